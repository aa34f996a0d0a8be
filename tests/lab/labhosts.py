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

    def module(self, name: str, check: bool = False, **options: t.Any) -> Results:
        """Run a module on the hosts; what each answered, with the warnings of all of them."""
        argv = [self.tool("ansible"), ",".join(self.at), "-m", "gpuops.serving." + name]
        argv += ["-i", str(self.folder / "inventory.yml"), "-a", json.dumps(options)] + ["--check"] * check
        environment = dict(self.environment(), ANSIBLE_CALLBACK_RESULT_FORMAT="json")
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=180)
        found = {}
        for match in re.finditer(r"^(\w+) \| (?:SUCCESS|CHANGED|FAILED!) => (\{.*?^\})", done.stdout, re.M | re.S):
            found[match.group(1)] = dict(json.loads(match.group(2)), said=done.stdout + done.stderr)
        assert set(found) == set(self.at), done.stdout + done.stderr
        return found

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
