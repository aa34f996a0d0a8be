# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which processes belong to a service, however far they have wandered from its front process.

Each evidence (``found_by``), whether it is firm, and to what ownership spreads from a process that it speaks for:

====================================  =============  ==================================================================
evidence                              firm           spreads to
====================================  =============  ==================================================================
pid, main_pid, control_pid            yes            children, the session and group that it leads, its mount namespace
cgroup, mark                          yes            the same
descendant                            as its parent  the same if firm, else children
session, process_group                no             children
the same of a unit's dead main        yes            children, the session and group that it leads, its mount namespace
mount_namespace                       no             children, its mount namespace
====================================  =============  ==================================================================

So one weak link never leads to another kind of weak link: behind a session, a process group or a namespace there is
always a firmly owned process, living or dead. A mount namespace that the host or the caller is in speaks for nothing.
What is not firm and in another unit, login session or container than all that is firm is foreign: named and left alone.
"""

from __future__ import annotations

import grp
import os
import re
from dataclasses import dataclass, field
from typing import Iterable

from ._errors import UsageError
from ._processes import TICKS, Process, ProcessRef, Table, own_line
from ._service import mark_group
from ._systemd import UnitState

__all__ = ["Owned", "attribute", "check_mark", "foreign", "group_id", "mark_group", "of_pids", "of_unit", "own_part"]

# Parts of a cgroup's path that mean a container. The manager's name may stand before the id: docker-ID.scope,
# libpod-ID, PARENT:cri-containerd:ID. The monitor beside a container bears the id too, and is not in it.
CONTAINER = re.compile(r"(?!(?:libpod|crio)-conmon-)(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?\Z")
LXC = re.compile(r"lxc\.payload\.(.+)\Z")
LXC_FOLDERS = ("lxc", "lxc.payload")  # the name is the next part
MACHINE_SCOPE = re.compile(r"machine-(?!qemu\\x2d)(.+)\.scope\Z")  # virtual machines bear such names as well
NSPAWN_SERVICE = re.compile(r"systemd-nspawn@(.+)\.service\Z")
CONTAINER_NAME = re.compile(r"[A-Za-z0-9_.:@+-]{1,255}\Z")
UNIT_SUFFIXES = (".service", ".scope", ".socket", ".mount", ".swap")


@dataclass
class Owned:
    """The owned processes, each with all the ways it was found by."""

    processes: dict[ProcessRef, list[str]] = field(default_factory=dict)
    roots: list[ProcessRef] = field(default_factory=list)
    firm: set[ProcessRef] = field(default_factory=set)
    # Of firmly owned processes, dead ones too: sessions and process groups that they led, users, units with containers.
    leaders: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    places: set[tuple[str | None, str | None]] = field(default_factory=set)

    def add(self, process: Process, found_by: str, firm: bool) -> bool:
        """Add a process or one more way it was found by; says whether that changes what may follow from it."""
        if process.pid <= 1 or process.kernel_thread:
            return False
        ways = self.processes.setdefault(process.ref, [])
        news = not ways or (firm and process.ref not in self.firm)
        if found_by not in ways:
            ways.append(found_by)
        if firm:
            self.firm.add(process.ref)
            self.users.add(process.uid)
            self.places.add(attribute(process))
            if process.pid in (process.session, process.pgrp):
                self.leaders.add(process.pid)
        return news


def group_id(name: str) -> int | None:
    """The gid of a group, None without one."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def check_mark(gid: int | None) -> int | None:
    """The gid, unless it is a group that means something else: half a host may be in that one."""
    if gid is None:
        return None
    try:
        name = grp.getgrgid(gid).gr_name
    except KeyError:
        name = ""
    if gid <= 0 or (name and not name.startswith("gpuops-")):
        raise UsageError('the group %d is not an ownership mark: it is the group "%s"' % (gid, name or "root"))
    return gid


def attribute(process: Process) -> tuple[str | None, str | None]:
    """The unit and the innermost container of a process, as its cgroup tells: an id, or a name for LXC and nspawn."""
    unit, container = None, None
    outer = True
    parts = process.cgroup.split("/")
    for place, part in enumerate(parts):
        container = _container(parts, place) or container
        if outer and part and not part.endswith(".slice"):
            name = part[1:] if part.startswith("_") else part
            unit = _printable(name) if name.endswith(UNIT_SUFFIXES) else None
            outer = False
    return unit, container


def _printable(name: str) -> str:
    """A name that anybody may have given to a cgroup, as one printable line; that of a real unit is one already."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def _container(parts: list[str], place: int) -> str | None:
    """The container that this part of a cgroup's path means, if any."""
    part, inside = parts[place], parts[place + 1 : place + 2]
    match = CONTAINER.match(part)
    if match is None:
        match = LXC.match(part)
    if match is None and inside != ["supervisor"]:
        match = MACHINE_SCOPE.match(part)
    if match is None and inside == ["payload"]:
        match = NSPAWN_SERVICE.match(part)
    name = match.group(1) if match is not None else ""
    # A container may itself be called lxc: then what follows is in it.
    if match is None and parts[max(0, place - 1)] in LXC_FOLDERS and parts[max(0, place - 2)] not in LXC_FOLDERS:
        name = part
    name = re.sub(r"\\x([0-9a-f]{2})", lambda escaped: chr(int(escaped.group(1), 16)), name)
    return name if CONTAINER_NAME.match(name) else None


def foreign(table: Table, owned: Owned, any_user: bool = False) -> set[ProcessRef]:
    """Owned processes that may yet be somebody else's: not firm, and of a stranger user or in another place.

    The place is the unit or the container. An operator's shell inside the service's namespace is in a session's scope.
    """
    found = set()
    for process in map(table.by_ref, owned.processes):
        if process is None or process.ref in owned.firm:
            continue
        place = attribute(process)
        elsewhere = place != (None, None) and place not in owned.places
        if elsewhere or (process.uid not in owned.users and not any_user):
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


def _mount_namespace(pid: int | str) -> int:
    try:
        return os.stat("/proc/%s/ns/mnt" % pid).st_ino
    except OSError:
        return 0


def _earlier_main(table: Table, state: UnitState) -> int:
    """The pid of a dead main process whose session lives on.

    The kernel does not hand out a number again while a session bears it. So a member that was born while the main
    process lived proves that the session is that main process's, and not a later one with the same number.
    """
    pid = int(state.raw.get("ExecMainPID", "0") or 0)
    ended = int(state.raw.get("ExecMainExitTimestampMonotonic", "0") or 0)
    if pid <= 1 or ended == 0 or table.get(pid) is not None:
        return 0
    for process in table:
        if pid in (process.session, process.pgrp) and process.ref.start * (1000000 // TICKS) <= ended:
            return pid
    return 0


def _strange_namespaces(table: Table) -> dict[ProcessRef, int]:
    """The mount namespaces of processes, where neither the host nor the caller is in them; no entry is no evidence."""
    common = (_mount_namespace(1), _mount_namespace("self"))
    if 0 in common:
        return {}  # without knowing what everybody shares, nothing follows from sharing
    found = {p.ref: _mount_namespace(p.pid) for p in table if not p.kernel_thread}
    return {ref: number for ref, number in found.items() if number != 0 and number not in common}


def _spread(table: Table, owned: Owned, mark_gid: int | None, mount_ns: bool, spared: set[int]) -> None:
    """Add whatever belongs to what is owned already, until nothing is added."""
    namespaces = _strange_namespaces(table) if mount_ns else {}
    candidates = [p for p in table if p.pid not in spared]
    if mark_gid is not None:
        for process in candidates:
            if mark_gid in process.gids:
                owned.add(process, "mark", True)
    grown = True
    while grown:
        grown = False
        # A namespace that outlived all firmly owned processes is still known by those found through it.
        known = owned.firm.union(ref for ref, ways in owned.processes.items() if "mount_namespace" in ways)
        mounts = {namespaces[ref] for ref in known if ref in namespaces}
        for process in candidates:
            parent = table.get(process.ppid)
            if parent is not None and parent.ref in owned.processes:
                grown |= owned.add(process, "descendant", parent.ref in owned.firm)
            if process.session != process.pid and _leads(table, owned, process.session):
                grown |= owned.add(process, "session", False)
            if process.pgrp != process.pid and _leads(table, owned, process.pgrp):
                grown |= owned.add(process, "process_group", False)
            if process.ref in namespaces and namespaces[process.ref] in mounts:
                grown |= owned.add(process, "mount_namespace", False)


def _leads(table: Table, owned: Owned, leader_pid: int) -> bool:
    """Whether a session or process group is led by an owned process, or was by one that is dead by now."""
    if leader_pid <= 1 or leader_pid not in owned.leaders:
        return False  # 0 is the session of all that never had one
    leader = table.get(leader_pid)
    return leader is None or leader.ref in owned.processes


def of_unit(
    table: Table,
    state: UnitState,
    *,
    mark_gid: int | None = None,
    previous: Owned | None = None,
) -> Owned:
    """What a unit owns: its cgroup and all nested ones, its mark, and what descends from either.

    ``previous`` is an earlier answer: what it held stays owned for as long as it lives.
    """
    spared = own_line(table)
    owned = Owned()
    for pid, word in ((state.main_pid, "main_pid"), (state.control_pid, "control_pid")):
        root = table.get(pid) if pid not in spared else None
        if root is not None and pid > 1:
            owned.add(root, word, True)
            owned.roots.append(root.ref)
    group = state.control_group
    for process in table:
        inside = group not in ("", "/") and _in_cgroup(process, group)
        if process.pid not in spared and (inside or attribute(process)[0] == state.name):
            owned.add(process, "cgroup", True)
    earlier = _earlier_main(table, state)
    if earlier:
        owned.leaders.add(earlier)
        for process in table:
            if process.pid not in spared and earlier in (process.session, process.pgrp):
                owned.add(process, "session" if process.session == earlier else "process_group", True)
    _carry(table, owned, previous, spared)
    return _finish(table, owned, mark_gid, True, spared)


def of_pids(table: Table, refs: Iterable[ProcessRef], *, previous: Owned | None = None) -> Owned:
    """What the given processes own: themselves, what descends from them, the sessions and groups that they lead.

    A mount namespace is no evidence here: what somebody started by hand may share one with much else.
    """
    spared = own_line(table)
    owned = Owned()
    for ref in refs:
        process = table.by_ref(ref)
        if process is not None and ref.pid not in spared and ref.pid > 1 and not process.kernel_thread:
            owned.add(process, "pid", True)
            owned.roots.append(ref)
    _carry(table, owned, previous, spared)
    return _finish(table, owned, None, False, spared)


def _carry(table: Table, owned: Owned, previous: Owned | None, spared: set[int]) -> None:
    """Keep what an earlier look found, with what spoke for it then."""
    if previous is None:
        return
    owned.leaders |= previous.leaders
    owned.users |= previous.users
    owned.places |= previous.places
    for ref, ways in previous.processes.items():
        process = table.by_ref(ref)
        if process is not None and ref.pid not in spared:
            for found_by in ways:
                owned.add(process, found_by, ref in previous.firm)


def _finish(table: Table, owned: Owned, mark_gid: int | None, mount_ns: bool, spared: set[int]) -> Owned:
    _spread(table, owned, mark_gid, mount_ns, spared)
    tops = [ref for ref in owned.processes if not _has_owned_parent(table, owned, ref)]
    owned.roots = [ref for ref in owned.roots if ref in tops] or tops
    return owned


def _has_owned_parent(table: Table, owned: Owned, ref: ProcessRef) -> bool:
    process = table.by_ref(ref)
    parent = table.get(process.ppid) if process is not None else None
    return parent is not None and parent.ref in owned.processes
