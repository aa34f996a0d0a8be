# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every binding that calls itself "pynvml", as published: what is served, and what is said where it is not."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from gpu_host import driver_library

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "bindings"
OLDEST, NEWEST = "nvidia-ml-py==11.495.46", "nvidia-ml-py==13.615.71"
SERVED = [OLDEST, "nvidia-ml-py==11.525.150", "nvidia-ml-py==12.535.161", NEWEST]
READ = """
import json, sys
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_nvidia, _site
if sys.argv[1]:
    _site.SITE, _site.unsafe_reason = sys.argv[1], lambda path: None
reading = _gpu_nvidia.read()
json.dump([reading.reason, reading.detail, reading.devices], sys.stdout)
"""
SCENARIO = """
devices=2
device.0.mig=1
device.0.mig.1.gi=3
device.0.mig.1.process.0=4711,300,compute
device.1.process.0=4712,na,graphics
device.1.process.1=4713,500,mps
"""


def fetched(*requirements: str) -> pathlib.Path:
    """A folder with these distributions and nothing else, fetched once."""
    name = hashlib.sha256(repr((requirements, sys.version_info[:2])).encode()).hexdigest()[:16]
    target = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            fresh = CACHE / ("." + name)
            shutil.rmtree(fresh, ignore_errors=True)
            for requirement in requirements:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh)]
                subprocess.run([*pip, requirement], check=True)
            fresh.rename(target)
    return target


@pytest.fixture(name="read")
def fixture_read(tmp_path, tmp_path_factory):
    """Reads the made-up machine in an interpreter that has what is in these folders, and no other packages."""
    library = driver_library(tmp_path_factory)
    (tmp_path / "scenario").write_text(SCENARIO)

    def read(*folders, site="", scenario="", library=library.parent):
        (tmp_path / "scenario").write_text(SCENARIO + scenario)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT / ".cache" / "collections")]),
            "FAKE_NVML_DIR": str(tmp_path),
            "LD_LIBRARY_PATH": str(library),
        }
        done = subprocess.run(
            [sys.executable, "-S", "-c", READ, str(site)], env=environment, stdout=subprocess.PIPE, check=True
        )
        return json.loads(done.stdout)

    return read


@pytest.mark.parametrize("requirement", SERVED)
def test_every_version_that_is_served_tells_the_same(read, requirement):
    _, _, expected = read(fetched(NEWEST))
    assert [part["memory_used"] for part in expected[0]["partitions"]] == [312]
    assert [(p["pid"], p["memory"], p["kind"]) for p in expected[1]["processes"]] == [
        (4712, None, "graphics"),
        (4713, 500, "mps"),
    ]
    reason, detail, devices = read(fetched(requirement))
    assert (reason, detail) == ("", "")
    if requirement < "nvidia-ml-py==11.510":  # it knows memory only with the driver's own share in it
        for facts in [*devices, *devices[0]["partitions"]]:
            assert facts["memory_basis"] == "used_and_reserved"
            facts["memory_basis"] = "used"
            facts["memory_used"] -= 0 if "gi" in facts else 541
    assert devices == expected


WRONG = {
    "pynvml==11.5.3": (
        'the module "pynvml" in %s/pynvml is of the Python distribution "pynvml" 11.5.3 and not of "nvidia-ml-py": '
        'uninstall "pynvml" and install "nvidia-ml-py"'
    ),
    "nvidia-ml-py3==7.352.0": (
        'the module "pynvml" in %s is of the Python distribution "nvidia-ml-py3" 7.352.0 and not of "nvidia-ml-py": '
        'uninstall "nvidia-ml-py3" and install "nvidia-ml-py"'
    ),
    "nvidia-ml-py==11.450.51": (
        'the module "pynvml" of the Python distribution "nvidia-ml-py" 11.450.51 cannot be used, because it lacks '
        'nvmlDeviceGetMPSComputeRunningProcesses: install "nvidia-ml-py" 11.495 or newer for ' + sys.executable
    ),
    # What Python itself says of the syntax differs between its versions.
    "nvidia-ml-py==7.352.0": (
        'the module "pynvml" of the Python distribution "nvidia-ml-py" 7.352.0 cannot be used, because it cannot be '
        'imported: SyntaxError: ...: install "nvidia-ml-py" 11.495 or newer for ' + sys.executable
    ),
}


@pytest.mark.parametrize("requirement", WRONG)
def test_a_wrong_binding_is_named(read, requirement):
    folder = fetched(requirement)
    reason, detail, devices = read(folder)
    assert (reason, devices) == ("binding_wrong", [])
    expected = WRONG[requirement].replace("%s", str(folder))
    assert re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), detail)


@pytest.mark.parametrize("requirement", WRONG)
def test_the_binding_of_the_host_agent_is_used_instead(read, requirement):
    reason, detail, devices = read(fetched(requirement), site=fetched(NEWEST))
    assert (reason, detail, len(devices)) == ("", "", 2)


def test_the_right_one_beside_a_wrong_one(read):
    folder = fetched(NEWEST, "pynvml==11.5.3")
    reason, detail, _ = read(folder)
    assert reason == "binding_wrong"
    assert detail.endswith(': uninstall "pynvml", then install "nvidia-ml-py" again')


def test_a_later_pynvml_only_depends_on_the_right_one(read):
    assert read(fetched(NEWEST, "pynvml==12.0.0"))[0] == ""


def test_four_causes_are_told_apart_and_each_has_its_remedy(read, tmp_path):
    """No binding, no driver library, no kernel driver, and one that does not fit."""
    right, broken = fetched(NEWEST), tmp_path / "broken"
    broken.mkdir()
    (broken / "libnvidia-ml.so.1").write_text("On a machine that has the real one, this one comes first.\n")
    found = [
        read(),
        read(right, library=broken),
        read(right, scenario="init_error=9\n"),
        read(right, scenario="init_error=18\n"),
    ]
    assert [reason for reason, _, _ in found] == [
        "binding_missing",
        "library_missing",
        "driver_not_loaded",
        "driver_mismatch",
    ]
    start = "the NVIDIA driver library does not start: "
    assert [detail for _, detail, _ in found] == [
        'the Python distribution "nvidia-ml-py" is missing for %s: apply the role gpuops.serving.host_agent to this '
        "host, or install it for that interpreter" % sys.executable,
        start + "libnvidia-ml.so.1 is not found or cannot be loaded (code 12); install the libraries of the driver",
        start + 'the NVIDIA kernel driver is not loaded (code 9); load it with "modprobe nvidia"',
        start + "the driver library and the loaded kernel driver are of different versions (code 18); "
        "reload the kernel driver or reboot the host",
    ]
