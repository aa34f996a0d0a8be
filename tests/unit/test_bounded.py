# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import signal
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError


@pytest.fixture(autouse=True)
def stuck_folder(tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = str(tmp_path / "stuck")
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", folder)
    return folder


def hang(report: _bounded.Report) -> t.Any:
    report({"at": "headers"})
    signal.pause()


def test_the_value_comes_back() -> None:
    outcome = _bounded.run(lambda report: {"a": [1, None, "\u00e9"]}, 5)
    assert (outcome.status, outcome.value, outcome.partial) == ("ok", {"a": [1, None, "\u00e9"]}, [])


def test_a_value_larger_than_a_pipe_comes_back() -> None:
    assert _bounded.run(lambda report: "x" * 1_000_000, 5).value == "x" * 1_000_000


def test_a_call_that_hangs_is_ended_and_what_it_reported_is_kept() -> None:
    began = time.monotonic()
    outcome = _bounded.run(hang, 0.2)
    assert time.monotonic() - began < 2
    assert (outcome.status, outcome.partial) == ("timeout", [{"at": "headers"}])
    assert outcome.error == "no answer within 0.2 s"


def test_an_exception_is_an_error_with_its_type() -> None:
    outcome = _bounded.run(lambda report: 1 / 0, 5)
    assert (outcome.status, outcome.error) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("kind", [ServingError, UsageError])
def test_an_error_of_the_library_is_raised_here_with_its_result(kind: type[ServingError]) -> None:
    def fail(report: _bounded.Report) -> t.Any:
        raise kind("the thing broke", seen=3)

    with pytest.raises(kind) as caught:
        _bounded.run(fail, 5)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.result) == ("the thing broke", {"seen": 3})


def test_a_child_that_dies_without_an_answer_is_an_error() -> None:
    outcome = _bounded.run(lambda report: os.kill(os.getpid(), signal.SIGKILL), 5)
    assert (outcome.status, outcome.error) == ("error", "the child ended without an answer")


def test_the_child_keeps_nothing_of_the_caller_open(tmp_path: t.Any) -> None:
    with open(tmp_path / "lock", "w", encoding="utf-8") as handle:
        number = handle.fileno()

        def look(report: _bounded.Report) -> t.Any:
            return sorted(
                int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)
            ), [os.readlink("/proc/self/fd/%d" % fd) for fd in (0, 1, 2)]

        open_files, standard = _bounded.run(look, 5).value
    assert number not in open_files or number <= 2
    assert standard == [os.devnull] * 3


def test_no_zombie_is_left_behind() -> None:
    _bounded.run(lambda report: 1, 5)
    _bounded.run(hang, 0.05)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_the_child_started_ends_with_it(tmp_path: t.Any) -> None:
    def start_another(report: _bounded.Report) -> t.Any:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        report({"pid": pid})
        signal.pause()

    outcome = _bounded.run(start_another, 0.3)
    pid = outcome.partial[0]["pid"]
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            with open("/proc/%d/stat" % pid, "rb") as handle:
                if handle.read().rpartition(b")")[2].split()[0] == b"Z":
                    break
        except FileNotFoundError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("process %d outlived its parent" % pid)


def test_a_child_that_cannot_be_ended_is_recorded_and_blocks_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "_kill", lambda pid: None)
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    first = _bounded.run(hang, 0.05, key="nvml-0")
    assert first.status == "stuck"
    [(pid, start)] = _bounded.stuck_children()
    try:
        assert start == _bounded._start_ticks(pid)
        calls: list[int] = []
        again = _bounded.run(lambda report: calls.append(1), 5, key="nvml-0")
        assert (again.status, calls) == ("stuck", [])
        assert again.error == "process %d has not come back from an earlier call" % pid
        assert _bounded.run(lambda report: 7, 5, key="nvml-1").value == 7
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert _bounded.stuck_children() == []
    assert _bounded.run(lambda report: 7, 5, key="nvml-0").value == 7


@pytest.fixture(name="hangs_in_its_exit", params=["devices", "memory"])
def fixture_hangs_in_its_exit(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Children do not end: the kernel has closed their pipe already, or never gets to it."""

    def end(_code: int) -> None:
        if request.param == "devices":
            os.closerange(3, 256)
        while True:
            signal.pause()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(_bounded, "_kill", lambda pid: None)
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    monkeypatch.setattr(_bounded, "EXIT_WAIT", 0.05)


@pytest.mark.usefixtures("hangs_in_its_exit")
def test_a_child_that_has_answered_and_hangs_in_its_exit_is_recorded() -> None:
    outcome = _bounded.run(lambda report: 7, 0.5, key="nvml-0")
    try:
        assert (outcome.status, outcome.value, outcome.left_behind) == ("ok", 7, True)
        assert [pid for pid, _start in _bounded.stuck_children()] == [outcome.pid]
        assert _bounded.run(lambda report: 7, 5, key="nvml-0").status == "stuck"
    finally:
        os.kill(outcome.pid, signal.SIGKILL)
        os.waitpid(outcome.pid, 0)


@pytest.mark.usefixtures("hangs_in_its_exit")
def test_a_child_that_raised_and_hangs_in_its_exit_is_recorded() -> None:
    def fail(report: _bounded.Report) -> t.Any:
        raise ServingError("the thing broke")

    with pytest.raises(ServingError, match="the thing broke"):
        _bounded.run(fail, 0.5, key="nvml-0")
    [(pid, _start)] = _bounded.stuck_children()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_child_that_cannot_be_ended_is_recorded_when_the_caller_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "_kill", lambda pid: None)
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    monkeypatch.setattr(_bounded, "TICK", 0.05)

    def give_up() -> None:
        raise ServingError("the lease is gone")

    with pytest.raises(ServingError, match="the lease is gone"):
        _bounded.run(hang, 5, key="nvml-0", tick=give_up)
    [(pid, _start)] = _bounded.stuck_children()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_child_whose_devices_take_a_moment_to_close_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = os._exit

    def end(code: int) -> None:
        os.closerange(3, 256)
        time.sleep(0.3)
        leave(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    outcome = _bounded.run(lambda report: 7, 5, key="nvml-0")
    assert (outcome.value, outcome.left_behind) == (7, False)
    assert outcome.elapsed >= 0.3


def test_a_child_that_ends_late_is_reaped_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(_bounded, "_kill", lambda _pid: None)
        late = _bounded.run(lambda _report: time.sleep(60), 0.05)
    assert (late.status, late.left_behind) == ("stuck", True)
    assert _bounded.run(lambda _report: 1, 5).value == 1
    os.kill(late.pid, 0)  # it is still ours, and its number nobody else's
    os.kill(late.pid, signal.SIGKILL)
    os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOWAIT)
    assert _bounded.run(lambda _report: 2, 5).value == 2
    with pytest.raises(ChildProcessError):
        os.waitpid(late.pid, os.WNOHANG)


def test_a_record_of_another_process_with_the_same_pid_blocks_nothing(stuck_folder: str) -> None:
    os.makedirs(stuck_folder)
    with open(os.path.join(stuck_folder, "nvml-0.json"), "w", encoding="utf-8") as handle:
        handle.write('{"pid": %d, "start": 1}' % os.getpid())
    assert _bounded.run(lambda report: 7, 5, key="nvml-0").value == 7


@pytest.mark.parametrize("dies_with_caller", [True, False])
def test_a_child_whose_caller_was_killed_is_ended(monkeypatch: pytest.MonkeyPatch, dies_with_caller: bool) -> None:
    """By the kernel at once, or by its own timer once its time is over: nobody else would."""
    monkeypatch.setattr(_bounded, "OVERDUE", 0.1)
    reader, writer = os.pipe()

    close = _bounded._close_quietly
    monkeypatch.setattr(_bounded, "_close_quietly", lambda number: None if number == writer else close(number))

    def work(_report: _bounded.Report) -> t.Any:
        os.write(writer, b"%d\n" % os.getpid())
        signal.pause()

    caller = os.fork()
    if caller == 0:
        _bounded.run(work, 60.0 if dies_with_caller else 0.5, dies_with_caller=dies_with_caller)
        os._exit(0)
    os.close(writer)
    pid = int(os.read(reader, 16))
    start = _bounded._start_ticks(pid)
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    end = time.monotonic() + 10
    while _bounded._start_ticks(pid) == start and start is not None:
        assert time.monotonic() < end, "process %d lives on" % pid
        time.sleep(0.01)
    os.close(reader)


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 1e-9, 1e6])
def test_a_limit_may_be_any_number(timeout: float) -> None:
    outcome = _bounded.run(lambda report: 7, timeout)
    assert outcome.status == ("ok" if timeout > 1 else "timeout")
