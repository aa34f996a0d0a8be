# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The process table: one snapshot, identities that survive pid reuse, and signals that reach no other one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, NamedTuple

from ._accounts import user_name

__all__ = [
    "Process",
    "ProcessRef",
    "Table",
    "alive",
    "boot_time",
    "escape",
    "own_line",
    "parse_stat",
    "read_at",
    "send",
    "threads",
    "user_name",
]

TICKS = os.sysconf("SC_CLK_TCK")
PF_KTHREAD = 0x00200000
CHUNK = 8192  # more than these files have, of all but the strangest processes
NEW_ONES = 8  # how often one look goes back for processes that were born during it
YOUNG = 5.0  # seconds in which a process may yet be given its user, groups and control group by whoever starts it


class ProcessRef(NamedTuple):
    """A process, and never the next one that gets its number."""

    pid: int
    start: int  # field 22 of /proc/PID/stat: clock ticks since boot


def boot_time(proc: str = "/proc") -> float:
    """Wall clock time of the boot, the base of every create time."""
    try:
        with open(proc + "/stat", "rb") as stream:
            for line in stream:
                if line.startswith(b"btime "):
                    return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def escape(raw: bytes) -> str:
    """Bytes of a process name as one printable line that no two names share."""
    text = raw.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass
class Process:
    """One row of the table."""

    ref: ProcessRef
    ppid: int
    pgrp: int
    session: int
    state: str
    name: str
    uid: int
    gids: tuple[int, ...]
    cgroup: str
    threads: int
    kernel_thread: bool
    cpu_ticks: int
    booted: float = 0.0
    settled: bool = False  # whether its user, groups and control group were read after its first seconds
    line: bytes = b""  # its stat as it was read

    @property
    def pid(self) -> int:
        return self.ref.pid

    @property
    def user(self) -> str:
        return user_name(self.uid)

    @property
    def create_time(self) -> float:
        return self.booted + self.ref.start / TICKS

    @property
    def gone(self) -> bool:
        """Dead in this snapshot, reaped or not; with more threads than the dead main one it still holds everything."""
        return self.state in "Xx" or (self.state == "Z" and self.threads <= 1)


class _Stat(NamedTuple):
    name: bytes
    state: str
    ppid: int
    pgrp: int
    session: int
    flags: int
    cpu_ticks: int
    threads: int
    start: int


def parse_stat(data: bytes) -> _Stat:
    # The name may hold spaces, parentheses and newlines: only its outermost parentheses count.
    opening, closing = data.index(b"("), data.rindex(b")")
    rest = data[closing + 2 :].split(None, 20)
    return _Stat(
        name=data[opening + 1 : closing],
        state=rest[0].decode("ascii"),
        ppid=int(rest[1]),
        pgrp=int(rest[2]),
        session=int(rest[3]),
        flags=int(rest[6]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        threads=int(rest[17]),
        start=int(rest[19]),
    )


def _line(data: bytes, key: bytes) -> list[bytes]:
    """The words of one line of a status; a name above it has its newlines escaped, so it cannot pass for one."""
    begin = data.index(b"\n" + key) + 1 + len(key)
    return data[begin : data.index(b"\n", begin)].split()


def _parse_status(data: bytes) -> tuple[int, tuple[int, ...]]:
    gids = _line(data, b"Gid:")[:2] + _line(data, b"Groups:")
    return int(_line(data, b"Uid:")[0]), tuple(sorted(map(int, set(gids))))


@functools.lru_cache(maxsize=1024)
def _parse_cgroup(data: bytes) -> str:
    """The path in the hierarchy that systemd tracks units in; on a legacy host the unified one is always the root."""
    unified, named = "", ""
    # Only a newline ends a line: whoever may make a group may give it a name with any other character.
    for line in filter(None, data.decode("utf-8", "surrogateescape").split("\n")):
        _number, _colon, rest = line.partition(":")
        controllers, _colon, path = rest.partition(":")
        if path.endswith(" (deleted)"):
            path = path[: -len(" (deleted)")]
        if controllers == "":
            unified = path
        elif controllers == "name=systemd":
            named = path
    if unified in ("", "/"):
        return named or unified
    return unified


def read_at(name: str, directory: int | None = None) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        data = chunk = os.read(fd, CHUNK)
        while len(chunk) == CHUNK:
            chunk = os.read(fd, CHUNK)
            data += chunk
        return data
    finally:
        os.close(fd)


def _read_cgroup(name: str, directory: int) -> str:
    try:
        return _parse_cgroup(read_at(name, directory))
    except OSError:
        return ""


def threads(pid: int | str, proc: str = "/proc") -> list[str]:
    """The numbers of a process's threads, oldest first; none when it has ended."""
    try:
        return sorted(os.listdir("%s/%s/task" % (proc, pid)), key=lambda entry: (len(entry), entry))
    except OSError:
        return []


def _read_process(proc: str, pid: int, booted: float) -> Process | None:
    # A descriptor of /proc/PID stays with that process: all files read through it belong to one identity.
    try:
        directory = os.open("%s/%d" % (proc, pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = read_at("stat", directory)
        stat = parse_stat(line)
        uid, gids = _parse_status(read_at("status", directory))
        cgroup = _read_cgroup("cgroup", directory)
        if stat.state == "Z" and stat.threads > 1 and cgroup in ("", "/"):
            # On legacy control groups a main thread that has ended is in the root, the others are where they were.
            others = (_read_cgroup("task/%s/cgroup" % thread, directory) for thread in threads(pid, proc))
            cgroup = next((path for path in others if path not in ("", "/")), cgroup)
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(directory)
    return _process(ProcessRef(pid, stat.start), stat, line, uid, gids, cgroup, booted)


def _read_again(proc: str, known: Process) -> Process | None:
    """The same process at this moment, as far as its stat tells; another one when the number is another's now."""
    try:
        line = read_at("%s/%d/stat" % (proc, known.pid))
        if known.settled and line == known.line:
            return known  # it did nothing since
        stat = parse_stat(line)
    except (OSError, ValueError, IndexError):
        return None
    if stat.start != known.ref.start or not known.settled:
        return _read_process(proc, known.pid, known.booted)
    return _process(known.ref, stat, line, known.uid, known.gids, known.cgroup, known.booted)


def _process(
    ref: ProcessRef, stat: _Stat, line: bytes, uid: int, gids: tuple[int, ...], cgroup: str, booted: float
) -> Process:
    return Process(
        ref=ref,
        ppid=stat.ppid,
        pgrp=stat.pgrp,
        session=stat.session,
        state=stat.state,
        name=escape(stat.name),
        uid=uid,
        gids=gids,
        cgroup=cgroup,
        threads=stat.threads,
        kernel_thread=bool(stat.flags & PF_KTHREAD),
        cpu_ticks=stat.cpu_ticks,
        booted=booted,
        line=line,
        settled=time.clock_gettime(time.CLOCK_BOOTTIME) - ref.start / TICKS > YOUNG,
    )


class Table:
    """All processes seen in one look at /proc."""

    def __init__(self, processes: Iterable[Process], proc: str = "/proc") -> None:
        self.proc = proc
        self._by_pid: dict[int, Process] = {}
        self._children: dict[int, list[Process]] = {}
        self.add(processes)

    def add(self, processes: Iterable[Process]) -> None:
        """Add rows; a number that is in it already keeps its row."""
        for process in processes:
            if self._by_pid.setdefault(process.pid, process) is process:
                self._children.setdefault(process.ppid, []).append(process)

    @classmethod
    def snapshot(cls, proc: str = "/proc", known: Table | None = None) -> Table:
        """Every process, those too that are born while this looks.

        The user, the groups and the control group of those that ``known``, an earlier table, holds already are taken
        from there, unless they were young then. That makes it three times as fast.
        """
        booted = boot_time(proc)
        found: list[Process] = []
        seen: set[str] = set()
        for _round in range(NEW_ONES):
            entries = {entry for entry in os.listdir(proc) if entry.isdigit()} - seen
            if not entries:
                break
            seen |= entries
            for pid in sorted(map(int, entries)):
                earlier = known.get(pid) if known is not None else None
                process = _read_again(proc, earlier) if earlier is not None else _read_process(proc, pid, booted)
                if process is not None:
                    found.append(process)
        return cls(found, proc)

    @classmethod
    def of(cls, pids: Iterable[int], proc: str = "/proc") -> Table:
        """A table of these processes alone: it knows nobody's family."""
        booted = boot_time(proc)
        found = (_read_process(proc, pid, booted) for pid in pids)
        return cls((process for process in found if process is not None), proc)

    def renew(self, processes: Iterable[Process]) -> None:
        """Put these rows in the place of those that were read before."""
        rows = {process.pid: process for process in processes}
        kept = [process for process in self if process.pid not in rows]
        self._by_pid, self._children = {}, {}
        self.add([*kept, *rows.values()])

    def __iter__(self) -> Iterator[Process]:
        return iter(self._by_pid.values())

    def __len__(self) -> int:
        return len(self._by_pid)

    def get(self, pid: int) -> Process | None:
        return self._by_pid.get(pid)

    def by_ref(self, ref: ProcessRef) -> Process | None:
        process = self._by_pid.get(ref.pid)
        return process if process is not None and process.ref.start == ref.start else None

    def children(self, pid: int) -> list[Process]:
        return list(self._children.get(pid, ()))

    def descendants(self, pids: Iterable[int]) -> list[Process]:
        """Children, and theirs, nearest first; the given processes are not among them."""
        seen = set(pids)
        queue, found = list(seen), []
        while queue:
            for child in self._children.get(queue.pop(0), ()):
                if child.pid not in seen:
                    seen.add(child.pid)
                    found.append(child)
                    queue.append(child.pid)
        return found


def own_line(table: Table) -> set[int]:
    """Pids of the calling process, its ancestors and its descendants: whoever stops others must not stop these."""
    line = {os.getpid()}
    line.update(process.pid for process in table.descendants([os.getpid()]))
    process = table.get(os.getpid())
    while process is not None and process.ppid not in line and process.ppid > 0:
        line.add(process.ppid)
        process = table.get(process.ppid)
    return line


def _living_thread(pid: int) -> bool:
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            if parse_stat(read_at("/proc/%d/task/%s/stat" % (pid, thread))).state not in "ZXx":
                return True
    return False


def alive(ref: ProcessRef) -> bool:
    """Whether this very process runs now, for callers without a fresh snapshot: each of its threads is looked at."""
    try:
        with open("/proc/%d/stat" % ref.pid, "rb") as stream:
            stat = parse_stat(stream.read())
    except (OSError, ValueError, IndexError):
        return False
    if stat.start != ref.start or stat.state in "Xx":
        return False
    return stat.state != "Z" or _living_thread(ref.pid)


def send(ref: ProcessRef, signum: int) -> str:
    """Signal exactly this process: ``sent``, ``gone`` (dead, or the pid is another's now) or ``denied``."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    sender: Callable[[int, int], None] | None = getattr(signal, "pidfd_send_signal", None)
    fd = -1
    if opener is not None and sender is not None:
        try:
            # Opened before the identity is checked: from here on the number cannot be reused under us.
            fd = opener(ref.pid)
        except ProcessLookupError:
            return "gone"
        except OSError:
            fd = -1  # an old kernel or a seccomp filter: plain kill is all there is
    try:
        if not alive(ref):
            return "gone"
        if fd >= 0 and sender is not None:
            sender(fd, signum)
        else:
            os.kill(ref.pid, signum)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "denied"
    finally:
        if fd >= 0:
            os.close(fd)
    return "sent"
