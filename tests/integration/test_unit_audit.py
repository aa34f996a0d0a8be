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
from labhosts import LabHosts, Result

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


SILENT = "systemd-analyze verify %s 2>&1; systemctl show -P NeedDaemonReload %s" % (UNIT, UNIT)
NOW = "systemctl show -p KillMode -p SendSIGKILL -p Restart -p TimeoutStopUSec %s | sort" % UNIT
WORKERS = "ps -eo args | grep -cx 'sleep 98765' || :"
STEPS: t.Dict[str, t.Any] = {
    "found": {},
    "loops": "! %s && test ! -e %s" % (FAILED, DROP_IN),
    "before": SHOW,
    "plan": {"fix": True, "check": True},
    "done": {"fix": True},
    "after": SHOW,
    "text": "cat " + DROP_IN,
    "silent": SILENT,
    "now": NOW,
    "trips": "for i in $(seq 100); do if %s; then exit 0; fi; sleep 0.1; done; exit 7" % FAILED,
    "stamp": STAMP,
    "again": {"fix": True},
    "stamp_again": STAMP,
    "workers": WORKERS,
    "stopped": "systemctl stop %s; %s" % (UNIT, WORKERS),
    "removed": {"state": "absent"},
    "gone": "test ! -e $(dirname %s)" % DROP_IN,
}


def run_steps(folder: pathlib.Path) -> t.Dict[str, t.Dict[str, t.Any]]:
    """Every step on every host, in one run of Ansible: results of the module, and what the shell printed."""
    tasks: t.List[t.Dict[str, t.Any]] = []
    for name, step in STEPS.items():
        task: t.Dict[str, t.Any] = {"name": "Do " + name, "register": "step_" + name}
        if isinstance(step, str):
            task["ansible.builtin.shell"] = step
        else:
            options = {key: value for key, value in step.items() if key != "check"}
            task.update({"gpuops.serving.unit_audit": {"report_only": True, **options}, "check_mode": "check" in step})
        tasks.append(task)
    answers = "{{ {%s} | to_json }}" % ", ".join("'%s': step_%s" % (name, name) for name in STEPS)
    copy = {"content": answers, "dest": "%s/{{ inventory_hostname }}.json" % folder, "mode": "0600"}
    local = {"delegate_to": "localhost", "become": False, "vars": {"ansible_connection": "local"}}
    tasks.append({"name": "Bring the answers", "ansible.builtin.copy": copy, **local})
    play = folder / "steps.yml"
    play.write_text(
        json.dumps([{"hosts": ",".join(LAB.specs), "gather_facts": False, "tasks": tasks}]), encoding="utf-8"
    )
    argv = [LAB.tool("ansible-playbook"), "-i", str(LAB.folder / "inventory.yml"), str(play)]
    done = subprocess.run(argv, env=LAB.environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {host: json.loads((folder / (host + ".json")).read_text(encoding="utf-8")) for host in LAB.specs}
    for answers_of_host in found.values():
        for name, step in STEPS.items():
            if isinstance(step, str):
                answers_of_host[name] = answers_of_host[name]["stdout"]
    return found


def test_bad_units_are_found_cured_and_stopped_whole(tmp_path: pathlib.Path) -> None:
    versions = {"old": 247, "mid": 252, "new": 257}
    for host, step in run_steps(tmp_path).items():
        found = step["found"]
        assert (found["verdict"], found["changed"], found["systemd"]) == ("flawed", False, versions[host])
        assert broken(found) == RULES
        # Nothing is said of an exporter, and nothing is wrong with the unit of the role.
        assert [row["name"] for row in found["units"]] == [
            *(UNIT, "gpuops-qwen.service", "loop-vllm.service", "reset-vllm.service", "tmpl-vllm@7.service"),
            *("trans-vllm.service", "user-vllm.service"),
        ]
        assert broken(found, "gpuops-qwen.service") == []
        assert broken(found, "loop-vllm.service") == ["start_limit_never"]

        plan, done = step["plan"], step["done"]
        for key in ("verdict", "changed", "msg", "counts", "units", "diff"):
            assert done[key] == plan[key]
        assert (done["verdict"], done["changed"]) == ("flawed", True)
        assert broken(done) == []
        assert broken(done, "user-vllm.service") == ["login_session"]
        (entry,) = [entry for entry in done["diff"] if entry["after_header"] == DROP_IN]
        assert (entry["before"], entry["after"]) == ("", step["text"] + "\n")
        # The same unit runs on under other rules, of which systemd has nothing to say.
        assert step["before"] == step["after"]
        assert step["silent"] == "no"
        assert step["now"] == "KillMode=mixed\nRestart=on-failure\nSendSIGKILL=yes\nTimeoutStopUSec=2min"

        again = step["again"]
        assert (again["changed"], step["stamp"]) == (False, step["stamp_again"])
        assert step["stamp"].split()[2:] == ["644", "root"]
        rows = {row["name"]: row for row in again["units"]}
        assert rows[UNIT]["verdict"] == rows["gpuops-qwen.service"]["verdict"] == "clean"
        assert rows["reset-vllm.service"]["verdict"] == "clean"
        assert rows["tmpl-vllm@7.service"]["ports"] == [817]
        assert rows["tmpl-vllm@7.service"]["drop_in"].endswith("/tmpl-vllm@7.service.d/50-gpuops-audit.conf")
        (finding,) = rows["trans-vllm.service"]["findings"]
        assert (finding["rule"], finding["held_up"][:22]) == ("kill_mode", "the unit is transient:")

        assert (step["workers"], step["stopped"]) == ("1", "0")
        assert (step["removed"]["verdict"], step["removed"]["changed"]) == ("flawed", True)
        assert broken(step["removed"]) == RULES


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
