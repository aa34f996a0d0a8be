# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Look at the GPUs of this host, once or until they are clear."""

from __future__ import annotations

import os
import typing as t
from dataclasses import dataclass, field

from . import _bounded, _gpu_bus, _gpu_nodes, _gpu_nvidia, _gpu_reasons, _gpu_select, _gpu_view
from ._deadline import Deadline
from ._errors import UsageError
from ._gpu_device import DEFAULT_ALLOWED, Device, Holder, Identity, Resolve
from ._gpu_facts import Facts, VendorReading
from ._gpu_judge import judge
from ._gpu_options import VENDORS, Options
from ._verdicts import worst

__all__ = ["DEFAULT_ALLOWED", "Device", "Holder", "Options", "Reading", "read", "wait_clear"]

BUSY_SENSOR = 90  # percent
LAST_LOOK = 2.0  # seconds for the look that begins when the time is over
LAST_ANSWER = 1.0  # seconds for systemd and for the open files when the time is over
NAMES = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
# What a vendor's library answers on a host without that vendor's hardware.
NOT_INSTALLED = ("binding_missing", "binding_wrong", "library_missing", "driver_not_loaded")


@dataclass
class Reading:
    """One look at all devices that were asked for."""

    verdict: str = "unknown"
    reason: str = ""
    detail: str = ""
    devices: t.List[Device] = field(default_factory=list)
    not_judged: t.List[Device] = field(default_factory=list)
    count: t.Optional[int] = None
    driver_version: t.Optional[str] = None
    container: t.Optional[str] = None
    sees_all_processes: t.Optional[bool] = None
    stuck_probes: t.List[int] = field(default_factory=list)
    warnings: t.List[str] = field(default_factory=list)
    readings: int = 1
    elapsed: float = 0.0
    nothing: str = "there is no GPU to judge"  # what there is to say where there is none

    @property
    def message(self) -> str:
        """One sentence that explains the verdict."""
        parts = _complaints(self.devices)
        if self.reason:
            return "; ".join([self.detail] + (parts if self.reason != "unconfirmed" else []))
        if parts:
            return "; ".join(parts)
        if not self.devices:
            return self.nothing
        excused = ["%s: %s" % (d.label, d.detail) for d in self.devices if d.reason == "only_excused"]
        return "; ".join(["%s clear" % _are(self.devices, "is", "are"), *excused])

    @property
    def lasting(self) -> bool:
        """Whether waiting changes nothing."""
        if self.reason in _gpu_reasons.LASTING:
            return True
        return any(device.reason in _gpu_reasons.LASTING_DEVICE for device in self.devices)

    @property
    def cut_short(self) -> bool:
        """Whether time alone made it an error."""
        reasons = {device.reason for device in self.devices if device.verdict == "error"}
        return self.verdict == "error" and reasons.union([self.reason] if self.reason else []) == {"timeout"}

    def fail(self, reason: str, detail: str) -> None:
        """Decide from something else than the devices; what was found out first is kept."""
        verdict = _gpu_reasons.READING[reason][0]
        self.verdict = worst([self.verdict, verdict]) if self.devices or self.reason else verdict
        if not self.reason:
            self.reason, self.detail = reason, detail
        elif detail not in self.detail:
            self.detail += "; " + detail

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "msg": self.message,
            "gpus": [device.as_dict() for device in self.devices],
            "not_judged": [
                {"index": d.index, "pci": d.pci, "vendor": d.vendor, "name": d.name} for d in self.not_judged
            ],
            "gpu_count": self.count,
            "driver_version": self.driver_version,
            "container": self.container,
            "sees_all_processes": self.sees_all_processes,
            "stuck_probes": self.stuck_probes,
            "readings": self.readings,
            "elapsed": round(self.elapsed, 3),
        }


def _are(devices: t.Sequence[Device], one: str, several: str) -> str:
    return "%s %s" % (", ".join(device.label for device in devices), one if len(devices) == 1 else several)


def _complaints(devices: t.Sequence[Device]) -> t.List[str]:
    """What is wrong with them; the same is said once."""
    words = {
        "busy": ("is busy", "are busy"),
        "unknown": ("cannot be judged", "cannot be judged"),
        "error": ("does not answer properly", "do not answer properly"),
    }
    groups: t.Dict[t.Tuple[str, str], t.List[Device]] = {}
    for device in devices:
        if device.verdict != "clear":
            groups.setdefault((device.verdict, device.detail), []).append(device)
    return ["%s: %s" % (_are(group, *words[verdict]), detail) for (verdict, detail), group in groups.items()]


def uses_none(service: str) -> Reading:
    """The answer for a service whose definition says that it uses no GPU."""
    reading = Reading(verdict="clear", readings=0)
    reading.nothing = 'the service "%s" uses no GPU' % service
    return reading


@dataclass(frozen=True)
class _Place:
    """Where the kernel shows its things; other folders are for tests."""

    devices: str
    proc: str
    sys: str


def read(
    options: Options,
    limit: t.Optional[float] = None,
    *,
    devices: str = "/dev",
    proc: str = "/proc",
    sys: str = "/sys",
) -> Reading:
    """Look once. ``limit`` bounds the time spent on drivers and on systemd; the folders are for tests."""
    selectors = None if options.gpus is None else _gpu_select.check(options.gpus)
    place = _Place(devices, proc, sys)
    present = [vendor for vendor in VENDORS if _present(vendor, place)]
    if options.vendor not in ("auto", "nvidia") and options.vendor not in present:
        return _no_stack(options)
    deadline = Deadline(_gpu_nvidia.READING_LIMIT if limit is None else limit)
    state = None if options.unit is None else _unit(options.unit, options, deadline, proc)
    readings, nodes = _ask(options, selectors, present, place, deadline)
    view = _gpu_view.look(proc)
    reading = Reading(container=view.container, sees_all_processes=view.complete)
    reading.stuck_probes = sorted(pid for pid, _start in _bounded.stuck_children())
    every = [facts for vendor in readings for facts in vendor.devices]
    _without(every, nodes, [*reading.stuck_probes, os.getpid()], view.complete)
    resolve = _resolver(_mentioned(every, nodes), options, state, proc)
    judged = [judge(v.vendor, facts, nodes, view, resolve, options) for v in readings for facts in v.devices]
    _choose(reading, judged, readings, selectors, options)
    _check_count(reading, options)
    _warn(reading, readings, _gpu_bus.count("nvidia", sys))
    return reading


def _present(vendor: str, place: _Place) -> bool:
    """Whether the host has such hardware, or its driver, whatever a library says."""
    if vendor == "nvidia":
        if _gpu_nodes.any_node(_gpu_nodes.NVIDIA, place.devices):
            return True
        return _gpu_nvidia.hardware_present(place.sys, place.devices, place.proc)
    return _gpu_bus.present(vendor, place.sys, place.devices)


def _ask(
    options: Options, selectors: t.Optional[t.List[str]], present: t.List[str], place: _Place, deadline: Deadline
) -> t.Tuple[t.List[VendorReading], _gpu_nodes.NodeFacts]:
    """What each vendor tells. One whose hardware is not here, and that tells nothing, is left out."""
    readings = []
    if options.vendor in ("auto", "nvidia"):
        only = None
        if selectors and present in ([], ["nvidia"]):
            indexes = [_gpu_select.index_of(text) for text in selectors]
            only = [index for index in indexes if index is not None] if None not in indexes else None
        nvidia = _gpu_nvidia.read(only, deadline.seconds, place.proc)
        if not nvidia.reason and not nvidia.count:
            nvidia.reason, nvidia.detail = "no_gpu", "the NVIDIA driver runs but knows no GPU"
            if "nvidia" in present:
                nvidia.detail += ", although the PCI bus or the device nodes show one"
        elsewhere = nvidia.reason == "no_gpu" and options.vendor == "auto" and present != []
        if "nvidia" in present or not (elsewhere or nvidia.reason in NOT_INSTALLED):
            readings.append(nvidia)
    # Read after the driver: what it listed and what has ended since is then seen as such, and never the reverse.
    nodes = _gpu_nodes.scan(place.devices, place.proc, max(LAST_ANSWER, min(_gpu_nodes.LIMIT, deadline.remaining)))
    # Rooms that only some hosts need are loaded there alone: a module compiles what it imports on every run.
    left = max(LAST_ANSWER, deadline.remaining)
    if "amd" in present and options.vendor in ("auto", "amd"):
        from . import _gpu_amd

        readings.append(_gpu_amd.read(None, left, nodes, place.sys, place.proc, place.devices))
        left = max(LAST_ANSWER, deadline.remaining)
    if "intel" in present and options.vendor in ("auto", "intel"):
        from . import _gpu_intel

        readings.append(_gpu_intel.read(None, left, nodes, place.sys, place.proc, place.devices))
    return readings, nodes


def _choose(
    reading: Reading,
    judged: t.List[Device],
    readings: t.List[VendorReading],
    selectors: t.Optional[t.List[str]],
    options: Options,
) -> None:
    """Which devices the answer is about, and its verdict."""
    silent = [vendor for vendor in readings if vendor.reason]
    meant, others = _gpu_select.candidates(judged, options.vendor)
    if len(silent) < len(readings):
        reading.count = sum(vendor.count or 0 for vendor in readings if not vendor.reason) - len(others)
    reading.driver_version = next((v.driver_version for v in readings if v.driver_version), None)
    if not readings:
        blank = _no_stack(options)
        reading.verdict, reading.reason, reading.detail = blank.verdict, blank.reason, blank.detail
        return
    if selectors is None:
        reading.devices, reading.not_judged = meant, others
    elif len(silent) < len(readings):
        found = _gpu_select.pick(selectors, judged, options.vendor, {vendor.vendor for vendor in silent})
        # A vendor that tells nothing is no matter where all that was asked for is another's.
        if silent and not any(device.reason == "not_found" for device in found):
            reading.warnings.extend(vendor.detail for vendor in silent)
            silent = []
        reading.devices = found
    reading.verdict = worst(device.verdict for device in reading.devices)
    for vendor in silent:
        reading.fail(vendor.reason, vendor.detail)
    if not silent and not reading.devices and not reading.reason:
        reading.fail("no_gpu", "the %s driver knows no GPU" % NAMES[readings[0].vendor])


def _no_stack(options: Options) -> Reading:
    whose = "" if options.vendor == "auto" else "%s " % NAMES[options.vendor]
    reading = Reading(verdict="error", reason="no_stack")
    reading.detail = "there is no %sGPU on this host and no driver for one" % whose
    if options.allow_no_gpu and not options.expected_gpus and options.gpus is None:
        reading.verdict = "clear"
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
        reading = look(options, None if single else max(LAST_LOOK, deadline.remaining))
        readings += 1
        # A look that the deadline cut short tells less than the one before it.
        if last is None or not (deadline.expired and reading.cut_short):
            last = reading
            in_a_row = in_a_row + 1 if reading.verdict == "clear" else 0
        lasting = reading.lasting
        if single or in_a_row >= options.confirmations or lasting or deadline.expired:
            break
        deadline.sleep(options.interval)
    last.readings, last.elapsed = readings, deadline.elapsed
    if not single and last.verdict == "clear" and in_a_row < options.confirmations and not last.lasting:
        last.verdict, last.reason = "unknown", "unconfirmed"
        last.detail = "the GPUs were clear in the last %d of %d readings, %d in a row were asked for" % (
            in_a_row,
            readings,
            options.confirmations,
        )
    return last


def _parts(devices: t.Iterable[Facts]) -> t.Iterator[Facts]:
    for facts in devices:
        yield facts
        yield from facts.get("partitions") or ()


def _without(devices: t.Sequence[Facts], nodes: _gpu_nodes.NodeFacts, pids: t.Sequence[int], complete: bool) -> None:
    """Take out our own looks: a call of ours that hangs in the driver is not a holder.

    Where not all processes are visible, a driver may mean another one by the same number, unless its node is open here.
    """
    seen = {pid for pids_of_node in nodes.holders.values() for pid in pids_of_node}
    for facts in _parts(devices):
        if facts.get("processes"):
            facts["processes"] = [
                entry
                for entry in facts["processes"]
                if entry["pid"] not in pids or not (complete or entry["pid"] in seen)
            ]
    for node, holders in nodes.holders.items():
        nodes.holders[node] = [pid for pid in holders if pid not in pids]


def _mentioned(devices: t.Sequence[Facts], nodes: _gpu_nodes.NodeFacts) -> t.Set[int]:
    pids = {entry["pid"] for facts in _parts(devices) for entry in facts.get("processes") or ()}
    return pids.union(*nodes.holders.values())


def _unit(name: str, options: Options, deadline: Deadline, proc: str) -> t.Any:
    """The state of the unit that is judged; a UsageError, before anything else is read, where there is none."""
    from . import _ownership, _systemd
    from ._processes import Table

    state = _systemd.show(name, max(LAST_ANSWER, min(10.0, deadline.remaining)))
    known = state.load_state != "not-found"
    if not (known or _ownership.of_unit(Table.snapshot(proc), state, mark_gid=options.mark_gid).processes):
        raise UsageError(
            'the unit "%s" is not known on this host and owns no process: nothing of it can be judged' % name
        )
    return state


def _resolver(pids: t.Set[int], options: Options, state: t.Any, proc: str) -> Resolve:
    if not pids and state is None:
        return lambda _pid: None  # there is nobody to name
    from . import _ownership
    from ._processes import Table

    owned: t.Optional[t.Collection[t.Any]] = None
    if state is None:
        table = Table.of(pids, proc)
    else:
        table = Table.snapshot(proc)
        owned = _ownership.of_unit(table, state, mark_gid=options.mark_gid).processes

    def resolve(pid: int) -> t.Optional[Identity]:
        process = table.get(pid)
        if process is None:
            return None
        unit, container = _ownership.attribute(process)
        mine = owned is None or process.ref in owned
        return Identity(round(process.create_time, 2), process.name, process.user, unit, container, process.state, mine)

    return resolve


def _check_count(reading: Reading, options: Options) -> None:
    if options.expected_gpus is None or reading.count is None:
        return
    if reading.count < options.expected_gpus:
        reading.fail(
            "fewer_gpus",
            "GPUs expected: %d, found: %d" % (options.expected_gpus, reading.count),
        )
    elif reading.count > options.expected_gpus:
        reading.warnings.append("GPUs expected: %d, found: %d" % (options.expected_gpus, reading.count))


def _warn(reading: Reading, readings: t.Sequence[VendorReading], on_bus: int) -> None:
    for vendor in readings:
        reading.warnings.extend(vendor.warnings)
        if vendor.vendor == "nvidia" and vendor.count and vendor.count < on_bus:
            reading.warnings.append("the PCI bus shows %d NVIDIA GPUs, the driver knows %d" % (on_bus, vendor.count))
    for device in reading.devices:
        utilization = device.utilization or 0
        if device.verdict == "clear" and utilization >= BUSY_SENSOR:
            reading.warnings.append(
                "%s reports %d %% utilisation although nothing holds it" % (device.label, utilization)
            )
        if device.verdict == "clear":
            reading.warnings.extend("%s: %s" % (device.label, text) for text in device.disagreements)
