# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The randomised campaign of process_tree_stop at its large size: who is owned ends, nobody else is touched, in time.

The seeds are new in each run; a failure prints its own and the command that runs that very tree again.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import typing as t

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent / "campaign" / "campaign.py"
PLAIN = int(os.environ.get("GPUOPS_CAMPAIGN_PLAIN", "4000"))
UNITS = int(os.environ.get("GPUOPS_CAMPAIGN_UNITS", "300"))  # on each host
HOSTS = {"old": "bullseye", "mid": "bookworm", "new": "trixie", "legacy": "bullseye,legacy=1"}
WORKERS = 10
LANES = 4
PROGRESS = 20.0

Measured = t.Dict[str, t.Any]


def measure() -> Measured:
    # By its path: this file has the same name.
    spec = importlib.util.spec_from_file_location("process_campaign", ROOM)
    assert spec is not None and spec.loader is not None
    room = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = room
    spec.loader.exec_module(room)
    first = 10**6 + int.from_bytes(os.urandom(4), "big") % 10**8
    print("seeds from %d on" % first, flush=True)
    tally = room.Tally(PROGRESS)
    with room.library() as folder:
        with room.lab("bench-campaign", HOSTS) as hosts:
            room.run_units(first, UNITS, tally.take, folder, hosts, LANES, HOSTS)
        room.run_plain(range(first, first + PLAIN), tally.take, folder, WORKERS)
    found: Measured = dict(tally.result(), first_seed=first)
    problems = found["problems"]
    other = sum(problems.values()) - sum(problems[kind] for kind in room.EXPECTED)
    found["aims"] = [
        {"aim": "at least 5000 trees", "met": found["trees"] >= 5000},
        {"aim": "at least 1000 of them systemd units", "met": found["kinds"].get("unit", 0) >= 1000},
        {"aim": "no process killed or signalled that is not owned", "met": problems["wrong"] == 0},
        {"aim": "no owned process survives", "met": problems["survivor"] == 0},
        {"aim": "each stop within grace + grace + kill_grace + 5 s", "met": problems["late"] == 0},
        {
            "aim": "every verdict, plan and name as the description has it, every tree built as described",
            "met": not other,
        },
    ]
    return found


def table(result: Measured) -> str:
    problems = result["problems"]
    rows = [
        ("trees", result["trees"]),
        ("of them systemd units", result["kinds"].get("unit", 0)),
        ("processes grown", result["processes"]),
        ("processes ended", result["ended"]),
        ("numbers given to somebody else meanwhile", result["numbers_given_again"]),
        ("wrong kills or signals", problems["wrong"]),
        ("survivors", problems["survivor"]),
        ("stops beyond their time", problems["late"]),
        ("other differences", sum(problems.values()) - problems["wrong"] - problems["survivor"] - problems["late"]),
        ("slowest stop, seconds", result["slowest"]),
        ("seconds in all", result["seconds"]),
    ]
    return "\n".join("%-42s %10s" % row for row in rows)
