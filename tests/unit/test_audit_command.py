# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What an audit reads from command lines: engines, ports, devices, times; and what it must not read into them."""

from __future__ import annotations

import shlex
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _audit_command, _clients, _engines
from ansible_collections.gpuops.serving.plugins.module_utils._audit_command import Port

IMAGE = "docker run --rm --name q -p 127.0.0.1:8000:80 -p 9000:9000/udp --gpus device=1,2 reg:5000/vllm/vllm-openai:v1"


def image_of(line: str) -> str:
    clients = _clients.find(shlex.split(line), {})
    return clients[0].image if clients else ""


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("/opt/vllm/bin/vllm serve m --port 8000", "vllm"),
        ("/usr/bin/env HF_HUB_OFFLINE=1 /opt/vllm/bin/vllm serve m", "vllm"),
        ("/opt/venv/bin/python3 -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("/usr/bin/uv run vllm serve m", "vllm"),
        ("/usr/bin/numactl --cpunodebind=0 -m 0 /opt/llama-server -m x.gguf", "llama_cpp"),
        ("/usr/bin/nice -n 5 /opt/llama-server", "llama_cpp"),
        ("/bin/bash -lc 'source /opt/env && exec python -m sglang.launch_server --tp 2'", "sglang"),
        ("/bin/su vllm -c 'exec sglang serve m'", "sglang"),
        ("/usr/sbin/runuser -u vllm -- /opt/sglang serve", "sglang"),
        ("/usr/bin/setpriv --reuid vllm --keep-groups /usr/bin/ovms --rest_port 1", "ovms"),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", "triton"),
        ("/usr/bin/text-generation-launcher --model-id m", "tgi"),
        ("/usr/local/bin/ollama serve", "ollama"),
        ("/usr/bin/python3 -m llama_cpp.server", "llama_cpp"),
        ("/usr/sbin/runuser -u vllm -- /opt/python -m vllm.serve -c x.yml", "vllm"),
        ("/usr/sbin/runuser vllm -c '/opt/vllm serve m'", "vllm"),
        ("/bin/bash -o pipefail -c 'vllm serve m'", "vllm"),
        (IMAGE, "vllm"),
        ("docker run lmsysorg/sglang:latest python3 -m sglang.launch_server", "sglang"),
        ("docker run my/image vllm serve m", "vllm"),
        ("podman run nvcr.io/nvidia/tritonserver:24.01-py3 x", "triton"),
        ("podman run ghcr.io/huggingface/text-generation-inference:3.0 --model-id x", "tgi"),
        ("docker run ghcr.io/ggml-org/llama.cpp:server-cuda -m x", "llama_cpp"),
        # What only looks like one.
        ("/usr/bin/vllm-exporter --port 8000", ""),
        ("/usr/bin/tail -F /var/log/ovms", ""),
        ("/usr/bin/vllm bench serve", ""),
        ("/usr/bin/ollama pull x", ""),
        ("/usr/bin/python3 /opt/vllm/check.py", ""),
        ("/bin/echo vllm", ""),
        ("/bin/bash /opt/x.sh -c 'vllm serve m'", ""),
        ("docker run prom/vllm-exporter", ""),
        ("docker start -a vllm", ""),
        ("/bin/sh -c 'unbalanced", ""),
        ("/opt/start.sh", ""),
    ],
)
def test_the_engine_of_a_command_line(line: str, engine: str) -> None:
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split(" ", 2)
    assert _audit_command.engine_of(words, image_of(line) if "'" not in line else "") == engine


def test_no_words_are_no_engine() -> None:
    assert _audit_command.engine_of([]) == ""
    assert _audit_command.engine_of(["A=b"]) == ""


def test_shells_in_shells_end() -> None:
    script = "vllm serve"
    for _depth in range(9):
        script = "sh -c " + shlex.quote(script)
    assert _audit_command.engine_of(shlex.split(script)) == ""


@pytest.mark.parametrize(
    ("engine", "line", "ports"),
    [
        ("vllm", "vllm serve m", [Port(8000)]),
        ("vllm", "vllm serve m --port 9000", [Port(9000)]),
        ("vllm", "vllm serve m --port=9000 --host 127.0.0.1", [Port(9000, "127.0.0.1")]),
        ("vllm", "vllm serve m --host 0.0.0.0 --port 1 --port 2", [Port(2)]),
        ("vllm", "vllm serve m --config x.yaml", []),
        ("vllm", "vllm serve m --port \0", []),
        ("sglang", "sh -c 'exec sglang serve --port 30001'", [Port(30001)]),
        ("sglang", "sh -c 'exec sglang serve --port $PORT'", []),
        ("tgi", "text-generation-launcher -p 81", [Port(81)]),
        ("ovms", "ovms --port 9000 --rest_port 8001", [Port(8001)]),
        ("ovms", "ovms --port 9000", []),
        ("openai", "/opt/server --port 9", []),
        ("vllm", IMAGE, [Port(8000, "127.0.0.1")]),
        ("vllm", "docker run --network host vllm/vllm-openai --port 8005", [Port(8005)]),
        ("vllm", "docker run --net=host vllm/vllm-openai", [Port(8000)]),
        ("vllm", "docker run -p 8000-8005:1-6 -p 80 vllm/vllm-openai --port 1", []),
        ("tgi", "docker run -p 90:80 tgi -p 80", [Port(90)]),
        ("vllm", "docker start -a q", []),
    ],
)
def test_the_ports_of_a_command_line(engine: str, line: str, ports: t.List[Port]) -> None:
    words = shlex.split(line)
    image = image_of(line) if words[0] == "docker" else None
    default = _engines.get(engine).port
    assert list(_audit_command.ports_of(engine, words, default, {}, image)) == ports


@pytest.mark.parametrize(
    ("engine", "line", "variables", "port"),
    [
        ("llama_cpp", "llama-server", {"LLAMA_ARG_PORT": "81"}, 81),
        ("llama_cpp", "llama-server --port 82", {"LLAMA_ARG_PORT": "81"}, 82),
        ("llama_cpp", "llama-server", {"PORT": "81"}, 8080),
        ("tgi", "text-generation-launcher", {"PORT": "81"}, 81),
        ("vllm", "vllm serve m", {"PORT": "81"}, 8000),
    ],
)
def test_a_port_in_the_environment(engine: str, line: str, variables: t.Dict[str, str], port: int) -> None:
    default = _engines.get(engine).port
    assert _audit_command.ports_of(engine, line.split(), default, variables, None) == (Port(port),)


def test_the_port_of_ollama_is_in_its_environment() -> None:
    assert _audit_command.ports_of("ollama", ["ollama", "serve"], 11434, {}, None) == (Port(11434),)
    told = {"OLLAMA_HOST": "http://10.0.0.1:9999"}
    assert _audit_command.ports_of("ollama", ["ollama", "serve"], 11434, told, None) == (Port(9999, "10.0.0.1"),)


@pytest.mark.parametrize(
    ("line", "variables", "gpus"),
    [
        ("vllm serve", {}, ()),
        ("vllm serve", {"CUDA_VISIBLE_DEVICES": "1, 0"}, ("1", "0")),
        ("vllm serve", {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ("vllm serve", {"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ("vllm serve", {"CUDA_VISIBLE_DEVICES": "\0"}, ()),
        ("vllm serve", {"NVIDIA_VISIBLE_DEVICES": "all"}, ()),
        ("vllm serve", {"ROCR_VISIBLE_DEVICES": "2"}, ("2",)),
        ("vllm serve", {"CUDA_VISIBLE_DEVICES": "MIG-a,GPU-b"}, ("MIG-a", "GPU-b")),
        ("sglang serve --tp-size 2 --base-gpu-id 4", {}, ("4", "5")),
        (IMAGE, {"CUDA_VISIBLE_DEVICES": "7"}, ("1", "2")),
        ("docker run --gpus '\"device=3\"' img", {}, ("3",)),
        ("docker run --gpus all -e CUDA_VISIBLE_DEVICES=3 img", {}, ("3",)),
        ("docker run --gpus all img", {}, ()),
        ("podman run --device nvidia.com/gpu=0 --device nvidia.com/gpu=1 img", {}, ("0", "1")),
        ("podman run --device nvidia.com/gpu=all img", {}, ()),
    ],
)
def test_the_devices_of_a_command_line(line: str, variables: t.Dict[str, str], gpus: t.Tuple[str, ...]) -> None:
    words = shlex.split(line)
    image = image_of(line) if words[0] in ("docker", "podman") else None
    engine = "sglang" if words[0] == "sglang" else "vllm"
    assert _audit_command.gpus_of(engine, words, variables, image) == gpus


@pytest.mark.parametrize(
    ("engine", "line", "seconds"),
    [
        ("vllm", "vllm serve m --shutdown-timeout 300", 330.0),
        ("vllm", "vllm serve m --shutdown-timeout 0", 0.0),
        ("vllm", "vllm serve m --shutdown-timeout soon", 0.0),
        ("triton", "tritonserver --exit-timeout-secs=90", 120.0),
        ("sglang", "sglang serve --shutdown-timeout 300", 0.0),
        ("", "x", 0.0),
    ],
)
def test_the_time_that_a_command_line_gives_to_drain(engine: str, line: str, seconds: float) -> None:
    assert _audit_command.drain_of(engine, shlex.split(line)) == seconds
