# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Real processes that hold devices of the test driver library are ended, and nobody else is.

``test_stop.py`` runs this file in a process id namespace of its own.
"""

from __future__ import annotations

import os
import pathlib
import signal
import tempfile
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu, _holders, _ownership, _stopping
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError
from ansible_collections.gpuops.serving.plugins.module_utils._selection import Refused
from ansible_collections.gpuops.serving.plugins.module_utils._stop import Options
from confined import fixture_confined  # noqa: F401
from gpu_host import Lab, driver_library, made
from grove import Forest, cared_for

QUICK: t.Dict[str, t.Any] = {"grace": 2.0, "kill_grace": 2.0}
DAEMON = 1  # the number of an account that every host has


@pytest.fixture(name="lab")
def fixture_lab(tmp_path, tmp_path_factory, monkeypatch) -> t.Iterator[Lab]:
    # These tests may run in a service or a container themselves.
    monkeypatch.setattr(_ownership, "attribute", lambda _process: (None, None))
    for lab in made(tmp_path, driver_library(tmp_path_factory), monkeypatch):
        lab.scenario(devices=2)
        yield lab


@pytest.fixture(name="forest")
def fixture_forest(lab: Lab) -> t.Iterator[Forest]:
    with tempfile.TemporaryDirectory(prefix="forest-") as name:
        os.chmod(name, 0o777)
        yield from cared_for(pathlib.Path(name))


def stop(lab: Lab, forest: Forest, gpus: str = "0", check_mode: bool = False, **params: t.Any) -> t.Dict[str, t.Any]:
    def look(options: t.Any, limit: t.Any) -> _gpu.Reading:
        return _gpu.read(options, limit, devices=str(lab.dev), sys=str(lab.sys))

    given = dict({"user": "root", "allow_foreign_users": False}, **params)
    selection = _holders.select(dict(given, gpus=gpus.split(",")), look=look)
    options = Options(**QUICK, allow_foreign_users=given["allow_foreign_users"])
    result = _stopping.carry_out(selection, options, check_mode, send=forest.send)
    return dict(result, warnings=selection.warnings)


def engine(lab: Lab, name: str, number: int = 0, listed: bool = True, **facts: t.Any) -> t.Dict[str, t.Any]:
    held = {"device": number, "memory": 1000, "node": str(lab.dev / ("nvidia%d" % number)), "listed": listed}
    return dict({"id": name, "name": name, "gpu": held}, **facts)


def outcomes(result: t.Dict[str, t.Any]) -> t.Dict[str, t.Tuple[t.List[str], str]]:
    return {process["name"]: (process["found_by"], process["outcome"]) for process in result["processes"]}


def test_a_holder_with_its_workers_is_ended_and_the_shell_that_started_it_is_not(lab: Lab, forest: Forest) -> None:
    worker = {"id": "worker", "name": "worker", "session": True, "deaf": True}
    forest.grow(
        {
            "id": "shell",
            "name": "shell",
            "session": True,
            "all_deaf": True,
            "children": [engine(lab, "engine", children=[worker]), {"id": "decoy", "all_deaf": True}],
        }
    )
    result = stop(lab, forest)
    assert result["verdict"] == "stopped", result
    assert outcomes(result) == {"engine": (["gpu_holder"], "ended"), "worker": (["descendant"], "ended")}
    assert forest.untouched("shell") and forest.untouched("decoy")
    assert any('the parent %d "shell"' % forest.ref("shell").pid in text for text in result["warnings"])
    [device] = lab.look(gpus=["0"]).devices
    assert device.verdict == "clear"


def test_only_the_device_that_is_meant(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "first"), engine(lab, "second", 1, all_deaf=True))
    assert stop(lab, forest)["verdict"] == "stopped"
    assert not forest.alive("first")
    assert forest.untouched("second")
    assert stop(lab, forest, check_mode=True)["verdict"] == "absent"
    assert set(outcomes(stop(lab, forest, "all", check_mode=True))) == {"second"}


def test_check_mode_names_them_and_touches_nobody(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "first", all_deaf=True), engine(lab, "second", 1, all_deaf=True))
    result = stop(lab, forest, "0,1", check_mode=True)
    assert (result["verdict"], result["changed"]) == ("stopped", True)
    assert outcomes(result) == {name: (["gpu_holder"], "planned") for name in ("first", "second")}
    assert forest.untouched("first") and forest.untouched("second")


def test_a_holder_of_somebody_else_refuses_all_of_it(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "ours", all_deaf=True), engine(lab, "theirs", uid=DAEMON, all_deaf=True))
    for check_mode in (True, False):
        with pytest.raises(Refused) as refused:
            stop(lab, forest, check_mode=check_mode)
        assert '%d "theirs" (user daemon)' % forest.ref("theirs").pid in refused.value.message
        assert "ours" not in refused.value.message
    assert forest.untouched("ours") and forest.untouched("theirs")
    assert stop(lab, forest, "1")["verdict"] == "absent"


def test_the_holders_of_all_where_that_is_said(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "ours"), engine(lab, "theirs", uid=DAEMON))
    assert stop(lab, forest, user=None, allow_foreign_users=True)["verdict"] == "stopped"
    assert not forest.alive("ours") and not forest.alive("theirs")


def test_the_holders_of_a_user_are_his_alone(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "theirs", uid=DAEMON), engine(lab, "ours", 1, all_deaf=True))
    assert stop(lab, forest, user="daemon")["verdict"] == "stopped"
    assert not forest.alive("theirs")
    assert forest.untouched("ours")


def test_an_allowed_holder_is_shown_and_goes_on(lab: Lab, forest: Forest) -> None:
    daemon = engine(lab, "nv-hostengine", uid=DAEMON, all_deaf=True)
    daemon["gpu"]["memory"] = 100
    forest.grow(daemon, engine(lab, "engine"))
    result = stop(lab, forest)
    assert result["verdict"] == "stopped"
    assert outcomes(result) == {
        "engine": (["gpu_holder"], "ended"),
        "nv-hostengine": (["gpu_holder"], "allowed"),
    }
    assert result["survivors"] == []
    assert forest.untouched("nv-hostengine")
    again = stop(lab, forest)
    assert (again["verdict"], again["changed"]) == ("absent", False)


def test_a_rule_allows_what_the_caller_names(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "desktop", uid=DAEMON, all_deaf=True), engine(lab, "engine"))
    with pytest.raises(Refused, match="not of the user"):
        stop(lab, forest)
    assert stop(lab, forest, allowed_holders=[{"name": "desktop", "user": "daemon"}])["verdict"] == "stopped"
    assert forest.untouched("desktop")


def test_a_monitor_goes_on_and_is_named(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "monitor", listed=False, all_deaf=True, uid=DAEMON), engine(lab, "engine"))
    result = stop(lab, forest)
    assert result["verdict"] == "stopped"
    assert set(outcomes(result)) == {"engine"}
    assert any('"monitor" (user daemon) has the device node of GPU 0 open' in text for text in result["warnings"])
    assert forest.untouched("monitor")


def test_a_monitor_goes_on_while_the_driver_gives_the_memory_back(lab: Lab, forest: Forest) -> None:
    lab.scenario(devices=2, release_delay_ms=1500)
    forest.grow(engine(lab, "monitor", listed=False, all_deaf=True), engine(lab, "engine"))
    result = stop(lab, forest)
    assert result["verdict"] == "stopped"
    assert not forest.alive("engine")
    # Asked again at once, as somebody would who sees the memory still in use.
    assert stop(lab, forest)["verdict"] == "absent"
    assert forest.untouched("monitor")


def test_a_worker_that_is_listed_nowhere_counts_where_memory_is_in_use(lab: Lab, forest: Forest) -> None:
    lab.scenario(devices=2, device__0__memory_hidden=4000)
    forest.grow(engine(lab, "worker", listed=False))
    result = stop(lab, forest)
    assert outcomes(result) == {"worker": (["gpu_holder"], "ended")}
    assert not forest.alive("worker")


def test_memory_of_nobody_is_refused(lab: Lab, forest: Forest) -> None:
    lab.scenario(devices=2, device__0__memory_hidden=4000)
    with pytest.raises(Refused, match="GPU 0: 4003 MiB are in use by no visible process"):
        stop(lab, forest)


def test_a_number_of_another_process_table_is_refused(lab: Lab, forest: Forest) -> None:
    lab.scenario(devices=2, device__0__process__0="4194303,500,compute")
    forest.grow(engine(lab, "ours", all_deaf=True))
    with pytest.raises(Refused, match="process 4194303, which is not in the process table here"):
        stop(lab, forest)
    assert forest.untouched("ours")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"device__1__error__nvmlDeviceGetMemoryInfo": 15}, "gpu_lost"),
        ({"device__1__error__nvmlDeviceGetComputeRunningProcesses": 4}, "processes_unreadable"),
    ],
)
def test_a_device_that_cannot_be_read_refuses_all_of_it(
    lab: Lab, forest: Forest, trouble: t.Dict[str, t.Any], reason: str
) -> None:
    lab.scenario(devices=2, **trouble)
    forest.grow(engine(lab, "ours", all_deaf=True))
    with pytest.raises(Refused, match=r"GPU 1: .*\(%s\)" % reason):
        stop(lab, forest, "0,1")
    assert forest.untouched("ours")


def before_the_first_signal(forest: Forest, what: t.Callable[[], None]) -> None:
    """Something happens in the middle of the stop."""
    real, waiting = forest.send, [what]

    def send(ref: t.Any, number: int) -> str:
        while waiting:
            waiting.pop()()
        return real(ref, number)

    forest.send = send  # type: ignore[method-assign]


def test_a_holder_that_is_started_again_is_ended_again(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "engine"))
    before_the_first_signal(forest, lambda: forest.grow(engine(lab, "again")))
    result = stop(lab, forest)
    assert result["verdict"] == "stopped", result
    assert outcomes(result) == {name: (["gpu_holder"], "ended") for name in ("engine", "again")}
    assert not forest.alive("again")


def test_a_new_holder_of_somebody_else_is_left_and_said(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "engine"))
    before_the_first_signal(forest, lambda: forest.grow(engine(lab, "theirs", all_deaf=True, uid=DAEMON)))
    result = stop(lab, forest)
    assert result["verdict"] == "survivors", result
    assert [process["name"] for process in result["survivors"]] == ["theirs"]
    assert outcomes(result)["theirs"] == (["gpu_holder"], "foreign")
    assert any("a new holder is left alone" in text for text in result["warnings"])
    assert forest.untouched("theirs")


def test_a_driver_that_falls_silent_is_no_end(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "engine", slow=0.5))
    lost = {"device__0__error__nvmlDeviceGetMemoryInfo": 15}
    before_the_first_signal(forest, lambda: lab.scenario(devices=2, **lost))
    with pytest.raises(ServingError, match=r"it is not known who holds the devices now: .*GPU 0") as failed:
        stop(lab, forest)
    assert failed.value.result["verdict"] == "error"
    assert failed.value.result["changed"] is True
    assert outcomes(failed.value.result)["engine"] == (["gpu_holder"], "ended")


def test_the_signal_goes_to_the_process_that_was_read(lab: Lab, forest: Forest) -> None:
    forest.grow(engine(lab, "engine", deaf=True))
    began = time.monotonic()
    result = stop(lab, forest)
    assert result["processes"][0]["signals"] == ["TERM", "KILL"]
    assert (result["processes"][0]["pid"], result["verdict"]) == (forest.ref("engine").pid, "stopped")
    assert signal.SIGTERM in forest.heard("engine")
    assert time.monotonic() - began < 12
