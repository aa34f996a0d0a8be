# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who has a device node open, on made-up file tables."""

from __future__ import annotations

import os
import stat
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_nodes
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import NVIDIA, scan


@pytest.fixture
def proc(tmp_path):
    def add(pid, *targets, thread=None):
        folder = tmp_path / str(pid)
        (folder / "task" / str(pid) / "fd").mkdir(parents=True, exist_ok=True)
        (folder / "fd").mkdir(exist_ok=True)
        table = folder / "fd"
        if thread is not None:
            table = folder / "task" / str(thread) / "fd"
            table.mkdir(parents=True)
        for number, target in enumerate(targets):
            (table / str(number)).symlink_to(target)

    add.root = str(tmp_path)
    add(1)
    return add


def test_holders_by_minor(proc):
    proc(10, "/dev/null", "/dev/nvidia0", "/dev/nvidia0", "socket:[17]")
    proc(20, "/dev/nvidia0", "/dev/nvidia12")
    proc(30, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-modeset")
    facts = scan(NVIDIA, proc=proc.root)
    assert facts.holders == {0: [10, 20], 12: [20]}
    assert (facts.hidden, facts.error) == (0, "")


def test_a_node_that_was_removed_is_still_held(proc):
    proc(10, "/dev/nvidia3 (deleted)")
    assert scan(NVIDIA, proc=proc.root).holders == {3: [10]}


def test_only_nodes_of_the_folder_count(proc):
    proc(10, "/tmp/nvidia0", "/srv/dev/nvidia1", "/dev/nvidia0x")
    assert scan(NVIDIA, proc=proc.root).holders == {}
    assert scan(NVIDIA, folder="/srv/dev/", proc=proc.root).holders == {1: [10]}


def test_threads_hold_on_after_the_main_thread_has_ended(proc):
    proc(10)
    proc(10, "/dev/nvidia0", thread=11)
    assert scan(NVIDIA, proc=proc.root).holders == {0: [10]}


def test_a_table_that_may_not_be_read_is_counted(proc, monkeypatch):
    proc(10, "/dev/nvidia0")
    proc(20, "/dev/nvidia0")
    real = os.listdir

    def listdir(path):
        if str(path).endswith("/10/fd"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(_gpu_nodes.os, "listdir", listdir)
    facts = scan(NVIDIA, proc=proc.root)
    assert (facts.holders, facts.hidden) == ({0: [20]}, 1)


def test_a_process_table_that_cannot_be_listed_is_an_error(tmp_path):
    assert scan(NVIDIA, proc=str(tmp_path / "none")).error


def test_any_node(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert not _gpu_nodes.any_node(NVIDIA, str(tmp_path))
    (tmp_path / "nvidia0").touch()
    assert _gpu_nodes.any_node(NVIDIA, str(tmp_path))
    assert not _gpu_nodes.any_node(NVIDIA, str(tmp_path / "none"))


@pytest.mark.parametrize("path", ["/dev/gpu", "/srv/root/dev/nvidia7", "/tmp/x (deleted)", "/dev/nvidia7"])
@pytest.mark.parametrize(("major", "minor", "holders"), [(195, 5, {5: [10]}), (195, 255, {}), (1, 3, {}), (0, 0, {})])
def test_a_node_anywhere_is_known_by_its_number(proc, monkeypatch, path, major, minor, holders):
    proc(10, path)
    if path == "/dev/nvidia7" and major != 195:
        holders = {7: [10]}  # by its name

    class Node:
        st_rdev, st_mode = os.makedev(major, minor), stat.S_IFCHR

    real = os.stat
    monkeypatch.setattr(_gpu_nodes.os, "stat", lambda path, **more: Node if "/fd/" in str(path) else real(path, **more))
    assert scan(NVIDIA, proc=proc.root).holders == holders


def test_a_process_table_without_process_one_hides_others(proc):
    os.rename(proc.root + "/1", proc.root + "/100")
    assert scan(NVIDIA, proc=proc.root).hidden == 1


@pytest.mark.parametrize(
    ("options", "uid", "hidden"),
    [("rw", 1000, 0), ("rw,hidepid=0", 1000, 0), ("rw,hidepid=1", 1000, 1), ("rw,gid=3,hidepid=invisible", 1000, 1)]
    + [("rw,hidepid=2", 0, 0)],
)
def test_a_process_table_that_hides_others_says_so(proc, monkeypatch, options, uid, hidden):
    os.mkdir(proc.root + "/self")
    lines = "21 1 0:5 / /dev rw - devtmpfs udev rw\n22 1 0:20 / %s rw,nosuid shared:12 - proc proc %s\n"
    with open(proc.root + "/self/mountinfo", "w") as handle:
        handle.write(lines % (proc.root, options))
    monkeypatch.setattr(_gpu_nodes.os, "geteuid", lambda: uid)
    assert scan(NVIDIA, proc=proc.root).hidden == hidden


def test_a_file_that_hangs_does_not_hang_the_look(proc, monkeypatch):
    proc(10, "/dev/nvidia0")
    proc(20, "/net/gone")
    real = os.readlink
    monkeypatch.setattr(_gpu_nodes.os, "readlink", lambda path: time.sleep(60) if "/20/" in str(path) else real(path))
    facts = scan(NVIDIA, proc=proc.root, limit=0.5)
    assert facts.holders == {0: [10]}
    assert facts.error == "the open files of all processes cannot be read: no answer within 0.5 s"
