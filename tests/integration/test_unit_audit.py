# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""unit_audit on systemd 247, 252 and 257: bad units are found, cured by drop-ins, and the cure holds."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import typing as t

import jinja2
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils._audit_rules import RULES as RULES_OF_ALL
from ansible_collections.gpuops.serving.plugins.plugin_utils import _services
from labhosts import LabHosts, Result, verdicts

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAB = LabHosts("test-audit", {"old": "bullseye", "mid": "bookworm", "new": "trixie"})
everywhere = LAB.everywhere
UNIT = "bad-sglang.service"
DROP_IN = "/etc/systemd/system/%s.d/50-gpuops-audit.conf" % UNIT
# An engine whose worker outlives its front, as every child of it does under KillMode=process.
BAD = """
[Unit]
Description=Überwacht von Hand
[Service]
ExecStart=/bin/sh -c 'setsid sleep 98765 & exec /opt/sglang serve --port 30000'
KillMode=process
SendSIGKILL=no
Restart=always
RestartSec=10
TimeoutStopSec=infinity
[Install]
WantedBy=multi-user.target
"""
ENGINE = "#!/bin/sh\nexec sleep 98764\n"
RULES = ["kill_mode", "restart_always", "send_sigkill", "start_limit_never", "timeout_stop_none"]


ODD = {
    "tmpl-vllm@.service": "[Service]\nExecStart=/opt/vllm serve %i --port 81%i\nKillMode=process\n",
    "empty-vllm.service": "[Unit]\nDescription=vllm\n[Service]\nType=simple\n",
    "user-vllm.service": "[Service]\nExecStart=/bin/su -s /bin/sh daemon -c 'exec /opt/vllm serve m --port 1'\n",
    "reset-vllm.service": "[Service]\nExecStart=/opt/vllm serve m --port 2\nKillMode=process\n",
    "exporter.service": "[Service]\nExecStart=/opt/vllm-exporter\nKillMode=process\n",
    "loop-vllm.service": "[Unit]\nStartLimitIntervalSec=1\nStartLimitBurst=2\n[Service]\nExecStartPre=/bin/false\n"
    "ExecStart=/opt/vllm serve m --port 3\nRestart=on-failure\nRestartSec=500ms\n",
}
PREPARE = (
    """
cd /etc/systemd/system
ln -s reset-vllm.service alias-vllm.service
mkdir reset-vllm.service.d
printf '[Service]\nKillMode=\nTimeoutStopSec=300\n' > reset-vllm.service.d/override.conf
ln -sf /dev/null masked-vllm.service
systemctl daemon-reload
systemctl start --no-block tmpl-vllm@7 user-vllm loop-vllm %s
systemd-run --quiet --unit=trans-vllm -p KillMode=none /opt/vllm serve m --port 9
"""
    % UNIT
)
SHOW = "systemctl show -P InvocationID -P MainPID %s" % UNIT
STAMP = "stat -c '%%i %%Y %%a %%U' %s" % DROP_IN
FAILED = "test $(systemctl show -P SubState loop-vllm) = failed"


def audit(check: bool = False, **options: t.Any) -> t.Dict[str, Result]:
    return LAB.module("unit_audit", check=check, **{"report_only": True, **options})


def broken(result: Result, name: str = UNIT) -> t.List[str]:
    """The rules that a unit still breaks."""
    (row,) = [row for row in result["units"] if row["name"] == name]
    return sorted(finding["rule"] for finding in row["findings"] if not finding["fixed"])


def left(command: str) -> t.Set[str]:
    return set(everywhere("ps -eo args | grep -cx '%s' || :" % command).values())


@pytest.fixture(scope="module", autouse=True)
def fixture_lab() -> t.Iterator[None]:
    service = {"name": "qwen", "engine": "sglang", "port": 30001, "command": ["/opt/sglang", "serve"], "gpus": ["0"]}
    (item,) = _services.resolve([service])
    path = ROOT / "roles" / "inference_service" / "templates" / "unit.service.j2"
    template = jinja2.Environment(trim_blocks=True).from_string(path.read_text(encoding="utf-8"))
    files = {"/etc/systemd/system/" + name: text for name, text in {**ODD, UNIT: BAD}.items()}
    files["/etc/systemd/system/" + item["unit"]] = template.render(service=item)
    files["/etc/gpuops/services/qwen.json"] = json.dumps(item["definition"])
    files["/opt/sglang"] = files["/opt/vllm"] = ENGINE
    write = "import json, sys; [open(path, 'w').write(text) for path, text in json.load(sys.stdin).items()]"
    with LAB.up():
        everywhere('mkdir -p /etc/gpuops/services; PYTHONUTF8=1 python3 -c "%s"' % write, json.dumps(files))
        everywhere("chmod 755 /opt/sglang /opt/vllm" + PREPARE)
        LAB.wait("grep -q session- /proc/$(pgrep -u daemon -n sleep)/cgroup")
        yield


def test_bad_units_are_found_cured_and_stopped_whole() -> None:
    found = audit()
    assert verdicts(found) == {("flawed", False)}
    for host, version in (("old", 247), ("mid", 252), ("new", 257)):
        assert found[host]["systemd"] == version
        assert broken(found[host]) == RULES
        # Nothing is said of an exporter, and nothing is wrong with the unit of the role.
        assert [row["name"] for row in found[host]["units"]] == [
            *(UNIT, "gpuops-qwen.service", "loop-vllm.service", "reset-vllm.service", "tmpl-vllm@7.service"),
            *("trans-vllm.service", "user-vllm.service"),
        ]
        assert broken(found[host], "gpuops-qwen.service") == []
        assert broken(found[host], "loop-vllm.service") == ["start_limit_never"]
    everywhere("! %s; test ! -e %s" % (FAILED, DROP_IN))
    before = everywhere(SHOW)

    plan, done = audit(check=True, fix=True), audit(fix=True)
    assert verdicts(plan) == verdicts(done) == {("flawed", True)}
    for host, result in done.items():
        for key in ("msg", "counts", "units"):
            assert result[key] == plan[host][key]
        assert broken(result) == []
        assert broken(result, "user-vllm.service") == ["login_session"]
    # The same unit runs on under other rules, of which systemd has nothing to say.
    assert everywhere(SHOW) == before
    silent = "systemd-analyze verify %s 2>&1; systemctl show -P NeedDaemonReload %s" % (UNIT, UNIT)
    assert set(everywhere(silent).values()) == {"no\n"}
    now = everywhere("systemctl show -p KillMode -p SendSIGKILL -p Restart -p TimeoutStopUSec %s | sort" % UNIT)
    expected = "KillMode=mixed\nRestart=on-failure\nSendSIGKILL=yes\nTimeoutStopUSec=2min\n"
    assert set(now.values()) == {expected}
    LAB.wait(FAILED, 10)

    stamps = everywhere(STAMP)
    assert {stamp.split()[2:] == ["644", "root"] for stamp in stamps.values()} == {True}
    again = audit(fix=True)
    assert verdicts(again) == {("flawed", False)}
    assert everywhere(STAMP) == stamps
    for result in again.values():
        rows = {row["name"]: row for row in result["units"]}
        assert rows[UNIT]["verdict"] == rows["gpuops-qwen.service"]["verdict"] == "clean"
        assert rows["reset-vllm.service"]["verdict"] == "clean"
        assert rows["tmpl-vllm@7.service"]["ports"] == [817]
        assert rows["tmpl-vllm@7.service"]["drop_in"].endswith("/tmpl-vllm@7.service.d/50-gpuops-audit.conf")
        (finding,) = rows["trans-vllm.service"]["findings"]
        assert (finding["rule"], finding["held_up"][:22]) == ("kill_mode", "the unit is transient:")

    assert left("sleep 98765") == {"1\n"}
    everywhere("systemctl stop %s" % UNIT)
    assert left("sleep 98765") == {"0\n"}

    removed = audit(state="absent")
    assert verdicts(removed) == {("flawed", True)}
    everywhere("test ! -e $(dirname %s)" % DROP_IN)
    assert {tuple(broken(result)) for result in removed.values()} == {tuple(RULES)}


def test_the_playbook_tells_of_every_host(tmp_path: pathlib.Path) -> None:
    """One host does not answer; the units of the others are as the test before has left them."""
    dark = tmp_path / "dark.yml"
    dark.write_text("all: {hosts: {dark: {ansible_host: 127.0.0.1, ansible_port: 1}}}", encoding="utf-8")
    report = tmp_path / "units.json"
    argv = [LAB.tool("ansible-playbook"), "-i", str(LAB.folder / "inventory.yml"), "-i", str(dark)]
    argv += ["gpuops.serving.audit_units", "-e", "gpuops_hosts=all", "-e", "gpuops_audit_report=%s" % report]
    environment = dict(LAB.environment(), ANSIBLE_CALLBACK_RESULT_FORMAT="yaml", ANSIBLE_NOCOLOR="1")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 2, done.stdout + done.stderr
    text = done.stdout.partition("TASK [Show what they answered]")[2].partition("\n\n")[0]
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert "NO dark unknown, the host does not answer" in rows
    cure = RULES_OF_ALL["kill_mode"].cure
    assert "NO mid %s critical kill_mode KillMode=process %s" % (UNIT, cure) in rows
    assert "yes new gpuops-qwen.service clean" in rows
    assert rows[-1].startswith("4 hosts: 3 flawed, 1 unknown; 21 units: ")
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["verdict"], found["ok"], found["counts"]["units"]["all"]) == ("unknown", False, 21)
    assert found["msg"].startswith("not every unit is in order: ") and "dark (unknown)" in found["msg"]
    assert found["hosts"]["old"]["units"][0]["findings"][0]["rule"] == "kill_mode"


def test_odd_names() -> None:
    named = audit(units=["masked-vllm", "empty-vllm", "alias-vllm", "nowhere", "reset-vllm.service"])
    for result in named.values():
        rows = {row["name"]: (row["verdict"], [f["rule"] for f in row["findings"]]) for row in result["units"]}
        assert rows == {
            "masked-vllm.service": ("unknown", []),
            "empty-vllm.service": ("flawed", ["not_loadable"]),
            "reset-vllm.service": ("clean", []),
            "nowhere.service": ("not_found", []),
        }
        assert (result["verdict"], result["ok"]) == ("unknown", False)


def test_the_unit_of_a_service_is_judged_by_its_definition() -> None:
    # What it says is the same on every host.
    LAB.at = ("old",)
    for result in LAB.module("unit_audit", fail_on="notice", service="qwen").values():
        (row,) = result["units"]
        assert (row["verdict"], row["service"], row["engine_from"]) == ("clean", "qwen", "definition")
        assert (row["load_time"], row["drain_time"], row["gpus"], row["ports"]) == (1800.0, 120.0, ["0"], [30001])
