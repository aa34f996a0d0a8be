# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Grows the processes that ``forest.py`` describes, and signals no others."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _processes
from ansible_collections.gpuops.serving.plugins.module_utils._processes import ProcessRef, Table

FOREST = pathlib.Path(__file__).parent / "forest.py"


class Forest:
    """The processes of one test; whatever is left of them ends with it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.strays: t.List[str] = []

    def send(self, ref: ProcessRef, number: int) -> str:
        """Signals only what this test has grown."""
        if not self.has_grown(ref):
            self.strays.append("signal %d to process %d" % (number, ref.pid))
            return "denied"
        return _processes.send(ref, number)

    def has_grown(self, ref: ProcessRef) -> bool:
        try:
            line = pathlib.Path("/proc/%d/cmdline" % ref.pid).read_text()
        except OSError:
            return True  # gone: there is nothing to harm
        ready = {path.read_text() for path in self.folder.iterdir() if path.suffix == ""}
        return str(self.folder) in line or "%d %d" % ref in ready  # a dead main thread has no line

    def grow(self, *trees: t.Dict[str, t.Any], wait: t.Sequence[str] = ()) -> None:
        subprocess.run([sys.executable, str(FOREST), str(self.folder), json.dumps(trees)], check=True)
        for name in wait or [node["id"] for tree in trees for node in nodes(tree)]:
            self.ref(name)

    def ref(self, name: str) -> ProcessRef:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for error in self.folder.glob("*.error"):
                raise AssertionError("%s: %s" % (error.name, error.read_text()))
            try:
                pid, start = (self.folder / name).read_text().split()
                return ProcessRef(int(pid), int(start))
            except FileNotFoundError:
                time.sleep(0.01)
        raise AssertionError("the process %r was never ready" % name)

    def alive(self, name: str) -> bool:
        return _processes.alive(self.ref(name))

    def heard(self, name: str) -> t.List[int]:
        return [int(line) for line in (self.folder / (name + ".signals")).read_text().split()]

    def untouched(self, name: str) -> bool:
        process = Table.snapshot().by_ref(self.ref(name))
        return process is not None and process.state in "SR" and self.heard(name) == []

    def fell(self) -> None:
        for path in self.folder.iterdir():
            if path.suffix == "" and not path.name.startswith("."):
                pid, start = path.read_text().split()
                _processes.send(ProcessRef(int(pid), int(start)), signal.SIGKILL)


def nodes(tree: t.Dict[str, t.Any]) -> t.List[t.Dict[str, t.Any]]:
    return [tree] + [node for child in tree.get("children", ()) for node in nodes(child)]


def cared_for(folder: pathlib.Path) -> t.Iterator[Forest]:
    """A forest with bystanders, which must all come through; whatever is left of it ends here."""
    forest = Forest(folder)
    # Bystanders: a child of process 1 without a session of its own, one that leads a session, a session's orphan.
    bystanders: t.List[t.Dict[str, t.Any]] = [
        {"id": "by_session", "all_deaf": True, "session": True, "children": [{"id": "by_child", "all_deaf": True}]},
        {"id": "by_orphan", "all_deaf": True, "daemon": True},
        {"id": "by_user", "all_deaf": True, "uid": 1},
    ]
    forest.grow(*bystanders)
    yield forest
    harmed = [node["id"] for tree in bystanders for node in nodes(tree) if not forest.untouched(node["id"])]
    forest.fell()
    assert harmed == []
    assert forest.strays == []
