# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the campaign puts in the place of the library's own is there to be replaced, and is replaced."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import types
import typing as t

import pytest

CAMPAIGN = pathlib.Path(__file__).resolve().parents[1] / "campaign"
sys.path.insert(0, str(CAMPAIGN))

import campaign  # noqa: E402
import judge  # noqa: E402
import mutants  # noqa: E402

IN_A_SERVICE = """
import sys
sys.path[:0] = sys.argv[1:3]
import stops
from gpuops import _selection
stops.Field("", None, 0, lambda *_what, **_order: "", [])
print(_selection.service_of(None), _selection.untouchable.__globals__["service_of"](None))
"""


def run(code: str, *arguments: str) -> t.List[str]:
    with campaign.library() as folder:
        argv = [sys.executable, "-B", "-c", code, str(folder), str(CAMPAIGN), *arguments]
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stdout
    return done.stdout.split()


def test_a_campaign_that_runs_inside_a_service_knows_of_none() -> None:
    assert run(IN_A_SERVICE) == ["None", "None"]


APPLY = """
import sys
sys.path[:0] = sys.argv[1:3]
import mutants  # noqa: E402
mutants.apply(sys.argv[3])
print("applied")
"""


@pytest.mark.parametrize("mutant", mutants.MUTANTS)
def test_what_a_mutant_replaces_is_there(mutant: str) -> None:
    assert run(APPLY, mutant) == ["applied"]


def test_a_name_that_is_not_there_is_not_replaced() -> None:
    room = types.SimpleNamespace(here=1)
    mutants.replace(room, "here", 2)
    assert room.here == 2
    with pytest.raises(AttributeError, match="has no gone that could be replaced"):
        mutants.replace(room, "gone", 2)


class Empty:
    """A build log in which nobody is."""

    def pid(self, _node: int) -> int:
        return 0


def test_check_mode_must_have_the_verdict_of_the_stop() -> None:
    options = {"grace": 1.0, "kill_grace": 1.0}
    tree = {"nodes": [], "gone": [], "named": [7], "maybe_named": [], "options": options, "verdict": "survivors"}
    told = {"verdict": "survivors", "msg": "m", "survivors": [{"pid": 0}]}
    log: t.Any = Empty()
    assert judge.forecast(tree, log, told) == []
    wrong = judge.forecast(tree, log, dict(told, verdict="stopped"))
    assert wrong == [["verdict", "check mode: stopped, not survivors: m"]]
    unnamed = judge.forecast(tree, log, dict(told, survivors=[]))
    assert unnamed == [["named", "check mode: [] are named, not [0]"]]
