# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which GPUs are on the PCI bus, whatever drivers say."""

from __future__ import annotations

import os
import re
import typing as t

from ._gpu_nodes import DRM, any_node

__all__ = ["count", "driver", "functions", "line", "present"]

IDS = {"nvidia": "0x10de", "amd": "0x1002", "intel": "0x8086"}
# A display controller, or a 3D controller as the modules of servers are (0x0302); not the audio beside it, and not
# Intel's NPU. An Instinct card is no display but a processing accelerator.
CLASSES = {"nvidia": re.compile(r"0x03"), "amd": re.compile(r"0x(03|1200)"), "intel": re.compile(r"0x03")}


def functions(vendor: str, sys: str = "/sys") -> t.List[t.Tuple[str, str]]:
    """The GPUs of the vendor, each by its address and folder; OSError when the bus cannot be read.

    Nothing of this asks the devices: the kernel has it in memory.
    """
    base = sys + "/bus/pci/devices"
    found = [(address, os.path.join(base, address)) for address in os.listdir(base)]
    return [
        (address, path)
        for address, path in found
        if line(path, "vendor") == IDS[vendor] and CLASSES[vendor].match(line(path, "class"))
    ]


def count(vendor: str, sys: str = "/sys") -> int:
    """How many there are, those of virtual machines left out; none where the bus cannot be read."""
    try:
        return sum(not driver(path).startswith("vfio") for _address, path in functions(vendor, sys))
    except OSError:
        return 0


def present(vendor: str, sys: str = "/sys", dev: str = "/dev") -> bool:
    """Whether the host may have a GPU of AMD or Intel, with a driver or without, so that it is worth to be looked for.

    A bus that cannot be read may have one. A host with neither a bus nor the node of any GPU has none.
    """
    if vendor == "amd" and (os.path.isdir(sys + "/class/kfd/kfd") or os.path.exists(dev + "/kfd")):
        return True
    try:
        return bool(functions(vendor, sys))
    except FileNotFoundError:
        return any_node(DRM, dev)
    except OSError:
        return True


def driver(path: str) -> str:
    """The driver that is bound to a device, or nothing."""
    try:
        return os.path.basename(os.readlink(path + "/driver"))
    except OSError:
        return ""


def line(path: str, name: str) -> str:
    """The text of an attribute that the kernel keeps itself, or nothing."""
    try:
        with open(os.path.join(path, name), encoding="ascii") as handle:
            return handle.read().strip()
    except (OSError, ValueError):
        return ""
