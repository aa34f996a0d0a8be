# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who listens, asked of the kernel by netlink (sock_diag(7)), as ss does.

The tables below /proc walk through all places for connections that the kernel has, which takes milliseconds even where
there is none; asked for those that listen, it looks at those alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import typing as t

__all__ = ("listening",)

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST, NLM_F_DUMP, NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
NLMSG_ERROR, NLMSG_DONE = 2, 3
LISTEN = 10  # TCP_LISTEN
PATIENCE = 1.0  # seconds for each answer
LONGEST = 1 << 16  # bytes: the kernel answers in parts of 32 KiB at most

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
# inet_diag_req_v2 with an inet_diag_sockid that fits everybody
REQUEST = struct.Struct("=BBBxI48x")
# inet_diag_msg: family, state; ports and addresses in the order of the network; then figures, the last is the inode
ANSWER = struct.Struct("=BBxx2s2x16s16x12x16xI")
CODE = struct.Struct("=i")
PORT = struct.Struct("!H")

Row = t.Tuple[str, int, int]


def listening(family: int) -> t.List[Row]:
    """Address, port and inode of each TCP socket of a family that listens in the network of this process.

    An OSError where the kernel does not tell, or not all at once.
    """
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with contextlib.closing(socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)) as link:
        link.settimeout(PATIENCE)
        body = REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << LISTEN)
        head = HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 1, 0)
        link.sendto(head + body, (0, 0))
        found: t.List[Row] = []
        while True:
            data, _room, flags, sender = link.recvmsg(LONGEST)
            if sender[0] != 0:
                continue  # not from the kernel
            if flags & socket.MSG_TRUNC:
                raise OSError(errno.EMSGSIZE, "the kernel's answer is longer than it may be")
            rows, over = _part(data, family)
            found += rows
            if over:
                return found


def _part(data: bytes, family: int) -> t.Tuple[t.List[Row], bool]:
    """The rows in one answer, and whether it is the last."""
    rows: t.List[Row] = []
    at = 0
    while at + HEADER.size <= len(data):
        length, kind, flags, _sequence, _port = HEADER.unpack_from(data, at)
        body = data[at + HEADER.size : at + length]
        if length < HEADER.size or len(body) != length - HEADER.size:
            raise OSError(errno.EPROTO, "the kernel's answer ends too early")
        if flags & NLM_F_DUMP_INTR:
            raise OSError(errno.EINTR, "the sockets changed while the kernel told of them")
        if kind in (NLMSG_ERROR, NLMSG_DONE):
            code = -CODE.unpack_from(body)[0] if len(body) >= CODE.size else 0
            if code > 0:
                raise OSError(code, os.strerror(code))
            return rows, True
        if kind == SOCK_DIAG_BY_FAMILY:
            if len(body) < ANSWER.size:
                raise OSError(errno.EPROTO, "the kernel's answer ends too early")
            of, state, port, address, inode = ANSWER.unpack_from(body)
            if (of, state) == (family, LISTEN):
                size = 4 if family == socket.AF_INET else 16
                rows.append((socket.inet_ntop(family, address[:size]), PORT.unpack(port)[0], inode))
        at += (length + 3) & ~3
    return rows, False
