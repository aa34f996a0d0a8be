# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a process is: the unit and the containers that the path of its cgroup tells."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from ._processes import Process

__all__ = ["Container", "attribute", "containers_of", "in_login", "machine_of", "place"]

# Parts of a cgroup's path that mean a container. The manager's name may stand before the id: docker-ID.scope,
# libpod-ID, PARENT:cri-containerd:ID. The monitor beside a container bears the id too, and is not in it.
CONTAINER = re.compile(r"(?!(?:libpod|crio)-conmon-)(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?\Z")
LXC = re.compile(r"lxc\.payload\.(.+)\Z")
LXC_FOLDERS = ("lxc", "lxc.payload")  # the name is the next part
MACHINE_SCOPE = re.compile(r"machine-(?!qemu\\x2d)(.+)\.scope\Z")  # virtual machines bear such names as well
NSPAWN_SERVICE = re.compile(r"systemd-nspawn@(.+)\.service\Z")
PAYLOAD_SCOPE = re.compile(r"(.+)\.scope\Z")  # of a machine that is not registered
CONTAINER_NAME = re.compile(r"[A-Za-z0-9_.:@+-]{1,255}\Z")
LOGIN = re.compile(r"(?:session-[^/]+\.scope|user@[^/]+\.service)\Z")
# What keeps the host, the sessions of its users and the way to it running.
HOST_UNITS = re.compile(
    r"(?:init\.scope|session-.*\.scope|user@.*\.service|user-runtime-dir@.*\.service|"
    r"systemd-(?!(?:nspawn|vmspawn)@).*\.service|sshd?(?:@.*)?\.service|dbus(?:-broker)?\.service)\Z"
)
UNIT_SUFFIXES = (".service", ".scope", ".socket", ".mount", ".swap")


class Container(NamedTuple):
    """A container of which a client is in the unit's ExecStart= or among its firmly owned processes."""

    manager: str  # docker, podman, nerdctl, nspawn
    id: str  # as ``attribute`` tells it
    name: str
    # What asks the manager to stop it; one word may be {seconds}. Empty: its processes are signalled themselves.
    stop: tuple[str, ...] = ()
    restarts: bool = False  # whether its manager may yet start it again by itself, also while nothing of it runs


def attribute(process: Process) -> tuple[str | None, str | None]:
    """The unit and the innermost container of a process, as its cgroup tells: an id, or a name for LXC and nspawn."""
    return _attribute(process.cgroup)


@functools.lru_cache(maxsize=4096)
def _attribute(cgroup: str) -> tuple[str | None, str | None]:
    unit, container = None, None
    outer = True
    parts = cgroup.split("/")
    for place, part in enumerate(parts):
        container = _container(parts, place) or container
        if outer and part and not part.endswith(".slice"):
            name = part[1:] if part.startswith("_") else part
            unit = _printable(name) if name.endswith(UNIT_SUFFIXES) else None
            outer = False
    return unit, container


def in_login(process: Process) -> bool:
    """Whether somebody logged in to start it, or the manager of a user's own units did."""
    return LOGIN.match(attribute(process)[0] or "") is not None


def place(process: Process) -> tuple[str | None, str | None]:
    """The unit and container, or the path of a group that is of neither, such as batch systems make them."""
    found = attribute(process)
    apart = found == (None, None) and any(part and not part.endswith(".slice") for part in process.cgroup.split("/"))
    return (process.cgroup, None) if apart else found


def containers_of(process: Process) -> list[str]:
    """The containers that a process is in, the outermost first."""
    parts = process.cgroup.split("/")
    found = [_container(parts, place) for place in range(len(parts))]
    return [name for name in found if name is not None]


def machine_of(process: Process) -> str | None:
    """The name of the machine of systemd-nspawn, in a scope of its own, that a process is in."""
    parts = process.cgroup.split("/")
    for place, part in enumerate(parts):
        if part.endswith(".scope") and parts[place + 1 : place + 2] == ["payload"]:
            return _container(parts, place)
    return None


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
        match = NSPAWN_SERVICE.match(part) or PAYLOAD_SCOPE.match(part)
    name = match.group(1) if match is not None else ""
    # A container may itself be called lxc: then what follows is in it.
    if match is None and parts[max(0, place - 1)] in LXC_FOLDERS and parts[max(0, place - 2)] not in LXC_FOLDERS:
        name = part
    name = re.sub(r"\\x([0-9a-f]{2})", lambda escaped: chr(int(escaped.group(1), 16)), name)
    return name if CONTAINER_NAME.match(name) else None
