# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A made-up service whose every aspect is a function of the time, on a clock of its own, for a wait to look at."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock, Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._progress import Activity, Usage
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Ending, Listener, LogLine, Options

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
    """Healthy, unless told otherwise."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.state: t.Callable[[float], t.Optional[UnitState]] = lambda now: ACTIVE
        self.cpu: t.Callable[[float], float] = lambda now: 0.0
        self.read: t.Callable[[float], int] = lambda now: 0
        self.memory: t.Callable[[float], int] = lambda now: 0
        self.network: t.Dict[str, int] = {"unit a": 0}
        self.lines: t.Callable[[float], t.List[str]] = lambda now: []
        self.port: t.Callable[[float], Listener] = lambda now: Listener("owned")
        # Another one listens as soon as it is said otherwise who does.
        self.listening: t.Callable[[float], t.FrozenSet[int]] = lambda now: (
            frozenset() if self.port(now).kind in ("none", "translated") else frozenset((hash(self.port(now)),))
        )
        self.health: t.Callable[[float], _http.Answer] = lambda now: _http.Answer("u", status=200)
        self.models: t.Callable[[float], _http.Answer] = lambda now: listing("m")
        self.token: t.Callable[[float], Side] = lambda now: Side("ok", ttft=0.1)
        self.token_takes = 0.1
        self.asked: t.List[t.Optional[str]] = []
        self.listener_looks = 0
        self.closed = 0
        self.patience: t.Callable[[float], float] = lambda most: most
        self.warnings: t.List[str] = []
        self.port_number, self.keyed = 8000, False  # by which it is asked

    def bound(self, deadline: Deadline) -> None:
        self.patience = deadline.patience

    def close(self) -> None:
        self.closed += 1

    def unit(self, now: bool = False) -> t.Optional[UnitState]:
        return self.state(self.clock.now)

    def activity(self, state: UnitState) -> Activity:
        now = self.clock.now
        return Activity({(10, 1): Usage(self.cpu(now), self.read(now), self.memory(now))}, None, self.network)

    def log(self, state: UnitState) -> t.List[LogLine]:
        return [LogLine(line, True) for line in self.lines(self.clock.now)]

    def listener(self, state: UnitState) -> Listener:
        self.listener_looks += 1
        return self.port(self.clock.now)

    def sockets(self) -> t.Optional[t.FrozenSet[int]]:
        return self.listening(self.clock.now)

    def knock(self) -> bool:
        now = self.clock.now
        return self.port(now).kind not in ("none", "translated") or self.health(now).status is not None

    def peek(self, path: str) -> t.Optional[int]:
        return self.get(path, 0.25).status

    def save(self) -> t.Dict[str, t.Any]:
        return {}

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        pass

    def get(self, path: str, timeout: float, method: str = "GET") -> _http.Answer:
        return (self.models if path == "/v1/models" else self.health)(self.clock.now)

    def greet(self, path: str, timeout: float) -> _http.Answer:
        return self.get(path, timeout)

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
        limits = Options(timeout=timeout, stall_timeout=stall, **options)
        wait = Wait(self, _engines.PROFILES[engine], limits, self.clock)
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
