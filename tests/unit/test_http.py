# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import time

import pytest
import requests
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _http
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1", "http://h:1/v1/models"),
        ("http://h:1/", "http://h:1/v1/models"),
        ("http://h:1/v1", "http://h:1/v1/models"),
        ("https://h/lane/v1/", "https://h/lane/v1/models"),
        ("https://h/lane", "https://h/lane/v1/models"),
    ],
)
def test_a_base_with_or_without_v1_leads_to_the_same_endpoint(base: str, url: str) -> None:
    assert _http.join(base, "/v1/models") == url


@pytest.mark.parametrize("base", ["h:1", "ftp://h", "http://", "/v1"])
def test_what_is_no_http_url_is_refused(base: str) -> None:
    with pytest.raises(UsageError) as caught:
        _http.join(base, "/health")
    assert caught.value.message == (
        'the URL "%s" is not usable: it must be http://HOST:PORT or https://HOST:PORT' % base
    )


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
