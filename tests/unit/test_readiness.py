# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a wait makes of a unit and of what moves."""

from __future__ import annotations

import itertools
import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http
from ansible_collections.gpuops.serving.plugins.module_utils._errors import MissingLibrary, ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener, LogLine, Options
from service import ACTIVE, Service, changed, loading


def test_a_healthy_service_is_ready_at_once() -> None:
    found = Service().wait(model="m")
    assert (found.verdict, found.wait.reached, found.wait.restarts) == ("ready", "generation", 0)
    assert found.seconds < 1
    assert [(tier.name, tier.reached) for tier in found.wait.tiers] == [
        (name, True) for name in ("unit", "listener", "health", "model", "generation")
    ]


@pytest.mark.parametrize("tier", ["listener", "generation"])
def test_a_unit_that_somebody_stops_at_that_moment_is_not_ready(tier: str) -> None:
    """It answers while it winds up, so what was seen proves nothing any more."""
    service = Service()
    asked: t.List[bool] = []

    def unit(now: bool = False) -> UnitState:
        asked.append(now)
        stopping = changed(active_state="deactivating", sub_state="stop-sigterm")
        gone = changed(active_state="inactive", sub_state="dead", main_pid=0)
        return ACTIVE if True not in asked else stopping if service.clock.now < 20 else gone

    service.unit = unit  # type: ignore[method-assign]
    found = service.wait(tier=tier)
    assert found.verdict == "dead"
    assert 20 <= found.seconds < 22
    assert asked[:2] == [False, True]


def test_a_lower_tier_asks_for_no_token() -> None:
    service = Service()
    assert service.wait(tier="health").wait.reached == "health"
    assert service.asked == []


def test_a_silent_log_and_a_busy_processor_is_progress_until_the_deadline() -> None:
    service = Service()
    loading(service, 400)
    service.cpu = lambda now: now
    assert service.wait(timeout=600, stall=30).verdict == "ready"
    service.clock.now = 0
    assert service.wait(timeout=300, stall=30).verdict == "progressing"


def test_nothing_that_moves_is_stalled_within_the_stall_timeout() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now * 0.01  # what idling costs
    found = service.wait(timeout=600, stall=30)
    assert found.verdict == "stalled"
    assert 30 <= found.seconds <= 32
    assert found.msg == 'for 30 s nothing moved: the tier "listener" is not reached: nothing listens on the port'


def test_a_line_that_repeats_with_another_time_is_no_movement() -> None:
    service = Service()
    loading(service, 9999)
    service.lines = lambda now: ["12:00:%02d Waiting for shard to be ready... rank=0 [%d]" % (now % 60, now)]
    found = service.wait(timeout=600, stall=30)
    assert found.verdict == "stalled"
    assert found.seconds <= 32


def test_a_growing_percentage_is_progress_and_is_shown() -> None:
    service = Service()
    loading(service, 9999)
    service.lines = lambda now: ["Loading safetensors checkpoint shards: %d%% Completed | %d/50" % (now / 5, now / 10)]
    found = service.wait(timeout=300, stall=30)
    assert found.verdict == "progressing"
    assert (found.wait.progress.percent, found.wait.progress.phase) == (60.0, "loading_weights")


@pytest.mark.parametrize(("tier", "phase"), [("generation", "started"), ("model", "loading_weights")])
def test_a_token_tells_more_than_the_last_line_of_the_log(tier: str, phase: str) -> None:
    service = Service()
    loading(service, 30)
    service.lines = lambda now: ["Loading safetensors checkpoint shards: %d%% Completed" % now]
    found = service.wait(tier=tier)
    answer = found.wait.as_dict(found.ending)
    assert (answer["verdict"], answer["phase"]) == ("ready", phase)


def test_a_percentage_that_stands_still_is_no_movement() -> None:
    service = Service()
    loading(service, 9999)
    service.lines = lambda now: ["Loading safetensors checkpoint shards: 40% Completed | 20/50"]
    assert service.wait(timeout=300, stall=30).verdict == "stalled"


@pytest.mark.parametrize("sign", ["read", "memory"])
def test_reading_and_growing_are_movement(sign: str) -> None:
    service = Service()
    loading(service, 200)
    setattr(service, sign, lambda now: int(now) * (20 << 20))
    assert service.wait(timeout=600, stall=30).verdict == "ready"


def test_movement_renews_the_window_and_never_the_deadline() -> None:
    service = Service()
    loading(service, 640)
    service.cpu = lambda now: now
    found = service.wait(timeout=600, stall=30)
    assert found.verdict == "progressing"
    assert 600 <= found.seconds <= 601


def test_a_restart_loop_is_reported_after_the_limit_with_its_line() -> None:
    service = Service()
    loading(service, 9999)

    def state(now: float) -> UnitState:
        lives = int(now // 4)
        if now % 4 < 2:
            return changed(n_restarts=lives, invocation_id="i%d" % lives, main_pid=10 + lives)
        return changed(
            active_state="activating",
            sub_state="auto-restart",
            n_restarts=lives,
            invocation_id="i%d" % lives,
            main_pid=0,
        )

    service.state = state
    service.lines = lambda now: ["torch.OutOfMemoryError: CUDA out of memory."] if 1.5 < now % 4 < 3 else []
    found = service.wait(timeout=600, max_restarts=3)
    assert found.verdict == "restart_loop"
    assert found.seconds < 15
    assert found.wait.restarts == 3
    assert found.ending.cause == {"kind": "gpu_out_of_memory", "line": "torch.OutOfMemoryError: CUDA out of memory."}
    assert found.msg == 'the unit "x.service" was restarted 3 times: torch.OutOfMemoryError: CUDA out of memory.'


def test_a_restart_gives_a_new_grace_and_keeps_the_count() -> None:
    service = Service()
    loading(service, 50)
    service.state = lambda now: changed(n_restarts=int(now >= 25), invocation_id="i%d" % (now >= 25))
    service.lines = lambda now: ["only line"] if now < 1 or 25 <= now < 26.5 else []
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.wait.restarts) == ("ready", 1)


def test_a_restart_by_hand_counts_too() -> None:
    service = Service()
    loading(service, 20)
    service.state = lambda now: changed(invocation_id="i%d" % (now >= 10))
    assert service.wait().wait.restarts == 1


@pytest.mark.parametrize(
    ("fields", "msg"),
    [
        (
            {"active_state": "failed", "result": "exit-code", "exec_main_code": 1, "exec_main_status": 3},
            'the unit "x.service" failed: its main process exited with status 3',
        ),
        (
            {"active_state": "failed", "result": "oom-kill"},
            'the unit "x.service" failed: the kernel ended it because the host ran out of memory',
        ),
        (
            {"active_state": "failed", "result": "signal", "exec_main_code": 2, "exec_main_status": 9},
            'the unit "x.service" failed: its main process was killed by signal 9',
        ),
        (
            {"active_state": "failed", "result": "start-limit-hit", "n_restarts": 5},
            'the unit "x.service" failed, and systemd gave up after 5 restarts: systemd says start-limit-hit',
        ),
        ({"active_state": "inactive"}, 'the unit "x.service" is inactive, and nothing is about to start it'),
        (
            {"active_state": "inactive", "load_state": "masked"},
            'the unit "x.service" is inactive and masked, and nothing is about to start it',
        ),
        (
            {"active_state": "inactive", "load_state": "not-found"},
            'the unit "x.service" does not exist on this host',
        ),
    ],
)
def test_a_dead_unit_is_reported_at_once(fields: t.Dict[str, t.Any], msg: str) -> None:
    service = Service()
    service.state = lambda now: changed(main_pid=0, **fields)
    found = service.wait()
    assert (found.verdict, found.msg) == ("dead", msg)
    assert found.seconds < 1


@pytest.mark.parametrize(
    ("age", "seconds"),
    [
        (0.7, 70.0),  # its own time counts, not that of the look that finds it
        (None, 70.7),  # of a file nobody knows it
        (30.0, 70.7),  # a journal that was stuck: what comes late is news
        (-5.0, 70.7),  # no clock of this host
    ],
)
def test_a_line_moves_at_the_moment_it_was_written(age: t.Optional[float], seconds: float) -> None:
    service = Service()
    loading(service, 9999)
    told: t.List[float] = []

    def log(_state: UnitState) -> t.List[LogLine]:
        now = service.clock.now
        if now < 10.7 or told:
            return []
        told.append(now)
        return [LogLine("Capturing CUDA graphs", True, None if age is None else now - age)]

    service.log = log  # type: ignore[method-assign]
    found = service.wait(timeout=600, stall=60, interval=1.0)
    assert (found.verdict, told) == ("stalled", [pytest.approx(10.7, abs=0.6)])
    assert found.seconds - told[0] == pytest.approx(seconds - 10.7, abs=0.01)


def test_the_last_word_is_that_of_the_service_and_not_of_systemd() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    failed = changed(active_state="failed", result="exit-code", exec_main_code=1, exec_main_status=3, main_pid=0)
    service.state = lambda now: ACTIVE if now < 5 else failed
    service.log = lambda state: [  # type: ignore[method-assign]
        *([LogLine("the tokenizer is sulking", True), LogLine("  ", True)] if 4 < service.clock.now < 5.1 else []),
        LogLine("Failed to start x.service.", False),
    ]
    found = service.wait()
    assert found.ending.cause == {"kind": "exited", "line": "the tokenizer is sulking"}
    assert found.wait.as_dict(found.ending)["log_tail"][-1] == "Failed to start x.service."


WORD = "boom: the flux capacitor is empty"


def looping(service: Service, pause: float, **ended: t.Any) -> None:
    """It lives for two seconds; then systemd waits, and begins the next life."""
    loading(service, 9999)
    service.cpu = lambda now: now

    def state(now: float) -> UnitState:
        lives, age = divmod(now, 2 + pause)
        life = {"n_restarts": int(lives), "invocation_id": "i%d" % lives}
        if age < 2:
            return changed(main_pid=10 + int(lives), **life)
        return changed(active_state="activating", sub_state="auto-restart", main_pid=0, **life, **ended)

    service.state = state


EXITED = ("x.service: Main process exited, code=exited, status=1/FAILURE", "x.service: Failed with result 'exit-code'.")


@pytest.mark.parametrize(
    ("pause", "ended"),
    [
        # Seen between two lives, or only in what systemd wrote: a look comes too late for the end itself.
        (2.0, {"result": "exit-code", "exec_main_code": 1, "exec_main_status": 1}),
        (0.0, {}),
    ],
)
@pytest.mark.parametrize("word", [WORD, ""])
def test_a_loop_is_told_by_how_its_lives_end(pause: float, ended: t.Dict[str, t.Any], word: str) -> None:
    service = Service()
    looping(service, pause, **ended)
    told = -1

    def log(state: UnitState) -> t.List[LogLine]:
        nonlocal told
        over = int((service.clock.now - (2 if pause else 0)) // (2 + pause)) - (0 if pause else 1)
        found = [LogLine(word, True), *(LogLine(line, False) for line in EXITED)] if over > told else []
        told = max(told, over)
        return found

    service.log = log  # type: ignore[method-assign]
    found = service.wait(timeout=600, max_restarts=3)
    text = "its main process exited with status 1"
    assert (found.verdict, found.ending.cause) == ("restart_loop", {"kind": "exited", "line": word or text})
    last = ', with the last word "%s"' % word if word else ""
    assert found.msg == 'the unit "x.service" was restarted 3 times: ' + text + last


def test_a_loop_of_lives_that_end_without_an_error_says_so() -> None:
    service = Service()
    looping(service, 2.0, result="success", exec_main_code=1, exec_main_status=0)
    found = service.wait(timeout=600, max_restarts=2)
    text = "its main process ended with status 0"
    assert (found.ending.cause, found.msg) == (
        {"kind": "exited", "line": text},
        'the unit "x.service" was restarted 2 times: ' + text,
    )


def test_the_word_of_one_life_is_not_told_of_the_next() -> None:
    service = Service()
    looping(service, 2.0, result="exit-code", exec_main_code=1, exec_main_status=1)
    service.lines = lambda now: [WORD] if now < 1 else []
    found = service.wait(timeout=600, max_restarts=2)
    assert found.ending.cause == {"kind": "exited", "line": "its main process exited with status 1"}


def test_a_telling_line_of_an_earlier_life_stays_the_cause_of_a_loop() -> None:
    service = Service()
    looping(service, 2.0, result="exit-code", exec_main_code=1, exec_main_status=1)
    line = "torch.OutOfMemoryError: CUDA out of memory."
    service.lines = lambda now: [line] if now < 1 else []
    assert service.wait(timeout=600, max_restarts=3).ending.cause == {"kind": "gpu_out_of_memory", "line": line}


def test_a_restart_by_hand_is_no_crash() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    service.lines = lambda now: ["all is well"] if now < 1 else []
    service.state = lambda now: changed(invocation_id="i%d" % (now >= 10))
    assert service.wait(timeout=30).ending.cause is None


def test_a_wait_that_ends_in_a_new_life_tells_what_ended_the_last_one() -> None:
    service = Service()
    looping(service, 2.0, result="exit-code", exec_main_code=1, exec_main_status=7)
    for seconds in (3.5, 5.0):  # between two lives, and in the next
        service.clock.now = 0.0
        found = service.wait(timeout=seconds)
        assert found.verdict == "progressing"
        assert found.ending.cause == {"kind": "exited", "line": "its main process exited with status 7"}


VAGUE = "WARNING: permission denied: /root/.cache"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (
            {"result": "oom-kill", "exec_main_code": 2, "exec_main_status": 9},
            "host_out_of_memory",
            "the kernel ended it because the host ran out of memory",
        ),
        (
            {"result": "timeout", "exec_main_code": 2, "exec_main_status": 15},
            "timeout",
            "a time limit of the unit was over (TimeoutStartSec=, TimeoutStopSec= or RuntimeMaxSec=), "
            "so systemd ended it",
        ),
        (
            {"result": "timeout", "exec_main_code": 1, "exec_main_status": 0},
            "timeout",
            "a time limit of the unit was over (TimeoutStartSec=, TimeoutStopSec= or RuntimeMaxSec=), "
            "so systemd ended it",
        ),
        (
            {"result": "watchdog", "exec_main_code": 2, "exec_main_status": 6},
            "watchdog",
            "it gave no sign of life for WatchdogSec=, so systemd ended it",
        ),
        ({"result": "resources"}, "bad_unit", "systemd could not run its command"),
    ],
)
@pytest.mark.parametrize("loops", [False, True])
def test_what_systemd_decided_is_not_hidden_by_a_vague_line(
    fields: t.Dict[str, t.Any], kind: str, text: str, loops: bool
) -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    if loops:
        looping(service, 2.0, **fields)
    else:
        service.state = lambda now: ACTIVE if now < 5 else changed(active_state="failed", main_pid=0, **fields)
    service.lines = lambda now: [VAGUE] if now < 1 else []
    found = service.wait(max_restarts=1)
    assert found.ending.cause == {"kind": kind, "line": text}
    assert found.msg == 'the unit "x.service" %s: %s' % ("was restarted once" if loops else "failed", text)
    # What tells more stays.
    service.clock.now = 0.0
    telling = "torch.OutOfMemoryError: CUDA out of memory."
    service.lines = lambda now: [telling] if now < 1 else []
    if kind in ("timeout", "watchdog"):
        assert service.wait(max_restarts=1).ending.cause == {"kind": "gpu_out_of_memory", "line": telling}


@pytest.mark.parametrize("during", [True, False])
def test_a_unit_that_ended_without_an_error_says_so_with_its_last_word(during: bool) -> None:
    """systemd may have forgotten it by then, so that its state tells nothing."""
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    gone = changed(active_state="inactive", sub_state="dead", main_pid=0, invocation_id="")
    service.state = lambda now: ACTIVE if during and now < 5 else gone
    told = [("Started x.service.", False), ("all done", True), ("x.service: Deactivated successfully.", False)]
    lines = [LogLine(*line) for line in told]
    service.log = lambda state: lines if state.active_state == "inactive" else []  # type: ignore[method-assign]
    found = service.wait()
    assert (found.verdict, found.ending.cause) == ("dead", {"kind": "exited", "line": "all done"})
    text = 'the unit "x.service" is inactive, and nothing is about to start it: it ended without an error'
    assert found.msg == text
    assert "all done" in found.wait.as_dict(found.ending)["log_tail"]


def test_a_unit_that_was_stopped_before_has_no_cause() -> None:
    service = Service()
    service.state = lambda now: changed(active_state="inactive", sub_state="dead", main_pid=0, invocation_id="")
    service.log = lambda state: [  # type: ignore[method-assign]
        LogLine(VAGUE, True),
        LogLine("Stopping x.service...", False),
        LogLine("x.service: Succeeded.", False),
    ]
    found = service.wait()
    assert (found.ending.cause, found.msg) == (
        None,
        'the unit "x.service" is inactive, and nothing is about to start it',
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"load_state": "bad-setting", "raw": {"LoadError": 'org.x.Bad "Unit x.service has a bad setting."'}},
            "systemd cannot load it: Unit x.service has a bad setting",
        ),
        (
            {"raw": {"ConditionResult": "no", "ConditionTimestampMonotonic": "7"}},
            "systemd skipped its start: a condition of the unit is not met",
        ),
    ],
)
def test_a_unit_that_systemd_did_not_start_says_why(fields: t.Dict[str, t.Any], text: str) -> None:
    service = Service()
    service.state = lambda now: changed(active_state="inactive", main_pid=0, invocation_id="", **fields)
    found = service.wait()
    assert (found.verdict, found.msg) == (
        "dead",
        'the unit "x.service" is inactive, and nothing is about to start it: ' + text,
    )
    assert found.ending.cause["kind"] in ("bad_unit", "condition")


def socket_started(service: Service) -> t.List[float]:
    """It is at rest until the first connection, and loads then."""
    began: t.List[float] = []
    resting = changed(active_state="inactive", sub_state="dead", main_pid=0, invocation_id="", awaited="x.socket")
    service.state = lambda now: ACTIVE if began else resting
    service.port = lambda now: Listener("forwarder")
    service.health = lambda now: (
        _http.Answer("u", status=200) if began and now >= began[0] + 20 else _http.Answer("u", "timeout", error="late")
    )
    service.cpu = lambda now: now
    knock = service.knock
    service.knock = lambda: began.append(service.clock.now) or knock()  # type: ignore[func-returns-value,method-assign]
    return began


def test_a_unit_that_its_socket_starts_is_not_dead() -> None:
    service = Service()
    began = socket_started(service)
    assert (service.wait().verdict, began[0] < 1) == ("ready", True)


def test_one_look_does_not_start_a_unit_by_its_socket() -> None:
    service = Service()
    began = socket_started(service)
    ending = Wait(service, _engines.PROFILES["vllm"], Options(timeout=100), service.clock).run(once=True)
    assert ending is not None and (ending.verdict, began) == ("progressing", [])
    assert ending.msg == (
        'the unit "x.service" is inactive: the first connection to "x.socket" starts it, and this look makes none'
    )


def test_a_unit_that_is_about_to_be_started_is_waited_for() -> None:
    service = Service()
    service.state = lambda now: ACTIVE if now > 5 else changed(active_state="inactive", job=77, main_pid=0)
    assert service.wait().verdict == "ready"


def test_the_main_process_dies_in_the_middle_of_a_generation() -> None:
    service = Service()
    service.state = lambda now: ACTIVE if now < 0.1 else changed(active_state="failed", result="signal", main_pid=0)
    assert service.wait().verdict == "dead"


def test_without_a_unit_only_the_deadline_ends_the_wait() -> None:
    service = Service()
    service.state = lambda now: None
    loading(service, 500)
    assert service.wait(timeout=600, stall=30).verdict == "ready"
    service.clock.now = 0
    found = service.wait(timeout=300, stall=30)
    # Refused connections do not tell a server that has died from one that still loads.
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(300, abs=2))
    assert found.msg == (
        "not ready after 300 s, and without a unit it cannot be told whether it moves: "
        'the tier "health" is not reached: connection refused'
    )
    assert [tier.reached for tier in found.wait.tiers[:2]] == [None, None]


def test_one_look_does_not_wait() -> None:
    service = Service()
    loading(service, 10)
    ending = Wait(service, _engines.PROFILES["vllm"], Options(timeout=100), service.clock).run(once=True)
    assert (ending.verdict, service.clock.now) == ("progressing", 0.0)


@pytest.mark.parametrize("name", ["timeout", "stall_timeout", "interval", "generation_timeout"])
def test_no_time_at_all_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Wait(Service(), _engines.PROFILES["vllm"], Options(**{name: 0}))  # type: ignore[arg-type]
    assert caught.value.message == '"%s" must be more than 0, not 0' % name


def test_a_failed_unit_that_is_about_to_be_started_is_waited_for() -> None:
    service = Service()
    service.state = lambda now: ACTIVE if now > 5 else changed(active_state="failed", job=77, main_pid=0)
    assert service.wait().verdict == "ready"


def test_a_restart_that_shows_in_two_steps_counts_once() -> None:
    service = Service()
    loading(service, 60)
    service.cpu = lambda now: now
    service.state = lambda now: changed(n_restarts=int(now >= 10), invocation_id="i%d" % (now >= 13))
    assert service.wait(max_restarts=2).wait.restarts == 1
    # Several between two looks are all counted.
    service.clock.now = 0
    service.state = lambda now: changed(n_restarts=3 * int(now >= 10), invocation_id="i%d" % (now >= 13))
    assert service.wait(max_restarts=4).wait.restarts == 3


def test_a_unit_between_two_lives_is_not_stalled() -> None:
    service = Service()
    loading(service, 60)
    looks: t.List[float] = []

    def state(now: float) -> UnitState:
        looks.append(now)
        if 5 <= now < 50:
            return changed(active_state="activating", sub_state="auto-restart", main_pid=0, invocation_id="i0")
        return changed(n_restarts=int(now >= 50), invocation_id="i%d" % (now >= 50))

    service.state = state
    found = service.wait(timeout=600, stall=20)
    assert (found.verdict, found.wait.restarts) == ("ready", 1)
    assert len(looks) < 100
    service.clock.now = 0
    found = service.wait(timeout=45, stall=20)
    assert (found.verdict, found.seconds) == ("progressing", pytest.approx(45, abs=0.01))
    assert found.msg.startswith("not ready after 45 s, and systemd is about to start the unit again: ")


def test_a_wait_in_which_nothing_ever_moved_is_stalled_however_short() -> None:
    service = Service()
    loading(service, 9999)
    found = service.wait(timeout=60, stall=300)
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(60, abs=0.01))
    assert found.msg == (
        'not ready after 60 s, and nothing moved: the tier "listener" is not reached: nothing listens on the port'
    )
    service.clock.now = 0
    service.cpu = lambda now: min(now, 20.0)
    assert service.wait(timeout=60, stall=300).msg.startswith("not ready after 60 s, but something moved 40 s ago: ")


def test_one_look_says_nothing_of_movement() -> None:
    service = Service()
    loading(service, 10)
    ending = Wait(service, _engines.PROFILES["vllm"], Options(timeout=100), service.clock).run(once=True)
    assert ending is not None
    assert ending.msg == ('not ready at this moment: the tier "listener" is not reached: nothing listens on the port')


def unanswered(service: Service, since: float, until: float, error: Exception, takes: float = 10.0) -> None:
    """Looks at the unit fail for a while, each after some seconds."""
    state = service.state

    def unit(now: float) -> t.Optional[UnitState]:
        if since <= now < until:
            service.clock.sleep(takes)
            raise error
        return state(now)

    service.state = unit


ERRORS = (ServingError("systemd did not answer"), OSError(11, "Resource temporarily unavailable"))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("takes", [0.0, 10.0])
def test_a_look_without_an_answer_does_not_end_a_wait(error: Exception, takes: float) -> None:
    service = Service()
    loading(service, 100)
    service.cpu = lambda now: now
    unanswered(service, 20, 65, error, takes)
    found = service.wait(timeout=600, stall=30)
    assert found.verdict == "ready"
    assert service.warnings == [
        "the service could not be looked at for a while, and was waited for all the same: %s" % error
    ]


@pytest.mark.parametrize("what", ["activity", "log", "listener"])
def test_no_part_of_a_look_ends_a_wait_at_once(what: str) -> None:
    service = Service()
    loading(service, 100)
    service.cpu = lambda now: now
    original = getattr(service, what)

    def part(state: UnitState) -> t.Any:
        if 20 <= service.clock.now < 50 or 100 <= service.clock.now < 110:
            raise ERRORS[1]
        return original(state)

    setattr(service, what, part)
    assert service.wait(timeout=600, stall=60).verdict == "ready"
    assert len(service.warnings) == 1


def test_looks_without_an_answer_end_a_wait_when_they_last() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    unanswered(service, 20, 9999, ERRORS[0])
    with pytest.raises(ServingError) as caught:
        service.wait(timeout=600, stall=30)
    assert caught.value.message == "systemd did not answer"
    assert 80 <= service.clock.now <= 95


def test_looks_without_an_answer_do_not_outlast_the_deadline() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    unanswered(service, 20, 9999, ERRORS[0], takes=0.0)
    found = service.wait(timeout=50, stall=50)
    assert (found.verdict, found.seconds) == ("progressing", pytest.approx(50, abs=0.01))


@pytest.mark.parametrize("tier", ["unit", "generation"])
@pytest.mark.parametrize("since", [0.5, 20.0, 45.0, 49.9])
def test_a_systemd_that_hangs_does_not_hold_up_the_end(since: float, tier: str) -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now

    def unit(now: bool = False) -> UnitState:
        if service.clock.now < since:
            return changed(active_state="activating", sub_state="start-pre")
        limit = service.patience(10.0)
        service.clock.sleep(limit)
        raise ServingError("no answer within %g s" % limit)

    service.unit = unit  # type: ignore[method-assign]
    found = service.wait(timeout=50, stall=50, tier=tier)
    assert found.verdict == "progressing"
    assert 50 <= found.seconds <= 51


def test_a_token_does_not_count_while_nobody_says_that_the_unit_still_runs() -> None:
    service = Service()
    loading(service, 20)

    def unit(now: bool = False) -> UnitState:
        if now:
            service.clock.sleep(service.patience(10.0))
            raise ServingError("no answer")
        return ACTIVE

    service.unit = unit  # type: ignore[method-assign]
    service.cpu = lambda now: now
    found = service.wait(timeout=50)
    assert (found.verdict, found.seconds <= 51) == ("progressing", True)
    assert found.msg.endswith(": every tier is reached, but not that the unit still runs")


@pytest.mark.parametrize("mistake", [UsageError("no such thing"), MissingLibrary("requests is not there")])
def test_the_first_look_and_what_will_not_mend_itself_are_told_at_once(mistake: ServingError) -> None:
    service = Service()
    unanswered(service, 0, 9999, ERRORS[0], takes=0.0)
    with pytest.raises(ServingError):
        service.wait()
    assert service.clock.now < 0.1
    service = Service()
    loading(service, 9999)
    unanswered(service, 20, 9999, mistake, takes=0.0)
    with pytest.raises(type(mistake)):
        service.wait()
    assert service.clock.now < 22


def test_what_the_caller_raises_ends_a_wait_at_once() -> None:
    service = Service()
    loading(service, 9999)
    service.token = lambda now: Side("wedged", error="no answer")

    def tick() -> None:
        if service.clock.now > 20:
            raise ServingError("nobody waits any more")

    for ready_at in (9999, 0):
        service.clock.now = 0
        loading(service, ready_at)
        wait = Wait(service, _engines.PROFILES["vllm"], Options(timeout=100, stall_timeout=90), service.clock)
        with pytest.raises(ServingError):
            wait.run(tick)
        assert service.clock.now < 23


def since(moment: float, **fields: t.Any) -> UnitState:
    """A unit whose main process was started at a moment of the clock."""
    return changed(raw={"ExecMainStartTimestampMonotonic": "%d" % (moment * 1e6)}, **fields)


@pytest.mark.parametrize("interval", [0.3, 1.0, 30.0])
@pytest.mark.parametrize(
    ("began", "ready"), [(100.0, 103.0), (99.0, 102.0), (98.3, 101.3), (97.0, 100.0), (5.0, 100.0)]
)
def test_the_unit_is_reached_when_its_main_process_has_lived_for_a_while(
    began: float, ready: float, interval: float
) -> None:
    service = Service()
    service.clock.now = 100.0
    service.state = lambda now: since(began)
    found = service.wait(tier="unit", interval=interval)
    assert (found.verdict, found.seconds) == ("ready", pytest.approx(ready, abs=0.002))
    (tier,) = found.wait.tiers
    assert (tier.reached, tier.at) == (True, pytest.approx(ready - 100.0, abs=0.002))
    assert tier.detail == "active (running), main process 10"


@pytest.mark.parametrize(
    "fields",
    [
        {"active_state": "activating", "sub_state": "start-post"},
        {"active_state": "reloading", "sub_state": "reload"},
    ],
)
def test_a_main_process_that_runs_counts_whatever_the_unit_is_called(fields: t.Dict[str, t.Any]) -> None:
    service = Service()
    service.clock.now = 100.0
    service.state = lambda now: since(100.0, **fields)
    assert service.wait(tier="unit").seconds == pytest.approx(103.0, abs=0.002)


def test_a_unit_without_a_main_process_is_reached_when_it_is_active() -> None:
    service = Service()
    service.state = lambda now: changed(sub_state="exited", main_pid=0)
    assert service.wait(tier="unit").seconds < 0.1


def test_a_unit_that_is_active_between_one_failure_and_the_next_is_never_reached() -> None:
    """It exits two seconds after each start: a look at the word "active" alone would call it well."""
    service = Service()
    service.clock.now = 100.0

    def state(now: float) -> UnitState:
        lives = int((now - 100) // 4)
        if now % 4 < 2:
            return since(100.0 + 4 * lives, n_restarts=lives, invocation_id="i%d" % lives, main_pid=10 + lives)
        return changed(
            active_state="activating",
            sub_state="auto-restart",
            n_restarts=lives,
            invocation_id="i%d" % lives,
            main_pid=0,
        )

    service.state = state
    found = service.wait(tier="unit", max_restarts=3)
    assert (found.verdict, found.wait.reached) == ("restart_loop", "")


def test_a_unit_that_is_not_stable_yet_says_so() -> None:
    service = Service()
    service.clock.now = 100.0
    service.state = lambda now: since(100.0)
    found = service.wait(tier="unit", timeout=2)
    assert (found.verdict, found.seconds) == ("stalled", 102.0)
    assert found.wait.tiers[0].detail == "active (running), main process 10 for 2.0 s, and not yet stable"


@pytest.mark.parametrize(("tier", "ready"), [("generation", 101.1), ("model", 103.0), ("listener", 103.0)])
def test_a_token_proves_more_than_the_age_of_the_main_process(tier: str, ready: float) -> None:
    service = Service()
    service.clock.now = 100.0
    loading(service, 101.0)
    service.state = lambda now: since(100.0)
    found = service.wait(tier=tier, interval=30.0)
    assert (found.verdict, found.seconds) == ("ready", pytest.approx(ready, abs=0.15))
    assert [one.reached for one in found.wait.tiers] == [True] * len(found.wait.tiers)
    # What is above the unit is not looked at any later than without that.
    assert found.wait.tiers[1].at == pytest.approx(1.0, abs=0.15)


def test_to_go_on_living_is_no_movement() -> None:
    service = Service()
    service.clock.now = 100.0
    loading(service, 9999)
    service.state = lambda now: since(99.0)
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(130.0, abs=0.1))
    assert (found.wait.reached, found.wait.live()["missing"]) == ("unit", "listener")


def young(service: Service) -> None:
    loading(service, 100)
    service.cpu = lambda now: now
    service.state = lambda now: since(0.5 if now < 50 else 50.0, n_restarts=int(now >= 50))


UNCOUNTED = 'what the unit "x.service" receives from the network is no sign of movement, because it is not counted: '


@pytest.mark.parametrize(
    ("network", "accounting", "warnings"),
    [
        ({}, "no", [UNCOUNTED + 'set "IPAccounting=yes" in it']),
        ({}, "yes", [UNCOUNTED + "systemd cannot on this host"]),
        ({"unit a": 0}, "yes", []),
        # A network of its own is counted without it.
        ({"network 7": 0}, "no", []),
    ],
)
def test_a_stalled_wait_says_that_the_network_was_not_counted(
    network: t.Dict[str, int], accounting: str, warnings: t.List[str]
) -> None:
    service = Service()
    loading(service, 9999)
    service.network = network
    service.state = lambda now: changed(raw={"IPAccounting": accounting})
    assert service.wait(stall=30).verdict == "stalled"
    assert service.warnings == warnings


def test_only_a_stalled_wait_says_that_the_network_was_not_counted() -> None:
    service = Service()
    service.network = {}
    loading(service, 20)
    assert (service.wait().verdict, service.warnings) == ("ready", [])
    loading(service, 9999)
    service.cpu = lambda now: now
    assert (service.wait(timeout=40).verdict, service.warnings) == ("progressing", [])
    # Without a unit nothing at all is seen to move, which the sentence says.
    service.state = lambda now: None
    assert (service.wait(timeout=40, stall=40).verdict, service.warnings) == ("stalled", [])


def blind_for_a_while(service: Service) -> None:
    loading(service, 100)
    service.cpu = lambda now: now
    unanswered(service, 20, 65, ERRORS[0], 3.0)


def never_moving(service: Service) -> None:
    loading(service, 9999)


def between_lives(service: Service) -> None:
    loading(service, 9999)
    waiting = changed(active_state="activating", sub_state="auto-restart", main_pid=0)
    service.state = lambda now: waiting if 10 <= now < 130 else changed(n_restarts=int(now >= 130))


def failing_fast(service: Service) -> None:
    loading(service, 20)
    service.cpu = lambda now: now
    service.token = lambda now: Side("error_response", status=500, error="boom")


def restarting_in_two_steps(service: Service) -> None:
    loading(service, 9999)
    service.cpu = lambda now: now
    service.state = lambda now: changed(n_restarts=int(now // 40), invocation_id="i%d" % ((now - 3) // 40))


@pytest.mark.parametrize(
    "case", [young, blind_for_a_while, never_moving, between_lives, failing_fast, restarting_in_two_steps]
)
@pytest.mark.parametrize("every", [2, 7])
def test_another_process_goes_on_as_if_there_were_only_one(case: t.Callable[[Service], None], every: int) -> None:
    options = Options(timeout=150, stall_timeout=140)

    def answer(every: int) -> t.Tuple[t.Dict[str, t.Any], t.List[str], float, int]:
        service = Service()
        case(service)
        wait = Wait(service, _engines.PROFILES["vllm"], options, service.clock)
        for left in itertools.count():
            asks = itertools.count(1)
            ending = wait.run(leave=lambda asks=asks: next(asks) >= every)
            if ending is not None:
                return wait.as_dict(ending), service.warnings, service.clock.now, left
            saved = json.loads(json.dumps(wait.save()))
            wait = Wait(service, _engines.PROFILES["vllm"], options, service.clock, saved["start"])
            wait.restore(saved)
        raise AssertionError

    whole, parts = answer(10**9), answer(every)
    assert parts[:3] == whole[:3]
    assert (whole[3], parts[3] > 3) == (0, True)


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        (
            changed(active_state="failed", sub_state="failed", result="exit-code"),
            'the unit "x.service" failed: '
            "a command beside its main process (ExecStartPre=, ExecStartPost= or such) failed",
        ),
        (
            changed(active_state="inactive", sub_state="dead", main_pid=0),
            'the unit "x.service" is inactive, and nothing is about to start it',
        ),
        (changed(load_state="not-found", active_state="inactive"), 'the unit "x.service" does not exist on this host'),
    ],
)
def test_a_dead_unit_is_said_in_the_line_of_its_tier_too(state: UnitState, detail: str) -> None:
    service = Service()
    service.state = lambda now: state
    found = service.wait()
    assert (found.verdict, found.wait.tiers[0].detail) == ("dead", detail)


@pytest.mark.parametrize("lines", [[], ["Loading safetensors checkpoint shards: 98% Completed"]])
@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_service_that_generates_is_loaded_whatever_its_log_said_last(lines: t.List[str], seconds: float) -> None:
    service = Service()
    loading(service, seconds)
    service.lines = lambda now: lines
    found = service.wait()
    assert found.wait.as_dict(found.ending)["percent"] == 100.0
    # Without a token that is not proved.
    service.clock.now = 0
    found = service.wait(tier="model")
    assert found.wait.as_dict(found.ending)["percent"] == (98.0 if lines and seconds else None)
