# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Numbers that a caller sets, and the least and the most that each may be."""

from __future__ import annotations

import typing as t

from ._errors import UsageError

__all__ = ("at_least", "finite", "more_than_zero")

MOST = 2000000  # 23 days in seconds; a little more, and the calls that wait in the kernel refuse it


def finite(**values: t.Optional[float]) -> None:
    """Refuse what never ends, what is no number, and what no call can wait for."""
    for name, value in values.items():
        if value is not None and not -MOST <= value <= MOST:
            given = str(value)[:20]
            raise UsageError('"%s" must be a number up to %d, not %s' % (name, MOST, given))


def at_least(least: float, **values: t.Optional[float]) -> None:
    """Refuse a value that is too small, or not finite; one that was not given is no mistake."""
    finite(**values)
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError('"%s" must be at least %g, not %g' % (name, least, value))


def more_than_zero(**values: t.Optional[float]) -> None:
    """Refuse what would be no time at all, or would never end."""
    finite(**values)
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UsageError('"%s" must be more than 0, not %g' % (name, value))
