# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Waiting for clear GPUs on a clock that tests turn, and choosing devices."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _gpu_device,
    _gpu_facts,
    _gpu_nvml_codes,
    _gpu_options,
    _gpu_reasons,
    _gpu_select,
    _service,
)
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
    assert script.limits == [5.0, 3.0, 2.0, 2.0]  # the last ones get time to answer at all


def test_too_few_clear_looks_are_not_clear():
    result, _, _ = run(2, "busy", "busy", "clear", confirmations=2)
    assert (result.verdict, result.reason) == ("unknown", "unconfirmed")
    assert result.message == "the GPUs were clear in the last 1 of 3 readings, 2 in a row were asked for"


def test_a_last_look_that_found_nothing_out_does_not_undo_the_ones_before():
    result, _, _ = run(3, "clear", (3, "error:timeout"), confirmations=2)
    assert result.message == "the GPUs were clear in the last 1 of 2 readings, 2 in a row were asked for"


def test_a_look_that_the_end_cut_short_does_not_replace_a_whole_one():
    result, _, _ = run(3, "busy", (2.5, "error:timeout"))
    assert result.verdict == "busy"
    result, _, _ = run(3, (4, "error:timeout"))
    assert result.verdict == "error"
    result, _, _ = run(3, "busy", (2.5, "error:gpu_lost"))
    assert result.verdict == "error"


@pytest.mark.parametrize("reason", sorted(_gpu_reasons.LASTING))
def test_what_waiting_does_not_change_is_told_at_once(reason):
    result, clock, _ = run(60, "error:" + reason)
    assert (result.verdict, result.readings, clock.now) == ("error", 1, 0.0)


@pytest.mark.parametrize("reason", sorted(_gpu_reasons.LASTING_DEVICE))
def test_a_device_that_waiting_does_not_bring_back_is_told_at_once(reason):
    device = Device(index=9, vendor="nvidia").decide("error", reason, "")
    looks = []

    def look(options, limit):
        looks.append(limit)
        return Reading(verdict="error", devices=[device])

    assert wait_clear(Options(), Deadline(60, FakeClock()), look).verdict == "error"
    assert len(looks) == 1


def test_a_driver_that_comes_up_is_waited_for():
    result, _, _ = run(60, "error:driver_not_loaded", "clear")
    assert (result.verdict, result.readings) == ("clear", 3)


DEVICES = [
    Device(index=0, vendor="nvidia", verdict="clear", uuid="GPU-a", pci="00000000:17:00.0"),
    Device(index=1, vendor="nvidia", verdict="error"),
]
SPLIT = Device(
    index=2, vendor="nvidia", uuid="GPU-c", partitions=[Device(index=1, vendor="nvidia", verdict="busy", uuid="MIG-x")]
)
CARD = Device(index=0, vendor="intel", verdict="busy", pci="0000:03:00.0")
GRAPHICS = Device(index=0, vendor="intel", verdict="clear", pci="0000:00:02.0", integrated=True)


def pick(text, devices=DEVICES, vendor="auto", silent=()):
    [found] = _gpu_select.pick([text], devices, vendor, silent)
    return found


@pytest.mark.parametrize(
    ("text", "index", "verdict"),
    [
        ("0", 0, "clear"),
        ("GPU-a", 0, "clear"),
        ("gpu-A", 0, "clear"),
        ("0000:17:00.0", 0, "clear"),
        ("17:00.0", 0, "clear"),
        ("1", 1, "error"),
        ("7", 7, "error"),
        ("GPU-b", None, "error"),
        ("0000:18:00.0", None, "error"),
        ("MIG-x", 1, "busy"),
        ("MIG-y", None, "error"),
    ],
)
def test_pick(text, index, verdict):
    device = pick(text, [*DEVICES, SPLIT])
    assert (device.index, device.verdict) == (index, verdict)


def test_a_device_not_found_may_be_the_silent_one():
    device = pick("GPU-b")
    assert device.detail == "no driver here knows such a device, or it is GPU 1, which does not tell its name"
    assert pick("7").detail.startswith("no driver here knows such a device, only 0, 1")
    assert device.label == 'GPU "GPU-b"'


def test_a_partition_may_be_one_that_is_not_told():
    blind = Device(index=3, vendor="nvidia").decide("unknown", "partitions_unreadable", "")
    device = pick("MIG-y", [*DEVICES, blind])
    assert (device.verdict, device.detail) == ("unknown", "GPU 3 does not tell its partitions")


def test_an_index_must_mean_one_device():
    with pytest.raises(UsageError, match='index "0" may mean a device of intel or nvidia on this host'):
        pick("0", [*DEVICES, CARD])
    with pytest.raises(UsageError, match="intel or nvidia"):
        pick("0", [CARD], silent=["nvidia"])
    # Beside NVIDIA's devices, whatever they are, the graphics of the processor would not be meant.
    assert pick("0", [GRAPHICS], silent=["nvidia"]).reason == "not_found"
    assert pick("0", [CARD], vendor="intel") is CARD
    assert pick("03:00.0", [*DEVICES, CARD]) is CARD


def test_the_graphics_of_a_processor_are_not_meant_beside_real_devices():
    assert pick("0", [GRAPHICS, *DEVICES]) is DEVICES[0]
    assert pick("0000:00:02.0", [GRAPHICS, *DEVICES]) is GRAPHICS
    assert _gpu_select.candidates([GRAPHICS, *DEVICES], "auto") == (DEVICES, [GRAPHICS])
    assert _gpu_select.candidates([GRAPHICS], "auto") == ([GRAPHICS], [])
    assert _gpu_select.candidates([GRAPHICS, CARD], "intel") == ([GRAPHICS, CARD], [])


def test_devices_of_virtual_machines_are_not_meant():
    given = Device(index=1, vendor="amd").decide("error", "passed_through", "")
    assert _gpu_select.candidates([CARD, given], "auto") == ([CARD], [given])
    assert _gpu_select.candidates([given, GRAPHICS], "auto") == ([GRAPHICS], [given])
    assert _gpu_select.candidates([given], "auto") == ([given], [])


def test_two_names_of_one_device_are_refused():
    with pytest.raises(UsageError, match="names GPU 0 twice: 0, GPU-a"):
        _gpu_select.pick(["0", "GPU-a"], DEVICES, "auto", ())


@pytest.mark.parametrize(
    "gpus",
    [
        *([], ["x"], ["0", "0"], ["-1"], ["0,1"], ["all"], ["²"], ["٣"], ["9" * 30], ["0", "00"], [""], ["GPU"]),
        *(
            ["17:00.0", "0000:17:00.0"],
            ["17:00.9"],
            ["GPU-a", "GPU-a"],
            ["GPU-a\nb"],
            ["GPU-" + "a" * 97],
            ["MIG-\xff"],
        ),
        *("10", 5, True, {"0": 1}),
    ],
)
def test_a_selector_that_means_nothing_is_refused(gpus):
    with pytest.raises(UsageError):
        _gpu_select.check(gpus)


def test_message():
    reading = Reading(verdict="error", devices=[*DEVICES, Device(index=2, vendor="nvidia", verdict="clear")])
    assert reading.message == "GPU 1 does not answer properly: "
    assert Reading(verdict="clear", devices=DEVICES[:1]).message == "GPU 0 is clear"


def test_what_is_wrong_with_several_is_said_once():
    devices = [
        *(Device(index=n, vendor="nvidia").decide("unknown", "nodes_unreadable", "run as root") for n in range(2)),
        Device(index=2, vendor="nvidia").decide("busy", "held_by_process", "process 7"),
    ]
    message = Reading(verdict="unknown", devices=devices).message
    assert message == "GPU 0, GPU 1 cannot be judged: run as root; GPU 2 is busy: process 7"


def test_message_of_a_driver_that_is_silent_beside_one_that_is_not():
    busy = Device(index=0, vendor="amd").decide("busy", "held_by_process", "process 7 holds it")
    reading = Reading(verdict="busy", devices=[busy])
    reading.fail("driver_not_loaded", "the NVIDIA kernel driver is not loaded")
    reading.fail("fewer_gpus", "8 GPUs are expected")
    assert (reading.verdict, reading.reason) == ("error", "driver_not_loaded")
    assert reading.message == (
        "the NVIDIA kernel driver is not loaded; 8 GPUs are expected; GPU 0 is busy: process 7 holds it"
    )


def documented(field):
    return set(re.findall(r"(?<!For )V\(([a-z_]+)\)", str(field["description"])))


ROOT = pathlib.Path(__file__).resolve().parents[2]
VERDICTS = {"clear", "busy", "unknown", "error"}


def test_every_return_code_has_a_word():
    words = {word for word, _sentence, _remedy in _gpu_nvml_codes.CODES.values()}
    assert words <= set(_gpu_reasons.DEVICE) and words <= set(_gpu_reasons.READING)


def test_every_reason_is_documented():
    returned = yaml.safe_load(gpu_clear.RETURN)
    assert documented(returned["reason"]) == set(_gpu_reasons.READING)
    of_devices = returned["gpus"]["contains"]
    assert documented(of_devices["reason"]) - VERDICTS == set(_gpu_reasons.DEVICE)
    assert documented(of_devices["memory_basis"]) == set(_gpu_facts.BASES)
    assert documented(of_devices["holders"]["contains"]["source"]) == set(_gpu_facts.SOURCES)


def test_the_page_on_clear_gpus_has_every_word_with_its_verdict():
    page = (ROOT / "docs/when-is-a-gpu-clear.md").read_text(encoding="utf-8")
    of_devices, of_readings = page.split("## Every reason of a reading")
    for part, words in ((of_devices, _gpu_reasons.DEVICE), (of_readings, _gpu_reasons.READING)):
        rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \|", part, re.M)
        assert rows == [(word, verdict, meaning) for word, (verdict, meaning) in words.items()]
    for word in (*_gpu_facts.BASES, *_gpu_facts.SOURCES, *(rule["name"] for rule in _gpu_device.DEFAULT_ALLOWED)):
        assert "`%s`" % word in page
    for vendor, mib in _gpu_options.TOLERANCE.items():
        assert re.search(r"\| %s \|.* %d MiB" % (vendor.capitalize(), mib), page, re.I)


def test_documented_defaults_are_those_of_the_library():
    options = yaml.safe_load(gpu_clear.DOCUMENTATION)["options"]
    library = Options()
    for name in ("allow_no_gpu", "vendor", "interval", "confirmations"):
        assert options[name]["default"] == getattr(library, name)
    assert options["vendor"]["choices"] == ["auto", *_gpu_options.VENDORS]
    assert "64 for NVIDIA, and 512 for AMD and Intel" in str(options["memory_tolerance"]["description"])


DEFAULTS = {
    **dict.fromkeys(("service", "unit", "gpus", "expected_gpus", "allowed_holders", "memory_tolerance")),
    "vendor": "auto",
    "allow_no_gpu": False,
    "timeout": 0,
    "interval": 1,
    "confirmations": 2,
}


def test_the_mark_of_a_unit_needs_no_service(monkeypatch):
    monkeypatch.setattr(_service, "names", lambda _folder: ["qwen"])
    monkeypatch.setattr(_service, "load", lambda _name, _folder: {"unit": "gpuops-qwen.service", "mark_gid": 987654})
    assert _gpu_options.of_params(dict(DEFAULTS, unit="gpuops-qwen.service")).mark_gid == 987654
    assert _gpu_options.of_params(dict(DEFAULTS, unit="gpuops-qwen")).mark_gid == 987654
    assert _gpu_options.of_params(dict(DEFAULTS, unit="other.service")).mark_gid is None
    assert _gpu_options.of_params(DEFAULTS).mark_gid is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: value} for name in ("timeout", "interval") for value in (-1.0, float("inf"), float("nan"))),
        *({"memory_tolerance": -1}, {"expected_gpus": -3}, {"confirmations": 0}),
    ],
)
def test_limits_that_are_none(wrong):
    with pytest.raises(UsageError, match='"%s" must be' % next(iter(wrong))):
        _gpu_options.of_params(dict(DEFAULTS, **wrong))


@pytest.mark.parametrize("rule", [{}, {"name": None, "user": None, "unit": None}, {"name": ""}])
def test_a_rule_that_would_fit_nobody_is_refused(rule):
    with pytest.raises(UsageError, match='a rule of "allowed_holders" is empty'):
        _gpu_options.of_params(dict(DEFAULTS, allowed_holders=[{"user": "root"}, rule]))


@pytest.mark.parametrize("unit", ["", "a b", "*", "../../x"])
def test_a_unit_that_is_no_name_is_refused(unit):
    with pytest.raises(UsageError, match="is not a systemd unit name"):
        _gpu_options.of_params(dict(DEFAULTS, unit=unit))


def test_a_count_where_nothing_is_looked_at_is_refused():
    with pytest.raises(UsageError, match='"expected_gpus" counts the GPUs of the host'):
        _gpu_options.of_params(dict(DEFAULTS, gpus=[], expected_gpus=8))


def test_devices_that_make_no_sense_are_refused_before_anything_is_read():
    with pytest.raises(UsageError, match="names one twice"):
        _gpu_options.of_params(dict(DEFAULTS, gpus=["0", "0"]))
