# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How mappings are asked for: one after the other where the kernel answers, else as the text of all of them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_nodes, _gpu_tables
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_tables import Names, mapped_nodes
from proc_tables import MAP, Proc


class Kernel:
    """Answers for processes with these mappings: (start, end, device, inode)."""

    def __init__(self, mappings, end=errno.ENOENT):
        self.mappings, self.end, self.asked = mappings, end, 0

    def ioctl(self, _file, request, query):
        self.asked += 1
        size, flags, address = struct.unpack_from("QQQ", query)
        assert (request, size, flags) == (0xC0686611, len(query), 0x30)
        for start, end, device, inode in self.mappings:
            if end > address:
                struct.pack_into("QQ", query, 24, start, end)
                struct.pack_into("QII", query, 64, inode, 0, device)
                return 0
        raise OSError(self.end, os.strerror(self.end))


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Process 10 with a library twice and two nodes mapped, all of which the kernel tells; its text names another."""
    proc = Proc(tmp_path)
    files = {"1000-2000": "/lib/x", "2000-3000": "/lib/x", "5000-6000": "/srv/gpu", "7000-8000": "/dev/nvidia1"}
    proc(10, maps=MAP % ("rw-s", 7, "/dev/nvidia9"), mapped=files)
    kernel = Kernel([(0x1000, 0x2000, 1, 5), (0x2000, 0x3000, 1, 5), (0x5000, 0x6000, 2, 5), (0x7000, 0x8000, 2, 6)])
    stated = []

    def fake(path, *_more, **_named):
        name = os.path.basename(str(path))
        if "map_files" not in str(path) or name not in files:
            raise FileNotFoundError(2, "No such file or directory")
        stated.append(name)
        mode, number = (stat.S_IFCHR, os.makedev(195, 3)) if name == "5000-6000" else (stat.S_IFREG, 0)
        return os.stat_result([mode, len(stated), 1, 1, 0, 0, 0, 0, 0, 0], {"st_rdev": number})

    monkeypatch.setattr(_gpu_tables.os, "stat", fake)
    monkeypatch.setattr(_gpu_tables.fcntl, "ioctl", kernel.ioctl)
    kernel.files, kernel.stated = files, stated
    kernel.process, kernel.names = proc.root + "/10", Names("/dev", proc.root)
    return kernel


def test_each_file_is_looked_at_once(asked):
    for _ in range(2):
        assert mapped_nodes(asked.process, asked.names) == {"nvidia1", "nvidia3"}
    assert asked.stated == ["1000-2000", "5000-6000", "7000-8000"]
    assert asked.asked == 10


@pytest.mark.parametrize(
    ("error", "again"),
    [(errno.ENOTTY, False), (errno.ESRCH, True), (errno.EINVAL, True), (errno.EINTR, True)],
)
def test_a_kernel_that_does_not_answer_is_read_from(asked, error, again):
    """One that does not know the question is not asked any more; a process may have no answer."""
    asked.mappings, asked.end = [], error
    for _ in range(2):
        assert mapped_nodes(asked.process, asked.names) == {"nvidia9"}
    assert asked.asked == (2 if again else 1)


def test_a_mapping_that_is_gone_meanwhile_leaves_nothing_out(asked):
    del asked.files["5000-6000"]
    assert mapped_nodes(asked.process, asked.names) == {"nvidia9"}
    asked.files["5000-6000"] = "/srv/gpu"
    assert mapped_nodes(asked.process, asked.names) == {"nvidia1", "nvidia3"}


@pytest.mark.parametrize("question", [_gpu_tables.PROCMAP_QUERY, 0])
def test_real_nodes_open_and_mapped(monkeypatch, question):
    """A device of this machine stands in for a GPU. No kernel knows the question 0, and an older one not the other."""
    zero = os.stat("/dev/zero").st_rdev
    monkeypatch.setattr(_gpu_tables, "PROCMAP_QUERY", question)
    monkeypatch.setattr(Names, "_by_number", lambda _names, number: (number == zero, "nvidia0"))

    def held():
        return os.getpid() in _gpu_nodes.scan().holders.get("nvidia0", [])

    assert not held()
    with open("/dev/zero", "rb") as handle:
        assert held()
        memory = mmap.mmap(handle.fileno(), 4096, mmap.MAP_PRIVATE)
    assert held()
    memory.close()
    assert not held()
