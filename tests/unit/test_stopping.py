# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is said beside the answer of a stop."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _ownership, _selection, _stopping, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import NoAnswer, UnitState
from host import Host


@pytest.mark.parametrize("check_mode", [True, False])
@pytest.mark.parametrize(("socket", "warned"), [("active", 1), ("inactive", 0), (None, 0)])
def test_what_may_start_the_unit_again_is_named(
    monkeypatch: pytest.MonkeyPatch, socket: t.Optional[str], warned: int, check_mode: bool
) -> None:
    host = Host(monkeypatch, raw={"TriggeredBy": "qwen.timer qwen.socket"})

    def show(unit: str, timeout: float = 10.0) -> UnitState:
        if unit == "qwen.socket":
            if socket is None:
                raise NoAnswer("no answer")
            return UnitState(unit, load_state="loaded", active_state=socket)
        return UnitState(unit, load_state="loaded") if unit == "qwen.timer" else host.show(unit)

    monkeypatch.setattr(_systemd, "show", show)
    said: t.List[str] = []
    chosen = _selection.Selection('the unit "qwen.service"', _selection.by_unit(None), "qwen.service")
    result = _stopping.carry_out(chosen, _stopping.Options(), check_mode, warn=said.append)
    assert result["unit_state"]["triggered_by"] == ["qwen.socket", "qwen.timer"]
    text = 'the unit "qwen.service" may be started by "qwen.socket", which is active: stop that too'
    assert said == [text] * warned


def triggered(monkeypatch: pytest.MonkeyPatch, check_mode: bool, **facts: t.Any) -> t.List[str]:
    monkeypatch.setattr(_systemd, "show", lambda unit, _limit: UnitState(unit, active_state="active"))
    state = {"name": "q.service", "triggered_by": ["q.socket"]}
    return list(_stopping._triggers(dict(facts, unit_state=state), check_mode))


def test_what_may_start_the_unit_again_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    by = 'by "q.socket", which is active: stop that'
    for verdict in ("stopped", "survivors"):
        facts = {"verdict": verdict, "changed": True}
        assert triggered(monkeypatch, False, **facts) == ['the unit "q.service" may be started again %s first' % by]
        would = 'the unit "q.service" would be stopped, but may be started again %s first' % by
        assert triggered(monkeypatch, True, **facts) == [would]
    for check_mode in (True, False):
        nothing = triggered(monkeypatch, check_mode, verdict="absent", changed=False)
        assert nothing == ['the unit "q.service" may be started %s too' % by]
        assert triggered(monkeypatch, check_mode, verdict="refused", changed=False) == []


@pytest.mark.parametrize("takes", [0.0, 0.4, 5.0])
def test_the_warnings_after_the_end_take_a_second_in_all(monkeypatch: pytest.MonkeyPatch, takes: float) -> None:
    clock = Host(monkeypatch)
    asked: t.List[str] = []

    def show(unit: str, limit: float) -> UnitState:
        asked.append(unit)
        clock.sleep(min(takes, limit))
        if takes > limit:
            raise NoAnswer("no answer")
        return UnitState(unit, active_state="active")

    monkeypatch.setattr(_systemd, "show", show)
    names = ["%d.socket" % number for number in range(9)]
    result = {"verdict": "stopped", "changed": True, "unit_state": {"name": "q.service", "triggered_by": names}}
    began = clock.now
    said = list(_stopping._triggers(result, False, clock))
    assert clock.now - began <= 1.001
    assert (len(said), asked) == {0.0: (4, names[:4]), 0.4: (2, names[:3]), 5.0: (0, names[:1])}[takes]


@pytest.mark.parametrize(
    ("groups", "warned"), [("gpuops-x", False), ("video", True), ("", True), (None, False)], ids=str
)
def test_a_unit_without_a_mark_is_named(monkeypatch: pytest.MonkeyPatch, groups: t.Optional[str], warned: bool) -> None:
    monkeypatch.setattr(_ownership, "group_number", {"gpuops-x": 900}.get)
    Host(monkeypatch, raw={} if groups is None else {"SupplementaryGroups": groups})
    said: t.List[str] = []
    chosen = _selection.Selection('the unit "qwen.service"', _selection.by_unit(None), "qwen.service")
    result = _stopping.carry_out(chosen, _stopping.Options(), False, warn=said.append)
    assert result["marks"] == (["900"] if groups == "gpuops-x" else [])
    assert [text.split(":")[0] for text in said] == [
        'the unit "qwen.service" gives its processes no ownership mark'
    ] * warned


@pytest.mark.parametrize(("state", "warned"), [("active", True), ("inactive", False)])
def test_units_that_end_together_with_it_are_named(monkeypatch: pytest.MonkeyPatch, state: str, warned: bool) -> None:
    Host(monkeypatch, active_state=state, raw={"BoundBy": "side.service"})
    said: t.List[str] = []
    chosen = _selection.Selection('the unit "qwen.service"', _selection.by_unit(None), "qwen.service")
    _stopping.carry_out(chosen, _stopping.Options(), True, warn=said.append)
    text = 'systemd stops "side.service" together with it; starting it does not start them again'
    assert said == [text] * warned
