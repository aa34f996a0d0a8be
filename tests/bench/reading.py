# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What one look at the GPUs of a host costs beside many unrelated processes, compared with ``fuser -v``.

Measured in turns on one machine, so that what else runs there hits all of them alike. Needs root, as the check does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import platform
import resource
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
import typing as t

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "collections"))

from ansible_collections.gpuops.serving.plugins.module_utils import _gpu, _gpu_nodes

HERE = pathlib.Path(__file__).resolve().parent
REPO = HERE.parents[1]
SIZES = (500, 1000, 2000)
ROUNDS = 9
DEVICES = 8
LIBRARY = "libnvidia-ml.so.1"
LAUNCH = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuops._agent import main; sys.exit(main())"

Measured = t.Dict[str, t.Any]


@contextlib.contextmanager
def crowd(size: int) -> t.Iterator[None]:
    """So many processes, all of them gone afterwards."""
    command = [sys.executable, str(HERE / "crowd.py"), str(size)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        if line.strip() != b"%d" % size:
            raise RuntimeError("%d processes cannot be started here" % size)
        yield
    finally:
        parent.communicate()


class Machine:
    """A made-up machine with eight GPUs: their nodes, what the test driver library says, the installed command."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.dev, self.state = folder / "dev", folder / "state"
        for path in (self.dev, self.state, self.state / "holders", self.state / "dead"):
            path.mkdir()
        self.nodes = [self.dev / ("nvidia%d" % number) for number in range(DEVICES)]
        for number, path in enumerate(self.nodes):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, number))
        subprocess.run([str(REPO / "tests/fakes/nvml/build.sh"), str(folder)], check=True)
        (self.state / "scenario").write_text("devices=%d\n" % DEVICES)
        os.environ["FAKE_NVML_DIR"] = str(self.state)
        ctypes.CDLL(str(folder / LIBRARY))  # from then on the loader gives this one out for the name
        shutil.copytree(REPO / "plugins" / "module_utils", folder / "lib" / "gpuops")
        self.environment = dict(os.environ, LD_LIBRARY_PATH=str(folder))
        self.command_line = [sys.executable, "-c", LAUNCH, str(folder / "lib"), "gpu-clear", "--json"]

    def scan(self) -> None:
        _gpu_nodes.scan(str(self.dev))

    def reading(self) -> None:
        found = _gpu.read(_gpu.Options(), devices=str(self.dev))
        if len(found.devices) != DEVICES:
            raise RuntimeError("the reading is none: %s" % found.message)

    def command(self) -> None:
        done = subprocess.run(self.command_line, env=self.environment, capture_output=True)
        if done.stdout.count(b'"verdict"') <= DEVICES:
            raise RuntimeError("the command does not work: %r" % done.stderr[-500:])

    def fuser(self) -> None:
        command = ["fuser", "-v", *map(str, self.nodes)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode not in (0, 1):  # 1 when nobody has one open
            raise RuntimeError("fuser ended with status %d" % done.returncode)


def processor() -> float:
    """Seconds of processor time of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def cost(call: t.Callable[[], None]) -> t.Tuple[float, float]:
    began, spent = time.perf_counter(), processor()
    call()
    return time.perf_counter() - began, processor() - spent


def at(machine: Machine, size: int, rounds: int) -> Measured:
    """Medians of all four beside ``size`` more processes."""
    calls = {"scan": machine.scan, "reading": machine.reading, "command": machine.command, "fuser": machine.fuser}
    taken: t.Dict[str, t.List[t.Tuple[float, float]]] = {name: [] for name in calls}
    with crowd(size):
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(cost(call))
        found = sum(entry.isdigit() for entry in os.listdir("/proc"))
    row: Measured = {"started": size, "processes": found}
    for name, pairs in taken.items():
        row[name] = {
            "seconds": round(statistics.median(pair[0] for pair in pairs), 4),
            "processor": round(statistics.median(pair[1] for pair in pairs), 4),
            "least": round(min(pair[0] for pair in pairs), 4),
        }
    # Each round is a ratio of its own: a disturbance that lasts longer than a round cancels out.
    ratios = [one[0] / other[0] for one, other in zip(taken["reading"], taken["fuser"])]
    row["ratio"] = round(statistics.median(ratios), 3)
    row["processor_ratio"] = round(
        statistics.median(one[1] / other[1] for one, other in zip(taken["reading"], taken["fuser"])), 3
    )
    return row


def measure(sizes: t.Sequence[int] = SIZES, rounds: int = ROUNDS) -> Measured:
    """All figures, and whether the aims are met."""
    if os.geteuid() != 0:
        raise RuntimeError("this takes root: without it neither of the two sees the open files of others")
    if shutil.which("fuser") is None:
        raise RuntimeError('fuser is missing: install the Debian package "psmisc"')
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(pathlib.Path(folder))
        rows = [at(machine, size, rounds) for size in sizes]
    growth = _growth(rows)
    last = rows[-1]
    # Beside a full load, who waits longer is chance.
    calm = load < (os.cpu_count() or 1)
    beside = "beside %d processes" % last["started"]
    aims = [
        ("one reading %s takes less processor time than fuser -v" % beside, last["processor_ratio"] < 1.0),
        ("one reading %s takes less time than fuser -v" % beside, last["ratio"] < 1.0 if calm else None),
        ("a reading grows linearly: twice the processes, at most 2.2 times the processor time", growth <= 2.2),
    ]
    return {
        "rows": rows,
        "growth": growth,
        "rounds": rounds,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "load": load,
        "aims": [{"aim": text, "met": met} for text, met in aims],
    }


def _growth(rows: t.Sequence[Measured]) -> float:
    """By how much a reading's processor time grows at most when the processes become twice as many."""
    found = [1.0]
    for less, more in zip(rows, rows[1:]):
        times = more["processes"] / less["processes"]
        found.append(2.0 * (more["reading"]["processor"] / less["reading"]["processor"]) / times)
    return round(max(found), 2)


def table(result: Measured) -> str:
    """The figures for people."""
    form = "%9s %9s %9s %9s %9s %13s %13s %11s"
    lines = [
        form % ("processes", "scan", "reading", "command", "fuser -v", "reading/fuser", "the same, CPU", "per process")
    ]
    for row in result["rows"]:
        times = ["%.0f ms" % (row[name]["seconds"] * 1000) for name in ("scan", "reading", "command", "fuser")]
        each = "%.0f us" % (row["reading"]["seconds"] / row["processes"] * 1e6)
        lines.append(form % (row["processes"], *times, row["ratio"], row["processor_ratio"], each))
    return "\n".join(lines)
