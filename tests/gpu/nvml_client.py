#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Asks the driver library in a process of its own, because whoever asks it may hold device nodes.

``facts``   what there is, once, as a line of JSON
``stages``  starts the library, then asks for every device; announces each stage, and goes on with a line on stdin
``watch``   follows one device until its memory is back and none of its processes is listed
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
import typing as t

MIB = 1024 * 1024
TICK = 0.02
CALM = 5  # readings
LISTS = ("Compute", "Graphics", "MPSCompute")
LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED = 12, 9

Facts = t.Dict[str, t.Any]


def tell(**facts: t.Any) -> None:
    print(json.dumps(facts), flush=True)


def _text(value: t.Any) -> t.Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _mib(value: t.Optional[int]) -> t.Optional[int]:
    return None if value is None or value == 2**64 - 1 else -(-int(value) // MIB)


def _or_none(pynvml: t.Any, function: t.Callable[[], t.Any]) -> t.Any:
    try:
        return function()
    except (pynvml.NVMLError, AttributeError):
        return None


def memory(pynvml: t.Any, handle: t.Any) -> Facts:
    """Both versions: the first counts the driver's own share as used."""
    one = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    two = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    return {
        "total": _mib(getattr(one, "total", None)),
        "used_v1": _mib(getattr(one, "used", None)),
        "used_v2": _mib(getattr(two, "used", None)),
        "reserved_v2": _mib(getattr(two, "reserved", None)),
        "free_v2": _mib(getattr(two, "free", None)),
    }


def used(facts: Facts) -> t.Optional[int]:
    return facts["used_v1"] if facts["used_v2"] is None else facts["used_v2"]


def processes(pynvml: t.Any, handle: t.Any) -> t.List[Facts]:
    """All lists that this driver knows, each in the newest version that both sides know."""
    found = []
    for name in LISTS:
        for version in ("_v3", "_v2", ""):
            function = getattr(pynvml, "nvmlDeviceGet%sRunningProcesses%s" % (name, version), None)
            listed = None if function is None else _or_none(pynvml, lambda ask=function: ask(handle))
            if listed is not None:
                found += [{"pid": p.pid, "memory": _mib(p.usedGpuMemory), "list": name.lower()} for p in listed]
                break
    return found


def device(pynvml: t.Any, index: int) -> Facts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    mode = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMigMode(handle))
    persistence = _or_none(pynvml, lambda: pynvml.nvmlDeviceGetPersistenceMode(handle))
    return {
        "index": index,
        "uuid": _text(_or_none(pynvml, lambda: pynvml.nvmlDeviceGetUUID(handle))),
        "pci": _text(_or_none(pynvml, lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        "name": _text(_or_none(pynvml, lambda: pynvml.nvmlDeviceGetName(handle))),
        "minor": _or_none(pynvml, lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "partitioned": bool(mode and mode[0]),
        "persistence": None if persistence is None else bool(persistence),
        "memory": memory(pynvml, handle),
        "processes": processes(pynvml, handle),
    }


def facts(pynvml: t.Any, only: t.Optional[int]) -> None:
    began = time.monotonic()
    pynvml.nvmlInit()
    started = time.monotonic() - began
    indexes = range(pynvml.nvmlDeviceGetCount()) if only is None else [only]
    tell(
        driver_version=_text(pynvml.nvmlSystemGetDriverVersion()),
        nvml_version=_text(_or_none(pynvml, pynvml.nvmlSystemGetNVMLVersion)),
        binding=_binding(pynvml),
        init_seconds=round(started, 3),
        gpus=[device(pynvml, index) for index in indexes],
        cuda=_cuda(),
    )


def _binding(pynvml: t.Any) -> str:
    try:
        from importlib.metadata import version

        return version("nvidia-ml-py")
    except Exception:  # a copy without its metadata
        return str(getattr(pynvml, "__version__", "unknown"))


def _cuda() -> str:
    """Why the other library cannot be loaded; empty when it can."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""


def stages(pynvml: t.Any) -> None:
    pynvml.nvmlInit()
    tell(stage="init")
    if not sys.stdin.readline():
        return
    for index in range(pynvml.nvmlDeviceGetCount()):
        device(pynvml, index)
    tell(stage="queries")
    sys.stdin.readline()


def watch(pynvml: t.Any, options: argparse.Namespace) -> None:
    """Times are those of the monotonic clock, which all processes share."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(options.index)
    first = memory(pynvml, handle)
    tell(stage="ready", used=used(first), listed=processes(pynvml, handle))
    end = time.monotonic() + options.seconds
    memory_at = list_at = None
    readings, last, calm = 0, used(first), 0
    # What comes back for a moment only has not come back.
    while time.monotonic() < end and calm < CALM:
        last, listed, readings = used(memory(pynvml, handle)), processes(pynvml, handle), readings + 1
        now = time.monotonic()
        memory_at = (memory_at or now) if last is None or last <= options.most else None
        gone = options.pid not in [entry["pid"] for entry in listed]
        list_at = (list_at or now) if gone else None
        calm = 0 if memory_at is None or list_at is None else calm + 1
        time.sleep(TICK)
    tell(stage="end", memory_at=memory_at, list_at=list_at, used=last, readings=readings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["facts", "stages", "watch"])
    parser.add_argument("--index", type=int)
    parser.add_argument("--pid", type=int, help="watch: the process that is to leave the lists")
    parser.add_argument("--most", type=int, help="watch: MiB in use at which the memory counts as back")
    parser.add_argument("--seconds", type=float, help="watch: how long")
    options = parser.parse_args()
    try:
        import pynvml
    except ImportError as error:
        tell(error=str(error), reason="binding")
        return 1
    try:
        if options.what == "facts":
            facts(pynvml, options.index)
        elif options.what == "stages":
            stages(pynvml)
        else:
            watch(pynvml, options)
    except pynvml.NVMLError as error:
        reasons = {LIBRARY_NOT_FOUND: "library", DRIVER_NOT_LOADED: "driver"}
        tell(error="%s (code %d)" % (error, error.value), reason=reasons.get(error.value, "answer"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
