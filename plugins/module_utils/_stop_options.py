# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How to stop: what may be asked for, and what may not."""

from __future__ import annotations

from dataclasses import dataclass

from . import _limits

__all__ = ["Options"]


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
