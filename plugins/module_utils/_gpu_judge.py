# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The judgement on one device. It is pure, and never turns something that could not be seen into "clear"."""

from __future__ import annotations

import os
import typing as t

from ._gpu_device import DEFAULT_ALLOWED, DEFAULT_MOST, Device, Holder, Identity, Resolve
from ._gpu_facts import Facts
from ._gpu_nodes import NodeFacts
from ._gpu_options import Options, Rule
from ._gpu_view import View
from ._verdicts import worst

__all__ = ["allowed", "blocking", "judge"]

COMM_LENGTH = 15  # the kernel cuts process names


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


def blocking(device: Device, options: Options) -> t.List[Holder]:
    """Whose use makes this device busy: those listed, and with memory in use that they do not explain, its node's."""
    listed = [holder for holder in device.holders if holder.listed and not holder.excused]
    if device.partitions:  # what is held outside of them was judged with the whole
        unexplained = device.reason in ("node_held_memory_in_use", "node_held_memory_unreadable")
    else:
        unexplained = device.memory_used is None or _rest(device) > options.tolerance(device.vendor)
    return listed + (_suspects(device) if unexplained else [])


class _Case(t.NamedTuple):
    """What the judgement on a device rests on, beside its facts."""

    nodes: NodeFacts
    view: View
    resolve: Resolve
    options: Options


def judge(vendor: str, facts: Facts, nodes: NodeFacts, view: View, resolve: Resolve, options: Options) -> Device:
    """The verdict on one device from what its driver said, who has its nodes open, and the rules of the caller."""
    case = _Case(nodes, view, resolve, options)
    device = Device.of(vendor, facts)
    if not facts.get("partitioned"):
        return _one(device, facts, case)
    partitions = facts.get("partitions")
    if facts.get("reason") or not partitions:
        _one(device, facts, case)
        if device.verdict == "clear" and partitions is None:
            detail = "it is partitioned (MIG), and does not tell its partitions"
            device.decide("unknown", "partitions_unreadable", detail)
        return device
    for part in partitions:
        partition = Device.of(vendor, part)
        partition.partition_of, partition.pci = device.label, device.pci
        siblings = [other for other in partitions if other is not part and _share(part, other)]
        partition.explained = _explained(part, siblings)
        # The node of the whole device stands in for a partition whose own is not known.
        known = {**part, "nodes": part.get("nodes") or facts.get("nodes")}
        strangers = {entry["pid"] for other in siblings for entry in other.get("processes") or ()}
        device.partitions.append(_one(partition, known, case, strangers))
    return _whole(device, facts, case)


def _outside(device: Device, partitions: t.Sequence[Facts]) -> int:
    """Memory in use that no partition answers for; none is known of where the device does not tell its own."""
    told: t.Dict[t.Any, int] = {}
    for place, (partition, part) in enumerate(zip(device.partitions, partitions)):
        used = partition.memory_used
        if used is None:  # no more is known of it than what its processes hold
            used = sum(holder.memory or 0 for holder in partition.holders if holder.listed)
        place = -1 - place if part.get("gi") is None else part["gi"]
        told[place] = max(used, told.get(place, 0))
    return max(0, (device.memory_used or 0) - sum(told.values()))


def _share(part: Facts, other: Facts) -> bool:
    """Whether two partitions have their memory in common: the compute instances of one GPU instance."""
    return part.get("gi") is not None and part.get("gi") == other.get("gi")


def _explained(part: Facts, siblings: t.Sequence[Facts]) -> t.Optional[int]:
    """How much of a partition's memory in use is that of processes on its siblings; None where one does not tell."""
    own = {entry["pid"] for entry in part.get("processes") or ()}
    held: t.Dict[int, t.Optional[int]] = {}
    for entry in (entry for other in siblings for entry in other.get("processes") or ()):
        if entry["pid"] not in own:
            held[entry["pid"]] = entry["memory"]
    return None if None in held.values() else sum(memory or 0 for memory in held.values())


def _whole(device: Device, facts: Facts, case: _Case) -> Device:
    """The verdict on a partitioned device: that of its partitions, and of what is held outside of them."""
    inside = {holder.pid for partition in device.partitions for holder in partition.holders}
    device.holders = [holder for holder in _holders(device, facts, case) if holder.pid not in inside]
    device.memory_used = _outside(device, facts["partitions"])
    # What the device itself refuses to tell, as is usual then, its partitions tell.
    _judge(device, {**facts, "lists": "complete", "memory_denied": False}, case)
    device.memory_used = facts.get("memory_used")
    verdict = worst([device.verdict, *(partition.verdict for partition in device.partitions)])
    same = [partition for partition in device.partitions if partition.verdict == verdict]
    if verdict == "clear":
        return device.decide("clear", same[0].reason, "all of its %d partitions are clear" % len(same))
    own = [(device.reason, device.detail)] if device.verdict == verdict else []
    reasons = own + [(partition.reason, "%s: %s" % (partition.label, partition.detail)) for partition in same]
    return device.decide(verdict, reasons[0][0], "; ".join(detail for _reason, detail in reasons))


def _one(device: Device, facts: Facts, case: _Case, strangers: t.Collection[int] = ()) -> Device:
    """The verdict on a device or a partition; ``strangers`` hold a sibling, which has a node in common with it."""
    device.holders = [h for h in _holders(device, facts, case) if h.listed or h.pid not in strangers]
    if facts.get("reason"):
        return device.decide("error", facts["reason"], facts["detail"])
    return _judge(device, facts, case)


def _judge(device: Device, facts: Facts, case: _Case) -> Device:
    """Busy if anything says so, then unknown if anything was not seen, and only then clear."""
    _compare(device, facts, case)
    found = _busy(device, case) or _unseen(device, facts, case)
    if found is None:
        return _clear(device, case.options)
    verdict, reason, detail = found
    if reason == "held_by_unresolvable":
        # Who cannot look into all processes may well have the holder before him.
        detail += "; %s" % _hidden(case.nodes) if case.nodes.hidden else ""
        detail += "" if case.view.complete else "; %s" % case.view.sentence
    return device.decide(verdict, reason, detail)


Found = t.Optional[t.Tuple[str, str, str]]


def _busy(device: Device, case: _Case) -> Found:
    blocking = [holder for holder in device.holders if holder.listed and not holder.excused]
    if blocking:
        known = any(holder.identity is not None for holder in blocking)
        return "busy", "held_by_process" if known else "held_by_unresolvable", _name(blocking)
    suspects = _suspects(device)
    if device.memory_used is None:
        if suspects:
            detail = "its memory in use is not known and %s" % _name(suspects)
            return "busy", "node_held_memory_unreadable", detail
        return None
    rest, excused = _rest(device), [holder for holder in device.holders if holder.listed]
    if rest <= case.options.tolerance(device.vendor):
        return None
    if suspects:
        return "busy", "node_held_memory_in_use", "%d MiB are in use and %s" % (device.memory_used, _name(suspects))
    if device.explained is None:
        detail = "%d MiB are in use, and it is not told how much of it is a process's on a partition beside it"
        return "unknown", "memory_unattributed", detail % device.memory_used
    if any(holder.memory is None for holder in excused):
        detail = "%d MiB are in use, and the driver does not tell how much of it %s" % (
            device.memory_used,
            _name(excused),
        )
        return "unknown", "memory_unattributed", detail
    where = " outside of its partitions" if device.partitions else ""
    tolerated = case.options.tolerance(device.vendor)
    if excused:
        detail = "%d of %d MiB in use%s are held by no visible process" % (rest, device.memory_used, where)
    else:
        detail = "%d MiB are in use%s by no visible process" % (device.memory_used, where)
    detail += ", %d are tolerated" % tolerated
    if device.memory_basis == "used_and_reserved":
        detail += "; the driver's own share is in it: if an idle device shows as much, raise the tolerance to that"
    passed_over = [holder for holder in device.holders if not holder.listed]
    return "busy", "held_by_unresolvable", detail + ("; passed over: %s" % _name(passed_over) if passed_over else "")


def _unseen(device: Device, facts: Facts, case: _Case) -> Found:
    """What could not be seen, and might hide a holder."""
    nodes, lists = case.nodes, facts.get("lists") or "complete"
    if nodes.error:
        return "unknown", "nodes_unreadable", nodes.error
    if not facts.get("nodes"):
        return "unknown", "nodes_unreadable", "its device node is not known"
    if nodes.hidden:
        return "unknown", "nodes_unreadable", _hidden(nodes)
    if facts.get("memory_denied"):
        return "unknown", "memory_unreadable", "there is a figure of its memory in use, and it cannot be read"
    if lists == "denied":
        return "unknown", "processes_unreadable", "this account may not see the processes on it"
    if lists == "absent" and (device.memory_used is None or _suspects(device)):
        return "unknown", "processes_unreadable", "the list of the processes on it is not complete"
    # What visible processes hold says nothing of those that are not visible.
    by_holders = device.memory_used is None or device.memory_basis == "clients"
    if by_holders and not case.view.complete:
        return "unknown", "outside_not_visible", "its memory in use is not told, and %s" % case.view.sentence
    return None


def _hidden(nodes: NodeFacts) -> str:
    many = "process" if nodes.hidden == 1 else "processes"
    text = "the open files of %d %s or more could not be read" % (nodes.hidden, many)
    if nodes.hung:
        text += ", and process %s gives no answer" % ", ".join(map(str, nodes.hung[:3]))
    return text + ("; run as root" if os.geteuid() else "")


def _clear(device: Device, options: Options) -> Device:
    if device.memory_used is None:
        # Who is excused is shown, and is nobody that counts.
        detail = "its memory in use is not told; nobody that counts holds it"
        return device.decide("clear", "judged_by_holders", detail)
    detail = "%d MiB are in use%s, %d are tolerated"
    excused = [holder for holder in device.holders if holder.listed]
    numbers = (_rest(device), " by others" if excused else "", options.tolerance(device.vendor))
    if excused:
        return device.decide("clear", "only_excused", "%s, excused; %s" % (_name(excused), detail % numbers))
    return device.decide("clear", "idle", detail % numbers)


def _holders(device: Device, facts: Facts, case: _Case) -> t.List[Holder]:
    found: t.Dict[int, Holder] = {}
    for entry in facts.get("processes") or ():
        pid, memory = entry["pid"], entry["memory"]
        holder = found.get(pid)
        if holder is None:
            found[pid] = Holder(pid, entry["kind"], [entry["source"]], memory, dict(entry.get("clients") or {}))
            continue
        if entry["source"] not in holder.source:
            holder.source.append(entry["source"])
        holder.clients.update(entry.get("clients") or {})
        if memory is not None:
            # One process in two lists: each shows its whole memory.
            holder.memory = max(memory, holder.memory or 0)
    for pid in sorted({pid for node in facts.get("nodes") or () for pid in case.nodes.holders.get(node, ())}):
        if pid in found:
            found[pid].source.append("node")
        else:
            found[pid] = Holder(pid, "node", ["node"])
    for holder in found.values():
        if not case.view.complete and not holder.confirmed:
            holder.outside = True
            continue  # a driver's number is the machine's: here it names nobody, or an innocent process
        holder.identity = case.resolve(holder.pid)
        _excuse(holder, case.options, device.memory_used)
    return list(found.values())


def _excuse(holder: Holder, options: Options, used: t.Optional[int]) -> None:
    if options.allowed_holders is not None:
        holder.allowed = allowed(holder.identity, options.allowed_holders)
    elif allowed(holder.identity, DEFAULT_ALLOWED):
        # One that has no more than the node open is not listed, so that it needs no figure to be excused.
        untold = holder.memory is None and used is None
        holder.beyond = holder.listed and (untold or (holder.memory or 0) > DEFAULT_MOST)
        holder.allowed = not holder.beyond
    holder.foreign = holder.identity is not None and not holder.identity.owned


def _compare(device: Device, facts: Facts, case: _Case) -> None:
    """Note where the sources contradict each other."""
    complete = bool(facts.get("nodes")) and not case.nodes.error and not case.nodes.hidden
    for holder in device.holders:
        if holder.outside:
            text = "the driver lists number %d, which no process here is known to be" % holder.pid
        elif holder.identity is None and holder.listed:
            text = "the driver lists process %d, which is not in the process table here" % holder.pid
        elif holder.listed and not holder.confirmed and complete:
            text = "the driver lists process %d, which has no device node open" % holder.pid
        elif not holder.listed and not holder.excused and _rest(device) > case.options.tolerance(device.vendor):
            text = "process %d has the device node open while memory is in use, and is not listed" % holder.pid
        else:
            continue
        device.disagreements.append(text)


def _rest(device: Device) -> int:
    """Memory in use that no listed process explains; what several processes share is counted once."""
    shared: t.Dict[str, int] = {}
    held = device.explained or 0
    for holder in device.holders:
        shared.update(holder.clients)
        held += max(0, (holder.memory or 0) - sum(holder.clients.values()))
    return max(0, (device.memory_used or 0) - held - sum(shared.values()))


def _suspects(device: Device) -> t.List[Holder]:
    return [holder for holder in device.holders if not holder.listed and not holder.excused]


def _name(holders: t.Sequence[Holder]) -> str:
    shown = "; ".join(str(holder) for holder in holders[:3])
    return shown + ("; and %d more" % (len(holders) - 3) if len(holders) > 3 else "")
