# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Grows and stops many trees that are real systemd units, on the host that it runs on.

``units.py FOLDER FIRST COUNT LANES [MUTANT]``: FOLDER holds the library as the package ``gpuops``; seeds from FIRST on;
so many at once. A line of JSON goes out for each tree.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import typing as t

sys.path.insert(0, sys.argv[1])

import judge
import mutants
import seeds_units
from gpuops import _accounts, _errors, _ownership, _stopping
from growth import READY, Log
from promise import facts_of

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = "/run/campaign"
UNITS = "/run/systemd/system"
BATCH = 6  # trees a lane between two reloads
WAIT = 20.0
Tree = t.Dict[str, t.Any]


def call(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    said = done.stdout.decode("utf-8", "replace")
    if check and done.returncode != 0:
        raise RuntimeError("%s: %s" % (" ".join(argv), said.strip()))
    return said


def until(happened: t.Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT
    while not happened():
        if time.monotonic() > end:
            raise RuntimeError("it did not happen in time: %s" % what)
        time.sleep(0.01)


def folder_of(tree: Tree) -> str:
    return os.path.join(ROOT, str(tree["seed"]))


def write(tree: Tree) -> None:
    """The files of one tree: its description and its units."""
    folder = folder_of(tree)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    os.chmod(folder, 0o777)
    names = seeds_units.names(tree["seed"])
    nodes = [dict(n, scope=scope_name(tree, n["moved"])) if n.get("exec") == "scope" else n for n in tree["nodes"]]
    with open(os.path.join(folder, "forest.json"), "w", encoding="ascii") as stream:
        json.dump(nodes, stream)
    for node in tree["nodes"]:
        if node.get("top") not in ("unit", "d1", "d2"):
            continue
        lines = [
            "[Service]",
            "ExecStart=%s -I -S %s/growth.py %s %d" % (sys.executable, HERE, folder, node["id"]),
            "WorkingDirectory=%s" % folder,
            "TimeoutStopSec=%s" % ("500ms" if node["top"] == "unit" else "5s"),
            "User=%s" % ("daemon" if node.get("uid") else "root"),
        ]
        if node["top"] == "unit":
            lines.append("KillMode=%s" % tree["kill_mode"])
            lines += ["SupplementaryGroups=%s" % _ownership.mark_group(tree["service"])] * tree["marked"]
            lines += ["PrivateTmp=yes"] * tree["private"]
            lines += ["Restart=always", "RestartSec=100ms"] * tree["restart"]
        with open(os.path.join(UNITS, names[node["top"]]), "w", encoding="ascii") as stream:
            stream.write("\n".join(lines) + "\n")


def scope_name(tree: Tree, place: str) -> str:
    return seeds_units.names(tree["seed"]).get(place, "eng-%d-%s.scope" % (tree["seed"], place))


def mark_gid(service: str) -> int:
    """The mark of a service: each tree that lives at the same time has its own."""
    group = _ownership.mark_group(service)
    call("groupadd", "--force", "--system", group)
    gid = _accounts.group_number(group)
    assert gid is not None
    return gid


class Stand:
    """One tree on its host."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.mark = mark_gid(tree["service"])
        self.folder = folder_of(tree)
        self.log = Log(os.path.join(self.folder, "log"))
        self.names = seeds_units.names(tree["seed"])
        self.tops = [node for node in tree["nodes"] if node.get("top")]

    def grow(self) -> None:
        services = [self.names[node["top"]] for node in self.tops if node["top"] != "ds"]
        try:
            call("systemctl", "start", *services)
        except RuntimeError:  # a busy machine may lack something for a moment
            time.sleep(1.0)
            call("systemctl", "start", *services)
        for node in self.tops:
            if node["top"] == "ds":
                scope = ["systemd-run", "--quiet", "--scope", "--collect", "--unit=" + self.names["ds"]]
                grow = [sys.executable, "-I", "-S", HERE + "/growth.py", self.folder, str(node["id"]), "--detach"]
                call(*scope, *grow)
        wanted = {node["id"] for node in self.tree["nodes"] if not node.get("born")}
        try:
            until(lambda: bool(self.errors()) or not self.unready(wanted), "")
        except RuntimeError:
            raise RuntimeError("nodes are not ready: %s" % self.unready(wanted)) from None
        if self.errors():
            raise RuntimeError(self.errors())
        self.move()
        until(lambda: not self.misplaced(()), "everybody is in his unit")
        if self.tree["state"] == "front_dead":
            os.kill(self.log.pid(self.tree["front"]), signal.SIGKILL)
            # systemd has seen it, and is done with the rest where it ends that too.
            until(lambda: self.active() in ("failed", "inactive"), "the unit is dead")
        elif self.tree["state"] == "stopped":
            call("systemctl", "stop", self.names["unit"])
        wrong: t.List[str] = []

        def as_described() -> bool:
            wrong[:] = judge.as_described(self.tree, self.log, -1, self.mark) + self.misplaced(self.tree["dead"])
            return not wrong

        with contextlib.suppress(RuntimeError):
            until(as_described, "")
        if wrong:
            raise RuntimeError("the forest is not as described: %s" % "; ".join(wrong))

    def unready(self, wanted: t.Set[int]) -> t.List[int]:
        return sorted(number for number in wanted if self.log.stage(number) < READY)

    def errors(self) -> str:
        found = []
        for name in sorted(os.listdir(self.folder)):
            if name.startswith("error."):
                with open(os.path.join(self.folder, name), encoding="ascii") as stream:
                    found.append("%s: %s" % (name, stream.read()))
        return " ".join(found)

    def active(self) -> str:
        return call("systemctl", "is-active", self.names["unit"], check=False).strip()

    def move(self) -> None:
        """What ``systemd-run --scope`` does, for processes of any user."""
        scopes: t.Dict[str, t.List[str]] = {}
        for node in self.tree["nodes"]:
            if node.get("moved") in ("s1", "s2"):
                scopes.setdefault(self.names[node["moved"]], []).append(str(self.log.pid(node["id"])))
        manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
        for scope, pids in scopes.items():
            argv = ("StartTransientUnit", "ssa(sv)a(sa(sv))", scope, "fail", "1", "PIDs", "au", str(len(pids)))
            call("busctl", "call", *manager, *argv, *pids, "0")

    def misplaced(self, dead: t.Collection[int]) -> t.List[str]:
        wrong = []
        for fact in facts_of(self.tree["nodes"], dead).values():
            if fact.alive:
                try:
                    with open("/proc/%d/task/%d/cgroup" % ((self.log.pid(fact.id),) * 2), encoding="ascii") as stream:
                        text = stream.read()
                except OSError:
                    continue
                node = self.tree["nodes"][fact.id - 1]
                unit = scope_name(self.tree, fact.place)
                if "/" + unit not in text and not node.get("threads"):
                    wrong.append("%d is not in %s" % (fact.id, unit))
        return wrong

    def ask(self, check: bool) -> t.Dict[str, t.Any]:
        params: t.Dict[str, t.Any] = dict.fromkeys(("pid", "pidfile", "pattern", "user", "create_time", "gpus"))
        params.update(dict.fromkeys(("engine", "allowed_holders", "run_id", "timeout", "definition")))
        params.update(
            {"unit": self.names["unit"], "service": self.tree["service"], "reset_failed": False, "protected": []}
        )
        params.update(self.tree["options"])
        try:
            return _stopping.stop(params, check)
        except _errors.ServingError as error:
            return dict({"verdict": "error", "processes": [], "survivors": []}, **dict(error.result, msg=error.message))

    def stop(self, answer: t.Dict[str, t.Any]) -> None:
        tree = self.tree
        if tree["check"] and not tree["refusal"]:
            result = self.ask(True)
            planned, wanted = judge.planned(result), {self.log.pid(number) for number in tree["gone"]}
            if planned != wanted and not any(node.get("exec") == "runuser" for node in tree["nodes"]):
                answer["problems"].append(["plan", "%s are planned, not %s" % (sorted(planned), sorted(wanted))])
            answer["problems"] += judge.forecast(tree, self.log, result)
        began = time.monotonic()
        result = self.ask(False)
        seconds = time.monotonic() - began
        if tree["restart"]:
            time.sleep(0.3)  # longer than RestartSec
        problems, ended = judge.judge(tree, self.log, result, seconds)
        left = sorted(self.here() - {self.log.pid(node["id"]) for node in tree["nodes"]})
        if not tree["refusal"]:
            problems += [["survivor", "the process %d, which nobody knows" % pid] for pid in left]
        answer["problems"] += problems
        answer.update(verdict=result["verdict"], ended=ended, seconds=seconds, grown=len(tree["nodes"]))
        if answer["problems"]:
            answer["result"] = result
            answer["pids"] = {node["id"]: self.log.pid(node["id"]) for node in tree["nodes"]}

    def here(self) -> t.Set[int]:
        """Everybody who works in the folder of this tree: that is inherited, whatever else is left."""
        # One whose main thread has ended works nowhere.
        found = {self.log.pid(n["id"]) for n in self.tree["nodes"] if judge.of(self.log, n["id"]) is not None}
        for pid in judge.living():
            with contextlib.suppress(OSError):
                if os.readlink("/proc/%d/cwd" % pid) == self.folder:
                    found.add(pid)
        return found

    def clear(self) -> None:
        names = [self.names[node["top"]] for node in self.tops if node["top"] != "ds"]
        decoys = [self.names[node["top"]] for node in self.tops if node["top"] in ("d1", "d2")]
        if decoys:
            call("systemctl", "kill", "--signal=KILL", *decoys, check=False)

        def empty() -> bool:
            left = self.here()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(UNITS, name))
        call("systemctl", "stop", *names, check=False)
        until(empty, "the forest is gone")
        # On legacy control groups nobody tells systemd that a scope is empty.
        places = {"ds"} | {node["moved"] for node in self.tree["nodes"] if "moved" in node}
        call("systemctl", "stop", *[scope_name(self.tree, place) for place in sorted(places)], check=False)
        call("systemctl", "reset-failed", *names, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def one(tree: Tree) -> t.Dict[str, t.Any]:
    answer: t.Dict[str, t.Any] = {"seed": tree["seed"], "kind": "unit", "selector": "systemd", "problems": []}
    stand = Stand(tree)
    try:
        stand.grow()
        stand.stop(answer)
    except Exception as error:
        answer["problems"].append(["broken", "%s: %s" % (type(error).__name__, error)])
    try:
        stand.clear()
    except Exception as error:
        answer["problems"].append(["broken", "%s: %s" % (type(error).__name__, error)])
    if answer["problems"]:
        answer["tree"] = tree
    return answer


def lane(trees: t.List[Tree], path: str) -> int:
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        with open(path, "w", encoding="utf-8") as stream:
            for tree in trees:
                stream.write(json.dumps(one(tree)) + "\n")
                stream.flush()
        code = 0
    finally:
        os._exit(code)


def main() -> int:
    first, count, lanes = map(int, sys.argv[2:5])
    if len(sys.argv) > 5:
        mutants.apply(sys.argv[5])
    os.makedirs(ROOT, exist_ok=True)
    os.chmod(ROOT, 0o755)
    seeds = list(range(first, first + count))
    while seeds:
        batch, seeds = seeds[: lanes * BATCH], seeds[lanes * BATCH :]
        trees = [seeds_units.unit(seed) for seed in batch]
        for number, tree in enumerate(trees):
            tree["service"] = "campaign-%d" % number
            mark_gid(tree["service"])
            write(tree)
        call("systemctl", "daemon-reload")
        paths = [os.path.join(ROOT, "lane.%d" % number) for number in range(lanes)]
        children = {lane(trees[number::lanes], paths[number]): paths[number] for number in range(lanes)}
        while children:
            pid, _status = os.wait()
            path = children.pop(pid, "")
            if path:
                with open(path, encoding="utf-8") as stream:
                    sys.stdout.write(stream.read())
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
