# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cgroup per host: what holds its processes together, and what ends them without naming a single pid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from .common import LabError

_TOP = "gpuops-lab"


def unified_root() -> Path:
    """Return where the version 2 hierarchy is mounted."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[2] == "cgroup2":
            return Path(fields[1])
    raise LabError("the lab needs control groups version 2: mount cgroup2 on '/sys/fs/cgroup'.")


def _roots() -> list[Path]:
    """Return the hierarchies a host gets a group in: version 2, and systemd's own where it is separate."""
    named = Path("/sys/fs/cgroup/systemd")
    return [unified_root()] + ([named] if (named / "cgroup.procs").exists() else [])


def groups(lab: str, host: str | None = None) -> list[Path]:
    """Return the groups of a host, or of the whole lab."""
    return [root / _TOP / lab / host if host else root / _TOP / lab for root in _roots()]


def create(lab: str, host: str, part: str) -> list[Path]:
    """Create one part of a host's groups and return the files that a process is moved in by."""
    parts = [group / part for group in groups(lab, host)]
    for folder in parts:
        folder.mkdir(parents=True, exist_ok=True)
    return [folder / "cgroup.procs" for folder in parts]


def members(lab: str, host: str) -> set[int]:
    """Return the pids in the groups of a host."""
    found: set[int] = set()
    for group in groups(lab, host):
        for folder in _below(group):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (folder / "cgroup.procs").read_text(encoding="utf-8").split())
    return found - {0}


def _below(group: Path) -> list[Path]:
    """Return the group and all below it, the deepest first; what the host removes meanwhile is left out."""
    return [Path(folder) for folder, _folders, _files in os.walk(group, topdown=False)]


def kill(lab: str, host: str, timeout: float = 15.0) -> None:
    """End every process of a host, and wait until none is left."""
    deadline = time.monotonic() + timeout
    while members(lab, host):
        for group in groups(lab, host):
            with contextlib.suppress(OSError):
                (group / "cgroup.kill").write_text("1", encoding="utf-8")
        for pid in members(lab, host):
            # The pid was read from the host's own group a moment ago, which is its identity.
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if pid in members(lab, host):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        if time.monotonic() > deadline:
            raise LabError(f"host '{host}' still has processes after SIGKILL: {sorted(members(lab, host))}.")
        time.sleep(0.02)


def remove(lab: str, host: str | None = None) -> None:
    """Remove the empty groups of a host, or of the whole lab."""
    for group in groups(lab, host):
        if not group.is_dir():
            continue
        for folder in _below(group):
            _rmdir(folder)
        if host is None:
            with contextlib.suppress(OSError):
                group.parent.rmdir()  # only when no other lab is below


def _rmdir(folder: Path) -> None:
    """Remove a group; right after its last process it may be busy for a moment."""
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
    raise LabError(f"control group '{folder}' cannot be removed: something is still in it.")
