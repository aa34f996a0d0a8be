# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is known of a GPU, and the judgement on it: the vendor's driver and the open device nodes, always both.

Judging is pure. It never turns something that could not be seen into "clear".
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from ._gpu_nodes import NodeFacts

__all__ = ["DEFAULT_ALLOWED", "Device", "Holder", "Identity", "Options", "judge"]

Facts = t.Dict[str, t.Any]
Rule = t.Mapping[str, t.Any]

RETURNED = (
    *("index", "uuid", "pci", "vendor", "name", "verdict", "reason", "detail"),
    *("memory_used", "memory_total", "memory_basis"),
)
COMM_LENGTH = 15  # the kernel cuts process names
NO_PERMISSION = 4
DEFAULT_MOST = 512  # MiB that a name alone excuses: these daemons hold little, and anybody may bear their names

DEFAULT_ALLOWED: t.List[t.Dict[str, str]] = [
    {"name": "nvidia-persistenced"},
    {"name": "nvidia-powerd"},
    {"name": "nv-fabricmanager"},
    {"name": "nv-hostengine"},
    {"name": "dcgm-exporter"},
    {"name": "Xorg"},
]


@dataclass
class Options:
    """What to judge and by which rules."""

    gpus: t.Optional[t.List[str]] = None
    expected_gpus: t.Optional[int] = None
    allow_no_gpu: bool = False
    memory_tolerance: int = 64
    allowed_holders: t.Optional[t.Sequence[Rule]] = None  # by the default rules, up to DEFAULT_MOST each
    unit: t.Optional[str] = None
    mark_gid: t.Optional[int] = None
    interval: float = 1.0
    confirmations: int = 2


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
    """A process that holds a device, by what either source says."""

    pid: int
    kind: str
    source: t.List[str]
    memory: t.Optional[int] = None
    identity: t.Optional[Identity] = None
    allowed: bool = False
    foreign: bool = False
    beyond: bool = False  # a default rule fits, but it holds more than that excuses

    @property
    def excused(self) -> bool:
        return self.allowed or self.foreign

    @property
    def listed(self) -> bool:
        return self.kind != "node"

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
        if self.identity is None:
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
    """One device and the verdict on it."""

    index: t.Optional[int]
    vendor: str
    verdict: str = "unknown"
    reason: str = ""
    detail: str = ""
    uuid: t.Optional[str] = None
    pci: t.Optional[str] = None
    name: t.Optional[str] = None
    memory_used: t.Optional[int] = None
    memory_total: t.Optional[int] = None
    memory_basis: str = "not_available"
    holders: t.List[Holder] = field(default_factory=list)
    utilization: t.Optional[int] = None
    asked: t.Optional[str] = None  # how the caller named a device that was not found

    def decide(self, verdict: str, reason: str, detail: str) -> Device:
        self.verdict, self.reason, self.detail = verdict, reason, detail
        return self

    @property
    def label(self) -> str:
        return "GPU %s" % (self.index if self.index is not None else '"%s"' % self.asked)

    def as_dict(self) -> t.Dict[str, t.Any]:
        result = {key: getattr(self, key) for key in RETURNED}
        result["holders"] = [holder.as_dict() for holder in self.holders]
        return result


def allowed(identity: t.Optional[Identity], rules: t.Sequence[Rule]) -> bool:
    """Whether a rule names this process; every key that a rule gives must fit, and an empty rule fits nothing."""
    if identity is None:
        return False
    for rule in rules:
        wanted = {key: value for key, value in rule.items() if value is not None}
        found = {"name": identity.name, "user": identity.user, "unit": identity.unit}
        if "name" in wanted:
            wanted["name"] = wanted["name"][:COMM_LENGTH]
        if wanted and all(found.get(key) == value for key, value in wanted.items()):
            return True
    return False


def judge(
    vendor: str, facts: Facts, nodes: NodeFacts, minor: t.Optional[int], resolve: Resolve, options: Options
) -> Device:
    """The verdict on one device from what the driver said, who has its node open, and the rules of the caller."""
    device = Device(
        index=facts["index"],
        vendor=vendor,
        uuid=facts.get("uuid"),
        pci=facts.get("pci"),
        name=facts.get("name"),
        memory_used=facts.get("memory_used"),
        memory_total=facts.get("memory_total"),
        memory_basis=facts.get("memory_basis", "not_available"),
        utilization=facts.get("utilization"),
    )
    node_pids = nodes.holders.get(minor, []) if minor is not None else []
    device.holders = _holders(facts.get("processes", []), node_pids, resolve, options, device.memory_used)
    if facts.get("reason"):
        return device.decide("error", facts["reason"], facts["detail"])
    if facts.get("mig"):
        return device.decide(
            "unknown", "partitioned", "the device is partitioned (MIG), and partitions are not judged yet"
        )
    blocking = [holder for holder in device.holders if holder.listed and not holder.excused]
    if blocking:
        known = any(holder.identity is not None for holder in blocking)
        return device.decide("busy", "held_by_process" if known else "held_by_unresolvable", _name(blocking))
    nodes_missing = nodes.error or ("its device node is not known" if minor is None else "")
    if device.memory_used is None:
        return _by_holders(device, facts.get("unreadable", {}), nodes, nodes_missing)
    return _by_memory(device, facts.get("unreadable", {}), nodes, nodes_missing, options.memory_tolerance)


def _holders(
    listed: t.Sequence[Facts], node_pids: t.Sequence[int], resolve: Resolve, options: Options, used: t.Optional[int]
) -> t.List[Holder]:
    found: t.Dict[int, Holder] = {}
    for entry in listed:
        pid, memory = entry["pid"], entry["memory"]
        if pid not in found:
            found[pid] = Holder(pid, entry["kind"], ["driver"], memory)
        elif memory is not None:
            # One process in two lists: each shows its whole memory.
            found[pid].memory = max(memory, found[pid].memory or 0)
    for pid in node_pids:
        if pid in found:
            found[pid].source.append("node")
        else:
            found[pid] = Holder(pid, "node", ["node"])
    for holder in found.values():
        holder.identity = resolve(holder.pid)
        if options.allowed_holders is not None:
            holder.allowed = allowed(holder.identity, options.allowed_holders)
        elif allowed(holder.identity, DEFAULT_ALLOWED):
            # Where it is not known what it holds, it holds no more than all that is in use.
            most = used if holder.memory is None else holder.memory
            holder.beyond = holder.listed and (most is None or (holder.memory or 0) > DEFAULT_MOST)
            holder.allowed = not holder.beyond
        holder.foreign = holder.identity is not None and not holder.identity.owned
    return list(found.values())


def _name(holders: t.Sequence[Holder]) -> str:
    shown = "; ".join(str(holder) for holder in holders[:3])
    return shown + ("; and %d more" % (len(holders) - 3) if len(holders) > 3 else "")


def _node_suspects(device: Device) -> t.List[Holder]:
    return [holder for holder in device.holders if not holder.listed and not holder.excused]


def _unlisted(unreadable: t.Mapping[str, int]) -> bool:
    """Whether processes may exist that the driver did not show.

    A driver that does not know the graphics or MPS list has no such clients. The compute list is another matter.
    """
    return "compute" in unreadable or NO_PERMISSION in unreadable.values()


def _by_holders(device: Device, unreadable: t.Mapping[str, int], nodes: NodeFacts, nodes_missing: str) -> Device:
    """The driver does not tell how much memory is in use: who holds the device decides, and all must be visible."""
    suspects = _node_suspects(device)
    if suspects:
        detail = "its memory in use is not known and %s" % _name(suspects)
        return device.decide("busy", "node_held_memory_unreadable", detail)
    if _unlisted(unreadable):
        detail = "the driver shows neither its memory in use nor the processes on it"
        return device.decide("unknown", "processes_unreadable", detail)
    if nodes_missing or nodes.hidden:
        detail = nodes_missing or "the open files of some processes cannot be read"
        return device.decide("unknown", "nodes_unreadable", "its memory in use is not known and %s" % detail)
    return device.decide("clear", "judged_by_holders", "the driver does not tell its memory in use; nobody holds it")


def _by_memory(
    device: Device, unreadable: t.Mapping[str, int], nodes: NodeFacts, nodes_missing: str, tolerance: int
) -> Device:
    used = device.memory_used or 0
    excused = [holder for holder in device.holders if holder.listed]
    rest = used - sum(holder.memory or 0 for holder in excused)
    suspects = _node_suspects(device)
    if rest > tolerance:
        if suspects:
            detail = "%d MiB are in use and %s" % (used, _name(suspects))
            return device.decide("busy", "node_held_memory_in_use", detail)
        if any(holder.memory is None for holder in excused):
            detail = "%d MiB are in use, and the driver does not tell how much of it %s" % (used, _name(excused))
            return device.decide("unknown", "memory_unattributed", detail)
        if excused:
            detail = "%d of %d MiB in use are held by no visible process" % (rest, used)
        else:
            detail = "%d MiB are in use by no visible process" % used
        return device.decide("busy", "held_by_unresolvable", detail)
    if nodes_missing:
        return device.decide("unknown", "nodes_unreadable", nodes_missing)
    if _unlisted(unreadable) and (NO_PERMISSION in unreadable.values() or suspects or nodes.hidden):
        detail = "the driver does not show the processes on it, and the open device nodes do not exclude one"
        return device.decide("unknown", "processes_unreadable", detail)
    detail = "%d MiB are in use%s, %d are tolerated" % (rest, " by nobody that counts" if excused else "", tolerance)
    return device.decide("clear", "idle", detail)
