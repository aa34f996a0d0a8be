# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A log file that is written, emptied, rotated and taken away under the reader."""

from __future__ import annotations

import os
import pathlib
import threading
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _logfile
from ansible_collections.gpuops.serving.plugins.module_utils._logfile import LogFile


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "engine.log"


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

    def refuse(*_arguments: t.Any) -> t.NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_logfile.os, "open", refuse)
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: Permission denied' % path]


def test_a_file_system_that_hangs_costs_its_patience_once(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, b"old\n")
    log = LogFile(str(path))
    log.read()
    released = threading.Event()
    real = os.fstat
    monkeypatch.setattr(_logfile, "PATIENCE", 0.05)
    monkeypatch.setattr(_logfile.os, "fstat", lambda number: (released.wait(10), real(number))[1])
    assert log.read() == []
    assert list(log.warnings.values()) == ['the log file "%s" cannot be read: its file system does not answer' % path]
    assert log._stuck is not None
    stuck = log._stuck
    assert log.read() == [] and log._stuck is stuck
    released.set()
    stuck.join(5)
    add(path, b"new\n")
    assert new(log) == ["new"]
    assert log.warnings == {}


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
