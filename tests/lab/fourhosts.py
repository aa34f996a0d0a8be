# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Four kinds of host (systemd 247, 252, 257, and legacy control groups) on which tests stop units, all at once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import typing as t

from gpulab import common
from labhosts import LabHosts, Result

HOSTS = {"old": "bullseye", "mid": "bookworm", "new": "trixie", "legacy": "bullseye,legacy=1"}
FOREST = common.REPO / "tests" / "fakes" / "forest.py"
PLAY = [
    {
        "name": "Stop",
        "hosts": "gpu_hosts",
        "gather_facts": False,
        "tasks": [
            {"name": "Do this first", "ansible.builtin.shell": "{{ first }}", "check_mode": False},
            {
                "name": "Stop one after the other",
                "gpuops.serving.process_tree_stop": "{{ item }}",
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

__all__ = ("HOSTS", "FourHosts", "Result", "mark_group")


def mark_group(service: str) -> str:
    """The group that marks the processes of a service."""
    return "gpuops-" + hashlib.sha256(service.encode()).hexdigest()[:12]


class FourHosts(LabHosts):
    """A lab of the four kinds, with what it takes to grow processes there."""

    def __init__(self, name: str) -> None:
        super().__init__(name, HOSTS)

    @contextlib.contextmanager
    def up(self) -> t.Iterator[None]:
        with super().up():
            self.everywhere("cat > /opt/forest.py", FOREST.read_text(encoding="utf-8"))
            yield

    def stop(
        self,
        *calls: t.Dict[str, t.Any],
        check: bool = False,
        hosts: t.Sequence[str] = tuple(HOSTS),
        first: str = "true",
    ) -> t.Dict[str, t.List[Result]]:
        """Call process_tree_stop once for each of these options; what each host answered.

        ``first`` is a shell command that each host runs right before.
        """
        folder = self.folder / "answers"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        play = self.folder / "stop.yml"
        play.write_text(json.dumps(PLAY), encoding="utf-8")
        values = {"calls": list(calls), "folder": str(folder), "first": first}
        argv = [self.tool("ansible-playbook"), "-i", str(self.folder / "inventory.yml")]
        argv += [str(play), "-e", json.dumps(values), "--limit", ",".join(hosts)] + (["--check"] if check else [])
        done = subprocess.run(argv, env=self.environment(), capture_output=True, text=True, check=False, timeout=300)
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}
        assert set(found) == set(hosts), done.stdout + done.stderr
        return found

    def stop_one(self, check: bool = False, **options: t.Any) -> t.Dict[str, Result]:
        """The same for a single call."""
        return {host: answers[0] for host, answers in self.stop(options, check=check).items()}
