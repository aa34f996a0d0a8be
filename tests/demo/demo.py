#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The demo: three real systemd hosts behind a real gateway, restarted one after another under client traffic.

``demo.py`` runs it, ``demo.py down`` removes its lab. It exits non-zero when a client request failed, when a process
of before lives on, or when a host does not serve in the end.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import typing as t
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from fleet import GPU_HOSTS, REPO, UNITS, Fleet, FleetError, Traffic

sys.path.insert(0, str(REPO / ".cache" / "collections"))

from ansible_collections.gpuops.serving.plugins.module_utils._report import table

BUILD = REPO / "build" / "demo"
LEAST_IN_FLIGHT = 20


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def naive_restart(fleet: Fleet) -> t.Dict[str, t.Any]:
    """What ``systemctl restart`` does to the hand-written unit of gpu3."""
    before = fleet.processes("gpu3")
    for row in before:
        print(f"    pid {row['pid']:<6} {row['name']:<16} {'holds the GPU' if row['gpu'] else ''}")
    fleet.run("gpu3", "systemctl restart qwen-legacy.service", checked=False)
    end = time.monotonic() + 20
    while int(fleet.unit("gpu3")["NRestarts"]) < 1 and time.monotonic() < end:
        time.sleep(0.2)
    orphans = [row for row in fleet.processes("gpu3") if row["gpu"] and row in before]
    log = fleet.run("gpu3", "journalctl -u qwen-legacy.service -o cat --no-pager | grep -a OutOfMemory | tail -n 1")
    if not orphans or not log:
        raise FleetError("the hand-written unit left no orphan behind: there is nothing to show")
    for row in orphans:
        print(f"    still there: pid {row['pid']} {row['name']}, parent {row['parent']}, holds the GPU")
    print(f"    the next start says: {log}")
    reading = fleet.module("gpu3", "gpu_clear", report_only=True, confirmations=1)
    print(f"    gpu_clear says: {reading['verdict']}: {reading['msg']}")
    named = [holder for gpu in reading["gpus"] for holder in gpu["holders"]]
    if {row["pid"] for row in orphans} - {holder["pid"] for holder in named}:
        raise FleetError(f"gpu_clear does not name the orphan: {named}")
    return {"orphans": orphans, "next_start": log, "gpu_clear": named}


# Tasks that say nothing to a spectator.
BACKSTAGE = (
    *(
        "Validating",
        "Begin",
        "Go through",
        "Enter the",
        "Do the phase",
        "See that",
        "Name the run",
        "Keep the services",
    ),
    *("Look for", "Read the", "Group the", "Refuse", "Restart the service cleanly", "Report", "Write the report"),
    *("Show the table", "Note that", "Fail a host", "Name what", "Begin no batch", "Plan the", "See to"),
)


def play(fleet: Fleet, playbook: str, log: Path, *arguments: str) -> int:
    """Run a playbook: everything it prints goes into a log, what happens on the hosts is shown."""
    argv = fleet.ansible_argv(playbook, *arguments)
    print(f"    (the whole output: {log.relative_to(REPO)})", flush=True)
    task, telling = "", False
    with open(log, "w", encoding="utf-8") as whole, subprocess.Popen(
        argv, env=fleet.environment(), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            whole.write(line)
            header = re.match(r"TASK \[(?:[\w.]+ : )?(.*)\]", line)
            result = re.match(r"(ok|changed|failed|fatal|unreachable): \[(\w+)", line)
            if header:
                task, telling = header.group(1), False
            elif result and result.group(1) in ("failed", "fatal", "unreachable"):
                print(f"    {result.group(2)}: FAILED: {task}", flush=True)
                telling = True
            elif result and task.startswith("Name what holds"):
                telling = True
            elif result and not task.startswith(BACKSTAGE):
                print(f"    {result.group(2)}: {task}", flush=True)
            elif telling and line.strip() not in ("", "msg:"):
                print("        " + line.strip().lstrip("- ").strip("'"), flush=True)
    return process.returncode


def verify(fleet: Fleet, before: t.Dict[str, t.Any], units: t.Dict[str, t.Any]) -> t.List[str]:
    """What is wrong after the rollout; nothing when all is well."""
    wrong = []
    for host in GPU_HOSTS:
        now = fleet.processes(host)
        old = {(row["pid"], row["start"]) for row in before[host]}
        wrong += [
            f"{host}: pid {row['pid']} {row['name']} survived" for row in now if (row["pid"], row["start"]) in old
        ]
        if not any(row["gpu"] for row in now):
            wrong.append(f"{host}: nothing holds the GPU")
        unit = fleet.unit(host)
        if unit["ActiveState"] != "active":
            wrong.append(f"{host}: {UNITS[host]} is {unit['ActiveState']}")
        if unit["InvocationID"] == units[host]["InvocationID"]:
            wrong.append(f"{host}: {UNITS[host]} was not restarted")
        try:
            if fleet.one_token(f"http://{fleet.address(host)}:8080") < 1:
                wrong.append(f"{host}: no token")
        except FleetError as error:
            wrong.append(str(error))
    states = fleet.backends()
    wrong += [f"{host}: the gateway sees it {states.get(host)}" for host in GPU_HOSTS if states.get(host) != "UP"]
    if fleet.one_token(fleet.gateway_url()) < 1:
        wrong.append("no token through the gateway")
    return wrong


def run() -> int:
    began = time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    fleet = Fleet("demo")
    say("Booting three GPU hosts and a gateway")
    if fleet.up_or_reuse():
        print("    they are up already: make demo-down removes them")
    say("Deploying: gpu1 and gpu2 by gpuops.serving.deploy, gpu3 keeps its hand-written unit with KillMode=process")
    fleet.install_legacy()
    # A demo that was ended in the middle of its deploy has units that were written and not started.
    if play(fleet, "deploy", BUILD / "deploy.log", "-e", "service=qwen", "-e", "inference_service_start=always"):
        raise FleetError(f"deploy failed: see {BUILD / 'deploy.log'}")
    fleet.wait_backends(dict.fromkeys(GPU_HOSTS, "UP"), timeout=120)

    say("systemctl restart of the hand-written unit on gpu3")
    naive = naive_restart(fleet)
    fleet.wait_backends({"gpu3": "DOWN"})

    before = {host: fleet.processes(host) for host in GPU_HOSTS}
    units = {host: fleet.unit(host) for host in GPU_HOSTS}
    say("Client traffic through the gateway: no client retries, no gateway retries, no redispatch")
    traffic = Traffic(fleet, BUILD / "traffic.json")
    try:
        traffic.wait_in_flight(LEAST_IN_FLIGHT, streams=3)
        say("ansible-playbook gpuops.serving.rolling_restart -e service=qwen")
        rollout_began = time.monotonic()
        arguments = ("-e", "service=qwen", "-e", f"clean_restart_report={BUILD / 'rollout.json'}")
        code = play(fleet, "rolling_restart", BUILD / "rolling_restart.log", *arguments)
        rollout_seconds = time.monotonic() - rollout_began
        summary = traffic.stop()
    finally:
        traffic.kill()

    say("Verifying")
    wrong = verify(fleet, before, units)
    if code:
        wrong.append(f"rolling_restart exited {code}")
    if summary["failed"]:
        wrong.append(f"{summary['failed']} client requests failed: see {traffic.report}")
    if summary["least_in_flight"] < LEAST_IN_FLIGHT:
        wrong.append(f"only {summary['least_in_flight']} requests were in flight at one time")
    report = json.loads((BUILD / "rollout.json").read_text(encoding="utf-8"))
    report.update(
        naive_restart=naive,
        traffic=summary,
        rollout_seconds=round(rollout_seconds, 1),
        demo_seconds=round(time.monotonic() - began, 1),
        wrong=wrong,
    )
    (BUILD / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for orphan in naive["orphans"]:
        print(f"    gpu3: pid {orphan['pid']} {orphan['name']}, which systemctl restart had left behind, is gone")
    for host in GPU_HOSTS:
        for row in fleet.processes(host):
            print(f"    {host}: pid {row['pid']} {row['name']} serves{', holds the GPU' if row['gpu'] else ''}")
    streams = f"{summary['streams']} streams of up to {summary['longest_stream']:.1f} s"
    print(f"    {streams}; never fewer than {summary['least_in_flight']} requests in flight; seconds by phase:")
    for line in table(report):
        print("    " + line)
    print(f"    report: {(BUILD / 'report.json').relative_to(REPO)}; hosts: ssh -F build/lab/demo/ssh_config gpu3")
    print("    make demo-down removes the hosts")
    for line in wrong:
        print(f"demo: {line}", file=sys.stderr)
    restarted = sum(host["outcome"] == "ok" for host in report["hosts"])
    word = "failed" if wrong else "ok"
    print(f"demo: {word}, {restarted} hosts restarted, {summary['requests']} requests, {summary['failed']} failed")
    return 1 if wrong else 0


def main() -> int:
    try:
        if sys.argv[1:] == ["down"]:
            Fleet("demo").down()
            return 0
        return run()
    except FleetError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
