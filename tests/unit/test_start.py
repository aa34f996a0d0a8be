# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The start of a unit on a made-up host: only over the proven end of its earlier life, and once."""

from __future__ import annotations

import types
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _ownership, _selection, _start
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.modules import service_start
from host import Host, process


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
        ({"active_state": "activating", "sub_state": "start-pre"}, "running"),
        ({"active_state": "reloading", "sub_state": "reload"}, "running"),
    ],
)
def test_units_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, state: t.Dict[str, t.Any], verdict: str) -> None:
    host = Host(monkeypatch, **state)
    result = start(host)
    assert (result["verdict"], result["changed"]) == (verdict, False)


def test_a_gate_is_asked_last_and_keeps_the_unit_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive")
    held = start(host, gate=lambda: ("busy", 'GPU 0 is busy: process 7 "x" holds 44000 MiB'))
    assert (held["verdict"], held["changed"], host.state.active_state) == ("busy", False, "inactive")
    assert held["msg"] == 'the unit "qwen.service" is not started: GPU 0 is busy: process 7 "x" holds 44000 MiB'
    assert start(host, gate=lambda: None)["verdict"] == "started"

    def never() -> t.Optional[t.Tuple[str, str]]:
        raise AssertionError("a unit that runs is not asked about")

    assert start(host, gate=never)["verdict"] == "running"


def test_check_mode_has_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, active_state="inactive")
    plan = start(host, check_mode=True)
    assert (plan["verdict"], plan["changed"], host.state.active_state) == ("started", True, "inactive")
    assert set(plan) == set(start(host))


LOOPING = {"active_state": "activating", "sub_state": "auto-restart", "invocation_id": "old", "n_restarts": 7}


def test_a_unit_between_two_lives_is_started_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, **LOOPING)
    result = start(host)
    assert (result["verdict"], result["changed"], host.stops) == ("started", True, 1)
    assert result["invocation_id"] == "new"
    assert host.now - 1000.0 < 2


def test_a_unit_between_two_lives_is_not_started_over_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10), **LOOPING)
    result = start(host)
    assert (result["verdict"], result["changed"], host.stops) == ("survivors", False, 0)
    assert [p["pid"] for p in result["survivors"]] == [10]
    assert host.state.sub_state == "auto-restart"


def test_what_its_stop_brings_to_light_is_not_started_over(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, **LOOPING)

    def stop() -> None:
        host.rest()
        host.processes[11] = process(11)

    host.on_stop = stop
    result = start(host)
    assert (result["verdict"], result["changed"], host.stops) == ("survivors", True, 1)
    assert host.state.active_state == "inactive"


def test_check_mode_leaves_a_unit_between_two_lives_there(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, **LOOPING)
    result = start(host, check_mode=True)
    assert (result["verdict"], result["changed"], host.stops) == ("started", True, 0)
    assert host.state.sub_state == "auto-restart"


def test_a_unit_that_systemd_starts_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, **LOOPING)
    scan = _selection.by_unit(None)

    def wakes(*of: t.Any) -> t.Any:
        host.start("")
        host.processes[20] = process(20)
        return scan(*of)

    selection = _selection.Selection("it", wakes, "qwen.service")
    result = _start.start(selection, clock=host)
    assert (result["verdict"], result["changed"], host.stops) == ("running", False, 0)
    assert (result["invocation_id"], result["survivors"]) == ("new", [])


def test_a_unit_that_cannot_be_taken_out_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, **LOOPING)
    host.on_stop = lambda: None
    result = start(host, timeout=3)
    assert (result["verdict"], result["changed"]) == ("failed", True)
    assert host.now - 1000.0 <= 3
    assert "it is deactivating (auto-restart) 3 s after it was asked to stop restarting" in result["msg"]


@pytest.mark.parametrize("call", ["show", "request_stop", "reset_failed", "start"])
def test_a_systemd_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    host = Host(monkeypatch, **LOOPING)
    host.mute = {call}
    with pytest.raises(_start._systemd.NoAnswer):
        start(host, timeout=3)
    assert host.now - 1000.0 <= 3 + _start.LAST_ANSWER


def test_a_unit_that_the_task_runs_below_is_not_stopped_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, process(10, name="sshd"), active_state="activating", sub_state="auto-restart")
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1, 10})
    result = start(host)
    assert (result["verdict"], result["changed"], host.stops) == ("refused", False, 0)
    assert '10 "sshd"' in result["msg"]


@pytest.mark.parametrize("wrong", [{"timeout": float("inf")}, {"timeout": -1.0}, {"memory_tolerance": -1}])
def test_limits_that_are_none(wrong: t.Dict[str, t.Any]) -> None:
    params = dict({"unit": "x.service", "timeout": 30.0, "memory_tolerance": 64}, **wrong)
    with pytest.raises(UsageError, match="must be"):
        service_start.start(types.SimpleNamespace(params=params, check_mode=True))
