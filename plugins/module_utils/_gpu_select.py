# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How the caller names devices, and which device of which vendor that is."""

from __future__ import annotations

import re
import typing as t

from ._errors import UsageError
from ._gpu_device import Device

__all__ = ["candidates", "check", "index_of", "pci_of", "pick"]

UUID = re.compile(r"(?:GPU|MIG)-[0-9a-zA-Z/-]{1,96}\Z")


def check(gpus: t.Any) -> t.List[str]:
    """The names, each in one spelling; a UsageError before anything is read where they make no sense."""
    if not isinstance(gpus, (list, tuple)):
        raise UsageError("the GPUs must be a list of indexes, UUIDs or PCI addresses, not %s" % type(gpus).__name__)
    selectors = [str(entry).strip() for entry in gpus]
    selectors = [text if index_of(text) is None else str(index_of(text)) for text in selectors]
    if not selectors:
        raise UsageError("the list of GPUs is empty: name at least one, or leave the list out to mean all")
    for text in selectors:
        if index_of(text) is None and not UUID.match(text) and pci_of(text) is None:
            shown = text[:60].encode("unicode_escape").decode("ascii")
            raise UsageError('"%s" names no GPU: give an index, a UUID or a PCI address' % shown)
    if len(set(selectors)) != len(selectors):
        raise UsageError("the list of GPUs names one twice: %s" % ", ".join(selectors))
    addresses = [pci_of(text) for text in selectors if pci_of(text) is not None]
    if len(set(addresses)) != len(addresses):
        raise UsageError("the list of GPUs names one address twice: %s" % ", ".join(selectors))
    return selectors


def index_of(text: str) -> t.Optional[int]:
    return int(text) if re.match(r"[0-9]{1,4}\Z", text) else None


def pci_of(text: str) -> t.Optional[t.Tuple[int, int, int, int]]:
    """A PCI address as numbers, however many zeros it is written with."""
    match = re.match(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])\Z", text.lower())
    if match is None:
        return None
    domain, bus, slot, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, slot, function


def candidates(devices: t.Sequence[Device], vendor: str) -> t.Tuple[t.List[Device], t.List[Device]]:
    """The devices that are meant where none is named, and the ones that are not.

    Those of virtual machines are no business of this host's. The graphics of a processor beside real accelerators serve
    its display: they are meant only where there is nothing else, or where the caller names their vendor.
    """
    ours = [device for device in devices if device.reason != "passed_through"]
    discrete = [device for device in ours if not device.integrated]
    meant = discrete if discrete and vendor == "auto" else ours or list(devices)
    return meant, [device for device in devices if not any(device is other for other in meant)]


def pick(
    selectors: t.Sequence[str], devices: t.Sequence[Device], vendor: str, silent: t.Collection[str]
) -> t.List[Device]:
    """The devices by name, in the caller's order; ``silent`` are vendors that cannot tell theirs.

    A UsageError where an index may mean devices of several vendors, or two names mean one device.
    """
    meant, _others = candidates(devices, vendor)
    if silent and vendor == "auto":
        meant = [device for device in meant if not device.integrated]  # beside others they would not be meant
    found = [_one(text, meant, devices, silent) for text in selectors]
    for number, device in enumerate(found):
        if any(device is other for other in found[:number]):
            raise UsageError("the list of GPUs names %s twice: %s" % (device.label, ", ".join(selectors)))
    return found


def _one(text: str, meant: t.Sequence[Device], devices: t.Sequence[Device], silent: t.Collection[str]) -> Device:
    index = index_of(text)
    if index is not None:
        vendors = sorted({device.vendor for device in meant} | set(silent))
        if len(vendors) > 1:
            raise UsageError(
                'the index "%s" may mean a device of %s on this host: give a PCI address, or set the vendor'
                % (text, " or ".join(vendors))
            )
        for device in meant:
            if device.index == index:
                return device
    every = [*devices, *(partition for device in devices for partition in device.partitions)]
    for device in every if index is None else ():
        if device.uuid is not None and device.uuid.lower() == text.lower():
            return device
        if device.pci and pci_of(text) is not None and pci_of(device.pci) == pci_of(text):
            return device
    return _not_found(text, devices)


def _not_found(text: str, devices: t.Sequence[Device]) -> Device:
    vendors = {device.vendor for device in devices}
    lost = Device(index=index_of(text), vendor=vendors.pop() if len(vendors) == 1 else "unknown", asked=text)
    if text.startswith("MIG-"):
        blind = [device.label for device in devices if device.reason == "partitions_unreadable"]
        if blind:
            return lost.decide(
                "unknown", "partitions_unreadable", "%s does not tell its partitions" % " or ".join(blind)
            )
    detail = "no driver here knows such a device"
    if index_of(text) is not None and devices:
        detail += ", only %s" % ", ".join(str(device.index) for device in devices)
    silent = [device.label for device in devices if device.verdict == "error" and device.uuid is None]
    if silent:
        detail += ", or it is %s, which does not tell its name" % " or ".join(silent)
    return lost.decide("error", "not_found", detail)
