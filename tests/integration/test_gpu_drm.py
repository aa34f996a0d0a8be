# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Real processes that hold the device nodes of made-up Intel and AMD GPUs."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_amd, _gpu_intel, _gpu_nodes
from drm_host import DrmHost, amdgpu, xe

HOLD = """\
import os, sys, time
for path in sys.argv[1:]:
    os.open(path, os.O_RDONLY)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(name="host")
def fixture_host(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    return DrmHost(tmp_path)


@pytest.fixture(name="hold")
def fixture_hold():
    children = []

    def hold(*paths):
        child = subprocess.Popen([sys.executable, "-c", HOLD, *map(str, paths)], stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield hold
    for child in children:
        child.kill()
        child.wait()


def nodes_of(host, *pids, proc="/proc"):
    """What the processes hold; others on this machine may hold nodes with the same numbers."""
    facts = _gpu_nodes.scan(str(host.dev), str(proc))
    assert facts.error == ""
    facts.hidden = 0  # in a sandbox not even root may look into process 1
    holders = {name: [pid for pid in found if pid in pids] for name, found in facts.holders.items()}
    facts.holders = {name: found for name, found in holders.items() if found}
    facts.files = [entry for entry in facts.files if entry[0] in pids]
    return facts


def table(host, child, **accounts):
    """A process table with the real files of one process, and the accounts that a driver would write for them."""
    real = pathlib.Path("/proc/%d" % child.pid)
    process = host.proc / str(child.pid)
    (process / "fdinfo").mkdir(parents=True)
    for name in ("fd", "maps", "task"):
        (process / name).symlink_to(real / name)
    for link in (real / "fd").iterdir():
        text = accounts.get(pathlib.Path(os.readlink(link)).name)
        if text:
            (process / "fdinfo" / link.name).write_text(text)


def test_a_kernel_without_accounts_shows_the_holder_and_no_list(host, hold):
    """The files here are no DRM device's, as on a kernel whose driver accounts for nothing."""
    host.xe()
    child = hold(host.dev / "dri/renderD128", host.dev / "dri/renderD128")
    nodes = nodes_of(host, child.pid)
    assert nodes.holders == {"renderD128": [child.pid]}
    assert [(pid, name) for pid, _file, name in nodes.files] == [(child.pid, "renderD128")] * 2
    (facts,) = _gpu_intel.read(None, 20.0, nodes, sys=str(host.sys), dev=str(host.dev)).devices
    assert (facts["processes"], facts["lists"], facts["memory_basis"]) == ([], "absent", "not_available")
    child.kill()
    child.wait()
    nodes = nodes_of(host, child.pid)
    (facts,) = _gpu_intel.read(None, 20.0, nodes, sys=str(host.sys), dev=str(host.dev)).devices
    assert (nodes.files, facts["processes"], facts["lists"]) == ([], [], "complete")


def test_an_intel_holder_with_its_account(host, hold):
    host.xe()
    child = hold(host.dev / "dri/renderD128")
    table(host, child, renderD128=xe(7, vram="512 MiB", ccs=4))
    nodes = nodes_of(host, child.pid, proc=host.proc)
    (facts,) = _gpu_intel.read(None, 20.0, nodes, **host.trees()).devices
    assert [(e["pid"], e["memory"], e["kind"]) for e in facts["processes"]] == [(child.pid, 512, "compute")]
    assert (facts["memory_used"], facts["memory_basis"], facts["lists"]) == (512, "clients", "complete")


def test_an_amd_holder_in_both_sources(host, hold):
    host.amdgpu()
    host.kfd_device(1, 51545)
    (host.dev / "kfd").touch()
    child = hold(host.dev / "dri/renderD128", host.dev / "kfd")
    table(host, child, renderD128=amdgpu(7, vram=300 * 1024))
    host.kfd_process(child.pid, {51545: 300 * 1024 * 1024})
    nodes = nodes_of(host, child.pid, proc=host.proc)
    assert nodes.holders["kfd"] == [child.pid]
    (facts,) = _gpu_amd.read(None, 20.0, nodes, **host.trees()).devices
    assert [(entry["pid"], entry["memory"], entry["source"]) for entry in facts["processes"]] == [
        (child.pid, 300, "kfd"),
        (child.pid, 300, "fdinfo"),
    ]
    assert (facts["lists"], facts["remarks"]) == ("complete", [])


def test_real_nodes_are_known_by_number(host, hold):
    """No driver is behind the node, so it cannot be opened for reading; a path alone holds it here."""
    host.xe()
    node = host.dev / "elsewhere"
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(226, 128))
        file = os.open(node, os.O_PATH)
    except OSError as error:
        pytest.skip("device nodes cannot be made here: %s" % error.strerror)
    nodes = nodes_of(host, os.getpid())
    os.close(file)
    assert (os.getpid(), file, "renderD128") in nodes.files
    (facts,) = _gpu_intel.read(None, 20.0, nodes, sys=str(host.sys), dev=str(host.dev)).devices
    assert facts["nodes"] == ["renderD128", "card0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_is_told_no_complete_list(host, hold):
    """Red when accounts that may not be read are taken for none."""
    host.xe()
    child = hold(host.dev / "dri/renderD128")
    (file,) = [file for _pid, file, _name in nodes_of(host, child.pid).files]
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        nodes = _gpu_nodes.NodeFacts(holders={"renderD128": [child.pid]})
        nodes.files = [(child.pid, file, "renderD128")]
        card = _gpu_intel._gpu_drm.Card(0, "0000:03:00.0", "/", 0xE20B, "xe", ("renderD128",))
        account = _gpu_intel._gpu_drm.examine(card, lambda card: {}, nodes, "/proc", 5.0)
        os.write(writer, json.dumps([account.lists(nodes), len(account.clients)]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert json.loads(os.read(reader, 1000)) == ["denied", 0]
    os.close(reader)
    os.close(writer)
