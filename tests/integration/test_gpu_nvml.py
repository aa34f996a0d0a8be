# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""gpu_clear with the unmodified nvidia-ml-py on the test driver library, and with real processes and open nodes."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _gpu,
    _gpu_options,
    _gpu_view,
    _ownership,
    _service,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import read
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from gpu_host import FAKES, driver_library, made, verdicts, wait_for


@pytest.fixture(name="lab")
def fixture_lab(tmp_path, tmp_path_factory, monkeypatch):
    yield from made(tmp_path, driver_library(tmp_path_factory), monkeypatch)


def test_idle(lab):
    reading = lab.look()
    assert (reading.verdict, reading.count, reading.driver_version) == ("clear", 1, "550.127.05")
    assert reading.as_dict()["gpus"] == [
        {
            "index": 0,
            "uuid": "GPU-00000000-0000-0000-0000-000000000010",
            "pci": "00000000:17:00.0",
            "vendor": "nvidia",
            "name": "NVIDIA L40S",
            "integrated": False,
            "verdict": "clear",
            "reason": "idle",
            "detail": "3 MiB are in use, 64 are tolerated",
            "memory_used": 3,
            "memory_total": 46068,
            "memory_basis": "used",
            "holders": [],
            "partitions": [],
            "disagreements": [],
        }
    ]


def test_a_holder_is_named_with_both_sources(lab):
    child = lab.hold("--memory", "44000", node="nvidia0")
    reading = lab.look()
    assert (reading.verdict, verdicts(reading)) == ("busy", [("busy", "held_by_process")])
    holder = reading.devices[0].as_dict()["holders"][0]
    assert holder["pid"] == child.pid
    assert (holder["name"], holder["memory"], holder["kind"]) == ("sleep", 44000, "compute")
    assert holder["source"] == ["driver", "node"]
    assert abs(holder["create_time"] - time.time()) < 60
    assert 'GPU 0 is busy: process %d "sleep" (user ' % child.pid in reading.message
    assert reading.message.endswith(" holds 44000 MiB")


def test_what_only_the_driver_lists_is_seen(lab):
    """Red when the driver's process lists are ignored: the memory is within the tolerance and no node is open."""
    for kind in ("compute", "graphics", "mps"):
        child = lab.hold("--memory", "10", "--kind", kind)
        reading = lab.look()
        assert verdicts(reading) == [("busy", "held_by_process")]
        assert [(h.pid, h.kind) for h in reading.devices[0].holders] == [(child.pid, kind)]
        lab.end(child)


def test_what_only_a_node_shows_is_seen(lab):
    """Red when open nodes are ignored: the driver lists nobody and tells no memory."""
    lab.scenario(device__0__error__nvmlDeviceGetMemoryInfo=3)
    assert verdicts(lab.look()) == [("clear", "judged_by_holders")]
    child = lab.hold("--unlisted", node="nvidia0")
    reading = lab.look()
    assert verdicts(reading) == [("busy", "node_held_memory_unreadable")]
    assert [(h.pid, h.kind, h.source) for h in reading.devices[0].holders] == [(child.pid, "node", ["node"])]
    lab.scenario()
    reading = lab.look()
    assert verdicts(reading) == [("clear", "idle")]
    assert [h.kind for h in reading.devices[0].holders] == ["node"]
    lab.scenario(device__0__memory_hidden=400)
    reading = lab.look()
    assert verdicts(reading) == [("busy", "node_held_memory_in_use")]
    assert str(child.pid) in reading.message


def test_nodes_that_name_no_device_are_no_holders(lab):
    lab.scenario(device__0__error__nvmlDeviceGetMemoryInfo=3)
    lab.hold("--unlisted", node="nvidiactl")
    assert lab.look().verdict == "clear"


def test_nodes_are_matched_by_minor_and_not_by_index(lab):
    lab.scenario(
        devices=2,
        device__0__minor=1,
        device__1__minor=0,
        device__0__error__nvmlDeviceGetMemoryInfo=3,
        device__1__error__nvmlDeviceGetMemoryInfo=3,
    )
    lab.hold("--unlisted", node="nvidia0")
    assert [device.verdict for device in lab.look().devices] == ["clear", "busy"]


def test_memory_that_nobody_visible_holds(lab):
    """Red when memory is ignored."""
    lab.scenario(device__0__memory_hidden=44000)
    reading = lab.look()
    assert verdicts(reading) == [("busy", "held_by_unresolvable")]
    assert reading.message == "GPU 0 is busy: 44003 MiB are in use by no visible process, 64 are tolerated"


def test_a_listed_process_that_is_not_here(lab):
    lab.scenario(device__0__process__0="4194303,na,compute")
    reading = lab.look()
    assert verdicts(reading) == [("busy", "held_by_unresolvable")]
    assert reading.devices[0].as_dict()["holders"][0]["name"] is None


def test_memory_comes_back_after_the_process_is_gone(lab):
    lab.scenario(release_delay_ms=4000)
    child = lab.hold("--memory", "44000", node="nvidia0")
    lab.end(child)
    reading = lab.wait(0)
    assert verdicts(reading) == [("busy", "held_by_unresolvable")]
    reading = lab.wait(20, interval=0.1)
    assert reading.verdict == "clear"
    assert reading.readings > 2  # it was busy once more, and then clear twice


def test_a_holder_that_stays_is_busy_at_the_end(lab):
    lab.hold("--memory", "44000")
    reading = lab.wait(0.5, interval=0.2)
    assert reading.verdict == "busy"
    assert 0.5 <= reading.elapsed < 1.5


def test_a_dead_main_thread_whose_threads_live_still_holds(lab):
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = lab.hold("--memory", "100", node="nvidia0", command=("python3", "-c", code))
    wait_for(lambda: ") Z " in pathlib.Path("/proc/%d/stat" % child.pid).read_text())
    reading = lab.look()
    assert verdicts(reading) == [("busy", "held_by_process")]
    assert reading.devices[0].holders[0].source == ["driver", "node"]


def test_no_gpu(lab):
    lab.scenario(devices=0)
    assert (lab.look(allow_no_gpu=True).verdict, lab.look().reason) == ("error", "no_gpu")
    lab.scenario(init_error=9)
    assert lab.look(allow_no_gpu=True).reason == "driver_not_loaded"  # there are device nodes
    for node in lab.dev.iterdir():
        node.unlink()
    assert (lab.look().verdict, lab.look().reason) == ("error", "no_stack")
    assert lab.look(allow_no_gpu=True).verdict == "clear"
    assert lab.look(allow_no_gpu=True, gpus=["0"]).verdict == "error"
    assert lab.look(allow_no_gpu=True, expected_gpus=1).verdict == "error"
    lab.scenario(init_error=18)
    assert lab.look(allow_no_gpu=True).verdict == "error"


def test_fewer_devices_than_expected(lab):
    lab.scenario(devices=3)
    reading = lab.look(expected_gpus=4)
    assert (reading.verdict, reading.reason) == ("error", "fewer_gpus")
    assert reading.message == "GPUs expected: 4, found: 3"
    assert [device.verdict for device in reading.devices] == ["clear"] * 3
    assert lab.look(expected_gpus=3).verdict == "clear"
    assert lab.look(expected_gpus=2).warnings == ["GPUs expected: 2, found: 3"]


def test_utilisation_alone_is_a_warning(lab):
    lab.scenario(device__0__utilization=100)
    reading = lab.look()
    assert reading.verdict == "clear"
    assert reading.warnings == ["GPU 0 reports 100 % utilisation although nothing holds it"]


def test_an_allowed_holder_is_shown(lab):
    lab.hold("--memory", "300", node="nvidia0")
    assert lab.look().verdict == "busy"
    reading = lab.look(allowed_holders=[{"name": "sleep"}])
    assert reading.verdict == "clear"
    assert [(h.allowed, h.memory) for h in reading.devices[0].holders] == [(True, 300)]


def test_two_services_on_one_host_are_judged_independently(lab):
    """Eight devices, four for each: one service's gate does not wait for the other."""
    lab.scenario(devices=8)
    for device in range(4, 8):
        lab.hold("--device", str(device), "--memory", "44000")
    ours, theirs = [str(n) for n in range(4)], [str(n) for n in range(4, 8)]
    assert lab.look(gpus=ours).verdict == "clear"
    assert verdicts(lab.look(gpus=theirs)) == [("busy", "held_by_process")] * 4
    lab.scenario(devices=8, device__6__error__nvmlDeviceGetHandleByIndex=15)
    assert lab.look(gpus=ours, expected_gpus=8).verdict == "clear"


def test_in_a_container_what_is_not_visible_is_not_called_clear(lab, monkeypatch):
    """The number that the driver lists may be another process's there, even that of an allowed one."""
    monkeypatch.setattr(_gpu_view, "look", lambda *_folders: _gpu_view.View("own", "lxc"))
    reading = lab.look()
    assert (reading.verdict, reading.container, reading.sees_all_processes) == ("clear", "lxc", False)
    lab.scenario(device__0__error__nvmlDeviceGetMemoryInfo=3)
    assert verdicts(lab.look()) == [("unknown", "outside_not_visible")]
    lab.scenario()
    child = lab.hold("--memory", "300")
    reading = lab.look(allowed_holders=[{"name": "sleep"}])
    assert verdicts(reading) == [("busy", "held_by_unresolvable")]
    assert [(h.pid, h.identity) for h in reading.devices[0].holders] == [(child.pid, None)]
    [told] = reading.devices[0].disagreements
    assert told == "the driver lists number %d, which no process here is known to be" % child.pid
    lab.end(child)
    lab.hold("--memory", "300", node="nvidia0")
    assert lab.look(allowed_holders=[{"name": "sleep"}]).verdict == "clear"


def test_without_root_nothing_is_called_clear(lab, monkeypatch):
    real = _gpu._gpu_nodes.scan

    def scan(*arguments):
        facts = real(*arguments)
        facts.hidden += 12
        return facts

    monkeypatch.setattr(_gpu._gpu_nodes, "scan", scan)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reading = lab.look()
    assert verdicts(reading) == [("unknown", "nodes_unreadable")]
    assert reading.message == (
        "GPU 0 cannot be judged: the open files of 12 processes or more could not be read; run as root"
    )


def test_two_names_of_one_device_are_refused(lab):
    with pytest.raises(UsageError, match="names GPU 0 twice"):
        lab.look(gpus=["0", "GPU-00000000-0000-0000-0000-000000000010"])


@pytest.mark.parametrize(("vendor", "name"), [("amd", "AMD"), ("intel", "Intel")])
def test_a_vendor_that_is_not_here_is_told_before_anything_is_read(lab, monkeypatch, vendor, name):
    monkeypatch.setattr(_gpu._gpu_nodes, "scan", None)
    reading = lab.look(vendor=vendor)
    assert (reading.verdict, reading.reason) == ("error", "no_stack")
    assert reading.message == "there is no %s GPU on this host and no driver for one" % name
    assert lab.look(vendor=vendor, allow_no_gpu=True).verdict == "clear"


def test_a_name_that_is_no_text_is_told(lab, tmp_path):
    """Spaces, a parenthesis, a newline, and a byte that is no UTF-8."""
    program = os.fsencode(str(tmp_path)) + b"/x) (\n\xff z"
    os.symlink(os.path.realpath("/bin/sleep"), program)
    lab.hold("--memory", "300", command=(os.fsdecode(program), "60"))
    holder = lab.look().devices[0].as_dict()["holders"][0]
    assert holder["name"] == "x) (\\n\\xff z"


def test_devices_are_chosen_and_ordered_by_the_caller(lab):
    lab.scenario(devices=3)
    lab.hold("--device", "1", "--memory", "44000")
    reading = lab.look(gpus=["00000000:19:00.0", "GPU-00000000-0000-0000-0000-000000000010"])
    assert ([device.index for device in reading.devices], reading.verdict) == ([2, 0], "clear")
    assert [device.index for device in lab.look(gpus=["2", "1"]).devices] == [2, 1]
    reading = lab.look(gpus=["0", "5"])
    assert verdicts(reading) == [("clear", "idle"), ("error", "not_found")]


class Owned:
    def __init__(self, processes):
        self.processes = processes


class State:
    def __init__(self, load_state):
        self.load_state = load_state


def test_one_unit_of_several(lab, monkeypatch):
    lab.scenario(devices=2)
    ours, other = lab.hold("--memory", "1000"), lab.hold("--device", "1", "--memory", "2000")
    limits = []
    monkeypatch.setattr(_systemd, "show", lambda _unit, limit: limits.append(limit) or State("loaded"))
    monkeypatch.setattr(
        _ownership, "of_unit", lambda table, _state, mark_gid: Owned({table.get(ours.pid).ref: ["cgroup"]})
    )
    reading = lab.look(unit="ours.service")
    assert verdicts(reading) == [("busy", "held_by_process"), ("clear", "only_excused")]
    assert [(h.pid, h.foreign) for d in reading.devices for h in d.holders] == [(ours.pid, False), (other.pid, True)]
    lab.look(limit=3.0, unit="ours.service")
    assert limits[0] == 10.0 and limits[1] <= 3.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process another group")
def test_what_left_the_unit_is_still_its_own_by_the_mark(lab, monkeypatch):
    mark = 987654
    orphan = lab.hold("--memory", "1000", groups=[mark])
    # The test itself is the parent here, and the caller's own line is never owned.
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1, os.getpid()})
    monkeypatch.setattr(_systemd, "show", lambda unit, _limit: UnitState(unit, load_state="loaded"))
    monkeypatch.setattr(_service, "names", lambda _folder: ["ours"])
    monkeypatch.setattr(_service, "load", lambda _name, _folder: {"unit": "ours.service", "mark_gid": mark})
    words = ("service", "gpus", "expected_gpus", "allowed_holders", "memory_tolerance")
    numbers = {"vendor": "auto", "allow_no_gpu": False, "timeout": 0, "interval": 1, "confirmations": 2}
    options = _gpu_options.of_params({**dict.fromkeys(words), **numbers, "unit": "ours.service"})
    reading = read(options, devices=str(lab.dev), sys=str(lab.sys))
    assert verdicts(reading) == [("busy", "held_by_process")]
    assert [(h.pid, h.foreign) for d in reading.devices for h in d.holders] == [(orphan.pid, False)]


@pytest.mark.skipif(os.geteuid() != 0, reason="a device node takes root")
def test_a_node_in_another_root_is_seen(lab, tmp_path):
    """A real node with the vendor's number; where no driver is behind it, only a path can be had of it."""
    node = tmp_path / "root" / "gpu"
    node.parent.mkdir()
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(195, 0))
    except OSError as error:
        pytest.skip("no such node here: %s" % error)
    lab.scenario(devices=1, device__0__error__nvmlDeviceGetMemoryInfo=3)
    code = "import os, time; os.open(%r, %d); print('open', flush=True); time.sleep(60)" % (str(node), os.O_PATH)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"open\n"
        [device] = lab.look().devices
        child.kill()
    assert (device.verdict, device.reason) == ("busy", "node_held_memory_unreadable")
    assert [holder.pid for holder in device.holders] == [child.pid]


def test_a_unit_that_does_not_exist_is_not_called_clear(lab, monkeypatch):
    monkeypatch.setattr(_systemd, "show", lambda _unit, _limit: State("not-found"))
    monkeypatch.setattr(_ownership, "of_unit", lambda _table, _state, mark_gid: Owned({}))
    with pytest.raises(UsageError, match=r'the unit "typo.service" is not known'):
        lab.look(unit="typo.service")


def test_hold_fails_like_an_engine_when_memory_is_short(lab):
    lab.hold("--memory", "44000")
    again = subprocess.run(
        [sys.executable, str(FAKES / "hold.py"), "--memory", "44000", "--require-free", "--", "true"],
        env=lab.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1
    assert again.stderr == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB. "
        "GPU 0 has a total capacity of 44.99 GiB of which 1.49 GiB is free.\n"
    )


def test_a_registration_of_another_process_does_not_count(lab):
    """The number of a dead holder may be given to another process, which then holds nothing."""
    lab.hold("--memory", "44000")
    entry = next((lab.state / "holders").iterdir())
    entry.write_text(entry.read_text().replace("start=", "start=1"))
    assert lab.look().verdict == "clear"


def run_module(lab, tmp_path, **options):
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({"ANSIBLE_MODULE_ARGS": options}))
    module = pathlib.Path(_gpu.__file__).resolve().parents[1] / "modules" / "gpu_clear.py"
    environment = dict(lab.environment, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    code = (
        "import gpu_host, runpy, sys; gpu_host.patch(); sys.argv.pop(0); runpy.run_path(sys.argv[0], None, '__main__')"
    )
    words = [sys.executable, "-c", code, str(module), str(arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_module(lab, tmp_path):
    code, result = run_module(lab, tmp_path, timeout=20, interval=0.1)
    assert (code, result["ok"], result["verdict"], result["changed"]) == (0, True, "clear", False)
    assert (result["readings"], result["msg"]) == (2, "GPU 0 is clear")
    child = lab.hold("--memory", "44000")
    code, result = run_module(lab, tmp_path)
    assert (code, result["failed"], result["ok"], result["verdict"]) == (1, True, False, "busy")
    assert result["gpus"][0]["holders"][0]["pid"] == child.pid
    code, result = run_module(lab, tmp_path, report_only=True, _ansible_check_mode=True)
    assert (code, result["ok"], result["verdict"]) == (0, False, "busy")
    code, result = run_module(lab, tmp_path, gpus=[])
    assert code == 1 and "the list of GPUs is empty" in result["msg"]
    code, result = run_module(lab, tmp_path, confirmations=0)
    assert code == 1 and '"confirmations" must be at least 1' in result["msg"]


def test_module_without_the_driver_library(lab, tmp_path):
    lab.environment.pop("LD_LIBRARY_PATH")
    code, result = run_module(lab, tmp_path)
    assert (code, result["verdict"]) == (1, "error")
    assert result["reason"] in ("no_stack", "library_missing")
