# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a life ended, by states and lines as systemd 247, 252 and 257 gave them on lab hosts."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _causes, _ends
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState

State = t.Optional[t.Dict[str, t.Any]]
FAILED: t.Dict[str, t.Any] = {"load_state": "loaded", "active_state": "failed", "sub_state": "failed"}
WORD = "boom: the flux capacitor is empty"
START = "it was not up within TimeoutStartSec=, so systemd ended it"
STOP = "it did not stop within TimeoutStopSec=, so systemd killed it"


def end(state: State, *lines: str, word: str = WORD) -> t.Optional[_ends.End]:
    ends = _ends.Ends()
    ends.own(word)
    ends.own("   ")
    for line in lines:
        ends.systemd(line)
    again = _ends.Ends()
    again.restore(json.loads(json.dumps(ends.save())))
    found = again.of(None if state is None else UnitState("c.service", **state))
    if found is not None:
        assert found.kind in _ends.KINDS and found.kind in _causes.KINDS
        assert found.cause == {"kind": found.kind, "line": found.line}
    return found


def failed(result: str, code: int = 0, status: int = 0) -> t.Dict[str, t.Any]:
    return dict(FAILED, result=result, exec_main_code=code, exec_main_status=status)


@pytest.mark.parametrize(
    ("state", "lines", "kind", "text"),
    [
        # By the state of the life itself.
        (failed("exit-code", 1, 3), [], "exited", "its main process exited with status 3"),
        (failed("signal", 2, 9), [], "killed", "its main process was killed by signal 9"),
        (failed("core-dump", 3, 11), [], "killed", "its main process was killed by signal 11"),
        (failed("success", 1, 0), [], "exited", "its main process ended with status 0"),
        (failed("oom-kill", 2, 9), [], "host_out_of_memory", "the kernel ended it because the host ran out of memory"),
        (failed("timeout", 2, 15), ["c.service: start operation timed out. Terminating."], "timeout", START),
        (failed("timeout", 1, 0), ["c.service: start operation timed out. Terminating."], "timeout", START),
        (failed("timeout", 2, 15), ["c.service: start-pre operation timed out. Terminating."], "timeout", START),
        (
            failed("timeout", 2, 9),
            [
                "c.service: start operation timed out. Terminating.",
                "c.service: State 'stop-sigterm' timed out. Killing.",
            ],
            "timeout",
            START,
        ),
        (
            failed("timeout", 2, 9),
            ["Stopping c.service...", "c.service: State 'stop-sigterm' timed out. Killing."],
            "timeout",
            STOP,
        ),
        (failed("timeout", 2, 9), ["c.service: State 'final-sigterm' timed out. Killing."], "timeout", STOP),
        (
            failed("timeout", 2, 15),
            ["c.service: Service reached runtime time limit. Stopping."],
            "timeout",
            "it ran for as long as RuntimeMaxSec= allows, so systemd ended it",
        ),
        (
            failed("timeout", 2, 15),
            [],
            "timeout",
            "a time limit of the unit was over (TimeoutStartSec=, TimeoutStopSec= or RuntimeMaxSec=), "
            "so systemd ended it",
        ),
        (
            failed("watchdog", 2, 6),
            ["c.service: Watchdog timeout (limit 2s)!"],
            "watchdog",
            "it gave no sign of life for WatchdogSec=, so systemd ended it",
        ),
        (failed("protocol", 1, 0), [], "exited", "it ended before it told systemd that it is ready"),
        # A command beside the main process failed; for that the main process was ended, if there was one.
        (
            failed("exit-code"),
            ["c.service: Control process exited, code=exited, status=7/NOTRUNNING"],
            "exited",
            "a command beside its main process (ExecStartPre=, ExecStartPost= or such) failed: it exited with status 7",
        ),
        (
            failed("exit-code", 2, 15),
            ["c.service: Control process exited, code=exited, status=8/n/a"],
            "exited",
            "a command beside its main process (ExecStartPre=, ExecStartPost= or such) failed: it exited with status 8",
        ),
        (
            failed("exit-code", 2, 15),
            [],
            "exited",
            "a command beside its main process (ExecStartPre=, ExecStartPost= or such) failed",
        ),
        # Of a life that another has followed, by the journal alone.
        (
            None,
            [
                "c.service: Main process exited, code=exited, status=1/FAILURE",
                "c.service: Failed with result 'exit-code'.",
            ],
            "exited",
            "its main process exited with status 1",
        ),
        (
            None,
            ["c.service: Main process exited, code=killed, status=9/KILL", "c.service: Failed with result 'signal'."],
            "killed",
            "its main process was killed by signal 9",
        ),
        (
            None,
            ["c.service: Main process exited, code=dumped, status=6/ABRT", "c.service: Failed with result 'watchdog'."],
            "watchdog",
            "it gave no sign of life for WatchdogSec=, so systemd ended it",
        ),
        (
            None,
            [
                "c.service: A process of this unit has been killed by the OOM killer.",
                "c.service: Failed with result 'oom-kill'.",
            ],
            "host_out_of_memory",
            "the kernel ended it because the host ran out of memory",
        ),
        (None, ["c.service: Succeeded."], "exited", "it ended without an error"),
        # A start that was skipped before this life says nothing of it.
        (
            failed("exit-code", 1, 3),
            ["c.service skipped, unmet condition check ConditionPathExists=/x", "Starting c.service..."],
            "exited",
            "its main process exited with status 3",
        ),
        (None, ["c.service: Deactivated successfully."], "exited", "it ended without an error"),
        # What the state says of no life adds nothing.
        (
            {"load_state": "loaded", "result": "success"},
            ["c.service: Succeeded."],
            "exited",
            "it ended without an error",
        ),
    ],
)
def test_an_end_is_told_in_words(state: State, lines: t.List[str], kind: str, text: str) -> None:
    found = end(state, *lines)
    assert found is not None
    assert (found.kind, found.text) == (kind, text)
    assert found.line == (WORD if kind in ("exited", "killed") else text)
    silent = end(state, *lines, word="")
    assert silent is not None and (silent.kind, silent.line) == (kind, text)


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        ({"load_state": "loaded"}, []),
        (None, []),
        (None, ["Stopping c.service...", "c.service: Succeeded.", "Stopped c.service."]),
        (None, ["Stopping c.service - A model...", "c.service: Deactivated successfully."]),
        (failed("success", 1, 0), ["Stopping c.service..."]),
        (failed("start-limit-hit"), ["c.service: Start request repeated too quickly."]),
        (None, ["Started c.service.", "c.service: Scheduled restart job, restart counter is at 2."]),
    ],
)
def test_no_end_is_made_up(state: State, lines: t.List[str]) -> None:
    assert end(state, *lines) is None


@pytest.mark.parametrize(
    "line",
    [
        "Condition check resulted in c.service being skipped.",
        "c.service was skipped because of an unmet condition check (ConditionPathExists=/no/such/file).",
        "c.service skipped, unmet condition check ConditionPathExists=/no/such/file",
        "c.service: Starting requested but asserts failed.",
        "c.service: Skipped due to 'exec-condition'.",
    ],
)
def test_a_start_that_was_skipped_is_told_with_its_line(line: str) -> None:
    found = end({"load_state": "loaded"}, line, word="")
    assert found == ("condition", "systemd skipped its start: " + line, line)


@pytest.mark.parametrize(
    "raw",
    [
        {"ConditionResult": "no", "ConditionTimestampMonotonic": "5"},
        {"ConditionResult": "yes", "AssertResult": "no", "ConditionTimestampMonotonic": "5"},
    ],
)
def test_a_condition_that_is_not_met_needs_no_journal(raw: t.Dict[str, str]) -> None:
    text = "systemd skipped its start: a condition of the unit is not met"
    assert end({"load_state": "loaded", "raw": raw}, word="") == ("condition", text, text)
    never = dict(raw, ConditionTimestampMonotonic="0")
    assert end({"load_state": "loaded", "raw": never}, word="") is None


def test_a_unit_that_cannot_be_loaded_is_told_with_the_place() -> None:
    error = 'org.freedesktop.systemd1.BadUnitSetting "Unit c.service has a bad unit file setting."'
    state = {"load_state": "bad-setting", "raw": {"LoadError": error}}
    text = "systemd cannot load it: Unit c.service has a bad unit file setting"
    assert end(state, word="") == ("bad_unit", text, text)
    line = "/run/systemd/system/c.service:2: Neither a valid executable name nor an absolute path: notabsolute"
    found = end(state, line, "c.service: Unit configuration has fatal error, unit will not be started.", word="")
    assert found == ("bad_unit", "systemd cannot load it: " + line, line)
    line = "c.service: Service has no ExecStart=, ExecStop=, or SuccessAction=. Refusing."
    assert end(state, line, word="") == ("bad_unit", "systemd cannot load it: " + line, line)


@pytest.mark.parametrize("second", ["Failed to run 'start' task", "Failed to spawn 'start' task"])
def test_a_command_that_cannot_be_run_is_a_bad_unit(second: str) -> None:
    line = "c.service: Failed to load environment files: No such file or directory"
    tail = ["c.service: %s: No such file or directory" % second, "c.service: Failed with result 'resources'."]
    for state in (failed("resources"), None):
        assert end(state, line, *tail, word="") == ("bad_unit", "systemd could not run its command: " + line, line)


@pytest.mark.parametrize(
    ("status", "setting"), [(200, "WorkingDirectory="), (203, "ExecStart="), (217, "User="), (216, "Group=")]
)
def test_a_main_process_that_could_not_be_made_is_a_bad_unit(status: int, setting: str) -> None:
    text = "its main process could not be made, for %s: status %d" % (setting, status)
    assert end(failed("exit-code", 1, status), word="") == ("bad_unit", text, text)
    # An engine may end with any status; it has said something by then.
    found = end(failed("exit-code", 1, status))
    assert found is not None and (found.kind, found.line) == ("exited", WORD)


@pytest.mark.parametrize(
    "said",
    [
        "Failed at step EXEC spawning /opt/models/serve: No such file or directory",
        "Failed to locate executable /opt/models/serve: No such file or directory",
        "Unable to locate executable '/opt/models/serve': No such file or directory",
        "Failed to determine user credentials: No such process",
        "Changing to the requested working directory failed: No such file or directory",
        "Failed to set up mount namespacing: /opt/models: No such file or directory",
    ],
)
def test_what_the_child_of_systemd_says_of_its_failure_is_a_bad_unit(said: str) -> None:
    line = "c.service: " + said
    assert _causes.cause_of(None, line) == {"kind": "bad_unit", "line": line}
