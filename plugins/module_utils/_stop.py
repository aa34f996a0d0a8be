# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stop what a service owns and prove it: freeze the set, front process first, escalate, look until nothing is new."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Callable

from . import _limits, _processes, _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError
from ._processes import ProcessRef
from ._survey import Member, Scan, Survey
from ._systemd import UnitState

__all__ = ["Options", "Stopper"]

DEFAULT_GRACE = 30.0
UNIT_GRACE = 90.0  # for a unit that sets no limit of its own
REST_GRACE = 15.0
SLACK = 5.0  # on top of the waits, for the looks between them and for systemd's answers
LAST_ANSWER = 1.0  # what systemd has for an answer even when the time is over, since a stop ends with a look
LOOK = (0.05, 0.1, 0.2, 0.3)


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

    def __post_init__(self) -> None:
        _limits.at_least(0, grace=self.grace, kill_grace=self.kill_grace, timeout=self.timeout)


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
        self.survey = Survey(scan, unit, options.protected, options.allow_foreign_users, clock)
        self.changed = False
        self.reset = False
        self._clock = clock
        self._tick = tick
        self._send = send
        self._restarted = False
        self._deadline = Deadline(SLACK if options.timeout is None else options.timeout, clock)

    @property
    def state(self) -> UnitState | None:
        return self.survey.state

    def look(self) -> None:
        self._tick()
        self.survey.look(self._patience)

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

    @property
    def _total(self) -> float:
        return self.grace + self.rest_grace + self.options.kill_grace + SLACK

    @property
    def _patience(self) -> float:
        """What systemd has for one answer."""
        return max(LAST_ANSWER, min(10.0, self._deadline.remaining))

    # The stop

    def refusal(self) -> str:
        """Why this must not even begin, empty when it may."""
        state, own = self.state, self.survey.own
        if state is not None and own is not None:
            return 'this task itself runs below the process %d "%s" of the unit "%s"' % (own.pid, own.name, state.name)
        if state is not None and not state.at_rest and state.kill_mode in ("control-group", "mixed"):
            for member in self.survey.members.values():
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
            if self.options.timeout is None:
                self._deadline = Deadline(self._total - self._deadline.elapsed, self._clock)
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
            for member in self.survey.ours():
                if member.role == "root":
                    self._signal(member, self.options.signal)
            waiting = self._before_kill(self.grace, keep=self.rest_grace)
            self._wait(waiting, lambda: not any(m.role == "root" for m in self.survey.ours()))
        if not self._quiet() and not self._restarted:
            self._signal_all(self.options.signal)
            self._wait(self.rest_grace, lambda: False, self.options.signal)
        for attempt in range(3):  # something may fork at the very end
            if self._restarted or self._quiet() or (attempt and self._deadline.expired):
                break
            self._kill()
        if self._restarted:
            return
        if self.options.reset_failed and self.state is not None and self.state.active_state == "failed":
            _systemd.reset_failed(self.state.name, self._patience)
            self.changed = self.reset = True
            self.look()

    def _stop_unit(self) -> None:
        """systemd stops its unit, so that Restart= does not race; past its time the owned set is killed under it."""
        assert self.unit is not None and self.state is not None
        self._request_stop()
        requests, end = 1, Deadline(self._before_kill(self.grace), self._clock)
        while not end.expired:
            self.look()
            if self.state.at_rest:
                return
            if self.state.awake and not self.state.job and requests < 3:
                self._request_stop()  # somebody's start took the place of our stop, or ended it between two lives
                requests += 1
            elif self._started_again():
                return
            end.sleep(0.2)
        self._kill(lambda: self.state is not None and self.state.at_rest)

    def _request_stop(self) -> None:
        assert self.unit is not None
        self.changed = True
        now = self._clock.monotonic()
        for member in self.survey.ours():
            if self.survey.falls_to_systemd(member) and "systemd" not in member.signals:
                member.signalled_at = now
                member.signals.append("systemd")
        _systemd.request_stop(self.unit, self._patience)

    def _kill(self, also: Callable[[], bool] = lambda: True) -> None:
        self._signal_all("KILL")
        self._wait(self._deadline.clamp(self.options.kill_grace), lambda: False, "KILL", also, last=True)

    def _share(self, wanted: float) -> float:
        """What is kept free of a wait for the next one: of a limit that is too short for all, at most a third."""
        return wanted if self.options.timeout is None else min(wanted, self.options.timeout / 3.0)

    def _before_kill(self, seconds: float, keep: float = 0.0) -> float:
        left = self._deadline.remaining - self._share(self.options.kill_grace) - self._share(keep)
        return max(0.0, min(seconds, left))

    def _quiet(self) -> bool:
        """Whether two looks in a row show nothing of ours."""
        for _look in range(2):
            self.look()
            if self.survey.ours() or self._started_again():
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
            quiet = quiet + 1 if not self.survey.ours() and also() else 0
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
        if state is not None and state.awake and not state.job:
            self._restarted = True
        return self._restarted

    def _signal_all(self, name: str) -> None:
        for member in self.survey.ours():
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
        for member in self.survey.ours():
            if member.process.state == "T" and member.signals:
                self._continue(member)

    # The answer

    def _plan(self, began: float) -> dict[str, Any]:
        busy = self.state is not None and not self.state.at_rest
        ours = self.survey.ours()
        failed = self.options.reset_failed and self.state is not None and self.state.active_state == "failed"
        self.changed = bool(busy or ours or failed)
        for member in self.survey.members.values():
            if member.standing != "ours":
                member.outcome = member.standing
            elif busy and self.survey.falls_to_systemd(member):
                member.signals = ["systemd"]
            else:
                member.signals = [self.options.signal]
        if not busy and not ours:
            return self._judge(began)
        names = ", ".join('%d "%s"' % (m.process.pid, m.process.name) for m in ours)
        return self._result(began, "stopped", "%s would be stopped: %s" % (self.what, names or "it owns no process"))

    def _judge(self, began: float) -> dict[str, Any]:
        unkillable, survivors = [], []
        for member in self.survey.members.values():
            if member.ref not in self.survey.living:
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
        ended = sum(1 for m in self.survey.members.values() if m.outcome in ("ended", "gone"))
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
            len(self.survey.members),
            self.what,
            ", and the unit is not at rest" if awake else "",
            named,
        )

    def _result(self, began: float, verdict: str, msg: str) -> dict[str, Any]:
        survivors = []
        for member in self.survey.members.values():
            if member.outcome in ("foreign", "denied", "unkillable", "survived"):
                survivors.append(dict(member.as_result(), wchan=_processes.waiting_in(member.ref)))
        return {
            "verdict": verdict,
            "changed": self.changed,
            "msg": msg,
            "processes": [member.as_result() for member in self.survey.members.values()],
            "survivors": survivors,
            "zombies": list(self.survey.zombies.values()),
            "unit_state": self.state.as_result() if self.state is not None else None,
            "elapsed": round(self._clock.monotonic() - began, 2),
        }
