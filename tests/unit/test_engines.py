# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _engines
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

SUBJECTS = ("health", "owned_by", "metrics", "running", "waiting", "kv_use", "tokens", "phases", "models", "endpoints")
SUBJECTS += ("prompt_tokens", "steps", "titles")


@pytest.mark.parametrize("name", sorted(_engines.PROFILES))
def test_every_subject_of_a_profile_says_how_it_is_known(name: str) -> None:
    profile = _engines.PROFILES[name]
    filled = {subject for subject in SUBJECTS if getattr(profile, subject)}
    assert set(profile.known) == filled
    assert all(word.split(",")[0] in ("live", "source", "docs", "issue") for word in profile.known.values())


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


def test_every_profile_says_what_makes_metrics_appear() -> None:
    assert all(profile.metrics_remedy for profile in _engines.PROFILES.values())


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        _engines.get("tgi")
    assert caught.value.message == (
        'the engine "tgi" is not known: use one of llama_cpp, vllm, sglang, openai, '
        "the last for any other that answers like OpenAI"
    )
    assert _engines.get(None).name == "openai"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB.", "gpu_out_of_memory"),
        (
            "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.3 GiB).",
            "gpu_out_of_memory",
        ),
        (
            "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
            "port_in_use",
        ),
        ("start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port_in_use"),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver_mismatch"),
        ("gguf_init_from_file: failed to open GGUF file '/m.gguf'", "model_not_found"),
        ("OSError: /models/x is not a local folder and is not a valid model identifier", "model_not_found"),
        ("api_server.py: error: unrecognized arguments: --tp 4", "bad_arguments"),
        ("Received sigquit from a child proces. It usually means the child failed.", "child_failed"),
        ("Loading safetensors checkpoint shards:  25% Completed | 1/4", None),
        ("INFO: Application startup complete.", None),
    ],
)
def test_causes_are_told_by_the_line_of_the_log(line: str, kind: str | None) -> None:
    assert _engines.match(_engines.CAUSES, line) == kind


@pytest.mark.parametrize(
    ("engine", "line", "phase"),
    [
        ("vllm", "Starting to load model /models/x...", "loading_weights"),
        ("vllm", "torch.compile takes 41.2 s in total", "compiling"),
        ("vllm", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%", "capturing_graphs"),
        ("vllm", "GPU KV cache size: 191,024 tokens", "allocating_kv_cache"),
        ("sglang", "Load weight begin. avail mem=78.58 GB", "loading_weights"),
        ("sglang", "Capture cuda graph begin. This can take up to several minutes.", "capturing_graphs"),
        ("sglang", "The server is fired up and ready to roll!", "started"),
        ("llama_cpp", "0.00.008.852 I srv    load_model: loading model 'tiny.gguf'", "loading_weights"),
        ("llama_cpp", "0.00.019.791 I srv  llama_server: listening on http://127.0.0.1:18080", "started"),
    ],
)
def test_phases_are_told_by_the_line_of_the_log(engine: str, line: str, phase: str) -> None:
    assert _engines.match(_engines.PROFILES[engine].phases, line) == phase
