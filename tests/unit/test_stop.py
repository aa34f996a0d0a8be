# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The plan of a stop against a made-up host: no process, no systemd and no clock is real here."""

from __future__ import annotations

import types
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ownership,
    _selection,
    _stop,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._processes import ProcessRef
from ansible_collections.gpuops.serving.plugins.module_utils._stop import Options, Stopper
from ansible_collections.gpuops.serving.plugins.modules import process_tree_stop
from host import Host, process


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


@pytest.mark.parametrize("call", ["show", "request_stop", "reset_failed"])
@pytest.mark.parametrize("timeout", [0.0, 3.0])
def test_a_systemd_that_does_not_answer_cannot_make_it_outlast_its_limit(
    monkeypatch: pytest.MonkeyPatch, call: str, timeout: float
) -> None:
    state = "failed" if call == "reset_failed" else "active"
    host = Host(monkeypatch, process(10), active_state=state, main_pid=0 if state == "failed" else 10)
    host.mute = {call}
    with pytest.raises(_systemd.NoAnswer) as caught:
        host.stopper(timeout=timeout, reset_failed=True, grace=1, kill_grace=1).run()
    assert host.now - 1000.0 <= timeout + _stop.LAST_ANSWER
    assert caught.value.result["verdict"] == "survivors"


def test_the_first_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.immortal = {10}
    slow = [4.0]
    stopper = host.stopper(grace=30, kill_grace=1, timeout=6)
    monkeypatch.setattr(_systemd, "show", lambda unit, limit: host.sleep(slow.pop() if slow else 0) or host.show(unit))
    stopper.run()
    assert 6.0 <= host.now - 1000.0 <= 6.5


def test_a_short_limit_leaves_time_for_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.immortal = {10}
    host.stopper(grace=30, kill_grace=1, timeout=5).run()
    killed = next(when for when, _pid, name in host.sent if name == "SIGKILL")
    assert 3.5 <= killed <= 4.5
    assert 5.0 <= host.now - 1000.0 <= 5.5


def front_and_worker(monkeypatch: pytest.MonkeyPatch) -> t.Tuple[Host, Stopper]:
    host = Host(monkeypatch, process(10, cgroup="/"), process(11, 10, cgroup="/"))
    host.deaf = {10, 11}
    scan = _selection._of_refs([ProcessRef(10, 100)])
    return host, host.stopper(scan, None, timeout=9)


def test_a_short_limit_leaves_time_to_end_in_good_order(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}
    host.stopper(timeout=9).run()
    assert [(round(when), name) for when, _pid, name in host.sent] == [(0, "SIGTERM"), (6, "SIGKILL")]
    host, stopper = front_and_worker(monkeypatch)
    assert stopper.run()["verdict"] == "stopped"
    assert [(round(when), pid, name) for when, pid, name in host.sent] == [
        (0, 10, "SIGTERM"),
        (3, 11, "SIGTERM"),
        (6, 10, "SIGKILL"),
        (6, 11, "SIGKILL"),
    ]


@pytest.mark.parametrize("name", ["grace", "kill_grace", "timeout"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_limits_that_are_none(name: str, value: float) -> None:
    with pytest.raises(UsageError, match='"%s" must be' % name):
        Options(**{name: value})


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


@pytest.mark.parametrize("state", [("active", "running"), ("activating", "auto-restart")])
def test_a_cancelled_stop_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, state: t.Tuple[str, str]) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)

    def cancelled_once() -> None:
        if host.stops == 1:
            host.state.active_state, host.state.sub_state = state
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
    stopper = host.stopper(grace=10)
    stopper._tick = lambda: ticks.append(host.now)
    stopper.run()
    assert max(b - a for a, b in zip(ticks, ticks[1:])) < 1


def test_a_denied_signal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.send = lambda _ref, _number: "denied"  # type: ignore[method-assign]
    result = host.stopper(grace=0.2, kill_grace=0.2).run()
    assert result["verdict"] == "survivors"
    assert result["changed"] is False
    assert result["processes"][0]["outcome"] == "denied"


@pytest.mark.parametrize("check_mode", [True, False])
def test_the_module_renews_its_lease_but_not_in_check_mode(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    kept: t.List[t.Any] = []
    monkeypatch.setattr(
        process_tree_stop._lease, "keeper", lambda *of: kept.append(of) or (lambda: kept.append("tick"))
    )
    Host(monkeypatch)
    selection = _selection.Selection("it", lambda _table, _state, _previous: _ownership.Owned())
    monkeypatch.setattr(_selection, "select", lambda _params: selection)
    params = {"service": "qwen", "run_id": "r", "grace": None, "timeout": None, "order": "all", "signal": "TERM"}
    params.update(kill_grace=1.0, protected=[], allow_foreign_users=False, reset_failed=False)
    context = types.SimpleNamespace(params=params, check_mode=check_mode, warn=lambda _text: None)
    assert process_tree_stop.stop(context)["verdict"] == "absent"
    assert kept[:2] == [("qwen", None if check_mode else "r"), "tick"]


def test_limits_are_what_the_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    options = yaml.safe_load(process_tree_stop.DOCUMENTATION)["options"]
    grace, timeout = (" ".join(options[name]["description"]) for name in ("grace", "timeout"))
    assert "and 5 seconds more for a unit (%g seconds if it has none)" % _stop.UNIT_GRACE in grace
    assert "%g seconds for a front process, and %g seconds" % (_stop.DEFAULT_GRACE, _stop.REST_GRACE) in grace
    assert options["kill_grace"]["default"] == Options().kill_grace
    assert "the sum of both waits, O(kill_grace) and %g seconds" % _stop.SLACK in timeout
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.immortal = {10}
    stopper = host.stopper(grace=6, kill_grace=3)
    stopper.run()
    assert stopper._deadline.seconds == 6 + 6 + 3 + _stop.SLACK


@pytest.mark.parametrize("check_mode", [True, False])
@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, {"main_pid": 10}),
        ({"cgroup": "/system.slice/qwen.service/nested"}, {"control_group": "/system.slice/qwen.service"}),
        ({"cgroup": "/elsewhere"}, {"main_pid": 10}),
        ({"cgroup": "/elsewhere"}, {"control_pid": 10}),
        ({}, {"kill_mode": "process"}),
        ({}, {"active_state": "failed"}),
    ],
)
def test_a_unit_that_the_task_runs_below_is_refused(
    monkeypatch: pytest.MonkeyPatch, facts: t.Dict[str, t.Any], state: t.Dict[str, t.Any], check_mode: bool
) -> None:
    host = Host(
        monkeypatch, process(10, name="sshd", **facts), process(11), **dict({"active_state": "active"}, **state)
    )
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1, 10, 500})
    result = host.stopper().run(check_mode)
    assert (result["verdict"], result["changed"], host.stops, host.sent) == ("refused", False, 0, [])
    assert '10 "sshd"' in result["msg"]


def test_a_unit_that_holds_process_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(1, 0, name="init"), process(11), active_state="active")
    assert host.stopper().run()["verdict"] == "refused"
    assert (host.stops, host.sent) == (0, [])
