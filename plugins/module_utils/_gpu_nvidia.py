# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""NVIDIA devices as the driver library tells them, every call bounded and one sick device never hiding the others.

All devices are read in one child, because each start of the library may initialise every device. When the child
does not come back, the device it was busy with is the sick one, and a new child reads the rest.
"""

from __future__ import annotations

import functools
import os
import typing as t

from . import _bounded, _gpu_bus, _gpu_nvml
from ._deadline import Deadline
from ._gpu_facts import Facts, VendorReading, sick

__all__ = ["READING_LIMIT", "VENDOR", "hardware_present", "read"]

DRIVER_LIMIT = 10.0  # seconds for the start of the library and the list of devices
DEVICE_LIMIT = 2.0  # and for each device besides
READING_LIMIT = 60.0  # for one look at all devices, sick ones included
LEAST = 0.5  # seconds for one child, however little is left
MAX_DEVICES = 64
KEY = "nvml"
VENDOR = "nvidia"
WSL_LIBRARY = "/usr/lib/wsl/lib/libnvidia-ml.so.1"


def hardware_present(sys: str = "/sys", dev: str = "/dev", proc: str = "/proc") -> bool:
    """Whether an NVIDIA GPU or its kernel driver is on this host, whatever the library says."""
    if _gpu_bus.count(VENDOR, sys) or os.path.isdir(proc + "/driver/nvidia"):
        return True
    # In the Windows subsystem for Linux there is no PCI device: one node stands for all GPUs, of whatever vendor.
    return os.path.exists(dev + "/dxg") and os.path.exists(WSL_LIBRARY)


def read(only: t.Optional[t.Sequence[int]] = None, limit: float = READING_LIMIT, proc: str = "/proc") -> VendorReading:
    """Read the devices with the indexes ``only``, or all, within ``limit`` seconds."""
    reading = VendorReading(VENDOR)
    if _bounded.stuck_child(KEY) is not None:
        return _no_answer(reading, "stuck", "an earlier call into it has not come back")
    deadline = Deadline(limit)
    done: t.Dict[int, Facts] = {}
    for index in range(MAX_DEVICES) if only is None else only:
        if _bounded.stuck_child(_key(index)) is not None:
            done[index] = sick(index, "stuck", "an earlier call into the driver for this device has not come back")
    while True:
        ask = functools.partial(_gpu_nvml.look, only=only, skip=sorted(done), proc=proc)
        allowed = DRIVER_LIMIT + DEVICE_LIMIT * (8 if reading.count is None else reading.count)
        # Whatever hangs takes half of what is left at most, so that something is left for the others.
        outcome = _bounded.run(ask, min(allowed, max(LEAST, deadline.remaining / 2)), dies_with_caller=True)
        begun = _take(reading, done, outcome.partial)
        if outcome.left_behind:
            _bounded.remember(KEY if begun is None else _key(begun), outcome.pid)
        if outcome.ok:
            break
        if begun is not None:
            reason = "driver_error" if outcome.status == "error" else "timeout"
            done[begun] = sick(begun, reason, "the driver does not answer for this device: %s" % outcome.error)
        elif outcome.status == "error":
            return _no_answer(reading, "internal", outcome.error)
        elif not any("device" in part for part in outcome.partial):
            # It hangs before the first device: another try would leave one more child.
            return _no_answer(reading, "timeout", outcome.error)
        if deadline.expired:
            for index in range(reading.count or 0) if only is None else only:
                done.setdefault(index, sick(index, "timeout", "the time was over before this device was read"))
            break
    reading.devices = [done[index] for index in sorted(done) if reading.count is None or index < reading.count]
    return reading


def _no_answer(reading: VendorReading, reason: str, detail: str) -> VendorReading:
    reading.reason = reason
    reading.detail = "the NVIDIA driver library gives no answer: %s" % detail
    return reading


def _key(index: int) -> str:
    return "%s-%d" % (KEY, index)


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
