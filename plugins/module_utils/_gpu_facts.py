# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the rooms of the vendors tell of a host's devices, before anything is judged.

The facts of one device are a plain dictionary, because they travel from a child process as JSON:

============  ======================================================================================================
key           value
============  ======================================================================================================
index         its number in the vendor's order
uuid          or None; so are pci (address) and name
nodes         names of the device nodes that mean this device: ["nvidia0"], ["renderD128"]; empty when not known
integrated    true for a device that has no memory of its own
memory_used   MiB, rounded up, or None where nobody tells; so is memory_total
memory_basis  what memory_used counts: a word of BASES
memory_denied true where there is a figure of the memory in use that cannot be read
processes     [{"pid", "memory" (MiB or None), "kind" (compute, graphics, mps), "source" (a word of SOURCES),
              "clients" (MiB by identity, where several processes may share what they hold)}]
lists         "complete"; "absent" when processes may be missing from it; "denied" when it may not be read
utilization   percent, or None
partitions    the facts of its partitions, each with keys of this table; missing or None on a device without them
gi, ci        of a partition: its GPU instance, whose memory it shares, and its compute instance
partitioned   true when the device is split, even where its partitions cannot be told
remarks       sentences about sources that contradict each other
reason        a word when the device gives no answer, and then detail is the sentence; both empty otherwise
============  ======================================================================================================

Keys that are missing are as good as None.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

__all__ = ["BASES", "SOURCES", "Facts", "VendorReading", "sick"]

Facts = t.Dict[str, t.Any]

BASES = {
    "used": "without the driver's own share",
    "used_and_reserved": "with the driver's own share, where that is not told apart",
    "clients": "the sum of what the visible processes hold, where the device does not tell",
    "not_available": "nobody tells",
}
SOURCES = {
    "driver": "the vendor's management library",
    "kfd": "the compute part of the AMD kernel driver",
    "fdinfo": "the kernel driver's account of an open file",
    "node": "an open or mapped device node",
}


@dataclass
class VendorReading:
    """One look at all devices of a vendor. ``reason`` is set when nothing can be told of any of them."""

    vendor: str
    devices: t.List[Facts] = field(default_factory=list)
    count: t.Optional[int] = None
    driver_version: t.Optional[str] = None
    reason: str = ""
    detail: str = ""
    warnings: t.List[str] = field(default_factory=list)


def sick(index: int, reason: str, detail: str) -> Facts:
    """The facts of a device that gives no answer."""
    return {"index": index, "reason": reason, "detail": detail}
