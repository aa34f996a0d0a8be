# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""HAProxy through its runtime socket."""

from __future__ import annotations

import csv
import os
import re
import socket
import time
import typing as t

from ._errors import ServingError, UsageError
from ._gateways import Server

__all__ = ("Haproxy", "parse")

CALL_TIMEOUT = 5.0
MAX_BYTES = 16 << 20
MOST_PATH = 107  # bytes: the kernel takes no longer path of a socket
WORD = re.compile(r"[A-Za-z0-9_.:-]+\Z")


class Haproxy:
    """One backend of a running HAProxy."""

    def __init__(self, path: str, backend: str, server: str) -> None:
        for what, word in (("backend", backend), ("server", server)):
            if not WORD.match(word):
                raise UsageError('the %s name "%s" is not one that HAProxy can have' % (what, word))
        if "\0" in path or len(os.fsencode(path)) > MOST_PATH:
            raise UsageError('the path "%s" is no path of a socket: it may have %d bytes' % (path[:200], MOST_PATH))
        self.path, self.backend, self.server = path, backend, server

    def servers(self) -> t.Dict[str, Server]:
        statistics, state = self._ask("show stat"), self._ask("show servers state")
        found = parse(statistics, state, self.backend)
        if not found:
            known = ", ".join('"%s"' % name for name in backends(state)) or "none"
            raise ServingError(
                'the backend "%s" does not exist in the gateway at "%s", or has no servers: those with servers are %s'
                % (self.backend, self.path, known)
            )
        if self.server not in found:
            raise ServingError(
                'the server "%s" does not exist in the backend "%s": it has %s'
                % (self.server, self.backend, ", ".join('"%s"' % name for name in sorted(found)))
            )
        return found

    def set_state(self, server: str, state: str) -> None:
        word = "drain" if state == "drained" else "ready"
        said = self._ask("set server %s/%s state %s" % (self.backend, server, word)).strip()
        if said:
            remedy = ': give its "stats socket" the level admin' if "denied" in said.lower() else ""
            said = said.rstrip(".") + remedy
            raise ServingError('the gateway refuses to change the server "%s": %s' % (server, said))

    def _ask(self, command: str) -> str:
        """One command, one answer; bounded in time and size."""
        end = time.monotonic() + CALL_TIMEOUT
        parts: t.List[bytes] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(CALL_TIMEOUT)
                link.connect(self.path)
                link.sendall(command.encode("ascii") + b"\n")
                while sum(map(len, parts)) < MAX_BYTES:
                    link.settimeout(max(0.01, end - time.monotonic()))
                    part = link.recv(65536)
                    if not part:
                        break
                    parts.append(part)
        except socket.timeout:
            raise ServingError(
                'the gateway at "%s" does not answer "%s" within %g s' % (self.path, command, CALL_TIMEOUT)
            ) from None
        except OSError as error:
            raise ServingError('the gateway at "%s" cannot be asked: %s' % (self.path, error.strerror)) from error
        return b"".join(parts).decode("utf-8", "replace")


def parse(statistics: str, state: str, backend: str) -> t.Dict[str, Server]:
    """The servers of a backend, from ``show stat`` (sessions, health) and ``show servers state`` (what was told)."""
    told = _told(state, backend)
    found = {}
    for row in csv.DictReader(statistics.lstrip("# ").splitlines()):
        name = row.get("svname", "")
        if row.get("pxname") != backend or name not in told:
            continue
        found[name] = Server(
            admin=told[name],
            operational=row["status"],
            # Requests that wait for this very server will still be sent to it.
            sessions=int(row["scur"] or 0) + int(row["qcur"] or 0),
            weight=int(row["weight"] or 0),
            checked=row["status"] != "no check",
        )
    return found


def backends(state: str) -> t.List[str]:
    """The backends that have servers, by ``show servers state``."""
    return sorted({row["be_name"] for row in _rows(state)})


def _told(state: str, backend: str) -> t.Dict[str, str]:
    """The administrative state by server: in srv_admin_state, 1, 2, 4 and 32 mean maintenance, 8 and 16 drain."""
    told = {}
    for row in _rows(state):
        if row["be_name"] == backend:
            bits = int(row["srv_admin_state"])
            told[row["srv_name"]] = "maint" if bits & 0x27 else "drain" if bits & 0x18 else "ready"
    return told


def _rows(state: str) -> t.Iterator[t.Dict[str, str]]:
    """The servers of all backends. What another program says has no such rows."""
    heads: t.List[str] = []
    for line in state.splitlines():
        if line.startswith("#"):
            heads = line[1:].split()
            continue
        row = dict(zip(heads, line.split()))
        if {"be_name", "srv_name", "srv_admin_state"} <= set(row):
            yield row
