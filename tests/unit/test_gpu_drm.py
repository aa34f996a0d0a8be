# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What DRM drivers account for an open file, on texts as they write them, and devices that fail or hang."""

from __future__ import annotations

import os
import re
import tempfile

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_drm
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_drm import MIB, cards, examine, parse
from drm_host import FAILS, HANGS, DrmHost, amdgpu, amdgpu_5_15, i915, xe

VRAM = re.compile(r"vram\d*\Z")


@pytest.fixture(name="host")
def fixture_host(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    return DrmHost(tmp_path)


def account(host, attributes=lambda card: {}, limit=5.0, hidden=0):
    (card,) = cards("intel", str(host.sys))
    return examine(card, attributes, host.nodes(hidden), str(host.proc), limit)


def used(host):
    found = account(host).processes(VRAM)
    assert all(entry["source"] == "fdinfo" for entry in found)
    return [(entry["pid"], entry["memory"], entry["kind"]) for entry in found]


def test_the_keys_of_xe():
    client = parse(xe(7, vram="23992 KiB", gtt="192 KiB", ccs=5, rcs=3))
    assert (client.driver, client.identity) == ("xe", "7")
    assert client.regions["vram0"] == {"total": 23992 * 1024, "resident": 23992 * 1024}
    assert sorted(client.regions) == ["gtt", "stolen", "system", "vram0"], "drm-total-cycles-ccs is no region"
    assert client.engines == {"rcs": 3, "bcs": 0, "ccs": 5}, "a capacity is no use of an engine"


def test_the_keys_of_i915():
    client = parse(i915(3, system="4 KiB", local="256 MiB", render=900, compute=17))
    assert client.regions["local0"] == {"total": 256 * MIB, "resident": 256 * MIB}
    assert sorted(client.regions) == ["local0", "stolen-local0", "system0"]
    assert client.engines == {"render": 900, "copy": 0, "compute": 17}


def test_the_keys_of_amdgpu_new_old_and_oldest():
    assert parse(amdgpu(9, vram=4096, resident=1024)).regions["vram"] == {
        "total": 4096 * 1024,
        "resident": 1024 * 1024,
        "memory": 1024 * 1024,
    }
    old = parse(amdgpu(9, vram=4096, new=False, gfx=12))
    assert (old.regions["vram"], old.engines) == ({"memory": 4096 * 1024}, {"gfx": 12})
    oldest = parse(amdgpu_5_15(32774, vram=4096, gtt=2))
    assert (oldest.driver, oldest.identity) == ("amdgpu", "pasid 32774")
    assert oldest.regions["vram"] == {"memory": 4096 * 1024}


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        ("0", 0),
        ("4096", 4096),
        ("3 KiB", 3072),
        ("7 MiB", 7 * MIB),
        ("2 GiB", 2048 * MIB),
        ("5 TiB", None),
        ("x", None),
    ],
)
def test_units(value, amount):
    """Red when the unit is taken for granted: the same key comes without one, in KiB and in MiB."""
    regions = parse("drm-driver:\txe\ndrm-resident-vram0:\t%s\n" % value).regions
    assert regions == ({} if amount is None else {"vram0": {"resident": amount}})


def test_a_number_that_cannot_be_understood_is_not_zero(host):
    host.xe()
    host.client(10, 3, "renderD128", xe(1, vram="5 TiB", rcs="much"))
    assert used(host) == [(10, None, "graphics")]
    assert account(host).memory(VRAM) is None


def test_a_file_without_an_account():
    assert parse("pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t685\n") is None


def test_several_files_of_one_client_count_once(host):
    host.xe()
    for file in (3, 4, 9):
        host.client(10, file, "renderD128", xe(7, vram="512 MiB", ccs=1))
    assert used(host) == [(10, 512, "compute")]
    assert account(host).memory(VRAM) == 512 * MIB


def test_several_clients_of_one_process_are_added_up(host):
    host.xe()
    host.client(10, 3, "renderD128", xe(7, vram="512 MiB", rcs=1))
    host.client(10, 4, "card0", xe(8, vram="100 KiB"))
    assert used(host) == [(10, 513, "graphics")]


def test_a_client_handed_to_another_process_has_two_holders_and_counts_once(host):
    host.xe()
    host.client(10, 3, "renderD128", xe(7, vram="512 MiB"))
    host.client(20, 5, "renderD128", xe(7, vram="512 MiB"))
    assert used(host) == [(10, 512, "graphics"), (20, 512, "graphics")]
    assert account(host).memory(VRAM) == 512 * MIB


def test_the_same_number_on_two_devices_is_two_clients(host):
    host.xe("0000:03:00.0")
    host.xe("0000:04:00.0", number=1, render=129)
    host.client(10, 3, "renderD128", xe(1, vram="8 MiB"))
    host.client(20, 3, "renderD129", xe(1, vram="16 MiB"))
    both = [
        examine(card, lambda card: {}, host.nodes(), str(host.proc), 5.0).processes(VRAM)
        for card in cards("intel", str(host.sys))
    ]
    assert [[(entry["pid"], entry["memory"]) for entry in part] for part in both] == [[(10, 8)], [(20, 16)]]


def test_an_opened_idle_device_is_no_process_on_it(host):
    """What an opened file alone costs the driver is no use; more of it, or a busy engine, is."""
    host.xe()
    host.client(10, 3, "renderD128", xe(1, vram="2 MiB", gtt="100 MiB"))
    assert used(host) == []
    host.client(20, 3, "renderD128", xe(2, vram="4 MiB"))
    host.client(30, 3, "renderD128", xe(3, ccs=1))
    assert used(host) == [(20, 4, "graphics"), (30, 0, "compute")]


def test_what_was_moved_out_still_is_use(host):
    host.xe()
    text = xe(1, vram="0").replace("drm-total-vram0:\t0", "drm-total-vram0:\t900 MiB")
    host.client(10, 3, "renderD128", text)
    assert used(host) == [(10, 0, "graphics")]


def test_memory_that_is_not_told_is_not_zero(host):
    host.i915()
    host.client(10, 3, "renderD128", i915(1, memory=False, render=5))
    host.client(20, 3, "renderD128", i915(2, memory=False))
    assert used(host) == [(10, None, "graphics")]
    assert account(host).memory(VRAM) is None
    host.client(30, 3, "renderD128", "drm-driver:\ti915\ndrm-client-id:\t3\n")
    assert used(host) == [(10, None, "graphics"), (30, None, "graphics")]


def test_only_keys_of_the_driver_count(host):
    """A number that was reused meanwhile may be a file of another device's driver."""
    host.xe()
    host.client(10, 3, "renderD128", amdgpu(1, vram=900000))
    assert (used(host), account(host).unread) == ([], set())


def test_a_file_that_was_closed_meanwhile_is_nothing(host):
    host.xe()
    host.files.append((10, 3, "renderD128"))
    host.hold(10, "renderD128")
    found = account(host)
    assert (found.clients, found.lists(host.nodes())) == ([], "complete")


def test_threads_hold_on_after_the_main_thread_has_ended(host):
    host.xe()
    (host.proc / "10" / "fdinfo").mkdir(parents=True)
    host.client(10, 3, "renderD128", xe(7, vram="512 MiB"), thread=11)
    assert used(host) == [(10, 512, "graphics")]


def test_a_kernel_without_accounts_has_no_list(host):
    host.xe()
    assert account(host).lists(host.nodes()) == "complete"
    host.client(10, 3, "renderD128", "pos:\t0\nflags:\t02100002\n")
    assert account(host).lists(host.nodes()) == "absent"
    assert account(host).memory(VRAM) is None


def test_a_mapping_without_an_open_file_has_no_account(host):
    host.xe()
    host.hold(10, "renderD128")
    assert account(host).lists(host.nodes()) == "absent"


def test_files_that_cannot_be_seen_leave_no_complete_list(host):
    host.xe()
    assert account(host).lists(host.nodes(hidden=1)) == "denied"
    assert account(host).lists(host.nodes(error="the time was over")) == "denied"


def test_an_account_that_may_not_be_read_is_denied(monkeypatch):
    """As an ordinary user, who sees the link of a process of the same user in another security domain, say."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        host = DrmHost(folder)
        host.xe()
        host.client(10, 3, "renderD128", xe(7, vram="512 MiB"))
        os.chmod(host.proc / "10" / "fdinfo" / "3", 0)
        monkeypatch.setattr(_bounded, "STUCK_FOLDER", folder + "/stuck")
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            found = account(host)
        finally:
            os.seteuid(before)
        assert (found.clients, found.unread, found.lists(host.nodes())) == ([], {"denied"}, "denied")


def test_a_failing_account_is_not_a_closed_file(host):
    host.xe()
    host.client(10, 3, "renderD128", FAILS)
    assert account(host).lists(host.nodes()) == "absent"


def test_what_was_read_before_a_hang_counts(host):
    host.xe()
    host.client(10, 3, "renderD128", xe(7, vram="512 MiB"))
    host.client(20, 3, "renderD128", HANGS)
    host.client(30, 3, "renderD128", xe(9, vram="512 MiB"))
    found = account(host, lambda card: {"memory_total": 12216}, limit=0.5)
    assert [(entry["pid"], entry["memory"]) for entry in found.processes(VRAM)] == [(10, 512)]
    assert (found.facts["reason"], found.facts["memory_total"]) == ("timeout", 12216)
    assert found.facts["detail"] == "the driver does not tell what process 20 holds: no answer within 0.5 s"
    assert found.lists(host.nodes()) == "absent"


def test_a_child_that_hangs_is_not_joined_by_another(host):
    host.xe()
    _bounded.remember("drm-0000:03:00.0", os.getpid())
    found = account(host, lambda card: pytest.fail("called"))
    assert found.facts["reason"] == "stuck"
    assert found.facts["detail"] == "an earlier call into the driver for this device has not come back"
    assert found.facts["pci"] == "0000:03:00.0"


def test_no_time_left_is_told_without_asking(host):
    host.xe()
    assert account(host, limit=0).facts["reason"] == "timeout"


def test_a_device_off_the_bus(host):
    path = host.xe()
    (path / "config").write_bytes(b"\xff" * 64)
    facts = account(host).facts
    assert (facts["reason"], facts["detail"]) == ("gpu_lost", "the device does not answer on the PCI bus")


def test_a_device_that_vanishes(host):
    path = host.xe()
    found = account(host, lambda card: [path.rename(path.parent / "gone"), {}][1])
    assert (found.facts["reason"], found.facts["detail"]) == ("driver_error", "the device vanished while it was read")


def test_cards_are_ordered_by_address_and_keep_virtual_functions(host):
    host.xe("0000:e1:00.0", number=2, render=130)
    host.xe("10000:01:00.0", number=3, render=131)
    host.xe("0000:03:00.1", number=1, render=129, physfn="")
    host.xe("0000:03:00.0")
    host.card("0000:05:00.0", "0x8086", "0x7d1d", "intel_vpu", kind="0x120000")
    host.card("0000:06:00.0", "0x8086", "0x1533", "igb", kind="0x020000")
    found = cards("intel", str(host.sys))
    assert [(card.index, card.pci, card.nodes[0]) for card in found] == [
        (0, "0000:03:00.0", "renderD128"),
        (1, "0000:03:00.1", "renderD129"),
        (2, "0000:e1:00.0", "renderD130"),
        (3, "10000:01:00.0", "renderD131"),
    ]
    assert found[0].nodes == ("renderD128", "card0")


@pytest.mark.parametrize(
    ("driver", "loaded", "reason", "detail"),
    [
        ("xe", False, None, None),
        (
            "",
            False,
            "driver_not_loaded",
            'the Intel GPU 0000:03:00.0 has no graphics driver: load it with "modprobe xe"',
        ),
        (
            "",
            True,
            "driver_not_loaded",
            'the Intel GPU 0000:03:00.0 has no graphics driver, although "xe" is loaded: the kernel log tells why',
        ),
        (
            "vfio-pci",
            True,
            "passed_through",
            'the Intel GPU 0000:03:00.0 is given to virtual machines ("vfio-pci")',
        ),
        (
            "radeon",
            True,
            "driver_not_loaded",
            'the Intel GPU 0000:03:00.0 is run by "radeon", which does not account for it',
        ),
    ],
)
def test_a_device_without_its_driver(host, driver, loaded, reason, detail):
    host.xe(driver=driver)
    if loaded:
        (host.sys / "module" / "xe").mkdir(parents=True)
    (card,) = cards("intel", str(host.sys))
    facts = _gpu_drm.undriven(card, "Intel", ("xe", "i915"), "xe", str(host.sys))
    assert facts is None if reason is None else (facts["reason"], facts["detail"]) == (reason, detail)
