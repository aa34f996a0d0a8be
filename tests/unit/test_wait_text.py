# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What people read of a wait."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _wait_text

LIVE: t.Dict[str, t.Any] = {
    "phase": "loading_weights",
    "percent": 63.4,
    "missing": "listener",
    "restarts": 0,
    "memory": 71204,
    "on_gpu": True,
    "moved": 2.1,
    "stall_timeout": 300.0,
    "elapsed": 252.0,
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "loading weights 63 % · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"on_gpu": False}, "loading weights 63 % · memory 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"percent": None, "memory": None}, "loading weights · 4 m 12 s, moved 2 s ago"),
        ({"restarts": 1}, "loading weights 63 % · GPU 71204 MiB · restarted once · 4 m 12 s, moved 2 s ago"),
        ({"restarts": 2}, "loading weights 63 % · GPU 71204 MiB · restarted 2 times · 4 m 12 s, moved 2 s ago"),
        ({"elapsed": 7325.0}, "loading weights 63 % · GPU 71204 MiB · 2 h 02 m, moved 2 s ago"),
        (
            {"moved": 65.0},
            "loading weights 63 % · GPU 71204 MiB · 4 m 12 s, nothing moved for 1 m 05 s (stalled at 5 m 00 s)",
        ),
        ({"moved": None, "memory": None}, "loading weights 63 % · 4 m 12 s"),
        ({"phase": "", "percent": None}, "starting, the port is not open · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"missing": "unit"}, "waiting for the unit · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
        # What the log said last is over when the port is open and the engine says that it is up.
        (
            {"phase": "started", "missing": "health", "percent": None},
            "the port is open, not healthy yet · GPU 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        ({"missing": "health"}, "loading weights 63 % · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
        ({"missing": "model"}, "healthy, the model is not listed yet · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
        (
            {"missing": "generation"},
            "the model is listed, waiting for a token · GPU 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        (
            {"missing": "generation", "asking": 12.4},
            "asking for a token, 12 s · GPU 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        # One that comes back at once is no news.
        (
            {"missing": "generation", "asking": 0.9},
            "the model is listed, waiting for a token · GPU 71204 MiB · 4 m 12 s, moved 2 s ago",
        ),
        ({"missing": ""}, "ready · GPU 71204 MiB · 4 m 12 s, moved 2 s ago"),
    ],
)
def test_a_line(change: t.Dict[str, t.Any], line: str) -> None:
    assert _wait_text.line({**LIVE, **change}) == line


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"elapsed": 900.0, "memory": 3, "moved": 9.0, "percent": 63.9}, ""),
        ({"percent": 64.0}, "little"),
        ({"percent": None}, "little"),
        ({"phase": "compiling"}, "much"),
        ({"missing": "health"}, ""),
        ({"missing": "generation"}, "much"),
        ({"restarts": 1}, "much"),
        ({"moved": 61.0}, "much"),
    ],
)
def test_what_is_a_change(change: t.Dict[str, t.Any], word: str) -> None:
    assert _wait_text.changed(_wait_text.key(LIVE), _wait_text.key({**LIVE, **change})) == word


def test_moving_again_is_no_great_matter() -> None:
    still = _wait_text.key({**LIVE, "moved": 61.0})
    assert _wait_text.changed(still, _wait_text.key(LIVE)) == "little"
    assert _wait_text.changed(still, _wait_text.key({**LIVE, "phase": "compiling"})) == "much"


def test_the_first_look_is_a_change() -> None:
    assert _wait_text.changed(None, _wait_text.key(LIVE)) == "much"


@pytest.mark.parametrize(("stall", "quiet"), [(300.0, 60.0), (60.0, 15.0), (10.0, 5.0), (1800.0, 360.0)])
def test_standing_still_is_told_long_before_it_is_a_stall(stall: float, quiet: float) -> None:
    for moved, still in ((quiet - 0.1, False), (quiet, True)):
        assert _wait_text.key({**LIVE, "stall_timeout": stall, "moved": moved})[2] is still


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"service": "qwen", "unit": "vllm.service", "url": "u"}, "qwen"),
        ({"service": None, "unit": "vllm.service", "url": "u"}, "vllm"),
        ({"unit": "vllm.scope"}, "vllm.scope"),
        ({"url": "http://gpu:8000"}, "http://gpu:8000"),
        # A secret in it is refused by the host, which is asked later.
        ({"url": "http://gpu:8000/v1?key=hunter2"}, "http://gpu:8000/v1"),
        ({"url": "http://gpu:8000/v1#hunter2"}, "http://gpu:8000/v1"),
        ({"url": "http://ops:hunter2@gpu:8000"}, ""),
        ({"url": "ops:hun?ter2@gpu:8000"}, ""),
        ({"url": "http://gpu/?key=a@hunter2"}, ""),
        ({}, ""),
    ],
)
def test_the_name_of_what_is_waited_for(params: t.Dict[str, t.Any], name: str) -> None:
    assert _wait_text.subject(params) == name


def test_the_end_of_a_wait_as_text() -> None:
    result = {
        "verdict": "dead",
        "tiers": [
            {"name": "unit", "reached": True, "at": 0.02, "detail": "active (running), main process 7"},
            {"name": "listener", "reached": None, "at": None, "detail": "not judged without a unit"},
            {"name": "health", "reached": False, "at": None, "detail": ""},
        ],
        "cause": {
            "kind": "gpu_out_of_memory",
            "line": "CUDA out of memory.",
            "figures": {"free_mib": 3170.3, "total_mib": 81559.0},
            "holders": ['process 9 "python3" holds 78102 MiB on GPU 0'],
        },
        "log_tail": ["line %d" % number for number in range(12)],
        "phase": "loading_weights",
        "percent": 16.5,
        "restarts": 1,
        "movement": {"gpu_memory": 31.2, "cpu": 0.4},
    }
    assert _wait_text.lines(result) == [
        "unit        reached at 0 s: active (running), main process 7",
        "listener    not judged: not judged without a unit",
        "health      not reached",
        "at: loading weights 16.5 %, restarted once",
        "moved: cpu 0.4 s ago, gpu memory 31.2 s ago",
        "cause: gpu_out_of_memory: CUDA out of memory.",
        "memory: free 3170.3 MiB, total 81559 MiB",
        'holds the GPU: process 9 "python3" holds 78102 MiB on GPU 0',
        *("log: line %d" % number for number in range(2, 12)),
    ]
    assert _wait_text.lines({"verdict": "ready", "log_tail": ["x"]}) == []
    quiet = {**result, "phase": "", "percent": None, "restarts": 0, "movement": {}, "log_tail": []}
    quiet["cause"] = {"kind": "gpu_out_of_memory", "line": "x", "holders": []}
    assert _wait_text.lines(quiet)[3:] == [
        "moved: nothing",
        "cause: gpu_out_of_memory: x",
        "holds the GPU: no other process that can be seen",
    ]
    assert _wait_text.lines({"verdict": "error"}) == []


def test_how_long_a_token_is_asked_for_is_no_change_by_itself() -> None:
    asking = [_wait_text.key({**LIVE, "missing": "generation", "asking": seconds}) for seconds in (None, 5.0, 6.0)]
    assert _wait_text.changed(asking[0], asking[1]) == "much"
    assert _wait_text.changed(asking[1], asking[2]) == ""


def test_a_model_that_is_not_listed_is_named_with_those_that_are() -> None:
    unlisted = 'the model "foo" is not listed yet: there are "qwen3-32b"'
    assert _wait_text.stage({"missing": "model", "unlisted": unlisted}) == unlisted
    assert _wait_text.stage({"missing": "model", "unlisted": ""}) == "healthy, the model is not listed yet"
    assert len(_wait_text.stage({"missing": "model", "unlisted": unlisted * 100})) <= 120
    assert _wait_text.stage({"missing": "generation", "unlisted": unlisted}) != unlisted


UNIT = {"name": "gpuops-qwen.service", "load_state": "loaded", "active_state": "active", "main_pid": 4711}
RESULT: t.Dict[str, t.Any] = {
    "verdict": "stalled",
    "msg": 'for 300 s nothing moved: the tier "listener" is not reached: nothing listens on port 8002',
    "tier_reached": "unit",
    "phase": "loading_weights",
    "percent": 16.4,
    "movement": {"log": 300.2},
    "cause": None,
    "log_tail": ["x"],
    "unit_state": UNIT,
}
NAMED = _wait_text.Named("qwen", "gpuops-qwen.service", "http://127.0.0.1:8002", "", True, True)
HEAD = 'the service "qwen" (unit "gpuops-qwen.service") '
FAILED = {"verdict": "dead", "msg": 'the unit "gpuops-qwen.service" failed: boom'}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {},
            'is stalled: for 300 s nothing moved, at loading weights 16 %: the tier "listener" is not reached: nothing '
            "listens on port 8002; next: py-spy dump --pid 4711, then gpuops stop qwen",
        ),
        # Where the log is no place, it is none.
        (
            {"phase": "started", "unit_state": {**UNIT, "main_pid": 0}},
            'is stalled: for 300 s nothing moved: the tier "listener" is not reached: nothing listens on port 8002; '
            "next: journalctl -u gpuops-qwen.service",
        ),
        (
            {
                "verdict": "progressing",
                "msg": 'not ready after 60 s, but something moved 0 s ago: the tier "listener" is not reached',
                "movement": {"cpu": 0.3, "gpu_memory": 0.9, "log": 31.0},
                "percent": None,
            },
            "is progressing: not ready after 60 s, but something moved 0 s ago (cpu, gpu memory), at loading weights: "
            'the tier "listener" is not reached; next: wait again with a longer "timeout"',
        ),
        (
            {"verdict": "progressing", "msg": 'not ready at this moment: the tier "listener" is not reached'},
            'is progressing: not ready at this moment, at loading weights 16 %: the tier "listener" is not reached',
        ),
        (
            {
                "verdict": "restart_loop",
                "msg": 'the unit "gpuops-qwen.service" was restarted 3 times: out of memory',
            },
            "is in a restart_loop: it was restarted 3 times: out of memory; next: gpuops stop qwen",
        ),
        (
            {**FAILED, "unit_state": {**UNIT, "active_state": "failed"}},
            "is dead: it failed, at loading weights 16 %: boom; next: journalctl -u gpuops-qwen.service",
        ),
        (
            {
                "verdict": "dead",
                "msg": 'the unit "gpuops-qwen.service" is inactive, and nothing is about to start it',
                "unit_state": {**UNIT, "active_state": "inactive"},
                "phase": "",
                "log_tail": [],
            },
            "is dead: it is inactive, and nothing is about to start it; next: systemctl start gpuops-qwen.service",
        ),
        (
            {
                "verdict": "dead",
                "msg": 'the unit "gpuops-qwen.service" is inactive and masked, and nothing is about to start it',
                "unit_state": {**UNIT, "active_state": "inactive", "load_state": "masked"},
                "phase": "",
            },
            "is dead: it is inactive and masked, and nothing is about to start it; "
            "next: systemctl unmask gpuops-qwen.service",
        ),
        (
            {
                "verdict": "dead",
                "msg": 'the unit "gpuops-qwen.service" does not exist on this host',
                "unit_state": {**UNIT, "active_state": "inactive", "load_state": "not-found"},
                "phase": "",
            },
            "is dead: it does not exist on this host",
        ),
        (
            {"verdict": "dead", "msg": "u says that the engine is dead: status 503", "tier_reached": "listener"},
            "is dead: u says that the engine is dead, at loading weights 16 %: status 503; next: gpuops stop qwen",
        ),
        (
            {"verdict": "wrong_server", "msg": 'port 8002 belongs to another process than the unit\'s: 9 "ui"'},
            'has a wrong_server: port 8002 belongs to another process than the unit\'s: 9 "ui"',
        ),
        (
            {"verdict": "wedged", "msg": "the engine does not generate: no answer", "tier_reached": "model"},
            "is wedged: the engine does not generate: no answer; next: py-spy dump --pid 4711, then gpuops stop qwen",
        ),
        (
            {"verdict": "auth_error", "msg": "u answers with status 401: the API key is refused"},
            'has an auth_error: u answers with status 401: the API key is refused; next: give another "api_key"',
        ),
        (
            {"verdict": "ready", "msg": 'the service is ready: the tier "generation" is reached'},
            'is ready: the tier "generation" is reached',
        ),
    ],
)
def test_every_end_names_what_was_waited_for_its_verdict_and_its_place(change: t.Dict[str, t.Any], said: str) -> None:
    result = {**RESULT, **change}
    once = str(result["msg"]).startswith("not ready at this moment")
    text = _wait_text.sentence(result, NAMED._replace(once=once))
    assert text == HEAD + said
    # A command says the verdict first, and once.
    told = _wait_text.answer({**result, "msg": text})
    assert told == "%s: %s: %s" % (result["verdict"], HEAD.strip(), said.partition(": ")[2])


def test_every_verdict_of_a_wait_has_its_words() -> None:
    words = ("ready", "progressing", "stalled", "restart_loop", "dead", "wrong_server", "wedged", "auth_error")
    assert tuple(_wait_text.IS) == (*words, "unknown")
    assert all(word in phrase for word, phrase in _wait_text.IS.items())


@pytest.mark.parametrize(
    ("named", "head", "end"),
    [
        (_wait_text.Named("", "al"), 'the unit "gpuops-qwen.service"', "gpuops stop --unit gpuops-qwen.service"),
        (_wait_text.Named("q", "al"), 'the service "q" (unit "gpuops-qwen.service")', "--unit gpuops-qwen.service"),
        (_wait_text.Named("", "", "http://h:1"), 'the engine at "http://h:1"', "on port 8002"),
        (_wait_text.Named("q", "", "http://h:1"), 'the service "q", the engine at "http://h:1",', "on port 8002"),
    ],
)
def test_the_names_are_those_of_systemd_and_what_is_not_defined_is_stopped_by_its_unit(
    named: _wait_text.Named, head: str, end: str
) -> None:
    text = _wait_text.sentence({**RESULT, "unit_state": UNIT if named.unit else None}, named)
    assert text.startswith(head + " is stalled: ")
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("holders", "said"),
    [
        (None, ""),
        ([], "; no other process is seen to hold the GPUs"),
        (["process 9 holds 5 MiB"], "; process 9 holds 5 MiB"),
        (["process 9 holds 5 MiB", "b", "c"], "; process 9 holds 5 MiB, and 2 more"),
    ],
)
def test_the_sentence_says_who_holds_the_gpus(holders: t.Optional[t.List[str]], said: str) -> None:
    cause: t.Dict[str, t.Any] = {"kind": "gpu_out_of_memory", "line": "boom"}
    cause.update({} if holders is None else {"holders": holders})
    state = {**UNIT, "active_state": "failed"}
    text = _wait_text.sentence({**RESULT, **FAILED, "cause": cause, "unit_state": state, "phase": ""}, NAMED)
    assert text == HEAD + "is dead: it failed: boom%s; next: journalctl -u gpuops-qwen.service" % said


def test_a_log_file_is_shown_instead_of_the_journal_and_a_reason_is_no_page() -> None:
    result = {**RESULT, "msg": "for 300 s nothing moved: " + "x" * 5000, "unit_state": {**UNIT, "main_pid": 0}}
    text = _wait_text.sentence(result, NAMED._replace(log_path="/var/log/qwen"))
    assert text.endswith("xxx...; next: tail /var/log/qwen")
    assert len(text) < 600


def test_who_has_given_no_key_is_told_to_give_one() -> None:
    result = {**RESULT, "verdict": "auth_error", "msg": "u answers with status 401"}
    assert _wait_text.sentence(result, NAMED._replace(keyed=False)).endswith('; next: give "api_key"')


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"service": "qwen", "unit": None, "url": "u"}, 'the service "qwen"'),
        ({"service": "qwen", "unit": "x.service"}, 'the service "qwen" (unit "x.service")'),
        ({"unit": "x.service", "url": "u"}, 'the unit "x.service"'),
        ({"url": "http://h:1/v1?key=hunter2"}, 'the engine at "http://h:1/v1"'),
        ({"url": "http://ops:hunter2@h:1"}, "the engine"),
        ({}, "the engine"),
    ],
)
def test_what_is_waited_for_in_a_sentence_of_the_controller(params: t.Dict[str, t.Any], name: str) -> None:
    assert _wait_text.named(params) == name
