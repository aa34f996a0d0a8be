# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who holds a GPU as the kernel's tables tell it, independent of the vendor's driver library: open or mapped nodes.

No node is opened, so a sick device cannot block this. Two other things can: an open file of a network that is down,
when it is stated; and the mappings of a process that is stuck in a driver, since reading them takes its memory lock.
So all of it runs in a bounded child that marks where it is. What it hangs on counts as not seen, and a further child
goes on behind it. All file tables come before all mappings, so that a lock which is held costs no open node.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
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
KINDS = ("fd", "maps")

KEY = "nodes"
LIMIT = 10.0  # seconds for one look at all processes
SLICE = 1.0  # seconds for one child; what it hangs on for half of them is left out
TELL = 0.1  # seconds between the reports of a child: what it has told need not be read again
BATCH = 512  # tables in one report

Work = t.Tuple[str, int]  # one of KINDS, pid


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
    """Where a child is, and since when: in memory that it shares with its parent, for it may never answer."""

    FORM = struct.Struct("qd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.FORM.size)

    def set(self, place: int, now: float) -> None:
        self.FORM.pack_into(self._memory, 0, place, now)

    def get(self) -> t.Tuple[int, float]:
        place, since = self.FORM.unpack_from(self._memory, 0)
        return place, since


class _Scan:
    """One look at all processes: what is still to be read, and what was found."""

    def __init__(self, names: Names, proc: str, pids: t.Sequence[int]) -> None:
        self.names, self.proc = names, proc
        every = [(kind, pid) for kind in KINDS for pid in pids]
        self.hung = _stuck_on().intersection(every)
        self.todo = [work for work in every if work not in self.hung]
        self.mark = _Mark()
        self.holders: t.Dict[str, t.Set[int]] = {}
        self.files: t.List[t.Tuple[int, int, str]] = []
        self.hidden = {pid for _kind, pid in self.hung}

    def step(self, limit: float, patience: float) -> str:
        """Let one child read what it can; say why nobody can go on, if so."""
        self.mark.set(-1, time.monotonic())
        outcome = _bounded.run(self._read, limit)
        place, since = self.mark.get()
        done = 0
        for part in outcome.partial:
            done = part["done"]
            self.hidden.update(part["hidden"])
            self.files.extend((pid, number, name) for pid, number, name in part["files"])
            for pid, name in part["holders"]:
                self.holders.setdefault(name, set()).add(pid)
        subject = KEY
        if not outcome.ok and place >= done and time.monotonic() - since >= patience:
            work = self.todo.pop(place)
            self.hung.add(work)
            self.hidden.add(work[1])
            subject = _key(work)
        if outcome.left_behind:
            _bounded.remember(subject, outcome.pid)
        del self.todo[:done]
        return outcome.error if outcome.status == "error" else ""

    def _read(self, report: _bounded.Report) -> None:
        """Runs in the child."""
        told, done = time.monotonic(), 0
        holders: t.List[t.Tuple[int, str]] = []
        files: t.List[t.Tuple[int, int, str]] = []
        hidden: t.List[int] = []
        for place, (kind, pid) in enumerate(self.todo):
            now = time.monotonic()
            if place - done >= BATCH or now - told >= TELL or kind != self.todo[done][0]:
                told, done = now, place
                report({"done": done, "holders": holders, "files": files, "hidden": hidden})
                holders, files, hidden = [], [], []
            self.mark.set(place, now)
            process = "%s/%d" % (self.proc, pid)
            found: t.List[t.Tuple[int, str]] = []
            try:
                if kind == "fd":
                    open_nodes(process, self.names, found)
                else:
                    holders.extend((pid, name) for name in mapped_nodes(process, self.names))
            except PermissionError:
                if not is_gone(process):
                    hidden.append(pid)
            for number, name in found:
                holders.append((pid, name))
                if DRM.match(name):
                    files.append((pid, number, name))
        report({"done": len(self.todo), "holders": holders, "files": files, "hidden": hidden})


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
    try:
        pids = sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit())
    except OSError as error:
        return NodeFacts(error="%s cannot be listed: %s" % (proc, error.strerror))
    look = _Scan(Names(folder, proc), proc, pids)
    allowed = min(SLICE, limit / 3)
    why = ""
    while look.todo and not why:
        why = look.step(min(allowed, deadline.remaining), allowed / 2)
        if look.todo and deadline.expired:
            why = why or "no answer within %g s" % limit
    look.hidden.update(pid for _kind, pid in look.todo)
    return NodeFacts(
        holders={name: sorted(look.holders[name]) for name in sorted(look.holders)},
        files=sorted(look.files),
        hidden=len(look.hidden) + (1 if 1 not in pids or _hides(proc) else 0),
        hung=sorted({pid for _kind, pid in look.hung}),
        error=_unreadable(why) if why else "",
    )


def _unreadable(why: str) -> str:
    return "the open files of all processes cannot be read: %s" % why


def _key(work: Work) -> str:
    return "%s-%s-%d" % ((KEY, *work))


def _stuck_on() -> t.Set[Work]:
    """What children of earlier looks still hang on."""
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
