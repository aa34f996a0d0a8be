#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Try the collection's rules on a real NVIDIA GPU, and write what was found as JSON.

Run it as root; `make test-gpu` does. It needs neither a toolkit nor pytest, changes no setting, and ends only processes
that it started. Exit status: 0 all as the rules say (or no GPU here), 1 something differs, 2 it could not be found out.
docs/real-gpu-findings.md describes the document.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import sys
import typing as t

from findings import TOLERANCE, Findings
from outside import REPOSITORY, Child, Clock, Collection, Facts, Undone
from steps import Bench, clear_and_busy, inherited, look_at_stages, release, used
from stop_step import stop_here, stop_tree

DEFAULT_OUTPUT = os.path.join(REPOSITORY, "build", "gpu-findings.json")
VENV = os.path.join(REPOSITORY, ".cache", "venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")


class Skipped(Exception):
    """There is no GPU to try anything on."""


def need_binding() -> None:
    """Go on with an interpreter that has nvidia-ml-py: this one, else that of the repository's own environment."""
    if importlib.util.find_spec("pynvml") is not None:
        return
    if os.path.exists(VENV_PYTHON) and os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        os.execv(VENV_PYTHON, [VENV_PYTHON, os.path.abspath(__file__), *sys.argv[1:]])
    raise Skipped('the Python distribution "nvidia-ml-py" is not installed for %s' % sys.executable)


def ask_driver(clock: Clock) -> Facts:
    """What the driver says of the machine, or why there is nothing to ask."""
    with Child(clock, "nvml_client.py", "facts") as client:
        found = client.line(120)
    reason = found.get("reason")
    if reason == "binding":
        raise Skipped('the Python distribution "nvidia-ml-py" cannot be imported: %s' % found["error"])
    if reason == "library":
        raise Skipped("there is no NVIDIA driver library (libnvidia-ml.so.1) on this machine")
    if reason == "driver" and not os.path.exists("/proc/driver/nvidia"):
        raise Skipped("no NVIDIA driver is loaded on this machine")
    if reason:
        raise Undone("the driver does not answer: %s" % found["error"])
    if not found["gpus"]:
        raise Skipped("the NVIDIA driver knows no device on this machine")
    if found["cuda"]:
        raise Skipped("the other driver library cannot be loaded: %s" % found["cuda"])
    if os.geteuid() != 0:
        raise Undone("the open files of all processes must be seen: run it as root")
    return found


def machine(found: Facts) -> Facts:
    with open("/proc/self/status", encoding="ascii", errors="replace") as handle:
        depth = next((len(line.split()) - 1 for line in handle if line.startswith("NSpid:")), None)
    module = None
    with contextlib.suppress(OSError):
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as handle:
            module = handle.readline().strip()
    keys = ("driver_version", "nvml_version", "binding", "init_seconds")
    return dict(
        {key: found[key] for key in keys},
        kernel=platform.release(),
        architecture=platform.machine(),
        kernel_module=module,
        python=platform.python_version(),
        process_id_namespaces=depth,
    )


def choose(bench: Bench, gpus: t.List[Facts], wanted: t.Optional[int]) -> None:
    """Judge every device as it is, check what the idle ones show, and take the first that is clear."""
    findings, way = bench.findings, bench.collection.ways[0]
    idle: t.Dict[str, t.Any] = {}
    for gpu in gpus:
        answer = bench.clear_of(way, gpu["index"])
        gpu["gpu_clear"], gpu["clear_at_start"] = answer, answer["verdict"] == "clear"
        if not answer["holders"] and not gpu["processes"] and not gpu["partitioned"]:
            idle[str(gpu["index"])] = used(gpu["memory"])
    known = [figure for figure in idle.values() if figure is not None]
    if known:
        findings.check("idle_memory", max(known) <= TOLERANCE, idle, "MiB by device")
    else:
        findings.check("idle_memory", None, idle, "no device is idle and tells its memory")
    two = [gpu["memory"]["used_v2"] is not None for gpu in gpus if gpu["memory"]["total"] is not None]
    findings.check("memory_version", all(two) if two else None, two, "" if two else "no device tells its memory")
    for gpu in gpus:
        if gpu["clear_at_start"] and not gpu["partitioned"] and gpu["pci"] and wanted in (None, gpu["index"]):
            bench.gpu = gpu
            findings.data["device"] = gpu["index"]
            return
    asked = [gpu for gpu in gpus if wanted in (None, gpu["index"])]
    if not asked:
        raise Undone("the driver knows no device %s" % wanted)
    why = [
        "GPU %d is %s"
        % (
            gpu["index"],
            "partitioned (MIG), which is left alone"
            if gpu["partitioned"]
            else "%s: %s" % (gpu["gpu_clear"]["verdict"], gpu["gpu_clear"]["detail"]),
        )
        for gpu in asked
    ]
    raise Undone("there is no clear device to work on: %s" % "; ".join(why))


def work(options: argparse.Namespace, clock: Clock, findings: Findings) -> None:
    found = ask_driver(clock)
    findings.data["machine"], findings.data["gpus"] = machine(found), found["gpus"]
    collection = Collection(clock)
    try:
        bench = Bench(clock, collection, findings, options.patience)
        findings.data["ways"] = collection.ways
        choose(bench, found["gpus"], options.device)
        steps: t.List[t.Callable[[], None]] = [
            lambda: look_at_stages(bench),
            lambda: clear_and_busy(bench),
            lambda: inherited(bench),
            lambda: stop_tree(bench),
            lambda: release(bench),
        ]
        for step in steps:
            try:
                step()
            except Undone as error:
                findings.not_done.append(str(error))
    finally:
        collection.close()


def inside(order: Facts) -> int:
    """The stop in a process id namespace: what came of it, as one line of JSON."""
    clock = Clock(order["seconds"])
    collection = Collection(clock)
    bench = Bench(clock, collection, Findings(), order["patience"])
    bench.gpu = order["gpu"]
    try:
        answer = stop_here(bench, must_be_listed=True)
    except Undone as error:
        answer = {"listed": False, "why": str(error)}
    finally:
        collection.close()
    print(json.dumps(answer))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=DEFAULT_OUTPUT, help="where to write (default: build/gpu-findings.json)")
    parser.add_argument("--device", type=int, help="index of the device to work on (default: the first clear one)")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for memory to come back (default: 20)")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for all of it (default: 280)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.inside:
        return inside(json.loads(options.inside))
    clock, findings = Clock(options.limit), Findings()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # so that our processes end with us
    try:
        need_binding()
        work(options, clock, findings)
    except Skipped as error:
        print("skipped: %s" % error)
        return 0
    except Undone as error:
        findings.not_done.append(str(error))
    finally:
        for child in list(Child.living):
            child.end()
    findings.write(options.output, clock.elapsed)
    for rule in findings.failed:
        print('differs from the rule "%s": %s' % (rule, next(c["says"] for c in findings.checks if c["rule"] == rule)))
    for text in findings.not_done:
        print("could not be found out: %s" % text)
    print("%d checks in %.0f s, written to %s" % (len(findings.checks), clock.elapsed, options.output))
    return findings.status


if __name__ == "__main__":
    sys.exit(main())
