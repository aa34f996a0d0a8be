# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whether this host sees all processes of the machine, or is a container with a process table of its own."""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

from . import _bounded

__all__ = ["View", "look"]

# The number of the first process namespace, the same since Linux 3.8 (PROC_PID_INIT_INO in include/linux/proc_ns.h).
FIRST_NAMESPACE = 0xEFFFFFFC
# Files that tell the manager's name, and files that only one manager makes.
NAMED = ("systemd/container", "host/container-manager")
MARKS = (
    ("run", ".containerenv", "podman"),
    ("root", ".dockerenv", "docker"),
    ("run", "secrets/kubernetes.io", "kubernetes"),
    ("root", "dev/lxd/sock", "lxc"),
    ("root", "dev/incus/sock", "lxc"),
)
LIMIT = 1.0
CGROUPS = re.compile(r"/(docker)[/-]|/(lxc)(?:/|\.payload)|/(kubepods)(?:/|\.slice)")


@dataclass(frozen=True)
class View:
    """What this process can see of the machine that it runs on."""

    pid_namespace: str = "unknown"  # host, own or unknown
    container: t.Optional[str] = None  # systemd-nspawn, docker, podman, lxc and others, as far as they say so

    @property
    def complete(self) -> bool:
        """Whether no process of the machine is out of sight."""
        return self.pid_namespace == "host"

    @property
    def sentence(self) -> str:
        """What there is to know about it; nothing on a plain host."""
        kind = "this host is a container (%s)" % self.container if self.container else ""
        if self.pid_namespace == "own":
            begin = kind + " with" if kind else "this host is a namespace with"
            return begin + " a process table of its own: processes outside it are not visible here"
        if self.pid_namespace == "host":
            return kind and kind + " that shares the process table of the machine: all processes are visible here"
        begin = kind + ", and " if kind else ""
        return begin + "it cannot be told whether all processes of the machine are visible here"


def look(proc: str = "/proc", run: str = "/run", root: str = "/") -> View:
    """Find out where this process runs."""
    namespace = _namespace(proc)
    container = _by_files(run, root)
    if container is None and namespace != "host":
        container = _by_first_process(proc)
    return View(namespace, container)


def _namespace(proc: str) -> str:
    try:
        return "host" if os.stat(proc + "/self/ns/pid").st_ino == FIRST_NAMESPACE else "own"
    except OSError:
        return "unknown"


def _by_files(run: str, root: str) -> t.Optional[str]:
    for name in NAMED:
        found = _word(_text(os.path.join(run, name)))
        if found:
            return found
    folders = {"run": run, "root": root}
    return next((kind for folder, name, kind in MARKS if os.path.exists(os.path.join(folders[folder], name))), None)


def _by_first_process(proc: str) -> t.Optional[str]:
    """What process 1 was told by its manager. In a namespace that is the machine's own, it has none."""
    # Its environment lies in its memory, whose lock it may hold for ever: it can be the very server that is stuck.
    outcome = _bounded.run(lambda _report: _text(proc + "/1/environ"), LIMIT, key="view")
    for variable in (outcome.value or "").split("\0"):
        key, _equals, value = variable.partition("=")
        if key == "container" and _word(value):
            return _word(value)
    match = CGROUPS.search(_text(proc + "/1/cgroup"))
    return match.group(match.lastindex or 0).replace("kubepods", "kubernetes") if match else None


def _word(text: str) -> str:
    """The name of a manager: one word, whatever somebody wrote into the file."""
    match = re.match(r"[A-Za-z0-9._-]{1,40}\Z", text.strip())
    return match.group(0) if match else ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read(65536)
    except OSError:
        return ""
