# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A rolling restart of real hosts, and what happens when something goes wrong in the middle of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from fleet import GPU_HOSTS, REPO, UNITS, Fleet, Traffic

LIVES = t.Dict[str, str]


def lives(fleet: Fleet) -> LIVES:
    return {host: fleet.unit(host)["InvocationID"] for host in GPU_HOSTS}


def roll(fleet: Fleet, report: Path, *arguments: str, **options: t.Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = fleet.playbook(
        "rolling_restart",
        *("-e", "service=qwen", "-e", f"clean_restart_report={report}", *arguments),
        checked=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    return done


def outcomes(report: Path) -> t.Dict[str, t.Any]:
    return {entry["host"]: entry for entry in json.loads(report.read_text(encoding="utf-8"))["hosts"]}


def begin(fleet: Fleet, report: Path, *arguments: str) -> subprocess.Popen[str]:
    """A rollout in the background, in a session of its own."""
    return subprocess.Popen(
        fleet.ansible_argv("rolling_restart", "-e", "service=qwen", "-e", f"clean_restart_report={report}", *arguments),
        env=fleet.environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], text: str, timeout: float = 90) -> str:
    """What the rollout prints up to and with a line that holds ``text``."""
    assert process.stdout is not None
    end = time.monotonic() + timeout
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
        if time.monotonic() > end:
            break
    pytest.fail(f"the rollout never said {text!r}: {seen}")


def assert_serves(fleet: Fleet, host: str) -> None:
    assert fleet.unit(host)["ActiveState"] == "active"
    assert fleet.one_token(f"http://{fleet.address(host)}:8080") == 1


def test_check_mode_changes_nothing_and_names_what_it_would_stop(fleet: Fleet, tmp_path: Path) -> None:
    before = {host: fleet.processes(host) for host in GPU_HOSTS}
    kept = lives(fleet)
    done = roll(fleet, tmp_path / "report.json", "--check")
    assert done.returncode == 0, done.stdout
    for host in GPU_HOSTS:
        assert fleet.processes(host) == before[host]
        for row in before[host]:
            assert f"to be stopped: pid {row['pid']} {row['name']}" in done.stdout
    assert lives(fleet) == kept
    assert set(fleet.backends().values()) == {"UP"}
    # The two predicted changes of each host are the withdrawal and the stop.
    assert done.stdout.count("changed=2 ") == len(GPU_HOSTS)
    assert not (tmp_path / "report.json").exists()
    for host in GPU_HOSTS:
        assert fleet.run(host, "ls /var/lib/gpuops/qwen/lease.json", checked=False) == ""


def test_an_unknown_service_fails_before_any_host_is_touched(fleet: Fleet, tmp_path: Path) -> None:
    kept = lives(fleet)
    done = roll(fleet, tmp_path / "report.json", "-e", "service=qwne")
    assert done.returncode != 0
    assert 'the service "qwne" is not in gpuops_services of any selected host (there are: qwen)' in done.stdout
    assert lives(fleet) == kept


def test_hosts_that_are_down_failed_or_never_started_come_to_serve(fleet: Fleet, tmp_path: Path) -> None:
    # gpu1 is down, gpu2 has failed with its start limit hit, gpu3's front is gone and its scheduler holds the GPU.
    fleet.run("gpu1", "systemctl stop gpuops-qwen.service")
    fleet.run(
        "gpu2",
        "mv /usr/local/bin/lab-llama /usr/local/bin/lab-llama.away; systemctl restart gpuops-qwen.service",
        False,
    )
    fleet.run(
        "gpu2",
        "for i in $(seq 60); do systemctl is-failed -q gpuops-qwen && exit; systemctl restart gpuops-qwen; done",
        False,
    )
    fleet.run("gpu2", "mv /usr/local/bin/lab-llama.away /usr/local/bin/lab-llama")
    fleet.run("gpu3", "systemctl stop qwen-legacy.service")
    assert fleet.unit("gpu2")["ActiveState"] == "failed"
    assert any(row["gpu"] for row in fleet.processes("gpu3"))
    done = roll(fleet, tmp_path / "report.json", "-e", '{"gpuops_serial": "100%"}')
    assert done.returncode == 0, done.stdout
    assert {entry["outcome"] for entry in outcomes(tmp_path / "report.json").values()} == {"ok"}
    for host in GPU_HOSTS:
        assert_serves(fleet, host)
    assert set(fleet.backends().values()) == {"UP"}


@pytest.mark.parametrize("host", ["gpu1", "gpu2"])
def test_a_lost_host_stops_the_rollout_and_is_named(fleet: Fleet, tmp_path: Path, host: str) -> None:
    kept = lives(fleet)
    report = tmp_path / "report.json"
    # In a batch of one, and in a batch of two with a partner that goes on.
    serial = "1" if host == "gpu1" else "2"
    process = begin(fleet, report, "-e", f'{{"gpuops_serial": {serial}}}')
    try:
        seen = read_until(process, "Stop everything that the service owns")
        fleet.lab("cut", host)
        seen += process.communicate(timeout=180)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    found = outcomes(report)
    assert found[host]["outcome"] == "lost", seen
    assert f"{host} does not answer any more" in found[host]["failure"]["message"]
    left = "gpu1,gpu2,gpu3" if host == "gpu1" else "gpu2,gpu3"
    assert f"--limit {left} -e clean_restart_lease_wait=90" in found[host]["next_command"]
    assert fleet.backends()[host] != "UP"
    now = lives_of(fleet, [name for name in GPU_HOSTS if name != host])
    if host == "gpu1":
        assert now == {name: kept[name] for name in ("gpu2", "gpu3")}
        assert set(found) == {"gpu1"}
    else:
        assert found["gpu1"]["outcome"] == "ok"
        assert now["gpu3"] == kept["gpu3"]
        assert fleet.backends()["gpu1"] == "UP"
    if host == "gpu2":
        assert "gpu3 is left untouched: the rollout stopped after gpu2 went wrong" in seen
    fleet.lab("heal", host)
    again = roll(fleet, report, "--limit", host, "-e", "clean_restart_lease_wait=90")
    assert again.returncode == 0, again.stdout
    assert_serves(fleet, host)
    assert fleet.backends()[host] == "UP"


def lives_of(fleet: Fleet, hosts: t.Sequence[str]) -> LIVES:
    return {host: fleet.unit(host)["InvocationID"] for host in hosts}


@pytest.mark.parametrize("task", ["Stop everything that the service owns", "Start the unit"])
def test_a_second_run_converges_after_the_first_was_killed(fleet: Fleet, tmp_path: Path, task: str) -> None:
    report = tmp_path / "report.json"
    process = begin(fleet, report)
    try:
        read_until(process, task)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    refused = roll(fleet, report, "--limit", "gpu1")
    assert refused.returncode != 0
    assert 'the service "qwen" is in use by run "' in refused.stdout
    # What Ansible does with gpu2 and gpu3 afterwards is no different from any other rollout.
    again = roll(fleet, report, "--limit", "gpu1", "-e", "clean_restart_lease_wait=90")
    assert again.returncode == 0, again.stdout
    assert {entry["outcome"] for entry in outcomes(report).values()} == {"ok"}
    assert_serves(fleet, "gpu1")
    assert set(fleet.backends().values()) == {"UP"}


def test_too_few_healthy_backends_are_refused_before_anything_is_withdrawn(fleet: Fleet, tmp_path: Path) -> None:
    fleet.haproxy("; ".join(f"set server qwen/{host} state maint" for host in ("gpu2", "gpu3")))
    kept = lives(fleet)
    done = roll(fleet, tmp_path / "report.json", "--limit", "gpu1")
    assert done.returncode != 0
    assert outcomes(tmp_path / "report.json")["gpu1"]["failure"]["phase"] == "withdraw"
    assert outcomes(tmp_path / "report.json")["gpu1"]["failure"]["verdict"] == "refused"
    assert lives(fleet) == kept
    assert fleet.backends()["gpu1"] == "UP"


def test_a_host_that_does_not_become_ready_stays_withdrawn(fleet: Fleet, tmp_path: Path) -> None:
    kept = lives(fleet)
    fleet.run("gpu1", "mv /opt/models/tiny.gguf /opt/models/tiny.gguf.away")
    try:
        done = roll(fleet, tmp_path / "report.json")
    finally:
        fleet.run("gpu1", "mv /opt/models/tiny.gguf.away /opt/models/tiny.gguf")
    assert done.returncode != 0
    found = outcomes(tmp_path / "report.json")
    assert set(found) == {"gpu1"}
    # It dies at once, so that the start may notice before the wait does.
    failure = found["gpu1"]["failure"]
    assert (found["gpu1"]["outcome"], failure["phase"], failure["verdict"]) in (
        ("failed", "start", "failed"),
        ("failed", "wait", "restart_loop"),
        ("failed", "wait", "dead"),
    )
    assert fleet.backends()["gpu1"] != "UP"
    assert lives_of(fleet, ["gpu2", "gpu3"]) == {name: kept[name] for name in ("gpu2", "gpu3")}
    again = roll(fleet, tmp_path / "report.json", "--limit", "gpu1")
    assert again.returncode == 0, again.stdout
    assert_serves(fleet, "gpu1")


def test_a_wedged_engine_never_drains_and_is_restarted_when_that_is_accepted(
    fleet: Fleet, tmp_path: Path, traffic: t.Callable[..., Traffic]
) -> None:
    report = tmp_path / "report.json"
    fleet.haproxy("; ".join(f"set server qwen/{host} state drain" for host in ("gpu2", "gpu3")))
    clients = traffic("--workers", "4", "--streams", "1")
    clients.wait_in_flight(4, streams=3)
    main_pid = fleet.unit("gpu1")["MainPID"]
    fleet.run("gpu1", f"kill -STOP {main_pid}")
    quick = ("--limit", "gpu1", "-e", "clean_restart_drain_timeout=6", "-e", "clean_restart_min_healthy=0")
    done = roll(fleet, report, *quick)
    assert done.returncode != 0
    failure = outcomes(report)["gpu1"]["failure"]
    assert (failure["phase"], failure["verdict"]) == ("drain", "busy"), failure
    assert "clean_restart_drain_on_timeout=proceed" in done.stdout
    assert fleet.unit("gpu1")["MainPID"] == main_pid
    again = roll(fleet, report, *quick, "-e", "clean_restart_drain_on_timeout=proceed")
    clients.kill()
    assert again.returncode == 0, again.stdout
    assert fleet.unit("gpu1")["MainPID"] != main_pid
    assert_serves(fleet, "gpu1")
    assert fleet.backends()["gpu1"] == "UP"


MISTAKES = {
    "unit": (
        {"unit": "qwne.service", "manage_unit": False},
        "survey",
        'the unit "qwne.service" of the service "qwen" on gpu1 is not-found',
    ),
    "model": ({"model": "tinny"}, "survey", '"tinny" is not listed: there are "tiny"'),
    "backend": ({"gateway": {"backend": "qwem"}}, "withdraw", 'the backend "qwem"'),
    "gateway host": ({"gateway": {"host": "gateway1"}}, "survey", 'the gateway host "gateway1"'),
    "port": ({"port": 8099}, "drain", "nothing listens at the URL"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_the_inventory_stops_no_engine(fleet: Fleet, tmp_path: Path, what: str) -> None:
    change, phase, message = MISTAKES[what]
    service: t.Dict[str, t.Any] = {
        "name": "qwen",
        "engine": "llama_cpp",
        "model": "tiny",
        "port": 8080,
        "gpus": ["0"],
        "unit": "gpuops-qwen.service",
        "manage_unit": False,
        "gateway": {"type": "haproxy", "host": "gw", "backend": "qwen", "server": "gpu1", "url": fleet.gateway_url()},
    }
    gateway = dict(service["gateway"], **change.get("gateway", {}))
    services = [{**service, **change, "gateway": gateway}]
    before = fleet.processes("gpu1")
    done = roll(fleet, tmp_path / "report.json", "--limit", "gpu1", "-e", json.dumps({"gpuops_services": services}))
    assert done.returncode != 0
    failure = outcomes(tmp_path / "report.json")["gpu1"]["failure"]
    assert failure["phase"] == phase, failure
    assert message in failure["message"]
    assert fleet.processes("gpu1") == before


def test_a_deployed_change_of_model_and_port_is_rolled_out(fleet: Fleet, tmp_path: Path) -> None:
    def side(port: str, model: str) -> t.Tuple[str, ...]:
        command = ["/usr/bin/env", "LAB_LLAMA_NO_GPU=1", "/usr/local/bin/lab-llama", port, model]
        service = {
            "name": "side",
            "engine": "llama_cpp",
            "model": model,
            "port": int(port),
            "gpus": [],
            "command": command,
        }
        return ("--limit", "gpu1", "-e", json.dumps({"gpuops_services": [service]}), "-e", "service=side")

    report = ("-e", f"clean_restart_report={tmp_path / 'report.json'}")
    try:
        fleet.playbook("deploy", *side("8090", "old"))
        fleet.playbook("start", *side("8090", "old"), *report)
        mistake = fleet.playbook("rolling_restart", *side("8090", "new"), *report, checked=False)
        assert mistake.returncode != 0
        failure = outcomes(tmp_path / "report.json")["gpu1"]["failure"]
        assert (failure["phase"], failure["verdict"]) == ("survey", "wrong_server")
        fleet.playbook("deploy", *side("8091", "new"))
        fleet.playbook("rolling_restart", *side("8091", "new"), *report)
        assert outcomes(tmp_path / "report.json")["gpu1"]["outcome"] == "ok"
        assert fleet.one_token(f"http://{fleet.address('gpu1')}:8091") == 1
    finally:
        fleet.run("gpu1", "systemctl disable --now gpuops-side.service; rm -f /etc/gpuops/services/side.json", False)


@pytest.mark.parametrize(
    ("node", "named"),
    [
        ("--node /dev/nvidia0", r'pid \d+ "sleep" \(user root, unit stranger.service\) on GPU 0'),
        # The lab's hosts are containers: a number that only the driver tells names nobody there.
        ("", r"a process that the driver calls \d+, and that is not visible there, on GPU 0"),
    ],
)
def test_a_gpu_that_somebody_else_holds_is_found_before_the_stop(
    fleet: Fleet, tmp_path: Path, node: str, named: str
) -> None:
    hold = "gpu-hold --device 0 --memory 500 %s -- sleep 600" % node
    fleet.run("gpu1", "systemd-run --quiet --unit=stranger " + hold)
    before = fleet.processes("gpu1")
    try:
        done = roll(fleet, tmp_path / "report.json", "--limit", "gpu1")
        assert done.returncode != 0
        failure = outcomes(tmp_path / "report.json")["gpu1"]["failure"]
        assert failure["phase"] == "survey"
        assert re.search(named + " is not of this service", failure["message"]), failure["message"]
        assert fleet.processes("gpu1") == before
        assert fleet.backends()["gpu1"] == "UP"
    finally:
        fleet.run("gpu1", "systemctl stop stranger.service")


def test_a_service_without_a_gateway_and_without_a_gpu(fleet: Fleet, tmp_path: Path) -> None:
    command = ["/usr/bin/env", "LAB_LLAMA_NO_GPU=1", "/usr/local/bin/lab-llama", "8090", "side"]
    side = {"name": "side", "engine": "llama_cpp", "model": "side", "port": 8090, "gpus": [], "command": command}
    where = ("--limit", "gpu1", "-e", json.dumps({"gpuops_services": [side]}), "-e", "service=side")
    where += ("-e", f"clean_restart_report={tmp_path / 'report.json'}")
    try:
        fleet.playbook("deploy", *where)
        fleet.playbook("start", *where)
        life = fleet.unit("gpu1", "gpuops-side.service")["InvocationID"]
        fleet.playbook("rolling_restart", *where)
        assert fleet.unit("gpu1", "gpuops-side.service")["InvocationID"] not in ("", life)
        assert outcomes(tmp_path / "report.json")["gpu1"]["outcome"] == "ok"
        fleet.playbook("stop", *where)
        assert fleet.unit("gpu1", "gpuops-side.service")["ActiveState"] == "inactive"
        fleet.playbook("deploy", *where)
        assert fleet.unit("gpu1", "gpuops-side.service")["ActiveState"] == "inactive"
    finally:
        fleet.run("gpu1", "systemctl disable --now gpuops-side.service; rm -f /etc/gpuops/services/side.json", False)


def test_a_rollout_under_traffic_loses_nothing(fleet: Fleet, tmp_path: Path, traffic: t.Callable[..., Traffic]) -> None:
    clients = traffic()
    clients.wait_in_flight(20, streams=3)
    done = roll(fleet, tmp_path / "report.json")
    summary = clients.stop()
    assert done.returncode == 0, done.stdout
    assert summary["failed"] == 0, summary["failures"]
    assert summary["requests"] > 20
    assert summary["longest_stream"] >= 10


def test_the_same_rollout_without_the_drain_does_lose_requests(
    fleet: Fleet, tmp_path: Path, traffic: t.Callable[..., Traffic]
) -> None:
    clients = traffic()
    clients.wait_in_flight(20, streams=3)
    done = roll(fleet, tmp_path / "report.json", "--limit", "gpu1", "-e", "clean_restart_drain=false")
    summary = clients.stop()
    assert done.returncode == 0, done.stdout
    assert summary["failed"] > 0


def test_stop_and_start_by_playbook(fleet: Fleet, tmp_path: Path) -> None:
    where = ("-e", "service=qwen", "--limit", "gpu3", "-e", f"clean_restart_report={tmp_path / 'report.json'}")
    fleet.playbook("stop", *where)
    assert fleet.processes("gpu3") == []
    assert fleet.unit("gpu3")["ActiveState"] == "inactive"
    assert fleet.backends()["gpu3"] != "UP"
    assert fleet.module("gpu3", "gpu_clear")["verdict"] == "clear"
    fleet.playbook("stop", *where)
    fleet.playbook("start", *where)
    life = fleet.unit("gpu3")["InvocationID"]
    assert_serves(fleet, "gpu3")
    assert fleet.backends()["gpu3"] == "UP"
    fleet.playbook("start", *where)
    assert fleet.unit("gpu3")["InvocationID"] == life


def test_the_gpu_check_of_the_inventory(fleet: Fleet) -> None:
    fleet.playbook("stop", "-e", "service=qwen", "--limit", "gpu1")
    done = fleet.playbook(
        "gpu_clear_check",
        checked=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode != 0
    assert re.search(r"yes +gpu1 +0 +nvidia +clear +idle +3/46068 +none", done.stdout)
    assert re.search(r"NO +gpu2 +0 +nvidia +busy +held_by_process +44003/46068 +pid \d+ ", done.stdout)
    only = fleet.playbook("gpu_clear_check", "--limit", "gpu1", checked=False)
    assert only.returncode == 0
    fleet.lab("cut", "gpu1")
    lost = fleet.playbook(
        "gpu_clear_check", "--limit", "gpu1", checked=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert lost.returncode != 0
    assert re.search(r"NO +gpu1 +unknown, the host does not answer", lost.stdout)


def test_the_units_are_those_of_the_lab(fleet: Fleet) -> None:
    assert fleet.run("gpu3", "systemctl show -p KillMode --value " + UNITS["gpu3"]) == "process"
    assert fleet.run("gpu1", "systemctl show -p KillMode --value " + UNITS["gpu1"]) == "mixed"
