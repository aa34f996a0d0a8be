# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A log file that is written, emptied, rotated and taken away under the reader."""

from __future__ import annotations

import os
import pathlib
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _logfile, _standby
from ansible_collections.gpuops.serving.plugins.module_utils._logfile import LogFile


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "engine.log"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> t.Iterator[None]:
    """A machine that is busy with other tests is no file system that hangs."""
    monkeypatch.setattr(_logfile, "PATIENCE", 30.0)
    begun = []

    class Noted(_standby.Standby):
        def __init__(self, *arguments: t.Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(_standby, "Standby", Noted)
    yield
    for child in begun:
        child.close()


def add(path: pathlib.Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def new(log: LogFile) -> t.List[str]:
    found = log.read()
    assert all(is_new for _line, is_new in found)
    return [line for line, _is_new in found]


def test_what_was_there_is_shown_as_old_and_what_comes_is_new(path: pathlib.Path) -> None:
    add(path, b"old one\nold two\n")
    log = LogFile(str(path))
    assert log.read() == [("old one", False), ("old two", False)]
    assert log.read() == []
    add(path, b"new\r\nnewer\n")
    assert log.read() == [("new", True), ("newer", True)]
    assert log.warnings == {}


def test_the_first_look_at_a_huge_file_begins_near_its_end(path: pathlib.Path) -> None:
    add(path, b"".join(b"line %07d\n" % number for number in range(200000)))
    found = LogFile(str(path)).read()
    assert found[-1] == ("line 0199999", False)
    assert len(found) <= 1000
    assert all(line.startswith("line ") and len(line) == 12 for line, _is_new in found)


def test_a_file_that_appears_later_is_new_from_its_beginning(path: pathlib.Path) -> None:
    log = LogFile(str(path))
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" does not exist' % path]
    add(path, b"first\n")
    assert log.read() == [("first", True)]
    assert log.warnings == {}


def test_a_file_that_is_rotated_is_read_to_its_end_and_then_the_next(path: pathlib.Path) -> None:
    add(path, b"old\n")
    log = LogFile(str(path))
    log.read()
    add(path, b"before\n")
    path.rename(str(path) + ".1")
    assert new(log) == ["before"]
    add(pathlib.Path(str(path) + ".1"), b"still the old one\n")
    assert new(log) == ["still the old one"]
    assert log.warnings == {}
    add(pathlib.Path(str(path) + ".1"), b"its end")
    add(path, b"after\n")
    assert new(log) == ["its end", "after"]


@pytest.mark.parametrize("after", [b"x\n", b"a line that is far longer than all that was in it before\n"])
def test_a_file_that_is_emptied_is_read_from_its_beginning(path: pathlib.Path, after: bytes) -> None:
    add(path, b"one\ntwo\n")
    log = LogFile(str(path))
    log.read()
    os.truncate(path, 0)
    add(path, after)
    assert new(log) == [after.decode().strip()]


def test_a_writer_that_goes_on_where_it_was_in_an_emptied_file(path: pathlib.Path) -> None:
    with path.open("wb", buffering=0) as writer:
        writer.write(b"x" * 100000 + b"\n")
        log = LogFile(str(path))
        log.read()
        os.truncate(path, 0)
        writer.write(b"after a hole\n")
        assert new(log) == ["after a hole"]


def test_bars_without_line_ends_and_bytes_that_are_no_text(path: pathlib.Path) -> None:
    add(path, b"")
    log = LogFile(str(path))
    log.read()
    add(path, b"\rLoading:  10%")
    assert new(log) == []
    add(path, b"\rLoading:  20%\rLoading:  30%")
    assert new(log) == ["Loading:  10%", "Loading:  20%"]
    assert new(log) == ["Loading:  30%"]  # it stands there
    assert new(log) == []
    add(path, b"\n\x1b[1mdone \xff\x00\x1b[0m\n")
    assert new(log) == ["done \ufffd"]


def test_a_line_that_stood_unfinished_and_goes_on_is_told_whole(path: pathlib.Path) -> None:
    add(path, b"")
    log = LogFile(str(path))
    log.read()
    add(path, b"Loading")
    assert new(log) == []
    assert new(log) == ["Loading"]
    add(path, b" is over\nnext\n")
    assert new(log) == ["Loading is over", "next"]


def test_a_line_without_end_is_cut(path: pathlib.Path) -> None:
    add(path, b"")
    log = LogFile(str(path))
    log.read()
    for _piece in range(40):
        add(path, b"y" * 100000)
        log.read()
        assert len(log._pending) <= _logfile.PENDING_LIMIT
    add(path, b"\nnext\n")
    assert new(log)[-1] == "next"


def test_of_too_much_at_once_the_end_is_read(path: pathlib.Path) -> None:
    add(path, b"")
    log = LogFile(str(path))
    log.read()
    add(path, b"".join(b"line %07d\n" % number for number in range(400000)))
    found = new(log)
    assert found[-1] == "line 0399999" and len(found) <= 1000
    add(path, b"next\n")
    assert new(log) == ["next"]


def test_what_cannot_be_followed_is_said(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    log = LogFile(str(path))
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: it is no regular file' % path]
    path.rmdir()
    os.mkfifo(path)
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: it is no regular file' % path]

    log.close()
    real = os.open

    def refuse(name: t.Any, *arguments: t.Any, **options: t.Any) -> int:
        if name == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *arguments, **options)

    monkeypatch.setattr(_logfile.os, "open", refuse)
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: Permission denied' % path]


# A file system that does not answer


class Hung:
    """A file system that answers only after somebody has said so, and whether it was asked."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hangs, self._asked = folder / "hangs", folder / "asked"
        self._real = os.fstat
        monkeypatch.setattr(_logfile, "PATIENCE", 0.3)
        monkeypatch.setattr(_logfile.os, "fstat", self._fstat)
        monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(folder / "stuck"))

    def hang(self) -> None:
        self._hangs.touch()

    def answer(self) -> None:
        self._hangs.unlink()

    @property
    def asked(self) -> t.List[int]:
        """Which processes have asked."""
        return [int(pid) for pid in self._asked.read_text().split()] if self._asked.exists() else []

    def _fstat(self, number: int) -> os.stat_result:
        if self._hangs.exists():
            with self._asked.open("a") as stream:
                stream.write("%d\n" % os.getpid())
            while self._hangs.exists():
                time.sleep(0.005)
        return self._real(number)


@pytest.fixture
def hung(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Hung:
    return Hung(tmp_path, monkeypatch)


def unanswered(path: pathlib.Path) -> str:
    return 'the log file "%s" cannot be read: its file system does not answer' % path


def all_of(log: LogFile, wanted: int) -> t.List[str]:
    found: t.List[str] = []
    end = time.monotonic() + 30
    while len(found) < wanted and time.monotonic() < end:
        found += new(log)
    return found


def test_a_file_system_that_hangs_costs_its_patience_once(path: pathlib.Path, hung: Hung) -> None:
    add(path, b"old\n")
    log = LogFile(str(path))
    while not log.read():
        pass
    hung.hang()
    began = time.monotonic()
    assert log.read() == []
    assert time.monotonic() - began >= 0.3
    assert list(log.warnings.values()) == [unanswered(path)]
    began = time.monotonic()
    assert [log.read() for _look in range(20)] == [[]] * 20
    assert time.monotonic() - began < 0.3
    assert list(log.warnings.values()) == [unanswered(path)]
    add(path, b"new\n")
    hung.answer()
    assert all_of(log, 1) == ["new"]
    assert log.warnings == {}
    log.close()


def test_what_a_late_answer_tells_is_not_lost(path: pathlib.Path, hung: Hung) -> None:
    add(path, b"old\n")
    log = LogFile(str(path))
    while not log.read():
        pass
    add(path, b"in time for the question\n")
    hung.hang()
    assert log.read() == []
    hung.answer()
    assert all_of(log, 1) == ["in time for the question"]
    assert new(log) == []
    log.close()


def test_only_another_process_touches_the_file_and_none_is_left_that_can_be_ended(
    path: pathlib.Path, hung: Hung
) -> None:
    """A thread that hangs there would keep the whole process, and all who wait for its output."""
    add(path, b"one\n")
    before = threads()
    log = LogFile(str(path))
    hung.hang()
    while not hung.asked:
        assert log.read() == []
    (pid,) = hung.asked
    assert pid != os.getpid() and threads() == before
    saved = log.save()
    log.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    hung.answer()
    # What was asked and never answered is asked again.
    later = LogFile(str(path))
    later.restore(saved)
    found: t.List[t.Tuple[str, bool]] = []
    while not found:
        found = later.read()
    assert found == [("one", False)]
    later.close()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("recorded", [True, False])
def test_one_that_cannot_be_ended_is_left_and_no_second_one_is_begun(
    path: pathlib.Path, hung: Hung, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    add(path, b"one\n")
    log = LogFile(str(path))
    hung.hang()
    while not hung.asked:
        assert log.read() == []
    (pid,) = hung.asked
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    with monkeypatch.context() as unkillable:
        unkillable.setattr(_bounded, "_kill", lambda _pid: None)
        saved = log.save()
        log.close()
    assert _bounded.stuck_child(log._key) == pid
    later = LogFile(str(path))
    if not recorded:  # who is no root cannot
        monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(path) + "/nowhere")
        later.restore(saved)
    began = time.monotonic()
    assert [later.read() for _look in range(10)] == [[]] * 10
    assert time.monotonic() - began < 0.3
    assert list(later.warnings.values()) == [unanswered(path)]
    assert hung.asked == [pid]
    hung.answer()
    os.waitpid(pid, 0)
    found: t.List[t.Tuple[str, bool]] = []
    while not found:
        found = later.read()
    assert found == [("one", False)]
    assert later.warnings == {}
    later.close()


def test_a_reader_that_was_killed_is_begun_again_where_it_was(path: pathlib.Path) -> None:
    add(path, b"old\n")
    log = LogFile(str(path))
    log.read()
    assert log._child is not None
    os.kill(log._child.pid, 9)
    add(path, b"new\n")
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: its reader ended' % path]
    assert new(log) == ["new"]
    assert log.warnings == {}
    log.close()


def test_without_room_for_a_process_it_is_said(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> t.NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    add(path, b"old\n")
    log = LogFile(str(path))
    with monkeypatch.context() as full:
        full.setattr(os, "fork", refuse)
        assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: Resource temporarily unavailable' % path]
    assert log.read() == [("old", False)]
    log.close()


@pytest.mark.parametrize("rotated", [False, True])
def test_a_later_slice_goes_on_where_the_last_one_was(path: pathlib.Path, rotated: bool) -> None:
    add(path, b"old\n")
    first = LogFile(str(path))
    first.read()
    add(path, b"half a ")
    first.read()
    saved = first.save()
    first.close()
    add(path, b"line\n")
    if rotated:
        path.rename(str(path) + ".1")
        add(path, b"next file\n")
    second = LogFile(str(path))
    second.restore(saved)
    assert new(second) == ["half a line"] + (["next file"] if rotated else [])
    assert new(second) == []


def test_what_is_handed_on_has_nothing_of_the_log_in_it(path: pathlib.Path) -> None:
    add(path, b"--api-key=sk-0123456789abcdef\n")
    log = LogFile(str(path))
    log.read()
    for data in (b"api_key='sk-0123456789abcdef'\n", b"and again sk-0123456", b"789abcdef"):
        add(path, data)
        log.read()
        saved = log.save()
        log.close()
        for piece in (b"sk-01", b"bcdef", b"again"):
            assert piece.hex() not in str(saved) and piece.decode() not in str(saved)
        log = LogFile(str(path))
        log.restore(saved)
        assert log.save() == saved  # one that has not looked has nothing else to hand on
    add(path, b"!\n")
    assert new(log) == ["and again sk-0123456789abcdef!"]
    log.close()


def test_a_later_slice_sees_that_the_file_was_begun_anew(path: pathlib.Path) -> None:
    add(path, b"old\nhalf a ")
    first = LogFile(str(path))
    first.read()
    saved = first.save()
    first.close()
    path.write_bytes(b"another one, and longer than that\n")
    second = LogFile(str(path))
    second.restore(saved)
    assert new(second) == ["another one, and longer than that"]
    second.close()
