# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From GPUs to the processes that hold them, as far as those may be ended: what ``fuser -k`` does, with a judgement.

The first reading decides: it is complete and every holder is one that may be ended, or nothing is signalled at all.
Later readings only add holders that a driver lists. A device whose memory is on its way back to the driver looks like
one that is held by whoever has its node open, and that may be a monitor.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from . import _gpu, _gpu_options, _gpu_select, _lease, _ownership, _processes, _selection, _service, _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError, UsageError
from ._gpu_device import Device, Holder
from ._gpu_judge import blocking
from ._ownership import Owned
from ._processes import Process, ProcessRef, Table
from ._selection import Refused, Selection
from ._systemd import UnitState

__all__ = ["select"]

FIRST_LOOK = 10.0  # seconds for the drivers at the first reading, and less where the caller's limit is short
LATER_LOOK = 3.0  # for all of a later one, with what it is repeated for
LEAST_LOOK = 1.0  # however short the limit is, since a driver must first be loaded
SETTLE = 5.0  # seconds in which a driver gives back what ended processes held
PAUSE = 0.5  # between two readings that wait for that
READINGS = 3  # one after the other, while processes are born during them
EVERY = 2.0  # seconds between readings while known holders live
AFTER = 0.5  # and when none of them does
SHORTEST = 0.5  # seconds in which a driver that was read just before may answer
UNIT_ANSWERS = 3.0  # seconds that systemd has at one reading for the states of all units
LEAST_ANSWER = 0.1  # seconds that one of them takes at least
SLIP = (0.0, 1.0)  # the boot time, the base of every create time, has whole seconds
ROUNDING = 0.006  # create times of readings have hundredths of a second, the ticks of the kernel

Look = Callable[["_gpu_options.Options", "float | None"], "_gpu.Reading"]


class Found(NamedTuple):
    """A holder, the device that it holds, and the process that it is; none where that is not certain."""

    holder: Holder
    device: Device
    process: Process | None

    def __str__(self) -> str:
        who = self.process
        if who is None:
            return "%s of %s" % (str(self.holder).split(" holds ")[0], self.device.label)
        return '%d "%s" (user %s)' % (who.pid, who.name, who.user)


def select(params: Mapping[str, Any], clock: Clock = SYSTEM_CLOCK, look: Look | None = None) -> Selection:
    """The holders of the GPUs that the options name."""
    names = [str(name).strip() for name in params["gpus"]]
    if not names:
        raise UsageError('"gpus" is empty: name the devices that are meant, or "all"')
    gpus = None if names == ["all"] else _gpu_select.check(names)
    user, anybody = params.get("user"), params["allow_foreign_users"]
    if user is None and not anybody:
        raise UsageError(
            '"gpus" needs "user", whose processes may be ended: a GPU may be held by anybody; '
            "allow_foreign_users=true means those of every user"
        )
    if user is not None and anybody:
        raise UsageError('"user" and "allow_foreign_users" contradict each other with "gpus": give one of them')
    options = _gpu_options.Options(gpus=gpus, allowed_holders=_gpu_options.check_rules(params.get("allowed_holders")))
    what = "the set of holders of %s" % ("all GPUs" if gpus is None else "GPU %s" % ", ".join(gpus))
    timeout = params.get("timeout")
    holders = Holders(
        options,
        None if user is None else _selection.user_id(user),
        str(user),
        clock=clock,
        look=look or _gpu.read,
        timeout=timeout,
        protected=tuple(params.get("protected") or ()),
    )
    return Selection(what, holders.scan, warnings=holders.warnings, doubt=lambda: holders.doubt)


class Holders:
    """Who holds the devices, over the looks of one stop."""

    def __init__(
        self,
        options: _gpu_options.Options,
        uid: int | None,
        user: str,
        clock: Clock,
        look: Look,
        timeout: float | None = None,
        protected: tuple[str, ...] = (),
    ) -> None:
        self.warnings: list[str] = []
        self.doubt = ""  # why the last look may have missed a holder
        self._options = options
        self._uid = uid
        self._user = user
        self._clock = clock
        self._read = look
        self._share = 1.0 if timeout is None else min(1.0, timeout / 3.0 / FIRST_LOOK)
        self._limit = Deadline(float("inf") if timeout is None else timeout, clock)
        self._protected = protected
        self._refs: list[ProcessRef] = []
        self._spared: dict[ProcessRef, str] = {}
        self._last = float("-inf")  # when the last reading ended
        self._told = False  # whether that one was made when no known holder lived any more
        self._remark = ""
        self._with_parents: set[ProcessRef] = set()  # whose parents were looked at

    def scan(self, table: Table, _state: UnitState | None, previous: Owned | None) -> Owned:
        self._units = _Units(self._limit.clamp(UNIT_ANSWERS * self._share), self._clock)
        if previous is None:
            self._begin(table)
        else:
            self._go_on(table, previous)
        owned = _ownership.of_pids(table, self._refs, found_by="gpu_holder", spared=self._spared, previous=previous)
        self._name_parents(table, owned)
        return owned

    # The first reading

    def _begin(self, table: Table) -> None:
        end = Deadline(SETTLE * self._share, self._clock)
        suspects: set[int] | None = None  # those that in each reading had no more than the node of a busy device
        while True:
            reading, found = self._look(table, FIRST_LOOK * self._share)
            listed = {one.holder.pid for one in found if one.holder.listed or one.device.memory_used is None}
            alone = {one.holder.pid for one in found} - listed
            suspects = alone if suspects is None else suspects & alone
            certain = not alone and all(one.process is not None for one in found)
            if end.expired or (certain and not any(map(_unexplained, reading.devices))):
                break
            end.sleep(PAUSE)
        self._last = self._clock.monotonic()
        self.warnings.extend(reading.warnings)
        self._check(reading)
        late = {one.device.label: one.device for one in found if one.holder.pid not in listed | suspects}
        found = [one for one in found if one.holder.pid in listed | suspects]
        for one in found:
            if one.process is not None and one.process.name in self._protected:
                self._spared[one.process.ref] = "protected"
        found = [one for one in found if one.process is None or one.process.ref not in self._spared]
        refused = self._refusals(table, found)
        if not refused:
            refused = ["%s: %s" % (d.label, d.detail) for d in reading.devices if _unexplained(d)]
            again = "%s: %s; it may be on its way back to the driver: try again in a while"
            refused += [again % (label, device.detail) for label, device in late.items()]
        if refused:
            raise Refused("nothing was signalled: %s" % "; ".join(refused))
        self._refs = list(dict.fromkeys(one.process.ref for one in found if one.process is not None))
        self._told = not self._refs
        self._spare(table, reading)

    def _check(self, reading: _gpu.Reading) -> None:
        """A device that is not told of completely may have more holders than are seen."""
        if reading.reason:
            raise Refused("nothing was signalled: %s" % reading.message)
        blind = [d for d in reading.devices if d.verdict in ("unknown", "error")]
        if blind:
            said = "; ".join("%s: %s (%s)" % (d.label, d.detail, d.reason) for d in blind)
            raise Refused("nothing was signalled, since it cannot be seen who holds the devices: %s" % said)

    def _spare(self, table: Table, reading: _gpu.Reading) -> None:
        """Show who is allowed, and say who else is left alone."""
        for one in _holders(table, reading.devices):
            if one.process is None or one.process.ref in self._refs or one.process.ref in self._spared:
                continue
            if one.holder.allowed:
                self._spared[one.process.ref] = "allowed"
            else:
                self._warn(
                    "%s has the device node of %s open and is not ended for it: nothing shows that it uses the device"
                    % (one, one.device.label)
                )

    # The later ones

    def _go_on(self, table: Table, previous: Owned) -> None:
        alive = any(_lives(table, ref) for ref in self._refs)
        waited = self._clock.monotonic() - self._last
        if alive and waited < EVERY:
            return
        if not alive and self._told and waited < AFTER:
            return
        end = Deadline(max(LEAST_LOOK, self._limit.clamp(LATER_LOOK * self._share)), self._clock)
        reading, found = self._look(table, end.remaining)
        trouble = self._trouble(reading, found)
        if trouble and not alive and end.remaining >= PAUSE + SHORTEST:
            end.sleep(PAUSE)
            reading, found = self._look(table, end.remaining, least=0.0)
            trouble = self._trouble(reading, found)
        self._last, self._told = self._clock.monotonic(), not alive
        self.doubt = "it is not known who holds the devices now: %s" % trouble if trouble else ""
        self._note(reading)
        known = {*self._refs, *previous.processes}
        for one in found:
            # A node alone proves nothing now, while drivers may still be giving memory back.
            if one.process is None or one.process.ref in known or not one.holder.listed:
                continue
            refused = self._refusals(table, [one])
            if one.process.name in self._protected:
                self._spared[one.process.ref] = "protected"
            elif refused:
                self._spared[one.process.ref] = "foreign"
                self._warn("a new holder is left alone: %s" % refused[0])
            else:
                self._refs.append(one.process.ref)
                self._told = False

    def _trouble(self, reading: _gpu.Reading, found: Sequence[Found]) -> str:
        """What keeps this reading from being a complete list of holders."""
        if reading.verdict in ("unknown", "error"):
            return reading.message
        ended = {ref.pid for ref in self._refs}
        strange = [str(one) for one in found if one.process is None and one.holder.pid not in ended]
        return "%s cannot be told" % ", ".join(strange) if strange else ""

    def _note(self, reading: _gpu.Reading) -> None:
        """Say at the end what a device still shows, once."""
        if self._remark:
            self.warnings.remove(self._remark)
            self._remark = ""
        busy = [d for d in reading.devices if self._told and d.verdict != "clear"]
        if busy:
            self._remark = "not clear yet: %s" % "; ".join("%s: %s" % (d.label, d.detail) for d in busy)
            self.warnings.append(self._remark)

    # What both have in common

    def _look(self, table: Table, limit: float, least: float = LEAST_LOOK) -> tuple[_gpu.Reading, list[Found]]:
        """One reading. A process that came to be during it is known for certain only by another one."""
        end = Deadline(max(least, limit), self._clock)
        for _attempt in range(READINGS):
            try:
                reading = self._read(self._options, end.remaining)
            except UsageError as error:
                raise UsageError(error.message, verdict="error") from error
            found = list(_holders(table, reading.devices, self._options))
            born = [one.holder.pid for one in found if one.process is None and one.holder.identity is not None]
            born = [pid for pid in born if table.get(pid) is None]
            if not born:
                break
            table.add(Table.of(born, table.proc))
            if end.remaining < SHORTEST:
                break
        return reading, found

    def _refusals(self, table: Table, found: Sequence[Found]) -> list[str]:
        """Why these must not be ended, a sentence for each kind of reason."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in found:
            why = self._why_not(table, one)
            if why is not None and str(one) not in reasons.setdefault(why, []):
                reasons[why].append(str(one))
        return [before + ", ".join(names) + after for (before, after), names in reasons.items()]

    def _why_not(self, table: Table, one: Found) -> tuple[str, str] | None:
        """What is said before and after who it is about; None for one that may be ended."""
        process = one.process
        if process is None:
            return "", (
                ": it cannot be told which process here that is, so it may be one of another process table "
                "(a container), or dead and stuck in the driver"
            )
        why = _selection.untouchable(table, process)
        if why:
            return "", ": " + why
        container = _ownership.attribute(process)[1]
        if container is not None:
            return "", ' runs in the container "%s": stop the container instead' % container
        unit = _selection.service_of(process)
        why = self._units.at_work(unit) if unit is not None else ""
        if why:
            return "", " " + why
        if self._uid is not None and process.uid != self._uid:
            return 'not of the user "%s": ' % self._user, ""
        return None

    def _name_parents(self, table: Table, owned: Owned) -> None:
        new = [ref for ref in self._refs if ref not in self._with_parents]
        self._with_parents.update(new)
        own = _processes.own_line(table) if new else set()
        for process in map(table.by_ref, new):
            parent = table.get(process.ppid) if process is not None else None
            if process is None or parent is None or parent.pid <= 1 or parent.pid in own:
                continue
            if parent.ref not in owned.processes and not parent.gone:
                self._warn(
                    'the parent %d "%s" (user %s) of the holder %d "%s" is not ended, and may start it again'
                    % (parent.pid, parent.name, parent.user, process.pid, process.name)
                )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


class _Units:
    """What systemd says at one reading of the units that holders are in, each asked for once."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._end = Deadline(max(LEAST_LOOK, seconds), clock)
        self._known: dict[str, str] = {}

    def at_work(self, unit: str) -> str:
        """Why a holder in this unit's control group is the unit's business, empty where it is left over from it."""
        if unit not in self._known:
            self._known[unit] = self._ask(unit)
        return self._known[unit]

    def _ask(self, unit: str) -> str:
        unknown = 'belongs to the unit "%s", of which nothing more is known: %s'
        if self._end.remaining < LEAST_ANSWER:
            return unknown % (unit, "systemd took too long over others")
        try:
            state = _systemd.show(unit, self._end.remaining)
        except ServingError as error:
            return unknown % (unit, error.message)
        if not state.at_rest:
            doing = "between two lives" if state.between_lives else state.active_state
            return 'belongs to the unit "%s", which is %s and may start it again: stop the unit instead' % (unit, doing)
        service = _service.of_unit(unit)
        lease = _lease.read(service) if service is not None else None
        if lease is None or not lease.fresh:
            return ""
        said = 'is left over from the unit "%s", and the service "%s" is in use by %s'
        return said % (unit, service, lease.describe())


def _holders(table: Table, devices: Sequence[Device], options: _gpu_options.Options | None = None) -> Iterator[Found]:
    """Who holds these devices and their partitions; with options, only those that make one busy."""
    for device in devices:
        for part in (device, *device.partitions):
            for holder in part.holders if options is None else blocking(part, options):
                yield Found(holder, part, _process(table, holder))


def _process(table: Table, holder: Holder) -> Process | None:
    """The very process, which the table showed before the devices were read and the reading showed after."""
    process, who = table.get(holder.pid), holder.identity
    if process is None or who is None or process.gone:
        return None
    slip = abs(process.create_time - who.create_time)
    return process if any(abs(slip - step) < ROUNDING for step in SLIP) else None


def _unexplained(device: Device) -> bool:
    return any(part.reason == "held_by_unresolvable" for part in (device, *device.partitions))


def _lives(table: Table, ref: ProcessRef) -> bool:
    process = table.by_ref(ref)
    return process is not None and not process.gone
