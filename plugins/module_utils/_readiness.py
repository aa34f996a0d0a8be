# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One wait for a model: its looks, the lives of its unit, and its verdict.

A wait can be left between two looks and gone on with by another process, as if it had never been left.
"""

from __future__ import annotations

import contextlib
import typing as t

from . import _engines, _foreign, _http, _matching
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._engines import Profile
from ._errors import MissingLibrary, ServingError, UsageError
from ._ladder import Ladder
from ._lives import Lives
from ._progress import Progress
from ._systemd import UnitState
from ._tiers import TIERS, Ending, Options, Target, Tier

__all__ = ("Wait",)

NEAR_PERCENT, NEAR_OVERALL = 90.0, 75.0
PREPARED = 1.0  # seconds after which there was time to prepare for the first request
FIRST_PAUSE = 0.25
SLOWER = 1.5
LAST_WORDS = 0.2
LONGEST_NAP = 1.0  # between two questions whether to leave
FAR_OVERALL, FAR_NAP = 50.0, 0.25  # per cent of a load that is far from its end, and seconds between two signs then
LAG = 2.0  # seconds that a line takes at most to get through the journal
ONE_LOOK = 10.0  # seconds that a single look may take in all
BLIND = 60.0  # seconds for which a host that does not answer is borne with


class Wait:
    """One wait. ``run`` returns when the tier is reached, or when it is known that it will not be."""

    def __init__(
        self,
        target: Target,
        profile: Profile,
        options: Options,
        clock: Clock = SYSTEM_CLOCK,
        start: t.Optional[float] = None,
        veil: _foreign.Veil = _foreign.BARE,
    ) -> None:
        """``veil`` makes what engine and host write fit to be kept and told."""
        options.check()
        self.veil = veil
        self.target, self.profile, self.options = target, profile, options
        self.deadline = Deadline(options.timeout, clock, start)
        self.progress = Progress(profile, options.stall_timeout, self.deadline)
        self.ladder = Ladder(target, profile, options, self.deadline, self.progress, veil)
        self.rungs, self.attempts = self.ladder.rungs, self.ladder.attempts
        target.bound(self.deadline)
        self.lives = Lives(self.progress)
        self.state: t.Optional[UnitState] = None
        self._looks = 0
        self._began = clock.monotonic()  # in this process
        self._once = False
        self._observed = float("-inf")
        self._first: t.Optional[float] = None  # when all had been looked at once: what was there by then has not moved
        self._blind: t.Optional[float] = None  # since when the host has not answered
        self._excuse = ""  # what it said instead
        self._pause = FIRST_PAUSE
        self._next = clock.monotonic()  # when the next whole look is due

    def run(
        self,
        tick: t.Callable[[], None] = lambda: None,
        once: bool = False,
        leave: t.Callable[[], bool] = lambda: False,
    ) -> t.Optional[Ending]:
        """Look until there is a verdict. ``once`` looks a single time, for check mode.

        ``tick`` is called all the time. ``leave`` is asked between looks: when it agrees, there is no ending, and
        :meth:`save` has what another process needs to go on.
        """
        self._once = once
        if once:
            self.ladder.once = True
            self.deadline.seconds = min(self.deadline.seconds, self.deadline.elapsed + ONE_LOOK)
        while True:
            if not once and not self._sleep(tick, leave):
                return None
            tick()
            reached = self.rungs.reached
            ending = self._look(tick) if once else self._patient_look(tick)
            if ending is None and not once:
                ending = self._stalled()
            if ending is None and (once or self.deadline.expired):
                ending = self._out_of_time(once)
            if ending is not None:
                ending.cause = self.progress.cause or self.progress.last_cause
                if ending.verdict in ("dead", "restart_loop"):
                    ending.cause = self.lives.cause
                self._explain(ending)
                said = (self._excuse, self._unseen(ending), *_matching.remarks())
                self.target.warnings += [text for text in said if text]
                return ending
            self._plan(climbed=self.rungs.reached != reached)

    @property
    def restarts(self) -> int:
        return self.lives.restarts

    @property
    def tiers(self) -> t.List[Tier]:
        return self.rungs.tiers

    @property
    def reached(self) -> str:
        """The highest tier reached, empty below the first."""
        return self.rungs.reached

    def live(self) -> t.Dict[str, t.Any]:
        """Where the wait stands, in the words of the answer, for people who watch."""
        missing = self.rungs.missing
        return {
            "phase": self.progress.phase,
            "percent": self.progress.percent,
            "overall": _engines.overall(self.profile, self.progress.phase, self.progress.percent),
            "tier_reached": self.rungs.reached,
            "missing": "" if missing is None else missing.name,
            "unlisted": missing.detail if missing is not None and self.ladder.strange else "",
            "near": self.near,
            "asking": None if self.attempts.asking is None else round(self.attempts.asking, 1),
            "restarts": self.restarts,
            "memory": self.progress.memory if self.progress.gpu_memory is None else self.progress.gpu_memory,
            "on_gpu": self.progress.gpu_memory is not None,
            "moved": None if self.state is None else round(self.progress.window.age, 1),
            "stall_timeout": self.options.stall_timeout,
            "timeout": self.options.timeout,
            "elapsed": round(self.deadline.elapsed, 1),
        }

    def as_dict(self, ending: Ending) -> t.Dict[str, t.Any]:
        """The answer of a wait that ended so."""
        return {
            "verdict": ending.verdict,
            "msg": ending.msg,
            "tier_reached": self.reached,
            "tiers": [dict(vars(tier)) for tier in self.tiers],
            "phase": self._phase(ending),
            "percent": 100.0 if self._generates(ending) else self.progress.percent,
            "movement": self.progress.movement(),
            "restarts": self.restarts,
            "cause": None if ending.verdict == "ready" else ending.cause,
            "log_tail": list(self.progress.tail),
            "unit_state": None if self.state is None else self.state.as_result(),
            "elapsed": round(self.deadline.elapsed, 3),
        }

    def _phase(self, ending: Ending) -> str:
        """What the log said last, unless a token has come since: the line that says so may be on its way yet."""
        return "started" if self._generates(ending) and self.progress.phase else self.progress.phase

    def _generates(self, ending: Ending) -> bool:
        return ending.verdict == "ready" and self.reached == TIERS[-1]

    def observe(self) -> None:
        """Take in what moved since the last look."""
        if self.state is None:
            return
        # What was written long before the last look came late, and is news of now; so is all that the first look finds.
        since = float("inf") if self._observed == float("-inf") else self._observed - LAG
        self._observed = self.deadline.clock.monotonic()
        for text, own, at in self.target.log(self.state):
            line = self.veil.whole(text)
            self.lives.line(line, own)
            if own:
                self.progress.line(line, at if at is not None and at > since else None)
            else:
                self.progress.tail.append(line)
        self.progress.activity(self.target.activity(self.state))
        if self._first is None:
            self._first = self.deadline.clock.monotonic()
        if self.near or self._observed - self._began >= PREPARED:
            _http.load()  # the first request must not wait for what it is made with

    @property
    def near(self) -> bool:
        """Whether the end of the load is near, by the log."""
        percent = self.progress.percent
        overall = _engines.overall(self.profile, self.progress.phase, percent)
        return (percent or 0.0) >= NEAR_PERCENT or (overall or 0.0) >= NEAR_OVERALL

    @property
    def far(self) -> bool:
        """Whether the load has most of its way to go, by the log: so long nobody misses a tenth of a second."""
        overall = _engines.overall(self.profile, self.progress.phase, self.progress.percent)
        return overall is not None and overall < FAR_OVERALL

    def ends_within(self, seconds: float) -> bool:
        """Whether the wait is over by then unless something moves; of a short window that is only the second half."""
        if self.deadline.remaining < seconds:
            return True
        if self.state is None or self.state.between_lives:
            return False
        return self.progress.window.remaining < min(seconds, self.options.stall_timeout / 2)

    # Looks

    def _sleep(self, tick: t.Callable[[], None], leave: t.Callable[[], bool]) -> bool:
        """Sleep until a look is due, or a cheap sign asks for one; says no when the wait is left instead."""
        clock = self.deadline.clock
        while True:
            left = self._next - clock.monotonic()
            if left <= 0:
                return True
            if leave():
                return False
            tick()
            pause = self.ladder.pause or LONGEST_NAP
            clock.sleep(min(left, max(pause, FAR_NAP) if self.far else pause))
            with contextlib.suppress(ServingError, OSError):  # a whole look will say so
                if self.ladder.stirs():
                    return True

    def _plan(self, climbed: bool) -> None:
        """When to look next: never later than the moment at which the time or the stall window is over."""
        if climbed:
            self._pause = FIRST_PAUSE
        pause = min(self._pause, self.options.interval, self.deadline.remaining)
        if self.state is not None and not self.progress.window.stalled:
            pause = min(pause, self.progress.window.remaining)
        if self.rungs.steady_in is not None:
            pause = min(pause, self.rungs.steady_in)
        self._pause *= SLOWER
        self._next = self.deadline.clock.monotonic() + pause

    def _patient_look(self, tick: t.Callable[[], None]) -> t.Optional[Ending]:
        """A look that may fail for a while, once there was one that did not: a busy host is no reason to give up."""
        raised: t.List[BaseException] = []

        def kept() -> None:
            try:
                tick()
            except BaseException as error:
                raised.append(error)
                raise

        now = self.deadline.clock.monotonic()
        try:
            ending = self._look(kept)
        except (ServingError, OSError) as error:
            if raised or isinstance(error, (UsageError, MissingLibrary)) or not self._looks:
                raise
            self._blind = now if self._blind is None else self._blind
            if self.deadline.clock.monotonic() - self._blind >= BLIND and not self.deadline.expired:
                raise
            self._excuse = "the service could not be looked at for a while, and was waited for all the same: %s" % error
            return None
        self._blind = None
        return ending

    def _look(self, tick: t.Callable[[], None]) -> t.Optional[Ending]:
        def watch(period: float) -> None:
            tick()
            age = self.deadline.clock.monotonic() - self._observed
            # Before it is said that nothing moved, it is looked.
            if age >= min(period, self.options.interval) or (age > 0 and self.progress.window.stalled):
                with contextlib.suppress(ServingError, OSError):  # no reason to break off what is asked meanwhile
                    self.observe()

        ending = self._unit()
        if ending is None:
            ending = self.ladder.climb(self.state, watch, lambda: None if self.state is None else self._unit(now=True))
        # A service that is ready at the first look is not read up on: nobody asks how it got there.
        self._looks += 1
        if ending is None or ending.verdict != "ready" or self._looks > 1:
            try:
                self.observe()
            except (ServingError, OSError):
                if ending is None:
                    raise
        return ending

    # The unit

    def _unit(self, now: bool = False) -> t.Optional[Ending]:
        state, before = self.target.unit(now), self.state
        if state is None:
            self.rungs.without_unit()
            return None
        self.state = state
        name = state.name
        if not state.found:
            return Ending("dead", 'the unit "%s" does not exist on this host' % name)
        if before is not None:
            self._count_restarts(before, state)
        if self.restarts >= self.options.max_restarts:
            if state.active_state == "failed":
                self._last_words()
                self.lives.conclude(state)
            times = "once" if self.restarts == 1 else "%d times" % self.restarts
            why = self.lives.why(state, word=True)
            return Ending("restart_loop", 'the unit "%s" was restarted %s: %s' % (name, times, why))
        if state.active_state == "failed" and not state.job:
            self._last_words()
            self.lives.conclude(state)
            again = ", and systemd gave up after %d restarts" % state.n_restarts if state.n_restarts else ""
            return Ending("dead", 'the unit "%s" failed%s: %s' % (name, again, self.lives.why(state)))
        if state.active_state == "inactive" and not state.job and (self._once or not state.awaited):
            return self._inactive(state)
        runs = state.active_state in ("active", "reloading", "refreshing") or state.sub_state == "start-post"
        detail = "%s (%s)" % (state.active_state, state.sub_state)
        if state.awaited:
            detail += ', started by the first connection to "%s"' % state.awaited
        if state.main_pid:
            detail += ", main process %d" % state.main_pid
        self.rungs.unit(runs, detail, state.main_since if state.main_pid else None)
        return None

    def _inactive(self, state: UnitState) -> Ending:
        if state.awaited:
            text = 'the unit "%s" is inactive: the first connection to "%s" starts it, and this look makes none'
            return Ending("progressing", text % (state.name, state.awaited))
        self._last_words()
        text = 'the unit "%s" is inactive, and nothing is about to start it' % state.name
        if state.load_state == "masked":
            text = text.replace("inactive", "inactive and masked", 1)
        elif self.lives.conclude(state):
            text += ": " + self.lives.why(state)
        elif not self._looks and self.lives.stopped:
            self.progress.cause = None  # what it said before somebody stopped it is no cause of that
        return Ending("dead", text)

    def _count_restarts(self, before: UnitState, state: UnitState) -> None:
        # Counted before anything else can fail: the next look compares with this state.
        counted = self.lives.count(before, state)
        if not counted:
            return
        self.observe()
        if counted > 0:
            same = state.between_lives and state.invocation_id == before.invocation_id
            self.lives.conclude(state if same else before if before.between_lives else None)
        self.lives.new_life()
        self.ladder.new_life()

    def _last_words(self) -> None:
        """What a dying process wrote reaches the journal a moment after its death reaches systemd."""
        self.deadline.clock.sleep(LAST_WORDS)
        self.observe()

    # Verdicts without an event

    def _stalled(self) -> t.Optional[Ending]:
        # Without a unit nothing can be seen to move; only the deadline ends such a wait. While systemd waits before it
        # begins the next life there is nothing that could move.
        if self.state is None or self.state.between_lives or self._blind is not None:
            return None
        if not self.progress.window.stalled:
            return None
        text = "for %.0f s nothing moved: %s" % (self.progress.window.age, self._missing())
        if self.attempts.proof is not None and self.rungs.listed:
            return Ending("wedged", "the engine lists its model, but " + text)
        return Ending(self._still(), text)

    def _still(self) -> str:
        """The verdict where nothing moves: a server that lists other models for all that time is another one."""
        return "wrong_server" if self.ladder.strange else "stalled"

    def _out_of_time(self, once: bool = False) -> Ending:
        seconds = round(self.deadline.elapsed, 1)
        if self.attempts.proved:
            return self.attempts.wedged()
        if self.rungs.doubt:
            return Ending(self.rungs.doubt, self.rungs.why())
        if self.state is None:
            text = "not ready after %g s, and without a unit it cannot be told whether it moves: %s"
            return Ending(self._still(), text % (seconds, self.rungs.why()))
        if once:
            return Ending("progressing", "not ready at this moment: %s" % self._missing())
        if self.state.between_lives:
            self.lives.conclude(self.state)
            text = "not ready after %g s, and systemd is about to start the unit again: %s"
            return Ending("progressing", text % (seconds, self._missing()))
        window = self.progress.window
        if self._blind is None and (window.stalled or self._first is None or window.last <= self._first):
            return Ending(self._still(), "not ready after %g s, and nothing moved: %s" % (seconds, self._missing()))
        text = "not ready after %g s, but something moved %.0f s ago: %s"
        return Ending("progressing", text % (seconds, window.age, self._missing()))

    def _explain(self, ending: Ending) -> None:
        """Let the tier at which a wait ended say why: what it said last is of before."""
        tier = self.rungs.missing
        ended = ending.verdict in ("dead", "restart_loop")
        if ended and tier is not None and (tier.name == "unit" or not tier.detail):
            tier.detail = ending.msg

    def _unseen(self, ending: Ending) -> str:
        """What may have moved although it does not show, where that matters."""
        if ending.verdict != "stalled" or self.state is None or not self.progress.deaf:
            return ""
        text = 'what the unit "%s" receives from the network is no sign of movement, because it is not counted: '
        counted = self.state.raw.get("IPAccounting") == "yes"
        why = "systemd cannot on this host" if counted else 'set "IPAccounting=yes" in it'
        return text % self.state.name + why

    def _missing(self) -> str:
        assert self.state is not None
        self.ladder.port.explain(self.state)
        unconfirmed = self.rungs.missing is None and self._blind is not None
        return self.rungs.why() + (", but not that the unit still runs" if unconfirmed else "")

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        state = self.state
        return {
            "start": self.deadline.start,
            "next": self._next,
            "pause": self._pause,
            "looks": self._looks,
            "lives": self.lives.save(),
            "first": self._first,
            "observed": None if self._first is None else self._observed,
            "blind": self._blind,
            "excuse": self._excuse,
            "unit": None if state is None else [state.name, state.n_restarts, state.invocation_id, state.main_pid],
            "ladder": self.ladder.save(),
            "progress": self.progress.save(),
            "target": self.target.save(),
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        """Go on where another process has left the wait; the deadline was given when this one was made."""
        self._next, self._pause, self._looks = saved["next"], saved["pause"], saved["looks"]
        self.lives.restore(saved["lives"])
        self._first, self._blind, self._excuse = saved["first"], saved["blind"], saved["excuse"]
        self._observed = self._observed if saved["observed"] is None else saved["observed"]
        if saved["unit"] is not None:
            name, n_restarts, invocation_id, main_pid = saved["unit"]
            self.state = UnitState(
                name=name, n_restarts=n_restarts, invocation_id=invocation_id, main_pid=main_pid, load_state="loaded"
            )
        self.ladder.restore(saved["ladder"])
        self.progress.restore(saved["progress"])
        self.target.restore(saved["target"])
