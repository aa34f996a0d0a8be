# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock, Deadline, StallWindow


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_deadline_counts_down_to_zero_and_stays_there() -> None:
    clock = FakeClock()
    deadline = Deadline(10, clock)
    clock.now += 4
    assert (deadline.elapsed, deadline.remaining, deadline.expired) == (4, 6, False)
    clock.now += 6
    assert (deadline.remaining, deadline.expired) == (0, True)
    clock.now += 5
    assert (deadline.elapsed, deadline.remaining) == (15, 0)


@pytest.mark.parametrize(("asked", "slept"), [(3, [3]), (30, [10]), (0, []), (-1, [])])
def test_a_sleep_never_passes_the_end(asked: float, slept: list[float]) -> None:
    clock = FakeClock()
    Deadline(10, clock).sleep(asked)
    assert clock.slept == slept


def test_a_negative_deadline_is_over_at_once() -> None:
    assert Deadline(-5, FakeClock()).expired


def test_movement_renews_the_window() -> None:
    clock = FakeClock()
    window = StallWindow(5, Deadline(100, clock))
    clock.now += 4.9
    assert not window.stalled
    window.moved()
    clock.now += 4.9
    assert not window.stalled
    clock.now += 0.1
    assert window.stalled
    assert window.age == pytest.approx(5)


def test_movement_does_not_renew_the_deadline() -> None:
    clock = FakeClock()
    deadline = Deadline(8, clock)
    window = StallWindow(5, deadline)
    clock.now += 6
    window.moved()
    clock.now += 2
    assert deadline.expired
    assert not window.stalled


def test_a_deadline_that_began_in_another_process_is_gone_on_with() -> None:
    clock = FakeClock()
    deadline = Deadline(10, clock, start=94.0)
    assert (deadline.elapsed, deadline.remaining, deadline.start) == (6, 4, 94.0)


def test_a_window_can_be_given_the_moment_of_the_last_movement() -> None:
    clock = FakeClock()
    window = StallWindow(5, Deadline(100, clock))
    assert (window.last, window.remaining) == (100.0, 5.0)
    window.last = 97.0
    assert (window.age, window.remaining, window.stalled) == (3.0, 2.0, False)
    clock.now += 2
    assert window.stalled


def test_one_question_has_its_time_what_is_left_or_the_second_that_an_answer_takes() -> None:
    clock = FakeClock()
    deadline = Deadline(30.0, clock)
    given = []
    for now in (0.0, 25.0, 29.5, 30.0, 99.0):
        clock.now = 100.0 + now
        given.append((deadline.patience(10.0), deadline.patience(0.5)))
    assert given == [(10.0, 0.5), (5.0, 0.5), (1.0, 0.5), (1.0, 0.5), (1.0, 0.5)]
