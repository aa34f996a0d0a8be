# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _overrides, _profile
from ansible_collections.gpuops.serving.plugins.module_utils._engines import Listed, Phase
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

REPO = pathlib.Path(__file__).resolve().parents[2]
ENGINES = sorted(_engines.PROFILES)


@pytest.mark.parametrize("name", ENGINES)
def test_every_subject_of_a_profile_says_how_it_is_known(name: str) -> None:
    profile = _engines.PROFILES[name]
    filled = {subject for subject in _profile.SUBJECTS if getattr(profile, subject) not in (None, "", ())}
    assert set(profile.known) == filled
    assert all(re.split(r"[ ,;]", word)[0] in _profile.KNOWN for word in profile.known.values())
    assert "given" not in profile.known.values()


@pytest.mark.parametrize("name", ENGINES)
def test_every_profile_can_be_given_as_a_change_of_itself(name: str) -> None:
    """So every field of it passes the checks, as it would from a file."""
    profile = _engines.PROFILES[name]
    fields = {field: getattr(profile, field) for field in _overrides.CHECKS}
    fields["health_status"] = dict(profile.health_status)
    fields["endpoints"] = dict(profile.endpoints)
    changed = _engines.get(name, json.loads(json.dumps(fields)))
    assert changed._replace(known=profile.known) == profile


def test_every_field_can_be_changed_except_the_name_and_how_it_is_known() -> None:
    assert set(_overrides.CHECKS) == set(_profile.Profile._fields) - {"name", "known"}


@pytest.mark.parametrize("name", ENGINES)
def test_the_shares_of_a_load_follow_each_other(name: str) -> None:
    shares = [phase.share for phase in _engines.PROFILES[name].phases if phase.share is not None]
    assert all(begin <= end for begin, end in shares)
    assert all(before[1] <= after[0] for before, after in zip(shares, shares[1:]))


@pytest.mark.parametrize(
    ("engine", "name", "fits"),
    [
        ("vllm", "VLLM::EngineCor", True),
        ("vllm", "VLLM::Worker_TP", True),
        ("vllm", "python3", False),
        ("vllm", "notVLLM::x", False),
        ("vllm", "sglang::schedul", False),
        ("sglang", "sglang::schedul", True),
        ("sglang", "sglang::detoken", True),
        ("sglang", "sgl_diffusion::", True),
        ("sglang", "VLLM::Worker_TP", False),
        ("ovms", "ovms", True),
        ("ovms", "ovms-exporter", False),
        ("triton", "tritonserver", True),
        ("triton", "triton_python_b", True),
        ("triton", "triton", False),
        ("tgi", "text-generation", True),
        ("ollama", "ollama_llama_se", True),
        ("ollama", "ollama", False),  # also the name of the client, which people run
    ],
)
def test_titles(engine: str, name: str, fits: bool) -> None:
    """Against what the kernel keeps of a name."""
    assert len(name) <= 15
    pattern = _engines.titles(engine)
    assert pattern is not None
    assert bool(pattern.search(name)) is fits


def test_where_a_name_proves_nothing_there_are_no_titles() -> None:
    assert _engines.titles("llama_cpp") is None
    assert _engines.titles(None) is None
    changed = _engines.titles("llama_cpp", {"titles": ["^my-llama"]})
    assert changed is not None
    assert changed.search("my-llama-server")


def test_every_profile_says_what_makes_metrics_appear() -> None:
    assert all(profile.metrics_remedy for profile in _engines.PROFILES.values())


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        _engines.get("trition")
    assert caught.value.message == (
        'the engine "trition" is not known: use one of llama_cpp, vllm, sglang, ovms, triton, tgi, ollama, openai, '
        "the last for any other that answers like OpenAI"
    )
    assert _engines.get(None).name == "openai"


def test_the_same_engines_can_be_chosen_everywhere() -> None:
    for module in ("route_probe", "wait_engine_idle", "wait_model_ready"):
        text = (REPO / "plugins" / "modules" / (module + ".py")).read_text(encoding="utf-8")
        documented = yaml.safe_load(text.split('DOCUMENTATION = r"""', 1)[1].split('"""', 1)[0])
        assert documented["options"]["engine"]["choices"] == _engines.NAMES, module
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    listed = re.search(r"engine: (\w+) +# or ([\w, ]+)", readme)
    assert listed is not None
    assert sorted([listed.group(1), *re.split(", ", listed.group(2))]) == ENGINES


@pytest.mark.parametrize(
    ("engine", "line", "phase"),
    [
        ("vllm", "(EngineCore pid=9) Initializing a V1 LLM engine (v0.24.0) with config: graphs", "initialising"),
        ("vllm", "Starting to load model /models/x...", "loading_weights"),
        ("vllm", "Loading safetensors checkpoint shards:  25% Completed | 1/4", "loading_weights"),
        ("vllm", "(APIServer pid=115) INFO [model.py:733] Resolved architecture: LlamaForCausalLM", "initialising"),
        ("vllm", "torch.compile takes 41.2 s in total", "compiling"),
        ("vllm", "INFO [monitor.py:40] Starting torch.compile", "compiling"),
        ("vllm", "INFO [backends.py:1105] Using cache directory: /c for vLLM's torch.compile", "compiling"),
        ("vllm", "WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel", None),
        ("vllm", "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 3.05 s", "warming_up"),
        ("vllm", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%", "capturing_graphs"),
        ("vllm", "GPU KV cache size: 191,024 tokens", "allocating_kv_cache"),
        ("vllm", "DeepGEMM warmup:  47%|####     | 594/1261 [03:10<02:52,  3.87it/s]", "warming_up"),
        ("vllm", "INFO:     Application startup complete.", "started"),
        ("sglang", "Init torch distributed begin.", "initialising"),
        ("sglang", "Load weight begin. avail mem=78.58 GB", "loading_weights"),
        ("sglang", "KV Cache is allocated. #tokens: 20480, K size: 1.25 GB", "allocating_kv_cache"),
        ("sglang", "Capture cuda graph begin. This can take up to several minutes.", "capturing_graphs"),
        ("sglang", "INFO:     Uvicorn running on http://0.0.0.0:30000", "warming_up"),
        ("sglang", "The server is fired up and ready to roll!", "started"),
        ("llama_cpp", "0.00.008.852 I srv    load_model: loading model 'tiny.gguf'", "loading_weights"),
        ("llama_cpp", "0.00.019.791 I srv  llama_server: listening on http://127.0.0.1:18080", "started"),
        ("ovms", 'status change. New status: ( "state": "LOADING", "error_code": "OK" )', "loading_weights"),
        ("ovms", "Mediapipe: q state changed to: AVAILABLE after handling: ValidationPassedEvent:", "started"),
        ("triton", "I0101 model_lifecycle.cc:469] loading: qwen:1", "loading_weights"),
        ("triton", "I0101 http_server.cc:3303] Started HTTPService at 0.0.0.0:8000", "started"),
        ("tgi", "INFO text_generation_launcher: Waiting for shard to be ready... rank=0", "loading_weights"),
        ("tgi", "INFO text_generation_launcher: Starting Webserver", "initialising"),
        ("tgi", "INFO text_generation_router_v3: Warming up model", "warming_up"),
        ("tgi", "INFO text_generation_router::server: router/src/server.rs:2402: Connected", "started"),
        ("ollama", 'msg="waiting for llama-server to start responding"', "loading_weights"),
        ("ollama", 'msg="llama runner started in 2.01 seconds"', "started"),
        ("ollama", "something else", None),
    ],
)
def test_phases_are_told_by_the_line_of_the_log(engine: str, line: str, phase: str | None) -> None:
    profile = _engines.PROFILES[engine]
    assert _engines.match(profile.phases, line) == phase
    found = _engines.phase_of(profile, line)
    assert (found.word if found is not None else None) == phase


@pytest.mark.parametrize(
    ("engine", "word", "percent", "whole"),
    [
        ("vllm", "loading_weights", 0, 3.0),
        ("vllm", "loading_weights", 50, 31.5),
        ("vllm", "loading_weights", None, 3.0),
        ("vllm", "loading_weights", 400, 60.0),
        ("vllm", "started", None, 100.0),
        ("openai", "loading_weights", 50, None),
        ("vllm", "", 50, None),
    ],
)
def test_how_far_the_whole_load_is(engine: str, word: str, percent: float | None, whole: float | None) -> None:
    assert _engines.overall(_engines.get(engine), word, percent) == whole


@pytest.mark.parametrize(
    ("engine", "status", "meaning"),
    [
        ("vllm", 200, "ready"),
        ("vllm", 503, "dead"),
        ("vllm", 404, ""),
        ("sglang", 503, "loading"),
        ("llama_cpp", 503, "loading"),
        ("ovms", 500, "loading"),
        ("triton", 400, "loading"),
        ("tgi", 503, ""),
        ("tgi", None, ""),
    ],
)
def test_what_a_status_of_the_health_means(engine: str, status: int | None, meaning: str) -> None:
    assert _engines.meaning(_engines.get(engine), status) == meaning


OVMS = {
    "model_version_status": [
        {"version": "2", "state": "LOADING", "status": {"error_code": "UNKNOWN", "error_message": "UNKNOWN"}},
        {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"}},
    ]
}


@pytest.mark.parametrize(
    ("engine", "body", "models"),
    [
        (
            "vllm",
            {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": 7}, {"id": 8}, {"id": "c"}]},
            [Listed("a", "vllm"), Listed("b"), Listed("c")],
        ),
        (
            "triton",
            [
                {"name": "a", "version": "1", "state": "READY"},
                {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "no such engine"},
                {"name": "c"},
            ],
            [Listed("a", "", True, "READY"), Listed("b", "", False, "UNAVAILABLE: no such engine"), Listed("c")],
        ),
        ("triton", [], []),
        (
            "ovms",
            {
                "a": OVMS,
                "b": {"model_version_status": []},
                "c": {"model_version_status": [{"state": "LOADING", "status": {}}]},
            },
            [
                Listed("a", "", True, "AVAILABLE"),
                Listed("b", "", False, "no version"),
                Listed("c", "", False, "LOADING"),
            ],
        ),
        (
            "ovms",
            {"a": {"model_version_status": OVMS["model_version_status"][:1]}},
            [Listed("a", "", False, "LOADING: UNKNOWN")],
        ),
        ("ovms", {"a": {"model_version_status": [{"state": "SLEEPING"}]}}, [Listed("a", "", True, "SLEEPING")]),
        ("ollama", {"models": [{"name": "llama3:latest", "size": 1}]}, [Listed("llama3:latest")]),
    ],
)
def test_the_models_of_a_list(engine: str, body: t.Any, models: list[Listed]) -> None:
    assert _engines.listed(_engines.get(engine), json.dumps(body)) == models


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "body",
    ["", "<html>", "null", "7", '"x"', "[7]", "[[]]", '{"data": 7}', '{"data": [7]}', '{"models": null}', '{"a": 7}']
    + ['[{"name": 7}]', '{"models": [{}]}', '{"a": {"model_version_status": [7]}}', "[" * 100000],
)
def test_what_is_no_list_of_models_lists_none(engine: str, body: str) -> None:
    assert _engines.listed(_engines.get(engine), body) == []


@pytest.mark.parametrize(
    ("engine", "wanted", "name", "fits"),
    [
        ("vllm", "a", "a", True),
        ("vllm", "a", "a:latest", False),
        ("ollama", "llama3", "llama3:latest", True),
        ("ollama", "llama3:8b", "llama3:latest", False),
        ("ollama", "llama3:8b", "llama3:8b", True),
    ],
)
def test_the_names_of_a_model(engine: str, wanted: str, name: str, fits: bool) -> None:
    assert _engines.names_model(_engines.get(engine), wanted, name) is fits


# What a service says of its own engine


def test_fields_are_changed_and_the_rest_stays() -> None:
    profile = _engines.get(
        "triton",
        {
            "metrics_port": 9002,
            "health_status": {"200": "ready", "418": "dead"},
            "endpoints": {"chat": "/v1/chat/completions"},
            "phases": [["compiling", "compiling"], ["loading: ", "loading_weights", [20, 90.5]]],
            "fatal": [["my own end", "exited"]],
            "metrics": None,
        },
    )
    before = _engines.get("triton")
    assert profile.metrics_port == 9002
    assert profile.health_status == ((200, "ready"), (418, "dead"))
    assert profile.endpoints == (("chat", "/v1/chat/completions"),)
    assert profile.phases == (Phase("compiling", "compiling"), Phase("loading: ", "loading_weights", (20, 90.5)))
    assert profile.fatal == (("my own end", "exited"),)
    assert profile.metrics is None
    assert (profile.name, profile.models, profile.titles) == (before.name, before.models, before.titles)
    assert (profile.known["metrics_port"], profile.known["models"]) == ("given", before.known["models"])
    assert before == _engines.PROFILES["triton"]
    assert _engines.get("vllm", {}) is _engines.get("vllm", None) is _engines.PROFILES["vllm"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"helth": "/"}, '"helth" is no field of it: use "health"'),
        ({"name": "x"}, '"name" is no field of it: use '),
        ({7: "x"}, '"7" is no field of it: use '),
        ({"port": "80"}, '"port" must be a number from 1 to 65535'),
        ({"port": True}, '"port" must be a number from 1 to 65535'),
        ({"port": 0}, '"port" must be a number from 1 to 65535'),
        ({"stop_timeout": 1.5}, '"stop_timeout" must be a number from 1 to 86400'),
        ({"health": "health"}, '"health" must be a path that begins with "/"'),
        ({"health": "/a b"}, '"health" must be a path that begins with "/"'),
        ({"models": None}, '"models" must be a path that begins with "/"'),
        ({"opens_early": "yes"}, '"opens_early" must be true or false'),
        ({"models_shape": "json"}, '"models_shape" must be one of openai, triton_index, ollama_tags, ovms_config'),
        ({"models_method": "get"}, '"models_method" must be one of GET, POST'),
        ({"models_method": ["GET"]}, '"models_method" must be one of GET, POST'),
        ({"running": "x"}, '"running" must be a list of texts'),
        ({"running": [""]}, '"running" must be a list of texts'),
        (
            {"health_status": {"200": "fine"}},
            '"health_status" must be a mapping of HTTP statuses to ready, loading, dead',
        ),
        (
            {"health_status": {"999": "dead"}},
            '"health_status" must be a mapping of HTTP statuses to ready, loading, dead',
        ),
        (
            {"health_status": {"200": ["x"]}},
            '"health_status" must be a mapping of HTTP statuses to ready, loading, dead',
        ),
        ({"health_status": [200]}, '"health_status" must be a mapping of HTTP statuses to ready, loading, dead'),
        ({"endpoints": {}}, '"endpoints" must be a mapping of completions, chat, generate to paths'),
        ({"endpoints": {"embed": "/x"}}, '"endpoints" must be a mapping of completions, chat, generate to paths'),
        ({"endpoints": {"chat": "x"}}, '"endpoints" must be a path that begins with "/"'),
        ({"phases": [["("]]}, '"phases" must be a list of phases: '),
        ({"phases": ["x"]}, '"phases" must be a list of phases: '),
        ({"phases": [["x", "y", [90, 10]]]}, '"phases" must be a list of phases: '),
        ({"phases": [["x", "y", [0, 101]]]}, '"phases" must be a list of phases: '),
        ({"phases": [["x", "Not a word"]]}, '"phases" must be made of words of lower-case letters'),
        ({"phases": [["(", "y"]]}, '"phases" must be made of regular expressions: "(" is none: '),
        ({"phases": [["x*", "y"]]}, '"phases" must be made of regular expressions that need something: "x*" '),
        ({"phases": [[7, "y"]]}, '"phases" must be made of regular expressions'),
        ({"fatal": [["x"]]}, '"fatal" must be a list of pairs: '),
        ({"fatal": {"x": "y"}}, '"fatal" must be a list of pairs: '),
        ({"titles": ["("]}, '"titles" must be made of regular expressions: "(" is none: '),
        ({"titles": ["p"]}, '"titles" must be names that only this engine\'s processes bear: "p" fits "python"'),
        ({"titles": ["."]}, '"titles" must be names that only this engine\'s processes bear: "." fits "systemd"'),
        ([["port", 80]], "the changes must be a mapping of fields to values"),
        ("port", "the changes must be a mapping of fields to values"),
    ],
)
def test_a_change_that_makes_no_sense_is_one_sentence(overrides: t.Any, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        _engines.get("vllm", overrides)
    start = 'the profile of the engine "vllm" cannot be changed: '
    assert caught.value.message.startswith(start + problem)
    assert "\n" not in caught.value.message


# The page


def writer() -> t.Any:
    spec = importlib.util.spec_from_file_location("engines_page", REPO / "tests" / "docs" / "engines.py")
    assert spec is not None
    assert spec.loader is not None
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room


def test_the_tables_of_the_page_are_those_of_the_data() -> None:
    room = writer()
    page = room.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"<!-- table: (\w+) -->", page) == list(room.TABLES)
    assert page == room.rendered(page), "run: make docs"
    assert room.rendered(page.replace("| `vllm` |", "| `wllm` |")) == page


def test_the_page_explains_every_field_that_can_be_changed() -> None:
    page = (REPO / "docs" / "engines.md").read_text(encoding="utf-8")
    table = page.split("## When yours differs", 1)[1].split("\n## ", 1)[0]
    named = [name for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(_overrides.CHECKS)


def test_the_example_of_the_page_can_be_used() -> None:
    page = (REPO / "docs" / "engines.md").read_text(encoding="utf-8")
    (service,) = yaml.safe_load(page.split("```yaml\n", 1)[1].split("```", 1)[0])["gpuops_services"]
    assert _engines.get(service["engine"], service["profile"]).metrics_port == 9002
