# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""systemd as the only owner of units: their state and their jobs, each call bounded."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

from . import _files
from ._errors import ServingError, UsageError

__all__ = [
    "FLOOR",
    "SLACK",
    "Moment",
    "NoAnswer",
    "UnitState",
    "call",
    "job_type",
    "number",
    "parse_show",
    "parse_span",
    "present",
    "request_stop",
    "require_floor",
    "reset_failed",
    "said",
    "show",
    "start",
    "thaw",
    "unit_name",
    "version",
]

FLOOR = 247
SLACK = 1.0  # seconds that two stamps of one moment may differ by: of clock ticks, or of a boot time in whole seconds
LOOKING = 1.0  # seconds for the files of a unit that may be on another host
RETRY = 0.2
DIGITS = 20  # of the greatest number of 64 bits
LONG_WORD = 60  # characters of one that a message does not show
# What systemctl says while systemd executes itself anew, as an upgrade makes it: no answer about any unit.
BROKEN = (
    "Message recipient disconnected from message bus",
    "Transport endpoint is not connected",
    "Connection refused",
    "Connection reset by peer",
)
PROPERTIES = (
    "Id,LoadState,LoadError,ActiveState,SubState,Result,MainPID,ControlPID,ExecMainPID,ControlGroup,NRestarts,"
    "InvocationID,Job,NeedDaemonReload,ExecMainExitTimestampMonotonic,ExecMainCode,ExecMainStatus,KillMode,"
    "TimeoutStopUSec,CanStop,Restart,UnitFileState,ConditionResult,AssertResult,ConditionTimestampMonotonic,RequiredBy,BoundBy,ConsistsOf,TriggeredBy,SupplementaryGroups,"
    "FragmentPath,DropInPaths,EnvironmentFiles,ExecMainStartTimestampMonotonic,User,IPAccounting,IPIngressBytes"
)
UNIT_TYPES = (
    ".service",
    ".socket",
    ".scope",
    ".slice",
    ".target",
    ".timer",
    ".mount",
    ".path",
    ".swap",
    ".device",
    ".automount",
)
SPAN_UNITS = {
    "y": 31557600.0,
    "month": 2629800.0,
    "w": 604800.0,
    "d": 86400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
}


class NoAnswer(ServingError):
    """A command did not answer within the time given."""


class Moment(NamedTuple):
    """When something was, in seconds since boot as the create times of processes count them.

    That clock goes on while the host sleeps, and the one that systemd stamps with stands still. Whether the host slept
    before or after a stamp is not known, so on a host that slept there is an earliest and a latest moment.
    """

    earliest: float
    latest: float


@dataclass
class UnitState:
    """What systemd says of a unit at one moment."""

    name: str
    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    result: str = "success"
    main_pid: int = 0
    control_pid: int = 0
    control_group: str = ""
    n_restarts: int = 0
    invocation_id: str = ""
    job: int = 0
    need_reload: bool = False
    exec_main_code: int = 0
    exec_main_status: int = 0
    kill_mode: str = ""
    timeout_stop: float = float("inf")
    restart: str = "no"
    unit_file_state: str = ""
    awaited: str = ""  # the socket unit that starts it with the first connection, where that was looked for
    raw: dict[str, str] = field(default_factory=dict)

    @property
    def found(self) -> bool:
        """Whether there is a unit to act on; one that runs on after its file was removed is."""
        return self.load_state not in ("not-found", "") or not self.at_rest

    @property
    def at_rest(self) -> bool:
        return self.active_state in ("inactive", "failed") and not self.job and not self.between_lives

    @property
    def between_lives(self) -> bool:
        """Whether its last life is over and systemd will begin the next by itself. systemd calls that activating."""
        return "auto-restart" in self.sub_state

    @property
    def refuses_stop(self) -> bool:
        """Whether systemd stops it only together with what needs it (RefuseManualStop=)."""
        return self.raw.get("CanStop") == "no"

    @property
    def awake(self) -> bool:
        """Whether it runs, or is on its way there or from one life to the next."""
        return self.active_state in ("active", "activating", "reloading", "refreshing")

    @property
    def runs(self) -> bool:
        """Whether it runs, or has begun to."""
        return self.awake and not self.between_lives

    @property
    def stops_with(self) -> list[str]:
        """Units that systemd stops together with this one; a start of this one does not start them again."""
        names = " ".join(self.raw.get(kind, "") for kind in ("RequiredBy", "BoundBy", "ConsistsOf")).split()
        return sorted(name for name in set(names) if not name.endswith(".target"))

    @property
    def triggered_by(self) -> list[str]:
        """Sockets, timers and paths that start it."""
        return sorted(self.raw.get("TriggeredBy", "").split())

    @property
    def load_error(self) -> str:
        """Why systemd cannot load it, as systemd says; empty where it can."""
        text = self.raw.get("LoadError", "").strip()
        quoted = re.match(r'[\w.]+ "(.+)"\Z', text)
        return (quoted.group(1) if quoted else text).rstrip(".")

    @property
    def condition_failed(self) -> bool:
        """Whether its last start was skipped. A unit whose conditions were never looked at calls them unmet too."""
        looked = number(self.raw.get("ConditionTimestampMonotonic", ""))
        return bool(looked) and "no" in (self.raw.get("ConditionResult"), self.raw.get("AssertResult"))

    @property
    def began(self) -> Moment | None:
        """When the main process was started last, None where systemd knows of no start."""
        return _moment(number(self.raw.get("ExecMainStartTimestampMonotonic", "")))

    @property
    def main_since(self) -> float | None:
        """When the main process was started last, by the monotonic clock; None where systemd knows of no start."""
        return number(self.raw.get("ExecMainStartTimestampMonotonic", "")) / 1e6 or None

    @property
    def tells_of_life(self) -> bool:
        """Whether :attr:`began` is of the life that the unit has, or of its last one when it is over."""
        return bool(self.main_pid) or self.between_lives or self.at_rest

    @property
    def ended(self) -> Moment | None:
        """When the main process ended, None while it lives."""
        began, ended = (number(self.raw.get("ExecMain%sTimestampMonotonic" % word, "")) for word in ("Start", "Exit"))
        return _moment(ended) if ended >= began else None

    def in_last_life(self, moment: float, lag: float = 0.0) -> bool:
        """Whether a moment, in seconds since boot, surely was while the main process lived, or ``lag`` after it."""
        began, ended = self.began, self.ended
        if began is None or moment < began.latest - SLACK:
            return False
        return ended is None or moment <= ended.earliest + SLACK + lag

    @property
    def changed_since_start(self) -> bool:
        """Whether a file that the unit is made of was written after its main process was started.

        A file that cannot be looked at in time counts as one that was not.
        """
        started = number(self.raw.get("ExecMainStartTimestampMonotonic", ""))
        if not started:
            return False
        age = time.monotonic() - started / 1e6
        names = " ".join(self.raw.get(kind, "") for kind in ("FragmentPath", "DropInPaths", "EnvironmentFiles"))
        paths = [word for word in names.split() if word.startswith("/")]
        since = time.time() - age
        return any(at > since for at in _files.written(paths, LOOKING, "files-of-" + self.name))

    def as_result(self) -> dict[str, Any]:
        """The part of it that modules return."""
        return {
            "name": self.name,
            "load_state": self.load_state,
            "active_state": self.active_state,
            "sub_state": self.sub_state,
            "result": self.result,
            "main_pid": self.main_pid,
            "n_restarts": self.n_restarts,
            "invocation_id": self.invocation_id,
            "control_group": self.control_group,
            "kill_mode": self.kill_mode,
            "restart": self.restart,
            "unit_file_state": self.unit_file_state,
            "stops_with": self.stops_with,
            "triggered_by": self.triggered_by,
            "changed_since_start": self.changed_since_start,
            "need_reload": self.need_reload,
        }


def _suspended() -> float:
    """Seconds that the host has slept since it was started."""
    monotonic = time.monotonic()
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - monotonic)


def _moment(stamp: int) -> Moment | None:
    return Moment(stamp / 1e6, stamp / 1e6 + _suspended()) if stamp > 0 else None


def unit_name(name: str) -> str:
    """The full name of a unit; a bare word is a service."""
    if not re.match(r"[A-Za-z0-9:_.\\@-]+\Z", name):
        raise UsageError('the unit name "%s" is not usable: it is not a systemd unit name' % name)
    return name if name.endswith(UNIT_TYPES) else name + ".service"


def present() -> bool:
    """Whether systemd manages this host."""
    return os.path.isdir("/run/systemd/system")


def call(arguments: list[str], timeout: float) -> tuple[int, str, str]:
    environment = dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER="", SYSTEMD_URLIFY="0")
    # sudo and some shells drop the sbin and bin folders that the tools live in.
    environment["PATH"] = environment.get("PATH", "") + ":/usr/bin:/bin:/usr/sbin:/sbin"
    try:
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
    except OSError as error:
        raise ServingError('the command "%s" cannot run: %s' % (arguments[0], error.strerror)) from error
    try:
        out, err = child.communicate(timeout=max(0.1, timeout))
    except subprocess.TimeoutExpired:
        child.kill()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # never wait for a client that cannot die
            child.wait(1.0)
        raise NoAnswer('the command "%s" did not answer within %g s' % (_named(arguments), timeout)) from None
    return child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace").strip()


def _named(arguments: list[str]) -> str:
    """A command as a message names it, without lists that nobody reads."""
    return " ".join(w if len(w) <= LONG_WORD or "=" not in w else w.partition("=")[0] + "=..." for w in arguments)


def said(rc: int, err: str) -> str:
    return " ".join(err.split()).rstrip(".") or "status %d" % rc


def _systemctl(arguments: list[str], timeout: float) -> tuple[int, str, str]:
    if not present():
        raise ServingError("systemd does not manage this host: /run/systemd/system does not exist")
    end, left = time.monotonic() + timeout, timeout
    while True:
        rc, out, err = call(["systemctl", "--no-pager", "--no-ask-password"] + arguments, left)
        if rc == 0 or not any(text in err for text in BROKEN):
            return rc, out, err
        left = end - time.monotonic() - RETRY
        if left <= 0:
            raise NoAnswer("systemd could not be reached for %g s: %s" % (timeout, said(rc, err)))
        time.sleep(RETRY)


def version() -> int:
    """The generation of systemd on this host."""
    _rc, out, _err = call(["systemctl", "--version"], 10.0)
    match = re.match(r"systemd (\d+)", out)
    if match is None:
        raise ServingError('the version of systemd cannot be read: it says "%s"' % out[:80].strip())
    return int(match.group(1))


def require_floor(floor: int = FLOOR) -> None:
    """Refuse a systemd whose answers were never tried."""
    found = version()
    if found < floor:
        raise ServingError("systemd %d is too old: %d or newer is required" % (found, floor))


def parse_span(text: str) -> float:
    """Seconds of a systemd time span such as ``1min 30s``."""
    text = text.strip()
    if text == "infinity" or text == "":
        return float("inf")
    if text.isdigit():
        return int(text) / 1e6
    total = 0.0
    for number, unit in re.findall(r"([0-9.]+)\s*([a-z]+)", text):
        total += float(number) * SPAN_UNITS.get(unit, 0.0)
    return total


def number(text: Union[str, bytes]) -> int:
    """A number of at most 64 bits, as systemd and the journal write it; 0 for whatever else."""
    return int(text) if len(text) <= DIGITS and text.isascii() and text.isdigit() else 0


def parse_show(unit: str, text: str) -> UnitState:
    """The state that ``systemctl show`` printed."""
    raw = {}
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            raw[key] = value
    get = raw.get
    return UnitState(
        name=get("Id") or unit,
        load_state=get("LoadState", "not-found"),
        active_state=get("ActiveState", "inactive"),
        sub_state=get("SubState", "dead"),
        result=get("Result", ""),
        main_pid=number(get("MainPID", "")),
        control_pid=number(get("ControlPID", "")),
        control_group=get("ControlGroup", ""),
        n_restarts=number(get("NRestarts", "")),
        invocation_id=get("InvocationID", ""),
        job=number(get("Job", "")),
        need_reload=get("NeedDaemonReload") == "yes",
        exec_main_code=number(get("ExecMainCode", "")),
        exec_main_status=number(get("ExecMainStatus", "")),
        kill_mode=get("KillMode", ""),
        timeout_stop=parse_span(get("TimeoutStopUSec", "")),
        restart=get("Restart", "no"),
        unit_file_state=get("UnitFileState", ""),
        raw=raw,
    )


def show(unit: str, timeout: float = 10.0) -> UnitState:
    """The state of a unit. A unit that does not exist is a state too."""
    unit = unit_name(unit)
    rc, out, err = _systemctl(["show", "--property=" + PROPERTIES, "--", unit], timeout)
    if rc != 0:
        raise ServingError('the state of the unit "%s" cannot be read: %s' % (unit, said(rc, err)))
    return parse_show(unit, out)


def start(unit: str, timeout: float = 10.0) -> None:
    """Queue the start and return: a start with gates takes as long as the model loads."""
    unit = unit_name(unit)
    rc, _out, err = _systemctl(["start", "--no-block", "--", unit], timeout)
    if rc != 0:
        raise ServingError('the unit "%s" was not started: %s' % (unit, said(rc, err)))


def request_stop(unit: str, timeout: float = 10.0) -> None:
    """Queue the stop and return, for callers that have to watch while it works."""
    unit = unit_name(unit)
    rc, _out, err = _systemctl(["stop", "--no-block", "--", unit], timeout)
    if rc != 0 and "not loaded" not in err:
        raise ServingError('the unit "%s" was not stopped: %s' % (unit, said(rc, err)))


def thaw(unit: str, timeout: float = 10.0) -> None:
    """Let a frozen unit run. On systemd 257 a unit that ``systemctl freeze`` has frozen refuses to be stopped."""
    # An old systemd, or a unit that it did not freeze itself, is no reason not to go on.
    _systemctl(["thaw", "--", unit_name(unit)], timeout)


def job_type(unit: str, timeout: float = 10.0) -> str:
    """What the job that waits or runs for the unit is: start, stop, restart; empty without one."""
    unit = unit_name(unit)
    rc, out, err = _systemctl(["list-jobs", "--no-legend", "--plain", "--", unit], timeout)
    if rc != 0:
        raise ServingError('the jobs of the unit "%s" cannot be read: %s' % (unit, said(rc, err)))
    for words in map(str.split, out.split("\n")):
        if len(words) >= 3 and words[1] == unit:
            return words[2]
    return ""


def reset_failed(unit: str, timeout: float = 10.0) -> None:
    """Forget the failure and the start counter, so that a start limit no longer refuses."""
    unit = unit_name(unit)
    rc, _out, err = _systemctl(["reset-failed", "--", unit], timeout)
    if rc != 0 and "not loaded" not in err and "not found" not in err:
        raise ServingError('the failed state of the unit "%s" was not reset: %s' % (unit, said(rc, err)))
