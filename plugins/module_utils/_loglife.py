# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which lines of a log file are of the life that a service has now, when they were there before anybody looked.

What an earlier life said must never be taken for what this one says. So a line counts only by proof: by its own time
stamp, or because the file itself is younger than the life, or because it is the last one and was written since.
"""

from __future__ import annotations

import calendar
import re
import time
import typing as t

__all__ = ("first_of_life", "stamp_of")

SLACK = 2.0  # seconds that a stamp may be later than the last write: the clock of a file is coarse
CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
# What may stand before the stamp: the process, a bracket, the level.
PREFIX = r"\s*(?:\([^()]{1,80}\)\s*)?(?:[A-Z]{4,8}:?\s+)?(?:time=)?[\[\"]?"
STAMPS = tuple(
    re.compile(PREFIX + pattern)
    for pattern in (
        # 2026-12-02T10:00:00.123Z, 2026-12-02 10:00:00,123, with a zone or without
        r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T ]" + CLOCK + r"(?P<zone>Z|[+-]\d\d:?\d\d)?(?!\d)",
        # 12-02 10:00:00
        r"(?P<month>\d\d)-(?P<day>\d\d) " + CLOCK + r"(?!\d)",
        # I1202 10:00:00.123456
        r"[IWEF](?P<month>\d\d)(?P<day>\d\d) " + CLOCK + r"(?!\d)",
    )
)


def first_of_life(lines: t.Sequence[str], began: float, written: float, born: t.Optional[float] = None) -> int:
    """The place of the first line that surely is of a life; behind the last one when none is.

    All moments are seconds by the clock of the wall: when the life began, when the file was written last, and when it
    was made.
    """
    if written < began or not lines:
        return len(lines)
    stamps = [stamp_of(line, written) for line in lines]
    known = [stamp for stamp in stamps if stamp is not None]
    if any(stamp > written + SLACK for stamp in known):
        return len(lines)  # the engine has another idea of the time
    older = max((at for at, stamp in enumerate(stamps) if stamp is not None and stamp < began), default=-1)
    if born is not None and born >= began and older < 0:
        return 0
    for at, stamp in enumerate(stamps):
        if at > older and stamp is not None:
            return at
    return len(lines) - 1 if older < len(lines) - 1 else len(lines)


def stamp_of(line: str, written: float) -> t.Optional[float]:
    """When a line says that it was written. Without a zone that is local time, without a year the last such day."""
    for pattern in STAMPS:
        found = pattern.match(line)
        if found is not None:
            return _moment(found.groupdict(), written)
    return None


def _moment(parts: t.Mapping[str, t.Optional[str]], written: float) -> t.Optional[float]:
    month, day, hour, minute, second = (int(parts[name] or 0) for name in ("month", "day", "hour", "minute", "second"))
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    part = float("0." + (parts["part"] or "0"))
    year = int(parts.get("year") or 0)
    zone = parts.get("zone")
    if zone:
        offset = 0 if zone == "Z" else (int(zone[1:3]) * 60 + int(zone[-2:])) * 60
        moment = calendar.timegm((year, month, day, hour, minute, second))
        return moment - (-offset if zone[0] == "-" else offset) + part
    try:
        if year:
            return time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) + part
        year = time.localtime(written + SLACK).tm_year
        moments = (time.mktime((one, month, day, hour, minute, second, 0, 0, -1)) + part for one in (year, year - 1))
        return next((moment for moment in moments if moment <= written + SLACK), None)
    except (OverflowError, ValueError):
        return None
