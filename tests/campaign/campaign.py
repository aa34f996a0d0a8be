# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Random forests of processes, one service of each stopped: everything owned must end, and nothing else be touched.

``campaign.py plain FIRST [COUNT]`` grows forests in process id namespaces of their own, ``campaign.py units FIRST
[COUNT]`` real systemd units on a lab host that it boots. A seed is one forest, always the same. ``--show`` prints the
description of the first and what must become of it. As root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import typing as t

HERE = pathlib.Path(__file__).resolve().parent
REPO = HERE.parents[1]
LAB = REPO / "tests" / "lab" / "lab.py"
NAMESPACE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
HUNG = 90.0  # seconds without an answer on one tree
EXPECTED = ("wrong", "survivor", "late")
Answer = t.Dict[str, t.Any]
Seen = t.Callable[[Answer], None]


@contextlib.contextmanager
def library() -> t.Iterator[pathlib.Path]:
    """The library as a package of its own, as it is now: nobody's edit changes it during the run."""
    with tempfile.TemporaryDirectory(prefix="campaign-library-") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        shutil.copytree(
            REPO / "plugins" / "module_utils", folder / "gpuops", ignore=shutil.ignore_patterns("__pycache__")
        )
        yield folder


class Tally:
    """What has been found so far."""

    def __init__(self, progress: float = 0.0) -> None:
        self.trees: t.Counter[str] = collections.Counter()
        self.verdicts: t.Counter[str] = collections.Counter()
        self.problems: t.Counter[str] = collections.Counter(dict.fromkeys(EXPECTED, 0))
        self.failures: t.List[Answer] = []
        self.ended = self.grown = self.heirs = 0
        self.slowest = 0.0
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._progress = progress
        self._said = self.began

    def take(self, answer: Answer) -> None:
        with self._lock:
            self.trees[answer["kind"]] += 1
            self.verdicts[str(answer.get("verdict"))] += 1
            self.ended += answer.get("ended", 0)
            self.grown += answer.get("grown", 0)
            self.heirs += bool(answer.get("heir"))
            self.slowest = max(self.slowest, answer.get("seconds", 0.0))
            if tells(answer):
                self.problems.update(kind for kind, _text in answer["problems"])
                self.failures.append(answer)
                print(told(answer), flush=True)
            if self._progress and time.monotonic() - self._said > self._progress:
                self._said = time.monotonic()
                print("%4.0f s: %s" % (self._said - self.began, self.line()), flush=True)

    def line(self) -> str:
        count = sum(self.trees.values())
        return "%d trees, %d of them systemd units; %d processes ended; %d wrong, %d survivors, %d late, %d other" % (
            count,
            self.trees["unit"],
            self.ended,
            self.problems["wrong"],
            self.problems["survivor"],
            self.problems["late"],
            sum(self.problems.values()) - sum(self.problems[kind] for kind in EXPECTED),
        )

    def result(self) -> t.Dict[str, t.Any]:
        return {
            "trees": sum(self.trees.values()),
            "kinds": dict(self.trees),
            "processes": self.grown,
            "ended": self.ended,
            "numbers_given_again": self.heirs,
            "verdicts": dict(self.verdicts),
            "problems": dict(self.problems),
            "slowest": round(self.slowest, 2),
            "seconds": round(time.monotonic() - self.began, 1),
            "failures": [told(answer) for answer in self.failures[:20]],
        }


def tells(answer: Answer) -> bool:
    """Whether the library did something wrong; a tree that came to no end tells nothing about it."""
    return any(kind != "broken" for kind, _text in answer["problems"])


def told(answer: Answer) -> str:
    """A failure, the whole tree, and the command that runs this very tree again."""
    kind = "plain" if answer["kind"] == "plain" else "units"
    host = " --host %s" % answer["host"] if answer.get("host") else ""
    lines = ["seed %d (%s, %s):" % (answer["seed"], answer["kind"], answer.get("selector"))]
    lines += ["  %s: %s" % (name, text) for name, text in answer["problems"]]
    lines.append("  again: python3 tests/campaign/campaign.py %s %d%s" % (kind, answer["seed"], host))
    tree = dict(answer.get("tree") or {})
    for node in tree.pop("nodes", []):
        pid = (answer.get("pids") or {}).get(str(node["id"]), 0)
        lines.append("    node %s%s" % (json.dumps(node), " process %d" % pid if pid else ""))
    lines.append("    tree %s" % json.dumps(tree))
    for process in (answer.get("result") or {}).get("processes", []):
        keys = ("pid", "name", "found_by", "role", "signals", "outcome")
        lines.append("    library %s" % json.dumps({key: process.get(key) for key in keys}))
    return "\n".join(lines)


# Plain trees


def run_plain(
    seeds: t.Iterable[int],
    take: Seen,
    folder: pathlib.Path,
    workers: int = 6,
    mutant: str = "",
    until_found: bool = False,
) -> None:
    """Each worker has a namespace of its own."""
    waiting: queue.Queue[int] = queue.Queue()
    for seed in seeds:
        waiting.put(seed)
    found = threading.Event()

    def work() -> None:
        worker: t.Optional[Worker] = None
        while not (until_found and found.is_set()):
            try:
                seed = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(folder, mutant)
            answer = worker.one(seed)
            if answer is None:
                worker.end()
                worker = None
                answer = {"seed": seed, "kind": "plain", "problems": [["broken", "no answer within %g s" % HUNG]]}
            if tells(answer):
                found.set()
            take(answer)
        if worker is not None:
            worker.end()

    _together([work] * workers)


class Worker:
    """One namespace."""

    def __init__(self, folder: pathlib.Path, mutant: str) -> None:
        argv = [sys.executable, "-B", str(HERE / "plain.py"), str(folder)] + ([mutant] if mutant else [])
        self.child = subprocess.Popen(NAMESPACE + argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def one(self, seed: int) -> t.Optional[Answer]:
        assert self.child.stdin is not None and self.child.stdout is not None
        line = b""
        try:
            self.child.stdin.write(b"%d\n" % seed)
            self.child.stdin.flush()
            if select.select([self.child.stdout], [], [], HUNG)[0]:
                line = self.child.stdout.readline()
        except BrokenPipeError:
            pass
        return t.cast(Answer, json.loads(line)) if line else None

    def end(self) -> None:
        self.child.kill()  # the namespace ends with it
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _together(works: t.Sequence[t.Callable[[], None]]) -> None:
    errors: t.List[BaseException] = []

    def guarded(work: t.Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# systemd units


@contextlib.contextmanager
def lab(name: str, hosts: t.Mapping[str, str]) -> t.Iterator[t.Dict[str, t.List[str]]]:
    """Lab hosts by their names, each with the words that run a command there."""
    command = [sys.executable, str(LAB)]
    words = [word for host, spec in hosts.items() for word in ("--host", "%s=%s" % (host, spec))]
    subprocess.run([*command, "down", "--name", name], check=True, capture_output=True)
    subprocess.run([*command, "up", "--name", name, *words], check=True, capture_output=True)
    try:
        config = str(REPO / "build" / "lab" / name / "ssh_config")
        yield {host: ["setpriv", "--pdeathsig", "KILL", "ssh", "-F", config, host] for host in hosts}
    finally:
        subprocess.run([*command, "down", "--name", name], check=True, capture_output=True)


def run_units(
    first: int,
    count: int,
    take: Seen,
    folder: pathlib.Path,
    hosts: t.Mapping[str, t.List[str]],
    lanes: int = 3,
    specs: t.Optional[t.Mapping[str, str]] = None,
    mutant: str = "",
) -> None:
    """So many trees on each host, each host with seeds of its own."""

    def work(place: int, host: str) -> None:
        pack = [
            "tar",
            "-cf",
            "-",
            "--exclude=__pycache__",
            "-C",
            str(HERE.parent),
            "campaign",
            "-C",
            str(folder),
            "gpuops",
        ]
        tar = subprocess.run(pack, check=True, stdout=subprocess.PIPE).stdout
        unpack = "rm -rf /opt/campaign; mkdir /opt/campaign; tar -xf - -C /opt/campaign"
        subprocess.run([*hosts[host], unpack], input=tar, check=True)
        begin = first + place * count
        command = "python3 /opt/campaign/campaign/units.py /opt/campaign %d %d %d %s" % (begin, count, lanes, mutant)
        child = subprocess.Popen([*hosts[host], command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        missing = set(range(begin, begin + count))
        assert child.stdout is not None
        for line in child.stdout:
            answer = json.loads(line)
            missing.discard(answer["seed"])
            take(dict(answer, host=(specs or {}).get(host, "")))
        if child.wait() != 0 or missing:
            problem = ["broken", "%s ended with %d and left out %s" % (host, child.returncode, sorted(missing)[:5])]
            take({"seed": begin, "kind": "unit", "problems": [problem]})

    _together([lambda place=place, host=host: work(place, host) for place, host in enumerate(hosts)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["plain", "units"])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--host", default="bookworm", help="the release of the lab host, such as bullseye,legacy=1")
    parser.add_argument("--mutant", default="")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if options.show:
        sys.path.insert(0, str(HERE))
        import seeds
        import seeds_units

        tree = (seeds.plain if options.kind == "plain" else seeds_units.unit)(options.first)
        print(told({"seed": options.first, "kind": options.kind, "problems": [], "tree": tree}))
        return 0
    tally = Tally(10.0)
    with library() as folder:
        if options.kind == "plain":
            wanted = range(options.first, options.first + options.count)
            run_plain(wanted, tally.take, folder, min(options.workers, options.count), options.mutant)
        else:
            with lab("campaign-%d" % os.getpid(), {"host": options.host}) as hosts:
                specs = {"host": options.host}
                run_units(options.first, options.count, tally.take, folder, hosts, specs=specs, mutant=options.mutant)
    print(tally.line())
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
