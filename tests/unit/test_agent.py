# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the host agent: the exit codes of the verdict table, and one sentence for each mistake."""

from __future__ import annotations

import argparse
import json
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _agent, _agent_gpu, _gpu_text, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Device, Reading
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_device import Holder
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_options import Options
from ansible_collections.gpuops.serving.plugins.modules import gpu_clear


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> t.List[t.Tuple[Options, float]]:
    """What the command asked of the library, which always answers that the GPUs are busy."""
    calls: t.List[t.Tuple[Options, float]] = []

    def wait_clear(options: Options, deadline: t.Any) -> Reading:
        calls.append((options, deadline.seconds))
        return Reading(verdict="busy", reason="held", detail='GPU 0 is held by "python3"')

    monkeypatch.setattr(_agent_gpu._gpu, "wait_clear", wait_clear)
    return calls


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> t.Dict[str, t.Any]:
    definition: t.Dict[str, t.Any] = {"name": "chat", "gpus": ["1"], "mark_gid": 987654}
    monkeypatch.setattr(_service, "load", lambda name, folder="": definition)
    return definition


def test_busy_gpus_exit_with_the_code_of_the_table(seen: t.Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["gpu-clear", "--gpus", "0, GPU-1", "--timeout", "5"]) == 1
    assert capsys.readouterr().out == 'busy: GPU 0 is held by "python3"\n'
    assert (seen[0][0].gpus, seen[0][1]) == (["0", "GPU-1"], 5.0)


def test_all_gpus_are_judged_unless_some_are_named(seen: t.Any) -> None:
    _agent.main(["gpu-clear"])
    assert seen[0][0].gpus is None
    assert seen[0][0].memory_tolerance == Options().memory_tolerance


def test_a_service_brings_its_gpus_and_its_mark(seen: t.Any, defined: t.Any) -> None:
    _agent.main(["gpu-clear", "--service", "chat", "--memory-tolerance", "100", "--unit", "chat.service"])
    options = seen[0][0]
    assert (options.gpus, options.unit, options.mark_gid) == (["1"], "chat.service", 987654)
    assert options.memory_tolerance == 100


def test_a_service_without_gpus_is_clear(seen: t.Any, defined: t.Any, capsys: pytest.CaptureFixture[str]) -> None:
    defined["gpus"] = []
    assert _agent.main(["gpu-clear", "--service", "chat"]) == 0
    assert capsys.readouterr().out == 'clear: the service "chat" uses no GPU\n'
    assert seen == []


def test_json_is_the_result_of_the_module(seen: t.Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["gpu-clear", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "busy"


@pytest.mark.parametrize(("error", "code"), [(UsageError("no such GPU"), 3), (ServingError("it broke"), 2)])
def test_an_error_is_one_sentence(
    error: ServingError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: t.Any, deadline: t.Any) -> Reading:
        raise error

    monkeypatch.setattr(_agent_gpu._gpu, "wait_clear", fail)
    assert _agent.main(["gpu-clear"]) == code
    assert capsys.readouterr().err == "gpuops: %s\n" % error.message


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["gpu"], ["gpu-clear", "--gpus", ","], ["gpu-clear", "--timeout", "soon"]),
        *(["gpu-clear", "--vendor", "matrox"], ["gpu-clear", "--allowed-holder", "name"]),
        *(["gpu-clear", "--allowed-holder", "pid=7"], ["gpu-clear", "--memory-tolerance", "-1"]),
        *(["gpu-clear", "--gpus", "0,0"], ["gpu-clear", "--confirmations", "0"], ["gpu-clear", "--interval", "nan"]),
    ],
)
def test_wrong_use_has_a_code_of_its_own(argv: t.List[str]) -> None:
    assert _agent.main(argv) == 3


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["--help"]) == 0
    assert "gpu-clear" in capsys.readouterr().out


def test_the_command_has_the_options_and_defaults_of_the_module(seen: t.Any) -> None:
    documented = yaml.safe_load(gpu_clear.DOCUMENTATION)["options"]
    parser = argparse.ArgumentParser()
    _agent_gpu.add(parser.add_subparsers())
    arguments = vars(parser.parse_args(["gpu-clear"]))
    # What fails a task is the command's exit status here.
    assert set(arguments) - {"run", "json"} == {*documented, "service"} - {"report_only"}
    for name, option in documented.items():
        assert name == "report_only" or arguments[name] == option.get("default")


def test_every_option_arrives(seen: t.Any) -> None:
    words = "--vendor amd --expected-gpus 8 --allow-no-gpu --interval 0.5 --confirmations 3"
    rules = ["--allowed-holder", "name=nvtop,user=alice", "--allowed-holder", "unit=dcgm.service"]
    _agent.main(["gpu-clear", *words.split(), *rules])
    assert seen[0][0] == Options(
        vendor="amd",
        expected_gpus=8,
        allow_no_gpu=True,
        interval=0.5,
        confirmations=3,
        allowed_holders=[{"name": "nvtop", "user": "alice"}, {"unit": "dcgm.service"}],
    )


def test_the_table_names_devices_partitions_and_holders() -> None:
    device = Device(index=0, vendor="nvidia", memory_used=44003, memory_total=46068)
    device.holders = [Holder(4711, "compute", ["driver", "node"], 44000)]
    device.disagreements = ["the driver lists process 4711, which is not in the process table here"]
    device.decide("busy", "held_by_unresolvable", "")
    split = Device(index=1, vendor="nvidia")
    part = Device(index=3, vendor="nvidia", memory_used=2, memory_total=9000)
    split.partitions = [part.decide("clear", "idle", "")]
    split.decide("clear", "idle", "")
    assert _gpu_text.lines([device, split]) == [
        "GPU  VENDOR  VERDICT  USED MiB  TOTAL MiB  REASON",
        "0    nvidia  busy     44003     46068      held_by_unresolvable",
        "  process 4711, which is not in the process table here, holds 44000 MiB (compute, by driver and node)",
        "  contradiction: the driver lists process 4711, which is not in the process table here",
        "1    nvidia  clear    unknown   unknown    idle",
        "1/3  nvidia  clear    2         9000       idle",
    ]
    assert _gpu_text.lines([]) == []


class Full:
    """A file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass


def test_an_answer_that_cannot_be_written_is_none(
    seen: t.Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1 would say that the GPUs are busy."""
    moved: t.List[t.Any] = []
    monkeypatch.setattr(_agent.os, "dup2", lambda *numbers: moved.append(numbers))
    monkeypatch.setattr("sys.stdout", Full())
    assert _agent.main(["gpu-clear"]) == 2
    assert capsys.readouterr().err == "gpuops: the answer cannot be written: No space left on device\n"
    assert [numbers[1] for numbers in moved] == [1]


def test_what_fails_in_the_work_is_not_the_answer(
    seen: t.Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: t.Any, deadline: t.Any) -> Reading:
        raise OSError(28, "No space left on device", "/run/x")

    monkeypatch.setattr(_agent_gpu._gpu, "wait_clear", fail)
    assert _agent.main(["gpu-clear"]) == 2
    said = "gpuops: this host refused what the work needs: [Errno 28] No space left on device: '/run/x'\n"
    assert capsys.readouterr() == ("", said)


def test_without_an_output_nothing_is_done(
    seen: t.Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    for words in (["gpu-clear"], ["--help"]):
        assert _agent.main(words) == 2
        assert capsys.readouterr().err == "gpuops: the answer cannot be written: the standard output is closed\n"
    assert seen == []


def test_without_an_error_output_the_answer_stays_clean(
    seen: t.Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert _agent.main(["gpu-clear", "--gpus", "0,0"]) == 3
    assert capsys.readouterr().out == ""


def test_an_interrupted_wait_has_no_verdict(seen: t.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: t.Any, deadline: t.Any) -> Reading:
        raise KeyboardInterrupt

    monkeypatch.setattr(_agent_gpu._gpu, "wait_clear", interrupt)
    assert _agent.main(["gpu-clear"]) == 130


@pytest.mark.parametrize("gpus", [True, 5, "10", {"0": 1}])
def test_devices_of_a_definition_that_are_no_list_are_refused(seen: t.Any, defined: t.Any, gpus: t.Any) -> None:
    defined["gpus"] = gpus
    assert _agent.main(["gpu-clear", "--service", "chat"]) == 3
    assert seen == []
