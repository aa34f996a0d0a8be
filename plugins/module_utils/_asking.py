# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Questions to container managers, what their clients were called with, and requests to stop; all of it bounded."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import subprocess
import time
from typing import IO, NamedTuple

from . import _bounded
from ._accounts import account
from ._places import Container
from ._processes import ProcessRef, escape

__all__ = ["Request", "Said", "as_user", "ask", "program", "read"]

FOLDERS = ("/usr/bin", "/usr/local/bin", "/bin", "/usr/sbin", "/usr/local/sbin", "/sbin", "/snap/bin")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
MARGIN = 10.0  # what a manager has beyond the seconds that it gives a container
MOST = 1 << 20  # bytes of a command line or an environment
NOISE = 300


class Said(NamedTuple):
    """What a live client was called with."""

    words: list[str]
    environment: dict[str, str]


def program(name: str) -> str:
    """The path of a manager's program in a usual folder, if nobody but root can have put it there."""
    for folder in FOLDERS:
        path = os.path.realpath(os.path.join(folder, name))
        if os.access(path, os.X_OK) and os.path.isfile(path) and _only_root(path):
            return os.path.join(folder, name)
    return ""


def _only_root(path: str) -> bool:
    while True:
        facts = os.stat(path)
        sticky = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX
        if facts.st_uid != 0 or (facts.st_mode & 0o022 and not sticky):
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def as_user(uid: int) -> list[str]:
    """What comes before a command that is to run with the rights of a user and none of ours."""
    entry = account(uid)
    if entry is None:
        return ["setpriv", "--reuid=%d" % uid, "--regid=65534", "--clear-groups", "--", "env", "-i", "PATH=" + PATH]
    words = ["setpriv", "--reuid=%d" % uid, "--regid=%d" % entry.pw_gid, "--init-groups", "--", "env", "-i"]
    words += ["PATH=" + PATH, "LC_ALL=C", "HOME=" + entry.pw_dir, "USER=" + entry.pw_name]
    return [*words, "XDG_RUNTIME_DIR=/run/user/%d" % uid]


def _start(words: list[str], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
    # None of the caller's variables: some of them say which daemon a client asks.
    environment = {"PATH": PATH, "LC_ALL": "C", "HOME": "/root"}
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, cwd="/", start_new_session=True
    )


def _end(child: subprocess.Popen[bytes], wait: float = 1.0) -> None:
    """Kill a child and what it started, and reap it."""
    if child.poll() is not None:
        return
    for target in (os.killpg, os.kill):  # not reaped yet, so the number is its own
        with contextlib.suppress(OSError):
            target(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is not waited for
        child.wait(wait)


def ask(words: list[str], timeout: float) -> tuple[int, str, str]:
    """The status of a command, what it printed, and what it complained of in one line; -1 without a status."""
    with contextlib.ExitStack() as opened:
        try:
            out, err = opened.enter_context(_memory()), opened.enter_context(_memory())
        except OSError as error:
            return -1, "", "no answer: there is no room for one: %s" % error.strerror
        try:
            child = _start(words, out, err)
        except OSError as error:
            return -1, "", "%s cannot run: %s" % (words[0], error.strerror)
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            return -1, "", "no answer within %.3g s" % timeout
        finally:
            _end(child)
        return child.returncode, _text(out, MOST), _line(err)


def _memory() -> IO[bytes]:
    """A file in memory: no folder may be full, and a pipe is kept open by what a command leaves behind."""
    return open(os.memfd_create("gpuops"), "w+b")


def _text(stream: IO[bytes], most: int) -> str:
    stream.seek(0)
    return stream.read(most).decode("utf-8", "replace")


def _line(stream: IO[bytes]) -> str:
    text = " ".join(_text(stream, 4096).split())
    return escape(text.encode("utf-8", "replace"))[-NOISE:]


class Request:
    """One manager's work on stopping one container, in the background."""

    def __init__(self, container: Container, seconds: float) -> None:
        whole = str(max(0, math.ceil(seconds)))
        words = [whole if word == "{seconds}" else word for word in container.stop]
        self._until = time.monotonic() + max(0.0, seconds) + MARGIN
        self._container = container
        self._child: subprocess.Popen[bytes] | None = None
        self._failed = ""
        self._err: IO[bytes] | None = None
        if not words:
            return
        with contextlib.suppress(OSError):  # the request counts, not what is said about it
            self._err = _memory()
        try:
            with open(os.devnull, "wb") as null:
                self._child = _start(words, null, self._err or null)
        except OSError as error:
            self._failed = "%s cannot run: %s" % (words[0], error.strerror)

    @property
    def done(self) -> bool:
        """Whether the manager has answered, or will not any more."""
        if self._child is None:
            return True
        if self._child.poll() is None:
            if time.monotonic() < self._until:
                return False
            _end(self._child)
            self._failed = self._failed or "no answer"
        return True

    @property
    def failed(self) -> str:
        """What went wrong, empty when nothing did or it is not done."""
        if self._failed or self._child is None or self._child.poll() in (None, 0):
            return self._failed
        return (_line(self._err) if self._err is not None else "") or "status %s" % self._child.returncode

    def end(self) -> None:
        """Leave nothing of it behind."""
        if self._child is not None and self._child.poll() is None:
            self._failed = self._failed or "it was not waited for any longer"
            _end(self._child)


def read(refs: list[ProcessRef], timeout: float) -> dict[ProcessRef, Said]:
    """Arguments and environment of processes; one that cannot be read in time is missing.

    Either is in the process's memory, which one that hangs in a driver may have locked for ever.
    """
    found: dict[ProcessRef, Said] = {}
    end = time.monotonic() + timeout
    for ref in refs:

        def look(_report: _bounded.Report, ref: ProcessRef = ref) -> list[list[str]] | None:
            directory = os.open("/proc/%d" % ref.pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with open(os.open("stat", os.O_RDONLY, dir_fd=directory), "rb") as stream:
                if int(stream.read().rpartition(b")")[2].split()[19]) != ref.start:
                    return None
            return [_strings(directory, "cmdline"), _strings(directory, "environ")]

        outcome = _bounded.run(look, max(0.05, min(1.0, end - time.monotonic())))
        if outcome.ok and outcome.value is not None:
            words, variables = outcome.value
            found[ref] = Said(words, dict(word.split("=", 1) for word in variables if "=" in word))
        if time.monotonic() >= end:
            break
    return found


def _strings(directory: int, name: str) -> list[str]:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory), "rb") as stream:
        data = stream.read(MOST)
    return [part.decode("utf-8", "replace") for part in data.rstrip(b"\0").split(b"\0")]
