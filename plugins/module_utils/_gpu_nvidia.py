# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""NVIDIA devices as the driver library tells them, every call bounded and one sick device never hiding the others.

All devices are read in one child, because each start of the library may initialise every device. When the child
does not come back, the device it was busy with is the sick one, and a new child reads the rest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import typing as t

from . import (
    _bounded,
    _site,  # noqa: F401
)
from ._deadline import Deadline
from ._errors import MissingLibrary

__all__ = ["READING_LIMIT", "Facts", "VendorReading", "hardware_present", "read"]

DRIVER_LIMIT = 10.0  # seconds for the start of the library and the list of devices
DEVICE_LIMIT = 2.0  # and for each device besides
READING_LIMIT = 60.0  # for one look at all devices, sick ones included
MAX_DEVICES = 64
KEY = "nvml"
MIB = 1024 * 1024
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH = 3, 4, 6, 13, 25
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIBRARY_MISMATCH = 9, 12, 18
LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
# The words of a device error that a caller may want to tell apart.
CODES = {10: "timeout", 15: "gpu_lost", 16: "reset_required", 17: "blocked_by_system", 18: "driver_mismatch"}

# A device's facts travel from the child as JSON: index, uuid, pci, minor, name, memory_total, memory_used,
# memory_basis, processes (pid, memory, kind), unreadable (list kind -> code), mig, utilization, reason, detail.
Facts = t.Dict[str, t.Any]


class VendorReading:
    """One look through the driver library. ``reason`` is set when there is nothing to say about any device."""

    def __init__(self) -> None:
        self.devices: t.List[Facts] = []
        self.count: t.Optional[int] = None
        self.driver_version: t.Optional[str] = None
        self.reason = ""
        self.detail = ""


def hardware_present(sys: str = "/sys") -> bool:
    """Whether the PCI bus shows an NVIDIA display or 3D controller, whatever the driver says."""
    base = sys + "/bus/pci/devices"
    try:
        addresses = os.listdir(base)
    except OSError:
        return False
    for address in addresses:
        if _line(base, address, "vendor") == "0x10de" and _line(base, address, "class").startswith("0x03"):
            return True
    return False


def _line(base: str, address: str, name: str) -> str:
    try:
        with open(os.path.join(base, address, name), encoding="ascii") as handle:
            return handle.read().strip()
    except (OSError, ValueError):
        return ""


def read(only: t.Optional[t.Sequence[int]] = None, limit: float = READING_LIMIT) -> VendorReading:
    """Read the devices with the indexes ``only``, or all, within ``limit`` seconds."""
    reading = VendorReading()
    if _bounded.stuck_child(KEY) is not None:
        return _no_answer(reading, "stuck", "an earlier call into it has not come back")
    deadline = Deadline(limit)
    done: t.Dict[int, Facts] = {}
    for index in range(MAX_DEVICES) if only is None else only:
        if _bounded.stuck_child(_key(index)) is not None:
            done[index] = _sick(index, "stuck", "an earlier call into the driver for this device has not come back")
    while True:
        skip = sorted(done)
        allowed = DRIVER_LIMIT + DEVICE_LIMIT * (8 if reading.count is None else reading.count)
        outcome = _bounded.run(functools.partial(_look, only=only, skip=skip), deadline.clamp(allowed))
        begun = _take(reading, done, outcome.partial)
        if outcome.left_behind:
            _bounded.remember(KEY if begun is None else _key(begun), outcome.pid)
        if outcome.ok:
            break
        if outcome.status == "error":
            return _no_answer(reading, "internal", outcome.error)
        if begun is not None:
            done[begun] = _sick(begun, "timeout", "the driver does not answer for this device: %s" % outcome.error)
        elif reading.count is None:
            return _no_answer(reading, "timeout", outcome.error)
        if deadline.expired:
            for index in range(reading.count or 0) if only is None else only:
                done.setdefault(index, _sick(index, "timeout", "the time was over before this device was read"))
            break
    reading.devices = [done[index] for index in sorted(done) if reading.count is None or index < reading.count]
    return reading


def _no_answer(reading: VendorReading, reason: str, detail: str) -> VendorReading:
    reading.reason = reason
    reading.detail = "the NVIDIA driver library gives no answer: %s" % detail
    return reading


def _key(index: int) -> str:
    return "%s-%d" % (KEY, index)


def _sick(index: int, reason: str, detail: str) -> Facts:
    return {"index": index, "reason": reason, "detail": detail}


def _take(reading: VendorReading, done: t.Dict[int, Facts], parts: t.Sequence[Facts]) -> t.Optional[int]:
    """Store what the child told; return the device that it had begun and not finished."""
    begun = None
    for part in parts:
        if "begin" in part:
            begun = part["begin"]
        elif "device" in part:
            done[part["device"]["index"]] = part["device"]
            begun = None
        else:
            reading.count = part.get("count", reading.count)
            reading.driver_version = part.get("driver_version", reading.driver_version)
            reading.reason = part.get("reason", reading.reason)
            reading.detail = part.get("detail", reading.detail)
    return begun


def _look(report: _bounded.Report, only: t.Optional[t.Sequence[int]], skip: t.Sequence[int]) -> None:
    """Runs in the child: tell about the library, then device by device."""
    try:
        import pynvml
    except ImportError as error:
        raise MissingLibrary('the Python distribution "nvidia-ml-py" cannot be imported: %s' % error) from error
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        report(_library_error(error))
        return
    report({"count": count})
    with contextlib.suppress(pynvml.NVMLError):
        report({"driver_version": _text(pynvml.nvmlSystemGetDriverVersion())})
    for index in range(count) if only is None else only:
        if index in skip or index >= count:
            continue
        report({"begin": index})
        report({"device": _device(pynvml, index)})
    # No nvmlShutdown: the child ends now, and a shutdown is one more call that could hang.


def _library_error(error: t.Any) -> Facts:
    remedy = {
        LIBRARY_NOT_FOUND: (
            "library_missing",
            "the NVIDIA driver library libnvidia-ml.so.1 is not found: install the driver's libraries",
        ),
        DRIVER_NOT_LOADED: (
            "driver_not_loaded",
            'the NVIDIA kernel driver is not loaded: load it with "modprobe nvidia"',
        ),
        LIBRARY_MISMATCH: (
            "driver_mismatch",
            "the NVIDIA driver library and the loaded kernel driver are of different versions: "
            "reload the kernel driver or reboot the host",
        ),
    }
    other = ("driver_error", "the NVIDIA driver library does not start: %s (code %d)" % (error, error.value))
    reason, detail = remedy.get(error.value, other)
    return {"reason": reason, "detail": detail}


def _device(pynvml: t.Any, index: int) -> Facts:
    facts: Facts = {"index": index, "reason": "", "detail": ""}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        facts["uuid"] = _text(_optional(pynvml, lambda: pynvml.nvmlDeviceGetUUID(handle)))
        facts["pci"] = _text(_optional(pynvml, lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId))
        facts["name"] = _text(_optional(pynvml, lambda: pynvml.nvmlDeviceGetName(handle)))
        facts["minor"] = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMinorNumber(handle))
        mode = _optional(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle))
        facts["mig"] = bool(mode and mode[0])
        facts["processes"], facts["unreadable"] = _processes(pynvml, handle)
        facts.update(_memory(pynvml, handle))
    except pynvml.NVMLError as error:
        facts["reason"] = CODES.get(error.value, "driver_error")
        facts["detail"] = "the driver answers: %s (code %d)" % (error, error.value)
        return facts
    with contextlib.suppress(pynvml.NVMLError):  # it decides nothing
        facts["utilization"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return facts


def _optional(pynvml: t.Any, call: t.Callable[[], t.Any]) -> t.Any:
    """The answer, or None where the device or the driver does not know the question."""
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in (NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND):
            return None
        raise


def _processes(pynvml: t.Any, handle: t.Any) -> t.Tuple[t.List[Facts], t.Dict[str, int]]:
    found: t.List[Facts] = []
    unreadable: t.Dict[str, int] = {}
    for kind, name in LISTS:
        try:
            listed = _first_known(pynvml, name, handle)
        except pynvml.NVMLError as error:
            if error.value not in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND):
                raise
            unreadable[kind] = error.value
            continue
        for process in listed:
            found.append({"pid": int(process.pid), "memory": _mib(process.usedGpuMemory), "kind": kind})
    return found, unreadable


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
    try:
        if version is not None:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
    except pynvml.NVMLError as error:
        if error.value not in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VERSION_MISMATCH):
            raise
    if memory is None:
        basis = "used_and_reserved"
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            if error.value not in (NOT_SUPPORTED, NO_PERMISSION):
                raise
    if memory is None or not memory.total:
        return {"memory_total": None, "memory_used": None, "memory_basis": "not_available"}
    return {"memory_total": _mib(memory.total), "memory_used": _mib(memory.used), "memory_basis": basis}


def _mib(value: t.Optional[int]) -> t.Optional[int]:
    """MiB, rounded up: a started MiB is in use. None where the driver says that it does not know."""
    if value is None or value == 2**64 - 1:
        return None
    return -(-int(value) // MIB)


def _text(value: t.Any) -> t.Optional[str]:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
