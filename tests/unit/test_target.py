# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whose listener it is, by made-up tables of sockets and processes, and by a real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import typing as t

import psutil
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _generation,
    _http,
    _listening,
    _ownership,
    _processes,
    _sockets,
    _systemd,
    _target,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener

CONTAINER = "/system.slice/docker-" + "a" * 64 + ".scope"
UNSEEN = "a process listens that cannot be seen from here: run as root, or with become"


def process(pid: int, name: str, cgroup: str = "/") -> _processes.Process:
    return _processes.Process(
        _processes.ProcessRef(pid, 1),
        ppid=1,
        pgrp=pid,
        session=pid,
        state="S",
        name=name,
        uid=0,
        gids=(0,),
        cgroup=cgroup,
        threads=1,
        kernel_thread=False,
        cpu_ticks=0,
    )


def judge(
    *rows: t.Tuple[str, t.Optional[int]],
    host: str = "127.0.0.1",
    mine: t.Sequence[str] = ("engine",),
    activated: bool = False,
) -> Listener:
    """Processes 10 and up are the unit's, the others are not."""
    own = [process(10 + number, name) for number, name in enumerate(mine)]
    strangers = [process(1, "systemd"), process(20, "chat"), process(30, "docker-proxy")]
    table = _processes.Table([*own, *strangers, process(40, "engine", CONTAINER)])
    owned = _ownership.Owned()
    for one in own:
        owned.add(one, "cgroup", True)
    names = {"localhost": ["::1", "127.0.0.1"], "gpu1.example.com": ["127.0.1.1", "10.0.0.5"]}
    found = [_listening.Row(*row) for row in rows]
    return _listening.judge_listener(found, names.get(host, [host]), table, owned, lambda: activated)


@pytest.fixture(autouse=True)
def one_network(monkeypatch: pytest.MonkeyPatch) -> t.Dict[t.Any, int]:
    networks: t.Dict[t.Any, int] = {}
    monkeypatch.setattr(_listening, "_network", lambda pid: networks.get(pid, 7))
    return networks


@pytest.mark.parametrize(
    ("rows", "host", "kind"),
    [
        ([("0.0.0.0", 10)], "127.0.0.1", "owned"),
        ([("0.0.0.0", 20)], "127.0.0.1", "foreign"),
        # The kernel hands a connection to the most precise address of its family.
        ([("0.0.0.0", 10), ("127.0.0.1", 20)], "127.0.0.1", "foreign"),
        ([("127.0.0.1", 10), ("0.0.0.0", 20)], "localhost", "owned"),
        ([("10.0.0.5", 20), ("0.0.0.0", 10)], "127.0.0.1", "owned"),
        ([("0.0.0.0", 20), ("::", 10)], "127.0.0.1", "foreign"),
        ([("0.0.0.0", 20), ("::", 10)], "::1", "owned"),
        ([("::1", 10), ("0.0.0.0", 20)], "127.0.0.1", "foreign"),
        ([("::", 10)], "127.0.0.1", "owned"),
        ([("10.0.0.5", 20)], "127.0.0.1", "none"),
        ([("10.0.0.5", 10)], "gpu1.example.com", "owned"),
        ([("0.0.0.0", 40)], "127.0.0.1", "foreign"),
        # With SO_REUSEPORT several share a port, and the kernel lets any of them answer.
        ([("127.0.0.1", 10), ("127.0.0.1", 20)], "127.0.0.1", "foreign"),
        ([("127.0.0.1", 20), ("127.0.0.1", 10)], "127.0.0.1", "foreign"),
        ([("127.0.0.1", 10), ("::ffff:127.0.0.1", 20)], "127.0.0.1", "foreign"),
        ([("127.0.0.1", 10), ("::1", 20)], "localhost", "foreign"),
        ([("127.0.0.1", 10), ("127.0.0.1", 30)], "127.0.0.1", "unexplained"),
        ([("127.0.0.1", 10), ("127.0.0.1", None)], "127.0.0.1", "unexplained"),
        ([("127.0.0.1", 10), ("127.0.0.1", 1)], "127.0.0.1", "unexplained"),
    ],
)
def test_who_listens(rows: t.List[t.Tuple[str, t.Optional[int]]], host: str, kind: str) -> None:
    assert judge(*rows, host=host).kind == kind


def test_a_proxy_counts_only_for_a_unit_that_runs_a_container() -> None:
    assert judge(("::", 30)) == Listener(
        "unexplained",
        'process 30 "docker-proxy" takes connections in for others, and nothing shows that the unit is one of them',
    )
    assert judge(("::", 30), mine=("sh", "docker")) == Listener(
        "forwarder",
        'process 30 "docker-proxy" takes connections in for others: '
        'the unit runs a container by its process 11 "docker"',
    )


def test_the_first_process_counts_only_for_a_unit_that_its_socket_starts() -> None:
    assert judge(("::", 1)) == Listener(
        "unexplained", 'process 1 "systemd" listens, and no socket unit that starts this unit has the port'
    )
    assert judge(("::", 1), activated=True) == Listener(
        "forwarder", 'process 1 "systemd" listens for a socket unit that starts this unit'
    )


def test_a_process_that_cannot_be_seen_is_nobodys() -> None:
    assert judge(("0.0.0.0", None)) == Listener("unexplained", UNSEEN)
    assert judge(("0.0.0.0", None), ("0.0.0.0", 20)).kind == "foreign"


def test_the_engine_in_a_container_that_the_unit_runs_is_no_stranger() -> None:
    assert judge(("0.0.0.0", 40), mine=("docker",)) == Listener(
        "forwarder",
        'process 40 "engine" of the container aaaaaaaaaaaa listens: '
        'the unit runs a container by its process 10 "docker"',
    )


def test_nobody_listens_where_the_unit_lives_in_a_network_of_its_own(one_network: t.Dict[t.Any, int]) -> None:
    assert judge() == Listener("none")
    one_network[10] = 8
    assert judge() == Listener("translated", 'process 10 "engine" of the unit has a network of its own')
    assert judge(("::", 20)).kind == "foreign"


def test_who_shares_the_port_is_named() -> None:
    assert judge(("0.0.0.0", 10), ("0.0.0.0", 20)).detail == ('20 "chat" (unit none), besides process 10 of the unit')
    assert judge(("0.0.0.0", 10), ("0.0.0.0", 1), activated=True).kind == "owned"


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("::", ["::1"]),
        ("::ffff:10.0.0.5", ["10.0.0.5"]),
        ("0:0:0:0:0:0:0:1", ["::1"]),
        ("fe80::1%eth0", ["fe80::1"]),
    ],
)
def test_a_host_is_looked_for_at_its_addresses(host: str, addresses: t.List[str]) -> None:
    assert _listening.addresses_of(host) == addresses


def test_a_name_that_nobody_knows_is_one_sentence() -> None:
    with pytest.raises(ServingError) as caught:
        _listening.addresses_of("no-such-host.invalid")
    assert caught.value.message.startswith('the host name "no-such-host.invalid" cannot be resolved: ')


def test_the_url_of_another_host_is_refused_for_a_unit_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        target("http://192.0.2.7:8000").check_here()
    assert caught.value.message == (
        'the unit "x.service" cannot be waited for at "192.0.2.7": 192.0.2.7 is no address of this host'
    )
    own = [link.address for links in psutil.net_if_addrs().values() for link in links if link.family == socket.AF_INET]
    for host in (*own, "127.0.0.1", "127.0.1.1", "localhost", "[::1]", "0.0.0.0"):
        target("http://%s:8000" % host).check_here()
    # A name that leads to two hosts may lead to the wrong one.
    monkeypatch.setattr(_listening, "addresses_of", lambda *_words: ["127.0.0.1", "192.0.2.7"])
    with pytest.raises(UsageError):
        target("http://gpu1.example.com").check_here()


def test_silence_names_the_port_and_where_the_unit_listens_instead() -> None:
    owned = _ownership.Owned()
    owned.add(process(10, "engine"), "cgroup", True)

    def silence(*rows: t.Tuple[str, int, int]) -> str:
        return _listening.silence(8081, ["127.0.0.1"], [_listening.Row(*row) for row in rows], owned)

    assert silence(("0.0.0.0", 20, 22)) == "nothing listens on port 8081"
    assert silence(("0.0.0.0", 10, 8080)) == "nothing listens on port 8081; the unit listens on 8080"
    assert silence(("10.0.0.5", 10, 8081), ("::", 10, 9)) == (
        "nothing listens on port 8081 at 127.0.0.1; the unit listens there at 10.0.0.5"
    )
    many = [("0.0.0.0", 10, port) for port in range(1, 9)]
    assert silence(*many).endswith("; the unit listens on 1, 2, 3, 4, 5 and more")


def target(url: str) -> _target.HostTarget:
    return _target.HostTarget("x.service", url, _generation.Question(_engines.get(None)), _http.Access())


def test_a_table_of_sockets_that_cannot_be_read_is_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: t.Any) -> t.NoReturn:
        raise psutil.AccessDenied(1)

    def refuse() -> t.NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "net_connections", fail)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        url = "http://127.0.0.1:%d" % server.getsockname()[1]
        found = target(url).listener(_systemd.UnitState("x.service"))
        assert found.kind == "unexplained"
        assert found.detail.startswith("who listens cannot be read: ")
    monkeypatch.setattr(_sockets, "listening", refuse)
    found = target("http://127.0.0.1:9").listener(_systemd.UnitState("x.service"))
    assert found.kind == "unexplained"
    assert found.detail.startswith("who listens cannot be read: ")


def test_a_real_listener_of_another_process_is_foreign() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        url = "http://127.0.0.1:%d" % server.getsockname()[1]
        assert target(url).listener(_systemd.UnitState("x.service")).kind == "foreign"
    found = target(url).listener(_systemd.UnitState("x.service"))
    assert (found.kind, found.silence) == ("none", "nothing listens on port %s" % url.rpartition(":")[2])


def test_a_real_stranger_that_shares_the_port_of_the_unit_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = _ownership.Owned()
    owned.add(process(os.getpid(), "engine"), "cgroup", True)
    monkeypatch.setattr(_ownership, "of_unit", lambda *arguments, **options: owned)
    code = (
        "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(1); print('up', flush=True); sys.stdin.read()"
    )
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        url = "http://127.0.0.1:%d" % port
        state = _systemd.UnitState("x.service")
        assert target(url).listener(state).kind == "owned"
        assert (
            target("http://127.0.0.1:9")
            .listener(state)
            .silence.startswith("nothing listens on port 9; the unit listens on ")
        )
        command = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as orphan:
            assert orphan.stdout is not None and orphan.stdout.readline() == b"up\n"
            found = target(url).listener(state)
            assert (found.kind, str(orphan.pid) in found.detail) == ("foreign", True)
            orphan.kill()


@pytest.mark.parametrize(
    ("properties", "activated"),
    [
        ({("x.service", "TriggeredBy"): "x.timer x.socket\n", ("x.socket", "Listen"): "[::]:9 (Stream)\n"}, True),
        ({("x.service", "TriggeredBy"): "x.socket\n", ("x.socket", "Listen"): "/run/x (Stream)\n:99 (Stream)"}, False),
        ({("x.service", "TriggeredBy"): "x.timer\n", ("x.timer", "Listen"): "127.0.0.1:9 (Stream)"}, False),
        ({}, False),
    ],
)
def test_a_socket_unit_explains_the_port_that_it_has(
    monkeypatch: pytest.MonkeyPatch, properties: t.Dict[t.Tuple[str, str], str], activated: bool
) -> None:
    monkeypatch.setattr(_listening, "_properties", lambda unit, name, _timeout: properties.get((unit, name), ""))
    assert _listening.activated("x.service", 9) is activated
