# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The script for real GPUs, whole, against doubles of both driver libraries.

It runs with a /dev, a process table and process ids of its own, so that nothing it ends is of this machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "gpu" / "test_gpu.py"
ISOLATED = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# A shell as process 1 collects orphans. Regular files stand in for the nodes, since those can be mapped too.
MACHINE = r"""
set -e
mount -t tmpfs -o mode=755 dev /dev
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "/dev/${node%:*}" c 1 "${node#*:}"; done
ln -s /proc/self/fd /dev/fd
for node in nvidia0 nvidia1 nvidiactl nvidia-uvm; do truncate -s 4096 "/dev/$node"; done
for device in $HELD; do
    "$PYTHON" "$HOLD" --device "$device" --memory 1000 --node "/dev/nvidia$device" -- sleep 300 &
done
[ -z "$HELD" ] || sleep 1
"$@"
exit $?
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and the open files of all processes need root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
]


@pytest.fixture(name="libraries", scope="module")
def fixture_libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("nvml", "cuda"):
        subprocess.run([str(TESTS / "fakes" / name / "build.sh"), str(folder)], check=True)
    return folder


class Run:
    """One run of the script: its exit status, what it printed, and the document that it wrote."""

    def __init__(self, tmp_path, libraries, scenario=None, held="", arguments=(), **environment):
        state, output = tmp_path / "state", tmp_path / "findings.json"
        for part in (state, state / "holders", state / "dead"):
            part.mkdir()
        lines = ["%s=%s" % item for item in (scenario or {"devices": 2}).items()]
        (state / "scenario").write_text("\n".join(lines) + "\n")
        environment = dict(
            os.environ,
            FAKE_NVML_DIR=str(state),
            LD_LIBRARY_PATH=str(libraries) if libraries else "",
            PYTHON=sys.executable,
            HOLD=str(TESTS / "fakes" / "nvml" / "hold.py"),
            HELD=held,
            **environment,
        )
        words = [sys.executable, str(SCRIPT), "--output", str(output), *arguments]
        done = subprocess.run(
            [*ISOLATED, "sh", "-c", MACHINE, "sh", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
            check=False,
        )
        self.status, self.text = done.returncode, done.stdout
        self.found = json.loads(output.read_text()) if output.exists() else None

    def checks(self, passed):
        return {entry["rule"] for entry in self.found["checks"] if entry["passed"] is passed}

    def figure(self, rule, via=None):
        [entry] = [e for e in self.found["checks"] if e["rule"] == rule and e.get("via") == via]
        return entry["figure"]


def documented():
    """The rules in the script's own table."""
    text = (SCRIPT.parent / "findings.py").read_text()
    return set(re.findall(r'^    "(\w+)": "', text, re.MULTILINE))


def test_all_is_as_the_rules_say(tmp_path, libraries):
    run = Run(tmp_path, libraries)
    found = run.found
    assert run.status == 0, run.text
    assert (found["schema"], found["exit"], found["not_done"], found["device"]) == (1, 0, [], 0)
    assert run.checks(True) == documented() and len(documented()) == 16
    assert run.checks(False) == run.checks(None) == set()
    assert found["machine"]["driver_version"] == "550.127.05"
    assert found["machine"]["cuda_version"] == 12040
    assert [gpu["memory"]["used_v1"] - gpu["memory"]["used_v2"] for gpu in found["gpus"]] == [541, 541]

    stages = found["stages"]
    common = ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]
    assert {name: stage["open"] for name, stage in stages.items()} == {
        "nvml_init": [],
        "nvml_queries": [],
        "cuda_no_device": ["nvidiactl"],
        "cuda_init": common,
        "context": common,
        "allocation": common,
    }
    assert [stages[name]["mapped"] for name in ("cuda_init", "context")] == [[], ["nvidia0"]]
    assert stages["cuda_no_device"]["code"] == 100
    assert [len(stages[name]["listed"]) for name in ("cuda_init", "context", "allocation")] == [0, 1, 1]
    assert [stages[name]["memory_used"] for name in ("cuda_init", "context", "allocation")] == [3, 259, 515]
    assert stages["context"]["other_nodes"] == ["nvidia1"]

    for way in ("module", "library"):
        told = found["gpu_clear"][way]
        assert [told[when]["verdict"] for when in ("before", "busy", "after")] == ["clear", "busy", "clear"]
        assert run.figure("busy_by_both_sources", way) == {
            "verdict": "busy",
            "reason": "held_by_process",
            "holder": [{"kind": "compute", "memory": 512, "source": ["driver", "node"]}],
        }
    assert found["inherited"]["memory_kept"] is False

    stop = found["process_tree_stop"]
    assert (stop["listed"], stop["verdict"], stop["gone"]) == (True, "stopped", True)
    signals = {process["pid"]: process["signals"] for process in stop["processes"]}
    assert signals == {stop["holder"]: ["TERM"], stop["child"]: ["TERM", "KILL"]}
    assert "namespace" not in stop
    assert found["release"]["allocated"] == (46068 - 541 - 3) // 2
    assert found["release"]["used_before"] == found["release"]["allocated"] + 256 + 3


def test_memory_that_never_comes_back(tmp_path, libraries):
    """And what is taken on one device is taken on the other too."""
    scenario = {"devices": 2, "release_delay_ms": 600000}
    run = Run(tmp_path, libraries, scenario, arguments=["--patience", "2"], FAKE_CUDA_SPREAD="1")
    assert run.status == run.found["exit"] == 1, run.text
    assert {"memory_comes_back", "clear_after", "clear_after_stop"} <= run.checks(False)
    assert {"list_empties", "nodes_close", "stop_ends_the_tree", "context_holds_node"} <= run.checks(True)
    assert run.figure("memory_comes_back") is None
    assert 'differs from the rule "memory_comes_back"' in run.text
    # What the dead holder had is in use, and its child is the one that has the node.
    assert run.found["inherited"]["memory_kept"] is True
    assert run.figure("inherited_nodes_are_named") == {
        "verdict": "busy",
        "reason": "node_held_memory_in_use",
        "named": True,
    }
    assert run.figure("other_devices_stay_clear") == {"1": "busy"}
    assert run.checks(None) == set()


def test_a_holder_without_nodes_beside_a_device_in_use(tmp_path, libraries):
    run = Run(tmp_path, libraries, held="0", FAKE_CUDA_NODES="0")
    assert run.status == 1, run.text
    assert run.found["device"] == 1
    assert run.checks(False) == {"context_holds_node", "busy_by_both_sources"}
    assert run.checks(None) == {"other_devices_stay_clear"}
    assert run.figure("idle_memory") == {"1": 3}
    assert run.figure("busy_by_both_sources", "module")["holder"][0]["source"] == ["driver"]


def test_a_driver_that_lists_nobody_and_no_ansible(tmp_path, libraries):
    """Then the stop is not confined, and by the library."""
    shadow = tmp_path / "shadow"
    (shadow / "ansible").mkdir(parents=True)
    (shadow / "ansible" / "__init__.py").touch()
    run = Run(tmp_path, libraries, FAKE_CUDA_LISTED="0", PYTHONPATH=str(shadow))
    assert run.status == 1, run.text
    assert run.found["ways"] == ["library"]
    assert run.checks(False) == {"context_is_listed", "allocation_is_in_use", "busy_by_both_sources"}
    stop = run.found["process_tree_stop"]
    assert stop["namespace"]["why"].startswith("the driver lists the pids ")
    assert (stop["way"], stop["verdict"], stop["gone"]) == ("library", "stopped", True)
    assert {process["pid"] for process in stop["processes"]} == {stop["holder"], stop["child"]}


def test_no_device_is_free(tmp_path, libraries):
    run = Run(tmp_path, libraries, held="0 1")
    assert (run.status, run.found["exit"], run.found["device"]) == (2, 2, None), run.text
    [why] = run.found["not_done"]
    assert why.startswith("there is no clear device to work on: GPU 0 is busy: process ")
    assert '"sleep"' in why and "; GPU 1 is busy: process " in why
    assert "could not be found out: %s" % why in run.text
    assert "stages" not in run.found


def test_an_idle_device_with_memory_in_use(tmp_path, libraries):
    run = Run(tmp_path, libraries, {"devices": 1, "device.0.memory_base": 100})
    assert run.status == 1, run.text
    assert (run.figure("idle_memory"), run.checks(False)) == ({"0": 100}, {"idle_memory"})
    assert "GPU 0 is busy: 100 MiB are in use by no visible process" in run.found["not_done"][0]


def test_a_driver_that_does_not_tell_its_share_apart(tmp_path, libraries):
    run = Run(tmp_path, libraries, {"devices": 1, "device.0.error.nvmlDeviceGetMemoryInfo_v2": 13})
    assert run.status == 1, run.text
    assert run.checks(False) == {"idle_memory", "memory_version"}
    assert (run.figure("memory_version"), run.figure("idle_memory")) == ([False], {"0": 544})


def test_partitions_are_left_alone(tmp_path, libraries):
    run = Run(tmp_path, libraries, {"devices": 1, "device.0.mig": 1})
    assert run.status == 2, run.text
    assert "GPU 0 is partitioned (MIG), which is left alone" in run.found["not_done"][0]


def test_a_library_that_does_not_start(tmp_path, libraries):
    run = Run(tmp_path, libraries, {"devices": 1}, FAKE_CUDA_INIT="802")
    assert run.status == 2, run.text
    assert "cuInit answers CUDA_ERROR_SYSTEM_NOT_READY (code 802)" in run.found["not_done"]
    assert "library_is_no_holder" in run.checks(True)


def test_the_time_for_all_of_it(tmp_path, libraries):
    run = Run(tmp_path, libraries, {"devices": 1, "init_delay_ms": 60000}, arguments=["--limit", "3"])
    assert run.status == 2, run.text
    assert run.found["seconds"] < 6


@pytest.mark.parametrize(
    ("scenario", "kept", "sentence"),
    [
        ({}, [], "skipped: there is no NVIDIA driver library (libnvidia-ml.so.1) on this machine"),
        ({"devices": 0}, ["nvml", "cuda"], "skipped: the NVIDIA driver knows no device on this machine"),
        ({"devices": 1}, ["nvml"], "skipped: the other driver library cannot be loaded: libcuda.so.1: "),
        ({"init_error": 9}, ["nvml"], "skipped: no NVIDIA driver is loaded on this machine"),
    ],
)
def test_no_gpu_is_one_sentence(tmp_path, libraries, scenario, kept, sentence):
    folder = tmp_path / "kept"
    folder.mkdir()
    for name in kept:
        library = {"nvml": "libnvidia-ml.so.1", "cuda": "libcuda.so.1"}[name]
        shutil.copy(libraries / library, folder / library)
    run = Run(tmp_path, folder if kept else None, scenario)
    assert (run.status, run.found) == (0, None)
    assert run.text.startswith(sentence) and run.text.count("\n") == 1


def test_no_binding_is_one_sentence(tmp_path):
    """On a machine that has Python and these files alone."""
    shutil.copytree(SCRIPT.parent, tmp_path / "tests" / "gpu")
    words = [sys.executable, "-S", str(tmp_path / "tests" / "gpu" / "test_gpu.py")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 'skipped: the Python distribution "nvidia-ml-py" is not installed for %s\n' % sys.executable


def test_the_document_is_described(tmp_path):
    text = (TESTS.parent / "docs" / "real-gpu-findings.md").read_text()
    assert {rule for rule in documented() if "`%s`" % rule not in text} == set()
