# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is seen of processes from outside, and how the script runs others: every wait bounded, every end by pid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
import typing as t

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(HERE))
NODE = re.compile(r"/dev/((?:nvidia|dri/(?:card|renderD)).*?)(?: \(deleted\))?\Z")
NVIDIA_MAJOR, LAST_DEVICE_MINOR = 195, 247

Facts = t.Dict[str, t.Any]


class Undone(Exception):
    """A step could not be taken; the text says why."""


class Clock:
    """The time that is left of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self.seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def at_most(self, seconds: float) -> float:
        left = self.seconds - self.elapsed
        if left <= 0:
            raise Undone("the %g s for the whole run are over" % self.seconds)
        return min(seconds, left)


class Child:
    """A process of our own that announces its stages, and goes on or ends when it is told to."""

    living: t.List[Child] = []

    def __init__(self, clock: Clock, *words: str) -> None:
        self._clock = clock
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, words[0]), *words[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.start = start_ticks(self.pid)
        Child.living.append(self)

    def line(self, seconds: float = 60.0) -> Facts:
        """The next stage that it announces."""
        assert self._process.stdout is not None
        end = time.monotonic() + self._clock.at_most(seconds)
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Undone("process %d did not answer within %g s" % (self.pid, seconds))
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise Undone("process %d ended with status %s and no answer" % (self.pid, self._process.wait()))
            self._pending += chunk
        text, _, self._pending = self._pending.partition(b"\n")
        return t.cast(Facts, json.loads(text))

    def stage(self, name: str, seconds: float = 60.0) -> Facts:
        found = self.line(seconds)
        if found.get("stage") != name:
            raise Undone(str(found.get("error") or "the stage %s came in place of %s" % (found.get("stage"), name)))
        return found

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        # Not reaped yet, so its pid is still its own.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, seconds: float = 10.0) -> bool:
        """Kill it; says whether it is gone."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self in Child.living:
            Child.living.remove(self)
        return self.ended

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_error: t.Any) -> None:
        self.end()


def start_ticks(pid: int) -> int:
    """When a process began, in ticks; 0 when there is none, or only its remains."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def end_by_pid(pid: int, start: int) -> None:
    """Kill a process that is not our child, if it is still the one that was seen."""
    if start and start_ticks(pid) == start:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def nodes(pid: int) -> t.Dict[str, t.List[str]]:
    """The GPU nodes that a process has open, by NVIDIA's number or by name, or mapped, by name."""
    opened, mapped = set(), set()
    for entry in _listed("/proc/%d/fd" % pid):
        opened.add(_node("/proc/%d/fd/%s" % (pid, entry)))
    with contextlib.suppress(OSError):
        with open("/proc/%d/maps" % pid, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                words = line.split(None, 5)
                path = NODE.match(words[5].rstrip("\n")) if len(words) > 5 else None
                if path:
                    mapped.add(path.group(1))
    return {"open": sorted(filter(None, opened)), "mapped": sorted(mapped)}


def _listed(folder: str) -> t.List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _node(link: str) -> str:
    try:
        found, target = os.stat(link), os.readlink(link)
    except OSError:
        return ""
    if stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == NVIDIA_MAJOR:
        minor = os.minor(found.st_rdev)
        if minor <= LAST_DEVICE_MINOR:
            return "nvidia%d" % minor
    match = NODE.match(target)
    return match.group(1) if match else ""


class Collection:
    """Runs the collection's modules as files, as a host does, and its library without Ansible."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory(prefix="gpuops-test-gpu-")
        place = os.path.join(self._folder.name, "ansible_collections", "gpuops")
        os.makedirs(place)
        os.symlink(REPOSITORY, os.path.join(place, "serving"))
        path = [self._folder.name, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path))
        status, _out, _err = self._run([sys.executable, "-c", "import ansible.module_utils.basic"], 30.0)
        self.ways = ["module", "library"] if status == 0 else ["library"]

    def close(self) -> None:
        self._folder.cleanup()

    def ask(self, way: str, name: str, seconds: float = 90.0, check_mode: bool = False, **options: t.Any) -> Facts:
        """The result of a module, by its file or by the library below it."""
        path = os.path.join(self._folder.name, "arguments.json")
        extra = {"_ansible_check_mode": check_mode, "_ansible_remote_tmp": self._folder.name}
        with open(path, "w", encoding="utf-8") as handle:
            json.dump({"ANSIBLE_MODULE_ARGS": dict(options, **extra)}, handle)
        file = os.path.join(REPOSITORY, "plugins", "modules", name + ".py")
        words = [file] if way == "module" else [os.path.join(HERE, "by_library.py"), name]
        _status, out, err = self._run([sys.executable, *words, path], seconds)
        try:
            return t.cast(Facts, json.loads(out))
        except ValueError:
            text = (err or out).strip().splitlines()
            raise Undone("%s (%s) gave no answer: %s" % (name, way, text[-1] if text else "nothing")) from None

    def _run(self, words: t.List[str], seconds: float) -> t.Tuple[int, str, str]:
        """Exit status, stdout and stderr; not through pipes, which somebody left behind could keep open."""
        limit = self._clock.at_most(seconds)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self._environment, start_new_session=True
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise Undone("%s gave no answer within %g s" % (os.path.basename(words[1]), limit)) from None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5)
            out.seek(0)
            err.seek(0)
            return status, out.read(), err.read()
