# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import multiprocessing
import shlex
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _report
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError

PHASES = [{"name": "stop", "at": 10.0}, {"name": "start", "at": 12.5}]


def entry(host: str, failure: t.Optional[t.Dict[str, t.Any]] = None) -> _report.Entry:
    return _report.entry(host, "qwen", PHASES, 13.0, failure or {}, {"x": 1}, "type this")


def test_a_phase_lasts_until_the_next_one() -> None:
    assert entry("gpu1")["phases"] == [{"name": "stop", "seconds": 2.5}, {"name": "start", "seconds": 0.5}]
    assert (entry("gpu1")["seconds"], entry("gpu1")["outcome"]) == (3.0, "ok")
    assert "next_command" not in entry("gpu1")


@pytest.mark.parametrize(("lost", "outcome"), [(True, "lost"), (False, "failed")])
def test_a_failure_says_what_to_type(lost: bool, outcome: str) -> None:
    found = entry("gpu1", {"lost": lost, "phase": "stop"})
    assert (found["outcome"], found["next_command"]) == (outcome, "type this")


def test_hosts_of_one_rollout_gather_and_another_begins_anew(tmp_path: t.Any) -> None:
    path = str(tmp_path / "new" / "report.json")
    _report.add(path, "r1", "restart", entry("gpu1"))
    _report.add(path, "r1", "restart", entry("gpu2", {"lost": True}))
    report = _report.add(path, "r1", "restart", entry("gpu1"))
    assert [host["host"] for host in report["hosts"]] == ["gpu2", "gpu1"]
    with open(path, encoding="utf-8") as handle:
        assert json.load(handle) == report
    assert [host["host"] for host in _report.add(path, "r2", "stop", entry("gpu3"))["hosts"]] == ["gpu3"]


def failed(host: str, service: str, remaining: t.List[str]) -> _report.Entry:
    command = "ansible-playbook -i x --limit %s -e y=1" % shlex.quote(",".join(remaining))
    return _report.entry(host, service, PHASES, 13.0, {"lost": True}, {}, command, remaining)


@pytest.mark.parametrize("first", [True, False])
def test_a_partner_that_came_through_is_not_to_be_restarted_again(tmp_path: t.Any, first: bool) -> None:
    path = str(tmp_path / "report.json")
    entries = [failed("gpu 2", "qwen", ["gpu 2", "gpu1", "gpu3"]), failed("gpu2", "other", ["gpu2", "gpu1"])]
    # What fails as well is left to do.
    entries.append(failed("gpu3", "qwen", ["gpu3", "gpu1"]))
    entries.insert(0 if first else 3, entry("gpu1"))
    for one in entries:
        report = _report.add(path, "r1", "restart", one)
    told = {(host["host"], host["service"]): host for host in report["hosts"]}
    assert {key: host["next_command"] for key, host in told.items() if "next_command" in host} == {
        ("gpu 2", "qwen"): "ansible-playbook -i x --limit 'gpu 2,gpu3' -e y=1",
        ("gpu2", "other"): "ansible-playbook -i x --limit gpu2,gpu1 -e y=1",
        ("gpu3", "qwen"): "ansible-playbook -i x --limit gpu3 -e y=1",
    }
    assert told[("gpu 2", "qwen")]["remaining"] == ["gpu 2", "gpu3"]


def test_a_damaged_report_is_begun_anew(tmp_path: t.Any) -> None:
    path = tmp_path / "report.json"
    path.write_text("{", encoding="utf-8")
    assert len(_report.add(str(path), "r1", "restart", entry("gpu1"))["hosts"]) == 1


def _add(path: str, first: int) -> None:
    for number in range(first, first + 5):
        _report.add(path, "r1", "restart", entry("gpu%d" % number))


def test_hosts_that_report_at_once_are_all_kept(tmp_path: t.Any) -> None:
    path = str(tmp_path / "report.json")
    reporters = [multiprocessing.Process(target=_add, args=(path, first)) for first in range(0, 40, 5)]
    for reporter in reporters:
        reporter.start()
    for reporter in reporters:
        reporter.join(30)
        assert reporter.exitcode == 0
    with open(path, encoding="utf-8") as handle:
        assert len(json.load(handle)["hosts"]) == 40


def test_a_folder_in_place_of_the_report_is_one_sentence(tmp_path: t.Any) -> None:
    with pytest.raises(ServingError, match="cannot be written: Is a directory"):
        _report.add(str(tmp_path), "r1", "restart", entry("gpu1"))


def test_the_table_has_a_row_a_host_and_a_column_a_phase(tmp_path: t.Any) -> None:
    report = _report.add(str(tmp_path / "r.json"), "r1", "restart", entry("gpu1"))
    assert _report.table(report) == [
        "host  service  outcome  stop  start  total",
        "gpu1  qwen     ok       2.5   0.5    3.0",
    ]
