# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whose listener it is: the unit's, one that takes connections in for the unit, or somebody else's."""

from __future__ import annotations

import ipaddress
import os
import socket
import typing as t

from . import (
    _bounded,
    _ownership,
    _processes,
    _site,  # noqa: F401
    _systemd,
)
from ._errors import ServingError
from ._tiers import Listener

try:
    import psutil
except ImportError:
    psutil = None  # type: ignore[assignment]

__all__ = ("Row", "activated", "addresses_of", "elsewhere", "is_here", "judge_listener", "rows_of_all", "silence")

SYSTEMCTL_TIMEOUT = 10.0
RESOLVE_TIMEOUT = 10.0
MOST_PORTS = 5  # of the unit, in a message: workers may listen on many among themselves
# They take connections in for a container; which one that is cannot be seen here.
FORWARDERS = frozenset(("docker-proxy", "rootlessport", "slirp4netns", "pasta", "pasta.avx2", "conmon"))
CONTAINER_CLIENTS = frozenset(("docker", "podman", "nerdctl", "conmon"))


class Row(t.NamedTuple):
    """One listening socket: address, the process that has it, when that can be seen, and port."""

    address: str
    pid: t.Optional[int]
    port: int = 0


def rows_of_all() -> t.List[Row]:
    """Every listening socket with the process that has it: a look at the open files of all processes."""
    try:
        return [
            Row(link.laddr.ip, link.pid, link.laddr.port)
            for link in psutil.net_connections("tcp")
            if link.status == psutil.CONN_LISTEN and link.laddr
        ]
    except psutil.Error as error:
        raise OSError(str(error)) from error


def judge_listener(
    rows: t.Sequence[Row],
    addresses: t.Sequence[str],
    table: _processes.Table,
    owned: _ownership.Owned,
    has_socket_unit: t.Callable[[], bool] = lambda: False,
) -> Listener:
    """Who answers at ``addresses``, of all that listen on the port, and whether that is the unit.

    Several can share one port, and then any of them may answer: all must be the unit's. What takes connections in
    for others counts only when something shows that the unit is one of these others.
    """
    candidates = _candidates(rows, addresses)
    other = elsewhere(table, owned)
    if not candidates:
        return Listener("translated", other) if other else Listener("none")
    pids = sorted({row.pid for row in candidates if row.pid})
    mine = {ref.pid for ref in owned.processes}
    own = [pid for pid in pids if pid in mine]
    doubts, strangers, forwarders = [], [], []
    for pid in pids:
        if pid in mine:
            continue
        process = table.get(pid)
        name = process.name if process is not None else "unknown"
        text = 'process %d "%s"' % (pid, name)
        unit, container = _ownership.attribute(process) if process is not None else (None, None)
        if pid == 1:
            if has_socket_unit():
                forwarders.append(text + " listens for a socket unit that starts this unit")
                continue
            doubts.append(text + " listens, and no socket unit that starts this unit has the port")
        elif name in FORWARDERS or (container and other):
            role = "of the container %s listens" % container[:12] if container else "takes connections in for others"
            if other:
                forwarders.append("%s %s: %s" % (text, role, other))
                continue
            doubts.append("%s %s, and nothing shows that the unit is one of them" % (text, role))
        else:
            strangers.append('%d "%s" (unit %s)' % (pid, name, unit or "none"))
    if strangers:
        shared = ", besides process %d of the unit" % own[0] if own else ""
        return Listener("foreign", ", ".join(strangers) + shared)
    if any(row.pid is None for row in candidates):
        doubts.append("a process listens that cannot be seen from here: run as root, or with become")
    if doubts:
        return Listener("unexplained", "; ".join(doubts))
    if own:
        return Listener("owned", "process %d of the unit listens" % own[0])
    return Listener("forwarder", forwarders[0])


def _candidates(rows: t.Sequence[Row], addresses: t.Sequence[str]) -> t.List[Row]:
    """The sockets that a connection can reach. Of one family, the kernel prefers the most precise address."""

    def at(*wanted: str) -> t.List[Row]:
        return [row for row in rows if row.address in wanted]

    found: t.List[Row] = []
    for address in addresses:
        if ":" in address:
            found += at(address) or at("::")
        else:
            found += at(address, "::ffff:" + address) or at("0.0.0.0") or at("::")
    return found


def silence(port: int, addresses: t.Sequence[str], rows: t.Sequence[Row], owned: _ownership.Owned) -> str:
    """What to say when nobody answers: the port, and where the unit listens instead."""
    mine = {ref.pid for ref in owned.processes}
    own = [row for row in rows if row.pid in mine]
    near = sorted({row.address for row in own if row.port == port})
    if near:
        text = "nothing listens on port %d at %s" % (port, " or ".join(addresses))
        return text + "; the unit listens there at %s" % ", ".join(near)
    ports = sorted({row.port for row in own})
    known = ", ".join(map(str, ports[:MOST_PORTS])) + (" and more" if len(ports) > MOST_PORTS else "")
    return "nothing listens on port %d" % port + ("; the unit listens on %s" % known if ports else "")


def addresses_of(host: str, timeout: float = RESOLVE_TIMEOUT) -> t.List[str]:
    """The addresses that a connection to ``host`` may be made to."""

    def resolve(_report: t.Any) -> t.List[str]:
        return [str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]

    try:
        names = [str(ipaddress.ip_address(host.partition("%")[0]))]
    except ValueError:
        outcome = _bounded.run(resolve, timeout)
        if outcome.status != "ok":
            why = outcome.error or "no answer within %.3g s" % timeout
            raise ServingError('the host name "%s" cannot be resolved: %s' % (host, why)) from None
        names = outcome.value
    return list(dict.fromkeys(map(_plain, names)))


def _plain(address: str) -> str:
    """One spelling for one address. What is no address in particular leads to the host itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_unspecified:
        return "127.0.0.1" if ip.version == 4 else "::1"
    return str(ip)


def is_here(address: str) -> bool:
    if ipaddress.ip_address(address).is_loopback:
        return True
    families = (socket.AF_INET, socket.AF_INET6)
    links = [link for links in psutil.net_if_addrs().values() for link in links]
    return address in {_plain(link.address) for link in links if link.family in families}


def elsewhere(table: _processes.Table, owned: _ownership.Owned) -> str:
    """What shows that the unit serves from a container or another network, in words; empty when nothing does."""
    here = _network("self")
    for ref in owned.processes:
        process = table.by_ref(ref)
        if process is None:
            continue
        if process.name in CONTAINER_CLIENTS:
            return 'the unit runs a container by its process %d "%s"' % (ref.pid, process.name)
        if here and _network(ref.pid) not in (0, here):
            return 'process %d "%s" of the unit has a network of its own' % (ref.pid, process.name)
    return ""


def _network(pid: t.Union[int, str]) -> int:
    try:
        return os.stat("/proc/%s/ns/net" % pid).st_ino
    except OSError:
        return 0


def activated(unit: str, port: int, timeout: float = SYSTEMCTL_TIMEOUT) -> bool:
    """Whether a socket unit that starts this unit has the port."""
    for name in _properties(unit, "TriggeredBy", timeout).split():
        addresses = _properties(name, "Listen", timeout).splitlines() if name.endswith(".socket") else []
        if any(line.split(" ")[0].rpartition(":")[2] == str(port) for line in addresses):
            return True
    return False


def _properties(unit: str, name: str, timeout: float) -> str:
    _rc, out, _err = _systemd._systemctl(["show", "--value", "--property=" + name, "--", unit], timeout)
    return out
