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
from ._readiness import Listener

try:
    import psutil
except ImportError:
    psutil = None  # type: ignore[assignment]

__all__ = ("HostTarget", "Row", "judge_listener")

FIRST_LINES = 2000
SNAPSHOT_AGE = 0.5
PAGE = os.sysconf("SC_PAGE_SIZE")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
WILDCARD = ("0.0.0.0", "::")
# They take connections in for somebody else; who that is cannot be seen here.
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
        except (psutil.Error, OSError):
            rows = []
        if not rows:
            return Listener("none")
        self._looked = float("-inf")  # a listener may be younger than the last snapshot
        self._look(state)
        assert self._table is not None
        return judge_listener(rows, parts.hostname or "", self._table, self._owned)

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


def judge_listener(rows: t.Sequence[Row], host: str, table: _processes.Table, owned: _ownership.Owned) -> Listener:
    """Who answers at ``host``, of all that listen on its port. The kernel prefers the most precise address."""
    same = LOOPBACK if host in LOOPBACK else (host,)
    precise = [row for row in rows if row.address in same]
    wide = [row for row in rows if row.address in WILDCARD]
    # A name may stand for any address of this host.
    named = [] if host.replace(".", "").isdigit() or ":" in host or host in LOOPBACK else list(rows)
    candidates = precise or wide or named
    pids = sorted({row.pid for row in candidates if row.pid})
    mine = {ref.pid for ref in owned.processes}
    if not candidates:
        return Listener("none")
    if not pids:
        return Listener("forwarder", "a process listens that cannot be seen from here")
    for pid in pids:
        if pid in mine:
            return Listener("owned", "process %d of the unit listens" % pid)
    clients = [table.get(pid) for pid in mine]
    wraps_container = any(process is not None and process.name in CONTAINER_CLIENTS for process in clients)
    named_pids = []
    for pid in pids:
        process = table.get(pid)
        name = process.name if process is not None else "unknown"
        if pid == 1 or name in FORWARDERS:
            return Listener("forwarder", 'process %d "%s" takes connections in for somebody else' % (pid, name))
        unit, container = _ownership.attribute(process) if process is not None else (None, None)
        if container and wraps_container:
            return Listener("forwarder", 'process %d "%s" of the container %s listens' % (pid, name, container[:12]))
        named_pids.append('%d "%s" (unit %s)' % (pid, name, unit or "none"))
    return Listener("foreign", ", ".join(named_pids))


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
