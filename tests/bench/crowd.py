# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Processes that have nothing to do with a GPU: one parent starts them, and ends them by their numbers.

``crowd.py N`` says how many there are once all of them sleep. When its standard input ends, so do they; the kernel ends
them too when the parent is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import typing as t

PR_SET_PDEATHSIG = 1
SLEEP = ["sleep", "3600"]


def start(libc: ctypes.CDLL) -> int:
    """One process with seven open files of the usual kinds and the mappings of a small program."""
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        reader, writer = os.pipe()
        for number in (os.open("/etc/passwd", os.O_RDONLY), socket.socket().detach(), reader, writer):
            os.set_inheritable(number, True)
        os.execvp(SLEEP[0], SLEEP)
    finally:
        os._exit(70)


def asleep(pid: int) -> bool:
    with contextlib.suppress(OSError):
        with open("/proc/%d/cmdline" % pid, encoding="ascii") as handle:
            return handle.read().split("\0")[:-1] == SLEEP
    return False


def main(argv: t.Sequence[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    pids: t.List[int] = []
    try:
        for _ in range(int(argv[1])):
            pids.append(start(libc))
        while not all(asleep(pid) for pid in pids):
            pass
        print(len(pids), flush=True)
        sys.stdin.read()
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
