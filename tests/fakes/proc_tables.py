# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A made-up process table: file tables and mappings, as links and texts."""

from __future__ import annotations

import pathlib

MAP = "7f0000000000-7f0000001000 %s 00000000 00:05 %d %s\n"


class Proc:
    """Call it to add a process with these open files and mappings."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.root = folder, str(folder)
        self(1)

    def __call__(self, pid, *targets, thread=None, maps="", mapped=None):
        folder = self.folder / str(pid)
        (folder / "task" / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
        (folder / "fd").mkdir(exist_ok=True)
        (folder / "stat").write_text("%d (x) S 1%s" % (pid, " 0" * 30))
        if thread is not None:
            folder = folder / "task" / str(thread)
            (folder / "fd").mkdir(parents=True)
        for number, target in enumerate(targets):
            (folder / "fd" / str(number)).symlink_to(target)
        (folder / "maps").write_text(maps)
        for name, target in (mapped or {}).items():
            (folder / "map_files").mkdir(exist_ok=True)
            (folder / "map_files" / name).symlink_to(target)
