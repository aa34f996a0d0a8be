# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which container a unit's client started, and whether it is the unit's: the sayings of managers are made up here."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _asking,
    _clients,
    _containers,
    _files,
    _inspected,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._clients import UNTOLD
from ansible_collections.gpuops.serving.plugins.module_utils._ownership import Owned
from ansible_collections.gpuops.serving.plugins.module_utils._places import Container
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Process, ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState

A, B = "a1" * 32, "b2" * 32
HERE = "/system.slice/qwen.service"
INSIDE = "/system.slice/docker-%s.scope" % A
NOW = 1000000.0


def clients(line: str, **variables: str) -> t.List[_clients.Client]:
    return _clients.find(_clients.expand(shlex.split(line), variables), variables)


def only(line: str, **variables: str) -> _clients.Client:
    found = clients(line, **variables)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("line", "names", "image"),
    [
        ("docker run --name engine vllm/vllm-openai:v1 --model x", ["engine"], "vllm/vllm-openai:v1"),
        ("/usr/bin/docker run --rm --name=engine -it --gpus all img", ["engine"], "img"),
        ("podman run --replace --name engine -p 80:80 -v/a:/b -e X img --name other", ["engine"], "img"),
        ("docker container run -dit --name engine img", ["engine"], "img"),
        ("docker run -itp 80:80 -eA=1 --name engine img", ["engine"], "img"),
        ("docker run -e '--name=z' --env '--name z' --name engine img", ["engine"], "img"),
        ("docker run img serve --name other", [], "img"),
        ("docker run --rm -- img --name other", [], "img"),
        ("docker run --name a --name engine img", ["engine"], "img"),
        # What an option that nobody here knows does with the next word is not known, nor is what comes after it.
        ("docker run --name engine --new-option x --name y img", ["engine"], ""),
        ("docker run --new-option x --name y img", [], ""),
        ("docker run --new-option=x --name engine img", ["engine"], "img"),
        ("docker run -X --name y img", [], ""),
        ("docker run --name -x img", [], "img"),
        ("docker run --name 'a b' img", [], "img"),
        ("docker run --name", [], ""),
        ("docker --debug --log-level warn run --name engine img", ["engine"], "img"),
        ("nerdctl -n k8s run --name engine img", ["engine"], "img"),
        ("docker start -a engine", ["engine"], ""),
        ("docker start --attach engine", ["engine"], ""),
        ("docker start engine --attach", ["engine"], ""),
        ("docker start --detach-keys ctrl-p -ai engine", ["engine"], ""),
        ("podman start --attach --sig-proxy=true one two", ["one", "two"], ""),
        ("podman start --latest --new x engine", [], ""),
        ("podman start --all", [], ""),
    ],
)
def test_the_name_in_a_command_line(line: str, names: t.List[str], image: str) -> None:
    client = only(line)
    assert (list(client.names), client.image, client.elsewhere) == (names, image, "")
    assert client.verb in ("run", "start")


@pytest.mark.parametrize(
    "line",
    [
        "docker logs -f engine",
        "docker pull img",
        "docker",
        "docker --version",
        "sleep docker",
        "",
        "dockerd --x",
        "docker stop engine",
        "echo docker run --name engine img",
    ],
)
def test_what_starts_no_container(line: str) -> None:
    assert clients(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "/bin/sh -c 'exec docker run --name engine img'",
        "/bin/bash -ec 'sleep 1; docker pull img && docker run --rm --name engine img | cat'",
        "sh -c 'if true; then docker run --name engine img; fi'",
        "sh -c 'A=1 docker run --name engine img $EXTRA'",
        "/usr/bin/env A=1 docker run --name engine img",
        "nice -n 5 docker run --name engine img",
        "/usr/bin/systemd-cat -t x docker run --name engine img",
    ],
)
def test_a_client_in_a_script_or_behind_a_wrapper(line: str) -> None:
    assert [client.names for client in clients(line)] == [("engine",)]


@pytest.mark.parametrize("line", ["sh -c 'docker run --name $N img'", "sh -c 'docker run --name \"e`x`\" img'"])
def test_what_a_shell_puts_in_is_not_guessed(line: str) -> None:
    assert _clients.find(shlex.split(line), {})[0].names == ()


def test_a_script_that_cannot_be_split_tells_nothing() -> None:
    assert _clients.find(["sh", "-c", "docker run --name 'x"], {}) == []
    assert _clients.find(["sh"], {}) == []
    assert _clients.find(["sh", "-c", "sh -c \"sh -c 'docker run --name a b'\""], {}) == []


def test_variables_as_systemd_puts_them_in() -> None:
    words = ["x", "${A}-b", "$A", "$LIST", "a$A", "$$A", "${NONE}", "$NONE", "$EMPTY"]
    known = {"A": "one", "LIST": "two  three", "EMPTY": ""}
    assert _clients.expand(words, known) == [
        "x", "one-b", "one", "two", "three", "a$A", "$A", UNTOLD, UNTOLD,
    ]  # fmt: skip
    assert only("docker run --name ${N} img", N="engine").names == ("engine",)
    assert only("docker run --name ${N} img").names == ()
    assert only("docker run $OPTIONS img", OPTIONS="--rm --name engine").names == ("engine",)
    # What a variable holds may be any number of words, or none.
    unknown = only("docker run --name engine $OPTIONS")
    assert (unknown.names, unknown.image) == (("engine",), "")


@pytest.mark.parametrize(
    ("line", "variables", "elsewhere", "options"),
    [
        ("docker -H tcp://gpu2:2375 run --name e i", {}, "its host tcp://gpu2:2375", ()),
        ("docker -H=ssh://gpu2 run --name e i", {}, "its host ssh://gpu2", ()),
        (
            "docker --host unix:///run/user/7/docker.sock run --name e i",
            {},
            "",
            ("--host", "unix:///run/user/7/docker.sock"),
        ),
        ("docker --context far run --name e i", {}, "--context far", ()),
        ("docker --context default run --name e i", {}, "", ()),
        ("docker -c far start -a e", {}, "-c far", ()),
        ("podman --remote run --name e i", {}, "--remote true", ()),
        ("podman -r run --name e i", {}, "-r true", ()),
        ("podman --remote=false run --name e i", {}, "", ()),
        ("podman --url ssh://x run --name e i", {}, "its host ssh://x", ()),
        ("podman --url unix:///x.sock run --name e i", {}, "its host unix:///x.sock", ()),
        ("docker run --name e i", {"DOCKER_HOST": "tcp://x"}, "its host tcp://x", ()),
        ("docker run --name e i", {"DOCKER_HOST": "unix:///x"}, "", ("--host", "unix:///x")),
        ("docker run --name e i", {"DOCKER_CONTEXT": "far"}, "DOCKER_CONTEXT=far", ()),
        ("docker run --name e i", {"DOCKER_CONTEXT": "default"}, "", ()),
        ("docker run --name e i", {"CONTAINER_HOST": "ssh://x"}, "", ()),
        ("podman run --name e i", {"CONTAINER_HOST": "ssh://x"}, "its host ssh://x", ()),
        ("podman run --name e i", {"CONTAINER_CONNECTION": "x"}, "CONTAINER_CONNECTION=x", ()),
        ("podman run --name e i", {"DOCKER_HOST": "tcp://x"}, "", ()),
        ("docker --new thing run --name e i", {}, None, ()),
        (
            "podman --root /srv --storage-driver=vfs run --name e i",
            {},
            "",
            ("--root", "/srv", "--storage-driver", "vfs"),
        ),
        ("podman --log-level debug run --name e i", {}, "", ()),
    ],
)
def test_which_daemon_or_store_is_meant(
    line: str, variables: t.Dict[str, str], elsewhere: t.Optional[str], options: t.Tuple[str, ...]
) -> None:
    found = clients(line, **variables)
    if elsewhere is None:  # the option may take the next word, which may be the command
        assert all(client.elsewhere for client in found)
        return
    assert [(client.elsewhere, client.options) for client in found] == [(elsewhere, options)]


@pytest.mark.parametrize(
    ("line", "name", "folder", "keep"),
    [
        ("systemd-nspawn -D /srv/web -M engine /bin/x", "engine", "/srv/web", False),
        ("systemd-nspawn --quiet --boot --directory=/srv/web", "web", "/srv/web", False),
        ("systemd-nspawn -i /srv/web.raw", "web", "", False),
        ("systemd-nspawn --quiet --keep-unit --boot --machine=web", "web", "/var/lib/machines/web", True),
        ("systemd-nspawn -qbUM web", "web", "/var/lib/machines/web", False),
        ("systemd-nspawn --new x -D /srv/web", "", "", False),
        ("systemd-nspawn -D /srv/web x --machine=y", "web", "/srv/web", False),
    ],
)
def test_machines(line: str, name: str, folder: str, keep: bool) -> None:
    client = only(line)
    assert (client.manager, client.names, client.folder, client.keep_unit) == (
        "nspawn",
        (name,) if name else (),
        folder,
        keep,
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("vllm/vllm-openai:v1", "vllm/vllm-openai:v1", True),
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1", True),
        ("tiny", "localhost/tiny:latest", True),
        ("tiny", "tiny:1", False),
        ("a/tiny", "b/tiny:latest", False),
        ("localhost:5000/tiny", "tiny:latest", True),
        ("tiny@sha256:00", "tiny@sha256:01", False),
        ("", "", False),
        ("tiny", "", False),
    ],
)
def test_names_of_images(one: str, other: str, same: bool) -> None:
    assert _clients.same_image(one, other) is same
    assert _clients.same_image(other, one) is same


# The tracker


def process(pid: int, name: str = "python3", **facts: t.Any) -> Process:
    return Process(
        ref=ProcessRef(pid, 100),
        ppid=facts.get("ppid", 1),
        pgrp=pid,
        session=pid,
        state=facts.get("state", "S"),
        name=name,
        uid=facts.get("uid", 0),
        gids=facts.get("gids", (0,)),
        cgroup=facts.get("cgroup", HERE),
        threads=1,
        kernel_thread=False,
        cpu_ticks=0,
        booted=NOW - 100,
    )


CLIENT = process(100, "docker")
ENGINE = process(500, cgroup=INSIDE)


class World:
    """What systemd, the managers and /proc say."""

    def __init__(self) -> None:
        self.exec_start: t.List[t.List[str]] = []
        self.environment: t.List[str] = []
        self.files: t.List[str] = []
        self.containers: t.Dict[str, t.Dict[str, t.Any]] = {}
        self.lines: t.Dict[int, t.Tuple[str, t.Dict[str, str]]] = {}
        self.asked: t.List[t.List[str]] = []
        self.error = ""
        self.rows: t.List[Process] = [CLIENT, ENGINE]
        self.raw = {"User": "", "ExecMainStartTimestampMonotonic": "%d" % ((time.monotonic() - 50) * 1e6)}
        self.state = UnitState("qwen.service", load_state="loaded", main_pid=100, control_group=HERE, raw=self.raw)
        self.clock = 0.0
        self.slow: t.Dict[str, float] = {}  # seconds that each kind of answer takes
        self.tracker = _containers.Tracker(self.ask, self.read, now=lambda: NOW, monotonic=lambda: self.clock)

    def ask(self, words: t.List[str], timeout: float) -> t.Tuple[int, str, str]:
        assert 0 < timeout <= _containers.ANSWER
        self.asked.append(words)
        slow = self.slow.get(words[0].rsplit("/", 1)[-1], 0.0)
        self.clock += min(timeout, slow)
        if slow > timeout:
            return -1, "", "no answer within %.3g s" % timeout
        if words[0] == "busctl":
            assert words[4] == "/org/freedesktop/systemd1/unit/qwen_2eservice"
            data: t.List[t.Any] = {
                "ExecStart": [[line[0], line, False, 0, 0, 0, 0, 0, 0, 0] for line in self.exec_start],
                "Environment": self.environment,
                "EnvironmentFiles": [[path, False] for path in self.files],
            }[words[-1]]
            return 0, json.dumps({"type": "x", "data": data}), ""
        if self.error:
            return 1, "", self.error
        for key, row in self.containers.items():
            if words[-1] in (key, row["Id"]):
                return 0, json.dumps([row]), ""
        return 1, "[]", "Error: No such container: %s" % words[-1]

    def read(self, refs: t.List[ProcessRef], timeout: float) -> t.Dict[ProcessRef, _asking.Said]:
        assert 0 < timeout <= _containers.ANSWER
        self.clock += min(timeout, self.slow.get("read", 0.0))
        known = ((ref, self.lines.get(ref.pid)) for ref in refs)
        return {ref: _asking.Said(shlex.split(said[0]), said[1]) for ref, said in known if said is not None}

    def start(self, line: str) -> None:
        words = shlex.split(line)
        self.exec_start.append(["/usr/bin/" + words[0], *words[1:]])
        if "$" not in line:
            self.lines.setdefault(100, (line, {}))

    def contain(self, name: str = "engine", **facts: t.Any) -> None:
        state = {"Running": True, "Pid": 500, "StartedAt": rfc(facts.get("started", NOW - 49))}
        state.update(facts.get("state", {}))
        self.containers[name] = {
            "Id": facts.get("id", A),
            "Name": "/" + name,
            "Created": rfc(facts.get("created", NOW - 49)),
            "State": state,
            "Config": {"Image": facts.get("image", "img")},
            "HostConfig": {"RestartPolicy": {"Name": facts.get("policy", "no")}},
        }

    def ended(self, seconds_ago: float) -> None:
        self.raw["ExecMainExitTimestampMonotonic"] = "%d" % ((time.monotonic() - seconds_ago) * 1e6)
        self.state.main_pid = 0

    def look(self) -> t.List[str]:
        table = Table(self.rows)
        owned = Owned()
        for one in table:
            if one.cgroup == HERE:
                owned.add(one, "cgroup", True)
        return sorted(self.tracker.containers(table, self.state, owned))

    @property
    def inspected(self) -> t.List[t.List[str]]:
        return [words for words in self.asked if words[0] != "busctl"]


def rfc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + ".123456789Z"


@pytest.fixture(autouse=True)
def awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up host has never slept, whatever the one has that the tests run on."""
    monkeypatch.setattr(_systemd, "_suspended", lambda: 0.0)


@pytest.fixture(name="world")
def fixture_world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(_containers, "program", lambda name: "/usr/bin/" + name)
    return World()


def test_the_container_of_a_client_that_lives(world: World) -> None:
    world.start("docker run --name engine img")
    world.lines[100] = "docker run --name engine img", {}
    world.contain()
    assert world.look() == [A]
    stop = ("/usr/bin/docker", "stop", "-t", "{seconds}", A)
    found = world.tracker.containers(Table(world.rows), world.state, Owned())[A]
    assert found == Container("docker", A, "engine", stop)
    assert world.tracker.warnings == []
    assert world.inspected == [["/usr/bin/docker", "inspect", "--type", "container", "engine"]] * 2


def test_a_client_is_asked_about_once(world: World) -> None:
    world.start("docker run --name engine img")
    world.contain()
    world.rows = [ENGINE]
    for _look in range(5):
        assert world.look() == [A]
    assert len(world.inspected) == 1
    assert len([words for words in world.asked if words[0] == "busctl"]) == 3
    world.ended(1)  # a new life may have a new container
    assert world.look() == [A]
    assert len(world.inspected) == 2


def test_a_unit_without_a_client_costs_one_question(world: World) -> None:
    world.start("vllm serve model")
    world.rows = [process(100, "vllm")]
    assert (world.look(), world.look()) == ([], [])
    assert len(world.asked) == 1
    assert world.tracker.warnings == []


def test_the_container_of_a_client_that_is_dead(world: World) -> None:
    world.start("docker run --name ${N} img")
    world.environment = ["N=engine", "X"]
    world.contain()
    world.rows = [ENGINE]
    world.ended(10)
    assert world.look() == [A]


def test_variables_of_a_file(world: World, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "env"
    path.write_text("# x\nN='engine'\nDOCKER_HOST=tcp://far\n")
    world.start("docker run --name ${N} img")
    world.files = [str(path), str(tmp_path / "none"), str(tmp_path)]
    world.contain()
    assert world.look() == []
    assert "its host tcp://far" in world.tracker.warnings[0]
    path.write_text("N=engine\n")
    again = World()
    again.start("docker run --name ${N} img")
    again.files = [str(path)]
    again.contain()
    assert again.look() == [A]


def test_a_client_that_cannot_be_read(world: World) -> None:
    world.exec_start = [["/opt/start.sh"]]
    assert world.look() == []
    assert 'the client 100 "docker" of the unit "qwen.service" cannot be read' in world.tracker.warnings[0]
    told = World()
    told.start("docker start -a engine")
    told.lines.clear()
    told.contain()
    assert told.look() == [A]
    assert told.tracker.warnings == []


def test_a_name_that_only_the_live_client_tells(world: World) -> None:
    world.start("docker run --name ${N} img")
    world.lines[100] = "docker run --name engine img", {}
    world.contain()
    assert world.look() == [A]
    assert world.tracker.warnings == []


def test_a_client_that_a_script_started(world: World) -> None:
    world.exec_start = [["/opt/start.sh"]]
    world.rows = [process(99, "start.sh"), process(100, "docker", ppid=99), ENGINE]
    world.state.main_pid = 99
    world.lines[100] = "docker start -a engine", {}
    world.contain()
    assert world.look() == [A]


def test_a_look_into_a_container_is_no_claim(world: World) -> None:
    world.exec_start = [["/opt/start.sh"]]
    world.state.main_pid = 99
    world.lines[100] = "docker exec other healthcheck", {}
    world.contain("other")
    assert world.look() == []
    assert world.tracker.warnings == []


@pytest.mark.parametrize(
    "line", ["docker exec engine x", "docker attach engine", "docker compose up", "docker-compose up"]
)
def test_a_main_process_whose_containers_are_not_known(world: World, line: str) -> None:
    world.start(line)
    world.contain()
    assert world.look() == []
    assert "none is stopped" in world.tracker.warnings[0]


def test_a_script_that_becomes_such_a_client(world: World) -> None:
    world.exec_start = [["/opt/start.sh"]]
    world.lines[100] = "docker exec engine x", {}
    assert world.look() == []
    assert "none is stopped" in world.tracker.warnings[0]


def test_a_container_without_a_name(world: World) -> None:
    world.start("docker run --rm img")
    world.lines[100] = "docker run --rm img", {}
    world.contain()
    assert world.look() == []
    assert all("give the container a --name" in text for text in world.tracker.warnings)
    assert world.tracker.warnings


def test_a_file_with_the_id(world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cid"
    path.write_text(A)
    path.chmod(0o644)
    world.start("docker run --cidfile %s img" % path)
    world.contain()
    root = os.stat(path).st_uid == 0
    assert world.look() == ([A] if root else [])
    for content, mode in (("engine", 0o644), (A, 0o666), (A + "x", 0o644)):
        path.write_text(content)
        path.chmod(mode)
        assert _files.ids([str(path)], 5.0) == {str(path): ""}
    path.write_text(A)
    path.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert _files.ids([str(link)], 5.0) == {str(link): ""}
    os.mkfifo(tmp_path / "fifo")
    assert _files.ids([str(tmp_path / "fifo")], 5.0) == {str(tmp_path / "fifo"): ""}


def test_a_container_that_does_not_run_is_nobody_s_business(world: World) -> None:
    world.start("docker start -a engine")
    world.contain(state={"Running": False, "Pid": 0})
    assert world.look() == []
    absent = World()
    absent.start("docker start -a engine")
    assert absent.look() == []
    assert absent.tracker.warnings == world.tracker.warnings == []


def test_a_policy_does_not_start_what_was_stopped(world: World) -> None:
    world.start("docker start -a engine")
    world.contain(state={"Running": False, "Pid": 0}, policy="always")
    assert (world.look(), world.tracker.warnings) == ([], [])


def test_a_client_inside_a_container_says_nothing_of_this_host(world: World) -> None:
    """It speaks to a daemon of its own, or is a name that somebody in there has made up."""
    world.exec_start = [["/opt/start.sh"]]
    inner = process(600, "docker", cgroup=INSIDE)
    world.lines = {600: ("docker start -a victim", {})}
    world.contain("victim", id=B)
    owned = Owned()
    owned.add(inner, "container", True)
    assert world.tracker.containers(Table([ENGINE, inner]), world.state, owned) == {}
    assert world.inspected == []


def test_a_container_between_two_lives_is_owned(world: World) -> None:
    world.start("docker start -a engine")
    world.contain(state={"Running": False, "Pid": 0, "Restarting": True}, policy="always")
    assert world.look() == [A]


@pytest.mark.parametrize("error", ["Cannot connect to the Docker daemon", ""])
def test_a_daemon_that_does_not_tell(world: World, error: str) -> None:
    world.start("docker start -a engine")
    world.error = error
    world.containers["engine"] = {"Id": "short"}
    assert world.look() == []
    assert (error or "gave no usable answer") in world.tracker.warnings[0]


def test_a_manager_that_somebody_else_may_have_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(_containers, "program", lambda _name: "")
    world.start("docker start -a engine")
    world.contain()
    assert world.look() == []
    assert "only root may write" in world.tracker.warnings[0]
    assert world.inspected == []


def test_a_container_elsewhere(world: World) -> None:
    world.start("docker -H tcp://far run --name engine img")
    world.contain()
    assert world.look() == []
    assert "another host" in world.tracker.warnings[0]
    assert world.inspected == []


@pytest.mark.parametrize("place", ["/docker/" + B, "/system.slice/other.service", "/"])
def test_a_container_whose_process_is_not_in_it_here(world: World, place: str) -> None:
    """A daemon that answers from another host, or lies: its pid is somebody else here."""
    world.start("docker start -a engine")
    world.contain()
    world.rows = [CLIENT, process(500, cgroup=place)]
    assert world.look() == []
    assert "not in it on this host" in world.tracker.warnings[0]


def test_a_container_in_the_unit_s_own_group(world: World) -> None:
    world.start("podman run --cgroups=split --name engine img")
    world.contain()
    world.rows = [process(100, "conmon", cgroup=HERE), process(500, cgroup=HERE + "/payload")]
    assert world.look() == [A]


@pytest.mark.parametrize(
    "line", ["docker start -a engine", "docker run --name engine img", "docker start " + A[:12], "docker start " + A]
)
def test_a_container_that_another_unit_runs_too(world: World, line: str) -> None:
    world.start("docker start -a engine")
    world.contain()
    world.rows += [process(200, "docker", cgroup="/system.slice/other.service")]
    world.lines[200] = line, {}
    assert world.look() == []
    assert 'the unit "other.service" runs a client of it too' in world.tracker.warnings[0]


def test_a_client_of_another_unit_that_cannot_be_read_may_be_one_of_the_same_container(world: World) -> None:
    world.start("docker start -a engine")
    world.contain()
    world.rows += [process(200, "docker", cgroup="/system.slice/other.service")]
    assert world.look() == []
    assert "cannot be read" in world.tracker.warnings[-1]


@pytest.mark.parametrize(
    "place", ["/system.slice/other.service", "/user.slice/user-0.slice/session-1.scope", "/docker/" + B]
)
def test_other_clients_do_not_matter(world: World, place: str) -> None:
    world.start("docker start -a engine")
    world.contain()
    world.rows += [process(200, "docker", cgroup=place)]
    world.lines[200] = "docker start -a %s" % ("other" if "service" in place else "engine"), {}
    assert world.look() == [A]


# How long it may take


@pytest.mark.parametrize(
    "hangs", [{"busctl": 60}, {"docker": 60}, {"read": 60}, {"busctl": 60, "docker": 60, "read": 60}]
)
def test_all_looks_of_one_stop_have_one_limit(world: World, hangs: t.Dict[str, float]) -> None:
    """A daemon, systemd or a client that hangs is named, and does not make the stop late."""
    world.start("docker run --name engine img")
    world.lines.clear() if "read" in hangs else None
    world.contain()
    world.rows += [process(200, "docker", cgroup="/system.slice/other.service")]
    world.slow = hangs
    for life in range(20):  # each asks everything again
        world.state.invocation_id = str(life)
        world.look()
    assert _containers.SECONDS <= world.clock <= _containers.SECONDS + 0.001
    assert "could not be told within 3 s" in " ".join(world.tracker.warnings)
    asked = len(world.asked)
    world.state.invocation_id = "more"
    world.look()
    assert (len(world.asked), world.clock <= _containers.SECONDS + 0.001) == (asked, True)


def test_what_was_found_before_the_time_was_used_up_stays(world: World) -> None:
    world.start("docker run --name engine img")
    world.contain()
    world.slow = {"docker": 1.6}
    assert world.look() == [A]
    world.ended(1)
    assert world.look() == [A]
    assert any("left alone" in text or "looked up" in text for text in world.tracker.warnings)


def test_a_manager_that_hangs_costs_a_unit_without_a_client_nothing(world: World) -> None:
    world.slow = {"docker": 60, "podman": 60}
    world.start("vllm serve model")
    world.rows = [process(100, "vllm"), process(200, "docker", cgroup="/system.slice/other.service"), ENGINE]
    assert (world.look(), world.inspected, world.clock, world.tracker.warnings) == ([], [], 0.0, [])


@pytest.mark.parametrize("present", [True, False])
def test_a_systemd_that_does_not_tell_is_named_where_there_is_a_manager(
    world: World, monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    monkeypatch.setattr(_containers, "program", lambda name: "/usr/bin/" + name if present else "")
    monkeypatch.setattr(world.tracker, "_ask", lambda _words, _limit: (1, "", "no bus"))
    world.rows = [process(100, "vllm")]
    assert world.look() == []
    assert ["no bus" in text for text in world.tracker.warnings] == [True] * present


@pytest.mark.parametrize("name, load", [("run-r1.scope", "loaded"), ("qwen.service", "not-found")])
def test_what_has_no_commands_is_not_asked_for_them(world: World, name: str, load: str) -> None:
    world.state.name, world.state.load_state = name, load
    world.rows = []
    assert (world.look(), world.asked, world.tracker.warnings) == ([], [], [])


def stick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this name hang, as those of a dead file server do."""
    real = os.open

    def opener(path: t.Any, *rest: t.Any, **more: t.Any) -> int:
        if str(path).endswith("stuck"):
            time.sleep(60)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", opener)
    monkeypatch.setattr(_containers, "FILES", 0.3)


def test_an_environment_file_that_hangs(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Which daemon is meant may be in it, so nothing is guessed; a live client tells all by itself."""
    stick(monkeypatch)
    world.exec_start = [["/usr/bin/docker", "run", "--name", "engine", "img"]]
    world.files = [str(tmp_path / "none"), str(tmp_path / "stuck")]
    world.contain()
    world.rows = [ENGINE]
    began = time.monotonic()
    assert world.look() == []
    assert time.monotonic() - began < 5
    assert 'EnvironmentFile= "%s"' % (tmp_path / "stuck") in world.tracker.warnings[0]
    told = World()
    told.exec_start, told.files = world.exec_start, world.files
    told.lines[100] = "docker run --name engine img", {}
    told.contain()
    assert told.look() == [A]


def test_a_file_with_an_id_that_hangs(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    stick(monkeypatch)
    world.start("docker run --cidfile %s img" % (tmp_path / "stuck"))
    world.contain()
    began = time.monotonic()
    assert world.look() == []
    assert time.monotonic() - began < 5
    assert "cannot be told from its ExecStart=" in world.tracker.warnings[0]
    # That of another unit's client may name the container of this one.
    other = World()
    other.start("docker start -a engine")
    other.contain()
    other.rows += [process(200, "docker", cgroup="/system.slice/other.service")]
    other.lines[200] = "docker run --cidfile %s img" % (tmp_path / "stuck"), {}
    assert other.look() == []
    assert "cannot be read in time" in other.tracker.warnings[0]


# Whose container it is


@pytest.mark.parametrize(
    ("line", "facts", "ended", "why"),
    [
        ("docker run --name engine img", {}, None, ""),
        ("docker run --name engine img", {"created": NOW - 900, "started": NOW - 900}, None, ""),
        ("docker run --name engine img", {"created": NOW - 900, "image": "db"}, None, "its image is"),
        ("docker run --name engine img", {"created": NOW - 52, "image": "db"}, None, "its image is"),
        ("docker run --name engine img", {"created": NOW - 30, "image": "db"}, 40, "its image is"),
        ("docker run --name engine img", {"created": NOW - 48, "image": "db"}, 40, ""),
        ("docker run --name engine $X", {"created": NOW - 900}, None, "its image is"),
        ("docker run --name engine $X", {}, None, ""),
        ("docker start -a engine", {"created": NOW - 9000}, None, ""),
        ("docker start -a engine", {"created": NOW - 9000, "started": NOW - 9000}, None, ""),
        ("docker start -a engine", {"started": NOW - 30}, 40, "started after"),
        ("docker start -a engine", {"started": NOW - 30, "policy": "always"}, 40, ""),
        ("docker run --name engine img", {"started": NOW - 30}, 40, "started after"),
        ("docker run --name engine img", {"started": NOW - 30, "policy": "on-failure"}, 40, ""),
        ("docker run --name engine img", {"started": NOW - 37}, 40, ""),
    ],
)
def test_somebody_else_s_container_of_that_name(
    world: World, line: str, facts: t.Dict[str, t.Any], ended: t.Optional[float], why: str
) -> None:
    world.start(line)
    world.contain(**facts)
    if ended is not None:
        world.ended(ended)
        world.rows = [ENGINE]
    assert world.look() == ([] if why else [A])
    assert [why in text for text in world.tracker.warnings] == ([True] if why else [])


def test_of_a_unit_that_never_ran_only_what_it_would_create_is_its_own(world: World) -> None:
    world.raw["ExecMainStartTimestampMonotonic"] = "0"
    world.rows = [ENGINE]
    world.start("docker start -a engine")
    world.contain()
    assert world.look() == []
    assert "somebody else started it" in world.tracker.warnings[0]
    created = World()
    created.raw["ExecMainStartTimestampMonotonic"] = "0"
    created.start("docker run --name engine img")
    created.contain()
    assert created.look() == [A]


# What users may say


def test_a_user_s_docker_client_is_believed_as_far_as_the_socket_goes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    socket = tmp_path / "docker.sock"
    socket.touch(0o660)
    os.chmod(socket, 0o660)
    monkeypatch.setattr(_containers, "SOCKETS", (str(tmp_path / "none"), str(socket)))
    group = os.stat(socket).st_gid
    world.exec_start = [["/opt/start.sh"]]
    world.lines[100] = "docker start -a engine", {}
    world.contain()
    world.rows = [process(100, "docker", uid=4321, gids=(4321, group)), ENGINE]
    assert world.look() == [A]
    assert world.inspected[0][0] == "/usr/bin/docker"
    stranger = World()
    stranger.exec_start, stranger.lines = world.exec_start, world.lines
    stranger.contain()
    stranger.rows = [process(100, "docker", uid=4321, gids=(4321,)), ENGINE]
    assert stranger.look() == []
    assert stranger.inspected[0][:2] == ["setpriv", "--reuid=4321"]
    assert 'its process 500 "python3" is of the user "root"' in stranger.tracker.warnings[0]


@pytest.mark.parametrize(
    "line", ["podman run --name engine img", "docker --host unix:///home/u/own.sock run --name engine img"]
)
@pytest.mark.parametrize("source", ["ExecStart", "client"])
def test_a_user_cannot_name_what_is_not_his(world: World, line: str, source: str) -> None:
    """Whatever answers for a user is under his control, so an id in its answer may be anybody's container."""
    world.raw["User"] = "4321"
    if source == "ExecStart":
        world.start(line)
    world.lines[100] = line, {}
    world.rows = [process(100, line.split()[0], uid=4321, gids=(4321,)), ENGINE]
    world.contain()
    assert world.look() == []
    assert "is left alone" in world.tracker.warnings[0]
    own = World()
    own.exec_start, own.lines, own.raw["User"] = world.exec_start, world.lines, "4321"
    own.rows = [world.rows[0], process(500, cgroup=INSIDE, uid=4321)]
    own.contain()
    assert own.look() == [A]
    stop = own.tracker.containers(Table(own.rows), own.state, Owned())[A].stop
    assert stop[:4] == ("setpriv", "--reuid=4321", "--regid=65534", "--clear-groups")
    assert stop[-4:] == ("stop", "-t", "{seconds}", A)


def test_subordinate_users_are_the_user_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspected, "_subordinate", lambda _uid: [(100000, 65536)])
    facts = _inspected.Facts(A, "engine", 0, 0, 500, "img", False)
    for uid, his in ((4321, True), (100000, True), (165535, True), (165536, False), (0, False)):
        table = Table([process(500, cgroup=INSIDE, uid=uid), process(501, uid=9)])
        assert (_inspected.not_his(table, facts, 4321) == "") is his


def test_a_user_that_is_not_known(world: World) -> None:
    world.raw["User"] = "no-such-user"
    world.start("podman run --name engine img")
    world.contain()
    world.rows = [ENGINE]
    assert world.look() == []
    assert "user is not known" in world.tracker.warnings[0]


# Machines


@pytest.mark.parametrize("scope", ["machine-web.scope", "web.scope"])
def test_a_machine_outside_the_unit(world: World, scope: str) -> None:
    world.start("systemd-nspawn -D /srv/web /engine")
    world.rows = [process(100, "systemd-nspawn"), process(500, cgroup="/machine.slice/%s/payload" % scope)]
    world.lines[100] = "systemd-nspawn -D /srv/web /engine", {}
    world.raw["ExecMainStartTimestampMonotonic"] = "%d" % ((time.monotonic() - 99.5) * 1e6)
    assert world.look() == ["web"]
    # Its first process was born 99 s ago, before this life of the unit.
    older = World()
    older.exec_start, older.rows, older.lines = world.exec_start, world.rows, world.lines
    assert older.look() == []
    assert "is left alone" in older.tracker.warnings[0]


def test_a_machine_of_an_earlier_life_is_known_by_its_root(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: t.List[t.Tuple[int, str]] = []
    monkeypatch.setattr(
        _containers, "_same_folder", lambda pid, folder, _limit: bool(seen.append((pid, folder)) or True)
    )
    world.start("systemd-nspawn -D /srv/web /engine")
    world.rows = [process(500, cgroup="/machine.slice/machine-web.scope/payload")]
    assert world.look() == ["web"]
    assert seen == [(500, "/srv/web")]


def test_the_root_of_a_process() -> None:
    assert _containers._same_folder(os.getpid(), "/", 5.0)
    assert not _containers._same_folder(os.getpid(), "/proc", 5.0)
    assert not _containers._same_folder(os.getpid(), "/nonexistent", 5.0)
    assert not _containers._same_folder(os.getpid(), "", 5.0)


def test_a_machine_in_the_unit_s_own_group_needs_no_look(world: World) -> None:
    world.start("systemd-nspawn --keep-unit -D /srv/web /engine")
    world.rows = [process(500, cgroup="/machine.slice/machine-web.scope/payload")]
    assert world.look() == []
    assert world.tracker.warnings == []


def test_a_machine_takes_root(world: World) -> None:
    world.raw["User"] = "4321"
    world.start("systemd-nspawn -D / /engine")
    world.rows = [process(500, cgroup="/machine.slice/machine-web.scope/payload")]
    world.exec_start[0][1:3] = ["-M", "web"]
    world.raw["ExecMainStartTimestampMonotonic"] = "%d" % ((time.monotonic() - 99.5) * 1e6)
    assert world.look() == []
    world.raw["User"], again = "", World()
    again.exec_start, again.rows, again.raw = world.exec_start, world.rows, world.raw
    again.state.raw = world.raw
    assert again.look() == ["web"]


def test_a_machine_without_a_name(world: World) -> None:
    world.start("systemd-nspawn --new x -D /srv/web /engine")
    world.rows = []
    assert world.look() == []
    assert "--machine=" in world.tracker.warnings[0]


# Times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-02T03:04:05Z", 1767323045.0),
        ("2026-01-02T03:04:05.5Z", 1767323045.5),
        ("2026-01-02T05:04:05.25+02:00", 1767323045.25),
        ("2026-01-01T22:34:05-04:30", 1767323045.0),
        ("2026-01-02 03:04:05.123456789 +0000 UTC", 1767323045.123456789),
        ("", 0.0),
        ("soon", 0.0),
    ],
)
def test_moments(text: str, seconds: float) -> None:
    assert _inspected._moment(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[{}]", "null", "[1]", '[{"Id": "%s"}]' % A])
def test_answers_without_sense(text: str) -> None:
    assert _inspected.parse(text) is None


def test_an_answer_of_two_containers_is_none(world: World) -> None:
    world.contain()
    row = world.containers["engine"]
    assert _inspected.parse(json.dumps([row])) is not None
    assert _inspected.parse(json.dumps([row, row])) is None


# Real children


def sleeper(*words: str) -> Container:
    return Container("docker", A, "engine", (sys.executable, "-c", *words))


def wait_done(request: _asking.Request, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not request.done:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_that_succeeds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "said"
    script = "import sys; open(%r, 'w').write(repr(sys.argv[1:]))" % str(path)
    request = _asking.Request(sleeper(script, "-t", "{seconds}", A), 2.2)
    wait_done(request)
    assert request.failed == ""
    assert path.read_text() == repr(["-t", "3", A])


def test_a_request_that_fails_says_why() -> None:
    request = _asking.Request(sleeper("import sys; sys.exit('no\\nsuch \\x1b thing')"), 1)
    wait_done(request)
    assert request.failed == "no such \\x1b thing"
    silent = _asking.Request(sleeper("import sys; sys.exit(3)"), 1)
    wait_done(silent)
    assert silent.failed == "status 3"
    absent = _asking.Request(Container("docker", A, "engine", ("/nonexistent/docker", "stop")), 1)
    assert absent.done
    assert "cannot run" in absent.failed


def test_a_container_without_a_manager_is_done_at_once() -> None:
    request = _asking.Request(Container("nspawn", "web", "web"), 1)
    assert (request.done, request.failed) == (True, "")
    request.end()


def test_a_request_that_hangs_ends_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(_asking, "MARGIN", 0.0)
    path = tmp_path / "pids"
    script = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild = os.fork()\n"
        "if child: open(%r + '.new', 'w').write('%%d %%d' %% (os.getpid(), child)); os.rename(%r + '.new', %r)\n"
        "time.sleep(600)"
    ) % (str(path), str(path), str(path))
    for ends in (False, True):
        path.unlink() if path.exists() else None
        request = _asking.Request(sleeper(script), 0.0 if not ends else 60.0)
        request._until += 5.0
        end = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        pids = [int(word) for word in path.read_text().split()]
        assert not request.done
        assert os.getsid(pids[0]) == pids[0]
        if ends:
            request.end()
        else:
            request._until = 0.0
        assert request.done
        assert request.failed in ("no answer", "it was not waited for any longer")
        gone_by = time.monotonic() + 5
        while any(os.path.exists("/proc/%d" % pid) and _state(pid) not in "ZX" for pid in pids):
            assert time.monotonic() < gone_by
            time.sleep(0.01)
        with pytest.raises(ChildProcessError):
            os.waitpid(pids[0], os.WNOHANG)  # reaped already


def _state(pid: int) -> str:
    try:
        return pathlib.Path("/proc/%d/stat" % pid).read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X"


def test_no_folder_is_needed_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With /tmp full no unit could be stopped."""

    def full(*_any: object, **_more: object) -> t.NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile._get_default_tempdir", full)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert _asking.ask([sys.executable, "-c", "print('x')"], 20.0) == (0, "x\n", "")
    request = _asking.Request(sleeper("import sys; sys.exit('no such thing')"), 1)
    wait_done(request)
    assert request.failed == "no such thing"
    monkeypatch.setattr(os, "memfd_create", full)
    assert _asking.ask([sys.executable, "-c", "print('x')"], 20.0) == (
        -1,
        "",
        "no answer: there is no room for one: No space left on device",
    )
    request = _asking.Request(sleeper("import sys; sys.exit('no such thing')"), 1)
    wait_done(request)
    assert request.failed == "status 1"


def test_a_question_is_bounded_and_has_none_of_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://far")
    words = [sys.executable, "-c", "import os; print(sorted(os.environ), os.getcwd())"]
    rc, out, err = _asking.ask(words, 20.0)
    assert (rc, err) == (0, "")
    assert "DOCKER_HOST" not in out
    assert out.endswith("/\n")
    began = time.monotonic()
    assert _asking.ask([sys.executable, "-c", "import time; time.sleep(60)"], 0.3) == (-1, "", "no answer within 0.3 s")
    assert time.monotonic() - began < 5
    assert _asking.ask(["/nonexistent/x"], 1.0)[0] == -1
    # One that leaves a child behind with its output open is not waited for.
    began = time.monotonic()
    leaver = "import os, time\nprint('x', flush=True)\nif os.fork() == 0: os.setsid(); time.sleep(3)"
    assert _asking.ask([sys.executable, "-c", leaver], 20.0)[:2] == (0, "x\n")
    assert time.monotonic() - began < 2.9


@pytest.mark.skipif(os.geteuid() != 0, reason="the rights of another user take root")
def test_a_command_with_a_user_s_rights() -> None:
    rc, out, err = _asking.ask([*_asking.as_user(65534), "sh", "-c", "id -u; id -g; id -G; pwd; env"], 20.0)
    assert (rc, err) == (0, "")
    lines = out.splitlines()
    assert lines[:4] == ["65534", "65534", "65534", "/"]
    assert "XDG_RUNTIME_DIR=/run/user/65534" in lines
    assert "HOME=/root" not in lines
    unknown = _asking.ask([*_asking.as_user(4321), "sh", "-c", "id -u; id -G"], 20.0)
    assert unknown == (0, "4321\n65534\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="folders of root take root")
def test_a_program_that_only_root_can_have_put_there(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path("/run/gpuops-test-%d" % os.getpid())
    folder.mkdir(mode=0o755)
    try:
        path = folder / "docker"
        path.write_text("x")
        path.chmod(0o755)
        monkeypatch.setattr(_asking, "FOLDERS", (str(folder),))
        assert _asking.program("docker") == str(path)
        assert _asking.program("podman") == ""
        path.chmod(0o775)
        assert _asking.program("docker") == ""
        path.chmod(0o755)
        os.chown(path, 65534, 0)
        assert _asking.program("docker") == ""
        os.chown(path, 0, 0)
        folder.chmod(0o777)
        assert _asking.program("docker") == ""
        folder.chmod(0o755)
        target = tmp_path / "own"
        target.write_text("x")
        target.chmod(0o777)
        (folder / "podman").symlink_to(target)
        assert _asking.program("podman") == ""
    finally:
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()


def test_what_a_process_was_called_with() -> None:
    words = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", "a b", "", "c"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={"X": "y=z"}) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            start = int(pathlib.Path("/proc/%d/stat" % child.pid).read_bytes().rpartition(b")")[2].split()[19])
            ref, other = ProcessRef(child.pid, start), ProcessRef(child.pid, start + 1)
            said = _asking.read([ref, other, ProcessRef(2**22, 1)], 5.0)
            assert list(said) == [ref]
            assert said[ref].words[1:] == words[1:]
            assert said[ref].environment["X"] == "y=z"
        finally:
            child.send_signal(signal.SIGKILL)
