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
    _forwarding,
    _ownership,
    _processes,
    _site,  # noqa: F401
    _sockets,
    _systemd,
)
from ._errors import ServingError
from ._tiers import Listener

try:
    import psutil
except ImportError:
    psutil = None  # type: ignore[assignment]

__all__ = (
    *("Row", "activated", "addresses_of", "elsewhere", "has_port", "is_here", "judge_listener", "rows_of_all"),
    "silence",
)

SYSTEMCTL_TIMEOUT = 10.0
RESOLVE_TIMEOUT = 10.0
MOST_PORTS = 5  # of the unit, in a message: workers may listen on many among themselves
# They take connections in for a container, or keep its port; which one that is cannot always be seen.
FORWARDERS = frozenset(("docker-proxy", "rootlessport", "slirp4netns", "pasta", "pasta.avx2", "conmon", "dockerd"))
# These run beside the client that started them, in its unit, unless a daemon or a user's own manager has them.
BESIDE_CLIENTS = frozenset(("rootlessport", "slirp4netns", "pasta", "pasta.avx2"))
DAEMONS = ("docker.service", "podman.service", "user@")
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
    ways: t.Optional[_forwarding.Ways] = None,
) -> Listener:
    """Who answers at ``addresses``, of all that listen on the port, and whether that is the unit.

    Several can share one port, and then any of them may answer: all must be the unit's. Of what takes connections in
    for others ``ways`` tells for whom; where that cannot be told it counts only when the unit is one of such others.
    """
    candidates = _sockets.reached_at(rows, addresses)
    other = elsewhere(table, owned)
    if not candidates:
        return _unheard(other, ways)
    pids = sorted({row.pid for row in candidates if row.pid})
    mine = {ref.pid for ref in owned.processes}
    helpers = {pid for pid in mine if ways is not None and _forwarding.leads_on(table.get(pid))}
    own = [pid for pid in pids if pid in mine - helpers]
    found: t.Dict[str, t.List[str]] = {}
    for pid in pids:
        if pid not in own:
            helped = other or ("it is the unit's own" if pid in helpers else "")
            kind, text = _explain(pid, table.get(pid), helped, has_socket_unit, ways)
            found.setdefault(kind, []).append(text)
    if "other" in found:
        shared = ", besides process %d of the unit" % own[0] if own else ""
        return Listener("foreign", ", ".join(found["other"]) + shared)
    if any(row.pid is None for row in candidates):
        if os.geteuid():
            text = "whose the process is that listens cannot be seen without more rights: run as root, or with become"
            return Listener("unseen", text)
        text = "a process listens that cannot be seen from here: run as root, or with become"
        found.setdefault("doubt", []).append(text)
    if "doubt" in found:
        return Listener("unexplained", "; ".join(found["doubt"]))
    if "nobody" in found:
        return Listener("unserved", found["nobody"][0])
    if own:
        return Listener("owned", "process %d of the unit listens" % own[0])
    if "unit" in found:
        return Listener("forwarder", found["unit"][0])
    return Listener("none", found["quiet"][0])


def _unheard(other: str, ways: t.Optional[_forwarding.Ways]) -> Listener:
    """Nobody listens on this host; the kernel may lead connections to somebody all the same."""
    end = ways.led()[1] if ways is not None else None
    if end is not None and end.whose != "nobody":
        return Listener("owned" if end.whose == "unit" else "foreign", "the kernel leads connections to " + end.text)
    return Listener("translated", other) if other else Listener("none")


def _explain(
    pid: int,
    process: t.Optional[_processes.Process],
    other: str,
    has_socket_unit: t.Callable[[], bool],
    ways: t.Optional[_forwarding.Ways],
) -> t.Tuple[str, str]:
    """For whom a process that is not the unit's listens: the unit, other, nobody yet, or a doubt; and in words.

    "quiet" is what keeps a port at which no connection is taken.
    """
    name = process.name if process is not None else "unknown"
    text = 'process %d "%s"' % (pid, name)
    if pid == 1:
        if has_socket_unit():
            return "unit", text + " listens for a socket unit that starts this unit"
        end = ways.of_socket_unit() if ways is not None else None
        if end is not None:
            return end.whose, "%s listens %s" % (text, end.text)
        return "doubt", text + " listens, and no socket unit that starts this unit has the port"
    if process is None:
        return "other", '%d "%s" (unit none)' % (pid, name)
    if ways is not None and name in _forwarding.PROXIES:
        end = ways.behind(process)
        if end is not None:
            return end.whose, "%s leads to %s" % (text, end.text)
    if ways is not None and name in _forwarding.KEEPERS:
        taken, end = ways.led()
        if not taken:
            inner = ways.inner()
            return "quiet", text + " keeps the port for others, and no connection is taken" + (inner and "; " + inner)
        if end is not None:
            return end.whose, "%s keeps the port for others, and connections come to %s" % (text, end.text)
    unit, container = _ownership.attribute(process)
    name = "rootlessport" if name == "exe" and ways is not None and ways.is_rootlessport(process) else name
    if name in BESIDE_CLIENTS and (unit or "").endswith(".service") and not str(unit).startswith(DAEMONS):
        return "other", _forwarding.described(process)
    # A container that is known to be the unit's is owned, and so are its processes.
    in_doubt = container and other and (ways is None or ways.may_be_mine(process))
    if name not in FORWARDERS and not in_doubt:
        return "other", _forwarding.described(process)
    role = "of the container %s listens" % container[:12] if container else "takes connections in for others"
    if ways is not None and ways.late:
        return "doubt", "%s %s, and which container the unit runs was not told in time" % (text, role)
    if other:
        return "unit", "%s %s: %s" % (text, role, other)
    return "doubt", "%s %s, and nothing shows that the unit is one of them" % (text, role)


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
    names = _properties(unit, "TriggeredBy", timeout).split()
    return any(name.endswith(".socket") and has_port(name, port, timeout) for name in names)


def has_port(socket: str, port: int, timeout: float = SYSTEMCTL_TIMEOUT) -> bool:
    """Whether a socket unit listens on the port, or would."""
    return any(_forwarding.is_port(line, port) for line in _properties(socket, "Listen", timeout).splitlines())


def _properties(unit: str, name: str, timeout: float) -> str:
    _rc, out, _err = _systemd._systemctl(["show", "--value", "--property=" + name, "--", unit], timeout)
    return out
