# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who listens on this host, by the kernel's own table: without a look at every process, which costs far more."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import typing as t

__all__ = ("Socket", "listening", "owners")

LISTENS = b"0A"
IN_BETWEEN = b"03"  # connections that are not taken yet: old kernels tell them with the socket that is to take them
MOST = 10000  # sockets that are looked at
FAMILIES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))


class Socket(t.NamedTuple):
    """A listening TCP socket."""

    address: str
    port: int
    inode: int


def listening(proc: str = "/proc") -> t.List[Socket]:
    """All listening TCP sockets of this network; an OSError where there is no such table."""
    found: t.List[Socket] = []
    for name, family in FAMILIES:
        path = "%s/self/net/%s" % (proc, name)
        if family == socket.AF_INET6 and not os.path.exists(path):
            continue  # a kernel without that family
        with open(path, "rb") as stream:
            stream.readline()
            for line in stream:
                words = line.split(None, 10)
                # The kernel tells those that listen first: what comes after them may be a hundred thousand connections.
                if len(words) < 10 or words[3] not in (LISTENS, IN_BETWEEN) or len(found) >= MOST:
                    break
                if words[3] == IN_BETWEEN:
                    continue
                address, _colon, port = words[1].partition(b":")
                found.append(Socket(_address(address, family), int(port, 16), int(words[9])))
    return found


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
