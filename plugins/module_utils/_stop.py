# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stop what a service owns and prove it: freeze the set, front process first, escalate, look until nothing is new."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Callable

from . import _ownership, _processes, _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError
from ._ownership import Owned
from ._processes import Process, ProcessRef, Table
from ._systemd import UnitState

__all__ = ["Member", "Options", "Scan", "Stopper"]

DEFAULT_GRACE = 30.0
UNIT_GRACE = 90.0  # for a unit that sets no limit of its own
REST_GRACE = 15.0
SLACK = 5.0
LOOK = (0.05, 0.1, 0.2, 0.3)

# What belongs to the service, given the table, the unit's state and what the look before had found.
Scan = Callable[[Table, "UnitState | None", "Owned | None"], Owned]


@dataclass
class Options:
    """How to stop."""

    signal: str = "TERM"
    grace: float | None = None
    kill_grace: float = 10.0
    timeout: float | None = None
    order: str = "parent_first"
    protected: tuple[str, ...] = ()
    allow_foreign_users: bool = False
    reset_failed: bool = False


@dataclass
class Member:
    """One owned process and what became of it."""

    process: Process
    found_by: list[str]
    role: str
    standing: str  # ours, foreign, protected
    signals: list[str] = field(default_factory=list)
    outcome: str = "planned"
    signalled_at: float | None = None
    seconds: float | None = None
    denied: bool = False

    @property
    def ref(self) -> ProcessRef:
        return self.process.ref

    def as_result(self) -> dict[str, Any]:
        process = self.process
        return {
            "pid": process.pid,
            "create_time": round(process.create_time, 2),
            "ppid": process.ppid,
            "name": process.name,
            "user": process.user,
            "state": process.state,
            "found_by": self.found_by,
            "role": self.role,
            "signals": self.signals,
            "outcome": self.outcome,
            "seconds": self.seconds,
        }


class Stopper:
    """One stop, from the first look to the verdict."""

    def __init__(
        self,
        what: str,
        scan: Scan,
        options: Options,
        unit: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        tick: Callable[[], None] = lambda: None,
        send: Callable[[ProcessRef, int], str] = _processes.send,
    ) -> None:
        self.what = what
        self.options = options
        self.unit = unit
        self.members: dict[ProcessRef, Member] = {}
        self.living: set[ProcessRef] = set()
        self.zombies: dict[ProcessRef, dict[str, Any]] = {}
        self.state: UnitState | None = None
        self.changed = False
        self.reset = False
        self._scan = scan
        self._clock = clock
        self._tick = tick
        self._send = send
        self._owned: Owned | None = None
        self._restarted = False
        self._deadline = Deadline(SLACK, clock)

    # Looking

    def look(self) -> bool:
        """Take a fresh look at everything; says whether it showed an owned process not known before."""
        self._tick()
        if self.unit is not None:
            self.state = _systemd.show(self.unit, max(2.0, min(10.0, self._deadline.remaining)))
        table = Table.snapshot()
        owned = self._owned = self._scan(table, self.state, self._owned)
        strangers = _ownership.foreign(table, owned, self.options.allow_foreign_users)
        self.living = set()
        fresh = False
        for ref, ways in owned.processes.items():
            process = table.by_ref(ref)
            if process is None:
                continue
            if process.gone:
                self._note_zombie(table, process)
                continue
            self.living.add(ref)
            member = self.members.get(ref)
            if member is None:
                fresh = True
                self.members[ref] = Member(
                    process, ways, self._role(process, owned), self._standing(process, strangers)
                )
            else:
                member.process = process
        now = self._clock.monotonic()
        for member in self.members.values():
            if member.ref not in self.living and member.outcome not in ("ended", "gone"):
                # systemd's own signals are not seen here; a process that ended before any is simply gone.
                member.outcome = "ended" if member.signals else "gone"
                if member.signalled_at is not None:
                    member.seconds = round(now - member.signalled_at, 2)
        return fresh

    def _note_zombie(self, table: Table, process: Process) -> None:
        parent = table.get(process.ppid)
        self.zombies[process.ref] = {
            "pid": process.pid,
            "name": process.name,
            "parent": process.ppid,
            "parent_name": parent.name if parent is not None else "",
        }

    def _role(self, process: Process, owned: Owned) -> str:
        if self.state is not None:
            if process.pid == self.state.main_pid:
                return "main"
            if process.pid == self.state.control_pid:
                return "control"
            return "member" if "cgroup" in owned.processes[process.ref] else "escaped"
        return "root" if process.ref in owned.roots else "member"

    def _standing(self, process: Process, strangers: set[ProcessRef]) -> str:
        if process.name in self.options.protected:
            return "protected"
        return "foreign" if process.ref in strangers else "ours"

    def _ours(self) -> list[Member]:
        return [m for m in self.members.values() if m.ref in self.living and m.standing == "ours"]

    # Limits

    @property
    def grace(self) -> float:
        """For the front process, or for the unit."""
        if self.options.grace is not None:
            return self.options.grace
        if self.state is not None:
            own = self.state.timeout_stop
            return own + 5.0 if 0 < own < float("inf") else UNIT_GRACE
        return DEFAULT_GRACE

    @property
    def rest_grace(self) -> float:
        return self.options.grace if self.options.grace is not None else REST_GRACE

    # The stop

    def refusal(self) -> str:
        """Why this must not even begin, empty when it may."""
        state = self.state
        if state is not None and not state.at_rest and state.kill_mode in ("control-group", "mixed"):
            for member in self.members.values():
                if member.standing == "protected" and "cgroup" in member.found_by:
                    return 'systemd would end the protected process %d "%s" together with the unit "%s"' % (
                        member.process.pid,
                        member.process.name,
                        state.name,
                    )
        return ""

    def run(self, check_mode: bool = False) -> dict[str, Any]:
        """Do it, or say what would be done."""
        began = self._clock.monotonic()
        try:
            self.look()
            total = self.grace + self.rest_grace + self.options.kill_grace + SLACK - 1.0
            self._deadline = Deadline(total if self.options.timeout is None else self.options.timeout, self._clock)
            refusal = self.refusal()
            if refusal:
                return self._result(began, "refused", "nothing was signalled: %s" % refusal)
            if check_mode:
                return self._plan(began)
            self._stop()
        except ServingError as error:
            error.result = dict(
                self._result(began, error.result.get("verdict", "survivors"), error.message), **error.result
            )
            raise
        return self._judge(began)

    def _stop(self) -> None:
        if self.state is not None and not self.state.at_rest:
            self._stop_unit()
        elif self.options.order == "parent_first" and self.unit is None:
            for member in self._ours():
                if member.role == "root":
                    self._signal(member, self.options.signal)
            self._wait(self.grace, lambda: not any(m.role == "root" for m in self._ours()))
        if not self._quiet() and not self._restarted:
            self._signal_all(self.options.signal)
            self._wait(self.rest_grace, lambda: False, self.options.signal)
        for _round in range(3):  # something may fork at the very end
            if self._restarted or self._quiet():
                break
            self._kill()
        if self._restarted:
            return
        if self.options.reset_failed and self.state is not None and self.state.active_state == "failed":
            _systemd.reset_failed(self.state.name)
            self.state = _systemd.show(self.state.name)
            self.changed = self.reset = True

    def _stop_unit(self) -> None:
        """systemd stops its unit, so that Restart= does not race; past its time the owned set is killed under it."""
        assert self.unit is not None and self.state is not None
        self._request_stop()
        requests, end = 1, Deadline(self._before_kill(self.grace), self._clock)
        while not end.expired:
            self.look()
            if self.state.at_rest:
                return
            if self.state.active_state == "active" and not self.state.job and requests < 3:
                self._request_stop()  # somebody's start took the place of our stop
                requests += 1
            elif self._started_again():
                return
            end.sleep(0.2)
        self._kill(lambda: self.state is not None and self.state.at_rest)

    def _request_stop(self) -> None:
        assert self.unit is not None
        self.changed = True
        now = self._clock.monotonic()
        for member in self._ours():
            if self._falls_to_systemd(member) and "systemd" not in member.signals:
                member.signalled_at = now
                member.signals.append("systemd")
        _systemd.request_stop(self.unit)

    def _falls_to_systemd(self, member: Member) -> bool:
        if self.state is None or "cgroup" not in member.found_by:
            return False
        return self.state.kill_mode not in ("process", "none") or member.role in ("main", "control")

    def _kill(self, also: Callable[[], bool] = lambda: True) -> None:
        self._signal_all("KILL")
        self._wait(self._deadline.clamp(self.options.kill_grace), lambda: False, "KILL", also, last=True)

    def _before_kill(self, seconds: float) -> float:
        return max(0.0, min(seconds, self._deadline.remaining - self.options.kill_grace))

    def _quiet(self) -> bool:
        """Whether two looks in a row show nothing of ours."""
        for _look in range(2):
            self.look()
            if self._ours() or self._started_again():
                return False
            self._deadline.sleep(LOOK[0])
        return True

    def _wait(
        self,
        seconds: float,
        enough: Callable[[], bool],
        newcomers: str | None = None,
        also: Callable[[], bool] = lambda: True,
        last: bool = False,
    ) -> None:
        """Look until it is enough, or two looks in a row show nothing of ours, or the time is over."""
        end = Deadline(seconds if last else self._before_kill(seconds), self._clock)
        pauses, quiet = list(LOOK), 0
        while True:
            self.look()
            if self._started_again():
                return
            quiet = quiet + 1 if not self._ours() and also() else 0
            if quiet >= 2 or (quiet == 0 and enough()):
                return
            if newcomers is not None:
                self._signal_all(newcomers)
            self._continue_stopped()
            if end.expired:
                return
            end.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])

    def _started_again(self) -> bool:
        """Whether somebody started the unit after it came to rest: those processes are not what was to be stopped."""
        state = self.state
        if state is not None and state.active_state in ("active", "activating", "reloading") and not state.job:
            self._restarted = True
        return self._restarted

    def _signal_all(self, name: str) -> None:
        for member in self._ours():
            if name not in member.signals:
                self._signal(member, name)

    def _signal(self, member: Member, name: str) -> None:
        answer = self._send(member.ref, getattr(signal, "SIG" + name))
        if answer == "sent":
            self.changed = True
            member.signals.append(name)
            if member.signalled_at is None:
                member.signalled_at = self._clock.monotonic()
            if member.process.state == "T" and name != "KILL":
                self._continue(member)
        elif answer == "denied":
            member.denied = True

    def _continue(self, member: Member) -> None:
        if self._send(member.ref, signal.SIGCONT) == "sent" and "CONT" not in member.signals:
            member.signals.append("CONT")

    def _continue_stopped(self) -> None:
        # A stopped process has the signal pending and cannot act on it.
        for member in self._ours():
            if member.process.state == "T" and member.signals:
                self._continue(member)

    # The answer

    def _plan(self, began: float) -> dict[str, Any]:
        busy = self.state is not None and not self.state.at_rest
        ours = self._ours()
        failed = self.options.reset_failed and self.state is not None and self.state.active_state == "failed"
        self.changed = bool(busy or ours or failed)
        for member in self.members.values():
            if member.standing != "ours":
                member.outcome = member.standing
            elif busy and self._falls_to_systemd(member):
                member.signals = ["systemd"]
            else:
                member.signals = [self.options.signal]
        if not busy and not ours:
            return self._judge(began)
        names = ", ".join('%d "%s"' % (m.process.pid, m.process.name) for m in ours)
        return self._result(began, "stopped", "%s would be stopped: %s" % (self.what, names or "it owns no process"))

    def _judge(self, began: float) -> dict[str, Any]:
        unkillable, survivors = [], []
        for member in self.members.values():
            if member.ref not in self.living:
                continue
            if member.standing == "protected":
                member.outcome = "protected"
                continue
            if member.standing == "foreign":
                member.outcome = "foreign"
            elif member.denied and "KILL" not in member.signals:
                member.outcome = "denied"
            elif "KILL" in member.signals:
                member.outcome = "unkillable"
                unkillable.append(member)
            else:
                member.outcome = "survived"
            survivors.append(member)
        awake = self.state is not None and not self.state.at_rest
        if survivors or awake:
            return self._result(began, "unkillable" if unkillable else "survivors", self._complaint(survivors, awake))
        ended = sum(1 for m in self.members.values() if m.outcome in ("ended", "gone"))
        if ended or (self.changed and not self.reset):
            return self._result(
                began, "stopped", "%s is stopped: %d processes ended, none is left" % (self.what, ended)
            )
        text = "there was nothing to stop: %s owns no process" % self.what
        if self.state is not None and not self.state.found:
            text = (
                "there was nothing to stop: %s does not exist on this host, and no process carries its mark" % self.what
            )
        return self._result(began, "absent", text + (", its failed state was reset" if self.reset else ""))

    def _complaint(self, survivors: list[Member], awake: bool) -> str:
        if self._restarted:
            return "%s was started again by somebody else while it was being stopped" % self.what
        named = ", ".join('%d "%s" (%s)' % (m.process.pid, m.process.name, m.outcome) for m in survivors)
        if not survivors and self.state is not None:
            return "%s did not come to rest: systemd says it is %s" % (self.what, self.state.active_state)
        return "%d of %d processes of %s are left%s: %s" % (
            len(survivors),
            len(self.members),
            self.what,
            ", and the unit is not at rest" if awake else "",
            named,
        )

    def _result(self, began: float, verdict: str, msg: str) -> dict[str, Any]:
        survivors = []
        for member in self.members.values():
            if member.outcome in ("foreign", "denied", "unkillable", "survived"):
                survivors.append(dict(member.as_result(), wchan=_processes.waiting_in(member.ref)))
        return {
            "verdict": verdict,
            "changed": self.changed,
            "msg": msg,
            "processes": [member.as_result() for member in self.members.values()],
            "survivors": survivors,
            "zombies": list(self.zombies.values()),
            "unit_state": self.state.as_result() if self.state is not None else None,
            "elapsed": round(self._clock.monotonic() - began, 2),
        }
