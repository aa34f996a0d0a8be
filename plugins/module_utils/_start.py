# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Start a unit once, and only over the proven end of its earlier life."""

from __future__ import annotations

from typing import Any, Callable

from . import _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._processes import Process
from ._selection import Selection
from ._survey import Survey
from ._systemd import UnitState

__all__ = ["start"]

# Why the unit must not be started now: a verdict and its sentence; None when nothing speaks against it.
Gate = Callable[[], "tuple[str, str] | None"]

POLL = 0.2
LAST_ANSWER = 1.0  # seconds for systemd when the time is over
SETTLE = 1.0  # a command that cannot run at all is failed within milliseconds, not at once


def start(
    selection: Selection,
    timeout: float = 30.0,
    reset_failed: bool = True,
    check_mode: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    gate: Gate | None = None,
) -> dict[str, Any]:
    """Start the selected unit and return its verdict. ``gate`` is asked last, when it would be started now.

    A unit between two lives does not run: systemd only waits to begin the next. A start job would wait with it, so the
    unit is stopped first, which also keeps systemd from starting it between the look for survivors and the start.
    """
    assert selection.unit is not None and selection.scan is not None
    unit, deadline = selection.unit, Deadline(timeout, clock)
    changed = False
    state = _systemd.show(unit, _patience(deadline))
    while state.active_state == "deactivating" and not deadline.expired:
        deadline.sleep(POLL)
        state = _systemd.show(unit, _patience(deadline))

    def answer(verdict: str, msg: str, survivors: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        runs = verdict in ("started", "running") and not (check_mode and changed)
        return {
            "verdict": verdict,
            "changed": changed,
            "msg": 'the unit "%s" %s' % (unit, msg),
            "survivors": survivors or [],
            "unit_state": state.as_result(),
            "invocation_id": state.invocation_id if runs else "",
            "main_pid": state.main_pid,
            "elapsed": round(deadline.elapsed, 2),
        }

    if state.active_state == "deactivating":
        return answer("refused", "is not started: it is still stopping after %g s" % timeout)
    if not state.found:
        return answer("not_found", "does not exist on this host")
    if state.runs:
        return answer("running", "is %s (%s) already" % (state.active_state, state.sub_state))
    if state.load_state != "loaded":
        if state.load_state == "masked":
            return answer("refused", "is not started: it is masked")
        return answer("failed", "cannot be loaded: %s" % (state.load_error or state.load_state))
    survivors, own = _survivors(selection, deadline)
    if own is not None:
        return answer(
            "refused", 'is not started: this task itself runs below its process %d "%s"' % (own.pid, own.name)
        )
    if state.between_lives:
        state = _systemd.show(unit, _patience(deadline))
        if state.runs:
            return answer("running", "was started by systemd this moment: it is %s already" % state.active_state)
        if not survivors and not check_mode:
            changed = True
            _systemd.request_stop(unit, _patience(deadline))
            state = _come_to_rest(unit, deadline)
            if not state.at_rest:
                text = "is not started: it is %s (%s) %g s after it was asked to stop restarting"
                return answer("failed", text % (state.active_state, state.sub_state, deadline.elapsed))
            survivors, _own = _survivors(selection, deadline)
    if survivors:
        named = ", ".join('%d "%s"' % (process["pid"], process["name"]) for process in survivors)
        text = "is not started: processes of its earlier life are alive: %s: stop them with process_tree_stop" % named
        return answer("survivors", text, survivors)
    held = gate() if gate is not None else None
    if held is not None:
        return answer(held[0], "is not started: %s" % held[1])
    changed = True
    if check_mode:
        return answer("started", "would be started")

    before = state.invocation_id
    if reset_failed:
        _systemd.reset_failed(unit, _patience(deadline))
    _systemd.start(unit, _patience(deadline))
    state = _watch(unit, deadline)
    verdict, msg = _judge(state, before, timeout)
    return answer(verdict, msg)


def _patience(deadline: Deadline) -> float:
    """What systemd has for one answer."""
    return max(LAST_ANSWER, min(10.0, deadline.remaining))


def _survivors(selection: Selection, deadline: Deadline) -> tuple[list[dict[str, Any]], Process | None]:
    assert selection.scan is not None
    survey = Survey(selection.scan, selection.unit)
    survey.look(_patience(deadline))
    return [m.as_result() for m in survey.members.values() if m.standing != "foreign"], survey.own


def _come_to_rest(unit: str, deadline: Deadline) -> UnitState:
    while True:
        state = _systemd.show(unit, _patience(deadline))
        if state.at_rest or deadline.expired:
            return state
        deadline.sleep(POLL)


def _watch(unit: str, deadline: Deadline) -> UnitState:
    """The unit's state once it has run for a moment, has ended, or the time is over."""
    running_since: float | None = None
    while True:
        state = _systemd.show(unit, _patience(deadline))
        if state.runs:
            if running_since is None:
                running_since = deadline.elapsed
            if deadline.elapsed - running_since >= SETTLE:
                return state
        elif state.at_rest or state.between_lives:
            return state
        if deadline.expired:
            return state
        deadline.sleep(POLL)


def _judge(state: UnitState, before: str, timeout: float) -> tuple[str, str]:
    if state.between_lives:
        return "failed", "ended at once and is about to be restarted by systemd: %s" % _ending(state)
    if state.runs:
        if state.main_pid:
            return "started", "is started: its main process is %d" % state.main_pid
        return "started", "is started: it is %s (%s)" % (state.active_state, state.sub_state)
    held = state.result == "exec-condition" or state.raw.get("ConditionResult") == "no"
    if state.active_state == "inactive" and held:
        return "refused", "was not started by systemd: its condition does not hold"
    if state.active_state == "inactive" and state.at_rest and state.invocation_id not in ("", before):
        return "failed", "was started and has ended already, without an error"
    if not state.at_rest:
        return "failed", "is not running after %g s: it is %s (%s)" % (timeout, state.active_state, state.sub_state)
    return "failed", "was started and failed: %s" % _ending(state)


def _ending(state: UnitState) -> str:
    text = state.result
    if state.exec_main_code:
        text += ", main process %s %d" % (
            "exited with status" if state.exec_main_code == 1 else "was killed by signal",
            state.exec_main_status,
        )
    return text
