# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Stops what a plain tree is to be stopped by, through the library, and tells what became of everybody."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
import typing as t

import judge
import mutants
import seeds
from gpuops import _errors, _ownership, _selection
from gpuops._processes import Table
from gpuops._stop import Options, Stopper
from gpuops._systemd import UnitState
from growth import Log

NUMBERS = ("TERM", "INT", "HUP", "QUIT")
WAIT = 10.0
Tree = t.Dict[str, t.Any]


class Field:
    """The namespace as the runner sees it: the ground, the bystanders, one forest at a time."""

    def __init__(
        self,
        folder: str,
        log: Log,
        ground: int,
        ask: t.Callable[..., t.Any],
        bystanders: t.List[t.Dict[str, t.Any]],
    ) -> None:
        self.folder = folder
        self.log = log
        self.ground = ground
        self.ask = ask
        self.bystanders = bystanders
        # The machine that this runs on may itself have put everything into a service.
        mutants.replace(_selection, "service_of", lambda _process: None)
        said = ask("grow", nodes=bystanders, folder=folder)
        if said:
            raise RuntimeError(said)
        self.at_home = {(n["id"], log.pid(n["id"]), log.start(n["id"])) for n in bystanders}
        self.permanent = {1, os.getpid(), ground} | {pid for _n, pid, _s in self.at_home}

    def one(self, seed: int) -> t.Dict[str, t.Any]:
        tree = seeds.plain(seed)
        answer: t.Dict[str, t.Any] = {"seed": seed, "kind": "plain", "selector": tree["selector"], "problems": []}
        try:
            self.prepare(tree)
            self.stop(tree, answer)
        except Exception as error:
            answer["problems"].append(["broken", "%s: %s" % (type(error).__name__, error)])
        for problem in self.clear():
            answer["problems"].append(problem)
        if answer["problems"]:
            answer["tree"] = tree
        return answer

    def prepare(self, tree: Tree) -> None:
        for node in tree["nodes"]:
            self.log_clear(node["id"])
        said = self.ask("grow", nodes=tree["nodes"], folder=self.folder)
        if said:
            raise RuntimeError("the forest did not grow: %s" % said)
        for number in tree["dead"]:
            pid = self.log.pid(number)
            os.kill(pid, signal.SIGKILL)
            if not self.until(lambda pid=pid: judge.row(pid) is None, collect=True):
                raise RuntimeError("the process %d was not collected" % pid)
            tree["ended_at"] = time.clock_gettime(time.CLOCK_MONOTONIC)
        wrong: t.List[str] = []

        def as_described() -> bool:
            wrong[:] = judge.as_described(tree, self.log, self.ground, seeds.MARK)
            return not wrong

        if not self.until(as_described):
            raise RuntimeError("the forest is not as described: %s" % "; ".join(wrong))

    def log_clear(self, node: int) -> None:
        self.log.forget(node)

    def until(self, happened: t.Callable[[], bool], collect: bool = False) -> bool:
        end = time.monotonic() + WAIT
        while not happened():
            if time.monotonic() > end:
                return False
            if collect:
                self.ask("collect")
            time.sleep(0.002)
        return True

    def stop(self, tree: Tree, answer: t.Dict[str, t.Any]) -> None:
        if tree.get("refusal") == "reused_pidfile":
            self.reuse(tree)
        if tree["check"] and not tree["refusal"]:
            scan = self.scan(tree)
            result = {"verdict": "absent", "msg": "", "processes": [], "survivors": []}
            if scan is not None:
                result = Stopper("it", scan, Options(**self.options(tree))).run(True)
            planned = judge.planned(result)
            wanted = {self.log.pid(number) for number in tree["gone"]}
            if planned != wanted:
                answer["problems"].append(["plan", "%s are planned, not %s" % (sorted(planned), sorted(wanted))])
            answer["problems"] += judge.forecast(tree, self.log, result)
        began = time.monotonic()
        try:
            scan = self.watched(tree, self.scan(tree))
            if scan is None:
                result = {"verdict": "absent", "msg": "", "processes": [], "survivors": []}
            else:
                stopper = Stopper("it", scan, Options(**self.options(tree)), tick=lambda: self.succession(tree))
                result = stopper.run()
        except _errors.ServingError as error:
            result = dict({"verdict": "error", "processes": [], "survivors": []}, **error.result)
            result["msg"] = error.message
        seconds = time.monotonic() - began
        problems, ended = judge.judge(tree, self.log, result, seconds)
        problems += self.strays(tree)
        answer["problems"] += problems
        answer.update(
            verdict=result["verdict"],
            ended=ended,
            seconds=seconds,
            heir=tree.get("reborn", False),
            grown=len(tree["nodes"]),
        )
        if problems:
            answer["result"] = result
            answer["pids"] = {node["id"]: self.log.pid(node["id"]) for node in tree["nodes"]}

    def options(self, tree: Tree) -> t.Dict[str, t.Any]:
        options = dict(tree["options"])
        options["protected"] = tuple(options.get("protected", ()))
        return options

    def scan(self, tree: Tree) -> t.Any:
        """What the library is asked for."""
        pid = self.log.pid(tree["front"])
        found = judge.row(pid)
        created = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        created += found.start / os.sysconf("SC_CLK_TCK") if found is not None else 0
        selector, refusal = tree["selector"], tree["refusal"]
        if selector == "pattern":
            return _selection.by_pattern(seeds.pattern_of(tree["token"]), pwd.getpwuid(tree["user"]).pw_name)
        if selector == "unit":
            return self.made_up(tree)
        if refusal == "wrong_time":
            return _selection.by_pid(pid, created - 60, None)
        if refusal == "wrong_user":
            return _selection.by_pid(pid, None, "games")
        if refusal in ("own", "init"):
            return _selection.by_pid(1 if refusal == "init" else os.getpid(), None, None)
        if selector == "pidfile" or refusal.endswith("pidfile"):
            return self.by_file(pid, refusal, found.uid if found is not None else 0)
        return _selection.by_pid(pid, created if selector == "timed" else None, None)

    def by_file(self, pid: int, refusal: str, uid: int) -> t.Any:
        path = os.path.join(self.folder, "engine.pid")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with open(path, "w", encoding="ascii") as stream:
            stream.write("%d\n" % pid)
        os.chmod(path, 0o666 if refusal == "open_pidfile" else 0o644)
        if refusal == "strange_pidfile":
            os.chown(path, uid + 7, -1)
        if refusal in ("old_pidfile", "reused_pidfile"):
            then = time.time() - (3600 if refusal == "old_pidfile" else 5)
            os.utime(path, (then, then))
        return _selection.by_pidfile(path, _selection.pid_in_file(path), None, None)

    def made_up(self, tree: Tree) -> t.Any:
        """A unit with this main process, living or dead, and no control group to find the others by."""
        pid, raw = self.log.pid(tree["front"]), {}
        if tree["dead"]:
            raw = {"ExecMainPID": str(pid), "ExecMainExitTimestampMonotonic": "%d" % (tree["ended_at"] * 1e6)}

        def scan(table: Table, _state: t.Any, previous: t.Any) -> t.Any:
            alive = judge.of(self.log, tree["front"]) is not None
            state = UnitState("made-up.service", load_state="loaded", main_pid=pid if alive else 0, raw=raw)
            return _ownership.of_unit(table, state, mark_gid=seeds.MARK, previous=previous)

        return scan

    def reuse(self, tree: Tree) -> None:
        """Before the stop: the number that is in the pid file is a stranger's now."""
        pid = self.log.pid(tree["front"])
        heir = {"id": len(tree["nodes"]) + 1, "session": True, "blocks": True, "late": tree["front"]}
        tree["nodes"].append(heir)
        self.log_clear(heir["id"])
        if not self.ask("heir", pid=pid, node=heir, nodes=tree["nodes"], folder=self.folder):
            tree["refusal"], tree["verdict"] = (
                "dead",
                "absent",
            )  # the dead one's session lives on: nobody gets the number
            return
        tree["reborn"] = self.until(lambda: self.log.stage(heir["id"]) > 1)

    def watched(self, tree: Tree, scan: t.Any) -> t.Any:
        """The same scan, which counts the looks that show the number of the victim free."""
        if "heir" not in tree:
            return scan
        tree["free"] = 0

        def look(table: Table, state: t.Any, previous: t.Any) -> t.Any:
            tree["free"] += table.get(self.log.pid(tree["of"])) is None
            return scan(table, state, previous)

        return look

    def succession(self, tree: Tree) -> None:
        """During the stop: once the victim is gone its number is somebody else's.

        Who only leaves a session of that number behind comes later: the kernel hands out all other numbers first, so
        the library has seen that nobody bore this one.
        """
        if "heir" not in tree or "reborn" in tree:
            return
        if tree["nodes"][tree["heir"] - 1].get("leave") and tree["free"] < 2:
            return
        pid = self.log.pid(tree["of"])
        self.ask("collect")
        if judge.row(pid) is not None:
            return
        heir = tree["nodes"][tree["heir"] - 1]
        tree["reborn"] = self.ask("heir", pid=pid, node=heir, nodes=tree["nodes"], folder=self.folder)
        if tree["reborn"]:
            self.until(lambda: all(self.log.stage(n["id"]) > 1 for n in tree["nodes"] if n.get("late")))

    def strays(self, tree: Tree) -> t.List[judge.Problem]:
        """Whoever lives here without having written himself down."""
        known = self.permanent | {self.log.pid(node["id"]) for node in tree["nodes"]}
        # Children of the runner are the library's own, which may still be ending.
        left = [pid for pid, parent in judge.living().items() if pid not in known and parent != os.getpid()]
        return [["survivor", "the process %d, which nobody knows" % pid] for pid in sorted(left)]

    def clear(self) -> t.List[judge.Problem]:
        """End what is left of the forest; nobody but the bystanders may live then, and nothing happened to them."""
        problems: t.List[judge.Problem] = []
        for number, pid, start in self.at_home:
            found = judge.row(pid)
            harm = judge.touched({"blocks": True}, found if found is not None and found.start == start else None)
            if number != self.bystanders[2]["id"] and harm:
                problems.append(["wrong", "the bystander %d %s" % (pid, harm)])

        if self.log.stage(0):
            problems.append(["wrong", "process %d got signal %d" % (self.log.pid(0), self.log.stage(0))])
            self.log.forget(0)

        def empty() -> bool:
            left = set(judge.living()) - self.permanent
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        if not self.until(empty, collect=True):
            problems.append(["broken", "somebody lives on: %s" % sorted(set(judge.living()) - self.permanent)])
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))
        return problems
