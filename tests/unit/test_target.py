# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whose listener it is, by made-up tables of sockets and processes, and by a real one."""

from __future__ import annotations

import socket
import typing as t

import psutil
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _generation,
    _http,
    _ownership,
    _processes,
    _systemd,
    _target,
)
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
    return _target.judge_listener([_target.Row(*row) for row in rows], host, table, owned, lambda: activated)


@pytest.fixture(autouse=True)
def one_network(monkeypatch: pytest.MonkeyPatch) -> t.Dict[t.Any, int]:
    networks: t.Dict[t.Any, int] = {}
    monkeypatch.setattr(_target, "_network", lambda pid: networks.get(pid, 7))
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


def target(url: str) -> _target.HostTarget:
    return _target.HostTarget("x.service", url, _generation.Question(_engines.get(None)), _http.Access())


def test_a_table_of_sockets_that_cannot_be_read_is_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> t.NoReturn:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "net_connections", fail)
    found = target("http://127.0.0.1:9").listener(_systemd.UnitState("x.service"))
    assert found.kind == "unexplained"
    assert found.detail.startswith("who listens cannot be read: ")


def test_a_real_listener_of_another_process_is_foreign() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        url = "http://127.0.0.1:%d" % server.getsockname()[1]
        assert target(url).listener(_systemd.UnitState("x.service")).kind == "foreign"
    assert target(url).listener(_systemd.UnitState("x.service")).kind == "none"


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
    monkeypatch.setattr(_target, "_properties", lambda unit, name: properties.get((unit, name), ""))
    assert _target._activated("x.service", 9) is activated
