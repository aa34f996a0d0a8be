# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the check of an inventory costs beside ``ansible.builtin.ping`` over the same lab hosts with the same forks.

Measured in turns, so that what else runs on the machine hits all of them alike. The processor time of the controller
and of the hosts is told as well, because it depends less on the neighbours than the time on the clock.
Needs root, as the lab does. The lab is removed whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import typing as t

HERE = pathlib.Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(REPO / "tests" / "lab"))

from fleet import Fleet  # noqa: E402
from used import guests, processor  # noqa: E402

NAME = "bench"
HOSTS = 50
ROUNDS = 5
FORKS = 10
MOST = 1.5  # times what ping takes
RELEASES = ("bookworm", "bullseye", "trixie")

Figures = t.Dict[str, float]
Measured = t.Dict[str, t.Any]


def measure(hosts: int = HOSTS, rounds: int = ROUNDS, forks: int = FORKS) -> Measured:
    """Boot the hosts, take turns, remove them; the figures are medians."""
    fleet = Fleet(NAME)
    fleet.down()
    # Without this a run that is told to end would leave its hosts behind.
    previous = signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit("told to end"))
    try:
        fleet.up(["n%02d=%s" % (number, RELEASES[number % len(RELEASES)]) for number in range(1, hosts + 1)])
        commands = commands_of(fleet, forks)
        run(fleet, [*commands["ping"][:-1], str(REPO / "tests" / "lab" / "agent.yml")])
        for command in commands.values():  # what is done once: connections, caches
            run(fleet, command)
        turns: t.Dict[str, t.List[Figures]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                turns[name].append(run(fleet, command))
    finally:
        fleet.down()
        signal.signal(signal.SIGTERM, previous)
    return result(turns, hosts, forks)


def commands_of(fleet: Fleet, forks: int) -> t.Dict[str, t.List[str]]:
    shared = ["-i", str(fleet.folder / "inventory.yml"), "-f", str(forks)]
    return {
        "ping": ["ansible-playbook", *shared, str(HERE / "ping.yml")],
        "ping_adhoc": ["ansible", *shared, "gpu_hosts", "-m", "ansible.builtin.ping"],
        "check": ["ansible-playbook", *shared, "-e", "gpuops_hosts=gpu_hosts", "gpuops.serving.gpu_clear_check"],
    }


def run(fleet: Fleet, command: t.Sequence[str]) -> Figures:
    """Seconds of one run. Every host must answer, and be clear."""
    before, hosts, began = processor(), guests(NAME), time.monotonic()
    done = subprocess.run(
        command, env=fleet.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPO
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError("%s ended with status %d:\n%s" % (" ".join(command), done.returncode, done.stdout[-3000:]))
    return {"seconds": seconds, "controller_cpu": processor() - before, "hosts_cpu": guests(NAME) - hosts}


def result(turns: t.Mapping[str, t.Sequence[Figures]], hosts: int, forks: int) -> Measured:
    names = ("seconds", "controller_cpu", "hosts_cpu")
    found: Measured = {"hosts": hosts, "forks": forks, "rounds": len(turns["check"]), "cores": os.cpu_count()}
    for name, figures in turns.items():
        found[name] = {key: round(statistics.median(one[key] for one in figures), 2) for key in names}
        found[name]["all_seconds"] = [round(one["seconds"], 2) for one in figures]
    check = found["check"]
    for name in ("ping", "ping_adhoc"):
        found["ratio_to_" + name] = round(check["seconds"] / found[name]["seconds"], 2)
    cpu = {name: found[name]["controller_cpu"] + found[name]["hosts_cpu"] for name in turns}
    found["cpu_ratio_to_ping"] = round(cpu["check"] / cpu["ping"], 2)
    aim = "the check of %d hosts takes at most %g times what a playbook with ping takes (%.2f)"
    met = found["ratio_to_ping"] <= MOST
    found["aims"] = [{"aim": aim % (hosts, MOST, found["ratio_to_ping"]), "met": met}]
    return found


def table(found: Measured) -> str:
    lines = ["%d hosts, %d forks, %d rounds, medians in seconds" % (found["hosts"], found["forks"], found["rounds"])]
    lines.append("%-22s %8s %12s %10s" % ("", "clock", "controller", "hosts"))
    for name, title in (("ping", "ping, a playbook"), ("ping_adhoc", "ping, ad hoc"), ("check", "gpu_clear_check")):
        one = found[name]
        lines.append("%-22s %8.2f %12.2f %10.2f" % (title, one["seconds"], one["controller_cpu"], one["hosts_cpu"]))
    lines.append(
        "beside ping: %.2f (ad hoc %.2f), in processor time %.2f"
        % (found["ratio_to_ping"], found["ratio_to_ping_adhoc"], found["cpu_ratio_to_ping"])
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the check of an inventory beside ping.")
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--forks", type=int, default=FORKS)
    options = parser.parse_args()
    found = measure(options.hosts, options.rounds, options.forks)
    print(json.dumps(found, indent=2))
    return 0 if all(aim["met"] for aim in found["aims"]) else 1


if __name__ == "__main__":
    sys.exit(main())
