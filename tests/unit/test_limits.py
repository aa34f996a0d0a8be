# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _limits
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

CHECKS: t.Dict[str, t.Callable[[t.Optional[float]], None]] = {
    "finite": lambda value: _limits.finite(x=value),
    "at_least": lambda value: _limits.at_least(0.5, x=value),
    "more_than_zero": lambda value: _limits.more_than_zero(x=value),
}


@pytest.mark.parametrize("check", sorted(CHECKS))
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e300, 10**400])
def test_what_no_wait_can_take_is_refused_by_every_check(check: str, value: float) -> None:
    with pytest.raises(UsageError) as caught:
        CHECKS[check](value)
    assert caught.value.message == '"x" must be a number up to 2000000, not ' + str(value)[:20]


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_what_was_not_given_and_what_fits_is_accepted(check: str) -> None:
    CHECKS[check](None)
    CHECKS[check](1)
    CHECKS[check](1999999.5)


def test_too_small_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        _limits.at_least(0.5, x=0.25)
    assert caught.value.message == '"x" must be at least 0.5, not 0.25'
    with pytest.raises(UsageError) as caught:
        _limits.more_than_zero(x=0)
    assert caught.value.message == '"x" must be more than 0, not 0'
