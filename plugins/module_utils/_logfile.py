# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A log file, followed: what is written to it from the first look on, over rotations, bounded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import typing as t
import zlib

from . import _bounded, _logtext, _standby

__all__ = ("LogFile",)

FIRST_BYTES = 64 << 10  # that the first look goes back, to show what was written last
READ_LIMIT = 1 << 20  # bytes that one look takes in; of more, the last ones
PENDING_LIMIT = 64 << 10  # of a line that does not end
MARK = 64  # bytes before the place where it goes on: others there mean that the file was begun anew
PATIENCE = 1.0  # seconds for a file system that does not answer
# Of statx(2): the file that a number stands for, the bit of the time at which it was made, and where that is.
AT_EMPTY_PATH, STATX_BTIME, BTIME_AT, STATX_SIZE = 0x1000, 0x800, 80, 256


class LogFile:
    """Lines of a file as ``(line, new)``. Old lines are those that were in it when it was first looked at.

    A child reads, since whoever asks a file system that hangs may never end, and keeps open what it was given.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.warnings: t.Dict[str, str] = {}
        self._number = -1  # the open file
        self._file: t.Optional[t.Tuple[int, int]] = None  # its device and inode
        self._offset = 0
        self._mark = b""
        self._pending = b""  # a line that has not ended
        self._shown = False  # whether it was told of all the same
        self._kept: t.Optional[t.Dict[str, t.Any]] = None  # how both are known again, after another process
        self._looked = False
        # When the file was written last before the first look, and when it was made, by the clock of the wall.
        self.written: t.Optional[float] = None
        self.born: t.Optional[float] = None
        self._key = "log-file-%08x" % zlib.crc32(os.fsencode(path))
        self._child: t.Optional[_standby.Standby] = None
        self._stuck: t.Optional[t.List[int]] = None  # one that an earlier process left: its number and start

    def read(self) -> t.List[t.Tuple[str, bool]]:
        """The lines since the last call. A file system that hangs costs a second, once."""
        if self._child is None and self._left_behind():
            self._say("its file system does not answer")
            return []
        try:
            if self._child is None:
                self._child = _standby.Standby(self._look, self._key)
            answer = self._child.ask(0.0 if self._child.asked else PATIENCE)
        except OSError as error:
            self.close()
            self._say(error.strerror or str(error))
            return []
        if answer is None:
            self._say("its file system does not answer")
            return []
        self._take_place(answer["place"])
        self.warnings, self.written, self.born = answer["warnings"], answer["written"], answer["born"]
        return [(line, new) for line, new in answer["lines"]]

    def _say(self, why: str) -> None:
        self.warnings = {"log": 'the log file "%s" cannot be read: %s' % (self.path, why)}

    def _left_behind(self) -> bool:
        """Whether a child of an earlier process still hangs: another one would only join it."""
        if self._stuck is not None and _bounded._start_ticks(self._stuck[0]) != self._stuck[1]:
            self._stuck = None
        return self._stuck is not None or _bounded.stuck_child(self._key) is not None

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def save(self) -> t.Dict[str, t.Any]:
        """What another process needs to go on. A log may hold secrets, so its bytes are told by a hash."""
        stuck = self._stuck if self._child is None else self._child.mark()
        kept = self._kept or {"mark": _print_of(self._mark), "pending": _print_of(self._pending)}
        return dict(self._place(), stuck=stuck, **kept)

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self._take_place({**saved, "mark": "", "pending": ""})
        self._kept = {name: list(saved[name]) for name in ("mark", "pending")}
        self._stuck = saved["stuck"]

    def _place(self) -> t.Dict[str, t.Any]:
        return {
            "file": self._file,
            "offset": self._offset,
            "mark": self._mark.hex(),
            "pending": self._pending.hex(),
            "shown": self._shown,
            "looked": self._looked,
        }

    def _take_place(self, saved: t.Mapping[str, t.Any]) -> None:
        self._file = None if saved["file"] is None else (saved["file"][0], saved["file"][1])
        self._offset, self._shown, self._looked = saved["offset"], saved["shown"], saved["looked"]
        self._mark, self._pending = bytes.fromhex(saved["mark"]), bytes.fromhex(saved["pending"])
        self._kept = None

    def _look(self) -> t.Dict[str, t.Any]:
        """Runs in the child, where all that is open stays open."""
        lines = self._read()
        times = {"written": self.written, "born": self.born}
        return {"lines": lines, "warnings": self.warnings, "place": self._place(), **times}

    def _read(self) -> t.List[t.Tuple[str, bool]]:
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
        if self._number >= 0 and self._kept is not None:
            self._recall(self._kept)
            self._kept = None

    def _recall(self, kept: t.Mapping[str, t.Any]) -> None:
        """What an earlier process had read last, which is in the file as long as nobody has begun that anew."""

        def before(length: int, known: str) -> t.Optional[bytes]:
            data = os.pread(self._number, length, max(0, self._offset - length))
            return data if _print_of(data) == [length, known] else None

        mark = before(*kept["mark"])
        if mark is None:
            self._begin_anew()
        else:
            self._mark, self._pending = mark, before(*kept["pending"]) or b""

    def _renewed(self) -> bool:
        """Whether the path leads to another file than the open one."""
        status = os.stat(self.path)
        return self._number < 0 or (status.st_dev, status.st_ino) != self._file

    def _last(self) -> t.List[str]:
        """The last lines that are there already; from here on every line is new."""
        status = os.fstat(self._number)
        size, self.written, self.born = status.st_size, status.st_mtime, _born(self._number)
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


def _print_of(data: bytes) -> t.List[t.Any]:
    return [len(data), hashlib.sha256(data).hexdigest()]


def _born(number: int) -> t.Optional[float]:
    """When an open file was made; None where the file system or the C library does not tell."""
    try:
        import ctypes

        answer = ctypes.create_string_buffer(STATX_SIZE)
        if ctypes.CDLL(None).statx(number, b"", AT_EMPTY_PATH, STATX_BTIME, answer) != 0:
            return None
    except (ImportError, OSError, AttributeError):
        return None
    if not struct.unpack_from("=I", answer)[0] & STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, BTIME_AT)
    return float(seconds + nanoseconds / 1e9)
