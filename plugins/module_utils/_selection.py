# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From what an operator names (a unit, a pid, a pid file, a pattern) to the processes meant, or to a refusal."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Pattern

from . import _accounts, _bounded, _inside, _ownership, _processes, _service, _systemd
from ._errors import ServingError, UsageError
from ._ownership import Owned
from ._pidfile import MOST_PID, PidFile, pid_in_file
from ._places import HOST_UNITS
from ._processes import Process, ProcessRef, Table, user_name
from ._survey import Scan
from ._systemd import UnitState
from ._words import check_words, user_id

if TYPE_CHECKING:
    from . import _containers

__all__ = [
    "Refused",
    "Selection",
    "by_pattern",
    "by_pid",
    "by_pidfile",
    "by_unit",
    "check_words",
    "mark_of",
    "nothing",
    "select",
    "service_of",
    "untouchable",
    "user_id",
]

MATCHING = 2.0  # seconds that a pattern may take on all processes
LINE_READING = 4.0  # seconds that command lines which cannot be read may cost in all
SSH_SERVER = ("sshd", "sshd-session", "sshd-auth")
CLOCK_SLIP = 1.0  # the boot time, the base of every create time, has whole seconds


class Refused(ServingError):
    """The process named is not one that may be stopped; nothing was signalled."""

    def __init__(self, message: str, **result: object) -> None:
        super().__init__(message, verdict="refused", **result)


@dataclass
class Selection:
    """What an operator meant: its name for messages, and how to find its processes; no way when nothing is there."""

    what: str
    scan: Scan | None
    unit: str | None = None
    warnings: list[str] = field(default_factory=list)
    doubt: Callable[[], str] = lambda: ""  # why the looks may have missed a process, empty when they have not


def select(params: Mapping[str, Any], types: tuple[str, ...] = (".service", ".scope")) -> Selection:
    """The selection that a task's options make, with exactly one of unit, pid, pidfile and pattern.

    ``types`` are the kinds of units that it may be.
    """
    check_words(params)
    create_time, user = params.get("create_time"), params.get("user")
    warnings: list[str] = []
    if params.get("unit"):
        unit = checked_unit(params["unit"], types)
        _systemd.require_floor()
        definition = params.get("definition") or {}
        mark_gid = mark_of(params.get("service"), unit, definition)
        # Loaded where it is asked for: a module compiles what it imports on every run.
        from . import _containers

        # A short limit of the caller's leaves less for the managers of containers.
        limit = params.get("timeout")
        tracker = _containers.Tracker(seconds=_containers.SECONDS if limit is None else min(_containers.SECONDS, limit))
        owned = by_unit(mark_gid, _titles(params.get("engine"), unit, definition), tracker)
        return Selection('the unit "%s"' % unit, owned, unit, warnings=tracker.warnings)
    if params.get("pid") is not None:
        if not 1 <= params["pid"] <= MOST_PID:
            raise UsageError('"pid" must be a process id from 1 to %d, not %s' % (MOST_PID, str(params["pid"])[:20]))
        scan = by_pid(params["pid"], create_time, user, warnings)
        return Selection("the process %d" % params["pid"], scan, warnings=warnings)
    if params.get("pidfile"):
        what = 'the process of the pid file "%s"' % params["pidfile"]
        scan = by_pidfile(params["pidfile"], pid_in_file(params["pidfile"]), create_time, user, warnings)
        return Selection(what, scan, warnings=warnings)
    if params.get("pattern"):
        if user is None:
            raise UsageError('"pattern" needs "user": without it, processes of anybody could be meant')
        what = 'the pattern "%s" of the user "%s"' % (params["pattern"], user)
        return Selection(what, by_pattern(params["pattern"], user))
    raise UsageError('no unit is known for the service "%s": name it in its definition or here' % params.get("service"))


def checked_unit(name: str, types: tuple[str, ...]) -> str:
    """The unit's full name, unless it holds much more than a service."""
    unit = _systemd.unit_name(name)
    if not unit.endswith(types):
        raise UsageError('the unit "%s" is none of a service: its name must end in %s' % (unit, " or ".join(types)))
    if "@." in unit:
        raise UsageError(
            'the unit "%s" is a template: name one of its instances, such as "%s"' % (unit, unit.replace("@.", "@1."))
        )
    if HOST_UNITS.match(unit):
        raise Refused('the unit "%s" holds the sessions of users or this host itself, not a service' % unit)
    return unit


def nothing(selection: Selection) -> dict[str, Any]:
    """The answer when there is no process at all, in the shape of every other answer."""
    return {
        "verdict": "absent",
        "changed": False,
        "msg": "there was nothing to stop: %s does not exist" % selection.what,
        "processes": [],
        "unlisted": 0,
        "survivors": [],
        "suspects": [],
        "zombies": [],
        "plan": [],
        "marks": [],
        "unit_state": None,
        "elapsed": 0.0,
    }


def _keeper(process: Process) -> str:
    """Who may start it again, as a warning; empty when it is in no container and no system service."""
    unit, container = service_of(process), _ownership.attribute(process)[1]
    if container is not None:
        place, remedy = 'the container "%s"' % container, "stop the container"
    elif unit is not None:
        place, remedy = 'the unit "%s"' % unit, "stop the unit"
    else:
        return ""
    return "the process %d belongs to %s, which may start it again: %s instead" % (process.pid, place, remedy)


def mark_of(service: str | None, unit: str | None, definition: Mapping[str, object]) -> int | None:
    """The gid of the ownership mark: from the definition, else from the group that bears the service's name.

    Without a definition the one that names the unit is looked for. When none does, one that cannot be read is an error:
    it may be the one, and without the mark what wandered off would pass as somebody else's.
    """
    if not definition and unit:
        found = _service.match(_systemd.unit_name(unit))
        if found.unreadable is not None:
            raise found.unreadable
        if found.name is not None:
            definition, service = found.definition, found.name
    gid = definition.get("mark_gid")
    if gid is None and service:
        gid = _accounts.group_number(_service.mark_group(service))
    return _ownership.check_mark(int(str(gid))) if gid is not None else None


def by_unit(
    mark_gid: int | None, titles: Pattern[str] | None = None, tracker: _containers.Tracker | None = None
) -> Scan:
    """What the unit owns. ``tracker`` finds the containers that it is the client of."""

    def scan(table: Table, state: UnitState | None, previous: Owned | None) -> Owned:
        assert state is not None
        known = dict(previous.containers) if previous is not None else {}
        while True:
            owned = _ownership.of_unit(
                table, state, mark_gid=mark_gid, titles=titles, containers=known, previous=previous
            )
            found = tracker.containers(table, state, owned) if tracker is not None else known
            if set(found) <= set(known):
                return owned
            known = {**known, **found}

    return scan


def _titles(engine: str | None, unit: str, definition: Mapping[str, Any] = {}) -> Pattern[str] | None:
    """How the engine names its processes; without a word about it, that of the service that names the unit."""
    from . import _engines

    if not engine:
        definition = _service.match(unit).definition
        engine = definition.get("engine")
        engine = engine if engine in _engines.PROFILES else None
    profile = definition.get("profile")
    return _engines.titles(engine, profile) if engine or profile else None


def by_pid(pid: int, create_time: float | None, user: str | None, warnings: list[str] | None = None) -> Scan | None:
    """What one process owns; None when there is no such process any more. ``warnings`` gets what may undo its end."""
    table = Table.snapshot()
    process = table.get(pid)
    if process is None or process.gone:
        _refuse_thread(pid)
        return None
    return _of_process(table, process, create_time, user, warnings)


def _refuse_thread(number: int) -> None:
    """Threads bear numbers too: /proc answers for them, but does not list them."""
    try:
        with open("/proc/%d/status" % number, "rb") as stream:
            leader = re.search(rb"^Tgid:\s*(\d+)", stream.read(), re.MULTILINE)
    except OSError:
        return
    if leader and int(leader.group(1)) != number:
        raise UsageError("the number %d is a thread of the process %s: name that" % (number, leader.group(1).decode()))


def _of_process(
    table: Table, process: Process, create_time: float | None, user: str | None, warnings: list[str] | None
) -> Scan:
    """What this very process owns, and never one that gets its number after it was checked."""
    why = untouchable(table, process)
    if why:
        raise Refused(why)
    if user is not None and process.uid != user_id(user):
        raise Refused(
            'the process %d "%s" belongs to the user "%s", not to "%s"'
            % (process.pid, process.name, process.user, user)
        )
    if create_time is not None and abs(process.create_time - create_time) > CLOCK_SLIP:
        raise Refused(
            'the process %d is "%s" now: it was created at %.2f, not at %.2f'
            % (process.pid, process.name, process.create_time, create_time)
        )
    warning = _keeper(process)
    if warning and warnings is not None:
        warnings.append(warning)

    def scan(now: Table, _state: UnitState | None, previous: Owned | None) -> Owned:
        return _ownership.of_pids(now, [process.ref], previous=previous)

    return scan


def by_pidfile(
    path: str,
    found: PidFile | None,
    create_time: float | None,
    user: str | None,
    warnings: list[str] | None = None,
) -> Scan | None:
    """What the process in a pid file owns.

    It must be older than the file, else the number was given anew, and the file must be root's or its own user's, else
    somebody names a process that is none of his.
    """
    table = Table.snapshot()
    process = table.get(found.pid) if found is not None else None
    if found is None or process is None or process.gone:
        return None
    if found.open_to_others or found.owner not in (0, process.uid):
        why = (
            "can be written by others" if found.open_to_others else 'belongs to the user "%s"' % user_name(found.owner)
        )
        raise Refused(
            'the pid file "%s" %s, so its word is not taken for the process %d "%s" of the user "%s"'
            % (path, why, found.pid, process.name, process.user)
        )
    if process.create_time > found.written + CLOCK_SLIP:
        raise Refused(
            'the process %d in "%s" is another one now: "%s" was created %.0f s after the file was written'
            % (found.pid, path, process.name, process.create_time - found.written)
        )
    return _of_process(table, process, create_time, user, warnings)


def by_pattern(pattern: str, user: str) -> Scan:
    """What the processes of a user own whose name or command line the pattern is found in.

    A match in a service's unit is refused at the first look, and no match at the later ones: its unit is what to name.
    Whoever comes to fit during the stop, by a name or program that it takes on, is stopped too.
    """
    _check_pattern(pattern)
    uid = user_id(user)
    chosen: set[ProcessRef] = set()
    lines: dict[ProcessRef, _Line] = {}
    tried: dict[str, bool] = {}  # the texts that processes bear now, and whether the pattern is found in them
    left = LINE_READING

    def scan(table: Table, _state: UnitState | None, previous: Owned | None) -> Owned:
        nonlocal lines, tried, left
        spared = _processes.own_line(table)
        candidates = [
            p
            for p in table
            if p.uid == uid and p.pid > 1 and p.pid not in spared and not p.kernel_thread and not p.gone
        ]
        waiting = [p for p in candidates if p.ref not in chosen]
        unread = [p for p in waiting if p.ref not in lines or not lines[p.ref].stands_for(p)]
        began = time.monotonic()
        read = _inside.command_lines([p.ref for p in unread], max(0.1, min(2.0, left))) if unread else {}
        if len(read) < len(unread):  # one that hangs must not make every look of a long stop slow
            left -= time.monotonic() - began
        fresh = {p.ref: _Line(p.name, p.settled, read[p.ref]) for p in unread if p.ref in read}
        lines = {p.ref: fresh.get(p.ref) or lines[p.ref] for p in waiting if p.ref in fresh or p.ref in lines}
        borne = {text for p in waiting for text in (p.name, lines[p.ref].text if p.ref in lines else "")}
        tried = {text: fits for text, fits in tried.items() if text in borne}
        tried.update(_search(pattern, sorted(borne - set(tried)), previous is None))
        for process in waiting:
            if not tried[process.name] and not (process.ref in lines and tried[lines[process.ref].text]):
                continue
            unit = service_of(process)
            if unit is not None and previous is None:
                raise Refused(
                    'nothing was signalled: the pattern "%s" fits the process %d "%s" of the unit "%s": '
                    "name the unit instead, or give a narrower pattern" % (pattern, process.pid, process.name, unit)
                )
            why = untouchable(table, process) if unit is None else ""
            if why and previous is None:
                raise Refused('nothing was signalled: the pattern "%s" is too wide: %s' % (pattern, why))
            if unit is None and not why:
                chosen.add(process.ref)
        return _ownership.of_pids(table, [p.ref for p in candidates if p.ref in chosen], previous=previous)

    return scan


def _check_pattern(pattern: str) -> None:
    """A UsageError for what is no pattern or fits everybody; in a child, as some take longer than anybody lives."""

    def check(_report: _bounded.Report) -> list[Any]:
        try:
            return ["", re.compile(pattern).search("") is not None]
        except (re.error, RecursionError, OverflowError) as error:
            return [str(error) or type(error).__name__, False]

    outcome = _bounded.run(check, MATCHING)
    if not outcome.ok:
        raise Refused('the pattern "%s" cannot be looked for: %s' % (pattern, outcome.error))
    wrong, fits = outcome.value
    if wrong:
        raise UsageError('the pattern "%s" is not a regular expression: %s' % (pattern, wrong))
    if fits:
        raise UsageError('the pattern "%s" fits every process: it is found in an empty text' % pattern)


class _Line(NamedTuple):
    """A command line as it was when the process bore this name."""

    name: str
    settled: bool
    text: str

    def stands_for(self, process: Process) -> bool:
        """Whether it needs no other reading: who is young may be about to become another program."""
        return self.settled and self.name == process.name


def service_of(process: Process) -> str | None:
    """The service unit that the process is in, or the user manager that it is; no unit of a user counts."""
    unit = _ownership.attribute(process)[0]
    if unit is None or not (unit.endswith(".service") or unit == "init.scope"):
        return None
    managed = unit.startswith("user@") and not process.cgroup.endswith("/init.scope")
    return None if managed else unit


def _search(pattern: str, texts: list[str], first: bool) -> dict[str, bool]:
    """In which texts the pattern is found; in a child, since some patterns take longer than anybody lives."""
    if not texts:
        return {}

    def search(_report: _bounded.Report) -> list[bool]:
        expression = re.compile(pattern)
        return [expression.search(text) is not None for text in texts]

    outcome = _bounded.run(search, MATCHING)
    if outcome.ok:
        return dict(zip(texts, map(bool, outcome.value)))
    kind = Refused if first else ServingError
    raise kind('the pattern "%s" cannot be looked for: %s' % (pattern, outcome.error))


def untouchable(table: Table, process: Process) -> str:
    """Why this process is not one to be stopped, whoever names it; empty when it may be one."""
    called = 'the process %d "%s"' % (process.pid, process.name)
    if process.pid == 1:
        return "the process 1 is the init process of this host"
    if process.kernel_thread:
        return called + " is a kernel thread"
    if process.pid in _processes.own_line(table):
        return called + " is one that this task runs in"
    unit = service_of(process)
    if unit is not None and HOST_UNITS.match(unit):
        return '%s belongs to the unit "%s", which this host or the sessions of its users need' % (called, unit)
    if process.name in SSH_SERVER:
        return called + " is the SSH server or one of its connections"
    return ""
