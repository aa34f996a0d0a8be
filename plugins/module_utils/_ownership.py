# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which processes belong to a service, however far they have wandered from its front process."""

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

__all__ = ["Owned", "attribute", "check_mark", "foreign", "mark_group", "of_pids", "of_unit"]

FIRM = frozenset(("pid", "main_pid", "control_pid", "cgroup", "mark", "earlier"))
CONTAINER = re.compile(r"(?:^|-)([0-9a-f]{64})(?:\.scope)?$")
UNIT_SUFFIXES = (".service", ".scope", ".socket", ".mount", ".swap")


@dataclass
class Owned:
    """The owned processes, each with all the ways it was found by."""

    processes: dict[ProcessRef, list[str]] = field(default_factory=dict)
    roots: list[ProcessRef] = field(default_factory=list)
    leaders: set[int] = field(default_factory=set)  # sessions and process groups known to be owned, dead leaders' too

    def add(self, process: Process, found_by: str) -> bool:
        ways = self.processes.setdefault(process.ref, [])
        if found_by in ways:
            return False
        ways.append(found_by)
        return len(ways) == 1


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
    """The unit and the container of a process, as its cgroup tells."""
    unit, container = None, None
    outer = True
    for part in process.cgroup.split("/"):
        match = CONTAINER.search(part)
        if match:
            container = match.group(1)
        if outer and part and not part.endswith(".slice"):
            name = part[1:] if part.startswith("_") else part
            unit = name if name.endswith(UNIT_SUFFIXES) else None
            outer = False
    return unit, container


def foreign(table: Table, owned: Owned) -> set[ProcessRef]:
    """Owned processes that may yet be somebody else's.

    A cgroup, a mark and a line of descent speak for themselves. What is found by a session, a process group or a
    namespace alone must also run as a user whom the others run as.
    """
    firm = {ref for ref, ways in owned.processes.items() if FIRM.intersection(ways)}
    firm.update(process.ref for process in table.descendants(ref.pid for ref in firm) if process.ref in owned.processes)
    users = {process.uid for process in (table.by_ref(ref) for ref in firm) if process is not None}
    doubtful = (table.by_ref(ref) for ref in owned.processes if ref not in firm)
    return {process.ref for process in doubtful if process is not None and process.uid not in users}


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


def _spread(table: Table, owned: Owned, mark_gid: int | None, mount_ns: bool, spared: set[int]) -> None:
    """Add whatever belongs to what is owned already, until nothing is added."""
    own_namespaces = {_mount_namespace(1), _mount_namespace("self"), 0} if mount_ns else set()
    # Namespaces are read once: each is a system call a process.
    namespaces = {p.ref: _mount_namespace(p.pid) for p in table if not p.kernel_thread} if mount_ns else {}
    candidates = [p for p in table if p.pid not in spared and p.pid > 1 and not p.kernel_thread]
    if mark_gid is not None:
        for process in candidates:
            if mark_gid in process.gids:
                owned.add(process, "mark")
    grown = True
    while grown:
        grown = False
        pids = {ref.pid for ref in owned.processes}
        mounts = {namespaces.get(ref, 0) for ref in owned.processes} - own_namespaces
        for ref in owned.processes:
            process = table.by_ref(ref)
            if process is not None and ref.pid in (process.session, process.pgrp):
                owned.leaders.add(ref.pid)
        for process in candidates:
            if process.ppid in pids:
                grown |= owned.add(process, "descendant")
            if process.session in owned.leaders and process.session != process.pid:
                grown |= _by_leader(table, owned, process, process.session, "session")
            if process.pgrp in owned.leaders and process.pgrp != process.pid:
                grown |= _by_leader(table, owned, process, process.pgrp, "process_group")
            if mounts and namespaces.get(process.ref, 0) in mounts:
                grown |= owned.add(process, "mount_namespace")


def _by_leader(table: Table, owned: Owned, process: Process, leader_pid: int, found_by: str) -> bool:
    leader = table.get(leader_pid)
    if leader is not None and leader.ref not in owned.processes:
        return False  # the number is somebody else's by now
    return owned.add(process, found_by)


def of_unit(
    table: Table,
    state: UnitState,
    *,
    mark_gid: int | None = None,
    mount_ns: bool = True,
    seeds: Iterable[ProcessRef] = (),
    leaders: Iterable[int] = (),
) -> Owned:
    """What a unit owns: its cgroup and all nested ones, its mark, and what descends from either."""
    spared = own_line(table)
    owned = Owned(leaders=set(leaders))
    for pid, word in ((state.main_pid, "main_pid"), (state.control_pid, "control_pid")):
        process = table.get(pid) if pid > 1 else None
        if process is not None and pid not in spared:
            owned.add(process, word)
            owned.roots.append(process.ref)
    for process in table:
        if process.pid in spared or process.kernel_thread or process.pid <= 1:
            continue
        group = state.control_group
        if (group not in ("", "/") and _in_cgroup(process, group)) or attribute(process)[0] == state.name:
            owned.add(process, "cgroup")
    earlier = _earlier_main(table, state)
    if earlier:
        owned.leaders.add(earlier)
    return _finish(table, owned, seeds, mark_gid, mount_ns, spared)


def of_pids(
    table: Table,
    refs: Iterable[ProcessRef],
    *,
    mark_gid: int | None = None,
    mount_ns: bool = False,
    seeds: Iterable[ProcessRef] = (),
    leaders: Iterable[int] = (),
) -> Owned:
    """What the given processes own: themselves, what descends from them, and the sessions and groups that they lead."""
    spared = own_line(table)
    owned = Owned(leaders=set(leaders))
    for ref in refs:
        process = table.by_ref(ref)
        if process is not None and ref.pid not in spared and ref.pid > 1 and not process.kernel_thread:
            owned.add(process, "pid")
            owned.roots.append(ref)
    return _finish(table, owned, seeds, mark_gid, mount_ns, spared)


def _finish(
    table: Table, owned: Owned, seeds: Iterable[ProcessRef], mark_gid: int | None, mount_ns: bool, spared: set[int]
) -> Owned:
    for ref in seeds:  # what an earlier scan had found stays owned for as long as it lives
        process = table.by_ref(ref)
        if process is not None and ref.pid not in spared:
            owned.add(process, "earlier")
    _spread(table, owned, mark_gid, mount_ns, spared)
    for ref in owned.processes:
        process = table.by_ref(ref)
        parent = table.get(process.ppid) if process is not None else None
        if process is not None and (parent is None or parent.ref not in owned.processes) and ref not in owned.roots:
            owned.roots.append(ref)
    return owned
