# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Intel devices as the kernel drivers xe and i915 tell them; no library of the vendor is needed.

How much memory of a whole device is in use is told to root alone, in debugfs. Without it the clients are added up,
and that only when all of them can be seen. A device without memory of its own is judged by its holders.
"""

from __future__ import annotations

import os
import re
import typing as t

from . import _gpu_drm
from ._deadline import Deadline
from ._gpu_drm import Account, Card
from ._gpu_facts import Facts, VendorReading
from ._gpu_nodes import NodeFacts

__all__ = ["VENDOR", "read"]

VENDOR = "intel"
DRIVERS = ("xe", "i915")
OWN = re.compile(r"(?:vram|local)\d*\Z")  # the regions of a device's own memory: of xe, of i915
ANY = re.compile(r"")
BUILT_IN = re.compile(r"[0-9a-f]+:00:02\.")  # where the GPU of a processor is
# The first byte of the device number of generations that i915 does not know: Lunar Lake, Panther Lake, Battlemage...
XE_ALONE = (0x64, 0x67, 0xB0, 0xD7, 0xE2, 0xFD)


def read(
    only: t.Optional[t.Sequence[int]],
    limit: float,
    nodes: NodeFacts,
    sys: str = "/sys",
    proc: str = "/proc",
    dev: str = "/dev",
) -> VendorReading:
    """Read the devices with the indexes ``only``, or all, within ``limit`` seconds."""
    deadline = Deadline(limit)
    reading, cards = _gpu_drm.begin(VENDOR, sys)

    def attributes(card: Card) -> Facts:
        return _attributes(card, sys)

    for card in cards:
        if only is not None and card.index not in only:
            continue
        facts = _gpu_drm.undriven(card, "Intel", DRIVERS, _module(card), sys)
        if facts is not None:
            facts["integrated"] = BUILT_IN.match(card.pci) is not None
        else:
            share = deadline.remaining / (len(cards) - card.index)  # a sick device leaves the others theirs
            facts = _facts(card, _gpu_drm.examine(card, attributes, nodes, proc, share), nodes)
        reading.devices.append(facts)
    return reading


def _module(card: Card) -> str:
    return "xe" if card.device_id >> 8 in XE_ALONE else "i915"


def _facts(card: Card, account: Account, nodes: NodeFacts) -> Facts:
    facts = account.facts
    own = facts.get("memory_used") is not None or facts.get("memory_total") is not None
    own = own or any(OWN.match(name) for _pid, client in account.clients for name in client.regions)
    facts["integrated"] = not own and BUILT_IN.match(card.pci) is not None
    facts["processes"] = account.processes(ANY if facts["integrated"] else OWN)
    facts["lists"] = account.lists(nodes)
    facts.setdefault("memory_basis", "not_available")
    if own and facts.get("memory_used") is None and facts["lists"] == "complete":
        used = account.memory(OWN)
        if used is not None:
            facts["memory_used"], facts["memory_basis"] = _gpu_drm.mib(used), "clients"
    return facts


def _attributes(card: Card, sys: str) -> Facts:
    """Runs in the child: the memory of the whole device, where the driver tells it."""
    total, used = 0, None
    for tile in sorted(name for name in os.listdir(card.path) if re.match(r"tile\d+\Z", name)):
        total += _gpu_drm.number("%s/%s/physical_vram_size_bytes" % (card.path, tile)) or 0
    for text in _debug_texts(card, sys):
        size, usage = _manager(text)
        if usage is None:
            used = None  # the sum of some parts is no figure of the device
            break
        used = (used or 0) + usage
        total = max(total, size or 0)
    facts: Facts = {"memory_total": _gpu_drm.mib(total) if total else None}
    if used is not None:
        # The driver's own buffers are in it.
        facts.update(memory_used=_gpu_drm.mib(used), memory_basis="used_and_reserved")
    return facts


def _debug_texts(card: Card, sys: str) -> t.List[str]:
    """What the memory managers of the device's own memory tell, one text for each."""
    names = [card.pci] + [name[len("card") :] for name in card.nodes if name.startswith("card")]
    for folder in ("%s/kernel/debug/dri/%s" % (sys, name) for name in names):
        try:
            entries = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # debugfs is not mounted, locked down, or not for us
        if card.driver == "i915":
            text = _read(folder + "/i915_gem_objects")
            if text is not None:
                return [part for name, part in _sections(text) if OWN.match(name)]
            continue
        paths = ["%s/%s/vram_mm" % (folder, name) for name in entries if re.match(r"tile\d+\Z", name)]
        paths += ["%s/%s" % (folder, name) for name in entries if re.match(r"vram\d+_mm\Z", name)]
        texts = [text or "" for text in map(_read, paths)]
        if texts:
            return texts
    return []


def _sections(text: str) -> t.List[t.Tuple[str, str]]:
    """The regions that i915 tells of one after the other, each by its name and the lines up to the next."""
    parts = re.split(r"^([\w-]+): +(?=use_type:|total:)", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


def _read(path: str) -> t.Optional[str]:
    try:
        return _gpu_drm.text(path)
    except PermissionError:
        return None


def _manager(text: str) -> t.Tuple[t.Optional[int], t.Optional[int]]:
    """Bytes in all and in use; the line "size" counts pages in i915, the allocator's own line MiB in both."""
    usage = re.search(r"\busage:\s*(\d+)\s*$", text, re.MULTILINE)
    size = re.search(r"\btotal:\s*(\d+)MiB", text)
    return (int(size.group(1)) * _gpu_drm.MIB if size else None), (int(usage.group(1)) if usage else None)
