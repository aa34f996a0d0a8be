# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _verdicts

GOOD = {
    "clear",
    "absent",
    "stopped",
    "started",
    "running",
    "ready",
    "ok",
    "slow",
    "idle",
    "drained",
    "held",
    "released",
    "clean",
    "minor",
}


def test_only_what_is_proved_is_good() -> None:
    assert {word for word, meaning in _verdicts.VERDICTS.items() if meaning.ok} == GOOD


def test_whatever_is_not_good_fails_and_exits_non_zero() -> None:
    for word, meaning in _verdicts.VERDICTS.items():
        assert meaning.fails is not meaning.ok, word
        assert (meaning.exit_code == 0) is meaning.ok, word


@pytest.mark.parametrize(
    ("words", "overall"),
    [
        ([], "unknown"),
        (["clear", "clear"], "clear"),
        (["clear", "busy"], "busy"),
        (["busy", "unknown"], "unknown"),
        (["unknown", "error", "clear"], "error"),
    ],
)
def test_the_worst_device_decides_and_no_device_is_never_clear(words: list[str], overall: str) -> None:
    assert _verdicts.worst(words) == overall
