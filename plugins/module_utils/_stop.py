# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stop what a service owns and prove it: freeze the set, front process first, escalate, look until nothing is new."""

from __future__ import annotations

import signal
from typing import Any, Callable

from . import _processes, _refusal, _stop_answer, _systemd
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError
from ._groups import Group
from ._managers import Managers
from ._processes import ProcessRef
from ._stop_options import Options
from ._survey import Member, Scan, Survey
from ._systemd import UnitState

__all__ = ["Options", "Stopper"]

SLACK = 5.0  # on top of the waits, for the looks between them and for systemd's answers
LAST_ANSWER = 1.0  # what systemd has for an answer even when the time is over, since a stop ends with a look
POLL = 0.03  # between two glances at the processes that are known
FIRST_PAUSE, LAST_PAUSE = 0.1, 10.0  # between two looks for processes that are not
# So many times what a look costs is waited before the next: at first or when somebody has ended, and in the long run.
SOON, SHARE = 20.0, 100.0
FIRST_NAP, LAST_NAP = 0.01, 1.0  # before systemd is asked whether all is over, doubled each time
STILL_ROUNDS = 20  # looks in which processes that fork all the time are stopped before they are killed


def _anybody(_member: Member) -> bool:
    return True


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
        alive: Callable[[ProcessRef], bool] = _processes.alive,
    ) -> None:
        self.what = what
        self.options = options
        self.unit = unit
        self.survey = Survey(scan, unit, options.protected, options.allow_foreign_users, clock)
        self.managers = Managers(self.survey, clock)
        self.changed = False
        self.reset = False
        self.restarted = False
        self.plan: list[dict[str, Any]] = []
        self._clock = clock
        self._tick = tick
        self._send = send
        self._alive = alive
        self._told: UnitState | None = None  # the unit's state when it was read right before the next look
        self._calm = 0  # looks in a row that showed nothing of ours
        self._life: str | None = None  # of the unit, by its invocation id, that is being stopped
        self._deadline = Deadline(SLACK if options.timeout is None else options.timeout, clock)
        self._began = clock.monotonic()

    @property
    def state(self) -> UnitState | None:
        return self.survey.state

    @property
    def elapsed(self) -> float:
        return self._clock.monotonic() - self._began

    def look(self, second: bool = False) -> None:
        """Look at everything. The second look of a proof follows the first at once: systemd has just been asked."""
        self._tick()
        self.survey.look(self._patience, self.state if second and self._at_rest else self._told)
        self._told = None
        self._calm = 0 if self.survey.ours() else self._calm + 1

    @property
    def _at_rest(self) -> bool:
        return self.state is None or self.state.at_rest

    # Limits

    @property
    def grace(self) -> float:
        """For the front process, or for the unit."""
        return self.options.front_grace(self.state)

    @property
    def rest_grace(self) -> float:
        return self.options.later_grace(self.state)

    @property
    def _total(self) -> float:
        return self.grace + self.rest_grace + self.options.kill_grace + SLACK

    @property
    def _patience(self) -> float:
        """What systemd has for one answer."""
        return max(LAST_ANSWER, min(10.0, self._deadline.remaining))

    # The stop

    def run(self, check_mode: bool = False) -> dict[str, Any]:
        """Do it, or say what would be done."""
        self._began = self._clock.monotonic()
        try:
            self.look()
            if self.options.timeout is None:
                self._deadline = Deadline(self._total - self._deadline.elapsed, self._clock)
            _stop_answer.describe(self)
            self.plan = _stop_answer.plan(self)
            refusal = _refusal.why(self.survey)
            if refusal:
                return _stop_answer.result(self, "refused", "nothing was signalled: %s" % refusal)
            if check_mode:
                return _stop_answer.forecast(self)
            self._stop()
        except ServingError as error:
            verdict = "survivors" if self.survey.looks else "error"
            _stop_answer.settle(self)
            if self.changed and error.result.get("verdict") == "refused":
                # Such as a lease that somebody took: it was not refused from the beginning.
                error.message += "; the stop was broken off in the middle"
                error.result["verdict"] = verdict
            found = _stop_answer.result(self, error.result.get("verdict", verdict), error.message)
            error.result = dict(found, **error.result)
            raise
        finally:
            self.managers.end()
        return _stop_answer.judge(self)

    def _stop(self) -> None:
        self._thaw()
        if self.state is not None and not self.state.at_rest:
            self._stop_unit()
        elif self.options.order == "parent_first" and any(not m.top for m in self.survey.ours()):
            self._stop_tops()
        if self.restarted:
            return
        if (self.managers.waiting() or not self._quiet()) and not self.restarted:
            self._ask_managers(self.rest_grace)
            self._signal_all(self.options.signal)
            self._wait(self.rest_grace, newcomers=self.options.signal, also=self.managers.answered)
        for attempt in range(3):  # something may fork at the very end
            if self.restarted or self._quiet() or (attempt and self._deadline.expired):
                break
            self._kill()
        if self.restarted:
            return
        if self.options.reset_failed and self.state is not None and self.state.active_state == "failed":
            _systemd.reset_failed(self.state.name, self._patience)
            self.changed = self.reset = True
            self.look()

    def _stop_unit(self) -> None:
        """systemd stops its unit, so that Restart= does not race; past its time the owned set is killed under it."""
        assert self.unit is not None and self.state is not None
        self._request_stop(join=True)
        requests, end, pause = 1, Deadline(self.before_kill(self.grace), self._clock), FIRST_PAUSE
        while True:
            self.look()
            if self.state.at_rest:
                if self._calm == 1:
                    self.look(second=True)
                return
            lives_again = self.state.invocation_id not in ("", self._life)
            if self.state.awake and (lives_again or not self.state.job):
                # Somebody's start took the place of our stop, or systemd's own began the next of two lives, or systemd
                # does not do it: it stops nothing that is frozen together with its slice.
                if requests == 3:
                    self.restarted = lives_again or self.state.between_lives
                    if self.restarted:
                        return
                    break
                self._request_stop()
                requests += 1
            if end.expired:
                break
            pause = self._doze(end, pause)
        # What is not systemd's to end has not been asked yet: it has its turn afterwards.
        self._kill(self.survey.falls_to_systemd)

    def _request_stop(self, join: bool = False) -> None:
        """Ask systemd for the stop, unless one that somebody else asked for is under way and may be joined."""
        assert self.unit is not None and self.state is not None
        now, falls = self._clock.monotonic(), [m for m in self.survey.ours() if self.survey.falls_to_systemd(m)]
        self._life = self.state.invocation_id
        under_way = join and self.state.active_state == "deactivating" and self.state.job
        if not (under_way and _systemd.job_type(self.state.name, self._patience) == "stop"):
            try:
                _systemd.request_stop(self.unit, self._patience)
            except _systemd.NoAnswer:
                self.changed = True  # it may have heard
                raise
        self.changed = True
        for member in falls:
            if "systemd" not in member.signals:
                member.signalled_at = now
                member.signals.append("systemd")

    def _thaw(self) -> None:
        """Nobody acts on a signal while frozen; systemd would wait for it in vain, or refuse to stop the unit."""
        if self.survey.group.paused:
            self.changed = True
            if self.unit is not None:
                _systemd.thaw(self.unit, self._patience)
            self.survey.group.thaw()

    def _stop_tops(self) -> None:
        """Whoever has no owned parent is asked first, and has time to wind up its workers."""
        self._ask_managers(self.grace)
        for member in self.survey.ours():
            if member.top and not self.managers.at_work_on(member):
                self._signal(member, self.options.signal)
        waiting = self.before_kill(self.grace, keep=self.rest_grace)
        self._wait(waiting, lambda: not any(m.top for m in self.survey.ours()), also=self.managers.answered)

    def _ask_managers(self, seconds: float) -> None:
        if self.managers.ask(self.before_kill(seconds)):
            self.changed = True
            self._calm = 0

    def _kill(self, whom: Callable[[Member], bool] = _anybody) -> None:
        self._signal_all("KILL", whom)
        self._wait(self._deadline.clamp(self.options.kill_grace), newcomers="KILL", whom=whom, last=True)

    def before_kill(self, seconds: float, keep: float = 0.0) -> float:
        """How long a wait may be, so that time is left for the next one and for SIGKILL."""
        left = self._deadline.remaining - self.options.share(self.options.kill_grace) - self.options.share(keep)
        return max(0.0, min(seconds, left))

    # Waiting

    def _quiet(self) -> bool:
        """Whether two looks in a row show nothing of ours, and the unit is at rest."""
        while self._calm < 2:
            self.look()
            if self._started_again() or not self._calm:
                return False
        return self._at_rest and not self._started_again()

    def _wait(
        self,
        seconds: float,
        enough: Callable[[], bool] = lambda: False,
        newcomers: str | None = None,
        whom: Callable[[Member], bool] = _anybody,
        also: Callable[[], bool] = lambda: True,
        last: bool = False,
    ) -> None:
        """Look until two looks in a row show nothing of ours, or the time is over.

        ``newcomers`` is the signal for whoever of ``whom`` appears meanwhile, ``enough`` ends the wait early although
        something of ours lives, ``also`` must be true besides; ``last`` is the wait that no time is kept free after.
        """
        end = Deadline(seconds if last else self.before_kill(seconds), self._clock)
        pause, storm, second = FIRST_PAUSE, 0, False
        while True:
            self.look(second)
            if self._started_again():
                return
            if not also():
                self._calm = 0  # what was seen before that proves nothing
            if self.survey.ours() and all(m.denied for m in self.survey.ours()):
                return  # nothing more can be done for them
            if (self._calm >= 2 and self._at_rest) or (self.survey.ours() and enough()):
                return
            if whom is not _anybody and self._at_rest and not any(map(whom, self.survey.ours())):
                return
            storm = storm + 1 if self.survey.newcomers and last else 0
            if storm >= 2:
                self._end_storm()
            elif newcomers is not None:
                self._signal_all(newcomers, whom)
            if not last:
                self._continue_stopped()
            second = self._calm == 1
            if second:
                continue  # one look proves nothing: the second one follows at once, also when the time is over
            if end.expired:
                return
            pause = self._doze(end, FIRST_PAUSE if self.survey.newcomers else pause)

    def _doze(self, end: Deadline, pause: float) -> float:
        """Wait until what is known has ended or another look is due, and say how long to wait the next time."""
        watched = self.survey.ours()
        pause = max(pause, min(LAST_PAUSE, SOON * self.survey.cost))
        asleep = Deadline(end.clamp(pause), self._clock)
        while not asleep.expired:
            before = self._clock.monotonic()
            living = [m for m in watched if self._alive(m.ref)]
            if not watched and not self._at_rest:
                self._await_rest(asleep)
                break
            soon = min(pause, SOON * self.survey.cost + POLL)
            if len(living) < len(watched) and (not living or asleep.elapsed >= soon):
                break
            asleep.sleep(max(POLL, SHARE * (self._clock.monotonic() - before)))
            self._tick()
        return min(LAST_PAUSE, max(FIRST_PAUSE, SHARE * self.survey.cost), 2 * pause)

    def _await_rest(self, end: Deadline) -> None:
        """All are gone: wait until systemd says so too, which takes it no longer than a moment."""
        nap = FIRST_NAP
        while not end.expired:
            end.sleep(nap)
            nap = min(LAST_NAP, 2 * nap)
            state = _systemd.show(str(self.unit), self._patience)
            if state.at_rest:
                self._told = state
                break

    def _started_again(self) -> bool:
        """Whether somebody started the unit after it came to rest: those processes are not what was to be stopped."""
        if self.state is not None and self.state.awake and (self._life is None or not self._stopping()):
            self.restarted = True
        return self.restarted

    def _stopping(self) -> bool:
        """Whether what runs is still the life that systemd was asked to end."""
        assert self.state is not None
        # Each life has an identifier of its own. Where none is told, a job of systemd's is all there is to go by.
        return self.state.invocation_id == self._life and bool(self._life or self.state.job)

    # Signals

    def _signal_all(self, name: str, whom: Callable[[Member], bool] = _anybody) -> None:
        for member in filter(whom, self.survey.ours()):
            if name not in member.signals and (name == "KILL" or not self.managers.at_work_on(member)):
                self._signal(member, name)

    def _signal(self, member: Member, name: str) -> None:
        answer = self._send(member.ref, getattr(signal, "SIG" + name))
        if answer == "sent":
            self.changed = True
            member.signals.append(name)
            if member.signalled_at is None:
                member.signalled_at = self._clock.monotonic()
            if member.process.state == "T" and name not in ("KILL", "STOP"):
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

    def _end_storm(self) -> None:
        """They fork faster than one look after the other can name them: first let nobody run any more."""
        group, inside = self.survey.group, self.survey.in_group()
        if inside and all(m.standing == "ours" for m in inside):
            # The kernel looks at nobody's identity: the unit's life must still be the one that is being ended.
            self.survey.state = _systemd.show(str(self.unit), self._patience)
            if self._started_again():
                return
            if group.kill():
                for member in inside:
                    if "KILL" not in member.signals:
                        member.signals.append("KILL")
                return
        # Who is not ours must not stay frozen if this call is killed.
        freezing = group if all(m.standing == "ours" for m in inside) else Group("")
        try:
            with freezing.frozen(self._clock):
                for _round in range(STILL_ROUNDS):
                    for member in self.survey.ours():
                        if "STOP" not in member.signals:
                            self._signal(member, "STOP")
                    self.look()
                    if self._started_again() or not self.survey.newcomers or self._deadline.expired:
                        break
                if not self.restarted:
                    self._signal_all("KILL")
        finally:
            # Whatever broke this off: those that were stopped for it must not stay so for ever.
            for member in self.survey.members.values():
                if "STOP" in member.signals and "KILL" not in member.signals and member.ref in self.survey.living:
                    self._signal(member, "KILL")
