# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The file with the present line of a slice: who may read it, and that it goes with the slice."""

from __future__ import annotations

import os
import signal
import stat
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _site, _wait_line

NAME = "0123456789abcdef" * 2
OTHER = 12345  # a user without a name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file is, below a folder that anybody may write to."""
    found = tmp_path / "lines"
    monkeypatch.setattr(_wait_line, "FOLDER", str(found))
    monkeypatch.setattr(_wait_line, "FOLDER_OF_USER", str(found).replace("%", "%%") + "-%d")
    monkeypatch.setattr(_site, "unsafe_reason", lambda _path: None)
    monkeypatch.delenv("SUDO_UID", raising=False)
    return found if os.geteuid() == 0 else Path("%s-%d" % (found, os.geteuid()))


def children() -> t.Set[str]:
    return set(Path("/proc/self/task/%d/children" % os.getpid()).read_text(encoding="ascii").split())


def test_the_last_line_is_there_as_long_as_it_is_open_and_nothing_of_it_afterwards(folder: Path) -> None:
    before, files = children(), os.listdir("/proc/self/fd")
    with _wait_line.opened(NAME) as write:
        for text in ("one", "two", "thr\u00e9\u00e9"):
            write(text)
            assert (folder / NAME).read_text(encoding="utf-8") == text + "\n"
        assert os.listdir(folder) == [NAME]
        assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
        assert len(children() - before) == 1
    assert os.listdir(folder) == []
    assert (children(), os.listdir("/proc/self/fd")) == (before, files)


def test_it_is_gone_when_the_body_fails(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), _wait_line.opened(NAME) as write:
        write("one")
        raise ZeroDivisionError
    assert os.listdir(folder) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_when_the_slice_is_killed_and_its_output_is_closed(folder: Path, number: int) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            with _wait_line.opened(NAME) as write:
                write("one")
                os.write(writer, b"x")
                signal.pause()
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    assert os.listdir(folder) == [NAME]
    os.killpg(pid, number)
    os.waitpid(pid, 0)
    # The child that stays to remove it does not hold the output open.
    assert os.read(reader, 1) == b""
    os.close(reader)
    until = time.monotonic() + 20
    while os.listdir(folder) and time.monotonic() < until:
        time.sleep(0.01)
    assert os.listdir(folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(
    ("text", "owner"), [(str(OTHER), OTHER), ("", 0), ("-1", 0), ("x", 0), ("0", 0), ("99999999999999999999", 0)]
)
def test_it_belongs_to_who_has_logged_in(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, owner: int) -> None:
    monkeypatch.setenv("SUDO_UID", text)
    with _wait_line.opened(NAME) as write:
        write("one")
        assert (folder / NAME).stat().st_uid == owner
    # Others may come to it by its name, and neither list the folder nor put anything into it.
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o711)


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user")
def test_a_folder_that_others_own_or_write_to_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    for uid, mode in ((OTHER, 0o700), (0, 0o777)):
        os.chown(folder, uid, -1)
        folder.chmod(mode)
        with _wait_line.opened(NAME) as write:
            write("one")
            assert os.listdir(folder) == []
    folder.rmdir()
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with _wait_line.opened(NAME) as write:
        write("one")
        assert os.listdir(elsewhere) == []
    folder.unlink()
    monkeypatch.setattr(_site, "unsafe_reason", lambda _path: "others can write to it")
    with _wait_line.opened(NAME) as write:
        write("one")
        assert not folder.exists()


def test_what_cannot_be_written_is_no_reason_to_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with _wait_line.opened(NAME) as write:
        write("one")
        write("x" * _wait_line.MOST)
        assert (folder / NAME).read_text(encoding="utf-8") == "one\n"
        monkeypatch.setattr(_wait_line, "OPEN_NEW", os.O_WRONLY)
        write("two")
        assert (folder / NAME).read_text(encoding="utf-8") == "one\n"

    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(_wait_line.os, "fork", refuse)
    files = os.listdir("/proc/self/fd")
    with _wait_line.opened(NAME) as write:
        write("one")
        assert os.listdir(folder) == []
    assert (children(), os.listdir("/proc/self/fd")) == (before, files)


def test_without_a_name_nothing_is_made(folder: Path) -> None:
    before = children()
    with _wait_line.opened("") as write:
        write("one")
        assert children() == before
    assert not folder.exists()


def test_what_was_left_of_a_line_that_was_cut_is_no_obstacle(folder: Path) -> None:
    with _wait_line.opened(NAME) as write:
        (folder / (NAME + ".new")).write_text("ha", encoding="ascii")
        write("one")
        assert (folder / NAME).read_text(encoding="ascii") == "one\n"
