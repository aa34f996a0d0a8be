# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A made-up machine with GPUs: what the test driver library says of them, and real processes that hold them."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys
import time

from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu, _gpu_view
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Options, read, wait_clear

FAKES = pathlib.Path(__file__).parent / "nvml"


class Lab:
    """One made-up machine: what the driver says, and processes that hold."""

    def __init__(self, folder, library):
        self.state, self.dev, self.sys = folder / "state", folder / "dev", folder / "sys"
        for part in (self.state, self.state / "holders", self.state / "dead", self.dev, self.sys):
            part.mkdir()
        for name in ("nvidia0", "nvidia1", "nvidiactl"):
            (self.dev / name).touch()
        self.environment = dict(
            os.environ,
            FAKE_NVML_DIR=str(self.state),
            FAKE_NVML_LIBRARY=str(library),
            LD_LIBRARY_PATH=str(library.parent),
        )
        self.children = []

    def scenario(self, **keys):
        lines = ["%s=%s" % (key.replace("__", "."), value) for key, value in keys.items()]
        (self.state / "scenario").write_text("\n".join(lines) + "\n")

    def hold(self, *arguments, node=None, command=("sleep", "60"), groups=None):
        words = [sys.executable, str(FAKES / "hold.py"), *arguments]
        if node is not None:
            words += ["--node", str(self.dev / node)]
        child = subprocess.Popen([*words, "--", *command], env=self.environment, extra_groups=groups)
        self.children.append(child)
        wait_for(lambda: self._became(child, command))
        return child

    @staticmethod
    def _became(child, command):
        assert child.poll() is None
        if ") Z " in os.fsdecode(pathlib.Path("/proc/%d/stat" % child.pid).read_bytes()):
            return True  # its main thread has ended already
        line = os.fsdecode(pathlib.Path("/proc/%d/cmdline" % child.pid).read_bytes())
        return line.split("\0")[:-1] == list(command)

    def end(self, child):
        child.kill()
        child.wait()

    def look(self, limit=None, **options):
        return read(Options(**options), limit, devices=str(self.dev), sys=str(self.sys))

    def wait(self, timeout, **options):
        def look(given, limit):
            return read(given, limit, devices=str(self.dev), sys=str(self.sys))

        return wait_clear(Options(**options), Deadline(timeout), look)


def patch():
    """For a process of its own that runs a module on a made-up machine."""
    _gpu._gpu_nodes.scan = scan_but_process_1
    _gpu_view.look = lambda *_folders: _gpu_view.View("host", None)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


BUILT: list[pathlib.Path] = []


def driver_library(tmp_path_factory):
    """The test driver library, built once; from then on the loader gives this one out for the name."""
    if not BUILT:
        folder = tmp_path_factory.mktemp("nvml")
        subprocess.run([str(FAKES / "build.sh"), str(folder)], check=True)
        BUILT.append(folder / "libnvidia-ml.so.1")
        ctypes.CDLL(str(BUILT[0]))
    return BUILT[0]


def made(tmp_path, library, monkeypatch):
    """A machine for one test."""
    monkeypatch.setenv("FAKE_NVML_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    monkeypatch.setattr(_gpu._gpu_nodes, "scan", scan_but_process_1)
    monkeypatch.setattr(_gpu_view, "look", lambda *_folders: _gpu_view.View("host", None))
    lab = Lab(tmp_path, library)
    yield lab
    for child in lab.children:
        lab.end(child)


def scan_but_process_1(*arguments, real=_gpu._gpu_nodes.scan):
    """In a sandbox not even root may look into process 1, which there is none of the tests' business."""
    facts = real(*arguments)
    try:
        os.readlink("/proc/1/fd/0")
    except PermissionError:
        facts.hidden -= 1
    except OSError:
        pass
    return facts


def verdicts(reading):
    return [(device.verdict, device.reason) for device in reading.devices]
