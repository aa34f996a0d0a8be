# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a wait makes of the answers of each engine, by its profile."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _http
from ansible_collections.gpuops.serving.plugins.module_utils._generation import Side
from service import Service

LOADED_AT = 30.0


def answer(body: t.Any, status: int = 200) -> _http.Answer:
    return _http.Answer("u", status=status, content_type="application/json", body=json.dumps(body))


def models(engine: str, ready: bool) -> t.Any:
    """The list of an engine that says how far its models are, or that has them all from the first answer on."""
    states = {"ovms": ("LOADING", "AVAILABLE"), "triton": ("LOADING", "READY")}.get(engine, ("", ""))
    return {
        "ovms": {"m": {"model_version_status": [{"version": "1", "state": states[ready]}]}},
        "triton": [{"name": "m", "version": "1", "state": states[ready]}],
        "ollama": {"models": [{"name": "m:latest"}]},
    }.get(engine, {"data": [{"id": "m", "owned_by": _engines.get(engine).owned_by or "m"}]})


class Engine(Service):
    """It answers as its profile says, and is loaded after a while."""

    def __init__(self, name: str, loading: int = 200) -> None:
        super().__init__()
        self.profile, self.loading = _engines.get(name), loading
        self.cpu = lambda now: now
        self.methods: t.Set[t.Tuple[str, str]] = set()

    def get(self, path: str, timeout: float, method: str = "GET") -> _http.Answer:
        self.methods.add((method, path))
        loaded = self.clock.now >= LOADED_AT
        if path == self.profile.models and method == self.profile.models_method:
            return answer(models(self.profile.name, loaded))
        if path == self.profile.health and method == "GET":
            return answer({}, 200 if loaded else self.loading)
        return answer({"error": "not found"}, 404)


@pytest.mark.parametrize(
    ("name", "loading"),
    [("llama_cpp", 503), ("sglang", 503), ("ovms", 500), ("triton", 400), ("tgi", 503), ("ollama", 503)],
)
def test_a_health_that_is_not_yet_good_is_waited_for(name: str, loading: int) -> None:
    engine = Engine(name, loading)
    found = engine.wait(name, model="m")
    assert found.verdict == "ready"
    assert LOADED_AT <= found.wait.tiers[2].at < LOADED_AT + 1.5
    assert (engine.profile.models_method, engine.profile.models) in engine.methods


@pytest.mark.parametrize("name", ["ovms", "triton"])
def test_a_model_that_is_listed_and_not_ready_is_waited_for(name: str) -> None:
    engine = Engine(name)
    found = engine.wait(name, model="m")
    assert found.verdict == "ready"
    assert found.wait.tiers[2].at < 2.0
    assert LOADED_AT <= found.wait.tiers[3].at < LOADED_AT + 1.5
    assert engine.asked == ["m"]
    never = Engine(name)
    found = never.wait(name, timeout=20, model="m")
    assert found.verdict == "progressing"
    assert 'lists "m" as not ready: LOADING' in found.msg


def test_an_engine_that_says_that_it_is_dead_is_not_waited_for() -> None:
    found = Engine("vllm", 503).wait("vllm", model="m")
    assert (found.verdict, found.seconds < 5) == ("dead", True)


def test_a_model_is_found_by_the_name_that_ollama_gives_it() -> None:
    assert Engine("ollama").wait("ollama", model="m").verdict == "ready"
    assert Engine("ollama").wait("ollama", model="m:8b", timeout=40).verdict != "ready"


def test_a_model_that_is_listed_before_it_is_served_gets_a_second_look() -> None:
    gone = Side("wrong_model", error="status 404: Mediapipe graph definition with requested name is not found")
    engine = Engine("ovms")
    asked: t.List[float] = []

    def token(now: float) -> Side:
        asked.append(now)
        return gone if len(asked) == 1 else Side("ok", ttft=0.1)

    engine.token = token
    assert engine.wait("ovms", model="m").verdict == "ready"
    engine = Engine("ovms")
    engine.token = lambda now: gone
    assert engine.wait("ovms", model="m").verdict == "wrong_server"
