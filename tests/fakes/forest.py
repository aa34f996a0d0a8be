# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Grows a forest of real processes from a description, far away from whoever asked for it.

``forest.py FOLDER JSON``: JSON, or ``@`` and a file that holds it, is a list of trees.
The keys of a node, all optional but ``id``:

``id``        file FOLDER/ID tells pid and start time once the process is ready, FOLDER/ID.signals what it was sent
``name``      its name, as Latin-1 text for any byte
``title``     its command line, written over the arguments and the environment as setproctitle does: both are gone
``children``  more nodes
``session``, ``group``, ``double`` (double fork), ``daemon`` (own session, then double fork)
``deaf``      ignores TERM, INT, HUP and QUIT; ``all_deaf`` everything that can be ignored, and tells of it
``on_term``   a node that is born when TERM comes
``stopped``   stops itself; ``slow`` ends that many seconds after TERM; ``zombie`` ends at once and is never collected
``threads``   its main thread ends, another one lives on
``gpu``       what it tells the test driver library: device, memory, kind, node (a path), listed
``mark`` (gid), ``uid``, ``mounts`` (own mount namespace), ``leave`` (ends when its children are ready)

It needs nothing but Python, so that lab hosts can run it as the command of a unit; ``--stay`` then keeps the first tree
in the process that was started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NAME = 15
CLONE_NEWNS = 0x00020000
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _write(folder: str, name: str, text: str) -> None:
    temporary = os.path.join(folder, ".%s.%d" % (name, os.getpid()))
    # Plain bytes: another user may not be able to read this interpreter's codecs.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, text.encode())
    os.close(fd)
    os.rename(temporary, os.path.join(folder, name))


def _start_ticks() -> int:
    with open("/proc/self/stat", "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[19])


def _hear(folder: str, node: dict) -> None:
    """Log each signal, then do as the node would."""
    heard = os.open(os.path.join(folder, node["id"] + ".signals"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def handler(number: int, _frame: object) -> None:
        os.write(heard, b"%d\n" % number)
        if node.get("all_deaf") or number not in ASKING or node.get("deaf"):
            return
        if "on_term" in node:
            plant(folder, node["on_term"])
        time.sleep(node.get("slow", 0))
        os._exit(0)

    wanted = set(ASKING) | {signal.SIGCONT}
    if node.get("all_deaf"):
        wanted = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    for number in wanted:
        signal.signal(number, handler)


def _retitle(title: str) -> None:
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[48])  # arg_start, env_end
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, title.encode(), min(len(title.encode()), end - begin - 1))


def _ready(folder: str, node: dict) -> None:
    _write(folder, node["id"], "%d %d" % (os.getpid(), _start_ticks()))


def _live(folder: str, node: dict) -> None:
    if node.get("session"):
        os.setsid()
    if node.get("group"):
        os.setpgid(0, 0)
    if node.get("mounts") and LIBC.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if node.get("mark"):
        os.setgroups([node["mark"]])
    _hear(folder, node)
    if "gpu" in node:
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml"))
        import hold  # only some forests hold a device

        hold.hold(**node["gpu"])
    if node.get("uid"):
        os.setuid(node["uid"])
    if "name" in node:
        LIBC.prctl(PR_SET_NAME, ctypes.c_char_p(node["name"].encode("latin-1")), 0, 0, 0)
    if "title" in node:
        _retitle(node["title"])
    for child in node.get("children", ()):
        plant(folder, child)
    for child in node.get("children", ()):
        while not os.path.exists(os.path.join(folder, child["id"])):
            time.sleep(0.005)
    if node.get("threads"):
        threading.Thread(target=lambda: (_ready(folder, node), time.sleep(3600))).start()
        time.sleep(0.05)
        LIBC.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread alone
    _ready(folder, node)
    if node.get("zombie") or node.get("leave"):
        os._exit(0)
    if node.get("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(3600)


def plant(folder: str, node: dict) -> None:
    child = os.fork()
    if child != 0:
        if node.get("daemon") or node.get("double"):
            os.waitpid(child, 0)
        return
    try:
        if node.get("daemon"):
            os.setsid()
        if (node.get("daemon") or node.get("double")) and os.fork() != 0:
            os._exit(0)
        _live(folder, node)
    except BaseException as error:  # a node that fails must say so, and never run its parent's code
        _write(folder, node["id"] + ".error", ascii(error))
    finally:
        os._exit(1)


def main() -> None:
    stay = "--stay" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--stay"]
    folder, text = arguments
    if text.startswith("@"):
        with open(text[1:], encoding="ascii") as stream:
            text = stream.read()
    trees = json.loads(text)
    if stay:
        for tree in trees[1:]:
            plant(folder, tree)
        _live(folder, trees[0])
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # a pipe of the caller's would never end
        os.dup2(null, number)
    for tree in trees:
        plant(folder, dict(tree, double=True))


if __name__ == "__main__":
    main()
