# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A service on this host as a wait sees it: its unit, its processes, its log, its port, its answers."""

from __future__ import annotations

import time
import typing as t
from urllib.parse import urlsplit

from . import (
    _forwarding,
    _generation,
    _gpu_memory,
    _http,
    _journal_reader,
    _knock,
    _listening,
    _logfile,
    _loglife,
    _members,
    _processes,
    _sockets,
    _systemd,
)
from ._deadline import Deadline
from ._errors import ServingError, UsageError
from ._progress import Activity
from ._tiers import Listener, LogLine

__all__ = ("HostTarget",)

UNIT_PATIENCE = 10.0  # seconds for systemd to say what state a unit is in
RESOLVE_PATIENCE = 10.0
UNIT_AGE = 4.0  # seconds for which the state of a unit holds while its main process lives
SOCKETS_AGE = 10.0  # seconds for which the ports of a unit are known
DOUBT_AGE = 5.0  # seconds for which an answer holds that took a look at all processes and explained nothing
EARLY_AGE = 2.0  # and one that found nobody behind who listens
RESOLVE_AGAIN = 10.0
KEYS = ("authorization", "x-api-key", "api-key")  # headers that a key is given in
SAVED = 1  # the version of what is saved


class HostTarget:
    """The real thing behind :class:`_readiness.Target`."""

    def __init__(
        self,
        unit: t.Optional[str],
        url: str,
        question: _generation.Question,
        access: _http.Access,
        mark_gid: t.Optional[int] = None,
        *,
        log_path: t.Optional[str] = None,
        gpus: t.Optional[t.Sequence[str]] = None,
    ) -> None:
        self.name, self.url, self.question, self.access = unit, url, question, access
        self.warnings: t.List[str] = []
        self.members = _members.Members(mark_gid)
        self.gpu_memory = _gpu_memory.GpuMemory(gpus)
        self._patience: t.Callable[[float], float] = lambda most: most  # for a question that may hang
        self._journal = None if unit is None else _journal_reader.Reader(unit)
        self._file = None if log_path is None else _logfile.LogFile(log_path)
        self._unreadable = False
        self._callers: t.Set[int] = set()  # this process and its ancestors
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = self.port_number = parts.port or (443 if parts.scheme == "https" else 80)
        self.keyed = bool(access.api_key) or any(name.lower() in KEYS for name in access.headers or {})
        self._addresses: t.Sequence[str] = ()
        self._resolve_at = float("-inf")
        self._state: t.Optional[_systemd.UnitState] = None
        self._state_at = float("-inf")
        self._main: t.Optional[_processes.ProcessRef] = None
        self._ports: t.List[_listening.Row] = []
        self._inner = ""  # where the unit listens in networks of its own
        self._ports_at = float("-inf")
        self._doubt: t.Optional[t.Tuple[t.Any, float, Listener]] = None

    def check_here(self) -> None:
        """Refuse a unit of this host together with the URL of another: what answers there proves nothing here."""
        self._addresses = self._resolve()
        away = [address for address in self._addresses if not _listening.is_here(address)]
        if away:
            raise UsageError(
                'the unit "%s" cannot be waited for at "%s": %s is no address of this host'
                % (self.name, self._host, " or ".join(away))
            )

    def bound(self, deadline: Deadline) -> None:
        """Let no question take longer than what is left of the deadline, or a second more."""
        self._patience = self.members.patience = deadline.patience
        if self._journal is not None:
            self._journal.patience = deadline.patience

    # The unit

    def unit(self, now: bool = False) -> t.Optional[_systemd.UnitState]:
        """What systemd says. A unit that ran a moment ago, and whose main process lives, still runs.

        It may be about to be stopped all the same, so ``now`` asks anew.
        """
        if self.name is None:
            return None
        at = time.monotonic()
        young = self._state is not None and at - self._state_at < UNIT_AGE and not now
        if young and self._main is not None and _processes.alive(self._main):
            return self._state
        state = self._state = _systemd.show(self.name, self._patience(UNIT_PATIENCE))
        self._state_at, self._main = at, None
        if state.active_state == "inactive" and not state.job:
            state.awaited = self._socket_of(state)
        if state.active_state == "active" and state.sub_state == "running" and not state.job and state.main_pid:
            found = _processes.Table.of([state.main_pid]).get(state.main_pid)
            self._main = found.ref if found is not None else None
        return state

    def _socket_of(self, state: _systemd.UnitState) -> str:
        """The socket unit that has the port and starts the unit with the first connection."""
        for name in state.triggered_by:
            has = name.endswith(".socket") and _listening.has_port(name, self._port, self._patience(UNIT_PATIENCE))
            if has and _systemd.show(name, self._patience(UNIT_PATIENCE)).active_state == "active":
                return name
        return ""

    def activity(self, state: _systemd.UnitState) -> Activity:
        self.members.follow(state)
        processes = self.members.usage()
        self._unreadable |= self.members.unreadable
        gpu_memory = self.gpu_memory.look(self.members.pids)
        self._gather_warnings()
        return Activity(processes, gpu_memory, self.members.network(state))

    def log(self, state: _systemd.UnitState) -> t.List[LogLine]:
        """The lines since the last call."""
        if self._journal is None:
            return []
        # A wait by ExecStartPost= writes to the journal of the unit that it waits for.
        callers = self._line_of_callers() - {state.main_pid}
        found = [
            LogLine(
                record.message, record.pid != 1 and not record.dropped and self._file is None, record.monotonic / 1e6
            )
            for record in self._journal.read(state)
            if (self._file is None or record.pid == 1) and record.pid not in callers
        ]
        if self._file is not None:
            found += self._of_file(self._file, state)
        self._gather_warnings()
        return found

    @staticmethod
    def _of_file(file: _logfile.LogFile, state: _systemd.UnitState) -> t.List[LogLine]:
        """Its lines. Of those that were there at the first look the ones count that surely are of this life."""
        found = [LogLine(line, new) for line, new in file.read()]
        old = [line.text for line in found if not line.own]
        began = state.began
        if not old or not state.tells_of_life or began is None or file.written is None:
            return found
        wall = began.latest + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        first = _loglife.first_of_life(old, wall, file.written, file.born)
        return [LogLine(line.text, line.own or number >= first) for number, line in enumerate(found)]

    def _line_of_callers(self) -> t.Set[int]:
        self._callers = self._callers or self.members.line()
        return self._callers

    def _gather_warnings(self) -> None:
        found = []
        if self._unreadable:
            found.append("what the processes of the unit read and write cannot be seen: run as root, or with become")
        if self.members.unknown_container:
            found.append(
                'which container the unit "%s" runs cannot be told: only its log and its answers show whether it moves'
                % self.name
            )
        if self.gpu_memory.warning:
            found.append(self.gpu_memory.warning)
        for log in (self._journal, self._file):
            found += [] if log is None else log.warnings.values()
        self.warnings[:] = found

    def close(self) -> None:
        """End what runs on the side."""
        self.gpu_memory.close()
        for log in (self._journal, self._file):
            if log is not None:
                log.close()

    # The port

    def listener(self, state: _systemd.UnitState) -> Listener:
        self._addresses = self._addresses or self._resolve()
        try:
            found = _sockets.listening()
        except OSError as error:
            return Listener("unexplained", "who listens cannot be read: %s" % error)
        at_port = [one for one in found if one.port == self._port]
        if at_port:
            return self._explained(state, at_port)
        self.members.follow(state)
        if self.knock():
            self.members.renew(state)  # the kernel leads connections on, maybe to somebody younger than the last look
        return self._judged(state, [])._replace(silence=self._silence(found))

    def sockets(self) -> t.Optional[t.FrozenSet[int]]:
        """The sockets that listen on the port, by the kernel's numbers; None where they cannot be read."""
        try:
            return frozenset(one.inode for one in _sockets.listening() if one.port == self._port)
        except OSError:
            return None

    def _explained(self, state: _systemd.UnitState, at_port: t.Sequence[_sockets.Socket]) -> Listener:
        self.members.follow(state)
        owners = _sockets.owners({one.inode for one in at_port}, self.members.pids)
        listeners = [self.members.table.get(pid) for pids in owners.values() for pid in pids]
        if all(one.inode in owners for one in at_port) and not any(map(_forwarding.leads_on, listeners)):
            # Nobody else can have it, so nobody else is looked at: at this moment the token is near.
            own = [_listening.Row(one.address, pid, one.port) for one in at_port for pid in owners[one.inode]]
            return self._judged(state, own)
        now = time.monotonic()
        key = (at_port, self.members.listening())
        if self._doubt is not None and self._doubt[0] == key:
            age = EARLY_AGE if self._doubt[2].kind == "unserved" else DOUBT_AGE
            if now - self._doubt[1] < age:
                return self._doubt[2]
        try:
            rows = _listening.rows_of_all()
        except OSError as error:
            return Listener("unexplained", "who listens cannot be read: %s" % error)
        self.members.renew(state)  # a listener may be younger than the last look
        found = self._judged(state, [row for row in rows if row.port == self._port])
        said = _listening.silence(self._port, self._addresses, rows, self.members.owned)
        found = found._replace(silence=found.detail or said)
        self._doubt = (key, now, found) if found.kind in ("unexplained", "unserved", "unseen") else None
        return found

    def _judged(self, state: _systemd.UnitState, rows: t.Sequence[_listening.Row]) -> Listener:
        table, owned = self.members.table, self.members.owned
        return _listening.judge_listener(
            rows, self._addresses, table, owned, lambda: self._activated(state.name), self._ways()
        )

    def _ways(self) -> _forwarding.Ways:
        one = self.members
        patience = self._patience(UNIT_PATIENCE)
        return _forwarding.Ways(self._port, self._addresses, one.table, one.owned, one.unsure, one.late, patience)

    def _activated(self, unit: str) -> bool:
        return _listening.activated(unit, self._port, self._patience(UNIT_PATIENCE))

    def _silence(self, found: t.Sequence[_sockets.Socket]) -> str:
        """What to say while nobody listens; where the unit does is looked up now and then only."""
        now = time.monotonic()
        if now - self._ports_at >= SOCKETS_AGE:
            owners = _sockets.owners({one.inode for one in found}, self.members.pids)
            self._ports = [
                _listening.Row(one.address, pid, one.port) for one in found for pid in owners.get(one.inode, ())
            ]
            self._inner, self._ports_at = self._ways().inner(), now
        text = _listening.silence(self._port, self._addresses, self._ports, self.members.owned)
        return "%s; %s" % (text, self._inner) if self._inner else text

    def knock(self) -> bool:
        """Whether a connection to the port is taken. Costs next to nothing, and never waits long."""
        return self._resolved() and _knock.knock(self._addresses, self._port)

    def peek(self, path: str) -> t.Optional[int]:
        """The status that a GET answers with at once; None without one. Costs little, and never waits long."""
        return _knock.peek(_http.join(self.url, path), self._addresses, self.access) if self._resolved() else None

    def _resolved(self) -> bool:
        now = time.monotonic()
        if not self._addresses and now - self._resolve_at >= RESOLVE_AGAIN:
            self._resolve_at = now
            try:
                self._addresses = self._resolve()
            except ServingError:
                return False  # whoever asks the engine is told
        return bool(self._addresses)

    def _resolve(self) -> t.List[str]:
        return _listening.addresses_of(self._host, self._patience(RESOLVE_PATIENCE))

    # The engine

    def get(self, path: str, timeout: float, method: str = "GET") -> _http.Answer:
        return _http.fetch(_http.Request(method, _http.join(self.url, path)), self.access, timeout)

    def greet(self, path: str, timeout: float) -> _http.Answer:
        access = self.access._replace(api_key=None, headers={})
        return _http.fetch(_http.Request("GET", _http.join(self.url, path)), access, timeout)

    def generate(self, model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> _generation.Side:
        question = self.question._replace(model=model)
        sides = _generation.probe({_generation.DIRECT: self.url}, question, self.access, timeout, tick)
        return sides[_generation.DIRECT]

    # From one slice of a wait to the next

    def save(self) -> t.Dict[str, t.Any]:
        """What another process needs to go on from here. Times in it are of the host's monotonic clock."""
        return {
            "version": SAVED,
            "journal": None if self._journal is None else self._journal.save(),
            "file": None if self._file is None else self._file.save(),
            "members": self.members.save(),
            "gpu_memory": self.gpu_memory.save(),
            "addresses": list(self._addresses),
            "unreadable": self._unreadable,
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        """Go on from what another process has saved; another version's is left alone."""
        if saved.get("version") != SAVED:
            return
        if self._journal is not None and saved["journal"] is not None:
            self._journal.restore(saved["journal"])
        if self._file is not None and saved["file"] is not None:
            self._file.restore(saved["file"])
        self.members.restore(saved["members"])
        self.gpu_memory.restore(saved["gpu_memory"])
        self._addresses, self._unreadable = saved["addresses"], saved["unreadable"]
        self._gather_warnings()
