# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Containers whose client a unit runs: which they are, and how their manager is asked to stop them.

What the unit's own ExecStart= says was written by root. What a live client's arguments say is believed as far as its
user could do the same: any container where the client runs as root or its user may write the daemon's socket, and
else only containers whose processes are all that user's.

A container that bears the name is not yet the unit's: see ``_inspected.refusal``.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, TypeVar

from . import _bounded, _clients, _files
from ._accounts import account_of
from ._asking import Request, Said, as_user, ask, program, read
from ._clients import Client
from ._inspected import Facts, elsewhere, in_last_life, not_his, parse, refusal
from ._places import Container, attribute, containers_of, machine_of
from ._processes import Process, ProcessRef, Table
from ._systemd import UnitState

if TYPE_CHECKING:
    from ._ownership import Owned

__all__ = ["Container", "Request", "Tracker"]

SECONDS = 3.0  # for all questions and readings of one stop: a daemon that hangs must not make it late
ANSWER = 2.0  # of these for one answer at most
FILES = 1.0  # and for one reading of files
LEAST = 0.05
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock")
ADVICE = "give the container a --name in the unit's ExecStart="

Told = TypeVar("Told")


class _Untold(Exception):
    """What systemd or a file did not tell."""


class Source(NamedTuple):
    """A client, who speaks of it, and with whose rights it works."""

    client: Client
    uid: int
    told_by: str  # for messages
    trusted: bool


class Tracker:
    """The containers of one unit; each client is resolved once."""

    def __init__(
        self,
        asking: Callable[[list[str], float], tuple[int, str, str]] = ask,
        reading: Callable[[list[ProcessRef], float], dict[ProcessRef, Said]] = read,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        seconds: float = SECONDS,
    ) -> None:
        self.warnings: list[str] = []
        self._ask = asking
        self._read = reading
        self._now = now
        self._monotonic = monotonic
        self._seconds = self._left = seconds
        self._unit = ""
        self._resolved: set[tuple[str, int, tuple[str, ...], str]] = set()
        self._key: object = None
        self._found: dict[str, Container] = {}
        self._lines: dict[ProcessRef, Said] = {}
        self._commands: tuple[list[list[str]], dict[str, str]] | None = None

    def containers(self, table: Table, state: UnitState, owned: Owned) -> dict[str, Container]:
        """The containers that the unit is the client of, by their ids.

        What all looks of one stop may cost here is limited. What is not known by then is not asked for any more, and a
        warning says so.
        """
        self._unit = state.name
        clients = [p for p in table if p.name in _clients.MANAGERS and not p.gone]
        mine = [p for p in clients if p.ref in owned.firm and not containers_of(p)]
        raw = state.raw.get
        key = (
            state.invocation_id,
            raw("ExecMainStartTimestampMonotonic"),
            raw("ExecMainExitTimestampMonotonic"),
            frozenset(p.ref for p in mine),
        )
        if key != self._key:
            self._key = key
            self._resolved.clear()
            others = [p for p in clients if p.ref not in owned.processes and _service(p) not in (None, state.name)]
            for source in self._sources(table, state, mine):
                self._resolve(table, state, source, others)
        return dict(self._found)

    # Who speaks of a client

    def _sources(self, table: Table, state: UnitState, mine: list[Process]) -> list[Source]:
        found = []
        user = _uid(state.raw.get("User", ""))
        commands, variables = self._exec_start(state)
        for words in commands:
            for client in _clients.find(_clients.expand(words, variables), variables):
                found.append(Source(client, user, "its ExecStart=", True))
        self._learn(mine)
        for process in (p for p in mine if p.ref in self._lines):
            words, environment = self._lines[process.ref]
            for client in _clients.find(words, environment):
                if client.verb not in ("run", "start") and process.pid != state.main_pid:
                    continue  # a look into a container, not the engine
                told_by = 'the process %d "%s"' % (process.pid, process.name)
                # Whoever may write the daemon's socket may do anything to any container already.
                trusted = process.uid == 0 or (client.manager == "docker" and _may_write(process))
                found.append(Source(client, process.uid, told_by, trusted))
        # What a live client says is exact, and ExecStart= may hold variables: a name that either tells is enough.
        told = {source.client.manager for source in found if source.client.names or source.client.cidfile}
        for process in mine:
            manager = process.name.replace("systemd-", "")
            if process.ref not in self._lines and manager not in told:
                self._warn(
                    'the command line of the client %d "%s" of the unit "%s" cannot be read: its container is not found'
                    % (process.pid, process.name, state.name)
                )
        return [s for s in found if s.client.names or s.client.cidfile or s.client.manager not in told]

    def _exec_start(self, state: UnitState) -> tuple[list[list[str]], dict[str, str]]:
        """The commands of the unit, word by word, and the variables that systemd puts in: asked for once."""
        if self._commands is None and state.name.endswith(".service") and state.found:
            try:
                commands = [[entry[0], *entry[1][1:]] for entry in self._property(state.name, "ExecStart") if entry[1]]
                used = any(_clients.find(words, {}) for words in commands)
                self._commands = commands, self._variables(state.name) if used else {}
            except _Untold as untold:
                if any(map(program, _clients.MANAGERS)):
                    self._warn(
                        'the %s of the unit "%s" cannot be read: a container of it whose client has ended is not found'
                        % (untold, state.name)
                    )
        return self._commands or ([], {})

    def _variables(self, unit: str) -> dict[str, str]:
        """The variables that systemd puts into the commands of the unit."""
        found = dict(word.split("=", 1) for word in self._property(unit, "Environment") if "=" in word)
        paths = [path for path, _optional in self._property(unit, "EnvironmentFiles")]
        told: dict[str, str] = {}
        if paths:
            told = self._within(lambda limit: _files.texts(paths, min(FILES, limit)), told)
        for path in paths:
            if path not in told:
                raise _Untold('EnvironmentFile= "%s"' % path)
            found.update(_variables(told[path]))
        return found

    def _property(self, unit: str, name: str) -> list[Any]:
        """A property of the unit as systemd keeps it: `systemctl show` does not tell where a word ends."""
        escaped = "".join(c if c.isalnum() and (i or not c.isdigit()) else "_%02x" % ord(c) for i, c in enumerate(unit))
        words = ["busctl", "--json=short", "get-property", "org.freedesktop.systemd1"]
        words += ["/org/freedesktop/systemd1/unit/" + escaped, "org.freedesktop.systemd1.Service", name]
        rc, out, err = self._asked(words)
        try:
            data = json.loads(out)["data"] if rc == 0 else None
        except (ValueError, KeyError, TypeError):
            data = None
        if not isinstance(data, list):
            raise _Untold("%s= (%s)" % (name.replace("EnvironmentFiles", "EnvironmentFile"), err or "no usable answer"))
        return data

    def _learn(self, clients: Iterable[Process]) -> None:
        missing = [p.ref for p in clients if p.ref not in self._lines]
        if missing:
            none: dict[ProcessRef, Said] = {}
            self._lines.update(self._within(lambda limit: self._read(missing, limit), none))

    def _ids(self, paths: list[str]) -> dict[str, str]:
        """What clients wrote into files; what cannot be read in time is missing."""
        none: dict[str, str] = {}
        return self._within(lambda limit: _files.ids(paths, min(FILES, limit)), none) if paths else none

    # Which container it is

    def _resolve(self, table: Table, state: UnitState, source: Source, others: list[Process]) -> None:
        client, subject = source.client, 'the unit "%s"' % state.name
        if client.manager == "nspawn":
            if not client.keep_unit and source.uid == 0:
                self._machine(table, state, client)
            return
        if client.elsewhere:
            self._warn(
                "%s runs a %s container on another host or in another context (%s): what runs there is not stopped"
                % (subject, client.manager, client.elsewhere)
            )
            return
        if client.verb not in ("run", "start"):
            self._warn(
                '%s runs "%s %s": which containers that means is not known here, and none is stopped'
                % (subject, client.manager, client.verb)
            )
            return
        written = self._ids([client.cidfile]) if client.cidfile and not client.names else {}
        names = [name for name in client.names or written.values() if name]
        if not names:
            self._warn(
                "which container %s runs through %s cannot be told from %s: what is left of it is not found; %s"
                % (subject, client.manager, source.told_by, ADVICE)
            )
        for name in names:
            self._inspect(table, state, source, name, others)

    def _inspect(self, table: Table, state: UnitState, source: Source, name: str, others: list[Process]) -> None:
        client = source.client
        what = 'the %s container "%s" of the unit "%s"' % (client.manager, name, state.name)
        # The daemon of the host does not ask who the client is; any other one, and a store, is its user's own.
        uid = 0 if source.trusted and client.manager == "docker" and "--host" not in client.options else source.uid
        if (client.manager, uid, client.options, name) in self._resolved:
            return
        self._resolved.add((client.manager, uid, client.options, name))
        if uid < 0:
            self._warn("%s cannot be looked up: the unit's user is not known on this host" % what)
            return
        words = _words(client, uid)
        if not words:
            self._warn('%s cannot be looked up: no "%s" in a folder that only root may write' % (what, client.manager))
            return
        rc, out, err = self._asked([*words, "inspect", "--type", "container", name])
        facts = parse(out) if rc == 0 else None
        if facts is None:
            if not re.search(r"no such (?:container|object)", err, re.IGNORECASE):
                self._warn("%s cannot be looked up: %s" % (what, err or "%s gave no usable answer" % client.manager))
            return
        if facts.pid <= 0 and not facts.restarted:
            return  # it does not run, and nothing will make it
        why = (
            elsewhere(table, state, facts)
            or ("" if uid == 0 else not_his(table, facts, uid))
            or self._claimed(facts, name, others)
            or refusal(client, facts, state, self._now())
        )
        if why:
            self._warn("%s is left alone: %s" % (what, why))
            return
        stop = (*words, "stop", "-t", "{seconds}", facts.id)
        self._found[facts.id] = Container(client.manager, facts.id, facts.name or name, stop, facts.restarted)

    def _claimed(self, facts: Facts, name: str, others: list[Process]) -> str:
        """Why the container may be another unit's, empty when no other unit runs a client of it."""
        self._learn(others)
        said = {p.ref: _clients.find(*self._lines[p.ref]) for p in others if p.ref in self._lines}
        paths = sorted({c.cidfile for found in said.values() for c in found if c.cidfile and not c.names})
        written = self._ids(paths)
        for process in others:
            if process.ref not in self._lines:
                return (
                    'the client %d "%s" of the unit "%s" may be another one of it, and its command line cannot be read'
                    % (
                        process.pid,
                        process.name,
                        _service(process),
                    )
                )
            for client in said[process.ref]:
                if client.cidfile in paths and client.cidfile not in written:
                    return 'the unit "%s" may run a client of it too: the file "%s" cannot be read in time' % (
                        _service(process),
                        client.cidfile,
                    )
                names = client.names or (written.get(client.cidfile, ""),)
                if any(n and (n in (name, facts.name) or facts.id.startswith(n)) for n in names):
                    return 'the unit "%s" runs a client of it too' % _service(process)
        return ""

    def _machine(self, table: Table, state: UnitState, client: Client) -> None:
        name = client.names[0] if client.names else ""
        if not name:
            self._warn(
                'the name of the machine that the unit "%s" runs cannot be told: give it a --machine=' % state.name
            )
            return
        members = [p for p in table if name == machine_of(p) and not p.gone]
        if not members or name in self._found:
            return
        first = min(members, key=lambda p: p.ref.start)
        ours = in_last_life(state, first.create_time, self._now())
        if ours or self._within(lambda limit: _same_folder(first.pid, client.folder, limit), False):
            self._found[name] = Container("nspawn", name, name)
            return
        self._warn(
            'the machine "%s" is left alone: it was not started by the unit "%s" in its last life, and its root is not'
            " the unit's" % (name, state.name)
        )

    def _asked(self, words: list[str]) -> tuple[int, str, str]:
        return self._within(lambda limit: self._ask(words, limit), (-1, "", "there was no time left for an answer"))

    def _within(self, call: Callable[[float], Told], untold: Told) -> Told:
        """What something tells that may hang, as long as there is time for it."""
        allowed = min(ANSWER, self._left)
        if allowed < LEAST:
            self._warn(
                'which containers the unit "%s" runs could not be told within %.3g s: what is left of them is not found'
                % (self._unit, self._seconds)
            )
            return untold
        began = self._monotonic()
        try:
            return call(allowed)
        finally:
            self._left -= self._monotonic() - began

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def _words(client: Client, uid: int) -> list[str]:
    """How the client is called by us, empty when it may not be."""
    path = program(client.manager)
    if not path:
        return []
    return [*as_user(uid), path, *client.options] if uid else [path, *client.options]


def _may_write(process: Process) -> bool:
    """Whether the process's user may write the socket of the host's docker daemon."""
    for path in SOCKETS:
        try:
            facts = os.stat(path)
        except OSError:
            continue
        if facts.st_uid == process.uid:
            return bool(facts.st_mode & stat.S_IWUSR)
        if facts.st_gid in process.gids:
            return bool(facts.st_mode & stat.S_IWGRP)
        return bool(facts.st_mode & stat.S_IWOTH)
    return False


def _same_folder(pid: int, folder: str, limit: float) -> bool:
    """Whether the root of a process is that folder; looked at in a child, since either may be on a dead server."""
    if not folder:
        return False

    def look(_report: _bounded.Report) -> bool:
        return os.path.samestat(os.stat("/proc/%d/root" % pid), os.stat(folder))

    return _bounded.run(look, limit).value is True


def _service(process: Process) -> str | None:
    unit = attribute(process)[0]
    return unit if unit is not None and unit.endswith(".service") else None


def _uid(user: str) -> int:
    """The uid of User=, root without one; one that is not known here is nobody's."""
    if not user:
        return 0
    if user.isdigit():
        return int(user)
    known = account_of(user)
    return known.pw_uid if known is not None else -1


def _variables(text: str) -> dict[str, str]:
    """The variables in an environment file, as far as simple lines tell them."""
    found = re.findall(r"^\s*([A-Za-z_][A-Za-z0-9_]*)=(.*?)\s*$", text, re.M)
    return {
        name: value[1:-1] if value[:1] in "\"'" and value[-1:] == value[:1] else value for name, value in found if value
    }
