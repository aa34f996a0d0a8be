# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Engine profiles as data: where an engine answers, what it counts, what it logs.

``known`` says of each subject how it is known: ``live`` (tried on the real engine), ``source``, ``docs``, ``issue``.
Names move between releases, so several names may stand in one field, newest first.
"""

from __future__ import annotations

import re
import typing as t

from ._errors import UsageError

__all__ = ("CAUSES", "PROFILES", "Profile", "get", "match", "titles")

Patterns = t.Tuple[t.Tuple[str, str], ...]


class Profile(t.NamedTuple):
    """What the library knows of one engine."""

    name: str
    title: str
    health: t.Optional[str] = None
    models: str = "/v1/models"
    # What data[].owned_by of the model list says when it is this engine; empty when it proves nothing.
    owned_by: str = ""
    # Whether the list of models is complete from the first answer on, so that a wrong one will not become right.
    models_static: bool = True
    endpoints: t.Tuple[t.Tuple[str, str], ...] = (("completions", "/v1/completions"), ("chat", "/v1/chat/completions"))
    metrics: t.Optional[str] = None
    # What makes the metrics appear where they are missing.
    metrics_remedy: str = ""
    running: t.Tuple[str, ...] = ()
    waiting: t.Tuple[str, ...] = ()
    kv_use: t.Tuple[str, ...] = ()
    # Counters of what was generated, of what was read in, and of steps that did either.
    tokens: t.Tuple[str, ...] = ()
    prompt_tokens: t.Tuple[str, ...] = ()
    steps: t.Tuple[str, ...] = ()
    phases: Patterns = ()
    # Names that only processes of this engine bear; the kernel keeps 15 bytes of one, so no pattern asks for more.
    titles: t.Tuple[str, ...] = ()
    known: t.Mapping[str, str] = {}


# Why a start failed, as the log tells it. The first that fits a line names the cause.
CAUSES: Patterns = (
    (
        r"out of memory|outofmemory|failed to allocate .*buffer|less than desired GPU memory utilization|"
        r"cudaMalloc failed|CL_OUT_OF_RESOURCES|no available memory for the cache blocks",
        "gpu_out_of_memory",
    ),
    (r"address already in use|couldn't bind|failed to bind|errno 98\b", "port_in_use"),
    (
        r"driver/library version mismatch|driver version is insufficient|no CUDA-capable device|"
        r"found no NVIDIA driver|CUDA initialization",
        "driver_mismatch",
    ),
    (
        r"failed to open GGUF|error loading model|failed to load model|is not a local folder and is not a valid model|"
        r"repository not found|no such file or directory.*(?:model|gguf|safetensors)|model path does not exist",
        "model_not_found",
    ),
    (r"oom-kill|killed process .* total-vm", "host_out_of_memory"),
    (r"unrecognized arguments|invalid argument:|unknown argument|arguments are required", "bad_arguments"),
    (r"permission denied", "permission_denied"),
    (r"received sigquit from a child|engine core (?:initialization )?failed|enginecore.*died", "child_failed"),
)

_WEIGHTS = (r"loading safetensors|load weight begin|starting to load model|loading weights", "loading_weights")
_GRAPHS = (r"captur(?:ing|e) (?:cuda|cudagraph|batches|.*graph)", "capturing_graphs")
_STARTED = (r"application startup complete|uvicorn running on", "started")

PROFILES: t.Dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="llama_cpp",
            title="llama.cpp server",
            health="/health",
            owned_by="llamacpp",
            metrics="/metrics",
            metrics_remedy="start llama-server with --metrics",
            running=("llamacpp:requests_processing",),
            waiting=("llamacpp:requests_deferred",),
            kv_use=("llamacpp:kv_cache_usage_ratio",),
            # tokens_predicted_total moves only when a request ends; n_decode_total moves with each step.
            tokens=("llamacpp:tokens_predicted_total",),
            prompt_tokens=("llamacpp:prompt_tokens_total",),
            steps=("llamacpp:n_decode_total",),
            phases=(
                (r"load_model: loading model|loading model '", "loading_weights"),
                (r"warming up the model", "warming_up"),
                (r"server is listening|llama_server: listening", "started"),
            ),
            known={
                "health": "live",
                "models": "live",
                "owned_by": "live",
                "endpoints": "live",
                "metrics": "live",
                "running": "live",
                "waiting": "live",
                "kv_use": "issue, older builds only",
                "tokens": "live",
                "prompt_tokens": "live",
                "steps": "live",
                "phases": "live",
            },
        ),
        Profile(
            name="vllm",
            title="vLLM",
            health="/health",
            owned_by="vllm",
            metrics="/metrics",
            metrics_remedy="start vLLM without --disable-log-stats",
            running=("vllm:num_requests_running",),
            waiting=("vllm:num_requests_waiting",),
            kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            tokens=("vllm:generation_tokens_total",),
            prompt_tokens=("vllm:prompt_tokens_total",),
            phases=(
                _WEIGHTS,
                (r"torch\.compile|dynamo bytecode transform|compiling a graph", "compiling"),
                (r"kv cache size|available kv cache memory", "allocating_kv_cache"),
                _GRAPHS,
                (r"warming up|warmup model took", "warming_up"),
                _STARTED,
            ),
            # A front process bears no title before it has set one, and VLLM_PROCESS_NAME_PREFIX may change them all.
            titles=(r"^VLLM::",),
            known={
                "health": "live",
                "models": "live",
                "owned_by": "source",
                "endpoints": "live",
                "metrics": "live",
                "running": "live",
                "waiting": "docs",
                "kv_use": "docs",
                "tokens": "live",
                "prompt_tokens": "live",
                "phases": "source",
                "titles": "live",
            },
        ),
        Profile(
            name="sglang",
            title="SGLang",
            health="/health",
            owned_by="sglang",
            metrics="/metrics",
            metrics_remedy="start SGLang with --enable-metrics",
            running=("sglang:num_running_reqs",),
            waiting=("sglang:num_queue_reqs",),
            kv_use=("sglang:token_usage",),
            tokens=("sglang:generation_tokens_total",),
            prompt_tokens=("sglang:prompt_tokens_total",),
            phases=(
                (r"init torch distributed", "initialising"),
                _WEIGHTS,
                (r"kv cache is allocated|memory pool end", "allocating_kv_cache"),
                _GRAPHS,
                (r"fired up and ready to roll", "started"),
                _STARTED,
            ),
            titles=(r"^sglang::", r"^sgl_diffusion::"),
            known={
                "health": "source",
                "models": "source",
                "owned_by": "source",
                "endpoints": "docs",
                "metrics": "docs",
                "running": "docs",
                "waiting": "docs",
                "kv_use": "docs",
                "tokens": "docs",
                "prompt_tokens": "docs",
                "phases": "source",
                "titles": "source",
            },
        ),
        Profile(
            name="openai",
            title="OpenAI-compatible server",
            models_static=False,
            metrics_remedy='name the engine in "engine"',
            phases=(_WEIGHTS, _GRAPHS, _STARTED),
            known={"models": "docs", "endpoints": "docs", "phases": "source"},
        ),
    )
}


def get(name: t.Optional[str]) -> Profile:
    """The profile of an engine; without a name, the one that assumes least."""
    try:
        return PROFILES[name or "openai"]
    except KeyError:
        raise UsageError(
            'the engine "%s" is not known: use one of %s, the last for any other that answers like OpenAI'
            % (name, ", ".join(PROFILES))
        ) from None


def titles(name: t.Optional[str]) -> t.Optional[t.Pattern[str]]:
    """What the names of an engine's processes are known by; none where a name proves nothing."""
    patterns = get(name).titles
    return re.compile("|".join(patterns)) if patterns else None


def match(patterns: Patterns, line: str) -> t.Optional[str]:
    """The word of the first pattern that a line fits."""
    for pattern, word in patterns:
        if re.search(pattern, line, re.IGNORECASE):
            return word
    return None
