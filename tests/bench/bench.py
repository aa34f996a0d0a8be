# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the checks cost: ``bench.py [PART...]`` measures the parts that are named, or all.

A part is a file beside this one with ``measure()``, which returns what is written as JSON to build/bench/PART.json and
holds ``aims``, and ``table(result)``, which says it to people. An aim that is missed makes the exit status 1; one whose
``met`` is None could not be judged here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "bench"
PARTS = {
    "reading": "one look at the GPUs of a host, beside many unrelated processes",
    "inventory": "the check of all hosts of an inventory",
    "stopping": "a stop beside many unrelated processes: how soon it answers, what it uses while it waits",
    "waiting": "a wait for a model: how soon it says what has become of the start, what it costs while it lasts",
    "campaign": "random forests of processes and real units: what is owned ends, and nothing else is touched",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the checks cost, as ratios in one run.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error("there is no part %s: choose from %s" % (", ".join(unknown), ", ".join(PARTS)))
    sys.path.insert(0, str(HERE))
    BUILD.mkdir(parents=True, exist_ok=True)
    missed = 0
    for part in parts:
        print("==> %s: %s" % (part, PARTS[part]), flush=True)
        room = importlib.import_module(part)
        result = room.measure()
        (BUILD / (part + ".json")).write_text(json.dumps(result, indent=2) + "\n")
        print(room.table(result))
        for aim in result["aims"]:
            missed += aim["met"] is False
            word = {True: "met", False: "MISSED", None: "not judged, this machine is busy"}[aim["met"]]
            print("%s: %s" % (word, aim["aim"]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
