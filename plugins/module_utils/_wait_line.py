# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a slice of a wait stands, in a small file that is there as long as the slice.

The controller reads it beside the slice, by a shell of the login and without ``become``. So root makes it in a folder
where nobody else can, and gives it to the login. It is a convenience: whatever goes wrong with it, the wait goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import typing as t

from . import _site

__all__ = ("FOLDER", "FOLDER_OF_USER", "MOST", "Line", "opened")

FOLDER = "/run/gpuops/lines"
FOLDER_OF_USER = "/run/user/%d/gpuops-lines"  # for who is not root
MOST = 4096  # bytes of a line
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Line:
    """The file. A second process removes it when this one is killed."""

    def __init__(self, name: str) -> None:
        """Raises OSError where there can be none."""
        self._names = (name, name + ".new")
        self._reader = _login()
        self._folder = _open_folder()
        try:
            self._guard, self._alive = _guard(self._folder, self._names)
        except OSError:
            os.close(self._folder)
            raise

    def write(self, text: str) -> None:
        """Put one line into the place of the one before. Raises OSError."""
        data = text.encode("utf-8", "replace") + b"\n"
        if len(data) > MOST:
            return
        name, new = self._names
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._folder)
        handle = os.open(new, OPEN_NEW, 0o600, dir_fd=self._folder)
        try:
            os.write(handle, data)
            if self._reader != os.geteuid():
                os.fchown(handle, self._reader, -1)
        finally:
            os.close(handle)
        os.replace(new, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def close(self) -> None:
        """Remove it."""
        _remove(self._folder, self._names)
        # The other one sleeps, so nothing keeps it from ending. It is a child that nobody else reaps: its number is its
        # own.
        with contextlib.suppress(OSError):
            os.kill(self._guard, signal.SIGKILL)
            os.waitpid(self._guard, 0)
        os.close(self._alive)
        os.close(self._folder)


@contextlib.contextmanager
def opened(name: str) -> t.Iterator[t.Callable[[str], None]]:
    """What writes the line of that name, or does nothing where that cannot be or no name is given."""
    line: t.Optional[Line] = None
    if name:
        with contextlib.suppress(OSError):
            line = Line(name)

    def write(text: str) -> None:
        with contextlib.suppress(OSError):
            if line is not None:
                line.write(text)

    try:
        yield write
    finally:
        if line is not None:
            line.close()


def _login() -> int:
    """The user who has logged in, as far as that is known."""
    text = os.environ.get("SUDO_UID", "")
    return int(text) if os.geteuid() == 0 and text.isdecimal() and len(text) <= 10 else os.geteuid()


def _open_folder() -> int:
    """The folder, made when it is not there: nobody but its owner can put anything into it or list it."""
    uid = os.geteuid()
    path = FOLDER_OF_USER % uid if uid else FOLDER
    parent = os.path.dirname(path)
    if not uid:
        os.makedirs(parent, mode=0o755, exist_ok=True)
        if _site.unsafe_reason(parent) is not None:
            raise PermissionError(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, OPEN_FOLDER)
    found = os.fstat(folder)
    try:
        if found.st_uid != uid or found.st_mode & 0o022:
            raise PermissionError(path)
        # Who knows a name may come to it.
        if not uid and stat.S_IMODE(found.st_mode) != 0o711:
            os.fchmod(folder, 0o711)
    except OSError:
        os.close(folder)
        raise
    return folder


def _guard(folder: int, names: t.Sequence[str]) -> t.Tuple[int, int]:
    """A child that removes the files once this process is gone, and what must stay open as long as it is not."""
    ends, ready = os.pipe(), os.pipe()
    try:
        pid = os.fork()
    except OSError:
        for end in (*ends, *ready):
            os.close(end)
        raise
    if pid == 0:
        _stand_by(ends[0], folder, names)
    os.close(ends[0])
    os.close(ready[1])
    os.read(ready[0], 1)  # until the child has closed it: from then on it outlives what ends this process
    os.close(ready[0])
    return pid, ends[1]


def _stand_by(end: int, folder: int, names: t.Iterable[str]) -> t.NoReturn:
    try:
        os.setsid()
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(kind, signal.SIG_IGN)
        # The output above all: whoever waits for its end must not wait for this one.
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in (end, folder):
                with contextlib.suppress(OSError):
                    os.close(number)
        os.read(end, 1)
        _remove(folder, names)
    finally:
        os._exit(0)


def _remove(folder: int, names: t.Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
