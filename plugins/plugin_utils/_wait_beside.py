# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Reading where a slice of a wait stands, beside the slice.

Ansible hands out what a module printed when the module has ended. So a second command runs beside it, over the
connection that is there already: a shell on the host that prints the line of the slice whenever it is another one.
Nothing depends on it. Whatever goes wrong with it, the line comes at the end of the slice.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import shlex
import signal
import subprocess
import threading
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _wait_line

__all__ = ("Beside", "Words", "command")

SHELL = "/bin/sh"
# In single quotes none of it means anything to any login shell. Each round prints a line, be it an empty one: that ends
# the shell when nobody reads any more. It ends when its file is gone, and in any case after a while.
SCRIPT = (
    "a={root}/{name}; b={user}/{name}; o=; i=0; while [ $i -lt {rounds} ]; do i=$((i+1)); l=; f=$b; "
    "if [ -r $a ]; then f=$a; fi; "
    'if [ -r $f ] && read -r l <$f; then if [ "$l" = "$o" ]; then l=; else o=$l; fi; '
    'elif [ -n "$o" ]; then exit 0; fi; '
    'printf "%s\\n" "$l" || exit 0; if [ -n "$o" ]; then sleep {pause}; else sleep {sooner}; fi; done 2>/dev/null'
)
ROUNDS, PAUSE, SOONER = 150, 2, 1  # seconds, the second as long as the file is not there
# The command uses a connection that is there, and never makes one: no password is asked, no host is dialled.
# What is said first counts.
RIDE = ("ProxyCommand=false", "ControlMaster=no", "BatchMode=yes", "ClearAllForwardings=yes", "ForwardX11=no")
FIRST = 1.0  # seconds for the module to take its place on the connection: it may be that there is none for two
FASTEST, SLOWEST = 2.0, 60.0  # seconds between two tries
SILENCE = 30.0  # seconds after which a command that prints nothing is given up
JOIN = 5.0

Live = t.Dict[str, t.Any]
Words = t.List[t.Union[str, bytes]]


def command(connection: t.Any, name: str) -> t.Optional[Words]:
    """What prints the line of that name on the host, or None where that takes more than the connection at hand."""
    user = _wait_line.FOLDER_OF_USER.replace("%d", "$(id -u)")
    script = SCRIPT.format(root=_wait_line.FOLDER, user=user, name=name, rounds=ROUNDS, pause=PAUSE, sooner=SOONER)
    if connection.transport == "local":
        return [SHELL, "-c", script]
    if connection.transport != "ssh":
        return None
    # A second object, so that nothing of the first one is touched. It has no password: none can be asked for.
    twin = copy.copy(connection)
    twin._play_context = copy.copy(connection._play_context)
    twin._play_context.password = None
    twin._options = dict(connection._options, password=None, private_key=None, pkcs11_provider=None)
    host = twin.get_option("host") or twin.host
    built = twin._build_command(twin.get_option("ssh_executable"), "ssh", host, SHELL + " -c " + shlex.quote(script))
    if not any(b"ControlPath" in word for word in built):
        return None
    first = [word for option in RIDE for word in (b"-o", option.encode())]
    return [built[0], *first, *_without_jump(built[1:])]


def _without_jump(words: t.Sequence[bytes]) -> t.List[bytes]:
    """The same without ``-J HOST``, which would be refused beside another way to connect."""
    found, skip = [], False
    for word in words:
        if not skip and word != b"-J":
            found.append(word)
        skip = word == b"-J"
    return found


class Beside:
    """A thread that reads as long as the body of the ``with`` lasts, and hands each line to ``show``."""

    def __init__(self, argv: t.Optional[Words], show: t.Callable[[Live], None], first: float = FIRST) -> None:
        self.heard = False
        self._argv, self._show, self._first = argv, show, first
        self._lock, self._over = threading.Lock(), False
        self._stop = -1
        self._thread: t.Optional[threading.Thread] = None

    def __enter__(self) -> Beside:
        if self._argv is not None:
            ends: t.Sequence[int] = ()
            try:
                ends = os.pipe()
                self._thread = threading.Thread(target=self._run, args=(ends[0],), daemon=True)
                self._thread.start()
                self._stop = ends[1]
            except (OSError, RuntimeError):  # no file or no thread is left
                self._thread = None
                for end in ends:
                    os.close(end)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread is None:
            return
        # Nothing is shown from here on, and nobody is in the middle of it.
        with self._lock:
            self._over = True
        os.close(self._stop)
        self._thread.join(JOIN)

    def _run(self, stop: int) -> None:
        pause, after = self._first, FASTEST
        try:
            while not _ready(pause, stop):
                with contextlib.suppress(OSError, ValueError):
                    self._read(stop)
                pause, after = after, min(2 * after, SLOWEST)
        finally:
            os.close(stop)

    def _read(self, stop: int) -> None:
        assert self._argv is not None
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            output, pending = process.stdout.fileno(), b""
            while len(pending) <= _wait_line.MOST:
                if _ready(SILENCE, stop, output) != [output]:
                    return
                chunk = os.read(output, 65536)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(JOIN)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            live = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(live, dict):
            return
        with self._lock:
            if not self._over:
                with contextlib.suppress(Exception):
                    self._show(live)
                    self.heard = True


def _ready(seconds: float, *files: int) -> t.List[int]:
    """Those of the files that can be read within so many seconds, the first ones first."""
    poller = select.poll()
    for number in files:
        poller.register(number, select.POLLIN)
    ready = [number for number, _event in poller.poll(seconds * 1000)]
    return [number for number in files if number in ready]
