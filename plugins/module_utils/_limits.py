# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Numbers that a caller sets, and the least that each may be."""

from __future__ import annotations

import typing as t

from ._errors import UsageError

__all__ = ("at_least", "more_than_zero")


def at_least(least: float, **values: t.Optional[float]) -> None:
    """Refuse a value that is too small; one that was not given is no mistake."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError('"%s" must be at least %g, not %g' % (name, least, value))


def more_than_zero(**values: t.Optional[float]) -> None:
    """Refuse what would be no time at all."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UsageError('"%s" must be more than 0, not %g' % (name, value))
