# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What counts as movement of a service that is loading: the signs that tell slow from stuck."""

from __future__ import annotations

import re
import typing as t
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from . import _causes, _engines, _logtext, _matching
from ._deadline import Deadline, StallWindow

__all__ = ("SIGNALS", "Activity", "Progress", "Usage", "pattern_of", "percent_in")

SIGNALS = ("log", "percent", "cpu", "io", "memory", "gpu_memory", "network", "tier", "restart")

CPU_SHARE = 0.05  # of one core: what polling and idling cost stays below
READ_RATE = 1 << 20  # bytes a second
NETWORK_RATE = 256 << 10  # bytes a second: what our own questions and those of monitoring cost stays below
MEMORY_STEP = 8 << 20
GPU_STEP = 64.0  # MiB: a driver's own share moves by a few
MIN_SAMPLE = 0.2
TAIL = 30
LINE_WIDTH = 1000  # characters of a line that are kept; causes and news are looked for in more of it
MAX_PATTERNS = 2000
MAX_BARS = 200
MAX_PASSES = 16  # times that one progress bar may begin again and count: it is shown for each of several parts
MAX_PROCESSES = 500
SAVED = 1  # the version of what is saved

PERCENT = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d+)?)\s?%")
FRACTION = re.compile(r"(?<![\d/.:-])(\d+)/(\d+)(?![\d/.:-])")
# How often something was tried grows while nothing does.
TRIES = re.compile(r"retr(?:y|ies|ied)|(?<![a-z])(?:try|tries|attempts?)(?![a-z])", re.IGNORECASE)
# So does the share of a time limit that is over.
OF_TIME = re.compile(
    r"(?<![\d.])\d{1,3}(?:\.\d+)?\s?%\s*(?:of\s+)?(?:(?:the|its|our|a|max(?:imum)?|total|start(?:up)?|wait(?:ing)?)\s+)*"
    r"(?:time|time-?out|deadline|limit|grace|patience)\b|"
    r"\b(?:time-?out|time\s+limit|deadline|waited)\W{1,3}(?:is\s+|at\s+|for\s+)?\d{1,3}(?:\.\d+)?\s?%",
    re.IGNORECASE,
)
# 31/3600 seconds; waited 31/3600.
SECONDS = re.compile(
    r"\d+/\d+\s*(?:ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b(?!\s*/)|"
    r"\b(?:wait(?:ed|ing)?|elapsed|time-?out|time\s+limit|deadline|time)\b\W{1,3}(?:is\s+|at\s+|for\s+)?\d+/\d+|"
    r"\d+/\d+\s+(?:elapsed|waited|until)\b",
    re.IGNORECASE,
)
# ASCII, since in Chinese or Japanese a whole sentence is a word.
UUID = re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b", re.ASCII)
WORD_WITH_DIGIT = re.compile(r"\b[^\W\d]*\d\w*", re.ASCII)  # anchored: a long word without is looked through once
HEX_WORD = re.compile(r"\b[a-fA-F]{6,}\b", re.ASCII)  # an identifier that happens to have no digit
NO_LETTER = re.compile(r"[\W\d_]+")


class Usage(t.NamedTuple):
    """What one process has used so far; None where that may not be read."""

    cpu: float
    read: t.Optional[int]  # bytes moved by any call; those of children that it has waited for are in it
    memory: t.Optional[int]
    children: float = 0.0  # CPU seconds of children that it has waited for
    age: t.Optional[float] = None  # seconds since its start


@dataclass
class Activity:
    """What a service has used so far."""

    # By process identity, so that a new process with an old number starts from zero.
    processes: t.Mapping[t.Tuple[int, int], Usage] = field(default_factory=dict)
    gpu_memory: t.Optional[float] = None  # MiB
    network: t.Mapping[str, int] = field(default_factory=dict)  # bytes by where they are counted


def percent_in(line: str) -> t.Optional[float]:
    """The progress that a line shows, as a percentage or as n of m."""
    found = PERCENT.findall(line)
    if found:
        value = float(found[-1])
        return value if value <= 100 and not OF_TIME.search(line) else None
    for done, total in () if TRIES.search(line) or SECONDS.search(line) else FRACTION.findall(line):
        if 1 < int(total) >= int(done):
            return round(100.0 * int(done) / int(total), 1)
    return None


def pattern_of(line: str) -> str:
    """A line without numbers, times, bars and identifiers: what repeats with another number is a repetition."""
    text = HEX_WORD.sub(" ", WORD_WITH_DIGIT.sub(" ", UUID.sub(" ", line[: _logtext.LINE_WIDTH])))
    return NO_LETTER.sub(" ", text).strip().lower()


class Progress:
    """Gathers the signs of movement and renews the stall window."""

    def __init__(self, profile: _engines.Profile, stall_timeout: float, deadline: Deadline) -> None:
        self.profile = profile
        self.window = StallWindow(stall_timeout, deadline)
        self.phase = ""
        self.percent: t.Optional[float] = None
        self.cause: t.Optional[_causes.Cause] = None
        self.last_cause: t.Optional[_causes.Cause] = None  # of an earlier life
        self.tail: t.Deque[str] = deque(maxlen=TAIL)
        self.memory: t.Optional[int] = None  # MiB of the host's, as last seen
        self.gpu_memory: t.Optional[int] = None  # MiB, as last seen
        self._moves: t.Dict[str, float] = {}
        # The ones seen last, by a short hash: one that is forgotten among so many others is news again.
        self._patterns: OrderedDict[int, None] = OrderedDict()
        self._bars: OrderedDict[int, t.Tuple[float, int]] = OrderedDict()  # highest percentage, passes
        self._sample: t.Optional[t.Tuple[float, Activity]] = None
        self._most: t.Dict[t.Tuple[int, int], int] = {}
        self._grown = 0
        self._most_gpu: t.Optional[float] = None

    def moved(self, signal: str, at: t.Optional[float] = None) -> None:
        """Note that a sign moved, ``at`` that moment where it is known."""
        when = self.window.moved(at)
        self._moves[signal] = max(when, self._moves.get(signal, when))

    def new_life(self) -> None:
        """The unit was started again: it gets a new grace, and nothing of the last life counts as a repetition."""
        self.phase, self.percent = "", None
        self.last_cause, self.cause = self.cause or self.last_cause, None
        self._patterns.clear()
        self._bars.clear()
        self._sample = None
        self._most.clear()
        self._grown, self._most_gpu = 0, None
        self.memory = self.gpu_memory = None
        self.moved("restart")

    def line(self, text: str, at: t.Optional[float] = None) -> None:
        """Take in one line of the service's log, written ``at`` that moment of the clock."""
        whole = text.strip()[: _logtext.LINE_WIDTH]
        if not whole:
            return
        text = whole[:LINE_WIDTH]
        self.tail.append(text)
        phase = _engines.phase_of(self.profile, text)
        if phase is not None and phase.word != self.phase:
            self.phase, self.percent = phase.word, None
        pattern = zlib.crc32(pattern_of(whole).encode("utf-8", "replace"))
        percent = percent_in(text)
        if percent is not None:
            self.percent = percent
            if self._grew(pattern, percent):
                self.moved("percent", at)
        if _remember(self._patterns, pattern, None, MAX_PATTERNS):
            self.moved("log", at)
            # Once for all lines that differ in numbers only: it is by far the dearest look at a line.
            self.cause = _causes.better(self.cause, _causes.cause_of(self.profile, whole))

    def _grew(self, pattern: int, percent: float) -> bool:
        """Whether a progress bar is further than ever. One that was complete and begins again is another."""
        most, passes = self._bars.get(pattern, (-1.0, 0))
        if most >= 99.9 and percent < 50 and passes < MAX_PASSES:
            most, passes = percent, passes + 1
        grew = percent > most
        _remember(self._bars, pattern, (max(most, percent), passes), MAX_BARS)
        return grew

    def activity(self, activity: Activity) -> None:
        """Compare what the service has used with the last sample."""
        now = self.window.deadline.clock.monotonic()
        self._show(activity)
        if self._sample is None:
            self._sample = (now, activity)
            self._memory_growth(activity)
            self._gpu_growth(activity)
            self._grown = 0
            return
        then, before = self._sample
        span = now - then
        if span < MIN_SAMPLE:
            return
        self._sample = (now, activity)
        cpu, read = _used(before.processes, activity.processes, span)
        if cpu / span >= CPU_SHARE:
            self.moved("cpu")
        if read / span >= READ_RATE:
            self.moved("io")
        received = sum(max(0, count - before.network.get(at, count)) for at, count in activity.network.items())
        if received / span >= NETWORK_RATE:
            self.moved("network")
        self._memory_growth(activity)
        if self._grown >= MEMORY_STEP:
            self._grown = 0
            self.moved("memory")
        if self._gpu_growth(activity):
            self.moved("gpu_memory")

    def _show(self, activity: Activity) -> None:
        known = [usage.memory for usage in activity.processes.values() if usage.memory is not None]
        self.memory = sum(known) >> 20 if known else None
        if activity.gpu_memory is not None:
            self.gpu_memory = int(activity.gpu_memory)

    def _memory_growth(self, activity: Activity) -> None:
        """Add up by how much each process has more than it ever had.

        What a process has when it is first seen is no growth: a fork has what its parent has.
        """
        most = {}
        for ref, usage in activity.processes.items():
            if usage.memory is not None:
                before = self._most.get(ref, usage.memory)
                most[ref] = max(before, usage.memory)
                self._grown += most[ref] - before
        self._most = most

    def _gpu_growth(self, activity: Activity) -> bool:
        if activity.gpu_memory is None:
            return False
        if self._most_gpu is None:
            self._most_gpu = activity.gpu_memory
        if activity.gpu_memory < self._most_gpu + GPU_STEP:
            return False
        self._most_gpu = activity.gpu_memory
        return True

    @property
    def deaf(self) -> bool:
        """Whether what the service receives from the network is counted nowhere, so that it cannot show."""
        return self._sample is not None and not self._sample[1].network

    def movement(self) -> t.Dict[str, float]:
        """Seconds since each sign last moved."""
        now = self.window.deadline.clock.monotonic()
        return {signal: round(now - at, 1) for signal, at in sorted(self._moves.items())}

    # From one slice of a wait to the next

    def save(self) -> t.Dict[str, t.Any]:
        """What a later slice needs to go on as if there were no slices. Its times are those of the clock."""
        sample = None
        if self._sample is not None:
            at, activity = self._sample
            rows = [[*ref, *usage] for ref, usage in list(activity.processes.items())[:MAX_PROCESSES]]
            sample = {"at": at, "processes": rows, "network": dict(activity.network)}
        return {
            "version": SAVED,
            "phase": self.phase,
            "percent": self.percent,
            "cause": self.cause,
            "last_cause": self.last_cause,
            "tail": list(self.tail),
            "memory": self.memory,
            "gpu_memory": self.gpu_memory,
            "moved": self.window.last,
            "moves": dict(self._moves),
            "patterns": list(self._patterns),
            "bars": [[pattern, *bar] for pattern, bar in self._bars.items()],
            "sample": sample,
            "most": [[*ref, most] for ref, most in list(self._most.items())[:MAX_PROCESSES]],
            "grown": self._grown,
            "most_gpu": self._most_gpu,
            "given_up": list(_matching.given_up),
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        """Go on from what an earlier slice saved; nothing changes where it was another version's."""
        if saved.get("version") != SAVED:
            return
        self.phase, self.percent = saved["phase"], saved["percent"]
        self.cause, self.last_cause = saved["cause"], saved["last_cause"]
        self.tail = deque(saved["tail"], maxlen=TAIL)
        self.memory, self.gpu_memory = saved["memory"], saved["gpu_memory"]
        self.window.last = saved["moved"]
        self._moves = dict(saved["moves"])
        self._patterns = OrderedDict.fromkeys(saved["patterns"])
        self._bars = OrderedDict((pattern, (most, passes)) for pattern, most, passes in saved["bars"])
        sample = saved["sample"]
        self._sample = None
        if sample is not None:
            processes = {(row[0], row[1]): Usage(*row[2:]) for row in sample["processes"]}
            self._sample = (sample["at"], Activity(processes, None, sample["network"]))
        self._most = {(pid, start): most for pid, start, most in saved["most"]}
        self._grown, self._most_gpu = saved["grown"], saved["most_gpu"]
        _matching.given_up += [pattern for pattern in saved["given_up"] if pattern not in _matching.given_up]


Key = t.TypeVar("Key")
Value = t.TypeVar("Value")


def _remember(known: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> bool:
    """Put it last, forget the first of too many; says whether it is new."""
    new = key not in known
    known[key] = value
    known.move_to_end(key)
    if len(known) > limit:
        known.popitem(last=False)
    return new


Processes = t.Mapping[t.Tuple[int, int], Usage]


def _used(before: Processes, now: Processes, span: float) -> t.Tuple[float, float]:
    """CPU seconds and bytes between two samples.

    A process that has ended since is in neither; what it had used by the first sample moves over to the parent that
    waits for it, and is taken off there. A process that is new to the sample and older than it tells nothing yet.
    """
    cpu = children = read = 0.0
    for ref, usage in now.items():
        old = before.get(ref)
        if old is None:
            if usage.age is not None and usage.age > span + 1.0:
                continue
            old = Usage(0.0, 0, 0)
        cpu += max(0.0, usage.cpu - old.cpu)
        children += max(0.0, usage.children - old.children)
        if usage.read is not None and old.read is not None:
            read += max(0, usage.read - old.read)
    for ref, old in before.items():
        if ref not in now:
            children -= old.cpu + old.children
            read -= old.read or 0
    return cpu + max(0.0, children), max(0.0, read)
