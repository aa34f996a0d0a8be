# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils._progress import pattern_of, percent_in


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:03<00:09,  3.1s/it]", 25.0),
        ("Capturing CUDA graphs: 33/67", 49.3),
        ("usage: 12.5 %", 12.5),
        ("2026/11/29 12:00:00 hello", None),
        ("model-00001-of-00030.safetensors", None),
        ("GET /v1/models HTTP/1.1", None),
        ("250% of nothing", None),
    ],
)
def test_progress_is_a_percentage_or_n_of_m(line: str, percent: float | None) -> None:
    assert percent_in(line) == percent


def test_lines_that_differ_only_in_numbers_are_one_pattern() -> None:
    assert pattern_of("[2026-11-29 12:00:01 TP0] Waiting 10s (0x7f3a, id=9f3c)") == pattern_of(
        "[2026-11-30 08:10:11 TP3] Waiting 20s (0x1111, id=8e2b)"
    )
    assert pattern_of("Load weight begin") != pattern_of("Load weight end")
