# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""GPUs that the kernel's DRM drivers run: which there are, and what each open file of theirs is accounted for.

A driver writes into ``/proc/PID/fdinfo/FD`` of an open device node who the client is, how much memory its buffers
have in each region, and for how long or for how many cycles it kept each engine busy. Drivers differ in their keys,
and what a kernel does not tell is kept apart from zero.

Reading such a file or an attribute of a device asks its driver, which may hang. So each device is read in a child of
its own, and what the child told before it hung counts.
"""

from __future__ import annotations

import functools
import os
import re
import typing as t
from dataclasses import dataclass, field

from . import _bounded
from ._gpu_bus import driver, functions, line
from ._gpu_facts import Facts, VendorReading
from ._gpu_nodes import NodeFacts

__all__ = [
    *("LEAST", "MIB", "Account", "Card", "Client"),
    *("begin", "cards", "examine", "mib", "number", "parse", "text", "undriven"),
]

DEVICE_LIMIT = 5.0  # for one device
MIB = 1024 * 1024
UNITS = {"": 1, "KiB": 1024, "kB": 1024, "MiB": MIB, "GiB": 1024 * MIB}
# What an opened file alone may cost: page tables and a context of the driver. Less is no use of the device.
LEAST = 4 * MIB
ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])\Z")
MEMORY = re.compile(r"drm-(total|resident|memory)-(?!cycles-)(\S+)\Z")
ENGINE = re.compile(r"drm-(?:engine|cycles)-(?!capacity-)(\S+)\Z")
PASSED_THROUGH = re.compile(r"vfio|pci-stub|pciback")  # drivers that hold a device for a virtual machine

Attributes = t.Callable[["Card"], Facts]


@dataclass(frozen=True)
class Card:
    """One PCI function of a GPU; a virtual function is one of its own."""

    index: int  # by PCI address
    pci: str
    path: str
    device_id: int
    driver: str  # empty when no driver is bound
    nodes: t.Tuple[str, ...]  # renderDN, cardN


class Client(t.NamedTuple):
    """One opened device, as its driver accounts for it. Several files, also of several processes, may be the same."""

    driver: str
    identity: str  # empty in drivers that give none
    regions: t.Dict[str, t.Dict[str, int]]  # bytes: total, resident, memory (the older key)
    engines: t.Dict[str, int]  # nanoseconds or cycles; empty where the driver told none


@dataclass
class Account:
    """What was read of one device."""

    facts: Facts
    clients: t.List[t.Tuple[int, Client]] = field(default_factory=list)  # by process
    unread: t.Set[str] = field(default_factory=set)  # "denied", "absent": some file that could not be accounted for

    def memory(self, region: t.Pattern[str]) -> t.Optional[int]:
        """Bytes that all clients have in the regions, each client counted once; None when one of them does not tell."""
        seen: t.Dict[t.Any, t.Optional[int]] = {}
        for place, (_pid, client) in enumerate(self.clients):
            seen[client.identity or place] = _present(client, region)
        known = [amount for amount in seen.values() if amount is not None]
        return None if self.unread or len(known) < len(seen) else sum(known)

    def processes(self, region: t.Pattern[str]) -> t.List[Facts]:
        """The processes that use the device; one that only has it open and idle is none of them.

        A client that tells neither memory nor engines may well use it. With memory told and no engines it does by its
        memory: amdgpu leaves out the engines that were idle, and xe before Linux 6.11 has no such keys.
        """
        found: t.Dict[int, t.Dict[t.Any, Client]] = {}
        for place, (pid, client) in enumerate(self.clients):
            found.setdefault(pid, {})[client.identity or place] = client
        entries = []
        for pid, clients in found.items():
            present = [_present(client, region) for client in clients.values()]
            busy = {name for client in clients.values() for name, spent in client.engines.items() if spent}
            silent = any(not client.regions and not client.engines for client in clients.values())
            most = sum(_most(client, region) for client in clients.values())
            if busy or most >= LEAST or silent:
                kind = "compute" if busy & {"ccs", "compute"} else "graphics"
                memory = None if None in present else mib(sum(amount or 0 for amount in present))
                shared = {
                    client.identity: mib(amount)
                    for client, amount in zip(clients.values(), present)
                    if client.identity and amount
                }
                entry = {"pid": pid, "memory": memory, "kind": kind, "source": "fdinfo", "clients": shared}
                entries.append(entry)
        return entries

    def lists(self, nodes: NodeFacts) -> str:
        """The word for the list of processes: it is drawn from open files, so it ends where these cannot be seen."""
        if nodes.error or nodes.hidden or "denied" in self.unread:
            return "denied"
        return "absent" if self.unread else "complete"


def mib(amount: t.Optional[int]) -> t.Optional[int]:
    """MiB, rounded up: a started MiB is in use."""
    return None if amount is None else -(-amount // MIB)


def _present(client: Client, region: t.Pattern[str]) -> t.Optional[int]:
    """Bytes that are there now; None when the driver tells of no region at all."""
    if not client.regions:
        return None
    return sum(
        sizes.get("resident", sizes.get("memory", sizes.get("total", 0)))
        for name, sizes in client.regions.items()
        if region.match(name)
    )


def _most(client: Client, region: t.Pattern[str]) -> int:
    """Bytes with what was moved out for others and will come back."""
    return sum(max(sizes.values()) for name, sizes in client.regions.items() if region.match(name))


def cards(vendor: str, sys: str = "/sys") -> t.List[Card]:
    """The GPUs of one vendor by their PCI addresses, with a driver or without; OSError when the bus cannot be read."""
    found = []
    for pci, path in functions(vendor, sys):
        address = ADDRESS.match(pci)
        if address:
            found.append(([int(part, 16) for part in address.groups()], pci, path))
    return [
        Card(index, pci, path, _hex(path, "device"), driver(path), _nodes(path))
        for index, (_order, pci, path) in enumerate(sorted(found))
    ]


def begin(vendor: str, sys: str) -> t.Tuple[VendorReading, t.List[Card]]:
    """A reading of the vendor's devices that has not begun to ask them, and the devices."""
    reading = VendorReading(vendor)
    try:
        found = cards(vendor, sys)
    except OSError as error:
        reading.reason = "bus_unreadable"
        reading.detail = "the list of PCI devices cannot be read: %s" % error.strerror
        return reading, []
    reading.count = len(found)
    return reading, found


def _nodes(path: str) -> t.Tuple[str, ...]:
    try:
        entries = os.listdir(path + "/drm")
    except OSError:
        return ()
    return tuple(sorted((name for name in entries if re.match(r"(card|renderD)\d+\Z", name)), reverse=True))


def _hex(path: str, name: str) -> int:
    try:
        return int(line(path, name), 16)
    except ValueError:
        return 0


def undriven(card: Card, vendor: str, drivers: t.Sequence[str], module: str, sys: str) -> t.Optional[Facts]:
    """The facts of a device that none of the ``drivers`` runs; ``module`` is the one that would."""
    if card.driver in drivers:
        return None
    what = "the %s GPU %s" % (vendor, card.pci)
    if card.driver and PASSED_THROUGH.search(card.driver):
        return known(card, "passed_through", '%s is given to virtual machines ("%s")' % (what, card.driver))
    if card.driver:
        return known(
            card, "driver_not_loaded", '%s is run by "%s", which does not account for it' % (what, card.driver)
        )
    if os.path.isdir("%s/module/%s" % (sys, module)):
        detail = '%s has no graphics driver, although "%s" is loaded: the kernel log tells why' % (what, module)
    else:
        detail = '%s has no graphics driver: load it with "modprobe %s"' % (what, module)
    return known(card, "driver_not_loaded", detail)


def known(card: Card, reason: str = "", detail: str = "") -> Facts:
    """The facts that are known of a device before it is asked."""
    return {"index": card.index, "pci": card.pci, "nodes": list(card.nodes), "reason": reason, "detail": detail}


def text(path: str) -> t.Optional[str]:
    """An attribute; None when this kernel has no such attribute. Any other failure is the device's."""
    try:
        with open(path, encoding="ascii", errors="replace") as handle:
            return handle.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        error.filename = path  # a failed read, other than a failed open, does not tell it
        raise


def number(path: str) -> t.Optional[int]:
    """The number in an attribute; None when there is none."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def examine(card: Card, attributes: Attributes, nodes: NodeFacts, proc: str, limit: float) -> Account:
    """Read the attributes of a device and the accounts of the files that it is opened by."""
    account = Account(known(card))
    files = [(pid, file) for pid, file, node in nodes.files if node in card.nodes]
    holders = {pid for node in card.nodes for pid in nodes.holders.get(node, [])}
    if holders - {pid for pid, _file in files}:
        account.unread.add("absent")  # it is mapped, and the file is closed: the buffers may live on
    if limit <= 0:
        return _failed(account, "timeout", "the time was over before this device was read")
    look = functools.partial(_look, card=card, attributes=attributes, files=files, proc=proc)
    outcome = _bounded.run(look, min(limit, DEVICE_LIMIT), key="drm-" + card.pci, dies_with_caller=True)
    at = "its attributes"
    for part in outcome.partial:
        account.facts.update(part.get("facts", {}))
        if "at" in part:
            at = part["at"]
        if "unread" in part:
            account.unread.add(part["unread"])
        if "client" in part:
            account.clients.append((part["pid"], Client(*part["client"])))
    if outcome.status == "error":
        return _failed(account, "internal", "the device cannot be read: %s" % outcome.error)
    if outcome.status == "stuck" and not outcome.partial and not outcome.pid:
        return _failed(account, "stuck", "an earlier call into the driver for this device has not come back")
    if not outcome.ok:
        return _failed(account, "timeout", "the driver does not tell %s: %s" % (at, outcome.error))
    return account


def _failed(account: Account, reason: str, detail: str) -> Account:
    account.facts.update(reason=reason, detail=detail)
    account.unread.add("absent")
    return account


def _look(
    report: _bounded.Report, card: Card, attributes: Attributes, files: t.Sequence[t.Tuple[int, int]], proc: str
) -> None:
    """Runs in the child."""
    try:
        facts = attributes(card)
        if _lost(card):
            facts.update(reason="gpu_lost", detail="the device does not answer on the PCI bus")
        elif not os.path.isdir(card.path):
            facts.update(reason="driver_error", detail="the device vanished while it was read")
    except OSError as error:
        what = os.path.basename(error.filename or card.path)
        facts = {"reason": "driver_error", "detail": 'the driver does not tell "%s": %s' % (what, error.strerror)}
    report({"facts": facts})
    for pid, file in files:
        report({"at": "what process %d holds" % pid})
        try:
            found = _account(proc, pid, file)
        except OSError as error:
            report({"unread": "denied" if isinstance(error, PermissionError) else "absent"})
            continue
        client = None if found is None else parse(found)
        if client is not None and client.driver == card.driver:
            report({"pid": pid, "client": client})
        elif client is None and found is not None:
            report({"unread": "absent"})


def _lost(card: Card) -> bool:
    """A device that has fallen off the bus answers each read with ones."""
    try:
        with open(card.path + "/config", "rb") as handle:
            return handle.read(4) == b"\xff\xff\xff\xff"
    except (FileNotFoundError, PermissionError):
        return False


def _account(proc: str, pid: int, file: int) -> t.Optional[str]:
    """The account of an open file, or None when it is closed by now."""
    process = "%s/%d" % (proc, pid)
    try:
        # A main thread that has ended has no files, while the threads that live on still have.
        folders = [process] + ["%s/task/%s" % (process, thread) for thread in os.listdir(process + "/task")]
    except (FileNotFoundError, ProcessLookupError):
        folders = [process]
    for folder in folders:
        try:
            with open("%s/fdinfo/%d" % (folder, file), encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def parse(account: str) -> t.Optional[Client]:
    """The account in an fdinfo file; None when it has none, as on kernels that are too old for it."""
    driver, identity = "", ""
    regions: t.Dict[str, t.Dict[str, t.Optional[int]]] = {}
    engines: t.Dict[str, int] = {}
    for entry in account.splitlines():
        key, _colon, value = entry.partition(":")
        key, value = key.strip(), value.strip()
        memory, engine = MEMORY.match(key), ENGINE.match(key)
        if key == "drm-driver":
            driver = value
        elif key == "drm-client-id":
            identity = value
        elif key in ("vram mem", "gtt mem", "cpu mem"):  # amdgpu before the keys were agreed on, Linux 5.14 to 5.18
            driver = driver or "amdgpu"
            regions.setdefault(key[:-4], {})["memory"] = _amount(value)
        elif key == "pasid" and not identity:
            identity = "pasid " + value
        elif memory:
            regions.setdefault(memory.group(2), {})[memory.group(1)] = _amount(value)
        elif engine:
            spent = _amount(value.replace(" ns", ""))
            engines[engine.group(1)] = 1 if spent is None else spent
    # A number that cannot be understood is not zero: such an account tells no memory at all.
    known = {name: {key: size for key, size in sizes.items() if size is not None} for name, sizes in regions.items()}
    return Client(driver, identity, known if known == regions else {}, engines) if driver else None


def _amount(value: str) -> t.Optional[int]:
    match = re.match(r"(\d{1,20})\s*([A-Za-z]*)\Z", value)
    if match is None or match.group(2) not in UNITS:
        return None
    return int(match.group(1)) * UNITS[match.group(2)]
