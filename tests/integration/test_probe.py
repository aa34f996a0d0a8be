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
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _generation, _http, _load
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.modules import route_probe

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
    sides = {name: value for name, value in (("direct", url), ("route", route)) if value}
    params = {"timeout": timeout, "max_ttft": None, "max_total": None}
    question = _generation.Question(SGLANG, "tiny")
    return route_probe.attempt(sides, question, _http.Access(**access), params, lambda: None)


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
        ("busy", "busy", None),
        ("endless", "error_response", 200),
        ("empty", "empty_response", 200),
        ("hang_up", "dead", None),
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
    with engine("--bug", "hang_post") as url:
        port = int(url.rpartition(":")[2])
        for _ in range(5):
            assert ask(url, timeout=0.5)[0] == "wedged"

        def open_connections() -> int:
            links = psutil.net_connections("tcp")
            return sum(1 for link in links if link.status == "ESTABLISHED" and link.raddr and link.raddr.port == port)

        until(lambda: open_connections() == 0, 3)
        assert [child.name() for child in psutil.Process().children()] == ["sglang::launch"]


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


def test_idle_waits_for_the_last_request_and_sees_an_engine_that_is_gone() -> None:
    with engine("--token-delay", "0.05") as url:

        def generate() -> None:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 20}
            _http.fetch(_http.Request("POST", url + "/v1/completions", body), _http.Access(), 10)

        def wait(timeout: float) -> str:
            def look(left: float) -> _load.Reading:
                return _load.read(SGLANG, url, _http.Access(), left)

            return _load.wait_idle(look, Deadline(timeout), 0.1).verdict

        assert wait(0) == "idle"
        client = threading.Thread(target=generate)
        client.start()
        until(lambda: (_load.read(SGLANG, url, _http.Access(), 1).load or _load.Load()).running == 1)
        assert wait(0) == "busy"
        assert wait(10) == "idle"
        assert not client.is_alive() or client.join(0.5) is None
    assert wait(5) == "absent"
