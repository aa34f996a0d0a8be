# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The probe against servers that misbehave: real sockets, short limits."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import typing as t

import psutil
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _generation, _http, _load, _probe
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

ENGINE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fakes", "engine.py")
SGLANG = _engines.PROFILES["sglang"]
LIMIT = 1.5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: t.Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def engine(*arguments: str, port: int = 0) -> t.Iterator[str]:
    """A simulated engine that serves; its URL."""
    port = port or free_port()
    command = [sys.executable, ENGINE, "--port", str(port), "--load", "0", "--token-delay", "0.01", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: listens(port))
        yield "http://127.0.0.1:%d" % port
    finally:
        process.kill()
        process.wait()


def ask(
    url: t.Optional[str], route: t.Optional[str] = None, timeout: float = LIMIT, **access: t.Any
) -> t.Tuple[str, str, t.Dict[str, t.Any]]:
    question = _generation.Question(SGLANG, "tiny")
    found = _probe.run(_probe.sides_of(url, route, {}), question, _http.Access(**access), _probe.Policy(timeout))
    return found.verdict, found.msg, found.as_dict()


@pytest.mark.parametrize(
    ("bug", "verdict", "status"),
    [
        ("", "ok", 200),
        ("empty_text", "ok", 200),
        ("no_stream", "ok", 200),
        ("hang_post", "wedged", None),
        ("headers_only", "wedged", 200),
        ("trickle", "wedged", None),
        ("error_400", "error_response", 400),
        ("error_500", "error_response", 500),
        ("html", "misconfigured", 200),
        ("wrong_model", "wrong_model", 200),
        ("redirect", "misconfigured", 307),
        ("hang_later", "wedged", None),
        ("busy", "busy", None),
        ("endless", "error_response", 200),
        ("empty", "empty_response", 200),
        ("hang_up", "error_response", None),
    ],
)
def test_each_kind_of_misbehaviour_has_its_verdict_within_the_limit(
    bug: str, verdict: str, status: t.Optional[int]
) -> None:
    with engine("--bug", bug) as url:
        began = time.monotonic()
        word, msg, row = ask(url)
        assert time.monotonic() - began < LIMIT + 0.7
        assert (word, row["direct"]["status"]) == (verdict, status), msg


def test_the_engine_still_answers_every_get_while_it_is_wedged() -> None:
    with engine("--bug", "hang_post") as url:
        assert ask(url)[0] == "wedged"
        answer = _http.fetch(_http.Request("GET", url + "/health"), _http.Access(), LIMIT)
        assert answer.status == 200


def test_a_missing_key_is_an_auth_error_and_the_right_one_is_not() -> None:
    with engine("--api-key", "secret") as url:
        assert ask(url)[0] == "auth_error"
        assert ask(url, api_key="secret")[0] == "ok"


def test_a_redirect_to_another_host_is_not_followed_and_gets_no_key() -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen(5)
        thief.settimeout(0.3)
        target = "http://localhost:%d/v1/completions" % thief.getsockname()[1]
        with engine("--bug", "redirect", "--redirect-to", target) as url:
            word, msg, _row = ask(url, api_key="secret")
        assert word == "misconfigured"
        assert target in msg
        with pytest.raises(socket.timeout):
            thief.accept()


def test_probes_that_time_out_leave_no_connection_and_no_process() -> None:
    before = {
        child.pid for child in psutil.Process().children()
    }  # a call that hung in an earlier test leaves its child
    with engine("--bug", "hang_post") as url:
        port = int(url.rpartition(":")[2])
        for _ in range(5):
            assert ask(url, timeout=0.5)[0] == "wedged"

        def open_connections() -> int:
            links = psutil.net_connections("tcp")
            return sum(1 for link in links if link.status == "ESTABLISHED" and link.raddr and link.raddr.port == port)

        until(lambda: open_connections() == 0, 3)
        children = [child for child in psutil.Process().children() if child.pid not in before]
        assert [child.name() for child in children] == ["sglang::launch"]


def test_a_fine_engine_behind_a_broken_gateway_is_a_broken_route() -> None:
    with engine() as url:
        assert ask(url, "http://127.0.0.1:%d" % free_port())[0] == "route_broken"
        for bug, verdict in (
            ("error_500", "route_broken"),
            ("hang_post", "route_broken"),
            ("wrong_model", "wrong_model"),
        ):
            with engine("--bug", bug) as gateway:
                began = time.monotonic()
                word, _msg, row = ask(url, gateway)
                assert (word, row["direct"]["verdict"]) == (verdict, "ok")
                assert time.monotonic() - began < LIMIT + 0.7


def test_both_sides_are_asked_at_the_same_time() -> None:
    with engine("--bug", "hang_post") as url:
        began = time.monotonic()
        word, _msg, row = ask(url, url)
        assert (word, row["route"]["verdict"]) == ("wedged", "wedged")
        assert time.monotonic() - began < LIMIT + 0.7


def test_a_refused_connection_is_dead_and_an_unknown_name_misconfigured() -> None:
    assert ask("http://127.0.0.1:%d" % free_port())[0] == "dead"
    assert ask("http://no-such-host.invalid:80")[0] == "misconfigured"


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_asked_otherwise(tmp_path: t.Any) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*made, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen(5)
        url = "https://127.0.0.1:%d/x" % plain.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    link, _address = plain.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(link, server_side=True) as secured:
                    secured.recv(4096)
                    secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=serve, daemon=True).start()

        def outcome(**access: t.Any) -> t.Tuple[str, t.Optional[int]]:
            answer = _http.fetch(_http.Request("GET", url), _http.Access(**access), LIMIT)
            return answer.outcome, answer.status

        assert outcome() == ("tls", None)
        assert outcome(ca_path=cert) == ("answered", 200)
        assert outcome(validate_certs=False) == ("answered", 200)
        plain.shutdown(socket.SHUT_RDWR)


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:%d" % free_port())
    with engine() as url:
        assert ask(url)[0] == "ok"


def test_our_own_prompt_and_token_are_no_sign_of_others() -> None:
    with engine("--bug", "hang_later") as url:
        word, _msg, row = ask(url, url)
        before, after = row["counters"]["before"], row["counters"]["after"]
        assert after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"] == 2
        assert after["sglang:prompt_tokens_total"] - before["sglang:prompt_tokens_total"] == 80
        assert (word, row["counters"]["moved"]) == ("wedged", False)


def test_the_gravest_attempt_counts_and_one_that_timed_out_is_the_last() -> None:
    question, access = _generation.Question(SGLANG, "tiny"), _http.Access()
    with engine() as url:
        found = _probe.run({"direct": url}, question, access, _probe.Policy(LIMIT, count=3, interval=0))
        assert (found.verdict, len(found.attempts), found.ok) == ("ok", 3, True)
        slow = _probe.run({"direct": url}, question, access, _probe.Policy(LIMIT, max_total=0.001))
        assert (slow.verdict, slow.ok) == ("slow", False)
    with engine("--bug", "hang_post") as url:
        found = _probe.run({"direct": url}, question, access, _probe.Policy(0.5, count=3, interval=0))
        assert (found.verdict, len(found.attempts), found.ok) == ("wedged", 1, False)


@pytest.mark.parametrize(
    "limits",
    [
        *({"timeout": 0}, {"count": 0}, {"interval": -1}, {"max_ttft": 0}, {"max_total": -1}),
        *({"timeout": float("inf")}, {"timeout": float("nan")}, {"interval": float("inf")}, {"max_ttft": float("inf")}),
    ],
)
def test_limits_that_are_none_are_refused_before_anything_is_asked(limits: t.Dict[str, t.Any]) -> None:
    with pytest.raises(UsageError):
        _probe.run({"direct": "http://h"}, _generation.Question(SGLANG), _http.Access(), _probe.Policy(**limits))


def drain(url: str, timeout: float, engine_name: str = "sglang") -> _load.IdleWait:
    return _load.drain(_engines.PROFILES[engine_name], url, _http.Access(), timeout, 0.1)


def test_idle_waits_for_the_last_request_and_sees_an_engine_that_is_gone() -> None:
    with engine("--token-delay", "0.05") as url:

        def generate() -> None:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 20}
            _http.fetch(_http.Request("POST", url + "/v1/completions", body), _http.Access(), 10)
            ended.append(time.monotonic())

        ended: t.List[float] = []
        assert drain(url, 0).verdict == "idle"
        client = threading.Thread(target=generate)
        client.start()
        until(lambda: (_load.read(SGLANG, url, _http.Access(), 1).load or _load.Load()).running == 1)
        assert drain(url, 0).verdict == "busy"
        assert drain(url, 10).verdict == "idle"
        idle = time.monotonic()
        client.join(5)
        # The client hears of its end a moment after the engine is done with it.
        assert ended[0] < idle + 0.4
    assert drain(url, 5).verdict == "absent"


@pytest.mark.parametrize(
    ("arguments", "profile", "remedy"),
    [
        (["--no-metrics"], "sglang", "start SGLang with --enable-metrics"),
        (["--engine", "llama_cpp", "--no-metrics"], "llama_cpp", "start llama-server with --metrics"),
        (["--engine", "openai"], "openai", 'name the engine in "engine"'),
    ],
)
def test_an_engine_without_metrics_is_not_waited_for(arguments: t.List[str], profile: str, remedy: str) -> None:
    with engine(*arguments) as url:
        began = time.monotonic()
        found = drain(url, 30, profile)
        assert (found.verdict, found.readings) == ("unknown", 2)
        assert found.msg.endswith(": " + remedy)
        assert time.monotonic() - began < 5
    assert drain(url, 5, profile).verdict == "absent"


def test_a_server_that_hangs_up_is_there() -> None:
    with socket.socket() as rude:
        rude.bind(("127.0.0.1", 0))
        rude.listen(5)

        def serve() -> None:
            while True:
                try:
                    rude.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        url = "http://127.0.0.1:%d" % rude.getsockname()[1]
        assert drain(url, 0.5).verdict == "unknown"
        assert ask(url)[0] == "error_response"
        rude.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", sorted(_engines.PROFILES))
def test_a_token_comes_back_from_every_engine_as_its_profile_asks_for_it(name: str) -> None:
    with engine("--engine", name) as url:
        for model in (None, "tiny"):
            question = _generation.Question(_engines.get(name), model)
            side = _probe.run({"direct": url}, question, _http.Access(), _probe.Policy(5)).attempts[-1].direct
            assert side is not None
            assert (side.verdict, side.error) == ("ok", "")
