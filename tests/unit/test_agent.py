# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the host agent: the exit codes of the verdict table, and one sentence for each mistake."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _agent, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Reading
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_judge import Options


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> t.List[t.Tuple[Options, float]]:
    """What the command asked of the library, which always answers that the GPUs are busy."""
    calls: t.List[t.Tuple[Options, float]] = []

    def wait_clear(options: Options, deadline: t.Any) -> Reading:
        calls.append((options, deadline.seconds))
        return Reading(verdict="busy", reason="held", detail='GPU 0 is held by "python3"')

    monkeypatch.setattr(_agent._gpu, "wait_clear", wait_clear)
    monkeypatch.setattr(_agent._site, "require", lambda modules: None)
    return calls


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> t.Dict[str, t.Any]:
    definition: t.Dict[str, t.Any] = {"name": "chat", "gpus": ["1"], "mark_gid": 990}
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
    _agent.main(["gpu-clear", "--service", "chat", "--memory-tolerance", "100"])
    options = seen[0][0]
    assert (options.gpus, options.mark_gid, options.memory_tolerance) == (["1"], 990, 100)


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
    def fail(modules: t.Any) -> None:
        raise error

    monkeypatch.setattr(_agent._site, "require", fail)
    assert _agent.main(["gpu-clear"]) == code
    assert capsys.readouterr().err == "gpuops: %s\n" % error.message


@pytest.mark.parametrize("argv", [[], ["gpu"], ["gpu-clear", "--gpus", ","], ["gpu-clear", "--timeout", "soon"]])
def test_wrong_use_has_a_code_of_its_own(argv: t.List[str]) -> None:
    assert _agent.main(argv) == 3


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["--help"]) == 0
    assert "gpu-clear" in capsys.readouterr().out
