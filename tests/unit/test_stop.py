# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The plan of a stop against a made-up host: no process, no systemd and no clock is real here."""

from __future__ import annotations

import pathlib
import signal
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _ownership, _selection, _start, _stop, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
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
        "pid_ns_depth": 1,
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
        self.later: t.List[t.Tuple[float, t.Callable[[], None]]] = []
        self.on_stop: t.Callable[[], None] = self.rest
        self.stops = 0
        monkeypatch.setattr(Table, "snapshot", lambda: Table(list(self.processes.values())))
        monkeypatch.setattr(_ownership, "own_line", lambda _table: {1})
        monkeypatch.setattr(_ownership, "_mount_namespace", lambda _pid: 1)
        for name in ("show", "request_stop", "reset_failed", "start"):
            monkeypatch.setattr(_systemd, name, getattr(self, name))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [what for when, what in self.later if when <= self.now]
        self.later = [(when, what) for when, what in self.later if when > self.now]
        for what in due:
            what()

    def after(self, seconds: float, what: t.Callable[[], None]) -> None:
        self.later.append((self.now + seconds, what))

    def show(self, _unit: str, _timeout: float = 0) -> UnitState:
        return UnitState(**vars(self.state))

    def request_stop(self, _unit: str, _timeout: float = 0) -> None:
        self.stops += 1
        self.state.active_state = "deactivating"
        self.on_stop()

    def rest(self) -> None:
        for pid in [pid for pid, p in self.processes.items() if p.cgroup == GROUP]:
            del self.processes[pid]
        self.state.active_state, self.state.main_pid = "inactive", 0

    def reset_failed(self, _unit: str, _timeout: float = 0) -> None:
        self.state.active_state, self.state.result = "inactive", "success"

    def start(self, _unit: str, _timeout: float = 0) -> None:
        self.state.active_state, self.state.main_pid, self.state.invocation_id = "active", 4711, "new"
        self.state.sub_state = "running"

    def send(self, ref: ProcessRef, number: int) -> str:
        if ref.pid not in self.processes:
            return "gone"
        self.sent.append((self.now - 1000.0, ref.pid, signal.Signals(number).name))
        heeded = number == signal.SIGKILL or (number != signal.SIGCONT and ref.pid not in self.deaf)
        if heeded and ref.pid not in self.immortal:
            del self.processes[ref.pid]
        return "sent"

    def stopper(self, **options: t.Any) -> Stopper:
        scan = _selection.by_unit(None)
        return Stopper('the unit "qwen.service"', scan, Options(**options), "qwen.service", clock=self, send=self.send)


def test_an_active_unit_is_left_to_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), process(11, 10), active_state="active", main_pid=10)
    result = host.stopper().run()
    assert (result["verdict"], result["changed"]) == ("stopped", True)
    assert host.sent == []
    assert [p["signals"] for p in result["processes"]] == [["systemd"], ["systemd"]]
    assert result["msg"] == 'the unit "qwen.service" is stopped: 2 processes ended, none is left'


def test_leftovers_are_asked_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), process(11), active_state="inactive", kill_mode="process")
    host.deaf = {11}
    result = host.stopper(grace=4).run()
    assert result["verdict"] == "stopped"
    assert [(pid, name) for _when, pid, name in host.sent] == [(10, "SIGTERM"), (11, "SIGTERM"), (11, "SIGKILL")]
    assert 4 <= host.sent[-1][0] < 5
    assert host.stops == 0


def test_a_unit_that_does_not_stop_is_killed_after_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)
    host.on_stop = lambda: None

    def send(ref: ProcessRef, number: int) -> str:
        answer = Host.send(host, ref, number)
        host.rest()
        return answer

    host.send = send  # type: ignore[method-assign]
    result = host.stopper().run()
    assert result["verdict"] == "stopped"
    assert [(round(when), name) for when, _pid, name in host.sent] == [(25, "SIGKILL")]  # 20 s of its own and 5 more


@pytest.mark.parametrize(
    ("own", "grace"), [(20.0, 25.0), (float("inf"), 90.0), (0.0, 90.0)], ids=["limit", "infinity", "unknown"]
)
def test_the_grace_of_a_unit_follows_its_own_limit(monkeypatch: pytest.MonkeyPatch, own: float, grace: float) -> None:
    host = Host(monkeypatch, timeout_stop=own)
    stopper = host.stopper()
    stopper.look()
    assert (stopper.grace, stopper.rest_grace) == (grace, 15.0)
    assert host.stopper(grace=3.0).grace == 3.0


@pytest.mark.parametrize("timeout", [None, 5.0, 0.0])
def test_it_never_outlasts_its_limit(monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
    host = Host(monkeypatch, process(10), process(11), active_state="active", main_pid=10)
    host.immortal = {10, 11}
    host.on_stop = lambda: None
    result = host.stopper(grace=6, kill_grace=3, timeout=timeout).run()
    assert result["verdict"] == "unkillable"
    assert {name for _when, _pid, name in host.sent} >= {"SIGKILL"}
    assert host.now - 1000.0 <= (6 + 6 + 3 + 5 if timeout is None else timeout + 0.5)
    assert result["msg"].startswith('2 of 2 processes of the unit "qwen.service" are left, and the unit is not at rest')


def test_a_short_limit_leaves_time_for_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.immortal = {10}
    host.stopper(grace=30, kill_grace=3, timeout=5).run()
    killed = next(when for when, _pid, name in host.sent if name == "SIGKILL")
    assert killed <= 2.5
    assert host.now - 1000.0 >= killed + 2.5


def test_a_unit_that_somebody_starts_again_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}

    def start() -> None:
        host.start("")
        host.processes[20] = process(20)

    host.after(2, start)
    result = host.stopper(grace=5).run()
    assert result["verdict"] == "survivors"
    assert "was started again by somebody else" in result["msg"]
    assert 20 not in [pid for _when, pid, _name in host.sent]


def test_a_cancelled_stop_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)

    def cancelled_once() -> None:
        if host.stops == 1:
            host.state.active_state = "active"
        else:
            host.rest()

    host.on_stop = cancelled_once
    assert host.stopper().run()["verdict"] == "stopped"
    assert host.stops == 2


def test_a_failed_state_is_reset_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="failed", result="exit-code")
    result = host.stopper().run()
    assert (result["verdict"], result["changed"], host.state.active_state) == ("absent", False, "failed")
    result = host.stopper(reset_failed=True).run()
    assert (result["verdict"], result["changed"], host.state.active_state) == ("absent", True, "inactive")
    assert "its failed state was reset" in result["msg"]
    assert host.stopper(reset_failed=True).run()["changed"] is False


def test_an_error_in_the_middle_carries_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)

    def broken() -> None:
        raise ServingError("the bus is gone")

    host.on_stop = broken
    with pytest.raises(ServingError) as caught:
        host.stopper().run()
    assert caught.value.message == "the bus is gone"
    assert caught.value.result["changed"] is True
    assert [p["pid"] for p in caught.value.result["processes"]] == [10]


def test_the_lease_is_kept_while_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}
    ticks: t.List[float] = []
    scan = _selection.by_unit(None)
    stopper = Stopper(
        "it", scan, Options(grace=10), "x", clock=host, send=host.send, tick=lambda: ticks.append(host.now)
    )
    stopper.run()
    assert max(b - a for a, b in zip(ticks, ticks[1:])) < 1


def test_a_denied_signal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.send = lambda _ref, _number: "denied"  # type: ignore[method-assign]
    result = host.stopper(grace=0.2, kill_grace=0.2).run()
    assert result["verdict"] == "survivors"
    assert result["changed"] is False
    assert result["processes"][0]["outcome"] == "denied"


def test_a_pid_file_without_a_pid(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "engine.pid"
    for text in ("", "x", "-5", "0"):
        path.write_text(text)
        with pytest.raises(ServingError, match="holds no process id"):
            _selection.pid_in_file(str(path))


def test_patterns_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        _selection.by_pattern("(", "root")
    with pytest.raises(UsageError, match='the user "nobody-here" does not exist'):
        _selection.by_pattern("x", "nobody-here")


def start(host: Host, **options: t.Any) -> t.Dict[str, t.Any]:
    selection = _selection.Selection('the unit "qwen.service"', _selection.by_unit(None), "qwen.service")
    return _start.start(selection, clock=host, **options)


def test_start(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive", sub_state="dead")
    result = start(host)
    assert (result["verdict"], result["changed"]) == ("started", True)
    assert result["msg"] == 'the unit "qwen.service" is started: its main process is 4711'
    assert (result["invocation_id"], result["main_pid"]) == ("new", 4711)
    assert start(host)["verdict"] == "running"
    assert start(host)["changed"] is False


def test_start_over_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="failed")
    result = start(host)
    assert (result["verdict"], result["changed"]) == ("survivors", False)
    assert [p["pid"] for p in result["survivors"]] == [10]
    assert '10 "p10"' in result["msg"]
    assert host.state.active_state == "failed"


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        ({"load_state": "not-found"}, "not_found"),
        ({"load_state": "masked"}, "refused"),
        ({"load_state": "bad-setting"}, "failed"),
        ({"active_state": "deactivating"}, "refused"),
        ({"active_state": "activating", "sub_state": "auto-restart"}, "running"),
    ],
)
def test_units_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, state: t.Dict[str, t.Any], verdict: str) -> None:
    host = Host(monkeypatch, **state)
    result = start(host)
    assert (result["verdict"], result["changed"]) == (verdict, False)


def test_check_mode_has_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive")
    plan = start(host, check_mode=True)
    assert (plan["verdict"], plan["changed"], host.state.active_state) == ("started", True, "inactive")
    assert set(plan) == set(start(host))


def test_limits_are_what_the_documentation_says() -> None:
    assert (_stop.DEFAULT_GRACE, _stop.REST_GRACE, _stop.UNIT_GRACE, Options().kill_grace) == (30, 15, 90, 10)
