# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The looks at a service during its stop: what it owns, what each process is to it, and what became of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

from . import _ownership, _systemd
from ._deadline import SYSTEM_CLOCK, Clock
from ._ownership import Owned
from ._processes import Process, ProcessRef, Table
from ._systemd import UnitState

__all__ = ["Member", "Scan", "Survey"]

# What belongs to the service, given the table, the unit's state and what the look before had found.
Scan = Callable[[Table, "UnitState | None", "Owned | None"], Owned]


@dataclass
class Member:
    """One owned process and what became of it."""

    process: Process
    found_by: list[str]
    role: str
    standing: str  # ours, foreign, protected
    signals: list[str] = field(default_factory=list)
    outcome: str = "planned"
    signalled_at: float | None = None
    seconds: float | None = None
    denied: bool = False

    @property
    def ref(self) -> ProcessRef:
        return self.process.ref

    def as_result(self) -> dict[str, Any]:
        process = self.process
        return {
            "pid": process.pid,
            "create_time": round(process.create_time, 2),
            "ppid": process.ppid,
            "name": process.name,
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
        self.state: UnitState | None = None
        self.own: Process | None = None  # what the caller itself depends on, in the unit
        self._scan = scan
        self._protected = protected
        self._allow_foreign_users = allow_foreign_users
        self._clock = clock
        self._owned: Owned | None = None

    def look(self, limit: float = 10.0) -> None:
        """Take a fresh look at everything; systemd has ``limit`` seconds to answer."""
        if self.unit is not None:
            self.state = _systemd.show(self.unit, limit)
        table = Table.snapshot()
        self.own = _ownership.own_part(table, self.state) if self.state is not None else None
        owned = self._owned = self._scan(table, self.state, self._owned)
        strangers = _ownership.foreign(table, owned, self._allow_foreign_users)
        self.living = set()
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
                self.members[ref] = Member(
                    process, ways, self._role(process, owned), self._standing(process, strangers)
                )
            else:
                member.process = process
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

    def falls_to_systemd(self, member: Member) -> bool:
        """Whether systemd signals this process when it stops the unit."""
        if self.state is None or "cgroup" not in member.found_by:
            return False
        return self.state.kill_mode not in ("process", "none") or member.role in ("main", "control")

    def _note_zombie(self, table: Table, process: Process) -> None:
        parent = table.get(process.ppid)
        self.zombies[process.ref] = {
            "pid": process.pid,
            "name": process.name,
            "parent": process.ppid,
            "parent_name": parent.name if parent is not None else "",
        }

    def _role(self, process: Process, owned: Owned) -> str:
        if self.state is not None:
            if process.pid == self.state.main_pid:
                return "main"
            if process.pid == self.state.control_pid:
                return "control"
            return "member" if "cgroup" in owned.processes[process.ref] else "escaped"
        return "root" if process.ref in owned.roots else "member"

    def _standing(self, process: Process, strangers: set[ProcessRef]) -> str:
        if process.name in self._protected:
            return "protected"
        return "foreign" if process.ref in strangers else "ours"
