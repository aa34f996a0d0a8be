# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Files that a unit names: when they were written and what is in them, also where one is on a dead file server.

A look at such a file hangs in the kernel. What is surely on this host is looked at directly, all else in a child.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from . import _bounded

__all__ = ["ids", "regular", "texts", "written"]

LOCAL = ("/etc/", "/run/systemd/", "/usr/lib/", "/lib/")  # whatever else is mounted
MOST = 1 << 20  # bytes of one file


def regular(path: str, most: int) -> bytes:
    """What is in a file that somebody names. Anything else could hang, or never end; an OSError says why."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (ValueError, TypeError):
        raise OSError(0, "its name is none") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is no regular file")
        data = b""
        while len(data) <= most:
            chunk = os.read(fd, most + 1 - len(data))
            if not chunk:
                break
            data += chunk
    finally:
        os.close(fd)
    if len(data) > most:
        raise OSError(0, "it is larger than %d KiB" % (most >> 10))
    return data


def _on_this_host(path: str) -> bool:
    """Whether a path is surely on a file system of this host: below a folder that is, and through no link."""
    root = next((folder for folder in LOCAL if path.startswith(folder)), "")
    parts = path[len(root) :].split("/")
    if not root or ".." in parts:
        return False
    return not any(os.path.islink(root + "/".join(parts[:count])) for count in range(1, len(parts) + 1))


def written(paths: list[str], limit: float, key: str) -> list[float]:
    """When the files were written last, of those that are there and tell in time."""
    found: list[float] = []

    def look(report: _bounded.Report) -> None:
        for path in far:
            with contextlib.suppress(OSError):
                report({"at": os.stat(path).st_mtime})

    far = [path for path in paths if not _on_this_host(path)]
    for path in paths:
        if path not in far:
            with contextlib.suppress(OSError):
                found.append(os.stat(path).st_mtime)
    if far:
        # With a key, one child at most hangs on for the files of one unit.
        found += [row["at"] for row in _bounded.run(look, limit, key=key).partial]
    return found


def texts(paths: list[str], limit: float) -> dict[str, str]:
    """What is in the files, nothing of one that cannot be read; one that does not tell in time is missing."""

    def look(report: _bounded.Report) -> None:
        for path in far:
            report({"path": path, "text": _text(path)})

    far = [path for path in paths if not _on_this_host(path)]
    found = {path: _text(path) for path in paths if path not in far}
    if far:
        found.update((row["path"], row["text"]) for row in _bounded.run(look, limit).partial)
    return found


def ids(paths: list[str], limit: float) -> dict[str, str]:
    """The id of a container in each of these files, empty where there is none; one that does not tell is missing."""

    def look(report: _bounded.Report) -> None:
        for path in paths:
            report({"path": path, "id": _written_id(path)})

    return {row["path"]: row["id"] for row in _bounded.run(look, limit).partial} if paths else {}


def _text(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(fd, MOST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


def _written_id(path: str) -> str:
    """The id in a file that the client wrote; whoever can write it can name any container, so it is only root's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != 0 or facts.st_mode & 0o022:
            return ""
        text = os.read(fd, 128).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    return text if re.match(r"[0-9a-f]{64}\Z", text) else ""
