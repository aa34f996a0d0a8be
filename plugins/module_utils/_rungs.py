# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is known of the tiers of one wait: which are reached, since when, and what speaks against them."""

from __future__ import annotations

import typing as t

from . import _foreign
from ._deadline import Deadline
from ._progress import Progress
from ._tiers import TIERS, Ending, Options, Tier

__all__ = ("Rungs",)

CONFIRMATIONS = 2  # looks in a row that must say "wrong server"
STEADY = 3.0  # seconds that a main process has to live: one that fails at once, again and again, is active in between


class Rungs:
    """The tiers of one wait, lowest first."""

    def __init__(self, options: Options, deadline: Deadline, progress: Progress, veil: _foreign.Veil) -> None:
        self.options, self.deadline, self.progress, self.veil = options, deadline, progress, veil
        self.tiers = [Tier(name) for name in TIERS[: TIERS.index(options.tier) + 1]]
        self.changed = deadline.start  # when the first tier that is missing became it
        self._doubts: t.Dict[str, t.Tuple[str, int]] = {}
        self._climbed: t.Set[str] = set()  # tiers that were news in this life: a port that comes and goes moves nothing
        self._runs = False  # whether the unit does, for however short a time
        self._steady_at = float("-inf")

    # What is asked of them

    def __getitem__(self, name: str) -> t.Optional[Tier]:
        return next((tier for tier in self.tiers if tier.name == name), None)

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
    def listed(self) -> bool:
        tier = self["model"]
        return tier is not None and bool(tier.reached)

    @property
    def doubt(self) -> str:
        """The verdict that one look speaks for and no second one has confirmed; empty without such a look."""
        return next((verdict for verdict, _looks in self._doubts.values()), "")

    def why(self) -> str:
        """The first tier that is not reached, in words."""
        tier = self.missing
        if tier is None:
            return "every tier is reached"
        return 'the tier "%s" is not reached%s' % (tier.name, ": " + tier.detail if tier.detail else "")

    def lost_below(self, tier: Tier) -> bool:
        """Whether a tier between the unit and this one is not reached any more."""
        return any(one.reached is False for one in self.tiers[1 : self.tiers.index(tier)])

    @property
    def steady_in(self) -> t.Optional[float]:
        """Seconds until the unit will be stable if it goes on to run; None where that is not the question."""
        if not self._runs or self.tiers[0].reached:
            return None
        return max(0.0, self._steady_at - self.deadline.clock.monotonic())

    # What is learned of them

    def mark(self, name: str, reached: bool, detail: str) -> None:
        tier = self[name]
        if tier is None:
            return
        if reached and not tier.reached:
            self._rise(tier)
            if name not in self._climbed:
                self._climbed.add(name)
                self.progress.moved("tier")
        tier.reached, tier.detail = reached, self.veil(detail)

    def _rise(self, tier: Tier) -> None:
        tier.at = round(self.deadline.elapsed, 3)
        self.changed = self.deadline.clock.monotonic()

    def cut_short(self, name: str, detail: str) -> None:
        """What a look says that had not its whole time: less than what is known already."""
        tier = self[name]
        self.mark(name, False, (tier.detail if tier is not None else "") or detail)

    def refused(self, name: str, what: str, keyed: bool) -> Ending:
        msg = what + (": the API key is refused" if keyed else ": it wants an API key, and none is given")
        self.mark(name, False, msg)
        return Ending("auth_error", msg)

    def in_doubt(self, name: str, verdict: str, msg: str) -> t.Optional[Ending]:
        """Evidence that must be seen twice in a row: at a hand-over the last look of the old server is normal."""
        self.mark(name, False, msg)
        before, looks = self._doubts.get(name, (verdict, 0))
        looks = looks + 1 if before == verdict else 1
        self._doubts[name] = (verdict, looks)
        return Ending(verdict, msg) if looks >= CONFIRMATIONS else None

    def sure(self, name: str) -> None:
        self._doubts.pop(name, None)

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
            self._rise(tier)
        tier.reached, tier.detail = runs, detail

    def without_unit(self) -> None:
        for tier in self.tiers[:2]:
            tier.reached, tier.detail = None, "not judged without a unit"

    # What was seen holds no more

    def new_life(self) -> None:
        self._runs = False
        self._climbed.clear()
        self.forget(self.tiers)

    def forget(self, tiers: t.Sequence[Tier]) -> None:
        """What was seen of these tiers was seen of another server."""
        gone = [tier.name for tier in tiers]
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name not in gone}
        for tier in tiers:
            tier.reached, tier.at, tier.detail = False, None, ""

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        return {
            "tiers": [[tier.reached, tier.at, tier.detail] for tier in self.tiers],
            "doubts": {tier: list(doubt) for tier, doubt in self._doubts.items()},
            "changed": self.changed,
            "runs": self._runs,
            "climbed": sorted(self._climbed),
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        for tier, (reached, at, detail) in zip(self.tiers, saved["tiers"]):
            tier.reached, tier.at, tier.detail = reached, at, detail
        self._doubts = {tier: (verdict, looks) for tier, (verdict, looks) in saved["doubts"].items()}
        self.changed, self._runs, self._climbed = saved["changed"], saved["runs"], set(saved["climbed"])
