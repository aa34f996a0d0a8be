# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which lines that a log file had before anybody looked are of the life that the service has now."""

from __future__ import annotations

import calendar
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils._loglife import first_of_life, stamp_of

BEGAN = float(calendar.timegm((2026, 12, 2, 10, 0, 0)))
WRITTEN = BEGAN + 300
ZONES = ("UTC", "Asia/Shanghai", "America/New_York")


@pytest.fixture(autouse=True, params=ZONES[:1])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> t.Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("line", "at"),
    [
        # vLLM, SGLang, OpenVINO Model Server, Triton, Text Generation Inference, Ollama.
        ("INFO 12-02 10:00:07 [core.py:58] Initializing", 7),
        ("(EngineCore_0 pid=812) ERROR 12-02 10:00:07 [core.py:632] torch.OutOfMemoryError", 7),
        ("[2026-12-02 10:00:07 TP0] Load weight begin.", 7),
        ("[2026-12-02 10:00:07.250][1][serving][info][server.cpp:1] OpenVINO", 7.25),
        ("I1202 10:00:07.500000 1 server.cc:1] Triton", 7.5),
        ("2026-12-02T10:00:07.123Z  INFO text_generation_launcher: Args", 7.123),
        ("2026-12-02T18:00:07+08:00 INFO x", 7),
        ("2026-12-02T04:30:07-05:30 INFO x", 7),
        ("2026-12-02 10:00:07,123 - x - INFO - y", 7.123),
        ('time=2026-12-02T10:00:07.000+00:00 level=INFO source=x msg="y"', 7),
        ("INFO:     2026-12-02 10:00:07 - Application startup", 7),
        # No stamps, or none of the line itself.
        ("llama_model_loader: loaded meta data", None),
        ("model made at 2026-12-02 10:00:07", None),
        ("Traceback (most recent call last):", None),
        ("2026-99-99 10:00:07 x", None),
        ("1-02 10:00:07 x", None),
        ("", None),
    ],
)
def test_the_stamps_of_engines_are_read(line: str, at: t.Optional[float]) -> None:
    found = stamp_of(line, WRITTEN)
    assert found == (None if at is None else pytest.approx(BEGAN + at, abs=0.001))


@pytest.mark.parametrize("zone", ZONES[1:], indirect=True)
def test_a_stamp_without_a_zone_is_local_time(zone: str) -> None:
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 7))
    assert stamp_of(local + " x", WRITTEN) == BEGAN + 7
    assert stamp_of(local[5:] + " x", WRITTEN) == BEGAN + 7


def test_a_stamp_without_a_year_is_of_the_last_such_day() -> None:
    new_year = float(calendar.timegm((2027, 1, 1, 0, 5, 0)))
    assert stamp_of("12-31 23:59:00 x", new_year) == new_year - 360
    assert stamp_of("01-01 00:04:00 x", new_year) == new_year - 60


OLD = "INFO 12-02 09:58:00 CUDA out of memory"
NEW = "INFO 12-02 10:00:30 loading"
BARE = "CUDA out of memory"


@pytest.mark.parametrize(
    ("lines", "born", "first"),
    [
        # By their stamps; what has none goes with the one before it.
        ([OLD, NEW, BARE], None, 1),
        ([OLD, BARE, NEW, NEW], None, 2),
        ([NEW, BARE], None, 0),
        ([BARE, NEW], None, 1),
        ([NEW, OLD, BARE, NEW], None, 3),
        # The file is younger than the life, unless a line in it says that it is not.
        ([BARE] * 5, BEGAN + 1, 0),
        ([BARE] * 5, BEGAN, 0),
        ([OLD, BARE, NEW], BEGAN + 1, 2),
        ([BARE, NEW], BEGAN + 1, 0),
        # Nothing tells but the last write: that was the last line.
        ([BARE] * 5, None, 4),
        ([BARE] * 5, BEGAN - 1, 4),
        ([OLD, BARE, BARE], BEGAN - 1, 2),
        ([OLD, OLD], None, 2),
        # A line of the second in which the life began may be the last one of the life before.
        (["INFO 12-02 09:59:59 x", "INFO 12-02 10:00:00 y"], None, 1),
        ([], BEGAN + 1, 0),
    ],
)
def test_only_what_surely_is_of_this_life_counts(lines: t.List[str], born: t.Optional[float], first: int) -> None:
    assert first_of_life(lines, BEGAN, WRITTEN, born) == first


def test_a_second_that_began_before_the_life_is_not_of_it() -> None:
    lines = ["INFO 12-02 10:00:00 CUDA out of memory", "INFO 12-02 10:00:01 loading"]
    assert first_of_life(lines, BEGAN + 0.5, WRITTEN) == 1


@pytest.mark.parametrize("lines", [[BARE] * 3, [NEW] * 3, [OLD] * 3])
def test_what_was_written_last_before_the_life_began_is_not_of_it(lines: t.List[str]) -> None:
    assert first_of_life(lines, BEGAN, BEGAN - 0.1, BEGAN - 1) == 3


@pytest.mark.parametrize("zone", ZONES, indirect=True)
@pytest.mark.parametrize("other", ZONES)
def test_an_engine_with_another_idea_of_the_time_never_lends_a_line_of_an_earlier_life(
    zone: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines in containers write the time of another zone; on either side of it, less is known but nothing wrong."""
    ages = (-7200, -60, -1, 5, 120, 299)

    def stamped(age: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + age)) + " x"

    monkeypatch.setenv("TZ", other)
    time.tzset()
    lines = [stamped(age) for age in ages]
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    first = first_of_life(lines, BEGAN, WRITTEN)
    assert first >= 3
    assert first == (3 if zone == other else 6)
