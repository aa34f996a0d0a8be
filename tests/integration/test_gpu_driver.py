# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""gpu_clear where the driver is old, does not start, hangs, or has lost a device."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_nvidia
from gpu_host import driver_library, made, verdicts


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
    assert "GPU 1 does not answer properly: the driver answers: GPU is lost (code 15)" in reading.message
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
    ("code", "reason", "words"),
    [(9, "driver_not_loaded", "modprobe nvidia"), (18, "driver_mismatch", "reboot"), (999, "driver_error", "code 999")],
)
def test_driver_that_does_not_start(lab, code, reason, words):
    lab.scenario(init_error=code)
    reading = lab.look(allow_no_gpu=True)
    assert (reading.verdict, reading.reason) == ("error", reason)
    assert words in reading.message


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
