# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How the controller asks a host for one slice of a wait, and what a slice hands to the next one."""

from __future__ import annotations

import base64
import binascii
import json
import typing as t
import zlib

from ._errors import UsageError

__all__ = ("Asked", "asked", "pack", "request")

PREFIX = "gpuops-wait"
MOST = 4 << 20  # bytes of a token, unpacked


class Asked(t.NamedTuple):
    """What the controller asks of a slice."""

    elapsed: float  # seconds since the wait began, by the controller's clock
    lively: bool  # whether a change ends the slice
    token: t.Mapping[str, t.Any]  # empty for the first one


def request(elapsed: float, lively: bool, token: str = "") -> str:
    """The option that asks for a slice."""
    return "%s:%.3f:%d:%s" % (PREFIX, elapsed, lively, token)


def asked(text: str) -> Asked:
    """What an option asks for; a UsageError for one that :func:`request` did not make."""
    try:
        prefix, elapsed, lively, token = text.split(":")
        if prefix != PREFIX or lively not in ("0", "1") or not 0 <= float(elapsed) < 1e9:
            raise ValueError(text)
        return Asked(float(elapsed), lively == "1", _unpack(token) if token else {})
    except (ValueError, binascii.Error, zlib.error):
        raise UsageError('"resume" is how the controller asks for a slice of a wait: leave it out') from None


def pack(content: t.Mapping[str, t.Any]) -> str:
    """A token, which nobody but the next slice reads."""
    return base64.b64encode(zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 6)).decode("ascii")


def _unpack(text: str) -> t.Dict[str, t.Any]:
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST)
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError(content)
    return content
