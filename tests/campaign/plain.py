# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Process 1 of a process id namespace in which one forest after the other is grown and stopped.

``plain.py FOLDER [MUTANT]``: FOLDER holds the library as the package ``gpuops``. Seeds come by standard input, one a
line; a line of JSON goes out for each. Process 1 collects orphans, the *ground* grows the forests, and the *runner*
calls the library: it is no ancestor of a forest, since whoever stops others spares his own children.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import typing as t

from growth import EVERY, READY, Growth, Log, settle

READY_SECONDS = 20.0
BYSTANDERS = 250  # slots at the end of the log


def bystanders() -> t.List[t.Dict[str, t.Any]]:
    """Who lives through all of it: a session with a child, an orphan of a session, one of another user."""
    first = BYSTANDERS
    return [
        {"id": first, "session": True, "blocks": True},
        {"id": first + 1, "by": first, "blocks": True},
        {"id": first + 2, "session": True, "leave": True},
        {"id": first + 3, "by": first + 2, "blocks": True},
        {"id": first + 4, "uid": 1, "blocks": True},
    ]


def main() -> int:
    log = Log()
    ours, theirs = socket.socketpair()
    for number in EVERY - {signal.SIGCHLD}:
        signal.signal(number, lambda number, _frame: log.note(number))
    gc.disable()
    ground = os.fork()
    if ground == 0:
        ours.close()
        os.setsid()
        settle()
        _ground(theirs, log)  # never returns
    theirs.close()
    runner = os.fork()
    if runner == 0:
        for number in EVERY:
            signal.signal(number, signal.SIG_DFL)
        code = 1
        try:
            gc.enable()
            _run(ours, log, ground)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    while True:
        pid, status = os.wait()
        if pid in (runner, ground):
            return 0 if status == 0 else 1


# The ground


def _ground(peer: socket.socket, log: Log) -> t.NoReturn:
    try:
        stream = peer.makefile("rw")
        for line in stream:
            order = json.loads(line)
            stream.write(json.dumps(_obey(order, log)) + "\n")
            stream.flush()
    finally:
        os._exit(1)


def _obey(order: t.Dict[str, t.Any], log: Log) -> t.Any:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if order["do"] == "collect":
        return True
    growth = Growth(order["nodes"], log, order["folder"])
    if order["do"] == "heir":
        return _heir(order["pid"], growth, order["node"])
    for node in growth.tops():
        if not node.get("late"):
            growth.plant(node)
    wanted = {node["id"] for node in order["nodes"] if not node.get("born") and not node.get("late")}
    end = time.monotonic() + READY_SECONDS
    while wanted:
        wanted = {number for number in wanted if log.stage(number) < READY}
        if time.monotonic() > end or _errors(order["folder"]):
            return "not ready: %s %s" % (sorted(wanted), _errors(order["folder"]))
        time.sleep(0.001)
    return ""


def _errors(folder: str) -> t.List[str]:
    found = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("error."):
            with open(os.path.join(folder, name), encoding="ascii") as stream:
                found.append("%s: %s" % (name, stream.read()))
    return found


def _heir(pid: int, growth: Growth, node: t.Dict[str, t.Any]) -> bool:
    """The number of somebody who is gone for somebody else, where the kernel gives it."""
    for _attempt in range(5):
        with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as stream:
            stream.write(str(pid - 1))
        child = os.fork()
        if child == 0:
            if os.getpid() != pid:
                os._exit(77)
            growth.become(node)
        if child != pid:
            os.waitpid(child, 0)
            continue
        if node.get("leave"):
            os.waitpid(child, 0)
        return True
    return False


# The runner


def _run(peer: socket.socket, log: Log, ground: int) -> None:
    sys.path.insert(0, sys.argv[1])
    import stops
    from mutants import apply

    if len(sys.argv) > 2:
        apply(sys.argv[2])
    stream = peer.makefile("rw")

    def ask(do: str, **order: t.Any) -> t.Any:
        stream.write(json.dumps(dict(order, do=do)) + "\n")
        stream.flush()
        return json.loads(stream.readline())

    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.chmod(folder, 0o777)
        field = stops.Field(folder, log, ground, ask, bystanders())
        for line in sys.stdin:
            print(json.dumps(field.one(int(line))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
