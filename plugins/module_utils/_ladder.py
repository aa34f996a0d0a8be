# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The ladder from "the unit is active" to "a token came back": which look tries which tier, and what ends the wait."""

from __future__ import annotations

import typing as t

from . import _engines, _foreign, _http
from ._attempts import Attempts, Watch
from ._deadline import Deadline
from ._engines import Profile
from ._port import GET_TIMEOUT, SPOKEN, Port
from ._progress import Progress
from ._rungs import Rungs
from ._systemd import UnitState
from ._tiers import Ending, Options, Target, Tier

__all__ = ("Ladder",)

FIRST_GET = 0.8  # before anything else was looked at: what is there by then is no movement
# A port that opens late is the last step of a load; one that is open early is asked less often after a while.
KNOCKS, PEEKS, LATER_PEEKS, LATER = 0.1, 0.2, 0.5, 30.0


class Ladder:
    """The looks at the tiers of one wait."""

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
        self.rungs = Rungs(options, deadline, progress, veil)
        self.port = Port(target, self.rungs, self._health_path, lambda: self._limit)
        self.attempts = Attempts(target, profile, self.rungs)
        self.model = options.model
        self.once = False  # whether there is one look only
        self._others = False  # whether the list of models has some, and not the one that is wanted
        self._outcome = "answered"  # of the last GET, if there was one
        self._peeked: t.Optional[int] = None
        self._looks = 0

    @property
    def strange(self) -> bool:
        """Whether what is missing is the model, in a list that has others."""
        return self._others and self.rungs.missing is not None and self.rungs.missing.name == "model"

    def new_life(self) -> None:
        """The unit was started again, so nothing of what was seen holds any more."""
        self.port.new_life()
        self.rungs.new_life()
        self._begin_anew(self.rungs.tiers)

    def _begin_anew(self, tiers: t.Sequence[Tier]) -> None:
        """What was seen of these tiers was seen of another server."""
        self.rungs.forget(tiers)
        self.attempts.forget()
        self._others, self._outcome, self._peeked = False, "answered", None

    # Between two looks

    @property
    def pause(self) -> float:
        """Seconds until :meth:`stirs` is worth asking again; 0 when only a whole look can tell more."""
        tier = self.rungs.missing
        if tier is None or tier.name in ("unit", "generation"):
            return 0.0
        if self._silent:
            return KNOCKS
        if not self._talks:
            return 0.0
        return PEEKS if self.deadline.clock.monotonic() - self.rungs.changed < LATER else LATER_PEEKS

    def stirs(self) -> bool:
        """Whether a whole look may find more than the last one did, by signs that cost next to nothing."""
        tier = self.rungs.missing
        if tier is None or tier.name in ("unit", "generation"):
            return False
        if self._silent:
            return self.port.opens()
        if not self._talks:
            return False
        path = self.profile.models if tier.name == "model" else self._health_path
        if tier.name == "model" and self.profile.models_method != "GET":
            return False
        if self.port.may_have_changed():
            return True  # the key is not for whom it has come to: a whole look tells first who that is
        status, known = self.target.peek(path), self._peeked
        self._peeked = status if status is not None else known
        return status is not None and status != known

    @property
    def _silent(self) -> bool:
        """Whether nobody takes a connection, so that a knock is the first thing that can tell of a change.

        A server that takes them and does not answer must not be knocked at: each knock waits in its queue.
        """
        tier = self.rungs.missing
        return tier is not None and (bool(self.port.silence) if tier.name == "listener" else self._outcome == "refused")

    @property
    def _talks(self) -> bool:
        """Whether the engine answers at once, so that it can be asked often."""
        tier = self.rungs.missing
        return tier is not None and tier.name != "listener" and self._outcome == "answered"

    @property
    def _health_path(self) -> str:
        return self.profile.health or self.profile.models

    # A whole look

    def climb(
        self,
        state: t.Optional[UnitState],
        watch: Watch,
        unit: t.Callable[[], t.Optional[Ending]],
    ) -> t.Optional[Ending]:
        """Try the tiers above the unit, lowest first. ``watch`` looks at what moves if that was so many seconds ago.

        ``unit`` looks at the unit once more before the end of it all: what was seen of a life that is over, or about to
        be, proves nothing.
        """
        self._looks += 1
        self.attempts.windowed = state is not None and not state.between_lives
        for tier in self.rungs.tiers[1:]:
            if tier.name != "listener":
                # Each of these questions carries the key.
                ending = self._still_listens(state, thoroughly=tier.name == "generation")
                if ending is not None or self.rungs.lost_below(tier):
                    return ending
            if tier.reached is False:
                ending = self._step(tier.name, state, watch)
                if ending is not None:
                    return ending
            if tier.reached is False:
                return None
        for last in (unit, lambda: self._still_listens(state, thoroughly=True)):
            ending = last() if self.rungs.missing is None else None
            if ending is not None or self.rungs.missing is not None:
                return ending
        return Ending("ready", 'the service is ready: the tier "%s" is reached' % self.options.tier)

    def _step(self, name: str, state: t.Optional[UnitState], watch: Watch) -> t.Optional[Ending]:
        if name == "listener":
            assert state is not None
            return self.port.judge(state)
        if name == "health":
            return self._health()
        if name == "model":
            return self._models()
        return self._generation(watch)

    def _still_listens(self, state: t.Optional[UnitState], thoroughly: bool = False) -> t.Optional[Ending]:
        """Judge the port again if it may have come to somebody else since."""
        tier = self.rungs["listener"]
        if state is None or tier is None or not tier.reached or not self.port.may_have_changed(thoroughly):
            return None
        ending, same = self.port.judge_again(state)
        if not same:
            self._begin_anew(self.rungs.tiers[2:])
        return ending

    def _health(self) -> t.Optional[Ending]:
        answer = self._ask("health", self._health_path)
        if isinstance(answer, Ending) or answer is None:
            return answer
        status = answer.status or 0
        meaning = _engines.meaning(self.profile, status) if self.profile.health else ""
        if meaning == "dead":
            msg = "%s says that the engine is dead: status %d" % (answer.url, status)
            return self.rungs.in_doubt("health", "dead", msg)
        self.rungs.sure("health")
        self.rungs.mark("health", (meaning or ("ready" if status == 200 else "")) == "ready", "status %d" % status)
        return None

    def _models(self) -> t.Optional[Ending]:
        answer = self._ask("model", self.profile.models, self.profile.models_method)
        if isinstance(answer, Ending) or answer is None:
            return answer
        if answer.status != 200:
            self.rungs.sure("model")
            self.rungs.mark("model", False, "status %d" % (answer.status or 0))
            return None
        listed = _engines.listed(self.profile, answer.body)
        owners = [model.owner for model in listed if model.owner]
        if self.profile.owned_by and owners and self.profile.owned_by not in owners:
            msg = 'another server answers: its models belong to "%s", not to %s' % (owners[0], self.profile.title)
            return self.rungs.in_doubt("model", "wrong_server", msg)
        wanted = self.options.model
        fitting = [m for m in listed if wanted is None or _engines.names_model(self.profile, wanted, m.name)]
        if not fitting:
            names = ", ".join('"%s"' % model.name for model in listed) or "none"
            msg = 'the model "%s" is not listed: there are %s' % (wanted, names) if wanted else "no model is listed"
            if listed and self.profile.models_static:
                return self.rungs.in_doubt("model", "wrong_server", msg)
            self.rungs.sure("model")
            if wanted and listed:
                msg = 'the model "%s" is not listed yet: there are %s' % (wanted, names)
                if self.profile.name == "openai":
                    msg += '; "engine" would tell whether more can come'
            self.rungs.mark("model", False, msg)
            self._others = bool(wanted and listed)
            return None
        self.rungs.sure("model")
        self._others = False
        model = next((entry for entry in fitting if entry.ready is not False), fitting[0])
        if model.ready is False:
            self.rungs.mark("model", False, 'lists "%s" as not ready: %s' % (model.name, model.detail))
            return None
        self.model = wanted or model.name
        self.rungs.mark("model", True, 'lists "%s"' % self.model)
        return None

    def _generation(self, watch: Watch) -> t.Optional[Ending]:
        if self.once and self.profile.loads_on_request:
            self.rungs.mark("generation", False, "not looked at, because asking for a token may load the model")
            return None
        return self.attempts.make(self.model, watch)

    @property
    def _limit(self) -> float:
        """How long a GET may take: it must not delay an end."""
        first = self.attempts.windowed and self._looks <= 1 and not self.once
        limit = self.deadline.clamp(FIRST_GET if first else GET_TIMEOUT)
        return max(0.1, min(limit, self.progress.window.remaining) if self.attempts.windowed else limit)

    def _ask(self, tier: str, path: str, method: str = "GET") -> t.Union[Ending, _http.Answer, None]:
        """An answer that tells how far the engine has come; an end or nothing where it only tells of the server."""
        if self._outcome not in ("answered", "timeout") and not self.target.knock():
            self.rungs.sure(tier)
            return None
        limit = self._limit
        answer = self.target.get(path, limit, method)
        self._outcome = answer.outcome
        if self._outcome != "answered":
            if self._outcome == "timeout" and limit < GET_TIMEOUT:
                self.rungs.cut_short(tier, answer.error)
            else:
                self.rungs.mark(tier, False, answer.error)
            if self._outcome in SPOKEN:
                self._outcome = "answered"
                return self.rungs.in_doubt(tier, "wrong_server", "%s: %s" % (answer.url, answer.error))
            self.rungs.sure(tier)
            return None
        if answer.status in (401, 403):
            what = "%s answers with status %d" % (answer.url, answer.status)
            return self.rungs.refused(tier, what, self.target.keyed)
        if answer.html and answer.status == 200:
            msg = "%s answers with an HTML page: it is another program" % answer.url
            return self.rungs.in_doubt(tier, "wrong_server", msg)
        if answer.html:
            self.rungs.mark(tier, False, "status %d with an HTML page" % (answer.status or 0))
            self.rungs.sure(tier)
            return None
        return answer

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        return {
            "rungs": self.rungs.save(),
            "port": self.port.save(),
            "attempts": self.attempts.save(self.veil),
            # A name that must not be told is looked up again.
            "model": self.model if self.model == self.options.model or self._fit(self.model) else None,
            "outcome": self._outcome,
            "peeked": self._peeked,
            "others": self._others,
            "looks": self._looks,
        }

    def _fit(self, model: t.Optional[str]) -> bool:
        return model is None or self.veil(model) == model

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self.rungs.restore(saved["rungs"])
        self.port.restore(saved["port"])
        self.attempts.restore(saved["attempts"])
        self.model, self._outcome, self._peeked = saved["model"], saved["outcome"], saved["peeked"]
        self._others, self._looks = saved["others"], saved["looks"]
