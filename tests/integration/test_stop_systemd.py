# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""process_tree_stop and service_start on real systemd of three generations, and on legacy control groups."""

from __future__ import annotations

import json
import os
import re
import time
import typing as t

import pytest
from fourhosts import HOSTS, FourHosts, mark_group
from labhosts import verdicts

SERVICE = "qwen"
UNIT = "gpuops-qwen.service"
MARK = mark_group(SERVICE)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")


LAB = FourHosts("test-stop")
on, everywhere, module = LAB.on, LAB.everywhere, LAB.module


@pytest.fixture(scope="module", autouse=True)
def fixture_lab() -> t.Iterator[None]:
    with LAB.up():
        everywhere("groupadd --system %s" % MARK)
        yield


def unit(exec_start: str, *lines: str, name: str = UNIT) -> None:
    text = "[Unit]\nDescription=test\n[Service]\nExecStart=%s\n%s\n" % (exec_start, "\n".join(lines))
    everywhere("cat > /etc/systemd/system/%s; systemctl daemon-reload; systemctl reset-failed" % name, text)


@pytest.fixture(autouse=True)
def fixture_clean() -> t.Iterator[None]:
    bystander = "systemctl is-active --quiet bystander || systemd-run --quiet --unit=bystander sleep infinity"
    before = everywhere("%s; systemctl show -P InvocationID -P MainPID ssh systemd-journald bystander" % bystander)
    yield
    kill = (
        "systemctl kill -s KILL --kill-who=all {u} 2>/dev/null || :; systemctl stop {u} 2>/dev/null || :;"
        " for p in $(pgrep -f '[f]orest.py|[s]leep 98765' || :); do kill -9 $p 2>/dev/null || :; done;"
        " rm -rf /etc/systemd/system/{u} /tmp/forest; systemctl unmask --quiet {u}; systemctl daemon-reload;"
        " systemctl reset-failed"
    ).format(u=UNIT)
    everywhere(kill)
    after = everywhere("%s; systemctl show -P InvocationID -P MainPID ssh systemd-journald bystander" % "true")
    assert before == after


def forest(*trees: t.Dict[str, t.Any]) -> str:
    """A command line for ExecStart= that grows these processes."""
    everywhere("mkdir -p /tmp/forest; cat > /opt/forest.json", json.dumps(trees))
    return "/usr/bin/python3 /opt/forest.py --stay /tmp/forest @/opt/forest.json"


SIX = {
    "id": "front",
    "name": "front",
    "children": [
        {"id": "plain", "name": "plain"},
        {"id": "own_session", "name": "own_session", "session": True},
        {"id": "double", "name": "double", "double": True},
        {"id": "daemon", "name": "daemon", "daemon": True},
        {"id": "deaf", "name": "deaf", "daemon": True, "deaf": True},
    ],
}
ESCAPE = "ExecStartPost=/bin/sh -c 'setsid systemd-run --quiet --scope sleep 98765 >/dev/null 2>&1 & sleep 0.5'"
LEFT = ["daemon", "deaf", "double", "own_session", "plain", "sleep"]
ALL = sorted([*LEFT, "front"])


def names(result: t.Dict[str, t.Any], key: str = "processes") -> t.List[str]:
    return sorted(process["name"] for process in result[key])


def wait_for(script: str, seconds: float = 15) -> None:
    everywhere("for i in $(seq %d); do if %s; then exit 0; fi; sleep 0.1; done; exit 7" % (seconds * 10, script))


def start_six(*lines: str) -> None:
    unit(forest(SIX), "SupplementaryGroups=%s" % MARK, ESCAPE, *lines)
    everywhere("systemctl start %s" % UNIT)
    wait_for("test -e /tmp/forest/front && pgrep -f '[s]leep 98765'")


def test_killmode_process_leaves_all_workers_and_they_are_ended() -> None:
    start_six("KillMode=process")
    everywhere("systemctl stop %s" % UNIT)
    refused = module("service_start", service=SERVICE, unit=UNIT)
    assert verdicts(refused) == {("survivors", False)}
    for result in refused.values():
        assert names(result, "survivors") == LEFT
        assert '"deaf"' in result["msg"]
    plan = module("process_tree_stop", check=True, service=SERVICE, unit=UNIT)
    assert verdicts(plan) == {("stopped", True)}
    stopped = module("process_tree_stop", service=SERVICE, unit=UNIT, grace=2)
    assert verdicts(stopped) == {("stopped", True)}
    for host, result in stopped.items():
        assert names(result) == names(plan[host]) == LEFT
        by_name = {process["name"]: process for process in result["processes"]}
        assert by_name["sleep"]["found_by"] == ["mark"]
        assert by_name["sleep"]["role"] == "escaped"
        assert "cgroup" in by_name["daemon"]["found_by"]
        assert by_name["deaf"]["signals"] == ["TERM", "KILL"]
        assert result["unit_state"]["active_state"] == "inactive"
    everywhere("! pgrep -f '[f]orest.py|[s]leep 98765'")
    assert verdicts(module("process_tree_stop", service=SERVICE, unit=UNIT)) == {("absent", False)}
    assert verdicts(module("service_start", service=SERVICE, unit=UNIT)) == {("started", True)}


@pytest.mark.parametrize("kill_mode", ["process", "mixed", "control-group"])
def test_an_active_unit_is_stopped_through_systemd(kill_mode: str) -> None:
    start_six("KillMode=%s" % kill_mode, "Restart=always", "RestartSec=1", "TimeoutStopSec=3")
    results = module("process_tree_stop", service=SERVICE, unit=UNIT, grace=5)
    assert verdicts(results) == {("stopped", True)}
    for result in results.values():
        assert names(result) == ALL
        by_name = {process["name"]: process for process in result["processes"]}
        assert by_name["front"]["role"] == "main"
        assert by_name["front"]["signals"][0] == "systemd"
        assert by_name["sleep"]["signals"] == ["TERM"]
        assert result["unit_state"]["active_state"] in ("inactive", "failed")
    time.sleep(1.5)  # longer than RestartSec
    everywhere("! pgrep -f '[f]orest.py|[s]leep 98765'")


def test_a_session_of_a_dead_main_process_is_found_without_a_mark() -> None:
    scope = "(systemd-run --quiet --scope sleep 98765 >/dev/null 2>&1 &); exec sleep infinity"
    unit('/bin/sh -c "%s"' % scope, "KillMode=process")
    everywhere("systemctl start %s" % UNIT)
    wait_for("pgrep -f '[s]leep 98765'")
    everywhere("systemctl kill -s KILL --kill-who=main %s" % UNIT)
    wait_for("systemctl is-failed --quiet %s" % UNIT)
    results = module("process_tree_stop", unit=UNIT, grace=2, reset_failed=True)
    assert verdicts(results) == {("stopped", True)}
    for result in results.values():
        assert [process["found_by"] for process in result["processes"]] == [["session", "process_group"]]
        assert result["unit_state"]["active_state"] == "inactive"
    everywhere("! pgrep -f '[s]leep 98765'")


def test_a_worker_that_lost_the_mark_is_in_the_control_group() -> None:
    unit(
        "/usr/bin/setpriv --reuid=daemon --regid=daemon --clear-groups sleep 98765",
        "SupplementaryGroups=%s" % MARK,
        "KillMode=none",
    )
    everywhere("systemctl start %s" % UNIT)
    wait_for("pgrep -u daemon -f '[s]leep 98765'")
    results = module("process_tree_stop", service=SERVICE, unit=UNIT, grace=2)
    assert verdicts(results) == {("stopped", True)}
    for result in results.values():
        (process,) = result["processes"]
        assert process["user"] == "daemon"
        assert "cgroup" in process["found_by"] and "mark" not in process["found_by"]


def test_a_stop_that_takes_too_long_is_ended_in_time() -> None:
    unit(forest({"id": "front", "name": "front", "deaf": True}), "TimeoutStopSec=infinity")
    everywhere("systemctl start %s" % UNIT)
    wait_for("test -e /tmp/forest/front")
    results = module("process_tree_stop", unit=UNIT, grace=2, kill_grace=3)
    assert verdicts(results) == {("stopped", True)}
    for result in results.values():
        assert result["processes"][0]["signals"] == ["systemd", "KILL"]
        assert result["elapsed"] < 2 + 2 + 3 + 5


def test_a_stop_of_somebody_else_is_joined() -> None:
    unit("/bin/sleep infinity", "ExecStop=/bin/sleep 8", "TimeoutStopSec=20")
    everywhere("systemctl start %s; systemctl stop --no-block %s" % (UNIT, UNIT))
    results = module("process_tree_stop", unit=UNIT)
    assert verdicts(results) == {("stopped", True)}
    everywhere("systemctl start %s; systemctl stop --no-block %s" % (UNIT, UNIT))
    assert verdicts(module("service_start", unit=UNIT)) == {("started", True)}
    everywhere("systemctl stop --no-block %s" % UNIT)
    busy = module("service_start", unit=UNIT, timeout=0.3)
    assert verdicts(busy) == {("refused", False)}
    assert "still stopping" in busy["old"]["msg"]


def test_a_restart_loop_is_stopped_between_two_lives() -> None:
    unit("/bin/false", "Restart=always", "RestartSec=30")
    everywhere("systemctl start %s || :" % UNIT)
    wait_for("systemctl show -P SubState %s | grep -q auto-restart" % UNIT)
    results = module("process_tree_stop", unit=UNIT)
    assert verdicts(results) == {("stopped", True)}
    everywhere("! systemctl is-active --quiet %s; test $(systemctl show -P SubState %s) != auto-restart" % (UNIT, UNIT))


LOOP = ("Restart=always", "RestartSec=60")
ENGINE = "/bin/sh -c 'test -e /run/repaired && exec sleep infinity; exit 1'"
BETWEEN_LIVES = "systemctl show -P SubState %s | grep -q auto-restart" % UNIT


def test_a_unit_between_two_lives_is_started_at_once_and_not_over_survivors() -> None:
    unit(ENGINE, *LOOP)
    everywhere("rm -f /run/repaired; systemctl start %s || :" % UNIT)
    wait_for(BETWEEN_LIVES)
    plan = module("service_start", check=True, unit=UNIT)
    assert verdicts(plan) == {("started", True)}
    everywhere(BETWEEN_LIVES)
    everywhere("touch /run/repaired")
    started = module("service_start", unit=UNIT)
    assert verdicts(started) == {("started", True)}
    for result in started.values():
        assert result["main_pid"] > 1
        assert result["elapsed"] < 20
    everywhere("rm /run/repaired; systemctl is-active --quiet %s" % UNIT)
    assert verdicts(module("service_start", unit=UNIT)) == {("running", False)}
    everywhere("systemctl stop %s" % UNIT)
    unit("/bin/sh -c 'setsid sleep 98765 & sleep 0.3; exit 1'", *LOOP, "KillMode=process")
    everywhere("systemctl start %s || :" % UNIT)
    wait_for(BETWEEN_LIVES)
    refused = module("service_start", unit=UNIT)
    assert verdicts(refused) == {("survivors", False)}
    assert {tuple(names(result, "survivors")) for result in refused.values()} == {("sleep",)}
    everywhere(BETWEEN_LIVES)
    assert verdicts(module("process_tree_stop", unit=UNIT, grace=2)) == {("stopped", True)}
    everywhere("! pgrep -f '[s]leep 98765'")


def test_a_start_limit_that_was_hit_is_reset() -> None:
    unit("/bin/sleep infinity")
    everywhere("for i in 1 2 3 4 5 6 7; do systemctl restart %s || :; done; systemctl stop %s" % (UNIT, UNIT))
    refused = module("service_start", unit=UNIT, reset_failed=False)
    assert verdicts(refused) == {("failed", True)}
    assert {result["unit_state"]["result"] for result in refused.values()} == {"start-limit-hit"}
    started = module("service_start", unit=UNIT)
    assert verdicts(started) == {("started", True)}
    for result in started.values():
        assert result["main_pid"] > 1
        assert re.fullmatch("[0-9a-f]{32}", result["invocation_id"])
    again = module("service_start", unit=UNIT)
    assert verdicts(again) == {("running", False)}
    assert again["mid"]["invocation_id"] == started["mid"]["invocation_id"]


def test_a_command_that_cannot_run() -> None:
    unit("/nonexistent/engine")
    results = module("service_start", unit=UNIT)
    assert verdicts(results) == {("failed", True)}
    assert "exited with status 203" in results["new"]["msg"]
    unit("/bin/false", "Restart=always", "RestartSec=20")
    assert "about to be restarted" in module("service_start", unit=UNIT)["mid"]["msg"]


def test_masked_held_and_missing_units() -> None:
    assert verdicts(module("service_start", unit="nowhere")) == {("not_found", False)}
    missing = module("process_tree_stop", unit="nowhere")
    assert verdicts(missing) == {("absent", False)}
    assert "does not exist on this host" in missing["new"]["msg"]
    everywhere("systemctl mask --quiet %s" % UNIT)
    assert verdicts(module("service_start", unit=UNIT)) == {("refused", False)}
    everywhere("systemctl unmask --quiet %s" % UNIT)
    unit("/bin/sleep infinity", "ExecCondition=/bin/false")
    held = module("service_start", unit=UNIT)
    assert verdicts(held) == {("refused", True)}
    assert "its condition does not hold" in held["old"]["msg"]


def test_a_gate_before_the_engine_is_a_start() -> None:
    unit("/bin/sleep infinity", "ExecStartPre=/bin/sleep 4")
    results = module("service_start", unit=UNIT)
    assert verdicts(results) == {("started", True)}
    assert results["mid"]["unit_state"]["active_state"] == "activating"
    stopped = module("process_tree_stop", unit=UNIT)
    assert verdicts(stopped) == {("stopped", True)}


def test_check_mode_starts_and_stops_nothing() -> None:
    unit("/bin/sleep infinity")
    assert verdicts(module("service_start", check=True, unit=UNIT)) == {("started", True)}
    everywhere("! systemctl is-active --quiet %s; systemctl start %s" % (UNIT, UNIT))
    plan = module("process_tree_stop", check=True, unit=UNIT)
    assert verdicts(plan) == {("stopped", True)}
    assert names(plan["old"]) == ["sleep"]
    everywhere("systemctl is-active --quiet %s" % UNIT)


def test_a_protected_process_in_the_unit_is_a_refusal() -> None:
    unit("/bin/sleep infinity")
    everywhere("systemctl start %s" % UNIT)
    refused = module("process_tree_stop", unit=UNIT, protected=["sleep"])
    assert verdicts(refused) == {("refused", False)}
    everywhere("systemctl is-active --quiet %s" % UNIT)


def test_the_definition_of_the_service_names_unit_and_mark() -> None:
    gid = int(on("mid", "getent group %s | cut -d: -f3" % MARK))
    for host in HOSTS:
        own = on(host, "getent group %s | cut -d: -f3" % MARK).strip()
        definition = json.dumps({"name": SERVICE, "unit": UNIT, "mark_gid": int(own)})
        on(host, "mkdir -p /etc/gpuops/services; cat > /etc/gpuops/services/%s.json" % SERVICE, definition)
    assert gid > 0
    try:
        start_six("KillMode=process")
        results = module("process_tree_stop", service=SERVICE, grace=2)
        assert verdicts(results) == {("stopped", True)}
        assert names(results["new"]) == ALL
        start_six("KillMode=process")
        by_unit = module("process_tree_stop", unit=UNIT, grace=2)
        assert names(by_unit["legacy"]) == ALL
    finally:
        everywhere("rm -rf /etc/gpuops")


def test_an_operators_shell_in_the_services_namespace_is_left_alone() -> None:
    unit("/bin/sleep infinity", "PrivateTmp=yes")
    everywhere("systemctl start %s" % UNIT)
    shell = "setsid systemd-run --quiet --scope nsenter -t $(systemctl show -P MainPID %s) -m sleep 98765" % UNIT
    everywhere("%s </dev/null >/dev/null 2>&1 &" % shell)
    wait_for("pgrep -f '^[s]leep 98765'")
    results = module("process_tree_stop", unit=UNIT, grace=1, kill_grace=1)
    assert verdicts(results) == {("survivors", True)}
    for result in results.values():
        (left,) = result["survivors"]
        assert (left["found_by"], left["outcome"], left["signals"]) == (["mount_namespace"], "foreign", [])
    everywhere("pgrep -f '[s]leep 98765'; ! systemctl is-active --quiet %s" % UNIT)


def test_what_the_task_runs_below_is_refused() -> None:
    for name in ("ssh.service", "init.scope", "user@0.service"):
        assert verdicts(module("process_tree_stop", unit=name)) == {("refused", False)}
    own = module("process_tree_stop", unit="ssh.service")
    assert 'the unit "ssh.service" holds the sessions of users or this host itself' in own["new"]["msg"]
    everywhere("ln -sf $(systemctl show -P FragmentPath ssh) /etc/systemd/system/nick.service; systemctl daemon-reload")
    try:
        alias = module("process_tree_stop", unit="nick.service")
        assert verdicts(alias) == {("refused", False)}
    finally:
        everywhere("rm /etc/systemd/system/nick.service; systemctl daemon-reload")
    wrong = module("process_tree_stop", unit="system.slice")
    assert "its name must end in" in wrong["old"]["msg"]
