# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""For whom somebody else takes connections in: made-up networks, command lines and sockets of systemd."""

from __future__ import annotations

import os
import pathlib
import struct
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _forwarding,
    _generation,
    _http,
    _knock,
    _listening,
    _ownership,
    _processes,
    _sockets,
    _systemd,
    _target,
)

MINE = "/system.slice/docker-" + "a" * 64 + ".scope"
THEIRS = "/system.slice/docker-" + "b" * 64 + ".scope"
PORT = 9101
ROW = "%4d: %s %s %s 00000000:00000000 00:00000000 00000000     0        0 %d 1 0000000000000000 100 0 0 10 0\n"
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TRIE = """Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 172.17.0.0
        /16 link UNICAST
     |-- %s
        /32 host LOCAL
     |-- 172.17.255.255
        /32 link BROADCAST
"""


def spelled(address: str, port: int) -> str:
    raw = bytes(map(int, address.split(".")))
    return "%08X:%04X" % (struct.unpack("=I", raw)[0], port)


class Host:
    """Networks with addresses and sockets, and processes in them. The unit runs "docker" (10) and its engine (11)."""

    def __init__(self, proc: pathlib.Path) -> None:
        self.proc = proc
        self.rows: t.List[_processes.Process] = []
        self.owned = _ownership.Owned()
        self.networks: t.Dict[str, t.List[str]] = {}
        (proc / "networks").mkdir()
        self.network("host", "10.0.0.5")
        self.network("mine", "172.17.0.2")
        self.network("theirs", "172.17.0.3")
        self.add("self", "", "host")
        self.add(1, "systemd", "host", "/init.scope", "/sbin/init")
        self.add(10, "docker", "host", "/system.slice/x.service", "docker", own=True)
        self.add(11, "engine", "mine", MINE, "engine", own=True)
        self.add(21, "chat", "theirs", THEIRS, "chat")

    def network(self, name: str, address: str) -> None:
        folder = self.proc / "networks" / name
        folder.mkdir()
        (folder / "id").write_text("")
        (folder / "fib_trie").write_text(TRIE % address)
        self.networks[name] = []
        self.write(name)

    def write(self, name: str) -> None:
        listed = sorted(self.networks[name], key=lambda row: " 0A " not in row)  # as the kernel does
        (self.proc / "networks" / name / "tcp").write_text(HEAD + "".join(listed))

    def add(
        self,
        pid: t.Union[int, str],
        name: str,
        net: str,
        cgroup: str = "/",
        *words: str,
        own: bool = False,
        age: int = 1,
    ) -> None:
        folder = self.proc / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "fd").mkdir()
        (folder / "ns" / "net").symlink_to(self.proc / "networks" / net / "id")
        (folder / "net").symlink_to(self.proc / "networks" / net)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
        if isinstance(pid, int):
            ref = _processes.ProcessRef(pid, age)
            row = _processes.Process(ref, 1, pid, pid, "S", name, 0, (0,), cgroup, 1, False, 0)
            self.rows.append(row)
            if own:
                self.owned.add(row, "cgroup", True)

    def listen(self, net: str, address: str, port: int, inode: int, *pids: int) -> None:
        self.networks[net].append(ROW % (0, spelled(address, port), spelled("0.0.0.0", 0), "0A", inode))
        for pid in pids:
            (self.proc / str(pid) / "fd" / str(inode)).symlink_to("socket:[%d]" % inode)
        self.write(net)

    def connection(self, net: str, here: str, port: int, there: str, sender: int, state: str = "01") -> None:
        self.networks[net].append(ROW % (1, spelled(here, port), spelled(there, sender), state, 0))
        self.write(net)

    @property
    def table(self) -> _processes.Table:
        return _processes.Table(self.rows, str(self.proc))

    def ways(self, **options: t.Any) -> _forwarding.Ways:
        return _forwarding.Ways(PORT, ["127.0.0.1"], self.table, self.owned, **options)

    def judge(self, *pids: int, **options: t.Any) -> t.Tuple[str, str]:
        rows = [_listening.Row("0.0.0.0", pid, PORT) for pid in pids]
        found = _listening.judge_listener(
            rows, ["127.0.0.1"], self.table, self.owned, lambda: False, self.ways(**options)
        )
        return found.kind, found.detail


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    # No connection is taken unless a test says so; systemd knows no socket.
    monkeypatch.setattr(_knock, "connect", lambda *arguments: None)
    monkeypatch.setattr(_systemd, "_systemctl", lambda *arguments: (0, "", ""))
    found = Host(tmp_path)
    here = os.stat(tmp_path / "networks" / "host" / "id").st_ino
    inodes = {pid: os.stat(tmp_path / str(pid) / "ns" / "net").st_ino for pid in (10, 11)}
    monkeypatch.setattr(_listening, "_network", lambda pid: inodes.get(pid, here))
    return found


def proxy(host: Host, address: str = "172.17.0.2", port: int = 8000, words: str = "") -> None:
    words = words or "-proto tcp -host-ip 0.0.0.0 -host-port 9101 -container-ip %s -container-port %d"
    words = words % (address, port) if "%" in words else words
    host.add(30, "docker-proxy", "host", "/system.slice/docker.service", "/usr/bin/docker-proxy", *words.split())


# docker-proxy says where it leads to

LEADS = 'process 30 "docker-proxy" leads to '
ENGINE = 'process 11 "engine" of the unit, at port 8000 of 172.17.0.2'
CHAT = '21 "chat" (container bbbbbbbbbbbb), at port 8000 of 172.17.0.3'


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--container-ip=%s --container-port=%d",
        "-use-listen-fd -container-ip %s -host-port 9101 -container-port %d",
    ],
)
def test_a_proxy_that_leads_to_the_engine_is_the_units(host: Host, words: str) -> None:
    host.listen("mine", "0.0.0.0", 8000, 77, 11)
    proxy(host, words=words)
    assert host.judge(30) == ("forwarder", LEADS + ENGINE)


def test_a_proxy_that_leads_to_another_container_is_foreign_also_for_a_unit_with_a_container(host: Host) -> None:
    host.listen("theirs", "0.0.0.0", 8000, 78, 21)
    host.listen("mine", "0.0.0.0", 8000, 77, 11)
    proxy(host, "172.17.0.3")
    assert host.judge(30) == ("foreign", LEADS + CHAT)


def test_a_stranger_in_the_network_of_the_unit_is_foreign(host: Host) -> None:
    host.add(22, "sidecar", "mine", "/system.slice/y.service")
    host.listen("mine", "0.0.0.0", 8000, 77, 22)
    proxy(host)
    assert host.judge(30) == ("foreign", LEADS + '22 "sidecar" (unit y.service), at port 8000 of 172.17.0.2')


def test_a_stranger_that_shares_the_port_of_the_engine_is_foreign(host: Host) -> None:
    host.add(22, "sidecar", "mine", "/system.slice/y.service")
    host.listen("mine", "0.0.0.0", 8000, 77, 11)
    host.listen("mine", "0.0.0.0", 8000, 79, 22)
    proxy(host)
    assert host.judge(30) == ("foreign", LEADS + '22 "sidecar" (unit y.service), at port 8000 of 172.17.0.2')


def test_a_socket_that_the_engine_shares_with_who_handed_it_on_is_the_engines(host: Host) -> None:
    host.add(22, "launcher", "mine", "/system.slice/y.service")
    host.listen("mine", "0.0.0.0", 8000, 77, 22, 11)
    proxy(host)
    assert host.judge(30) == ("forwarder", LEADS + ENGINE)


@pytest.mark.parametrize(
    ("listens", "words"),
    [
        ((), "port 8000 of 172.17.0.2, where nobody listens"),
        ((("0.0.0.0", 8001),), "port 8000 of 172.17.0.2, where nobody listens; the unit listens there on 8001"),
        ((("127.0.0.1", 8000),), "port 8000 of 172.17.0.2, where nobody listens; the unit listens there on 8000"),
    ],
)
def test_a_proxy_with_nobody_behind_it_is_said_so(
    host: Host, listens: t.Sequence[t.Tuple[str, int]], words: str
) -> None:
    for number, (address, port) in enumerate(listens):
        host.listen("mine", address, port, 70 + number, 11)
    proxy(host)
    assert host.judge(30) == ("unserved", LEADS + words)


def test_a_container_that_has_no_process_yet_is_nobodys_port(host: Host) -> None:
    proxy(host, "172.17.0.9")
    assert host.judge(30) == ("unserved", LEADS + "port 8000 of 172.17.0.9, where no process is")


def test_where_networks_may_not_be_seen_nothing_follows_from_seeing_none(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: t.Any, *arguments: t.Any, **options: t.Any) -> os.stat_result:
        if str(path).endswith("11/ns/net"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    proxy(host)
    monkeypatch.setattr(os, "stat", stat)
    assert host.judge(30)[0] == "forwarder"


@pytest.mark.parametrize("words", ["-proto tcp", "-container-ip 172.17.0.2 -container-port x", "-container-ip"])
def test_a_proxy_that_does_not_say_where_it_leads_to_counts_as_before(host: Host, words: str) -> None:
    proxy(host, words=words)
    assert host.judge(30) == (
        "forwarder",
        'process 30 "docker-proxy" takes connections in for others: '
        'the unit runs a container by its process 10 "docker"',
    )


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/system.slice/y.service", "foreign"),
        ("/system.slice/podman.service", "forwarder"),
        ("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-1.scope", "forwarder"),
        ("/user.slice/user-1000.slice/session-1.scope", "forwarder"),
        ("/", "forwarder"),
    ],
)
@pytest.mark.parametrize("name", ["rootlessport", "slirp4netns", "pasta", "pasta.avx2"])
def test_who_forwards_beside_the_client_of_another_unit_is_foreign(
    host: Host, name: str, place: str, kind: str
) -> None:
    host.add(30, name, "host", place)
    found = host.judge(30)
    assert found[0] == kind
    assert kind == "forwarder" or found[1] == '30 "%s" (unit y.service)' % name


@pytest.mark.parametrize(
    ("word", "kind"),
    [("containers-rootlessport-child", "forwarder"), ("rootlessport-child", "forwarder"), ("x", "foreign")],
)
def test_the_child_of_rootlessport_is_known_by_its_command_line(host: Host, word: str, kind: str) -> None:
    host.add(30, "exe", "host", "/user.slice/user-1000.slice/session-1.scope", word)
    assert host.judge(30)[0] == kind


# Which container is the unit's may not be known


def unknown(host: Host, age: int) -> None:
    """The same unit, but nobody could tell that the engine is its own."""
    host.owned = _ownership.Owned()
    host.rows = [row for row in host.rows if row.pid not in (10, 11)]
    for pid in (10, 11):
        for child in (host.proc / str(pid) / "fd").iterdir():
            child.unlink()
        for name in ("ns/net", "net", "cmdline"):
            (host.proc / str(pid) / name).unlink()
        for name in ("ns", "fd"):
            (host.proc / str(pid) / name).rmdir()
        (host.proc / str(pid)).rmdir()
    host.add(10, "docker", "host", "/system.slice/x.service", "docker", own=True, age=100)
    host.add(11, "engine", "mine", MINE, "engine", age=age)
    host.listen("mine", "0.0.0.0", 8000, 77, 11)


@pytest.mark.parametrize(
    ("age", "options", "kind"),
    [
        (200, {"unsure": True}, "forwarder"),
        (50, {"unsure": True}, "foreign"),  # older than the unit
        (200, {}, "foreign"),  # its name is known, and it is not this one
        (200, {"unsure": True, "late": True}, "unexplained"),
        (50, {"unsure": True, "late": True}, "foreign"),
    ],
)
@pytest.mark.parametrize("way", ["proxy", "shared network"])
def test_a_container_that_nobody_knows_may_be_the_units_if_it_is_younger(
    host: Host, age: int, options: t.Dict[str, bool], kind: str, way: str
) -> None:
    unknown(host, age)
    proxy(host)
    assert host.judge(30 if way == "proxy" else 11, **options)[0] == kind


# systemd-socket-proxyd


def test_a_proxy_of_systemd_leads_on_in_the_network_that_it_is_in(host: Host) -> None:
    host.add(
        40, "systemd-socket-", "mine", "/system.slice/p.service", "/lib/systemd/systemd-socket-proxyd", "localhost:8000"
    )
    assert host.judge(40)[0] == "unserved"
    host.listen("mine", "127.0.0.1", 8000, 77, 11)
    assert host.judge(40) == (
        "forwarder",
        'process 40 "systemd-socket-" leads to process 11 "engine" of the unit, at port 8000 of 127.0.0.1',
    )
    host.add(41, "systemd-socket-", "host", "/system.slice/q.service", "systemd-socket-proxyd", "127.0.0.1:8000")
    host.listen("host", "0.0.0.0", 8000, 79, 1)
    assert host.judge(41)[0] == "foreign"


def test_a_proxy_of_systemd_waits_alone_in_the_network_of_a_unit_between_two_lives(host: Host) -> None:
    host.network("joined", "10.1.0.1")
    words = ("systemd-socket-proxyd", "127.0.0.1:8000")
    host.add(40, "systemd-socket-", "joined", "/system.slice/p.service", *words)
    nobody = 'process 40 "systemd-socket-" leads to port 8000 of 127.0.0.1, where nobody listens'
    assert host.judge(40) == ("unserved", nobody)
    host.add(42, "chat", "joined", "/system.slice/c.service")
    assert host.judge(40)[0] == "foreign"
    # In the network of the host, where an engine may be that has yet to open its port.
    host.add(41, "systemd-socket-", "host", "/system.slice/q.service", *words)
    assert host.judge(41) == ("unserved", nobody.replace("40", "41"))
    host.owned = _ownership.Owned()
    assert host.judge(41) == ("foreign", nobody.replace("40", "41"))


@pytest.mark.parametrize(
    ("words", "destinations"),
    [
        (["p", "127.0.0.1:8000"], [("127.0.0.1", 8000)]),
        (["p", "--exit-idle-time=5s", "[::1]:8000"], [("::1", 8000)]),
        (["p", "localhost:81"], [("127.0.0.1", 81), ("::1", 81)]),
        (["p", "10.0.0.1"], [("10.0.0.1", 80)]),
        (["p", "/run/engine.sock"], []),
        (["p", "gpu1.example.com:80"], []),
        (["p", "localhost:http"], []),
        (["p"], []),
        ([], []),
    ],
)
def test_where_a_proxy_of_systemd_leads_to(words: t.List[str], destinations: t.List[t.Tuple[str, int]]) -> None:
    assert _forwarding._destination(words) == destinations


# Sockets that systemd listens at

SOCKETS = """Id=dbus.socket
Listen=/run/dbus/system_bus_socket (Stream)
Triggers=dbus.service

Id=p.socket
Listen=/run/p (Stream)
Listen=[::]:9101 (Stream)
Triggers=p.service
"""


def test_who_is_started_for_a_socket_of_systemd_is_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.judge(1)[0] == "unexplained"
    monkeypatch.setattr(_systemd, "_systemctl", lambda *arguments: (0, SOCKETS, ""))
    text = 'process 1 "systemd" listens for "p.socket", which starts "p.service"'
    assert host.judge(1) == ("unserved", text + ": that does not run")
    host.add(50, "haproxy", "host", "/system.slice/p.service", "haproxy")
    assert host.judge(1) == ("foreign", text)
    host.add(51, "systemd-socket-", "mine", "/system.slice/p.service", "systemd-socket-proxyd", "127.0.0.1:8000")
    host.listen("mine", "127.0.0.1", 8000, 77, 11)
    assert host.judge(1) == (
        "forwarder",
        text + ', which leads to process 11 "engine" of the unit, at port 8000 of 127.0.0.1',
    )


def test_a_datagram_socket_or_another_port_is_not_meant(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    others = SOCKETS.replace("9101 (Stream)", "9101 (Datagram)") + "\nId=q.socket\nListen=0.0.0.0:19101 (Stream)\n"
    monkeypatch.setattr(_systemd, "_systemctl", lambda *arguments: (0, others, ""))
    assert host.judge(1)[0] == "unexplained"


# What the kernel leads on


class Link:
    """A connection that was made from port 50001."""

    def getsockname(self) -> t.Tuple[str, int]:
        return "127.0.0.1", 50001

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_error: t.Any) -> None:
        pass


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, host: Host) -> Host:
    monkeypatch.setattr(_knock, "connect", lambda *arguments: Link())
    return host


@pytest.mark.parametrize("state", ["01", "03", "06", "08"])
@pytest.mark.parametrize("keeper", ["", "conmon", "dockerd"])
def test_a_connection_that_comes_to_the_network_of_the_unit_is_its_own(taken: Host, keeper: str, state: str) -> None:
    taken.listen("mine", "0.0.0.0", 8000, 77, 11)
    taken.connection("mine", "172.17.0.2", 8000, "10.0.0.5", 50001, state)
    if keeper:
        taken.add(60, keeper, "host", "/system.slice/k.service")
    kind, text = taken.judge(*([60] if keeper else []))
    assert kind == ("forwarder" if keeper else "owned")
    assert text.endswith("connections come to " + ENGINE if keeper else "the kernel leads connections to " + ENGINE)


@pytest.mark.parametrize("keeper", ["", "conmon", "dockerd"])
def test_a_connection_that_comes_to_another_network_is_foreign(taken: Host, keeper: str) -> None:
    taken.listen("theirs", "0.0.0.0", 8000, 78, 21)
    taken.connection("theirs", "172.17.0.3", 8000, "10.0.0.5", 50001)
    if keeper:
        taken.add(60, keeper, "host", "/system.slice/k.service")
    kind, text = taken.judge(*([60] if keeper else []))
    assert kind == "foreign"
    assert text.endswith(CHAT)


@pytest.mark.parametrize(("there", "sender"), [("10.0.0.5", 50002), ("192.0.2.7", 50001)])
def test_a_connection_of_somebody_else_is_not_ours(taken: Host, there: str, sender: int) -> None:
    taken.listen("theirs", "0.0.0.0", 8000, 78, 21)
    taken.connection("theirs", "172.17.0.3", 8000, there, sender)
    assert taken.judge() == ("translated", 'the unit runs a container by its process 10 "docker"')


def test_a_keeper_of_the_units_own_is_not_the_one_that_listens(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.add(60, "conmon", "host", "/system.slice/x.service", own=True)
    host.listen("mine", "0.0.0.0", 8001, 77, 11)
    assert host.judge(60) == (
        "none",
        'process 60 "conmon" keeps the port for others, and no connection is taken; '
        "in a network of its own the unit listens on 8001",
    )
    monkeypatch.setattr(_knock, "connect", lambda *arguments: Link())
    assert host.judge(60)[0] == "forwarder"  # where the connection went to cannot be seen
    assert host.judge(60, unsure=True, late=True)[0] == "unexplained"


def test_addresses_of_a_network_are_those_that_it_has_itself(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "7" / "net"
    folder.mkdir(parents=True)
    assert _sockets.addresses(7, str(tmp_path)) == set()
    (folder / "fib_trie").write_text(TRIE % "172.17.0.2")
    line = "%s 02 40 20 80     eth0\n"
    (folder / "if_inet6").write_text(line % ("fd00" + "0" * 27 + "2") + line % ("0" * 31 + "1"))
    assert _sockets.addresses(7, str(tmp_path)) == {"127.0.0.1", "172.17.0.2", "fd00::2", "::1"}
    real = _sockets.addresses()
    assert not real or "127.0.0.1" in real


def test_an_address_that_is_mapped_is_the_same(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "7" / "net"
    folder.mkdir(parents=True)
    (folder / "tcp").write_text(HEAD)
    ours = "0000000000000000FFFF0000%s"
    row = ROW % (0, ours % spelled("172.17.0.2", 8000), ours % spelled("10.0.0.5", 50001), "01", 0)
    (folder / "tcp6").write_text(HEAD + row)
    assert _sockets.came_in(7, 50001, {"10.0.0.5"}, str(tmp_path)) == ("172.17.0.2", 8000)
    assert _sockets.came_in(7, 50001, {"10.0.0.6"}, str(tmp_path)) is None


# What one look remembers


@pytest.fixture
def looked(host: Host, monkeypatch: pytest.MonkeyPatch) -> t.List[str]:
    """A target that sees this host, and who was looked at all."""
    looks: t.List[str] = []

    def rows() -> t.List[_listening.Row]:
        looks.append("all")
        return [_listening.Row("0.0.0.0", 30, PORT)]

    monkeypatch.setattr(_listening, "rows_of_all", rows)
    monkeypatch.setattr(_processes.Table, "snapshot", lambda *arguments: host.table)
    monkeypatch.setattr(_processes.Table, "of", lambda *arguments: _processes.Table([]))
    monkeypatch.setattr(_ownership, "of_unit", lambda *arguments, **options: host.owned)
    real = _sockets.listening
    monkeypatch.setattr(_sockets, "listening", lambda proc=str(host.proc), pid="self": real(proc, pid))
    return looks


def test_an_engine_that_opens_its_port_behind_a_proxy_is_seen_at_once(host: Host, looked: t.List[str]) -> None:
    proxy(host)
    host.listen("host", "0.0.0.0", PORT, 90, 30)
    question = _generation.Question(_engines.get(None))
    target = _target.HostTarget("x.service", "http://127.0.0.1:%d" % PORT, question, _http.Access())
    target.members.proc = str(host.proc)
    state = _systemd.UnitState("x.service", active_state="active", sub_state="running", main_pid=10)
    kinds = [target.listener(state).kind for _look in range(5)]
    assert (kinds, len(looked)) == (["unserved"] * 5, 1)  # that costs too much to be looked up at each look
    host.listen("mine", "0.0.0.0", 8000, 77, 11)
    assert target.listener(state).kind == "forwarder"
    assert len(looked) == 2


def test_a_keeper_of_the_unit_is_no_short_cut(host: Host, looked: t.List[str]) -> None:
    host.add(30, "conmon", "host", "/system.slice/x.service", own=True)
    host.listen("host", "0.0.0.0", PORT, 90, 30)
    question = _generation.Question(_engines.get(None))
    target = _target.HostTarget("x.service", "http://127.0.0.1:%d" % PORT, question, _http.Access())
    target.members.proc = str(host.proc)
    found = target.listener(_systemd.UnitState("x.service", active_state="active", sub_state="running", main_pid=10))
    assert found.kind == "none"
    assert found.silence == 'process 30 "conmon" keeps the port for others, and no connection is taken'
    assert looked == ["all"]
