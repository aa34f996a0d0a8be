# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The ladder from "the unit is active" to "a token came back", and the verdict of a wait on it."""

from __future__ import annotations

import typing as t

from . import _generation, _http
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._engines import Profile
from ._progress import Progress
from ._systemd import UnitState
from ._tiers import TIERS, Ending, Options, Target, Tier

__all__ = ("Wait",)

CONFIRMATIONS = 2  # looks in a row that must say "wrong server"
FAILURES = ("error_response", "empty_response", "misconfigured")
FAILED_GENERATIONS = 3  # answers of that kind that make a wedge
FIRST_PAUSE = 0.25
GET_TIMEOUT = 5.0
LAST_WORDS = 0.2


class Wait:
    """One wait. ``run`` returns when the tier is reached, or when it is known that it will not be."""

    def __init__(self, target: Target, profile: Profile, options: Options, clock: Clock = SYSTEM_CLOCK) -> None:
        options.check()
        self.target, self.profile, self.options = target, profile, options
        self.deadline = Deadline(options.timeout, clock)
        self.progress = Progress(profile, options.stall_timeout, self.deadline)
        self.tiers = [Tier(name) for name in TIERS[: TIERS.index(options.tier) + 1]]
        self.restarts = 0
        self.state: t.Optional[UnitState] = None
        self.side: t.Optional[_generation.Side] = None
        self._model = options.model
        self._doubts: t.Dict[str, int] = {}
        self._failed = 0
        self._proof: t.Optional[_generation.Side] = None  # of a wedge: an attempt that had all its time
        self._looks = 0

    def run(self, tick: t.Callable[[], None] = lambda: None, once: bool = False) -> Ending:
        """Look until there is a verdict. ``once`` looks a single time, for check mode."""
        pause = FIRST_PAUSE
        while True:
            tick()
            ending = self._look(tick)
            if ending is None and not once:
                ending = self._stalled()
            if ending is None and (once or self.deadline.expired):
                ending = self._out_of_time()
            if ending is not None:
                ending.cause = self.progress.cause
                if ending.cause is None and ending.verdict in ("dead", "restart_loop"):
                    ending.cause = self.progress.last_cause
                return ending
            self.deadline.sleep(min(pause, self.options.interval))
            pause *= 1.5

    @property
    def reached(self) -> str:
        """The highest tier reached, empty below the first."""
        names = [tier.name for tier in self.tiers if tier.reached]
        return names[-1] if names else ""

    def as_dict(self, ending: Ending) -> t.Dict[str, t.Any]:
        """The answer of a wait that ended so."""
        return {
            "verdict": ending.verdict,
            "msg": ending.msg,
            "tier_reached": self.reached,
            "tiers": [dict(vars(tier)) for tier in self.tiers],
            "phase": self.progress.phase,
            "percent": self.progress.percent,
            "movement": self.progress.movement(),
            "restarts": self.restarts,
            "cause": None if ending.verdict == "ready" else ending.cause,
            "log_tail": list(self.progress.tail),
            "unit_state": None if self.state is None else self.state.as_result(),
            "elapsed": round(self.deadline.elapsed, 3),
        }

    def _look(self, tick: t.Callable[[], None]) -> t.Optional[Ending]:
        ending = self._unit()
        if ending is None:
            ending = self._climb(tick)
        # A service that is ready at the first look is not read up on: nobody asks how it got there.
        self._looks += 1
        if ending is None or ending.verdict != "ready" or self._looks > 1:
            self.observe()
        return ending

    def observe(self) -> None:
        """Take in what moved since the last look."""
        if self.state is None:
            return
        for line, own in self.target.log(self.state):
            if own:
                self.progress.line(line)
            else:
                self.progress.tail.append(line)
        self.progress.activity(self.target.activity(self.state))

    # The unit

    def _unit(self) -> t.Optional[Ending]:
        state, before = self.target.unit(), self.state
        if state is None:
            for tier in self.tiers[:2]:
                tier.reached, tier.detail = None, "not judged without a unit"
            return None
        self.state = state
        name = state.name
        if not state.found:
            return Ending("dead", 'the unit "%s" does not exist on this host' % name)
        if before is not None:
            self._count_restarts(before, state)
        if self.restarts >= self.options.max_restarts:
            why = self._why()
            return Ending("restart_loop", 'the unit "%s" was restarted %d times: %s' % (name, self.restarts, why))
        if state.active_state == "failed":
            self._last_words()
            again = ", and systemd gave up after %d restarts" % state.n_restarts if state.n_restarts else ""
            return Ending("dead", 'the unit "%s" failed%s: %s' % (name, again, self._why()))
        if state.active_state == "inactive" and not state.job:
            self._last_words()
            masked = " and masked" if state.load_state == "masked" else ""
            return Ending("dead", 'the unit "%s" is inactive%s, and nothing is about to start it' % (name, masked))
        runs = state.active_state in ("active", "reloading", "refreshing") or state.sub_state == "start-post"
        detail = "%s (%s)" % (state.active_state, state.sub_state)
        self._mark("unit", runs, detail if not state.main_pid else "%s, main process %d" % (detail, state.main_pid))
        return None

    def _count_restarts(self, before: UnitState, state: UnitState) -> None:
        restarted = max(0, state.n_restarts - before.n_restarts)
        new_life = before.invocation_id and state.invocation_id and before.invocation_id != state.invocation_id
        if not restarted and not new_life:
            return
        self.observe()
        self.restarts += max(restarted, 1)
        self.progress.new_life()
        self._doubts.clear()
        self._failed, self.side, self._proof = 0, None, None
        for tier in self.tiers:
            tier.reached, tier.at, tier.detail = False, None, ""

    def _last_words(self) -> None:
        """What a dying process wrote reaches the journal a moment after its death reaches systemd."""
        self.deadline.clock.sleep(LAST_WORDS)
        self.observe()

    def _why(self) -> str:
        """The cause of an end, from the log or else from what systemd says."""
        state = self.state
        assert state is not None
        known = self.progress.cause or self.progress.last_cause
        if known is not None:
            return known["line"]
        if state.result == "oom-kill":
            kind, text = "host_out_of_memory", "the kernel ended it because the host ran out of memory"
        elif state.exec_main_code in (2, 3):
            kind, text = "killed", "its main process was killed by signal %d" % state.exec_main_status
        elif state.exec_main_code == 1 and state.exec_main_status:
            kind, text = "exited", "its main process exited with status %d" % state.exec_main_status
        else:
            return "systemd says %s" % state.result
        # The last word of the process itself names what no pattern knows.
        line = next((line for line in reversed(self.progress.tail) if not line.startswith(state.name)), "")
        self.progress.cause = {"kind": kind, "line": line or text}
        return text

    # The tiers above it

    def _climb(self, tick: t.Callable[[], None]) -> t.Optional[Ending]:
        steps: t.Dict[str, t.Callable[[], t.Optional[Ending]]] = {
            "listener": self._listener,
            "health": self._health,
            "model": self._models,
            "generation": lambda: self._generation(tick),
        }
        for tier in self.tiers:
            if tier.reached is False and tier.name in steps:
                ending = steps[tier.name]()
                if ending is not None:
                    return ending
            if tier.reached is False:
                return None
        return Ending("ready", 'the service is ready: the tier "%s" is reached' % self.options.tier)

    def _listener(self) -> t.Optional[Ending]:
        assert self.state is not None
        found = self.target.listener(self.state)
        if found.kind == "foreign":
            return self._doubt(
                "listener", "wrong_server", "the port belongs to another process than the unit's: %s" % found.detail
            )
        self._sure("listener")
        reached, detail = found.kind in ("owned", "forwarder"), found.detail
        if found.kind in ("none", "translated"):
            # Kernel address translation listens nowhere, and answers all the same.
            if self._get(self.profile.health or self.profile.models).status is None:
                detail = found.silence
            else:
                reached = found.kind == "translated"
                detail = "it answers, although no process of this host listens: " + (
                    found.detail or "nothing shows that it is the unit's"
                )
        self._mark("listener", reached, detail)
        return None

    def _health(self) -> t.Optional[Ending]:
        answer = self._get(self.profile.health or self.profile.models)
        ending = self._not_the_engine("health", answer)
        if ending is not None or answer.outcome != "answered" or answer.html:
            return ending
        self._sure("health")
        self._mark("health", answer.status == 200, "status %d" % (answer.status or 0))
        return None

    def _models(self) -> t.Optional[Ending]:
        answer = self._get(self.profile.models)
        ending = self._not_the_engine("model", answer)
        if ending is not None or answer.outcome != "answered" or answer.html:
            return ending
        if answer.status != 200:
            self._sure("model")
            self._mark("model", False, "status %d" % (answer.status or 0))
            return None
        listed = _generation.listed_models(answer.body)
        owners = _owners(answer.body)
        if self.profile.owned_by and owners and self.profile.owned_by not in owners:
            msg = 'another server answers: its models belong to "%s", not to %s' % (owners[0], self.profile.title)
            return self._doubt("model", "wrong_server", msg)
        wanted = self.options.model
        if not listed or (wanted is not None and wanted not in listed):
            names = ", ".join('"%s"' % name for name in listed) or "none"
            msg = 'the model "%s" is not listed: there are %s' % (wanted, names) if wanted else "no model is listed"
            if listed and self.profile.models_static:
                return self._doubt("model", "wrong_server", msg)
            self._sure("model")
            self._mark("model", False, msg)
            return None
        self._sure("model")
        self._model = wanted or listed[0]
        self._mark("model", True, 'lists "%s"' % self._model)
        return None

    def _generation(self, tick: t.Callable[[], None]) -> t.Optional[Ending]:
        limit = max(0.1, self.deadline.clamp(self.options.generation_timeout))

        def watch() -> None:
            tick()
            self.observe()

        side = self.side = self.target.generate(self._model, limit, watch)
        if side.verdict in ("ok", "slow"):
            self._mark("generation", True, "a token after %.2f s" % (side.ttft or 0.0))
            # A token from a life that ended meanwhile proves nothing about this one.
            return None if self.state is None else self._unit()
        self._mark("generation", False, "%s: %s" % (side.verdict, side.error))
        if side.verdict in ("auth_error", "wrong_model"):
            verdict = "auth_error" if side.verdict == "auth_error" else "wrong_server"
            return Ending(verdict, "the engine does not generate: %s" % side.error)
        failed = side.verdict in FAILURES and side.status not in (None, 429, 503)
        full = limit >= self.options.generation_timeout
        if full or not (failed or side.verdict == "wedged"):
            self._proof = side if failed or side.verdict == "wedged" else None
        self._failed = self._failed + 1 if failed else self._failed
        quiet = side.verdict == "wedged" and full and self.progress.window.age >= limit - 1.0
        return self._wedged() if self._listed() and (quiet or self._failed >= FAILED_GENERATIONS) else None

    def _wedged(self) -> Ending:
        assert self.side is not None
        return Ending("wedged", "the engine lists its model, but it does not generate: %s" % self.side.error)

    def _listed(self) -> bool:
        return any(tier.name == "model" and tier.reached for tier in self.tiers)

    def _get(self, path: str) -> _http.Answer:
        return self.target.get(path, max(0.1, self.deadline.clamp(GET_TIMEOUT)))

    def _not_the_engine(self, tier: str, answer: _http.Answer) -> t.Optional[Ending]:
        """What a GET says of the server as such, rather than of how far it has come."""
        if answer.outcome != "answered":
            self._mark(tier, False, answer.error)
            if answer.outcome in ("tls", "redirected", "too_large"):
                return self._doubt(tier, "wrong_server", "%s: %s" % (answer.url, answer.error))
            self._sure(tier)
            return None
        if answer.status in (401, 403):
            msg = "%s answers with status %d: the API key is refused" % (answer.url, answer.status)
            return Ending("auth_error", msg)
        if answer.html and answer.status == 200:
            return self._doubt(tier, "wrong_server", "%s answers with an HTML page: it is another program" % answer.url)
        return None

    def _mark(self, name: str, reached: bool, detail: str) -> None:
        for tier in self.tiers:
            if tier.name == name:
                if reached and not tier.reached:
                    tier.at = round(self.deadline.elapsed, 3)
                    self.progress.moved("tier")
                tier.reached, tier.detail = reached, detail

    def _doubt(self, tier: str, verdict: str, msg: str) -> t.Optional[Ending]:
        """Evidence that must be seen twice in a row: at a hand-over the last look of the old server is normal."""
        self._mark(tier, False, msg)
        self._doubts[tier] = self._doubts.get(tier, 0) + 1
        return Ending(verdict, msg) if self._doubts[tier] >= CONFIRMATIONS else None

    def _sure(self, tier: str) -> None:
        self._doubts.pop(tier, None)

    # Verdicts without an event

    def _stalled(self) -> t.Optional[Ending]:
        # Without a unit nothing can be seen to move; only the deadline ends such a wait.
        if self.state is None or not self.progress.window.stalled:
            return None
        text = "for %.0f s nothing moved: %s" % (self.progress.window.age, self._missing())
        if self._proof is not None and self._listed():
            return Ending("wedged", "the engine lists its model, but " + text)
        return Ending("stalled", text)

    def _out_of_time(self) -> Ending:
        seconds = round(self.deadline.elapsed, 1)
        if self._proof is not None and self._listed():
            return self._wedged()
        if self._doubts:
            return Ending("wrong_server", self._missing())
        if self.state is None:
            text = "not ready after %g s, and without a unit it cannot be told whether it moves: %s"
            return Ending("stalled", text % (seconds, self._missing()))
        age = self.progress.window.age
        text = "not ready after %g s, but something moved %.0f s ago: %s"
        return Ending("progressing", text % (seconds, age, self._missing()))

    def _missing(self) -> str:
        """The first tier that was not reached, in words."""
        for tier in self.tiers:
            if tier.reached is False:
                return 'the tier "%s" is not reached%s' % (tier.name, ": " + tier.detail if tier.detail else "")
        return "every tier is reached"


def _owners(body: str) -> t.List[str]:
    try:
        return [row["owned_by"] for row in _http.loads(body)["data"] if isinstance(row["owned_by"], str)]
    except (KeyError, TypeError):
        return []
