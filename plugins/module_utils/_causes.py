# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Why a start failed, as a line of the log tells it: the kind of the cause, and what figures it gives."""

from __future__ import annotations

import re
import typing as t

from . import _matching
from ._profile import Patterns, Profile

__all__ = ("CAUSES", "KINDS", "Cause", "better", "cause_of", "figures_in")

# kind, line, and figures for what ran out of memory.
Cause = t.Dict[str, t.Any]

# The first pattern that a line fits names the cause; what an engine alone writes comes before these.
CAUSES: Patterns = (
    # What a child of systemd writes that could not become the command.
    (r"^\S+\.service: failed |^\S+\.service: unable to |^\S+\.service: changing to ", "bad_unit"),
    (
        r"oom-kill|out of memory: killed process|killed process .{0,80} total-vm|"
        r"defaultcpuallocator: (?:can't|not enough)|cannot allocate memory|std::bad_alloc(?!.{0,80}cuda)|"
        r"^memoryerror\b|unable to allocate .{0,40} for an array|insufficient memory \(attempted to allocate|"
        r"ggml_backend_cpu\S*: failed to allocate|failed to allocate CPU\S* buffer",
        "host_out_of_memory",
    ),
    (
        # Engines also advise those that are "running out of memory".
        r"(?<!running )(?<!run )(?<!avoid )(?<!go )out of memory(?! errors\b)|outofmemoryerror|out_of_device_memory|"
        r"(?:cuda|hip)malloc failed|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|OUT_OF_RESOURCES|"
        r"not enough gpu memory|CL_MEM_OBJECT_ALLOCATION_FAILURE|less than desired GPU memory utilization|"
        r"no available memory for the cache blocks|larger than the available KV cache memory|"
        r"larger than the maximum number of tokens that can be stored in KV cache|"
        r"(?:failed|unable) to allocate (?:buffer|.{0,40} buffer)|exceed allocatable memory of the device",
        "gpu_out_of_memory",
    ),
    (
        # One that tries the next port has no trouble.
        r"address already in use|couldn't bind|failed to bind|errno 98\b|socket '[^']*' already in use|"
        r"port \d+ is already in use(?!, trying)",
        "port_in_use",
    ),
    (
        r"driver/library version mismatch|driver version is insufficient|found no NVIDIA driver|"
        r"NVIDIA driver on your system is too old|forward compatibility was attempted|"
        r"system has unsupported display driver|CUDA initialization|CUDA driver initialization failed",
        "driver_mismatch",
    ),
    (
        r"gpu is lost|fallen off the bus|unable to determine the device handle|failed to infer device type|"
        r"no CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|"
        r"larger than the number of available GPUs",
        "gpu_missing",
    ),
    (
        r"illegal memory access|device-side assert|unspecified launch failure|uncorrectable (?:ecc|nvlink) error|"
        r"cudaErrorECCUncorrectable|cudaErrorLaunchFailure|no kernel image is available",
        "gpu_error",
    ),
    (
        r"no space left on device|disk quota exceeded|not enough free disk space|"
        r"error while creating shared memory segment",
        "disk_full",
    ),
    (r"too many open files", "too_many_files"),
    (
        r"gated repo|access to model .{1,200} is restricted|40[13] client error|"
        r"invalid credentials in authorization header",
        "model_access_denied",
    ),
    (
        r"error while deserializing header|data is not within the file bounds|model is corrupted or incomplete|"
        r"invalid magic (?:number|characters)|metadataincompletebuffer",
        "model_corrupt",
    ),
    (
        r"model architectures? .{1,200} (?:is|are) not supported|unknown model architecture|"
        r"checkpoint you are trying to load has model type|unsupported model type",
        "model_unsupported",
    ),
    (
        r"failed to open GGUF|is not a local folder and is not a valid model|couldn't connect to .{0,60}huggingface|"
        r"repository not found|repositorynotfounderror|model path does not exist|cannot find any model weights|"
        r"no such file or directory.{0,300}(?:model|gguf|safetensors|config\.json)|"
        r"(?:model|gguf|safetensors|config\.json).{0,300}no such file or directory|"
        r"does not appear to have a file named config\.json",
        "model_not_found",
    ),
    (
        r"error while loading shared libraries|cannot open shared object file|^modulenotfounderror|^importerror\b|"
        r"undefined symbol:",
        "library_missing",
    ),
    (
        r"unrecognized arguments|unrecognized option|invalid argument:|unknown argument|arguments? (?:is|are) required|"
        r"the following required arguments were not provided|unexpected argument '|error: argument |"
        r"error: invalid value '|unknown (?:flag|option)\b|\bvalue error, |user-specified max_model_len|"
        r"must be divisible by tensor parallel size",
        "bad_arguments",
    ),
    (r"\bnccl error|ncclsystemerror|ncclunhandledcudaerror|ncclinternalerror|\brccl error", "communication_failed"),
    (r"initialization failed\. warmup error|warmup failed", "warmup_failed"),
    (r"watchdog timeout|watchdog caught collective operation timeout", "watchdog"),
    (r"permission denied", "permission_denied"),
    (
        r"received sigquit from a child|engine core (?:initialization )?failed|enginecore.{0,80}failed|"
        r"enginecore.{0,80}died|enginedeaderror|workerproc initialization failed|worker proc .{0,80}died",
        "child_failed",
    ),
    (
        r"failed to load all models|failed to load '[^']*' version|error loading model|failed to load model",
        "model_failed",
    ),
)

# Every pattern above needs one of these, in lower case: most lines have none, and looking for a text is cheap.
HINTS = (
    *("alloc", "memory", "killed", "oom-kill", "kv cache", "resources", "already in use", "bind", "errno", "driver"),
    *("mismatch", "cuda init", "cuda gpus", "available gpus", "gpu is lost", "fallen off", "device", "illegal"),
    *("launch", "uncorrectable", "kernel image", "failed", "space left", "quota", "disk space", "too many", "gated"),
    *("restricted", "client error", "credentials", "deserializ", "file bounds", "corrupted", "magic", "incomplete"),
    *("not supported", "unknown", "model type", "error", "not a local", "not found", "notfound", "not exist"),
    *("cannot find", "no such file", "not appear", "couldn't connect", "shared object", "undefined symbol"),
    *("unrecognized", "invalid", "required", "not provided", "unexpected", "max_model_len", "divisible", "watchdog"),
    *("denied", "sigquit", "died", "worker proc", "compatibility", ".service: "),
)

# What each kind means.
KINDS: t.Dict[str, str] = {
    "gpu_out_of_memory": "the GPU has not enough free memory",
    "host_out_of_memory": "the host, or the memory limit of the unit, has not enough memory",
    "port_in_use": "another process has the port",
    "driver_mismatch": "the driver does not fit the libraries, or is not there",
    "gpu_missing": "a GPU that the engine asks for cannot be used",
    "gpu_error": "a computation on the GPU failed",
    "disk_full": "a file system is full, which /dev/shm may be too",
    "too_many_files": "the limit of open files is reached",
    "model_access_denied": "the model may not be downloaded with the credentials at hand",
    "model_corrupt": "a file of the model is damaged or cut short",
    "model_unsupported": "the engine does not know this kind of model",
    "model_not_found": "the model is not where it is looked for",
    "library_missing": "a library or Python module is missing, or of another version",
    "bad_arguments": "the engine does not take its arguments",
    "communication_failed": "the GPUs of the service cannot talk with each other",
    "permission_denied": "the account of the service may not do something",
    "watchdog": "a watchdog ended it: the engine's own, or systemd's (WatchdogSec=)",
    "warmup_failed": "the first generation failed",
    "killed": "its main process was killed",
    "exited": "its main process ended by itself",
    "timeout": "a time limit of the unit was over, and systemd ended it",
    "condition": "systemd skipped its start, because a condition of the unit is not met",
    "bad_unit": "systemd cannot load the unit, or cannot run its command",
    "model_failed": "a model could not be loaded",
    "child_failed": "one of its processes failed",
}

# From telling to vague, by what is in none of these rows: the first are also seen in logs of engines that go on.
VAGUE = (
    (
        "driver_mismatch",
        "gpu_missing",
        "library_missing",
        "watchdog",
        "permission_denied",
        "communication_failed",
        "timeout",
    ),
    ("killed", "warmup_failed", "model_failed"),
    ("child_failed", "exited"),
)

# The options that a server starts with, and requests, may hold any word.
# vLLM warns on every start under a low limit of open files, and quotes what may come of it.
NO_CAUSE = re.compile(
    r"server_args=|non-default args:|args: namespace|\"(?:get|post|head|put|delete) /|"
    r"found ulimit of \d+ and failed to automatically increase",
    re.I,
)
LINE_WIDTH = 1000  # characters of a line that are told
BEFORE = 200  # of them before what names the cause
OUT_OF_MEMORY = ("gpu_out_of_memory", "host_out_of_memory")
UNITS = {"B": 1.0 / (1 << 20), "KIB": 1.0 / 1024, "MIB": 1.0, "GIB": 1024.0, "TIB": 1024.0 * 1024}
UNITS.update({"BYTES": UNITS["B"], "KB": UNITS["KIB"], "MB": UNITS["MIB"], "GB": UNITS["GIB"], "TB": UNITS["TIB"]})
SIZE = r"([0-9][0-9.]*)\s*(B|bytes|[KMGT]i?B)"


def _pattern(text: str) -> t.Pattern[str]:
    return re.compile(text.replace("SIZE", SIZE), re.IGNORECASE)


# Each with the figures that its sizes are, in their order.
FIGURES: t.Tuple[t.Tuple[t.Pattern[str], t.Tuple[str, ...]], ...] = (
    # "a/b GiB": only the second has a unit.
    (
        _pattern(
            r"free memory on device .*?\(([0-9.]+)/SIZE\) on startup is less than desired GPU memory utilization "
            r"\([0-9.]+,\s*SIZE\)"
        ),
        ("free_mib", "total_mib", "wanted_mib"),
    ),
    (
        _pattern(r"tried to allocate SIZE\..*?total capacity of SIZE of which SIZE is free"),
        ("wanted_mib", "total_mib", "free_mib"),
    ),
    # Before torch 2.1 or so.
    (
        _pattern(r"tried to allocate SIZE \(GPU \d+; SIZE total capacity; .*?SIZE free"),
        ("wanted_mib", "total_mib", "free_mib"),
    ),
    (_pattern(r"tried to allocate SIZE\..*?total capacity of SIZE"), ("wanted_mib", "total_mib")),
    (_pattern(r"(?:tried|attempted) to allocate SIZE"), ("wanted_mib",)),
    (
        _pattern(r"SIZE KV cache is needed, which is larger than the available KV cache memory \(SIZE\)"),
        ("wanted_mib", "free_mib"),
    ),
    (_pattern(r"allocating SIZE on device \d+: (?:cuda|hip|musa)malloc failed"), ("wanted_mib",)),
    (_pattern(r"failed to allocate .*buffer of size ([0-9]+)()"), ("wanted_mib",)),
    # Of the host's memory.
    (_pattern(r"requires more system memory \(SIZE\) than is available \(SIZE\)"), ("wanted_mib", "free_mib")),
)


def cause_of(profile: t.Optional[Profile], line: str) -> t.Optional[Cause]:
    """The cause that a line of the log names, if it names one."""
    kind, at = _kind_of(profile, line)
    if at is None or NO_CAUSE.search(line):
        return None
    cause: Cause = {"kind": kind, "line": _around(line, at)}
    figures = figures_in(line) if kind in OUT_OF_MEMORY else {}
    if figures:
        cause["figures"] = figures
    return cause


def _kind_of(profile: t.Optional[Profile], line: str) -> t.Tuple[str, t.Optional[int]]:
    """The kind of the cause and where in the line it is named; no place for a line that names none."""
    if profile is not None:
        find = _matching.finder(profile, "fatal")
        for pattern, kind in profile.fatal:
            at = find(pattern, line)
            if at is not None:
                return kind, at
    low = line.lower()
    for pattern, kind in CAUSES if any(hint in low for hint in HINTS) else ():
        found = re.search(pattern, line, re.IGNORECASE)
        if found is not None:
            return kind, found.start()
    return "", None


def _around(line: str, at: int) -> str:
    """As much of a line as can be read, with what was found in it."""
    begin = max(0, min(at - BEFORE, len(line) - LINE_WIDTH))
    return line[begin : begin + LINE_WIDTH]


def better(a: t.Optional[Cause], b: t.Optional[Cause]) -> t.Optional[Cause]:
    """The more telling of two causes; of equals the first, unless only the second has figures."""
    if a is None or b is None:
        return a or b
    if _vagueness(b) < _vagueness(a):
        return b
    more = a["kind"] == b["kind"] and len(b.get("figures") or ()) > len(a.get("figures") or ())
    return b if more else a


def figures_in(line: str) -> t.Dict[str, float]:
    """How much memory was free, wanted and there, as far as the line says, in MiB."""
    for pattern, names in FIGURES:
        found = pattern.search(line)
        if found is None:
            continue
        words = list(found.groups())
        if len(words) == 2 * len(names) - 1:
            words.insert(1, words[2])  # "a/b GiB"
        try:
            return {
                name: round(float(words[2 * at]) * UNITS[(words[2 * at + 1] or "B").upper()], 1)
                for at, name in enumerate(names)
            }
        except ValueError:
            return {}
    return {}


def _vagueness(cause: Cause) -> int:
    return next((at for at, kinds in enumerate(VAGUE, 1) if cause["kind"] in kinds), 0)
