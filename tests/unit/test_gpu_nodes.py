# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who has a device node open, on made-up file tables."""

from __future__ import annotations

import os

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


@pytest.mark.parametrize(("major", "minor", "holders"), [(195, 5, {5: [10]}), (195, 255, {}), (1, 3, {}), (0, 0, {})])
def test_a_node_under_another_name_is_known_by_its_number(proc, monkeypatch, major, minor, holders):
    proc(10, "/dev/gpu")

    class Node:
        st_rdev = os.makedev(major, minor)

    monkeypatch.setattr(_gpu_nodes.os, "stat", lambda _path: Node)
    assert scan(NVIDIA, proc=proc.root).holders == holders
