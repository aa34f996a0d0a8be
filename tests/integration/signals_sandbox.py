# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A real journald with a journal of its own, without systemd: in namespaces that end with the test.

A unit is a control group, and the file by which systemd tells journald of its invocation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
import typing as t

JOURNALD = "/lib/systemd/systemd-journald"
UNIT = "signals-test.service"
LIVES = ("0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210")
NAMESPACES = ("unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child")
CGROUPS = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")


def usable() -> bool:
    """Whether such a sandbox can be made here."""
    if os.geteuid() != 0 or not os.path.exists(JOURNALD) or unified() is None:
        return False
    return subprocess.run([*NAMESPACES, "true"], check=False).returncode == 0


def unified() -> t.Optional[str]:
    return next((path for path in CGROUPS if os.path.exists(path + "/cgroup.procs")), None)


class Sandbox:
    """In the namespaces: the journal, and a unit that writes to it."""

    def __init__(self, **settings: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/var/log"], check=True)
        for folder in ("journal", "units", "journald.conf.d", "system"):
            os.makedirs("/run/systemd/" + folder)
        given = {"Storage": "volatile", "RateLimitIntervalSec": "0", **settings}
        with open("/run/systemd/journald.conf.d/test.conf", "w", encoding="ascii") as stream:
            stream.write("[Journal]\n" + "".join("%s=%s\n" % pair for pair in given.items()))
        self.group = "/system.slice/" + UNIT
        self.folder = (unified() or "") + self.group
        os.makedirs(self.folder, exist_ok=True)
        self.life(0)
        self.journald: t.Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        self.journald = subprocess.Popen([JOURNALD], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while not os.path.exists("/run/systemd/journal/stdout"):
            assert time.monotonic() < end, "journald does not start"
            time.sleep(0.02)

    def life(self, number: int) -> None:
        """Which start of the unit this is."""
        link = "/run/systemd/units/invocation:" + UNIT
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
        os.symlink(LIVES[number], link)

    def rotate(self, *options: str) -> None:
        assert self.journald is not None
        self.journald.send_signal(signal.SIGUSR2)
        time.sleep(0.3)
        if options:
            subprocess.run(["journalctl", "--quiet", *options], check=True, stderr=subprocess.DEVNULL)

    def writer(self) -> Writer:
        return Writer(self.folder)

    def systemd_says(self, text: str, life: int = 0) -> None:
        """Only what the first process writes counts as systemd's own word, and that is who calls this."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.connect("/run/systemd/journal/socket")
            fields = {"MESSAGE": text, "UNIT": UNIT, "INVOCATION_ID": LIVES[life], "PRIORITY": "6"}
            link.send("".join("%s=%s\n" % pair for pair in fields.items()).encode())

    def end(self) -> None:
        if self.journald is not None:
            self.journald.kill()
            self.journald.wait()
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


class Writer:
    """A process of the unit, and its standard output as systemd connects it."""

    def __init__(self, folder: str) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, reader)  # those of others too: their readers wait for the last of these to be closed
            os.closerange(reader + 1, 256)
            with open(folder + "/cgroup.procs", "w", encoding="ascii") as stream:
                stream.write("0")
            links: t.Dict[bytes, socket.socket] = {}
            while True:
                head = os.read(reader, 5)
                if len(head) < 5:
                    os._exit(0)
                kind, size = head[:1], struct.unpack("<I", head[1:])[0]
                data = b""
                while len(data) < size:
                    data += os.read(reader, size - len(data))
                if kind not in links:
                    links[kind] = self._connect(kind)
                links[kind].sendall(data)
        os.close(reader)
        self._pipe = writer

    @staticmethod
    def _connect(kind: bytes) -> socket.socket:
        if kind == b"n":
            link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            link.connect("/run/systemd/journal/socket")
            return link
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect("/run/systemd/journal/stdout")
        link.sendall(b"engine\n\n6\n0\n0\n0\n0\n")
        return link

    def write(self, data: bytes) -> None:
        """To its standard output."""
        self._send(b"s", data)

    def native(self, message: bytes) -> None:
        """As a library for the journal does, with bytes of any kind."""
        self._send(b"n", b"PRIORITY=6\nMESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\n")

    def _send(self, kind: bytes, data: bytes) -> None:
        data = kind + struct.pack("<I", len(data)) + data
        while data:
            data = data[os.write(self._pipe, data) :]

    def end(self) -> None:
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
