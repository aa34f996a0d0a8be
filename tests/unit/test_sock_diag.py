# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who listens by netlink: the same as the tables say, and never half of it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _sock_diag, _sockets

FAMILIES = (socket.AF_INET, socket.AF_INET6)
V6 = ("::1", "::", "::ffff:127.0.0.1") if os.path.exists("/proc/net/if_inet6") else ()
DONE, ERROR, SOCK = 3, 2, 20


@contextlib.contextmanager
def listeners(count: int, *addresses: str) -> t.Iterator[t.Set[t.Tuple[str, int, int]]]:
    """So many sockets that listen at each address, as they are to be found."""
    with contextlib.ExitStack() as stack:
        found = set()
        for address in addresses:
            for _number in range(count):
                server = stack.enter_context(socket.socket(FAMILIES[":" in address]))
                if ":" in address:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not address.startswith("::ffff:")))
                server.bind((address, 0))
                server.listen(1)
                found.add((address, server.getsockname()[1], os.fstat(server.fileno()).st_ino))
        yield found


def test_all_who_listen_are_told_with_their_addresses_and_numbers() -> None:
    # So many that the kernel answers in several parts.
    with listeners(200, "127.0.0.1", "0.0.0.0", *V6) as wanted:
        found = [row for family in FAMILIES for row in _sock_diag.listening(family)]
        tables = {tuple(row) for row in _sockets.listening(pid=os.getpid())}
    assert len(found) == len(set(found))
    assert wanted <= set(found)
    assert wanted <= tables


def test_who_does_not_listen_is_not_told() -> None:
    with socket.socket() as bound, listeners(1, "127.0.0.1") as wanted:
        bound.bind(("127.0.0.1", 0))
        ((_address, port, inode),) = wanted
        with socket.create_connection(("127.0.0.1", port)) as link:
            found = _sock_diag.listening(socket.AF_INET)
            assert [row for row in found if row[1] in (port, bound.getsockname()[1], link.getsockname()[1])] == [
                ("127.0.0.1", port, inode)
            ]


def message(kind: int, body: bytes = b"", flags: int = 2, length: t.Optional[int] = None) -> bytes:
    padded = body + b"\0" * (-len(body) % 4)
    return struct.pack("=IHHII", 16 + len(body) if length is None else length, kind, flags, 1, 0) + padded


def row(port: int, inode: int, family: int = socket.AF_INET, state: int = 10) -> bytes:
    body = struct.pack("=BBBB", family, state, 0, 0) + struct.pack("!HH", port, 0)
    body += bytes((127, 0, 0, 1)) + bytes(12) + bytes(16 + 12 + 16)
    return message(SOCK, body + struct.pack("=I", inode))


class Kernel:
    """A socket that answers as it is told."""

    def __init__(self, *parts: bytes, sender: int = 0, cut: bool = False) -> None:
        self.parts, self.sender, self.cut = list(parts), sender, cut

    def __call__(self, *_facts: int) -> Kernel:
        return self

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 1

    def sendto(self, data: bytes, where: t.Tuple[int, int]) -> None:
        assert struct.unpack_from("=IHHII", data) == (len(data), SOCK, 0x301, 1, 0)
        assert where == (0, 0)

    def recvmsg(self, _size: int) -> t.Tuple[bytes, t.List[t.Any], int, t.Tuple[int, int]]:
        if not self.parts:
            raise TimeoutError("timed out")
        sender, self.sender = self.sender, 0
        return self.parts.pop(0), [], socket.MSG_TRUNC if self.cut else 0, (sender, 0)

    def close(self) -> None:
        pass


def ask(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> t.List[t.Tuple[str, int, int]]:
    monkeypatch.setattr(socket, "socket", kernel)
    return _sock_diag.listening(socket.AF_INET)


def test_answers_come_in_parts_until_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done = message(DONE, struct.pack("=i", 0))
    parts = (row(80, 1) + row(81, 2), row(82, 3), row(83, 4) + done)
    assert [found[1:] for found in ask(monkeypatch, Kernel(*parts))] == [(80, 1), (81, 2), (82, 3), (83, 4)]
    others = row(81, 2, family=socket.AF_INET6) + row(82, 3, state=1) + message(1) + row(83, 4)
    assert ask(monkeypatch, Kernel(others, done)) == [("127.0.0.1", 83, 4)]


def test_what_did_not_come_from_the_kernel_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = message(DONE, struct.pack("=i", 0))
    assert ask(monkeypatch, Kernel(row(80, 1) + done, row(81, 2) + done, sender=4711)) == [("127.0.0.1", 81, 2)]


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(row(80, 1)),  # and then nothing
        Kernel(row(80, 1) + message(ERROR, struct.pack("=i", -2))),  # a kernel without it
        Kernel(row(80, 1), message(DONE, struct.pack("=i", -4))),
        Kernel(row(80, 1), message(SOCK, row(81, 2)[16:], flags=0x12), message(DONE)),
        Kernel(row(80, 1)[:-4]),
        Kernel(message(SOCK, b"", length=3)),
        Kernel(message(SOCK, bytes((2, 10, 0, 0)))),
        Kernel(row(80, 1) + message(DONE), cut=True),
    ],
    ids=["silent", "error", "broken off", "changed", "short", "no length", "no row", "cut"],
)
def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    with pytest.raises(OSError):
        ask(monkeypatch, kernel)


def test_the_tables_tell_where_the_kernel_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_family: int) -> t.NoReturn:
        raise PermissionError(1, "Operation not permitted")

    with listeners(1, "127.0.0.1", *V6[:1]) as wanted:
        asked = {tuple(one) for one in _sockets.listening()}
        monkeypatch.setattr(_sock_diag, "listening", refuse)
        assert wanted <= {tuple(one) for one in _sockets.listening()}
        # The other family's answer alone would be half of it.
        monkeypatch.setattr(_sock_diag, "listening", lambda family: [] if family == socket.AF_INET else refuse(family))
        assert wanted <= {tuple(one) for one in _sockets.listening()}
    assert wanted <= asked
