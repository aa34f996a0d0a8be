# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The check of an inventory's GPUs on real hosts: one clear, one held, one without its library, one switched off."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import typing as t
from pathlib import Path

import pytest
from fleet import Fleet

# The host that does not answer comes first: what runs once for all hosts begins there.
HOSTS = ("dark=bookworm", "free=bookworm", "held=bullseye,user=ops", "broken=trixie")
MISSING = "the Python distribution"
HEADINGS = "clear  host    gpu  vendor  verdict  reason           memory MiB   holders"
FREE = "yes    free    0    nvidia  clear    idle             3/46068      none"
DARK = "NO     dark    unknown, the host does not answer"


class Lab(Fleet):
    """A lab whose hosts have no services, and one playbook."""

    pid = 0

    def check(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        argv = ["ansible-playbook", "-i", str(self.folder / "inventory.yml"), "gpuops.serving.gpu_clear_check"]
        environment = dict(self.environment(), ANSIBLE_CALLBACK_RESULT_FORMAT="yaml", ANSIBLE_NOCOLOR="1", **variables)
        return subprocess.run(
            [*argv, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    def hold(self, host: str, unit: str, memory: int, command: str, *options: str) -> int:
        """Let a process in a unit of its own hold the GPU, and return its pid."""
        holder = ["gpu-hold", "--device", "0", "--memory", str(memory), "--node", "/dev/nvidia0", "--", command, "3600"]
        self.run(host, shlex.join(["systemd-run", "--quiet", "--unit=" + unit, *options, *holder]))
        pid = int(self.run(host, "systemctl show -p MainPID --value " + unit))
        name = os.path.basename(command)
        self.run(host, 'while [ "$(cat /proc/%d/comm)" != %s ]; do sleep 0.1; done' % (pid, shlex.quote(name)))
        return pid

    def held(self) -> str:
        row = "NO     held    0    nvidia  busy     held_by_process  44003/46068  "
        return row + "pid %d sleep, user ops, unit hold.service, 44000 MiB" % self.pid


def table(done: subprocess.CompletedProcess[str]) -> t.List[str]:
    """The table as it was shown, without the indentation."""
    text = done.stdout.partition("TASK [Show what they answered]")[2].partition("\n\n")[0]
    rows = text.partition("msg: |-\n")[2].splitlines()
    assert rows, done.stdout + done.stderr
    return [row.strip() for row in rows]


def message(done: subprocess.CompletedProcess[str], task: str) -> str:
    """What a task failed with, in one line."""
    text = done.stdout.partition("TASK [%s]" % task)[2].partition("    msg: ")[2].partition("\n\n")[0]
    assert text, done.stdout + done.stderr
    return " ".join(text.split()).strip("'").replace("''", "'")


@pytest.fixture(scope="module")
def lab() -> t.Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    fleet = Lab("gpu-check")
    fleet.down()
    try:
        fleet.up(HOSTS)
        fleet.install_agent()
        fleet.pid = fleet.hold("held", "hold", 44000, "sleep", "--uid=ops")
        fleet.run("broken", "mv /opt/gpuops /opt/away")
        fleet.lab("kill", "dark")
        yield fleet
    finally:
        fleet.down()


def test_every_kind_of_host(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    done = lab.check("-e", "gpuops_hosts=all", "-e", "gpuops_gpu_report=%s" % path)
    assert done.returncode == 2
    rows = table(done)
    assert rows[:4] == [HEADINGS, DARK, FREE, lab.held()]
    assert rows[4].startswith("NO     broken  error, " + MISSING)
    assert rows[5:] == ["4 hosts: 1 clear, 1 busy, 1 unknown, 1 error; 2 GPUs: 1 clear, 1 busy"]
    summary = "not every GPU is clear: dark (unknown), held (busy), broken (error)"
    assert message(done, "Fail unless every GPU is clear") == summary

    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["schema"], found["verdict"], found["ok"], found["msg"]) == (1, "error", False, summary)
    assert found["counts"] == {
        "hosts": {"all": 4, "clear": 1, "busy": 1, "unknown": 1, "error": 1},
        "gpus": {"all": 2, "clear": 1, "busy": 1, "unknown": 0, "error": 0},
    }
    hosts = found["hosts"]
    assert {host: entry["verdict"] for host, entry in hosts.items()} == {
        "dark": "unknown",
        "free": "clear",
        "held": "busy",
        "broken": "error",
    }
    assert list(hosts) == ["dark", "free", "held", "broken"]
    assert (hosts["dark"]["msg"], hosts["dark"]["answered"]) == ("the host does not answer", False)
    assert "10.213." in hosts["dark"]["cause"]
    assert hosts["free"]["msg"] == "GPU 0 is clear"
    assert (hosts["broken"]["answered"], hosts["broken"]["gpus"]) == (True, [])
    assert MISSING in hosts["broken"]["msg"]
    [device] = hosts["held"]["gpus"]
    [holder] = device["holders"]
    assert (device["verdict"], device["reason"], device["memory_used"]) == ("busy", "held_by_process", 44003)
    assert {key: holder[key] for key in ("pid", "name", "user", "unit", "memory", "kind")} == {
        "pid": lab.pid,
        "name": "sleep",
        "user": "ops",
        "unit": "hold.service",
        "memory": 44000,
        "kind": "compute",
    }


def test_all_clear_is_zero(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    done = lab.check("-e", "gpuops_hosts=all", "-l", "free", "-e", "gpuops_gpu_report=%s" % path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table(done)[1].split() == FREE.split()
    assert json.loads(path.read_text(encoding="utf-8"))["ok"] is True


@pytest.mark.parametrize("hosts", ["dark", "held", "broken"])
def test_each_of_the_others_alone_is_not_zero(lab: Lab, hosts: str) -> None:
    done = lab.check("-e", "gpuops_hosts=%s" % hosts, "-f", "1")
    assert done.returncode == 2
    assert table(done)[-1].startswith("1 host: 1 ")


def test_a_host_with_a_broken_interpreter_is_an_error_with_its_message(lab: Lab) -> None:
    done = lab.check("-e", "gpuops_hosts=free,held", "-e", "ansible_python_interpreter=/nowhere")
    assert done.returncode == 2
    assert [row.split(",")[0] for row in table(done)[1:3]] == ["NO     free  error", "NO     held  error"]
    assert "/nowhere: not found" in table(done)[1]


def test_an_ordinary_user_without_rights_is_never_told_clear(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    done = lab.check("-e", "gpuops_hosts=held", "-e", "ansible_become=false", "-e", "gpuops_gpu_report=%s" % path)
    assert done.returncode == 2
    assert json.loads(path.read_text(encoding="utf-8"))["hosts"]["held"]["ok"] is False


def test_check_mode_says_the_same_and_writes_nothing(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    done = lab.check("-e", "gpuops_hosts=free,held", "-e", "gpuops_gpu_report=%s" % path, "--check", "--diff")
    assert done.returncode == 2
    assert table(done)[1:3] == [FREE.replace("free    ", "free  "), lab.held().replace("held    ", "held  ")]
    assert not path.exists()


def test_devices_and_counts_that_are_asked_for(lab: Lab) -> None:
    done = lab.check("-e", "gpuops_hosts=free", "-e", "gpuops_expected_gpus=8")
    assert done.returncode == 2
    assert table(done)[2] == "NO     free  error, GPUs expected: 8, found: 1"
    done = lab.check("-e", "gpuops_hosts=free", "-e", "gpuops_gpus=0,1")
    assert done.returncode == 2
    assert [row.split()[:6] for row in table(done)[1:3]] == [
        ["yes", "free", "0", "nvidia", "clear", "idle"],
        ["NO", "free", "1", "nvidia", "error", "not_found"],
    ]
    assert lab.check("-e", "gpuops_hosts=held", "-e", "gpuops_gpu_tolerance=50000").returncode == 2
    assert lab.check("-e", "gpuops_hosts=free", "-e", "gpuops_gpu_tolerance=2").returncode == 2


def test_what_each_host_expects_and_what_its_services_use(lab: Lab, tmp_path: Path) -> None:
    extra = tmp_path / "hosts.yml"
    extra.write_text(
        json.dumps(
            {
                "all": {
                    "hosts": {
                        "free": {
                            "gpuops_expected_gpus": 1,
                            "gpuops_services": [{"name": "chat", "gpus": ["0"]}, {"name": "embed", "gpus": ["7"]}],
                        },
                        "held": {"gpuops_expected_gpus": 2, "gpuops_services": [{"name": "cpu", "gpus": []}]},
                        "broken": {},
                    },
                    "children": {"twice": {"hosts": {"free": {}}}, "again": {"hosts": {"free": {}}}},
                }
            }
        ),
        encoding="utf-8",
    )
    with_services = ("-i", str(extra), "-l", "free,held,broken")
    done = lab.check(*with_services)
    assert done.returncode == 2
    assert [row.split()[1] for row in table(done)[1:-1]] == ["free", "held", "held"]
    assert table(done)[3].startswith("NO     held  error, GPUs expected: 2, found: 1; GPU 0 is busy")
    done = lab.check(*with_services, "-e", "service=chat")
    assert done.returncode == 0, done.stdout
    assert [row.split()[1:3] for row in table(done)[1:-1]] == [["free", "0"]]
    done = lab.check(*with_services, "-e", "service=chat,embed")
    assert [row.split()[1:6] for row in table(done)[1:-1]] == [
        ["free", "0", "nvidia", "clear", "idle"],
        ["free", "7", "nvidia", "error", "not_found"],
    ]
    done = lab.check(*with_services, "-e", "service=cpu")
    assert done.returncode == 2
    assert message(done, "Fail unless every GPU is clear") == (
        'no host was asked: none of them uses a GPU for the service "cpu"'
    )
    done = lab.check(*with_services, "-e", "service=nosuch")
    assert message(done, "Refuse what cannot be asked") == (
        'the service "nosuch" is not in gpuops_services of any selected host (there are: chat, cpu, embed)'
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpuops_hosts=nosuch"], 'no host of the inventory fits the pattern "nosuch"'),
        (["gpuops_hosts=all:!all"], 'no host of the inventory fits the pattern "all:!all"'),
        (
            ["gpuops_hosts=all", "gpuops_expected_gpus=eight"],
            'gpuops_expected_gpus must be a whole number from 0 to 2000000, not "eight"',
        ),
        (
            ["gpuops_hosts=all", "gpuops_vendor=matrox"],
            'gpuops_vendor must be one of auto, amd, intel, nvidia, not "matrox"',
        ),
        (
            ["gpuops_hosts=all", "gpuops_gpu_report=/nowhere/gpus.json"],
            'gpuops_gpu_report "/nowhere/gpus.json" cannot be written: there is no folder "/nowhere"',
        ),
    ],
)
def test_a_bad_request_ends_non_zero_before_any_host_is_asked(lab: Lab, arguments: t.List[str], sentence: str) -> None:
    done = lab.check(*[word for argument in arguments for word in ("-e", argument)])
    assert done.returncode == 2
    assert message(done, "Refuse what cannot be asked") == sentence
    assert "TASK [Read the GPUs]" not in done.stdout


def test_hosts_without_services_are_not_asked_unless_named(lab: Lab) -> None:
    done = lab.check()
    assert done.returncode == 2
    assert message(done, "Fail unless every GPU is clear") == (
        "no host was asked, for none has gpuops_services in the inventory: "
        "add the list, or name the hosts with -e gpuops_hosts=PATTERN"
    )


def test_what_a_process_is_called_is_no_template(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    name = "{{ 7*7 }}"
    lab.run("free", "cp /bin/sleep '/tmp/%s'" % name)
    lab.hold("free", "odd", 100, "/tmp/" + name)
    try:
        done = lab.check("-e", "gpuops_hosts=free", "-e", "gpuops_gpu_report=%s" % path)
        assert done.returncode == 2
        assert "%s, user root, unit odd.service, 100 MiB" % name in table(done)[1]
        found = json.loads(path.read_text(encoding="utf-8"))["hosts"]["free"]["gpus"][0]
        assert found["holders"][0]["name"] == name
    finally:
        lab.run("free", "systemctl stop odd")
