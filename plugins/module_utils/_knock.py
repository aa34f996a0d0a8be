# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Looks at a port that cost next to nothing: whether it takes a connection, and what status it answers with."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import ssl
import time
import typing as t
from urllib.parse import urlsplit

from . import _http

__all__ = ("PATIENCE", "connect", "knock", "peek")

PATIENCE = 0.05  # seconds for one address: on the host itself the kernel answers at once
PEEK_PATIENCE = 0.25
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])\b")
STATUS_BYTES = 512


def connect(address: str, port: int, patience: float) -> t.Optional[socket.socket]:
    """A connection, None where none is taken in time."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        link = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        link.setblocking(False)
        code = link.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(link, select.POLLOUT)
            poller.poll(patience * 1000.0)
            # Where it is still on its way, this says so: asking again tells without an error that was not there.
            code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or link.connect_ex((address, port))
        if code in (0, errno.EISCONN):
            return link
    except OSError:
        pass
    link.close()
    return None


def knock(addresses: t.Sequence[str], port: int, patience: float = PATIENCE) -> bool:
    """Whether a connection to one of the addresses is taken."""
    for address in addresses:
        link = connect(address, port, patience)
        if link is not None:
            link.close()
            return True
    return False


def peek(
    url: str, addresses: t.Sequence[str], access: _http.Access, patience: float = PEEK_PATIENCE
) -> t.Optional[int]:
    """The status of the answer to a GET, None where none comes at once. Of the answer nothing else is read."""
    end = time.monotonic() + patience
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for address in addresses:
        link = connect(address, port, max(0.0, min(PATIENCE, end - time.monotonic())))
        if link is None:
            continue
        try:
            with _secured(link, parts.scheme, parts.hostname or "", access, end) as stream:
                return _status(stream, _request(url, access), end)
        except (OSError, ValueError):
            return None
        finally:
            link.close()
    return None


def _secured(link: socket.socket, scheme: str, host: str, access: _http.Access, end: float) -> socket.socket:
    link.settimeout(max(0.01, end - time.monotonic()))
    if scheme != "https":
        return link
    if access.validate_certs:
        path = _http._verify(access)
        folder = isinstance(path, str) and os.path.isdir(path)
        context = ssl.create_default_context(
            cafile=path if isinstance(path, str) and not folder else None,
            capath=path if isinstance(path, str) and folder else None,
        )
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(link, server_hostname=host)


def _request(url: str, access: _http.Access) -> bytes:
    parts = urlsplit(url)
    headers = {"Host": parts.netloc, "User-Agent": "gpuops.serving", "Connection": "close"}
    headers.update({str(name): str(value) for name, value in (access.headers or {}).items()})
    if access.api_key:
        headers["Authorization"] = "Bearer " + access.api_key
    lines = ["GET %s HTTP/1.1" % (parts.path or "/")] + ["%s: %s" % pair for pair in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _status(link: socket.socket, request: bytes, end: float) -> t.Optional[int]:
    link.sendall(request)
    data = b""
    while b"\n" not in data and len(data) < STATUS_BYTES:
        left = end - time.monotonic()
        if left <= 0:
            return None
        link.settimeout(left)
        chunk = link.recv(STATUS_BYTES)
        if not chunk:
            break
        data += chunk
    found = STATUS_LINE.match(data)
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    return int(found.group(1)) if found else None
