# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who holds a GPU as the kernel's tables tell it, independent of the vendor's driver library: open or mapped nodes.

No node is opened, so a sick device cannot block this. Two other things can: an open file of a network that is down,
when it is stated; and the mappings of a process that is stuck in a driver, since reading them takes its memory lock.
So all of it runs in bounded children, one for the file tables and one for the mappings, and each marks where it is.
What one hangs on counts as not seen, and the next goes on behind it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import struct
import time
import typing as t
from dataclasses import dataclass, field

from . import _bounded
from ._deadline import Deadline
from ._gpu_tables import Names, canonical, is_gone, mapped_nodes, open_nodes

__all__ = ["AMD", "DRM", "LIMIT", "NVIDIA", "NodeFacts", "any_node", "scan"]

NVIDIA = re.compile(r"nvidia[0-9]+\Z")
AMD = re.compile(r"kfd\Z")
DRM = re.compile(r"(?:renderD|card)[0-9]+\Z")
FOLDERS = ("", "dri/", "nvidia-caps/")  # where nodes lie in /dev
KINDS = ("fd", "maps")  # what is read of each process

KEY = "nodes"
LIMIT = 10.0  # seconds for one look at all processes
SLICE = 1.0  # seconds for a pair of children; what one hangs on for half of them is left out
END_WAIT = 0.5  # seconds for the end of a child that was killed
TELL = 0.1  # seconds between the reports of a child: what it has told need not be read again
BATCH = 512  # tables in one report
ROUNDS = 20  # listings of the processes until there is nobody new


@dataclass
class NodeFacts:
    """What the tables showed, with the nodes under their usual names wherever they lie: nvidia0, kfd, renderD128.

    ``hidden`` counts the processes of which something could not be seen, and those that are hidden altogether as one.
    """

    holders: t.Dict[str, t.List[int]] = field(default_factory=dict)  # name of the node -> pids, ascending
    files: t.List[t.Tuple[int, int, str]] = field(default_factory=list)  # (pid, fd, name) of open DRM nodes
    hidden: int = 0
    hung: t.List[int] = field(default_factory=list)  # those of the hidden ones whose tables gave no answer
    error: str = ""


class _Mark:
    """Where a child is, since when, and its pid: in memory that it shares with its parent, for it may never answer."""

    FORM = struct.Struct("qdq")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.FORM.size)

    def set(self, place: int, now: float, pid: int) -> None:
        self.FORM.pack_into(self._memory, 0, place, now, pid)

    def get(self) -> t.Tuple[int, float, int]:
        place, since, pid = self.FORM.unpack_from(self._memory, 0)
        return place, since, pid


class _Scan:
    """One look at all processes: what is still to be read, and what was found."""

    def __init__(self, names: Names, proc: str) -> None:
        self.names, self.proc = names, proc
        self.stuck_on = _stuck_on()
        self.hung: t.Set[t.Tuple[str, int]] = set()
        self.todo: t.Dict[str, t.List[int]] = {kind: [] for kind in KINDS}
        self.marks = {kind: _Mark() for kind in KINDS}
        self.holders: t.Dict[str, t.Set[int]] = {}
        self.files: t.List[t.Tuple[int, int, str]] = []
        self.hidden: t.Set[int] = set()
        self.ours: t.Set[int] = set()  # children that could not be ended: they are in a later list

    def add(self, pids: t.Sequence[int]) -> None:
        """Take on further processes."""
        for kind in KINDS:
            hung = {(kind, pid) for pid in pids} & self.stuck_on
            self.hung |= hung
            self.hidden.update(pid for _kind, pid in hung)
            self.todo[kind] += [pid for pid in pids if (kind, pid) not in hung]

    def finish(self, deadline: Deadline) -> str:
        """Read all that is still to be read; say why that cannot be done, if so."""
        allowed, why = min(SLICE, deadline.seconds / 3), ""
        while self.left and not why:
            why = self.step(min(allowed, deadline.remaining), allowed / 2)
            if self.left and deadline.expired:
                why = why or "no answer within %.3g s" % deadline.seconds
        return why

    @property
    def left(self) -> t.Set[int]:
        """The processes of which something is still to be read."""
        return set().union(*self.todo.values())

    def step(self, limit: float, patience: float) -> str:
        """Let a pair of children read what they can; say why nobody can go on, if so."""
        for mark in self.marks.values():
            mark.set(-1, time.monotonic(), 0)
        outcome = _bounded.run(self._read, limit)
        if outcome.left_behind:
            self.ours.add(outcome.pid)
        now, done = time.monotonic(), dict.fromkeys(KINDS, 0)
        for part in outcome.partial:
            done[part["kind"]] = part["done"]
            self.hidden.update(part["hidden"])
            self.files.extend((pid, number, name) for pid, number, name in part["files"])
            for pid, name in part["holders"]:
                self.holders.setdefault(name, set()).add(pid)
        for kind in KINDS:
            place, since, child = self.marks[kind].get()
            if not outcome.ok and place >= done[kind] and now - since >= patience:
                self._leave_out(kind, self.todo[kind].pop(place), child)
            del self.todo[kind][: done[kind]]
        if outcome.ok and outcome.left_behind:
            _bounded.remember(KEY, outcome.pid)
        return outcome.error if outcome.status == "error" else ""

    def _leave_out(self, kind: str, pid: int, child: int) -> None:
        self.hung.add((kind, pid))
        self.hidden.add(pid)
        end = time.monotonic() + END_WAIT
        while not is_gone("/proc/%d" % child):
            if time.monotonic() >= end:
                _bounded.remember(_key(kind, pid), child)
                self.ours.add(child)
                break
            time.sleep(0.005)

    def _read(self, report: _bounded.Report) -> None:
        """Runs in the child. One of its own, in the same process group, reads the mappings and tells it."""
        first, second = KINDS
        if not (self.todo[first] and self.todo[second]):
            self._look(first if self.todo[first] else second, report)
            return
        reader, writer = os.pipe()
        helper = os.fork()
        if helper == 0:
            _child(lambda tell: self._look(second, tell), writer)
        os.close(writer)
        self._look(first, report)
        with open(reader, "rb") as lines:
            for line in lines:
                part = json.loads(line)
                if "error" in part:
                    raise RuntimeError(part["error"])
                report(part)
        os.waitpid(helper, 0)  # so that what it cost counts as ours

    def _look(self, kind: str, report: _bounded.Report) -> None:
        told, done = time.monotonic(), 0
        todo, mark, own = self.todo[kind], self.marks[kind], os.getpid()
        holders: t.List[t.Tuple[int, str]] = []
        files: t.List[t.Tuple[int, int, str]] = []
        hidden: t.List[int] = []
        for place, pid in enumerate(todo):
            now = time.monotonic()
            if place - done >= BATCH or now - told >= TELL:
                told, done = now, place
                report({"kind": kind, "done": done, "holders": holders, "files": files, "hidden": hidden})
                holders, files, hidden = [], [], []
            mark.set(place, now, own)
            process = "%s/%d" % (self.proc, pid)
            found: t.List[t.Tuple[int, str]] = []
            try:
                if kind == "fd":
                    open_nodes(process, self.names, found)
                else:
                    holders.extend((pid, name) for name in mapped_nodes(process, self.names))
            except OSError:
                if not is_gone(process):
                    hidden.append(pid)
            for number, name in found:
                holders.append((pid, name))
                if DRM.match(name):
                    files.append((pid, number, name))
        # What the second child has told may yet wait in its pipe when the first one hangs.
        mark.set(-1, time.monotonic(), own)
        report({"kind": kind, "done": len(todo), "holders": holders, "files": files, "hidden": hidden})


def _child(look: t.Callable[[_bounded.Report], None], writer: int) -> None:
    """What the second child does; its parent hears of what goes wrong."""

    def tell(part: t.Dict[str, t.Any]) -> None:
        data = json.dumps(part).encode() + b"\n"
        while data:
            data = data[os.write(writer, data) :]

    try:
        try:
            look(tell)
        except Exception as error:
            tell({"error": "%s: %s" % (type(error).__name__, error)})
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # nothing of its copy of the parent is to run any more


def any_node(names: t.Pattern[str], folder: str = "/dev") -> bool:
    """Whether the folder has a node with such a name at all."""
    prefix = folder.rstrip("/") + "/"
    for part in FOLDERS:
        with contextlib.suppress(OSError):
            if any(names.match(canonical(part + entry) or "") for entry in os.listdir(prefix + part)):
                return True
    return False


def scan(folder: str = "/dev", proc: str = "/proc", limit: float = LIMIT) -> NodeFacts:
    """Every process that has a node of a GPU open or mapped; ``folder`` is where nodes are known by their names."""
    deadline = Deadline(limit)
    stuck = _bounded.stuck_child(KEY)
    if stuck is not None:
        return NodeFacts(error=_unreadable("process %d has not come back from an earlier call" % stuck))
    look, why = _Scan(Names(folder, proc), proc), ""
    pids: t.Set[int] = set()
    try:
        # Who was born meanwhile may have what another has left to it: until nobody new is there, it is not complete.
        for _round in range(ROUNDS):
            born = {int(entry) for entry in os.listdir(proc) if entry.isdigit()} - pids - look.ours
            if why or not born:
                break
            pids |= born
            look.add(sorted(born))
            why = look.finish(deadline)
        else:
            why = "processes come and go faster than they can be read"
    except OSError as error:
        return NodeFacts(error="%s cannot be listed: %s" % (proc, error.strerror))
    look.hidden.update(look.left)
    return NodeFacts(
        holders={name: sorted(look.holders[name]) for name in sorted(look.holders)},
        files=sorted(look.files),
        hidden=len(look.hidden) + (1 if 1 not in pids or _hides(proc) else 0),
        hung=sorted({pid for _kind, pid in look.hung}),
        error=_unreadable(why) if why else "",
    )


def _unreadable(why: str) -> str:
    return "the open files of all processes cannot be read: %s" % why


def _key(kind: str, pid: int) -> str:
    return "%s-%s-%d" % (KEY, kind, pid)


def _stuck_on() -> t.Set[t.Tuple[str, int]]:
    """What children of earlier looks still hang on: one of KINDS, and the process."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(_bounded.STUCK_FOLDER):
            match = re.match(r"%s-(fd|maps)-([0-9]+)\.json\Z" % KEY, entry)
            if match and _bounded.stuck_child(entry[: -len(".json")]) is not None:
                found.add((match.group(1), int(match.group(2))))
    return found


def _hides(proc: str) -> bool:
    """Whether this process table is mounted so that an ordinary user does not see the processes of others."""
    if os.geteuid() == 0:
        return False
    try:
        with open(proc + "/self/mountinfo", encoding="utf-8", errors="replace") as handle:
            mounts = [line.split() for line in handle]
    except OSError:
        return True
    for words in mounts:
        options = words[-1].split(",") if len(words) > 4 and words[4] == proc else []
        if any(word.startswith("hidepid=") and word not in ("hidepid=0", "hidepid=off") for word in options):
            return True
    return False
