# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The lives of the unit that a wait has seen: how often it was started again, and what ended them."""

from __future__ import annotations

import typing as t

from . import _causes, _ends
from ._progress import Progress
from ._systemd import UnitState

__all__ = ("Lives",)


class Lives:
    """The lives of one unit."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._counted = [0, 0]  # restarts that systemd counted, and new lives: one restart shows in both, not at once
        self._ends = _ends.Ends()  # of the life that goes on
        self._end: t.Optional[_ends.End] = None  # of the last life whose cause is known from there alone

    @property
    def restarts(self) -> int:
        return max(self._counted)

    @property
    def stopped(self) -> bool:
        """Whether somebody stopped the unit, by what systemd says of this life."""
        return self._ends.stopped

    def line(self, text: str, own: bool) -> None:
        """A line of the log, with whether the service itself wrote it rather than systemd."""
        if own:
            self._ends.own(text)
        else:
            self._ends.systemd(text)

    def count(self, before: UnitState, state: UnitState) -> int:
        """Count what happened between two looks; says how many restarts, or -1 for a new life without one."""
        restarted = max(0, state.n_restarts - before.n_restarts)
        new_life = before.invocation_id and state.invocation_id and before.invocation_id != state.invocation_id
        self._counted = [self._counted[0] + restarted, self._counted[1] + bool(new_life)]
        return restarted or (-1 if new_life else 0)

    def new_life(self) -> None:
        self._ends = _ends.Ends()
        self._progress.new_life()

    @property
    def cause(self) -> t.Optional[_causes.Cause]:
        """The most telling cause of this life and of the ones before."""
        return _causes.better(self._progress.cause, self._progress.last_cause)

    def conclude(self, state: t.Optional[UnitState]) -> bool:
        """Find the cause of a life that is over; says whether systemd tells how it ended.

        What systemd decided itself is surer than a vague line. Else the log knows better; where it does not, the last
        word of the process itself names what no pattern knows.
        """
        end, known = self._ends.of(state), self.cause
        if end is None:
            return False
        cause: t.Optional[_causes.Cause] = known
        if known is None or (self._end is not None and known == self._end.cause):
            cause = end.cause
        elif end.kind in _ends.DEFINITE:
            cause = _causes.better(end.cause, known)
        if cause == end.cause:
            self._end = end
        self._progress.cause = cause
        return True

    def why(self, state: UnitState, word: bool = False) -> str:
        """The cause of an end, from the log or else from what systemd says; with the last word where asked for."""
        known = self.cause
        if known is None:
            return "systemd says %s" % state.result
        if self._end is None or known != self._end.cause:
            return str(known["line"])
        said = word and self._end.kind in ("exited", "killed") and self._end.line != self._end.text
        return '%s, with the last word "%s"' % self._end[1:] if said else self._end.text

    # Another process goes on

    def save(self) -> t.Dict[str, t.Any]:
        return {"counted": self._counted, "ends": self._ends.save(), "end": self._end}

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self._counted = list(saved["counted"])
        self._ends.restore(saved["ends"])
        self._end = None if saved["end"] is None else _ends.End(*saved["end"])
