# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is answered of one device: its verdict, and who holds it."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from . import _gpu_reasons
from ._gpu_facts import Facts

__all__ = ["DEFAULT_ALLOWED", "DEFAULT_MOST", "Device", "Holder", "Identity", "Resolve"]

DEFAULT_MOST = 512  # MiB that a name alone excuses: these daemons hold little, and anybody may bear their names
DEFAULT_ALLOWED: t.List[t.Dict[str, str]] = [
    {"name": "nvidia-persistenced"},
    {"name": "nvidia-powerd"},
    {"name": "nv-fabricmanager"},
    {"name": "nv-hostengine"},
    {"name": "dcgm-exporter"},
    {"name": "Xorg"},
    {"name": "systemd-logind"},  # keeps the file that it opened for a display server
]


class Identity(t.NamedTuple):
    """What the process table says about a holder."""

    create_time: float
    name: str
    user: str
    unit: t.Optional[str]
    container: t.Optional[str]
    state: str
    owned: bool  # by the unit that is judged; true when none was named


Resolve = t.Callable[[int], t.Optional[Identity]]


@dataclass
class Holder:
    """A process that holds a device, by what any source says."""

    pid: int
    kind: str
    source: t.List[str]
    memory: t.Optional[int] = None
    clients: t.Dict[str, int] = field(default_factory=dict)  # MiB by what several processes may share
    identity: t.Optional[Identity] = None
    allowed: bool = False
    foreign: bool = False
    outside: bool = False  # only a driver tells of it, by a number that may be another process's here
    beyond: bool = False  # a default rule fits, but it holds more than that excuses

    @property
    def excused(self) -> bool:
        return self.allowed or self.foreign

    @property
    def listed(self) -> bool:
        return self.kind != "node"

    @property
    def confirmed(self) -> bool:
        """Whether the process table here, and not only a driver that knows the whole machine, shows it as a holder."""
        return "node" in self.source or "fdinfo" in self.source

    def as_dict(self) -> t.Dict[str, t.Any]:
        who = self.identity
        return {
            "pid": self.pid,
            "create_time": who.create_time if who else None,
            "name": who.name if who else None,
            "user": who.user if who else None,
            "unit": who.unit if who else None,
            "container": who.container if who else None,
            "state": who.state if who else None,
            "memory": self.memory,
            "kind": self.kind,
            "source": self.source,
            "allowed": self.allowed,
            "foreign": self.foreign,
        }

    def __str__(self) -> str:
        if self.outside:
            text = "a process that the driver calls %d, and that cannot be told from others here," % self.pid
        elif self.identity is None:
            text = "process %d, which is not in the process table here," % self.pid
        else:
            place = "unit %s" % (self.identity.unit or "none")
            if self.identity.container:
                place += ", container %s" % self.identity.container[:12]
            text = 'process %d "%s" (user %s, %s)' % (self.pid, self.identity.name, self.identity.user, place)
        if not self.listed:
            return text + " has the device node open"
        text += " holds %d MiB" % self.memory if self.memory is not None else " holds memory of unknown size"
        return text + (" (its name alone excuses %d MiB)" % DEFAULT_MOST if self.beyond else "")


@dataclass
class Device:
    """One device, or one partition of it, and the verdict on it."""

    index: t.Optional[int]
    vendor: str
    verdict: str = "unknown"
    reason: str = ""
    detail: str = ""
    uuid: t.Optional[str] = None
    pci: t.Optional[str] = None
    name: t.Optional[str] = None
    integrated: bool = False
    memory_used: t.Optional[int] = None
    memory_total: t.Optional[int] = None
    memory_basis: str = "not_available"
    utilization: t.Optional[int] = None
    holders: t.List[Holder] = field(default_factory=list)
    partitions: t.List[Device] = field(default_factory=list)
    disagreements: t.List[str] = field(default_factory=list)
    asked: t.Optional[str] = None  # how the caller named a device that was not found
    partition_of: t.Optional[str] = None  # of a partition: the label of its device
    explained: t.Optional[int] = (
        0  # of a partition: memory in use that processes on a sibling hold, which shares its memory
    )

    @classmethod
    def of(cls, vendor: str, facts: Facts) -> Device:
        return cls(
            index=facts["index"],
            vendor=vendor,
            uuid=facts.get("uuid"),
            pci=facts.get("pci"),
            name=facts.get("name"),
            integrated=bool(facts.get("integrated")),
            memory_used=facts.get("memory_used"),
            memory_total=facts.get("memory_total"),
            memory_basis=facts.get("memory_basis") or "not_available",
            utilization=facts.get("utilization"),
            disagreements=list(facts.get("remarks") or ()),
        )

    def decide(self, verdict: str, reason: str, detail: str) -> Device:
        if _gpu_reasons.DEVICE[reason][0] != verdict:
            raise ValueError('the reason "%s" does not stand for "%s"' % (reason, verdict))
        self.verdict, self.reason, self.detail = verdict, reason, detail
        return self

    @property
    def label(self) -> str:
        if self.partition_of is not None:
            return "partition %s of %s" % (self.index, self.partition_of)
        return "GPU %s" % (self.index if self.index is not None else '"%s"' % self.asked)

    def as_dict(self) -> t.Dict[str, t.Any]:
        names = ("index", "uuid", "pci", "vendor", "name", "integrated", "verdict", "reason", "detail")
        result = {key: getattr(self, key) for key in names}
        result.update({key: getattr(self, key) for key in ("memory_used", "memory_total", "memory_basis")})
        result["holders"] = [holder.as_dict() for holder in self.holders]
        result["partitions"] = [partition.as_dict() for partition in self.partitions]
        result["disagreements"] = self.disagreements
        return result
