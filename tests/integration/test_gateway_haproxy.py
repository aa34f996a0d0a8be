# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Drain and restore against a real HAProxy with clients that never retry."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _gateways, _http, _load
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError
from ansible_collections.gpuops.serving.plugins.module_utils._gateway_haproxy import Haproxy

HAPROXY = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
ENGINE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fakes", "engine.py")
NAMES = ("gpu1", "gpu2", "gpu3")
CLIENTS = 20
CONFIG = """
global
    stats socket %(socket)s mode 600 level %(level)s
    log stdout format raw local0 emerg
defaults
    mode http
    retries 0
    no option redispatch
    %(connections)s
    timeout connect 2s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:%(front)d
    default_backend qwen
backend qwen
    balance leastconn
    option httpchk GET /health
    default-server inter 200ms fastinter 100ms downinter 200ms fall 2 rise 2
%(servers)s
"""

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: t.Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Site:
    """Three engines behind one gateway."""

    def __init__(self, folder: str, connections: str = "", level: str = "admin", check: str = "check") -> None:
        self.ports = {name: free_port() for name in NAMES}
        self.front = free_port()
        self.socket = folder + "/s"
        self.engines: t.Dict[str, subprocess.Popen[bytes]] = {}
        servers = "\n".join("    server %s 127.0.0.1:%d %s" % (name, self.ports[name], check) for name in NAMES)
        values = {"socket": self.socket, "level": level, "front": self.front, "servers": servers}
        with open(folder + "/haproxy.cfg", "w", encoding="utf-8") as handle:
            handle.write(CONFIG % dict(values, connections=connections))
        assert HAPROXY is not None
        for name in NAMES:
            self.start(name)
        # A gateway takes a server for up until its first check fails, so the engines come first.
        until(lambda: all(listens(port) for port in self.ports.values()))
        self.gateway = subprocess.Popen([HAPROXY, "-db", "-f", folder + "/haproxy.cfg"])
        until(lambda: os.path.exists(self.socket))

    def start(self, name: str) -> None:
        command = [sys.executable, ENGINE, "--port", str(self.ports[name]), "--load", "0", "--token-delay", "0.02"]
        self.engines[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        self.engines[name].kill()
        self.engines[name].wait()

    def change(self, name: str, state: str, timeout: float = 20, **options: t.Any) -> _gateways.Change:
        driver = Haproxy(self.socket, "qwen", name)
        return _gateways.change(driver, name, state, timeout, 0.1, **options)

    def idle(self, name: str) -> str:
        profile, url = _engines.PROFILES["sglang"], "http://127.0.0.1:%d" % self.ports[name]
        return _load.drain(profile, url, _http.Access(), 20, 0.1).verdict

    def all_up(self) -> bool:
        found = Haproxy(self.socket, "qwen", NAMES[0]).servers()
        return all(found[name].serves for name in NAMES)

    def close(self) -> None:
        for process in (self.gateway, *self.engines.values()):
            process.kill()
            process.wait()


class Traffic:
    """Clients that never retry: every fourth streams for two seconds and more."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.began = time.monotonic()
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.done = 0
        self.failures: t.List[str] = []
        self.threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def _client(self, number: int) -> None:
        tokens = 100 if number % 4 == 0 else 5
        while not self.stop.is_set():
            try:
                problem = self._request(tokens)
            except (OSError, http.client.HTTPException) as error:
                problem = "%s: %s" % (type(error).__name__, error)
            with self.lock:
                self.done += 1
                if problem:
                    self.failures.append("%s after %.1f s" % (problem, time.monotonic() - self.began))
            time.sleep(0.01)

    def _request(self, tokens: int) -> str:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": tokens, "stream": True})
            link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            text = answer.read()
            if answer.status != 200:
                return "status %d" % answer.status
            return "" if text.endswith(b"data: [DONE]\n\n") and text.count(b"data: {") == tokens else "cut off"
        finally:
            link.close()

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def site(tmp_path: t.Any, request: pytest.FixtureRequest) -> t.Iterator[Site]:
    made = Site(str(tmp_path), **getattr(request, "param", {}))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    "site", [{}, {"connections": "option httpclose\n    http-reuse never"}], indirect=True, ids=["keep-alive", "close"]
)
def test_a_rolling_restart_under_traffic_loses_no_request(site: Site) -> None:
    until(site.all_up)
    traffic = Traffic(site.front)
    try:
        time.sleep(0.5)
        for name in NAMES:
            drained = site.change(name, "drained", min_healthy=2)
            assert (drained.verdict, drained.after.sessions) == ("drained", 0)
            assert site.idle(name) == "idle"
            site.kill(name)
            time.sleep(0.6)  # long enough for the gateway to find it down
            site.start(name)
            restored = site.change(name, "ready")
            assert restored.verdict == "ready"
            assert restored.after.operational.startswith("UP")
        time.sleep(0.5)
    finally:
        traffic.finish()
    assert traffic.failures == []
    assert traffic.done > 100


def test_the_same_restart_without_a_drain_does_lose_requests(site: Site) -> None:
    until(site.all_up)
    traffic = Traffic(site.front)
    try:
        time.sleep(0.5)
        for name in NAMES:
            site.kill(name)
            time.sleep(0.6)
            site.start(name)
            until(site.all_up)
    finally:
        traffic.finish()
    assert len(traffic.failures) > 0


def test_too_few_healthy_others_refuse_and_change_nothing(site: Site) -> None:
    until(site.all_up)
    assert site.change("gpu1", "drained", min_healthy=2).verdict == "drained"
    refused = site.change("gpu2", "drained", min_healthy=2)
    assert (refused.verdict, refused.healthy_others, refused.changed) == ("refused", ["gpu3"], False)
    assert refused.after.admin == "ready"
    # Asked again, a server that is withdrawn already stays so whatever the others are.
    again = site.change("gpu1", "drained", min_healthy=2)
    assert (again.verdict, again.changed) == ("drained", False)
    assert site.change("gpu1", "ready").changed is True
    assert site.change("gpu1", "ready").changed is False


def test_a_server_that_is_down_is_put_back_only_when_it_is_up(site: Site) -> None:
    until(site.all_up)
    site.change("gpu1", "drained")
    site.kill("gpu1")
    until(lambda: Haproxy(site.socket, "qwen", "gpu1").servers()["gpu1"].operational.startswith("DOWN"))
    failed = site.change("gpu1", "ready", timeout=0.5)
    assert (failed.verdict, failed.after.operational) == ("error", "DOWN")
    site.start("gpu1")
    assert site.change("gpu1", "ready").verdict == "ready"


def test_sessions_that_do_not_end_are_busy(site: Site) -> None:
    until(site.all_up)
    with socket.create_connection(("127.0.0.1", site.front)) as link:
        body = b'{"max_tokens": 500, "stream": true}'
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert link.recv(20).startswith(b"HTTP/1.1 200")
        sessions = {name: row.sessions for name, row in Haproxy(site.socket, "qwen", "gpu1").servers().items()}
        busy = max(sessions, key=lambda name: sessions[name])
        done = site.change(busy, "drained", timeout=0.5)
        assert (done.verdict, done.after.admin, done.after.sessions) == ("busy", "drain", 1)
    assert site.change(busy, "drained").verdict == "drained"


@pytest.mark.parametrize("site", [{"level": "operator"}], indirect=True)
def test_a_socket_without_the_right_level_is_one_sentence(site: Site) -> None:
    until(site.all_up)
    with pytest.raises(ServingError) as caught:
        site.change("gpu1", "drained")
    assert caught.value.message == (
        'the gateway refuses to change the server "gpu1": Permission denied: give its "stats socket" the level admin'
    )


@pytest.mark.parametrize("site", [{"check": ""}], indirect=True)
def test_without_health_checks_nothing_is_called_healthy(site: Site) -> None:
    refused = site.change("gpu1", "drained")
    assert (refused.verdict, refused.healthy_others) == ("refused", [])
    assert site.change("gpu1", "drained", min_healthy=0).verdict == "drained"
    restored = site.change("gpu1", "ready")
    assert restored.msg == 'the gateway sends requests to the server "gpu1", but it does not check its health'
    assert (restored.verdict, restored.as_dict()["health_checked"]) == ("ready", False)


@pytest.mark.parametrize("site", [{"check": "weight 0"}, {"check": "check weight 0"}], indirect=True)
def test_a_server_that_gets_nothing_by_its_weight_is_not_ready(site: Site) -> None:
    done = site.change("gpu1", "ready", timeout=1)
    assert (done.verdict, done.msg) == (
        "error",
        'the server "gpu1" is put back, but after 1 s the gateway does not send to it: its weight is 0',
    )


def test_names_that_do_not_exist_are_named(site: Site) -> None:
    with pytest.raises(ServingError) as caught:
        site.change("gpu9", "drained")
    assert caught.value.message == (
        'the server "gpu9" does not exist in the backend "qwen": it has "gpu1", "gpu2", "gpu3"'
    )
    with pytest.raises(ServingError) as caught:
        Haproxy(site.socket, "nothing", "gpu1").servers()
    assert caught.value.message == (
        'the backend "nothing" does not exist in the gateway at "%s", or has no servers: those with servers are "qwen"'
        % site.socket
    )
    with pytest.raises(ServingError) as caught:
        Haproxy("/nonexistent/socket", "qwen", "gpu1").servers()
    assert caught.value.message == ('the gateway at "/nonexistent/socket" cannot be asked: No such file or directory')
