# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import http.server
import json
import threading
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _engines, _foreign, _generation, _http
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side

OPENAI = _engines.PROFILES["openai"]


def stream(*replies: t.Any) -> _http.Answer:
    events = [(0.1 * (number + 1), json.dumps(reply)) for number, reply in enumerate(replies)]
    return _http.Answer("u", status=200, content_type="text/event-stream", events=[*events, (1.0, "[DONE]")], elapsed=1)


def whole(reply: t.Any, status: int = 200) -> _http.Answer:
    return _http.Answer("u", status=status, content_type="application/json", body=json.dumps(reply), elapsed=0.5)


def text(word: t.Optional[str], end: t.Optional[str] = None, model: str = "m") -> t.Dict[str, t.Any]:
    return {"model": model, "choices": [{"text": word, "index": 0, "finish_reason": end}]}


def usage(tokens: int) -> t.Dict[str, t.Any]:
    return {"model": "m", "choices": [], "usage": {"completion_tokens": tokens}}


@pytest.mark.parametrize(
    ("answer", "verdict", "tokens", "ttft"),
    [
        (stream(text("x"), text("", "length"), usage(1)), "ok", 1, 0.1),
        # The first token of a healthy engine may decode to an empty text.
        (stream(text(""), usage(1)), "ok", 1, 0.2),
        (stream(text("", "length")), "ok", 1, 0.1),
        (whole(dict(text(""), usage={"completion_tokens": 1})), "ok", 1, 0.5),
        (whole(text("x")), "ok", 1, 0.5),
        (stream(text("", "stop")), "empty_response", None, None),
        # What the engine counted outweighs what its answer looks like; the last count is the count.
        (stream(text("", "length"), usage(0)), "empty_response", 0, None),
        (stream(text("sorry"), usage(0)), "empty_response", 0, None),
        (whole(dict(text("", "length"), usage={"completion_tokens": 0})), "empty_response", 0, None),
        (stream(usage(0), text("x"), usage(1)), "ok", 1, 0.2),
        (stream(text("", "stop"), usage(0)), "empty_response", 0, None),
        (_http.Answer("u", status=200, body="[" * 100000), "error_response", None, None),
        (whole({"model": "m", "choices": []}), "empty_response", None, None),
        (stream(), "error_response", None, None),
        (stream({"error": {"message": "engine died"}}), "error_response", None, None),
        # An error outweighs whatever stands beside it.
        (whole(dict(text("x"), error={"message": "engine died"})), "error_response", None, None),
        (whole(dict(text("", "length"), error={}, usage={"completion_tokens": 1})), "error_response", None, None),
        (stream(text("x"), {"error": "engine died"}), "error_response", None, None),
        (stream(text("x"), dict(text(""), error={"message": "x"}), usage(1)), "error_response", None, None),
        (stream(text("x"), {"object": "error", "message": "x"}), "error_response", None, None),
        (whole(dict(text("x"), error=None)), "ok", 1, 0.5),
        (whole(text("x", "error")), "error_response", None, None),
        (stream(text("x"), text("", "error"), usage(1)), "error_response", None, None),
        (
            whole({"model": "m", "choices": [{"text": "x", "finish_reason": {"type": "abort"}}]}),
            "error_response",
            None,
            None,
        ),
        (whole(dict(text("", "length"), usage={"completion_tokens": 0.0})), "empty_response", 0, None),
        (whole(dict(text("x"), usage={"completion_tokens": -1})), "empty_response", 0, None),
        (whole({"model": 7, "choices": [{"delta": ["x"]}, "x", None]}), "empty_response", None, None),
        (stream(text("x", model="other")), "wrong_model", None, 0.1),
        (whole(text("x", model="org/m")), "ok", 1, 0.5),
        (whole({"detail": "boom"}, 500), "error_response", None, None),
        (whole({"error": "bad"}, 400), "error_response", None, None),
        (whole({"error": "key"}, 401), "auth_error", None, None),
        (whole({"error": "key"}, 403), "auth_error", None, None),
        (whole({"error": "too many"}, 429), "busy", None, None),
        (whole({"message": "The model `m` does not exist."}, 404), "wrong_model", None, None),
        (whole({"detail": "Not Found"}, 404), "error_response", None, None),
        (_http.Answer("u", status=200, content_type="text/html", body="<html>"), "misconfigured", None, None),
        (_http.Answer("u", status=502, content_type="text/html", body="<html>"), "error_response", None, None),
        (_http.Answer("u", "timeout", error="x"), "wedged", None, None),
        (_http.Answer("u", "refused", error="x"), "dead", None, None),
        (_http.Answer("u", "hung_up", error="x"), "error_response", None, None),
        (_http.Answer("u", "unreachable", error="x"), "misconfigured", None, None),
        (_http.Answer("u", "broken", error="x"), "error_response", None, None),
        (_http.Answer("u", "too_large", error="x"), "error_response", None, None),
        (_http.Answer("u", "redirected", error="x"), "misconfigured", None, None),
        (_http.Answer("u", "tls", error="x"), "misconfigured", None, None),
        (_http.Answer("u", "unresolved", error="x"), "misconfigured", None, None),
    ],
)
def test_what_an_answer_proves(
    answer: _http.Answer, verdict: str, tokens: t.Optional[int], ttft: t.Optional[float]
) -> None:
    side = _generation.judge(answer, "completions", "m")
    assert (side.verdict, side.tokens, side.ttft) == (verdict, tokens, ttft)
    assert bool(side.error) is (verdict != "ok")


def test_a_role_alone_is_no_token_of_a_chat_and_reasoning_is_one() -> None:
    role = {"model": "m", "choices": [{"delta": {"role": "assistant", "content": ""}}]}
    thought = {"model": "m", "choices": [{"delta": {"reasoning_content": "hm"}}]}
    assert _generation.judge(stream(role), "chat", "m").verdict == "empty_response"
    assert _generation.judge(stream(role, thought), "chat", "m").ttft == 0.2


@pytest.mark.parametrize(
    ("status", "verdict", "error"),
    [
        ("error", "error_response", "the probe itself failed: the child ended without an answer"),
        ("timeout", "wedged", "no answer within 30 s"),
        ("stuck", "wedged", "no answer within 30 s"),
    ],
)
def test_a_probe_that_breaks_says_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch, status: str, verdict: str, error: str
) -> None:
    outcome = _bounded.Outcome(status, error="the child ended without an answer")
    monkeypatch.setattr(_bounded, "run", lambda *arguments, **options: outcome)
    found = _generation.probe({"direct": "http://h"}, _generation.Question(OPENAI, "m"), _http.Access(), 30)["direct"]
    assert (found.verdict, found.error) == (verdict, error)


class Server:
    """Answers in order, and remembers what was asked."""

    def __init__(self, *answers: _http.Answer) -> None:
        self.answers = list(answers)
        self.asked: t.List[_http.Request] = []

    def __call__(self, request: _http.Request) -> _http.Answer:
        self.asked.append(request)
        return self.answers.pop(0)


def ask(server: Server, **question: t.Any) -> Side:
    return _generation._ask("http://h", _generation.Question(OPENAI, **question), server)


def test_a_chat_is_asked_where_there_are_no_completions() -> None:
    server = Server(whole({"detail": "Not Found"}, 404), stream(text("x")))
    assert ask(server, model="m").endpoint == "chat"
    assert [request.url for request in server.asked] == ["http://h/v1/completions", "http://h/v1/chat/completions"]
    assert "messages" in (server.asked[1].body or {})


def test_a_server_that_cannot_stream_is_asked_without() -> None:
    server = Server(whole({"error": "stream_options"}, 400), whole(text("x")))
    assert ask(server, model="m").verdict == "ok"
    assert [request.stream for request in server.asked] == [True, False]


def test_a_server_that_refuses_everything_is_asked_twice_and_no_more() -> None:
    server = Server(whole({"error": "no"}, 400), whole({"error": "no"}, 400))
    assert ask(server, model="m", endpoint="completions").verdict == "error_response"
    assert server.answers == []


def test_without_a_model_the_first_one_listed_is_asked() -> None:
    server = Server(whole({"data": [{"id": "one"}, {"id": "two"}]}), stream(text("x", model="one")))
    assert ask(server).verdict == "ok"
    assert (server.asked[1].body or {})["model"] == "one"


def made(engine: str, *answers: _http.Answer, **question: t.Any) -> t.Tuple[Side, t.List[_http.Request]]:
    """A probe of another engine than most, and what was asked."""
    server = Server(*answers)
    side = _generation._ask("http://h", _generation.Question(_engines.get(engine), **question), server)
    return side, server.asked


def test_triton_is_asked_by_the_name_in_the_path_and_without_a_stream() -> None:
    answer = whole({"model_name": "a/b", "model_version": "1", "text_output": "x"})
    side, (request,) = made("triton", answer, model="a/b", prompt="p")
    assert (side.verdict, side.model, side.tokens, side.endpoint) == ("ok", "a/b", 1, "generate")
    assert (request.method, request.url, request.stream) == ("POST", "http://h/v2/models/a%2Fb/generate", False)
    assert request.body == {"text_input": "p", "max_tokens": 8, "exclude_input_in_output": True}


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (whole({"model_name": "m", "text_output": ""}), "empty_response"),
        (whole({"model_name": "m"}), "empty_response"),
        (whole({"model_name": "other", "text_output": "x"}), "wrong_model"),
        (whole({"error": "out of memory"}), "error_response"),
        (whole({"error": "Request for unknown model: 'm' is not found"}, 400), "wrong_model"),
        (whole({"error": "failed to parse"}, 400), "error_response"),
    ],
)
def test_what_an_answer_of_triton_proves(answer: _http.Answer, verdict: str) -> None:
    assert made("triton", answer, model="m")[0].verdict == verdict


def test_without_a_name_the_first_model_that_is_ready_is_asked() -> None:
    models = whole([{"name": "a", "state": "UNAVAILABLE"}, {"name": "b", "state": "READY"}])
    side, asked = made("triton", models, whole({"model_name": "b", "text_output": "x"}))
    assert side.verdict == "ok"
    assert [(request.method, request.url) for request in asked] == [
        ("POST", "http://h/v2/repository/index"),
        ("POST", "http://h/v2/models/b/generate"),
    ]
    side, asked = made("triton", whole([{"name": "a", "state": "LOADING"}]))
    assert (side.verdict, len(asked)) == ("misconfigured", 1)
    assert side.error == "no model is ready, and the endpoint needs its name"


def test_ovms_and_ollama_are_asked_for_what_they_have() -> None:
    graphs = whole({"q": {"model_version_status": [{"version": "1", "state": "AVAILABLE"}]}})
    side, asked = made("ovms", graphs, stream(text("x", model="q")))
    assert side.verdict == "ok"
    assert [request.url for request in asked] == ["http://h/v1/config", "http://h/v3/completions"]
    assert (asked[1].body or {})["model"] == "q"
    missing = whole({"error": "Mediapipe graph definition with requested name is not found"}, 404)
    side, asked = made("ovms", missing, model="q")
    assert (side.verdict, len(asked)) == ("wrong_model", 1)
    side, asked = made("ollama", whole({"models": [{"name": "l:latest"}]}), stream(text("x", model="l:latest")))
    assert [request.url for request in asked] == ["http://h/api/tags", "http://h/v1/completions"]
    assert (side.verdict, side.model) == ("ok", "l:latest")


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        ("m", "m", True),
        ("org/m", "m", True),
        ("m", "other/m", True),
        ("llama3", "llama3:latest", True),
        ("llama3:latest", "llama3", True),
        ("llama3", "llama3:8b", False),
        ("m", "mm", False),
    ],
)
def test_which_names_are_of_one_model(wanted: str, got: str, same: bool) -> None:
    assert _generation.same_model(wanted, got) is same


def test_a_probe_refuses_a_key_before_it_asks() -> None:
    with pytest.raises(UsageError):
        _generation.probe({"direct": "http://h"}, _generation.Question(OPENAI, "m"), _http.Access("a\nb"), 30)


def test_every_prompt_is_a_new_one() -> None:
    bodies = [_generation._body("completions", "m", None, True) for _ in range(2)]
    assert bodies[0]["prompt"] != bodies[1]["prompt"]
    assert _generation._body("completions", "m", "mine", False) == {
        "max_tokens": 1,
        "temperature": 0,
        "model": "m",
        "prompt": "mine",
    }


def side(verdict: str, url: str = "u") -> Side:
    return Side(verdict, url, ttft=0.25, error="" if verdict == "ok" else "it is so")


@pytest.mark.parametrize(
    ("direct", "route", "verdict"),
    [
        ("ok", None, "ok"),
        (None, "ok", "ok"),
        ("ok", "ok", "ok"),
        ("ok", "slow", "slow"),
        ("ok", "wedged", "route_broken"),
        ("ok", "dead", "route_broken"),
        ("ok", "error_response", "route_broken"),
        ("slow", "misconfigured", "route_broken"),
        ("ok", "empty_response", "route_broken"),
        ("ok", "auth_error", "auth_error"),
        ("ok", "wrong_model", "wrong_model"),
        ("ok", "busy", "busy"),
        ("wedged", "ok", "wedged"),
        ("dead", "wedged", "dead"),
        ("busy", "wedged", "busy"),
        (None, "error_response", "error_response"),
    ],
)
def test_the_verdict_comes_from_both_sides(direct: t.Optional[str], route: t.Optional[str], verdict: str) -> None:
    sides = [None if word is None else side(word) for word in (direct, route)]
    assert _generation.overall(*sides)[0] == verdict


def test_the_sentence_names_the_side() -> None:
    assert _generation.overall(side("ok"), side("dead", "http://gw"))[1] == (
        "the engine generates, but the route does not: http://gw: it is so"
    )
    assert _generation.overall(side("ok"), side("ok"))[1] == (
        "a token came back directly after 0.25 s and through the route after 0.25 s"
    )


@pytest.mark.parametrize(
    ("ttft", "total", "max_ttft", "max_total", "verdict"),
    [
        (1, 2, None, None, "ok"),
        (1, 6, None, None, "slow"),
        (1, 6, 2, None, "ok"),
        (3, 6, 2, None, "slow"),
        (1, 6, None, 5, "slow"),
        (1, 6, None, 7, "ok"),
    ],
)
def test_slow_is_what_exceeds_a_limit_or_half_the_time(
    ttft: float, total: float, max_ttft: t.Optional[float], max_total: t.Optional[float], verdict: str
) -> None:
    found = _generation.slow(Side("ok", ttft=ttft, total=total), max_ttft, max_total, 5)
    assert found.verdict == verdict


def test_every_word_is_in_the_table_of_verdicts() -> None:
    from ansible_collections.gpuops.serving.plugins.module_utils._verdicts import VERDICTS

    assert set(_generation.GRAVITY) <= set(VERDICTS)


KEY = "sk-zyxwvutsrqponmlk"  # no number of a result can look like a part of it


class EchoServer(http.server.ThreadingHTTPServer):
    request_queue_size = 64


class Echo(http.server.BaseHTTPRequestHandler):
    """Says what it was asked with, after as many characters as its path has."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        pad, status = self.path.split("/")[1:3]
        text = "." * int(pad) + self.headers["Authorization"]
        body = {"object": "error", "message": text} if status == "200" else {"detail": text}
        data = json.dumps(body).encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_words: t.Any) -> None:
        pass


@pytest.mark.parametrize("status", [200, 429, 500, 404])
def test_an_echo_of_the_key_is_masked_wherever_it_is_cut(status: int) -> None:
    with EchoServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        profile = OPENAI._replace(endpoints=(("completions", "/completions"),))
        question = _generation.Question(profile, "m", prompt="x")
        sides = {
            str(pad): "http://127.0.0.1:%d/%d/%d" % (server.server_address[1], pad, status)
            for pad in (0, *range(225, 300, 3))
        }
        found = _generation.probe(sides, question, _http.Access(KEY), 60)
        server.shutdown()
    assert {side.status for side in found.values()} == {status}
    assert "zyxwv" not in str(found)
    assert all(len(side.error) < 350 for side in found.values())
    assert _foreign.MASK in found["0"].error


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "m" * 100000])
def test_the_name_of_a_model_is_told_in_a_form_that_is_fit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(_http, "exchange", lambda *_words: whole(text("x", model=name)))
    [side] = _generation.probe({"direct": "http://h"}, _generation.Question(OPENAI, "n"), _http.Access(), 5).values()
    assert side.verdict == "wrong_model"
    for told in (side.error, str(side.model)):
        told.encode()
        assert "\x1b" not in told and len(told) < 350


@pytest.mark.parametrize("count", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "-3", "true", '"1"', "1e300"])
@pytest.mark.parametrize("text", ["x", ""])
def test_a_count_of_tokens_that_is_none_is_no_internal_error(count: str, text: str) -> None:
    body = '{"choices": [{"text": "%s"}], "usage": {"completion_tokens": %s}}' % (text, count)
    side = _generation.judge(_http.Answer("u", status=200, body=body), "completions", None)
    assert side.verdict == ("ok" if text and count != "-3" else "empty_response")
    assert side.tokens in (None, 0, 1)
