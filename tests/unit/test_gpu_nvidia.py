# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What becomes of the answers, the silence and the death of the child that asks the driver library."""

from __future__ import annotations

import os
import signal

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_nvidia, _gpu_nvml


@pytest.fixture(autouse=True)
def fixture_stuck_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))


def controller(sys, address, vendor, kind):
    folder = sys / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "present"),
    [
        ("0x10de", "0x030000", True),
        ("0x10de", "0x030200", True),  # a module on a server's board
        ("0x10de", "0x040300", False),  # the audio of a card that is passed to a guest without its GPU
        ("0x10de", "0x068000", False),  # a switch between GPUs
        ("0x1002", "0x030000", False),
    ],
)
def test_hardware_on_the_pci_bus(tmp_path, vendor, kind, present):
    controller(tmp_path, "0000:17:00.0", vendor, kind)
    assert _gpu_nvidia.hardware_present(str(tmp_path), str(tmp_path), str(tmp_path)) is present


def test_the_driver_is_a_sign_where_the_bus_is_not_seen(tmp_path):
    where = str(tmp_path)
    assert not _gpu_nvidia.hardware_present(where, where, where)
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    assert _gpu_nvidia.hardware_present(where, where, where)


@pytest.mark.parametrize(
    ("node", "library", "present"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_in_the_windows_subsystem_node_and_library_are_the_sign(tmp_path, monkeypatch, node, library, present):
    monkeypatch.setattr(_gpu_nvidia, "WSL_LIBRARY", str(tmp_path / "libnvidia-ml.so.1"))
    if node:
        (tmp_path / "dxg").touch()
    if library:
        (tmp_path / "libnvidia-ml.so.1").touch()
    where = str(tmp_path)
    assert _gpu_nvidia.hardware_present(where, where, where) is present


def child_that(monkeypatch, on_device, on_start=lambda: None, count=3):
    """Stands in for the child's part: three devices, and what happens at each."""

    def look(report, only, skip, proc):
        report({"count": count})
        on_start()
        for index in range(count):
            if index not in skip:
                report({"begin": index})
                on_device(index)
                report({"device": {"index": index, "reason": "", "detail": ""}})

    monkeypatch.setattr(_gpu_nvml, "look", look)


def reasons(reading):
    return [(device["index"], device["reason"]) for device in reading.devices]


def test_a_library_that_crashes_at_one_device_does_not_hide_the_others(monkeypatch):
    child_that(monkeypatch, lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == 1 else None)
    reading = _gpu_nvidia.read()
    assert (reading.reason, reasons(reading)) == ("", [(0, ""), (1, "driver_error"), (2, "")])
    assert reading.devices[1]["detail"] == (
        "the driver does not answer for this device: the child ended without an answer"
    )


def test_a_library_that_crashes_at_the_start(monkeypatch):
    child_that(monkeypatch, lambda index: None, on_start=lambda: os.kill(os.getpid(), signal.SIGKILL))
    reading = _gpu_nvidia.read()
    assert (reading.reason, reading.devices) == ("internal", [])


def test_a_hang_before_the_first_device_is_tried_once(monkeypatch):
    """Each further try would leave one more child, where none can be ended."""
    monkeypatch.setattr(_gpu_nvidia, "DRIVER_LIMIT", 0.1)
    monkeypatch.setattr(_gpu_nvidia, "DEVICE_LIMIT", 0.0)
    child_that(monkeypatch, lambda index: None, on_start=signal.pause)
    runs = []
    real = _bounded.run
    monkeypatch.setattr(_bounded, "run", lambda *args, **more: runs.append(args) or real(*args, **more))
    reading = _gpu_nvidia.read()
    assert (reading.reason, len(runs)) == ("timeout", 1)
    assert reading.detail == "the NVIDIA driver library gives no answer: no answer within 0.1 s"


def test_what_the_time_did_not_suffice_for_is_no_answer(monkeypatch):
    child_that(monkeypatch, lambda index: signal.pause() if index == 1 else None)
    reading = _gpu_nvidia.read(limit=0.2)
    assert reasons(reading) == [(0, ""), (1, "timeout"), (2, "timeout")]
    assert reading.devices[2]["detail"] == "the time was over before this device was read"


@pytest.mark.parametrize(
    ("pci", "folder"),
    [("00000000:17:00.0", "0000:17:00.0"), ("00010000:01:00.0", "10000:01:00.0"), ("0000:AB:00.0", "0000:ab:00.0")],
)
def test_the_minor_number_from_the_kernel_driver(tmp_path, pci, folder):
    place = tmp_path / "driver/nvidia/gpus" / folder
    place.mkdir(parents=True)
    (place / "information").write_text("Model: \t\t NVIDIA L40S\nDevice Minor: \t 12\n")
    assert _gpu_nvml._minor_by_driver(pci, str(tmp_path)) == 12
    assert _gpu_nvml._minor_by_driver("00000000:99:00.0", str(tmp_path)) is None
    assert _gpu_nvml._minor_by_driver("no address", str(tmp_path)) is None


def test_the_nodes_of_an_instance(tmp_path):
    access = tmp_path / "driver/nvidia/capabilities/gpu2/mig/gi1"
    (access / "ci0").mkdir(parents=True)
    (access / "access").write_text("DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    (access / "ci0/access").write_text("DeviceFileMinor: 13\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    assert _gpu_nvml._capabilities(2, 1, 0, str(tmp_path)) == ["nvidia-cap12", "nvidia-cap13"]
    assert _gpu_nvml._capabilities(2, 1, None, str(tmp_path)) == ["nvidia-cap12"]
    assert _gpu_nvml._capabilities(2, 1, 1, str(tmp_path)) == ["nvidia-cap12"]
    assert _gpu_nvml._capabilities(None, 1, 0, str(tmp_path)) == []
    assert _gpu_nvml._capabilities(2, None, 0, str(tmp_path)) == []
    table = tmp_path / "driver/nvidia-caps"
    table.mkdir()
    (table / "mig-minors").write_text("config 1\nmonitor 2\ngpu2/gi1/access 12\ngpu2/gi1/ci1/access 14\n")
    assert _gpu_nvml._capabilities(2, 1, 1, str(tmp_path)) == ["nvidia-cap12", "nvidia-cap14"]
