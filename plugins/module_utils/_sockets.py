# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who listens, by the kernel's own tables: without a look at every process, which costs far more.

Each process has tables of the network that it is in, which may be one of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import typing as t

from . import _sock_diag

__all__ = ("Socket", "addresses", "came_in", "listening", "owners", "reached_at")

LISTENS = b"0A"
IN_BETWEEN = b"03"  # connections that are not taken yet: old kernels tell them with the socket that is to take them
MOST = 10000  # sockets that are looked at
MOST_BYTES = 1 << 20  # of a table of addresses
FAMILIES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))


class Socket(t.NamedTuple):
    """A listening TCP socket."""

    address: str
    port: int
    inode: int


class _Placed(t.Protocol):
    @property
    def address(self) -> str: ...


Placed = t.TypeVar("Placed", bound=_Placed)


def reached_at(rows: t.Sequence[Placed], addresses: t.Sequence[str]) -> t.List[Placed]:
    """The sockets that a connection can reach. Of one family, the kernel prefers the most precise address."""

    def at(*wanted: str) -> t.List[Placed]:
        return [row for row in rows if row.address in wanted]

    found: t.List[Placed] = []
    for address in addresses:
        if ":" in address:
            found += at(address) or at("::")
        else:
            found += at(address, "::ffff:" + address) or at("0.0.0.0") or at("::")
    return found


def listening(proc: str = "/proc", pid: t.Union[int, str] = "self") -> t.List[Socket]:
    """All listening TCP sockets of the network of a process; an OSError where there is no such table."""
    if (proc, pid) == ("/proc", "self"):
        # The tables tell the same for a hundred times the price.
        with contextlib.suppress(OSError):
            return [Socket(*row) for _name, family in FAMILIES for row in _sock_diag.listening(family)][:MOST]
    found: t.List[Socket] = []
    for words, family in _rows(proc, pid, lambda state: state in (LISTENS, IN_BETWEEN)):
        if words[3] == LISTENS and len(found) < MOST:
            found.append(Socket(*_end(words[1], family), int(words[9])))
    return found


def came_in(
    pid: t.Union[int, str], port: int, senders: t.Collection[str], proc: str = "/proc"
) -> t.Optional[t.Tuple[str, int]]:
    """Where in the network of a process a connection ends that was made at ``port`` of one of the senders."""
    for words, family in itertools.islice(_rows(proc, pid, lambda state: True), MOST):
        if words[3] != LISTENS:
            address, at = _end(words[2], family)
            if at == port and _plain(address) in senders:
                here, local = _end(words[1], family)
                return _plain(here), local
    return None


def _rows(
    proc: str, pid: t.Union[int, str], wanted: t.Callable[[bytes], bool]
) -> t.Iterator[t.Tuple[t.List[bytes], int]]:
    """The rows of the tables, as long as their states are wanted."""
    for name, family in FAMILIES:
        path = "%s/%s/net/%s" % (proc, pid, name)
        if family == socket.AF_INET6 and not os.path.exists(path):
            continue  # a kernel without that family
        with open(path, "rb") as stream:
            stream.readline()
            for line in stream:
                words = line.split(None, 10)
                # The kernel tells those that listen first: what comes after them may be a hundred thousand connections.
                if len(words) < 10 or not wanted(words[3]):
                    break
                yield words, family


def addresses(pid: t.Union[int, str] = "self", proc: str = "/proc") -> t.Set[str]:
    """The addresses of the network of a process, as far as they can be read."""
    found: t.Set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        with open("%s/%s/net/fib_trie" % (proc, pid), encoding="ascii", errors="replace") as stream:
            before = ""
            for line in stream.read(MOST_BYTES).splitlines():
                if "host LOCAL" in line:
                    found.add(before)
                before = line.rpartition("-- ")[2].strip()
    with contextlib.suppress(OSError, ValueError):
        with open("%s/%s/net/if_inet6" % (proc, pid), encoding="ascii", errors="replace") as stream:
            for line in stream.read(MOST_BYTES).splitlines():
                found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return found


def _plain(address: str) -> str:
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def _end(text: bytes, family: int) -> t.Tuple[str, int]:
    address, _colon, port = text.partition(b":")
    return _address(address, family), int(port, 16)


def _address(text: bytes, family: int) -> str:
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack("=%dI" % len(words), *words))


def owners(inodes: t.Collection[int], pids: t.Iterable[int], proc: str = "/proc") -> t.Dict[int, t.List[int]]:
    """Which of the processes have which of the sockets open, as far as that can be seen."""
    wanted = {"socket:[%d]" % inode: inode for inode in inodes}
    found: t.Dict[int, t.List[int]] = {}
    for pid in pids if wanted else ():
        folder = "%s/%d/fd" % (proc, pid)
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                inode = wanted.get(os.readlink("%s/%s" % (folder, entry)))
                if inode is not None and pid not in found.setdefault(inode, []):
                    found[inode].append(pid)
    return found
