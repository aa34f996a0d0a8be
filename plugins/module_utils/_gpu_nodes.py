# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Open device nodes: who holds a GPU as the kernel's file tables tell it, independent of the vendor's driver library.

Links are read, and at most the link itself is stated. No node is opened, so a sick device cannot block this.
"""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass, field

__all__ = ["NVIDIA", "Family", "NodeFacts", "any_node", "scan"]

DELETED = " (deleted)"


@dataclass(frozen=True)
class Family:
    """How the nodes of one vendor's devices are recognised.

    By name, because that also holds where the number differs; by number, because a container may rename its nodes.
    """

    name: t.Pattern[str]
    major: int
    last_minor: int  # minors above are nodes that name no device


NVIDIA = Family(re.compile(r"nvidia(\d+)\Z"), major=195, last_minor=247)


@dataclass
class NodeFacts:
    """What the file tables showed. ``hidden`` counts the processes whose tables could not be read."""

    holders: t.Dict[int, t.List[int]] = field(default_factory=dict)  # minor -> pids
    hidden: int = 0
    error: str = ""


def scan(family: Family, folder: str = "/dev", proc: str = "/proc") -> NodeFacts:
    """Every process that has a node of ``family`` in ``folder`` open."""
    facts = NodeFacts()
    try:
        pids = [int(entry) for entry in os.listdir(proc) if entry.isdigit()]
    except OSError as error:
        facts.error = "%s cannot be listed: %s" % (proc, error.strerror)
        return facts
    prefix = folder.rstrip("/") + "/"
    for pid in sorted(pids):
        try:
            minors = _minors_of("%s/%d" % (proc, pid), family, prefix)
        except PermissionError:
            facts.hidden += 1
            continue
        for minor in minors:
            facts.holders.setdefault(minor, []).append(pid)
    return facts


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
    if target.endswith(DELETED):
        target = target[: -len(DELETED)]
    if not target.startswith(prefix):
        return None
    match = family.name.match(target[len(prefix) :])
    if match:
        return int(match.group(1))
    try:
        number = os.stat(link).st_rdev
    except OSError:
        return None
    if number and os.major(number) == family.major and os.minor(number) <= family.last_minor:
        return os.minor(number)
    return None
