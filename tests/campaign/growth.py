# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Makes real processes of a description, and lets each of them write itself into the build log.

A description is a list of nodes, creators before those they create. The keys of a node, all optional but ``id``:

``id``        its place in the build log, from 1 on
``by``        the node that creates it; without one whoever grows the forest
``name``      its name, as Latin-1 text for any byte; ``title`` its command line
``session``, ``group`` (it leads its own), ``join`` (the node whose process group it enters), ``reaper`` (subreaper)
``uid``, ``mark`` (gid), ``has_mark`` (systemd gave it), ``unmark`` (drops all groups)
``mounts``    is in a mount namespace of its own, ``private`` in one of its unit's, ``enter`` in that of another node
``top``       who starts it, if that is systemd; ``place`` the unit that it is in, ``moved`` the scope that it goes to
``nested``    moves itself into a control group below its own
``leave``     ends once its children are created; ``zombie`` the same, and its creator does not collect it
``exec``      becomes another program: ``sleep``, ``scope`` (sleep in a scope of its own), ``setpriv``, ``runuser``
``ignores``   the signals that ask it to end; ``blocks`` every signal, so that the kernel notes them as pending
``on_term``   creates the nodes with ``born`` when it is asked to end; with ``stays`` it lives on then
``slow``      ends that many seconds after it was asked; ``stopped`` stops itself; ``threads`` its main thread ends
``late``      is created during the stop, with the number of that node

It needs nothing but Python, so that lab hosts can run it as the command of a unit: ``growth.py FOLDER [ID]`` grows what
FOLDER/forest.json holds, from that node on, in this very process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
CLONE_NEWNS = 0x00020000
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
EVERY = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
RECORD = struct.Struct("<iiq")  # pid, stage, start
PLACED, READY = 1, 2
SLOTS = 256
PATIENCE = 20.0


def start_ticks(pid: object = "self") -> int:
    with open("/proc/%s/stat" % pid, "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[19])


class Log:
    """The build log: one record a node, in memory that all of them share."""

    def __init__(self, path: str = "") -> None:
        size = SLOTS * RECORD.size
        if not path:
            self._memory = mmap.mmap(-1, size)
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
            os.chmod(path, 0o666)
        self._memory = mmap.mmap(fd, size)
        os.close(fd)

    def forget(self, node: int) -> None:
        RECORD.pack_into(self._memory, node * RECORD.size, 0, 0, 0)

    def write(self, node: int, stage: int) -> None:
        start = self.start(node) or start_ticks()
        RECORD.pack_into(self._memory, node * RECORD.size, os.getpid(), stage, start)

    def note(self, number: int) -> None:
        """That this process, which is none of the nodes, got a signal."""
        RECORD.pack_into(self._memory, 0, os.getpid(), number, 0)

    def pid(self, node: int) -> int:
        return int(RECORD.unpack_from(self._memory, node * RECORD.size)[0])

    def stage(self, node: int) -> int:
        return int(RECORD.unpack_from(self._memory, node * RECORD.size)[1])

    def start(self, node: int) -> int:
        return int(RECORD.unpack_from(self._memory, node * RECORD.size)[2])

    def wait(self, node: int, stage: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.stage(node) < stage:
            if time.monotonic() > end:
                raise RuntimeError("node %d was never ready" % node)
            time.sleep(0.001)


class Growth:
    """One forest, seen from whichever process of it runs this."""

    def __init__(self, nodes: list, log: Log, folder: str) -> None:
        self.log = log
        self.folder = folder
        self._children: dict = {}
        for node in nodes:
            self._children.setdefault((node.get("by"), bool(node.get("born"))), []).append(node)

    def tops(self) -> list:
        return self._children.get((None, False), [])

    def plant(self, node: dict) -> None:
        child = os.fork()
        if child == 0:
            self.become(node)
        if node.get("zombie"):
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        elif node.get("leave"):
            os.waitpid(child, 0)

    def become(self, node: dict) -> None:
        """Live as this node, and never return."""
        try:
            self._live(node)
        except BaseException as error:
            self._fail(node, error)
        finally:
            os._exit(1)

    def _fail(self, node: dict, error: BaseException) -> None:
        fd = os.open(os.path.join(self.folder, "error.%d" % node["id"]), os.O_WRONLY | os.O_CREAT, 0o666)
        os.write(fd, ascii(error).encode())
        os.close(fd)

    def _live(self, node: dict) -> None:
        for number in EVERY:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._place(node)
        self.log.write(node["id"], PLACED)
        for child in self._children.get((node["id"], False), ()):
            self.plant(child)
        if node.get("leave") or node.get("zombie"):
            self.log.write(node["id"], READY)
            os._exit(0)
        self._listen(node)
        if "exec" in node:
            self._replace(node)
        if node.get("threads"):
            threading.Thread(target=lambda: (self.log.write(node["id"], READY), time.sleep(3600))).start()
            LIBC.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread alone
        self.log.write(node["id"], READY)
        if node.get("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        while "on_term" in node or "slow" in node:
            signal.sigwait(ASKING)
            for child in self._children.get((node["id"], True), ()):
                self.plant(child)
            time.sleep(node.get("slow", 0))
            if not node.get("stays"):
                os._exit(0)
        while True:
            signal.pause()

    def _place(self, node: dict) -> None:
        if node.get("session"):
            os.setsid()
        elif node.get("group"):
            os.setpgid(0, 0)
        if "join" in node:
            self.log.wait(node["join"], PLACED)
            os.setpgid(0, self.log.pid(node["join"]))
        if node.get("reaper"):
            _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if node.get("nested"):
            _nest()
        if node.get("mounts"):
            _call("unshare", CLONE_NEWNS)
        if "enter" in node:
            self.log.wait(node["enter"], PLACED)
            fd = os.open("/proc/%d/ns/mnt" % self.log.pid(node["enter"]), os.O_RDONLY)
            _call("setns", fd, CLONE_NEWNS)
            os.close(fd)
            os.chdir(self.folder)
        if "mark" in node or node.get("unmark"):
            os.setgroups([node["mark"]] if "mark" in node else [])
        if node.get("uid"):
            os.setresuid(node["uid"], node["uid"], node["uid"])
        if "title" in node:
            _title(node["title"].encode("latin-1"))
        if "name" in node:
            LIBC.prctl(PR_SET_NAME, ctypes.c_char_p(node["name"].encode("latin-1")), 0, 0, 0)

    def _listen(self, node: dict) -> None:
        if node.get("ignores"):
            for number in ASKING:
                signal.signal(number, signal.SIG_IGN)
        if node.get("blocks"):
            signal.pthread_sigmask(signal.SIG_BLOCK, EVERY)
        elif "on_term" in node or "slow" in node:
            signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)

    def _replace(self, node: dict) -> None:
        """Other programs in the same process: signals that are ignored or blocked stay so."""
        sleep = ["sleep", "100000"]
        programs = {
            "sleep": [node.get("title", "sleep"), "100000"],
            "scope": ["systemd-run", "--quiet", "--scope", "--collect", "--unit=" + node.get("scope", "")] + sleep,
            "setpriv": ["setpriv", "--reuid=%d" % node.get("to", 1), "--clear-groups"] + sleep,
            "runuser": ["runuser", "-u", "daemon", "--"] + sleep,
        }
        argv = programs[node["exec"]]
        self.log.write(node["id"], READY)
        os.execvp("sleep" if node["exec"] == "sleep" else argv[0], argv)


def _call(name: str, *arguments: int) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def _nest() -> None:
    """Into a group below the own one, in the hierarchy that systemd tracks units in."""
    with open("/proc/self/cgroup", encoding="ascii") as stream:
        rows = [line.rstrip("\n").split(":", 2) for line in stream]
    paths = {names: path for _number, names, path in rows}
    unified = paths.get("", "/")
    folder = "/sys/fs/cgroup/systemd" + paths["name=systemd"] if unified == "/" else "/sys/fs/cgroup" + unified
    folder += "/inner.%d" % os.getpid()
    os.mkdir(folder)
    with open(folder + "/cgroup.procs", "w", encoding="ascii") as stream:
        stream.write(str(os.getpid()))


def _title(text: bytes) -> None:
    """Overwrite the command line, as setproctitle does."""
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def settle() -> None:
    """What every process of a forest inherits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def main() -> None:
    folder = sys.argv[1]
    with open(os.path.join(folder, "forest.json"), encoding="ascii") as stream:
        nodes = json.load(stream)
    growth = Growth(nodes, Log(os.path.join(folder, "log")), folder)
    top = next(node for node in nodes if node["id"] == int(sys.argv[2]))
    os.chdir(folder)
    settle()
    if "--detach" in sys.argv:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()
    growth.become(top)


if __name__ == "__main__":
    main()
