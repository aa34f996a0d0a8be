# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The signs of movement from real sources: a real journald, real processes, real memory, real control groups."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import typing as t

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import signals_sandbox
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _generation,
    _gpu_memory,
    _http,
    _members,
    _ownership,
    _progress,
    _systemd,
    _target,
)
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from gpu_host import Lab, driver_library, made

ROOT = pathlib.Path(__file__).resolve().parents[2]

needs_journald = pytest.mark.skipif(not signals_sandbox.usable(), reason="this takes root, namespaces and journald")


def sandboxed(story: str, timeout: float = 60) -> t.Any:
    """What a story answers that runs in a sandbox of its own."""
    paths = [ROOT / ".cache" / "collections", ROOT / "tests" / "integration"]
    done = subprocess.run(
        [*signals_sandbox.NAMESPACES, sys.executable, "-m", "signals_stories", story],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ":".join(map(str, paths))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_journald
def test_each_line_of_a_real_journal_comes_once_over_lives_and_slices() -> None:
    assert sandboxed("lives_and_slices") == {
        "found": [
            ["Started the engine.", "one", "two"],
            ["three"],
            ["Loading \ufffd: 10%", "Loading: 20%", "Loading: 30%"],
            ["between two slices"],
            ["last words"],
            ["a new life"],
        ],
        "warnings": {},
    }


@needs_journald
def test_rotated_and_vacuumed_under_the_reader_nothing_is_repeated_and_nothing_fails() -> None:
    answer = sandboxed("rotated_and_vacuumed")
    assert answer["found"][:3] == [50, ["after the rotation"], ["after the vacuum"]]
    assert set(answer["found"][3]) <= {"a", "b"} and "b" in answer["found"][3]
    assert answer["warnings"] == {}


@needs_journald
def test_messages_of_many_megabytes_and_a_flood_are_bounded_in_memory_and_time() -> None:
    answer = sandboxed("floods")
    assert answer["last"] == "the end"
    assert answer["widest"] <= 4096
    assert answer["longest"] < 6
    assert answer["grown"] < 100


@needs_journald
def test_a_journal_that_leaves_out_lines_says_how_many() -> None:
    answer = sandboxed("left_out")
    assert answer["last"] == "after the pause" and answer["lines"] < 2000
    (warning,) = answer["warnings"]
    assert warning.startswith("the journal left out ") and warning.endswith(
        ' lines of the unit "%s", which wrote too many at once' % signals_sandbox.UNIT
    )


@needs_journald
def test_a_journal_that_is_not_there_or_may_not_be_read_is_said_and_no_error() -> None:
    said = 'the journal of the unit "%s" cannot be read in full: run as root, or with become' % signals_sandbox.UNIT
    nothing = "this host keeps no journal: what the service writes cannot be seen there"
    answer = sandboxed("not_there_or_denied")
    assert answer[0] == [] and answer[1] == [nothing]
    assert answer[2] == [] and answer[3] in ([said], [nothing])


@needs_journald
def test_one_that_follows_ends_with_a_caller_that_was_killed() -> None:
    assert sandboxed("killed_caller") == [True, False]


class Engine:
    """A real process that does what it is told, as the main process of a unit, and what is seen of it."""

    CODE = (
        "import os, subprocess, sys, time\n"
        "kept = []\n"
        "print('up', flush=True)\n"
        "for line in sys.stdin:\n"
        "    exec(line)\n"
        "    print('done', flush=True)\n"
    )

    def __init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()
        state = _systemd.UnitState("x.service", active_state="active", sub_state="running", main_pid=self.child.pid)
        self.state = state
        self.members = _members.Members()
        self.progress = _progress.Progress(_engines.get("vllm"), 60.0, Deadline(600.0))
        self.look()

    def answer(self) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline() in ("up\n", "done\n")

    def does(self, code: str) -> t.List[str]:
        """What moves while it does that."""
        assert self.child.stdin is not None
        time.sleep(0.3)
        self.look()
        self.progress._moves.clear()
        self.child.stdin.write(code + "\n")
        self.child.stdin.flush()
        self.answer()
        time.sleep(0.25)
        self.look()
        return sorted(self.progress._moves)

    def look(self) -> None:
        self.members.follow(self.state)
        self.progress.activity(_progress.Activity(self.members.usage()))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> t.Iterator[Engine]:
    # It is a child of the test, and a unit never owns its caller's children.
    monkeypatch.setattr(_ownership, "own_line", lambda table: {os.getpid()})
    found = Engine()
    yield found
    found.child.kill()
    found.child.communicate()


@pytest.mark.parametrize(
    ("code", "signals"),
    [
        ("time.sleep(0.5)", []),
        ("e = time.process_time() + 0.3\twhile time.process_time() < e: pass", ["cpu"]),
        ("[open('/dev/zero', 'rb', 0).read(1 << 20) for _ in range(8)]", ["io"]),
        ("kept.append(b'x' * (64 << 20))", ["memory"]),
        ("subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])", ["cpu"]),
    ],
)
def test_what_a_real_process_does_is_seen(engine: Engine, code: str, signals: t.List[str]) -> None:
    code = "exec(%r)" % code.replace("\t", "\n")
    found = engine.does(code)
    assert set(signals) <= set(found)
    if not signals:
        assert found == []


def test_a_worker_that_ends_after_much_work_is_no_movement_of_its_parent(engine: Engine) -> None:
    worker = (
        "e = time.process_time() + 1.0\nwhile time.process_time() < e: pass\nopen('/dev/zero', 'rb').read(80 << 20)\n"
    )
    start = "w = subprocess.Popen([sys.executable, '-c', %r], stdin=subprocess.PIPE, stdout=subprocess.PIPE)"
    worker = "import time, sys\n%sprint('ready', flush=True)\nsys.stdin.read()" % worker
    engine.does(start % worker + "; w.stdout.readline()")
    engine.members.renew(engine.state)
    engine.look()
    assert len(engine.members.pids) == 2
    engine.does("time.sleep(0.3)")
    # The kernel moves a second of CPU time and 80 MiB over to the one that waits for it.
    assert engine.does("w.stdin.close(); w.wait(); w.stdout.close(); time.sleep(0.3)") == []


def test_a_fork_of_a_big_process_is_no_growth(engine: Engine) -> None:
    assert "memory" in engine.does("kept.append(bytearray(os.urandom(1 << 20)) * 200)")
    code = "p = os.fork(); p or (time.sleep(30), os._exit(0)); time.sleep(0.3)"
    engine.does(code)
    engine.progress._moves.clear()
    engine.members.renew(engine.state)
    engine.look()
    assert len(engine.members.pids) == 2
    assert "memory" not in engine.progress._moves
    engine.does("os.kill(p, 9); os.waitpid(p, 0)")


def test_the_first_moment_of_an_open_port_is_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = "http://127.0.0.1:%d" % server.getsockname()[1]
        target = _target.HostTarget(None, url, _generation.Question(_engines.get("vllm")), _http.Access())
        assert not target.knock()
        server.listen(1)
        assert target.knock()
    assert not target.knock()


@pytest.fixture
def lab(
    tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> t.Iterator[Lab]:
    pytest.importorskip("pynvml")
    yield from made(tmp_path, driver_library(tmp_path_factory), monkeypatch)


def read_gpus(lab: Lab, pids: t.List[int], gpus: t.Optional[t.List[str]] = None) -> t.Tuple[t.Optional[float], str]:
    memory = _gpu_memory.GpuMemory(gpus, dev=str(lab.dev), sys=str(lab.sys))
    end = time.monotonic() + 20
    memory.look(pids)
    while memory._reading is not None and time.monotonic() < end:
        time.sleep(0.01)
        memory.look(pids)
    return memory.value, memory.warning


def test_the_memory_of_a_service_is_told_from_that_of_another_on_the_same_gpu(lab: Lab) -> None:
    lab.scenario(devices=2)
    mine, other = lab.hold("--memory", "44000", node="nvidia0"), lab.hold("--memory", "1500", node="nvidia0")
    assert read_gpus(lab, [mine.pid]) == (44000.0, "")
    assert read_gpus(lab, [other.pid]) == (1500.0, "")
    assert read_gpus(lab, [mine.pid, other.pid], ["0"]) == (45500.0, "")
    # Nothing of it is on the other device but what the driver itself has there.
    found, warning = read_gpus(lab, [mine.pid], ["1"])
    assert found is not None and found < 100 and warning == ""


def test_a_driver_that_hangs_delays_no_look(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    child = lab.hold("--memory", "100", node="nvidia0")
    lab.scenario(device__0__delay_ms__nvmlDeviceGetMemoryInfo=600000)
    monkeypatch.setattr(_gpu_memory, "LIMIT", 0.5)
    memory = _gpu_memory.GpuMemory(None, dev=str(lab.dev), sys=str(lab.sys))
    longest, end = 0.0, time.monotonic() + 2.0
    while time.monotonic() < end:
        began = time.monotonic()
        memory.look([child.pid])
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.05)
    assert longest < 1.0
    assert memory.warning == "the GPU memory of the service cannot be read: no answer within 0.5 s"
    memory.close()
