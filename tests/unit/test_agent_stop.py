# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command gpuops stop: the module's options, its lock, and text that says who, why and what became of each."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import types
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _agent,
    _agent_stop,
    _lease,
    _service,
    _stop_text,
    _stopping,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._selection import Refused
from ansible_collections.gpuops.serving.plugins.modules import process_tree_stop

ENGINE: t.Dict[str, t.Any] = {
    "pid": 101,
    "create_time": 5.0,
    "ppid": 1,
    "name": "python3",
    "command": "python3 -m vllm",
    "user": "qwen",
    "state": "S",
    "found_by": ["main_pid", "cgroup"],
    "role": "main",
    "signals": ["systemd"],
    "outcome": "planned",
    "seconds": None,
}
WORKER = dict(ENGINE, command="", pid=7, name="VLLM::Worker", found_by=["mark"], role="escaped", signals=["TERM"])
MONITOR = dict(
    ENGINE, command="nvtop", pid=8, name="nvtop", user="root", found_by=["session"], role="member", signals=[]
)


def answer(verdict: str = "stopped", *processes: t.Dict[str, t.Any], **facts: t.Any) -> t.Dict[str, t.Any]:
    known = {"verdict": verdict, "changed": True, "msg": "its sentence", "processes": list(processes)}
    return dict(known, survivors=[], zombies=[], suspects=[], plan=[], unlisted=0, unit_state=None, **facts)


class Seen(t.NamedTuple):
    """What the command asked of the library, and in which order it took and gave back the lock."""

    calls: t.List[t.Tuple[t.Dict[str, t.Any], bool]]
    steps: t.List[str]
    answers: t.List[t.Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen([], [], [answer()])

    def stop(params: t.Dict[str, t.Any], check_mode: bool, warn: t.Any = None, watch: t.Any = None) -> t.Any:
        found.calls.append((params, check_mode))
        found.steps.append("stop")
        warn("a warning")
        if isinstance(found.answers[0], Exception):
            raise found.answers[0]
        return found.answers[0]

    @contextlib.contextmanager
    def operation(service: t.Optional[str], run_id: t.Optional[str]) -> t.Iterator[None]:
        found.steps.append("lock %s %s" % (service, run_id))
        yield
        found.steps.append("unlock")

    monkeypatch.setattr(_stopping, "stop", stop)
    monkeypatch.setattr(_lease, "operation", operation)
    monkeypatch.setattr(_service, "of_unit", lambda unit: {"qwen.service": "qwen"}.get(unit))
    monkeypatch.setattr(
        _service, "load", lambda name, folder="": {"name": name, "unit": name + ".service", "engine": "vllm"}
    )
    monkeypatch.setattr(_service, "names", lambda *_folder: ["qwen"])
    return found


def test_a_service_brings_its_unit_and_its_engine_and_is_locked(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["stop", "qwen"]) == 0
    [(params, check_mode)] = seen.calls
    assert (params["service"], params["unit"], params["engine"], check_mode) == (
        "qwen",
        "qwen.service",
        "vllm",
        False,
    )
    assert seen.steps == ["lock qwen None", "stop", "unlock"]
    shown = capsys.readouterr()
    assert shown.out == "stopped: its sentence\n"
    assert shown.err == "gpuops: warning: a warning\n"


def test_a_unit_is_under_the_lock_of_its_service(seen: Seen) -> None:
    _agent.main(["stop", "--unit", "qwen.service"])
    _agent.main(["stop", "--pid", "7"])
    assert seen.steps == ["lock qwen None", "stop", "unlock", "lock None None", "stop", "unlock"]


def test_a_plan_takes_no_lock_and_says_that_it_is_one(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["stop", "qwen", "--plan"]) == 0
    assert seen.calls[0][1] is True
    assert seen.steps == ["stop"]
    assert capsys.readouterr().out == "plan: its sentence\n"


def test_a_fresh_lease_of_a_run_refuses_and_names_its_owner(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def operation(_service: t.Any, _run_id: t.Any) -> t.Iterator[None]:
        raise _lease.Lost('the service "qwen" is in use by run "r1" of ops', verdict="refused")
        yield

    monkeypatch.setattr(_lease, "operation", operation)
    assert _agent.main(["stop", "qwen"]) == 1
    assert capsys.readouterr().out == 'refused: the service "qwen" is in use by run "r1" of ops\n'
    assert seen.calls == []


@pytest.mark.parametrize(
    ("given", "code", "out"),
    [
        (answer("absent"), 0, "absent: its sentence\n"),
        (answer("survivors"), 1, "survivors: its sentence\n"),
        (answer("unkillable"), 1, "unkillable: its sentence\n"),
        (Refused("it is a kernel thread"), 1, "refused: it is a kernel thread\n"),
        (ServingError("no answer", verdict="error"), 2, "error: no answer\n"),
        (ServingError("it broke"), 2, "error: it broke\n"),
        (ServingError("no answer", **answer("survivors")), 1, "survivors: no answer\n"),
    ],
)
def test_exit_codes_are_those_of_the_table(
    seen: Seen, capsys: pytest.CaptureFixture[str], given: t.Any, code: int, out: str
) -> None:
    seen.answers[0] = given
    assert _agent.main(["stop", "qwen"]) == code
    assert capsys.readouterr().out == out
    assert _agent.main(["stop", "qwen", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == out.partition(":")[0]
    assert document["ok"] is (code == 0)
    assert document["warnings"] == ["a warning"]


def test_wrong_use_has_a_code_of_its_own(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    seen.answers[0] = UsageError("no such thing")
    assert _agent.main(["stop", "qwen"]) == 3
    assert capsys.readouterr().err == "gpuops: no such thing\n"
    assert _agent.main(["stop", "qwen", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "error"
    for argv in (["--pid", "x"], ["--gpus", ","], ["--signal", "KILL"], ["--order", "worst"], ["a", "b"]):
        assert _agent.main(["stop", *argv]) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing is named that could be stopped"),
        (["--pid", "7", "--unit", "x"], '"unit" and "pid" exclude each other'),
        (["--pattern", "x"], '"pattern" needs "user"'),
        (["--gpus", "0"], '"gpus" needs "user"'),
        (["--pid", "7", "--engine", "vllm"], '"engine" tells what the processes of a unit are called'),
        (["--pid", "7", "--allowed-holder", "name=x"], '"allowed_holders" says who may go on to hold "gpus"'),
        (["--unit", "x", "--create-time", "5"], '"create_time" says which process is meant'),
        (["--unit", "x", "--user", "root"], '"user" has no meaning for a unit'),
        (["--pid", "7", "--protected", ""], '"protected" holds an empty name'),
    ],
)
def test_words_that_do_not_go_together(
    argv: t.List[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_service, "of_unit", lambda _unit: None)
    for extra in ([], ["--plan"]):
        assert _agent.main(["stop", *argv, *extra]) == 3
        assert said in capsys.readouterr().err


def test_the_command_has_the_options_and_defaults_of_the_module() -> None:
    documented = yaml.safe_load(process_tree_stop.DOCUMENTATION)["options"]
    parser = argparse.ArgumentParser()
    _agent_stop.add(parser.add_subparsers())
    arguments = vars(parser.parse_args(["stop"]))
    # --plan is what check mode is for a task.
    assert set(arguments) - {"run", "json", "plan"} == {*documented, "service"}
    for name, option in documented.items():
        assert arguments[name] == option.get("default"), name


def test_every_option_arrives(seen: Seen) -> None:
    words = "--gpus 0,GPU-1 --user alice --signal INT --grace 1 --kill-grace 2 --timeout 3 --order all --reset-failed"
    more = "--allow-foreign-users --protected a --protected b --allowed-holder name=x,user=y --engine sglang"
    more += " --create-time 5.5 --pid 7 --pidfile /run/x --pattern x --unit u"
    _agent.main(["stop", *words.split(), *more.split()])
    found = {name: value for name, value in seen.calls[0][0].items() if name not in ("run", "command", "json", "plan")}
    assert found == {
        "service": None,
        "unit": "u",
        "pid": 7,
        "pidfile": "/run/x",
        "pattern": "x",
        "gpus": ["0", "GPU-1"],
        "create_time": 5.5,
        "user": "alice",
        "allowed_holders": [{"name": "x", "user": "y"}],
        "engine": "sglang",
        "signal": "INT",
        "grace": 1.0,
        "kill_grace": 2.0,
        "timeout": 3.0,
        "order": "all",
        "protected": ["a", "b"],
        "allow_foreign_users": True,
        "reset_failed": True,
    }
    _agent.main(["stop", "--pid", "8"])
    assert seen.calls[1][0]["protected"] == []


def test_a_plan_as_text() -> None:
    brief = [{"pid": 101, "name": "python3", "found_by": ["main_pid"]}]
    crowd = [{"pid": pid, "name": "w", "found_by": ["mark"]} for pid in range(20, 28)]
    plan = [
        {"step": 1, "action": "systemd_stop", "signal": None, "target": "q.service", "wait": 95.0, "processes": brief},
        {
            "step": 2,
            "action": "container_stop",
            "signal": None,
            "target": "qwen",
            "manager": "docker",
            "wait": 15.0,
            "processes": [],
        },
        {"step": 3, "action": "signal", "signal": "TERM", "target": None, "wait": 2.5, "processes": crowd},
    ]
    foreign = dict(MONITOR, outcome="foreign")
    assert _stop_text.lines(dict(answer("stopped", ENGINE, WORKER, foreign), plan=plan), True) == [
        "PID  USER  NAME          ROLE     FOUND BY          STATE  WILL GET  COMMAND",
        "101  qwen  python3       main     main_pid, cgroup  S      systemd   python3 -m vllm",
        "7    qwen  VLLM::Worker  escaped  mark              S      TERM",
        "8    root  nvtop         member   session           S      foreign   nvtop",
        "",
        "Steps, each only for those that are left by then:",
        '  1. systemd stops the unit "q.service", then up to 95 s: 101 "python3"',
        '  2. docker stops the container "qwen", then up to 15 s: no process',
        '  3. TERM, then up to 2.5 s: 20 "w", 21 "w", 22 "w", 23 "w", 24 "w", 25 "w", and 2 more',
    ]


def test_a_result_as_text() -> None:
    stuck = dict(WORKER, signals=["TERM", "KILL"], outcome="unkillable", state="D")
    state = {"name": "q.service", "active_state": "failed", "sub_state": "failed", "result": "timeout"}
    found = answer("unkillable", dict(ENGINE, outcome="ended", seconds=1.23), stuck, dict(MONITOR, outcome="gone"))
    found["survivors"] = [dict(stuck, wchan="nv_wait", stack=["nv_wait+0x1", "do_exit+0x2"])]
    found["survivors"].append(dict(MONITOR, outcome="foreign", why="only session speaks for it", wchan=""))
    found["zombies"] = [{"pid": 5, "name": "z", "parent": 4, "parent_name": "p"}]
    found["suspects"] = [{"pid": 9, "name": "VLLM::E", "user": "qwen", "unit": None, "why": "it bears the name"}]
    found.update(unit_state=state, unlisted=3)
    assert _stop_text.lines(found, False) == [
        "PID  USER  NAME          ROLE     FOUND BY          GOT         OUTCOME     SECONDS  COMMAND",
        "101  qwen  python3       main     main_pid, cgroup  systemd     ended       1.2      python3 -m vllm",
        "7    qwen  VLLM::Worker  escaped  mark              TERM, KILL  unkillable",
        "8    root  nvtop         member   session           nothing     gone                 nvtop",
        "and 3 more",
        "",
        'left: 7 "VLLM::Worker" (user qwen), unkillable, state D, waits in nv_wait',
        "  kernel stack: nv_wait+0x1, do_exit+0x2",
        'left: 8 "nvtop" (user root), foreign, state S: only session speaks for it',
        'dead, holds nothing: 5 "z", not collected by its parent 4 "p"',
        'not ended, look at it: 9 "VLLM::E" (user qwen, unit none): it bears the name',
        'unit "q.service": failed (failed), result timeout',
    ]
    assert _stop_text.lines({"verdict": "refused"}, False) == []


def test_progress_is_one_line_for_each_change_and_only_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def member(pid: int, *signals: str) -> t.Any:
        return types.SimpleNamespace(process=types.SimpleNamespace(pid=pid, name="w"), signals=list(signals))

    living = [member(7, "TERM"), member(8)]
    survey = types.SimpleNamespace(members={1: 1}, ours=lambda: living)
    for stream, expected in (
        (Terminal(), 'gpuops: 2 left: 7 "w" (TERM), 8 "w"\ngpuops: nobody is left, looking again\n'),
        (io.StringIO(), ""),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        watch = _agent_stop._Progress()
        watch(survey)
        watch(survey)
        watch(types.SimpleNamespace(members={1: 1}, ours=list))
        watch(types.SimpleNamespace(members={}, ours=list))
        assert stream.getvalue() == expected
