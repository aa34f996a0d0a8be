# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command gpuops wait: the module's options and defaults, a bar for a terminal, and lines for everything else."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import sys
import types
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _agent,
    _agent_wait,
    _engines,
    _service,
    _waiting,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.modules import wait_model_ready

LIVE = {
    "phase": "loading_weights",
    "percent": 10.0,
    "overall": 6.0,
    "missing": "listener",
    "restarts": 0,
    "memory": 512,
    "moved": 1.0,
    "stall_timeout": 300.0,
    "elapsed": 5.0,
}
# What a task has and the command has not, and the other way round.
OF_TASKS = {"api_key", "report_only", "resume", "run_id", "reconnect_timeout"}
OF_COMMANDS = {"api_key_file", "header_file", "check", "json", "run"}


def answer(verdict: str = "ready", **facts: t.Any) -> t.Dict[str, t.Any]:
    known = {"verdict": verdict, "msg": "its sentence", "tiers": [], "cause": None, "log_tail": []}
    return dict(known, **facts)


class Seen(t.NamedTuple):
    """What the command asked of the library, and what that answers."""

    calls: t.List[t.Dict[str, t.Any]]
    answers: t.List[t.Any]
    watched: t.List[t.Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    found = Seen([], [answer()], [])

    def run(params: t.Dict[str, t.Any], check_mode: bool = False, warn: t.Any = None, watch: t.Any = None) -> t.Any:
        found.calls.append(dict(params, check_mode=check_mode))
        found.watched.append(watch)
        warn("a warning")
        if isinstance(found.answers[0], Exception):
            raise found.answers[0]
        return found.answers[0]

    (tmp_path / "key").write_text("secret\n", encoding="ascii")
    definition = {
        "name": "qwen",
        "unit": "qwen.service",
        "url": "http://127.0.0.1:8000",
        "engine": "vllm",
        "model": "qwen3",
        "ready_timeout": 900,
        "gpus": ["0"],
        "api_key_file": str(tmp_path / "key"),
    }
    monkeypatch.setattr(_waiting, "run", run)
    monkeypatch.setattr(_service, "load", lambda name, folder="": dict(definition))
    monkeypatch.setattr(_service, "names", lambda *_folder: ["qwen"])
    return found


def test_a_service_brings_all_that_its_definition_has(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["wait", "qwen", "--model", "other"]) == 0
    [call] = seen.calls
    assert (call["unit"], call["url"], call["engine"]) == ("qwen.service", "http://127.0.0.1:8000", "vllm")
    assert (call["model"], call["timeout"], call["gpus"], call["api_key"]) == ("other", 900, ["0"], "secret")
    shown = capsys.readouterr()
    assert shown.out == "ready: its sentence\n"
    assert shown.err == "gpuops: warning: a warning\n"


def test_the_command_has_the_options_and_defaults_of_the_module() -> None:
    documented = yaml.safe_load(wait_model_ready.DOCUMENTATION)["options"]
    parser = argparse.ArgumentParser()
    _agent_wait.add(parser.add_subparsers())
    arguments = vars(parser.parse_args(["wait"]))
    shared = {"service", "profile", "api_key", "headers", "validate_certs", "ca_path"}  # documented in fragments
    assert set(arguments) - OF_COMMANDS == {*documented, *shared} - OF_TASKS
    for name, option in documented.items():
        assert name in OF_TASKS or arguments[name] == option.get("default"), name
    assert (arguments["headers"], arguments["validate_certs"], arguments["ca_path"]) == (None, True, None)
    assert arguments["profile"] is None


def test_engines_and_tiers_are_those_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    documented = yaml.safe_load(wait_model_ready.DOCUMENTATION)["options"]
    assert sorted(documented["engine"]["choices"]) == sorted(_engines.PROFILES)
    for name in ("engine", "tier"):
        assert _agent.main(["wait", "--" + name, "nonesuch"]) == 3
        said = capsys.readouterr().err
        assert all(choice in said for choice in documented[name]["choices"])


def test_every_option_arrives(seen: Seen, tmp_path: Path) -> None:
    words = "--unit u --url http://h:1 --engine tgi --model m --gpus 0,GPU-1 --log-path /x --tier model --timeout 9"
    more = "--stall-timeout 8 --generation-timeout 7 --max-restarts 6 --interval 5 --no-validate-certs --ca-path /ca"
    last = ["--header", "X-A=b=c", "--header", "X-B=", "--profile", '{"health": "/up"}', "--no-progress", "--check"]
    _agent.main(["wait", *words.split(), *more.split(), *last, "--api-key-file", str(tmp_path / "key")])
    skipped = ("run", "command", "json", "check", "check_mode", "api_key_file")
    found = {name: value for name, value in seen.calls[0].items() if name not in skipped}
    assert found == {
        "service": None,
        "unit": "u",
        "url": "http://h:1",
        "engine": "tgi",
        "profile": {"health": "/up"},
        "model": "m",
        "gpus": ["0", "GPU-1"],
        "log_path": "/x",
        "tier": "model",
        "timeout": 9.0,
        "stall_timeout": 8.0,
        "generation_timeout": 7.0,
        "max_restarts": 6,
        "interval": 5.0,
        "validate_certs": False,
        "ca_path": "/ca",
        "headers": {"X-A": "b=c", "X-B": ""},
        "progress": False,
        "api_key": "secret",
    }
    assert seen.calls[0]["check_mode"] is True
    assert [type(watch).__name__ for watch in seen.watched] == ["_Watch"]  # which shows nothing


@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        (answer("progressing"), 1, "progressing"),
        (answer("stalled"), 1, "stalled"),
        (answer("restart_loop"), 1, "restart_loop"),
        (answer("dead"), 1, "dead"),
        (answer("wrong_server"), 1, "wrong_server"),
        (answer("wedged"), 1, "wedged"),
        (answer("auth_error"), 1, "auth_error"),
        (ServingError("systemd does not answer"), 2, "error"),
    ],
)
def test_exit_codes_are_those_of_the_table(
    seen: Seen, capsys: pytest.CaptureFixture[str], given: t.Any, code: int, word: str
) -> None:
    seen.answers[0] = given
    assert _agent.main(["wait", "qwen"]) == code
    assert capsys.readouterr().out.startswith(word + ": ")
    assert _agent.main(["wait", "qwen", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["ok"], document["warnings"]) == (word, False, ["a warning"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_wait_and_what_it_began(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, number: signal.Signals
) -> None:
    ended: t.List[str] = []

    def run(*_words: t.Any, **_more: t.Any) -> t.Any:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except ServingError:
            ended.append("taken for an error")
        finally:
            ended.append("ended")

    monkeypatch.setattr(_waiting, "run", run)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        _agent.main(["wait", "qwen"])
    assert (caught.value.code, ended, signal.getsignal(number)) == (128 + number, ["ended"], before)


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    found: t.List[t.Any] = []
    monkeypatch.setattr(_waiting, "run", lambda *_a, **_b: found.append(signal.getsignal(signal.SIGHUP)) or answer())
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _agent.main(["wait", "qwen"]) == 0
        assert found == [signal.SIG_IGN]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_server_wrote_reaches_no_terminal_as_it_is(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    tier = {"name": "model", "reached": False, "at": None, "detail": "lists \x1b[2J\ud800\nready: it is not"}
    seen.answers[0] = answer("stalled", msg="a\x1b]0;b\x07\nready: c", tiers=[tier], log_tail=["\x9b1m"])
    assert _agent.main(["wait", "qwen"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "model       not reached: lists \\x1b[2J\\ud800 ready: it is not",
        "moved: nothing",
        "log: \\x9b1m",
        "stalled: a\\x1b]0;b\\x07 ready: c",
    ]


def test_wrong_use_has_a_code_of_its_own(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    seen.answers[0] = UsageError("no such thing")
    assert _agent.main(["wait", "qwen"]) == 3
    assert capsys.readouterr().err == "gpuops: no such thing\n"
    assert _agent.main(["wait", "qwen", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["msg"] == "no such thing"
    for argv in (["--timeout", "soon"], ["--profile", "x"], ["--profile", "[]"], ["--gpus", ","], ["a", "b"]):
        assert _agent.main(["wait", *argv]) == 3
    capsys.readouterr()
    assert _agent.main(["wait", "--header", "Bearer-secret"]) == 3
    assert "secret" not in capsys.readouterr().err


def test_headers_that_are_secrets_come_from_a_file(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text(
        "# for the gateway\n\nX-Token:  a:b=c \nAuthorization: Basic c2VjcmV0\nX-Empty:\n", encoding="utf-8"
    )
    _agent.main(["wait", "qwen", "--header-file", str(path), "--header", "x-token=plain", "--header", "X-B=1"])
    _agent.main(["wait", "qwen", "--header-file", str(path)])
    _agent.main(["wait", "qwen"])
    assert [call["headers"] for call in seen.calls] == [
        {"Authorization": "Basic c2VjcmV0", "X-Empty": "", "x-token": "plain", "X-B": "1"},
        {"X-Token": "a:b=c", "Authorization": "Basic c2VjcmV0", "X-Empty": ""},
        None,
    ]
    assert all("header_file" not in call for call in seen.calls)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"X-A: 1\nsecret-without-a-name\n", 'cannot be used: line 2 is not "Name: value"'),
        (b": secret\n", 'cannot be used: line 1 is not "Name: value"'),
        (b"X-A: secret\nx-a: secret\n", 'cannot be used: line 2 names a header again: "x-a"'),
        (b"# nothing\n", "cannot be used: it holds no header"),
        (b"X-A: secret\xff\n", "cannot be read: it does not hold text in UTF-8"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_header_file_that_is_none_is_one_sentence_without_what_is_in_it(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: t.Optional[bytes], why: str
) -> None:
    path = tmp_path / "headers"
    if content is not None:
        path.write_bytes(content)
    assert _agent.main(["wait", "qwen", "--header-file", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == 'error: the header file "%s" %s\n' % (path, why)
    assert "secret" not in shown.out + shown.err
    assert seen.calls == []


def test_the_help_says_which_headers_anybody_can_see(capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["wait", "--help"]) == 0
    assert "all users of the host see it in the process list" in " ".join(capsys.readouterr().out.split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_at(**live: t.Any) -> t.Any:
    return types.SimpleNamespace(live=lambda: {**LIVE, **live})


def test_lines_are_one_for_each_change_few_of_them_for_a_percentage_and_one_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, clock = io.StringIO(), Clock()
    monkeypatch.setattr("sys.stderr", stream)
    lines = _agent_wait._Lines("qwen", clock)
    moments = ((0.5, 1.0), (1.0, 2.0), (1.5, 3.0), (5.9, 7.0), (6.0, 7.0), (30.0, 7.0), (65.9, 7.0), (66.0, 7.0))
    for now, percent in moments:
        clock.now = now
        lines(wait_at(percent=percent, elapsed=now))
    for now, phase in ((66.5, "compiling"), (67.0, "compiling")):
        clock.now = now
        lines(wait_at(phase=phase, percent=None, elapsed=now))
    assert [
        line.split(" · ")[0] + " " + line.split(" · ")[2].split(",")[0] for line in stream.getvalue().splitlines()
    ] == [
        "qwen: loading weights 2 % 1 s",
        "qwen: loading weights 7 % 6 s",
        "qwen: loading weights 7 % 1 m 06 s",
        "qwen: compiling 1 m 07 s",
    ]


def test_a_terminal_that_is_gone_does_not_break_off_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: t.List[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    clock = Clock()
    lines = _agent_wait._Lines("qwen", clock)
    for now, percent in ((5.0, 10.0), (10.0, 20.0)):
        clock.now = now
        lines(wait_at(percent=percent))
    assert ["%d %%" % percent in text for percent, text in zip((10, 20), tried)] == [True, True]


def test_a_terminal_gets_a_bar_of_the_whole_load(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    stream, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", stream)
    with _agent_wait._Bar(tqdm, "qwen", clock) as bar:
        for now, overall in ((1.0, 6.0), (1.1, 7.0), (2.0, None), (3.0, 60.0)):
            clock.now = now
            bar(wait_at(overall=overall, percent=11.0))
            assert bar._bar.n == {1.1: 6, 2.0: 11}.get(now, int(overall or 0))
    text = stream.getvalue()
    assert "| qwen: loading weights 11 % · memory 512 MiB · 5 s, moved 1 s ago" in text
    assert "\r" in text
    assert "\n" not in text  # the answer is what stays


@pytest.mark.parametrize(("stream", "kind"), [(Terminal(), "_Bar"), (io.StringIO(), "_Lines")])
def test_which_of_them_it_is(monkeypatch: pytest.MonkeyPatch, seen: Seen, stream: io.StringIO, kind: str) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr", stream)
    _agent.main(["wait", "qwen"])
    assert type(seen.watched[0]).__name__ == kind


def test_without_the_library_of_the_bar_there_are_lines(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("sys.stderr", Terminal())
    _agent.main(["wait", "qwen"])
    assert type(seen.watched[0]).__name__ == "_Lines"


# What it says


def test_an_answer_says_its_verdict_once(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    seen.answers[0] = answer("stalled", msg='the unit "x.service" is stalled: for 60 s nothing moved: why')
    assert _agent.main(["wait", "qwen"]) == 1
    assert capsys.readouterr().out == 'stalled: the unit "x.service": for 60 s nothing moved: why\n'


def test_a_failure_tells_what_moved_and_how_far_it_came(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [{"name": "unit", "reached": True, "at": 0.1, "detail": ""}]
    facts = {"phase": "loading_weights", "percent": 40.0, "movement": {"cpu": 0.4}, "restarts": 0}
    seen.answers[0] = answer("progressing", tiers=tiers, **facts)
    assert _agent.main(["wait", "qwen"]) == 1
    assert capsys.readouterr().out.splitlines()[1:3] == ["at: loading weights 40 %", "moved: cpu 0.4 s ago"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            'there is nothing to wait for: give "unit" and "url", or a service whose definition has them',
            "there is nothing to wait for: give --unit and --url, or a service whose definition has them",
        ),
        (
            '"unit" is missing: without it the tier "unit" cannot be judged',
            '--unit is missing: without it the tier "unit" cannot be judged',
        ),
        ('"stall_timeout" (9 s) is above "timeout" (6 s)', "--stall-timeout (9 s) is above --timeout (6 s)"),
        ('"log_path" must be a path that begins with "/"', '--log-path must be a path that begins with "/"'),
        ('use the tier "model"', 'use the tier "model"'),
        ('the service "model" is not defined', 'the service "model" is not defined'),
        # A key of a definition is no option.
        ('"unit" in /etc/gpuops/services/q.json must be', '"unit" in /etc/gpuops/services/q.json must be'),
    ],
)
def test_wrong_use_is_said_in_the_words_of_the_command(
    seen: Seen, capsys: pytest.CaptureFixture[str], said: str, told: str
) -> None:
    seen.answers[0] = UsageError(said)
    assert _agent.main(["wait", "qwen"]) == 3
    assert capsys.readouterr().err == "gpuops: %s\n" % told


def test_a_remedy_is_said_in_the_words_of_the_command_and_what_the_engine_said_as_it_did(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    seen.answers[0] = answer("auth_error", msg='u is in an auth_error: it said "api_key"; next: give "api_key"')
    _agent.main(["wait", "qwen"])
    assert capsys.readouterr().out.endswith('it said "api_key"; next: give --api-key-file\n')


def test_every_option_of_the_module_has_a_name_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _agent.main(["wait", "--help"]) == 0
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    names = re.findall(r"[a-z_]+", _agent_wait.OPTION.pattern.partition('"(')[2].partition(')"')[0])
    assert {_agent_wait._spoken('"%s"' % name) for name in names} <= flags
    documented = set(yaml.safe_load(wait_model_ready.DOCUMENTATION)["options"])
    assert documented - OF_TASKS - {"service", "progress"} <= set(names)


@pytest.mark.parametrize("argv", [[], ["--json"], ["--no-progress"]])
@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_who_breaks_it_off_is_told_where_it_stood(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, argv: t.List[str], stream: io.StringIO
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr", stream)

    def run(_params: t.Any, check_mode: bool, warn: t.Any, watch: t.Any) -> t.Any:
        watch(wait_at(percent=37.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(_waiting, "run", run)
    assert _agent.main(["wait", "qwen", *argv]) == 130
    last = stream.getvalue().replace("\r", "\n").splitlines()[-1]
    assert last == "qwen: broken off at: loading weights 37 % · memory 512 MiB · 5 s, moved 1 s ago"


@pytest.mark.parametrize("error", [UsageError("no such thing"), ServingError("systemd does not answer", restarts=2)])
def test_an_error_has_all_that_an_answer_has(
    seen: Seen, capsys: pytest.CaptureFixture[str], error: ServingError
) -> None:
    seen.answers[0] = error
    _agent.main(["wait", "qwen", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert set(yaml.safe_load(wait_model_ready.RETURN)) <= set(document)
    assert (document["verdict"], document["restarts"]) == ("error", error.result.get("restarts", 0))
