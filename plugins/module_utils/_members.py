# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The processes of a unit, followed from look to look without reading the whole process table each time."""

from __future__ import annotations

import contextlib
import os
import time
import typing as t

from . import _ownership, _places, _processes, _sockets
from ._progress import Usage
from ._systemd import UnitState

__all__ = ("GROUPS", "Members")

# Where the kernel shows the control groups that systemd tracks units in: unified, legacy, hybrid.
GROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
PERIOD = 10.0  # seconds between two looks at all processes, when nothing asks for one
SHARE = 0.005  # of a core that these looks may cost
MOST_GROUPS = 64
MOST_SAVED = 500  # processes of a unit that the next slice of a wait is told of
# Who runs a container for a unit: what serves is then in a control group of its own.
CLIENTS = frozenset(("docker", "podman", "nerdctl"))
TRACKING = 2.0  # seconds for the question which container that is
NEARLY = 0.1  # of these left is none left
PAGE = os.sysconf("SC_PAGE_SIZE")


class Members:
    """Whom the unit owns now. ``table`` and ``owned`` are those of the last look at all processes, kept up since."""

    def __init__(self, mark_gid: t.Optional[int] = None, proc: str = "/proc", groups: t.Sequence[str] = GROUPS) -> None:
        self.mark_gid, self.proc, self._roots = mark_gid, proc, groups
        self.patience: t.Callable[[float], float] = lambda most: most  # for a question that may hang
        self.table = _processes.Table([], proc)
        self.owned = _ownership.Owned()
        self.looks = 0  # at all processes
        self.unreadable = False  # whether what some of them read and wrote may not be seen
        self._key: t.Tuple[t.Any, ...] = ()
        self._at = float("-inf")
        self._period = PERIOD
        self._own: t.Set[int] = set()
        self._grouped: t.Set[int] = set()
        self._containers: t.Set[str] = set()
        self._networks: t.Dict[int, int] = {}
        self.unknown_container = False  # whether the unit runs one, and which is not known
        self.unsure = False  # the same because nothing tells it: one of the others may be it
        self.late = False  # the same because its manager was not done with the answer in time
        self._tracked: t.Dict[str, _places.Container] = {}
        self._tracked_in = ""  # the life of the unit that these are of

    @property
    def pids(self) -> t.List[int]:
        return [ref.pid for ref in self.owned.processes]

    def follow(self, state: UnitState) -> None:
        """Take in who came since the last look; all processes are looked at only when the unit itself changed."""
        key = (state.name, state.main_pid, state.control_pid, state.invocation_id, state.control_group)
        if key != self._key or time.monotonic() - self._at >= self._period:
            self.renew(state)
            return
        grouped = self._in_groups(state)
        new, self._grouped = grouped - self._grouped, grouped
        found = [process for process in _processes.Table.of(sorted(new), self.proc) if not self._is_ours(process)]
        if found:
            self.table.renew(found)
            for process in found:
                self.owned.add(process, "cgroup", True)

    def renew(self, state: UnitState) -> None:
        """Look at all processes."""
        began = time.process_time()
        known = self.table if len(self.table) else None
        self.table = _processes.Table.snapshot(self.proc, known)
        self.owned = self._of_unit(state)
        self._own = _processes.own_line(self.table)
        self._key = (state.name, state.main_pid, state.control_pid, state.invocation_id, state.control_group)
        self._containers = self._container_groups()
        self._grouped = self._in_groups(state)
        self._networks = self._own_networks()
        self._period = max(PERIOD, (time.process_time() - began) / SHARE)
        self._at = time.monotonic()
        self.looks += 1

    def _of_unit(self, state: UnitState) -> _ownership.Owned:
        """What the unit owns, without those that weak evidence alone speaks for and that are in another unit.

        All that one user runs through rootless podman shares one mount namespace.
        """
        owned = self._found(state)
        for ref in _ownership.foreign(self.table, owned):
            del owned.processes[ref]
        return owned

    def _found(self, state: UnitState) -> _ownership.Owned:
        if self._tracked_in != state.invocation_id:
            self._tracked, self._tracked_in = {}, state.invocation_id
        owned = _ownership.of_unit(self.table, state, mark_gid=self.mark_gid, containers=self._tracked)
        firm = [self.table.by_ref(ref) for ref in owned.firm]
        runs_client = any(process is not None and process.name in CLIENTS for process in firm)
        # A client that left its container to a daemon is gone by now.
        left = not firm and state.active_state == "active"
        self.unknown_container = self.unsure = self.late = False
        if self._tracked or not (runs_client or left):
            return owned
        # Loaded where it is needed: a module compiles what it imports on every run.
        from . import _containers

        # A new one each time: a container that its client has yet to make is not found, and not looked for again.
        seconds, began = self.patience(TRACKING), time.monotonic()
        tracker = _containers.Tracker(seconds=seconds)
        self._tracked = tracker.containers(self.table, state, owned)
        # Without a warning its name is known, and there is none of that name that runs.
        self.unsure = not self._tracked and bool(tracker.warnings)
        self.late = self.unsure and time.monotonic() - began >= seconds - NEARLY
        self.unknown_container = not self._tracked and (runs_client or self.unsure)
        if self._tracked:
            return _ownership.of_unit(self.table, state, mark_gid=self.mark_gid, containers=self._tracked)
        return owned

    def save(self) -> t.Optional[t.Dict[str, t.Any]]:
        """What another process needs to follow them without a look at all; None when it has to take one."""
        if not self._key or len(self.owned.processes) > MOST_SAVED:
            return None
        owned = self.owned
        return {
            "key": list(self._key),
            "at": self._at,
            "period": self._period,
            "processes": [[*ref, ways, ref in owned.firm] for ref, ways in owned.processes.items()],
            "containers": sorted(self._containers),
            "tracked": [list(container) for container in self._tracked.values()],
            "tracked_in": self._tracked_in,
            "unknown_container": self.unknown_container,
        }

    def restore(self, saved: t.Optional[t.Mapping[str, t.Any]]) -> None:
        """Go on with those of them that still live. Its times are those of the host's monotonic clock."""
        if saved is None:
            return
        found = {_processes.ProcessRef(row[0], row[1]): (row[2], row[3]) for row in saved["processes"]}
        self.table = _processes.Table.of([ref.pid for ref in found], self.proc)
        self.owned = _ownership.Owned()
        for process in self.table:
            ways, firm = found.get(process.ref, ((), False))
            for way in ways:
                self.owned.add(process, way, firm)
        self._own = self.line()
        self._key, self._at, self._period = tuple(saved["key"]), saved["at"], saved["period"]
        self._containers = set(saved["containers"])
        tracked = (_places.Container(row[0], row[1], row[2], tuple(row[3]), row[4]) for row in saved["tracked"])
        self._tracked = {container.id: container for container in tracked}
        self._tracked_in, self.unknown_container = saved["tracked_in"], saved["unknown_container"]
        self._grouped = {ref.pid for ref in self.owned.processes}
        self._networks = self._own_networks()

    def line(self) -> t.Set[int]:
        """The caller and its ancestors."""
        found: t.Set[int] = set()
        pid = os.getpid()
        while pid > 1 and pid not in found:
            found.add(pid)
            process = _processes.Table.of([pid], self.proc).get(pid)
            pid = process.ppid if process is not None else 0
        return found

    def usage(self) -> t.Dict[t.Tuple[int, int], Usage]:
        """What each of them has used; who has ended is forgotten."""
        found = {}
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.unreadable = False
        for ref in list(self.owned.processes):
            usage = self._usage(ref, now)
            if usage is None:
                del self.owned.processes[ref]
                self.owned.firm.discard(ref)
            else:
                found[(ref.pid, ref.start)] = usage
        return found

    def network(self, state: UnitState) -> t.Dict[str, int]:
        """Bytes received by the unit, where they can be told from those of others.

        systemd counts them for a unit with IPAccounting=, and a network of its own has its own interfaces. Counters of
        the host's interfaces are everybody's.
        """
        found = {}
        counted = state.raw.get("IPIngressBytes", "")
        if counted.isdigit() and int(counted) < 1 << 63:
            found["unit " + state.invocation_id] = int(counted)
        for inode, pid in self._networks.items():
            received = _received("%s/%d/net/dev" % (self.proc, pid))
            if received is not None:
                found["network %d" % inode] = received
        return found

    def listening(self) -> t.Set[_sockets.Socket]:
        """What listens in networks of the unit's own: who takes connections in for it may have listened long before."""
        found: t.Set[_sockets.Socket] = set()
        for pid in self._networks.values():
            with contextlib.suppress(OSError):
                found.update(_sockets.listening(self.proc, pid))
        return found

    def _is_ours(self, process: _processes.Process) -> bool:
        """Whether it is the caller, or was started by the caller, who may be in the unit's control group itself."""
        mine = {os.getpid()}.union(other.pid for other in self.table.descendants([os.getpid()]))
        return process.pid in self._own or process.ppid in mine

    def _container_groups(self) -> t.Set[str]:
        """The control groups of containers that the unit owns: they are outside its own."""
        owned = (self.table.by_ref(ref) for ref in self.owned.firm)
        found = {process.cgroup for process in owned if process is not None and _ownership.attribute(process)[1]}
        return found if len(found) <= MOST_GROUPS else set()

    def _in_groups(self, state: UnitState) -> t.Set[int]:
        pids: t.Set[int] = set()
        for group in {state.control_group} | self._containers:
            if group in ("", "/"):
                continue
            for root in self._roots:
                if os.path.isdir(root + group):
                    pids |= _pids_below(root + group)
                    break
        return pids

    def _own_networks(self) -> t.Dict[int, int]:
        """A process for each network that is not this one."""
        here = _network(self.proc, "self")
        found: t.Dict[int, int] = {}
        for ref in self.owned.firm:
            inode = _network(self.proc, ref.pid)
            if here and inode not in (0, here):
                found.setdefault(inode, ref.pid)
        return found

    def _usage(self, ref: _processes.ProcessRef, now: float) -> t.Optional[Usage]:
        folder = "%s/%d" % (self.proc, ref.pid)
        try:
            data = _processes.read_at(folder + "/stat")
            words = data[data.rindex(b")") + 2 :].split(None, 20)
            user, system, waited_user, waited_system = map(int, words[11:15])
            if int(words[19]) != ref.start or words[0] in b"Xx" or (words[0] == b"Z" and int(words[17]) <= 1):
                return None
        except (OSError, ValueError, IndexError):
            return None
        moved = None
        try:
            moved = _bytes_moved(folder + "/io")
        except PermissionError:
            self.unreadable = True
        return Usage(
            cpu=(user + system) / _processes.TICKS,
            read=moved,
            memory=_memory(folder + "/statm"),
            children=(waited_user + waited_system) / _processes.TICKS,
            age=max(0.0, now - ref.start / _processes.TICKS),
        )


def _pids_below(folder: str) -> t.Set[int]:
    pids: t.Set[int] = set()
    folders = [folder]
    for place in folders:
        with contextlib.suppress(OSError, ValueError):
            pids.update(map(int, _processes.read_at(place + "/cgroup.procs").split()))
        with contextlib.suppress(OSError):
            with os.scandir(place) as entries:
                folders += [e.path for e in entries if len(folders) < MOST_GROUPS and e.is_dir(follow_symlinks=False)]
    return pids


def _network(proc: str, pid: t.Union[int, str]) -> int:
    try:
        return os.stat("%s/%s/ns/net" % (proc, pid)).st_ino
    except OSError:
        return 0


def _received(path: str) -> t.Optional[int]:
    """Bytes that came in through all interfaces but the loop."""
    try:
        rows = _processes.read_at(path).decode("ascii", "replace").splitlines()[2:]
        named = (row.partition(":") for row in rows)
        return sum(int(figures.split()[0]) for name, _colon, figures in named if name.strip() != "lo")
    except (OSError, ValueError, IndexError):
        return None


def _bytes_moved(path: str) -> t.Optional[int]:
    """Read and written through files and pipes, and read from disks on behalf of mapped files."""
    try:
        values = dict(line.split(b": ", 1) for line in _processes.read_at(path).splitlines())
        return int(values[b"rchar"]) + int(values[b"wchar"]) + int(values[b"read_bytes"])
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError):
        return None


def _memory(path: str) -> t.Optional[int]:
    try:
        return int(_processes.read_at(path).split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return None
