# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run something that may hang in a forked child, and look now and then whether it has answered."""

from __future__ import annotations

import contextlib
import json
import os
import time
import typing as t

from . import _bounded

__all__ = ("Background",)


class Background:
    """Like :func:`_bounded.run`, for callers that have something else to do meanwhile."""

    def __init__(
        self, function: t.Callable[[_bounded.Report], t.Any], limit: float, key: t.Optional[str] = None
    ) -> None:
        self.cpu = 0.0  # seconds that the child used, once it has ended
        self._limit, self._key = limit, key
        self._records: t.List[t.Dict[str, t.Any]] = []
        self._pending = b""
        self._finished = self._gone = False
        self._outcome: t.Optional[_bounded.Outcome] = None
        stuck = None if key is None else _bounded.stuck_child(key)
        if stuck is not None:
            self._outcome = _bounded.Outcome("stuck", error="process %d has not come back from an earlier call" % stuck)
            return
        self._end = time.monotonic() + limit
        self._reader, writer = _bounded._pipe()
        caller = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _bounded._child(function, self._reader, writer, caller)
        os.close(writer)
        os.set_blocking(self._reader, False)

    def poll(self) -> t.Optional[_bounded.Outcome]:
        """What came of it; None while it runs. Takes no longer than it takes to kill a child whose time is over."""
        if self._outcome is None:
            self._read()
            if self._finished:
                self._reap()
            if self._gone or time.monotonic() >= self._end:
                self._settle()
        return self._outcome

    def close(self) -> None:
        """Give up on it."""
        if self._outcome is None:
            self._settle()

    def _read(self) -> None:
        while not self._finished:
            try:
                chunk = os.read(self._reader, 65536)
            except BlockingIOError:
                return
            self._finished = not chunk
            *whole, self._pending = (self._pending + chunk).split(b"\n")
            self._records += [json.loads(line) for line in whole]

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            pid, _status, used = os.wait4(self._pid, os.WNOHANG)
            if not pid:
                return
            self.cpu = used.ru_utime + used.ru_stime
        self._gone = True

    def _settle(self) -> None:
        gone = self._gone or _bounded._end(self._pid, self._key)
        os.close(self._reader)
        self._outcome = _bounded._settle(self._records, self._finished, gone, self._limit, self._pid)
