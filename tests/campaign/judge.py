# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Compares what became of a forest with what must, by the build log and /proc alone."""

from __future__ import annotations

import os
import signal
import typing as t

from growth import Log
from promise import GROUND, INIT, Node, facts_of

SLACK = 5.0
Tree = t.Dict[str, t.Any]
Problem = t.List[str]  # its kind, and what happened


class Row(t.NamedTuple):
    """What /proc says of one process."""

    state: str
    ppid: int
    group: int
    session: int
    threads: int
    start: int
    uid: int
    groups: t.Set[int]
    pending: t.Set[int]

    @property
    def alive(self) -> bool:
        return self.state not in "Xx" and not (self.state == "Z" and self.threads <= 1)


def _stat(pid: int) -> t.List[bytes]:
    with open("/proc/%d/stat" % pid, "rb", 0) as stream:
        return stream.read().rpartition(b")")[2].split()


def row(pid: int) -> t.Optional[Row]:
    try:
        fields = _stat(pid)
        with open("/proc/%d/status" % pid, "rb", 0) as stream:
            status = stream.read()
    except OSError:
        return None

    def line(key: bytes) -> t.List[bytes]:
        return status.partition(b"\n" + key + b":")[2].partition(b"\n")[0].split()

    pending = int(line(b"SigPnd")[0], 16) | int(line(b"ShdPnd")[0], 16)
    return Row(
        state=fields[0].decode(),
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start=int(fields[19]),
        uid=int(line(b"Uid")[0]),
        groups={int(gid) for gid in line(b"Groups")},
        pending={n + 1 for n in range(64) if pending >> n & 1} - {int(signal.SIGCHLD)} if pending else set(),
    )


def of(log: Log, node: int) -> t.Optional[Row]:
    """The row of this very process, None when it is gone."""
    pid = log.pid(node)
    found = row(pid) if pid else None
    return found if found is not None and found.start == log.start(node) and found.alive else None


def touched(node: Node, found: t.Optional[Row]) -> str:
    """What was done to a process that nothing may be done to, empty when nothing was."""
    if found is None:
        return "was ended"
    if node.get("blocks") and found.pending:
        return "got " + ", ".join(_signal_name(number) for number in sorted(found.pending))
    if node.get("stopped") != (True if found.state == "T" else None):
        return "was continued" if node.get("stopped") else "was stopped"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def as_described(tree: Tree, log: Log, ground: int, mark: int) -> t.List[str]:
    """In what the forest differs from its description: then the tree proves nothing."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    facts = facts_of(tree["nodes"], tree.get("dead", ()))
    numbers = {number: log.pid(number) for number in nodes}
    numbers.update({INIT: 1, GROUND: ground})
    wrong = []
    for fact in facts.values():
        node = nodes[fact.id]
        if fact.id in tree.get("dead", ()) and of(log, fact.id) is not None:
            wrong.append("%d is not dead" % fact.id)
        if node.get("late") or not (fact.alive or fact.zombie):
            continue
        found = row(numbers[fact.id])
        if found is None:
            wrong.append("%d is not there" % fact.id)
            continue
        state = "Z" if fact.zombie or node.get("threads") else "T" if node.get("stopped") else "RS"
        told: t.Dict[str, t.Tuple[t.Any, t.Any]] = {
            "state": (found.state if found.state not in state else state, state),
            "parent": (found.ppid, numbers[fact.parent]),
            "group": (found.group, numbers.get(fact.group)),
            "session": (found.session, numbers.get(fact.session)),
            "user": (found.uid, fact.uid),
            "mark": (mark in found.groups, fact.marked),
        }
        if fact.session == GROUND:
            told["group" if fact.group == GROUND else "session"] = (0, 0)
            told["session"] = (0, 0)
        wrong += ["%d: %s is %s, not %s" % (fact.id, key, *pair) for key, pair in told.items() if pair[0] != pair[1]]
    return wrong


def planned(result: t.Mapping[str, t.Any]) -> t.Set[int]:
    return {p["pid"] for p in result["processes"] if p["outcome"] == "planned"}


def forecast(tree: Tree, log: Log, result: t.Mapping[str, t.Any]) -> t.List[Problem]:
    """The problems of check mode: it has the verdict of the stop, names the same survivors, and touches nobody."""
    found, _ended = judge(dict(tree, gone=[]), log, result, 0)
    return [[kind, "check mode: " + text] for kind, text in found if kind in ("wrong", "verdict", "named")]


def judge(tree: Tree, log: Log, result: t.Mapping[str, t.Any], seconds: float) -> t.Tuple[t.List[Problem], int]:
    """The problems, and how many owned processes ended."""
    problems: t.List[Problem] = []
    gone = set(tree["gone"])
    facts = facts_of(tree["nodes"], tree.get("dead", ()))
    ended = 0
    for node in tree["nodes"]:
        number = node["id"]
        found = of(log, number)
        if number in gone or node.get("born"):
            ended += bool(log.pid(number)) and found is None
            if found is not None:
                problems.append(["survivor", "node %d, process %d" % (number, log.pid(number))])
        elif facts[number].alive and log.pid(number):
            harm = touched(node, found)
            if harm:
                problems.append(["wrong", "node %d, process %d %s" % (number, log.pid(number), harm)])
    options = tree["options"]
    bound = 2 * options["grace"] + options["kill_grace"] + SLACK
    if seconds > bound:
        problems.append(["late", "it took %.2f s, more than %.2f s" % (seconds, bound)])
    if result["verdict"] != tree["verdict"]:
        problems.append(["verdict", "%s, not %s: %s" % (result["verdict"], tree["verdict"], result["msg"])])
    elif tree["verdict"] in ("stopped", "survivors"):
        named = {p["pid"] for p in result["survivors"]}
        must = {log.pid(n) for n in tree["named"]}
        may = must | {log.pid(n) for n in tree["maybe_named"]}
        if not must <= named <= may:
            problems.append(["named", "%s are named, not %s" % (sorted(named), sorted(must))])
    return problems, ended


def living() -> t.Dict[int, int]:
    """Everybody here who is not dead, with the parent."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = _stat(int(entry))
            except OSError:
                continue
            if fields[0] not in b"Xx" and (fields[0] != b"Z" or int(fields[17]) > 1):
                found[int(entry)] = int(fields[1])
    return found
