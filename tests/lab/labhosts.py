# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A lab as tests use it: boot it, run scripts and modules on all its hosts at once, remove it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import typing as t
from pathlib import Path

from gpulab import common

Result = t.Dict[str, t.Any]
Results = t.Dict[str, Result]
PLAY = [
    {
        "name": "Call",
        "hosts": "gpu_hosts",
        "gather_facts": False,
        "tasks": [
            {"name": "Do this first", "ansible.builtin.shell": "{{ first }}", "check_mode": False},
            {
                "name": "Call one after the other",
                "gpuops.serving.MODULE": "{{ item }}",
                "loop": "{{ calls }}",
                "loop_control": {"label": "{{ item.unit | default(item) }}"},
                "register": "answers",
                "ignore_errors": True,
            },
            {
                "name": "Bring the answers",
                "ansible.builtin.copy": {
                    "content": "{{ answers.results | to_json }}",
                    "dest": "{{ folder }}/{{ inventory_hostname }}.json",
                    "mode": "0600",
                },
                "delegate_to": "localhost",
                "check_mode": False,
                "become": False,
                "vars": {"ansible_connection": "local"},
            },
        ],
    }
]


class LabHosts:
    """Hosts by their names, each with its release and options; at first all of them are worked on."""

    def __init__(self, name: str, specs: t.Mapping[str, str]) -> None:
        self.name = name
        self.specs = dict(specs)
        self.at: t.Sequence[str] = tuple(specs)
        self.folder = common.BUILD / name

    @contextlib.contextmanager
    def up(self) -> t.Iterator[None]:
        lab = [sys.executable, str(common.LAB / "lab.py")]
        hosts = [word for host, spec in self.specs.items() for word in ("--host", "%s=%s" % (host, spec))]
        subprocess.run([*lab, "down", "--name", self.name], check=True, capture_output=True)
        subprocess.run([*lab, "up", "--name", self.name, *hosts], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run([*lab, "down", "--name", self.name], check=True, capture_output=True)

    def on(self, host: str, script: str, text: str = "", timeout: float = 120) -> str:
        """Run a shell script as root and return what it prints."""
        argv = ["ssh", "-F", str(self.folder / "ssh_config"), host, "sh -euc %s" % shlex.quote(script)]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == 0, "%s: %s%s" % (host, done.stdout, done.stderr)
        return done.stdout

    def everywhere(self, script: str, text: str = "", timeout: float = 120) -> t.Dict[str, str]:
        with concurrent.futures.ThreadPoolExecutor(len(self.at)) as pool:
            return dict(zip(self.at, pool.map(lambda host: self.on(host, script, text, timeout), self.at)))

    def wait(self, script: str, seconds: float = 30) -> None:
        """Until the script succeeds on every host."""
        loop = "for i in $(seq %d); do if %s; then exit 0; fi; sleep 0.1; done; echo 'never: '%s; exit 7"
        self.everywhere(loop % (seconds * 10, script, shlex.quote(script)))

    @staticmethod
    def _ansible(argv: t.Sequence[str], environment: t.Mapping[str, str], timeout: float) -> t.Any:
        # It refuses a stream that another ssh has made non-blocking this moment.
        options: t.Dict[str, t.Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(argv, env=environment, check=False, timeout=timeout, **options)

    def module(self, name: str, check: bool = False, **options: t.Any) -> Results:
        """Run a module on the hosts; what each answered, with the warnings of all of them."""
        argv = [self.tool("ansible"), ",".join(self.at), "-m", "gpuops.serving." + name]
        argv += ["-i", str(self.folder / "inventory.yml"), "-a", json.dumps(options)] + ["--check"] * check
        environment = dict(self.environment(), ANSIBLE_CALLBACK_RESULT_FORMAT="json")
        done = self._ansible(argv, environment, 180)
        found = {}
        for match in re.finditer(r"^(\w+) \| (?:SUCCESS|CHANGED|FAILED!) => (\{.*?^\})", done.stdout, re.M | re.S):
            found[match.group(1)] = dict(json.loads(match.group(2)), said=done.stdout + done.stderr)
        assert set(found) == set(self.at), done.stdout + done.stderr
        return found

    def modules(
        self,
        name: str,
        *calls: t.Dict[str, t.Any],
        check: bool = False,
        hosts: t.Sequence[str] = (),
        first: str = "true",
    ) -> t.Dict[str, t.List[Result]]:
        """Call a module once for each of these options; what each host answered.

        ``first`` is a shell command that each host runs right before.
        """
        hosts = hosts or self.at
        folder = self.folder / "answers"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        play = self.folder / "calls.yml"
        play.write_text(json.dumps(PLAY).replace("MODULE", name), encoding="utf-8")
        values = {"calls": list(calls), "folder": str(folder), "first": first}
        argv = [self.tool("ansible-playbook"), "-i", str(self.folder / "inventory.yml")]
        argv += [str(play), "-e", json.dumps(values), "--limit", ",".join(hosts)] + (["--check"] if check else [])
        done = self._ansible(argv, self.environment(), 300)
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}
        assert set(found) == set(hosts), done.stdout + done.stderr
        return found

    def install_agent(self) -> None:
        """Put the host agent on all hosts."""
        argv = [self.tool("ansible-playbook"), "-i", str(self.folder / "inventory.yml"), str(common.LAB / "agent.yml")]
        done = self._ansible(argv, self.environment(), 300)
        assert done.returncode == 0, done.stdout + done.stderr

    @staticmethod
    def tool(name: str) -> str:
        """A program of the environment that the tests run in."""
        return str(Path(sys.executable).parent / name)

    @staticmethod
    def environment() -> t.Dict[str, str]:
        """What the tools of Ansible are told."""
        environment = dict(os.environ, ANSIBLE_CONFIG=str(common.REPO / "tests" / "ansible.cfg"))
        environment.setdefault("ANSIBLE_HOME", str(common.REPO / ".cache" / "ansible"))
        return environment


def verdicts(results: Results) -> t.Set[t.Tuple[str, bool]]:
    """The verdicts of all hosts, each with whether something changed."""
    return {(result["verdict"], result["changed"]) for result in results.values()}
