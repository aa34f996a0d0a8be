# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Expressions that a user wrote: none of them holds up a wait, and one that tried is named."""

from __future__ import annotations

import signal
import threading
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _matching
from ansible_collections.gpuops.serving.plugins.module_utils._causes import cause_of
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._progress import Progress
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Options
from service import FakeClock, Service, loading

ENDLESS = (
    (r"(a+)+$", "a" * 60 + "b"),
    (r"(?:a|aa)+$", "a" * 60 + "b"),
    (r"(a|a)*c", "a" * 60 + "b"),
    (r"(.*a){30}c", "a" * 60 + "b"),
    (r"^(?:[a-z]+\s?)+:$", "the quick brown fox jumps over the lazy dog and does not come back"),
    # No end of the world, and too long all the same: the fifth power of the length.
    (r".*a.*a.*a.*a.*c", "a" * 4096),
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> t.Iterator[None]:
    monkeypatch.setattr(_matching, "BUDGET", 0.05)
    _matching.given_up.clear()
    yield
    _matching.given_up.clear()


@pytest.mark.parametrize(("pattern", "line"), ENDLESS)
def test_an_expression_that_does_not_come_back_is_given_up_once(pattern: str, line: str) -> None:
    began = time.process_time()
    assert _matching.search(pattern, line) is None
    assert time.process_time() - began < 1.0
    assert _matching.given_up == [pattern]
    began = time.process_time()
    assert [_matching.search(pattern, line) for _look in range(1000)] == [None] * 1000
    assert time.process_time() - began < 0.05
    assert _matching.given_up == [pattern]


@pytest.mark.parametrize(
    ("pattern", "line", "at"),
    [
        (r"compiling the engine", "INFO Compiling the Engine (3/7)", 5),
        (r"(?:shard\s+)+ready", "x" * 4000 + " shard shard ready", 4001),
        (r"error.*cuda.*memory", "x" * 4000 + " ERROR: cuda has no memory", 4001),
        (r"(?:\[\w+\]\s*)*engine (?:failed|died)", "[a] [b] engine died", 0),
        (r"nothing of it", "x" * 4096, None),
    ],
)
def test_a_good_expression_is_found_whatever_repeats_in_it(pattern: str, line: str, at: t.Optional[int]) -> None:
    assert _matching.search(pattern, line) == at
    assert _matching.given_up == []


def test_who_else_uses_the_signal_is_left_as_it_was() -> None:
    mine = lambda _number, _frame: None  # noqa: E731
    before = signal.signal(signal.SIGVTALRM, mine)
    try:
        for pattern, line in (ENDLESS[0], ("x", "x")):
            _matching.search(pattern, line)
            assert signal.getsignal(signal.SIGVTALRM) is mine
            assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_beside_the_main_thread_it_is_looked_for_without_a_guard() -> None:
    found: t.List[t.Optional[int]] = []
    thread = threading.Thread(target=lambda: found.append(_matching.search("b", "ab")))
    thread.start()
    thread.join()
    assert found == [1]


@pytest.mark.parametrize("field", ["phases", "fatal"])
def test_a_wait_goes_on_and_names_the_expression(field: str) -> None:
    profile = _engines.get("vllm", {field: [[r"(a+)+$", "watchdog"], ["loading", "loading_weights"]]})
    service = Service()
    loading(service, 20)
    service.lines = lambda now: ["a" * 60 + "b", "loading"] if now < 1 else []
    wait = Wait(service, profile, Options(timeout=60, stall_timeout=60), service.clock)
    ending = wait.run()
    assert ending is not None and ending.verdict == "ready"
    assert service.warnings == [
        'the expression "(a+)+$" in "profile" is not used any more: it took 0.05 s for one line: write it more simply'
    ]
    assert _engines.phase_of(profile, "loading") if field == "phases" else cause_of(profile, "loading")


def test_the_next_process_does_not_try_it_again() -> None:
    progress = Progress(_engines.PROFILES["vllm"], 60.0, Deadline(600.0, FakeClock()))
    _matching.search(*ENDLESS[0])
    saved = progress.save()
    _matching.given_up.clear()
    for _slice in range(2):
        progress.restore(saved)
    assert _matching.given_up == [ENDLESS[0][0]]


def test_expressions_of_the_library_cost_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "setitimer", lambda *_words: pytest.fail("guarded"))
    for profile in _engines.PROFILES.values():
        _engines.phase_of(profile, "nothing in particular")
        cause_of(profile, "nothing in particular")
