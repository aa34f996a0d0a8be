# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The words that say why a device, or a whole reading, got its verdict.

The page "When is a GPU clear?" has the same tables, and the documentation of gpu_clear has the same words.
Tests compare them.
"""

from __future__ import annotations

import typing as t

__all__ = ["DEVICE", "LASTING", "LASTING_DEVICE", "READING"]

# Of one device: the word, the verdict that it stands for, what it means.
DEVICE: t.Dict[str, t.Tuple[str, str]] = {
    "idle": ("clear", "its memory is free but for what is tolerated, and nobody holds it"),
    "only_excused": ("clear", "allowed or foreign processes hold it, and nobody else"),
    "judged_by_holders": ("clear", "the memory in use is not told; all that could hold it was seen, and nothing does"),
    "held_by_process": ("busy", "a process that can be named uses it"),
    "held_by_unresolvable": ("busy", "memory is in use, or a process is listed, and nobody visible here explains it"),
    "node_held_memory_in_use": ("busy", "a process that is not listed has its device node open while memory is in use"),
    "node_held_memory_unreadable": ("busy", "a process has its device node open, and the memory in use is not told"),
    "processes_unreadable": ("unknown", "the list of processes on it is not complete, and nothing else excludes one"),
    "nodes_unreadable": ("unknown", "the open device nodes of some processes could not be seen"),
    "memory_unreadable": ("unknown", "there is a figure of its memory in use, and it cannot be read"),
    "outside_not_visible": ("unknown", "only this container is visible, and the memory in use is not told"),
    "memory_unattributed": ("unknown", "an allowed or foreign process holds memory of unknown size"),
    "partitions_unreadable": ("unknown", "it is partitioned (MIG), and its partitions cannot be told"),
    "gpu_lost": ("error", "it has fallen off the bus"),
    "reset_required": ("error", "it must be reset before it can be used"),
    "blocked_by_system": ("error", "the operating system keeps the driver from it, such as by a device cgroup"),
    "driver_mismatch": ("error", "the management library and the kernel driver are of different versions"),
    "driver_not_loaded": ("error", "no graphics driver is bound to it"),
    "passed_through": ("error", "it is given to a virtual machine, and cannot be judged here"),
    "no_permission": ("error", "the driver does not answer this account"),
    "no_power": ("error", "its external power is not attached"),
    "driver_too_old": ("error", "the driver lacks a function that is needed"),
    "library_missing": ("error", "its driver lacks a library that it needs"),
    "driver_error": ("error", "its driver answers with an error"),
    "timeout": ("error", "its driver did not answer in time"),
    "stuck": ("error", "an earlier look still hangs in its driver, so that it was not asked again"),
    "internal": ("error", "our own look at it ended without an answer"),
    "not_found": ("error", "no such device is known"),
}

# Of a whole reading, where the answer comes from no single device.
READING: t.Dict[str, t.Tuple[str, str]] = {
    "binding_missing": ("error", "the Python distribution nvidia-ml-py is not installed"),
    "binding_wrong": ("error", "another distribution stands in the place of nvidia-ml-py"),
    "library_missing": ("error", "the driver's management library is not installed"),
    "driver_not_loaded": ("error", "the kernel driver is not loaded"),
    "driver_mismatch": ("error", "the management library and the kernel driver are of different versions"),
    "no_permission": ("error", "the driver does not answer this account"),
    "no_power": ("error", "the external power of a device is not attached"),
    "driver_too_old": ("error", "the driver lacks a function that is needed"),
    "gpu_lost": ("error", "a device has fallen off the bus, and the driver does not start for it"),
    "reset_required": ("error", "a device must be reset before the driver starts"),
    "blocked_by_system": ("error", "the operating system keeps the driver from the devices"),
    "driver_error": ("error", "the driver answers with an error"),
    "timeout": ("error", "the driver did not answer in time"),
    "stuck": ("error", "an earlier look still hangs in the driver, so that it was not asked again"),
    "bus_unreadable": ("error", "the list of PCI devices cannot be read, so that devices may be missing"),
    "internal": ("error", "our own call into the driver ended without an answer"),
    "no_gpu": ("error", "the driver runs and knows no device"),
    "no_stack": ("error", "the host has neither such a GPU nor a driver for one; clear if allow_no_gpu is set"),
    "fewer_gpus": ("error", "fewer devices are known than expected_gpus"),
    "unconfirmed": ("unknown", "the time was over before enough looks in a row were clear"),
}

# Waiting does not change these.
LASTING_DEVICE = ("not_found", "passed_through", "gpu_lost")
LASTING = ("binding_missing", "binding_wrong", "library_missing", "driver_mismatch", "no_gpu", "no_stack")
