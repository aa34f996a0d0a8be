# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What each return code of the NVIDIA driver library means to an operator."""

from __future__ import annotations

import typing as t

__all__ = ["CODES", "FIELD", "explain"]

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 2, 3, 4, 6
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED = 12, 13, 25, 26

# Where one of these answers a question about a device, that one thing is unknown; all others are about the device.
FIELD = (NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED)

# code -> (reason word, sentence, remedy where there is exactly one). A word of its own is for what somebody can act on.
CODES = {
    1: ("driver_error", "the driver library says that it was not started", ""),
    2: ("driver_error", "the driver does not accept the question", ""),
    3: ("driver_error", "the driver does not support this", ""),
    4: ("no_permission", "this user may not ask the driver", "run as root"),
    5: ("driver_error", "the driver library says that it was started already", ""),
    6: ("driver_error", "the driver knows no such device", ""),
    7: ("driver_error", "the answer of the driver does not fit", ""),
    8: ("no_power", "the external power cables of a GPU are not properly attached", "attach them"),
    9: ("driver_not_loaded", "the NVIDIA kernel driver is not loaded", 'load it with "modprobe nvidia"'),
    10: ("timeout", "the driver gave up on a limit of its own", ""),
    11: ("driver_error", "the kernel found a problem with the interrupts of a GPU", ""),
    12: (
        "library_missing",
        "libnvidia-ml.so.1 is not found or cannot be loaded",
        "install the libraries of the driver",
    ),
    13: ("driver_too_old", "the driver library lacks a function that is needed", "install a newer NVIDIA driver"),
    14: ("driver_error", "the infoROM of the GPU is corrupted", ""),
    15: ("gpu_lost", "the GPU has fallen off the bus or cannot be reached", "reboot the host"),
    16: ("reset_required", "the GPU must be reset before it can be used", 'reset it with "nvidia-smi --gpu-reset"'),
    17: (
        "blocked_by_system",
        "the operating system or a cgroup blocks the GPU",
        "allow this process its device nodes",
    ),
    18: (
        "driver_mismatch",
        "the driver library and the loaded kernel driver are of different versions",
        "reload the kernel driver or reboot the host",
    ),
    19: ("driver_error", "another client keeps the GPU for itself", ""),
    20: ("driver_error", "the driver library has not enough memory", ""),
    21: ("driver_error", "the driver has no data", ""),
    22: ("driver_error", "the driver refuses a vGPU because ECC is enabled", ""),
    23: ("driver_error", "the driver has run out of resources", ""),
    24: ("driver_error", "the driver does not support the clock", ""),
    25: ("driver_error", "the driver library does not know this version of a question", ""),
    26: ("driver_error", "the driver no longer answers this question", ""),
    27: ("driver_error", "the system is not ready for the question yet", ""),
    28: ("driver_error", "the driver finds no GPU", ""),
    29: ("driver_error", "the GPU is not in a state in which it can answer", ""),
    30: ("driver_error", "the driver does not support this kind of reset", ""),
    999: ("driver_error", "the driver reports an internal error", ""),
}


def explain(error: t.Any) -> t.Tuple[str, str]:
    """The reason word and the sentence for an error of the binding."""
    reason, sentence, remedy = CODES.get(error.value, ("driver_error", "the driver answers: %s" % error, ""))
    return reason, "%s (code %d)%s" % (sentence, error.value, "; " + remedy if remedy else "")
