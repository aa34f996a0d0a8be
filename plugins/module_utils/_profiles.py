# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The engines, as data. Names move between releases, so several names may stand in one field, newest first."""

from __future__ import annotations

import typing as t

from ._profile import Phase, Profile
from ._profiles_servers import SERVERS

__all__ = ("PROFILES",)

_WEIGHTS = r"loading safetensors|load weight begin|starting to load model|loading weights"
_GRAPHS = r"captur(?:ing|e) (?:cuda|cudagraph|batches|.*graph)"
_STARTED = r"application startup complete|uvicorn running on"

LLAMA_CPP = Profile(
    name="llama_cpp",
    title="llama.cpp server",
    port=8080,
    opens_early=True,
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
        Phase(r"load_model: loading model|loading model '", "loading_weights", (0, 90)),
        Phase(r"warming up the model", "warming_up", (90, 99)),
        Phase(r"server is listening|llama_server: listening", "started", (100, 100)),
    ),
    fatal=((r"exiting due to model loading error", "model_failed"),),
    on_sigterm="Ends its streams, then itself. One that is wedged in a step ignores the signal.",
    stop_timeout=60,
    stop_advice="As long as the longest request may take, since there is no limit of its own.",
    known={
        "port": "docs",
        "opens_early": "live",
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
        "fatal": "live",
        "on_sigterm": "live; the wedge from an issue",
        "stop_timeout": "live",
    },
)

VLLM = Profile(
    name="vllm",
    title="vLLM",
    port=8000,
    opens_early=False,
    health="/health",
    health_status=((200, "ready"), (503, "dead")),
    owned_by="vllm",
    metrics="/metrics",
    metrics_remedy="start vLLM without --disable-log-stats",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    tokens=("vllm:generation_tokens_total",),
    prompt_tokens=("vllm:prompt_tokens_total",),
    phases=(
        Phase(r"resolved architecture|initializing a v\d llm engine", "initialising", (0, 3)),
        Phase(_WEIGHTS, "loading_weights", (3, 60)),
        # --enforce-eager announces that it disables torch.compile.
        Phase(
            r"starting torch\.compile|torch\.compile (?:took|takes|and initial)|for vllm's torch\.compile|"
            r"dynamo bytecode transform|compiling a graph|load the compiled graph",
            "compiling",
            (60, 75),
        ),
        Phase(r"kv cache size|available kv cache memory", "allocating_kv_cache", (75, 80)),
        Phase(_GRAPHS, "capturing_graphs", (80, 95)),
        Phase(r"warming up|warmup model\)? took|\bwarmup:", "warming_up", (95, 99)),
        Phase(_STARTED, "started", (100, 100)),
    ),
    fatal=(
        (r"to serve at least one request with the model.{0,40} max seq len", "gpu_out_of_memory"),
        # What is no folder is taken for the name of a repository, and a path is none.
        (r"repo id must be in the form", "model_not_found"),
    ),
    # A front process bears no title before it has set one, and VLLM_PROCESS_NAME_PREFIX may change them all.
    titles=(r"^VLLM::",),
    on_sigterm=(
        "Ends its engine at once and cuts what runs, then may wait without limit for those clients, who get no word; "
        "without such clients it ends within seconds. --shutdown-timeout gives what runs that time; then it answers "
        "new requests with 500, and ends soon after the last one that runs."
    ),
    stop_timeout=60,
    stop_advice="With --shutdown-timeout, 30 s more than that. Without it, all of it passes while a client waits.",
    known={
        "port": "docs",
        "opens_early": "live, 0.32",
        "health": "live, 0.32; 503 from the source",
        "models": "live, 0.32",
        "owned_by": "live, 0.32",
        "endpoints": "live, 0.32",
        "metrics": "live, 0.32",
        "running": "live, 0.32",
        "waiting": "live, 0.32",
        "kv_use": "live, 0.32; the second name from the docs",
        "tokens": "live, 0.32",
        "prompt_tokens": "live, 0.32",
        "phases": "live, 0.32; compiling and capturing from the source",
        "fatal": "live, 0.32",
        "titles": "live, 0.32",
        "on_sigterm": "live, 0.32",
        "stop_timeout": "live, 0.32",
    },
)

SGLANG = Profile(
    name="sglang",
    title="SGLang",
    port=30000,
    opens_early=False,
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
        Phase(r"init torch distributed", "initialising", (0, 5)),
        Phase(_WEIGHTS, "loading_weights", (5, 60)),
        Phase(r"kv cache is allocated|memory pool end", "allocating_kv_cache", (60, 65)),
        Phase(_GRAPHS, "capturing_graphs", (65, 95)),
        # The port opens before the warm-up, which sends one request.
        Phase(_STARTED, "warming_up", (95, 99)),
        Phase(r"fired up and ready to roll", "started", (100, 100)),
    ),
    fatal=(
        (r"not enough memory\. please try to (?:in|de)crease --mem-fraction-static", "gpu_out_of_memory"),
        (r"error: the memory capacity is unbalanced", "gpu_out_of_memory"),
    ),
    titles=(r"^sglang::", r"^sgl_diffusion::"),
    on_sigterm=(
        "/health turns to 503, and it waits without limit until no request is left. SGL_FORCE_SHUTDOWN cuts them. "
        "Whether it takes new requests meanwhile is not verified."
    ),
    stop_timeout=120,
    stop_advice="As long as the longest request may take, since there is no limit of its own.",
    known={
        "port": "docs",
        "opens_early": "source",
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
        "fatal": "source",
        "titles": "source",
        "on_sigterm": "source",
        "stop_timeout": "source",
    },
)

OPENAI = Profile(
    name="openai",
    title="OpenAI-compatible server",
    models_static=False,
    metrics_remedy='name the engine in "engine"',
    phases=(
        Phase(_WEIGHTS, "loading_weights"),
        Phase(_GRAPHS, "capturing_graphs"),
        Phase(_STARTED, "started"),
    ),
    known={"models": "docs", "endpoints": "docs", "phases": "source"},
)

PROFILES: t.Dict[str, Profile] = {profile.name: profile for profile in (LLAMA_CPP, VLLM, SGLANG, *SERVERS, OPENAI)}
