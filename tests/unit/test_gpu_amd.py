# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""AMD devices on made-up trees of sysfs, KFD and process tables."""

from __future__ import annotations

import sys
import types

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _bounded,
    _gpu_amd,
    _gpu_amdsmi,
    _gpu_bus,
    _gpu_drm,
    _gpu_kfd,
)
from drm_host import FAILS, HANGS, MIB, DrmHost, amdgpu, amdgpu_5_15

KIB_300 = 300 * 1024


@pytest.fixture(name="host")
def fixture_host(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    return DrmHost(tmp_path)


@pytest.fixture(name="card")
def fixture_card(host):
    host.amdgpu(unique_id="1f9de0957d137942", product_name="AMD Instinct MI300X OAM", gpu_busy_percent=7)
    host.kfd_device(0, 0, cpus=96)
    host.kfd_device(1, 51545)
    return host


def look(host, only=None, limit=20.0, hidden=0):
    return _gpu_amd.read(only, limit, host.nodes(hidden), **host.trees())


def one(host, **more):
    (facts,) = look(host, **more).devices
    return facts


def processes(facts):
    return [(entry["pid"], entry["memory"], entry["source"]) for entry in facts["processes"]]


def test_all_that_is_told_of_a_card(card):
    card.write(card.sys / "module/amdgpu/version", "6.10.5")
    card.kfd_process(4711, {51545: 300 * MIB})
    card.client(4711, 12, "renderD128", amdgpu(7, vram=KIB_300))
    reading = look(card)
    assert (reading.vendor, reading.count, reading.driver_version) == ("amd", 1, "6.10.5")
    assert reading.devices == [
        {
            "index": 0,
            "pci": "0000:83:00.0",
            "nodes": ["renderD128", "card0"],
            "reason": "",
            "detail": "",
            "uuid": "GPU-1f9de0957d137942",
            "name": "AMD Instinct MI300X OAM",
            "integrated": False,
            "memory_used": 284,
            "memory_total": 196592,
            "memory_basis": "used_and_reserved",
            "utilization": 7,
            "processes": [
                {"pid": 4711, "memory": 300, "kind": "compute", "source": "kfd"},
                {"pid": 4711, "memory": 300, "kind": "graphics", "source": "fdinfo", "clients": {"7": 300}},
            ],
            "lists": "complete",
            "remarks": [],
        }
    ]


def test_what_only_the_compute_driver_shows_is_taken(card):
    """Red when KFD is ignored."""
    card.kfd_process(4711, {51545: 300 * MIB})
    card.client(4711, 12, "renderD128", amdgpu(7, vram=12))
    facts = one(card)
    assert processes(facts) == [(4711, 300, "kfd")]
    assert facts["remarks"] == ["the compute driver (KFD) shows process 4711, its open files do not"]


def test_what_only_the_open_files_show_is_taken(card):
    """Red when fdinfo is ignored: KFD knows the process and tells no memory of it."""
    card.kfd_process(4711, {51545: 0})
    card.client(4711, 12, "renderD128", amdgpu(7, vram=KIB_300))
    facts = one(card)
    assert processes(facts) == [(4711, 300, "fdinfo")]
    assert facts["remarks"] == ["the open files of process 4711 show it, the compute driver (KFD) does not"]


def test_a_program_that_only_draws_contradicts_nothing(card):
    card.client(4711, 12, "renderD128", amdgpu(7, vram=KIB_300, gfx=5))
    facts = one(card)
    assert (processes(facts), facts["remarks"]) == ([(4711, 300, "fdinfo")], [])


def test_no_contradiction_is_told_where_one_side_cannot_be_seen(card):
    card.kfd_process(4711, {51545: 300 * MIB})
    facts = one(card, hidden=1)
    assert (processes(facts), facts["remarks"], facts["lists"]) == ([(4711, 300, "kfd")], [], "denied")


def test_an_opened_compute_driver_alone_is_no_use_of_a_device(card):
    """As a monitor has it: its files there say zero, and it has no queue."""
    card.kfd_process(10, {51545: 0})
    card.client(10, 4, "renderD128", amdgpu(7, vram=12))
    assert processes(one(card)) == []


def test_a_queue_is_use_of_a_device(card):
    card.kfd_process(10, {51545: 0}, queues=[51545])
    card.kfd_process(20, {51545: 0, 7: 0}, queues=[7])
    assert processes(one(card)) == [(10, 0, "kfd")]


def test_the_process_uses_another_device(card):
    card.amdgpu("0000:93:00.0", number=1, render=129)
    card.kfd_device(2, 4242, "0000:93:00.0", render=129)
    card.kfd_process(10, {51545: 0, 4242: 64 * MIB})
    first, second = look(card).devices
    assert (processes(first), processes(second)) == ([], [(10, 64, "kfd")])


def test_further_contexts_of_a_process_are_added(card):
    card.kfd_process(10, {51545: 64 * MIB})
    card.kfd_process(10, {51545: 36 * MIB}, context=1)
    assert processes(one(card)) == [(10, 100, "kfd")]


def test_a_kernel_that_does_not_tell_the_device(card):
    """Unknown is not clear: only its number is told, so it may be on any of them."""
    card.kfd_process(10)
    assert processes(one(card)) == [(10, None, "kfd")]


def test_the_files_that_read_the_memory_of_a_process_are_left_alone(card):
    """They hang in this tree."""
    card.kfd_process(10, {51545: 64 * MIB})
    reading = look(card)
    assert (reading.warnings, processes(reading.devices[0])) == ([], [(10, 64, "kfd")])


def test_compute_partitions_are_parts_of_their_card(host):
    host.amdgpu()
    host.kfd_device(1, 11, render=128)
    host.kfd_device(2, 12, render=129, partition=1)
    host.kfd_process(10, {11: 64 * MIB, 12: 0})
    host.kfd_process(20, {11: 0, 12: 32 * MIB})
    host.client(20, 3, "renderD129", amdgpu(1, vram=32 * 1024))
    facts = one(host)
    assert facts["nodes"] == ["renderD128", "card0", "renderD129"]
    assert processes(facts) == [(10, 64, "kfd"), (20, 32, "kfd"), (20, 32, "fdinfo")]


@pytest.mark.parametrize("text", [amdgpu(7, vram=KIB_300, new=False), amdgpu_5_15(9, vram=KIB_300)])
def test_older_keys(card, text):
    card.client(10, 3, "renderD128", text)
    card.client(10, 4, "renderD128", text)
    assert processes(one(card)) == [(10, 300, "fdinfo")]


def test_an_account_without_its_figures_is_of_unknown_size(card):
    """As the driver writes it when the address space of the client is locked."""
    card.client(10, 3, "renderD128", "drm-driver:\tamdgpu\ndrm-client-id:\t3\ndrm-pdev:\t0000:83:00.0\n")
    assert processes(one(card)) == [(10, None, "fdinfo")]


@pytest.mark.parametrize("sign", ["metrics", "cpus", "zero"])
def test_a_processor_with_a_gpu_has_no_memory_to_judge_by(host, sign):
    """Red when the carve-out, or the zero that an MI300A tells, is taken for the memory of a card."""
    used = 0 if sign == "zero" else 400 * MIB
    metrics = {"gpu_metrics": b"\x80\x00\x02\x02" if sign == "metrics" else b"\x80\x00\x01\x03"}
    host.amdgpu(used=used, total=512 * MIB, **metrics)
    host.kfd_device(0, 51545, cpus=16 if sign == "cpus" else 0)
    host.client(10, 3, "renderD128", amdgpu(7, vram=1024, gtt=900 * 1024))
    host.client(20, 3, "renderD128", amdgpu(8, vram=12, gtt=2048))
    facts = one(host)
    # An accelerator is not left out of a check for its odd figure.
    assert facts["integrated"] is (sign != "zero")
    assert (facts["memory_used"], facts["memory_total"], facts["memory_basis"]) == (None, None, "not_available")
    assert processes(facts) == [(10, 901, "fdinfo")]


def test_a_card_is_not_taken_for_a_processor(host):
    host.amdgpu(gpu_metrics=b"\x80\x00\x01\x03")
    host.client(10, 3, "renderD128", amdgpu(7, vram=12, gtt=900 * 1024))
    facts = one(host)
    assert (facts["integrated"], facts["memory_used"], processes(facts)) == (False, 284, [])


def test_a_driver_that_tells_no_memory(host):
    host.amdgpu(used=None)
    facts = one(host)
    assert (facts["memory_used"], facts["memory_basis"], facts["integrated"]) == (None, "not_available", False)


def test_a_sick_device_does_not_hide_the_others(host):
    host.amdgpu("0000:83:00.0", used=FAILS)
    host.amdgpu("0000:93:00.0", number=1, render=129)
    sick, well = look(host).devices
    assert (sick["reason"], sick["index"], sick.get("memory_used")) == ("driver_error", 0, None)
    assert sick["detail"] == 'the driver does not tell "mem_info_vram_used": Input/output error'
    assert (well["reason"], well["memory_used"]) == ("", 284)


def test_a_hanging_device_is_told_with_what_was_read(host, monkeypatch):
    monkeypatch.setattr(_gpu_drm, "DEVICE_LIMIT", 0.5)
    host.amdgpu("0000:83:00.0", used=HANGS)
    host.kfd_device(1, 51545)
    host.kfd_process(10, {51545: 64 * MIB})
    facts = one(host)
    assert (facts["reason"], processes(facts), facts["remarks"]) == ("timeout", [(10, 64, "kfd")], [])


def test_a_compute_driver_that_hangs(card, monkeypatch):
    monkeypatch.setattr(_gpu_kfd, "LIMIT", 0.5)
    card.kfd_process(10, {51545: 64 * MIB})
    card.kfd_process(20, {51545: HANGS})
    reading = look(card)
    facts = reading.devices[0]
    assert reading.warnings == ["the compute driver (KFD) does not tell its processes: no answer within 0.5 s"]
    assert (processes(facts), facts["lists"], facts["reason"]) == ([(10, 64, "kfd")], "absent", "")


def test_a_failing_sensor_decides_nothing(host):
    host.amdgpu(gpu_busy_percent=FAILS)
    facts = one(host)
    assert (facts["reason"], facts.get("utilization")) == ("", None)


def test_drivers_missing_or_others(host):
    host.amdgpu("0000:83:00.0", driver="")
    host.amdgpu("0000:84:00.0", driver="vfio-pci")
    first, second = look(host).devices
    assert first["detail"] == 'the AMD GPU 0000:83:00.0 has no graphics driver: load it with "modprobe amdgpu"'
    assert (second["reason"], second["index"]) == ("passed_through", 1)


def test_a_host_without_one(host):
    host.xe()
    assert (look(host).count, look(host).devices) == (0, [])
    assert _gpu_bus.present("amd", host.trees()["sys"], host.trees()["dev"]) is False
    (host.dev / "kfd").touch()
    assert _gpu_bus.present("amd", host.trees()["sys"], host.trees()["dev"]) is True


def smi(monkeypatch, listed, name="AMD Instinct MI300X", init=None):
    """A stand-in for the binding, with the shape of its answers."""
    fake = types.ModuleType("amdsmi")
    fake.amdsmi_init = init or (lambda: None)
    fake.amdsmi_get_processor_handles = lambda: ["broken", "handle"]
    fake.amdsmi_get_gpu_device_bdf = lambda handle: {"handle": "0000:83:00.0"}[handle]
    fake.amdsmi_get_gpu_asic_info = lambda handle: {"market_name": name}
    fake.amdsmi_get_gpu_process_list = listed
    monkeypatch.setitem(sys.modules, "amdsmi", fake)


def process(pid, vram, gfx=0):
    usage = {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": vram}
    return {"name": "x", "pid": pid, "mem": vram, "engine_usage": {"gfx": gfx, "enc": 0}, "memory_usage": usage}


def test_the_library_adds_names_and_its_list(host, monkeypatch):
    smi(monkeypatch, lambda handle: [process(10, 64 * MIB), process(20, 0), process(30, 0, 5), process(40, "N/A")])
    host.amdgpu()
    facts = one(host)
    assert facts["name"] == "AMD Instinct MI300X"
    assert processes(facts) == [(10, 64, "driver"), (30, 0, "driver"), (40, None, "driver")]


def test_a_call_of_the_library_that_fails_is_left_out(host, monkeypatch):
    smi(monkeypatch, lambda handle: 1 / 0)
    host.amdgpu()
    reading = look(host)
    assert (reading.devices[0]["name"], reading.devices[0]["processes"], reading.warnings) == (
        "AMD Instinct MI300X",
        [],
        [],
    )


def test_a_library_that_does_not_start_or_hangs_is_left_out(host, monkeypatch):
    host.amdgpu()
    smi(monkeypatch, lambda handle: [], init=lambda: 1 / 0)
    reading = look(host)
    assert reading.devices[0]["memory_used"] == 284
    assert reading.warnings == [
        "the AMD management library gives no answer and was left out: ZeroDivisionError: division by zero"
    ]
    monkeypatch.setattr(_gpu_amdsmi, "LIMIT", 0.5)
    smi(monkeypatch, lambda handle: [], init=(host.dev / "pipe").read_text)
    host.write(host.dev / "pipe", HANGS)
    reading = look(host)
    assert (reading.devices[0]["memory_used"], reading.devices[0]["reason"]) == (284, "")
    assert reading.warnings == ["the AMD management library gives no answer and was left out: no answer within 0.5 s"]
