# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The audit of an inventory: what is refused, who is asked for what, what the report and the table say."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.plugin_utils import _audit_check, _audit_table


def finding(rule: str = "kill_mode", severity: str = "critical", **more: t.Any) -> t.Dict[str, t.Any]:
    facts = {"directive": "KillMode", "value": "process", "cure": "KillMode=mixed", "fixed": False, "held_up": ""}
    return {"rule": rule, "severity": severity, **facts, **more}


def unit(name: str, verdict: str, *findings: t.Dict[str, t.Any], reason: str = "") -> t.Dict[str, t.Any]:
    return {"name": name, "verdict": verdict, "reason": reason, "findings": list(findings)}


def answer(verdict: str, *units: t.Dict[str, t.Any], **more: t.Any) -> t.Dict[str, t.Any]:
    return {"verdict": verdict, "ok": verdict == "clean", "msg": "so it is", "units": list(units), **more}


def report(answers: t.Dict[str, t.Any], asked: t.Optional[t.List[str]] = None) -> t.Dict[str, t.Any]:
    hostvars = {host: {} if result is None else {"audit": result} for host, result in answers.items()}
    return _audit_table.report(list(answers), hostvars, list(answers) if asked is None else asked, "audit")


LOSER = finding("mark_lost", "notice", directive="ExecStart", value="su", held_up="no drop-in can cure it")
BAD = unit("a.service", "flawed", finding(), LOSER)


def test_a_table_of_all_kinds_of_hosts() -> None:
    answers = {
        "gpu10": answer("flawed", BAD, unit("b.service", "clean")),
        "gpu2": answer("minor", unit("c.service", "minor", LOSER), unit("d.service", "clean", finding(fixed=True))),
        "bare": answer("clean"),
        "lost": answer("not_found", unit("e.service", "not_found", reason="it does not exist on this host")),
        "gone": {"unreachable": True, "msg": "Connection timed out"},
        "broken": {"failed": True, "msg": "MODULE FAILURE\nSee stdout", "module_stdout": "a\npython3: not found\n"},
        "skipped": {"skipped": True},
    }
    found = report(answers)
    assert _audit_table.table(found) == [
        "ok   host    unit       severity  rule       is now            cure",
        "NO   gpu10   a.service  critical  kill_mode  KillMode=process  KillMode=mixed",
        "NO   gpu10   a.service  notice    mark_lost  ExecStart=su      no drop-in can cure it",
        "yes  gpu10   b.service  clean",
        "yes  gpu2    c.service  notice    mark_lost  ExecStart=su      no drop-in can cure it",
        "yes  gpu2    d.service  critical  kill_mode  KillMode=process  cured by a drop-in",
        "yes  bare    clean, so it is",
        "NO   lost    e.service  it does not exist on this host",
        "NO   gone    unknown, the host does not answer",
        "NO   broken  error, MODULE FAILURE: python3: not found",
        "6 hosts: 1 clean, 1 minor, 1 flawed, 1 not found, 1 unknown, 1 error; "
        "5 units: 2 clean, 1 minor, 1 flawed, 1 not found; 3 findings: 1 critical, 2 notice",
    ]
    assert (found["verdict"], found["ok"]) == ("error", False)
    assert (
        found["msg"] == "not every unit is in order: gpu10 (flawed), lost (not_found), gone (unknown), broken (error)"
    )


def test_a_host_that_does_not_answer_is_not_clean() -> None:
    found = report({"a": answer("clean"), "b": {"unreachable": True, "msg": "timed out\r\n"}})
    assert (found["verdict"], found["ok"]) == ("unknown", False)
    assert found["hosts"]["b"] == {
        "verdict": "unknown",
        "ok": False,
        "answered": False,
        "reason": "unreachable",
        "msg": "the host does not answer",
        "cause": "timed out",
        "units": [],
        "warnings": [],
    }
    assert report({"a": answer("clean")}, asked=[])["hosts"]["a"]["reason"] == "not_asked"
    assert report({})["ok"] is False


def test_minor_findings_are_in_order() -> None:
    found = report({"a": answer("minor", unit("c.service", "minor", LOSER))})
    assert (found["verdict"], found["ok"], found["msg"]) == ("minor", True, "1 unit: nothing that fails the audit")


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"verdict": "fine", "units": []},
        {"verdict": "error", "units": [], "msg": "no systemd"},
        {"verdict": "clean"},
        {"verdict": "clean", "units": ["a"]},
        {"verdict": "clean", "units": [{"name": "a", "verdict": "clean"}]},
        {"verdict": "clean", "units": [unit("a", "clean", finding(severity="bad"))]},
    ],
)
def test_what_is_not_understood_is_never_clean(result: t.Any) -> None:
    found = report({"a": result})
    assert (found["hosts"]["a"]["verdict"], found["ok"]) == ("error", False)


def test_what_would_steer_a_terminal_is_shown_as_text() -> None:
    rows = _audit_table.table(report({"a": answer("flawed", unit("x\x1b[31m.service", "flawed", finding()))}))
    assert "x\\x1b[31m.service" in rows[1]


# The request


HOSTS = ["gpu1", "gpu2"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gpuops_audit_fail_on": "high"}, 'gpuops_audit_fail_on must be one of critical, warning, notice, not "high"'),
        (
            {"gpuops_audit_fix_severity": 1},
            'gpuops_audit_fix_severity must be one of critical, warning, notice, not "1"',
        ),
        ({"gpuops_audit_fix": "maybe"}, 'gpuops_audit_fix must be true or false, not "maybe"'),
        ({"gpuops_audit_load_time": "5 min"}, "gpuops_audit_load_time must be a number of seconds up to 2000000, not "),
        ({"gpuops_audit_load_time": -1}, "gpuops_audit_load_time must be a number of seconds up to 2000000, not "),
        ({"gpuops_audit_load_time": True}, "gpuops_audit_load_time must be a number of seconds up to 2000000, not "),
        ({"gpuops_audit_ignore": "shared_gpu,x"}, 'gpuops_audit_ignore names the rule "x", which does not exist: use '),
        ({"gpuops_services": 3}, "gpuops_services is not a list of services"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_host_is_asked(values: t.Dict[str, t.Any], sentence: str) -> None:
    everywhere = _audit_check.problems(HOSTS, dict.fromkeys(HOSTS, values), "all", "", None, None)
    assert len(everywhere) == 1 and everywhere[0].startswith(sentence)
    (one,) = _audit_check.problems(HOSTS, {"gpu1": {}, "gpu2": values}, "all", "", None, None)
    assert one.startswith("gpu2: " + sentence)


def test_a_request_that_makes_sense_has_no_mistake() -> None:
    values = {
        "gpuops_audit_fail_on": "notice",
        "gpuops_audit_fix": "true",
        "gpuops_audit_load_time": "640",
        "gpuops_audit_ignore": ["shared_gpu"],
        "gpuops_services": [{"name": "chat", "gpus": None}],
    }
    assert _audit_check.problems(HOSTS, dict.fromkeys(HOSTS, values), "all", "", "chat", None) == []
    assert _audit_check.problems([], {}, "gpu9", "", None, None) == ['no host of the inventory fits the pattern "gpu9"']
    (sentence,) = _audit_check.problems(HOSTS, dict.fromkeys(HOSTS, values), "all", "", "chta", None)
    assert sentence == 'the service "chta" is not in gpuops_services of any selected host (there are: chat)'
    (sentence,) = _audit_check.problems(HOSTS, {host: {} for host in HOSTS}, "all", "", None, "/nowhere/x.json")
    assert sentence == 'gpuops_audit_report "/nowhere/x.json" cannot be written: there is no folder "/nowhere"'


@pytest.mark.parametrize(
    ("services", "service", "everyone", "share"),
    [
        ([], None, False, {"ask": False, "units": None}),
        ([], None, True, {"ask": True, "units": None}),
        ([{"name": "a"}], None, False, {"ask": True, "units": None}),
        ([{"name": "a"}, {"name": "b", "unit": "x.service"}], "b", False, {"ask": True, "units": ["x.service"]}),
        (
            [{"name": "a"}, {"name": "b"}],
            "all",
            False,
            {"ask": True, "units": ["gpuops-a.service", "gpuops-b.service"]},
        ),
        ([{"name": "a"}], "b", True, {"ask": False, "units": []}),
    ],
)
def test_which_hosts_are_asked_for_which_units(
    services: t.Any, service: t.Any, everyone: bool, share: t.Dict[str, t.Any]
) -> None:
    assert _audit_check.share(services, service, everyone) == share
