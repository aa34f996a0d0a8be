# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The nodes of GPUs in the tables of one process: what it has open, what it has mapped, and what each node is called.

A node is known by its number first, whatever its path, because a container may rename its nodes and put them anywhere;
else by its path, because that also holds where the number differs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import typing as t

__all__ = ["Names", "canonical", "is_gone", "mapped_nodes", "open_nodes"]

DELETED = " (deleted)"
# What has ended has nothing. Any other failure, such as too many open files on the host, says nothing of what it has.
GONE = (FileNotFoundError, ProcessLookupError)
NVIDIA_MAJOR, NVIDIA_LAST = 195, 247  # minors above are nodes that name no device
DRM_MAJOR, DRM_RENDER, DRM_LAST = 226, 128, 191
EXTENDED = "card or renderD"  # a minor above the last is given to either kind when there are more than 64 devices
DYNAMIC = ("nvidia-uvm", "nvidia-caps", "kfd")  # their numbers are in /proc/devices
NAME = re.compile(r"(nvidia[0-9]+|nvidia-uvm|kfd)\Z|nvidia-caps/(nvidia-cap[0-9]+)\Z|dri/((?:renderD|card)[0-9]+)\Z")
# Start, end, device with inode and path, path alone: a newline in a path is written as \012.
MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) \S{4} \S+ (\S+ [0-9]+ +(/.*))")
SHARED = b"s "  # how the rights of a shared mapping end

# struct procmap_query of linux/fs.h, since Linux 6.11: its size, flags and address go in, the mapping comes back.
PROCMAP_QUERY, QUERY_SIZE = 0xC0686611, 104
NEXT_FILE = 0x10 | 0x20  # PROCMAP_QUERY_COVERING_OR_NEXT_VMA, PROCMAP_QUERY_FILE_BACKED_VMA
QUERY_HEAD, QUERY_RANGE = struct.Struct("QQQ"), struct.Struct("QQ")
QUERY_ADDRESS, QUERY_END, QUERY_FILE = slice(16, 24), slice(32, 40), slice(64, 80)


def canonical(path: str) -> t.Optional[str]:
    """The name of a node by its path within /dev."""
    match = NAME.match(path)
    return None if match is None else match.group(match.lastindex or 0)


class Names:
    """What nodes are called on this host. It remembers what is none, for most open files are the same few."""

    def __init__(self, folder: str, proc: str) -> None:
        self.prefix = folder.rstrip("/") + "/"
        self._dynamic = _majors(proc)
        self._others: t.Set[t.Tuple[int, int]] = set()  # (device, inode) of what is no node of a GPU
        self.mappings: t.Dict[bytes, t.Optional[str]] = {}  # by what names the file in all processes
        self.answers = True  # whether the kernel can be asked for mappings

    def by_path(self, path: str) -> t.Optional[str]:
        if path.endswith(DELETED):
            path = path[: -len(DELETED)]
        return canonical(path[len(self.prefix) :]) if path.startswith(self.prefix) else None

    def of(self, found: os.stat_result, path: t.Callable[..., str], *where: t.Any) -> t.Optional[str]:
        """The name of an open file, whose path is asked for only when its number does not say enough."""
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFCHR:
            known, name = self._by_number(found.st_rdev)
            if known and name == EXTENDED:
                card = "card%d" % os.minor(found.st_rdev)
                return card if self.by_path(path(*where)) == card else card.replace("card", "renderD")
            if known:
                return name
        elif kind not in (stat.S_IFREG, stat.S_IFBLK):
            return None  # a socket, a pipe, a folder, an epoll
        identity = (found.st_dev, found.st_ino)
        if identity in self._others:
            return None
        name = self.by_path(path(*where))
        if name is None:
            self._others.add(identity)
        return name

    def _by_number(self, number: int) -> t.Tuple[bool, t.Optional[str]]:
        """Whether a driver of GPUs has this number, and the node's name unless it names no device."""
        major, minor = os.major(number), os.minor(number)
        if major == NVIDIA_MAJOR:
            return True, "nvidia%d" % minor if minor <= NVIDIA_LAST else None
        if major == DRM_MAJOR:
            if minor > DRM_LAST:
                return True, EXTENDED
            if minor >= DRM_RENDER:
                return True, "renderD%d" % minor
            return True, "card%d" % minor if minor < 64 else None
        driver = self._dynamic.get(major)
        if driver == "nvidia-caps":
            return True, "nvidia-cap%d" % minor
        return driver is not None, driver if minor == 0 else None


def _majors(proc: str) -> t.Dict[int, str]:
    try:
        with open(proc + "/devices", encoding="utf-8", errors="replace") as handle:
            lines = handle.read().partition("Block devices:")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {int(pair[0]): pair[1] for pair in pairs if len(pair) == 2 and pair[1] in DYNAMIC}


def is_gone(process: str) -> bool:
    """Whether a process has ended: what it had cannot be read any more, and there is nothing to hide."""
    try:
        fields = _content(process + "/stat").rpartition(b")")[2].split()
        return not fields or fields[0] in (b"X", b"x") or (fields[0] == b"Z" and int(fields[17]) <= 1)
    except (OSError, ValueError, IndexError):
        return False


def open_nodes(process: str, names: Names, found: t.List[t.Tuple[int, str]]) -> None:
    """Append (file descriptor, name) of each open node; OSError where the table cannot be read."""
    if _open_in(process + "/fd", names, found):
        return
    # A main thread that has ended has no table, while the threads that live on still hold it open.
    for thread in _threads(process):
        _open_in("%s/task/%d/fd" % (process, thread), names, found)


def mapped_nodes(process: str, names: Names) -> t.Set[str]:
    """The nodes that a process has mapped; OSError where its mappings cannot be read."""
    found = _asked(process, names) if names.answers else None
    return _written(process, names) if found is None else found


def _asked(process: str, names: Names) -> t.Optional[t.Set[str]]:
    """By asking for one mapped file after the other, which costs less than all of it in writing; None for no answer."""
    try:
        file = os.open(process + "/maps", os.O_RDONLY | os.O_CLOEXEC)
    except GONE:
        return None
    found = set()
    query = bytearray(QUERY_SIZE)
    QUERY_HEAD.pack_into(query, 0, QUERY_SIZE, NEXT_FILE, 0)
    try:
        while True:
            fcntl.ioctl(file, PROCMAP_QUERY, query)
            what = bytes(query[QUERY_FILE])
            if what not in names.mappings:
                start, end = QUERY_RANGE.unpack_from(query, QUERY_HEAD.size)
                names.mappings[what] = _behind("%s/map_files/%x-%x" % (process, start, end), names)
            name = names.mappings[what]
            if name is not None:
                found.add(name)
            query[QUERY_ADDRESS] = query[QUERY_END]
    except OSError as error:
        if error.errno == errno.ENOENT:  # no further mapping
            return found
        # Neither does an older kernel know the question, nor a process without memory the answer.
        names.answers = error.errno != errno.ENOTTY
        return None
    except LookupError:
        return None
    finally:
        os.close(file)


def _behind(link: str, names: Names) -> t.Optional[str]:
    """The name of a mapped file; LookupError where that cannot be told: unmapped meanwhile, or only root may ask."""
    try:
        return names.of(os.stat(link), os.readlink, link)
    except OSError as error:
        raise LookupError(link) from error


def _written(process: str, names: Names) -> t.Set[str]:
    lines, place = _content(process + "/maps"), process
    if not lines:
        for thread in _threads(process):
            # All threads have the same memory. Only by its own number does a thread show the files mapped into it.
            lines, place = _content("%s/task/%d/maps" % (process, thread)), os.path.dirname(process) + "/%d" % thread
            if lines:
                break
    found = set()
    for line in _candidates(lines, os.fsencode(names.prefix)):
        match = MAPPING.match(line)
        if match is not None:
            what = match.group(3)
            name = names.mappings[what] if what in names.mappings else _mapped(place, match, names)
            if name is not None:
                found.add(name)
    return found


def _candidates(lines: bytes, prefix: bytes) -> t.Set[bytes]:
    """The mappings that may be of a device: shared ones, and those without any rights that a driver makes besides."""
    found = set()
    for sign in (SHARED, b" " + prefix):
        place = lines.find(sign)
        while place >= 0:
            end = lines.find(b"\n", place)
            end = len(lines) if end < 0 else end
            found.add(lines[lines.rfind(b"\n", 0, place) + 1 : end])
            place = lines.find(sign, end)
    return found


def _mapped(process: str, mapping: t.Match[bytes], names: Names) -> t.Optional[str]:
    start, end, what, path = mapping.groups()
    try:
        name = _behind("%s/map_files/%x-%x" % (process, int(start, 16), int(end, 16)), names)
    except LookupError:
        return names.by_path(os.fsdecode(path))
    names.mappings[what] = name
    return name


def _threads(process: str) -> t.List[int]:
    """The threads beside the main one, if there are any."""
    try:
        threads = sorted(int(entry) for entry in os.listdir(process + "/task"))
    except GONE:
        return []
    return threads if len(threads) > 1 else []


def _open_in(table: str, names: Names, found: t.List[t.Tuple[int, str]]) -> bool:
    """Append what one file table holds; say whether it holds anything at all."""
    try:
        folder = os.open(table, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except GONE:
        return False
    try:
        numbers = os.listdir(folder)
        for number in numbers:
            name = _node(number, folder, names)
            if name is not None:
                found.append((int(number), name))
        return bool(numbers)
    except GONE:
        return False
    finally:
        os.close(folder)


def _node(number: str, folder: int, names: Names) -> t.Optional[str]:
    try:
        try:
            # Of the open file itself, also where its path leads elsewhere: in another root, after a rename.
            found = os.stat(number, dir_fd=folder)
        except OSError:
            return names.by_path(_link(number, folder))  # a file system that lets only its owner look
        return names.of(found, _link, number, folder)
    except GONE:
        return None  # closed meanwhile


def _link(number: str, folder: int) -> str:
    return os.readlink(number, dir_fd=folder)


def _content(path: str) -> bytes:
    """What a file of the process table tells, which is nothing once the process has ended."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except GONE:
        return b""
    try:
        chunks: t.List[bytes] = []
        while True:
            chunk = os.read(file, 65536)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
    except GONE:
        return b""
    finally:
        os.close(file)
