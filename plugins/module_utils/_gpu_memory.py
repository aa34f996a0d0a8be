# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How much GPU memory a service uses while it loads: read beside the looks, and never waited for.

A figure for movement and for people, not for a verdict: `_gpu` tells whether a GPU is clear.
"""

from __future__ import annotations

import os
import re
import time
import typing as t

from . import _bounded, _gpu_nodes, _gpu_select
from ._background import Background

__all__ = ("GpuMemory", "measure")

PERIOD = 5.0  # seconds between two readings at least
SHARE = 0.005  # of a core that they may cost: the start of a driver library can be dear
LIMIT = 10.0  # seconds for one reading
AGAIN = 60.0  # seconds after one that failed
KEY = "gpu-memory"
MIB = float(1 << 20)
ANY = re.compile("")


class GpuMemory:
    """The GPU memory of a service's processes, as the last reading told it."""

    def __init__(
        self, gpus: t.Optional[t.Sequence[str]] = None, dev: str = "/dev", proc: str = "/proc", sys: str = "/sys"
    ) -> None:
        self.warning = ""
        self.value: t.Optional[float] = None
        self._gpus = None if gpus is None else list(gpus)
        self._dev, self._proc, self._sys = dev, proc, sys
        self._next = float("-inf")
        self._unfinished = 0  # readings in a row that a slice of a wait did not see the end of
        self._reading: t.Optional[Background] = None

    def look(self, pids: t.Sequence[int]) -> t.Optional[float]:
        """MiB, as far as it is known by now; begins another reading when it is time for one."""
        if self._reading is not None:
            outcome = self._reading.poll()
            if outcome is not None:
                self._take(outcome, self._reading.cpu)
                self._reading = None
        elif self._gpus != [] and pids and time.monotonic() >= self._next and self._present():
            mine, gpus = list(pids), self._gpus
            self._next = time.monotonic() + PERIOD * 4**self._unfinished
            self._unfinished = min(self._unfinished + 1, 4)
            self._reading = Background(
                lambda _report: measure(mine, gpus, self._dev, self._proc, self._sys), LIMIT, KEY
            )
        return self.value

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def save(self) -> t.Dict[str, t.Any]:
        again = None if self._next == float("-inf") else self._next
        return {"value": self.value, "next": again, "unfinished": self._unfinished, "warning": self.warning}

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self.value, self.warning, self._unfinished = saved["value"], saved["warning"], saved["unfinished"]
        self._next = float("-inf") if saved["next"] is None else saved["next"]

    def _present(self) -> bool:
        return _gpu_nodes.any_node(_gpu_nodes.NVIDIA, self._dev) or any(
            os.path.exists("%s/%s" % (self._dev, name)) for name in ("dri", "kfd")
        )

    def _take(self, outcome: _bounded.Outcome, cpu: float) -> None:
        why = outcome.error if not outcome.ok else outcome.value["why"]
        pause = AGAIN if why else max(PERIOD, cpu / SHARE)
        self._next, self._unfinished = time.monotonic() + pause, 0
        self.warning = "the GPU memory of the service cannot be read: %s" % why if why else ""
        if outcome.ok and outcome.value["mib"] is not None:
            self.value = outcome.value["mib"]


def measure(
    pids: t.Collection[int], gpus: t.Optional[t.Sequence[str]], dev: str, proc: str, sys: str
) -> t.Dict[str, t.Any]:
    """Runs in the child: ``mib``, or None with ``why``."""
    found: t.List[float] = []
    why = ""
    if _gpu_nodes.any_node(_gpu_nodes.NVIDIA, dev):
        facts, why = _nvidia(gpus, proc)
        if not why:
            found.append(sum(held(one, pids, gpus is not None or len(facts) == 1) for one in facts))
    if os.path.exists(dev + "/dri") or os.path.exists(dev + "/kfd"):
        found.append(_by_drm(pids, dev, proc, sys))
    return {"mib": sum(found) if found else None, "why": "" if found else why}


def _nvidia(gpus: t.Optional[t.Sequence[str]], proc: str) -> t.Tuple[t.List[t.Dict[str, t.Any]], str]:
    from . import _gpu_nvml

    indexes = [_gpu_select.index_of(str(text)) for text in gpus or ()]
    only = [index for index in indexes if index is not None]
    told: t.List[t.Dict[str, t.Any]] = []
    _gpu_nvml.look(told.append, only if only and None not in indexes else None, (), proc)
    detail = next((part["detail"] for part in told if part.get("detail") and "device" not in part), "")
    devices = [part["device"] for part in told if "device" in part]
    if gpus is not None:
        devices = [facts for facts in devices if any(_is(facts, str(text)) for text in gpus)]
    return devices, detail or next((facts["detail"] for facts in devices if facts.get("reason")), "")


def _is(facts: t.Mapping[str, t.Any], name: str) -> bool:
    """Whether a device, or one of its partitions, is called so."""
    index, pci = _gpu_select.index_of(name), _gpu_select.pci_of(name)
    if index is not None:
        return bool(facts["index"] == index)
    if pci is not None:
        return bool(facts.get("pci")) and _gpu_select.pci_of(facts["pci"]) == pci
    known = [facts, *(facts.get("partitions") or ())]
    return any((one.get("uuid") or "").lower() == name.lower() for one in known)


def held(facts: t.Mapping[str, t.Any], pids: t.Collection[int], alone: bool) -> float:
    """MiB of one device that the processes hold.

    Where the driver does not tell it of them, it is what is in use and not told of others; ``alone`` says that the
    device is known to be the service's, so that this means something.
    """
    mine: t.Dict[t.Any, float] = {}
    others: t.Dict[t.Any, float] = {}
    for part in (facts, *(facts.get("partitions") or ())):
        for entry in part.get("processes") or ():
            if entry.get("memory") is not None:
                # One process may be in several lists of a device, with the same memory.
                place, key = (mine if entry["pid"] in pids else others), (entry["pid"], entry.get("gi"))
                place[key] = max(place.get(key, 0.0), float(entry["memory"]))
    if mine or not alone or facts.get("memory_used") is None:
        return sum(mine.values())
    return max(0.0, float(facts["memory_used"]) - sum(others.values()))


def _by_drm(pids: t.Collection[int], dev: str, proc: str, sys: str) -> float:
    """MiB by the kernel drivers' accounts of the processes' open files, or by KFD where that tells more."""
    from . import _gpu_drm, _gpu_kfd

    clients: t.Dict[t.Tuple[str, str], int] = {}
    compute = 0
    for pid in pids:
        for file in _files(pid, dev, proc):
            try:
                text = _gpu_drm._account(proc, pid, file)
            except OSError:
                continue
            client = _gpu_drm.parse(text) if text is not None else None
            if client is not None:
                clients[(client.driver, client.identity)] = _gpu_drm._present(client, ANY) or 0
        memory: t.Dict[str, int] = {}
        try:
            _gpu_kfd._gather("%s/class/kfd/kfd/proc/%d" % (sys, pid), memory, [])
        except OSError:
            continue
        compute += sum(memory.values())
    accounted = sum(size for (driver, _identity), size in clients.items() if driver == "amdgpu")
    return (sum(clients.values()) - accounted + max(accounted, compute)) / MIB


def _files(pid: int, dev: str, proc: str) -> t.List[int]:
    folder = "%s/%d/fd" % (proc, pid)
    found = []
    try:
        for entry in os.listdir(folder):
            try:
                if os.readlink("%s/%s" % (folder, entry)).startswith(dev + "/dri/"):
                    found.append(int(entry))
            except OSError:
                continue
    except OSError:
        pass
    return found
