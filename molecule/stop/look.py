# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Write to /var/tmp/MOMENT.json who of those that the first look saw is alive, and which signals each heard."""

from __future__ import annotations

import json
import os
import sys

NOTE = "/var/tmp/noted.json"
FOLDERS = ("/var/tmp/engine", "/var/tmp/bystanders")


def note() -> list:
    found = []
    for folder in FOLDERS:
        for name in sorted(os.listdir(folder)):
            if "." not in name:
                with open(os.path.join(folder, name), encoding="ascii") as stream:
                    found.append([folder, name, *map(int, stream.read().split())])
    return found


def alive(pid: int, start: int) -> bool:
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == start


def main() -> None:
    if not os.path.exists(NOTE):
        with open(NOTE, "w", encoding="ascii") as stream:
            json.dump(note(), stream)
    with open(NOTE, encoding="ascii") as stream:
        refs = json.load(stream)
    found = {}
    for folder, name, pid, start in refs:
        with open(os.path.join(folder, name + ".signals"), encoding="ascii") as stream:
            heard = stream.read().split()
        found[name] = {"pid": pid, "alive": alive(pid, start), "heard": heard if folder == FOLDERS[1] else []}
    with open("/var/tmp/%s.json" % sys.argv[1], "w", encoding="ascii") as stream:
        json.dump(found, stream)


if __name__ == "__main__":
    main()
