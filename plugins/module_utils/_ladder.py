# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The ladder from "the unit is active" to "a token came back": which tiers are reached, and what speaks against it."""

from __future__ import annotations

import contextlib
import typing as t

from . import _engines, _foreign, _http
from ._deadline import Deadline
from ._engines import Profile
from ._errors import ServingError
from ._generation import Side
from ._progress import Progress
from ._systemd import UnitState
from ._tiers import TIERS, Ending, Options, Target, Tier

__all__ = ("Ladder",)

CONFIRMATIONS = 2  # looks in a row that must say "wrong server"
FAILURES = ("error_response", "empty_response", "misconfigured")
FAILED_GENERATIONS = 3  # answers of that kind in a row that make a wedge
FAILING = 5.0  # seconds that they must have lasted: an engine that still loads can fail faster than it loads
GET_TIMEOUT = 5.0
FIRST_GET = 0.8  # before anything else was looked at: what is there by then is no movement
SLACK = 1.0  # seconds of an attempt in which what it sets going itself may move
LEAST = 0.5  # seconds without movement that show anything at all
STEADY = 3.0  # seconds that a main process has to live: one that fails at once, again and again, is active in between
# A port that opens late is the last step of a load; one that is open early is asked less often after a while.
KNOCKS, PEEKS, LATER_PEEKS, LATER = 0.1, 0.2, 0.5, 30.0
JUDGED = 1.0  # seconds for which it holds who listens, where the kernel shows no socket that tells of a change
NOBODY = ("none", "translated")
SPOKEN = ("tls", "not_http", "redirected", "too_large")  # somebody answers, although it is no answer of use


class _Over(Exception):
    """An attempt at a token has had all its time."""


class Ladder:
    """The tiers of one wait."""

    def __init__(
        self,
        target: Target,
        profile: Profile,
        options: Options,
        deadline: Deadline,
        progress: Progress,
        veil: _foreign.Veil = _foreign.BARE,
    ) -> None:
        self.target, self.profile, self.options = target, profile, options
        self.deadline, self.progress, self.veil = deadline, progress, veil
        self.tiers = [Tier(name) for name in TIERS[: TIERS.index(options.tier) + 1]]
        self.model = options.model
        self._doubts: t.Dict[str, t.Tuple[str, int]] = {}
        self.side: t.Optional[Side] = None
        self.proof: t.Optional[Side] = None  # of a wedge: an attempt that had all its time
        self._failed = 0
        self._failing = 0.0  # since when
        self._silence = ""  # what there is to say as long as nobody listens
        self._outcome = "answered"  # of the last GET, if there was one
        self._windowed = False  # whether the stall window may end the wait
        self._heard: t.Optional[bool] = None
        self._peeked: t.Optional[int] = None
        self._changed = deadline.start  # when the first tier that is missing became it
        self._asked: t.Optional[float] = None  # since when a token is asked for
        self._proved_at = 0.0  # when the attempt that is the proof began
        self.others = False  # whether the list of models has some, and not the one that is wanted
        self.once = False  # whether there is one look only
        self._looks = 0
        self._sockets: t.Optional[t.FrozenSet[int]] = None  # that listened when it was judged who does
        self._found, self._judged_at = "", 0.0
        self._climbed: t.Set[str] = set()  # tiers that were news in this life: a port that comes and goes moves nothing
        self._runs = False  # whether the unit does, for however short a time
        self._steady_at = float("-inf")

    # What others ask of it

    @property
    def reached(self) -> str:
        """The highest tier reached, empty below the first."""
        names = [tier.name for tier in self.tiers if tier.reached]
        return names[-1] if names else ""

    @property
    def missing(self) -> t.Optional[Tier]:
        """The first tier that is not reached; a unit that has only begun to run hides none that is above it."""
        absent = [tier for tier in self.tiers if tier.reached is False]
        if len(absent) > 1 and absent[0].name == "unit" and self._runs:
            return absent[1]
        return absent[0] if absent else None

    @property
    def asking(self) -> t.Optional[float]:
        """Seconds for which an answer to the request for a token has been waited for; None while there is no such."""
        return None if self._asked is None else self.deadline.clock.monotonic() - self._asked

    @property
    def listed(self) -> bool:
        return any(tier.name == "model" and tier.reached for tier in self.tiers)

    @property
    def doubt(self) -> str:
        """The verdict that one look speaks for and no second one has confirmed; empty without such a look."""
        return next((verdict for verdict, _looks in self._doubts.values()), "")

    @property
    def strange(self) -> bool:
        """Whether what is missing is the model, in a list that has others."""
        return self.others and self.missing is not None and self.missing.name == "model"

    def why(self) -> str:
        """The first tier that is not reached, in words."""
        tier = self.missing
        if tier is None:
            return "every tier is reached"
        return 'the tier "%s" is not reached%s' % (tier.name, ": " + tier.detail if tier.detail else "")

    @property
    def _enough(self) -> float:
        """Seconds for which an attempt at a token goes on while nothing moves: that is as good as all its time."""
        enough = self.options.generation_timeout
        return min(enough, self.options.stall_timeout) if self._windowed else enough

    @property
    def _slack(self) -> float:
        return min(SLACK, self._enough / 4)

    @property
    def proved(self) -> bool:
        """Whether no token came by an attempt that had all its time, and nothing has moved since it began.

        What moves is slow, or a loop that turns: nobody can tell. Without a unit nothing can be seen to move.
        """
        if self.proof is None or not self.listed:
            return False
        if not self._windowed:
            return True
        window = self.progress.window
        return window.age >= max(LEAST, self._enough - self._slack) or window.last <= self._proved_at + self._slack

    def wedged(self) -> Ending:
        assert self.side is not None
        return Ending("wedged", "the engine lists its model, but it does not generate: %s" % self.side.error)

    def new_life(self) -> None:
        """The unit was started again, so nothing of what was seen holds any more."""
        self._sockets, self._found = None, ""
        self._silence, self._heard, self._runs = "", None, False
        self._climbed.clear()
        self._begin_anew(self.tiers)

    def _begin_anew(self, tiers: t.Sequence[Tier]) -> None:
        """What was seen of these tiers was seen of another server."""
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name not in [one.name for one in tiers]}
        self._failed, self.side, self.proof, self.others = 0, None, None, False
        self._outcome, self._peeked = "answered", None
        for tier in tiers:
            tier.reached, tier.at, tier.detail = False, None, ""

    def mark(self, name: str, reached: bool, detail: str) -> None:
        for tier in self.tiers:
            if tier.name == name:
                if reached and not tier.reached:
                    tier.at = round(self.deadline.elapsed, 3)
                    self._changed = self.deadline.clock.monotonic()
                    if name not in self._climbed:
                        self._climbed.add(name)
                        self.progress.moved("tier")
                tier.reached, tier.detail = reached, self.veil(detail)

    def unit(self, runs: bool, detail: str, since: t.Optional[float]) -> None:
        """What systemd says: whether it runs, and since when its main process does, by the clock of the deadline.

        It is stable when that process has lived for a while, or has made a token. To go on living is no movement.
        """
        if runs and not self._runs:
            self.progress.moved("tier")
        now = self.deadline.clock.monotonic()
        self._runs, self._steady_at = runs, float("-inf") if since is None else since + STEADY
        tier, generates = self.tiers[0], self.tiers[-1].name == "generation" and self.tiers[-1].reached
        if runs and not generates and now < self._steady_at:
            detail += " for %.1f s, and not yet stable" % max(0.0, now - self._steady_at + STEADY)
            runs = False
        if runs and not tier.reached:
            tier.at = round(self.deadline.elapsed, 3)
            self._changed = now
        tier.reached, tier.detail = runs, detail

    @property
    def steady_in(self) -> t.Optional[float]:
        """Seconds until the unit will be stable if it goes on to run; None where that is not the question."""
        if not self._runs or self.tiers[0].reached:
            return None
        return max(0.0, self._steady_at - self.deadline.clock.monotonic())

    def without_unit(self) -> None:
        for tier in self.tiers[:2]:
            tier.reached, tier.detail = None, "not judged without a unit"

    # Between two looks

    @property
    def pause(self) -> float:
        """Seconds until :meth:`stirs` is worth asking again; 0 when only a whole look can tell more."""
        tier = self.missing
        if tier is None or tier.name in ("unit", "generation"):
            return 0.0
        if self._silent:
            return KNOCKS
        if not self._talks:
            return 0.0
        return PEEKS if self.deadline.clock.monotonic() - self._changed < LATER else LATER_PEEKS

    def stirs(self) -> bool:
        """Whether a whole look may find more than the last one did, by signs that cost next to nothing."""
        tier = self.missing
        if tier is None or tier.name in ("unit", "generation"):
            return False
        if self._silent:
            heard, before = self.target.knock(), self._heard
            self._heard = heard
            return heard and before is not True
        if not self._talks:
            return False
        path = self.profile.models if tier.name == "model" else self._health_path
        if tier.name == "model" and self.profile.models_method != "GET":
            return False
        if self._may_have_changed():
            return True  # the key is not for whom it has come to: a whole look tells first who that is
        status, known = self.target.peek(path), self._peeked
        self._peeked = status if status is not None else known
        return status is not None and status != known

    @property
    def _silent(self) -> bool:
        """Whether nobody takes a connection, so that a knock is the first thing that can tell of a change.

        A server that takes them and does not answer must not be knocked at: each knock waits in its queue.
        """
        tier = self.missing
        return tier is not None and (bool(self._silence) if tier.name == "listener" else self._outcome == "refused")

    @property
    def _talks(self) -> bool:
        """Whether the engine answers at once, so that it can be asked often."""
        tier = self.missing
        return tier is not None and tier.name != "listener" and self._outcome == "answered"

    @property
    def _health_path(self) -> str:
        return self.profile.health or self.profile.models

    def explain(self, state: UnitState) -> None:
        """Say what listens instead, for an end in silence: it costs too much to be looked up at each look."""
        tier = self.missing
        if tier is not None and tier.name == "listener" and self._silence:
            with contextlib.suppress(ServingError, OSError):  # what is known already has to do
                found = self.target.listener(state)
                if found.kind in NOBODY:
                    tier.detail = found.silence

    # A whole look

    def climb(
        self,
        state: t.Optional[UnitState],
        watch: t.Callable[[float], None],
        unit: t.Callable[[], t.Optional[Ending]],
    ) -> t.Optional[Ending]:
        """Try the tiers above the unit, lowest first. ``watch`` looks at what moves if that was so many seconds ago.

        ``unit`` looks at the unit once more before the end of it all: what was seen of a life that is over, or about to
        be, proves nothing.
        """
        self._looks += 1
        self._windowed = state is not None and not state.between_lives
        for tier in self.tiers[1:]:
            if tier.name != "listener":
                # Each of these questions carries the key.
                ending = self._still_listens(state, thoroughly=tier.name == "generation")
                if ending is not None or self._lost(tier):
                    return ending
            if tier.reached is False:
                ending = self._step(tier.name, state, watch)
                if ending is not None:
                    return ending
            if tier.reached is False:
                return None
        for last in (unit, lambda: self._still_listens(state, thoroughly=True)):
            ending = last() if self.missing is None else None
            if ending is not None or self.missing is not None:
                return ending
        return Ending("ready", 'the service is ready: the tier "%s" is reached' % self.options.tier)

    def _step(self, name: str, state: t.Optional[UnitState], watch: t.Callable[[float], None]) -> t.Optional[Ending]:
        if name == "listener":
            assert state is not None
            return self._listener(state)
        if name == "health":
            return self._health()
        if name == "model":
            return self._models()
        return self._generation(watch)

    def _lost(self, tier: Tier) -> bool:
        """Whether a tier below this one is not reached any more."""
        return any(one.reached is False for one in self.tiers[1 : self.tiers.index(tier)])

    def _may_have_changed(self, thoroughly: bool = False) -> bool:
        """Whether others may listen than when it was judged who does: a cheap look, unless it is to be thorough.

        A socket stays whose it was for as long as it listens. Where a connection is led on, its end may change behind
        it; and where no socket shows, by what the kernel does.
        """
        if self._sockets is None:  # there is no unit, or it has not been judged
            return False
        now = self.target.sockets()
        if now is None or now != self._sockets:
            return True
        if thoroughly and (self._found != "owned" or not now):
            return True
        return not now and self.deadline.clock.monotonic() - self._judged_at >= JUDGED

    def _still_listens(self, state: t.Optional[UnitState], thoroughly: bool = False) -> t.Optional[Ending]:
        """Judge the port again if it may have come to somebody else since."""
        tier = next((one for one in self.tiers if one.name == "listener" and one.reached), None)
        if state is None or tier is None or not self._may_have_changed(thoroughly):
            return None
        before, detail = self._sockets or frozenset(), tier.detail
        ending = self._listener(state)
        now = self._sockets or frozenset()
        same = before <= now and ((now and self._found == "owned") or tier.detail == detail)
        if not tier.reached or not same:
            self._begin_anew(self.tiers[2:])
        return ending

    def _listener(self, state: UnitState) -> t.Optional[Ending]:
        # Before it is judged: what comes meanwhile is then seen as a change.
        self._sockets, self._judged_at = self.target.sockets() or frozenset(), self.deadline.clock.monotonic()
        self._heard = self.target.knock()
        if self._silence and not self._heard:
            self.mark("listener", False, self._silence)
            self._sure("listener")
            return None
        found = self.target.listener(state)
        self._found = found.kind
        if found.kind == "foreign":
            self._silence = ""
            text = "port %d belongs to another process than the unit's: %s"
            return self._doubt("listener", "wrong_server", text % (self.target.port_number, found.detail))
        if found.kind == "unseen":
            self._silence = ""
            return self._doubt("listener", "unknown", found.detail)
        self._sure("listener")
        self._silence = found.silence if found.kind in NOBODY else ""
        reached, detail = found.kind in ("owned", "forwarder"), found.detail
        if found.kind in NOBODY:
            # Kernel address translation listens nowhere, and answers all the same.
            limit = self._limit
            answer = self.target.greet(self._health_path, limit) if self._heard else None
            if answer is None or answer.outcome == "refused":
                detail = found.silence
            elif answer.outcome == "answered" or answer.outcome in SPOKEN:
                self._silence = ""
                reached = found.kind == "translated"
                detail = "it answers, although no process of this host listens: " + (
                    found.detail or "nothing shows that it is the unit's"
                )
            else:
                self._silence = ""
                detail = "a connection is taken, although no process of this host listens: " + answer.error
                if answer.outcome == "timeout" and limit < GET_TIMEOUT:
                    detail = self.tiers[1].detail or detail
        self.mark("listener", reached, detail)
        return None

    def _health(self) -> t.Optional[Ending]:
        answer = self._ask("health", self._health_path)
        if isinstance(answer, Ending) or answer is None:
            return answer
        status = answer.status or 0
        meaning = _engines.meaning(self.profile, status) if self.profile.health else ""
        if meaning == "dead":
            return self._doubt("health", "dead", "%s says that the engine is dead: status %d" % (answer.url, status))
        self._sure("health")
        self.mark("health", (meaning or ("ready" if status == 200 else "")) == "ready", "status %d" % status)
        return None

    def _models(self) -> t.Optional[Ending]:
        answer = self._ask("model", self.profile.models, self.profile.models_method)
        if isinstance(answer, Ending) or answer is None:
            return answer
        if answer.status != 200:
            self._sure("model")
            self.mark("model", False, "status %d" % (answer.status or 0))
            return None
        listed = _engines.listed(self.profile, answer.body)
        owners = [model.owner for model in listed if model.owner]
        if self.profile.owned_by and owners and self.profile.owned_by not in owners:
            msg = 'another server answers: its models belong to "%s", not to %s' % (owners[0], self.profile.title)
            return self._doubt("model", "wrong_server", msg)
        wanted = self.options.model
        fitting = [m for m in listed if wanted is None or _engines.names_model(self.profile, wanted, m.name)]
        if not fitting:
            names = ", ".join('"%s"' % model.name for model in listed) or "none"
            msg = 'the model "%s" is not listed: there are %s' % (wanted, names) if wanted else "no model is listed"
            if listed and self.profile.models_static:
                return self._doubt("model", "wrong_server", msg)
            self._sure("model")
            if wanted and listed:
                msg = 'the model "%s" is not listed yet: there are %s' % (wanted, names)
                if self.profile.name == "openai":
                    msg += '; "engine" would tell whether more can come'
            self.mark("model", False, msg)
            self.others = bool(wanted and listed)
            return None
        self._sure("model")
        self.others = False
        model = next((entry for entry in fitting if entry.ready is not False), fitting[0])
        if model.ready is False:
            self.mark("model", False, 'lists "%s" as not ready: %s' % (model.name, model.detail))
            return None
        self.model = wanted or model.name
        self.mark("model", True, 'lists "%s"' % self.model)
        return None

    def _generation(self, watch: t.Callable[[float], None]) -> t.Optional[Ending]:
        if self.once and self.profile.loads_on_request:
            self.mark("generation", False, "not looked at, because asking for a token may load the model")
            return None
        clock, limit = self.deadline.clock, max(0.1, self.deadline.clamp(self.options.generation_timeout))
        watch(SLACK)
        began = self._asked = clock.monotonic()
        try:
            side, broken_off = self._attempt(limit, watch)
        finally:
            self._asked = None
        self.side, took = side, clock.monotonic() - began
        if side.verdict in ("ok", "slow"):
            self.mark("generation", True, "a token after %.2f s" % (side.ttft or 0.0))
            if self.steady_in is not None:
                self.mark("unit", True, "its main process has made a token")
            return None
        if broken_off or limit >= self.options.generation_timeout or side.verdict != "wedged":
            self.mark("generation", False, "%s: %s" % (side.verdict, side.error))
        else:
            self._cut_short("generation", "%s: %s" % (side.verdict, side.error))
        if side.verdict == "auth_error":
            return self._refused("generation", "%s answers with status %d" % (side.url or "it", side.status or 0))
        if side.verdict == "wrong_model":
            verdict = "wrong_server"
            msg = "the engine does not generate: %s" % side.error
            if not self.profile.models_static:
                # What is still being loaded may be listed a moment before it is served.
                return self._doubt("generation", verdict, msg)
            return Ending(verdict, msg)
        self._sure("generation")
        failed = side.verdict in FAILURES and side.status not in (None, 429, 503)
        enough, age = self._enough, self.progress.window.age
        full = took >= enough - self._slack if broken_off else limit >= self.options.generation_timeout
        if self.profile.loads_on_request and side.verdict == "wedged":
            # It may have lasted for as long as the load did: only the time in which nothing moved tells.
            full = full and age >= enough - self._slack
        if full or not (failed or side.verdict == "wedged"):
            self.proof = side if failed or side.verdict == "wedged" else None
            self._proved_at = began
        self._failing = self._failing if self._failed else began
        self._failed = self._failed + 1 if failed else 0
        lasted = clock.monotonic() - self._failing
        # An engine that still computes is given as long as an attempt would have.
        idle = not self._windowed or age >= FAILING - SLACK
        broken = self._failed >= FAILED_GENERATIONS and lasted >= (FAILING if idle else max(FAILING, enough))
        quiet = side.verdict == "wedged" and full and age >= max(LEAST, min(limit, enough) - self._slack)
        return self.wedged() if self.listed and (quiet or broken) else None

    def _attempt(self, limit: float, watch: t.Callable[[float], None]) -> t.Tuple[Side, bool]:
        """Ask for a token, until the stall window is over; says whether that broke it off.

        Where the request itself keeps a load going, nothing else but the deadline does.
        """
        began, window = self.deadline.clock.monotonic(), self.progress.window
        if self.profile.loads_on_request:
            limit = max(0.1, self.deadline.remaining)

        def patient() -> None:
            watch(self._slack)
            if self._windowed and window.stalled:
                raise _Over

        try:
            return self.target.generate(self.model, limit, patient), False
        except _Over:
            took = self.deadline.clock.monotonic() - began
            return Side("wedged", total=took, error="no answer within %.0f s" % took), True

    @property
    def _limit(self) -> float:
        """How long a GET may take: it must not delay an end."""
        first = self._windowed and self._looks <= 1 and not self.once
        limit = self.deadline.clamp(FIRST_GET if first else GET_TIMEOUT)
        return max(0.1, min(limit, self.progress.window.remaining) if self._windowed else limit)

    def _ask(self, tier: str, path: str, method: str = "GET") -> t.Union[Ending, _http.Answer, None]:
        """An answer that tells how far the engine has come; an end or nothing where it only tells of the server."""
        if self._outcome not in ("answered", "timeout") and not self.target.knock():
            self._sure(tier)
            return None
        limit = self._limit
        answer = self.target.get(path, limit, method)
        self._outcome = answer.outcome
        if self._outcome != "answered":
            if self._outcome == "timeout" and limit < GET_TIMEOUT:
                self._cut_short(tier, answer.error)
            else:
                self.mark(tier, False, answer.error)
            if self._outcome in SPOKEN:
                self._outcome = "answered"
                return self._doubt(tier, "wrong_server", "%s: %s" % (answer.url, answer.error))
            self._sure(tier)
            return None
        if answer.status in (401, 403):
            return self._refused(tier, "%s answers with status %d" % (answer.url, answer.status))
        if answer.html and answer.status == 200:
            return self._doubt(tier, "wrong_server", "%s answers with an HTML page: it is another program" % answer.url)
        if answer.html:
            self.mark(tier, False, "status %d with an HTML page" % (answer.status or 0))
            self._sure(tier)
            return None
        return answer

    def _cut_short(self, name: str, detail: str) -> None:
        """What a look says that had not its whole time: less than what is known already."""
        known = next((tier.detail for tier in self.tiers if tier.name == name), "")
        self.mark(name, False, known or detail)

    def _refused(self, tier: str, what: str) -> Ending:
        msg = what + (": the API key is refused" if self.target.keyed else ": it wants an API key, and none is given")
        self.mark(tier, False, msg)
        return Ending("auth_error", msg)

    def _doubt(self, tier: str, verdict: str, msg: str) -> t.Optional[Ending]:
        """Evidence that must be seen twice in a row: at a hand-over the last look of the old server is normal."""
        self.mark(tier, False, msg)
        before, looks = self._doubts.get(tier, (verdict, 0))
        looks = looks + 1 if before == verdict else 1
        self._doubts[tier] = (verdict, looks)
        return Ending(verdict, msg) if looks >= CONFIRMATIONS else None

    def _sure(self, tier: str) -> None:
        self._doubts.pop(tier, None)

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        return {
            "tiers": [[tier.reached, tier.at, tier.detail] for tier in self.tiers],
            # A name that must not be told is looked up again.
            "model": self.model if self.model == self.options.model or self._fit(self.model) else None,
            "doubts": {tier: list(doubt) for tier, doubt in self._doubts.items()},
            "side": None if self.side is None else _foreign.walked(vars(self.side), self.veil, keep=("verdict",)),
            "proof": self.proof is not None,
            "failed": self._failed,
            "failing": self._failing,
            "silence": self._silence,
            "outcome": self._outcome,
            "heard": self._heard,
            "peeked": self._peeked,
            "changed": self._changed,
            "runs": self._runs,
            "sockets": None if self._sockets is None else sorted(self._sockets),
            "found": self._found,
            "judged_at": self._judged_at,
            "climbed": sorted(self._climbed),
            "proved_at": self._proved_at,
            "others": self.others,
            "looks": self._looks,
        }

    def _fit(self, model: t.Optional[str]) -> bool:
        return model is None or self.veil(model) == model

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        for tier, (reached, at, detail) in zip(self.tiers, saved["tiers"]):
            tier.reached, tier.at, tier.detail = reached, at, detail
        self.model = saved["model"]
        self._doubts = {tier: (verdict, looks) for tier, (verdict, looks) in saved["doubts"].items()}
        self.side = None if saved["side"] is None else Side(**saved["side"])
        # Of the attempt that is the proof only that there was one is asked.
        self.proof = self.side if saved["proof"] else None
        self._failed, self._failing = saved["failed"], saved["failing"]
        self._silence, self._outcome = saved["silence"], saved["outcome"]
        self._heard, self._peeked, self._changed = saved["heard"], saved["peeked"], saved["changed"]
        self._runs = saved["runs"]
        self._sockets = None if saved["sockets"] is None else frozenset(saved["sockets"])
        self._found, self._judged_at = saved["found"], saved["judged_at"]
        self._climbed = set(saved["climbed"])
        self._proved_at, self.others, self._looks = saved["proved_at"], saved["others"], saved["looks"]
