# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The GPU memory of a service while it loads: what is its own, and that nobody waits for the driver."""

from __future__ import annotations

import os
import pathlib
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _background, _bounded, _gpu_memory


def row(pid: int, memory: t.Optional[int], **more: t.Any) -> t.Dict[str, t.Any]:
    return {"pid": pid, "memory": memory, "kind": "compute", "source": "driver", **more}


@pytest.mark.parametrize(
    ("facts", "alone", "mib"),
    [
        ({"processes": [row(7, 100), row(8, 20), row(9, 4000)], "memory_used": 4500}, True, 120),
        # One process in two lists of the driver holds its memory once.
        ({"processes": [row(7, 100), row(7, 100, kind="graphics")], "memory_used": 500}, False, 100),
        # Nothing is told of ours: what is in use and not another's, where the device is ours.
        ({"processes": [row(9, 4000)], "memory_used": 4500}, True, 500),
        ({"processes": [row(9, 4000)], "memory_used": 4500}, False, 0),
        ({"processes": [row(7, None), row(9, 4000)], "memory_used": 4500}, True, 500),
        ({"processes": [row(9, 5000)], "memory_used": 4500}, True, 0),
        ({"processes": None, "memory_used": None}, True, 0),
        (
            {
                "processes": [],
                "memory_used": 9000,
                "partitions": [{"processes": [row(7, 10, gi=1)]}, {"processes": [row(7, 30, gi=2), row(9, 500, gi=2)]}],
            },
            True,
            40,
        ),
    ],
)
def test_what_a_device_tells_of_a_service(facts: t.Dict[str, t.Any], alone: bool, mib: float) -> None:
    assert _gpu_memory.held(facts, {7, 8}, alone) == mib


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("1", True),
        ("0", False),
        ("GPU-AB", True),
        ("MIG-7", True),
        ("GPU-x", False),
        ("0000:3b:00.0", True),
        ("3c:00.0", False),
    ],
)
def test_a_device_goes_by_several_names(name: str, found: bool) -> None:
    facts = {"index": 1, "uuid": "GPU-ab", "pci": "00000000:3B:00.0", "partitions": [{"uuid": "MIG-7"}]}
    assert _gpu_memory._is(facts, name) is found


class Host:
    """A host with a GPU whose reading a test decides."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "nvidia0").touch()
        self.folder, self.monkeypatch = folder, monkeypatch
        self.monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(folder / "stuck"))

    def reads(self, measure: t.Callable[..., t.Any]) -> None:
        self.monkeypatch.setattr(_gpu_memory, "measure", measure)

    def memory(self, gpus: t.Optional[t.List[str]] = None) -> _gpu_memory.GpuMemory:
        return _gpu_memory.GpuMemory(gpus, dev=str(self.folder))


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def until(call: t.Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not call():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_look_takes_what_is_known_and_never_waits(host: Host) -> None:
    host.reads(lambda pids, gpus, *folders: time.sleep(0.3) or {"mib": float(sum(pids)), "why": ""})
    memory = host.memory()
    began = time.monotonic()
    assert memory.look([7, 8]) is None
    assert time.monotonic() - began < 0.25
    until(lambda: memory.look([7, 8]) == 15.0)
    assert memory.warning == ""
    for _look in range(3):
        memory.look([7, 8])
    assert memory._reading is None  # not again before it is time
    memory._next = 0.0
    memory.look([1])
    assert memory._reading is not None
    memory.close()


@pytest.mark.parametrize("gpus", [[], None])
def test_nothing_is_asked_where_there_is_nothing_to_ask(host: Host, gpus: t.Optional[t.List[str]]) -> None:
    host.reads(lambda *arguments: pytest.fail("asked"))
    if gpus is None:
        (host.folder / "nvidia0").unlink()
    memory = host.memory(gpus)
    assert memory.look([7]) is None and memory._reading is None
    assert host.memory().look([]) is None


def test_a_driver_that_tells_nothing_is_a_warning_and_is_asked_seldom(host: Host) -> None:
    host.reads(lambda *arguments: {"mib": None, "why": "the driver is away"})
    memory = host.memory()
    until(lambda: memory.look([7]) is None and memory.warning != "")
    assert memory.warning == "the GPU memory of the service cannot be read: the driver is away"
    assert 50 < memory._next - time.monotonic() <= 60


def test_a_driver_that_hangs_is_given_up_on(host: Host) -> None:
    host.reads(lambda *arguments: time.sleep(60))
    host.monkeypatch.setattr(_gpu_memory, "LIMIT", 0.1)
    memory = host.memory()
    until(lambda: memory.look([7]) is None and memory.warning != "")
    assert memory.warning == "the GPU memory of the service cannot be read: no answer within 0.1 s"


def test_a_dear_reading_is_taken_less_often(host: Host) -> None:
    def burn(*arguments: t.Any) -> t.Dict[str, t.Any]:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return {"mib": 1.0, "why": ""}

    host.reads(burn)
    memory = host.memory()
    until(lambda: memory.look([7]) == 1.0)
    assert memory._next - time.monotonic() > 30


def test_a_later_slice_knows_the_figure_and_when_to_ask(host: Host) -> None:
    host.reads(lambda *arguments: {"mib": 3.5, "why": ""})
    memory = host.memory()
    assert memory.save() == {"value": None, "next": None, "unfinished": 0, "warning": ""}
    until(lambda: memory.look([7]) == 3.5)
    after = host.memory()
    after.restore(memory.save())
    assert after.look([7]) == 3.5 and after._reading is None


def test_a_reading_that_no_slice_sees_the_end_of_is_begun_less_and_less_often(host: Host) -> None:
    host.reads(lambda *arguments: time.sleep(60))
    saved, pauses = host.memory().save(), []
    for _slice in range(6):
        memory = host.memory()
        memory.restore(dict(saved, next=None))
        memory.look([7])
        saved = memory.save()
        pauses.append(round(saved["next"] - time.monotonic()))
        memory.close()
    assert pauses == [5, 20, 80, 320, 1280, 1280]


def test_open_files_of_a_display_driver_are_accounted_once(tmp_path: pathlib.Path) -> None:
    dev, proc, sys = tmp_path / "dev", tmp_path / "proc", tmp_path / "sys"
    (dev / "dri").mkdir(parents=True)

    def process(pid: int, client: int, driver: str, size: int) -> None:
        for file in (3, 4):
            for folder in ("fd", "fdinfo", "task/%d" % pid):
                (proc / str(pid) / folder).mkdir(parents=True, exist_ok=True)
            (proc / str(pid) / "fd" / str(file)).symlink_to(dev / "dri" / "renderD128")
            text = "drm-driver:\t%s\ndrm-client-id:\t%d\ndrm-total-vram0:\t%d KiB\n" % (driver, client, size)
            (proc / str(pid) / "fdinfo" / str(file)).write_text(text)

    process(7, 1, "xe", 2048)
    process(8, 2, "xe", 1024)
    process(9, 3, "xe", 999999)
    assert _gpu_memory.measure([7, 8], None, str(dev), str(proc), str(sys)) == {"mib": 3.0, "why": ""}
    process(10, 4, "amdgpu", 4096)
    kfd = sys / "class" / "kfd" / "kfd" / "proc" / "10"
    kfd.mkdir(parents=True)
    (kfd / "vram_123").write_text(str(6 << 20))
    assert _gpu_memory.measure([7, 10], None, str(dev), str(proc), str(sys)) == {"mib": 8.0, "why": ""}


# The child on the side


def outcome(background: _background.Background) -> _bounded.Outcome:
    until(lambda: background.poll() is not None)
    found = background.poll()
    assert found is not None
    return found


def test_a_call_on_the_side_answers_when_it_is_done() -> None:
    background = _background.Background(lambda report: (report({"a": 1}), time.sleep(0.1), os.getpid())[2], 5.0)
    assert background.poll() is None
    found = outcome(background)
    assert (found.ok, found.partial) == (True, [{"a": 1}])
    assert found.value != os.getpid()
    assert outcome(background) is found


def test_a_call_on_the_side_that_fails_or_does_not_end() -> None:
    assert outcome(_background.Background(lambda report: 1 // 0, 5.0)).error.startswith("ZeroDivisionError: ")
    slow = outcome(_background.Background(lambda report: time.sleep(60), 0.05))
    assert (slow.status, slow.error) == ("timeout", "no answer within 0.05 s")
    given_up = _background.Background(lambda report: time.sleep(60), 60.0)
    given_up.close()
    assert outcome(given_up).status == "timeout"


def test_a_call_that_is_stuck_elsewhere_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "stuck_child", lambda key: 4711 if key == "k" else None)
    found = outcome(_background.Background(lambda report: pytest.fail("made"), 5.0, "k"))
    assert (found.status, found.error) == ("stuck", "process 4711 has not come back from an earlier call")
