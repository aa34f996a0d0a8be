# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is running: one record per lab under /run, which a reboot of the machine clears as it clears the labs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .common import RUN, LabError, write


@dataclass
class Host:
    """One host of a lab, as started."""

    name: str
    release: str
    role: str
    user: str
    legacy: bool
    number: int
    address: str
    pid: int = 0
    start: int = 0


@dataclass
class Lab:
    """One lab, as started."""

    name: str
    index: int
    repository: str
    hosts: list[Host] = field(default_factory=list)
    binds: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where this lab's file system is mounted: the hosts' changes live there, in memory."""
        return RUN / self.name

    def host(self, name: str) -> Host:
        """Return the host called *name*."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"lab '{self.name}' has no host '{name}': it has {', '.join(h.name for h in self.hosts)}.")

    def save(self) -> None:
        """Write the record."""
        write(record(self.name), json.dumps(asdict(self), indent=2) + "\n")


def record(name: str) -> Path:
    """Return the file that holds the record of lab *name*."""
    return RUN / f"{name}.json"


def load(name: str) -> Lab | None:
    """Return the lab called *name*, or None when there is none."""
    try:
        data: dict[str, Any] = json.loads(record(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise LabError(f"the record '{record(name)}' cannot be read: {exc}") from exc
    try:
        hosts = [Host(**_known(Host, host)) for host in data.pop("hosts")]
        return Lab(hosts=hosts, **_known(Lab, data))
    except (AttributeError, KeyError, TypeError) as exc:
        raise LabError(f"the record '{record(name)}' cannot be read: it lacks something ({exc}).") from exc


def _known(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    """Return what this version knows of a record: another checkout may have written more."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in found.items() if name in names}


def all_labs() -> list[Lab]:
    """Return every lab of this machine."""
    labs = [load(path.stem) for path in sorted(RUN.glob("*.json"))]
    return [lab for lab in labs if lab is not None]


def started_at(pid: int) -> int:
    """Return the start time of process *pid* in clock ticks since boot, or 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def running(host: Host) -> bool:
    """Say whether the process that was started for *host* is still that process."""
    return host.pid > 0 and host.start > 0 and started_at(host.pid) == host.start


def find(name: str | None, host: str | None = None) -> Lab:
    """Return the lab meant: the named one, else the only one, else the only one with this host."""
    if name is not None:
        lab = load(name)
        if lab is None:
            raise LabError(f"lab '{name}' is not up.")
        return lab
    labs = [lab for lab in all_labs() if host is None or any(one.name == host for one in lab.hosts)]
    if len(labs) == 1:
        return labs[0]
    if not labs:
        raise LabError(f"no lab has a host '{host}'." if host else "no lab is up.")
    raise LabError(f"several labs are up ({', '.join(lab.name for lab in labs)}): say which with --name.")
