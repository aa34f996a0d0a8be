# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A unit's processes from look to look: real ones, in made-up control groups."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _containers,
    _members,
    _ownership,
    _places,
    _processes,
    _systemd,
)

GROUP = "/system.slice/x.service"


class Unit:
    """Processes that a made-up control group lists."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder
        self.group = folder / GROUP[1:]
        self.group.mkdir(parents=True)
        self.children: t.List[subprocess.Popen[bytes]] = []
        self.listed: t.List[int] = []

    def start(self, code: str = "import sys; sys.stdin.read()") -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return child

    def list(self, *pids: int, folder: str = "") -> None:
        place = self.group / folder
        place.mkdir(exist_ok=True)
        (place / "cgroup.procs").write_text("".join("%d\n" % pid for pid in pids))

    def state(self, main: int, invocation: str = "a") -> _systemd.UnitState:
        return _systemd.UnitState(
            "x.service",
            active_state="active",
            sub_state="running",
            main_pid=main,
            invocation_id=invocation,
            control_group=GROUP,
        )


@pytest.fixture
def unit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> t.Iterator[Unit]:
    found = Unit(tmp_path)
    # What a test starts is a child of the test, and a unit never owns its caller's children.
    monkeypatch.setattr(_ownership, "own_line", lambda table: {os.getpid()})
    yield found
    for child in found.children:
        child.kill()
        child.communicate()


def follow(unit: Unit) -> _members.Members:
    return _members.Members(groups=("/nowhere", str(unit.root)))


def test_all_processes_are_looked_at_once_and_new_ones_are_found_by_their_group(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_members.Members, "_is_ours", lambda self, process: False)
    first, second = unit.start(), unit.start()
    unit.list(first.pid)
    members = follow(unit)
    state = unit.state(first.pid)
    for _look in range(20):
        members.follow(state)
    assert (members.looks, members.pids) == (1, [first.pid])
    unit.list(first.pid, second.pid)
    members.follow(state)
    assert (members.looks, sorted(members.pids)) == (1, sorted([first.pid, second.pid]))
    third = unit.start()
    unit.list(third.pid, folder="nested")
    members.follow(state)
    assert (members.looks, third.pid in members.pids) == (1, True)
    assert members.owned.processes[next(ref for ref in members.owned.processes if ref.pid == third.pid)] == ["cgroup"]


@pytest.mark.parametrize("change", ["main", "invocation", "time"])
def test_all_are_looked_at_again_when_the_unit_changed_or_some_time_went_by(unit: Unit, change: str) -> None:
    first, second = unit.start(), unit.start()
    members = follow(unit)
    members.follow(unit.state(first.pid))
    if change == "time":
        members._at -= members._period
    after = unit.state(second.pid if change == "main" else first.pid, "b" if change == "invocation" else "a")
    members.follow(after)
    assert members.looks == 2
    assert after.main_pid in members.pids


def test_the_caller_and_its_children_are_nobodys_members(unit: Unit) -> None:
    first = unit.start()
    members = follow(unit)
    members.follow(unit.state(first.pid))
    mine = unit.start()
    unit.list(first.pid, mine.pid, os.getpid())
    members.follow(unit.state(first.pid))
    assert members.pids == [first.pid]


def test_a_look_at_all_that_is_dear_is_taken_less_often(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.25, 10.0, 10.01])
    monkeypatch.setattr(_members.time, "process_time", lambda: next(times))
    members = follow(unit)
    state = unit.state(unit.start().pid)
    members.renew(state)
    assert members._period == 50.0
    members.renew(state)
    assert members._period == 10.0


def test_what_a_process_uses_is_seen_and_who_ended_is_forgotten(unit: Unit) -> None:
    code = (
        "import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "end = __import__('time').process_time() + 0.3\n"
        "while __import__('time').process_time() < end: pass\n"
        "open('/dev/null', 'wb').write(open('/dev/zero', 'rb').read(3 << 20))\n"
        "kept = b'x' * (40 << 20)\n"
        "subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    child = unit.start(code)
    assert child.stdin is not None and child.stdout is not None
    members = follow(unit)
    state = unit.state(child.pid)
    members.follow(state)
    (before,) = members.usage().values()
    child.stdin.write(b"go\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"done\n"
    (after,) = members.usage().values()
    assert after.cpu - before.cpu >= 0.25
    assert after.children - before.children >= 0.1
    assert before.read is not None and after.read is not None and after.read - before.read >= 6 << 20
    assert before.memory is not None and after.memory is not None and after.memory - before.memory >= 38 << 20
    assert after.age is not None and before.age is not None and 0 <= before.age < after.age < 60
    assert members.unreadable is False
    child.kill()
    child.wait()
    assert (members.usage(), members.pids) == ({}, [])


def test_the_next_process_with_the_same_number_is_another(unit: Unit) -> None:
    child = unit.start()
    members = follow(unit)
    members.follow(unit.state(child.pid))
    (ref,) = members.owned.processes
    del members.owned.processes[ref]
    members.owned.processes[_processes.ProcessRef(ref.pid, ref.start - 1)] = ["cgroup"]
    assert members.usage() == {}


def test_what_may_not_be_read_is_none_and_known(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    child = unit.start()
    members = follow(unit)
    members.follow(unit.state(child.pid))
    real = _processes.read_at

    def refuse(name: str, directory: t.Optional[int] = None) -> bytes:
        if name.endswith("/io"):
            raise PermissionError(13, "Permission denied")
        return real(name, directory)

    monkeypatch.setattr(_processes, "read_at", refuse)
    (usage,) = members.usage().values()
    assert (usage.read, members.unreadable) == (None, True)


def test_a_network_counts_where_it_is_the_units_own(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    child = unit.start()
    members = follow(unit)
    state = unit.state(child.pid)
    members.follow(state)
    assert members.network(state) == {}
    # The host's interfaces are everybody's; of another network all but the loop count.
    monkeypatch.setattr(_members, "_network", lambda proc, pid: 4026531840 + (pid == child.pid))
    members.renew(state)
    expected = _members._received("/proc/%d/net/dev" % child.pid)
    assert members.network(state) == {"network 4026531841": expected}
    state.raw["IPIngressBytes"] = "12345"
    assert members.network(state)["unit a"] == 12345
    for nothing in ("[no data]", str((1 << 64) - 1), ""):
        state.raw["IPIngressBytes"] = nothing
        assert "unit a" not in members.network(state)


def test_a_later_slice_follows_without_a_look_at_all(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = unit.start(), unit.start(), unit.start()
    unit.list(first.pid, second.pid)
    members = follow(unit)
    assert members.save() is None
    state = unit.state(first.pid)
    members.renew(state)
    with monkeypatch.context() as patched:
        patched.setattr(_members.Members, "_is_ours", lambda self, process: False)
        members._grouped = set()
        members.follow(state)
    assert sorted(members.pids) == sorted([first.pid, second.pid])
    saved = json.loads(json.dumps(members.save()))
    second.kill()
    second.wait()
    later = follow(unit)
    later.restore(saved)
    assert os.getpid() in later._own and os.getppid() in later._own
    monkeypatch.setattr(_members.Members, "_is_ours", lambda self, process: False)
    unit.list(first.pid, third.pid)
    later.follow(state)
    assert (later.looks, sorted(later.pids)) == (0, sorted([first.pid, third.pid]))
    assert later.owned.firm == set(later.owned.processes)
    later.follow(unit.state(third.pid))
    assert later.looks == 1
    # Another process has the number by now.
    row = next(row for row in saved["processes"] if row[0] == first.pid)
    row[1] -= 1
    other = follow(unit)
    other.restore(saved)
    assert other.pids == []
    monkeypatch.setattr(_members, "MOST_SAVED", 0)
    assert members.save() is None


CONTAINER = "c" * 64


def test_a_container_that_the_unit_runs_is_followed_once_it_is_there(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = unit.start(), unit.start()
    scope = "/system.slice/docker-%s.scope" % CONTAINER
    asked: t.List[float] = []
    answers: t.List[t.Dict[str, _places.Container]] = [
        {},
        {CONTAINER: _places.Container("docker", CONTAINER, "engine", ("docker", "stop"), False)},
    ]

    class Tracker:
        warnings: t.Sequence[str] = ()

        def __init__(self, seconds: float) -> None:
            asked.append(seconds)

        def containers(self, *_arguments: t.Any) -> t.Dict[str, _places.Container]:
            return answers[len(asked) - 1]

    real = _processes.Table.snapshot

    def snapshot(*arguments: t.Any) -> _processes.Table:
        table = real(*arguments)
        for pid, name, cgroup in ((client.pid, "docker", GROUP), (engine.pid, "engine", scope)):
            process = table.get(pid)
            assert process is not None
            process.name, process.cgroup = name, cgroup
        return table

    monkeypatch.setattr(_containers, "Tracker", Tracker)
    monkeypatch.setattr(_processes.Table, "snapshot", snapshot)
    members = follow(unit)
    state = unit.state(client.pid)
    members.renew(state)
    assert (members.pids, members.unknown_container) == ([client.pid], True)
    members.renew(state)
    assert (sorted(members.pids), members.unknown_container) == (sorted([client.pid, engine.pid]), False)
    assert members._containers == {scope}
    members.renew(state)
    assert asked == [2.0, 2.0]
    later = follow(unit)
    later.restore(json.loads(json.dumps(members.save())))
    assert (later._tracked, later._containers) == (members._tracked, {scope})
    later.renew(state)
    assert (sorted(later.pids), asked) == (sorted([client.pid, engine.pid]), [2.0, 2.0])
    # Another life has another container.
    answers.append({})
    members.renew(unit.state(client.pid, "b"))
    assert (members.pids, members.unknown_container) == ([client.pid], True)


def test_the_bytes_of_interfaces(tmp_path: pathlib.Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                          |  Transmit\n"
        " face |bytes    packets errs drop fifo frame|bytes\n"
        "    lo:  999999  1 0 0 0 0 0 0 999999 1 0 0 0 0 0 0\n"
        "  eth0: 1200 10 0 0 0 0 0 0 40 1 0 0 0 0 0 0\n"
        "ib0:34 10 0 0 0 0 0 0 40 1 0 0 0 0 0 0\n"
    )
    assert _members._received(str(table)) == 1234
    assert _members._received(str(tmp_path / "none")) is None


def test_following_costs_far_less_than_looking_at_all(unit: Unit) -> None:
    children = [unit.start() for _number in range(4)]
    with contextlib.suppress(OSError):
        unit.list(*(child.pid for child in children))
    members = follow(unit)
    state = unit.state(children[0].pid)
    members.follow(state)

    def cost(call: t.Callable[[], t.Any]) -> float:
        best = float("inf")
        for _try in range(5):
            began = time.process_time()
            for _repeat in range(5):
                call()
            best = min(best, time.process_time() - began)
        return best / 5

    def look() -> None:
        members.follow(state)
        members.usage()

    assert cost(look) < 0.002 + cost(lambda: members.renew(state)) / 3


@pytest.mark.parametrize(
    ("active", "found", "warnings", "seconds", "expected"),
    [
        ("active", True, (), 0, (1, False, False, False)),
        ("active", False, (), 0, (1, False, False, False)),  # it has no client: most such units run no container at all
        ("active", False, ("cannot be told",), 0, (1, True, True, False)),
        ("active", False, ("cannot be told in time",), 2.0, (1, True, True, True)),
        ("inactive", True, (), 0, (0, False, False, False)),
    ],
)
def test_a_unit_that_left_its_container_to_a_daemon_is_asked_about(
    unit: Unit,
    monkeypatch: pytest.MonkeyPatch,
    active: str,
    found: bool,
    warnings: t.Sequence[str],
    seconds: float,
    expected: t.Tuple[int, bool, bool, bool],
) -> None:
    clock = [100.0]
    asked: t.List[float] = []

    class Tracker:
        def __init__(self, seconds: float) -> None:
            self.warnings = warnings
            asked.append(seconds)

        def containers(self, *_arguments: t.Any) -> t.Dict[str, _places.Container]:
            clock[0] += seconds
            return {CONTAINER: _places.Container("docker", CONTAINER, "engine")} if found else {}

    monkeypatch.setattr(_containers, "Tracker", Tracker)
    monkeypatch.setattr(_members.time, "monotonic", lambda: clock[0])
    members = follow(unit)
    members.renew(_systemd.UnitState("x.service", active_state=active, sub_state="exited", invocation_id="a"))
    assert (len(asked), members.unknown_container, members.unsure, members.late) == expected


def test_who_listens_in_networks_of_the_unit_is_seen(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "7" / "net"
    folder.mkdir(parents=True)
    row = "  0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1 0 100 0 0 10 0\n"
    (folder / "tcp").write_text("  sl  local_address rem_address   st\n" + row)
    members = _members.Members(proc=str(tmp_path))
    members._networks = {5: 7, 6: 8}  # the second has ended
    assert [(one.address, one.port, one.inode) for one in members.listening()] == [("0.0.0.0", 8000, 77)]


@pytest.mark.parametrize("way", ["mount_namespace", "session", "process_group"])
@pytest.mark.parametrize(
    ("cgroup", "uid", "owned"),
    [(GROUP, 0, True), ("/system.slice/y.service", 0, False), (GROUP, 65534, False), ("/", 0, True)],
)
def test_what_weak_evidence_finds_in_another_unit_is_not_the_units(
    unit: Unit, monkeypatch: pytest.MonkeyPatch, way: str, cgroup: str, uid: int, owned: bool
) -> None:
    main, other = unit.start(), unit.start()

    def of_unit(table: _processes.Table, *_arguments: t.Any, **_options: t.Any) -> _ownership.Owned:
        found = _ownership.Owned()
        for pid, place, user, by in ((main.pid, GROUP, 0, "main_pid"), (other.pid, cgroup, uid, way)):
            process = table.get(pid)
            assert process is not None
            process.cgroup, process.uid = place, user
            found.add(process, by, by == "main_pid")
        return found

    monkeypatch.setattr(_ownership, "of_unit", of_unit)
    members = follow(unit)
    members.renew(unit.state(main.pid))
    assert (other.pid in members.pids) is owned
    assert main.pid in members.pids
