# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A made-up host with Intel and AMD GPUs: trees of sysfs, debugfs, KFD and process tables under one folder.

The texts are as the kernel drivers write them. What an attribute does badly can be had, too: ``FAILS`` as its text
makes reading it fail with an input/output error, ``HANGS`` makes it wait for ever.
"""

from __future__ import annotations

import os
import pathlib

from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import NodeFacts

FAILS = object()
HANGS = object()
MIB = 1024 * 1024

# As i915 writes it; the lines "size" count pages.
I915_OBJECTS = """\
37 shrinkable [0 free] objects, 9007104 bytes
system: total:0x00000007c9b2f000 bytes
local0:   use_type: 1
  use_tt: 0
  size: 4161536
  usage: {usage}
default_page_size: 64KiB
visible_avail: 15942MiB
visible_size: 16256MiB
visible_reserved: 0MiB
chunk_size: 4KiB, total: {total}MiB, free: 15942MiB
order-22 free:    0 B  , blocks: 0
order-12 free:      288 MiB, blocks: 18
reserved:
0x0000000000000000-0x0000000000100000: 1048576
stolen-local0:   use_type: 1
  use_tt: 0
  size: 15360
  usage: 33554432
"""
# As xe writes it: bytes.
XE_VRAM_MM = """\
  use_type: 1
  use_tt: 0
  size: {size}
  usage: {usage}
default_page_size: 4KiB
visible_avail: 11870MiB
visible_size: 12216MiB
chunk_size: 4KiB, total: {total}MiB, free: 11870MiB, clear_free: 11000MiB
order-13 free:      832 MiB, blocks: 26
man size:{size}
"""


def xe(client, pdev="0000:03:00.0", vram="0", gtt="0", ccs=0, rcs=0, cycles=True, own=True):
    """An account of the driver xe; ``own`` is false on a device without memory of its own."""
    lines = ["pos:\t0", "flags:\t0100002", "mnt_id:\t26", "ino:\t685"]
    lines += ["drm-driver:\txe", "drm-client-id:\t%s" % client, "drm-pdev:\t%s" % pdev]
    for region, amount in [("system", "0"), ("gtt", gtt)] + ([("vram0", vram)] if own else []) + [("stolen", "0")]:
        lines += ["drm-%s-%s:\t%s" % (key, region, amount) for key in ("total", "shared", "active", "resident")]
    if cycles:
        for engine, spent in (("rcs", rcs), ("bcs", 0), ("ccs", ccs)):
            lines += ["drm-cycles-%s:\t%s" % (engine, spent), "drm-total-cycles-%s:\t7655183225" % engine]
        lines.append("drm-engine-capacity-ccs:\t4")
    return "\n".join(lines) + "\n"


def i915(client, pdev="0000:00:02.0", system="0", local=None, render=0, compute=None, memory=True):
    """An account of the driver i915; before Linux 6.8 it tells no ``memory``."""
    lines = ["pos:\t0", "flags:\t02100002", "mnt_id:\t30", "drm-driver:\ti915"]
    lines += ["drm-client-id:\t%s" % client, "drm-pdev:\t%s" % pdev]
    regions = [("system0", system)] + ([] if local is None else [("local0", local), ("stolen-local0", "9 MiB")])
    for region, amount in regions if memory else ():
        lines += ["drm-%s-%s:\t%s" % (key, region, amount) for key in ("total", "shared", "active", "resident")]
        lines.append("drm-purgeable-%s:\t1 MiB" % region)
    lines += ["drm-engine-render:\t%d ns" % render, "drm-engine-copy:\t0 ns", "drm-engine-capacity-video:\t2"]
    lines += [] if compute is None else ["drm-engine-compute:\t%d ns" % compute]
    return "\n".join(lines) + "\n"


def amdgpu(client, pdev="0000:83:00.0", vram=0, gtt=2048, resident=None, gfx=0, compute=0, new=True):
    """An account of the driver amdgpu, in KiB; without ``new`` as before Linux 6.13. An idle engine is not told."""
    resident = vram if resident is None else resident
    lines = ["pos:\t0", "flags:\t02100002", "mnt_id:\t26", "drm-driver:\tamdgpu"]
    lines += ["drm-client-id:\t%s" % client, "drm-pdev:\t%s" % pdev, "pasid:\t32774"]
    if new:
        for region, total, there in (("vram", vram, resident), ("gtt", gtt, gtt)):
            lines += ["drm-total-%s:\t%d KiB" % (region, total), "drm-shared-%s:\t0" % region]
            lines += ["drm-resident-%s:\t%d KiB" % (region, there), "drm-purgeable-%s:\t0" % region]
    lines += ["drm-memory-vram:\t%d KiB" % resident, "drm-memory-gtt: \t%d KiB" % gtt, "drm-memory-cpu: \t0 KiB"]
    lines += ["amd-evicted-vram:\t0 KiB", "amd-requested-vram:\t%d KiB" % vram]
    lines += ["drm-engine-%s:\t%d ns" % (name, spent) for name, spent in (("gfx", gfx), ("compute", compute)) if spent]
    return "\n".join(lines) + "\n"


def amdgpu_5_15(pasid, vram=0, gtt=0):
    """An account of the driver amdgpu in Linux 5.14 to 5.18, which has no ``drm-`` keys."""
    return "pos:\t0\npdev:\t0000:83:00.0\npasid:\t%d\nvram mem:\t%d kB\ngtt mem:\t%d kB\ncpu mem:\t0 kB\n" % (
        pasid,
        vram,
        gtt,
    )


class DrmHost:
    """The trees; ``sys``, ``proc`` and ``dev`` are their folders."""

    def __init__(self, folder):
        root = pathlib.Path(folder)
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"
        for part in (self.sys / "bus/pci/devices", self.proc / "1", self.dev / "dri"):
            part.mkdir(parents=True)
        self.files, self.holders = [], {}

    def card(self, pci, vendor, device, driver, number=0, render=128, kind="0x030000", **attributes):
        """A GPU on the PCI bus; ``driver`` is empty when none is bound."""
        path = self.sys / "bus/pci/devices" / pci
        (path / "drm").mkdir(parents=True)
        for name, text in {"vendor": vendor, "device": device, "class": kind, **attributes}.items():
            self.write(path / name, text)
        if not (path / "config").exists():
            (path / "config").write_bytes(bytes.fromhex(vendor[4:] + vendor[2:4]) + b"\x00" * 60)
        if driver:
            home = self.sys / "bus/pci/drivers" / driver
            home.mkdir(parents=True, exist_ok=True)
            (path / "driver").symlink_to(home)
        if driver and "vfio" not in driver:
            for node in ("card%d" % number, "renderD%d" % render):
                (path / "drm" / node).mkdir()
                (self.dev / "dri" / node).touch()
        return path

    def xe(self, pci="0000:03:00.0", driver="xe", **more):
        return self.card(pci, "0x8086", "0xe20b", driver, **more)

    def i915(self, pci="0000:00:02.0", device="0x46a6", driver="i915", **more):
        return self.card(pci, "0x8086", device, driver, **more)

    def amdgpu(self, pci="0000:83:00.0", driver="amdgpu", used=297771008, total=206141652992, **more):
        memory = {} if used is None else {"mem_info_vram_used": used, "mem_info_vram_total": total}
        return self.card(pci, "0x1002", "0x74a1", driver, kind="0x120000", **memory, **more)

    def write(self, path, text):
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            path.unlink()
        if text is FAILS:
            path.symlink_to("/proc/self/mem")  # its first page is never there: input/output error
        elif text is HANGS:
            os.mkfifo(path)
        elif isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text("%s\n" % str(text).rstrip("\n"))

    def debug(self, name, text):
        """A file of debugfs, as ``0000:03:00.0/tile0/vram_mm``."""
        self.write(self.sys / "kernel/debug/dri" / name, text)

    def client(self, pid, file, node, text, thread=None):
        """An open file of a process with its account; ``thread`` when the main thread has ended."""
        table = self.proc / str(pid) if thread is None else self.proc / str(pid) / "task" / str(thread)
        (table / "fd").mkdir(parents=True, exist_ok=True)
        (table / "fd" / str(file)).symlink_to(self.dev / "dri" / node)
        self.write(table / "fdinfo" / str(file), text)
        self.files.append((pid, file, node))
        self.hold(pid, node)

    def hold(self, pid, node):
        """A process that holds a node, open or mapped, without a file of it being told."""
        pids = self.holders.setdefault(node, [])
        pids[:] = sorted({*pids, pid})

    def nodes(self, hidden=0, error=""):
        """What a look at the open files would say."""
        facts = NodeFacts(holders={name: list(pids) for name, pids in self.holders.items()}, hidden=hidden, error=error)
        facts.files = list(self.files)
        return facts

    def kfd_device(self, node, gpu_id, pci="0000:83:00.0", render=128, cpus=0, partition=0):
        """A node of the topology; one without ``gpu_id`` is a processor."""
        folder = self.sys / "class/kfd/kfd/topology/nodes" / str(node)
        (self.sys / "class/kfd/kfd/proc").mkdir(parents=True, exist_ok=True)
        domain, bus, rest = pci.split(":")
        slot, _dot, function = rest.partition(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function) | partition << 28
        lines = {"cpu_cores_count": cpus, "simd_count": 304 if gpu_id else 0, "vendor_id": 4098 if gpu_id else 0}
        if gpu_id:
            lines.update(location_id=location, domain=int(domain, 16), drm_render_minor=render, unique_id=1)
        self.write(folder / "gpu_id", gpu_id)
        self.write(folder / "properties", "\n".join("%s %d" % line for line in lines.items()))

    def kfd_process(self, pid, vram=None, queues=(), context=None):
        """A process with /dev/kfd open: bytes by gpu_id, and the gpu_id of each queue."""
        folder = self.sys / "class/kfd/kfd/proc" / str(pid)
        if context is not None:
            folder = folder / ("context_%d" % context)
        (folder / "queues").mkdir(parents=True)
        self.write(folder / "pasid", 32769)
        for gpu_id, amount in (vram or {}).items():
            self.write(folder / ("vram_%s" % gpu_id), amount)
            self.write(folder / ("sdma_%s" % gpu_id), HANGS)
        for number, gpu_id in enumerate(queues):
            self.write(folder / "queues" / str(number) / "gpuid", gpu_id)
        if context is None:
            self.hold(pid, "kfd")

    def trees(self):
        """The folders as the keyword arguments of the rooms."""
        return {"sys": str(self.sys), "proc": str(self.proc), "dev": str(self.dev)}
