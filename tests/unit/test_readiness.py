# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http, _ownership, _processes, _target
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock, Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._progress import (
    Activity,
    Progress,
    Usage,
    pattern_of,
    percent_in,
)
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Ending, Listener, Options, Wait
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState

ACTIVE = UnitState(
    name="x.service",
    load_state="loaded",
    active_state="active",
    sub_state="running",
    result="success",
    main_pid=10,
    invocation_id="a",
)


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


class Service:
    """A service whose every aspect is a function of the time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.state: t.Callable[[float], t.Optional[UnitState]] = lambda now: ACTIVE
        self.cpu: t.Callable[[float], float] = lambda now: 0.0
        self.read: t.Callable[[float], int] = lambda now: 0
        self.memory: t.Callable[[float], int] = lambda now: 0
        self.lines: t.Callable[[float], t.List[str]] = lambda now: []
        self.port: t.Callable[[float], Listener] = lambda now: Listener("owned")
        self.health: t.Callable[[float], _http.Answer] = lambda now: _http.Answer("u", status=200)
        self.models: t.Callable[[float], _http.Answer] = lambda now: listing("m")
        self.token: t.Callable[[float], Side] = lambda now: Side("ok", ttft=0.1)
        self.token_takes = 0.1
        self.asked: t.List[t.Optional[str]] = []

    def unit(self) -> t.Optional[UnitState]:
        return self.state(self.clock.now)

    def activity(self, state: UnitState) -> Activity:
        now = self.clock.now
        return {(10, 1): Usage(self.cpu(now), self.read(now), self.memory(now))}

    def log(self, state: UnitState) -> t.List[t.Tuple[str, bool]]:
        return [(line, True) for line in self.lines(self.clock.now)]

    def listener(self, state: UnitState) -> Listener:
        return self.port(self.clock.now)

    def get(self, path: str, timeout: float) -> _http.Answer:
        return (self.models if path == "/v1/models" else self.health)(self.clock.now)

    def generate(self, model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> Side:
        self.asked.append(model)
        side = self.token(self.clock.now)
        takes = timeout if side.verdict == "wedged" else self.token_takes
        while takes > 0:
            self.clock.sleep(min(1.0, takes))
            takes -= 1.0
            tick()
        return side

    def wait(self, engine: str = "vllm", timeout: float = 600, stall: float = 60, **options: t.Any) -> t.Any:
        deadline = Deadline(timeout, self.clock)
        progress = Progress(_engines.PROFILES[engine], stall, deadline)
        wait = Wait(self, _engines.PROFILES[engine], Options(**options), deadline, progress)
        ending = wait.run()
        assert isinstance(ending, Ending)
        return Result(ending, wait, self.clock.now)


class Result(t.NamedTuple):
    ending: Ending
    wait: Wait
    seconds: float

    @property
    def verdict(self) -> str:
        return self.ending.verdict

    @property
    def msg(self) -> str:
        return self.ending.msg


def listing(*names: str, owner: str = "vllm") -> _http.Answer:
    body = json.dumps({"data": [{"id": name, "owned_by": owner} for name in names]})
    return _http.Answer("u/v1/models", status=200, content_type="application/json", body=body)


def refused(now: float) -> _http.Answer:
    return _http.Answer("u", "refused", error="connection refused")


def loading(service: Service, seconds: float) -> None:
    """Nothing answers until the load is over."""
    service.port = lambda now: Listener("owned" if now >= seconds else "none")
    service.health = lambda now: _http.Answer("u", status=200) if now >= seconds else refused(now)


def changed(**fields: t.Any) -> UnitState:
    return dataclasses.replace(ACTIVE, **fields)


def test_a_healthy_service_is_ready_at_once() -> None:
    found = Service().wait(model="m")
    assert (found.verdict, found.wait.reached, found.wait.restarts) == ("ready", "generation", 0)
    assert found.seconds < 1
    assert [(tier.name, tier.reached) for tier in found.wait.tiers] == [
        (name, True) for name in ("unit", "listener", "health", "model", "generation")
    ]


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


def test_a_unit_that_is_about_to_be_started_is_waited_for() -> None:
    service = Service()
    service.state = lambda now: ACTIVE if now > 5 else changed(active_state="inactive", job=77, main_pid=0)
    assert service.wait().verdict == "ready"


def test_the_main_process_dies_in_the_middle_of_a_generation() -> None:
    service = Service()
    service.state = lambda now: ACTIVE if now < 0.1 else changed(active_state="failed", result="signal", main_pid=0)
    assert service.wait().verdict == "dead"


def test_another_process_on_the_port_is_the_wrong_server_when_seen_twice() -> None:
    service = Service()
    service.port = lambda now: Listener("foreign", '99 "open-webui" (unit none)')
    found = service.wait()
    assert (found.verdict, found.wait.reached) == ("wrong_server", "unit")
    assert found.msg == ("the port belongs to another process than the unit's: " + '99 "open-webui" (unit none)')
    # The last look at the old instance of a hand-over is normal.
    service.clock.now = 0
    service.port = lambda now: Listener("foreign" if now < 0.2 else "owned", "x")
    assert service.wait().verdict == "ready"


def test_a_page_is_the_wrong_server() -> None:
    service = Service()
    service.health = lambda now: _http.Answer("u/health", status=200, content_type="text/html")
    found = service.wait()
    assert (found.verdict, found.msg) == (
        "wrong_server",
        "u/health answers with an HTML page: it is another program",
    )


def test_address_translation_in_front_of_the_port_is_not_the_wrong_server() -> None:
    service = Service()
    service.port = lambda now: Listener("none")
    found = service.wait()
    assert found.verdict == "ready"
    assert found.wait.tiers[1].detail == "answers, although no process of this host listens"


def test_a_model_that_is_not_listed_is_never_ready() -> None:
    service = Service()
    found = service.wait(model="other")
    assert (found.verdict, found.msg) == ("wrong_server", 'the model "other" is not listed: there are "m"')
    assert service.asked == []
    # A server whose list grows is given its time.
    service.clock.now = 0
    service.models = lambda now: listing("a", "other") if now > 20 else listing("a")
    assert service.wait("openai", model="other").verdict == "ready"


def test_models_of_another_engine_are_the_wrong_server() -> None:
    service = Service()
    service.models = lambda now: listing("m", owner="open-webui")
    assert service.wait(model="m").msg == ('another server answers: its models belong to "open-webui", not to vLLM')


def test_a_generation_that_never_comes_is_wedged() -> None:
    service = Service()
    service.token = lambda now: Side("wedged", error="no answer within 60 s")
    found = service.wait(timeout=600, stall=120)
    assert (found.verdict, found.wait.reached) == ("wedged", "model")
    assert found.seconds < 130
    assert len(service.asked) <= 2


def test_a_generation_that_compiles_first_is_waited_for() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer") if now < 150 else Side("ok", ttft=1)
    assert service.wait(timeout=600, stall=120).verdict == "ready"


def test_a_wedge_that_burns_the_processor_is_wedged_at_the_deadline() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer within 60 s")
    assert service.wait(timeout=300, stall=120).verdict == "wedged"


def test_a_generation_that_fails_is_wedged_after_three() -> None:
    service = Service()
    service.token = lambda now: Side("error_response", status=500, error="status 500: boom")
    found = service.wait()
    assert (found.verdict, len(service.asked)) == ("wedged", 3)
    assert found.msg == "the engine lists its model, but it does not generate: status 500: boom"


def test_a_server_that_still_warms_up_is_not_wedged() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("error_response", status=503, error="busy") if now < 30 else Side("ok", ttft=1)
    assert service.wait().verdict == "ready"


@pytest.mark.parametrize("where", ["models", "token"])
def test_a_refused_key_is_reported_at_once(where: str) -> None:
    service = Service()
    service.models = lambda now: _http.Answer("u", status=401) if where == "models" else listing("m")
    service.token = lambda now: Side("auth_error", status=401, error="status 401")
    assert service.wait().verdict == "auth_error"


def test_without_a_unit_only_the_deadline_ends_the_wait() -> None:
    service = Service()
    service.state = lambda now: None
    loading(service, 500)
    assert service.wait(timeout=600, stall=30).verdict == "ready"
    service.clock.now = 0
    found = service.wait(timeout=300, stall=30)
    assert (found.verdict, found.seconds) == ("dead", pytest.approx(300, abs=2))
    assert [tier.reached for tier in found.wait.tiers[:2]] == [None, None]


def test_one_look_does_not_wait() -> None:
    service = Service()
    loading(service, 10)
    deadline = Deadline(100, service.clock)
    progress = Progress(_engines.PROFILES["vllm"], 30, deadline)
    ending = Wait(service, _engines.PROFILES["vllm"], Options(), deadline, progress).run(once=True)
    assert (ending.verdict, service.clock.now) == ("progressing", 0.0)


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:03<00:09,  3.1s/it]", 25.0),
        ("Capturing CUDA graphs: 33/67", 49.3),
        ("usage: 12.5 %", 12.5),
        ("2026/11/29 12:00:00 hello", None),
        ("model-00001-of-00030.safetensors", None),
        ("GET /v1/models HTTP/1.1", None),
        ("250% of nothing", None),
    ],
)
def test_progress_is_a_percentage_or_n_of_m(line: str, percent: float | None) -> None:
    assert percent_in(line) == percent


def test_lines_that_differ_only_in_numbers_are_one_pattern() -> None:
    assert pattern_of("[2026-11-29 12:00:01 TP0] Waiting 10s (0x7f3a, id=9f3c)") == pattern_of(
        "[2026-11-30 08:10:11 TP3] Waiting 20s (0x1111, id=8e2b)"
    )
    assert pattern_of("Load weight begin") != pattern_of("Load weight end")


def process(pid: int, name: str, cgroup: str = "/") -> _processes.Process:
    return _processes.Process(
        _processes.ProcessRef(pid, 1), 1, pid, pid, "S", name, 0, (0,), cgroup, 1, 1, False, 0, 0.0
    )


CONTAINER = "/system.slice/docker-" + "a" * 64 + ".scope"


@pytest.mark.parametrize(
    ("rows", "host", "kind"),
    [
        ([("0.0.0.0", 10)], "127.0.0.1", "owned"),
        ([("0.0.0.0", 20)], "127.0.0.1", "foreign"),
        # The kernel hands a connection to the most precise address.
        ([("0.0.0.0", 10), ("127.0.0.1", 20)], "127.0.0.1", "foreign"),
        ([("127.0.0.1", 10), ("0.0.0.0", 20)], "localhost", "owned"),
        ([("10.0.0.5", 20), ("0.0.0.0", 10)], "127.0.0.1", "owned"),
        ([("10.0.0.5", 20)], "127.0.0.1", "none"),
        ([("10.0.0.5", 10)], "gpu1.example.com", "owned"),
        ([("::", 30)], "127.0.0.1", "forwarder"),
        ([("::", 1)], "127.0.0.1", "forwarder"),
        ([("0.0.0.0", None)], "127.0.0.1", "forwarder"),
        ([("0.0.0.0", 40)], "127.0.0.1", "foreign"),
    ],
)
def test_who_listens(rows: t.List[t.Tuple[str, t.Optional[int]]], host: str, kind: str) -> None:
    table = _processes.Table(
        [process(1, "systemd"), process(10, "engine"), process(20, "chat"), process(30, "docker-proxy")]
        + [process(40, "engine", CONTAINER)]
    )
    owned = _ownership.Owned()
    owned.add(process(10, "engine"), "cgroup", True)
    assert _target.judge_listener([_target.Row(*row) for row in rows], host, table, owned).kind == kind


def test_the_engine_in_a_container_that_the_unit_wraps_is_no_stranger() -> None:
    table = _processes.Table([process(10, "docker"), process(40, "engine", CONTAINER)])
    owned = _ownership.Owned()
    owned.add(process(10, "docker"), "cgroup", True)
    found = _target.judge_listener([_target.Row("0.0.0.0", 40)], "127.0.0.1", table, owned)
    assert found == Listener("forwarder", 'process 40 "engine" of the container aaaaaaaaaaaa listens')
