# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A log file, followed: what is written to it from the first look on, over rotations, bounded."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import typing as t

from . import _logtext

__all__ = ("LogFile",)

FIRST_BYTES = 64 << 10  # that the first look goes back, to show what was written last
READ_LIMIT = 1 << 20  # bytes that one look takes in; of more, the last ones
PENDING_LIMIT = 64 << 10  # of a line that does not end
MARK = 64  # bytes before the place where it goes on: others there mean that the file was begun anew
PATIENCE = 1.0  # seconds for a file system that does not answer


class LogFile:
    """Lines of a file as ``(line, new)``. Old lines are those that were in it when it was first looked at."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.warnings: t.Dict[str, str] = {}
        self._number = -1  # the open file
        self._file: t.Optional[t.Tuple[int, int]] = None  # its device and inode
        self._offset = 0
        self._mark = b""
        self._pending = b""  # a line that has not ended
        self._shown = False  # whether it was told of all the same
        self._looked = False
        self._stuck: t.Optional[threading.Thread] = None

    def read(self) -> t.List[t.Tuple[str, bool]]:
        """The lines since the last call. A file system that hangs costs a second, once."""
        if self._stuck is not None:
            if self._stuck.is_alive():
                return []
            self._stuck = None
        found: t.List[t.Tuple[str, bool]] = []
        reader = threading.Thread(target=lambda: found.extend(self._read()), daemon=True)
        reader.start()
        reader.join(PATIENCE)
        if reader.is_alive():
            self._stuck = reader
            self.warnings = {"log": 'the log file "%s" cannot be read: its file system does not answer' % self.path}
            return []
        return found

    def close(self) -> None:
        if self._number >= 0 and self._stuck is None:
            os.close(self._number)
        self._number = -1

    def save(self) -> t.Dict[str, t.Any]:
        return {
            "file": self._file,
            "offset": self._offset,
            "mark": self._mark.hex(),
            "pending": self._pending[: _logtext.LINE_WIDTH].hex(),
            "shown": self._shown,
            "looked": self._looked,
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self._file = None if saved["file"] is None else (saved["file"][0], saved["file"][1])
        self._offset, self._shown, self._looked = saved["offset"], saved["shown"], saved["looked"]
        self._mark, self._pending = bytes.fromhex(saved["mark"]), bytes.fromhex(saved["pending"])

    def _read(self) -> t.List[t.Tuple[str, bool]]:
        """Runs in a thread of its own."""
        first = not self._looked
        self.warnings = {}
        lines: t.List[str] = []
        try:
            if self._number < 0 and self._file is not None:
                self._find_again()
            if self._number >= 0:
                lines += self._more()
            if self._renewed():
                lines += self._rest()
                self._open(self.path)
                self._looked = True
                if first:
                    return [(line, False) for line in self._last()]
                lines += self._more()
        except FileNotFoundError:
            self._looked = True  # whatever is in it when it comes is new
            if self._number < 0:
                self.warnings["log"] = 'the log file "%s" does not exist' % self.path
        except OSError as error:
            why = error.strerror or str(error)
            self.warnings["log"] = 'the log file "%s" cannot be read: %s' % (self.path, why)
        return [(line, True) for line in lines]

    def _open(self, path: str, only: t.Optional[t.Tuple[int, int]] = None) -> None:
        """Begin a file at its beginning; with ``only``, if it is that one and where the last look left it."""
        # Without blocking, since a pipe would keep the one waiting who opens it.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        status = os.fstat(number)
        file = (status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode) or (only is not None and file != only):
            os.close(number)
            if only is None:
                raise OSError(0, "it is no regular file")
            return
        if self._number >= 0:
            os.close(self._number)
        self._number, self._file = number, file
        if only is None:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._offset, self._mark, self._pending, self._shown = 0, b"", b"", False

    def _find_again(self) -> None:
        """The file that an earlier process left, though it may have been rotated away since."""
        for path in (self.path, self.path + ".1"):
            with contextlib.suppress(OSError):
                if self._number < 0:
                    self._open(path, self._file)

    def _renewed(self) -> bool:
        """Whether the path leads to another file than the open one."""
        status = os.stat(self.path)
        return self._number < 0 or (status.st_dev, status.st_ino) != self._file

    def _last(self) -> t.List[str]:
        """The last lines that are there already; from here on every line is new."""
        size = os.fstat(self._number).st_size
        begin = max(0, size - FIRST_BYTES)
        data = os.pread(self._number, size - begin, begin)
        self._offset, self._mark = begin + len(data), data[-MARK:]
        whole = data if begin == 0 else data[data.find(b"\n") + 1 :]
        ended = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._pending, self._shown = data[ended:], True
        return _logtext.lines_of(whole)

    def _more(self) -> t.List[str]:
        """What was written to the open file since."""
        size = os.fstat(self._number).st_size
        if size < self._offset or not self._goes_on():
            self._begin_anew()
        begin = max(self._offset, size - READ_LIMIT)
        data = b""
        while len(data) < READ_LIMIT:
            chunk = os.pread(self._number, min(65536, READ_LIMIT - len(data)), begin + len(data))
            if not chunk:
                break
            data += chunk
        skipped, self._offset = begin > self._offset, begin + len(data)
        self._mark = data[-MARK:] if skipped else (self._mark + data)[-MARK:]
        if skipped:
            self._pending = b""
            data = data[data.find(b"\n") + 1 :]  # the first line is the end of one
        return self._lines(data)

    def _goes_on(self) -> bool:
        """Whether what was read last is still where it was: a file can be emptied and grow beyond that in one look."""
        return os.pread(self._number, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _lines(self, data: bytes) -> t.List[str]:
        """Whole lines, and one that has stood unfinished since the last look, as a progress bar does."""
        before = self._pending
        text = before + data
        ended = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        whole, pending = text[:ended], text[ended:]
        if ended and self._shown and _logtext.ENDS.split(whole, 1)[0] == before:
            whole = whole[len(before) :]  # that line was told of, and only its end came
        lines = _logtext.lines_of(whole)
        self._shown = self._shown and pending == before
        if pending and not self._shown and (pending == before or len(pending) > PENDING_LIMIT):
            lines += _logtext.lines_of(pending)
            self._shown = True
        self._pending = pending[:PENDING_LIMIT]
        return lines

    def _rest(self) -> t.List[str]:
        """What stood unfinished in a file that is gone."""
        pending, self._pending = self._pending, b""
        return [] if self._shown else _logtext.lines_of(pending)
