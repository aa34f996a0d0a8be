# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How to stop: what may be asked for, and what may not."""

from __future__ import annotations

from dataclasses import dataclass

from . import _limits
from ._systemd import UnitState

__all__ = ["Options"]

DEFAULT_GRACE = 30.0
UNIT_GRACE = 90.0  # for a unit that sets no limit of its own
REST_GRACE = 15.0


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

    def front_grace(self, state: UnitState | None) -> float:
        """Seconds for the front process, or for the unit."""
        if self.grace is not None:
            return self.grace
        if state is not None:
            own = state.timeout_stop
            return own + 5.0 if 0 < own < float("inf") else UNIT_GRACE
        return DEFAULT_GRACE

    def later_grace(self, state: UnitState | None) -> float:
        """Seconds for the rest."""
        return min(REST_GRACE, self.front_grace(state)) if self.grace is None else self.grace

    def share(self, wanted: float) -> float:
        """What is kept free of a wait for the next one: of a limit that is too short for all, at most a third."""
        return wanted if self.timeout is None else min(wanted, self.timeout / 3.0)
