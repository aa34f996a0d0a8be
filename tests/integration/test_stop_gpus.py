# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the cases of ``stop_gpu_cases.py`` where no signal of theirs can reach this machine."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

CASES = pathlib.Path(__file__).parent / "stop_gpu_cases.py"


@pytest.mark.skipif(os.geteuid() != 0, reason="a process id namespace and processes of other users need root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_real_holders_are_ended_and_nobody_else(tmp_path: pathlib.Path) -> None:
    # --kill-child: whatever the cases leave ends with the namespace.
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # A shell as process 1, since it collects orphans as an init does.
    inner = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(CASES)]
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    run = subprocess.run(
        namespace + shell + inner + ["--basetemp=%s" % (tmp_path / "cases")],
        env=dict(os.environ, GPUOPS_TEST_OUTSIDE=os.readlink("/proc/self/ns/pid")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout
