# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is found out about a partitioned device (MIG), whose whole may not answer where its instances do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_nvidia
from gpu_host import FAKES, driver_library, made

LISTS = ["nvmlDevice%sRunningProcesses" % kind for kind in ("GetCompute", "GetGraphics", "GetMPSCompute")]
# Two instances of their own, and between them a slot that is not in use.
TWO = {"device__0__mig": 1, "device__0__mig__0__gi": 1, "device__0__mig__2__gi": 5}


@pytest.fixture(name="lab")
def fixture_lab(tmp_path, tmp_path_factory, monkeypatch):
    yield from made(tmp_path, driver_library(tmp_path_factory), monkeypatch)


def look(lab, **scenario):
    lab.scenario(**scenario)
    [facts] = _gpu_nvidia.read(proc=str(lab.state)).devices
    return facts


def test_a_device_that_is_not_split(lab):
    assert look(lab)["partitioned"] is False
    facts = look(lab, device__0__mig=0)
    assert (facts["partitioned"], facts.get("partitions")) == (False, None)


def test_each_instance_is_told_like_a_device(lab):
    caps = lab.state / "driver/nvidia/capabilities/gpu0/mig/gi5"
    (caps / "ci1").mkdir(parents=True)
    (caps / "access").write_text("DeviceFileMinor: 48\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    (caps / "ci1/access").write_text("DeviceFileMinor: 50\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    facts = look(
        lab,
        **TWO,
        device__0__name="NVIDIA H100 80GB HBM3",
        device__0__mig__2__ci=1,
        device__0__mig__2__uuid="MIG-4f2e8b9a-9c1b-5a5e-8f0e-3d1f0c9b7a11",
        device__0__mig__2__memory_total=20096,
        device__0__mig__2__memory_base=20,
        device__0__mig__2__process__0="4711,300,compute",
    )
    assert (facts["partitioned"], facts["reason"], facts["remarks"]) == (True, "", [])
    first, second = facts["partitions"]
    assert first == {
        "index": 0,
        "reason": "",
        "detail": "",
        "uuid": "MIG-00000000-0000-0000-0010-000000000000",
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "gi": 1,
        "ci": 0,
        "nodes": [],
        "processes": [],
        "lists": "complete",
        "memory_total": 9728,
        "memory_used": 12,
        "memory_basis": "used",
    }
    assert (second["index"], second["uuid"]) == (2, "MIG-4f2e8b9a-9c1b-5a5e-8f0e-3d1f0c9b7a11")
    assert (second["gi"], second["ci"], second["nodes"]) == (5, 1, ["nvidia-cap48", "nvidia-cap50"])
    assert (second["memory_total"], second["memory_used"]) == (20096, 320)
    assert second["processes"] == [
        {"pid": 4711, "memory": 300, "kind": "compute", "source": "driver", "gi": 5, "ci": 1}
    ]


def test_the_whole_tells_in_which_instance_a_process_is(lab):
    facts = look(lab, **TWO, device__0__mig__2__process__0="4711,300,compute", device__0__process__0="4712,1,graphics")
    assert facts["processes"] == [
        {"pid": 4711, "memory": 300, "kind": "compute", "source": "driver", "gi": 5, "ci": 0},
        {"pid": 4712, "memory": 1, "kind": "graphics", "source": "driver"},
    ]


@pytest.mark.parametrize(("code", "state"), [(4, "denied"), (3, "absent")])
def test_instances_answer_where_the_whole_does_not(lab, code, state):
    """Red when the walk is left out: nothing would be known of the process."""
    refused = {"device__0__error__" + name: code for name in [*LISTS, "nvmlDeviceGetMemoryInfo"]}
    lab.scenario(**TWO, **refused)
    child = lab.hold("--instance", "2", "--memory", "500", "--kind", "mps")
    [facts] = _gpu_nvidia.read().devices
    assert (facts["reason"], facts["lists"], facts["processes"], facts["memory_used"]) == ("", state, [], None)
    assert [[process["pid"] for process in part["processes"]] for part in facts["partitions"]] == [[], [child.pid]]
    assert [part["memory_used"] for part in facts["partitions"]] == [12, 512]


@pytest.mark.parametrize("code", [15, 16, 999])
@pytest.mark.parametrize("function", ["nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMemoryInfo", *LISTS])
def test_a_sick_instance_does_not_hide_the_others(lab, code, function):
    facts = look(lab, **TWO, **{"device__0__mig__0__error__" + function: code})
    assert facts["reason"] == ""
    words = {15: "gpu_lost", 16: "reset_required", 999: "driver_error"}
    assert [(part["index"], part["reason"]) for part in facts["partitions"]] == [(0, words[code]), (2, "")]
    assert facts["partitions"][0]["detail"].find("(code %d)" % code) > 0


def test_memory_of_an_instance_that_is_not_told(lab):
    facts = look(lab, **TWO, device__0__mig__0__error__nvmlDeviceGetMemoryInfo=3, device__0__mig__2__memory_base="na")
    assert [(part["memory_used"], part["memory_basis"], part["reason"]) for part in facts["partitions"]] == [
        (None, "not_available", "")
    ] * 2


def test_an_old_driver_tells_the_memory_of_instances_in_version_1(lab):
    facts = look(
        lab,
        **TWO,
        device__0__mig__0__error__nvmlDeviceGetMemoryInfo_v2=13,
        device__0__mig__0__memory_reserved=7,
    )
    assert [(part["memory_used"], part["memory_basis"]) for part in facts["partitions"]] == [
        (19, "used_and_reserved"),
        (12, "used"),
    ]


def test_split_and_without_instances(lab):
    facts = look(lab, device__0__mig=1)
    assert (facts["partitions"], facts["remarks"]) == ([], [])


@pytest.mark.parametrize(
    ("keys", "remark"),
    [
        (
            {"device__0__error__nvmlDeviceGetMaxMigDeviceCount": 3},
            "but the driver does not say into how many instances",
        ),
        ({"device__0__mig_slots": 0}, "but the driver does not say into how many instances"),
        (
            {"device__0__error__nvmlDeviceGetMigDeviceHandleByIndex": 3},
            "but its instances cannot be asked: the driver does not support this (code 3)",
        ),
        (
            {"device__0__error__nvmlDeviceGetMigDeviceHandleByIndex": 4},
            "but its instances cannot be asked: this user may not ask the driver (code 4); run as root",
        ),
    ],
)
def test_instances_that_cannot_be_told(lab, keys, remark):
    facts = look(lab, **TWO, **keys)
    assert (facts["partitioned"], facts["partitions"], facts["reason"]) == (True, None, "")
    assert facts["remarks"] == ["the device is partitioned (MIG), " + remark]


def test_one_instance_that_may_not_be_asked(lab):
    facts = look(lab, **TWO, device__0__mig__0__error__nvmlDeviceGetMigDeviceHandleByIndex=4)
    assert [(part["index"], part["reason"]) for part in facts["partitions"]] == [(0, "no_permission"), (2, "")]


def test_a_device_that_is_lost_while_its_instances_are_counted(lab):
    facts = look(lab, **TWO, device__0__error__nvmlDeviceGetMaxMigDeviceCount=15)
    assert (facts["reason"], facts.get("partitions")) == ("gpu_lost", None)


def test_compute_instances_of_one_gpu_instance_share_its_memory(lab):
    facts = look(
        lab, **TWO, device__0__mig__3__gi=5, device__0__mig__3__ci=1, device__0__mig__3__process__0="4711,300,compute"
    )
    assert [(part["gi"], part["ci"], part["memory_used"]) for part in facts["partitions"]] == [
        (1, 0, 12),
        (5, 0, 312),
        (5, 1, 312),
    ]


def test_hold_fails_like_an_engine_when_the_instance_is_full(lab):
    lab.scenario(**TWO)
    lab.hold("--instance", "0", "--memory", "9000")
    command = [sys.executable, str(FAKES / "hold.py"), "--memory", "9000", "--require-free"]
    for slot, code in (("0", 1), ("2", 0)):
        done = subprocess.run([*command, "--instance", slot, "--", "true"], env=lab.environment, capture_output=True)
        assert done.returncode == code
