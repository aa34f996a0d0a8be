# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Cheap looks at real ports of this host."""

from __future__ import annotations

import os
import pathlib
import socket
import threading
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _http, _knock, _sockets


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> t.Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.bind((request.param, 0))
    except OSError:
        pytest.skip("this host has no such address")
    with found:
        yield found


def test_a_port_takes_a_connection_once_somebody_listens(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    assert not _knock.knock([address], port)
    server.listen(1)
    assert _knock.knock([address], port)
    assert _knock.knock(["192.0.2.1", address], port)


def test_a_knock_costs_next_to_nothing(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    best = 1.0
    for _try in range(20):
        began = time.perf_counter()
        _knock.knock([address], port)
        best = min(best, time.perf_counter() - began)
    assert best < 0.001


def test_an_address_that_does_not_answer_costs_its_patience() -> None:
    began = time.monotonic()
    assert not _knock.knock(["192.0.2.1"], 9, 0.05)
    assert time.monotonic() - began < 1.0


def test_who_listens_is_found_without_a_look_at_all_processes(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    assert [one for one in _sockets.listening() if one.port == port] == []
    server.listen(1)
    (found,) = [one for one in _sockets.listening() if one.port == port]
    assert (found.address, found.inode) == (address, os.fstat(server.fileno()).st_ino)
    assert _sockets.owners({found.inode}, [os.getpid(), 1]) == {found.inode: [os.getpid()]}
    assert _sockets.owners({found.inode}, [os.getppid()]) == {}
    with socket.create_connection((address, port)):
        assert len([one for one in _sockets.listening() if one.port == port]) == 1


def test_only_the_sockets_that_listen_are_read(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "self" / "net"
    folder.mkdir(parents=True)
    rows = "  %d: %s 00000000:0000 %s 00000000:00000000 00:00000000 00000000 0 0 %d 1 0 100 0 0 10 0\n"
    (folder / "tcp").write_text(
        "  sl  local_address rem_address   st\n"
        + rows % (0, "0100007F:1F90", "0A", 77)
        + rows % (1, "0100007F:1F90", "03", 0)
        + rows % (2, "00000000:0016", "0A", 78)
        + rows % (3, "0100007F:1F90", "01", 79)
        + rows % (4, "0100007F:1F91", "0A", 80)
    )
    (folder / "tcp6").write_text(
        "  sl  local_address                         remote_address                        st\n"
        + rows % (0, "00000000000000000000000001000000:1F90", "0A", 81)
    )
    found = _sockets.listening(str(tmp_path))
    assert [(one.address, one.port, one.inode) for one in found] == [
        ("127.0.0.1", 8080, 77),
        ("0.0.0.0", 22, 78),
        ("::1", 8080, 81),
    ]
    (folder / "tcp6").unlink()
    assert len(_sockets.listening(str(tmp_path))) == 2
    (folder / "tcp").unlink()
    with pytest.raises(OSError):
        _sockets.listening(str(tmp_path))


def answer(server: socket.socket, *pieces: bytes, pause: float = 0.0) -> t.Dict[str, bytes]:
    """Take one connection, and send the pieces."""
    server.listen(1)
    seen: t.Dict[str, bytes] = {}
    over = threading.Event()

    def serve() -> None:
        link, _address = server.accept()
        with link:
            seen["request"] = link.recv(4096)
            try:
                for piece in pieces:
                    link.sendall(piece)
                    over.wait(pause)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    return seen


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), 503),
        ((b"HTTP/1.0 200 OK\r\n", b"rest"), 200),
        ((b"HT", b"TP/1.1 401 No\r\n"), 401),
        ((b"220 smtp.example.com\r\n",), None),
        ((b"\x15\x03\x01\x00\x02",), None),
        ((b"",), None),
        ((b"x" * 4096,), None),
    ],
)
def test_the_status_alone_is_read(server: socket.socket, pieces: t.Tuple[bytes, ...], status: t.Optional[int]) -> None:
    address, port = server.getsockname()[:2]
    seen = answer(server, *pieces)
    host = "[%s]" % address if ":" in address else address
    url = "http://%s:%d/health" % (host, port)
    access = _http.Access(api_key="k", headers={"X-A": "b"})
    assert _knock.peek(url, [address], access, 5.0) == status
    assert seen["request"].startswith(b"GET /health HTTP/1.1\r\nHost: %s:%d\r\n" % (host.encode(), port))
    assert b"\r\nAuthorization: Bearer k\r\n" in seen["request"] and b"\r\nX-A: b\r\n" in seen["request"]


def test_a_server_that_trickles_or_is_silent_costs_the_patience(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    answer(server, *[b"H"] * 50, pause=0.05)
    host = "[%s]" % address if ":" in address else address
    began = time.monotonic()
    assert _knock.peek("http://%s:%d/" % (host, port), [address], _http.Access(), 0.2) is None
    assert time.monotonic() - began < 1.0


def test_nobody_there(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    assert _knock.peek("http://x:%d/" % port, [address], _http.Access(), 1.0) is None


def test_what_speaks_no_tls_is_no_status(server: socket.socket) -> None:
    address, port = server.getsockname()[:2]
    answer(server, b"HTTP/1.1 200 OK\r\n\r\n")
    assert _knock.peek("https://x:%d/" % port, [address], _http.Access(validate_certs=False), 2.0) is None
