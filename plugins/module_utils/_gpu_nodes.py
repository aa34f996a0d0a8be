# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Open device nodes: who holds a GPU as the kernel's file tables tell it, independent of the vendor's driver library.

Links are read, and what they lead to is stated. No node is opened, so a sick device cannot block this. A file of a
network that is down can: all of it runs in a bounded child.
"""

from __future__ import annotations

import os
import re
import stat
import typing as t
from dataclasses import dataclass, field

from . import _bounded

__all__ = ["NVIDIA", "Family", "NodeFacts", "any_node", "scan"]

DELETED = " (deleted)"
KEY = "nodes"
LIMIT = 10.0  # seconds for one look at all processes


@dataclass(frozen=True)
class Family:
    """How the nodes of one vendor's devices are recognised.

    By number first, whatever the path, because a container may rename its nodes and put them anywhere; else by name,
    because that also holds where the number differs.
    """

    name: t.Pattern[str]
    major: int
    last_minor: int  # minors above are nodes that name no device


NVIDIA = Family(re.compile(r"nvidia(\d+)\Z"), major=195, last_minor=247)


@dataclass
class NodeFacts:
    """What the file tables showed. ``hidden`` counts the processes whose tables could not be read.

    Processes that are hidden altogether count as one.
    """

    holders: t.Dict[int, t.List[int]] = field(default_factory=dict)  # minor -> pids
    hidden: int = 0
    error: str = ""


def scan(family: Family, folder: str = "/dev", proc: str = "/proc", limit: float = LIMIT) -> NodeFacts:
    """Every process that has a node of ``family`` open; ``folder`` is where nodes are known by their names."""
    facts = NodeFacts()

    def look(report: _bounded.Report) -> t.Dict[str, t.Any]:
        return _scan(report, family, folder, proc)

    outcome = _bounded.run(look, limit, key=KEY)
    for part in outcome.partial:
        for minor in part["minors"]:
            facts.holders.setdefault(minor, []).append(part["pid"])
    if outcome.ok:
        facts.hidden, facts.error = outcome.value["hidden"], outcome.value["error"]
    else:
        facts.error = "the open files of all processes cannot be read: %s" % outcome.error
    return facts


def _scan(report: _bounded.Report, family: Family, folder: str, proc: str) -> t.Dict[str, t.Any]:
    """Runs in the child: tell of each process that holds a node, then of what could not be seen."""
    try:
        pids = [int(entry) for entry in os.listdir(proc) if entry.isdigit()]
    except OSError as error:
        return {"hidden": 0, "error": "%s cannot be listed: %s" % (proc, error.strerror)}
    hidden = 1 if 1 not in pids or _hides(proc) else 0
    prefix = folder.rstrip("/") + "/"
    for pid in sorted(pids):
        try:
            minors = _minors_of("%s/%d" % (proc, pid), family, prefix)
        except PermissionError:
            hidden += 1
            continue
        if minors:
            report({"pid": pid, "minors": sorted(minors)})
    return {"hidden": hidden, "error": ""}


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


def any_node(family: Family, folder: str = "/dev") -> bool:
    """Whether the folder has a node of the family at all."""
    try:
        return any(family.name.match(entry) for entry in os.listdir(folder))
    except OSError:
        return False


def _minors_of(process: str, family: Family, prefix: str) -> t.Set[int]:
    """The minors that a process has open; PermissionError when its table may not be read."""
    found = _minors_in(process + "/fd", family, prefix)
    if found is not None:
        return found
    # A main thread that has ended has no table, while the threads that live on still hold it open.
    minors: t.Set[int] = set()
    try:
        threads = os.listdir(process + "/task")
    except PermissionError:
        raise
    except OSError:
        return minors
    for thread in threads if len(threads) > 1 else ():
        minors |= _minors_in("%s/task/%s/fd" % (process, thread), family, prefix) or set()
    return minors


def _minors_in(table: str, family: Family, prefix: str) -> t.Optional[t.Set[int]]:
    """The minors that one file table names, or None when it is empty or gone."""
    try:
        numbers = os.listdir(table)
    except PermissionError:
        raise
    except OSError:
        return None
    if not numbers:
        return None
    minors = set()
    for number in numbers:
        link = "%s/%s" % (table, number)
        try:
            target = os.readlink(link)
        except PermissionError:
            raise
        except OSError:
            continue  # closed meanwhile
        minor = _minor(link, target, family, prefix)
        if minor is not None:
            minors.add(minor)
    return minors


def _minor(link: str, target: str, family: Family, prefix: str) -> t.Optional[int]:
    if not target.startswith("/"):
        return None  # a socket, a pipe
    try:
        # Of the open file itself, also where its path leads elsewhere: in another root, after a rename.
        found = os.stat(link)
        if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == family.major:
            minor = os.minor(found.st_rdev)
            return minor if minor <= family.last_minor else None
    except OSError:
        pass
    if target.endswith(DELETED):
        target = target[: -len(DELETED)]
    match = family.name.match(target[len(prefix) :]) if target.startswith(prefix) else None
    return int(match.group(1)) if match else None
