# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A unit's control group, as files of a made-up kernel."""

from __future__ import annotations

import pathlib
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _groups
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock
from ansible_collections.gpuops.serving.plugins.module_utils._groups import Group

PATH = "/system.slice/qwen.service"


class Paused(Clock):
    def __init__(self) -> None:
        self.slept: t.List[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def made(root: pathlib.Path, path: str = PATH, *pids: int, **files: str) -> pathlib.Path:
    folder = root / path.strip("/")
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("".join("%d\n" % pid for pid in pids))
    for name, text in files.items():
        (folder / ("cgroup." + name)).write_text(text)
    return folder


def test_the_processes_of_a_group_and_of_those_below_it(tmp_path: pathlib.Path) -> None:
    made(tmp_path, PATH, 10, 11, 0)
    made(tmp_path, PATH + "/nested/deep", 12)
    made(tmp_path, "/system.slice/qwen.service2", 99)
    assert Group(PATH, (str(tmp_path / "none"), str(tmp_path))).pids() == {10, 11, 12}


@pytest.mark.parametrize("path", ["", "/", "//", "/system.slice/../qwen.service", "/nowhere"])
def test_what_is_no_group(tmp_path: pathlib.Path, path: str) -> None:
    (tmp_path / "cgroup.procs").write_text("1\n")
    made(tmp_path, PATH, 10, kill="", freeze="0")
    group = Group(path, (str(tmp_path),))
    assert (group.pids(), group.kill(), group.paused) == (set(), False, False)
    with group.frozen() as frozen:
        assert frozen is False


def test_the_kernel_kills_where_it_can(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, PATH, 10, kill="")
    assert Group(PATH, (str(tmp_path),)).kill() is True
    assert (folder / "cgroup.kill").read_text() == "1"
    (folder / "cgroup.kill").unlink()
    assert Group(PATH, (str(tmp_path),)).kill() is False
    assert not (folder / "cgroup.kill").exists()


def test_a_group_is_frozen_for_a_moment_and_always_thawed(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, PATH, 10, freeze="0", events="populated 1\nfrozen 1\n")
    group = Group(PATH, (str(tmp_path),))
    with pytest.raises(ValueError), group.frozen(Paused()) as frozen:
        assert frozen is True
        assert group.paused
        raise ValueError
    assert (folder / "cgroup.freeze").read_text() == "0"
    (folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert not group.paused


def test_what_does_not_freeze_is_not_waited_for_long(tmp_path: pathlib.Path) -> None:
    made(tmp_path, PATH, 10, freeze="0", events="populated 1\nfrozen 0\n")
    clock = Paused()
    with Group(PATH, (str(tmp_path),)).frozen(clock) as frozen:
        assert frozen is True
    assert _groups.FREEZING <= sum(clock.slept) <= _groups.FREEZING + 0.02
