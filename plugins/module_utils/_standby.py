# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A forked child that does one thing each time it is asked to, for what may hang and has to keep its place between."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import time
import typing as t

from . import _bounded

__all__ = ("Standby",)

ENDED = "its reader ended"


class Standby:
    """Like :func:`_bounded.run`, for many calls: a fork for each would cost more than the calls themselves.

    It ends when it is closed, or when the caller does. One that cannot be ended is recorded under its key.
    """

    def __init__(self, function: t.Callable[[], t.Dict[str, t.Any]], key: str) -> None:
        self.asked = False  # whether an answer is still to come
        self._key, self._closed = key, False
        self._pending = b""
        self._socket, other = _pair()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._socket)
            os.close(other)
            raise

        def serve(report: _bounded.Report) -> None:
            while os.read(other, 1):
                report(function())

        if self.pid == 0:
            _bounded._child(serve, self._socket, other, 0)
        os.close(other)
        os.set_blocking(self._socket, False)

    def ask(self, seconds: float) -> t.Optional[t.Dict[str, t.Any]]:
        """The answer to this question, or to the last one if that is still to come; None if none comes in time."""
        try:
            return self._ask(time.monotonic() + seconds)
        except (ConnectionError, EOFError) as error:
            raise OSError(0, ENDED) from error

    def _ask(self, end: float) -> t.Optional[t.Dict[str, t.Any]]:
        if not self.asked:
            os.write(self._socket, b"?")
            self.asked = True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while b"\n" not in self._pending:
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000.0):
                return None
            chunk = os.read(self._socket, 1 << 20)
            if not chunk:
                raise EOFError
            self._pending += chunk
        line, _end, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "partial" not in answer:
            raise OSError(0, str(answer.get("error") or answer.get("message") or ENDED))
        self.asked = False
        found: t.Dict[str, t.Any] = answer["partial"]
        return found

    def mark(self) -> t.Optional[t.List[int]]:
        """Its number and start while an answer is still to come, by which a later process knows it again."""
        start = _bounded._start_ticks(self.pid) if self.asked else None
        return None if start is None else [self.pid, start]

    def close(self) -> None:
        if not self._closed:
            self._closed = True  # the numbers of both may be another's from here on
            os.close(self._socket)
            _bounded._end(self.pid, self._key)


def _pair() -> t.Tuple[int, int]:
    """Two ends beside the standard files, even where the caller was started with some of those closed."""
    ends = []
    for end in socket.socketpair():
        with end:
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
    return ends[0], ends[1]
