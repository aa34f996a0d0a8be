# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Waiting for clear GPUs on a clock that tests turn, and choosing devices."""

from __future__ import annotations

import inspect
import re

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu, _gpu_judge, _gpu_nvidia, _service
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock, Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Device, Options, Reading, wait_clear
from ansible_collections.gpuops.serving.plugins.modules import gpu_clear


class FakeClock(Clock):
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Script:
    """Looks that were written down beforehand; the last one repeats. A number before a word is how long it takes."""

    def __init__(self, clock, *looks):
        self.clock, self.looks, self.limits = clock, list(looks), []

    def __call__(self, options, limit):
        self.limits.append(limit)
        entry = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        seconds, word = entry if isinstance(entry, tuple) else (0.0, entry)
        self.clock.now += seconds
        word, _, reason = word.partition(":")
        return Reading(verdict=word, reason=reason, detail=reason)


def run(timeout, *looks, **options):
    clock = FakeClock()
    script = Script(clock, *looks)
    result = wait_clear(Options(**options), Deadline(timeout, clock), script)
    return result, clock, script


def test_one_look_decides():
    result, clock, script = run(0, "clear")
    assert (result.verdict, result.readings, clock.now) == ("clear", 1, 0.0)
    assert script.limits == [None]
    assert run(0, "busy")[0].verdict == "busy"


def test_memory_comes_back_late():
    result, clock, _ = run(60, "busy", "busy", "busy", "clear")
    assert (result.verdict, result.readings) == ("clear", 5)
    assert clock.now == 4.0


def test_clear_looks_must_follow_each_other():
    result, _, _ = run(60, "clear", "busy", "clear", "unknown", "clear", "clear")
    assert (result.verdict, result.readings) == ("clear", 6)


def test_no_more_than_the_time_given():
    result, clock, script = run(5, "busy", interval=2)
    assert (result.verdict, clock.now, result.readings) == ("busy", 5.0, 4)
    assert script.limits == [5.0, 3.0, 1.0, 0.0]


def test_too_few_clear_looks_are_not_clear():
    result, _, _ = run(2, "busy", "busy", "clear", confirmations=2)
    assert (result.verdict, result.reason) == ("unknown", "unconfirmed")
    assert result.message == "the GPUs were clear in the last 1 of 3 readings, 2 in a row were asked for"


def test_a_look_that_the_end_cut_short_does_not_replace_a_whole_one():
    result, _, _ = run(3, "busy", (2.5, "error:timeout"))
    assert result.verdict == "busy"
    result, _, _ = run(3, (4, "error:timeout"))
    assert result.verdict == "error"


@pytest.mark.parametrize("reason", ["library_missing", "driver_mismatch", "no_gpu"])
def test_what_waiting_does_not_change_is_told_at_once(reason):
    result, clock, _ = run(60, "error:" + reason)
    assert (result.verdict, result.readings, clock.now) == ("error", 1, 0.0)


def test_a_driver_that_comes_up_is_waited_for():
    result, _, _ = run(60, "error:driver_not_loaded", "clear")
    assert (result.verdict, result.readings) == ("clear", 3)


DEVICES = [
    Device(index=0, vendor="nvidia", verdict="clear", uuid="GPU-a", pci="00000000:17:00.0"),
    Device(index=1, vendor="nvidia", verdict="error"),
]


@pytest.mark.parametrize(
    ("text", "index", "verdict"),
    [
        ("0", 0, "clear"),
        ("GPU-a", 0, "clear"),
        ("0000:17:00.0", 0, "clear"),
        ("17:00.0", 0, "clear"),
        ("1", 1, "error"),
        ("7", 7, "error"),
        ("GPU-b", None, "error"),
        ("0000:18:00.0", None, "error"),
        ("MIG-a", None, "unknown"),
    ],
)
def test_pick(text, index, verdict):
    device = _gpu._pick(text, DEVICES)
    assert (device.index, device.verdict) == (index, verdict)


def test_a_device_not_found_may_be_the_silent_one():
    device = _gpu._pick("GPU-b", DEVICES)
    assert device.detail == "the driver knows no such device, or it is GPU 1, which does not tell its name"
    assert device.label == 'GPU "GPU-b"'


@pytest.mark.parametrize(
    "gpus", [[], ["x"], ["0", "0"], ["-1"], ["0,1"], ["all"], ["²"], ["٣"], ["9" * 30], ["0", "00"]]
)
def test_a_selector_that_means_nothing_is_refused(gpus):
    with pytest.raises(UsageError):
        _gpu._check_selectors(gpus)


def test_message():
    reading = Reading(verdict="error", devices=[*DEVICES, Device(index=2, vendor="nvidia", verdict="clear")])
    assert reading.message == "GPU 1 does not answer properly: "
    assert Reading(verdict="clear", devices=DEVICES[:1]).message == "GPU 0 is clear"


def test_hardware_present(tmp_path):
    assert not _gpu_nvidia.hardware_present(str(tmp_path))
    for address, vendor, kind in (("0000:00:1f.0", "0x8086", "0x030000"), ("0000:17:00.1", "0x10de", "0x040300")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    assert not _gpu_nvidia.hardware_present(str(tmp_path))
    (tmp_path / "bus/pci/devices/0000:17:00.1/class").write_text("0x030200\n")
    assert _gpu_nvidia.hardware_present(str(tmp_path))


@pytest.mark.parametrize(("value", "mib"), [(0, 0), (1, 1), (1 << 20, 1), ((1 << 20) + 1, 2), (2**64 - 1, None)])
def test_memory_is_rounded_up_and_unknown_is_not_zero(value, mib):
    assert _gpu_nvidia._mib(value) == mib


def test_minor_from_the_kernel_driver(tmp_path):
    folder = tmp_path / "driver/nvidia/gpus/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: NVIDIA L40S\nDevice Minor: \t 3\n")
    assert _gpu._minor_by_driver("00000000:17:00.0", str(tmp_path)) == 3
    assert _gpu._minor_by_driver("00000000:18:00.0", str(tmp_path)) is None


REASONS_OF_A_LOOK = {
    *("library_missing", "driver_not_loaded", "driver_mismatch", "driver_error", "internal", "timeout", "stuck"),
    *("no_gpu", "no_stack", "fewer_gpus", "unconfirmed"),
}


def written(*modules):
    """Every reason that the source of these rooms can answer."""
    source = "\n".join(inspect.getsource(module) for module in modules)
    words = re.findall(
        r'(?:decide\(\s*"(?:busy|unknown|error|clear)", |_sick\(\w+, |_no_answer\(reading, )"(\w+)"', source
    )
    words += re.findall(r'reason = (?:"(?:error|unknown)", )?"(\w+)"', source) + re.findall(r'\d+: "(\w+)"', source)
    words += re.findall(r'^            "(\w+_\w+)",$', source, re.M) + re.findall(r'"(unconfirmed|fewer_gpus)"', source)
    return {*words, "driver_error"}


def documented(field):
    return set(re.findall(r"(?<!For )V\(([a-z_]+)\)", str(field["description"])))


def test_every_reason_is_documented():
    returned = yaml.safe_load(gpu_clear.RETURN)
    assert documented(returned["reason"]) == REASONS_OF_A_LOOK
    of_devices = documented(returned["gpus"]["contains"]["reason"]) - {"clear", "busy", "unknown", "error"}
    assert set(_gpu_nvidia.CODES.values()) <= of_devices
    assert of_devices | REASONS_OF_A_LOOK >= written(_gpu, _gpu_judge, _gpu_nvidia)


DEFAULTS = {
    **dict.fromkeys(("service", "unit", "gpus", "expected_gpus", "allowed_holders")),
    "allow_no_gpu": False,
    "memory_tolerance": 64,
    "timeout": 0,
    "interval": 1,
    "confirmations": 2,
}


def test_the_mark_of_a_unit_needs_no_service(monkeypatch):
    monkeypatch.setattr(_service, "names", lambda: ["qwen"])
    monkeypatch.setattr(_service, "load", lambda _name: {"unit": "gpuops-qwen.service", "mark_gid": 987654})
    assert gpu_clear.options_of(dict(DEFAULTS, unit="gpuops-qwen.service")).mark_gid == 987654
    assert gpu_clear.options_of(dict(DEFAULTS, unit="gpuops-qwen")).mark_gid == 987654
    assert gpu_clear.options_of(dict(DEFAULTS, unit="other.service")).mark_gid is None
    assert gpu_clear.options_of(DEFAULTS).mark_gid is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("timeout", "interval") for value in (-1.0, float("inf"), float("nan"))),
        *({"memory_tolerance": -1}, {"expected_gpus": -3}, {"confirmations": 0}),
    ],
)
def test_limits_that_are_none(wrong):
    with pytest.raises(UsageError, match='"%s" must be' % next(iter(wrong))):
        gpu_clear.options_of(dict(DEFAULTS, **wrong))
