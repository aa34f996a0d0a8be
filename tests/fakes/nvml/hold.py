#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Hold a GPU of the test driver library, as an engine would: be listed with memory, and keep the device node open.

On a lab host this file is the command ``gpu-hold``; an engine double may also import :func:`hold`.
It needs nothing but Python 3.9. See docs/test_driver_library.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import sys

MIB = 1024 * 1024


class OutOfMemory(Exception):
    """The device has less free memory than was asked for."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def state_folder() -> str:
    return os.environ.get("FAKE_NVML_DIR") or "/run/fake-nvml"


def start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def free_memory(device: int, library: str | None = None, instance: int | None = None) -> tuple[int, int]:
    """(free, total) MiB of a device or of one of its instances (MIG), from the driver library itself."""
    nvml = ctypes.CDLL(library or os.environ.get("FAKE_NVML_LIBRARY") or "libnvidia-ml.so.1")
    handle, memory = ctypes.c_void_p(), _Memory()
    code = nvml.nvmlInit_v2()
    if not code:
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device), ctypes.byref(handle))
        if not code and instance is not None:
            code = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, ctypes.c_uint(instance), ctypes.byref(handle))
        code = code or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        nvml.nvmlShutdown()
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA error: {nvml.nvmlErrorString(code).decode()}")
    return memory.free // MIB, memory.total // MIB


def _make_folders(folder: str) -> None:
    # Engines run under accounts of their own, so the folders are open to all, as /tmp is.
    for part in (folder, os.path.join(folder, "holders"), os.path.join(folder, "dead")):
        with contextlib.suppress(FileExistsError):
            os.mkdir(part)
            os.chmod(part, 0o1777)


def _lock(folder: str) -> int:
    """One registration at a time: the look at the free memory and the claim on it belong together."""
    path = os.path.join(folder, "lock")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _forget_the_dead(folder: str) -> None:
    """Drop registrations of dead processes, unless their memory is to stay for a while."""
    if _release_delay(folder):
        return
    for name in os.listdir(os.path.join(folder, "holders")):
        pid, _, rest = name.partition("-")
        with contextlib.suppress(OSError, ValueError):
            try:
                same = start_ticks(int(pid)) == int(rest.split("-")[0])
            except (FileNotFoundError, ProcessLookupError):
                same = False
            if not same:
                os.unlink(os.path.join(folder, "holders", name))


def _release_delay(folder: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, "scenario"), encoding="utf-8") as scenario:
            for line in scenario:
                key, _, value = line.partition("=")
                if key == "release_delay_ms":
                    return int(value)
    return 0


def hold(
    device: int = 0,
    memory: int = 0,
    kind: str = "compute",
    node: str | None = None,
    *,
    require_free: bool = False,
    listed: bool = True,
    library: str | None = None,
    instance: int | None = None,
) -> int | None:
    """Register the calling process as a holder and open the node; return the node's descriptor.

    The two are independent: ``listed=False`` only opens the node, ``node=None`` only registers.
    The descriptor is inherited by children and kept over exec. The registration belongs to this process alone
    and counts as long as it lives, whatever it executes.
    """
    if listed:
        folder = state_folder()
        _make_folders(folder)
        lock = _lock(folder)
        try:
            _forget_the_dead(folder)
            if require_free:
                _check_free(device, memory, library, instance)
            _register(folder, device, memory, kind, instance)
        finally:
            os.close(lock)
    if node is None:
        return None
    descriptor = os.open(node, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    return descriptor


def _check_free(device: int, memory: int, library: str | None, instance: int | None) -> None:
    free, total = free_memory(device, library, instance)
    if free < memory:
        raise OutOfMemory(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {memory / 1024:.2f} GiB. "
            f"GPU {device} has a total capacity of {total / 1024:.2f} GiB of which {free / 1024:.2f} GiB is free."
        )


def _register(folder: str, device: int, memory: int, kind: str, instance: int | None) -> None:
    pid = os.getpid()
    start = start_ticks(pid)
    name = f"{pid}-{start}-{device}-{kind}" + ("" if instance is None else f"-{instance}")
    holders = os.path.join(folder, "holders")
    with open(os.path.join(holders, "." + name), "w", encoding="utf-8") as out:
        out.write(f"pid={pid}\nstart={start}\ndevice={device}\nmemory={memory}\nkind={kind}\n")
        if instance is not None:
            out.write(f"instance={instance}\n")
    os.replace(os.path.join(holders, "." + name), os.path.join(holders, name))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-hold", description="Hold a GPU of the test driver library, then become CMD."
    )
    parser.add_argument("--device", type=int, default=0, help="index of the device (default 0)")
    parser.add_argument("--instance", type=int, metavar="SLOT", help="instance of a partitioned device (MIG)")
    parser.add_argument("--memory", type=int, default=0, metavar="MIB", help="memory to hold, in MiB (default 0)")
    parser.add_argument("--kind", choices=("compute", "graphics", "mps"), default="compute")
    parser.add_argument("--node", metavar="PATH", help="device node to keep open, such as /dev/nvidia0")
    parser.add_argument("--unlisted", action="store_true", help="only open the node: the driver lists nothing")
    parser.add_argument("--require-free", action="store_true", help="fail as an engine does when memory is short")
    parser.add_argument("--library", help="driver library to ask (default: libnvidia-ml.so.1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is needed after --")
    try:
        hold(
            options.device,
            options.memory,
            options.kind,
            options.node,
            require_free=options.require_free,
            listed=not options.unlisted,
            library=options.library,
            instance=options.instance,
        )
    except (OutOfMemory, RuntimeError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f'"{command[0]}" cannot be executed: {error.strerror}', file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
