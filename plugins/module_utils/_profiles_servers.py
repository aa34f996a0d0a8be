# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Engines whose server is apart from what computes, or serves other models too, as data."""

from __future__ import annotations

from ._profile import Phase, Profile

__all__ = ("SERVERS",)

OVMS = Profile(
    name="ovms",
    title="OpenVINO Model Server",
    # There is no HTTP without --rest_port, and no port that it would take by itself.
    opens_early=True,
    health="/v2/health/ready",
    health_status=((200, "ready"), (500, "loading"), (503, "loading")),
    models="/v1/config",
    models_shape="ovms_config",
    models_static=False,
    endpoints=(("completions", "/v3/completions"), ("chat", "/v3/chat/completions")),
    metrics="/metrics",
    metrics_remedy="start ovms with --metrics_enable",
    # A request is counted by the model or by the graph that serves it.
    running=("ovms_current_graphs", "ovms_current_requests"),
    adds_up=True,
    phases=(
        Phase(r"server started on port|server listening on port", "initialising", (0, 5)),
        Phase(r'"state": "LOADING"|state changed to: RELOADING', "loading_weights", (5, 95)),
        Phase(r'"state": "AVAILABLE"|state changed to: AVAILABLE', "started", (100, 100)),
    ),
    fatal=(
        (r'"state": "LOADING", "error_code": "UNKNOWN"', "model_failed"),
        (r"state changed to: LOADING_PRECONDITION_FAILED", "model_failed"),
        (r"SIGILL received: illegal instruction", "library_missing"),
    ),
    titles=(r"^ovms$",),
    on_sigterm="Closes its servers, unloads its models and ends; what runs is not drained.",
    stop_timeout=60,
    stop_advice="Withdraw it from the gateway and wait until it is idle first: it does not drain by itself.",
    known={
        "opens_early": "source",
        "health": "source",
        "models": "docs",
        "endpoints": "docs",
        "metrics": "docs",
        "running": "docs",
        "phases": "source; that of graphs from public logs",
        "fatal": "source",
        "titles": "docs",
        "on_sigterm": "source; that requests are cut is unverified",
        "stop_timeout": "unverified",
    },
)

TRITON = Profile(
    name="triton",
    title="Triton Inference Server",
    port=8000,
    opens_early=False,
    health="/v2/health/ready",
    health_status=((200, "ready"), (400, "loading"), (503, "loading")),
    models="/v2/repository/index",
    models_method="POST",
    models_shape="triton_index",
    models_static=False,
    endpoints=(("generate", "/v2/models/{model}/generate"),),
    metrics="/metrics",
    metrics_port=8002,
    metrics_remedy="use a backend that counts what runs, such as vLLM's or TensorRT-LLM's, and --allow-metrics",
    # Triton counts what waits for a backend; what runs, and waits inside, is counted by some backends only.
    running=("vllm:num_requests_running", 'nv_trt_llm_request_metrics{request_type="active"}'),
    waiting=(
        "nv_inference_pending_request_count",
        "vllm:num_requests_waiting",
        'nv_trt_llm_request_metrics{request_type="waiting"}',
    ),
    adds_up=True,
    kv_use=("vllm:kv_cache_usage_perc", 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}'),
    tokens=("vllm:generation_tokens_total",),
    prompt_tokens=("vllm:prompt_tokens_total",),
    phases=(
        Phase(r"\bloading: \S+:\d", "loading_weights", (0, 95)),
        Phase(r"successfully loaded '", "warming_up", (95, 99)),
        Phase(r"started httpservice at", "started", (100, 100)),
    ),
    fatal=(
        (r"failed to poll from model repository", "model_not_found"),
        (r"error: creating server: .{0,80}failed to load all models", "model_failed"),
    ),
    titles=(r"^tritonserver$", r"^triton_python_b"),
    on_sigterm="Takes nothing new and drains, for --exit-timeout-secs at most, 30 s by default.",
    stop_timeout=60,
    stop_advice="30 s more than --exit-timeout-secs.",
    known={
        "port": "docs",
        "opens_early": "docs, public logs",
        "health": "source",
        "models": "source",
        "endpoints": "source of vLLM's backend; TensorRT-LLM's unverified",
        "metrics": "docs",
        "running": "docs of TensorRT-LLM's backend; vLLM's unverified",
        "waiting": "source, newer releases only",
        "kv_use": "docs of TensorRT-LLM's backend; vLLM's unverified",
        "tokens": "docs of vLLM's backend",
        "prompt_tokens": "docs of vLLM's backend",
        "phases": "source",
        "fatal": "source",
        "titles": "issue",
        "on_sigterm": "source",
        "stop_timeout": "source",
    },
)

TGI = Profile(
    name="tgi",
    title="Text Generation Inference",
    port=3000,
    opens_early=False,
    health="/health",
    health_status=((200, "ready"),),
    metrics="/metrics",
    metrics_remedy="wait for its first request: it counts nothing before",
    running=("tgi_batch_current_size",),
    waiting=("tgi_queue_size",),
    marker="tgi_batch_max_total_tokens",
    tokens=("tgi_request_generated_tokens_sum",),
    prompt_tokens=("tgi_request_input_length_sum",),
    phases=(
        Phase(r"starting check and download process|download: ?\[|downloading", "downloading", (0, 20)),
        # The second repeats every ten seconds for ever, and is no movement.
        Phase(r"starting shard|waiting for shard to be ready", "loading_weights", (20, 80)),
        Phase(r"shard ready in|starting webserver", "initialising", (80, 85)),
        Phase(r"warming up model", "warming_up", (85, 99)),
        Phase(r"text_generation_router\S* .{0,80}\bconnected\b", "started", (100, 100)),
    ),
    fatal=(
        (r"shard \d+ (?:crashed|failed to start)|webserver crashed|ShardCannotStart|ShardFailed", "child_failed"),
        (r"not enough memory to handle \d+ (?:prefill|total) tokens", "gpu_out_of_memory"),
        (r"NotEnoughCUDADevices", "gpu_missing"),
        (r"ArgumentValidation\(", "bad_arguments"),
    ),
    titles=(r"^text-generation",),
    on_sigterm="Ends its web server, which finishes what runs, then the shards: 90 s for each, then SIGKILL.",
    stop_timeout=210,
    stop_advice="Twice 90 s, and 30 s more.",
    known={
        "port": "source",
        "opens_early": "source",
        "health": "source",
        "models": "source",
        "endpoints": "source",
        "metrics": "source",
        "running": "source",
        "waiting": "source",
        "tokens": "source; moves when a request ends",
        "prompt_tokens": "source; moves when a request ends",
        "phases": "source",
        "fatal": "source",
        "titles": "source",
        "on_sigterm": "source",
        "stop_timeout": "source",
    },
)

OLLAMA = Profile(
    name="ollama",
    title="Ollama",
    port=11434,
    opens_early=True,
    health="/api/version",
    health_status=((200, "ready"),),
    models="/api/tags",
    models_shape="ollama_tags",
    loads_on_request=True,
    metrics_remedy="use another engine where a drain must be proved: Ollama counts nothing",
    phases=(
        # It loads a model only when that is asked for: the first token waits for the whole load.
        Phase(r"starting (?:llama|runner)|waiting for (?:llama|server)|load_tensors:", "loading_weights", (0, 95)),
        Phase(r"(?:llama-server|llama runner|runner) started in", "started", (100, 100)),
    ),
    fatal=(
        (r"model requires more system memory", "host_out_of_memory"),
        (r"(?:llama-server|llama runner) process (?:has terminated|no longer running)", "child_failed"),
        (r"timed out waiting for llama", "watchdog"),
    ),
    titles=(r"^ollama_llama_",),
    on_sigterm="Closes all connections at once, kills its runners and ends.",
    stop_timeout=60,
    stop_advice="Withdraw it from the gateway first: it does not drain by itself.",
    known={
        "port": "docs",
        "opens_early": "source",
        "health": "source",
        "models": "source",
        "endpoints": "docs",
        "phases": "source",
        "fatal": "source",
        "titles": "unverified, older builds only",
        "on_sigterm": "source",
        "stop_timeout": "source",
    },
)

SERVERS = (OVMS, TRITON, TGI, OLLAMA)
