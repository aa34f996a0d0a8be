# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import re
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _causes, _ends, _engines

LESS_THAN_DESIRED = (
    "(EngineCore pid=253) ValueError: Free memory on device cuda:0 (85.92/121.69 GiB) on startup is less than desired "
    "GPU memory utilization (0.92, 111.95 GiB). Decrease GPU memory utilization or reduce GPU memory used by others."
)
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB "
    "of which 601.19 MiB is free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory "
    "this process has 966.00 MiB memory in use."
)


@pytest.mark.parametrize(
    ("engine", "line", "kind"),
    [
        ("vllm", LESS_THAN_DESIRED, "gpu_out_of_memory"),
        ("vllm", TORCH, "gpu_out_of_memory"),
        ("vllm", "ValueError: No available memory for the cache blocks. Try increasing it.", "gpu_out_of_memory"),
        (
            "vllm",
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
            "gpu_out_of_memory",
        ),
        (
            "sglang",
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "gpu_out_of_memory",
        ),
        (
            "llama_cpp",
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: "
            "out of memory",
            "gpu_out_of_memory",
        ),
        ("llama_cpp", "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 314572800", "gpu_out_of_memory"),
        ("ovms", "[CL] exception: CL_OUT_OF_RESOURCES", "gpu_out_of_memory"),
        ("tgi", "Not enough memory to handle 4096 prefill tokens. You need to decrease it", "gpu_out_of_memory"),
        (
            "ollama",
            "model requires more system memory (19.8 GiB) than is available (14.0 GiB)",
            "host_out_of_memory",
        ),
        ("vllm", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "host_out_of_memory"),
        ("vllm", "Out of memory: Killed process 4121 (VLLM::Worker)", "host_out_of_memory"),
        (
            "vllm",
            "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
            "port_in_use",
        ),
        ("triton", "failed to start HTTP service: Unavailable - Socket '0.0.0.0:8000' already in use", "port_in_use"),
        ("llama_cpp", "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port_in_use"),
        ("vllm", "Failed to initialize NVML: Driver/library version mismatch", "driver_mismatch"),
        ("vllm", "RuntimeError: No CUDA GPUs are available", "gpu_missing"),
        ("vllm", "RuntimeError: Failed to infer device type", "gpu_missing"),
        ("sglang", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "gpu_error"),
        ("vllm", "OSError: [Errno 28] No space left on device", "disk_full"),
        ("sglang", "OSError: [Errno 24] Too many open files", "too_many_files"),
        ("vllm", "OSError: You are trying to access a gated repo.", "model_access_denied"),
        ("vllm", "huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized", "model_access_denied"),
        ("vllm", "safetensors_rust.SafetensorError: Error while deserializing header", "model_corrupt"),
        ("llama_cpp", "tensor 'x' data is not within the file bounds, model is corrupted", "model_corrupt"),
        ("vllm", "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "model_unsupported"),
        ("llama_cpp", "error loading model architecture: unknown model architecture: 'foo'", "model_unsupported"),
        ("llama_cpp", "gguf_init_from_file: failed to open GGUF file '/m.gguf'", "model_not_found"),
        ("vllm", "OSError: /models/x is not a local folder and is not a valid model identifier", "model_not_found"),
        (
            "vllm",
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/opt/vllm/models/none'. Use `repo_type` argument if needed.",
            "model_not_found",
        ),
        ("vllm", "ImportError: libcudart.so.12: cannot open shared object file", "library_missing"),
        ("vllm", "api_server.py: error: unrecognized arguments: --tp 4", "bad_arguments"),
        ("llama_cpp", "error: invalid argument: --foo", "bad_arguments"),
        ("vllm", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "communication_failed"),
        ("sglang", "Watchdog timeout (self.watchdog_timeout=300)", "watchdog"),
        ("vllm", "PermissionError: [Errno 13] Permission denied: '/cache'", "permission_denied"),
        ("sglang", "Received sigquit from a child proces. It usually means the child failed.", "child_failed"),
        ("vllm", "RuntimeError: Engine core initialization failed. See root cause above.", "child_failed"),
        ("tgi", "ERROR text_generation_launcher: Shard 0 failed to start", "child_failed"),
        ("ollama", "llama runner process has terminated: exit status 2", "child_failed"),
        ("sglang", "Initialization failed. warmup error: Traceback (most recent call last):", "warmup_failed"),
        ("triton", "E0101 failed to load 'qwen' version 1: Internal: no such engine", "model_failed"),
        ("triton", "error: creating server: Internal - failed to load all models", "model_failed"),
        (
            "ovms",
            'STATUS CHANGE: Version 1 of model m status change. New status: ( "state": "LOADING", '
            '"error_code": "UNKNOWN" )',
            "model_failed",
        ),
    ],
)
def test_a_line_names_its_cause(engine: str, line: str, kind: str) -> None:
    cause = _causes.cause_of(_engines.get(engine), line)
    assert cause is not None
    assert (cause["kind"], cause["line"]) == (kind, line)
    assert kind in _causes.KINDS


@pytest.mark.parametrize(
    "line",
    [
        "Loading safetensors checkpoint shards:  25% Completed | 1/4",
        "INFO: Application startup complete.",
        "If you are running out of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode.",
        "Set PYTORCH_ALLOC_CONF=expandable_segments:True to avoid out of memory",
        "Lower the batch size to prevent out of memory errors",
        "Found ulimit of 1024 and failed to automatically increase with error current limit exceeds maximum limit. "
        "This can cause fd limit errors like `OSError: [Errno 24] Too many open files`",
        "server_args=ServerArgs(model_path='/m', note='permission denied: out of memory')",
        "non-default args: {'model': '/models/cuda out of memory'}",
        '127.0.0.1:55 - "GET /address%20already in use HTTP/1.1" 404',
        "Available KV cache memory: 55.2 GiB",
        "Port 5557 is already in use, trying port 5558",
        "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
        "Failed to import from vllm._C: ModuleNotFoundError(\"No module named 'vllm._C'\")",
        "",
    ],
)
def test_a_line_that_only_bears_the_words_names_none(line: str) -> None:
    assert _causes.cause_of(_engines.get("vllm"), line) is None
    assert _causes.cause_of(None, line) is None


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        (LESS_THAN_DESIRED, {"free_mib": 87982.1, "total_mib": 124610.6, "wanted_mib": 114636.8}),
        (
            "ValueError: Free memory on device (6.9/8.0 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 7.2 GiB).",
            {"free_mib": 7065.6, "total_mib": 8192.0, "wanted_mib": 7372.8},
        ),
        (TORCH, {"wanted_mib": 1996.8, "total_mib": 14919.7, "free_mib": 601.2}),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.65 GiB total capacity; 22.10 GiB already "
            "allocated; 8.56 MiB free; 22.3 GiB reserved in total by PyTorch)",
            {"wanted_mib": 20.0, "total_mib": 24217.6, "free_mib": 8.6},
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB.",
            {"wanted_mib": 44001.3},
        ),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: "
            "out of memory",
            {"wanted_mib": 4096.0},
        ),
        ("ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 314572800", {"wanted_mib": 300.0}),
        (
            "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (3.50 GiB).",
            {"wanted_mib": 16384.0, "free_mib": 3584.0},
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", {}),
        ("CUDA out of memory. Tried to allocate 1.2.3 GiB.", {}),
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "15.11 GiB. Of the allocated memory 13.20 GiB is allocated by PyTorch",
            {"wanted_mib": 2048.0, "total_mib": 15472.6},
        ),
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "191.98 GiB of which 0 bytes is free.",
            {"wanted_mib": 2048.0, "total_mib": 196587.5, "free_mib": 0.0},
        ),
    ],
)
def test_figures_come_from_the_line(line: str, figures: dict[str, float]) -> None:
    cause = _causes.cause_of(_engines.get("sglang"), line)
    assert cause is not None
    assert cause["kind"] == "gpu_out_of_memory"
    assert cause.get("figures", {}) == figures


def test_figures_of_the_memory_of_the_host_are_read_too() -> None:
    for line, figures in (
        (
            "model requires more system memory (19.8 GiB) than is available (14.0 GiB)",
            {"wanted_mib": 20275.2, "free_mib": 14336.0},
        ),
        ("ggml_aligned_malloc: insufficient memory (attempted to allocate 244.19 MB)", {"wanted_mib": 244.2}),
    ):
        cause = _causes.cause_of(_engines.get("ollama"), line)
        assert cause is not None
        assert (cause["kind"], cause["figures"]) == ("host_out_of_memory", figures)


# Ends of real starts, shortened: the engine, the kind, and which line tells most.
LLAMA = "0.00.396.048 E "
ENDS = {
    "a file that is not there": (
        "llama_cpp",
        "model_not_found",
        1,
        (
            LLAMA + "common_fit_params: encountered an error while trying to fit params to free device memory: failed "
            "to load model",
            LLAMA + "gguf_init_from_file: failed to open GGUF file '/m/none.gguf' (No such file or directory)",
            LLAMA + "llama_model_load: error loading model: llama_model_loader: failed to load model from /m/none.gguf",
            LLAMA + "llama_model_load_from_file_impl: failed to load model",
            LLAMA + "srv  llama_server: exiting due to model loading error",
        ),
    ),
    "a file that is something else": (
        "llama_cpp",
        "model_corrupt",
        1,
        (
            LLAMA + "common_fit_params: encountered an error while trying to fit params: failed to load model",
            LLAMA + "gguf_init_from_reader: invalid magic characters: 'Zri?', expected 'GGUF'",
            LLAMA + "llama_model_load: error loading model: llama_model_loader: failed to load model from bad.gguf",
        ),
    ),
    "a file that is cut short": (
        "llama_cpp",
        "model_corrupt",
        0,
        (
            LLAMA + "llama_model_load: error loading model: tensor 'blk.0.ffn_gate.weight' data is not within the file "
            "bounds, model is corrupted or incomplete",
            LLAMA + "srv    load_model: failed to load model, 'cut.gguf'",
        ),
    ),
    "a host without memory": (
        "llama_cpp",
        "host_out_of_memory",
        1,
        (
            "0.00.263.261 W llama_context: n_ctx_seq (1000192) > n_ctx_train (65536) -- possible overflow",
            LLAMA + "ggml_aligned_malloc: insufficient memory (attempted to allocate 244.19 MB)",
            LLAMA + "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 256049152",
            LLAMA + "ggml_backend_buft_alloc_buffer_n_default: failed to allocate CPU buffer of size 256049152",
            LLAMA + "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        ),
    ),
    "a port that is taken": (
        "llama_cpp",
        "port_in_use",
        0,
        (
            LLAMA + "srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18999",
            LLAMA + "srv  llama_server: exiting due to HTTP server error",
        ),
    ),
    "a GPU without memory": (
        "vllm",
        "gpu_out_of_memory",
        1,
        (
            "(EngineCore pid=253) ERROR EngineCore failed to start.",
            LESS_THAN_DESIRED,
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
        ),
    ),
    "weights that do not fit": (
        "vllm",
        "gpu_out_of_memory",
        1,
        (
            "ERROR [gpu_model_runner.py:5403] Failed to load model - not enough GPU memory. Try lowering it",
            TORCH,
        ),
    ),
    "more GPUs than there are": (
        "vllm",
        "gpu_missing",
        1,
        (
            "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ParallelConfig",
            "(APIServer pid=1)   Value error, World size (2) is larger than the number of available GPUs (1) here",
        ),
    ),
    "somebody else on one of the GPUs": (
        "sglang",
        "gpu_out_of_memory",
        0,
        (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=147.9, local_gpu_memory=176.2",
            "Received sigquit from a child proces. It usually means the child failed.",
        ),
    ),
}


@pytest.mark.parametrize("name", list(ENDS))
def test_of_a_whole_log_the_most_telling_line_is_kept(name: str) -> None:
    engine, kind, at, lines = ENDS[name]
    cause = None
    for line in lines:
        cause = _causes.better(cause, _causes.cause_of(_engines.get(engine), line))
    assert cause is not None
    assert (cause["kind"], cause["line"]) == (kind, lines[at])


def made(kind: str, **figures: float) -> _causes.Cause:
    return {"kind": kind, "line": kind, **({"figures": figures} if figures else {})}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (None, None, None),
        (made("killed"), None, 1),
        (None, made("killed"), 2),
        (made("gpu_out_of_memory"), made("child_failed"), 1),
        (made("child_failed"), made("gpu_out_of_memory"), 2),
        (made("exited"), made("killed"), 2),
        (made("permission_denied"), made("bad_arguments"), 2),
        (made("driver_mismatch"), made("model_not_found"), 2),
        (made("port_in_use"), made("gpu_out_of_memory"), 1),
        (made("gpu_out_of_memory"), made("gpu_out_of_memory", wanted_mib=1.0), 2),
        (made("gpu_out_of_memory", wanted_mib=1.0), made("gpu_out_of_memory", wanted_mib=2.0), 1),
        (made("gpu_out_of_memory", wanted_mib=1.0), made("gpu_out_of_memory"), 1),
    ],
)
def test_the_more_telling_cause_is_kept(
    first: _causes.Cause | None, second: _causes.Cause | None, kept: int | None
) -> None:
    assert _causes.better(first, second) is {None: None, 1: first, 2: second}[kept]


def test_every_kind_is_explained_and_can_be_told() -> None:
    told = {kind for _pattern, kind in _causes.CAUSES}
    for profile in _engines.PROFILES.values():
        told |= {kind for _pattern, kind in profile.fatal}
    assert told | set(_ends.KINDS) == set(_causes.KINDS)
    assert {kind for kinds in _causes.VAGUE for kind in kinds} <= set(_causes.KINDS)


def alternatives(pattern: str) -> list[str]:
    """What an expression gives to choose from, outside of all groups."""
    found, depth = [""], 0
    for sign in pattern:
        depth += (sign in "([") - (sign in ")]")
        if sign == "|" and not depth:
            found.append("")
        else:
            found[-1] += sign
    return found


def test_every_pattern_needs_one_of_the_hints() -> None:
    """A hint counts only outside of groups, since those give to choose."""
    for pattern, _kind in _causes.CAUSES:
        for text in alternatives(pattern):
            needed = re.sub(r"\(\?[:!<].*?\)", "#", text).lower()
            assert any(hint in needed for hint in _causes.HINTS), text


@pytest.mark.parametrize(
    "piece", ["model ", "no such file or directory ", "cuda out of ", "40 GiB (", "enginecore ", "x"]
)
def test_a_long_line_takes_no_long_time(piece: str) -> None:
    line = piece * (16384 // len(piece))
    began = time.process_time()
    _causes.cause_of(_engines.get("vllm"), line)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(("before", "after"), [(3000, 0), (0, 3000), (600, 600), (10, 10)])
def test_of_a_long_line_the_part_that_names_the_cause_is_told(before: int, after: int) -> None:
    line = "x" * before + " CUDA out of memory" + "y" * after
    cause = _causes.cause_of(None, line)
    assert cause is not None and "CUDA out of memory" in cause["line"]
    assert len(cause["line"]) == min(len(line), 1000)
