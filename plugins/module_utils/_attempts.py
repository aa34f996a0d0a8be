# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The tier "generation": attempts at a token, and when they prove that none will come."""

from __future__ import annotations

import typing as t

from . import _foreign
from ._engines import Profile
from ._generation import Side
from ._rungs import Rungs
from ._tiers import Ending, Target

__all__ = ("Attempts",)

FAILURES = ("error_response", "empty_response", "misconfigured")
FAILED = 3  # answers of that kind in a row that make a wedge
FAILING = 5.0  # seconds that they must have lasted: an engine that still loads can fail faster than it loads
SLACK = 1.0  # seconds of an attempt in which what it sets going itself may move
LEAST = 0.5  # seconds without movement that show anything at all

Watch = t.Callable[[float], None]


class _Over(Exception):
    """An attempt at a token has had all its time."""


class Attempts:
    """The attempts at a token of one wait."""

    def __init__(self, target: Target, profile: Profile, rungs: Rungs) -> None:
        self.target, self.profile, self.rungs = target, profile, rungs
        self.options, self.deadline, self.window = rungs.options, rungs.deadline, rungs.progress.window
        self.windowed = False  # whether the stall window may end the wait
        self.proof: t.Optional[Side] = None  # of a wedge: an attempt that had all its time
        self._side: t.Optional[Side] = None
        self._proved_at = 0.0  # when the attempt that is the proof began
        self._failed = 0
        self._failing = 0.0  # since when
        self._asked: t.Optional[float] = None  # since when a token is asked for

    def forget(self) -> None:
        self._failed, self._side, self.proof = 0, None, None

    # What they tell

    @property
    def asking(self) -> t.Optional[float]:
        """Seconds for which an answer to the request for a token has been waited for; None while there is no such."""
        return None if self._asked is None else self.deadline.clock.monotonic() - self._asked

    @property
    def _enough(self) -> float:
        """Seconds for which an attempt at a token goes on while nothing moves: that is as good as all its time."""
        enough = self.options.generation_timeout
        return min(enough, self.options.stall_timeout) if self.windowed else enough

    @property
    def _slack(self) -> float:
        return min(SLACK, self._enough / 4)

    @property
    def proved(self) -> bool:
        """Whether no token came by an attempt that had all its time, and nothing has moved since it began.

        What moves is slow, or a loop that turns: nobody can tell. Without a unit nothing can be seen to move.
        """
        if self.proof is None or not self.rungs.listed:
            return False
        if not self.windowed:
            return True
        window = self.window
        return window.age >= max(LEAST, self._enough - self._slack) or window.last <= self._proved_at + self._slack

    def wedged(self) -> Ending:
        assert self._side is not None
        return Ending("wedged", "the engine lists its model, but it does not generate: %s" % self._side.error)

    # An attempt

    def make(self, model: t.Optional[str], watch: Watch) -> t.Optional[Ending]:
        """Ask for a token, and judge what comes of it. ``watch`` looks at what moves if that was so long ago."""
        clock, limit = self.deadline.clock, max(0.1, self.deadline.clamp(self.options.generation_timeout))
        watch(SLACK)
        began = self._asked = clock.monotonic()
        try:
            side, broken_off = self._ask(model, limit, watch)
        finally:
            self._asked = None
        self._side = side
        if side.verdict in ("ok", "slow"):
            self.rungs.mark("generation", True, "a token after %.2f s" % (side.ttft or 0.0))
            if self.rungs.steady_in is not None:
                self.rungs.mark("unit", True, "its main process has made a token")
            return None
        whole = limit >= self.options.generation_timeout
        text = "%s: %s" % (side.verdict, side.error)
        if broken_off or whole or side.verdict != "wedged":
            self.rungs.mark("generation", False, text)
        else:
            self.rungs.cut_short("generation", text)
        if side.verdict == "auth_error":
            what = "%s answers with status %d" % (side.url or "it", side.status or 0)
            return self.rungs.refused("generation", what, self.target.keyed)
        if side.verdict == "wrong_model":
            return self._wrong_model(side)
        self.rungs.sure("generation")
        if broken_off:
            whole = clock.monotonic() - began >= self._enough - self._slack
        return self._judge(side, began, whole, min(limit, self._enough))

    def _ask(self, model: t.Optional[str], limit: float, watch: Watch) -> t.Tuple[Side, bool]:
        """Ask for a token, until the stall window is over; says whether that broke it off.

        Where the request itself keeps a load going, nothing else but the deadline does.
        """
        began = self.deadline.clock.monotonic()
        if self.profile.loads_on_request:
            limit = max(0.1, self.deadline.remaining)

        def patient() -> None:
            watch(self._slack)
            if self.windowed and self.window.stalled:
                raise _Over

        try:
            return self.target.generate(model, limit, patient), False
        except _Over:
            took = self.deadline.clock.monotonic() - began
            return Side("wedged", total=took, error="no answer within %.0f s" % took), True

    def _wrong_model(self, side: Side) -> t.Optional[Ending]:
        msg = "the engine does not generate: %s" % side.error
        if self.profile.models_static:
            return Ending("wrong_server", msg)
        # What is still being loaded may be listed a moment before it is served.
        return self.rungs.in_doubt("generation", "wrong_server", msg)

    def _judge(self, side: Side, began: float, whole: bool, limit: float) -> t.Optional[Ending]:
        """Whether no token will come: by one attempt that had all its time, or by failures in a row."""
        silent = side.verdict == "wedged"
        failed = side.verdict in FAILURES and side.status not in (None, 429, 503)
        age = self.window.age
        if self.profile.loads_on_request and silent:
            # It may have lasted for as long as the load did: only the time in which nothing moved tells.
            whole = whole and age >= self._enough - self._slack
        if whole or not (failed or silent):
            self.proof = side if failed or silent else None
            self._proved_at = began
        self._failing = self._failing if self._failed else began
        self._failed = self._failed + 1 if failed else 0
        lasted = self.deadline.clock.monotonic() - self._failing
        # An engine that still computes is given as long as an attempt would have.
        idle = not self.windowed or age >= FAILING - SLACK
        broken = self._failed >= FAILED and lasted >= (FAILING if idle else max(FAILING, self._enough))
        quiet = silent and whole and age >= max(LEAST, limit - self._slack)
        return self.wedged() if self.rungs.listed and (quiet or broken) else None

    # Another process goes on

    def save(self, veil: _foreign.Veil) -> t.Dict[str, t.Any]:
        return {
            "side": None if self._side is None else _foreign.walked(vars(self._side), veil, keep=("verdict",)),
            "proof": self.proof is not None,
            "proved_at": self._proved_at,
            "failed": self._failed,
            "failing": self._failing,
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self._side = None if saved["side"] is None else Side(**saved["side"])
        # Of the attempt that is the proof only that there was one is asked.
        self.proof = self._side if saved["proof"] else None
        self._proved_at = saved["proved_at"]
        self._failed, self._failing = saved["failed"], saved["failing"]
