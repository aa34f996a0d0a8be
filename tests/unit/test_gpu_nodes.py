# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who has a device node open or mapped, on made-up tables."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_nodes, _gpu_tables
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import AMD, DRM, NVIDIA, any_node, scan
from proc_tables import MAP, Proc

REAL_STAT = os.stat


@pytest.fixture(autouse=True)
def stuck_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


@pytest.fixture
def numbers(monkeypatch):
    """Gives these numbers to the character devices at these ends of links: "10/fd/0" or a part of it."""

    def give(table, kind=stat.S_IFCHR):
        def fake(path, *more, dir_fd=None, **named):
            where = str(path) if dir_fd is None else os.readlink("/proc/self/fd/%d" % dir_fd) + "/" + str(path)
            for part, (major, minor) in table.items():
                if where.endswith(part):
                    values = [kind, 1000 + minor, major, 1, 0, 0, 0, 0, 0, 0]
                    return os.stat_result(values, {"st_rdev": os.makedev(major, minor)})
            return REAL_STAT(path, *more, dir_fd=dir_fd, **named)

        monkeypatch.setattr(_gpu_tables.os, "stat", fake)

    return give


def test_holders_by_name(proc):
    proc(10, "/dev/null", "/dev/nvidia0", "/dev/nvidia0", "socket:[17]")
    proc(20, "/dev/nvidia0", "/dev/nvidia12")
    proc(30, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-modeset")
    proc(9, "/dev/kfd", "/dev/dri/renderD128", "/dev/dri/card1", "/dev/dri/by-path", "/dev/nvidia-uvm-tools")
    facts = scan(proc=proc.root)
    assert facts.holders == {
        "card1": [9],
        "kfd": [9],
        "nvidia-cap1": [30],
        "nvidia-uvm": [30],
        "nvidia0": [10, 20],
        "nvidia12": [20],
        "renderD128": [9],
    }
    assert facts.files == [(9, 1, "renderD128"), (9, 2, "card1")]
    assert (facts.hidden, facts.hung, facts.error) == (0, [], "")


def test_a_node_that_was_removed_is_still_held(proc):
    proc(10, "/dev/nvidia3 (deleted)")
    proc(20, maps=MAP % ("rw-s", 7, "/dev/nvidia3 (deleted)"))
    assert scan(proc=proc.root).holders == {"nvidia3": [10, 20]}


def test_only_nodes_of_the_folder_count(proc):
    proc(10, "/tmp/nvidia0", "/srv/dev/nvidia1", "/dev/nvidia0x", "/dev/nvidia0\n")
    assert scan(proc=proc.root).holders == {}
    assert scan(folder="/srv/dev/", proc=proc.root).holders == {"nvidia1": [10]}


def test_threads_hold_on_after_the_main_thread_has_ended(proc):
    proc(10)
    proc(10, "/dev/nvidia0", thread=11, maps=MAP % ("rw-s", 7, "/dev/nvidia1"))
    assert scan(proc=proc.root).holders == {"nvidia0": [10], "nvidia1": [10]}


def test_other_nodes_of_the_same_folder_do_not_hide_one(proc, tmp_path):
    """What is remembered as no node is that file, and no other one of its kind."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("log", "nvidia0"):
        (dev / name).touch()
    for pid in (10, 20):
        proc(pid, str(dev / "log"), str(dev / "log"), str(dev / "nvidia0"))
    assert scan(folder=str(dev), proc=proc.root).holders == {"nvidia0": [10, 20]}


@pytest.mark.parametrize("path", ["/dev/gpu", "/srv/root/dev/nvidia7", "/tmp/x (deleted)", "/dev/nvidia7"])
@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [
        (195, 5, "nvidia5"),
        (195, 247, "nvidia247"),
        (195, 248, None),
        (195, 255, None),
        (226, 0, "card0"),
        (226, 63, "card63"),
        (226, 64, None),
        (226, 128, "renderD128"),
        (226, 191, "renderD191"),
        (226, 192, "renderD192"),
        (505, 0, "nvidia-uvm"),
        (505, 1, None),
        (506, 3, "nvidia-cap3"),
        (507, 0, "kfd"),
        (8, 0, "by its name"),  # a block device in the list
        (1, 3, "by its name"),
    ],
)
def test_a_node_anywhere_is_known_by_its_number(proc, numbers, path, major, minor, name):
    proc(10, path)
    with open(proc.root + "/devices", "w") as handle:
        handle.write("Character devices:\n  1 mem\n505 nvidia-uvm\n506 nvidia-caps\n507 kfd\n195 nvidia\n\n")
        handle.write("Block devices:\n  8 kfd\n")
    numbers({"10/fd/0": (major, minor)})
    if name == "by its name":
        name = "nvidia7" if path == "/dev/nvidia7" else None
    assert scan(proc=proc.root).holders == ({name: [10]} if name else {})


def test_a_minor_that_either_kind_of_drm_node_may_have_is_told_apart_by_its_name(proc, numbers):
    proc(10, "/dev/dri/card200", "/dev/gpu")
    numbers({"10/fd/0": (226, 200), "10/fd/1": (226, 201)})
    facts = scan(proc=proc.root)
    assert facts.holders == {"card200": [10], "renderD201": [10]}
    assert facts.files == [(10, 0, "card200"), (10, 1, "renderD201")]


@pytest.mark.parametrize("kind", [stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFDIR, 0])
def test_what_is_no_device_has_no_number(proc, numbers, kind):
    proc(10, "/dev/nvidia0")
    numbers({"10/fd/0": (195, 0)}, kind)
    assert scan(proc=proc.root).holders == {}


def test_mappings(proc):
    proc(10, maps=MAP % ("rw-s", 7, "/dev/nvidia0") + MAP % ("r--s", 8, "/dev/dri/renderD128"))
    proc(
        20, maps=MAP % ("---p", 7, "/dev/nvidia0") + MAP % ("rw-s", 9, "anon_inode:i915.gem") + MAP % ("r-xs", 1, "/x")
    )
    proc(30, "/dev/nvidia0", maps=MAP % ("rw-s", 7, "/dev/nvidia0") + MAP % ("rw-s", 7, "/srv/dev/nvidia1"))
    proc(40, maps=MAP % ("rw-p", 0, "/dev/null") + "7f0-7f1 rw-p 00000000 00:00 0 \n")
    proc(50, maps="7f0-7f1 rwxs 00000000 00:05 7 /dev/nvidia2")  # no newline, and no right missing
    facts = scan(proc=proc.root)
    assert facts.holders == {"nvidia0": [10, 20, 30], "nvidia2": [50], "renderD128": [10]}
    assert facts.files == []  # nothing is open whose account could be read
    assert facts.hidden == 0


def test_a_mapped_node_anywhere_is_known_by_its_number(proc, numbers):
    line = "00400000-00401000 rw-s 00000000 00:05 7                  /srv/gpu\n"
    other = "00500000-00501000 rw-s 00000000 00:05 8                  /srv/gpu\n"
    proc(10, maps=line, mapped={"400000-401000": "/srv/gpu"})
    proc(20, maps=line)  # the same file: what is known of it holds for all processes
    proc(30, maps=other, mapped={"500000-501000": "/srv/gpu"})
    numbers({"10/map_files/400000-401000": (195, 5), "map_files/500000-501000": (195, 255)})
    assert scan(proc=proc.root).holders == {"nvidia5": [10, 20]}


def test_a_mapping_that_could_not_be_looked_at_says_nothing_of_others(proc, numbers):
    line = "00400000-00401000 rw-s 00000000 00:05 7                  /srv/gpu\n"
    proc(10, maps=line)
    proc(20, maps=line, mapped={"400000-401000": "/srv/gpu"})
    numbers({"20/map_files/400000-401000": (195, 5)})
    assert scan(proc=proc.root).holders == {"nvidia5": [20]}


@pytest.mark.parametrize(("part", "seen"), [("/10/fd", [20]), ("/10/maps", [10, 20])])
def test_a_table_that_may_not_be_read_is_counted(proc, monkeypatch, part, seen):
    proc(10, "/dev/nvidia0")
    proc(20, "/dev/nvidia0")
    deny(monkeypatch, part)
    facts = scan(proc=proc.root)
    assert (facts.holders, facts.hidden, facts.hung) == ({"nvidia0": seen}, 1, [])


@pytest.mark.parametrize(
    ("state", "hidden"),
    [("10 (a) b) Z 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 %d 0 5", None), ("10 (x) S 1" + " 0" * 30, 1), ("", 0)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_that_has_ended_hides_nothing(proc, monkeypatch, state, hidden, threads):
    proc(10)
    with open(proc.root + "/10/stat", "w") as handle:
        handle.write(state.replace("%d", str(threads)))
    deny(monkeypatch, "/10/fd")
    if hidden is None:
        hidden = threads - 1
    assert scan(proc=proc.root).hidden == hidden


def deny(monkeypatch, part):
    real = os.open

    def refuse(path, *more, **named):
        if str(path).endswith(part):
            raise PermissionError(13, "Permission denied")
        return real(path, *more, **named)

    monkeypatch.setattr(_gpu_tables.os, "open", refuse)


def test_a_file_that_only_its_owner_may_look_at_is_known_by_its_name(proc, monkeypatch):
    proc(10, "/mnt/fuse/x", "/dev/nvidia0")

    def refuse(path, **named):
        if named.get("dir_fd") is not None:
            raise PermissionError(13, "Permission denied")
        return REAL_STAT(path, **named)

    monkeypatch.setattr(_gpu_tables.os, "stat", refuse)
    facts = scan(proc=proc.root)
    assert (facts.holders, facts.hidden) == ({"nvidia0": [10]}, 0)


def test_a_process_table_that_cannot_be_listed_is_an_error(tmp_path):
    assert scan(proc=str(tmp_path / "none")).error == "%s/none cannot be listed: No such file or directory" % tmp_path


def test_any_node(tmp_path):
    (tmp_path / "dri").mkdir()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "renderD128").touch()
    assert not any(any_node(names, str(tmp_path)) for names in (NVIDIA, AMD, DRM))
    (tmp_path / "nvidia0").touch()
    (tmp_path / "kfd").touch()
    (tmp_path / "dri" / "card0").touch()
    assert [any_node(names, str(tmp_path) + "/") for names in (NVIDIA, AMD, DRM)] == [True, True, True]
    assert not any_node(NVIDIA, str(tmp_path / "none"))


def test_a_process_table_without_process_one_hides_others(proc):
    os.rename(proc.root + "/1", proc.root + "/100")
    assert scan(proc=proc.root).hidden == 1


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
    assert scan(proc=proc.root).hidden == hidden


def test_who_is_born_during_the_look_is_looked_at(proc, monkeypatch):
    """An engine that forks hands its nodes on: its child is not in the list that was made before."""
    proc(10)
    real = _gpu_nodes._Scan.step
    left = [20, 30]

    def step(self, *arguments):
        why = real(self, *arguments)
        if left:
            proc(left.pop(0), "/dev/nvidia0")
        return why

    monkeypatch.setattr(_gpu_nodes._Scan, "step", step)
    facts = scan(proc=proc.root)
    assert (facts.holders, facts.error) == ({"nvidia0": [20, 30]}, "")


def test_processes_that_come_and_go_too_fast_are_not_called_seen(proc, monkeypatch):
    real = _gpu_nodes._Scan.step
    next_pid = iter(range(100, 1000))

    def step(self, *arguments):
        why = real(self, *arguments)
        proc(next(next_pid))
        return why

    monkeypatch.setattr(_gpu_nodes._Scan, "step", step)
    assert scan(proc=proc.root).error == (
        "the open files of all processes cannot be read: processes come and go faster than they can be read"
    )


def fail_at(monkeypatch, end, code):
    real = os.open

    def fail(path, *arguments, **named):
        if str(path).endswith(end):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **named)

    monkeypatch.setattr(_gpu_tables.os, "open", fail)


@pytest.mark.parametrize("code", [errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.EIO, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("table", ["fd", "maps"])
def test_what_fails_for_another_reason_than_the_end_of_a_process_is_hidden(proc, monkeypatch, table, code):
    proc(10, "/dev/nvidia0", maps=MAP % ("rw-s", 7, "/dev/nvidia0"))
    fail_at(monkeypatch, "/10/" + table, code)
    facts = scan(proc=proc.root)
    assert (facts.hidden, facts.error) == (1, "")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESRCH])
@pytest.mark.parametrize("table", ["fd", "maps"])
def test_a_process_that_has_ended_meanwhile_is_not_hidden(proc, monkeypatch, table, code):
    proc(10)
    fail_at(monkeypatch, "/10/" + table, code)
    assert scan(proc=proc.root).hidden == 0
