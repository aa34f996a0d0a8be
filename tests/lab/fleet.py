# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the demo and the rollout tests do with a lab: boot it, run commands and playbooks, read what the hosts run."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LAB = REPO / "tests" / "lab" / "lab.py"
TRAFFIC = REPO / "tests" / "lab" / "traffic.py"
DEMO = REPO / "tests" / "demo"
HOSTS = ("gpu1=bookworm", "gpu2=bullseye,user=ops", "gpu3=trixie", "gw=bookworm,role=gateway")
GPU_HOSTS = ("gpu1", "gpu2", "gpu3")
UNITS = {"gpu1": "gpuops-qwen.service", "gpu2": "gpuops-qwen.service", "gpu3": "qwen-legacy.service"}
LINES_OF_A_FAILURE = 15


_LOOK = r"""
import glob, json, os, sys
found = []
for folder in glob.glob("/proc/[0-9]*"):
    try:
        stat = open(folder + "/stat").read()
        head, _, tail = stat.rpartition(")")
        fields = tail.split()
        cgroup = open(folder + "/cgroup").read()
        nodes = [os.readlink(fd) for fd in glob.glob(folder + "/fd/*") if os.path.islink(fd)]
        words = open(folder + "/cmdline", "rb").read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        continue
    gpu = any(node.startswith("/dev/nvidia") for node in nodes)
    if fields[0] != "Z" and (gpu or "/" + sys.argv[1] in cgroup):
        found.append({"pid": int(folder[6:]), "start": int(fields[19]), "name": head.partition("(")[2], "gpu": gpu,
                      "command": words[:80], "parent": int(fields[1])})
print(json.dumps(sorted(found, key=lambda row: row["pid"])))
"""


class FleetError(Exception):
    """A step went wrong; the message says which and how."""


class Fleet:
    """A lab of three GPU hosts and a gateway, with the inventory of the demo."""

    def __init__(self, name: str, services: t.Optional[Path] = None) -> None:
        self.name = name
        self.folder = REPO / "build" / "lab" / name
        self.services = services or DEMO / "services.yml"
        self._hosts: t.Dict[str, t.Any] = {}

    # Lab

    def up(self, hosts: t.Sequence[str] = HOSTS, binds: t.Sequence[str] = ()) -> None:
        argv = [sys.executable, str(LAB), "up", "--name", self.name]
        for host in hosts:
            argv += ["--host", host]
        for bind in binds:
            argv += ["--bind", bind]
        check(argv, "the lab did not boot", timeout=900)

    def up_or_reuse(self) -> bool:
        """Boot the lab, unless it stands and every host answers; says whether it stood."""
        names = [host.split("=")[0] for host in HOSTS]
        try:
            if (self.folder / "ssh_config").exists() and all(self.run(name, "echo up") == "up" for name in names):
                return True
        except (FleetError, subprocess.TimeoutExpired):
            pass
        self.down()
        self.up()
        return False

    def down(self) -> None:
        check([sys.executable, str(LAB), "down", "--name", self.name], "the lab was not removed", timeout=120)

    def lab(self, verb: str, host: str) -> None:
        check([sys.executable, str(LAB), verb, "--name", self.name, host], f"{verb} {host} failed", timeout=120)

    # Hosts

    def run(self, host: str, command: str, checked: bool = True, timeout: float = 60) -> str:
        """Run a shell command as root and return what it prints."""
        argv = ["ssh", "-F", str(self.folder / "ssh_config"), host, "sudo -n sh -c " + shlex.quote(command)]
        # No input: ssh makes what it inherits non-blocking, and Ansible that starts at that moment refuses the stream.
        options: t.Dict[str, t.Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(argv, check=False, timeout=timeout, **options)
        if checked and done.returncode:
            raise FleetError(f"on {host}, {command!r} exited {done.returncode}: {done.stderr.strip()}")
        return str(done.stdout).strip()

    def install_agent(self) -> None:
        """Put the host agent on every GPU host, without a service."""
        play = str(REPO / "tests" / "lab" / "agent.yml")
        argv = ["ansible-playbook", "-i", str(self.folder / "inventory.yml"), play]
        check(argv, "the host agent was not installed", timeout=300, environment=self.environment())

    def put(self, host: str, source: Path, target: str, mode: str = "0644") -> None:
        argv = ["ssh", "-F", str(self.folder / "ssh_config"), host]
        argv += [f"sudo -n install -m {mode} /dev/stdin {shlex.quote(target)}"]
        done = subprocess.run(argv, input=source.read_bytes(), capture_output=True, check=False, timeout=60)
        if done.returncode:
            raise FleetError(f"on {host}, {target} was not written: {done.stderr.decode(errors='replace').strip()}")

    def address(self, host: str) -> str:
        text = (self.folder / "ssh_config").read_text(encoding="utf-8")
        return text.split(f"Host {host}\n", 1)[1].split("HostName ", 1)[1].split()[0]

    def install_legacy(self, host: str = "gpu3", scope: bool = False) -> None:
        """The hand-written unit with KillMode=process, running."""
        self.put(host, DEMO / "legacy" / "legacy-launch", "/usr/local/bin/legacy-launch", "0755")
        self.put(host, DEMO / "legacy" / "qwen-legacy.service", "/etc/systemd/system/qwen-legacy.service")
        if scope:
            self.run(host, "sed -i 's/legacy-launch 8080 tiny/& --scope/' /etc/systemd/system/qwen-legacy.service")
        self.run(host, "systemctl daemon-reload && systemctl enable --now --quiet qwen-legacy.service")

    def unit(self, host: str, unit: str = "") -> t.Dict[str, str]:
        names = "ActiveState,SubState,MainPID,InvocationID,NRestarts,Result"
        text = self.run(host, f"systemctl show -p {names} {unit or UNITS[host]}")
        return dict(line.split("=", 1) for line in text.splitlines())

    def processes(self, host: str) -> t.List[t.Dict[str, t.Any]]:
        """What serves on a host, read from /proc alone: in the unit's cgroup, or with the GPU's node open."""
        argv = ["ssh", "-F", str(self.folder / "ssh_config"), host, "sudo -n python3 - " + UNITS[host]]
        done = subprocess.run(argv, input=_LOOK, capture_output=True, text=True, check=True, timeout=60)
        return t.cast(t.List[t.Dict[str, t.Any]], json.loads(done.stdout))

    # Gateway

    def gateway_url(self) -> str:
        return f"http://{self.address('gw')}:8000"

    def haproxy(self, commands: str) -> str:
        """What haproxy's runtime socket answers."""
        code = (
            "import socket, sys\nfor one in sys.argv[1].split('; '):\n s = socket.socket(socket.AF_UNIX)\n"
            " s.connect('/run/haproxy/admin.sock')\n s.sendall(one.encode() + b'\\n')\n"
            " print(b''.join(iter(lambda: s.recv(65536), b'')).decode())"
        )
        return self.run("gw", f"python3 -c {shlex.quote(code)} {shlex.quote(commands)}")

    def backends(self) -> t.Dict[str, str]:
        """Server to its state, as haproxy tells it."""
        text = self.haproxy("show stat")
        rows = [line.split(",") for line in text.splitlines() if line]
        head = [name.lstrip("# ") for name in rows[0]]
        named = [dict(zip(head, row)) for row in rows[1:]]
        return {row["svname"]: row["status"] for row in named if row["svname"] not in ("FRONTEND", "BACKEND")}

    def wait_backends(self, wanted: t.Mapping[str, str], timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while True:
            found = self.backends()
            if all(found.get(host, "").startswith(state) for host, state in wanted.items()):
                return
            if time.monotonic() > end:
                raise FleetError(f"the gateway did not see {dict(wanted)} within {timeout:.0f} s: it sees {found}")
            time.sleep(0.2)

    def one_token(self, url: str) -> int:
        """Tokens of one completion."""
        body = json.dumps({"model": "tiny", "prompt": "Say something.", "max_tokens": 1}).encode()
        request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(json.load(answer)["usage"]["completion_tokens"])
        except (OSError, KeyError, ValueError) as error:
            raise FleetError(f"{url} generates nothing: {error}") from error

    # Ansible

    def environment(self) -> t.Dict[str, str]:
        environment = dict(os.environ)
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment.setdefault("ANSIBLE_CONFIG", str(REPO / "tests" / "ansible.cfg"))
        environment.setdefault("ANSIBLE_COLLECTIONS_PATH", str(REPO / ".cache" / "collections"))
        environment.setdefault("ANSIBLE_HOME", str(REPO / ".cache" / "ansible"))
        return environment

    def ansible_argv(self, playbook: str, *arguments: str) -> t.List[str]:
        return [
            *("ansible-playbook", "-i", str(self.folder / "inventory.yml"), "-i", str(self.services)),
            *("gpuops.serving." + playbook, *arguments),
        ]

    def playbook(
        self, playbook: str, *arguments: str, checked: bool = True, timeout: float = 600, **options: t.Any
    ) -> t.Any:
        argv = self.ansible_argv(playbook, *arguments)
        if not any("clean_restart_report=" in argument for argument in arguments):
            argv += ["-e", f"clean_restart_report={self.folder / 'report.json'}"]
        make_blocking()
        options.setdefault("stdin", subprocess.DEVNULL)
        done = subprocess.run(argv, env=self.environment(), check=False, timeout=timeout, cwd=REPO, **options)
        if checked and done.returncode:
            raise FleetError(f"{' '.join(argv)} exited {done.returncode}\n{getattr(done, 'stdout', '') or ''}")
        return done

    def module(self, host: str, module: str, **arguments: t.Any) -> t.Dict[str, t.Any]:
        """Run one module on one host and return its result."""
        argv = ["ansible", "-i", str(self.folder / "inventory.yml"), host, "-m", "gpuops.serving." + module]
        if arguments:
            argv += ["-a", json.dumps(arguments)]
        environment = dict(
            self.environment(), ANSIBLE_LOAD_CALLBACK_PLUGINS="1", ANSIBLE_STDOUT_CALLBACK="ansible.builtin.oneline"
        )
        options: t.Dict[str, t.Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(argv, env=environment, check=False, timeout=120, cwd=REPO, **options)
        text = done.stdout
        try:
            return t.cast(t.Dict[str, t.Any], json.loads(text[text.index("{") :]))
        except ValueError:
            raise FleetError(f"{module} on {host} answered nothing readable: {done.stdout}{done.stderr}") from None


class Traffic:
    """Client requests through the gateway, until stopped."""

    def __init__(self, fleet: Fleet, report: Path, *arguments: str) -> None:
        self.report = report
        report.unlink(missing_ok=True)
        self.log = report.with_suffix(".log")
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(TRAFFIC), "--url", fleet.gateway_url(), "--report", str(report), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self, timeout: float = 90) -> t.Dict[str, t.Any]:
        """Let what is in flight finish, and return the summary."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise FleetError(f"the traffic did not end within {timeout:.0f} s: see {self.log}") from None
        if not self.report.exists():
            raise FleetError(f"the traffic left no report: {self.log.read_text(encoding='utf-8')[-2000:]}")
        return t.cast(t.Dict[str, t.Any], json.loads(self.report.read_text(encoding="utf-8")))

    def live(self) -> t.Dict[str, int]:
        """What the clients are doing now."""
        try:
            return t.cast(t.Dict[str, int], json.loads(Path(f"{self.report}.live").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {"in_flight": 0, "requests": 0, "failed": 0, "streams_open": 0}

    def wait_in_flight(self, least: int, streams: int = 1, timeout: float = 60) -> None:
        """Until the clients keep at least this many requests, and this many streams among them, in flight."""
        end = time.monotonic() + timeout
        while True:
            live = self.live()
            if live["in_flight"] >= least and live["streams_open"] >= streams:
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise FleetError(f"the clients do not keep {least} requests in flight but {live}: see {self.log}")
            time.sleep(0.2)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def check(
    argv: t.Sequence[str], what: str, timeout: float, environment: t.Optional[t.Mapping[str, str]] = None
) -> None:
    """Run a command to its end, show each line as it comes, and say why where it fails."""
    last: t.Deque[str] = collections.deque(maxlen=LINES_OF_A_FAILURE)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=REPO,
    )
    assert process.stdout is not None
    limit = threading.Timer(timeout, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line)
    finally:
        limit.cancel()
        process.stdout.close()
    if process.wait():
        raise FleetError(f"{what}: {' '.join(argv)} exited {process.returncode}:\n{''.join(last)}")


def make_blocking(streams: t.Iterable[int] = (1, 2)) -> None:
    """Undo what ssh does to the output it inherits: Ansible refuses to run with a stream that does not block."""
    for stream in streams:
        os.set_blocking(stream, True)
