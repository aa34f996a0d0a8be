# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How soon a wait says what has become of a start, and what it costs while it lasts.

On a lab host with real systemd, through SSH and the action plugin, at the default interval. The moments to compare with
are written down by the engine: its birth, the end of its movement, the first possible token. Both clocks are one, since
the host shares the kernel. Needs root, as the lab does.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
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

NAME = "bench-wait"
HOST = "unit"
LOADS = 20
ROUNDS = 3
CROWD = 2000
STALL = 5.0
RESTARTS = 3
LIVES = 2.0  # seconds of a life that crashes, and as many until the next one
SHORT, LONG = 10.0, 40.0  # two waits whose difference is what waiting costs, without what beginning costs
FIRST_PORT = 9400
RESULT = re.compile(r"^%s \| \S+ => (\{.*\})$" % HOST)

Measured = t.Dict[str, t.Any]
Answer = t.Tuple[float, t.Dict[str, t.Any]]


class Bench:
    """One host of a lab, and one engine after the other on it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.count = 0

    def prepare(self, crowd: int) -> None:
        self.fleet.install_agent()
        self.fleet.put(HOST, REPO / "tests" / "fakes" / "engine.py", "/opt/engine.py", "0755")
        self.fleet.put(HOST, HERE / "crowd.py", "/opt/crowd.py")
        self.fleet.run(
            HOST,
            "systemd-run --quiet --unit=crowd -p TasksMax=infinity -p StandardOutput=file:/run/crowd"
            " sh -c 'sleep 3600 | python3 /opt/crowd.py %d';"
            " for i in $(seq 600); do if test -s /run/crowd; then break; fi; sleep 0.1; done; test -s /run/crowd"
            % crowd,
            timeout=90,
        )

    def engine(self, arguments: str, *properties: str) -> t.Tuple[t.Dict[str, t.Any], str]:
        """The options of a wait for a new engine, and the command that starts it."""
        self.count += 1
        unit, port = "it-%d" % self.count, FIRST_PORT + self.count
        command = "systemd-run --quiet --unit=%s %s python3 /opt/engine.py --engine vllm --port %d --moments %s %s" % (
            *(unit, " ".join("-p " + line for line in properties), port, self.moments_of(unit), arguments),
        )
        options = {"unit": unit + ".service", "url": "http://127.0.0.1:%d" % port, "engine": "vllm", "model": "tiny"}
        return dict(options, timeout=120, report_only=True), command

    def moments_of(self, unit: str) -> str:
        return "/run/moments-" + unit.partition(".")[0]

    def moments(self, unit: str) -> t.List[t.Tuple[str, float]]:
        rows = [line.split() for line in self.fleet.run(HOST, "cat " + self.moments_of(unit)).splitlines()]
        return [(what, float(when)) for what, when in rows]

    def play(self, *tasks: t.Dict[str, t.Any]) -> t.List[Answer]:
        """What each wait among the tasks answered, and when the controller had it."""
        book = self.fleet.folder / "bench.json"
        plays = [{"hosts": HOST, "gather_facts": False, "tasks": list(tasks)}]
        book.write_text(json.dumps(plays), encoding="utf-8")
        argv = ["ansible-playbook", "-i", str(self.fleet.folder / "inventory.yml"), str(book)]
        environment = dict(self.fleet.environment(), ANSIBLE_STDOUT_CALLBACK="ansible.builtin.oneline")
        environment["PYTHONUNBUFFERED"] = "1"
        process = subprocess.Popen(
            argv, env=environment, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found, lines = [], []
        assert process.stdout is not None
        for line in process.stdout:
            now = time.time()
            lines.append(line)
            match = RESULT.match(line.rstrip("\n"))
            answer = json.loads(match.group(1)) if match else {}
            if "tier_reached" in answer:
                found.append((now, answer))
        if process.wait():
            raise RuntimeError("the playbook failed:\n%s" % "".join(lines)[-3000:])
        return found

    def wait(self, options: t.Mapping[str, t.Any], start: str = "") -> Answer:
        tasks = [command(start)] if start else []
        (answer,) = self.play(*tasks, waiting(options))
        return answer


def command(line: str) -> t.Dict[str, t.Any]:
    return {"ansible.builtin.command": {"cmd": line}}


def waiting(options: t.Mapping[str, t.Any]) -> t.Dict[str, t.Any]:
    return {"gpuops.serving.wait_model_ready": dict(options)}


def ready(bench: Bench, loads: int) -> Measured:
    """Seconds from the first possible token to the answer, over loads whose lengths are spread over the slices."""
    tasks, units = [], []
    for number in range(loads):
        options, start = bench.engine("--log tqdm --load %.2f" % (2 + 0.55 * (7 * number % loads)))
        tasks += [command(start), waiting(options)]
        units.append(options["unit"])
    answers = bench.play(*tasks)
    after = []
    for unit, (when, answer) in zip(units, answers):
        if answer["verdict"] != "ready":
            raise RuntimeError("a load did not become ready: %s" % answer["msg"])
        after.append(round(when - dict(bench.moments(unit))["token"], 3))
    if len(after) != loads:
        raise RuntimeError("%d of %d loads were answered" % (len(after), loads))
    longest = max(answer["elapsed"] for _when, answer in answers)
    return {"after": after, "median": round(statistics.median(after), 3), "worst": max(after), "longest": longest}


def stall(bench: Bench, rounds: int) -> Measured:
    """Seconds from the end of the stall window to the answer."""
    late = []
    for _ in range(rounds):
        options, start = bench.engine("--log tqdm --load 300 --freeze-after 3")
        when, answer = bench.wait(dict(options, stall_timeout=STALL), start)
        if answer["verdict"] != "stalled":
            raise RuntimeError("a load that froze was not called stalled: %s" % answer["msg"])
        late.append(round(when - dict(bench.moments(options["unit"]))["frozen"] - STALL, 3))
    return {"window": STALL, "late": late, "worst": max(late)}


def loop(bench: Bench, rounds: int) -> Measured:
    """Restarts that were told, and seconds from the beginning of the last of them to the answer."""
    told, late = [], []
    always = ("Restart=always", "RestartSec=%g" % LIVES, "StartLimitIntervalSec=0")
    for _ in range(rounds):
        options, start = bench.engine("--log tqdm --load 300 --crash-after %g" % LIVES, *always)
        when, answer = bench.wait(dict(options, max_restarts=RESTARTS), start)
        if answer["verdict"] != "restart_loop":
            raise RuntimeError("a loop was not called one: %s" % answer["msg"])
        bench.fleet.run(HOST, "systemctl stop " + options["unit"], checked=False)
        told.append(answer["restarts"])
        births = [at for what, at in bench.moments(options["unit"]) if what == "born" and at < when]
        late.append(round(when - births[-1], 3))
    return {"max_restarts": RESTARTS, "told": told, "late": late, "cycle": 2 * LIVES}


def cost(bench: Bench) -> Measured:
    """The share of a core that a wait takes on the host: by the command there, and through the slices."""
    options, start = bench.engine("--log tqdm --load 3600 --workers 6")
    bench.fleet.run(HOST, start)
    script = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
        " used = resource.getrusage(resource.RUSAGE_CHILDREN); print('USED', used.ru_utime + used.ru_stime)"
    )
    alone = {}
    for seconds in (SHORT, LONG):
        words = "--unit %s --url %s --engine vllm --model tiny" % (options["unit"], options["url"])
        line = 'python3 -c "%s" gpuops wait %s --timeout %g --stall-timeout %g' % (script, words, seconds, seconds)
        text = bench.fleet.run(HOST, line + " 2>/dev/null", timeout=120)
        alone[seconds] = float(text.rpartition("USED ")[2])
    idles = [idle_share()]
    sliced, controller = {}, {}
    for seconds in (SHORT, LONG):
        began, before, own = time.monotonic(), guests(NAME), processor()
        _when, answer = bench.wait(dict(options, timeout=seconds, stall_timeout=seconds))
        # Its bar may stand at one figure for the whole of the shorter wait.
        if answer["verdict"] not in ("progressing", "stalled"):
            raise RuntimeError("the wait that was to last did not: %s" % answer["msg"])
        sliced[seconds] = guests(NAME) - before, time.monotonic() - began
        controller[seconds] = processor() - own
    idles.append(idle_share())
    idle = statistics.mean(idles)
    (short, over), (long, all_over) = sliced[SHORT], sliced[LONG]
    span = LONG - SHORT
    return {
        "seconds": span,
        "command": round((alone[LONG] - alone[SHORT]) / span, 4),
        "slices": round((long - short - idle * (all_over - over)) / span, 4),
        "controller": round((controller[LONG] - controller[SHORT]) / span, 4),
        "raw": {"alone": alone, "idles": idles, "sliced": sliced, "controller": controller},
        "beginning": round(alone[SHORT] - (alone[LONG] - alone[SHORT]) * SHORT / span, 2),
    }


def idle_share() -> float:
    """What the host uses of a core while nobody waits: the load, and the host itself."""
    began, before = time.monotonic(), guests(NAME)
    time.sleep(LONG / 2)
    return (guests(NAME) - before) / (time.monotonic() - began)


def measure(loads: int = LOADS, rounds: int = ROUNDS, crowd: int = CROWD) -> Measured:
    """All figures, and whether the aims are met."""
    if os.geteuid() != 0:
        raise RuntimeError("this takes root: a lab host")
    load = os.getloadavg()[0]
    fleet = Fleet(NAME)
    fleet.down()
    # Without this a run that is told to end would leave its host behind.
    previous = signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit("told to end"))
    try:
        fleet.up([HOST + "=bookworm"])
        bench = Bench(fleet)
        bench.prepare(crowd)
        found: Measured = {"ready": ready(bench, loads), "stall": stall(bench, rounds), "loop": loop(bench, rounds)}
        found["cost"] = cost(bench)
    finally:
        fleet.down()
        signal.signal(signal.SIGTERM, previous)
    # Beside a full load, who waits longer is chance; processor time is not.
    calm = load < (os.cpu_count() or 1)
    share = found["cost"]
    aims = [
        (
            "ready within 0.5 s of the first possible token, the median of %d loads" % loads,
            found["ready"]["median"] < 0.5,
        ),
        ("a stall within a second of the end of its window", found["stall"]["worst"] < 1.0),
        (
            "a restart loop before the next restart",
            set(found["loop"]["told"]) == {RESTARTS} and max(found["loop"]["late"]) < found["loop"]["cycle"],
        ),
    ]
    judged = [{"aim": text, "met": met if calm else None} for text, met in aims]
    beside = "takes less than 2 %% of a core beside %d processes" % crowd
    judged.append({"aim": "a wait by the command " + beside, "met": share["command"] < 0.02})
    judged.append({"aim": "a wait in slices " + beside, "met": share["slices"] < 0.02})
    return {
        **found,
        "loads": loads,
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "load": load,
        "aims": judged,
    }


def table(result: Measured) -> str:
    """The figures for people."""
    ready, stall, loop, cost = (result[name] for name in ("ready", "stall", "loop", "cost"))
    return "\n".join(
        (
            "ready        median %.2f s, worst %.2f s after the first possible token, over %d loads of up to %.0f s"
            % (ready["median"], ready["worst"], result["loads"], ready["longest"]),
            "stalled      worst %.2f s after the end of a window of %g s" % (stall["worst"], stall["window"]),
            "loop         at restart %s, worst %.2f s after it began, with %g s from one to the next"
            % ("/".join(map(str, loop["told"])), max(loop["late"]), loop["cycle"]),
            "processor    %.1f %% of a core by the command, %.1f %% in slices; %.2f s once for its beginning;"
            " %.1f %% on the controller"
            % (100 * cost["command"], 100 * cost["slices"], cost["beginning"], 100 * cost["controller"]),
        )
    )
