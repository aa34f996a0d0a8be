# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The looks at a service during its stop: what it owns, what each process is to it, and what became of each."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from typing import Any, Callable

from . import _ownership, _places, _processes, _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError
from ._groups import Group
from ._ownership import Owned
from ._processes import Process, ProcessRef, Table
from ._systemd import UnitState

__all__ = ["Member", "Scan", "Survey", "processor_time"]

# What belongs to the service, given the table, the unit's state and what the look before had found.
Scan = Callable[[Table, "UnitState | None", "Owned | None"], Owned]

SAME_LIFE = 3  # looks in a row during which somebody may start the unit before one is taken as it is
LEAST_ANSWER = 0.3  # seconds that systemd has for one answer even when others took all the time
FULL_EVERY = 30.0  # seconds after which a look reads again what changes rarely


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def processor_time() -> float:
    """Seconds of a processor that this process and its ended children have used."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@dataclass
class Member:
    """One owned process and what became of it."""

    process: Process
    found_by: list[str]
    role: str
    standing: str  # ours, foreign, protected, allowed
    top: bool = False  # none of its parents is owned
    container: str | None = None  # the id of the service's container that it is in
    command: str = ""  # the beginning of its command line
    signals: list[str] = field(default_factory=list)
    outcome: str = "planned"
    signalled_at: float | None = None
    seconds: float | None = None
    denied: bool = False

    @property
    def ref(self) -> ProcessRef:
        return self.process.ref

    def brief(self) -> dict[str, Any]:
        return {"pid": self.process.pid, "name": self.process.name, "found_by": self.found_by}

    def as_result(self) -> dict[str, Any]:
        process = self.process
        return {
            "pid": process.pid,
            "create_time": round(process.create_time, 2),
            "ppid": process.ppid,
            "name": process.name,
            "command": self.command,
            "user": process.user,
            "state": process.state,
            "found_by": self.found_by,
            "role": self.role,
            "signals": self.signals,
            "outcome": self.outcome,
            "seconds": self.seconds,
        }


class Survey:
    """Everything owned that any look has shown."""

    def __init__(
        self,
        scan: Scan,
        unit: str | None = None,
        protected: tuple[str, ...] = (),
        allow_foreign_users: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.unit = unit
        self.members: dict[ProcessRef, Member] = {}
        self.living: set[ProcessRef] = set()
        self.zombies: dict[ProcessRef, dict[str, Any]] = {}
        self.suspects: dict[ProcessRef, Process] = {}
        self.state: UnitState | None = None
        self.own: Process | None = None  # what the caller itself depends on, in the unit
        self.own_units: set[str] = set()  # that the caller and its ancestors are in
        self.group = Group("")  # the unit's, as it was when it had one
        self.cost = 0.0  # processor time of the dearest of the late looks
        self.looks = 0
        self.newcomers = 0  # how many the last look found that none before it had
        self._scan = scan
        self._protected = protected
        self._allow_foreign_users = allow_foreign_users
        self._clock = clock
        self._owned: Owned | None = None
        self._table: Table | None = None
        self._read_in_full = float("-inf")

    @property
    def marks(self) -> set[int]:
        """The groups that mark the unit's processes."""
        return set(self._owned.marks) if self._owned is not None else set()

    @property
    def containers(self) -> dict[str, Any]:
        """The service's containers by their id."""
        return dict(self._owned.containers) if self._owned is not None else {}

    def look(self, limit: float = 10.0, told: UnitState | None = None) -> None:
        """Take a fresh look at everything; systemd has ``limit`` seconds for all its answers.

        ``told`` is the unit's state when it was read right before.
        """
        before, end = processor_time(), Deadline(limit, self._clock)
        for attempt in range(SAME_LIFE):
            state = told if attempt == 0 else None
            if self.unit is not None and state is None:
                state = _systemd.show(self.unit, max(LEAST_ANSWER, end.remaining))
            if state is not None and state.control_group not in ("", "/"):
                self.group = Group(state.control_group)
            table = self._snapshot()
            owned = self._scan(table, state, self._owned)
            # What runs in a unit at rest is left over, unless somebody started the unit between the two readings.
            if state is None or not state.at_rest or not set(owned.processes) - set(self.members):
                break
            again = _systemd.show(state.name, max(LEAST_ANSWER, end.remaining))
            if (again.at_rest, again.invocation_id) == (True, state.invocation_id) or attempt == SAME_LIFE - 1:
                state = again
                break
        self.state, self._owned = state, owned
        if state is not None:
            self.own = _ownership.own_part(table, state)
            line = (table.get(pid) for pid in _processes.own_line(table))
            self.own_units = {_places.attribute(process)[0] or "" for process in line if process is not None}
        self._take(table, owned)
        if state is not None and not state.found:
            # The manager of a user may run a unit of that name, which is another one.
            for process in table:
                named = state.name in process.cgroup.split("/") and _places.attribute(process)[0] != state.name
                if named and not process.gone and process.ref not in owned.processes:
                    self.suspects[process.ref] = process
        self.looks += 1
        self.cost = max(processor_time() - before, self.cost * 0.8)

    def _snapshot(self) -> Table:
        """What changes rarely is read at the first look, and again now and then."""
        now = self._clock.monotonic()
        full = now - self._read_in_full >= FULL_EVERY
        self._read_in_full = now if full else self._read_in_full
        table = Table.snapshot(known=None if full else self._table)
        missing = [pid for pid in self.group.pids() if self._is_outside(table.get(pid))]
        if missing:
            table.renew(Table.of(missing))
            unseen = [pid for pid in missing if table.get(pid) is None and _exists(pid)]
            if unseen:
                raise ServingError(
                    '%d processes of the unit "%s" cannot be looked at, such as %d: run as root, or with become'
                    % (len(unseen), self.unit, unseen[0])
                )
        self._table = table
        return table

    def _is_outside(self, process: Process | None) -> bool:
        """Whether the table knows nothing of a process, or not yet that it is in the unit's group now."""
        return process is None or not (process.cgroup + "/").startswith(self.group.path.rstrip("/") + "/")

    def _take(self, table: Table, owned: Owned) -> None:
        strangers = _ownership.foreign(table, owned, self._allow_foreign_users)
        self.living, self.newcomers = set(), 0
        for ref, ways in owned.processes.items():
            process = table.by_ref(ref)
            if process is None:
                continue
            if process.gone:
                self._note_zombie(table, process)
                continue
            self.living.add(ref)
            member = self.members.get(ref)
            if member is None:
                self.newcomers += 1
                self.members[ref] = self._member(process, ways, owned, strangers)
            else:
                member.process = process
        for process in map(table.by_ref, owned.suspects):
            if process is not None and not process.gone:
                self.suspects[process.ref] = process
        now = self._clock.monotonic()
        for member in self.members.values():
            if member.ref not in self.living and member.outcome not in ("ended", "gone"):
                # systemd's own signals are not seen here; a process that ended before any is simply gone.
                member.outcome = "ended" if member.signals else "gone"
                if member.signalled_at is not None:
                    member.seconds = round(now - member.signalled_at, 2)

    def ours(self) -> list[Member]:
        """What lives and may be signalled."""
        return [m for m in self.members.values() if m.ref in self.living and m.standing == "ours"]

    def in_group(self) -> list[Member]:
        """What lives in the unit's control group, whoever it is."""
        return [m for m in self.members.values() if m.ref in self.living and "cgroup" in m.found_by]

    def falls_to_systemd(self, member: Member) -> bool:
        """Whether systemd signals this process when it stops the unit."""
        if self.state is None or "cgroup" not in member.found_by:
            return False
        if self.state.kill_mode == "process":
            return member.role in ("main", "control")
        return self.state.kill_mode != "none"

    def _note_zombie(self, table: Table, process: Process) -> None:
        parent = table.get(process.ppid)
        self.zombies[process.ref] = {
            "pid": process.pid,
            "name": process.name,
            "parent": process.ppid,
            "parent_name": parent.name if parent is not None else "",
        }

    def _member(self, process: Process, ways: list[str], owned: Owned, strangers: set[ProcessRef]) -> Member:
        within = (name for name in _places.containers_of(process) if name in owned.containers)
        return Member(
            process,
            ways,
            self._role(process, owned),
            self._standing(process, owned, strangers),
            top=process.ref in owned.roots,
            container=next(within, None),
        )

    def _role(self, process: Process, owned: Owned) -> str:
        if self.state is not None:
            if process.pid == self.state.main_pid:
                return "main"
            if process.pid == self.state.control_pid:
                return "control"
            return "member" if "cgroup" in owned.processes[process.ref] else "escaped"
        return "root" if process.ref in owned.roots else "member"

    def _standing(self, process: Process, owned: Owned, strangers: set[ProcessRef]) -> str:
        if process.ref in owned.spared:
            return owned.spared[process.ref]
        if process.name in self._protected:
            return "protected"
        return "foreign" if process.ref in strangers else "ours"
