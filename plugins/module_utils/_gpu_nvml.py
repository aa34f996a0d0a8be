# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the NVIDIA driver library says of each device and of its instances (MIG). Runs in a child that may hang."""

from __future__ import annotations

import contextlib
import re
import typing as t

from . import _bounded, _gpu_nvml_binding
from ._gpu_facts import Facts, sick
from ._gpu_nvml_codes import (
    FIELD,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    VERSION_MISMATCH,
    explain,
)

__all__ = ["look"]

MIB = 1024 * 1024
NOT_AVAILABLE = 2**64 - 1
NO_INSTANCE = 2**32 - 1
LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
ACCESS = r"^DeviceFileMinor:\s*(\d+)"


def look(report: _bounded.Report, only: t.Optional[t.Sequence[int]], skip: t.Sequence[int], proc: str) -> None:
    """Tell about the library, then device by device. Handles are asked for afresh: they do not outlive a reset."""
    pynvml, reason, detail = _gpu_nvml_binding.load()
    if pynvml is None:
        report({"reason": reason, "detail": detail})
        return
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        reason, detail = explain(error)
        report({"reason": reason, "detail": "the NVIDIA driver library does not start: %s" % detail})
        return
    report({"count": count})
    with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
        report({"driver_version": _text(pynvml.nvmlSystemGetDriverVersion())})
    for index in range(count) if only is None else only:
        if index in skip or index >= count:
            continue
        report({"begin": index})
        report({"device": _device(pynvml, index, proc)})
    # No nvmlShutdown: the child ends now, and a shutdown is one more call that could hang.


def _device(pynvml: t.Any, index: int, proc: str) -> Facts:
    facts: Facts = {"index": index, "reason": "", "detail": ""}

    def tell() -> None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        facts["uuid"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetUUID(handle))
        facts["pci"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId)
        facts["name"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetName(handle))
        minor = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMinorNumber(handle))
        if minor is None and facts["pci"]:
            minor = _minor_by_driver(facts["pci"], proc)
        facts["nodes"] = [] if minor is None else ["nvidia%d" % minor]
        mode = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle))
        facts["partitioned"] = bool(mode and mode[0])
        _use(pynvml, handle, facts)
        with contextlib.suppress(pynvml.NVMLError):  # it decides nothing
            facts["utilization"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        if facts["partitioned"]:
            facts["partitions"], remark = _partitions(pynvml, handle, minor, proc)
            facts["remarks"] = [remark] if remark else []

    return _told(pynvml, facts, tell)


def _told(pynvml: t.Any, facts: Facts, tell: t.Callable[[], None]) -> Facts:
    """The facts that ``tell`` fills in; what goes wrong there is a fact about this device, and no reason to give up."""
    try:
        tell()
    except pynvml.NVMLError as error:
        facts["reason"], facts["detail"] = explain(error)
    except Exception as error:
        facts["reason"] = "driver_error"
        facts["detail"] = "the Python binding fails: %s: %s" % (type(error).__name__, error)
    return facts


def _optional(pynvml: t.Any, call: t.Callable[[], t.Any], denied: t.Optional[t.List[int]] = None) -> t.Any:
    """The answer, or None where the driver, the device or the binding does not know it; ``denied`` gets a refusal."""
    try:
        return _text(call())
    except pynvml.NVMLError as error:
        if error.value in FIELD:
            if denied is not None and error.value in (NO_PERMISSION, NOT_FOUND):
                denied.append(error.value)
            return None
        raise
    except (AttributeError, UnicodeDecodeError):
        return None


def _text(value: t.Any) -> t.Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# ---- who uses it, and how much memory is in use ----------------------------------------------------------------------


def _use(pynvml: t.Any, handle: t.Any, facts: Facts) -> None:
    facts["processes"], facts["lists"] = _processes(pynvml, handle)
    facts.update(_memory(pynvml, handle))


def _processes(pynvml: t.Any, handle: t.Any) -> t.Tuple[t.List[Facts], str]:
    """The processes in all lists, and whether there may be more of them.

    A driver that does not know the graphics or MPS list has no such clients. The compute list is another matter.
    """
    found: t.List[Facts] = []
    state = "complete"
    for kind, name in LISTS:
        try:
            listed = _first_known(pynvml, name, handle)
        except pynvml.NVMLError as error:
            if error.value not in FIELD:
                raise
            if error.value in (NO_PERMISSION, NOT_FOUND):
                state = "denied"
            elif kind == "compute" and state == "complete":
                state = "absent"
            continue
        found.extend(_process(process, kind) for process in listed)
    return found, state


def _process(process: t.Any, kind: str) -> Facts:
    facts: Facts = {
        "pid": int(process.pid),
        "memory": _mib(process.usedGpuMemory),
        "kind": kind,
        "source": "driver",
    }
    for key, name in (("gi", "gpuInstanceId"), ("ci", "computeInstanceId")):
        number = getattr(process, name, NO_INSTANCE)
        if number != NO_INSTANCE:
            facts[key] = int(number)
    return facts


def _first_known(pynvml: t.Any, name: str, handle: t.Any) -> t.Any:
    """The list in the newest version that both the binding and this driver know.

    The name without a version is for bindings that have no other: elsewhere it raises an error of another kind when
    the driver is older than the binding.
    """
    known = [name + suffix for suffix in ("_v3", "_v2") if hasattr(pynvml, name + suffix)]
    for function in known or [name]:
        try:
            return getattr(pynvml, function)(handle)
        except pynvml.NVMLError as error:
            if error.value not in (FUNCTION_NOT_FOUND, VERSION_MISMATCH):
                raise
    raise pynvml.NVMLError(FUNCTION_NOT_FOUND)


def _memory(pynvml: t.Any, handle: t.Any) -> Facts:
    """Version 2 keeps the driver's own share apart; an older driver or binding has only version 1."""
    basis, memory = "used", None
    version = getattr(pynvml, "nvmlMemory_v2", None)
    denied: t.List[int] = []
    if version is not None:
        memory = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=version), denied)
    if memory is None:
        basis = "used_and_reserved"
        memory = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), denied)
    if memory is None or not memory.total:
        # A device without a figure of its own is another matter than a figure that we may not see, or that cannot be.
        facts: Facts = {"memory_total": None, "memory_used": None, "memory_basis": "not_available"}
        return {**facts, "memory_denied": True} if denied or (memory is not None and memory.used) else facts
    used = _mib(memory.used)
    basis = "not_available" if used is None else basis
    return {"memory_total": _mib(memory.total), "memory_used": used, "memory_basis": basis}


def _mib(value: t.Optional[int]) -> t.Optional[int]:
    """MiB, rounded up: a started MiB is in use. None where the driver says that it does not know."""
    if value is None or value == NOT_AVAILABLE:
        return None
    return -(-int(value) // MIB)


# ---- instances of a partitioned device -------------------------------------------------------------------------------


def _partitions(
    pynvml: t.Any, device: t.Any, minor: t.Optional[int], proc: str
) -> t.Tuple[t.Optional[t.List[Facts]], str]:
    """The facts of each instance, or None with a remark where they cannot be told."""
    slots = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(device))
    if not slots:
        return None, "the device is partitioned (MIG), but the driver does not say into how many instances"
    found: t.List[Facts] = []
    for slot in range(slots):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, slot)
        except pynvml.NVMLError as error:
            if error.value in (NOT_FOUND, INVALID_ARGUMENT):
                continue  # the slots that are not in use lie anywhere between the others
            reason, detail = explain(error)
            if error.value in FIELD and error.value != NO_PERMISSION:
                return None, "the device is partitioned (MIG), but its instances cannot be asked: %s" % detail
            found.append(sick(slot, reason, detail))
            continue
        found.append(_instance(pynvml, handle, slot, minor, proc))
    if found and all(facts["reason"] == "no_permission" for facts in found):
        return None, "the device is partitioned (MIG), but its instances cannot be asked: %s" % found[0]["detail"]
    return found, ""


def _instance(pynvml: t.Any, handle: t.Any, slot: int, minor: t.Optional[int], proc: str) -> Facts:
    facts: Facts = {"index": slot, "reason": "", "detail": ""}

    def tell() -> None:
        facts["uuid"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetUUID(handle))
        facts["name"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetName(handle))
        facts["gi"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle))
        facts["ci"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetComputeInstanceId(handle))
        facts["nodes"] = _capabilities(minor, facts["gi"], facts["ci"], proc)
        _use(pynvml, handle, facts)

    return _told(pynvml, facts, tell)


def _capabilities(minor: t.Optional[int], gi: t.Optional[int], ci: t.Optional[int], proc: str) -> t.List[str]:
    """The nodes that a process needs for this instance: that of its GPU instance and its own."""
    if minor is None or gi is None:
        return []
    paths = ["gi%d" % gi] + ([] if ci is None else ["gi%d/ci%d" % (gi, ci)])
    found = []
    for path in paths:
        number = _number("%s/driver/nvidia/capabilities/gpu%d/mig/%s/access" % (proc, minor, path), ACCESS)
        if number is None:  # in a container only the table of all possible ones may be there
            table = r"^gpu%d/%s/access\s+(\d+)" % (minor, path)
            number = _number("%s/driver/nvidia-caps/mig-minors" % proc, table)
        if number is not None:
            found.append("nvidia-cap%d" % number)
    return found


# ---- the kernel driver's own files -----------------------------------------------------------------------------------


def _minor_by_driver(pci: str, proc: str) -> t.Optional[int]:
    """The minor number of a device whose library does not tell it."""
    address = re.match(r"([0-9a-f]+):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", pci.lower())
    if address is None:
        return None
    folder = "%04x:%s" % (int(address.group(1), 16), address.group(2))
    return _number("%s/driver/nvidia/gpus/%s/information" % (proc, folder), r"^Device Minor:\s*(\d+)")


def _number(path: str, pattern: str) -> t.Optional[int]:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            match = re.search(pattern, handle.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None
