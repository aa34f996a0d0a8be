# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a life of a unit ended, as systemd tells it: by the unit's state, or by what it wrote to the journal.

The state tells only of the life that a unit has now, or had last; of one that a new life has followed since, and of a
unit that systemd has forgotten, the journal alone tells.
"""

from __future__ import annotations

import re
import typing as t

from ._causes import Cause
from ._systemd import UnitState

__all__ = ("DEFINITE", "KINDS", "End", "Ends")

# What systemd itself decided, whatever else was written before.
DEFINITE = ("host_out_of_memory", "timeout", "watchdog", "bad_unit", "condition")
KINDS = (*DEFINITE, "killed", "exited")

EXITED = re.compile(r": (Main|Control) process exited, code=(exited|killed|dumped), status=(\d+)")
RESULT = re.compile(r": Failed with result '([a-z-]+)'")
TIMED_OUT = re.compile(
    r": (?:(start|reload|stop)\S* operation timed out|State '(start|stop|final|reload)[^']*' timed out)"
)
RUNTIME = re.compile(r": Service reached runtime time limit")
BEGUN = re.compile(r"Start(?:ed|ing) .")
STOPPING = re.compile(r"Stopping .{1,300}\.\.\.$")
WELL = re.compile(r": (?:Succeeded|Deactivated successfully)\.$")
SKIPPED = re.compile(
    r"Condition check resulted in .{1,300} being skipped|was skipped because of an? |skipped, unmet condition check|"
    r"Skipped due to 'exec-condition'|: Starting requested but asserts failed|^Assertion failed (?:for|on) "
)
# What is wrong with the unit itself; that it was refused for it says less.
BAD = re.compile(
    r"^\S+?:\d+: |: Failed to (?!start\b|run 'start|spawn 'start|with result)|: Service has no ExecStart=|"
    r" Refusing\.$|: .{1,80} setting\(s\) .{1,200}refusing"
)
# The state of a process that systemd could not make, by the setting that it could not carry out.
STEPS = {
    200: "WorkingDirectory=",
    203: "ExecStart=",
    205: "the limits (Limit...=)",
    209: "StandardOutput=",
    216: "Group=",
    217: "User=",
    226: "the file system settings (ProtectSystem=, ReadWritePaths= and such)",
    233: "RuntimeDirectory=",
    238: "StateDirectory=",
    239: "CacheDirectory=",
    240: "LogsDirectory=",
}
LIMITS = {
    "start": "it was not up within TimeoutStartSec=, so systemd ended it",
    "stop": "it did not stop within TimeoutStopSec=, so systemd killed it",
    "reload": "it did not reload within TimeoutStartSec=, so systemd ended it",
    "runtime": "it ran for as long as RuntimeMaxSec= allows, so systemd ended it",
    "": "a time limit of the unit was over (TimeoutStartSec=, TimeoutStopSec= or RuntimeMaxSec=), so systemd ended it",
}


class End(t.NamedTuple):
    """The end of a life: what kind of cause it is, in words of ours, and which line of the log is to be told."""

    kind: str
    text: str
    line: str

    @property
    def cause(self) -> Cause:
        return {"kind": self.kind, "line": self.line}


class Ends:
    """Takes in what is written about the life of a unit that goes on, and tells how it ended."""

    def __init__(self) -> None:
        self.word = ""  # the last one that the service itself wrote
        self._main: t.Optional[t.List[t.Any]] = None  # code and status
        self._control: t.Optional[t.List[t.Any]] = None
        self._result = self._limit = self._skipped = self._bad = ""
        self.stopped = False  # whether somebody asked for the end
        self._well = False

    def own(self, line: str) -> None:
        self.word = line.strip() or self.word

    def systemd(self, line: str) -> None:
        line = line.strip()
        if BEGUN.match(line):
            self._skipped = self._bad = ""  # of an earlier try
        exited = EXITED.search(line)
        if exited is not None:
            found = [{"exited": 1, "killed": 2, "dumped": 3}[exited.group(2)], int(exited.group(3))]
            if exited.group(1) == "Main":
                self._main = found
            else:
                self._control = self._control or found
        failed, timed_out = RESULT.search(line), TIMED_OUT.search(line)
        if failed is not None:
            self._result = self._result or failed.group(1)
        if timed_out is not None:
            self._limit = self._limit or (timed_out.group(1) or timed_out.group(2)).replace("final", "stop")
        elif RUNTIME.search(line):
            self._limit = self._limit or "runtime"
        if SKIPPED.search(line):
            # The newest: the generations that tell which condition it was do so in the first line of all.
            self._skipped = self._skipped if "asserts failed" in self._skipped else line
        elif BAD.search(line):
            self._bad = line
        self.stopped |= STOPPING.match(line) is not None
        self._well |= WELL.search(line) is not None

    def of(self, state: t.Optional[UnitState] = None) -> t.Optional[End]:
        """How the life ended. ``state`` is to tell of that life, and of no other; None where nothing is known."""
        if state is not None and state.load_state in ("bad-setting", "error"):
            text = "systemd cannot load it: %s" % (self._bad or state.load_error or state.load_state)
            return End("bad_unit", text, self._bad or text)
        skipped = state is not None and (state.condition_failed or state.result == "exec-condition")
        if skipped or self._skipped:
            text = "systemd skipped its start: %s" % (self._skipped or "a condition of the unit is not met")
            return End("condition", text, self._skipped or text)
        result, main = self._result, self._main
        if state is not None and (state.result not in ("", "success") or state.exec_main_code):
            result = state.result
            main = [state.exec_main_code, state.exec_main_status] if state.exec_main_code else main
        return self._by_result(result) or self._by_process(result, main)

    def _by_result(self, result: str) -> t.Optional[End]:
        """What systemd decided itself."""
        if result == "oom-kill":
            text = "the kernel ended it because the host ran out of memory"
            return End("host_out_of_memory", text, text)
        if result == "timeout":
            text = LIMITS.get(self._limit, LIMITS[""])
            return End("timeout", text, text)
        if result == "watchdog":
            text = "it gave no sign of life for WatchdogSec=, so systemd ended it"
            return End("watchdog", text, text)
        if result == "resources":
            text = "systemd could not run its command" + (": " + self._bad if self._bad else "")
            return End("bad_unit", text, self._bad or text)
        if result == "protocol":
            text = "it ended before it told systemd that it is ready"
            return End("exited", text, self.word or text)
        return None

    def _by_process(self, result: str, main: t.Optional[t.List[t.Any]]) -> t.Optional[End]:
        code, status = main or (0, 0)
        if result == "exit-code" and not (code == 1 and status):
            # The main process was not there yet, or was ended for it.
            text = "a command beside its main process (ExecStartPre=, ExecStartPost= or such) failed"
            if self._control is not None:
                how = "was killed by signal %d" if self._control[0] in (2, 3) else "exited with status %d"
                text += ": it " + how % self._control[1]
            return End("exited", text, self.word or text)
        if code in (2, 3):
            text = "its main process was killed by signal %d" % status
            return End("killed", text, self.word or text)
        if code == 1 and status in STEPS and not self.word:
            text = "its main process could not be made, for %s: status %d" % (STEPS[status], status)
            return End("bad_unit", text, text)
        if code == 1 and status:
            text = "its main process exited with status %d" % status
            return End("exited", text, self.word or text)
        if self.stopped:
            return None
        if code == 1:
            text = "its main process ended with status 0"
        elif self._well:
            text = "it ended without an error"
        else:
            return None
        return End("exited", text, self.word or text)

    def save(self) -> t.Dict[str, t.Any]:
        return dict(vars(self))

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        for name in vars(self):
            setattr(self, name, saved[name])
