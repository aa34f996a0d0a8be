# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's part in a wait: the slices it asks for, what it shows, and what it makes of a lost connection."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import types
import typing as t

import pytest
import yaml
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible_collections.gpuops.serving.plugins.action import wait_model_ready as action
from ansible_collections.gpuops.serving.plugins.module_utils import _wait_request
from ansible_collections.gpuops.serving.plugins.modules import wait_model_ready

LIVE = {
    "phase": "loading_weights",
    "percent": 10.0,
    "missing": "listener",
    "restarts": 0,
    "memory": 512,
    "moved": 1.0,
    "stall_timeout": 300.0,
    "timeout": 600.0,
    "elapsed": 5.0,
}
LOST = AnsibleConnectionFailure("the cable is out")
READY = {"verdict": "ready", "ok": True, "invocation": {"module_args": {"unit": "x", "resume": "VALUE_SPECIFIED"}}}


def slice_of(token: str, **live: t.Any) -> t.Dict[str, t.Any]:
    packed = _wait_request.pack({"token": token, "live": {**LIVE, **live}})
    return {"failed": True, "verdict": "progressing", "resume": packed}


def readable(request: str) -> str:
    """What a slice was asked for, with the name of its token in the place of the token."""
    head, _colon, token = request.rpartition(":")
    return "%s:%s" % (head, _wait_request.asked(request).token["token"] if token else "")


class Shell:
    tmpdir: t.Optional[str] = "/root/.ansible/tmp/x"


class Connection:
    def __init__(self) -> None:
        self._shell = Shell()
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


class Controller:
    """A controller that gets the answers which a test gives it, each after some seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: t.Any, **args: t.Any) -> None:
        self.now = 1000.0
        self.answers, self.calls, self.shown, self.commands = list(answers), [], [], []
        self.rc, self.blinks = 0, False
        task = types.SimpleNamespace(
            args={"unit": "qwen.service", **args},
            check_mode=False,
            async_val=0,
            no_log=False,
            delegate_to=None,
            action="gpuops.serving.wait_model_ready",
        )
        self.task, self.connection = task, Connection()
        self.plugin = action.ActionModule.__new__(action.ActionModule)
        self.plugin._task, self.plugin._connection = task, self.connection
        monkeypatch.setattr(action.ActionBase, "run", lambda *_words: {})
        for name, stand_in in (
            ("_execute_module", self.execute),
            ("_low_level_execute_command", self.command),
            ("_is_pipelining_enabled", lambda *_words: True),
        ):
            setattr(self.plugin, name, stand_in)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(action, "time", clock)
        real = action.Screen
        monkeypatch.setattr(action, "Screen", lambda name, on: real(name, on, clock.monotonic))
        self.warned: t.List[str] = []
        monkeypatch.setattr(action, "display", types.SimpleNamespace(display=self.show, warning=self.warned.append))
        monkeypatch.setattr(action, "read_by_machine", lambda: False)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def show(self, text: str, stderr: bool = False) -> None:
        self.shown.append(text)

    def command(self, text: str, sudoable: bool = True) -> t.Dict[str, t.Any]:
        self.commands.append(text)
        # What the next slice will be told, a command before it is told too.
        answer = self.answers[0][1] if self.answers else None
        lost = answer is LOST or (isinstance(answer, dict) and "unreachable" in answer)
        if lost and self.calls and not self.blinks:
            raise LOST
        return {"rc": self.rc}

    def execute(self, module_args: t.Any, task_vars: t.Any, wrap_async: bool = False) -> t.Any:
        self.calls.append((dict(module_args), wrap_async))
        seconds, answer = self.answers.pop(0)
        self.now += seconds
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self) -> t.Dict[str, t.Any]:
        return self.plugin.run(None, {"inventory_hostname": "gpu03"})

    @property
    def asked(self) -> t.List[str]:
        return [readable(args["resume"]) for args, _wrap in self.calls]


def test_a_wait_goes_from_slice_to_slice_and_answers_without_what_they_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, slice_of("t2", percent=20.0)), (3, dict(READY)))
    found = it.run()
    assert it.asked == ["gpuops-wait:0.000:1:", "gpuops-wait:8.000:1:t1", "gpuops-wait:16.000:1:t2"]
    assert found == {"verdict": "ready", "ok": True, "invocation": {"module_args": {"unit": "x"}}}
    assert it.shown == [
        "gpu03 qwen: loading weights 10 % · memory 512 MiB · 5 s, moved 1 s ago",
        "gpu03 qwen: loading weights 20 % · memory 512 MiB · 5 s, moved 1 s ago",
    ]
    assert "resume" not in it.task.args


def test_what_has_not_changed_is_shown_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [(20, slice_of("t", elapsed=20.0 * number)) for number in range(1, 8)]
    it = Controller(monkeypatch, *slices, (1, dict(READY)))
    it.run()
    assert [text.split(" · ")[2].split(",")[0] for text in it.shown] == ["20 s", "1 m 20 s", "2 m 20 s"]


@pytest.mark.parametrize(
    ("task", "args"),
    [({"no_log": True}, {}), ({}, {"progress": False}), ({}, {"progress": "no"})],
)
def test_nothing_is_shown_where_it_must_not(
    monkeypatch: pytest.MonkeyPatch, task: t.Dict[str, t.Any], args: t.Dict[str, t.Any]
) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (1, LOST), (8, slice_of("t2")), (1, dict(READY)), **args)
    vars(it.task).update(task)
    assert it.run()["verdict"] == "ready"
    assert it.shown == []
    # Nor does a change end a slice then.
    assert it.asked[0] == "gpuops-wait:0.000:0:"


@pytest.mark.parametrize("task", [{"check_mode": True}, {"async_val": 60}])
def test_check_mode_and_async_are_one_call(monkeypatch: pytest.MonkeyPatch, task: t.Dict[str, t.Any]) -> None:
    it = Controller(monkeypatch, (1, dict(READY)))
    vars(it.task).update(task)
    it.run()
    assert it.calls == [({"unit": "qwen.service"}, bool(task.get("async_val")))]
    assert it.shown == []


@pytest.mark.parametrize("lost", [LOST, {"unreachable": True, "msg": "no route"}])
def test_a_lost_connection_is_made_again_with_the_last_token(monkeypatch: pytest.MonkeyPatch, lost: t.Any) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (10, lost), (10, lost), (4, dict(READY)))
    it.connection._shell.tmpdir = None
    assert it.run()["verdict"] == "ready"
    assert it.asked[1:] == ["gpuops-wait:8.000:1:t1", "gpuops-wait:19.000:1:t1", "gpuops-wait:30.000:1:t1"]
    assert it.connection.resets == 2
    assert it.shown[1:] == [
        "gpu03 qwen: the connection is lost, it is tried for 1 m 00 s more",
        "gpu03 qwen: the connection is back",
    ]


def test_the_time_counts_from_the_beginning_where_the_first_slice_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, LOST), (4, dict(READY)))
    it.run()
    assert it.asked == ["gpuops-wait:0.000:1:", "gpuops-wait:9.000:1:"]


def test_a_connection_that_stays_lost_ends_it_and_says_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (9, LOST), (9, LOST), (9, LOST), reconnect_timeout="15")
    found = it.run()
    assert it.now - 1017 == 20  # from when it was seen; the last try began before the time was over
    assert found["msg"] == (
        'the host "gpu03" was lost while the unit "qwen.service" was waited for, and was tried again for 20 s: the '
        "cable is out; last seen at: loading weights 10 % · memory 512 MiB · 5 s, moved 1 s ago; next: wait again, "
        "nothing was changed"
    )
    assert (found["unreachable"], found["verdict"], found["ok"], found["elapsed"]) == (True, "error", False, 37)
    assert (found["phase"], found["percent"]) == ("loading_weights", 10.0)
    assert set(yaml.safe_load(wait_model_ready.RETURN)) <= set(found)
    # To tidy up there would fail as well, and that failure would take the place of this one.
    assert it.connection._shell.tmpdir is None


def test_the_time_that_is_left_is_told_when_it_is_lost_again(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (10, LOST), (9, LOST), (4, dict(READY)))
    it.blinks = True
    it.run()
    assert [text.partition(": ")[2] for text in it.shown[1:]] == [
        "the connection is lost, it is tried for 1 m 00 s more",
        "the connection is back",
        "the connection is lost, it is tried for 50 s more",
        "the connection is back",
    ]


def test_the_connection_is_back_as_soon_as_the_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (10, LOST), (50, slice_of("t2")), (4, dict(READY)))
    when: t.List[float] = []
    show = it.show
    monkeypatch.setattr(action.display, "display", lambda text, stderr: (when.append(it.now), show(text)))
    it.run()
    back = next(number for number, text in enumerate(it.shown) if text.endswith("the connection is back"))
    assert when[back] - when[back - 1] == action.AGAIN


KILLED = {"failed": True, "rc": 137, "module_stdout": "", "module_stderr": "Killed", "msg": "MODULE FAILURE."}


@pytest.mark.parametrize("check_mode", [False, True])
def test_a_module_that_is_killed_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, check_mode: bool) -> None:
    slices = [] if check_mode else [(8, slice_of("t1"))]
    it = Controller(monkeypatch, *slices, (3, dict(KILLED)))
    it.task.check_mode = check_mode
    found = it.run()
    assert (found["verdict"], found["ok"], found["rc"]) == ("error", False, 137)
    assert set(yaml.safe_load(wait_model_ready.RETURN)) <= set(found)
    seen = "nothing was seen of it"
    if not check_mode:
        seen = "last seen at: loading weights 10 % · memory 512 MiB · 5 s, moved 1 s ago"
    assert found["msg"] == (
        'the wait for the unit "qwen.service" was broken off on the host "gpu03": MODULE FAILURE; %s; '
        "next: wait again, nothing was changed" % seen
    )


def test_arguments_that_are_refused_are_an_error_in_the_words_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Controller(monkeypatch, (1, {"failed": True, "msg": "Unsupported parameters"})).run()
    assert (found["verdict"], found["msg"], found["tiers"]) == ("error", "Unsupported parameters", [])


def test_each_answer_gives_the_whole_time_again_and_the_timeout_caps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(
        monkeypatch, *[(20, slice_of("t", timeout=50.0)), (20, LOST), (20, slice_of("t", timeout=50.0))], (51, LOST)
    )
    assert it.run()["unreachable"] is True
    assert it.now - 1000 == 20 + 20 + 1 + 20 + 51


def test_a_host_that_cannot_be_reached_to_begin_with_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch)

    def refuse(*_words: t.Any, **_more: t.Any) -> t.Any:
        raise LOST

    it.plugin._low_level_execute_command = refuse
    found = it.run()
    assert (found["unreachable"], found["verdict"], found["msg"]) == (
        True,
        "error",
        'the host "gpu03" cannot be reached, so the unit "qwen.service" was not waited for: the cable is out',
    )
    assert (it.calls, it.shown) == ([], [])
    it.task.check_mode = True
    it.answers.append((1, LOST))
    assert it.run() == found


@pytest.mark.parametrize(("rc", "kept"), [(0, True), (1, False), (127, True)])
def test_a_folder_that_went_with_a_reboot_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, rc: int, kept: bool
) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (1, LOST), (1, dict(READY)))
    it.rc = rc
    it.run()
    assert it.commands[-1] == "test -d /root/.ansible/tmp/x"
    assert (it.connection._shell.tmpdir is not None) is kept


def test_a_host_whose_clock_stands_still_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [(50, slice_of("t", timeout=100.0)) for _ in range(3)]
    answer = {"verdict": "progressing", "tiers": [], "cause": None}
    it = Controller(monkeypatch, *slices, (1, dict(answer)), reconnect_timeout=20)
    # What a slice tells is no answer: the last call is asked for one.
    assert it.run() == answer
    assert it.asked[2:] == ["gpuops-wait:100.000:1:t", "gpuops-wait:150.000:whole:t"]
    assert it.now - 1000 == 151


def test_the_last_call_is_not_made_again_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (120, slice_of("t", timeout=100.0)), (9, LOST), reconnect_timeout=20)
    assert it.run()["unreachable"] is True


@pytest.mark.parametrize("damage", ["********", "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER", "cut", "other"])
def test_a_damaged_token_is_asked_for_once_more_and_then_the_wait_is_one_call(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    bad = slice_of("t2")
    sent = bad["resume"]
    bad["resume"] = {"cut": sent[:-2], "other": sent[:9] + chr(ord(sent[9]) ^ 1) + sent[10:]}.get(damage, damage)
    slices = [slice_of("t1"), bad, slice_of("t3"), bad, bad]
    it = Controller(monkeypatch, *[(8, part) for part in slices], (8, dict(READY)))
    assert it.run()["verdict"] == "ready"
    assert it.asked[1:] == [
        "gpuops-wait:8.000:1:t1",
        "gpuops-wait:16.000:1:t1",
        "gpuops-wait:24.000:1:t3",
        "gpuops-wait:32.000:1:t3",
        "gpuops-wait:40.000:whole:t3",
    ]
    assert it.warned == [
        "gpu03 qwen: what the host hands on from slice to slice comes back damaged: nothing more is shown until the "
        "wait ends"
    ]


def test_a_wait_whose_first_token_is_damaged_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"failed": True, "verdict": "progressing", "resume": "********"}
    it = Controller(monkeypatch, (8, bad), (8, bad), (8, dict(READY)))
    it.run()
    assert it.asked == ["gpuops-wait:0.000:1:", "gpuops-wait:8.000:1:", "gpuops-wait:16.000:whole:"]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://ops:hunter2@127.0.0.1:8000", "gpu03"),
        ("http://127.0.0.1:8000?key=hunter2", "gpu03 http://127.0.0.1:8000"),
    ],
)
def test_no_password_is_shown_in_what_is_waited_for(monkeypatch: pytest.MonkeyPatch, url: str, name: str) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (3, dict(READY)), unit=None, url=url)
    it.run()
    assert it.shown == [name + ": loading weights 10 % · memory 512 MiB · 5 s, moved 1 s ago"]


class Beside:
    """What is read beside the slices: for each whether there was a line, which is shown before the slice ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *heard: t.Optional[t.Dict[str, t.Any]]) -> None:
        self.lines, self.begun, self.open = list(heard), [], 0
        names = iter("%032x" % number for number in range(1, 99))
        monkeypatch.setattr(action.secrets, "token_hex", lambda _size: next(names))
        monkeypatch.setattr(action._wait_beside, "command", lambda _connection, name: ["read", name])
        monkeypatch.setattr(action._wait_beside, "Beside", self.begin)

    def begin(self, argv: t.Any, show: t.Any, first: float) -> t.Any:
        self.begun.append((argv and int(argv[1], 16), first))
        self.line, self.show = self.lines.pop(0) if argv else None, show
        return self

    @property
    def heard(self) -> bool:
        return self.line is not None

    def __enter__(self) -> Beside:
        self.open += 1
        if self.line is not None:
            self.show(self.line)
        return self

    def __exit__(self, *_error: object) -> None:
        self.open -= 1


def named(number: int, how: int) -> str:
    return "%d+%032x" % (how, number)


def test_what_a_slice_tells_is_shown_while_it_lasts_and_the_next_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (50, slice_of("t2", percent=20.0)), (3, dict(READY)))
    beside = Beside(monkeypatch, None, {**LIVE, "percent": 15.0}, None)
    it.run()
    assert it.asked == [
        "gpuops-wait:0.000:%s:" % named(1, how=1),
        "gpuops-wait:8.000:%s:t1" % named(2, how=1),
        "gpuops-wait:58.000:%s:t2" % named(3, how=2),
    ]
    assert [text.split(" · ")[0] for text in it.shown] == [
        "gpu03 qwen: loading weights 10 %",
        "gpu03 qwen: loading weights 15 %",
        "gpu03 qwen: loading weights 20 %",
    ]
    assert beside.begun == [(1, 1.0), (2, 1.0), (3, 0.0)]
    assert beside.open == 0


def test_after_a_lost_connection_it_is_not_known_whether_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, LOST), (8, dict(READY)))
    beside = Beside(monkeypatch, LIVE, LIVE, None)
    it.run()
    assert [request.split(":")[2] for request in it.asked] == [named(1, 1), named(2, 2), named(3, 1)]
    assert beside.open == 0


def test_the_connection_is_back_with_the_first_line_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, LOST), (8, slice_of("t2", percent=50.0)), (8, dict(READY)))
    Beside(monkeypatch, LIVE, None, {**LIVE, "percent": 40.0}, None)
    it.run()
    assert [text.partition(": ")[2].split(" · ")[0].split(",")[0] for text in it.shown] == [
        "loading weights 10 %",
        "the connection is lost",
        "the connection is back",
        "loading weights 40 %",
        "loading weights 50 %",
    ]


@pytest.mark.parametrize(
    ("task", "args"), [({"no_log": True}, {}), ({}, {"progress": False}), ({"check_mode": True}, {})]
)
def test_nothing_is_read_where_nothing_may_be_shown(
    monkeypatch: pytest.MonkeyPatch, task: t.Dict[str, t.Any], args: t.Dict[str, t.Any]
) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, dict(READY)), **args)
    beside = Beside(monkeypatch)
    vars(it.task).update(task)
    it.run()
    assert [begun[0] for begun in beside.begun] in ([], [None, None])
    assert all("+" not in str(given.get("resume")) for given, _wrap in it.calls)


def test_nothing_is_read_beside_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"failed": True, "verdict": "progressing", "resume": "********"}
    it = Controller(monkeypatch, (8, bad), (8, bad), (8, dict(READY)))
    beside = Beside(monkeypatch, None, None)
    it.run()
    assert it.asked[2] == "gpuops-wait:16.000:whole:"
    assert [begun[0] for begun in beside.begun] == [1, 2, None]


def test_a_connection_that_cannot_be_read_beside_is_waited_through_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, dict(READY)))
    assert not hasattr(it.connection, "transport")
    assert it.run()["verdict"] == "ready"
    assert it.asked == ["gpuops-wait:0.000:1:", "gpuops-wait:8.000:1:t1"]


def test_the_wait_ends_when_the_controller_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Controller(monkeypatch, (8, slice_of("t1")), (8, slice_of("t2")))
    parents = iter([1000, 1000, 1])
    monkeypatch.setattr(action.os, "getppid", lambda: next(parents))
    with pytest.raises(AnsibleActionFail):
        it.run()


def test_a_worker_whose_controller_was_killed_ends_with_its_connection() -> None:
    reader, writer = os.pipe()
    told, tell = os.pipe()
    controller = os.fork()
    if controller == 0:
        try:
            parent = os.getpid()
            if os.fork() == 0:
                with action._bound_to(parent, every=0.01):
                    subprocess.Popen(["sleep", "60"], pass_fds=[writer])
                    os.write(writer, b"began")
                    os.write(tell, b"x")
                    signal.pause()
            os.close(tell)
            os.read(told, 1)
        finally:
            os._exit(0)
    for end in (writer, told, tell):
        os.close(end)
    os.waitpid(controller, 0)
    with open(reader, "rb") as stream:
        poller = select.poll()
        poller.register(stream, 0)
        assert poller.poll(20000)
        # Both held it open: the worker, and the connection that it had made.
        assert stream.read() == b"began"


def test_a_worker_whose_controller_lives_goes_on() -> None:
    with action._bound_to(os.getppid(), every=0.001):
        watching = threading.active_count()
    assert watching > 1


def test_the_words_of_the_slices_are_the_controllers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnsibleActionFail):
        Controller(monkeypatch, resume="x").run()


@pytest.mark.parametrize(
    ("arguments", "callback", "machine"),
    [
        ({}, "default", False),
        ({}, "ansible.builtin.default", False),
        ({}, "ansible.posix.json", True),
        ({}, "ansible.posix.jsonl", True),
        ({}, "json", True),
        ({"module_name": "x"}, "default", True),
    ],
)
def test_who_reads_the_standard_output(
    monkeypatch: pytest.MonkeyPatch, arguments: t.Dict[str, t.Any], callback: str, machine: bool
) -> None:
    monkeypatch.setattr(action.context, "CLIARGS", arguments)
    monkeypatch.setattr(action.constants, "DEFAULT_STDOUT_CALLBACK", callback, raising=False)
    assert action.read_by_machine() is machine


def test_lines_for_a_machine_go_to_the_error_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: t.List[t.Tuple[str, bool]] = []
    stand_in = types.SimpleNamespace(display=lambda text, stderr: shown.append((text, stderr)))
    monkeypatch.setattr(action, "display", stand_in)
    for machine in (True, False):
        monkeypatch.setattr(action, "read_by_machine", lambda machine=machine: machine)
        action.Screen("gpu03 qwen", True).show(LIVE)
    assert [stderr for _text, stderr in shown] == [True, False]
