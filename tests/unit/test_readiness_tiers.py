# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a wait makes of the port, of the answers and of the token."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener, Options
from service import Service, listing, loading


def test_another_process_on_the_port_is_the_wrong_server_when_seen_twice() -> None:
    service = Service()
    service.port = lambda now: Listener("foreign", '99 "open-webui" (unit none)')
    found = service.wait()
    assert (found.verdict, found.wait.reached) == ("wrong_server", "unit")
    assert found.msg == ("port 8000 belongs to another process than the unit's: " + '99 "open-webui" (unit none)')
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


def test_address_translation_counts_when_the_unit_explains_it() -> None:
    service = Service()
    service.port = lambda now: Listener("translated", "the unit runs a container")
    found = service.wait()
    assert found.verdict == "ready"
    assert found.wait.tiers[1].detail == (
        "it answers, although no process of this host listens: the unit runs a container"
    )


@pytest.mark.parametrize(
    ("listener", "detail"),
    [
        (Listener("unexplained", "process 30 takes connections in"), "process 30 takes connections in"),
        (
            Listener("none"),
            "it answers, although no process of this host listens: nothing shows that it is the unit's",
        ),
    ],
)
def test_a_listener_that_nothing_explains_is_named_and_never_ready_nor_the_wrong_server(
    listener: Listener, detail: str
) -> None:
    service = Service()
    service.port = lambda now: listener
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.wait.reached) == ("stalled", "unit")
    assert found.msg == 'for 30 s nothing moved: the tier "listener" is not reached: ' + detail
    assert service.asked == []


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


@pytest.mark.parametrize("body", ["[" * 100000, '{"data": [{"id": "m", "owned_by": [1]}]}', '{"data": 7}'])
def test_a_list_of_models_that_is_none_is_no_internal_error(body: str) -> None:
    service = Service()
    service.cpu = lambda now: now
    service.models = lambda now: _http.Answer("u", status=200, body=body)
    assert service.wait(timeout=5).verdict in ("ready", "progressing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_restarts", -2),
        ("max_restarts", 0),
        ("interval", -1),
        ("interval", float("inf")),
        ("timeout", float("nan")),
        ("stall", float("inf")),
        ("generation_timeout", float("nan")),
    ],
)
def test_limits_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError):
        Service().wait(**{name: value})


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


@pytest.mark.parametrize(("attempt", "timeout"), [(0.5, 5), (1, 10), (2, 10), (3, 25), (60, 300)])
@pytest.mark.parametrize("interval", [0.5, 1.0, 50.0])
def test_what_computes_without_a_token_is_progress_until_the_deadline_however_short_an_attempt(
    attempt: float, timeout: float, interval: float
) -> None:
    """Whether it will come to a token cannot be told from what moves."""
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer within %g s" % attempt)
    found = service.wait(timeout=timeout, stall=120, generation_timeout=attempt, interval=interval)
    assert (found.verdict, found.seconds) == ("progressing", pytest.approx(timeout, abs=1.1))
    assert found.msg.endswith(': the tier "generation" is not reached: wedged: no answer within %g s' % attempt)
    # It stood still at last, for as long as an attempt may take: that is a wedge at the deadline too.
    service = Service()
    service.cpu = lambda now: min(now, timeout / 4)
    service.token = lambda now: Side("wedged", error="no answer")
    assert service.wait(timeout=timeout, stall=120, generation_timeout=attempt, interval=1.0).verdict == "wedged"


def test_an_attempt_that_the_deadline_cut_short_proves_no_wedge() -> None:
    service = Service()
    loading(service, 270)
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer within 30 s")
    found = service.wait(timeout=300, generation_timeout=60)
    assert (found.verdict, found.wait.reached) == ("progressing", "model")
    assert found.msg == (
        "not ready after 300 s, but something moved 0 s ago: "
        'the tier "generation" is not reached: wedged: no answer within 30 s'
    )
    # With an attempt before it that had all its time, and in which nothing moved, it is one.
    service.clock.now = 0
    loading(service, 200)
    assert service.wait(timeout=300, generation_timeout=60).verdict == "progressing"
    service.clock.now = 0
    service.cpu = lambda now: min(now, 200.0)
    assert service.wait(timeout=300, generation_timeout=60).verdict == "wedged"


@pytest.mark.parametrize(
    "side",
    [
        Side("busy", status=429, error="status 429"),
        Side("error_response", status=503, error="status 503"),
        Side("dead", error="connection refused"),
        Side("error_response", error="the connection was closed without an answer"),
    ],
)
def test_an_engine_that_is_overloaded_or_not_there_is_not_wedged(side: Side) -> None:
    service = Service()
    service.token = lambda now: side
    service.cpu = lambda now: now
    assert service.wait(timeout=100).verdict == "progressing"
    service.clock.now = 0
    service.cpu = lambda now: 0.0
    assert service.wait(timeout=100, stall=20).verdict == "stalled"
    # What it did before is no proof of what it does now.
    service.clock.now = 0
    service.cpu = lambda now: now
    service.token = lambda now: Side("wedged", error="no answer") if now < 50 else side
    assert service.wait(timeout=100, generation_timeout=10).verdict == "progressing"


def test_a_generation_that_fails_again_and_again_is_wedged() -> None:
    service = Service()
    service.token = lambda now: Side("error_response", status=500, error="status 500: boom")
    found = service.wait()
    assert (found.verdict, len(service.asked) >= 3) == ("wedged", True)
    assert 5.0 <= found.seconds <= 6.5
    assert found.msg == "the engine lists its model, but it does not generate: status 500: boom"


@pytest.mark.parametrize("interval", [1.0, 20.0])
def test_a_generation_that_fails_while_it_computes_is_given_as_long_as_an_attempt(interval: float) -> None:
    service = Service()
    service.cpu = lambda now: now
    failing = Side("error_response", status=500, error="boom")
    service.token = lambda now: failing if now < 14 else Side("ok", ttft=1)
    assert service.wait(interval=interval).verdict == "ready"
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: failing
    found = service.wait(interval=interval, generation_timeout=30)
    assert (found.verdict, 30 <= found.seconds <= 31 + interval) == ("wedged", True)


def test_a_server_that_still_warms_up_is_not_wedged() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("error_response", status=503, error="busy") if now < 30 else Side("ok", ttft=1)
    assert service.wait().verdict == "ready"


@pytest.mark.parametrize("where", ["models", "token"])
def test_a_refused_key_is_reported_at_once(where: str) -> None:
    service = Service()
    service.models = lambda now: _http.Answer("u", status=401) if where == "models" else listing("m")
    service.token = lambda now: Side("auth_error", status=401, error="status 401: the API key is refused")
    # The tier says why it is not reached, and a key that is wrong is another thing than none.
    for keyed, words in ((True, "the API key is refused"), (False, "it wants an API key, and none is given")):
        service.clock.now, service.keyed = 0, keyed
        found = service.wait()
        assert found.verdict == "auth_error"
        assert found.msg.endswith("status 401: " + words)
        assert found.wait.tiers[-1 if where == "token" else -2].detail.endswith("status 401: " + words)


def test_a_generation_that_fails_fast_while_it_still_loads_is_not_wedged() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("error_response", status=500, error="boom") if now < 4 else Side("ok", ttft=1)
    assert service.wait().verdict == "ready"
    # Only those in a row count.
    service.clock.now = 0
    answers = [Side("error_response", status=500), Side("error_response", status=500), Side("busy", status=429)]

    def token(now: float) -> Side:
        return answers[len(service.asked) % 3] if now < 60 else Side("ok", ttft=1)

    service.token = token
    assert service.wait().verdict == "ready"


def never(service: Service) -> None:
    service.token = lambda now: Side("wedged", error="no answer")


@pytest.mark.parametrize("interval", [1.0, 50.0])
@pytest.mark.parametrize("engine", ["vllm", "ollama"])
@pytest.mark.parametrize(("stall", "attempt", "seconds"), [(20, 60, 20), (60, 20, 20), (30, 30, 30), (5, 300, 5)])
def test_a_silent_attempt_has_the_time_of_the_window_or_its_own_whichever_is_less(
    stall: float, attempt: float, seconds: float, engine: str, interval: float
) -> None:
    service = Service()
    if engine == "ollama":
        on_request(service, 9999)
        seconds = stall  # nothing else breaks off a load
    else:
        never(service)
    found = service.wait(engine, timeout=600, stall=stall, generation_timeout=attempt, interval=interval)
    assert (found.verdict, found.wait.reached) == ("wedged", "model")
    assert found.seconds == pytest.approx(seconds, abs=1.5)
    assert found.msg.startswith("the engine lists its model, but it does not generate: no answer")


@pytest.mark.parametrize("interval", [1.0, 50.0])
def test_an_attempt_that_moves_has_all_its_time(interval: float) -> None:
    service = Service()
    never(service)
    service.cpu = lambda now: min(now, 50.0)
    found = service.wait(timeout=600, stall=20, generation_timeout=60, interval=interval)
    assert found.verdict == "wedged"
    # It moved for 50 s, and for the 20 s of the window after that nothing did, wherever the attempts ended.
    assert 60 <= found.seconds <= 72 + (interval > 20) * 20
    assert len(service.asked) <= 2


def test_an_attempt_that_the_window_gave_little_time_proves_no_wedge() -> None:
    """Nothing has moved while the engine said that it was busy, so what is left of the window is short."""
    service = Service()
    service.token = lambda now: Side("busy", status=429, error="status 429") if now < 17 else Side("wedged", error="x")
    found = service.wait(timeout=600, stall=20, generation_timeout=60)
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(20, abs=1.5))
    assert ' s nothing moved: the tier "generation" is not reached: wedged: no answer within ' in found.msg


def test_how_long_a_token_has_been_asked_for_is_shown() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("ok", ttft=12.0)
    service.token_takes = 12.0
    wait = Wait(service, _engines.PROFILES["vllm"], Options(timeout=60, stall_timeout=60), service.clock)
    seen: t.List[t.Any] = []
    wait.run(lambda: seen.append((wait.live()["missing"], wait.live()["asking"])))
    assert [asking for _missing, asking in seen if asking is not None] == [float(at) for at in range(1, 13)]
    assert {missing for missing, asking in seen if asking is not None} == {"generation"}
    assert wait.live()["asking"] is None


def test_nobody_is_asked_any_more_when_the_request_broke() -> None:
    service = Service()

    def generate(model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> Side:
        raise ServingError("no room for a process")

    service.generate = generate  # type: ignore[method-assign]
    wait = Wait(service, _engines.PROFILES["vllm"], Options(timeout=60, stall_timeout=60), service.clock)
    with pytest.raises(ServingError):
        wait.run()
    assert wait.live()["asking"] is None


def on_request(service: Service, seconds: float) -> None:
    """The first request loads the model, and the load begins anew when it is broken off."""

    def generate(model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> Side:
        service.asked.append(model)
        end = service.clock.now + min(seconds, timeout)
        while service.clock.now < end:
            service.clock.sleep(1.0)
            tick()
        return Side("ok", ttft=seconds) if timeout >= seconds else Side("wedged", error="no answer")

    def get(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        return _http.Answer("u", status=200, body='{"models": [{"name": "m:latest"}]}')

    service.generate, service.get = generate, get  # type: ignore[method-assign]


def test_a_load_that_the_request_itself_began_is_not_broken_off_while_it_moves() -> None:
    service = Service()
    service.cpu = lambda now: now
    on_request(service, 170)
    found = service.wait("ollama", timeout=600, stall=120)
    assert (found.verdict, len(service.asked)) == ("ready", 1)
    assert found.wait.restarts == 0
    # Nor without a unit, where nothing can be seen to move.
    service = Service()
    service.state = lambda now: None
    on_request(service, 170)
    assert service.wait("ollama", timeout=600, stall=120).verdict == "ready"


def test_a_load_that_the_request_itself_began_ends_with_the_window_or_the_deadline() -> None:
    service = Service()
    service.cpu = lambda now: min(now, 50.0)
    on_request(service, 9999)
    found = service.wait("ollama", timeout=600, stall=120)
    assert (found.verdict, len(service.asked)) == ("wedged", 1)
    assert found.seconds == pytest.approx(170, abs=2)
    assert found.msg == "the engine lists its model, but it does not generate: no answer within 170 s"
    service = Service()
    service.cpu = lambda now: now
    on_request(service, 9999)
    found = service.wait("ollama", timeout=600, stall=120)
    # It moved until the end: that is slow and no wedge.
    assert (found.verdict, found.seconds) == ("progressing", pytest.approx(600, abs=2))


@pytest.mark.parametrize("kind", ["none", "translated"])
@pytest.mark.parametrize(
    ("outcome", "error", "detail"),
    [
        ("timeout", "no answer within 5 s", "a connection is taken, although no process of this host listens: "),
        ("hung_up", "the connection was closed", "a connection is taken, although no process of this host listens: "),
        ("refused", "connection refused", ""),
    ],
)
def test_what_takes_connections_without_a_listener_is_told_as_it_is(
    kind: str, outcome: str, error: str, detail: str
) -> None:
    service = Service()
    service.port = lambda now: Listener(kind, "the unit runs a container", "nothing listens on port 8000")
    service.health = lambda now: _http.Answer("u", outcome, error=error)
    service.knock = lambda: True  # type: ignore[method-assign]
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.wait.reached) == ("stalled", "unit")
    wanted = detail + error if detail else "nothing listens on port 8000"
    assert found.msg.endswith(': the tier "listener" is not reached: ' + wanted)


def test_translation_to_a_server_with_another_certificate_is_the_wrong_server() -> None:
    service = Service()
    service.port = lambda now: Listener("translated", "the unit runs a container")
    service.health = lambda now: _http.Answer("u/health", "tls", error="TLS failed: expired")
    service.knock = lambda: True  # type: ignore[method-assign]
    found = service.wait()
    assert (found.verdict, found.wait.reached) == ("wrong_server", "listener")
    assert found.msg == "u/health: TLS failed: expired"


def test_a_server_that_nothing_explains_gets_no_key() -> None:
    service = Service()
    service.port = lambda now: Listener("none")
    asked: t.List[str] = []
    get = service.get

    def with_key(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        asked.append(path)
        return get(path, timeout, method)

    service.get = with_key  # type: ignore[method-assign]
    service.greet = lambda path, timeout: _http.Answer("u", status=401)  # type: ignore[method-assign]
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.wait.reached, asked) == ("stalled", "unit", [])
    service.clock.now = 0
    service.port = lambda now: Listener("translated", "the unit runs a container")
    assert service.wait().verdict == "ready"
    assert asked == ["/health", "/v1/models"]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize(("where", "status"), [("health", 401), ("model", 403), ("generation", 401)])
def test_a_key_that_is_missing_is_told_from_one_that_is_refused_in_the_line_of_its_tier_too(
    where: str, status: int, keyed: bool
) -> None:
    service = Service()
    service.keyed = keyed
    answer = _http.Answer("u/" + where, status=status)
    if where == "health":
        service.health = lambda now: answer
    if where == "model":
        service.models = lambda now: answer
    service.token = lambda now: Side("auth_error", "u/generation", status=status, error="status %d" % status)
    found = service.wait()
    why = "the API key is refused" if keyed else "it wants an API key, and none is given"
    assert (found.verdict, found.msg) == ("auth_error", "u/%s answers with status %d: %s" % (where, status, why))
    assert {tier.name: tier.detail for tier in found.wait.tiers}[where] == found.msg


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_a_list_that_has_other_models_to_the_end_is_another_server(unit: bool, moves: bool) -> None:
    """An engine that is left out may list more later, so its time is over first."""
    service = Service()
    service.models = lambda now: listing("qwen3-32b")
    if not unit:
        service.state = lambda now: None
    service.cpu = lambda now: now if moves else 0.0
    found = service.wait("openai", timeout=100, stall=20, model="foo")
    assert found.verdict == ("progressing" if unit and moves else "wrong_server")
    assert 'the model "foo" is not listed yet: there are "qwen3-32b"; "engine" would tell' in found.msg
    assert found.wait.live()["unlisted"].startswith('the model "foo" is not listed yet: there are "qwen3-32b"')
    # One that lists none may yet, and one that came to list it is no other.
    service.clock.now = 0
    service.models = lambda now: listing()
    assert service.wait("openai", timeout=100, stall=20, model="foo").verdict in ("stalled", "progressing")
    service.clock.now = 0
    service.models = lambda now: listing("qwen3-32b") if now < 5 else listing("foo")
    service.token = lambda now: Side("busy", status=429, error="busy")
    assert service.wait("openai", timeout=100, stall=20, model="foo").verdict in ("stalled", "progressing")


@pytest.mark.parametrize("status", [404, 500, 502])
@pytest.mark.parametrize("tier", ["health", "model"])
def test_a_page_with_an_error_is_named_as_what_is_missing(tier: str, status: int) -> None:
    service = Service()
    page = _http.Answer("u", status=status, content_type="text/html", body="<html>Bad Gateway")
    if tier == "health":
        service.health = lambda now: page
    else:
        service.models = lambda now: page
    found = service.wait(timeout=100, stall=20)
    wanted = ': the tier "%s" is not reached: status %d with an HTML page' % (tier, status)
    assert (found.verdict, found.msg[-len(wanted) :]) == ("stalled", wanted)
    # It is what the last look saw, and ends the doubt of the one before.
    assert found.wait.rungs.doubt == ""


@pytest.mark.parametrize("outcome", ["not_http", "tls"])
def test_what_does_not_speak_as_the_url_says_is_the_wrong_server_at_once(outcome: str) -> None:
    service = Service()
    service.health = lambda now: _http.Answer("http://h", outcome, error="it speaks HTTPS: use https:// in the URL")
    found = service.wait(timeout=600)
    assert (found.verdict, found.seconds < 2) == ("wrong_server", True)
    assert found.msg == "http://h: it speaks HTTPS: use https:// in the URL"


def test_a_listener_that_may_not_be_seen_is_told_at_once_and_is_no_guess() -> None:
    service = Service()
    service.port = lambda now: Listener("unseen", "run as root")
    found = service.wait(timeout=600, stall=300)
    assert (found.verdict, found.msg, found.seconds < 2) == ("unknown", "run as root", True)
    assert (found.wait.tiers[1].reached, found.wait.tiers[1].detail) == (False, "run as root")


def hangs(service: Service, since: float, path: str) -> None:
    """From some moment on it takes connections and answers no GET of that path."""
    get = service.get

    def hanging(asked: str, timeout: float, method: str = "GET") -> _http.Answer:
        if service.clock.now < since or asked != path:
            return get(asked, timeout, method)
        service.clock.sleep(timeout)
        return _http.Answer("u", "timeout", error="no answer within %g s" % timeout)

    service.get = hanging  # type: ignore[method-assign]


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(("path", "tier"), [("/health", "health"), ("/v1/models", "model")])
def test_a_look_that_the_end_cuts_short_hides_no_reason(path: str, tier: str, moves: bool) -> None:
    service = Service()
    service.cpu = lambda now: now if moves else 0.0
    last = 19.9
    service.health = lambda now: _http.Answer("u", status=503 if tier == "health" else 200)
    service.models = lambda now: _http.Answer("u", status=500)
    hangs(service, last, path)
    found = service.wait("sglang", timeout=20, stall=20)
    status = 503 if tier == "health" else 500
    assert found.msg.endswith(': the tier "%s" is not reached: status %d' % (tier, status))
    assert {one.name: one.detail for one in found.wait.tiers}[tier] == "status %d" % status
    # One that had its time tells what is now.
    service.clock.now, last = 0, 5.0
    hangs(service, last, path)
    found = service.wait("sglang", timeout=20, stall=20)
    assert found.msg.endswith("no answer within 5 s")


def test_an_attempt_that_the_deadline_cuts_short_hides_no_reason() -> None:
    service = Service()
    service.cpu = lambda now: now
    service.token = lambda now: Side("busy", status=429, error="full") if now < 19.5 else Side("wedged", error="0.1 s")
    found = service.wait(timeout=20, stall=20)
    assert (found.verdict, found.msg.rpartition(": the tier ")[2]) == (
        "progressing",
        '"generation" is not reached: busy: full',
    )


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_hang_from_the_first_look_on_is_stalled_within_a_second_of_its_window(path: str) -> None:
    """What its log held by then is old, however long the first answer is waited for."""
    service = Service()
    service.lines = lambda now: ["a line from before"]
    hangs(service, 0, path)
    found = service.wait(timeout=600, stall=30)
    assert (found.verdict, found.seconds) == ("stalled", pytest.approx(30.5, abs=0.5))


def test_a_first_answer_that_takes_long_is_waited_for_at_the_next_look() -> None:
    service = Service()
    get = service.get

    def slow(path: str, timeout: float, method: str = "GET") -> _http.Answer:
        service.clock.sleep(min(timeout, 2.0))
        return get(path, timeout, method) if timeout >= 2.0 else _http.Answer("u", "timeout", error="no answer")

    service.get = slow  # type: ignore[method-assign]
    service.peek = lambda path: None  # type: ignore[method-assign]
    found = service.wait()
    assert (found.verdict, found.seconds < 6) == ("ready", True)


def once(service: Service, engine: str, **options: t.Any) -> t.Any:
    wait = Wait(service, _engines.PROFILES[engine], Options(**options), service.clock)
    return wait, wait.run(once=True)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "ollama", "openai"])
@pytest.mark.parametrize("where", ["/health", "/v1/models", "token", "everything"])
def test_one_look_takes_ten_seconds_at_most_whatever_hangs(engine: str, where: str) -> None:
    service = Service()
    service.models = lambda now: listing("m", owner=engine)
    if where in ("token", "everything"):
        service.token = lambda now: Side("wedged", error="no answer")
    if where != "token":
        hangs(service, 0, where if where != "everything" else _engines.PROFILES[engine].health or "/v1/models")
    _wait, ending = once(service, engine, generation_timeout=600.0)
    assert service.clock.now <= 10.5
    assert ending.verdict in ("progressing", "ready")
    assert ending.msg.startswith("not ready at this moment: ") or ending.verdict == "ready"


def test_one_look_makes_no_engine_load_a_model() -> None:
    service = Service()
    service.get = lambda *_asked, **_named: _http.Answer(  # type: ignore[method-assign]
        "u", status=200, body='{"models": [{"name": "m:latest"}]}'
    )
    wait, ending = once(service, "ollama")
    assert service.asked == []
    assert (ending.verdict, wait.reached) == ("progressing", "model")
    why = "not looked at, because asking for a token may load the model"
    assert ending.msg == 'not ready at this moment: the tier "generation" is not reached: ' + why
    assert wait.tiers[4].detail == why
    # One that has it loaded already makes a token without a change.
    service = Service()
    assert once(service, "vllm")[1].verdict == "ready"
