# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Bounded calls of a program that has no standard files, and of one that is killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time


def test_a_caller_without_standard_files_gets_its_answer(tmp_path):
    """The numbers that are free then are those that the child gives to the null device."""
    code = (
        "import os, sys\n"
        "os.closerange(0, 3)\n"
        "from ansible_collections.gpuops.serving.plugins.module_utils import _bounded\n"
        "outcome = _bounded.run(lambda report: 7, 20)\n"
        "sys.exit(outcome.value if outcome.ok else 1)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 7


def test_a_child_ends_with_its_caller():
    """Else each run that is killed would leave one more call hanging in a driver."""
    code = (
        "import time\n"
        "from ansible_collections.gpuops.serving.plugins.module_utils import _bounded\n"
        "_bounded.run(lambda report: time.sleep(600), 600, dies_with_caller=True)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    children = pathlib.Path("/proc/%d/task/%d/children" % (caller.pid, caller.pid))
    end = time.monotonic() + 20
    while not children.read_text().split() and time.monotonic() < end:
        time.sleep(0.01)
    [child] = children.read_text().split()
    time.sleep(0.2)  # until it has asked the kernel for it
    caller.kill()
    caller.wait()
    while _alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _alive(child)


def _alive(pid):
    try:
        return ") Z " not in pathlib.Path("/proc/%s/stat" % pid).read_text()
    except OSError:
        return False
