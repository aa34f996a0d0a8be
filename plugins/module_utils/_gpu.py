# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Look at the GPUs of this host, once or until they are clear."""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

from . import _bounded, _gpu_nodes, _gpu_nvidia, _ownership, _systemd
from ._deadline import Deadline
from ._errors import UsageError
from ._gpu_judge import DEFAULT_ALLOWED, Device, Holder, Identity, Options, Resolve, judge
from ._processes import Table
from ._verdicts import worst

__all__ = ["DEFAULT_ALLOWED", "Device", "Holder", "Options", "Reading", "read", "wait_clear"]

VENDOR = "nvidia"
# Waiting does not change these.
LASTING = ("library_missing", "driver_mismatch", "no_gpu", "no_stack")
BUSY_SENSOR = 90  # percent
LAST_ANSWER = 1.0  # seconds for systemd and for the open files when the time is over


@dataclass
class Reading:
    """One look at all devices that were asked for."""

    verdict: str = "unknown"
    reason: str = ""
    detail: str = ""
    devices: t.List[Device] = field(default_factory=list)
    count: t.Optional[int] = None
    driver_version: t.Optional[str] = None
    stuck_probes: t.List[int] = field(default_factory=list)
    warnings: t.List[str] = field(default_factory=list)
    readings: int = 1
    elapsed: float = 0.0

    @property
    def message(self) -> str:
        """One sentence that explains the verdict."""
        if self.reason:
            return self.detail
        bad = [device for device in self.devices if device.verdict != "clear"]
        if not bad:
            if not self.devices:
                return "there is no GPU to judge"
            names = ", ".join(device.label for device in self.devices)
            return "%s %s clear" % (names, "is" if len(self.devices) == 1 else "are")
        words = {"busy": "is busy", "unknown": "cannot be judged", "error": "does not answer properly"}
        return "; ".join("%s %s: %s" % (device.label, words[device.verdict], device.detail) for device in bad)

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "msg": self.message,
            "gpus": [device.as_dict() for device in self.devices],
            "gpu_count": self.count,
            "driver_version": self.driver_version,
            "stuck_probes": self.stuck_probes,
            "readings": self.readings,
            "elapsed": round(self.elapsed, 3),
        }


def read(
    options: Options,
    limit: t.Optional[float] = None,
    *,
    devices: str = "/dev",
    proc: str = "/proc",
    sys: str = "/sys",
) -> Reading:
    """Look once. ``limit`` bounds the time spent on the driver and on systemd; the folders are for tests."""
    selectors = None if options.gpus is None else _check_selectors(options.gpus)
    indexes = None
    if selectors is not None and all(map(_index, selectors)):
        indexes = [int(text) for text in selectors]
    deadline = Deadline(_gpu_nvidia.READING_LIMIT if limit is None else limit)
    vendor = _gpu_nvidia.read(indexes, deadline.seconds)
    reading = Reading(count=vendor.count, driver_version=vendor.driver_version)
    # Read after the driver: what it listed and what has ended since is then seen as such, and never the reverse.
    nodes_limit = max(LAST_ANSWER, min(_gpu_nodes.LIMIT, deadline.remaining))
    nodes = _gpu_nodes.scan(_gpu_nodes.NVIDIA, devices, proc, nodes_limit)
    table = Table.snapshot(proc)
    reading.stuck_probes = sorted(pid for pid, _start in _bounded.stuck_children())
    _without(vendor.devices, nodes, reading.stuck_probes + [os.getpid()])
    if vendor.reason or not vendor.count:
        return _no_devices(reading, vendor, options, devices, sys)
    resolve = _resolver(table, options, deadline)
    for facts in vendor.devices:
        minor = facts.get("minor")
        if minor is None and facts.get("pci"):
            minor = _minor_by_driver(facts["pci"], proc)
        reading.devices.append(judge(VENDOR, facts, nodes, minor, resolve, options))
    if selectors is not None:
        reading.devices = [_pick(text, reading.devices) for text in selectors]
    reading.verdict = worst(device.verdict for device in reading.devices)
    _check_count(reading, options)
    _warn(reading, nodes)
    return reading


def wait_clear(
    options: Options, deadline: Deadline, look: t.Callable[[Options, t.Optional[float]], Reading] = read
) -> Reading:
    """Look until the GPUs were clear ``confirmations`` times in a row, or the deadline is over.

    A deadline of no seconds means one look, and that look decides.
    """
    single = deadline.seconds <= 0
    last: t.Optional[Reading] = None
    readings = in_a_row = 0
    while True:
        reading = look(options, None if single else deadline.remaining)
        readings += 1
        in_a_row = in_a_row + 1 if reading.verdict == "clear" else 0
        # A look that the deadline cut short tells less than the one before it.
        if last is None or reading.verdict != "error" or not deadline.expired:
            last = reading
        if single or in_a_row >= options.confirmations or reading.reason in LASTING or deadline.expired:
            break
        deadline.sleep(options.interval)
    last.readings, last.elapsed = readings, deadline.elapsed
    if not single and last.verdict == "clear" and in_a_row < options.confirmations and last.reason not in LASTING:
        last.verdict, last.reason = "unknown", "unconfirmed"
        last.detail = "the GPUs were clear in the last %d of %d readings, %d in a row were asked for" % (
            in_a_row,
            readings,
            options.confirmations,
        )
    return last


def _check_selectors(gpus: t.Sequence[t.Any]) -> t.List[str]:
    selectors = [str(entry).strip() for entry in gpus]
    selectors = [str(int(text)) if _index(text) else text for text in selectors]
    if not selectors:
        raise UsageError("the list of GPUs is empty: name at least one, or leave the list out to mean all")
    for text in selectors:
        if not (_index(text) or text.startswith(("GPU-", "MIG-")) or _pci(text)):
            raise UsageError('"%s" names no GPU: give an index, a UUID or a PCI address' % text)
    if len(set(selectors)) != len(selectors):
        raise UsageError("the list of GPUs names one twice: %s" % ", ".join(selectors))
    return selectors


def _index(text: str) -> bool:
    return re.match(r"[0-9]{1,4}\Z", text) is not None


def _pci(text: str) -> t.Optional[t.Tuple[int, int, int, int]]:
    """A PCI address as numbers, however many zeros it is written with."""
    match = re.match(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])\Z", text.lower())
    if match is None:
        return None
    domain, bus, slot, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, slot, function


def _pick(text: str, devices: t.Sequence[Device]) -> Device:
    for device in devices:
        if _index(text) and device.index == int(text):
            return device
        if device.uuid == text:
            return device
        if device.pci and _pci(text) and _pci(device.pci) == _pci(text):
            return device
    if text.startswith("MIG-"):
        lost = Device(index=None, vendor=VENDOR, asked=text)
        return lost.decide("unknown", "partitioned", "partitions (MIG) are not judged yet")
    detail = "the driver knows no such device"
    silent = [device.label for device in devices if device.verdict == "error" and device.uuid is None]
    if silent:
        detail += ", or it is %s, which does not tell its name" % " or ".join(silent)
    lost = Device(index=int(text) if _index(text) else None, vendor=VENDOR, asked=text)
    return lost.decide("error", "not_found", detail)


def _without(devices: t.Sequence[t.Dict[str, t.Any]], nodes: _gpu_nodes.NodeFacts, pids: t.Sequence[int]) -> None:
    """Take out our own looks: a call of ours that hangs in the driver is not a holder."""
    for facts in devices:
        if "processes" in facts:
            facts["processes"] = [entry for entry in facts["processes"] if entry["pid"] not in pids]
    for minor, holders in nodes.holders.items():
        nodes.holders[minor] = [pid for pid in holders if pid not in pids]


def _no_devices(
    reading: Reading, vendor: _gpu_nvidia.VendorReading, options: Options, devices: str, sys: str
) -> Reading:
    present = _gpu_nvidia.hardware_present(sys) or _gpu_nodes.any_node(_gpu_nodes.NVIDIA, devices)
    reading.verdict, reading.reason, reading.detail = "error", vendor.reason, vendor.detail
    if not vendor.reason:
        reading.reason = "no_gpu"
        reading.detail = "the NVIDIA driver runs but knows no GPU%s" % (
            ", although the PCI bus or the device nodes show one" if present else ""
        )
    elif vendor.reason in ("library_missing", "driver_not_loaded") and not present:
        reading.reason = "no_stack"
        reading.detail = "there is no NVIDIA GPU on this host and no driver for one"
        if options.allow_no_gpu and not options.expected_gpus and options.gpus is None:
            reading.verdict = "clear"
    return reading


def _resolver(table: Table, options: Options, deadline: Deadline) -> Resolve:
    owned: t.Optional[t.Collection[t.Any]] = None
    if options.unit is not None:
        state = _systemd.show(options.unit, max(LAST_ANSWER, min(10.0, deadline.remaining)))
        owned = _ownership.of_unit(table, state, mark_gid=options.mark_gid).processes
        if state.load_state == "not-found" and not owned:
            raise UsageError(
                'the unit "%s" is not known on this host and owns no process: nothing of it can be judged'
                % options.unit
            )

    def resolve(pid: int) -> t.Optional[Identity]:
        process = table.get(pid)
        if process is None:
            return None
        unit, container = _ownership.attribute(process)
        mine = owned is None or process.ref in owned
        return Identity(round(process.create_time, 2), process.name, process.user, unit, container, process.state, mine)

    return resolve


def _minor_by_driver(pci: str, proc: str) -> t.Optional[int]:
    """The minor number from the kernel driver's own files, where the library does not tell it."""
    address = _pci(pci)
    if address is None:
        return None
    path = "%s/driver/nvidia/gpus/%s/information" % (proc, "%04x:%02x:%02x.%d" % address)
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            match = re.search(r"^Device Minor:\s*(\d+)", handle.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None


def _check_count(reading: Reading, options: Options) -> None:
    if options.expected_gpus is None or reading.count is None:
        return
    if reading.count < options.expected_gpus:
        reading.verdict, reading.reason = "error", "fewer_gpus"
        reading.detail = "%d GPUs are expected, but the driver knows only %d" % (options.expected_gpus, reading.count)
    elif reading.count > options.expected_gpus:
        reading.warnings.append(
            "the driver knows %d GPUs, although %d are expected" % (reading.count, options.expected_gpus)
        )


def _warn(reading: Reading, nodes: _gpu_nodes.NodeFacts) -> None:
    if nodes.hidden:
        reading.warnings.append(
            "a device node may be open that is not seen: the open files of %d process%s or more could not be read%s"
            % (nodes.hidden, "" if nodes.hidden == 1 else "es", "; run as root" if os.geteuid() else "")
        )
    for device in reading.devices:
        utilization = device.utilization or 0
        if device.verdict == "clear" and utilization >= BUSY_SENSOR:
            reading.warnings.append(
                "%s reports %d %% utilisation although nothing holds it" % (device.label, utilization)
            )
