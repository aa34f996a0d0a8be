# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The facts of an audit as systemd tells them, and the units of a host that serve an engine, whatever their names."""

from __future__ import annotations

import json
import os
import pathlib
import re
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _audit_find,
    _audit_units,
    _gpu_nodes,
    _service,
    _sockets,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._audit_command import Port
from ansible_collections.gpuops.serving.plugins.module_utils._audit_judge import Listens, Unit
from ansible_collections.gpuops.serving.plugins.module_utils._audit_units import Told
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Process, ProcessRef, Table

SHOWN = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "UnitFileState": "enabled",
    "Type": "exec",
    "KillMode": "mixed",
    "SendSIGKILL": "yes",
    "Restart": "on-failure",
    "RestartUSec": "1min 500ms",
    "StartLimitIntervalUSec": "10s",
    "StartLimitBurst": "5",
    "TimeoutStartUSec": "1min 30s",
    "TimeoutStopUSec": "infinity",
    "SupplementaryGroups": "video gpuops-0123456789ab",
    "DropInPaths": "/etc/systemd/system/q.service.d/a.conf",
    "NeedDaemonReload": "no",
    "Conflicts": "shutdown.target other.service",
}


class Systemd:
    """What systemctl and busctl answer."""

    def __init__(self) -> None:
        self.shown: t.Dict[str, t.Dict[str, str]] = {}
        self.commands: t.Dict[str, t.Dict[str, t.List[t.List[str]]]] = {}
        self.environment: t.List[str] = []
        self.files: t.List[str] = []
        self.unit_path = ""
        self.listed = ""

    def add(self, name: str, start: t.Sequence[str] = ("/opt/vllm", "serve", "m"), **more: t.Any) -> None:
        self.shown[name] = {**SHOWN, "Id": name, **more}
        self.commands[name] = {"ExecStart": [list(start)]}

    def systemctl(self, arguments: t.List[str], timeout: float) -> t.Tuple[int, str, str]:
        if arguments[0] == "list-units":
            return 0, self.listed, ""
        if "--property=UnitPath" in arguments:
            return 0, self.unit_path, ""
        names = arguments[arguments.index("--") + 1 :]
        blocks = ["\n".join("%s=%s" % pair for pair in self.shown[name].items()) for name in names]
        return 0, "\n\n".join(blocks) + "\n", ""

    def call(self, arguments: t.List[str], timeout: float) -> t.Tuple[int, str, str]:
        escaped = arguments[3 + 1].rsplit("/", 1)[1]
        name = re.sub(r"_([0-9a-f]{2})", lambda found: chr(int(found.group(1), 16)), escaped)
        if name not in self.commands:
            return 1, "", "Unknown object"
        rows = []
        for kind in arguments[6:]:
            if kind == "Environment":
                data: t.Any = self.environment
            elif kind == "EnvironmentFiles":
                data = [[path, True] for path in self.files]
            else:
                data = [[words[0], words, False, 0] for words in self.commands[name].get(kind, [])]
            rows.append(json.dumps({"type": "x", "data": data}))
        return 0, "\n".join(rows) + "\n", ""


@pytest.fixture(name="systemd")
def fixture_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Systemd:
    systemd = Systemd()
    monkeypatch.setattr(_systemd, "_systemctl", systemd.systemctl)
    monkeypatch.setattr(_systemd, "call", systemd.call)
    monkeypatch.setattr(_service, "FOLDER", str(tmp_path / "services"))
    monkeypatch.setattr(_audit_units, "PAM", ())
    return systemd


def define(tmp_path: pathlib.Path, name: str, **definition: t.Any) -> None:
    (tmp_path / "services").mkdir(exist_ok=True)
    path = tmp_path / "services" / (name + ".json")
    path.write_text(json.dumps({"name": name, **definition}), encoding="utf-8")


def read(*names: str, told: t.Optional[Told] = None, **seen: str) -> t.List[_audit_units.Facts]:
    return _audit_units.read(names, told or Told(), seen)


def test_the_facts_of_a_hand_written_unit(systemd: Systemd) -> None:
    systemd.add("q.service", ("/opt/vllm", "serve", "${MODEL}", "--port", "$PORT"))
    systemd.environment = ["MODEL=my model", "PORT=8005", "CUDA_VISIBLE_DEVICES=0,1"]
    (one,) = read("q.service")
    unit = one.unit
    assert unit.start == (("/opt/vllm", "serve", "my model", "--port", "8005"),)
    assert (unit.restart_delay, unit.limit_interval, unit.timeout_start, unit.timeout_stop) == (
        60.5,
        10,
        90,
        float("inf"),
    )
    assert (unit.claims, unit.marked, unit.transient, unit.send_sigkill) == (True, True, False, True)
    assert (unit.engine, one.engine_from, unit.load_time, unit.drain) == ("vllm", "command", 300.0, 60.0)
    assert (unit.gpus, unit.ports) == (("0", "1"), (Port(8005),))
    assert unit.conflicts == {"shutdown.target", "other.service"}
    assert (one.drop_ins, one.service) == (("/etc/systemd/system/q.service.d/a.conf",), None)


def test_what_a_definition_says_wins_over_the_command_and_an_option_over_both(
    systemd: Systemd, tmp_path: pathlib.Path
) -> None:
    systemd.add("q.service", ("/opt/vllm", "serve", "m", "--port", "1", "--host", "0.0.0.0"))
    define(
        tmp_path,
        "chat",
        unit="q",
        engine="sglang",
        url="http://127.0.0.1:9000",
        gpus=["3"],
        ready_timeout=900,
        stop_timeout=45.5,
    )
    (one,) = read("q.service")
    assert (one.service, one.unit.engine, one.engine_from) == ("chat", "sglang", "definition")
    assert (one.unit.load_time, one.unit.drain, one.unit.gpus, one.unit.ports) == (900.0, 45.5, ("3",), (Port(9000),))
    (one,) = read("q.service", told=Told("triton", 5.0, 6.0))
    assert (one.unit.engine, one.engine_from, one.unit.load_time, one.unit.drain) == ("triton", "option", 5.0, 6.0)


@pytest.mark.parametrize(
    ("start", "seen", "engine", "load", "drain"),
    [
        (("/opt/start.sh",), "", "", 0.0, 0.0),
        (("/opt/start.sh",), "sglang", "sglang", 300.0, 120.0),
        (("/usr/bin/ollama", "serve"), "", "ollama", 0.0, 60.0),
        (("/opt/vllm", "serve", "m", "--shutdown-timeout", "300"), "", "vllm", 300.0, 330.0),
    ],
)
def test_the_times_of_an_engine(
    systemd: Systemd, start: t.Sequence[str], seen: str, engine: str, load: float, drain: float
) -> None:
    systemd.add("q.service", start)
    (one,) = _audit_units.read(["q.service"], Told(), {"q.service": seen} if seen else {})
    assert (one.unit.engine, one.unit.load_time, one.unit.drain, one.serves) == (engine, load, drain, engine != "")


def test_environment_files_are_read_as_far_as_they_tell(systemd: Systemd, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vllm.env"
    path.write_text('# x\nCUDA_VISIBLE_DEVICES="2"\nTOKEN=secret\n', encoding="utf-8")
    systemd.add("q.service")
    systemd.files = [str(path), str(tmp_path / "none.env")]
    (one,) = read("q.service")
    assert one.unit.gpus == ("2",)
    assert "secret" not in repr(one)


def test_a_container_is_known_by_its_client(systemd: Systemd) -> None:
    line = "/usr/bin/docker run --name q -p 8000:80 --gpus device=1 vllm/vllm-openai:v1 --model m"
    systemd.add("q.service", line.split())
    (one,) = read("q.service")
    assert (one.unit.engine, one.unit.gpus, one.unit.ports, one.unit.client_path) == (
        "vllm",
        ("1",),
        (Port(8000),),
        "/usr/bin/docker",
    )
    assert one.unit.clients[0].names == ("q",)


def test_two_names_of_one_unit_are_one_unit(systemd: Systemd) -> None:
    systemd.add("q.service")
    systemd.shown["alias.service"] = systemd.shown["q.service"]
    assert [one.unit.name for one in read("alias.service", "q.service")] == ["q.service"]


def test_a_unit_that_does_not_tell_hides_no_other(systemd: Systemd) -> None:
    systemd.add("q.service")
    systemd.add("gone.service")
    systemd.commands.pop("gone.service")
    first, second = read("gone.service", "q.service")
    assert (first.unit.load_state, second.unit.load_state) == ("unreadable", "loaded")
    assert first.unit.load_error == 'the commands of the unit "gone.service" cannot be read: Unknown object'


def test_what_is_not_there_is_asked_no_further(systemd: Systemd) -> None:
    error = 'org.freedesktop.systemd1.BadUnitSetting "Unit q.service has a bad unit file setting."'
    systemd.shown["q.service"] = {"Id": "q.service", "LoadState": "bad-setting", "LoadError": error}
    (one,) = read("q.service")
    assert (one.unit.load_state, one.unit.load_error) == ("bad-setting", "Unit q.service has a bad unit file setting")


def test_many_units_are_asked_for_in_parts(systemd: Systemd) -> None:
    names = ["u%03d.service" % number for number in range(250)]
    for name in names:
        systemd.add(name)
    assert [one.unit.name for one in read(*names)] == names


@pytest.mark.parametrize(
    ("text", "sessions"),
    [
        ("session optional pam_systemd.so\n", True),
        ("-session optional pam_systemd.so class=x\n", True),
        ("# session optional pam_systemd.so\n", False),
        ("session required pam_unix.so\n", False),
    ],
)
def test_whether_a_login_moves_processes_into_a_scope(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, text: str, sessions: bool
) -> None:
    (tmp_path / "pam").mkdir()
    (tmp_path / "pam" / "common-session").write_text(text, encoding="utf-8")
    monkeypatch.setattr(_audit_units, "PAM", (str(tmp_path / "none"), str(tmp_path / "pam")))
    systemd.add("q.service")
    assert read("q.service")[0].unit.sessions is sessions


# Which units


HINT = re.compile("vllm")


def test_units_are_found_by_their_files_whatever_lies_beside_them(systemd: Systemd, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second, first / "dropped.service.d", first / "dir.service", first / "x.target.wants"):
        folder.mkdir()
    systemd.unit_path = "%s %s /nonexistent" % (first, second)
    text = "ExecStart=/opt/vllm\n"
    for name in (
        "a.service",
        "t@.service",
        "ünit.service",
        ".service",
        "b c.service",
        "x.socket",
        "es\\x2dc@1.service",
    ):
        (first / name).write_text(text, encoding="utf-8")
    with open(os.fsencode(str(first)) + b"/bad\xff.service", "w", encoding="utf-8") as stream:
        stream.write(text)
    (second / "other.service").write_text("ExecStart=/bin/true\n", encoding="utf-8")
    (second / "dropped.service").write_text("ExecStart=$X\n", encoding="utf-8")
    (first / "dropped.service.d" / "o.conf").write_text("Environment=X=/opt/vllm\n", encoding="utf-8")
    (first / "masked.service").symlink_to("/dev/null")
    (first / "loop.service").symlink_to("loop.service")
    os.mkfifo(str(first / "fifo.service"))
    (first / "x.target.wants" / "t@2.service").symlink_to("../t@.service")
    (first / "x.target.wants" / "z@2.service").symlink_to("../z@.service")
    systemd.listed = "t@1.service loaded active running x\n"
    found = ["a.service", "dropped.service", "es\\x2dc@1.service", "t@1.service", "t@2.service"]
    assert sorted(_audit_units.mentioning(HINT)) == found


def process(pid: int, name: str, cgroup: str) -> Process:
    return Process(
        ref=ProcessRef(pid, 100),
        ppid=1,
        pgrp=pid,
        session=pid,
        state="S",
        name=name,
        uid=0,
        gids=(0,),
        cgroup=cgroup,
        threads=1,
        kernel_thread=False,
        cpu_ticks=0,
    )


CONTAINER = "/system.slice/docker-%s.scope" % ("a" * 64)
PROCESSES = [
    process(10, "VLLM::Worker", "/system.slice/v.service"),
    process(11, "sglang::schedul", "/user.slice/user-1.slice/session-c1.scope"),
    process(12, "llama-server", "/user.slice/user-1.slice/user@1.service/app.slice/l.service"),
    process(13, "tritonserver", CONTAINER),
    process(14, "python3", "/system.slice/j.service"),
    process(15, "nvidia-persiste", "/system.slice/nvidia-persistenced.service"),
    process(16, "Xwayland", "/system.slice/gdm.service"),
    process(17, "sshd", "/system.slice/ssh.service"),
]


@pytest.fixture(name="host")
def fixture_host(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    monkeypatch.setattr(Table, "snapshot", lambda: Table(PROCESSES))
    nodes = {"nvidia0": [10, 14, 15, 17, 99], "card0": [16]}
    monkeypatch.setattr(_gpu_nodes, "scan", lambda: _gpu_nodes.NodeFacts(holders=nodes))
    return systemd


def test_units_are_found_by_what_runs_what_holds_a_gpu_and_what_is_defined(
    host: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions = {"d": {"unit": "d"}, "s": {"unit": "s.socket"}, "t": {"unit": "t@"}, "none": {}}
    monkeypatch.setattr(_service, "names", lambda: list(definitions))
    monkeypatch.setattr(_service, "load", lambda name: definitions[name])
    sight = _audit_find.look()
    assert (sight.names, sight.engines) == (["d.service", "j.service", "v.service"], {"v.service": "vllm"})
    assert sight.outside == ['11 "sglang::schedul"', '12 "llama-server"']
    assert sight.contained == ['13 "tritonserver"']
    text = "an engine runs in no service unit, so that no rule was applied to it: process "
    assert list(sight.unjudged(clients=True)) == [text + '11 "sglang::schedul", 12 "llama-server"']
    assert list(sight.unjudged(clients=False)) == [text + '11 "sglang::schedul", 12 "llama-server", 13 "tritonserver"']


def test_who_listens_on_a_port_that_a_unit_is_told(host: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = [
        _sockets.Socket("0.0.0.0", 8000, 1),
        _sockets.Socket("127.0.0.1", 8000, 2),
        _sockets.Socket("::", 8000, 3),
        _sockets.Socket("::", 22, 4),
    ]
    monkeypatch.setattr(_sockets, "listening", lambda: sockets)
    owners = {1: [10], 2: [14], 3: [13, 11, 1, 77]}
    monkeypatch.setattr(_sockets, "owners", lambda inodes, pids: {inode: owners.get(inode, []) for inode in inodes})
    found = _audit_find.listens([Unit("q.service", ports=(Port(8000),))])
    # A container, a session, process 1 and what is gone are no other unit.
    assert found == [Listens("v.service", Port(8000)), Listens("j.service", Port(8000, "127.0.0.1"))]
    assert _audit_find.listens([Unit("q.service")]) == []
