# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab itself: what it promises to the demo, to Molecule and to the other tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
from gpulab import common, lifecycle, state

LAB = [sys.executable, str(common.LAB / "lab.py")]
NAME = "test-lab"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")


def lab(*words: str, checked: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LAB, *words], capture_output=True, text=True, check=False, timeout=timeout)
    if checked:
        assert done.returncode == 0, done.stderr
    return done


def ssh(host: str, command: str, seconds: float = 20) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(common.BUILD / NAME / "ssh_config"), host, command]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds, stdin=subprocess.DEVNULL)


def traces() -> dict[str, t.Any]:
    """What a lab of this name could leave behind on this machine."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z":
                continue  # ended; whether it is reaped is a matter of this machine's init
            line = (folder / "cmdline").read_bytes() + (folder / "cgroup").read_bytes()
        except OSError:
            continue
        if f"/{NAME}/".encode() in line and int(folder.name) != os.getpid():
            processes.append(f"{folder.name} {line[:200].decode(errors='replace')}")
    return {
        "mounts": [line for line in mounts.splitlines() if f"/{NAME}" in line],
        "links": [link["ifname"] for link in links if link["ifname"].startswith((f"vb-{NAME}", "gpulab"))],
        "processes": processes,
        "left": lifecycle.leftovers(NAME),
    }


NOTHING: dict[str, t.Any] = {"mounts": [], "processes": [], "left": []}


def assert_nothing_is_left(links_before: list[str]) -> None:
    """Other labs may stand, come and go meanwhile."""
    labs = state.all_labs()
    now = traces()
    links = now.pop("links")
    assert now == NOTHING
    mine = state.load(NAME)
    assert mine is None
    assert not [link for link in links if link.startswith(f"vb-{NAME}")]
    bridges = {f"gpulab{one.index}" for one in [*labs, *state.all_labs()]}
    assert {link for link in links if not link.startswith("vb-")} <= set(links_before) | bridges


@pytest.fixture
def links_before() -> t.Iterator[list[str]]:
    lab("down", "--name", NAME)
    yield t.cast("list[str]", traces()["links"])
    lab("down", "--name", NAME)


@pytest.fixture(scope="module")
def three() -> t.Iterator[None]:
    lab("down", "--name", NAME)
    hosts = ["--host", "gpu1=bookworm", "--host", "gpu2=bullseye,user=ops", "--host", "gw=trixie,role=gateway"]
    lab("up", "--name", NAME, *hosts)
    yield
    lab("down", "--name", NAME)


@pytest.mark.usefixtures("three")
class TestHosts:
    @pytest.mark.parametrize(
        ("host", "floor"), [("gpu1", "systemd 252"), ("gpu2", "systemd 247"), ("gw", "systemd 257")]
    )
    def test_real_systemd_of_its_release(self, host: str, floor: str) -> None:
        assert ssh(host, "systemctl --version").stdout.startswith(floor)
        assert ssh(host, "systemctl is-system-running --wait; systemctl --failed --no-legend").stdout == "running\n"
        assert ssh(host, "hostname").stdout == f"{host}\n"

    def test_one_is_an_ordinary_user_with_sudo(self) -> None:
        assert ssh("gpu1", "id -un").stdout == "root\n"
        assert ssh("gpu2", "id -un; sudo -n id -un").stdout == "ops\nroot\n"

    def test_no_way_out(self) -> None:
        assert ssh("gpu1", "ip route").stdout.count("\n") == 1
        assert "default" not in ssh("gpu1", "ip route").stdout
        assert ssh("gpu1", "getent hosts example.org").returncode != 0

    def test_hosts_reach_each_other_by_name(self) -> None:
        command = "import socket; print(socket.create_connection(('gpu2', 22), 3).recv(4).decode())"
        assert ssh("gpu1", f'python3 -c "{command}"').stdout == "SSH-\n"

    def test_gpu_and_its_node(self) -> None:
        for host in ("gpu1", "gpu2"):
            code = "import ctypes; print(ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2()); open('/dev/nvidia0').close()"
            assert ssh(host, f'python3 -c "{code}"').stdout == "0\n"
        assert ssh("gw", "test -e /dev/nvidia0").returncode == 1

    def test_run_keeps_status_and_output_apart(self) -> None:
        done = lab("run", "--name", NAME, "gpu1", "--", "sh", "-c", "echo out; echo err >&2; exit 7", checked=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")

    def test_ansible_reaches_all(self) -> None:
        argv = [str(Path(sys.executable).parent / "ansible"), "-i", str(common.BUILD / NAME / "inventory.yml")]
        done = subprocess.run(
            [*argv, "all", "-m", "ansible.builtin.command", "-a", "id -un"], capture_output=True, text=True, check=False
        )
        assert done.stdout.count("root") == 3, done.stdout + done.stderr

    def test_a_cut_is_silent_and_heals(self) -> None:
        lab("cut", "--name", NAME, "gpu1")
        try:
            began = time.monotonic()
            assert ssh("gpu1", "true").returncode == 255
            assert 2.5 < time.monotonic() - began < 8
            # Neither end knows: the carrier is there.
            assert lab("run", "--name", NAME, "gpu1", "--", "cat", "/sys/class/net/host0/carrier").stdout == "1\n"
            assert "cut" in lab("status").stdout
        finally:
            lab("heal", "--name", NAME, "gpu1")
        assert ssh("gpu1", "true").returncode == 0

    def test_reboot_keeps_the_disk_and_changes_the_boot(self) -> None:
        ssh("gpu2", "sudo touch /var/lib/kept")
        before = ssh("gpu2", "cat /proc/1/stat | cut -d' ' -f22").stdout
        lab("reboot", "--name", NAME, "gpu2")
        assert ssh("gpu2", "test -e /var/lib/kept").returncode == 0
        assert ssh("gpu2", "cat /proc/1/stat | cut -d' ' -f22").stdout != before

    def test_a_killed_host_is_down_and_boots_again(self) -> None:
        lab("kill", "--name", NAME, "gpu1")
        assert ssh("gpu1", "true").returncode == 255
        assert lab("run", "--name", NAME, "gpu1", "--", "true", checked=False).stderr == (
            "lab: host 'gpu1' is not running.\n"
        )
        lab("reboot", "--name", NAME, "gpu1")
        assert ssh("gpu1", "true").returncode == 0

    def test_a_lab_of_the_same_name_is_refused(self) -> None:
        done = lab("up", "--name", NAME, "--host", "a=bookworm", checked=False)
        assert done.returncode == 1
        assert done.stderr == (
            f"lab: lab '{NAME}' exists, from '{common.REPO}': remove it with 'lab.py down --name {NAME}'.\n"
        )
        assert ssh("gpu1", "true").returncode == 0

    def test_another_lab_beside_it(self) -> None:
        lab("up", "--name", f"{NAME}-2", "--host", "gpu1=bookworm,role=gateway")
        try:
            assert ssh("gpu1", "true").returncode == 0
        finally:
            lab("down", "--name", f"{NAME}-2")
        assert ssh("gpu1", "true").returncode == 0


@pytest.mark.usefixtures("three")
class TestEngine:
    def test_the_real_engine_on_an_old_glibc(self) -> None:
        start = "sudo systemd-run -q --unit=engine --setenv=LAB_DECODE_MS=20 /usr/local/bin/lab-llama 8080 tiny"
        assert ssh("gpu2", start).returncode == 0
        ask = (
            "import json, time, urllib.request as u\n"
            "for _ in range(100):\n"
            "    try:\n"
            "        u.urlopen('http://127.0.0.1:8080/health'); break\n"
            "    except OSError:\n"
            "        time.sleep(0.1)\n"
            "began = time.monotonic()\n"
            "body = json.dumps({'prompt': 'x', 'max_tokens': 50}).encode()\n"
            "answer = json.load(u.urlopen(u.Request('http://127.0.0.1:8080/v1/completions', body)))\n"
            "print(answer['model'], answer['usage']['completion_tokens'], time.monotonic() - began >= 1.0)\n"
        )
        try:
            assert ssh("gpu2", f'python3 -c "{ask}"').stdout == "tiny 50 True\n"
            assert ssh("gpu2", "sudo cat /run/fake-nvml/holders/*").stdout.count("memory=44000") == 1
            main = ssh("gpu2", "systemctl show -P MainPID engine").stdout.strip()
            assert ssh("gpu2", f"sudo readlink /proc/{main}/exe").stdout == "/opt/llama/llama-server\n"
            assert "/dev/nvidia0" in ssh("gpu2", f"sudo ls -l /proc/{main}/fd").stdout
        finally:
            ssh("gpu2", "sudo systemctl stop engine")


def test_down_leaves_nothing(links_before: list[str]) -> None:
    lab("up", "--name", NAME, "--host", "a=bookworm,role=gateway", "--host", "b=bullseye,role=gateway,legacy=1")
    assert traces()["mounts"] and traces()["processes"]
    # A shared connection, as Ansible leaves one.
    control = f"/run/gpuops-lab/{NAME}/ssh/one"
    argv = ["ssh", "-F", str(common.BUILD / NAME / "ssh_config"), "-o", "ControlMaster=auto", "-o", "ControlPersist=60"]
    subprocess.run([*argv, "-o", f"ControlPath={control}", "a", "true"], check=True, capture_output=True, timeout=20)
    lab("down", "--name", NAME)
    assert_nothing_is_left(links_before)
    again = lab("down", "--name", NAME)
    assert again.stdout == f"lab '{NAME}' is not up: nothing to do\n"


def test_a_folder_of_the_machine_is_seen_and_cannot_be_changed(links_before: list[str], tmp_path: Path) -> None:
    (tmp_path / "word").write_text("seen\n", encoding="utf-8")
    lab("up", "--name", NAME, "--host", "a=bookworm,role=gateway", "--bind", f"{tmp_path}:/opt/of-the-machine")
    for _ in range(2):
        assert ssh("a", "cat /opt/of-the-machine/word").stdout == "seen\n"
        assert "Read-only file system" in ssh("a", "echo changed > /opt/of-the-machine/word").stderr
        lab("reboot", "--name", NAME, "a")
    lab("down", "--name", NAME)
    assert (tmp_path / "word").read_text(encoding="utf-8") == "seen\n"
    assert_nothing_is_left(links_before)


def test_a_host_whose_cable_was_pulled_leaves_nothing_and_boots_again(links_before: list[str]) -> None:
    for _ in range(2):
        lab("up", "--name", NAME, "--host", "a=bookworm,role=gateway")
        # A connection with something still to say keeps the host's network alive when the cable is pulled.
        argv = ["ssh", "-F", str(common.BUILD / NAME / "ssh_config"), "a", "while :; do date; sleep 0.1; done"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as talking:
            assert talking.stdout is not None and talking.stdout.readline()
            lab("cut", "--name", NAME, "a")
            time.sleep(0.5)
            lab("down", "--name", NAME)
            talking.kill()
        assert_nothing_is_left(links_before)


def test_a_killed_start_leaves_nothing_after_down(links_before: list[str]) -> None:
    for seconds in (0.1, 0.25, 0.5, 0.9):
        process = subprocess.Popen(
            [*LAB, "up", "--name", NAME, "--host", "a=bookworm,role=gateway", "--host", "b=trixie,role=gateway"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lab("down", "--name", NAME)
        assert_nothing_is_left(links_before)


def test_a_failed_start_removes_itself(links_before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpulab import access, hosts

    def fail(*_: object, **__: object) -> None:
        raise common.LabError("no answer")

    monkeypatch.setattr(access, "wait_for_ssh", fail)
    with pytest.raises(common.LabError, match=r"^no answer$"):
        lifecycle.up(NAME, hosts.parse_hosts(["a=bookworm,role=gateway"]))
    assert_nothing_is_left(links_before)


def test_legacy_host_has_the_old_hierarchy(links_before: list[str]) -> None:
    if not Path("/sys/fs/cgroup/systemd/cgroup.procs").exists():
        pytest.skip("this machine has no version 1 hierarchy to give")
    lab("up", "--name", NAME, "--host", "old=bullseye,role=gateway,legacy=1")
    text = ssh("old", "cat /proc/self/cgroup").stdout
    assert any("name=systemd:/" in line and line.rstrip() != "name=systemd:/" for line in text.splitlines())
    assert ssh("old", "systemctl is-system-running --wait").stdout == "running\n"
