# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The signs of movement from real sources: a real journald, real processes, real memory, real control groups."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import typing as t

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import signals_sandbox

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not signals_sandbox.usable(), reason="this takes root, namespaces and journald")


def sandboxed(story: str, timeout: float = 60) -> t.Any:
    """What a story answers that runs in a sandbox of its own."""
    paths = [ROOT / ".cache" / "collections", ROOT / "tests" / "integration"]
    done = subprocess.run(
        [*signals_sandbox.NAMESPACES, sys.executable, "-m", "signals_stories", story],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ":".join(map(str, paths))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_line_of_a_real_journal_comes_once_over_lives_and_slices() -> None:
    assert sandboxed("lives_and_slices") == {
        "found": [
            ["Started the engine.", "one", "two"],
            ["three"],
            ["Loading \ufffd: 10%", "Loading: 20%", "Loading: 30%"],
            ["between two slices"],
            ["last words", "a new life"],
            [],
        ],
        "warnings": {},
    }


def test_rotated_and_vacuumed_under_the_reader_nothing_is_repeated_and_nothing_fails() -> None:
    answer = sandboxed("rotated_and_vacuumed")
    assert answer["found"][:3] == [50, ["after the rotation"], ["after the vacuum"]]
    assert set(answer["found"][3]) <= {"a", "b"} and "b" in answer["found"][3]
    assert answer["warnings"] == {}


def test_messages_of_many_megabytes_and_a_flood_are_bounded_in_memory_and_time() -> None:
    answer = sandboxed("floods")
    assert answer["last"] == "the end"
    assert answer["widest"] <= 4096
    assert answer["longest"] < 6
    assert answer["grown"] < 100


def test_a_journal_that_leaves_out_lines_says_how_many() -> None:
    answer = sandboxed("left_out")
    assert answer["last"] == "after the pause" and answer["lines"] < 2000
    (warning,) = answer["warnings"]
    assert warning.startswith("the journal left out ") and warning.endswith(
        ' lines of the unit "%s", which wrote too many at once' % signals_sandbox.UNIT
    )


def test_a_journal_that_is_not_there_or_may_not_be_read_is_said_and_no_error() -> None:
    said = 'the journal of the unit "%s" cannot be read in full: run as root, or with become' % signals_sandbox.UNIT
    nothing = "this host keeps no journal: what the service writes cannot be seen there"
    answer = sandboxed("not_there_or_denied")
    assert answer[0] == [] and answer[1] == [nothing]
    assert answer[2] == [] and answer[3] in ([said], [nothing])


def test_one_that_follows_ends_with_a_caller_that_was_killed() -> None:
    assert sandboxed("killed_caller") == [True, False]
