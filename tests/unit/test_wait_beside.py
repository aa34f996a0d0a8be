# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is read beside a slice: by which command, and that neither thread nor process outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import types
import typing as t
from pathlib import Path

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _wait_line
from ansible_collections.gpuops.serving.plugins.plugin_utils import _wait_beside

NAME = "0123456789abcdef" * 2
LIMIT = 30.0
LOCAL = types.SimpleNamespace(transport="local")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (("PAUSE", 0.01), ("SOONER", 0.01)):
        monkeypatch.setattr(_wait_beside, name, value)
    for name in ("FOLDER", "FOLDER_OF_USER"):
        monkeypatch.setattr(_wait_line, name, str(tmp_path / name))
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER_OF_USER").mkdir()
    return tmp_path / "FOLDER"


def write(folder: Path, live: t.Any) -> None:
    new = folder / "new"
    new.write_text((live if isinstance(live, str) else json.dumps(live)) + "\n", encoding="utf-8")
    new.rename(folder / NAME)


class Seen:
    """What was shown, for a test that waits for it."""

    def __init__(self) -> None:
        self.lines: t.List[t.Any] = []
        self._more = threading.Condition()

    def __call__(self, live: t.Any) -> None:
        with self._more:
            self.lines.append(live)
            self._more.notify()

    def wait(self, count: int) -> t.List[t.Any]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= count, LIMIT), self.lines
        return self.lines


def alive(word: str) -> t.List[str]:
    """Processes with that word in their command. A child still on its way to another program is not one more."""
    found: t.Dict[str, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (path / "cmdline").read_bytes():
                found[path.name] = (path / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
    return [pid for pid, parent in found.items() if parent not in found]


def test_a_child_on_its_way_to_another_program_is_not_counted() -> None:
    words = "import os, sys, time; os.fork(); print(flush=True); time.sleep(60)", NAME
    with subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline(), parent.stdout.readline()] == [b"\n", b"\n"]
        assert alive(NAME) == [str(parent.pid)]
        os.killpg(parent.pid, signal.SIGKILL)


def reading(seen: Seen, first: float = 0.0) -> _wait_beside.Beside:
    return _wait_beside.Beside(_wait_beside.command(LOCAL, NAME), seen, first)


@pytest.mark.parametrize("place", ["FOLDER", "FOLDER_OF_USER"])
def test_each_other_line_is_shown_once_and_nothing_is_left(folder: Path, place: str) -> None:
    threads, files, seen = threading.active_count(), os.listdir("/proc/self/fd"), Seen()
    where = folder.with_name(place)
    with reading(seen) as beside:
        for number, phase in enumerate(('a "b" $(c) \\n %s', "\u00e9\u0000\u001b[1m", "it's"), 1):
            write(where, {"phase": phase})
            write(where, {"phase": phase})
            assert seen.wait(number)[-1] == {"phase": phase}
        assert beside.heard
        assert len(alive(NAME)) == 1
    assert len(seen.lines) == 3
    assert (threading.active_count(), os.listdir("/proc/self/fd"), alive(NAME)) == (threads, files, [])


def test_a_slice_that_ends_before_the_first_look_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: t.Any, **_more: t.Any) -> t.Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(_wait_beside.subprocess, "Popen", refuse)
    threads = threading.active_count()
    with reading(Seen(), first=3600.0) as beside:
        assert threading.active_count() == threads + 1
    assert (threading.active_count(), beside.heard) == (threads, False)


def test_the_shell_ends_with_the_file_with_its_reader_and_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> t.Any:
        argv = _wait_beside.command(LOCAL, NAME)
        assert argv is not None
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    write(folder, {"percent": 3})
    with start() as shell:
        assert shell.stdout.readline() == b'{"percent": 3}\n'
        (folder / NAME).unlink()
        out, err = shell.communicate(timeout=LIMIT)
        assert (shell.returncode, out.strip(), err) == (0, b"", b"")
    write(folder, {"percent": 4})
    with start() as shell:
        assert shell.stdout.readline() == b'{"percent": 4}\n'
        shell.stdout.close()
        assert shell.wait(LIMIT) is not None
    monkeypatch.setattr(_wait_beside, "ROUNDS", 3)
    with start() as shell:
        assert shell.communicate(timeout=LIMIT) == (b'{"percent": 4}\n\n\n', b"")


def test_what_is_no_line_is_not_shown(folder: Path) -> None:
    seen = Seen()
    with reading(seen) as beside:
        for text in ("{", "[1]", "null", "x" * 3000, "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")):
            write(folder, text)
            (folder / "FIFO").touch()
        write(folder, {"percent": 5})
        assert seen.wait(1) == [{"percent": 5}]
        assert beside.heard


def test_a_line_that_cannot_be_shown_ends_nothing(folder: Path) -> None:
    seen = Seen()

    def show(live: t.Any) -> None:
        seen(live)
        raise KeyError("stage")

    with _wait_beside.Beside(_wait_beside.command(LOCAL, NAME), show, 0.0) as beside:
        for number in (1, 2):
            write(folder, {"percent": number})
            seen.wait(number)
    assert not beside.heard


@pytest.mark.parametrize(
    "argv", [["/nowhere/ssh"], ["false"], ["sh", "-c", "exec yes $(head -c 9000 /dev/zero | tr '\\0' x)"]]
)
def test_a_command_that_does_not_work_is_tried_again_at_longer_and_longer_intervals(
    monkeypatch: pytest.MonkeyPatch, argv: t.List[str]
) -> None:
    pauses: t.List[float] = []
    enough = threading.Event()
    real = _wait_beside._ready

    def ready(seconds: float, *files: int) -> t.List[int]:
        if len(files) > 1:
            return real(seconds, *files)
        pauses.append(seconds)
        if len(pauses) < 9:
            return []
        enough.set()
        return real(LIMIT, *files)

    monkeypatch.setattr(_wait_beside, "_ready", ready)
    seen = Seen()
    with _wait_beside.Beside(t.cast(t.Any, argv), seen) as beside:
        assert enough.wait(LIMIT)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert (seen.lines, beside.heard) == ([], False)


def test_nothing_is_shown_once_the_slice_has_ended() -> None:
    seen = Seen()
    with _wait_beside.Beside(None, seen) as beside:
        beside._take(b'{"percent": 1}')
    beside._over = True
    beside._take(b'{"percent": 2}')
    assert seen.lines == [{"percent": 1}]


def test_the_end_of_a_slice_waits_for_a_line_that_is_being_shown(folder: Path) -> None:
    showing, go_on, done = threading.Event(), threading.Event(), []

    def show(_live: t.Any) -> None:
        showing.set()
        assert go_on.wait(LIMIT)
        done.append("shown")

    write(folder, {"percent": 1})
    beside = _wait_beside.Beside(_wait_beside.command(LOCAL, NAME), show, 0.0)
    with beside:
        assert showing.wait(LIMIT)
        threading.Timer(0.05, go_on.set).start()
    assert done == ["shown"]


class Ssh:
    """A connection by SSH as far as a command is made of it."""

    transport = "ssh"

    def __init__(self, *words: str, **options: t.Any) -> None:
        self.words = [word.encode() for word in words]
        self.host = "gpu03"
        self._play_context = types.SimpleNamespace(password="hunter2")
        self._options = {"ssh_executable": "/usr/bin/ssh", "host": "10.0.0.3", "password": "hunter2", **options}
        self.user: t.Optional[str] = None

    def get_option(self, name: str) -> t.Any:
        return self._options[name]

    def _build_command(self, binary: str, subsystem: str, *rest: str) -> t.List[bytes]:
        assert subsystem == "ssh"
        assert not (self.get_option("password") or self._play_context.password)
        self.user = "ops"
        return [binary.encode(), *self.words, *(word.encode() for word in rest)]


def test_a_command_by_ssh_rides_the_connection_that_is_there_and_knows_no_password() -> None:
    connection = Ssh("-C", "-J", "bastion", "-o", "ControlPath=/x")
    before = dict(vars(connection))
    argv = _wait_beside.command(connection, NAME)
    assert argv is not None
    head, tail = argv[: 1 + 2 * len(_wait_beside.RIDE)], argv[1 + 2 * len(_wait_beside.RIDE) :]
    assert head[:3] == [b"/usr/bin/ssh", b"-o", b"ProxyCommand=false"]
    assert b"BatchMode=yes" in head
    assert b"ControlMaster=no" in head
    assert tail[:-1] == [b"-C", b"-o", b"ControlPath=/x", b"10.0.0.3"]
    assert t.cast(bytes, tail[-1]).startswith(b"/bin/sh -c '")
    # Nothing in it means anything to the shell of the login, whichever that is.
    quoted = t.cast(bytes, tail[-1])[len("/bin/sh -c ") :]
    assert quoted.count(b"'") == 2
    assert not set(b"!\n`") & set(quoted)
    # The connection of the slice itself is as it was.
    assert vars(connection) == before
    assert connection._play_context.password == connection._options["password"] == "hunter2"


def test_other_connections_are_left_alone() -> None:
    assert _wait_beside.command(Ssh("-C"), NAME) is None  # nothing to ride on
    assert _wait_beside.command(types.SimpleNamespace(transport="docker"), NAME) is None
