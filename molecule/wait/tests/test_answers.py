# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the wait said of every start on this generation of systemd, and how soon."""

from __future__ import annotations

import json
import os
import typing as t

import pytest
import yaml

with open(os.path.join(os.path.dirname(__file__), "..", "vars", "cases.yml"), encoding="utf-8") as stream:
    CASES = {case["name"]: case["expected"] for case in yaml.safe_load(stream)["cases"]}
WORDS = {"ready", "progressing", "stalled", "restart_loop", "dead", "wrong_server", "wedged", "auth_error"}
PLAIN = ("verdict", "tier_reached", "restarts", "phase")

Answer = t.Dict[str, t.Any]


@pytest.fixture(scope="module")
def answers(host: t.Any) -> t.Dict[str, Answer]:
    return t.cast(t.Dict[str, Answer], json.loads(host.file("/var/tmp/answers.json").content_string))


def test_every_verdict_of_a_wait_is_expected_of_some_start() -> None:
    assert {expected["verdict"] for expected in CASES.values()} == WORDS


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(answers: t.Dict[str, Answer], name: str) -> None:
    answer, expected = answers[name], CASES[name]
    known = {key: value for key, value in expected.items() if key in PLAIN}
    assert {key: answer[key] for key in known} == known, answer["msg"]
    assert expected.get("says", "") in answer["msg"]
    assert answer["ok"] is (expected["verdict"] == "ready")
    assert answer["changed"] is False


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if "most" in expected])
def test_the_wait_ends_as_soon_as_it_is_known(answers: t.Dict[str, Answer], name: str) -> None:
    assert answers[name]["elapsed"] < CASES[name]["most"]


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if "cause" in expected])
def test_the_cause(answers: t.Dict[str, Answer], name: str) -> None:
    cause, expected = answers[name]["cause"], CASES[name]
    assert cause["kind"] == expected["cause"]
    assert cause["line"]
    if "figures" in expected:
        found = cause["figures"]
        assert {key: round(value) for key, value in found.items()} == expected["figures"]


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if "moved" in expected])
def test_what_kept_the_wait_going_has_an_age(answers: t.Dict[str, Answer], name: str) -> None:
    assert answers[name]["movement"][CASES[name]["moved"]] < 10


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if "percent" in expected])
def test_the_percentage_of_an_unfinished_load(answers: t.Dict[str, Answer], name: str) -> None:
    assert 0 < answers[name]["percent"] < 50


def test_a_stall_is_told_within_a_second_of_its_window(answers: t.Dict[str, Answer]) -> None:
    movement = answers["stalled"]["movement"]
    assert 4 <= min(movement.values()) < 5


def test_nothing_of_a_wait_is_left_on_the_host(host: t.Any) -> None:
    assert host.run("pgrep -f '[w]ait_model_ready'").stdout == ""
