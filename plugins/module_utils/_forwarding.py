# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a connection ends that others take in: proxies, sockets of systemd, and the kernel's address translation.

A proxy says on its command line where it leads to. Of a translation nothing is written down that could be read without
the tools of its maker, so a connection is made and then looked for in the networks of this host.
"""

from __future__ import annotations

import contextlib
import os
import re
import typing as t

from . import _knock, _ownership, _processes, _sockets, _systemd

__all__ = ("KEEPERS", "PROXIES", "End", "Ways", "described", "is_port", "leads_on", "network")

SYSTEMCTL_TIMEOUT = 10.0
KNOCK = 0.25  # seconds for a connection that the kernel leads on
SHORT_ID = 12
MOST_PORTS = 5  # of the unit, in a message
# What they have open keeps the port from others; the kernel leads connections past them.
KEEPERS = frozenset(("conmon", "dockerd"))
PROXIES = frozenset(("docker-proxy", "systemd-socket-"))  # a name has 15 characters in the kernel
SOCKET_PROXY = "systemd-socket-proxyd"


class End(t.NamedTuple):
    """Whose process listens where a connection ends: ``unit``, ``other``, or ``nobody`` yet."""

    whose: str
    text: str


class _Place(t.NamedTuple):
    network: int
    address: str
    port: int


def described(process: _processes.Process) -> str:
    """A process, with what it is in, for somebody who has to find it."""
    unit, container = _ownership.attribute(process)
    places = [] if container and container in (unit or "") else ["unit %s" % (unit or "none")]
    places += ["container %s" % container[:SHORT_ID]] if container else []
    return '%d "%s" (%s)' % (process.pid, process.name, ", ".join(places))


def network(pid: t.Union[int, str], proc: str = "/proc") -> int:
    """The network that a process is in; 0 where that cannot be seen."""
    try:
        return os.stat("%s/%s/ns/net" % (proc, pid)).st_ino
    except OSError:
        return 0


class Ways:
    """The ways by which connections to the port of a unit are led on, at one look.

    ``unsure`` says that the unit runs a container and that nothing tells which: then one that is younger than the unit
    may be it. ``late`` says the same of a manager that did not tell in time.
    """

    def __init__(
        self,
        port: int,
        addresses: t.Sequence[str],
        table: _processes.Table,
        owned: _ownership.Owned,
        unsure: bool = False,
        late: bool = False,
        timeout: float = SYSTEMCTL_TIMEOUT,
    ) -> None:
        self.port, self.addresses, self.table, self.owned, self.unsure = port, addresses, table, owned, unsure
        self.late = late
        self._timeout = timeout
        self._networks: t.Optional[t.Dict[int, t.List[_processes.Process]]] = None
        self._unseen = False  # whether there are processes whose network may not be seen
        self._led: t.Optional[t.Tuple[bool, t.Optional[End]]] = None

    # Ways on

    def behind(self, process: _processes.Process) -> t.Optional[End]:
        """Who listens where this proxy leads to; None when that cannot be told."""
        words = _words(process, self.table.proc)
        if process.name == "docker-proxy":
            address, port = _option(words, "container-ip"), _option(words, "container-port")
            if not address or not port.isdigit():
                return None
            at = [number for number in self.networks if address in self._addresses(number)]
            if not at and not self._unseen:
                return End("nobody", "port %s of %s, where no process is" % (port, address))
            return self._best([_Place(number, address, int(port)) for number in at])
        if words and os.path.basename(words[0]) == SOCKET_PROXY:
            here = network(process.pid, self.table.proc)
            return self._best([_Place(here, address, port) for address, port in _destination(words)])
        return None

    def is_rootlessport(self, process: _processes.Process) -> bool:
        """Whether it is one that podman runs from its own file, so that its name does not tell."""
        return "rootlessport" in "".join(_words(process, self.table.proc)[:1])

    def led(self) -> t.Tuple[bool, t.Optional[End]]:
        """Whether a connection is taken, and who has it when it has come to another network of this host."""
        if self._led is None:
            self._led = self._lead()
        return self._led

    def _lead(self) -> t.Tuple[bool, t.Optional[End]]:
        taken = False
        here, host = network("self", self.table.proc), _sockets.addresses("self", self.table.proc)
        for address in self.addresses:
            link = _knock.connect(address, self.port, KNOCK)
            if link is None:
                continue
            taken = True
            with link, contextlib.suppress(OSError):
                sender = link.getsockname()[1]
                for number in self.networks:
                    found = None
                    if number != here:
                        pid = self.networks[number][0].pid
                        with contextlib.suppress(OSError):
                            found = _sockets.came_in(pid, sender, host, self.table.proc)
                    if found is not None:
                        return True, self._best([_Place(number, *found)])
        return taken, None

    def of_socket_unit(self) -> t.Optional[End]:
        """Who is started for the port by a socket unit; None when no such unit is known."""
        words = ["show", "--property=Id,Listen,Triggers", "--", "*.socket"]
        _rc, out, _err = _systemd._systemctl(words, self._timeout)
        for block in out.split("\n\n"):
            lines = block.splitlines()
            listens = [line.partition("=")[2] for line in lines if line.startswith("Listen=")]
            if not any(is_port(line, self.port) for line in listens):
                continue
            told = dict(line.partition("=")[::2] for line in lines)
            name, services = told.get("Id", ""), told.get("Triggers", "").split()
            text = 'for "%s", which starts %s' % (name, " and ".join('"%s"' % one for one in services) or "nothing")
            return self._started(services, text)
        return None

    def _started(self, services: t.Sequence[str], text: str) -> t.Optional[End]:
        running = [p for p in self.table if not p.gone and _ownership.attribute(p)[0] in services]
        proxies = [p for p in running if p.name in PROXIES]
        for process in proxies:
            end = self.behind(process)
            return None if end is None else End(end.whose, "%s, which leads to %s" % (text, end.text))
        if not running:
            return End("nobody", text + ": that does not run")
        return End("other", text)

    # Where they end

    def _best(self, places: t.Sequence[_Place]) -> t.Optional[End]:
        """The end of several places that a connection may come to: the unit's, where one is."""
        ends = [end for end in map(self._end_at, places) if end is not None]
        ranks = ("unit", "other", "nobody")
        return min(ends, key=lambda end: ranks.index(end.whose)) if ends else None

    def _end_at(self, place: _Place) -> t.Optional[End]:
        members = self.networks.get(place.network, [])
        if not members:
            return None
        mine = [process for process in members if process.ref in self.owned.processes]
        # Another proxy beside the engine does not make its network somebody else's.
        others = [row for row in members if row.ref not in self.owned.processes and not leads_on(row)]
        try:
            found = _sockets.listening(self.table.proc, members[0].pid)
        except OSError:
            return None
        there = _sockets.reached_at([one for one in found if one.port == place.port], [place.address])
        inodes = {one.inode for one in there}
        where = "port %d of %s" % (place.port, place.address)
        having, own = self._having(inodes, mine)
        if inodes and not inodes - own:
            return End("unit", 'process %d "%s" of the unit, at %s' % (having[0].pid, having[0].name, where))
        # Several can share a port, and then any of them may answer.
        for process in self._having(inodes - own, others)[0]:
            return None if self.may_be_mine(process) else End("other", "%s, at %s" % (described(process), where))
        if inodes or any(self.may_be_mine(process) for process in others):
            return None
        ports = self._ports(mine, found)
        where += ", where nobody listens" + ("; the unit listens there on " + _known(ports) if ports else "")
        if mine or not others:
            return End("nobody", where)
        host = place.network == network("self", self.table.proc)
        return End("other", where if host else "%s, at %s" % (described(others[0]), where))

    def _having(
        self, inodes: t.Collection[int], processes: t.Sequence[_processes.Process]
    ) -> t.Tuple[t.List[_processes.Process], t.Set[int]]:
        """Which of the processes have some of the sockets, and which of the sockets they have."""
        owners = _sockets.owners(inodes, [process.pid for process in processes], self.table.proc)
        pids = {pid for found in owners.values() for pid in found}
        return [process for process in processes if process.pid in pids], set(owners)

    def _ports(self, mine: t.Sequence[_processes.Process], found: t.Sequence[_sockets.Socket]) -> t.Set[int]:
        own = self._having({one.inode for one in found}, mine)[1]
        return {one.port for one in found if one.inode in own}

    def inner(self) -> str:
        """Where the unit listens in networks of its own, in words; empty where it does not."""
        here, ports = network("self", self.table.proc), set()
        for number, members in self._of({ref.pid for ref in self.owned.processes}).items():
            with contextlib.suppress(OSError):
                found = [] if number == here else _sockets.listening(self.table.proc, members[0].pid)
                ports |= self._ports(members, found)
        return "in a network of its own the unit listens on %s" % _known(ports) if ports else ""

    def may_be_mine(self, process: _processes.Process) -> bool:
        """Whether it is in a container that may be the unit's, because nobody could tell which that is."""
        if not self.unsure or _ownership.attribute(process)[1] is None:
            return False
        firm = [ref.start for ref in self.owned.firm]
        return not firm or process.ref.start >= min(firm)

    # Networks

    @property
    def networks(self) -> t.Dict[int, t.List[_processes.Process]]:
        """All processes by the network that they are in, those of the unit first."""
        if self._networks is None:
            found = self._of({process.pid for process in self.table})
            mine = {ref.pid for ref in self.owned.processes}
            order = sorted(found, key=lambda number: not any(process.pid in mine for process in found[number]))
            self._networks = {number: found[number] for number in order}
        return self._networks

    def _of(self, pids: t.Collection[int]) -> t.Dict[int, t.List[_processes.Process]]:
        found: t.Dict[int, t.List[_processes.Process]] = {}
        for process in self.table:
            if process.pid in pids and not process.gone and not process.kernel_thread:
                try:
                    number = os.stat("%s/%d/ns/net" % (self.table.proc, process.pid)).st_ino
                    found.setdefault(number, []).append(process)
                except PermissionError:
                    self._unseen = True
                except OSError:
                    continue
        return found

    def _addresses(self, number: int) -> t.Set[str]:
        return _sockets.addresses(self.networks[number][0].pid, self.table.proc)


# Words


def leads_on(process: t.Optional[_processes.Process]) -> bool:
    """Whether somebody else serves what this process listens for, be it the unit's own or not."""
    return process is not None and process.name in KEEPERS | PROXIES


def _known(ports: t.Collection[int]) -> str:
    return ", ".join(map(str, sorted(ports)[:MOST_PORTS])) + (" and more" if len(ports) > MOST_PORTS else "")


def _words(process: _processes.Process, proc: str) -> t.List[str]:
    try:
        data = _processes.read_at("%s/%d/cmdline" % (proc, process.pid))
    except OSError:
        return []
    return data.decode("utf-8", "replace").rstrip("\0").split("\0")


def _option(words: t.Sequence[str], name: str) -> str:
    for number, word in enumerate(words):
        found = re.match(r"--?%s(?:=(.*))?\Z" % name, word)
        if found is not None:
            return found.group(1) or (words[number + 1] if number + 1 < len(words) else "")
    return ""


def _destination(words: t.Sequence[str]) -> t.List[t.Tuple[str, int]]:
    """Where systemd-socket-proxyd leads to: HOST:PORT is its last word; None of a path or of names that others know."""
    host, colon, port = words[-1].rpartition(":") if len(words) > 1 else ("", "", "")
    if not colon:
        host, port = (words[-1], "80") if len(words) > 1 else ("", "")
    host = host.strip("[]")
    if not port.isdigit() or not re.match(r"[0-9.]+\Z|[0-9a-fA-F:.]+\Z|localhost\Z", host):
        return []
    return [(address, int(port)) for address in (("127.0.0.1", "::1") if host == "localhost" else (host,))]


def is_port(line: str, port: int) -> bool:
    """Whether a line such as "[::]:8000 (Stream)" of a socket unit names the port."""
    return line.split(" ")[0].rpartition(":")[2] == str(port) and "(Stream)" in line
