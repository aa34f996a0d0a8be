# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How the controller asks a host for one slice of a wait, and what a slice hands to the next one."""

from __future__ import annotations

import json
import re
import typing as t
import zlib

from ._errors import UsageError

__all__ = ("Asked", "asked", "goes_on", "live", "pack", "request")

PREFIX = "gpuops-wait"
WHOLE = "whole"  # what the controller asks for when it wants no slice, but an answer
MOST = 4 << 20  # bytes of a token, unpacked
# What the controller wants: nothing while it lasts, each change, or an answer. A name is that of the line which it
# reads beside the slice; a 2 says that it has read the one of the slice before.
HOW = re.compile(r"(?:0|1|%s|[12]\+[0-9a-f]{32})\Z" % WHOLE)
# A module's answer is searched for every secret value, the key and the headers, and what matches is replaced: a header
# with the value "1" would do that to any usual text. So a token is written in characters that no header can carry, each
# of which stands for 12 bits.
FIRST, BITS = 0xE000, 12
CHECK = 4  # bytes of the checksum in front
GROUP = 3  # bytes that make two characters


class Asked(t.NamedTuple):
    """What the controller asks of a slice."""

    elapsed: float  # seconds since the wait began, by the controller's clock
    lively: bool  # whether a change ends the slice
    token: t.Mapping[str, t.Any]  # empty for the first one
    whole: bool = False  # whether only a verdict ends it
    line: str = ""  # the name of the line that is read while the slice lasts
    heard: bool = False  # whether that of the slice before was read


def request(
    elapsed: float, lively: bool, token: str = "", whole: bool = False, line: str = "", heard: bool = False
) -> str:
    """The option that asks for a slice, or for all that is left of a wait."""
    how = "%d" % lively
    if whole:
        how = WHOLE
    elif line:
        how = "%d+%s" % (1 + heard, line)
    return "%s:%.3f:%s:%s" % (PREFIX, elapsed, how, token)


def asked(text: str) -> Asked:
    """What an option asks for; a UsageError for one that :func:`request` did not make."""
    try:
        prefix, elapsed, how, token = text.split(":")
        if prefix != PREFIX or not HOW.match(how) or not 0 <= float(elapsed) < 1e9:
            raise ValueError(text)
        what, _plus, line = how.partition("+")
        content = _unpack(token) if token else {}
        return Asked(float(elapsed), what in ("1", "2"), content, what == WHOLE, line, what == "2")
    except (ValueError, zlib.error):
        raise UsageError('"resume" is how the controller asks for a slice of a wait: leave it out') from None


def goes_on(text: t.Optional[str]) -> bool:
    """Whether a slice goes on from another one."""
    return bool(text) and not str(text).endswith(":")


def pack(content: t.Mapping[str, t.Any]) -> str:
    """A token, of which the controller reads :func:`live` and the next slice all."""
    data = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 6)
    data += bytes(-(CHECK + len(data)) % GROUP)
    return _written(_checksum(data) + data)


def live(token: t.Any) -> t.Optional[t.Dict[str, t.Any]]:
    """Where the wait stood when a slice ended, or None for a token that did not come as it was sent."""
    try:
        found = _unpack(str(token)).get("live")
    except (ValueError, zlib.error):
        return None
    return found if isinstance(found, dict) else None


def _unpack(text: str) -> t.Dict[str, t.Any]:
    data = _read(text)
    if _checksum(data[CHECK:]) != data[:CHECK]:
        raise ValueError("the checksum is another")
    content = json.loads(zlib.decompressobj().decompress(data[CHECK:], MOST))
    if not isinstance(content, dict):
        raise ValueError(content)
    return content


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECK, "big")


def _written(data: bytes) -> str:
    low = (1 << BITS) - 1
    numbers = (int.from_bytes(data[at : at + GROUP], "big") for at in range(0, len(data), GROUP))
    return "".join(chr(FIRST + (number >> BITS)) + chr(FIRST + (number & low)) for number in numbers)


def _read(text: str) -> bytes:
    codes = [ord(letter) - FIRST for letter in text]
    if len(codes) % 2 or any(not 0 <= code < 1 << BITS for code in codes):
        raise ValueError("it is written in other characters")
    pairs = zip(codes[::2], codes[1::2])
    return b"".join((high << BITS | low).to_bytes(GROUP, "big") for high, low in pairs)
