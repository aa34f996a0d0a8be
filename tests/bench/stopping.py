# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a stop costs beside 2,000 unrelated processes: how soon it answers, and what it uses while it waits.

By pid in a process id namespace of its own, and as a unit on a lab host with real systemd. The moment of the last death
is told by a watcher of this bench, which waits for it on a pidfd and knows nothing of the stop.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import typing as t

HERE = pathlib.Path(__file__).resolve().parent
REPO = HERE.parents[1]
CROWD = 2000
ROUNDS = 7
LASTS = 20.0  # seconds that a process takes to end, for the processor time of the wait
LAB = "bench-stop"
HOST = "unit"

Measured = t.Dict[str, t.Any]

# Runs where it may signal: a namespace of its own, or a lab host. Its library is the folder in its first argument.
PROBE = r'''
import json, os, resource, select, signal, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
from gpuops import _selection
from gpuops._stop import Options, Stopper

SLOW = """
import os, signal, sys, time
def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(float(sys.argv[1]))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
for _ in range(6):
    if os.fork() == 0:
        break
while True:
    time.sleep(3600)
"""


def family(unit, seconds):
    """Seven processes that take so long to end, and a watcher of the last death."""
    if unit:
        with open("/run/systemd/system/bench-stop.service", "w") as stream:
            stream.write("[Service]\nExecStart=/usr/bin/python3 /run/slow.py %s\nTimeoutStopSec=90\n" % seconds)
        with open("/run/slow.py", "w") as stream:
            stream.write(SLOW)
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "start", "bench-stop"], check=True)
        shown = subprocess.run(["systemctl", "show", "-p", "MainPID", "bench-stop"], stdout=subprocess.PIPE, check=True)
        front = int(shown.stdout.decode().split("=")[1])
    else:
        # Through a shell that ends: nobody of the family may descend from this process.
        start = 'setsid "$@" >/dev/null 2>&1 & echo $!'
        argv = ["sh", "-c", start, "sh", sys.executable, "-c", SLOW, str(seconds)]
        front = int(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    while True:
        time.sleep(0.05)
        with open("/proc/%d/task/%d/children" % (front, front)) as stream:
            children = [int(word) for word in stream.read().split()]
        if len(children) == 6:
            return front, [front, *children]


def watch(pids, ends):
    poller = select.poll()
    for pid in pids:
        poller.register(os.pidfd_open(pid), select.POLLIN)
    left = len(pids)
    while left:
        for fd, _event in poller.poll():
            left -= 1
            poller.unregister(fd)
            os.close(fd)
    ends.append(time.monotonic())


def used():
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def once(unit, seconds):
    front, pids = family(unit, seconds)
    if unit:
        selection = _selection.by_unit(None)
        stopper = Stopper("it", selection, Options(grace=60, order="all"), unit="bench-stop.service")
    else:
        stopper = Stopper("it", _selection.by_pid(front, None, None), Options(grace=60, order="all"))
    ends = []
    thread = threading.Thread(target=watch, args=(pids, ends))
    thread.start()
    spent, began = used(), time.monotonic()
    result = stopper.run()
    answered = time.monotonic()
    thread.join(5)
    if result["verdict"] != "stopped" or len(result["processes"]) != 7:
        raise SystemExit("the stop went wrong: %s" % result["msg"])
    return {"after": answered - ends[0], "took": answered - began, "processor": used() - spent}


unit, rounds, lasts = sys.argv[2] == "unit", int(sys.argv[3]), float(sys.argv[4])
once(unit, 0.5)
answers = [once(unit, 1.0 + 0.13 * number) for number in range(rounds)]
found = sum(entry.isdigit() for entry in os.listdir("/proc"))
print(json.dumps({"answers": answers, "wait": once(unit, lasts), "processes": found}))
'''


def _library(folder: pathlib.Path) -> None:
    """The library as the host agent has it: a package of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "gpuops"
    if not link.is_symlink():
        link.symlink_to(REPO / "plugins" / "module_utils")


def _judged(where: str, text: str) -> Measured:
    found = json.loads(text.strip().splitlines()[-1])
    after = [round(answer["after"], 3) for answer in found["answers"]]
    wait = found["wait"]
    return {
        "where": where,
        "processes": found["processes"],
        "answers": after,
        "median": round(statistics.median(after), 3),
        "worst": max(after),
        "waited": round(wait["took"], 1),
        "processor": round(wait["processor"], 3),
        "share": round(wait["processor"] / wait["took"], 4),
    }


def by_pid(folder: pathlib.Path, crowd: int, rounds: int, lasts: float) -> Measured:
    """In a process id namespace of its own: no signal from there can reach this machine."""
    _library(folder)
    script = (
        "coproc CROWD { exec python3 %s/crowd.py %d; }; read -r ready <&${CROWD[0]}; "
        'python3 -c "$PROBE" %s pid %d %s; status=$?; exec {CROWD[1]}>&-; wait; exit $status'
    ) % (HERE, crowd, folder, rounds, lasts)
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    done = subprocess.run(
        namespace, env=dict(os.environ, PROBE=PROBE), capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise RuntimeError("the stop by pid was not measured: %s" % done.stderr[-500:])
    return _judged("a tree by pid", done.stdout)


def by_unit(crowd: int, rounds: int, lasts: float) -> Measured:
    """On a lab host with its own systemd."""
    lab = [sys.executable, str(REPO / "tests" / "lab" / "lab.py")]
    subprocess.run([*lab, "up", "--name", LAB, "--host", HOST + "=bookworm"], check=True, capture_output=True)
    try:
        ssh = ["ssh", "-F", str(REPO / "build" / "lab" / LAB / "ssh_config"), HOST]
        packed = subprocess.run(
            ["tar", "-C", str(REPO / "plugins"), "--exclude=__pycache__", "--transform=s,^module_utils,gpuops,", "-c"]
            + ["module_utils"],
            capture_output=True,
            check=True,
        ).stdout
        subprocess.run([*ssh, "mkdir -p /opt/lib && tar -C /opt/lib -x"], input=packed, check=True, timeout=60)
        subprocess.run([*ssh, "cat >/opt/crowd.py"], input=(HERE / "crowd.py").read_bytes(), check=True, timeout=60)
        subprocess.run([*ssh, "cat >/opt/probe.py"], input=PROBE.encode(), check=True, timeout=60)
        script = (
            "systemd-run --quiet --unit=crowd -p TasksMax=infinity -p StandardOutput=file:/run/crowd"
            " sh -c 'sleep 3600 | python3 /opt/crowd.py %d';"
            " for i in $(seq 300); do if test -s /run/crowd; then break; fi; sleep 0.1; done; test -s /run/crowd;"
            " exec python3 /opt/probe.py /opt/lib unit %d %s"
        ) % (crowd, rounds, lasts)
        done = subprocess.run([*ssh, script], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError("the stop of a unit was not measured: %s" % done.stderr[-500:])
        return _judged("a unit on systemd 252", done.stdout)
    finally:
        subprocess.run([*lab, "down", "--name", LAB], check=True, capture_output=True)


def measure(crowd: int = CROWD, rounds: int = ROUNDS, lasts: float = LASTS) -> Measured:
    """All figures, and whether the aims are met."""
    if os.geteuid() != 0:
        raise RuntimeError("this takes root: a process id namespace and a lab host")
    load = os.getloadavg()[0]
    rows = [by_pid(REPO / "build" / "bench" / "lib", crowd, rounds, lasts), by_unit(crowd, rounds, lasts)]
    # Beside a full load, who waits longer is chance; processor time is not.
    calm = load < (os.cpu_count() or 1)
    aims = []
    for row in rows:
        beside = "%s, beside %d processes" % (row["where"], crowd)
        aims.append(("%s: the answer within 0.2 s of the last death" % beside, row["median"] < 0.2 if calm else None))
        text = "%s: waiting %.0f s takes less than 5 %% of one core" % (beside, lasts)
        aims.append((text, row["share"] < 0.05))
    return {
        "rows": rows,
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "load": load,
        "aims": [{"aim": text, "met": met} for text, met in aims],
    }


def table(result: Measured) -> str:
    """The figures for people."""
    form = "%-24s %9s %14s %8s %16s %7s"
    lines = [form % ("", "processes", "to the answer", "worst", "processor, wait", "share")]
    for row in result["rows"]:
        times = ["%.0f ms" % (row[name] * 1000) for name in ("median", "worst")]
        wait = "%.2f of %.1f s" % (row["processor"], row["waited"])
        lines.append(form % (row["where"], row["processes"], *times, wait, "%.1f %%" % (100 * row["share"])))
    return "\n".join(lines)
