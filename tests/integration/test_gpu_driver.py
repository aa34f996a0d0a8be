# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""gpu_clear where the driver is old, does not start, hangs, refuses an answer, or has lost a device."""

from __future__ import annotations

import os
import signal
import time

import pynvml
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_nvidia
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nvml_codes import CODES
from gpu_host import driver_library, made, verdicts

ERRORS = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")})


@pytest.fixture(name="lab")
def fixture_lab(tmp_path, tmp_path_factory, monkeypatch):
    yield from made(tmp_path, driver_library(tmp_path_factory), monkeypatch)


def test_a_lost_device_does_not_hide_the_others(lab):
    lab.scenario(
        devices=4, device__1__error__nvmlDeviceGetHandleByIndex=15, device__2__error__nvmlDeviceGetMemoryInfo=999
    )
    lab.hold("--device", "3", "--memory", "44000")
    reading = lab.look()
    assert reading.verdict == "error"
    assert verdicts(reading) == [
        ("clear", "idle"),
        ("error", "gpu_lost"),
        ("error", "driver_error"),
        ("busy", "held_by_process"),
    ]
    assert (
        "GPU 1 does not answer properly: the GPU has fallen off the bus or cannot be reached (code 15); reboot the host"
        in reading.message
    )
    assert lab.look(gpus=["0"]).verdict == "clear"


def test_a_call_that_hangs_does_not_hide_the_others(lab, monkeypatch):
    monkeypatch.setattr(_gpu_nvidia, "DRIVER_LIMIT", 2.0)
    monkeypatch.setattr(_gpu_nvidia, "DEVICE_LIMIT", 0.0)
    lab.scenario(devices=3, device__1__delay_ms__nvmlDeviceGetMemoryInfo=60000)
    lab.hold("--device", "2", "--memory", "44000")
    started = time.monotonic()
    reading = lab.look()
    assert verdicts(reading) == [("clear", "idle"), ("error", "timeout"), ("busy", "held_by_process")]
    assert time.monotonic() - started < 10
    assert reading.stuck_probes == []


def test_a_device_whose_earlier_call_is_stuck_is_not_asked_again(lab):
    lab.scenario(devices=2)
    stuck = lab.hold("--device", "1", "--memory", "500", node="nvidia1")
    _bounded.remember("nvml-1", stuck.pid)
    reading = lab.look()
    assert verdicts(reading) == [("clear", "idle"), ("error", "stuck")]
    assert reading.stuck_probes == [stuck.pid]
    assert reading.devices[1].holders == []
    lab.end(stuck)
    assert lab.look().verdict == "clear"


def test_our_own_stuck_call_is_no_holder(lab):
    lab.scenario(devices=2)
    stuck = lab.hold("--memory", "20", node="nvidia0")
    assert lab.look().verdict == "busy"
    _bounded.remember("nvml-1", stuck.pid)
    assert verdicts(lab.look()) == [("clear", "idle"), ("error", "stuck")]


def test_a_library_that_hangs_at_the_start(lab):
    lab.scenario(init_delay_ms=60000)
    reading = lab.look(limit=0.5)
    assert (reading.verdict, reading.reason) == ("error", "timeout")


@pytest.mark.parametrize(
    ("code", "reason", "sentence"),
    [
        (9, "driver_not_loaded", 'the NVIDIA kernel driver is not loaded (code 9); load it with "modprobe nvidia"'),
        (
            12,
            "library_missing",
            "libnvidia-ml.so.1 is not found or cannot be loaded (code 12); install the libraries of the driver",
        ),
        (
            18,
            "driver_mismatch",
            "the driver library and the loaded kernel driver are of different versions (code 18); "
            "reload the kernel driver or reboot the host",
        ),
        (999, "driver_error", "the driver reports an internal error (code 999)"),
    ],
)
def test_driver_that_does_not_start(lab, code, reason, sentence):
    lab.scenario(init_error=code)
    reading = lab.look(allow_no_gpu=True)
    assert (reading.verdict, reading.reason) == ("error", reason)
    assert reading.message == "the NVIDIA driver library does not start: " + sentence


@pytest.mark.parametrize("code", ERRORS)
def test_every_return_code_at_the_start(lab, code):
    lab.scenario(init_error=code)
    reading = _gpu_nvidia.read()
    assert (reading.reason, reading.devices) == (CODES[code][0], [])
    assert reading.detail.startswith("the NVIDIA driver library does not start: %s (code %d)" % (CODES[code][1], code))
    lab.scenario(error__nvmlDeviceGetCount=code)
    assert _gpu_nvidia.read().detail == reading.detail


@pytest.mark.parametrize("code", ERRORS)
def test_every_return_code_of_a_device(lab, code):
    """The device itself, its memory, its list and its name answer the code; a fifth device is well."""
    lab.scenario(
        devices=5,
        device__0__error__nvmlDeviceGetHandleByIndex=code,
        device__1__error__nvmlDeviceGetMemoryInfo=code,
        device__2__error__nvmlDeviceGetComputeRunningProcesses=code,
        device__3__error__nvmlDeviceGetName=code,
    )
    reading = _gpu_nvidia.read()
    sick, memory, processes, name, well = reading.devices
    word = CODES[code][0]
    assert (reading.reason, sick["reason"]) == ("", word)
    assert sick["detail"].startswith("%s (code %d)" % (CODES[code][1], code))
    if code in (3, 4, 6, 13, 25, 26):
        assert [facts["reason"] for facts in (memory, processes, name)] == ["", "", ""]
        assert (memory["memory_used"], memory["memory_total"], memory["memory_basis"]) == (None, None, "not_available")
        assert processes["lists"] == ("denied" if code in (4, 6) else "absent")
        assert (name["name"], name["memory_used"]) == (None, 3)
    else:
        assert [facts["reason"] for facts in (memory, processes, name)] == [word, word, word]
    assert (well["reason"], well["lists"], well["memory_used"]) == ("", "complete", 3)


def test_what_decides_nothing_may_fail(lab):
    lab.scenario(device__0__error__nvmlDeviceGetUtilizationRates=999, error__nvmlSystemGetDriverVersion=999)
    reading = _gpu_nvidia.read()
    assert (reading.driver_version, reading.devices[0]["reason"]) == (None, "")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"memory_base": "na"}, (46068, None, "not_available")),
        ({"memory_total": "na"}, (None, 3, "used")),
        ({"memory_free": "na"}, (46068, 3, "used")),
        ({"memory_base": "na", "memory_total": "na"}, (None, None, "not_available")),
        ({"memory_total": 0}, (None, None, "not_available")),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory_that_the_driver_does_not_know_is_unknown_and_never_0(lab, keys, expected, version):
    total, used, basis = expected
    scenario = {"device__0__" + key: value for key, value in keys.items()}
    if version == 1:
        scenario["device__0__error__nvmlDeviceGetMemoryInfo_v2"] = 13
        used, basis = (used if used is None else used + 541), basis.replace("used", "used_and_reserved")
    lab.scenario(**scenario)
    [facts] = _gpu_nvidia.read().devices
    assert (facts["memory_total"], facts["memory_used"], facts["memory_basis"]) == (total, used, basis)


def test_memory_of_a_process_that_the_driver_does_not_know(lab):
    lab.scenario(device__0__process__0="4711,na,compute", device__0__process__1="4712,0,mps")
    assert _gpu_nvidia.read().devices[0]["processes"] == [
        {"pid": 4711, "memory": None, "kind": "compute", "source": "driver"},
        {"pid": 4712, "memory": 0, "kind": "mps", "source": "driver"},
    ]


def test_a_device_that_answers_to_nothing_at_all(lab):
    lab.scenario(devices=2, device__0__error=15)
    reading = _gpu_nvidia.read()
    assert (reading.count, [facts["reason"] for facts in reading.devices]) == (2, ["gpu_lost", ""])


def test_100_looks_leave_one_call_that_hangs(lab, monkeypatch):
    """It cannot be ended, as where the kernel does not come back; the driver even lists it as using another device."""
    monkeypatch.setattr(_gpu_nvidia, "DRIVER_LIMIT", 1.0)
    monkeypatch.setattr(_gpu_nvidia, "DEVICE_LIMIT", 0.0)
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)
    hanging = {"devices": 2, "device__1__delay_ms__nvmlDeviceGetMemoryInfo": 120000}
    lab.scenario(**hanging)

    def reasons():
        with monkeypatch.context() as patched:
            patched.setattr(_bounded, "_kill", lambda _pid: None)
            return [facts["reason"] for facts in _gpu_nvidia.read().devices]

    assert reasons() == ["", "timeout"]
    stuck = _bounded.stuck_child("nvml-1")
    try:
        lab.scenario(**hanging, device__0__process__0="%d,300,compute" % stuck, device__0__memory_base=0)
        for number in range(99):
            assert reasons() == ["", "stuck"]
            if number % 33 == 0:
                reading = lab.look(memory_tolerance=400)
                assert verdicts(reading) == [("clear", "idle"), ("error", "stuck")]
                assert reading.stuck_probes == [stuck]
                assert [holder.pid for device in reading.devices for holder in device.holders] == []
        assert our_children() == [stuck]
    finally:
        os.kill(stuck, signal.SIGKILL)
        os.waitpid(stuck, 0)
    lab.scenario(devices=2)
    reading = lab.look()
    assert (verdicts(reading), reading.stuck_probes) == ([("clear", "idle")] * 2, [])


def our_children():
    with open("/proc/self/task/%d/children" % os.getpid(), encoding="ascii") as handle:
        return [int(word) for word in handle.read().split()]


def test_an_old_driver(lab):
    """Memory only in version 1, and a device that knows no MPS list."""
    lab.scenario(
        device__0__error__nvmlDeviceGetMemoryInfo_v2=13, device__0__error__nvmlDeviceGetMPSComputeRunningProcesses=13
    )
    reading = lab.look()
    assert (reading.devices[0].memory_used, reading.devices[0].memory_basis) == (544, "used_and_reserved")
    assert verdicts(reading) == [("busy", "held_by_unresolvable")]
    assert lab.look(memory_tolerance=600).verdict == "clear"


@pytest.mark.parametrize("missing", [("_v3",), ("_v3", "_v2")])
def test_a_driver_older_than_the_binding(lab, missing):
    """Its list in the newest version that it knows is used; where it knows none, the device is not called idle."""
    lab.scenario(**{"device__0__error__nvmlDeviceGetComputeRunningProcesses" + version: 13 for version in missing})
    lab.hold("--memory", "30", node="nvidia0")
    device = lab.look().devices[0]
    known = len(missing) == 1
    assert (device.verdict, device.reason) == (
        ("busy", "held_by_process") if known else ("unknown", "processes_unreadable")
    )


def test_a_look_that_has_answered_and_does_not_end_is_told_and_not_repeated(lab, monkeypatch):
    def end(_code):
        os.closerange(3, 256)
        while True:
            signal.pause()

    lab.scenario(devices=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", end)
        patched.setattr(_bounded, "_kill", lambda _pid: None)
        patched.setattr(_bounded, "KILL_WAIT", 0.05)
        patched.setattr(_bounded, "EXIT_WAIT", 0.05)
        reading = lab.look()
    assert reading.verdict == "clear"
    pids = {key: _bounded.stuck_child(key) for key in ("nvml", "nodes")}
    assert sorted(pids.values()) == reading.stuck_probes

    def end_child(key):
        os.kill(pids[key], signal.SIGKILL)
        os.waitpid(pids[key], 0)

    assert lab.look().reason == "stuck"
    end_child("nvml")
    reading = lab.look()
    assert (reading.verdict, reading.devices[0].reason) == ("unknown", "nodes_unreadable")
    assert reading.stuck_probes == [pids["nodes"]]
    end_child("nodes")
    assert lab.look().verdict == "clear"


@pytest.mark.parametrize(
    ("code", "verdict"), [(3, ("clear", "judged_by_holders")), (4, ("unknown", "memory_unreadable"))]
)
def test_a_figure_that_is_refused_is_not_one_that_does_not_exist(lab, code, verdict):
    lab.scenario(device__0__error__nvmlDeviceGetMemoryInfo=code)
    assert verdicts(lab.look()) == [verdict]


def test_a_device_that_hangs_leaves_the_others_their_time(lab):
    lab.scenario(devices=3, device__0__delay_ms__nvmlDeviceGetMemoryInfo=60000)
    lab.hold("--device", "2", "--memory", "44000")
    assert verdicts(lab.look(limit=6.0)) == [("error", "timeout"), ("clear", "idle"), ("busy", "held_by_process")]


def test_more_devices_on_the_bus_than_the_driver_knows_are_told(lab):
    for number in range(3):
        folder = lab.sys / ("bus/pci/devices/0000:1%d:00.0" % number)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
    (folder / "driver").symlink_to("/sys/bus/pci/drivers/vfio-pci")
    assert lab.look().warnings == ["the PCI bus shows 2 NVIDIA GPUs, the driver knows 1"]
    lab.scenario(devices=2)
    assert lab.look().warnings == []
