# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http, _load
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock, Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

VLLM = _engines.PROFILES["vllm"]
TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b}\\"c"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 1
vllm:num_requests_waiting{engine="0"} 0.0 1712345678901
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 7
broken line without a value
vllm:estimated NaN
"""


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_metrics_of_several_ranks_add_up_and_the_fullest_cache_counts() -> None:
    load = _load.load_of(VLLM, _load.parse(TEXT))
    assert load == _load.Load(4.0, 0.0, 0.5, {"vllm:generation_tokens_total": 1500.0})


def load(running: float = 0, waiting: float = 0, tokens: float = 0) -> _load.Reading:
    return _load.Reading(_load.Load(running, waiting, None, {"tokens": tokens}))


ABSENT = _load.Reading(None, "absent", "refused")
SILENT = _load.Reading(None, "unmeasured", "status 404")
UNKNOWN = _load.Reading(None, "unknown", "the connection was closed without an answer")


def wait(readings: t.List[_load.Reading], timeout: float = 10) -> _load.IdleWait:
    left = list(readings)
    return _load.wait_idle(lambda _left: left.pop(0) if len(left) > 1 else left[0], Deadline(timeout, FakeClock()), 1)


@pytest.mark.parametrize(
    ("readings", "verdict", "count"),
    [
        ([load(), load()], "idle", 2),
        ([load(2), load(0, 1), load(), load()], "idle", 4),
        # One quiet look between two busy ones is not idle.
        ([load(), load(1), load(), load()], "idle", 4),
        # The gauges say zero, but tokens come out: somebody is being served.
        ([load(tokens=1), load(tokens=2), load(tokens=3), load(tokens=3)], "idle", 4),
        ([load(1)], "busy", 11),
        ([ABSENT], "absent", 2),
        # One refusal may be a restart, and a server that hangs up is there.
        ([ABSENT, load(1), ABSENT, UNKNOWN, ABSENT, ABSENT], "absent", 6),
        ([ABSENT, load(1)], "busy", 11),
        ([UNKNOWN], "unknown", 11),
        # Waiting makes no metrics appear.
        ([SILENT], "unknown", 2),
        ([SILENT, load(), load()], "idle", 3),
        ([load(), _load.Reading(None, "unknown", "slow"), load(), load()], "idle", 4),
    ],
)
def test_idle_is_two_quiet_looks_in_a_row(readings: t.List[_load.Reading], verdict: str, count: int) -> None:
    found = wait(readings)
    assert (found.verdict, found.readings) == (verdict, count)


@pytest.mark.parametrize(
    ("readings", "timeout", "verdict"),
    [
        ([load()], 2, "idle"),
        ([load(1)], 2, "busy"),
        ([load(1), load(), load()], 2, "idle"),
        ([UNKNOWN], 2, "unknown"),
        ([ABSENT], 0, "absent"),
        ([load()], 0, "idle"),
    ],
)
def test_a_long_interval_never_outlasts_the_time_that_is_left(
    readings: t.List[_load.Reading], timeout: float, verdict: str
) -> None:
    left, clock = list(readings), FakeClock()
    found = _load.wait_idle(lambda _left: left.pop(0) if len(left) > 1 else left[0], Deadline(timeout, clock), 3600)
    assert found.verdict == verdict
    assert clock.now <= timeout + 0.3


def test_no_time_means_one_look_and_its_confirmation() -> None:
    assert wait([load()], timeout=0) == _load.IdleWait(
        "idle", "the engine is idle: nothing runs and nothing waits", load().load, 2
    )
    assert wait([load(3, 2)], timeout=0).msg == "the engine is still busy after 0 s: 3 running, 2 waiting"
    assert (wait([ABSENT], timeout=0).verdict, wait([ABSENT], timeout=0).readings) == ("absent", 2)
    assert wait([ABSENT, UNKNOWN], timeout=0).verdict == "unknown"
    restless = [load(tokens=number) for number in range(20)]
    assert (wait(restless, timeout=0).verdict, wait(restless, timeout=0).readings) == ("busy", 2)


@pytest.mark.parametrize(
    ("answer", "why", "error"),
    [
        (
            _http.Answer("u", "refused", error="connection refused"),
            "absent",
            "nothing answers at u: connection refused",
        ),
        (_http.Answer("u", "hung_up", error="closed"), "unknown", "u: closed"),
        (_http.Answer("u", "unreachable", error="no route"), "unknown", "u: no route"),
        (_http.Answer("u", status=503), "unknown", "u answers with status 503"),
        (_http.Answer("u", status=401), "unmeasured", "u answers with status 401: the API key is refused"),
        (_http.Answer("u", "timeout", error="no answer within 1 s"), "unknown", "u: no answer within 1 s"),
        (
            _http.Answer("u", status=501),
            "unmeasured",
            "u answers with status 501: start llama-server with --metrics",
        ),
        (
            _http.Answer("u", status=200, body="x 1\n"),
            "unmeasured",
            "u has no metric llamacpp:requests_processing: start llama-server with --metrics",
        ),
        (
            _http.Answer("u", status=200, body="llamacpp:requests_processing 0\n"),
            "unmeasured",
            "u has no metric llamacpp:requests_deferred: start llama-server with --metrics",
        ),
    ],
)
def test_what_cannot_be_read_is_never_idle(answer: _http.Answer, why: str, error: str) -> None:
    assert _load.reading_of(_engines.PROFILES["llama_cpp"], answer) == _load.Reading(None, why, error)


def test_counters_are_compared_only_where_both_looks_have_them() -> None:
    one, two = load(tokens=1).load, load(tokens=2).load
    assert _load.moved(one, two) is True
    assert _load.moved(one, one) is False
    assert _load.moved(None, one) is None
    assert _load.moved(one, _load.Load(0, 0, None, {"other": 1})) is None


def test_a_busy_engine_says_how_long_it_has_made_no_token() -> None:
    assert wait([load(2, tokens=7)]).still_for == 10
    working = [load(2, tokens=number) for number in range(20)]
    assert wait(working).still_for == 0
    assert wait([*working[:5], load(2, tokens=4)]).still_for == 6
    assert wait([_load.Reading(_load.Load(1, 0))]).still_for is None
    assert wait([load()]).still_for is None


@pytest.mark.parametrize(
    ("engine", "name", "delta", "requests", "prompt_bytes", "served"),
    [
        # One token is what our own request makes, or two of ours that meet in the same engine.
        ("vllm", "vllm:generation_tokens_total", 1, 1, 64, False),
        ("vllm", "vllm:generation_tokens_total", 2, 1, 64, True),
        ("vllm", "vllm:generation_tokens_total", 2, 2, 64, False),
        # The prompt of our own request has been read in, and then the engine wedged.
        ("sglang", "sglang:prompt_tokens_total", 40, 1, 64, False),
        ("sglang", "sglang:prompt_tokens_total", 4000, 1, 64, True),
        ("sglang", "sglang:prompt_tokens_total", 4000, 1, 4000, False),
        ("llama_cpp", "llamacpp:n_decode_total", 2, 1, 64, False),
        ("llama_cpp", "llamacpp:n_decode_total", 20, 1, 64, True),
        ("llama_cpp", "llamacpp:n_decode_total", 20, 1, 9000, False),
        ("vllm", "vllm:generation_tokens_total", -500, 1, 64, False),
        ("vllm", "vllm:something_else", 500, 1, 64, None),
    ],
)
def test_others_are_served_when_more_moved_than_we_can_have_moved(
    engine: str, name: str, delta: float, requests: int, prompt_bytes: int, served: t.Optional[bool]
) -> None:
    before, after = (_load.Load(1, 0, None, {name: value}) for value in (1000, 1000 + delta))
    assert _load.others(_engines.PROFILES[engine], before, after, requests, prompt_bytes) is served


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", -1), ("interval", 0), ("interval", -1), ("timeout", float("inf")), ("interval", float("nan"))],
)
def test_a_drain_refuses_limits_that_are_none(name: str, value: float) -> None:
    limits = dict({"timeout": 1.0, "interval": 1.0}, **{name: value})
    with pytest.raises(UsageError):
        _load.drain(VLLM, "http://127.0.0.1:1", _http.Access(), **limits)


TRITON = """\
nv_inference_pending_request_count{model="a",version="1"} 2
nv_trt_llm_request_metrics{model="a",request_type="context",version="1"} 9
nv_trt_llm_request_metrics{model="a",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="b",request_type="active",version="1"} 1
nv_trt_llm_request_metrics{model="a",request_type="waiting",version="1"} 4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="a"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="a"} 900
vllm:generation_tokens_total{model="c",version="1"} 16
"""


def test_metrics_are_told_apart_by_a_label_and_parts_add_up() -> None:
    profile = _engines.PROFILES["triton"]
    assert _load.labelled(profile) == {"nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"}
    load = _load.reading_of(profile, _http.Answer("u", status=200, body=TRITON)).load
    assert load == _load.Load(4.0, 6.0, 0.5, {"vllm:generation_tokens_total": 16.0})
    ovms = _load.parse('ovms_current_graphs{name="a"} 2\novms_current_requests{name="b",version="1"} 3\n')
    assert _load.load_of(_engines.PROFILES["ovms"], ovms) == _load.Load(5.0)
    alone = _load.parse('ovms_current_requests{name="b",version="1"} 3\n')
    assert _load.load_of(_engines.PROFILES["ovms"], alone).running == 3.0


def test_of_names_of_one_thing_the_newest_counts_alone() -> None:
    samples = _load.parse("vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.1\n")
    assert _load.load_of(VLLM, samples).kv_use == 0.1


def test_a_gauge_that_appears_with_the_first_request_is_zero_before_it() -> None:
    profile = _engines.PROFILES["tgi"]
    fresh = _http.Answer("u", status=200, body="tgi_batch_max_total_tokens 4096\n")
    assert _load.reading_of(profile, fresh).load == _load.Load(0.0, 0.0)
    other = _load.reading_of(profile, _http.Answer("u", status=200, body="something 1\n"))
    assert (other.load, other.why) == (None, "unmeasured")


@pytest.mark.parametrize(
    ("engine", "url", "where"),
    [
        ("vllm", "http://h:8000/v1", "http://h:8000/metrics"),
        ("triton", "http://h:8000", "http://h:8002/metrics"),
        ("triton", "https://h/lane/v1", "https://h:8002/metrics"),
        ("triton", "http://[::1]:8000", "http://[::1]:8002/metrics"),
        ("ollama", "http://h:11434", None),
    ],
)
def test_where_the_metrics_are(engine: str, url: str, where: t.Optional[str]) -> None:
    assert _load.metrics_url(_engines.get(engine), url) == where


@pytest.mark.parametrize(
    ("engine", "listening", "why", "error"),
    [
        ("triton", ("http://h:8000",), "unmeasured", "nothing answers at http://h:8002/metrics, although the engine"),
        ("triton", (), "absent", "nothing answers at http://h:8000/v2/repository/index"),
        ("vllm", (), "absent", "nothing answers at http://h:8000/metrics"),
        ("ollama", ("http://h:8000",), "unmeasured", 'the engine profile "ollama" knows no metrics'),
        ("ollama", (), "absent", "nothing answers at http://h:8000/api/tags"),
    ],
)
def test_metrics_that_nobody_serves_do_not_mean_that_the_engine_is_gone(
    monkeypatch: pytest.MonkeyPatch, engine: str, listening: t.Tuple[str, ...], why: str, error: str
) -> None:
    def fetch(request: _http.Request, _access: _http.Access, _timeout: float) -> _http.Answer:
        there = request.url.startswith(listening) if listening else False
        return _http.Answer(request.url, "answered", 200) if there else _http.Answer(request.url, "refused", error="r")

    monkeypatch.setattr(_http, "fetch", fetch)
    reading = _load.read(_engines.get(engine), "http://h:8000", _http.Access(), 1)
    assert (reading.load, reading.why) == (None, why)
    assert reading.error.startswith(error)


def test_of_an_engine_that_counts_no_tokens_more_are_our_own() -> None:
    name, profile = "vllm:generation_tokens_total", _engines.PROFILES["triton"]
    before, eight, nine = (_load.Load(tokens={name: value}) for value in (0, 8, 9))
    assert _load.others(profile, before, eight, 1, 64) is False
    assert _load.others(profile, before, nine, 1, 64) is True
