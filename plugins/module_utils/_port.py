# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The tier "listener": who answers on the engine's port, and whether that may have changed since it was judged."""

from __future__ import annotations

import contextlib
import typing as t

from ._errors import ServingError
from ._rungs import Rungs
from ._systemd import UnitState
from ._tiers import Ending, Target

__all__ = ("GET_TIMEOUT", "SPOKEN", "Port")

GET_TIMEOUT = 5.0
JUDGED = 1.0  # seconds for which it holds who listens, where the kernel shows no socket that tells of a change
NOBODY = ("none", "translated")
SPOKEN = ("tls", "not_http", "redirected", "too_large")  # somebody answers, although it is no answer of use


class Port:
    """The engine's port, as the host shows it."""

    def __init__(self, target: Target, rungs: Rungs, path: str, limit: t.Callable[[], float]) -> None:
        """``path`` is what a server is asked for that shows by its answer alone, ``limit`` how long that may take."""
        self.target, self.rungs, self.clock = target, rungs, rungs.deadline.clock
        self._path, self._limit = path, limit
        self.silence = ""  # what there is to say as long as nobody listens
        self._heard: t.Optional[bool] = None
        self._sockets: t.Optional[t.FrozenSet[int]] = None  # that listened when it was judged who does
        self._found, self._judged_at = "", 0.0

    def new_life(self) -> None:
        self._sockets, self._found = None, ""
        self.silence, self._heard = "", None

    def opens(self) -> bool:
        """Whether a connection is taken now, and was not before. Costs next to nothing."""
        before, self._heard = self._heard, self.target.knock()
        return self._heard and before is not True

    def may_have_changed(self, thoroughly: bool = False) -> bool:
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
        return not now and self.clock.monotonic() - self._judged_at >= JUDGED

    def judge_again(self, state: UnitState) -> t.Tuple[t.Optional[Ending], bool]:
        """The same as :meth:`judge`, and whether it is still the same server as far as can be seen."""
        tier = self.rungs["listener"]
        assert tier is not None
        before, detail = self._sockets or frozenset(), tier.detail
        ending = self.judge(state)
        now = self._sockets or frozenset()
        same = before <= now and ((now and self._found == "owned") or tier.detail == detail)
        return ending, bool(tier.reached and same)

    def judge(self, state: UnitState) -> t.Optional[Ending]:
        """Find out who listens."""
        # Before it is judged: what comes meanwhile is then seen as a change.
        self._sockets, self._judged_at = self.target.sockets() or frozenset(), self.clock.monotonic()
        self._heard = self.target.knock()
        if self.silence and not self._heard:
            self.rungs.mark("listener", False, self.silence)
            self.rungs.sure("listener")
            return None
        found = self.target.listener(state)
        self._found = found.kind
        if found.kind == "foreign":
            self.silence = ""
            text = "port %d belongs to another process than the unit's: %s"
            return self.rungs.in_doubt("listener", "wrong_server", text % (self.target.port_number, found.detail))
        if found.kind == "unseen":
            self.silence = ""
            return self.rungs.in_doubt("listener", "unknown", found.detail)
        self.rungs.sure("listener")
        self.silence = found.silence if found.kind in NOBODY else ""
        reached, detail = found.kind in ("owned", "forwarder"), found.detail
        if found.kind in NOBODY:
            # Kernel address translation listens nowhere, and answers all the same.
            reached, detail = self._greet(found.kind == "translated", found.detail)
        self.rungs.mark("listener", reached, detail)
        return None

    def _greet(self, translated: bool, by: str) -> t.Tuple[bool, str]:
        """Whether somebody answers although nobody is seen to listen, and what to say of it."""
        limit = self._limit()
        answer = self.target.greet(self._path, limit) if self._heard else None
        if answer is None or answer.outcome == "refused":
            return False, self.silence
        self.silence = ""
        if answer.outcome == "answered" or answer.outcome in SPOKEN:
            text = "it answers, although no process of this host listens: %s"
            return translated, text % (by or "nothing shows that it is the unit's")
        detail = "a connection is taken, although no process of this host listens: " + answer.error
        if answer.outcome == "timeout" and limit < GET_TIMEOUT:
            tier = self.rungs["listener"]
            detail = (tier.detail if tier is not None else "") or detail
        return False, detail

    def explain(self, state: UnitState) -> None:
        """Say what listens instead, for an end in silence: it costs too much to be looked up at each look."""
        tier = self.rungs.missing
        if tier is not None and tier.name == "listener" and self.silence:
            with contextlib.suppress(ServingError, OSError):  # what is known already has to do
                found = self.target.listener(state)
                if found.kind in NOBODY:
                    tier.detail = found.silence

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        return {
            "silence": self.silence,
            "heard": self._heard,
            "sockets": None if self._sockets is None else sorted(self._sockets),
            "found": self._found,
            "judged_at": self._judged_at,
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self.silence, self._heard = saved["silence"], saved["heard"]
        self._sockets = None if saved["sockets"] is None else frozenset(saved["sockets"])
        self._found, self._judged_at = saved["found"], saved["judged_at"]
