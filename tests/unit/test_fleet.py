# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How the demo and the tests run the commands of a lab: what fails says why, and Ansible gets streams it accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t

import fleet
import pytest


def test_a_command_that_fails_is_shown_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; [print('line', n) for n in range(40)]; print('no room', file=sys.stderr); sys.exit(3)"
    with pytest.raises(fleet.FleetError) as caught:
        fleet.check([sys.executable, "-c", code], "the lab did not boot", timeout=30)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("the lab did not boot: ") and first.endswith(" exited 3:")
    assert len(lines) == fleet.LINES_OF_A_FAILURE and "no room" in lines
    assert capsys.readouterr().out.startswith("line 0\nline 1\n")


def test_a_command_that_does_not_end_is_ended() -> None:
    with pytest.raises(fleet.FleetError, match="exited -9"):
        fleet.check([sys.executable, "-c", "import signal; signal.pause()"], "the lab did not boot", timeout=0.1)


@pytest.mark.parametrize("end", [0, 1])
def test_a_stream_that_ssh_left_non_blocking_blocks_again(end: int) -> None:
    pipe = os.pipe()
    try:
        os.set_blocking(pipe[end], False)
        fleet.make_blocking(pipe)
        assert os.get_blocking(pipe[end])
    finally:
        for number in pipe:
            os.close(number)


@pytest.mark.parametrize("what", ["run", "module", "playbook", "check"])
def test_no_command_of_a_lab_inherits_the_input(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: t.Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two at once share nothing that ssh could make non-blocking under the other."""
    for name in ("ssh", "ansible", "ansible-playbook"):
        (tmp_path / name).write_text("#!/bin/sh\necho '{\"input\": \"'$(readlink /proc/self/fd/0)'\"}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (tmp_path, os.environ["PATH"]))
    lab = fleet.Fleet("no-lab-at-all")
    monkeypatch.setattr(lab, "environment", lambda: dict(os.environ))
    reader, writer = os.pipe()
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        if what == "run":
            told = lab.run("gpu1", "true")
        elif what == "module":
            told = json.dumps(lab.module("gpu1", "gpu_clear"))
        elif what == "playbook":
            told = lab.playbook("stop", stdout=subprocess.PIPE, text=True).stdout
        else:
            fleet.check(["ssh"], "it failed", timeout=30)
            told = capfd.readouterr().out
    finally:
        os.dup2(before, 0)
        for number in (before, reader, writer):
            os.close(number)
    assert json.loads(told) == {"input": "/dev/null"}
