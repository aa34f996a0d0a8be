# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What counts as movement of a service that is loading: the signs that tell slow from stuck."""

from __future__ import annotations

import re
import typing as t
from collections import deque

from . import _engines
from ._deadline import Deadline, StallWindow

__all__ = ("Activity", "Progress", "Usage", "pattern_of", "percent_in")

CPU_SHARE = 0.05  # of one core: what polling and idling cost stays below
READ_RATE = 1 << 20  # bytes a second
MEMORY_STEP = 8 << 20
MIN_SAMPLE = 0.2
TAIL = 30
MAX_PATTERNS = 20000

PERCENT = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d+)?)\s?%")
FRACTION = re.compile(r"(?<![\d/.:-])(\d+)/(\d+)(?![\d/.:-])")
WORD_WITH_DIGIT = re.compile(r"\w*\d\w*")
NO_LETTER = re.compile(r"[^A-Za-z]+")


class Usage(t.NamedTuple):
    """What one process has used so far; None where that may not be read."""

    cpu: float
    read: t.Optional[int]
    memory: t.Optional[int]


# By process identity, so that a new process with an old number starts from zero.
Activity = t.Mapping[t.Tuple[int, int], Usage]


def percent_in(line: str) -> t.Optional[float]:
    """The progress that a line shows, as a percentage or as n of m."""
    found = PERCENT.findall(line)
    if found:
        value = float(found[-1])
        return value if value <= 100 else None
    for done, total in FRACTION.findall(line):
        if 1 < int(total) >= int(done):
            return round(100.0 * int(done) / int(total), 1)
    return None


def pattern_of(line: str) -> str:
    """A line without numbers, times, bars and identifiers: what repeats with another number is a repetition."""
    return NO_LETTER.sub(" ", WORD_WITH_DIGIT.sub(" ", line)).strip().lower()


class Progress:
    """Gathers the signs of movement and renews the stall window."""

    def __init__(self, profile: _engines.Profile, stall_timeout: float, deadline: Deadline) -> None:
        self.profile = profile
        self.window = StallWindow(stall_timeout, deadline)
        self.phase = ""
        self.percent: t.Optional[float] = None
        self.cause: t.Optional[t.Dict[str, str]] = None
        self.last_cause: t.Optional[t.Dict[str, str]] = None  # of an earlier life
        self.tail: t.Deque[str] = deque(maxlen=TAIL)
        self._moves: t.Dict[str, float] = {}
        self._patterns: t.Set[str] = set()
        self._percents: t.Dict[str, float] = {}
        self._sample: t.Optional[t.Tuple[float, Activity]] = None
        self._most_memory = 0

    def moved(self, signal: str) -> None:
        self._moves[signal] = self.window.deadline.clock.monotonic()
        self.window.moved()

    def new_life(self) -> None:
        """The unit was started again: it gets a new grace, and nothing of the last life counts as a repetition."""
        self.phase, self.percent = "", None
        self.last_cause, self.cause = self.cause or self.last_cause, None
        self._patterns.clear()
        self._percents.clear()
        self._sample = None
        self._most_memory = 0
        self.moved("restart")

    def line(self, text: str) -> None:
        """Take in one line of the service's log."""
        text = text.strip()
        if not text:
            return
        self.tail.append(text)
        self.phase = _engines.match(self.profile.phases, text) or self.phase
        kind = _engines.match(_engines.CAUSES, text)
        if kind is not None and self.cause is None:
            self.cause = {"kind": kind, "line": text}
        pattern = pattern_of(text)
        percent = percent_in(text)
        if percent is not None:
            self.percent = percent
            if percent > self._percents.get(pattern, -1.0):
                self._percents[pattern] = percent
                self.moved("percent")
        if pattern not in self._patterns and len(self._patterns) < MAX_PATTERNS:
            self._patterns.add(pattern)
            self.moved("log")

    def activity(self, activity: Activity) -> None:
        """Compare what the owned processes have used with the last sample."""
        now = self.window.deadline.clock.monotonic()
        if self._sample is None:
            self._sample = (now, activity)
            self._most_memory = _memory(activity)
            return
        then, before = self._sample
        span = now - then
        if span < MIN_SAMPLE:
            return
        self._sample = (now, activity)
        cpu = read = 0.0
        for ref, usage in activity.items():
            old = before.get(ref, Usage(0.0, 0, 0))
            cpu += max(0.0, usage.cpu - old.cpu)
            if usage.read is not None and old.read is not None:
                read += max(0, usage.read - old.read)
        if cpu / span >= CPU_SHARE:
            self.moved("cpu")
        if read / span >= READ_RATE:
            self.moved("io")
        memory = _memory(activity)
        if memory >= self._most_memory + MEMORY_STEP:
            self._most_memory = memory
            self.moved("memory")

    def movement(self) -> t.Dict[str, float]:
        """Seconds since each sign last moved."""
        now = self.window.deadline.clock.monotonic()
        return {signal: round(now - at, 1) for signal, at in sorted(self._moves.items())}


def _memory(activity: Activity) -> int:
    return sum(usage.memory or 0 for usage in activity.values())
