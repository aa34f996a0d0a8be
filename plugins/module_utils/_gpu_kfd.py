# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the compute part of the AMD kernel driver (KFD) tells: its devices, and the processes that compute on them.

Its process numbers are those of the machine, also when read inside a container. Each process that has opened
``/dev/kfd`` has a folder there, with a file for each device that it may use: only one that has memory or a queue on a
device uses it.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

from . import _bounded
from ._gpu_drm import Card, number

__all__ = ["Kfd", "Worker", "read"]

KEY = "kfd"
LIMIT = 5.0  # seconds


class Worker(t.NamedTuple):
    """A process that KFD knows."""

    pid: int
    memory: t.Dict[str, int]  # bytes of device memory by the driver's number of the device
    queues: t.List[str]  # the devices that it has a queue on


@dataclass
class Kfd:
    """One look. ``error`` is a sentence when KFD exists and could not be read."""

    devices: t.List[t.Dict[str, int]] = field(default_factory=list)  # gpu_id, minor, domain, slot, cpus
    workers: t.List[Worker] = field(default_factory=list)
    error: str = ""

    def of(self, card: Card) -> t.List[t.Dict[str, int]]:
        """The KFD devices of a card: several when it is split into compute partitions."""
        domain, bus, rest = card.pci.split(":")
        slot = int(bus, 16) << 5 | int(rest.partition(".")[0], 16)
        return [device for device in self.devices if (device["domain"], device["slot"]) == (int(domain, 16), slot)]

    def on(self, devices: t.Sequence[t.Dict[str, int]]) -> t.Dict[int, t.Optional[int]]:
        """The processes that use the devices, with bytes; None where this kernel does not tell them by device."""
        wanted = {str(device["gpu_id"]) for device in devices}
        found: t.Dict[int, t.Optional[int]] = {}
        for worker in self.workers:
            memory = sum(amount for gpu_id, amount in worker.memory.items() if gpu_id in wanted)
            if memory or wanted.intersection(worker.queues):
                found[worker.pid] = memory if worker.memory else None
            elif wanted and not worker.memory and not worker.queues:
                found[worker.pid] = None
        return found


def read(sys: str = "/sys", limit: float = LIMIT) -> Kfd:
    """Look once; an empty answer without an error where there is no KFD."""
    base = sys + "/class/kfd/kfd"
    kfd = Kfd()
    if not os.path.isdir(base):
        return kfd

    def look(report: _bounded.Report) -> None:
        _look(report, base)

    outcome = _bounded.run(look, max(0.1, min(limit, LIMIT)), key=KEY, dies_with_caller=True)
    for part in outcome.partial:
        if "device" in part:
            kfd.devices.append(part["device"])
        elif "worker" in part:
            kfd.workers.append(Worker(*part["worker"]))
    if not outcome.ok:
        kfd.error = "the compute driver (KFD) does not tell its processes: %s" % outcome.error
    return kfd


def _look(report: _bounded.Report, base: str) -> None:
    """Runs in the child; an OSError ends it and is told as the outcome."""
    for node in sorted(os.listdir(base + "/topology/nodes")):
        folder = "%s/topology/nodes/%s" % (base, node)
        gpu_id = number(folder + "/gpu_id")
        if not gpu_id:
            continue  # a processor
        properties = _properties(folder + "/properties")
        location = properties.get("location_id", 0)
        device = {
            "gpu_id": gpu_id,
            "minor": properties.get("drm_render_minor", -1),
            "domain": properties.get("domain", 0),
            # Bus and slot: a partition's number is in the function bits or above, as the kernel has it.
            "slot": (location & 0xFFFF) >> 3,
            "cpus": properties.get("cpu_cores_count", 0),
        }
        report({"device": device})
    for entry in sorted(os.listdir(base + "/proc")):
        if entry.isdigit():
            memory: t.Dict[str, int] = {}
            queues: t.List[str] = []
            _gather("%s/proc/%s" % (base, entry), memory, queues)
            report({"worker": [int(entry), memory, queues]})


def _properties(path: str) -> t.Dict[str, int]:
    with open(path, encoding="ascii", errors="replace") as handle:
        words = [line.split() for line in handle]
    return {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdigit()}


def _gather(folder: str, memory: t.Dict[str, int], queues: t.List[str]) -> None:
    """Add up a process and its further contexts, which are folders in its own.

    The files ``sdma_*`` are left alone: to read one, the driver reads the memory of the process.
    """
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return  # it has ended
    for entry in entries:
        match = re.match(r"vram_(\d+)\Z", entry)
        if match:
            memory[match.group(1)] = memory.get(match.group(1), 0) + (number("%s/%s" % (folder, entry)) or 0)
        elif entry == "queues":
            for queue in _listed(folder + "/queues"):
                gpu_id = number("%s/queues/%s/gpuid" % (folder, queue))
                queues.extend([] if gpu_id is None else [str(gpu_id)])
        elif re.match(r"context_\d+\Z", entry):
            _gather("%s/%s" % (folder, entry), memory, queues)


def _listed(folder: str) -> t.List[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
