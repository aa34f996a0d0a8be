# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Text that others wrote, made fit to be told: no secrets, no control characters, no more than can be read.

Servers echo what they were asked with, engines write their arguments to the log, and both may write anything.
Secrets are masked before a text is cut: half a key is one that nothing recognises.
"""

from __future__ import annotations

import base64
import json
import re
import typing as t
from urllib.parse import quote, urlsplit

__all__ = ("BARE", "MASK", "Veil", "masked", "place", "plain", "secrets_of", "seen", "valid", "walked")

MASK = "********"
SHORTEST = 8  # characters of what is masked: anything shorter is found in too many other words
WIDTH = 2000  # characters of one text
PLACE_WIDTH = 200

# Controls of both sets, what turns the direction of writing, other ends of lines, and halves of characters.
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
HALVES = re.compile("[\ud800-\udfff]")
SPACES = "\t\n\r\x0b\x0c"


def plain(text: str, width: int = WIDTH) -> str:
    """One line in which everything can be seen; a long one says how much is missing."""
    text = seen(text)
    if len(text) <= width:
        return text
    return "%s... (%d more characters)" % (text[:width], len(text) - width)


def seen(text: str) -> str:
    """One line in which everything can be seen: a terminal obeys none of it."""
    return UNFIT.sub(_seen, text)


def _seen(found: t.Match[str]) -> str:
    letter = found.group()
    if letter in SPACES:
        return " "
    code = ord(letter)
    return "\\x%02x" % code if code < 256 else "\\u%04x" % code


def valid(value: t.Any) -> t.Any:
    """The same without halves of characters, which no UTF-8 can carry: a whole answer would be refused for one."""
    return walked(value, lambda text: HALVES.sub(_seen, text), names=True)


def walked(value: t.Any, change: t.Callable[[str], str], keep: t.Container[str] = (), names: bool = False) -> t.Any:
    """A value with every text in it changed, but for what is under the names to ``keep``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            (change(name) if names and isinstance(name, str) else name): (
                item if name in keep and isinstance(item, str) else walked(item, change, keep, names)
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [walked(item, change, keep, names) for item in value]
    return value


def secrets_of(api_key: t.Optional[str], headers: t.Optional[t.Mapping[str, t.Any]]) -> t.List[str]:
    """The key and the words of the headers, in every spelling that an echo may have, longest first."""
    words = {api_key or ""}
    for value in (headers or {}).values():
        parts = str(value).split()
        words |= {str(value), *parts}
        if len(parts) == 2 and parts[0].lower() == "basic":
            words |= _of_basic(parts[1])
    spelled = {form for word in words if len(word) >= SHORTEST for form in _spellings(word)}
    return sorted(spelled, key=lambda word: (-len(word), word))


def _of_basic(text: str) -> t.Set[str]:
    """The user with the password, and the password."""
    try:
        decoded = base64.b64decode(text, validate=True).decode("utf-8")
    except ValueError:
        return set()
    return {decoded, decoded.partition(":")[2]}


def _spellings(word: str) -> t.Iterator[str]:
    in_json = json.dumps(word)[1:-1]
    yield from (word, in_json, in_json.replace("/", "\\/"), json.dumps(word, ensure_ascii=False)[1:-1])
    yield from (repr(word)[1:-1], quote(word, safe=""), quote(word))


def masked(text: str, secrets: t.Iterable[str]) -> str:
    """The same without what is secret, and without the beginning of a secret that ends it: somebody has cut it."""
    for secret in secrets:
        text = text.replace(secret, MASK)
        at = text.find(secret[:SHORTEST], max(0, len(text) - len(secret) + 1))
        while at >= 0:
            if secret.startswith(text[at:]):
                text = text[:at] + MASK
                break
            at = text.find(secret[:SHORTEST], at + 1)
    return text


class Veil:
    """What makes a text fit to be told."""

    def __init__(self, secrets: t.Sequence[str] = (), width: int = WIDTH) -> None:
        self._secrets, self._width = secrets, width

    def __call__(self, text: str) -> str:
        return plain(masked(text, self._secrets), self._width)

    def whole(self, text: str) -> str:
        """The same of a text that somebody else cuts."""
        return seen(masked(text, self._secrets))


BARE = Veil()  # where there is no secret


def place(url: str) -> str:
    """Where a URL leads, without what may be a secret in it."""
    parts = urlsplit(url)
    # A password may hold any character, so where it ends cannot always be told.
    if "@" in parts.path:
        return "%s://..." % plain(parts.scheme, PLACE_WIDTH)
    host = parts.netloc.rpartition("@")[2]
    return plain("%s://%s%s" % (parts.scheme, host, parts.path) if host else parts.path, PLACE_WIDTH)
