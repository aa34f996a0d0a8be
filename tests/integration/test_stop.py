# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the cases of ``stop_cases.py`` and ``stop_gpu_cases.py``: real processes are stopped, and nobody else."""

from __future__ import annotations

import os
import pathlib
import shutil

import confined
import pytest


@pytest.mark.skipif(os.geteuid() != 0, reason="a process id namespace and processes of other users need root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
@pytest.mark.parametrize("cases", ["stop_cases.py", "stop_gpu_cases.py"])
def test_they_are_stopped_and_nobody_else(tmp_path: pathlib.Path, cases: str) -> None:
    status, said = confined.run(pathlib.Path(__file__).parent / cases, tmp_path / "cases", 300)
    assert status == 0, said
    assert "passed" in said
    assert "skipped" not in said
