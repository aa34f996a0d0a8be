# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import typing as t
from pathlib import Path

import pytest
import requests
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _engines, _generation, _http
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1", "http://h:1/v1/models"),
        ("http://h:1/", "http://h:1/v1/models"),
        ("http://h:1/v1", "http://h:1/v1/models"),
        ("https://h/lane/v1/", "https://h/lane/v1/models"),
        ("https://h/lane", "https://h/lane/v1/models"),
        ("http://h:1/v3/", "http://h:1/v1/models"),
        ("http://h:1/v2", "http://h:1/v2/v1/models"),
    ],
)
def test_a_base_with_or_without_v1_leads_to_the_same_endpoint(base: str, url: str) -> None:
    assert _http.join(base, "/v1/models") == url


def test_what_stands_beside_the_version_is_found_from_such_a_base_too() -> None:
    assert _http.join("http://h:1/v1", "/v2/health/ready") == "http://h:1/v2/health/ready"
    assert _http.join("http://h:1/v3", "/v3/chat/completions") == "http://h:1/v3/chat/completions"
    assert _http.join("http://h:1/v1", "/metrics") == "http://h:1/metrics"


@pytest.mark.parametrize(
    "base",
    [
        *("h:1", "ftp://h", "http://", "/v1", "", "http://[::1", "http://h:abc", "http://h:99999", "http://h:0"),
        *("http://h:-1", "http://a b:1", "http://h:1/\n", "http://.:1", "http://a..b", "http://%s:1" % ("x" * 64)),
    ],
)
def test_what_is_no_http_url_is_refused(base: str) -> None:
    with pytest.raises(UsageError) as caught:
        _http.join(base, "/health")
    assert caught.value.message == (
        'the URL "%s" is not usable: it must be http://HOST:PORT or https://HOST:PORT' % base
    )


@pytest.mark.parametrize(
    "url",
    ["http://user:hunter2@h:1", "user:hunter2@h", "http://hunter2@h", "http://user:hunter2%40h", "ftp://u:hunter2@h"]
    + ["http://h:1/?key=hunter2", "http://h:1#hunter2", "http://[user:hunter2@h", "http://h:1/v1@hunter2"],
)
def test_a_url_that_may_hold_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        _http.join(url, "/health")
    assert caught.value.message.startswith("a URL is not usable: it holds a ")
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["http://[::1]:1", "http://[fe80::1%25eth0]:1", "http://gpu1:1", "https://\u00fc.example"]
)
def test_a_url_of_a_server_is_accepted(url: str) -> None:
    assert _http.join(url, "/x") == url + "/x"


@pytest.mark.parametrize(
    ("access", "what"),
    [
        (_http.Access("hunter2\n"), "the API key "),
        (_http.Access("hunter2\r\nX: y"), "the API key "),
        (_http.Access("hunter2\u20ac"), "the API key "),
        (_http.Access("hunter2\0"), "the API key "),
        (_http.Access(headers={"X-Key": "hunter2\n"}), 'the value of the header "X-Key" '),
        (_http.Access(headers={"X-Key": " hunter2"}), 'the value of the header "X-Key" '),
        (_http.Access(headers={"hunter2 x": "y"}), "the name of a header "),
        (_http.Access(headers={"": "y"}), "the name of a header "),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(access: _http.Access, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        _http.check(access)
    assert caught.value.message == (
        what + "is not usable: it holds a line break or another character that no HTTP header can carry"
    )
    with pytest.raises(UsageError):
        _http.fetch(_http.Request("GET", "http://127.0.0.1:9"), access, 1)


def test_a_key_that_a_header_can_carry_is_accepted() -> None:
    access = _http.Access("sk-a b\u00e9", {"X-Number": 7, "X-Empty": "", "X-Y": "a b"})
    assert _http.check(access) is access


@pytest.mark.parametrize("text", ["[" * 100000, '{"a":' * 100000, "", "x", "[1"])
def test_what_is_no_json_is_nothing(text: str) -> None:
    assert _http.loads(text) is None
    assert _http.loads("[1]") == [1]


def wrapped(inner: BaseException) -> requests.ConnectionError:
    error = requests.ConnectionError("outer")
    error.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (wrapped(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), None, "refused"),
        (wrapped(OSError(errno.EHOSTUNREACH, "no route")), None, "unreachable"),
        (wrapped(OSError(errno.ENETUNREACH, "no network")), None, "unreachable"),
        (wrapped(ConnectionResetError(errno.ECONNRESET, "reset")), None, "hung_up"),
        (wrapped(http.client.RemoteDisconnected("closed")), None, "hung_up"),
        (wrapped(ConnectionResetError(errno.ECONNRESET, "reset")), 200, "broken"),
        (wrapped(socket.gaierror(-2, "Name or service not known")), None, "unresolved"),
        (wrapped(ssl.SSLCertVerificationError("bad")), None, "tls"),
        (requests.ReadTimeout("slow"), None, "timeout"),
        (wrapped(http.client.BadStatusLine("SSH-2.0-OpenSSH_9.2")), None, "not_http"),
        (wrapped(http.client.BadStatusLine("x")), 200, "broken"),
        (wrapped(ValueError("x")), None, "broken"),
    ],
)
def test_a_failed_exchange_has_one_word_for_its_cause(error: BaseException, status: int | None, outcome: str) -> None:
    answer = _http.Answer("u", status=status)
    assert _http._explain(error, answer)[0] == outcome


def test_what_came_before_the_deadline_is_kept() -> None:
    notes = [
        {"status": 200, "content_type": "text/event-stream", "at": 0.5},
        {"event": "{}", "at": 0.75},
    ]
    answer = _http.unfinished("u", notes, 3)
    assert (answer.outcome, answer.status, answer.events) == ("timeout", 200, [(0.75, "{}")])
    assert answer.error == "status 200 after 0.5 s, but no end of the answer within 3 s"
    assert _http.unfinished("u", [], 3).error == "no answer within 3 s"


@pytest.mark.parametrize(
    ("kind", "body", "html"),
    [
        ("text/html; charset=utf-8", "", True),
        ("application/json", "{}", False),
        ("", "\n<!DOCTYPE html><html>", True),
        ("text/plain", "<html lang=en>", True),
    ],
)
def test_a_page_is_told_by_its_type_or_its_first_words(kind: str, body: str, html: bool) -> None:
    assert _http.Answer("u", content_type=kind, body=body).html is html


def test_a_long_exchange_is_watched_and_the_watcher_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "TICK", 0.05)
    ticks = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            raise UsageError("the lease is lost")

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        url = "http://127.0.0.1:%d/" % silent.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(UsageError):
            _http.fetch(_http.Request("GET", url), _http.Access(), 30, tick)
        assert time.monotonic() - began < 2
        link, _address = silent.accept()
        link.settimeout(2)
        assert link.recv(4096).startswith(b"GET / HTTP/1.1")
        assert link.recv(4096) == b""  # the connection was closed with the child
        link.close()


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://user:hunter2@login.example/in?token=hunter2#hunter2", "https://login.example/in"),
        ("https://login.example/\x1b[2J", "https://login.example/\\x1b[2J"),
        ("https://login.example/" + "x" * 30000, "https://login.example/xxxx"),
    ],
)
def test_a_redirect_is_told_without_what_may_be_secret(location: str, shown: str) -> None:
    def serve() -> None:
        link, _address = silent.accept()
        with link:
            link.recv(65536)
            link.sendall(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %s\r\n\r\n" % location.encode())

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        url = "http://127.0.0.1:%d/" % silent.getsockname()[1]
        answer = _http.fetch(_http.Request("GET", url), _http.Access(), 30)
        server.join(10)
    assert (answer.outcome, answer.status) == ("redirected", 302)
    assert answer.error.startswith('redirected to "%s' % shown)
    assert "hunter2" not in str(vars(answer))
    assert len(answer.error) < 350


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fifo", "is neither a regular file nor a folder"),
        ("large", "is larger than 16 MiB"),
        ("none", "cannot be read: No such file or directory"),
        ("text", "holds no certificate in PEM form"),
    ],
)
def test_certificates_are_in_a_regular_file_or_a_folder(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / "ca.pem"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        with open(path, "wb") as handle:
            handle.truncate(1 << 40)
    elif kind == "text":
        path.write_text("none", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        _http.check(_http.Access(ca_path=str(path)))
    assert caught.value.message == '"ca_path" cannot be used: "%s" %s' % (path, why)
    _http.check(_http.Access(ca_path=str(tmp_path)))


@pytest.mark.parametrize("ask", ["fetch", "probe"])
def test_a_request_ends_with_a_caller_that_was_killed(ask: str) -> None:
    """Its own limit may be a quarter of an hour away, and all that time the engine works for nobody."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        url = "http://127.0.0.1:%d/" % silent.getsockname()[1]
        caller = os.fork()
        if caller == 0:
            with contextlib.suppress(BaseException):
                if ask == "fetch":
                    _http.fetch(_http.Request("GET", url), _http.Access(), 800)
                question = _generation.Question(_engines.PROFILES["openai"], "m")
                _generation.probe({"direct": url}, question, _http.Access(), 800)
            os._exit(0)
        silent.settimeout(30)
        link, _address = silent.accept()
        with link:
            link.settimeout(10)
            assert link.recv(4096)
            os.kill(caller, signal.SIGKILL)
            os.waitpid(caller, 0)
            while link.recv(4096):
                pass


@contextlib.contextmanager
def listening(answer: t.Callable[[socket.socket], None]) -> t.Iterator[str]:
    """The URL of a server that does with each connection what ``answer`` does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(5)
        server.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                try:
                    link, _address = server.accept()
                except OSError:
                    continue
                with link:
                    link.settimeout(2)
                    answer(link)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield "http://127.0.0.1:%d/health" % server.getsockname()[1]
        finally:
            ended.set()
            serving.join()


@pytest.mark.parametrize(
    ("greeting", "outcome", "error"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not_http", "what answers does not speak HTTP: look at the port in the URL"),
        (b"+OK Redis\r\n", "not_http", "what answers does not speak HTTP: look at the port in the URL"),
        (b"", "hung_up", "the connection was closed without an answer"),
    ],
)
def test_a_port_that_speaks_no_http_is_told_from_a_server_that_is_gone(
    greeting: bytes, outcome: str, error: str
) -> None:
    def answers(link: socket.socket) -> None:
        link.recv(4096)
        link.sendall(greeting)

    with listening(answers) as url:
        answer = _http.fetch(_http.Request("GET", url), _http.Access("sk-secret"), 10)
    assert (answer.outcome, answer.error) == (outcome, error)


@pytest.mark.parametrize("way", ["closes", "alert"])
def test_a_server_of_https_that_is_asked_by_http_is_told_as_that(way: str, tmp_path: Path) -> None:
    """Most close the connection; some say something in TLS first."""
    key = tmp_path / "key.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -keyout %s -out %s" % (key, tmp_path / "cert.pem")
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(tmp_path / "cert.pem"), str(key))
    seen: list[bytes] = []

    def answers(link: socket.socket) -> None:
        seen.append(link.recv(4096, socket.MSG_PEEK))
        if seen[-1].startswith(b"GET"):
            link.recv(4096)
            link.sendall(b"\x15\x03\x01\x00\x02\x02\x46" if way == "alert" else b"")
            return
        with contextlib.suppress(OSError):
            context.wrap_socket(link, server_side=True).close()

    with listening(answers) as url:
        answer = _http.fetch(_http.Request("GET", url), _http.Access("sk-secret"), 10)
    assert (answer.outcome, answer.error) == ("tls", "it speaks HTTPS: use https:// in the URL")
    assert len(seen) == 2
    assert b"sk-secret" not in seen[1]
