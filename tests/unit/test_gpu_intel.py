# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Intel devices on made-up trees of sysfs, debugfs and process tables."""

from __future__ import annotations

import os

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_bus, _gpu_intel
from drm_host import FAILS, HANGS, I915_OBJECTS, MIB, XE_VRAM_MM, DrmHost, i915, xe

SIZE = 12216 * MIB


@pytest.fixture(name="host")
def fixture_host(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    return DrmHost(tmp_path)


def look(host, only=None, limit=20.0, hidden=0):
    return _gpu_intel.read(only, limit, host.nodes(hidden), **host.trees())


def one(host, **more):
    (facts,) = look(host, **more).devices
    return facts


def memory(facts):
    return facts.get("memory_used"), facts.get("memory_total"), facts["memory_basis"]


def test_all_that_is_told_of_a_xe_card(host):
    host.xe(**{"tile0/physical_vram_size_bytes": 12288 * MIB})
    host.debug("0000:03:00.0/tile0/vram_mm", XE_VRAM_MM.format(size=SIZE, usage=512 * MIB + 1, total=12216))
    host.client(4711, 12, "renderD128", xe(7, vram="500 MiB", ccs=9))
    reading = look(host)
    assert (reading.vendor, reading.count, reading.reason) == ("intel", 1, "")
    assert reading.devices == [
        {
            "index": 0,
            "pci": "0000:03:00.0",
            "nodes": ["renderD128", "card0"],
            "reason": "",
            "detail": "",
            "integrated": False,
            "memory_used": 513,
            "memory_total": 12288,
            "memory_basis": "used_and_reserved",
            "lists": "complete",
            "processes": [{"pid": 4711, "memory": 500, "kind": "compute", "source": "fdinfo", "clients": {"7": 500}}],
        }
    ]


def test_older_names_in_debugfs_and_several_tiles(host):
    host.xe()
    for tile in (0, 1):
        text = XE_VRAM_MM.format(size=SIZE, usage=100 * MIB, total=12216)
        host.debug("0/vram%d_mm" % tile, text)
    assert memory(one(host)) == (200, 12216, "used_and_reserved")


def test_the_number_in_debugfs_is_that_of_the_card(host):
    host.xe(number=1)
    host.debug("0/vram0_mm", XE_VRAM_MM.format(size=SIZE, usage=100 * MIB, total=12216))
    assert memory(one(host)) == (None, None, "not_available")


def test_an_i915_card_with_memory_of_its_own(host):
    host.i915("0000:03:00.0", device="0x56a0")
    host.debug("0/i915_gem_objects", I915_OBJECTS.format(usage=314 * MIB, total=16256))
    host.client(10, 3, "renderD128", i915(1, local="300 MiB", compute=4))
    facts = one(host)
    assert memory(facts) == (314, 16256, "used_and_reserved"), "not the stolen region, and no count of pages"
    assert (facts["integrated"], facts["lists"]) == (False, "complete")
    assert [(e["pid"], e["memory"], e["kind"]) for e in facts["processes"]] == [(10, 300, "compute")]


def test_without_debugfs_the_clients_are_added_up(host):
    host.xe(**{"tile0/physical_vram_size_bytes": SIZE})
    assert memory(one(host)) == (0, 12216, "clients")
    host.client(10, 3, "renderD128", xe(1, vram="300 MiB"))
    host.client(20, 3, "renderD128", xe(1, vram="300 MiB"))
    host.client(30, 3, "renderD128", xe(2, vram="1 MiB"))
    facts = one(host)
    assert memory(facts) == (301, 12216, "clients")
    assert [entry["pid"] for entry in facts["processes"]] == [10, 20]


def test_the_sum_is_told_only_when_all_clients_can_be_seen(host):
    """Red when an unknown client is taken for none."""
    host.xe(**{"tile0/physical_vram_size_bytes": SIZE})
    assert memory(one(host, hidden=1)) == (None, 12216, "not_available")
    assert one(host, hidden=1)["lists"] == "denied"
    host.hold(20, "renderD128")
    assert memory(one(host)) == (None, 12216, "not_available")
    assert one(host)["lists"] == "absent"


def test_a_kernel_that_tells_no_memory(host):
    """i915 before Linux 6.8 on a card: who computed is listed, with memory of unknown size."""
    host.i915("0000:03:00.0", device="0x56a0")
    host.client(10, 3, "renderD128", i915(1, memory=False, compute=8))
    host.client(20, 3, "renderD128", i915(2, memory=False, compute=0))
    facts = one(host)
    assert memory(facts) == (None, None, "not_available")
    assert facts["processes"] == [{"pid": 10, "memory": None, "kind": "compute", "source": "fdinfo", "clients": {}}]
    assert (facts["integrated"], facts["lists"]) == (False, "complete")


def test_a_kernel_that_tells_no_engines(host):
    """xe before Linux 6.11: its memory alone says whether a client uses the device."""
    host.xe()
    host.client(10, 3, "renderD128", xe(1, vram="8 MiB", cycles=False))
    host.client(20, 3, "renderD128", xe(2, cycles=False))
    assert [(entry["pid"], entry["kind"]) for entry in one(host)["processes"]] == [(10, "graphics")]


@pytest.mark.parametrize(
    ("make", "text"),
    [("i915", i915(1, system="90 MiB", render=7)), ("xe", xe(1, "0000:00:02.0", gtt="90 MiB", rcs=7, own=False))],
)
def test_an_integrated_gpu_has_no_memory_to_judge_by(host, make, text):
    """Red when it is told as 0 MiB: its clients hold memory of the host."""
    getattr(host, make)("0000:00:02.0")
    host.client(10, 3, "renderD128", text)
    host.client(20, 3, "renderD128", i915(2) if make == "i915" else xe(2, own=False))
    facts = one(host)
    assert facts["integrated"] is True
    assert memory(facts) == (None, None, "not_available")
    assert [(e["pid"], e["memory"], e["kind"]) for e in facts["processes"]] == [(10, 90, "graphics")]


def test_a_card_in_the_place_of_an_integrated_gpu_is_told_by_its_memory(host):
    """In a virtual machine a card may have any address."""
    host.i915("0000:00:02.0", device="0x56a0")
    host.client(10, 3, "renderD128", i915(1, local="300 MiB"))
    facts = one(host)
    assert (facts["integrated"], facts["memory_used"], facts["memory_basis"]) == (False, 300, "clients")


def test_a_sick_device_does_not_hide_the_others(host):
    host.xe("0000:03:00.0", **{"tile0/physical_vram_size_bytes": FAILS})
    host.xe("0000:04:00.0", number=1, render=129, **{"tile0/physical_vram_size_bytes": SIZE})
    sick, well = look(host).devices
    assert (sick["reason"], sick["index"]) == ("driver_error", 0)
    assert sick["detail"] == 'the driver does not tell "physical_vram_size_bytes": Input/output error'
    assert (well["reason"], well["memory_total"]) == ("", 12216)


def test_a_hanging_debugfs_is_bounded(host, monkeypatch):
    monkeypatch.setattr(_gpu_intel._gpu_drm, "DEVICE_LIMIT", 0.5)
    host.xe("0000:03:00.0")
    host.debug("0000:03:00.0/tile0/vram_mm", HANGS)
    host.xe("0000:04:00.0", number=1, render=129)
    host.client(10, 3, "renderD129", xe(1, "0000:04:00.0", vram="8 MiB"))
    sick, well = look(host).devices
    assert (sick["reason"], sick["lists"]) == ("timeout", "absent")
    assert sick["detail"] == "the driver does not tell its attributes: no answer within 0.5 s"
    assert [entry["pid"] for entry in well["processes"]] == [10]


def test_the_driver_of_a_generation_is_named(host):
    host.xe("0000:03:00.0", driver="")
    host.i915("0000:04:00.0", device="0x56a0", driver="")
    first, second = look(host).devices
    assert first["detail"] == 'the Intel GPU 0000:03:00.0 has no graphics driver: load it with "modprobe xe"'
    assert second["detail"] == 'the Intel GPU 0000:04:00.0 has no graphics driver: load it with "modprobe i915"'
    assert (first["reason"], second["reason"]) == ("driver_not_loaded", "driver_not_loaded")


def test_only_the_devices_that_are_asked_for(host):
    for number in range(3):
        host.xe("0000:0%d:00.0" % number, number=number, render=128 + number)
    reading = look(host, only=[2, 0, 7])
    assert ([facts["index"] for facts in reading.devices], reading.count) == ([0, 2], 3)


def test_a_host_without_one(host):
    host.amdgpu()
    reading = look(host)
    assert (reading.count, reading.devices, reading.reason) == (0, [], "")
    assert _gpu_bus.present("intel", host.trees()["sys"], host.trees()["dev"]) is False
    host.xe(driver="")
    assert _gpu_bus.present("intel", host.trees()["sys"], host.trees()["dev"]) is True


def test_a_bus_that_cannot_be_read(host):
    (host.sys / "bus/pci/devices").rmdir()
    reading = look(host)
    assert (reading.reason, reading.detail, reading.count) == (
        "bus_unreadable",
        "the list of PCI devices cannot be read: No such file or directory",
        None,
    )


def test_a_bus_that_cannot_be_read_beside_a_node_is_not_taken_for_no_device(host, monkeypatch):
    """A host without a bus has none; one whose bus is hidden from us may have some."""
    trees = host.trees()
    assert (
        _gpu_bus.present("intel", trees["sys"], trees["dev"])
        is _gpu_bus.present("amd", trees["sys"], trees["dev"])
        is False
    )
    (host.dev / "dri").mkdir(exist_ok=True)
    (host.dev / "dri/renderD128").touch()
    real = os.listdir

    def listdir(path="."):
        if str(path).endswith("/bus/pci/devices"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert (
        _gpu_bus.present("intel", trees["sys"], trees["dev"])
        is _gpu_bus.present("amd", trees["sys"], trees["dev"])
        is True
    )
    assert look(host).reason == "bus_unreadable"


def test_the_gpu_of_a_processor_without_a_driver_is_still_that(host):
    """So that it is left out beside real devices, as one with a driver is."""
    host.xe("0000:00:02.0", driver="")
    host.xe("0000:03:00.0", driver="", number=1, render=129)
    assert [(f["reason"], f.get("integrated")) for f in look(host).devices] == [
        ("driver_not_loaded", True),
        ("driver_not_loaded", False),
    ]


@pytest.mark.parametrize("second", ["", "usage: lots\n"])
def test_a_tile_that_tells_nothing_leaves_the_memory_of_the_device_unknown(host, second):
    host.xe()
    host.debug("0000:03:00.0/tile0/vram_mm", XE_VRAM_MM.format(size=SIZE, usage=50 * MIB, total=12216))
    host.debug("0000:03:00.0/tile1/vram_mm", second)
    facts = one(host)
    assert (facts.get("memory_used"), facts["memory_basis"]) != (50, "used_and_reserved")
