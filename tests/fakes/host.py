# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A made-up host with processes, one unit and a clock, in place of the real ones."""

from __future__ import annotations

import signal
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _ownership, _selection, _survey, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Process, ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._stop import Options, Stopper
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState

GROUP = "/system.slice/qwen.service"


def process(pid: int, ppid: int = 1, **facts: t.Any) -> Process:
    known: t.Dict[str, t.Any] = {
        "ref": ProcessRef(pid, 100),
        "ppid": ppid,
        "pgrp": pid,
        "session": pid,
        "state": "S",
        "name": "p%d" % pid,
        "uid": 0,
        "gids": (0,),
        "cgroup": GROUP,
        "threads": 1,
        "kernel_thread": False,
        "cpu_ticks": 0,
    }
    return Process(**dict(known, **facts))


class Host(Clock):
    """A host whose time passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *processes: Process, **state: t.Any) -> None:
        self.now = 1000.0
        self.processes = {p.pid: p for p in processes}
        self.state = UnitState(
            **dict(
                {"name": "qwen.service", "load_state": "loaded", "kill_mode": "mixed", "timeout_stop": 20.0}, **state
            )
        )
        self.sent: t.List[t.Tuple[float, int, str]] = []
        self.deaf: t.Set[int] = set()
        self.immortal: t.Set[int] = set()
        self.mute: t.Set[str] = set()
        self.later: t.List[t.Tuple[float, t.Callable[[], None]]] = []
        self.on_stop: t.Callable[[], None] = self.rest
        self.stops = 0
        self.thawed = False
        self.jobs: t.List[str] = []
        self.looks: t.List[t.Tuple[float, t.List[int]]] = []  # when, and who was there
        monkeypatch.setattr(Table, "snapshot", self.snapshot)
        monkeypatch.setattr(_survey, "processor_time", lambda: 0.0)
        monkeypatch.setattr(_ownership, "own_line", lambda _table: {1})
        monkeypatch.setattr(_ownership, "_mount_namespace", lambda _pid: 1)
        for name in ("show", "request_stop", "reset_failed", "start", "job_type", "thaw"):
            monkeypatch.setattr(_systemd, name, getattr(self, name))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)  # a sum that does not grow would never end
        due = [what for when, what in self.later if when <= self.now]
        self.later = [(when, what) for when, what in self.later if when > self.now]
        for what in due:
            what()

    def snapshot(self, known: t.Optional[Table] = None) -> Table:
        self.looks.append((self.now, list(self.processes)))
        return Table(list(self.processes.values()))

    def after(self, seconds: float, what: t.Callable[[], None]) -> None:
        self.later.append((self.now + seconds, what))

    def answer(self, call: str, timeout: float) -> None:
        """A call that systemd does not answer takes all the time that it is given."""
        if call in self.mute:
            self.sleep(timeout)
            raise _systemd.NoAnswer("no answer to %s" % call)

    def show(self, _unit: str, timeout: float = 10.0) -> UnitState:
        self.answer("show", timeout)
        return UnitState(**vars(self.state))

    def request_stop(self, _unit: str, timeout: float = 10.0) -> None:
        self.answer("request_stop", timeout)
        self.stops += 1
        self.state.active_state = "deactivating"
        self.on_stop()

    def rest(self) -> None:
        for pid in [pid for pid, p in self.processes.items() if p.cgroup == GROUP]:
            del self.processes[pid]
        self.state.active_state, self.state.sub_state, self.state.main_pid = "inactive", "dead", 0

    def reset_failed(self, _unit: str, timeout: float = 10.0) -> None:
        self.answer("reset_failed", timeout)
        self.state.active_state, self.state.result = "inactive", "success"

    def start(self, _unit: str, timeout: float = 10.0) -> None:
        self.answer("start", timeout)
        self.state.active_state, self.state.main_pid, self.state.invocation_id = "active", 4711, "new"
        self.state.sub_state = "running"

    def thaw(self, _unit: str, timeout: float = 10.0) -> None:
        self.answer("thaw", timeout)
        self.thawed = True

    def job_type(self, unit: str, timeout: float = 10.0) -> str:
        self.answer("job_type", timeout)
        return self.jobs[-1] if self.jobs and unit == self.state.name else ""  # systemctl knows no jobs by an alias

    def alive(self, ref: ProcessRef) -> bool:
        return ref.pid in self.processes

    def send(self, ref: ProcessRef, number: int) -> str:
        if ref.pid not in self.processes:
            return "gone"
        self.sent.append((self.now - 1000.0, ref.pid, signal.Signals(number).name))
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.processes[ref.pid].state = "T" if number == signal.SIGSTOP else "S"
            return "sent"
        heeded = number == signal.SIGKILL or ref.pid not in self.deaf
        if heeded and ref.pid not in self.immortal:
            del self.processes[ref.pid]
        return "sent"

    def stopper(self, scan: t.Any = None, unit: t.Optional[str] = "qwen.service", **options: t.Any) -> Stopper:
        what = 'the unit "qwen.service"' if unit else "it"
        return Stopper(
            what,
            scan or _selection.by_unit(None),
            Options(**options),
            unit,
            clock=self,
            send=self.send,
            alive=self.alive,
        )
