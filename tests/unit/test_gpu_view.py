# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a host can see of its machine, on made-up roots."""

from __future__ import annotations

import os
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_view
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_view import View, look

FIRST, OTHER = 4026531836, 4026532189


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with these files, in the process namespace with this number; 0 where nobody may know."""
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))

    def make(number, files=None):
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        if number:
            (tmp_path / "proc/self/ns").mkdir(parents=True)
            (tmp_path / "proc/self/ns/pid").touch()
        real = os.stat

        def stat(path, *more, **named):
            if str(path).endswith("proc/self/ns/pid"):
                values = list(real(path))
                values[1] = number
                return os.stat_result(values)
            return real(path, *more, **named)

        monkeypatch.setattr(_gpu_view.os, "stat", stat)
        root = str(tmp_path)
        return look(proc=root + "/proc", run=root + "/run", root=root)

    return make


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({}, None),
        ({"run/systemd/container": "lxc\n"}, "lxc"),
        ({"run/systemd/container": "\n", "run/host/container-manager": "systemd-nspawn"}, "systemd-nspawn"),
        ({"proc/1/environ": "PATH=/bin\0container=podman\0"}, "podman"),
        ({"proc/1/environ": "container_uuid=7\0xcontainer=podman\0"}, None),
        ({"proc/1/environ": "container=two words\0"}, None),
        ({"run/.containerenv": ""}, "podman"),
        ({".dockerenv": ""}, "docker"),
        ({"run/secrets/kubernetes.io/serviceaccount/token": ""}, "kubernetes"),
        ({"dev/lxd/sock": ""}, "lxc"),
        ({"proc/1/cgroup": "1:name=systemd:/docker/%s\n0::/\n" % ("a1" * 32)}, "docker"),
        ({"proc/1/cgroup": "0::/lxc.payload.web/init.scope\n"}, "lxc"),
        ({"proc/1/cgroup": "0::/kubepods/burstable/podx/%s\n" % ("a1" * 32)}, "kubernetes"),
        ({"proc/1/cgroup": "0::/system.slice/docker.service\n"}, None),
        # What the manager wrote down goes before what is only a mark.
        ({"run/systemd/container": "wsl", ".dockerenv": ""}, "wsl"),
        ({".dockerenv": "", "proc/1/environ": "container=lxc\0"}, "docker"),
    ],
)
def test_a_table_of_its_own(host, files, container):
    assert host(OTHER, files) == View("own", container)


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({}, None),
        ({".dockerenv": ""}, "docker"),  # docker run --pid=host
        # Process 1 is the machine's own here: what it was told is not about us.
        ({"proc/1/environ": "container=lxc\0", "proc/1/cgroup": "0::/lxc/web\n"}, None),
    ],
)
def test_the_table_of_the_machine(host, files, container):
    view = host(FIRST, files)
    assert view == View("host", container)
    assert view.complete


def test_a_table_that_nobody_knows(host):
    view = host(0, {"run/systemd/container": "lxc"})
    assert view == View("unknown", "lxc")
    assert not view.complete


def test_a_first_process_that_hangs_does_not_hang_the_look(host, monkeypatch):
    """Its environment lies in its memory."""
    real = _gpu_view._text
    monkeypatch.setattr(_gpu_view, "_text", lambda path: time.sleep(60) if path.endswith("/1/environ") else real(path))
    monkeypatch.setattr(_gpu_view, "LIMIT", 0.2)
    began = time.monotonic()
    assert host(OTHER, {"proc/1/cgroup": "0::/docker/x\n"}) == View("own", "docker")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        (View("host"), ""),
        (
            View("host", "docker"),
            "this host is a container (docker) that shares the process table of the machine: "
            "all processes are visible here",
        ),
        (
            View("own", "systemd-nspawn"),
            "this host is a container (systemd-nspawn) with a process table of its own: "
            "processes outside it are not visible here",
        ),
        (
            View("own"),
            "this host is a namespace with a process table of its own: processes outside it are not visible here",
        ),
        (View(), "it cannot be told whether all processes of the machine are visible here"),
        (
            View("unknown", "lxc"),
            "this host is a container (lxc), and "
            "it cannot be told whether all processes of the machine are visible here",
        ),
    ],
)
def test_what_is_said_of_it(view, sentence):
    assert view.sentence == sentence
