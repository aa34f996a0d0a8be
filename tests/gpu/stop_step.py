# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""process_tree_stop on a holder of our own, by its pid and create time, where it can reach nothing else.

First in a process id namespace of its own; where the driver does not list the holder there, directly. In both a look in
check mode comes first, and nothing is stopped unless it names the holder and its child alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import typing as t

from outside import HERE, Facts, Undone, end_by_pid, start_ticks
from steps import Bench, to_allocation

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
COLLECTS_ORPHANS = ("sh", "-c", '"$@"; exit $?', "sh")  # as process 1
PR_SET_PDEATHSIG = 1
LIMITS = {"grace": 3.0, "kill_grace": 5.0, "timeout": 20.0}
PROCESS = ("pid", "name", "found_by", "role", "signals", "outcome", "seconds")


def stop_tree(bench: Bench) -> None:
    found = _confined(bench)
    note = ""
    if not found.get("listed"):
        note = "not in a process id namespace: %s" % found.get("why", "the driver does not list the holder there")
        found = dict(stop_here(bench, must_be_listed=False), namespace=found)
    bench.findings.data["process_tree_stop"] = found
    if "why" in found:
        bench.findings.check("stop_ends_the_tree", False, None, found["why"])
        return
    child = [process for process in found["processes"] if process["pid"] == found["child"]]
    passed = found["verdict"] == "stopped" and found["gone"] and bool(child) and "KILL" in child[0]["signals"]
    signals = [process["signals"] for process in found["processes"]]
    figure = {"verdict": found["verdict"], "gone": found["gone"], "signals": signals}
    bench.findings.check("stop_ends_the_tree", passed, figure, note or "in a process id namespace of its own")
    after = found["after"]
    bench.findings.check("clear_after_stop", after["verdict"] == "clear", after["verdict"], after["detail"])


def _confined(bench: Bench) -> Facts:
    """The step in a namespace, or why it cannot be taken there."""
    if shutil.which(NAMESPACE[0]) is None:
        return {"listed": False, "why": "unshare is not installed"}
    limit = bench.clock.at_most(100.0)
    script = os.path.join(HERE, "test_gpu.py")
    order = {"gpu": bench.gpu, "seconds": limit, "patience": bench.patience}
    words = [*NAMESPACE, *COLLECTS_ORPHANS, sys.executable, script, "--inside", json.dumps(order)]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"listed": False, "why": "no answer within %g s" % limit}
    finally:
        if process.poll() is None:
            process.kill()  # and --kill-child ends the namespace with all that is in it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    try:
        return t.cast(Facts, json.loads(out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        lines = err.strip().splitlines()
        return {"listed": False, "why": lines[-1] if lines else "no answer"}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_here(bench: Bench, must_be_listed: bool) -> Facts:
    """Start a holder, find it with gpu_clear, and stop it by the pid and create time that gpu_clear tells."""
    way = bench.collection.ways[0]
    with bench.holder("--child") as holder:
        child = to_allocation(holder)["child"]
        start = start_ticks(child)
        try:
            busy = bench.clear(way)
            ours = [entry for entry in busy["holders"] if entry["pid"] == holder.pid and entry["create_time"]]
            listed = bool(ours) and "driver" in ours[0]["source"]
            seen = {"listed": listed, "holder": holder.pid, "child": child, "way": way, "busy": busy}
            if must_be_listed and not listed:
                pids = sorted(entry["pid"] for entry in busy["holders"])
                return dict(seen, why="the driver lists the pids %s there, the holder is %d" % (pids, holder.pid))
            if not ours:
                raise Undone("gpu_clear does not name the holder %d: %s" % (holder.pid, busy["detail"]))
            who = {"pid": holder.pid, "create_time": ours[0]["create_time"]}
            plan = bench.collection.ask(way, "process_tree_stop", check_mode=True, **who, **LIMITS)
            strangers = {process["pid"] for process in plan.get("processes", [])} - {holder.pid, child}
            if plan.get("verdict") != "stopped" or strangers:
                why = "it would also stop the processes %s" % sorted(strangers) if strangers else plan.get("msg")
                return dict(seen, why="process_tree_stop was not run: %s" % why)
            done = bench.collection.ask(way, "process_tree_stop", **who, **LIMITS)
            gone = not start_ticks(holder.pid) and start_ticks(child) != start
            after = bench.clear_again(way)
        finally:
            end_by_pid(child, start)
    processes = [{key: process.get(key) for key in PROCESS} for process in done.get("processes", [])]
    told = {"verdict": done.get("verdict"), "msg": done.get("msg"), "elapsed": done.get("elapsed")}
    return dict(seen, **told, processes=processes, gone=gone, after=after)
