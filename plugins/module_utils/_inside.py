# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What one process tells of itself and may hold back for ever: its command line, and where in the kernel it is."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Callable, Iterable

from . import _bounded
from ._processes import CHUNK, ProcessRef, escape, parse_stat, read_at, threads

__all__ = ["command_lines", "kernel_stacks", "waiting_in"]

STACK_READING = 1.0  # seconds that kernel stacks may take in all


def waiting_in(ref: ProcessRef) -> str:
    """Where in the kernel the process sleeps, empty when it does not or nobody may know."""
    try:
        with open("/proc/%d/wchan" % ref.pid, "rb") as stream:
            text = escape(stream.read(128)).strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def kernel_stacks(refs: Iterable[ProcessRef]) -> dict[ProcessRef, list[str]]:
    """Where in the kernel processes are, innermost first; nothing of those that do not tell, or not in time.

    Reading one takes a lock of the process, which it may hold for ever while it is stuck.
    """
    wanted = list(refs)

    def read(report: Callable[[dict[str, object]], None]) -> None:
        for ref in wanted:
            with contextlib.suppress(OSError):
                text = escape(read_at("/proc/%d/stack" % ref.pid)[:CHUNK].replace(b"\n", b"\t"))
                report({"pid": ref.pid, "lines": [line for line in text.split("\\t") if line]})

    if not wanted:
        return {}
    told = {row["pid"]: row["lines"] for row in _bounded.run(read, STACK_READING).partial}
    return {ref: told[ref.pid] for ref in wanted if told.get(ref.pid)}


def _command_line(ref: ProcessRef) -> str:
    directory = os.open("/proc/%d" % ref.pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if parse_stat(read_at("stat", directory)).start != ref.start:
            return ""
        raw = read_at("cmdline", directory)
        for thread in [] if raw else threads(ref.pid):
            with contextlib.suppress(OSError):  # a main thread that has ended has none any more, the others still have
                raw = raw or read_at("task/%s/cmdline" % thread, directory)
        return " ".join(escape(part) for part in raw.rstrip(b"\0").split(b"\0"))
    finally:
        os.close(directory)


def command_lines(refs: Iterable[ProcessRef], timeout: float = 2.0) -> dict[ProcessRef, str]:
    """Command lines by process; one that cannot be read in time is missing.

    Reading one takes the process's memory lock, which a process stuck in the driver may hold for ever.
    """
    waiting, found = list(refs), {}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        batch = list(waiting)

        def read(report: Callable[[dict[str, object]], None], batch: list[ProcessRef] = batch) -> None:
            for ref in batch:
                try:
                    line = _command_line(ref)
                except (OSError, ValueError, IndexError):
                    line = ""
                report({"pid": ref.pid, "line": line})

        outcome = _bounded.run(read, max(0.1, min(1.0, end - time.monotonic())))
        read_here = {row["pid"]: row["line"] for row in outcome.partial}
        found.update({ref: read_here[ref.pid] for ref in batch if ref.pid in read_here})
        if outcome.status == "ok":
            break
        # The first one without an answer is the one that hangs: go on without it.
        waiting = [ref for ref in batch if ref.pid not in read_here][1:]
    return found
