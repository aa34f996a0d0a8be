# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every host runs a new life of its unit, and nothing of the old one."""

from __future__ import annotations

import json
import os
import typing as t

import pytest

URL = "http://127.0.0.1:8080/v1/completions"
LOOK = os.path.join(os.path.dirname(__file__), "..", "..", "lab", "record.py")


@pytest.fixture(scope="module")
def before(host: t.Any) -> t.Dict[str, t.Any]:
    return t.cast(t.Dict[str, t.Any], json.loads(host.file("/var/tmp/before.json").content_string))


@pytest.fixture(scope="module")
def now(host: t.Any, before: t.Dict[str, t.Any]) -> t.Dict[str, t.Any]:
    """The same look as before the restart."""
    with open(LOOK, encoding="utf-8") as handle:
        script = handle.read().replace("/var/tmp/before.json", "/var/tmp/now.json")
    done = host.run("python3 -c %s %s", script, before["unit"])
    assert done.rc == 0, done.stderr
    return t.cast(t.Dict[str, t.Any], json.loads(host.file("/var/tmp/now.json").content_string))


def completion(host: t.Any, url: str) -> int:
    code = (
        "import json, urllib.request as u; r = u.Request(%r, json.dumps({'prompt': 'hi', 'max_tokens': 1}).encode(),"
        " {'Content-Type': 'application/json'});"
        " print(json.load(u.urlopen(r, timeout=30))['usage']['completion_tokens'])"
    )
    return int(host.check_output("python3 -c %s", code % url))


def test_the_unit_is_active(host: t.Any, before: t.Dict[str, t.Any]) -> None:
    assert host.check_output("systemctl is-active %s", before["unit"]) == "active"


def test_the_unit_began_a_new_life(before: t.Dict[str, t.Any], now: t.Dict[str, t.Any]) -> None:
    assert len(before["invocation"]) == 32
    assert len(now["invocation"]) == 32
    assert now["invocation"] != before["invocation"]


def test_no_process_of_the_old_life_is_left(before: t.Dict[str, t.Any], now: t.Dict[str, t.Any]) -> None:
    assert before["processes"]
    assert now["processes"]
    assert not {tuple(row) for row in before["processes"]} & {tuple(row) for row in now["processes"]}


def test_the_gpu_is_held_by_the_new_life_alone(
    host: t.Any, before: t.Dict[str, t.Any], now: t.Dict[str, t.Any]
) -> None:
    old = {row[0] for row in before["processes"]}
    registered = {int(name.split("-")[0]) for name in host.check_output("ls /run/fake-nvml/holders").split()}
    living = {pid for pid in registered if host.file("/proc/%d/stat" % pid).exists}
    assert living
    assert living <= {row[0] for row in now["processes"]}
    assert not living & old


def test_the_engine_generates(host: t.Any) -> None:
    assert completion(host, URL) == 1


def test_the_gateway_generates(host: t.Any) -> None:
    gateway = os.path.join(os.environ["MOLECULE_PROJECT_DIRECTORY"], "build", "lab", "molecule", "ssh_config")
    with open(gateway, encoding="utf-8") as handle:
        address = handle.read().split("Host gw\n", 1)[1].split("HostName ", 1)[1].split()[0]
    assert completion(host, "http://%s:8000/v1/completions" % address) == 1
