# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Nothing of the two lives is left, nobody else was signalled, and the unit runs again."""

from __future__ import annotations

import json
import typing as t

import pytest

SIX = {"plain", "own_session", "double", "daemon", "deaf", "scope"}


def read(host: t.Any, name: str) -> t.Dict[str, t.Any]:
    return t.cast(t.Dict[str, t.Any], json.loads(host.file("/var/tmp/%s.json" % name).content_string))


@pytest.fixture(scope="module")
def answers(host: t.Any) -> t.Dict[str, t.Any]:
    return read(host, "answers")


def test_check_mode_touched_nobody(host: t.Any, answers: t.Dict[str, t.Any]) -> None:
    plan = answers["plan"]
    assert (plan["verdict"], plan["changed"]) == ("stopped", True)
    assert {process["outcome"] for process in plan["processes"]} == {"planned"}
    assert read(host, "planned") == read(host, "restarted")


def test_the_plan_named_all_of_both_lives_with_their_evidence(host: t.Any, answers: t.Dict[str, t.Any]) -> None:
    planned = {process["pid"]: process for process in answers["plan"]["processes"]}
    before = read(host, "before")
    assert {before[name]["pid"] for name in SIX} < set(planned)
    assert len(planned) == 2 * len(SIX) + 1
    assert planned[before["scope"]["pid"]]["found_by"] == ["mark"]
    assert "cgroup" in planned[before["daemon"]["pid"]]["found_by"]
    assert answers["plan"]["plan"][0]["action"] == "systemd_stop"
    assert answers["plan"]["plan"][-1]["signal"] == "KILL"


def test_all_of_both_lives_ended(host: t.Any, answers: t.Dict[str, t.Any]) -> None:
    stopped = answers["stopped"]
    assert (stopped["verdict"], stopped["changed"], stopped["survivors"]) == ("stopped", True, [])
    assert {p["pid"] for p in stopped["processes"]} == {p["pid"] for p in answers["plan"]["processes"]}
    assert {name for name, what in read(host, "stopped").items() if what["alive"]} == {"editor", "neighbour"}


def test_the_bystanders_heard_nothing(host: t.Any) -> None:
    for name in ("editor", "neighbour"):
        assert read(host, "stopped")[name] == {"pid": read(host, "before")[name]["pid"], "alive": True, "heard": []}


def test_a_second_stop_found_nothing(answers: t.Dict[str, t.Any]) -> None:
    again = answers["again"]
    assert (again["verdict"], again["changed"], again["processes"]) == ("absent", False, [])


def test_the_unit_runs_again_alone(host: t.Any, answers: t.Dict[str, t.Any]) -> None:
    assert host.check_output("systemctl is-active engine") == "active"
    old = {process["pid"] for process in answers["stopped"]["processes"]}
    # Whoever bears the mark now is of the new life.
    script = 'gid=$(getent group gpuops-ed9f6f250686 | cut -d: -f3); grep -l "^Groups:.*\\b$gid\\b" /proc/[0-9]*/status'
    marked = {int(line.split("/")[2]) for line in host.check_output(script).split()}
    assert marked
    assert not marked & old
