# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What was found on a real GPU, and which rules of the collection it agrees with; see docs/real-gpu-findings.md."""

from __future__ import annotations

import json
import os
import typing as t

SCHEMA = 1
TOLERANCE = 64  # MiB, the default of gpu_clear
RELEASE = 10.0  # seconds

RULES = {
    "idle_memory": "a device that nothing holds has at most %d MiB in use" % TOLERANCE,
    "memory_version": "the driver tells its own share of the memory apart (version 2)",
    "library_is_no_holder": "a client of the driver library is in no process list, and does not make a device busy",
    "context_holds_node": "a process with a context on a device has the node of that device open or mapped",
    "context_is_listed": "the driver lists a process with a context under the pid that this machine knows it by",
    "allocation_is_in_use": "what a process allocates is in the device's memory in use",
    "other_devices_stay_clear": "a process that computes on one device does not make the others busy",
    "memory_comes_back": "the memory of a killed process is back within %g s" % RELEASE,
    "list_empties": "a killed process leaves the driver's lists within %g s" % RELEASE,
    "nodes_close": "the nodes of a killed process are closed within %g s" % RELEASE,
    "clear_before": "an idle device is clear",
    "busy_by_both_sources": "a device with a holder is busy, and the holder is named by the driver and by its node",
    "clear_after": "the device is clear again after its holder",
    "inherited_nodes_are_named": "a child that keeps a dead holder's memory in use is named",
    "stop_ends_the_tree": "process_tree_stop ends the holder and its child that ignores TERM, and nothing else",
    "clear_after_stop": "the device is clear after the stop",
}


class Findings:
    """The document that the script writes."""

    def __init__(self) -> None:
        self.data: t.Dict[str, t.Any] = {"schema": SCHEMA, "machine": {}, "gpus": [], "device": None}
        self.checks: t.List[t.Dict[str, t.Any]] = []
        self.not_done: t.List[str] = []

    def check(self, rule: str, passed: t.Optional[bool], figure: t.Any, detail: str = "", via: str = "") -> None:
        """``passed`` is None where this machine cannot tell; then ``detail`` says why."""
        entry = {"rule": rule, "says": RULES[rule], "passed": passed, "figure": figure, "detail": detail}
        if via:
            entry["via"] = via
        self.checks.append(entry)
        word = "    -" if passed is None else " pass" if passed else "FAIL "
        name = "%s (%s)" % (rule, via) if via else rule
        print("%s  %s: %s%s" % (word, name, json.dumps(figure), "; " + detail if detail else ""), flush=True)

    @property
    def failed(self) -> t.List[str]:
        """The rules that do not hold here, each once."""
        return list(dict.fromkeys(entry["rule"] for entry in self.checks if entry["passed"] is False))

    @property
    def status(self) -> int:
        if self.failed:
            return 1
        return 2 if self.not_done else 0

    def write(self, path: str, seconds: float) -> None:
        document = dict(
            self.data, checks=self.checks, not_done=self.not_done, seconds=round(seconds, 1), exit=self.status
        )
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8") as handle:
            json.dump(document, handle, indent=2)
            handle.write("\n")
