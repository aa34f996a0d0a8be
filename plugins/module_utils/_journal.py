# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What units and systemd wrote to the journal, as records: read piece by piece, bounded in time and in memory.

``journalctl --output=export`` is read because it tells every byte of a message as it was written, and because one that
is too long can be cut while it arrives.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import subprocess
import time
import typing as t
from dataclasses import dataclass

from . import _bounded, _logtext, _systemd
from ._errors import ServingError

__all__ = ["Parser", "Record", "Stream", "arguments_of", "journal", "remarks"]

JOURNAL_LINES = 5000
FIELD_LIMIT = 64 << 10  # bytes of a field that are kept
READ_LIMIT = 8 << 20  # bytes that one call takes in
ERROR_LIMIT = 16 << 10
FIELDS = ("MESSAGE", "_SYSTEMD_INVOCATION_ID", "INVOCATION_ID", "_PID", "PRIORITY", "N_DROPPED")
STAMPS = ("__CURSOR", "__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "_BOOT_ID")  # come without being asked for
WANTED = frozenset(name.encode("ascii") for name in (*FIELDS, *STAMPS))
NAME = re.compile(rb"[A-Z0-9_]{1,64}\Z")
NOTHING = [b""]


@dataclass
class Record:
    """One line of the journal. ``dropped`` are lines that it left out, as it says in this one."""

    cursor: str
    realtime: int
    monotonic: int
    invocation: str
    pid: int
    priority: int
    message: str
    boot: str = ""
    dropped: int = 0


class Parser:
    """Makes records of the export format as it arrives."""

    def __init__(self) -> None:
        self._data = b""
        self._fields: t.Dict[bytes, t.List[bytes]] = {}
        self._skip = 0  # bytes that are still to come of a field that is cut
        self._cut = False  # whether the rest of a line is thrown away

    def feed(self, data: bytes) -> t.List[Record]:
        """The records that end in this piece; a progress bar is one record a step."""
        self._data += data
        found: t.List[Record] = []
        at = 0
        while True:
            if self._skip:
                step = min(self._skip, len(self._data) - at)
                self._skip, at = self._skip - step, at + step
                if self._skip:
                    break
            end = self._data.find(b"\n", at)
            if self._cut:
                if end < 0:
                    at = len(self._data)
                    break
                self._cut, at = False, end + 1
                continue
            if end < 0:
                if len(self._data) - at > FIELD_LIMIT:
                    self._text(self._data[at : at + FIELD_LIMIT])
                    self._cut, at = True, len(self._data)
                break
            line = self._data[at:end]
            if not line:
                found += self._entry()
                at = end + 1
            elif b"=" in line:
                self._text(line[:FIELD_LIMIT])
                at = end + 1
            elif not NAME.match(line):
                at = end + 1  # what journalctl remarks
            else:
                begin = end + 1 + 8
                if len(self._data) < begin:
                    break
                (size,) = struct.unpack("<Q", self._data[end + 1 : begin])
                kept = min(size, FIELD_LIMIT)
                if len(self._data) < begin + kept:
                    break
                self._keep(line, self._data[begin : begin + kept])
                self._skip, at = size - kept + 1, begin + kept
        self._data = self._data[at:]
        return found

    def _text(self, line: bytes) -> None:
        name, _equals, value = line.partition(b"=")
        self._keep(name, value)

    def _keep(self, name: bytes, value: bytes) -> None:
        if name in self._fields:
            self._fields[name].append(value)
        elif name in WANTED:
            self._fields[name] = [value]

    def _entry(self) -> t.List[Record]:
        # Written out flat: beside a progress bar this is the most that a wait does.
        fields, self._fields = self._fields, {}
        if not fields:
            return []
        get, number = fields.get, _systemd.number
        invocation = get(b"_SYSTEMD_INVOCATION_ID") or get(b"INVOCATION_ID", NOTHING)
        return [
            Record(
                cursor=get(b"__CURSOR", NOTHING)[0].decode("utf-8", "replace"),
                realtime=number(get(b"__REALTIME_TIMESTAMP", NOTHING)[0]),
                monotonic=number(get(b"__MONOTONIC_TIMESTAMP", NOTHING)[0]),
                invocation=invocation[0].decode("utf-8", "replace"),
                pid=number(get(b"_PID", NOTHING)[0]),
                priority=number(get(b"PRIORITY", NOTHING)[0] or b"6"),
                message=line,
                boot=get(b"_BOOT_ID", NOTHING)[0].decode("utf-8", "replace"),
                dropped=number(get(b"N_DROPPED", NOTHING)[0]),
            )
            for line in _logtext.lines_of(b"\n".join(get(b"MESSAGE", NOTHING))) or [""]
        ]


class Stream:
    """A journalctl whose output is taken as it comes."""

    def __init__(self, arguments: t.Sequence[str]) -> None:
        environment = dict(os.environ, LC_ALL="C", SYSTEMD_COLORS="0", SYSTEMD_PAGER="", SYSTEMD_URLIFY="0")
        environment["PATH"] = environment.get("PATH", "") + ":/usr/bin:/bin:/usr/sbin:/sbin"
        caller = os.getpid()
        try:
            self._child = subprocess.Popen(
                ["journalctl", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                # One that follows would live on after a caller that was killed, until the unit writes again.
                preexec_fn=(lambda: _bounded._die_with(caller)) if "--follow" in arguments else None,
            )
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ServingError('the command "journalctl" cannot run: %s' % why) from error
        assert self._child.stdout is not None and self._child.stderr is not None
        self._out, self._err = self._child.stdout.fileno(), self._child.stderr.fileno()
        for number in (self._out, self._err):
            os.set_blocking(number, False)
        self.said = ""
        self.ended = False

    def read(self, seconds: float = 0.0, most: int = READ_LIMIT) -> t.Iterator[bytes]:
        """What has come, and what comes in the next seconds unless it ends before."""
        end = time.monotonic() + seconds
        poller = select.poll()
        for number in (self._out, self._err):
            poller.register(number, select.POLLIN)
        taken = 0
        while not self.ended and taken < most:
            left = end - time.monotonic()
            if not poller.poll(max(0.0, left) * 1000.0):
                return
            self._listen()
            try:
                chunk = os.read(self._out, 65536)
            except BlockingIOError:
                if left <= 0:
                    return
                continue
            if not chunk:
                self.ended = True
            taken += len(chunk)
            yield chunk

    def _listen(self) -> None:
        """What it says beside its output. A pipe that nobody empties would stop it."""
        with contextlib.suppress(BlockingIOError, ValueError):
            text = os.read(self._err, ERROR_LIMIT).decode("utf-8", "replace")
            self.said = (self.said + text)[:ERROR_LIMIT]

    def close(self) -> t.Optional[int]:
        """End it; its status where it had ended by itself."""
        if self.ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
            self._listen()
        rc = self._child.poll()
        if rc is None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # never wait for one that cannot die
                self._child.wait(0.5)
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        return rc


def arguments_of(unit: str, invocation: t.Optional[str] = None, after_cursor: t.Optional[str] = None) -> t.List[str]:
    """What to ask journalctl for."""
    unit = _systemd.unit_name(unit)
    arguments = ["--no-pager", "--all", "--output=export", "--output-fields=" + ",".join(FIELDS)]
    if after_cursor:
        arguments.append("--after-cursor=" + after_cursor)
    if not invocation:
        return [*arguments, "--unit=" + unit]
    # Of the service, of systemd about it, of journald about it.
    arguments += ["_SYSTEMD_INVOCATION_ID=" + invocation]
    arguments += ["+", "INVOCATION_ID=" + invocation, "UNIT=" + unit]
    return [*arguments, "+", "OBJECT_SYSTEMD_INVOCATION_ID=" + invocation, "_UID=0"]


def journal(
    unit: str,
    invocation: t.Optional[str] = None,
    after_cursor: t.Optional[str] = None,
    lines: t.Optional[int] = None,
    timeout: float = 10.0,
) -> t.List[Record]:
    """What the unit and systemd about the unit wrote, oldest first.

    Without a cursor these are the newest lines, after a cursor the ones that follow it; at most ``lines`` either way.
    Where the time is over, what has come is answered.
    """
    stream = Stream(["--lines=%d" % (lines or JOURNAL_LINES), *arguments_of(unit, invocation, after_cursor)])
    parser, found = Parser(), []
    try:
        for chunk in stream.read(timeout):
            found += parser.feed(chunk)
    finally:
        rc = stream.close()
    if not stream.ended and not found:
        raise _systemd.NoAnswer('the journal of the unit "%s" did not answer within %g s' % (unit, timeout))
    if stream.ended and rc != 0:
        said = _systemd.said(rc or 0, stream.said)
        raise ServingError('the journal of the unit "%s" cannot be read: %s' % (unit, said))
    return found


def remarks(timeout: float = 10.0) -> t.List[str]:
    """What journalctl remarks of the journal as such: that there is none, or that not all of it may be read.

    With an output for programs it keeps that to itself, so this asks for no line in the form for people.
    """
    stream = Stream(["--no-pager", "--lines=0"])
    try:
        for _chunk in stream.read(timeout):
            pass
    finally:
        stream.close()
    return stream.said.splitlines()
