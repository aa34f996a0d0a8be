# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What AMD's management library adds, where its Python binding ``amdsmi`` is importable: it is never required.

It gives the names of devices and its own list of processes. What it does not tell of one device is left out, and
the others are still told.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from . import (
    _bounded,
    _site,  # noqa: F401
)
from ._gpu_drm import LEAST, mib
from ._gpu_facts import Facts

__all__ = ["Told", "read"]

KEY = "amdsmi"
LIMIT = 10.0  # seconds for the start of the library and all devices


@dataclass
class Told:
    """Names and processes by PCI address; ``error`` when the library is there and gives no answer."""

    names: t.Dict[str, str] = field(default_factory=dict)
    processes: t.Dict[str, t.List[Facts]] = field(default_factory=dict)
    error: str = ""


def read(limit: float = LIMIT) -> Told:
    """Ask the library, when it is importable."""
    told = Told()
    if limit <= 0:
        return told
    outcome = _bounded.run(_look, min(limit, LIMIT), key=KEY, dies_with_caller=True)
    for part in outcome.partial:
        if "name" in part:
            told.names[part["pci"]] = part["name"]
        elif "processes" in part:
            told.processes[part["pci"]] = part["processes"]
        else:
            told.error = part["error"]
    if not outcome.ok:
        told.error = outcome.error
    if told.error:
        told.error = "the AMD management library gives no answer and was left out: %s" % told.error
    return told


def _look(report: _bounded.Report) -> None:
    """Runs in the child. The binding raises errors of many kinds, so each call is its own."""
    try:
        import amdsmi  # type: ignore[import-not-found]
    except Exception:  # not there, or without its library: each version fails in its own way, as with a KeyError
        return
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
    except Exception as error:
        report({"error": "%s: %s" % (type(error).__name__, error)})
        return
    for handle in handles:
        pci = _call(amdsmi, "amdsmi_get_gpu_device_bdf", handle)
        if not isinstance(pci, str):
            continue
        pci = pci.lower()
        asic = _call(amdsmi, "amdsmi_get_gpu_asic_info", handle)
        name = asic.get("market_name") if isinstance(asic, dict) else None
        if name and name != "N/A":
            report({"pci": pci, "name": name})
        listed = _call(amdsmi, "amdsmi_get_gpu_process_list", handle)
        if isinstance(listed, list):
            report({"pci": pci, "processes": [entry for entry in map(_entry, listed) if entry]})
    # No shutdown: the child ends now, and it is one more call that could hang.


def _call(amdsmi: t.Any, name: str, handle: t.Any) -> t.Any:
    try:
        return getattr(amdsmi, name)(handle)
    except Exception:
        return None


def _entry(process: t.Any) -> t.Optional[Facts]:
    """A process that uses the device; the library also lists those that only look at it."""
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int) or process["pid"] <= 0:
        return None
    usage, engines = process.get("memory_usage") or {}, process.get("engine_usage") or {}
    memory = usage.get("vram_mem")
    memory = memory if isinstance(memory, int) else None
    busy = any(isinstance(spent, int) and spent > 0 for spent in engines.values())
    if memory is not None and memory < LEAST and not busy:
        return None
    return {"pid": process["pid"], "memory": mib(memory), "kind": "compute", "source": "driver"}
