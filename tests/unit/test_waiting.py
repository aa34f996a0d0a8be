# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A wait from its options: what is refused before anything is touched, its slices, and the holders at its end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import typing as t
from pathlib import Path

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _foreign,
    _gpu,
    _http,
    _selection,
    _service,
    _systemd,
    _target,
    _tiers,
    _wait_request,
    _wait_state,
    _waiting,
)
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import LATE
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_device import Device, Holder, Identity
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener
from service import Service, changed, listing, loading

GIVEN: t.Dict[str, t.Any] = {
    "service": None,
    "unit": "x.service",
    "url": "http://127.0.0.1:8000",
    "engine": "vllm",
    "profile": None,
    "model": None,
    "gpus": None,
    "log_path": None,
    "tier": "generation",
    "timeout": None,
    "stall_timeout": None,
    "generation_timeout": 60.0,
    "max_restarts": 3,
    "interval": 1.0,
    "progress": True,
    "reconnect_timeout": 60.0,
    "api_key": None,
    "headers": None,
    "validate_certs": True,
    "ca_path": None,
    "resume": None,
}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on this host may be read."""

    def touch(*_words: t.Any, **_more: t.Any) -> t.Any:
        raise AssertionError("it was touched")

    monkeypatch.setattr(_systemd, "call", touch)
    monkeypatch.setattr(_selection, "mark_of", touch)
    monkeypatch.setattr(_target.HostTarget, "check_here", touch)


@pytest.mark.parametrize(
    ("options", "msg"),
    [
        (
            {"unit": None, "url": None},
            'there is nothing to wait for: give "unit" and "url", or a service whose definition has them',
        ),
        ({"url": None}, '"url" is missing: without it only the tier "unit" can be waited for'),
        ({"unit": None, "tier": "unit"}, '"unit" is missing: without it the tier "unit" cannot be judged'),
        ({"unit": None, "tier": "listener"}, '"unit" is missing: without it the tier "listener" cannot be judged'),
        (
            {"url": "127.0.0.1:8000"},
            'the URL "127.0.0.1:8000" is not usable: it must be http://HOST:PORT or https://HOST:PORT',
        ),
        (
            {"timeout": 60.0, "stall_timeout": 90.0},
            '"stall_timeout" (90 s) is above "timeout" (60 s), so it could never end the wait: make it smaller',
        ),
        (
            {"tier": "token"},
            'the tier "token" is not known: use one of unit, listener, health, model, generation',
        ),
        ({"max_restarts": 0}, '"max_restarts" must be at least 1, not 0'),
        ({"reconnect_timeout": -1.0}, '"reconnect_timeout" must be at least 0, not -1'),
        ({"interval": 0.0}, '"interval" must be more than 0, not 0'),
        ({"log_path": "logs/x"}, '"log_path" must be a path that begins with "/", not "logs/x"'),
        ({"log_path": "/x\0y"}, '"log_path" holds a null byte: leave it out'),
        ({"ca_path": "/x\0y"}, '"ca_path" cannot be used: its name holds a null byte'),
        ({"ca_path": "/dev/zero"}, '"ca_path" cannot be used: "/dev/zero" is neither a regular file nor a folder'),
        ({"log_path": "/x", "unit": None}, '"log_path" is the log of the unit: give "unit" too'),
        (
            {"api_key": "a\nb"},
            "the API key is not usable: it holds a line break or another character that no HTTP header can carry",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence_before_anything_is_touched(
    untouched: None, options: t.Dict[str, t.Any], msg: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _waiting.plan({**GIVEN, **options})
    assert caught.value.message == msg


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "vlm"}, 'the engine "vlm" is not known: use one of '),
        ({"profile": {"helth": "/"}}, '"helth" is no field of it: use "health"'),
        ({"profile": {"endpoints": []}}, "endpoints"),
        ({"gpus": ["0", "0"]}, "0"),
        ({"unit": "a b.service"}, "a b.service"),
        ({"ca_path": "/nowhere/ca.pem"}, '"ca_path" cannot be used: "/nowhere/ca.pem" cannot be read: No such file'),
        ({"ca_path": os.path.abspath(__file__)}, "holds no certificate in PEM form"),
    ],
)
def test_what_other_rooms_refuse_is_refused_before_anything_is_touched_too(
    untouched: None, options: t.Dict[str, t.Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _waiting.plan({**GIVEN, **options})
    assert said in caught.value.message


def test_a_certificate_and_a_folder_of_them_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout k -out ca.pem -subj /CN=x -days 2"
    )
    subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
    for path in (tmp_path / "ca.pem", tmp_path):
        assert _waiting.plan({**GIVEN, "ca_path": str(path)}).target.access.ca_path == str(path)


def test_a_stall_timeout_is_only_compared_with_a_timeout_that_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
    assert _waiting.plan({**GIVEN, "timeout": 60.0}).options.stall_timeout == 300.0
    assert _waiting.plan({**GIVEN, "timeout": 60.0, "stall_timeout": 60.0}).options.stall_timeout == 60.0


@pytest.mark.parametrize(
    ("given", "of_definition", "stall"),
    [
        # What was not chosen for this wait makes room for what was.
        ({"timeout": 60.0, "stall_timeout": 300.0}, ["stall_timeout"], 60.0),
        ({"timeout": 900.0, "stall_timeout": 1000.0}, ["timeout"], 900.0),
        ({"timeout": 60.0, "stall_timeout": 300.0}, ["timeout", "stall_timeout"], 60.0),
        ({"timeout": 600.0, "stall_timeout": 300.0}, ["stall_timeout"], 300.0),
        ({"timeout": 60.0, "stall_timeout": 300.0}, [], None),
    ],
)
def test_a_time_that_the_definition_brings_refuses_none_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, given: t.Dict[str, t.Any], of_definition: t.List[str], stall: t.Optional[float]
) -> None:
    monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
    params = {**GIVEN, **given, "of_definition": of_definition}
    if stall is None:
        with pytest.raises(UsageError):
            _waiting.plan(params)
    else:
        assert _waiting.plan(params).options.stall_timeout == stall


@pytest.mark.parametrize("given", [{}, {"timeout": 60.0}, {"model": "m"}, {"gpus": ["0"], "log_path": "/x"}])
def test_a_service_that_is_not_defined_is_named_whatever_else_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: t.Dict[str, t.Any]
) -> None:
    (tmp_path / "qwen.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(_service, "FOLDER", str(tmp_path))
    monkeypatch.setattr(_service.load, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(_service.names, "__defaults__", (str(tmp_path),))
    with pytest.raises(UsageError) as caught:
        _waiting.plan(
            _service.fill(
                {**GIVEN, "unit": None, "url": None, "service": "qwne", **given}, _waiting.FILL, str(tmp_path)
            )
        )
    assert caught.value.message == (
        'the service "qwne" is not defined on this host: %s/qwne.json does not exist (defined here: "qwen")' % tmp_path
    )


def test_a_name_that_nobody_resolves_costs_no_more_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: t.List[float] = []

    def resolve(host: str, timeout: float) -> t.List[str]:
        given.append(timeout)
        raise ServingError("no answer")

    monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
    monkeypatch.setattr(_target._listening, "addresses_of", resolve)
    for timeout in (3.0, 1800.0):
        with pytest.raises(ServingError):
            _waiting.run({**GIVEN, "url": "http://nowhere.example", "timeout": timeout})
    assert given == [pytest.approx(3.0, abs=1.1), _target.RESOLVE_PATIENCE]


@pytest.mark.parametrize("resume", [None, _wait_request.request(0.0, False)])
def test_the_time_that_a_name_takes_is_of_the_timeout(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, resume: t.Optional[str]
) -> None:
    plan = _waiting.plan

    def slow(params: t.Any) -> t.Any:
        planned.service.clock.sleep(8.0)
        return plan(params)

    monkeypatch.setattr(_waiting, "plan", slow)
    loading(planned.service, 100)
    found = planned.run(timeout=10.0, stall_timeout=10.0, resume=resume)
    assert (found["verdict"], found["elapsed"]) == ("stalled", pytest.approx(10.0, abs=0.5))


class Planned:
    """A made-up service in the place of the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = Service()
        self.service.name, self.service.url = "x.service", GIVEN["url"]  # type: ignore[attr-defined]
        monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
        monkeypatch.setattr(_wait_state.time, "process_time", lambda: 0.4)
        real = _waiting.plan

        def plan(params: t.Any) -> t.Any:
            return real(params)._replace(target=self.service)

        monkeypatch.setattr(_waiting, "plan", plan)
        self.warned: t.List[str] = []

    def run(self, check_mode: bool = False, **options: t.Any) -> t.Dict[str, t.Any]:
        return _waiting.run(
            {**GIVEN, "timeout": 600.0, "stall_timeout": 60.0, **options},
            check_mode,
            warn=self.warned.append,
            clock=self.service.clock,
        )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(monkeypatch)


def test_without_a_slice_it_is_one_call_and_its_warnings_are_told(planned: Planned) -> None:
    loading(planned.service, 30)
    planned.service.warnings.append("the journal cannot be read")
    found = planned.run()
    assert (found["verdict"], found["tier_reached"]) == ("ready", "generation")
    assert "resume" not in found
    assert planned.warned == ["the journal cannot be read"]


@pytest.mark.parametrize(
    "given", [{"api_key": "sk-0123456789"}, {"headers": {"Authorization": "Bearer sk-0123456789"}}]
)
def test_the_answer_quotes_no_secret_that_the_engine_has_logged(planned: Planned, given: t.Dict[str, t.Any]) -> None:
    service = planned.service
    loading(service, 100)
    service.lines = lambda _now: [
        "server_args: api_key='sk-0123456789'",
        "[Errno 98] address already in use: sk-0123456789",
    ]
    service.state = lambda now: changed(active_state="failed", main_pid=0) if now > 1 else changed()
    found = planned.run(**given)
    assert (found["verdict"], found["cause"]["kind"]) == ("dead", "port_in_use")
    assert "0123456789" not in str(found)
    assert found["log_tail"][0] == "server_args: api_key='********'"
    assert found["cause"]["line"] in found["msg"]


KEY = "sk-zyxwvutsrqponmlk"  # no number of a result can look like a part of it
ECHO = "no such thing: Authorization: Bearer %s; " % KEY


def echoes(planned: Planned, what: str) -> None:
    """A service that lets the key out at one place."""
    service = planned.service
    loading(service, 100)
    if what == "the log":
        service.lines = lambda _now: [ECHO]
    elif what == "a long line":
        # Each a little longer, so that every cut is in the middle of a key in one of them.
        service.lines = lambda _now: ["." * begin + " " + KEY for begin in range(975, 1002)]
    elif what == "the last word":
        service.lines = lambda _now: [ECHO]
        failed = changed(active_state="failed", main_pid=0, exec_main_code=1)
        service.state = lambda now: failed if now > 1 else changed()
    elif what == "the listener":
        service.port = lambda _now: Listener("foreign", ECHO)
    elif what == "the health":
        service.port = lambda _now: Listener("owned")
        service.health = lambda _now: _http.Answer("u", "broken", error=ECHO)
    elif what == "the models":
        service.port, service.health = (lambda _now: Listener("owned")), (lambda _now: _http.Answer("u", status=200))
        service.models = lambda _now: listing(ECHO, KEY)
    else:
        service.port, service.health = (lambda _now: Listener("owned")), (lambda _now: _http.Answer("u", status=200))
        service.models = lambda _now: listing(KEY if what == "the name" else "m")
        service.token = lambda _now: Side("error_response", status=500, error="status 500: " + ECHO)
    if what == "a warning":
        service.warnings.append(ECHO)


PLACES = [
    *("the log", "a long line", "the last word", "the listener", "the health", "the models", "the name", "the token"),
    "a warning",
]
# Whoever loads models while it runs is not judged by its first list.
ASKED = {"the models": {"model": "n", "engine": "openai"}}


@pytest.mark.parametrize("what", PLACES)
def test_nothing_of_an_answer_quotes_a_secret(planned: Planned, what: str) -> None:
    echoes(planned, what)
    found = planned.run(api_key=KEY, timeout=20.0, stall_timeout=10.0, **ASKED.get(what, {}))
    assert "zyxwv" not in str(found) + str(planned.warned)
    assert _foreign.MASK in str(found) + str(planned.warned)


@pytest.mark.parametrize("what", PLACES)
def test_what_a_slice_hands_on_quotes_no_secret(planned: Planned, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    handed: t.List[str] = []
    pack = _wait_request.pack
    monkeypatch.setattr(_wait_request, "pack", lambda content: handed.append(json.dumps(content)) or pack(content))
    echoes(planned, what)
    token = ""
    for _slice in range(5):
        request = _wait_request.request(planned.service.clock.now, True, token)
        found = planned.run(api_key=KEY, timeout=200.0, resume=request, **ASKED.get(what, {}))
        token = found.get("resume", "")
        if not token:
            break
    assert handed or what == "the listener"  # which ends it at once
    assert "zyxwv" not in "".join(handed)


@pytest.mark.parametrize("word", ["generation", "restart_loop", "wrong_server", "loading_weights", "gpu_out_of_memory"])
def test_a_header_blanks_no_word_of_ours(planned: Planned, word: str) -> None:
    plain = planned.run()
    planned.service.clock.now = 0.0
    found = planned.run(headers={"X-A": word})
    for name in ("verdict", "tier_reached", "phase"):
        assert found[name] == plain[name]
    assert [tier["name"] for tier in found["tiers"]] == [tier["name"] for tier in plain["tiers"]]


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2Jm", "a\nready: it is not", "m\u202e"])
def test_names_that_a_server_chose_break_no_answer(planned: Planned, name: str) -> None:
    planned.service.models = lambda _now: listing(name)
    for model in ("n", None):
        planned.service.clock.now = 0.0
        found = planned.run(model=model, timeout=5.0, stall_timeout=4.0)
        text = json.dumps(found, ensure_ascii=False)
        text.encode()
        assert not any(letter in str(found["msg"]) + found["tiers"][3]["detail"] for letter in "\n\x1b\u202e")


def test_a_server_that_lists_thousands_of_models_makes_no_long_answer(planned: Planned) -> None:
    planned.service.models = lambda _now: listing(*("model number %d" % number for number in range(14000)))
    assert len(json.dumps(planned.run(model="n", timeout=5.0, stall_timeout=4.0))) < 20000


def test_the_slices_tell_where_it_stands_and_the_last_one_answers(planned: Planned) -> None:
    loading(planned.service, 130)
    planned.service.cpu = lambda now: now
    planned.service.warnings.append("the journal cannot be read")
    token, seen = "", []
    while True:
        began = planned.service.clock.now
        found = planned.run(resume=_wait_request.request(began, True, token))
        if "resume" not in found:
            break
        assert found["verdict"] == "progressing"
        assert planned.warned == []
        token = found["resume"]
        live = _wait_request.live(token)
        assert live is not None
        seen.append((round(planned.service.clock.now - began), live["missing"], live["timeout"]))
    assert seen == [(1, "listener", 600.0), (55, "listener", 600.0), (55, "listener", 600.0)]
    assert found["verdict"] == "ready"
    assert found["elapsed"] == pytest.approx(130, abs=0.5)
    assert planned.warned == ["the journal cannot be read"]


@pytest.mark.parametrize("attempts", [False, True])
def test_the_lease_is_renewed_as_long_as_a_slice_lasts(planned: Planned, attempts: bool) -> None:
    planned.service.cpu = lambda now: now
    if attempts:
        # Each takes all its time, and nobody is asked meanwhile whether the slice is to end.
        planned.service.token = lambda now: Side("wedged", error="no answer within 60 s")
    else:
        loading(planned.service, 500)
    token, renewed, slices = "", [0.0], 0
    while planned.service.clock.now < 400:
        began = planned.service.clock.now
        found = _waiting.run(
            {**GIVEN, "timeout": 600.0, "resume": _wait_request.request(began, False, token)},
            tick=lambda: renewed.append(planned.service.clock.now),
            clock=planned.service.clock,
        )
        token, slices = found["resume"], slices + 1
    renewed.append(planned.service.clock.now)
    assert slices > 2
    assert max(after - before for before, after in zip(renewed, renewed[1:])) <= 20


def test_a_slice_that_nobody_waits_for_renews_no_lease(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    loading(planned.service, 30)
    monkeypatch.setattr(_waiting, "_unheard", lambda: planned.service.clock.now > 5)
    renewed: t.List[float] = []
    with pytest.raises(ServingError):
        _waiting.run(
            {**GIVEN, "timeout": 600.0, "resume": _wait_request.request(0.0, False)},
            tick=lambda: renewed.append(planned.service.clock.now),
            clock=planned.service.clock,
        )
    assert 4 < max(renewed) <= 5


class Lines:
    """What a slice wrote to its line, and when."""

    def __init__(self, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planned, self.opened, self.open = planned, [], 0
        self.written: t.List[t.Tuple[float, t.Dict[str, t.Any]]] = []
        monkeypatch.setattr(_waiting._wait_line, "opened", self)

    @contextlib.contextmanager
    def __call__(self, name: str) -> t.Iterator[t.Callable[[str], None]]:
        self.opened.append(name)
        self.open += 1
        try:
            yield lambda text: self.written.append((self.planned.service.clock.now, json.loads(text)))
        finally:
            self.open -= 1


@pytest.fixture
def written(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> Lines:
    return Lines(planned, monkeypatch)


NAME = "0123456789abcdef" * 2


def test_a_slice_that_is_read_while_it_lasts_writes_each_change_and_lasts(planned: Planned, written: Lines) -> None:
    service = planned.service
    loading(service, 200)
    service.lines = lambda now: ["Loading safetensors checkpoint shards: %d%% Completed" % (now / 2)]
    token, began = "", 0.0
    while began < _wait_state.LIVELY:
        token = planned.run(resume=_wait_request.request(began, True, token))["resume"]
        began = service.clock.now
    written.opened.clear()
    found = planned.run(resume=_wait_request.request(began, True, token, line=NAME, heard=True))
    assert service.clock.now - began == pytest.approx(_wait_state.LONGEST, abs=1.1)
    late = [when - 2 * live["percent"] for when, live in written.written if live["percent"]]
    assert len(late) >= 25
    # Half a percent a second, and one that has begun is not told as another.
    assert max(late) <= 2 + 5
    percents = [live["percent"] for _when, live in written.written]
    assert max(after - before for before, after in zip(percents, percents[1:])) <= 1.5
    assert written.written[-1][1].keys() == (_wait_request.live(found["resume"]) or {}).keys()
    assert (written.opened, written.open) == ([NAME], 0)


def test_a_request_for_a_token_that_takes_long_is_told_of(planned: Planned, written: Lines) -> None:
    """Nothing breaks it off, so nothing else can tell."""
    planned.service.cpu = lambda now: now
    planned.service.token = lambda now: Side("wedged", error="no answer within 60 s")
    token = planned.run(resume=_wait_request.request(0.0, True))["resume"]
    written.written.clear()
    planned.run(resume=_wait_request.request(planned.service.clock.now, True, token, line=NAME, heard=True))
    moments = [when for when, _live in written.written]
    assert len(moments) >= 3
    assert max(after - before for before, after in zip(moments, moments[1:])) < 25


def test_what_a_slice_writes_quotes_no_secret(planned: Planned, written: Lines) -> None:
    loading(planned.service, 100)
    secret = "loading_weights"  # as if somebody had chosen a word that is shown
    planned.service.lines = lambda _now: ["Loading safetensors checkpoint shards: 3% Completed"]
    planned.run(api_key=secret, resume=_wait_request.request(0.0, True, line=NAME))
    assert {live["phase"] for _when, live in written.written} == {_foreign.MASK}


@pytest.mark.parametrize("how", [{"lively": False}, {"lively": True}, {"lively": True, "whole": True}])
def test_nothing_is_written_for_nobody(planned: Planned, written: Lines, how: t.Dict[str, bool]) -> None:
    loading(planned.service, 30)
    planned.run(resume=_wait_request.request(0.0, **how))
    planned.run()
    planned.run(check_mode=True, resume=_wait_request.request(0.0, True, line=NAME))
    assert (written.written, written.opened) == ([], [""])


def test_the_line_of_a_slice_is_closed_when_nobody_waits_for_it(
    planned: Planned, written: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading(planned.service, 30)
    monkeypatch.setattr(_waiting, "_unheard", lambda: planned.service.clock.now > 5)
    with pytest.raises(ServingError):
        planned.run(resume=_wait_request.request(20.0, True, line=NAME, heard=True))
    assert (len(written.written), written.open) == (1, 0)


def test_all_that_is_left_of_a_wait_is_one_call(planned: Planned) -> None:
    loading(planned.service, 130)
    planned.service.cpu = lambda now: now
    token = planned.run(resume=_wait_request.request(0.0, True))["resume"]
    planned.service.clock.now = 40.0
    found = planned.run(resume=_wait_request.request(40.0, True, token, whole=True))
    assert (found["verdict"], found["elapsed"]) == ("ready", pytest.approx(130, abs=0.5))
    assert [tier["reached"] for tier in found["tiers"]] == [True] * 5


def test_a_call_for_the_rest_after_the_time_is_over_answers_at_once(planned: Planned) -> None:
    loading(planned.service, 130)
    planned.service.cpu = lambda now: now
    token = planned.run(resume=_wait_request.request(0.0, True))["resume"]
    # The host was halted for a while, and its clock with it.
    found = planned.run(resume=_wait_request.request(661.0, True, token, whole=True))
    assert (found["verdict"], found["elapsed"]) == ("progressing", pytest.approx(662, abs=2))
    assert "cpu" in found["movement"]
    assert planned.service.clock.now < 5


def test_a_name_is_resolved_in_the_first_slice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[str] = []
    monkeypatch.setattr(_selection, "mark_of", lambda *_words: None)
    monkeypatch.setattr(_target.HostTarget, "check_here", lambda self: asked.append(self.url))
    _waiting.plan(GIVEN)
    _waiting.plan({**GIVEN, "resume": _wait_request.request(0.0, True)})
    assert asked == [GIVEN["url"]] * 2
    _waiting.plan({**GIVEN, "resume": _wait_request.request(8.0, True, _wait_request.pack({}))})
    assert asked == [GIVEN["url"]] * 2


def test_check_mode_looks_once_whatever_is_asked(planned: Planned) -> None:
    loading(planned.service, 30)
    found = planned.run(check_mode=True, resume=_wait_request.request(0.0, True))
    assert (found["verdict"], planned.service.clock.now) == ("progressing", 0.0)
    assert "resume" not in found


def test_a_slice_that_nobody_waits_for_ends(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    loading(planned.service, 30)
    monkeypatch.setattr(_waiting, "_unheard", lambda: True)
    with pytest.raises(ServingError) as caught:
        planned.run(resume=_wait_request.request(0.0, True))
    assert caught.value.message == "nobody waits for the answer any more"
    assert planned.run()["verdict"] == "ready"  # a command whose output is closed is told by its own end


def test_a_closed_output_is_seen() -> None:
    reader, writer = os.pipe()
    try:
        assert not _waiting._unheard(writer)
        os.close(reader)
        assert _waiting._unheard(writer)
    finally:
        os.close(writer)


def holders(monkeypatch: pytest.MonkeyPatch, *found: Holder) -> t.List[t.Any]:
    asked: t.List[t.Any] = []

    def read(options: t.Any, limit: t.Optional[float] = None) -> t.Any:
        asked.append((options.gpus, limit))
        device = Device(0, "nvidia", holders=list(found))
        return _gpu.Reading("busy", devices=[device])

    monkeypatch.setattr(_gpu, "read", read)
    return asked


def holder(pid: int, unit: t.Optional[str]) -> Holder:
    found = Holder(pid, "compute", ["driver"], 78102)
    found.identity = Identity(1.0, "python3", "qwen", unit, None, "S", True)
    return found


def out_of_memory(service: Service) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB."
    service.state = lambda now: changed(active_state="failed", result="exit-code", exec_main_code=1, exec_main_status=1)
    service.lines = lambda now: [line] if now < 1 else []


def test_who_else_holds_the_gpus_is_named_when_their_memory_ran_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(planned.service)
    asked = holders(monkeypatch, holder(9, "old.service"), holder(10, "x.service"), Holder(11, "node", ["node"]))
    cause = planned.run(gpus=["0"])["cause"]
    assert (cause["kind"], cause["figures"]) == ("gpu_out_of_memory", {"wanted_mib": 44001.3})
    assert cause["holders"] == [
        'process 9 "python3" (user qwen, unit old.service) holds 78102 MiB on GPU 0',
        "process 11, which is not in the process table here, has the device node open on GPU 0",
    ]
    assert asked == [(["0"], _waiting.HOLDERS_LIMIT)]
    assert "; %s, and 1 more; next: " % cause["holders"][0] in planned.run(gpus=["0"])["msg"]


def test_nobody_else_on_the_gpus_is_said_too(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory(planned.service)
    holders(monkeypatch, holder(10, "x.service"))
    found = planned.run(gpus=["0"])
    assert found["cause"]["holders"] == []
    assert "; no other process is seen to hold the GPUs; next: " in found["msg"]


def test_who_holds_the_gpus_is_not_asked_for_long_at_the_end_of_the_time(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is one of all of the wait, and the last answer costs a second at most."""
    out_of_memory(planned.service)
    died = planned.service.state
    planned.service.state = lambda now: died(now) if now >= 6.0 else changed()
    planned.service.lines = lambda now: ["CUDA out of memory"] if now >= 6.0 else []
    loading(planned.service, 9999)
    asked = holders(monkeypatch)
    assert planned.run(gpus=["0"], timeout=6.5, stall_timeout=6.5)["verdict"] == "dead"
    assert asked == [(["0"], LATE)]


@pytest.mark.parametrize("resume", [None, _wait_request.request(0.0, True)])
def test_what_a_wait_opened_is_released_however_it_ends(planned: Planned, resume: t.Optional[str]) -> None:
    assert planned.run(resume=resume)["verdict"] == "ready"
    assert planned.service.closed == 1

    def broken(now: bool = False) -> t.Any:
        raise ServingError("no systemd")

    planned.service.unit = broken  # type: ignore[method-assign]
    with pytest.raises(ServingError):
        planned.run(resume=resume)
    assert planned.service.closed == 2


def test_whoever_watches_sees_it_while_a_token_is_asked_for(planned: Planned) -> None:
    planned.service.token_takes = 8.0
    seen: t.List[t.Any] = []
    _waiting.run({**GIVEN}, watch=lambda wait: seen.append(wait.live()["asking"]), clock=planned.service.clock)
    assert [asking for asking in seen if asking is not None] == [float(at) for at in range(1, 9)]


def test_a_slice_that_hands_on_releases_too(planned: Planned) -> None:
    loading(planned.service, 9999)
    planned.service.cpu = lambda now: now
    found = planned.run(resume=_wait_request.request(0.0, True))
    assert ("resume" in found, planned.service.closed) == (True, 1)


def test_who_holds_the_gpus_is_not_asked_for_nothing(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = holders(monkeypatch)
    assert planned.run()["cause"] is None
    out_of_memory(planned.service)
    planned.service.clock.now = 0.0
    assert "holders" not in planned.run(gpus=[])["cause"]
    assert asked == []


def test_gpus_that_cannot_be_asked_are_no_reason_to_fail(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_words: t.Any) -> t.Any:
        raise ServingError("no answer")

    out_of_memory(planned.service)
    monkeypatch.setattr(_gpu, "read", read)
    found = planned.run()
    # To see nobody is another thing than not to see.
    assert "holders" not in found["cause"]
    assert "hold the GPUs" not in found["msg"]


def test_the_sentence_names_the_service_the_unit_and_the_place(planned: Planned) -> None:
    loading(planned.service, 9999)
    planned.service.lines = lambda now: ["Loading safetensors checkpoint shards: 16% Completed"] if now < 1 else []
    assert planned.run(service="qwen", timeout=60.0, stall_timeout=30.0)["msg"] == (
        'the service "qwen" (unit "x.service") is stalled: for 30 s nothing moved, at loading weights 16 %: the tier '
        '"listener" is not reached: nothing listens on the port; '
        "next: py-spy dump --pid 10, then gpuops stop --unit x.service"
    )


def test_the_sentence_quotes_no_secret_not_even_where_it_is_cut(planned: Planned) -> None:
    loading(planned.service, 100)
    secret = "sk-" + "0123456789" * 4
    planned.service.lines = lambda _now: ["[Errno 98] address already in use: %s%s" % ("x" * 340, secret)]
    planned.service.state = lambda now: changed(active_state="failed", main_pid=0) if now > 1 else changed()
    found = planned.run(api_key=secret)
    assert found["verdict"] == "dead"
    assert "sk-0" not in found["msg"]


@pytest.mark.parametrize("resume", [None, _wait_request.request(0.0, True)])
def test_without_the_rights_to_see_who_listens_it_is_unknown(planned: Planned, resume: t.Optional[str]) -> None:
    planned.service.port = lambda now: Listener("unseen", "who listens cannot be seen: run as root, or with become")
    found = planned.run(resume=resume)
    assert (found["verdict"], found["tier_reached"]) == ("unknown", "unit")
    assert found["msg"].startswith('the unit "x.service" is in an unknown state: ')
    assert found["msg"].endswith("run as root, or with become")


def test_one_look_advises_no_longer_wait(planned: Planned) -> None:
    loading(planned.service, 100)
    found = planned.run(check_mode=True)
    assert (found["verdict"], "; next: " in found["msg"]) == ("progressing", False)
    planned.service.clock.now = 0.0
    planned.service.state = lambda now: changed(active_state="inactive", main_pid=0, awaited="x.socket")
    found = planned.run(check_mode=True)
    assert (found["verdict"], "; next: " in found["msg"]) == ("progressing", False)
    planned.service.clock.now = 0.0
    planned.service.cpu = lambda now: now
    loading(planned.service, 100)
    planned.service.state = lambda now: changed()
    assert planned.run(timeout=10.0, stall_timeout=10.0)["msg"].endswith('; next: wait again with a longer "timeout"')


def test_a_dead_unit_is_the_reason_of_its_tier(planned: Planned) -> None:
    planned.service.state = lambda now: changed(active_state="inactive", main_pid=0)
    found = planned.run()
    said = 'the unit "x.service" is inactive, and nothing is about to start it'
    assert (found["verdict"], found["tiers"][0]["detail"]) == ("dead", said)


@pytest.mark.parametrize("log", [[], ["Loading safetensors checkpoint shards: 98% Completed"]])
def test_what_generates_is_complete_whatever_its_log_said_last(planned: Planned, log: t.List[str]) -> None:
    loading(planned.service, 30)
    planned.service.lines = lambda now: log if now < 20 else []
    assert planned.run()["percent"] == 100.0
    planned.service.clock.now = 0.0
    assert planned.run(tier="listener")["percent"] == (98.0 if log else None)


@pytest.mark.parametrize("resume", [None, _wait_request.request(0.0, True)])
def test_an_error_of_the_wait_brings_what_was_found_before(planned: Planned, resume: t.Optional[str]) -> None:
    loading(planned.service, 100)
    planned.service.lines = lambda now: ["Loading safetensors checkpoint shards: 16% Completed; key sk-0123456789"]

    def tick() -> None:
        if planned.service.clock.now > 0.5:
            raise ServingError("the lease is lost", verdict="refused")

    with pytest.raises(ServingError) as caught:
        _waiting.run({**GIVEN, "api_key": "sk-0123456789", "resume": resume}, tick=tick, clock=planned.service.clock)
    found = caught.value.result
    assert (found["verdict"], found["percent"], found["tier_reached"]) == ("refused", 16.0, "unit")
    assert set(_tiers.NOTHING) <= set(found)
    assert "0123456789" not in str(found)
