# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What people read of a wait."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _wait_text

LIVE: t.Dict[str, t.Any] = {
    "phase": "loading_weights",
    "percent": 63.4,
    "missing": "listener",
    "restarts": 0,
    "memory": 71204,
    "moved": 2.1,
    "stall_timeout": 300.0,
    "elapsed": 252.0,
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "loading weights 63 % · 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"percent": None, "memory": None}, "loading weights · 4 m 12 s, moved 2 s ago"),
        ({"restarts": 1}, "loading weights 63 % · 71204 MiB · restarted once · 4 m 12 s, moved 2 s ago"),
        ({"restarts": 2}, "loading weights 63 % · 71204 MiB · restarted 2 times · 4 m 12 s, moved 2 s ago"),
        ({"elapsed": 7325.0}, "loading weights 63 % · 71204 MiB · 2 h 02 m, moved 2 s ago"),
        (
            {"moved": 65.0},
            "loading weights 63 % · 71204 MiB · 4 m 12 s, nothing moved for 1 m 05 s (stalled at 5 m 00 s)",
        ),
        ({"moved": None, "memory": None}, "loading weights 63 % · 4 m 12 s"),
        ({"phase": "", "percent": None}, "starting, the port is not open · 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"missing": "unit"}, "waiting for the unit · 71204 MiB · 4 m 12 s, moved 2 s ago"),
        # What the log said last is over when the port is open and the engine says that it is up.
        (
            {"phase": "started", "missing": "health", "percent": None},
            "the port is open, not healthy yet · 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        ({"missing": "health"}, "loading weights 63 % · 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"missing": "model"}, "healthy, the model is not listed yet · 71204 MiB · 4 m 12 s, moved 2 s ago"),
        (
            {"missing": "generation"},
            "the model is listed, waiting for a token · 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        (
            {"missing": "generation", "asking": 12.4},
            "asking for a token, 12 s · 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        # One that comes back at once is no news.
        (
            {"missing": "generation", "asking": 0.9},
            "the model is listed, waiting for a token · 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        ({"missing": ""}, "ready · 71204 MiB · 4 m 12 s, moved 2 s ago"),
    ],
)
def test_a_line(change: t.Dict[str, t.Any], line: str) -> None:
    assert _wait_text.line({**LIVE, **change}) == line


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"elapsed": 900.0, "memory": 3, "moved": 9.0, "percent": 63.9}, ""),
        ({"percent": 64.0}, "little"),
        ({"percent": None}, "little"),
        ({"phase": "compiling"}, "much"),
        ({"missing": "health"}, ""),
        ({"missing": "generation"}, "much"),
        ({"restarts": 1}, "much"),
        ({"moved": 61.0}, "much"),
    ],
)
def test_what_is_a_change(change: t.Dict[str, t.Any], word: str) -> None:
    assert _wait_text.changed(_wait_text.key(LIVE), _wait_text.key({**LIVE, **change})) == word


def test_moving_again_is_no_great_matter() -> None:
    still = _wait_text.key({**LIVE, "moved": 61.0})
    assert _wait_text.changed(still, _wait_text.key(LIVE)) == "little"
    assert _wait_text.changed(still, _wait_text.key({**LIVE, "phase": "compiling"})) == "much"


def test_the_first_look_is_a_change() -> None:
    assert _wait_text.changed(None, _wait_text.key(LIVE)) == "much"


@pytest.mark.parametrize(("stall", "quiet"), [(300.0, 60.0), (60.0, 15.0), (10.0, 5.0), (1800.0, 360.0)])
def test_standing_still_is_told_long_before_it_is_a_stall(stall: float, quiet: float) -> None:
    for moved, still in ((quiet - 0.1, False), (quiet, True)):
        assert _wait_text.key({**LIVE, "stall_timeout": stall, "moved": moved})[2] is still


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"service": "qwen", "unit": "vllm.service", "url": "u"}, "qwen"),
        ({"service": None, "unit": "vllm.service", "url": "u"}, "vllm"),
        ({"unit": "vllm.scope"}, "vllm.scope"),
        ({"url": "http://gpu:8000"}, "http://gpu:8000"),
        # A secret in it is refused by the host, which is asked later.
        ({"url": "http://gpu:8000/v1?key=hunter2"}, "http://gpu:8000/v1"),
        ({"url": "http://gpu:8000/v1#hunter2"}, "http://gpu:8000/v1"),
        ({"url": "http://ops:hunter2@gpu:8000"}, ""),
        ({"url": "ops:hun?ter2@gpu:8000"}, ""),
        ({"url": "http://gpu/?key=a@hunter2"}, ""),
        ({}, ""),
    ],
)
def test_the_name_of_what_is_waited_for(params: t.Dict[str, t.Any], name: str) -> None:
    assert _wait_text.subject(params) == name


def test_the_end_of_a_wait_as_text() -> None:
    result = {
        "verdict": "dead",
        "tiers": [
            {"name": "unit", "reached": True, "at": 0.02, "detail": "active (running), main process 7"},
            {"name": "listener", "reached": None, "at": None, "detail": "not judged without a unit"},
            {"name": "health", "reached": False, "at": None, "detail": ""},
        ],
        "cause": {
            "kind": "gpu_out_of_memory",
            "line": "CUDA out of memory.",
            "figures": {"free_mib": 3170.3, "total_mib": 81559.0},
            "holders": ['process 9 "python3" holds 78102 MiB on GPU 0'],
        },
        "log_tail": ["line %d" % number for number in range(12)],
    }
    assert _wait_text.lines(result) == [
        "unit        reached at 0 s: active (running), main process 7",
        "listener    not judged: not judged without a unit",
        "health      not reached",
        "cause: gpu_out_of_memory: CUDA out of memory.",
        "memory: free 3170.3 MiB, total 81559 MiB",
        'holds the GPU: process 9 "python3" holds 78102 MiB on GPU 0',
        *("log: line %d" % number for number in range(2, 12)),
    ]
    assert _wait_text.lines({"verdict": "ready", "log_tail": ["x"]}) == []
    assert _wait_text.lines({"verdict": "error"}) == []


def test_how_long_a_token_is_asked_for_is_no_change_by_itself() -> None:
    asking = [_wait_text.key({**LIVE, "missing": "generation", "asking": seconds}) for seconds in (None, 5.0, 6.0)]
    assert _wait_text.changed(asking[0], asking[1]) == "much"
    assert _wait_text.changed(asking[1], asking[2]) == ""


def test_a_model_that_is_not_listed_is_named_with_those_that_are() -> None:
    unlisted = 'the model "foo" is not listed yet: there are "qwen3-32b"'
    assert _wait_text.stage({"missing": "model", "unlisted": unlisted}) == unlisted
    assert _wait_text.stage({"missing": "model", "unlisted": ""}) == "healthy, the model is not listed yet"
    assert len(_wait_text.stage({"missing": "model", "unlisted": unlisted * 100})) <= 120
    assert _wait_text.stage({"missing": "generation", "unlisted": unlisted}) != unlisted
