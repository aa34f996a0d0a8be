# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What counts as movement, and when, on a clock that only moves when it is told to."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _progress
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._progress import (
    Activity,
    Progress,
    Usage,
    pattern_of,
    percent_in,
)
from service import FakeClock

MIB = 1 << 20


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
        # How often something failed is no progress, however far the count is.
        ("Retrying in 8s [Retry 5/5].", None),
        ("connection refused, attempt 3/10", None),
        ("try 2/4", None),
        ("max_retries=4/5", None),
        ("Reading entry 2/4", 50.0),
        ("Retrying after an error at 40%", 40.0),
        # How much of a time is over is none either.
        ("Waiting for other ranks to join: 31/3600 seconds", None),
        ("Waiting for other ranks to join: 31/3600s", None),
        ("waited 31/3600", None),
        ("Waiting: 31/60 min", None),
        ("31/3600 elapsed", None),
        ("timeout: 31/3600", None),
        ("Still waiting for the store, 31% of the timeout is over", None),
        ("31 % of the time limit", None),
        ("used 12.5% of its start timeout", None),
        ("timeout at 31%", None),
        # What is waited for may be on its way.
        ("Waiting for workers: 3/8 joined", 37.5),
        ("Waiting for the download: 31%", 31.0),
        ("Loading checkpoint shards: 50%|#####     | 2/4 [00:03<00:03,  1.5s/it]", 50.0),
        ("Capturing batches (bs=8): 12/24 [00:31<00:20]", 50.0),
        ("layers 12/24 in 3 s", 50.0),
        ("Downloading 31% of the model in time", 31.0),
        ("shards 3/8 model", 37.5),
    ],
)
def test_progress_is_a_percentage_or_n_of_m(line: str, percent: float | None) -> None:
    assert percent_in(line) == percent


def test_lines_that_differ_only_in_numbers_are_one_pattern() -> None:
    assert pattern_of("[2026-11-29 12:00:01 TP0] Waiting 10s (0x7f3a, id=9f3c)") == pattern_of(
        "[2026-11-30 08:10:11 TP3] Waiting 20s (0x1111, id=8e2b)"
    )
    assert pattern_of("Load weight begin") != pattern_of("Load weight end")


def test_identifiers_without_a_digit_are_no_news_either() -> None:
    assert pattern_of("request 1b9d6bcd-bbfd-abcd-9b5d-ab8dfbbd4bed waits") == pattern_of(
        "request deadbeef-feed-dead-beef-abcdefabcdef waits"
    )
    assert pattern_of("id=deadbeef waits") == pattern_of("id=feedface waits")
    assert pattern_of("worker waits") != pattern_of("worker loads")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("正在加载模型权重", "正在编译计算图", False),
        ("已加载第3个分片", "已加载第17个分片", True),
        ("已加载第3个分片", "已编译第3个图", False),
        ("等待中deadbeef。第１２次", "等待中feedface。第３次", True),
        ("Загрузка весов 3", "Загрузка графа 3", False),
        ("Загрузка весов 3", "Загрузка весов 14", True),
        ("Loading |███▌  | ⠋", "Loading |█████| ⠙", True),
    ],
)
def test_lines_in_any_language_have_their_patterns(a: str, b: str, same: bool) -> None:
    assert (pattern_of(a) == pattern_of(b)) is same


class World:
    """A wait's progress with a stall window of a minute, and what it is shown."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.progress = self.fresh()

    def fresh(self) -> Progress:
        return Progress(_engines.get("vllm"), 60.0, Deadline(600.0, self.clock))

    def look(self, at: float, *lines: str, gpu: t.Optional[float] = None, network: t.Any = None, **rows: Usage) -> None:
        """``rows`` are processes by a name of the form p7: the process 7."""
        self.clock.now = at
        for line in lines:
            self.progress.line(line)
        processes = {(int(name[1:]), 1): usage for name, usage in rows.items()}
        self.progress.activity(Activity(processes, gpu, network or {}))

    def cut(self) -> None:
        """End a slice here, and begin the next."""
        saved = json.loads(json.dumps(self.progress.save()))
        self.progress = self.fresh()
        self.progress.restore(saved)

    @property
    def moved(self) -> t.List[str]:
        """What moved at this very moment."""
        return [signal for signal, age in self.progress.movement().items() if age == 0.0]


@pytest.fixture
def world() -> World:
    return World()


def still(cpu: float = 5.0, read: int = 0, memory: int = 100 * MIB, **more: t.Any) -> Usage:
    return Usage(cpu, read, memory, **more)


def test_the_first_look_is_where_things_begin_and_no_movement(world: World) -> None:
    world.look(0, gpu=70000.0, network={"n": 10**9}, p1=still(cpu=5000.0, read=10**12, memory=10**11))
    assert world.progress.movement() == {}
    assert (world.progress.memory, world.progress.gpu_memory) == (95367, 70000)


@pytest.mark.parametrize(
    ("before", "after", "signals"),
    [
        (still(), still(cpu=5.04), []),
        (still(), still(cpu=5.051), ["cpu"]),
        (still(), still(children=0.05), ["cpu"]),
        (still(), still(read=MIB - 1), []),
        (still(), still(read=MIB), ["io"]),
        (still(), still(memory=108 * MIB - 1), []),
        (still(), still(memory=108 * MIB), ["memory"]),
        (still(), still(memory=10 * MIB), []),
        (Usage(5.0, None, None), Usage(5.0, 10**9, 10**9), []),
        (still(read=10**9), Usage(5.0, None, None), []),
    ],
)
def test_each_sign_has_its_threshold(world: World, before: Usage, after: Usage, signals: t.List[str]) -> None:
    world.look(0, p1=before)
    world.look(1, p1=after)
    assert world.moved == signals


def test_memory_that_grows_slowly_adds_up_and_what_comes_back_does_not_count(world: World) -> None:
    world.look(0, p1=still(memory=100 * MIB), p2=still(memory=100 * MIB))
    for at in range(1, 8):
        # One grows by a MiB in each look; the other gives back and takes again.
        world.look(at, p1=still(memory=(100 + at) * MIB), p2=still(memory=(100 if at % 2 else 20) * MIB))
        assert world.moved == []
    world.look(8, p1=still(memory=108 * MIB), p2=still(memory=20 * MIB))
    assert world.moved == ["memory"]


def test_a_process_that_ends_is_no_movement_of_the_one_that_waits_for_it(world: World) -> None:
    parent, worker = still(cpu=5.0), still(cpu=900.0, read=10**10)
    world.look(0, p1=parent, p2=worker)
    # The kernel adds what it used to its parent's account, at once.
    world.look(1, p1=still(cpu=5.0, children=900.0, read=10**10))
    assert world.moved == []
    world.look(2, p1=still(cpu=5.0, children=900.2, read=10**10))
    assert world.moved == ["cpu"]


def test_processes_that_come_and_go_between_two_looks_are_seen_by_their_parent(world: World) -> None:
    world.look(0, p1=still())
    world.look(1, p1=still(children=0.7))
    assert world.moved == ["cpu"]


@pytest.mark.parametrize(
    ("usage", "signals"),
    [
        (still(cpu=0.0, memory=9000 * MIB, age=0.5), []),  # a fork has the pages of its parent
        (still(cpu=0.3, age=0.5), ["cpu"]),
        (still(cpu=0.0, read=5 * MIB, age=0.5), ["io"]),
        (still(cpu=700.0, read=10**12, age=3000.0), []),  # only new to us
    ],
)
def test_a_new_process_moves_only_by_what_it_used_since(world: World, usage: Usage, signals: t.List[str]) -> None:
    world.look(0, p1=still())
    world.look(1, p1=still(), p2=usage)
    assert world.moved == signals


def test_a_new_process_with_an_old_number_begins_at_zero(world: World) -> None:
    world.progress.activity(Activity({(7, 100): still(cpu=50.0)}))
    world.clock.now = 1.0
    world.progress.activity(Activity({(7, 900): still(cpu=0.2, age=0.5)}))
    assert world.moved == ["cpu"]


def test_gpu_memory_moves_when_it_is_more_than_ever(world: World) -> None:
    world.look(0, gpu=400.0)
    world.look(1, gpu=463.0)
    assert world.moved == []
    world.look(2, gpu=464.0)
    assert world.moved == ["gpu_memory"]
    world.look(3, gpu=100.0)
    world.look(4, gpu=520.0)
    assert world.moved == []
    world.look(5)
    assert world.progress.gpu_memory == 520  # the last that is known


def test_a_network_is_compared_with_itself_only(world: World) -> None:
    world.look(0, network={"a": 10})
    world.look(1, network={"a": 10 + (256 << 10) - 1, "b": 10**9})
    assert world.moved == []
    world.look(2, network={"a": 10 + (512 << 10)})
    assert world.moved == ["network"]


def test_bars_grow_from_where_they_were_and_may_begin_again_when_they_were_complete(world: World) -> None:
    def bar(at: float, percent: float) -> t.List[str]:
        world.look(at, "Loading safetensors checkpoint shards: %g%% Completed" % percent)
        return [signal for signal in world.moved if signal == "percent"]

    assert bar(0, 10) == ["percent"]
    assert bar(1, 10) == []
    assert bar(2, 5) == []
    assert bar(3, 10) == []
    assert bar(4, 100) == ["percent"]
    assert bar(5, 0) == []  # a draft model has the same bar
    assert bar(6, 25) == ["percent"]
    assert world.progress.percent == 25
    for number in range(200):
        bar(10 + 2 * number, 100)
        bar(11 + 2 * number, 0)
    assert bar(600, 100) == []  # for ever the same is a loop


def test_a_count_that_runs_again_and_again_moves_a_few_times_only(world: World) -> None:
    moved = 0
    for number in range(500):
        world.look(number, "checked the store: %d/5" % (1 + number % 5))
        moved += "percent" in world.moved
    assert moved <= 5 * 17


def test_so_many_lines_are_remembered_and_one_that_was_forgotten_is_news(world: World) -> None:
    words = ["%s%s" % (chr(97 + n // 26 % 26) * (1 + n // 676), chr(97 + n % 26)) for n in range(2100)]
    for number, word in enumerate(words):
        world.look(number, "loading " + word)
        assert "log" in world.moved, word
    assert len(world.progress._patterns) == _progress.MAX_PATTERNS
    world.look(5000, "loading " + words[-1])
    assert world.moved == []
    world.look(5001, "loading " + words[0])
    assert world.moved == ["log"]


def test_the_percentage_belongs_to_its_phase(world: World) -> None:
    world.look(0, "Loading safetensors checkpoint shards: 100% Completed | 4/4")
    assert (world.progress.phase, world.progress.percent) == ("loading_weights", 100.0)
    world.look(1, "Capturing CUDA graphs")
    assert (world.progress.phase, world.progress.percent) == ("capturing_graphs", None)


def test_the_more_telling_cause_stays(world: World) -> None:
    vague = "ERROR Engine core initialization failed. See root cause above."
    telling = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB."
    world.look(0, vague)
    assert world.progress.cause is not None and world.progress.cause["kind"] == "child_failed"
    world.look(1, telling, vague)
    assert world.progress.cause["kind"] == "gpu_out_of_memory"
    world.progress.new_life()
    assert (world.progress.cause, world.progress.last_cause["kind"]) == (None, "gpu_out_of_memory")


def test_a_cause_is_found_in_a_long_line_and_told_with_what_is_around_it(world: World) -> None:
    long = '{"trace": "%s torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB. %s"}'
    world.look(0, long % ("x" * 1500, "y" * 1500))
    cause = world.progress.cause
    assert cause is not None and cause["kind"] == "gpu_out_of_memory"
    assert cause["figures"] == {"wanted_mib": 44001.3}
    assert len(cause["line"]) == 1000 and "torch.OutOfMemoryError: CUDA out of memory. Tried to" in cause["line"]


def test_a_cause_is_found_behind_a_beginning_that_was_seen_before(world: World) -> None:
    world.look(0, "x" * 1200)
    world.look(1, "x" * 1200 + " CUDA out of memory")
    assert world.progress.cause is not None and world.progress.cause["kind"] == "gpu_out_of_memory"


def test_a_character_that_no_text_can_have_is_taken_in(world: World) -> None:
    world.look(0, "model \udcff")
    assert world.moved == ["log"]


def test_a_line_is_kept_as_long_as_it_can_be_read(world: World) -> None:
    world.look(0, "x" * 5000)
    assert list(world.progress.tail) == ["x" * 1000]


def test_the_window_is_exact(world: World) -> None:
    world.look(0, p1=still())
    world.look(7.25, p1=still(cpu=9.0))
    world.clock.now = 67.24
    assert not world.progress.window.stalled
    world.clock.now = 67.25
    assert world.progress.window.stalled


def story(world: World, cut: bool) -> t.List[t.Any]:
    """A load with a bit of everything; tells what was known at each look."""
    found: t.List[t.Any] = []
    for step in range(300):
        at = step * 0.5
        lines = ["[%d] Waiting for shard rank=0" % step]
        if step == 40:
            lines.append("Starting to load model")
        if 40 <= step < 90:
            lines.append("Loading safetensors checkpoint shards: %d%% Completed" % ((step - 40) // 5 * 10))
        if step == 150:
            world.progress.new_life()
        rows = {
            "p1": still(cpu=5.0 + max(0, step - 100) * 0.02, memory=(100 + min(step, 60)) * MIB),
            "p%d" % (2 + step // 50): still(cpu=step % 50 * 0.5, read=step % 50 * MIB, age=step % 50 * 0.5),
        }
        world.look(at, *lines, gpu=min(step, 200) * 10.0, network={"n": step * 10**6 if step > 250 else 0}, **rows)
        if cut:
            world.cut()
        progress = world.progress
        window = (round(progress.window.age, 6), progress.window.stalled)
        found.append((at, progress.phase, progress.percent, progress.movement(), window, list(progress.tail)))
    return found


def test_slices_change_nothing() -> None:
    assert story(World(), cut=True) == story(World(), cut=False)


def test_what_travels_is_bounded_and_holds_no_line_but_the_last_ones(world: World) -> None:
    for number in range(2100):
        word = "%s%s" % (chr(103 + number % 20), "abcdefghij"[number // 20 % 10] * (1 + number // 200))
        world.progress.line("secret %s %s" % (word, "x" * 3000 if number > 2060 else ""))
    processes = {(pid, 1): still() for pid in range(2000)}
    world.progress.activity(Activity(processes, 1.0, {}))
    text = json.dumps(world.progress.save())
    assert len(text) < 200000
    assert text.count("secret") == 30


def test_what_another_version_saved_is_left_alone(world: World) -> None:
    world.look(0, "Starting to load model")
    world.progress.restore({"version": 0, "phase": "other"})
    assert world.progress.phase == "loading_weights"
