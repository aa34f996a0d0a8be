# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A unit's control group as the kernel keeps it: who is in it, and how to end those who fork faster than one can look.

A pass over /proc takes a while, in which a process may hand on to a child and end. The group's own list is complete.
"""

from __future__ import annotations

import contextlib
import os
from typing import Iterator

from ._deadline import SYSTEM_CLOCK, Clock, Deadline

__all__ = ["Group"]

# Where the hierarchy that systemd tracks units in is mounted: unified, hybrid, legacy.
MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")
MOST_FOLDERS = 2000
FREEZING = 0.5  # seconds that the kernel may take; what it cannot freeze in time is killed all the same


class Group:
    """One control group and those below it."""

    def __init__(self, path: str, mounts: tuple[str, ...] = MOUNTS) -> None:
        self.path, self.folder = path, ""
        if path.strip("/") and ".." not in path.split("/"):
            for mount in mounts:
                folder = os.path.join(mount, path.lstrip("/"))
                if os.path.exists(os.path.join(folder, "cgroup.procs")):
                    self.folder = folder
                    break

    def pids(self) -> set[int]:
        """Who is in it, or below it, at this moment. A threaded group names its processes only above it."""
        found: set[int] = set()
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError):
                with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as stream:
                    found.update(int(line) for line in stream)
        return found - {0}

    def _folders(self) -> Iterator[str]:
        waiting, seen = [self.folder] if self.folder else [], 0
        while waiting and seen < MOST_FOLDERS:
            folder = waiting.pop()
            seen += 1
            yield folder
            with contextlib.suppress(OSError):
                with os.scandir(folder) as entries:
                    waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]

    def kill(self) -> bool:
        """Have the kernel kill everything in it in one step; False where it cannot (before Linux 5.14, or legacy)."""
        return self._write("cgroup.kill", "1")

    @contextlib.contextmanager
    def frozen(self, clock: Clock = SYSTEM_CLOCK) -> Iterator[bool]:
        """Nobody in it runs meanwhile, nor forks; says whether that worked (not before Linux 5.2, nor on legacy)."""
        if not self._write("cgroup.freeze", "1"):
            yield False
            return
        try:
            end = Deadline(FREEZING, clock)
            while not self._is_frozen() and not end.expired:
                end.sleep(0.01)
            yield True
        finally:
            self.thaw()

    def thaw(self) -> None:
        """Let everything in it run, so that it can act on a signal."""
        self._write("cgroup.freeze", "0")

    @property
    def paused(self) -> bool:
        """Whether somebody has frozen it, or one above it."""
        try:
            with open(os.path.join(self.folder, "cgroup.events"), encoding="ascii") as stream:
                return bool(self.folder) and "frozen 1" in stream.read()
        except OSError:
            return False

    def _is_frozen(self) -> bool:
        try:
            with open(os.path.join(self.folder, "cgroup.events"), encoding="ascii") as stream:
                return "frozen 1" in stream.read()
        except OSError:
            return True  # it is gone, with all that was in it

    def _write(self, name: str, text: str) -> bool:
        if not self.folder:
            return False
        try:
            # Never created: on another file system there would be a file of that name afterwards.
            fd = os.open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(fd, text.encode("ascii"))
        except OSError:
            return False
        finally:
            os.close(fd)
        return True
