# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A service on this host as a wait sees it: its unit, its processes, its log, its port, its answers."""

from __future__ import annotations

import os
import time
import typing as t
from urllib.parse import urlsplit

from . import (
    _generation,
    _http,
    _ownership,
    _processes,
    _site,  # noqa: F401
    _systemd,
)
from ._errors import ServingError
from ._progress import Activity, Usage
from ._tiers import Listener

try:
    import psutil
except ImportError:
    psutil = None  # type: ignore[assignment]

__all__ = ("HostTarget", "Row", "judge_listener")

FIRST_LINES = 2000
SNAPSHOT_AGE = 0.5
SYSTEMCTL_TIMEOUT = 10.0
PAGE = os.sysconf("SC_PAGE_SIZE")
# They take connections in for a container; which one that is cannot be seen here.
FORWARDERS = frozenset(("docker-proxy", "rootlessport", "slirp4netns", "pasta", "pasta.avx2", "conmon"))
CONTAINER_CLIENTS = frozenset(("docker", "podman", "nerdctl", "conmon"))


class Row(t.NamedTuple):
    """One listening socket: address, and the process that has it, when that can be seen."""

    address: str
    pid: t.Optional[int]


class HostTarget:
    """The real thing behind :class:`_readiness.Target`."""

    def __init__(
        self,
        unit: t.Optional[str],
        url: str,
        question: _generation.Question,
        access: _http.Access,
        mark_gid: t.Optional[int] = None,
    ) -> None:
        self.name, self.url, self.question, self.access, self.mark_gid = unit, url, question, access, mark_gid
        self._cursor: t.Optional[str] = None
        self._table: t.Optional[_processes.Table] = None
        self._owned = _ownership.Owned()
        self._looked = float("-inf")

    def unit(self) -> t.Optional[_systemd.UnitState]:
        return _systemd.show(self.name) if self.name else None

    def activity(self, state: _systemd.UnitState) -> Activity:
        self._look(state)
        assert self._table is not None
        found = {}
        for ref in self._owned.processes:
            process = self._table.by_ref(ref)
            if process is not None and not process.gone:
                found[(ref.pid, ref.start)] = Usage(
                    process.cpu_ticks / _processes.TICKS, _bytes_read(ref.pid), _memory(ref.pid)
                )
        return found

    def log(self, state: _systemd.UnitState) -> t.List[t.Tuple[str, bool]]:
        assert self.name is not None
        try:
            if self._cursor is not None:
                records = _systemd.journal(self.name, after_cursor=self._cursor)
            elif state.invocation_id:
                records = _systemd.journal(self.name, invocation=state.invocation_id, lines=FIRST_LINES)
            else:
                return []
        except ServingError:
            # Without the journal the other signs of movement still tell.
            return []
        if records:
            self._cursor = records[-1].cursor or self._cursor
        return [(record.message, record.pid != 1) for record in records]

    def listener(self, state: _systemd.UnitState) -> Listener:
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            rows = [
                Row(link.laddr.ip, link.pid)
                for link in psutil.net_connections("tcp")
                if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port
            ]
        except (psutil.Error, OSError) as error:
            return Listener("unexplained", "who listens cannot be read: %s" % error)
        self._looked = float("-inf")  # a listener may be younger than the last snapshot
        self._look(state)
        assert self._table is not None
        return judge_listener(
            rows, parts.hostname or "", self._table, self._owned, lambda: _activated(state.name, port)
        )

    def get(self, path: str, timeout: float) -> _http.Answer:
        return _http.fetch(_http.Request("GET", _http.join(self.url, path)), self.access, timeout)

    def generate(self, model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> _generation.Side:
        question = self.question._replace(model=model)
        sides = _generation.probe({_generation.DIRECT: self.url}, question, self.access, timeout, tick)
        return sides[_generation.DIRECT]

    def _look(self, state: _systemd.UnitState) -> None:
        now = time.monotonic()
        if self._table is not None and now - self._looked < SNAPSHOT_AGE:
            return
        self._table = _processes.Table.snapshot()
        self._owned = _ownership.of_unit(self._table, state, mark_gid=self.mark_gid)
        self._looked = now


def judge_listener(
    rows: t.Sequence[Row],
    host: str,
    table: _processes.Table,
    owned: _ownership.Owned,
    activated: t.Callable[[], bool] = lambda: False,
) -> Listener:
    """Who answers at ``host``, of all that listen on its port, and whether that is the unit.

    What takes connections in for others counts only when something shows that the unit is one of these others.
    """
    candidates = _candidates(rows, host)
    elsewhere = _elsewhere(table, owned)
    if not candidates:
        return Listener("translated", elsewhere) if elsewhere else Listener("none")
    pids = sorted({row.pid for row in candidates if row.pid})
    mine = {ref.pid for ref in owned.processes}
    for pid in pids:
        if pid in mine:
            return Listener("owned", "process %d of the unit listens" % pid)
    doubts, strangers = [], []
    for pid in pids:
        process = table.get(pid)
        name = process.name if process is not None else "unknown"
        text = 'process %d "%s"' % (pid, name)
        unit, container = _ownership.attribute(process) if process is not None else (None, None)
        if pid == 1:
            if activated():
                return Listener("forwarder", text + " listens for a socket unit that starts this unit")
            doubts.append(text + " listens, and no socket unit that starts this unit has the port")
        elif name in FORWARDERS or (container and elsewhere):
            role = "of the container %s listens" % container[:12] if container else "takes connections in for others"
            if elsewhere:
                return Listener("forwarder", "%s %s: %s" % (text, role, elsewhere))
            doubts.append("%s %s, and nothing shows that the unit is one of them" % (text, role))
        else:
            strangers.append('%d "%s" (unit %s)' % (pid, name, unit or "none"))
    if strangers:
        return Listener("foreign", ", ".join(strangers))
    return Listener(
        "unexplained",
        "; ".join(doubts) or "a process listens that cannot be seen from here: run as root, or with become",
    )


def _candidates(rows: t.Sequence[Row], host: str) -> t.Sequence[Row]:
    """The sockets that a connection to ``host`` can reach. The kernel prefers the most precise address."""

    def at(*addresses: str) -> t.List[Row]:
        return [row for row in rows if row.address in addresses]

    if ":" in host:
        return at(host) or at("::")
    if host == "localhost":
        return at("127.0.0.1", "::1") or at("0.0.0.0", "::")
    if host.replace(".", "").isdigit():
        return at(host, "::ffff:" + host) or at("0.0.0.0") or at("::")
    return rows  # a name may stand for any address of this host


def _elsewhere(table: _processes.Table, owned: _ownership.Owned) -> str:
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


def _activated(unit: str, port: int) -> bool:
    """Whether a socket unit that starts this unit has the port."""
    for name in _properties(unit, "TriggeredBy").split():
        addresses = _properties(name, "Listen").splitlines() if name.endswith(".socket") else []
        if any(line.split(" ")[0].rpartition(":")[2] == str(port) for line in addresses):
            return True
    return False


def _properties(unit: str, name: str) -> str:
    _rc, out, _err = _systemd._systemctl(["show", "--value", "--property=" + name, "--", unit], SYSTEMCTL_TIMEOUT)
    return out


def _bytes_read(pid: int) -> t.Optional[int]:
    """Read from files and pipes, and from disks on behalf of mapped files."""
    try:
        with open("/proc/%d/io" % pid, "rb") as stream:
            values = dict(line.split(b": ", 1) for line in stream.read().splitlines())
        return int(values[b"rchar"]) + int(values[b"read_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def _memory(pid: int) -> t.Optional[int]:
    try:
        with open("/proc/%d/statm" % pid, "rb") as stream:
            return int(stream.read().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return None
