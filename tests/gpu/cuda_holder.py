#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A small process that computes on a GPU in stages, through the driver's libcuda.so.1 alone.

Each stage is announced as a line of JSON on stdout; the next one begins with a line on stdin, and the end of stdin ends
the process. It also ends with its parent, so that it never outlives who started it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import typing as t

PR_SET_PDEATHSIG = 1
CHILD_LIMIT = 150  # seconds that a child which ignores all requests lives at most
MIB = 1024 * 1024


class Failed(Exception):
    """A call of the driver API did not succeed."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__("%s answers %s (code %d)" % (function, name, code))
        self.code = code


class Cuda:
    """The few functions of the driver API that a holder takes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: t.Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise Failed(function, code, self._name(code))

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) == 0
        return text.value.decode("ascii", "replace") if known and text.value else "an unknown error"

    def number(self, function: str) -> int:
        value = ctypes.c_int()
        self.call(function, ctypes.byref(value))
        return value.value

    def device(self, pci: t.Optional[str]) -> ctypes.c_int:
        """The device at a PCI address, since CUDA has an order of its own; without one the first."""
        seen = []
        for index in range(self.number("cuDeviceGetCount")):
            device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
            self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self.call("cuDeviceGetPCIBusId", address, ctypes.c_int(32), device)
            seen.append(address.value.decode("ascii").lower())
            if pci is None or _same_address(pci, seen[-1]):
                return device
        raise LookupError("CUDA shows no device at %s, only %s" % (pci, ", ".join(seen) or "none"))


def _same_address(one: str, other: str) -> bool:
    """Domains are written with four or with eight digits."""
    return one.lower().lstrip("0") == other.lower().lstrip("0")


def announce(stage: str, **facts: t.Any) -> None:
    print(json.dumps(dict(facts, stage=stage, pid=os.getpid())), flush=True)


def pause() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # the end of the interpreter would call into the driver


def deaf_child() -> int:
    """Fork a child that ignores what asks it to end. It inherits the open nodes, as the workers of an engine do."""
    pid = os.fork()
    if pid:
        return pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    poller = select.poll()
    poller.register(0, 0)  # tells of nothing but the other side's end
    poller.poll(CHILD_LIMIT * 1000)
    os._exit(0)


def run(options: argparse.Namespace) -> None:
    cuda = Cuda()
    cuda.call("cuInit", ctypes.c_uint(0))
    announce("init", cuda_version=cuda.number("cuDriverGetVersion"), devices=cuda.number("cuDeviceGetCount"))
    pause()
    device = cuda.device(options.pci)
    context = ctypes.c_void_p()
    cuda.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
    announce("context")
    pause()
    address, size = ctypes.c_uint64(), ctypes.c_size_t(options.memory * MIB)
    cuda.call("cuMemAlloc_v2", ctypes.byref(address), size)
    # What was never written need not be there.
    cuda.call("cuMemsetD8_v2", address, ctypes.c_ubyte(1), size)
    cuda.call("cuCtxSynchronize")
    announce("allocate", memory=options.memory, child=deaf_child() if options.child else None)
    pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pci", help="address of the device (default: the first)")
    parser.add_argument("--invisible", action="store_true", help="show CUDA no device, so that it goes no further")
    parser.add_argument("--memory", type=int, default=64, help="MiB to allocate")
    parser.add_argument("--child", action="store_true", help="fork a child that ignores TERM")
    options = parser.parse_args()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # all, whatever the caller's is
    if options.invisible:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        run(options)
    except (AttributeError, Failed, LookupError, OSError) as error:
        announce("failed", error=str(error), code=getattr(error, "code", None))
    pause()
    os._exit(0)


if __name__ == "__main__":
    main()
