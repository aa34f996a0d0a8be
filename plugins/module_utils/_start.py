# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Start a unit once, and only over the proven end of its earlier life."""

from __future__ import annotations

from typing import Any

from . import _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._selection import Selection
from ._stop import Options, Stopper
from ._systemd import UnitState

__all__ = ["start"]

POLL = 0.2
SETTLE = 1.0  # a command that cannot run at all is failed within milliseconds, not at once


def start(
    selection: Selection,
    timeout: float = 30.0,
    reset_failed: bool = True,
    check_mode: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, Any]:
    """Start the selected unit and return its verdict."""
    assert selection.unit is not None and selection.scan is not None
    unit, deadline = selection.unit, Deadline(timeout, clock)
    state = _systemd.show(unit)
    while state.active_state == "deactivating" and not deadline.expired:
        deadline.sleep(POLL)
        state = _systemd.show(unit)

    def answer(
        verdict: str, msg: str, changed: bool = False, survivors: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
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
    if state.active_state in ("active", "activating", "reloading"):
        return answer("running", "is %s (%s) already" % (state.active_state, state.sub_state))
    if state.load_state != "loaded":
        if state.load_state == "masked":
            return answer("refused", "is not started: it is masked")
        return answer("failed", "cannot be loaded: %s" % (state.raw.get("LoadError") or state.load_state))
    survivors = _survivors(selection)
    if survivors:
        named = ", ".join('%d "%s"' % (process["pid"], process["name"]) for process in survivors)
        text = "is not started: processes of its earlier life are alive: %s: stop them with process_tree_stop" % named
        return answer("survivors", text, survivors=survivors)
    if check_mode:
        return answer("started", "would be started", changed=True)

    before = state.invocation_id
    if reset_failed:
        _systemd.reset_failed(unit)
    _systemd.start(unit, max(1.0, deadline.remaining))
    state = _watch(unit, before, deadline)
    verdict, msg = _judge(state, before, timeout)
    return answer(verdict, msg, changed=True)


def _survivors(selection: Selection) -> list[dict[str, Any]]:
    assert selection.scan is not None
    stopper = Stopper(selection.what, selection.scan, Options(), unit=selection.unit)
    stopper.look()
    return [member.as_result() for member in stopper.members.values() if member.standing != "foreign"]


def _watch(unit: str, before: str, deadline: Deadline) -> UnitState:
    """The unit's state once it has run for a moment, has ended, or the time is over."""
    running_since: float | None = None
    while True:
        state = _systemd.show(unit)
        begun = state.invocation_id not in ("", before) or state.active_state in ("active", "activating")
        if begun and state.active_state in ("active", "activating", "reloading") and state.sub_state != "auto-restart":
            if running_since is None:
                running_since = deadline.elapsed
            if deadline.elapsed - running_since >= SETTLE:
                return state
        elif state.at_rest or state.sub_state.startswith("auto-restart"):
            return state
        if deadline.expired:
            return state
        deadline.sleep(POLL)


def _judge(state: UnitState, before: str, timeout: float) -> tuple[str, str]:
    if state.sub_state.startswith("auto-restart"):
        return "failed", "ended at once and is about to be restarted by systemd: %s" % _ending(state)
    if state.active_state in ("active", "activating", "reloading"):
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
