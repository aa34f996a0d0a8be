# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Processes that bear a title of the service's engine: which of them are the service's, and which only look like it.

A title alone is the weakest evidence there is, since two services of one engine and user bear the same ones. So it
counts only for an orphan that is nowhere in particular (in no unit, session or container), that bears no other
service's mark, that was born in the unit's last life, and beside which no other service of that engine can be seen.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Pattern

from . import _service
from ._accounts import account_of, group_name
from ._errors import ServingError
from ._places import containers_of
from ._processes import TICKS, Process, Table
from ._systemd import UnitState

if TYPE_CHECKING:
    from ._ownership import Owned

__all__ = ["find", "users"]

USER_MANAGER = re.compile(r"user@[0-9]+\.service\Z")
UNITS = (".service", ".socket", ".mount", ".swap")


def users(state: UnitState, owned: Owned) -> set[int]:
    """Whose processes may be the service's: of the users that its firm ones have, else of the unit's own."""
    if owned.users:
        return owned.users
    name = state.raw.get("User")
    if name is None or state.load_state != "loaded":
        return set()
    if not name or name.isdigit():
        return {int(name or 0)}
    known = account_of(name)
    return {known.pw_uid} if known is not None else set()


def find(
    table: Table, state: UnitState, owned: Owned, titles: Pattern[str], mine: set[int], own: set[int]
) -> tuple[list[Process], list[Process]]:
    """The service's processes that only their title tells, and those that look like it and are left alone."""
    whose = users(state, owned)
    alike = [
        process
        for process in table
        if titles.search(process.name)
        and process.uid in whose
        and process.ref not in owned.processes
        and process.pid > 1
        and process.pid not in own
        and not process.kernel_thread
        and not process.gone
        and not containers_of(process)
    ]
    if not alike:
        return [], []
    marks, sole = _others(state)
    ours, suspects = [], []
    for process in alike:
        place = _place(process)
        if place == "unit" or not _orphan(table, process) or _marked(process, mine, marks):
            sole = False  # another service of that engine and user, or what somebody runs by hand
        elif place == "nowhere" and _in_last_life(state, process):
            ours.append(process)
        else:
            suspects.append(process)
    return (ours, suspects) if sole else ([], [*ours, *suspects])


def _place(process: Process) -> str:
    """Where a process is that is in no container: in a unit, apart in a scope or group, or nowhere in particular."""
    parts = [part for part in process.cgroup.split("/") if part]
    if any(part.endswith(UNITS) and not USER_MANAGER.match(part) for part in parts):
        return "unit"
    if process.cgroup and all(part.endswith(".slice") for part in parts):
        return "nowhere"
    return "apart"


def _orphan(table: Table, process: Process) -> bool:
    """Whether the kernel gave it to process 1, or to the manager of its user's session."""
    parent = table.get(process.ppid)
    if process.ppid == 1 or parent is None:
        return process.ppid == 1
    above, last = (parent.cgroup.split("/") + ["", ""])[-4:-2], parent.cgroup.rsplit("/", 1)[-1]
    manager = last == "init.scope" and any(USER_MANAGER.match(part) for part in above)
    return manager and parent.name == "systemd" and parent.uid == process.uid


def _marked(process: Process, mine: set[int], marks: set[int]) -> bool:
    """Whether it bears the mark of another service."""
    others = [gid for gid in process.gids if gid != 0 and gid not in mine]
    return any(gid in marks or group_name(gid).startswith("gpuops-") for gid in others)


def _in_last_life(state: UnitState, process: Process) -> bool:
    if not state.raw.get("ExecMainStartTimestampMonotonic", "").isdigit():
        return True  # not told
    return state.in_last_life(process.ref.start / TICKS)


def _others(state: UnitState) -> tuple[set[int], bool]:
    """The marks of other services of this host, and whether surely none of those has the same engine."""
    own_engine: object = None
    engines: list[object] = []
    marks: set[int] = set()
    for name in _service.names():
        try:
            definition = _service.load(name)
        except ServingError:
            engines.append(None)
            continue
        if state.name == _service.unit_of(definition):
            own_engine = definition.get("engine")
            continue
        engines.append(definition.get("engine"))
        if isinstance(definition.get("mark_gid"), int):
            marks.add(definition["mark_gid"])
    return marks, not any(own_engine is None or engine is None or engine == own_engine for engine in engines)
