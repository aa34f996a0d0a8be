# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What hosts carry beyond Debian: a GPU with its driver library, a real engine and a model; or a real gateway."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Iterable

from . import engine
from .common import CACHE, LAB, REPO, LabError, command, digest, in_use, locked, tree_parts, write
from .state import Host, Lab

_FILES = LAB / "files" / "gpu"
_NVML = REPO / "tests" / "fakes" / "nvml"
_MODEL = LAB / "tiny_gguf.py"
ENGINE_PORT = 8080
GATEWAY_PORT = 8000
BACKEND = "qwen"


def build(roles: Iterable[str]) -> dict[str, list[Path]]:
    """Return the layers that lie above the Debian root, by role."""
    return {"gpu": [_gpu_layer()]} if "gpu" in set(roles) else {}


def _python() -> str:
    """Return an interpreter that has the gguf package: ours, or the one that `make venv` made."""
    made = REPO / ".cache" / "venv" / "bin" / "python"
    for candidate in (sys.executable, str(made)):
        try:
            command(candidate, "-c", "import gguf, numpy")
            return candidate
        except LabError:
            continue
    raise LabError("the lab needs the Python package 'gguf' to write its model: run 'make venv'.")


def _gpu_layer() -> Path:
    parts: list[str | bytes] = [engine.key(), platform.machine(), _MODEL.read_bytes()]
    parts += tree_parts(_FILES) + tree_parts(_NVML)
    target = CACHE / "layers" / f"gpu-{digest(parts)}"
    if target.is_dir():
        return target
    with locked(target.with_name(".gpu.lock")):
        if target.is_dir():
            return target
        python = _python()
        server = engine.build(python)
        fresh = target.with_name(".building-gpu")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(_FILES, fresh, symlinks=True)
        _install(server, fresh / "opt/llama/llama-server", 0o755)
        _install(_NVML / "hold.py", fresh / "usr/local/bin/gpu-hold", 0o755)
        (fresh / "opt/models").mkdir(parents=True)
        command(python, _MODEL, fresh / "opt/models/tiny.gguf")
        library = fresh / "usr/lib"
        library.mkdir(parents=True)
        command("sh", _NVML / "build.sh", library)
        for path in (fresh, *fresh.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)
        fresh.rename(target)
        for old in target.parent.glob("gpu-*"):
            if old != target and not in_use(old):
                shutil.rmtree(old, ignore_errors=True)
    return target


def _install(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def configure(lab: Lab, host: Host) -> None:
    """Write what differs from host to host."""
    root = lab.folder / host.name / "root"
    if host.role == "gateway":
        write(root / "etc/haproxy/haproxy.cfg", haproxy_config(lab))
        wants = root / "etc/systemd/system/multi-user.target.wants"
        wants.mkdir(parents=True, exist_ok=True)
        unit = wants / "haproxy.service"
        unit.unlink(missing_ok=True)
        unit.symlink_to("/lib/systemd/system/haproxy.service")
    else:
        write(root / "etc/lab-gpu-scenario", f"devices=1\ndevice.0.uuid={gpu_uuid(host.name)}\n")


def gpu_uuid(name: str) -> str:
    """Return the identity of a host's GPU: the same in every lab."""
    sign = hashlib.sha256(name.encode()).hexdigest()
    return f"GPU-{sign[:8]}-{sign[8:12]}-{sign[12:16]}-{sign[16:20]}-{sign[20:32]}"


def haproxy_config(lab: Lab) -> str:
    """Return the gateway's configuration: no retries and no redispatch, so that every failure reaches the client."""
    servers = [f"    server {host.name} {host.address}:{ENGINE_PORT} check" for host in lab.hosts if host.role == "gpu"]
    return _HAPROXY + "\n".join(servers) + "\n"


_HAPROXY = f"""global
    log stdout format raw local0 info
    stats socket /run/haproxy/admin.sock mode 660 level admin
    user haproxy
    group haproxy

defaults
    mode http
    log global
    option httplog
    option httpclose
    retries 0
    no option redispatch
    timeout connect 3s
    timeout client 10m
    timeout server 10m
    timeout check 2s
    timeout queue 5s

frontend openai
    bind :{GATEWAY_PORT}
    default_backend {BACKEND}

backend {BACKEND}
    balance leastconn
    http-reuse never
    http-response set-header x-backend %s
    option httpchk GET /health
    http-check expect status 200
    default-server inter 500ms fastinter 200ms downinter 300ms fall 2 rise 2
"""
