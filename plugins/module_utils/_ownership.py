# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which processes belong to a service, however far they have wandered from its front process.

Each evidence (``found_by``), whether it is firm, and to what ownership spreads from a process that it speaks for:

====================================  =============  ==================================================================
evidence                              firm           spreads to
====================================  =============  ==================================================================
pid, main_pid, control_pid            yes            children, the session and group that it leads, its mount namespace
cgroup, container, mark, gpu_holder   yes            the same
descendant                            as its parent  the same if firm, else children
session, process_group                no             children
the same of a unit's dead main        yes            children, the session and group that it leads, its mount namespace
mount_namespace                       no             children
title                                 no             children
====================================  =============  ==================================================================

A mark in a login session is not firm and spreads to children alone: who logs in with it is a member of that group.
So one weak link never leads to another kind of weak link: behind a session, a process group or a namespace there is
always a firmly owned process, living or dead. A mount namespace that the host or the caller is in speaks for nothing;
one that all firmly owned processes have left speaks while somebody is in it whom the look before found.
What is not firm and in another unit, login session or container than all that is firm is foreign: named and left alone.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Pattern

from . import _titles
from ._accounts import group_name, group_number
from ._errors import UsageError
from ._places import Container, attribute, containers_of, in_login, machine_of, place
from ._processes import TICKS, Process, ProcessRef, Table, own_line, threads
from ._service import mark_group
from ._systemd import UnitState, number

__all__ = [
    "EVIDENCE",
    "Owned",
    "attribute",
    "check_mark",
    "foreign",
    "mark_group",
    "of_pids",
    "of_unit",
    "own_part",
]

# In the order in which they convince. The page docs/what-counts-as-owned.md explains each.
EVIDENCE = (
    *("pid", "main_pid", "control_pid", "gpu_holder", "cgroup", "container", "mark"),
    *("descendant", "session", "process_group", "mount_namespace", "title"),
)


@dataclass
class Owned:
    """The owned processes, each with all the ways it was found by."""

    processes: dict[ProcessRef, list[str]] = field(default_factory=dict)
    roots: list[ProcessRef] = field(default_factory=list)
    firm: set[ProcessRef] = field(default_factory=set)
    # Of firmly owned processes, dead ones too: sessions and process groups that they led, mount namespaces that they
    # were in, users, units with containers.
    leaders: set[int] = field(default_factory=set)
    namespaces: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    places: set[tuple[str | None, str | None]] = field(default_factory=set)
    marks: set[int] = field(default_factory=set)  # groups that mark the unit's processes
    # Containers whose client the unit runs, by the id that attribute() tells.
    containers: dict[str, Container] = field(default_factory=dict)
    # Shown and never signalled, with the word of their outcome: nothing follows from them.
    spared: dict[ProcessRef, str] = field(default_factory=dict)
    # Not owned, but they look as if they were: named only.
    suspects: list[ProcessRef] = field(default_factory=list)

    def add(self, process: Process, found_by: str, firm: bool) -> bool:
        """Add a process or one more way it was found by; says whether that changes what may follow from it."""
        if process.pid <= 1 or process.kernel_thread:
            return False
        ways = self.processes.setdefault(process.ref, [])
        firm = firm and process.ref not in self.spared
        news = not ways or (firm and process.ref not in self.firm)
        if found_by not in ways:
            ways.append(found_by)
        if firm:
            self.firm.add(process.ref)
            self.users.add(process.uid)
            self.places.add(place(process))
            if process.pid in (process.session, process.pgrp):
                self.leaders.add(process.pid)
        return news

    def spreads(self, ref: ProcessRef) -> bool:
        """Whether ownership goes on from this process."""
        return ref in self.processes and ref not in self.spared


def check_mark(gid: int | None) -> int | None:
    """The gid, unless it is a group that means something else: half a host may be in that one."""
    if gid is None:
        return None
    name = group_name(gid)
    if gid <= 0 or (name and not name.startswith("gpuops-")):
        raise UsageError('the group %d is not an ownership mark: it is the group "%s"' % (gid, name or "root"))
    return gid


def foreign(table: Table, owned: Owned, any_user: bool = False) -> set[ProcessRef]:
    """Owned processes that may yet be somebody else's: not firm, and of a stranger user or in another place.

    The place is the unit or the container. An operator's shell inside the service's namespace is in a session's scope.
    Nothing follows from who is left alone: a child of theirs that nothing else speaks for is left alone too.
    """
    found = set()
    weak = [process for process in map(table.by_ref, owned.processes) if process is not None]
    weak = [process for process in weak if process.ref not in owned.firm and process.ref not in owned.spared]
    for process in weak:
        where = place(process)
        elsewhere = where != (None, None) and where not in owned.places
        if elsewhere or (process.uid not in owned.users and not any_user):
            found.add(process.ref)
    before = -1
    while before != len(found):
        before = len(found)
        for process in weak:
            parent = table.get(process.ppid)
            if owned.processes[process.ref] == ["descendant"] and parent is not None and parent.ref in found:
                found.add(process.ref)
    return found


def own_part(table: Table, state: UnitState) -> Process | None:
    """A process of the unit that the caller depends on: systemd would end the caller's line together with the unit."""
    for pid in sorted(own_line(table) | {1}):
        process = table.get(pid)
        if process is None:
            continue
        inside = state.control_group not in ("", "/") and _in_cgroup(process, state.control_group)
        if inside or attribute(process)[0] == state.name or pid in (state.main_pid, state.control_pid):
            return process
    return None


def _in_cgroup(process: Process, group: str) -> bool:
    return process.cgroup == group or process.cgroup.startswith(group + "/")


def _in_unit(process: Process, state: UnitState) -> bool:
    group = state.control_group
    return (group not in ("", "/") and _in_cgroup(process, group)) or attribute(process)[0] == state.name


def _in_container(process: Process, containers: Mapping[str, Container]) -> bool:
    """Whether it is in one of them, or in one inside it. A name, unlike an id, is one only within its kind."""
    found = (containers[name] for name in containers_of(process) if name in containers)
    return bool(containers) and any(c.manager != "nspawn" or machine_of(process) == c.id for c in found)


def _mount_namespace(pid: int | str) -> int:
    with contextlib.suppress(OSError):
        return os.stat("/proc/%s/ns/mnt" % pid).st_ino
    # A main thread that has ended is in none any more, the others still are.
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            return os.stat("/proc/%s/task/%s/ns/mnt" % (pid, thread)).st_ino
    return 0


def _earlier_main(table: Table, state: UnitState) -> int:
    """The pid of a dead main process whose session lives on.

    The kernel does not hand out a number again while a session bears it. So a member that was born while the main
    process lived proves that the session is that main process's, and not a later one with the same number. A proof
    has no slack; systemd's stamp is not before the end, since it is set when systemd learns of it.
    """
    pid, ended = number(state.raw.get("ExecMainPID", "")), state.ended
    if pid <= 1 or ended is None or table.get(pid) is not None:
        return 0
    for process in table:
        if pid in (process.session, process.pgrp) and process.ref.start / TICKS <= ended.earliest:
            return pid
    return 0


class _Namespaces:
    """The mount namespaces of processes, where neither the host nor the caller is in them; 0 is no evidence."""

    def __init__(self, wanted: bool) -> None:
        self._common = (0, _mount_namespace(1), _mount_namespace("self")) if wanted else (0,)
        # Without knowing what everybody shares, nothing follows from sharing.
        self._wanted = wanted and 0 not in self._common[1:]
        self._known: dict[ProcessRef, int] = {}

    def of(self, process: Process) -> int:
        if not self._wanted or process.kernel_thread:
            return 0
        if process.ref not in self._known:
            inode = _mount_namespace(process.pid)
            self._known[process.ref] = 0 if inode in self._common else inode
        return self._known[process.ref]


def marks_of(state: UnitState, mark_gid: int | None = None) -> set[int]:
    """The mark that a definition tells, and those that the unit itself gives its processes."""
    found = {mark_gid} if mark_gid is not None else set()
    for word in state.raw.get("SupplementaryGroups", "").split():
        name = group_name(int(word)) if word.isdigit() else word
        gid = group_number(name) if name.startswith("gpuops-") else None
        if gid:
            found.add(gid)
    return found


def _bears_mark(process: Process, unit: str, marks: set[int]) -> bool:
    """Whether it bears a mark, outside of other services: instances of a template give it to all their processes."""
    place = attribute(process)[0] or ""
    elsewhere = place.endswith(".service") and place != unit and not place.startswith("user@")
    return not elsewhere and not marks.isdisjoint(process.gids)


def _spread(table: Table, owned: Owned, unit: str, namespaces: _Namespaces, own: set[int]) -> None:
    """Add whatever belongs to what is owned already, until nothing is added."""
    candidates = [p for p in table if p.pid not in own]
    for process in candidates if owned.marks else ():
        if _bears_mark(process, unit, owned.marks):
            # Who logs in with the mark is a member of that group: nobody's worker, unless the unit itself is there.
            owned.add(process, "mark", not in_login(process))
    grown = bool(owned.processes or owned.leaders or owned.namespaces)
    while grown:
        grown = False
        firm = (process for process in map(table.by_ref, owned.firm) if process is not None)
        owned.namespaces |= {namespaces.of(process) for process in firm} - {0}
        for process in candidates:
            parent = table.get(process.ppid)
            if parent is not None and owned.spreads(parent.ref):
                grown |= owned.add(process, "descendant", parent.ref in owned.firm)
            if process.session != process.pid and _leads(table, owned, process.session):
                grown |= owned.add(process, "session", False)
            if process.pgrp != process.pid and _leads(table, owned, process.pgrp):
                grown |= owned.add(process, "process_group", False)
            if owned.namespaces and namespaces.of(process) in owned.namespaces:
                grown |= owned.add(process, "mount_namespace", False)


def _leads(table: Table, owned: Owned, leader_pid: int) -> bool:
    """Whether a session or process group is led by an owned process, or was by one that is dead by now."""
    if leader_pid <= 1 or leader_pid not in owned.leaders:
        return False  # 0 is the session of all that never had one
    leader = table.get(leader_pid)
    return leader is None or owned.spreads(leader.ref)


def of_unit(
    table: Table,
    state: UnitState,
    *,
    mark_gid: int | None = None,
    titles: Pattern[str] | None = None,
    containers: Mapping[str, Container] | None = None,
    previous: Owned | None = None,
) -> Owned:
    """What a unit owns: its cgroup and all nested ones, its mark, its containers, and what descends from any of them.

    ``titles`` are the names that the engine gives its processes, ``containers`` those that the unit is the client of.
    ``previous`` is an earlier answer: what it held stays owned for as long as it lives.
    """
    own, namespaces = own_line(table), _Namespaces(True)
    owned = Owned(containers=dict(previous.containers if previous is not None else {}, **(containers or {})))
    for pid, word in ((state.main_pid, "main_pid"), (state.control_pid, "control_pid")):
        root = table.get(pid) if pid not in own else None
        if root is not None and pid > 1:
            owned.add(root, word, True)
            owned.roots.append(root.ref)
    judged: dict[str, tuple[bool, bool]] = {}  # by control group: most processes share a few
    for process in table:
        if process.cgroup not in judged:
            judged[process.cgroup] = _in_unit(process, state), _in_container(process, owned.containers)
        in_unit, in_container = judged[process.cgroup]
        if in_unit and process.pid not in own:
            owned.add(process, "cgroup", True)
        if in_container and process.pid not in own:
            owned.add(process, "container", True)
    earlier = _earlier_main(table, state)
    if earlier:
        owned.leaders.add(earlier)
        for process in table:
            if process.pid not in own and earlier in (process.session, process.pgrp):
                owned.add(process, "session" if process.session == earlier else "process_group", True)
    _carry(table, owned, previous, own, namespaces)
    owned.marks |= marks_of(state, mark_gid)
    _spread(table, owned, state.name, namespaces, own)
    if titles is not None:
        ours, suspects = _titles.find(table, state, owned, titles, owned.marks, own)
        owned.users |= _titles.users(state, owned) if ours else set()
        for process in ours:
            owned.add(process, "title", False)
        if ours:
            _spread(table, owned, state.name, namespaces, own)
        owned.suspects = [process.ref for process in suspects if process.ref not in owned.processes]
    return _finish(table, owned)


def of_pids(
    table: Table,
    refs: Iterable[ProcessRef],
    *,
    found_by: str = "pid",
    spared: Mapping[ProcessRef, str] | None = None,
    previous: Owned | None = None,
) -> Owned:
    """What the given processes own: themselves, what descends from them, the sessions and groups that they lead.

    ``found_by`` is how they were found, ``spared`` those of them that are shown and never signalled.
    A mount namespace is no evidence here: what somebody started by hand may share one with much else.
    """
    own, namespaces = own_line(table), _Namespaces(False)
    owned = Owned(spared=dict(spared or {}))
    for ref in [*refs, *owned.spared]:
        process = table.by_ref(ref)
        if process is not None and ref.pid not in own and ref.pid > 1 and not process.kernel_thread:
            owned.add(process, found_by, True)
            if ref not in owned.spared:
                owned.roots.append(ref)
    _carry(table, owned, previous, own, namespaces)
    _spread(table, owned, "", namespaces, own)
    return _finish(table, owned)


def _carry(table: Table, owned: Owned, previous: Owned | None, own: set[int], namespaces: _Namespaces) -> None:
    """Keep what an earlier look found, with what spoke for it then."""
    if previous is None:
        return
    owned.leaders |= previous.leaders
    owned.users |= previous.users
    owned.marks |= previous.marks
    owned.places |= previous.places
    owned.spared.update((ref, word) for ref, word in previous.spared.items() if ref not in owned.spared)
    for ref, ways in previous.processes.items():
        process = table.by_ref(ref)
        if process is not None and ref.pid not in own:
            for found_by in ways:
                owned.add(process, found_by, ref in previous.firm)
            # The next namespace gets the lowest free number: who is in it must have been there since the last look.
            if previous.namespaces and not process.gone:
                owned.namespaces |= {namespaces.of(process)} & previous.namespaces


def _finish(table: Table, owned: Owned) -> Owned:
    # A session that nobody is in any more gains nobody: who leads one of that number later is somebody else.
    if owned.leaders:
        borne = {number for process in table for number in (process.session, process.pgrp)}
        owned.leaders = {pid for pid in owned.leaders & borne if not _is_stranger(table.get(pid), owned)}
    tops = [ref for ref in owned.processes if owned.spreads(ref) and not _has_owned_parent(table, owned, ref)]
    owned.roots = [ref for ref in owned.roots if ref in tops] or tops
    return owned


def _is_stranger(process: Process | None, owned: Owned) -> bool:
    return process is not None and process.ref not in owned.processes


def _has_owned_parent(table: Table, owned: Owned, ref: ProcessRef) -> bool:
    process = table.by_ref(ref)
    parent = table.get(process.ppid) if process is not None else None
    return parent is not None and owned.spreads(parent.ref)
