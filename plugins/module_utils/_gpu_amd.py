# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""AMD devices as the kernel driver amdgpu tells them; the vendor's library adds to it where it is installed.

Three sources list processes: the compute driver (KFD), the accounts of open files, and the library. A process that
any of them shows is taken, and where the first two contradict each other it is said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing as t

from . import _gpu_amdsmi, _gpu_bus, _gpu_drm, _gpu_kfd
from ._deadline import Deadline
from ._gpu_drm import Account, Card
from ._gpu_facts import Facts, VendorReading
from ._gpu_nodes import NodeFacts

__all__ = ["VENDOR", "read"]

VENDOR = "amd"
DRIVER = "amdgpu"
OWN = re.compile(r"vram\Z")
SHARED = re.compile(r"(?:vram|gtt)\Z")  # a carve-out of the host's memory, and the host's memory


def read(
    only: t.Optional[t.Sequence[int]],
    limit: float,
    nodes: NodeFacts,
    sys: str = "/sys",
    proc: str = "/proc",
    dev: str = "/dev",
) -> VendorReading:
    """Read the devices with the indexes ``only``, or all, within ``limit`` seconds."""
    deadline = Deadline(limit)
    reading, cards = _gpu_drm.begin(VENDOR, sys)
    reading.driver_version = _gpu_bus.line(sys, "module/amdgpu/version") or None
    if not any(card.driver == DRIVER for card in cards):
        kfd, library = _gpu_kfd.Kfd(), _gpu_amdsmi.Told()
    else:
        kfd = _gpu_kfd.read(sys, deadline.remaining / 4)
        library = _gpu_amdsmi.read(deadline.remaining / 4)  # it only adds to what the cards tell
    reading.warnings.extend(filter(None, (kfd.error, library.error)))
    for card in cards:
        if only is not None and card.index not in only:
            continue
        facts = _gpu_drm.undriven(card, "AMD", (DRIVER,), DRIVER, sys)
        if facts is None:
            # A compute partition has a node of its own that is no PCI device's.
            minors = sorted({device["minor"] for device in kfd.of(card) if device["minor"] >= 0})
            extra = tuple(name for name in map("renderD{}".format, minors) if name not in card.nodes)
            card = dataclasses.replace(card, nodes=card.nodes + extra)
            share = deadline.remaining / (len(cards) - card.index)  # a sick device leaves the others theirs
            account = _gpu_drm.examine(card, _attributes, nodes, proc, share)
            facts = _facts(card, account, kfd, nodes)
            facts["name"] = facts.get("name") or library.names.get(card.pci)
            facts["processes"] += library.processes.get(card.pci, [])
        reading.devices.append(facts)
    return reading


def _attributes(card: Card) -> Facts:
    """Runs in the child."""
    used = _gpu_drm.number(card.path + "/mem_info_vram_used")
    total = _gpu_drm.number(card.path + "/mem_info_vram_total")
    unique = _gpu_bus.line(card.path, "unique_id")
    facts: Facts = {
        "uuid": "GPU-" + unique if unique.strip("0") else None,
        "name": _gpu_bus.line(card.path, "product_name") or None,
        "integrated": _is_apu(card),
        "memory_used": _gpu_drm.mib(used),
        "memory_total": _gpu_drm.mib(total),
        "memory_basis": "not_available" if used is None else "used_and_reserved",
    }
    # The driver itself always has some memory of a card: none in use is not told, as with the MI300A.
    if facts["integrated"] or used == 0:
        facts.update(memory_used=None, memory_total=None, memory_basis="not_available")
    with contextlib.suppress(OSError):  # it decides nothing
        facts["utilization"] = _gpu_drm.number(card.path + "/gpu_busy_percent")
    return facts


def _is_apu(card: Card) -> bool:
    """Whether the table of sensors is of the kind for processors with a GPU: its third byte says 2 or 3, not 1."""
    try:
        with open(card.path + "/gpu_metrics", "rb") as handle:
            return handle.read(4)[2:3] in (b"\x02", b"\x03")
    except OSError:
        return False  # not there, or refused in a state of low power


def _facts(card: Card, account: Account, kfd: _gpu_kfd.Kfd, nodes: NodeFacts) -> Facts:
    facts = account.facts
    devices = kfd.of(card)
    if any(device["cpus"] for device in devices):
        facts.update(integrated=True, memory_used=None, memory_total=None, memory_basis="not_available")
    region = SHARED if facts.get("memory_basis") == "not_available" else OWN
    by_files = account.processes(region)
    by_kfd = kfd.on(devices)
    facts["processes"] = [
        {"pid": pid, "memory": _gpu_drm.mib(memory), "kind": "compute", "source": "kfd"}
        for pid, memory in sorted(by_kfd.items())
    ] + by_files
    facts["lists"] = account.lists(nodes)
    if kfd.error and facts["lists"] == "complete":
        facts["lists"] = "absent"
    facts["remarks"] = _contradictions({entry["pid"] for entry in by_files}, set(by_kfd), facts["lists"], nodes)
    return facts


def _contradictions(by_files: t.Set[int], by_kfd: t.Set[int], lists: str, nodes: NodeFacts) -> t.List[str]:
    """Where both sources could be read; a program that only draws is none of the compute driver's."""
    if lists != "complete":
        return []
    remarks = []
    for pid in sorted(by_kfd - by_files):
        remarks.append("the compute driver (KFD) shows process %d, its open files do not" % pid)
    for pid in sorted((by_files - by_kfd).intersection(nodes.holders.get("kfd", []))):
        remarks.append("the open files of process %d show it, the compute driver (KFD) does not" % pid)
    return remarks
