# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Between two looks: cheap signs bring the next one forward, and what is dear is not done in vain."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _generation, _http, _target
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener
from service import Service, changed, listing, loading, refused


@pytest.mark.parametrize("interval", [1.0, 60.0])
def test_a_port_that_opens_is_seen_at_once_whatever_the_interval(interval: float) -> None:
    service = Service()
    loading(service, 100.03)
    service.cpu = lambda now: now
    found = service.wait(timeout=600, interval=interval)
    assert found.verdict == "ready"
    assert found.seconds == pytest.approx(100.03 + 0.1, abs=0.1001)  # the token takes 0.1 s


def test_who_listens_is_not_looked_up_while_nobody_answers() -> None:
    service = Service()
    loading(service, 100)
    service.cpu = lambda now: now
    assert service.wait().verdict == "ready"
    assert service.listener_looks == 2


def test_who_listens_instead_is_looked_up_once_more_for_the_last_word() -> None:
    service = Service()
    loading(service, 9999)
    service.port = lambda now: Listener(
        "none", silence="nothing listens on port 8000" + ("; on 9000" if now > 5 else "")
    )
    found = service.wait(timeout=600, stall=30)
    assert found.msg.endswith(': the tier "listener" is not reached: nothing listens on port 8000; on 9000')
    assert service.listener_looks == 2


def statuses(service: Service, *steps: t.Tuple[float, int]) -> None:
    """The status of the engine's health, from each of some moments on."""

    def health(now: float) -> _http.Answer:
        return _http.Answer("u/health", status=[status for since, status in steps if now >= since][-1])

    service.health = health
    service.models = lambda now: listing("m", owner="llamacpp")


@pytest.mark.parametrize(("ready", "late"), [(20.05, 0.2), (90.05, 0.5)])
def test_a_health_that_changes_is_seen_at_once_and_asked_less_often_after_a_while(ready: float, late: float) -> None:
    service = Service()
    service.cpu = lambda now: now
    statuses(service, (0, 503), (ready, 200))
    found = service.wait("llama_cpp", timeout=600, interval=60.0)
    assert found.verdict == "ready"
    assert ready <= found.wait.tiers[2].at <= ready + late


def test_a_status_that_stays_does_not_bring_a_look_forward() -> None:
    service = Service()
    service.cpu = lambda now: now
    looks: t.List[float] = []
    statuses(service, (0, 503))
    state = service.state

    def unit(now: float) -> t.Any:
        looks.append(now)
        return state(now)

    service.state = unit
    service.wait("llama_cpp", timeout=100, interval=10.0)
    assert len([now for now in looks if now > 30]) <= 8


def test_a_peek_goes_on_where_the_last_one_ended() -> None:
    service = Service()
    service.cpu = lambda now: now
    statuses(service, (0, 503), (10, 500), (12, 503), (40, 200))
    found = service.wait("llama_cpp", timeout=600, interval=30.0)
    assert (found.verdict, found.wait.tiers[2].detail) == ("ready", "status 200")


@pytest.mark.parametrize("interval", [1.0, 7.0, 60.0])
def test_the_end_of_the_stall_window_is_met_exactly(interval: float) -> None:
    service = Service()
    loading(service, 9999)
    found = service.wait(timeout=600, stall=33.3, interval=interval)
    moved = 0.0
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(moved + 33.3, abs=0.01))


def test_the_deadline_is_met_exactly() -> None:
    service = Service()
    loading(service, 9999)
    service.cpu = lambda now: now
    found = service.wait(timeout=77.7, stall=60, interval=9.0)
    assert (found.verdict, found.seconds) == ("progressing", pytest.approx(77.7, abs=0.01))


@pytest.mark.parametrize(
    ("line", "pause"),
    [
        ("Loading safetensors checkpoint shards: 20% Completed", 0.25),
        ("Loading safetensors checkpoint shards: 90% Completed", 0.1),
        ("something else", 0.1),
    ],
)
def test_a_port_is_knocked_at_less_often_while_the_load_has_most_of_its_way_to_go(line: str, pause: float) -> None:
    service = Service()
    loading(service, 30.0)
    service.lines = lambda now: [line]
    service.cpu = lambda now: now
    knocks: t.List[float] = []
    knock = service.knock
    service.knock = lambda: knocks.append(service.clock.now) or knock()  # type: ignore[func-returns-value,method-assign]
    found = service.wait(interval=30.0)
    assert (found.verdict, found.seconds) == ("ready", pytest.approx(30.2, abs=0.26))
    assert len(knocks) == pytest.approx(30.0 / pause, rel=0.2)


def test_without_a_unit_a_closed_port_is_knocked_at_and_not_asked() -> None:
    service = Service()
    service.state = lambda now: None
    loading(service, 50.05)
    asked: t.List[float] = []
    health = service.health

    def get(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        asked.append(service.clock.now)
        return health(service.clock.now) if path != "/v1/models" else service.models(service.clock.now)

    service.get = get  # type: ignore[method-assign]
    found = service.wait(timeout=600, interval=30.0)
    assert (found.verdict, found.seconds) == ("ready", pytest.approx(50.2, abs=0.15))
    assert len(asked) == 3


def test_an_engine_that_says_that_it_is_dead_is_believed_when_it_says_so_twice() -> None:
    service = Service()
    statuses(service, (0, 503))
    found = service.wait("vllm", timeout=600)
    assert (found.verdict, found.msg) == ("dead", "u/health says that the engine is dead: status 503")
    service = Service()
    statuses(service, (0, 503), (0.1, 200))
    service.models = lambda now: listing("m")
    assert service.wait("vllm").verdict == "ready"


def test_a_list_is_asked_for_as_the_engine_wants_it_and_says_which_models_are_ready() -> None:
    service = Service()
    service.cpu = lambda now: now
    methods: t.Set[str] = set()

    def get(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        if path != "/v2/repository/index":
            return service.health(service.clock.now)
        methods.add(method)
        state = "READY" if service.clock.now > 20 else "LOADING"
        return _http.Answer("u", status=200, body=json.dumps([{"name": "m", "version": "1", "state": state}]))

    service.get = get  # type: ignore[method-assign]
    found = service.wait("triton", model="m", tier="model")
    assert (found.verdict, methods) == ("ready", {"POST"})
    assert 20 < found.seconds < 22
    service.clock.now = 0
    assert service.wait("triton", model="m", tier="model", timeout=10, stall=10).msg.endswith(
        'the tier "model" is not reached: lists "m" as not ready: LOADING'
    )


def test_a_new_life_begins_at_the_bottom() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.state = lambda now: changed(invocation_id="a" if now < 70 else "b")
    service.token = lambda now: Side("wedged", error="no answer") if now < 100 else Side("ok", ttft=0.1)
    service.health = lambda now: refused(now) if 70 <= now < 90 else _http.Answer("u", status=200)
    service.port = lambda now: Listener("none" if 70 <= now < 90 else "owned")
    found = service.wait(timeout=600, stall=120)
    assert (found.verdict, found.wait.restarts) == ("ready", 1)
    assert found.wait.tiers[1].at >= 90


def blocked(service: Service, asked: t.List[float]) -> None:
    """It takes connections and never answers; ``asked`` gets the seconds that it was given each time."""

    def get(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        asked.append(timeout)
        service.clock.sleep(timeout)
        return _http.Answer("u", "timeout", error="no answer within %g s" % timeout)

    service.get = get  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["owned", "translated"])
def test_a_server_that_does_not_answer_is_not_knocked_at(kind: str) -> None:
    service = Service()
    asked: t.List[float] = []
    blocked(service, asked)
    service.port = lambda now: Listener(kind)
    service.cpu = lambda now: now
    knocks: t.List[float] = []
    service.knock = lambda: knocks.append(service.clock.now) or True  # type: ignore[method-assign,func-returns-value]
    service.peek = service.knock  # type: ignore[method-assign,assignment]
    assert service.wait(timeout=100, interval=10.0).verdict == "progressing"
    assert len(knocks) + len(asked) <= 45


def test_a_server_that_answers_late_does_not_delay_the_end_of_the_window() -> None:
    service = Service()
    asked: t.List[float] = []
    blocked(service, asked)
    found = service.wait(timeout=600, stall=33.3, interval=1.0)
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(33.3, abs=0.25))
    assert max(asked) == 5.0
    assert min(asked) >= 0.1
    # Without a unit there is no such window.
    service.clock.now = 0
    asked.clear()
    service.state = lambda now: None
    assert service.wait(timeout=100, stall=10).seconds == pytest.approx(100, abs=0.25)
    assert sorted(asked)[1] == 5.0


def test_whoever_is_greeted_gets_neither_key_nor_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: t.List[t.Any] = []
    monkeypatch.setattr(_http, "fetch", lambda request, access, timeout: seen.append((request, access, timeout)))
    access = _http.Access("key", {"X-Secret": "1"}, False, "/ca")
    question = _generation.Question(_engines.PROFILES["vllm"])
    target = _target.HostTarget("x.service", "http://127.0.0.1:8000", question, access)
    target.greet("/health", 3.0)
    wanted = _http.Request("GET", "http://127.0.0.1:8000/health")
    assert seen == [(wanted, _http.Access(None, {}, False, "/ca"), 3.0)]


SGLANG = listing("m", owner="sglang")
MINE, THIEF = Listener("owned", "process 10 of the unit listens"), Listener("foreign", '99 "thief" (unit b.service)')


def owners(service: Service, *steps: t.Tuple[float, Listener]) -> t.List[t.Tuple[float, str, Listener]]:
    """Who has the port from each of some moments on; gives the questions with the key, with who had it then."""
    asked: t.List[t.Tuple[float, str, Listener]] = []

    def port(now: float) -> Listener:
        return [listener for since, listener in steps if now >= since][-1]

    def noting(name: str, call: t.Callable[..., t.Any]) -> t.Callable[..., t.Any]:
        def noted(*given: t.Any, **named: t.Any) -> t.Any:
            asked.append((service.clock.now, name, service.port(service.clock.now)))
            return call(*given, **named)

        return noted

    service.port = port
    service.cpu = lambda now: now
    service.models = lambda now: SGLANG
    service.greet = service.get  # type: ignore[method-assign]
    for name in ("get", "peek", "generate"):
        setattr(service, name, noting(name, getattr(service, name)))
    return asked


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("missing", ["health", "model", "generation"])
def test_a_port_that_comes_to_somebody_else_gets_no_key_and_is_the_wrong_server(missing: str, between: bool) -> None:
    """A thief that is ready, at whatever tier the unit's own server had come to, at once or after a pause."""
    service = Service()
    gap = (20.0, Listener("none")) if between else (20.0, THIEF)
    asked = owners(service, (0, MINE), gap, (22.0, THIEF))
    service.health = lambda now: _http.Answer("u", status=503 if missing == "health" and now < 20 else 200)
    service.models = lambda now: SGLANG if missing != "model" or now >= 20 else _http.Answer("u", status=500)
    service.token = lambda now: Side("busy", status=429, error="busy") if now < 20 else Side("ok", ttft=0.1)
    found = service.wait("sglang", timeout=600)
    assert (found.verdict, found.wait.reached) == ("wrong_server", "unit")
    assert found.msg == "port 8000 belongs to another process than the unit's: " + THIEF.detail
    assert 20 <= found.seconds < 24.5
    assert [one for one in asked if one[2] != MINE] == []
    assert {tier.reached for tier in found.wait.tiers[1:]} == {False}


def test_another_one_that_shares_the_port_is_seen_before_the_key_is_sent_and_before_it_is_ready() -> None:
    for at in (6.0, 8.05):  # while a token is not to be had yet; and while the last one is made
        service = Service()
        asked = owners(service, (0, MINE), (at, THIEF))
        service.token = lambda now: Side("busy", status=429, error="busy") if now < 8.0 else Side("ok", ttft=0.1)
        service.token_takes = 0.3
        found = service.wait("sglang", timeout=600)
        assert (found.verdict, at <= found.seconds < at + 3) == ("wrong_server", True)
        assert [one for one in asked if one[2] == THIEF] == []


def test_a_peek_is_not_made_at_a_port_that_has_come_to_somebody_else() -> None:
    service = Service()
    asked = owners(service, (0, MINE), (20.0, THIEF))
    service.health = lambda now: _http.Answer("u", status=503)
    assert service.wait("llama_cpp", timeout=600, interval=60.0).verdict == "wrong_server"
    assert {name for _at, name, _who in asked} >= {"peek", "get"}
    assert [one for one in asked if one[2] == THIEF] == []


def test_what_was_seen_of_a_server_that_is_gone_proves_nothing_of_the_next_of_the_same_unit() -> None:
    service = Service()
    owners(service, (0, MINE), (20.0, Listener("owned", "process 11 of the unit listens")))
    service.token = lambda now: Side("busy", status=429, error="busy") if now < 40 else Side("ok", ttft=0.1)
    service.health = lambda now: _http.Answer("u", status=503 if 20 <= now < 60 else 200)
    found = service.wait("sglang", timeout=600)
    assert (found.verdict, found.seconds >= 60) == ("ready", True)
    assert min(tier.at for tier in found.wait.tiers[2:]) >= 60


def test_workers_that_join_on_the_same_port_begin_nothing_anew() -> None:
    service = Service()
    owners(service, (0, MINE))
    service.listening = lambda now: frozenset(range(1 + int(min(now, 20) / 5)))
    service.token = lambda now: Side("busy", status=429, error="busy") if now < 40 else Side("ok", ttft=0.1)
    found = service.wait("sglang", timeout=600)
    assert (found.verdict, found.wait.tiers[3].at < 2) == ("ready", True)


def test_a_port_that_comes_and_goes_is_no_movement() -> None:
    service = Service()
    owners(service, (0, MINE))
    service.cpu = lambda now: 0.0
    service.listening = lambda now: frozenset((int(now / 3),))
    service.health = lambda now: _http.Answer("u", status=503)
    found = service.wait("sglang", timeout=600, stall=30)
    assert (found.verdict, found.seconds < 35) == ("stalled", True)


@pytest.mark.parametrize("kind", ["translated", "forwarder", "owned"])
def test_what_leads_on_is_judged_again_before_a_token_is_asked_for_and_before_it_is_ready(kind: str) -> None:
    """Its socket stays, or it has none, and what is behind it changes."""
    for at in (5.0, 8.05):
        service = Service()
        steps = [(0.0, Listener(kind, "to container a")), (at, Listener("foreign", "to container b"))]
        asked = owners(service, *steps)
        service.listening = lambda now: frozenset((7,)) if kind == "forwarder" else frozenset()
        service.knock = lambda: True  # type: ignore[method-assign]
        service.token = lambda now: Side("busy", status=429, error="busy") if now < 8.0 else Side("ok", ttft=0.1)
        service.token_takes = 0.3
        assert service.wait("sglang", timeout=600).verdict == "wrong_server"
        assert [one for one in asked if one[1] == "generate" and one[2].kind == "foreign"] == []
