# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which units of this host serve an engine: by definitions, by what runs, by open nodes of GPUs, by command lines."""

from __future__ import annotations

import os
import re
import typing as t

from . import _audit_command, _audit_units, _engines, _gpu_nodes, _service, _sockets
from ._audit_judge import Listens, Unit
from ._errors import ServingError
from ._gpu_device import DEFAULT_ALLOWED
from ._places import HOST_UNITS, attribute
from ._processes import Process, Table

__all__ = ("Sight", "listens", "look")

COMM = 15  # bytes that the kernel keeps of a name
MOST = 5  # processes in one warning
# What is looked at more closely when its file holds it.
HINT = re.compile(
    r"vllm|sglang|llama-server|llama_cpp|llama\.cpp|ovms|model_server|tritonserver|text-generation|ollama"
)


class Sight(t.NamedTuple):
    """The units that serve an engine or hold a GPU, those that may, and the engines that processes tell."""

    names: t.List[str]
    perhaps: t.List[str]
    engines: t.Dict[str, str]
    warnings: t.List[str]
    # Processes of engines that are in no unit, and those that are in containers.
    outside: t.List[str] = []
    contained: t.List[str] = []

    def unjudged(self, clients: bool) -> t.Iterator[str]:
        """A warning of engines that no rule was applied to. Where units are the clients of containers, those were."""
        left = self.outside + ([] if clients else self.contained)
        if left:
            more = " and %d more" % (len(left) - MOST) if len(left) > MOST else ""
            text = "an engine runs in no service unit, so that no rule was applied to it: process %s%s"
            yield text % (", ".join(left[:MOST]), more)


def look() -> Sight:
    """What can be seen of engines on this host."""
    names: t.Dict[str, None] = {}
    engines: t.Dict[str, str] = {}
    outside: t.List[str] = []
    contained: t.List[str] = []
    warnings: t.List[str] = []
    patterns = {
        profile.name: re.compile("|".join(profile.titles)) for profile in _engines.PROFILES.values() if profile.titles
    }
    programs = {program[:COMM]: engine for program, engine in _audit_command.PROGRAMS.items()}
    table = Table.snapshot()
    for process in table:
        engine = programs.get(process.name) or next((n for n, p in patterns.items() if p.search(process.name)), "")
        if not engine or process.gone:
            continue
        unit = _unit(process)
        if unit:
            names[unit] = None
            engines.setdefault(unit, engine)
        else:
            (contained if attribute(process)[1] else outside).append('%d "%s"' % (process.pid, process.name))
    for name in _service.names():
        try:
            unit = _service.unit_of(_service.load(name))
        except ServingError as error:
            warnings.append(error.message)
            continue
        if _audit_units.usable(unit):
            names[unit] = None
    for unit in _holders(table, warnings):
        names[unit] = None
    perhaps = [unit for unit in _audit_units.mentioning(HINT) if unit not in names]
    return Sight(sorted(names), sorted(perhaps), engines, warnings, outside, contained)


def _unit(process: Process) -> str:
    """The service unit of the host that a process is in; one of a user's own manager is none."""
    unit, container = attribute(process)
    if unit is None or container is not None or not _audit_units.usable(unit) or HOST_UNITS.match(unit):
        return ""
    return unit


def _holders(table: Table, warnings: t.List[str]) -> t.Set[str]:
    """The units whose processes have a node of a GPU open."""
    allowed = {str(rule.get("name"))[:COMM] for rule in DEFAULT_ALLOWED}
    facts = _gpu_nodes.scan()
    if facts.error:
        warnings.append("which units hold a GPU could not be seen: %s" % facts.error)
    elif facts.hidden and os.geteuid() != 0:
        warnings.append("which units hold a GPU could not be seen of all processes: run as root, or with become")
    found = set()
    for node, pids in facts.holders.items():
        if node.startswith("card"):
            continue  # a display server has it open
        for process in filter(None, map(table.get, pids)):
            unit = _unit(process) if process.name not in allowed else ""
            if unit:
                found.add(unit)
    return found


def listens(units: t.Sequence[Unit]) -> t.List[Listens]:
    """The sockets that listen now on ports which units are told, each with the unit of its process."""
    wanted = {port.number for unit in units for port in unit.ports if not unit.clients}
    if not wanted:
        return []
    try:
        sockets = [socket for socket in _sockets.listening() if socket.port in wanted]
    except OSError:
        return []
    table = Table.snapshot()
    owners = _sockets.owners({socket.inode for socket in sockets}, [process.pid for process in table])
    found: t.Dict[Listens, None] = {}
    for socket in sockets:
        for process in filter(None, map(table.get, owners.get(socket.inode, []))):
            unit, container = attribute(process)
            # What process 1 holds is a socket unit's, and what forwards to a container is the container's.
            if process.pid == 1 or container or unit is None or not unit.endswith(".service"):
                continue
            if re.match(r"(?:docker|containerd|podman)\.service\Z", unit) or HOST_UNITS.match(unit):
                continue
            address = "" if socket.address in _audit_command.WILDCARDS else socket.address
            found[Listens(unit, _audit_command.Port(socket.port, address))] = None
    return list(found)
