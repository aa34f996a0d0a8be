# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The plan of a stop against a made-up host: no process, no systemd and no clock is real here."""

from __future__ import annotations

import contextlib
import types
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _containers,
    _groups,
    _inside,
    _ownership,
    _processes,
    _selection,
    _stop,
    _stop_answer,
    _stop_options,
    _survey,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._places import Container
from ansible_collections.gpuops.serving.plugins.module_utils._processes import ProcessRef, Table, user_name
from ansible_collections.gpuops.serving.plugins.module_utils._stop import Options, Stopper
from ansible_collections.gpuops.serving.plugins.modules import process_tree_stop
from host import GROUP, Host, process


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
    assert caught.value.result["verdict"] == ("error" if call == "show" else "survivors")
    assert caught.value.result["changed"] is (call != "show")  # what was asked for may have been heard


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

    def scan(table: Table, _state: t.Any, previous: t.Any) -> _ownership.Owned:
        return _ownership.of_pids(table, [ProcessRef(10, 100)], previous=previous)

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
    host.state.active_state = "failed"
    result = host.stopper(reset_failed=True).run(check_mode=True)
    assert (result["verdict"], result["changed"], host.state.active_state) == ("absent", True, "failed")
    assert "its failed state would be reset" in result["msg"]


def test_an_error_in_the_middle_carries_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="failed")
    host.deaf = {10}
    host.after(1, lambda: host.mute.add("show"))
    with pytest.raises(ServingError) as caught:
        host.stopper().run()
    assert caught.value.message == "no answer to show"
    assert caught.value.result["changed"] is True
    assert [(p["pid"], p["outcome"]) for p in caught.value.result["processes"]] == [(10, "survived")]
    assert [p["pid"] for p in caught.value.result["survivors"]] == [10]


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
    assert result["msg"].endswith('are left: 10 "p10" (denied); run as root, or with become')


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
    assert "and 5 seconds more for a unit (%g seconds if it has none)" % _stop_options.UNIT_GRACE in grace
    front, rest = _stop_options.DEFAULT_GRACE, _stop_options.REST_GRACE
    assert "%g seconds for a front process, and at most %g seconds" % (front, rest) in grace
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


def test_what_is_not_systemds_to_end_has_its_turn_after_a_unit_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    escaped = process(20, cgroup="/system.slice/run-r1.scope", gids=(900,))
    host = Host(monkeypatch, process(10), escaped, active_state="active", main_pid=10)
    host.on_stop = lambda: None
    send = host.send

    def end(ref: ProcessRef, number: int) -> str:
        answer = send(ref, number)
        if 10 not in host.processes:
            host.rest()
        return answer

    host.send = end  # type: ignore[method-assign]
    result = host.stopper(_selection.by_unit(900), grace=3, kill_grace=2).run()
    assert result["verdict"] == "stopped"
    assert [(pid, name) for _when, pid, name in host.sent] == [(10, "SIGKILL"), (20, "SIGTERM")]
    assert [(step["action"], step["signal"], [p["pid"] for p in step["processes"]]) for step in result["plan"]] == [
        ("systemd_stop", None, [10]),
        ("signal", "TERM", [20]),
        ("signal", "KILL", [10, 20]),
    ]


@pytest.mark.parametrize("check_mode", [True, False])
@pytest.mark.parametrize(
    ("kill_mode", "main", "refused"),
    [
        ("control-group", 10, True),
        ("control-group", 11, True),
        ("mixed", 11, True),
        ("process", 10, True),
        ("process", 11, False),
        ("none", 10, False),
    ],
)
def test_a_protected_process_that_systemd_would_end_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, kill_mode: str, main: int, refused: bool, check_mode: bool
) -> None:
    keep = process(10, name="keep")
    host = Host(monkeypatch, keep, process(11), active_state="active", main_pid=main, kill_mode=kill_mode)
    host.on_stop = lambda: setattr(host.state, "active_state", "inactive")
    result = host.stopper(protected=("keep",)).run(check_mode)
    assert (result["verdict"] == "refused", 10 in host.processes) == (refused, True)
    if refused:
        assert (host.stops, host.sent, result["changed"]) == (0, [], False)
        assert 'systemd would end the protected process 10 "keep"' in result["msg"]


def test_check_mode_tells_who_would_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = process(20, cgroup="/system.slice/other.service", session=10, uid=7)
    facts: t.Dict[str, t.Any] = {"active_state": "inactive"}
    host = Host(monkeypatch, process(10), stranger, **facts)
    plan = host.stopper().run(check_mode=True)
    real = host.stopper(grace=0.1, kill_grace=0.1).run()
    assert (plan["verdict"], real["verdict"]) == ("survivors", "survivors")
    assert [p["pid"] for p in plan["survivors"]] == [p["pid"] for p in real["survivors"]] == [20]
    assert '10 "p10"; but 1 would be left: 20 "p20" (foreign)' in plan["msg"]
    why = 'only session speaks for it, and it runs as the user "%s" in the unit "other.service"' % user_name(7)
    assert plan["survivors"][0]["why"] == real["survivors"][0]["why"] == why


# What others do meanwhile


@pytest.mark.parametrize("named", ["qwen.service", "an-alias-of-it.service"])
def test_a_stop_that_is_under_way_is_joined(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    host = Host(monkeypatch, process(10), active_state="deactivating", main_pid=10, job=7)
    host.jobs = ["stop"]
    host.after(3, lambda: (host.rest(), setattr(host.state, "job", 0)))
    result = host.stopper(unit=named).run()
    assert (result["verdict"], result["changed"], host.stops) == ("stopped", True, 0)
    assert result["processes"][0]["signals"] == ["systemd"]


@pytest.mark.parametrize(("job", "kind"), [(7, "restart"), (7, "start"), (0, "")])
def test_a_restart_that_is_under_way_is_not_joined(monkeypatch: pytest.MonkeyPatch, job: int, kind: str) -> None:
    host = Host(monkeypatch, process(10), active_state="deactivating", main_pid=10, job=job)
    host.jobs = [kind]
    host.on_stop = lambda: (setattr(host.state, "job", 0), host.rest())
    assert host.stopper().run()["verdict"] == "stopped"
    assert host.stops == 1


def test_a_start_that_takes_the_place_of_the_stop_is_stopped_too_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10, invocation_id="a")

    def taken_over() -> None:
        host.state.active_state, host.state.sub_state, host.state.job = "activating", "start", 9
        host.state.invocation_id += "a"
        host.processes = {20 + host.stops: process(20 + host.stops)}

    host.on_stop = taken_over
    result = host.stopper(grace=2, kill_grace=1).run()
    assert (result["verdict"], host.stops) == ("survivors", 3)
    assert "was started again by somebody else" in result["msg"]
    assert host.sent == []


def test_a_start_between_the_two_readings_of_a_look_makes_nothing_a_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive", invocation_id="a")
    shows = []

    def show(unit: str, limit: float = 10.0) -> t.Any:
        answer = Host.show(host, unit)
        if not shows:
            host.processes[20] = process(20)
            host.state.active_state, host.state.main_pid, host.state.invocation_id = "active", 20, "b"
        shows.append(answer.active_state)
        return answer

    monkeypatch.setattr(_systemd, "show", show)
    host.on_stop = host.rest
    stopper = host.stopper()
    stopper.look()
    assert shows == ["inactive", "active", "active"]
    assert stopper.state is not None and stopper.state.active_state == "active"


def test_a_new_life_that_begins_during_the_stop_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", kill_mode="process", invocation_id="a")
    host.deaf = {10}
    begun: t.List[float] = []
    real = Host.show

    def show(unit: str, limit: float = 10.0) -> t.Any:
        answer = real(host, unit)
        if host.now > 1001 and not begun:  # right after systemd was asked, before the processes are read
            begun.append(host.now)
            host.processes[20] = process(20)
            host.state.active_state, host.state.main_pid, host.state.invocation_id = "active", 20, "b"
        return answer

    monkeypatch.setattr(_systemd, "show", show)
    result = host.stopper(grace=5).run()
    assert begun and result["verdict"] == "survivors"
    assert "was started again by somebody else" in result["msg"]
    assert 20 not in [pid for _when, pid, _name in host.sent]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_unit_is_thawed_first(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)
    monkeypatch.setattr(_groups.Group, "paused", property(lambda _group: frozen))
    by_hand: t.List[int] = []
    monkeypatch.setattr(_groups.Group, "thaw", lambda _group: by_hand.append(host.stops))
    host.on_stop = lambda: host.rest() if host.thawed or not frozen else pytest.fail("still frozen")
    assert host.stopper().run()["verdict"] == "stopped"
    assert (host.thawed, by_hand) == (frozen, [0] if frozen else [])


# Order and limits


def test_the_tops_of_what_a_unit_left_behind_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), process(11, 10), active_state="failed", kill_mode="process")
    host.deaf = {11}
    result = host.stopper(grace=2).run()
    assert [(round(when), pid, name) for when, pid, name in host.sent] == [
        (0, 10, "SIGTERM"),
        (0, 11, "SIGTERM"),
        (2, 11, "SIGKILL"),
    ]
    host = Host(monkeypatch, process(10), process(11, 10), active_state="failed", kill_mode="process")
    host.deaf = {10}
    result = host.stopper(grace=2).run()
    assert [(round(when), pid) for when, pid, name in host.sent if name == "SIGTERM"] == [(0, 10), (2, 11)]
    assert [(step["action"], step["signal"], [p["pid"] for p in step["processes"]]) for step in result["plan"]] == [
        ("signal", "TERM", [10]),
        ("signal", "TERM", [11]),
        ("signal", "KILL", [10, 11]),
    ]


@pytest.mark.parametrize("own", [1.0, 20.0, 300.0])
def test_the_wait_for_the_rest_is_never_longer_than_that_for_the_unit(
    monkeypatch: pytest.MonkeyPatch, own: float
) -> None:
    host = Host(monkeypatch, timeout_stop=own)
    stopper = host.stopper()
    stopper.look()
    assert stopper.rest_grace == min(15.0, own + 5.0)
    assert stopper._total <= 2 * stopper.grace + 10 + 5


def test_known_processes_are_glanced_at_and_looks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}
    host.after(25.003, lambda: host.processes.pop(10))
    looks: t.List[float] = []
    shown = host.show
    monkeypatch.setattr(_systemd, "show", lambda unit, limit: looks.append(host.now) or shown(unit))
    monkeypatch.setattr("%s.processor_time" % _survey.__name__, Spent(0.05))
    assert host.stopper(grace=60).run()["verdict"] == "stopped"
    waiting = [look for look in looks if look < 1025]
    assert 25 / 5.0 <= len(waiting) <= 25 / (0.05 * _stop.SHARE) + 6
    # Its end is seen at once, though the next look was not due.
    assert host.now - 1025.003 < 2 * _stop.POLL


def test_systemds_word_that_all_is_over_is_not_waited_for_as_long_as_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)
    host.on_stop = lambda: host.processes.clear()
    host.after(0.4, host.rest)
    monkeypatch.setattr("%s.processor_time" % _survey.__name__, Spent(0.2))
    assert host.stopper().run()["verdict"] == "stopped"
    assert 0.4 <= host.now - 1000 <= 0.9


def test_two_looks_are_enough_for_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    asked: t.List[t.List[int]] = []
    shown = host.show
    monkeypatch.setattr(_systemd, "show", lambda unit, limit: asked.append(list(host.processes)) or shown(unit))
    assert host.stopper().run()["verdict"] == "stopped"
    assert [there for _when, there in host.looks if not there] == [[], []]
    # The second follows at once, so what systemd said before the first holds for both.
    assert [there for there in asked if not there] == [[]]


def test_a_start_between_the_two_looks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", invocation_id="one")

    def snapshot(known: t.Optional[Table] = None) -> Table:
        if host.looks and not host.processes:  # between the first look that shows nobody and the second
            host.processes[20] = process(20)
            host.state.active_state, host.state.invocation_id = "active", "two"
        return Host.snapshot(host, known)

    monkeypatch.setattr(Table, "snapshot", snapshot)
    result = host.stopper().run()
    assert (result["verdict"], "started again" in result["msg"]) == ("survivors", True)
    assert [pid for _when, pid, _name in host.sent] == [10]


class Spent:
    """Processor time that grows with each look."""

    def __init__(self, step: float) -> None:
        self.step, self.sum = step, 0.0

    def __call__(self) -> float:
        self.sum += self.step
        return self.sum


def storm(host: Host) -> t.List[int]:
    """Whoever is killed has had another child just before, unless it was stopped."""
    born: t.List[int] = []
    send = host.send

    def fork_first(ref: ProcessRef, number: int) -> str:
        if number == 9 and ref.pid in host.processes and host.processes[ref.pid].state != "T":
            born.append(100 + len(born))
            host.processes[born[-1]] = process(born[-1])
        return send(ref, number)

    host.deaf = {10}
    host.send = fork_first  # type: ignore[method-assign]
    return born


def test_a_fork_storm_is_stopped_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    born = storm(host)
    result = host.stopper(grace=1).run()
    assert (result["verdict"], host.processes) == ("stopped", {})
    last = born[-1]
    assert [name for _when, pid, name in host.sent if pid == last] == ["SIGSTOP", "SIGKILL"]
    assert host.now - 1000 <= 3


@pytest.mark.parametrize("broken_by", ["start", "error"])
def test_who_was_stopped_for_a_storm_does_not_stay_so(monkeypatch: pytest.MonkeyPatch, broken_by: str) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", invocation_id="a")
    storm(host)
    shown = _systemd.show

    def show(unit: str, timeout: float = 10.0) -> t.Any:
        if any(p.state == "T" for p in host.processes.values()):
            if broken_by == "error":
                raise ServingError("the bus is gone")
            host.state.active_state, host.state.invocation_id = "active", "b"
        return shown(unit)

    monkeypatch.setattr(_systemd, "show", show)
    with contextlib.suppress(ServingError):
        assert host.stopper(grace=0.5).run()["verdict"] == "survivors"
    assert "SIGSTOP" in [name for _when, _pid, name in host.sent]
    assert host.processes == {}


def test_the_kernel_kills_no_new_life(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", control_group=GROUP, invocation_id="a")
    storm(host)
    monkeypatch.setattr(_groups.Group, "kill", lambda _group: pytest.fail("a new life was killed"))
    end_storm = Stopper._end_storm

    def begin(stopper: Stopper) -> None:
        host.state.active_state, host.state.main_pid, host.state.invocation_id = "active", 30, "b"
        end_storm(stopper)

    monkeypatch.setattr(Stopper, "_end_storm", begin)
    result = host.stopper(grace=0.5).run()
    assert (result["verdict"], "started again" in result["msg"]) == ("survivors", True)


def test_the_kernel_ends_a_storm_where_all_in_the_group_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", control_group=GROUP)
    storm(host)
    kills: t.List[float] = []

    def kill(_group: t.Any) -> bool:
        kills.append(host.now)
        host.processes.clear()
        return True

    monkeypatch.setattr(_groups.Group, "kill", kill)
    result = host.stopper(grace=1).run()
    assert (result["verdict"], len(kills)) == ("stopped", 1)


def test_the_kernel_is_not_asked_where_somebody_else_is_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = process(11, name="keep")
    host = Host(monkeypatch, process(10), keep, active_state="inactive", kill_mode="process", control_group=GROUP)
    storm(host)
    monkeypatch.setattr(_groups.Group, "kill", lambda _group: pytest.fail("the whole group was killed"))
    host.stopper(grace=1, protected=("keep",)).run()
    assert 11 in host.processes
    assert 11 not in [pid for _when, pid, _name in host.sent]


def test_who_is_in_the_group_and_was_missed_in_the_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", control_group=GROUP)
    host.deaf = {10, 77}
    hidden = process(77)
    monkeypatch.setattr(_groups.Group, "pids", lambda _group: set(host.processes) | ({77} if hidden else set()))
    monkeypatch.setattr(Table, "of", lambda pids: [hidden] if 77 in pids and 77 in host.processes else [])
    monkeypatch.setattr(_survey, "_exists", lambda _pid: False)
    host.processes[77] = hidden
    snapshot = Table.snapshot
    monkeypatch.setattr(Table, "snapshot", lambda known=None: Table(p for p in snapshot() if p.pid != 77))
    result = host.stopper(grace=1).run()
    assert (result["verdict"], sorted(p["pid"] for p in result["processes"])) == ("stopped", [10, 77])


def test_who_was_moved_into_the_group_is_found_though_it_was_known_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive", control_group=GROUP)
    host.processes[77] = process(77, cgroup="/elsewhere")
    monkeypatch.setattr(_groups.Group, "pids", lambda _group: set(host.processes))
    monkeypatch.setattr(Table, "of", lambda pids: [process(pid) for pid in pids if pid in host.processes])
    result = host.stopper(grace=1).run()
    assert (result["verdict"], sorted(p["pid"] for p in result["processes"])) == ("stopped", [10, 77])


def test_who_cannot_be_looked_at_is_not_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive", control_group=GROUP)
    monkeypatch.setattr(_groups.Group, "pids", lambda _group: {77})
    monkeypatch.setattr(Table, "of", lambda pids: [])
    monkeypatch.setattr(_survey, "_exists", lambda _pid: True)
    with pytest.raises(
        ServingError, match=r'1 processes of the unit "qwen.service" cannot be looked at, such as 77'
    ) as raised:
        host.stopper().run()
    assert raised.value.result["verdict"] == "error"
    monkeypatch.setattr(_survey, "_exists", lambda _pid: False)
    assert host.stopper().run()["verdict"] == "absent"


@pytest.mark.parametrize("check_mode", [True, False])
@pytest.mark.parametrize(
    ("facts", "line", "said"),
    [
        ({"name": "ssh.service"}, {}, 'the unit "ssh.service" holds the sessions of users or this host itself'),
        ({"raw": {"RequiredBy": "user@0.service"}}, {}, 'would stop it together with "qwen.service"'),
        (
            {"raw": {"BoundBy": "caller.service"}},
            {500: "/system.slice/caller.service"},
            "this task itself runs in the unit",
        ),
        ({"raw": {"BoundBy": "other.service"}}, {500: "/system.slice/caller.service"}, ""),
    ],
    ids=["alias", "holds up", "caller", "other"],
)
def test_names_and_dependents_of_a_unit_count(
    monkeypatch: pytest.MonkeyPatch, facts: t.Dict[str, t.Any], line: t.Dict[int, str], said: str, check_mode: bool
) -> None:
    host = Host(monkeypatch, process(10), **dict({"active_state": "active", "main_pid": 10}, **facts))
    host.processes.update({pid: process(pid, cgroup=cgroup) for pid, cgroup in line.items()})
    monkeypatch.setattr(_processes, "own_line", lambda _table: {1, *line})
    result = host.stopper().run(check_mode)
    assert (result["verdict"] == "refused", said in result["msg"]) == (bool(said), True)
    assert not said or (host.stops, host.sent) == (0, [])


def test_a_stop_that_systemd_does_not_do_is_done_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10, invocation_id="a")
    host.on_stop = lambda: setattr(host.state, "active_state", "active")  # as systemd 257 does below a frozen slice
    send = host.send

    def end(ref: ProcessRef, number: int) -> str:
        answer = send(ref, number)
        host.rest()
        return answer

    host.send = end  # type: ignore[method-assign]
    result = host.stopper(grace=2).run()
    assert (result["verdict"], [name for _when, _pid, name in host.sent]) == ("stopped", ["SIGKILL"])


def test_a_kill_that_systemd_has_not_noticed_yet_is_no_new_life(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10, invocation_id="a")
    host.on_stop = lambda: setattr(host.state, "active_state", "active")  # as systemd 257 does below a frozen slice
    send = host.send

    def end(ref: ProcessRef, number: int) -> str:
        host.after(0.5, host.rest)
        return send(ref, number)

    host.send = end  # type: ignore[method-assign]
    assert host.stopper(grace=2).run()["verdict"] == "stopped"


def test_one_look_is_no_proof_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}
    send, born = host.send, [14, 13, 12, 11]

    def fork_first(ref: ProcessRef, number: int) -> str:
        """All but the last that are killed have had a child just before: the last SIGKILL is the last that there is."""
        if number == 9 and born:
            host.processes[born[-1]] = process(born[-1])
            host.deaf.add(born.pop())
        return send(ref, number)

    host.send = fork_first  # type: ignore[method-assign]
    assert host.stopper(grace=0.0, kill_grace=0.0).run()["verdict"] == "stopped"
    assert [there for _when, there in host.looks[-2:]] == [[], []]


def test_who_cannot_be_signalled_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), process(11), active_state="inactive")
    host.send = lambda _ref, _number: "denied"  # type: ignore[method-assign]
    result = host.stopper(grace=30, kill_grace=10).run()
    assert (result["verdict"], host.now - 1000 < 2) == ("survivors", True)


@pytest.mark.parametrize("signalled", [True, False])
def test_a_lease_that_is_lost_in_the_middle_is_no_refusal(monkeypatch: pytest.MonkeyPatch, signalled: bool) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    host.deaf = {10}
    stopper = host.stopper(grace=5)

    def tick() -> None:
        if bool(host.sent) == signalled:
            raise ServingError("the lease is gone", verdict="refused")

    stopper._tick = tick
    with pytest.raises(ServingError) as raised:
        stopper.run()
    assert raised.value.result["verdict"] == ("survivors" if signalled else "refused")
    assert ("broken off in the middle" in raised.value.message) is signalled


# Containers


class Asked:
    """A request to a manager that does as the test says."""

    made: t.List[t.Any] = []

    def __init__(self, container: Container, seconds: float) -> None:
        self.container, self.seconds = container, seconds
        self.done, self.failed, self.ended = False, "", False
        Asked.made.append(self)

    def end(self) -> None:
        self.ended = True


BOX = Container("docker", "a" * 64, "qwen", ("docker", "stop", "--time", "{seconds}", "a" * 64))
INSIDE = "/system.slice/docker-%s.scope" % BOX.id


def boxed(monkeypatch: pytest.MonkeyPatch, **state: t.Any) -> t.Tuple[Host, Stopper]:
    host = Host(monkeypatch, process(30, 2, cgroup=INSIDE), process(31, 30, cgroup=INSIDE), process(2), **state)
    host.processes[2].cgroup = "/system.slice/containerd.service"
    Asked.made = []
    monkeypatch.setattr(_containers, "Request", Asked)

    def scan(table: Table, state: t.Any, previous: t.Any) -> _ownership.Owned:
        return _ownership.of_unit(table, state, containers={BOX.id: BOX}, previous=previous)

    return host, host.stopper(scan, grace=4, kill_grace=1)


def test_a_container_is_left_to_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    host, stopper = boxed(monkeypatch, active_state="inactive")
    host.after(2, lambda: [host.processes.pop(pid) for pid in (30, 31)])
    result = stopper.run()
    assert (result["verdict"], result["changed"], host.sent) == ("stopped", True, [])
    (request,) = Asked.made
    assert (request.container, request.ended) == (BOX, True)
    assert 0 < request.seconds <= 4
    assert {tuple(p["signals"]) for p in result["processes"]} == {("docker",)}
    assert [(s["action"], s["target"]) for s in result["plan"]] == [("container_stop", "qwen"), ("signal", None)]
    assert 2 in host.processes


@pytest.mark.parametrize("done", [True, False])
def test_what_its_manager_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    host, stopper = boxed(monkeypatch, active_state="inactive")
    host.deaf = {30, 31}
    if done:
        host.after(1, lambda: setattr(Asked.made[0], "done", True))
    result = stopper.run()
    names = {name for _when, _pid, name in host.sent}
    assert (result["verdict"], names) == ("stopped", {"SIGTERM", "SIGKILL"} if done else {"SIGKILL"})
    assert Asked.made[0].ended


@pytest.mark.parametrize("failed", ["", "Error: No such container: qwen", "permission denied"])
def test_a_container_between_two_lives_is_kept_from_the_next(monkeypatch: pytest.MonkeyPatch, failed: str) -> None:
    host = Host(monkeypatch, active_state="failed")
    Asked.made = []
    monkeypatch.setattr(_containers, "Request", Asked)
    box = BOX._replace(restarts=True)

    def scan(table: Table, state: t.Any, previous: t.Any) -> _ownership.Owned:
        return _ownership.of_unit(table, state, containers={BOX.id: box}, previous=previous)

    plan = host.stopper(scan, grace=4).run(check_mode=True)
    assert (plan["verdict"], plan["changed"], Asked.made) == ("stopped", True, [])
    assert plan["plan"][0]["action"] == "container_stop"
    host.after(1, lambda: (setattr(Asked.made[0], "done", True), setattr(Asked.made[0], "failed", failed)))
    result = host.stopper(scan, grace=4).run()
    assert len(Asked.made) == 1
    assert host.now >= 1001  # it waits for the manager's answer
    assert (result["verdict"], result["changed"]) == ("survivors" if "denied" in failed else "stopped", True)
    if "denied" in failed:
        assert result["msg"].endswith('the docker container "qwen" may start again: its stop failed: permission denied')


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_protected_process_in_a_container_is_a_refusal(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    host, stopper = boxed(monkeypatch, active_state="inactive")
    host.processes[31].name = "keep"
    stopper = host.stopper(stopper.survey._scan, protected=("keep",))
    result = stopper.run(check_mode)
    assert (result["verdict"], Asked.made, host.sent) == ("refused", [], [])
    assert 'docker would end the protected process 31 "keep" together with the container "qwen"' in result["msg"]


def test_what_was_seen_before_a_managers_answer_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host, stopper = boxed(monkeypatch, active_state="inactive")
    host.deaf = {30, 31}
    answered: t.List[float] = []
    host.after(1, lambda: [host.processes.pop(pid) for pid in (30, 31)])
    host.after(2, lambda: (setattr(Asked.made[0], "done", True), answered.append(host.now)))
    assert stopper.run()["verdict"] == "stopped"
    assert answered and len([when for when, _there in host.looks if when >= answered[0]]) >= 2


def test_managers_of_two_kinds_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Container("podman", "b" * 64, "qwen", ("podman", "stop", "b" * 64))
    place = "/machine.slice/libpod-%s.scope" % other.id
    host = Host(monkeypatch, process(30, cgroup=INSIDE), process(40, cgroup=place), active_state="inactive")

    def scan(table: Table, state: t.Any, previous: t.Any) -> _ownership.Owned:
        boxes = {BOX.id: BOX, other.id: other}
        return _ownership.of_unit(table, state, containers=boxes, previous=previous)

    result = host.stopper(scan).run(check_mode=True)
    assert {p["pid"]: p["signals"] for p in result["processes"]} == {30: ["docker"], 40: ["podman"]}
    assert [(s["manager"], s["target"]) for s in result["plan"]] == [
        ("docker", "qwen"),
        ("podman", "qwen"),
        (None, None),
    ]


def test_check_mode_asks_no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    host, stopper = boxed(monkeypatch, active_state="inactive")
    result = stopper.run(check_mode=True)
    assert (result["verdict"], result["changed"], Asked.made, host.sent) == ("stopped", True, [], [])
    assert {tuple(p["signals"]) for p in result["processes"]} == {("docker",)}


# The answer


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_unit_that_may_not_be_stopped_by_hand(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10, raw={"CanStop": "no"})
    result = host.stopper().run(check_mode)
    assert (result["verdict"], result["changed"], host.stops, host.sent) == ("refused", False, 0, [])
    assert "for nobody but units that depend on it (RefuseManualStop=)" in result["msg"]
    host.state.active_state, host.state.main_pid = "failed", 0
    assert host.stopper().run()["verdict"] == "stopped"


def test_a_request_that_fails_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="active", main_pid=10)

    def refused() -> None:
        raise ServingError("access denied")

    host.on_stop = refused
    with pytest.raises(ServingError) as caught:
        host.stopper().run()
    assert caught.value.result["changed"] is False
    assert caught.value.result["processes"][0]["signals"] == []


def test_a_unit_of_that_name_under_a_users_manager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = process(50, cgroup="/user.slice/user-1.slice/user@1.service/app.slice/qwen.service")
    host = Host(monkeypatch, theirs, load_state="not-found")
    result = host.stopper().run()
    assert (result["verdict"], host.sent) == ("absent", [])
    (suspect,) = result["suspects"]
    assert (suspect["pid"], suspect["unit"]) == (50, "user@1.service")
    assert suspect["why"] == "the manager user@1.service of a user runs a unit of this name: stop it there"


def test_what_a_vanished_unit_left_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), load_state="not-found")
    result = host.stopper().run()
    assert (result["verdict"], result["suspects"], [p["pid"] for p in result["processes"]]) == ("stopped", [], [10])


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "python3 -m vllm.entrypoints.openai.api_server --model x --port 1",
            "python3 -m vllm.entrypoints.openai.api_server",
        ),
        ("vi handserver.yml", "vi handserver.yml"),
        ("vllm serve --api-key sk-1", "vllm serve"),
        ("server --hf-token=abc m", "server"),
        ("curl http://u:p@host/", "curl"),
        ("server PASSWORD=x y", "server"),
        ("", ""),
        ("python3 server.py sk-abc", "python3 server.py"),
        ("python3 -c code", "python3"),
        ("server --api abc", "server"),
        ("x" * 200, "x" * 100),
    ],
)
def test_the_beginning_of_a_command_line_holds_no_key(line: str, shown: str) -> None:
    assert _stop_answer.beginning(line) == shown


def test_command_lines_are_in_plan_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), active_state="inactive")
    monkeypatch.setattr(_inside, "command_lines", lambda refs, _timeout: dict.fromkeys(refs, "vi a.yml"))
    assert host.stopper().run(check_mode=True)["processes"][0]["command"] == "vi a.yml"
    assert host.stopper().run()["processes"][0]["command"] == "vi a.yml"


def test_a_unit_without_a_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="active", sub_state="exited")
    assert host.stopper().run()["msg"] == 'the unit "qwen.service" is stopped: it owned no process'


def test_a_failed_unit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="failed", result="start-limit-hit")
    text = "owns no process, and systemd calls it failed (start-limit-hit): reset_failed clears that"
    assert host.stopper().run()["msg"].endswith(text)


def test_an_answer_of_a_storm_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [process(1000 + n) for n in range(1500)]
    host = Host(monkeypatch, *crowd, active_state="inactive")
    host.immortal = {2000}
    result = host.stopper(grace=0.1, kill_grace=0.1).run()
    assert result["verdict"] == "unkillable"
    assert [p["pid"] for p in result["survivors"]] == [2000]
    assert (len(result["processes"]), result["unlisted"]) == (1000, 500)
    assert result["processes"][0]["pid"] == 2000
    assert len(result["plan"][0]["processes"]) == 1000


def test_the_waits_of_a_plan_fit_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), process(11, 10), active_state="inactive")
    waits = [step["wait"] for step in host.stopper(timeout=9).run(check_mode=True)["plan"]]
    assert waits == [3.0, 6.0, 9.0]
    waits = [step["wait"] for step in host.stopper(grace=7, kill_grace=2).run(check_mode=True)["plan"]]
    assert waits == [7.0, 7.0, 2.0]


def test_suspects_are_named_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = process(40, name="VLLM::Worker_TP0", cgroup="/system.slice/run-r1.scope")
    host = Host(monkeypatch, process(10), stray, active_state="inactive")

    def scan(table: Table, state: t.Any, previous: t.Any) -> _ownership.Owned:
        owned = _ownership.of_unit(table, state, previous=previous)
        owned.suspects = [stray.ref] if table.by_ref(stray.ref) else []
        return owned

    result = host.stopper(scan).run()
    assert result["verdict"] == "stopped"
    (suspect,) = result["suspects"]
    assert (suspect["pid"], suspect["unit"]) == (40, "run-r1.scope")
    assert 40 in host.processes
