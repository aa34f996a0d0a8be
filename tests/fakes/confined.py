# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Tests that signal processes run where no signal of theirs can reach this machine: with process ids of their own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

OUTSIDE = "GPUOPS_TEST_OUTSIDE"


def run(cases: pathlib.Path, folder: pathlib.Path, timeout: float) -> tuple[int, str]:
    """Run the tests of one file; the exit status and what pytest said."""
    # --kill-child: whatever the cases leave ends with the namespace.
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # A shell as process 1, since it collects orphans as an init does.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    inner = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        [*namespace, *shell, *inner, "--basetemp=%s" % folder],
        env=dict(os.environ, **{OUTSIDE: os.readlink("/proc/self/ns/pid")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(autouse=True, scope="session")
def fixture_confined() -> None:
    """Nothing that imports this runs among the processes of the machine itself."""
    outside = os.environ.get(OUTSIDE)
    if not outside or os.readlink("/proc/self/ns/pid") == outside or os.readlink("/proc/1/ns/pid") == outside:
        pytest.exit("run tests/integration/test_stop.py instead: it gives these tests their own process ids", 3)
