# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Write the life of a unit and the processes that serve it to /var/tmp/before.json."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys


def serving(unit: str) -> list:
    """(pid, start ticks) of what is in the unit's cgroup or has a GPU node open."""
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(folder + "/stat", encoding="utf-8", errors="replace") as handle:
                fields = handle.read().rpartition(")")[2].split()
            with open(folder + "/cgroup", encoding="utf-8") as handle:
                inside = "/" + unit in handle.read()
            nodes = [os.readlink(entry) for entry in glob.glob(folder + "/fd/*") if os.path.islink(entry)]
        except OSError:
            continue
        if fields[0] != "Z" and (inside or any(node.startswith("/dev/nvidia") for node in nodes)):
            found.append([int(folder[6:]), int(fields[19])])
    return sorted(found)


def main() -> None:
    unit = sys.argv[1]
    life = subprocess.check_output(["systemctl", "show", "-p", "InvocationID", "--value", unit], text=True).strip()
    with open("/var/tmp/before.json", "w", encoding="utf-8") as handle:
        json.dump({"unit": unit, "invocation": life, "processes": serving(unit)}, handle)


if __name__ == "__main__":
    main()
