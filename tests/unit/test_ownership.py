# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import grp
import inspect
import json
import pathlib
import re
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _accounts,
    _ownership,
    _service,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._places import Container
from ansible_collections.gpuops.serving.plugins.module_utils._processes import TICKS, Process, ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState, parse_show
from ansible_collections.gpuops.serving.plugins.modules import process_tree_stop

HERE = "/system.slice/qwen.service"
MARK = 777


def process(pid: int, ppid: int = 1, **facts: t.Any) -> Process:
    return Process(
        ref=ProcessRef(pid, facts.get("start", 100)),
        ppid=ppid,
        pgrp=facts.get("pgrp", pid),
        session=facts.get("session", pid),
        state=facts.get("state", "S"),
        name=facts.get("name", "p%d" % pid),
        uid=facts.get("uid", 0),
        gids=facts.get("gids", (0,)),
        cgroup=facts.get("cgroup", "/"),
        threads=1,
        kernel_thread=facts.get("kernel_thread", False),
        cpu_ticks=0,
    )


BASE = [
    process(1, 0, pgrp=0, session=0),
    process(2, 0, pgrp=0, session=0, kernel_thread=True),
    process(3, 2, pgrp=0, session=0, kernel_thread=True),
    # Children of an init that never made a session: many hosts of containers look like this.
    process(50, 1, pgrp=0, session=0),
    process(51, 50, pgrp=51, session=0),
    process(60, 1, cgroup="/system.slice/ssh.service"),
    process(61, 60, cgroup="/user.slice/user-0.slice/session-1.scope"),
    process(62, 61, session=61, pgrp=62, cgroup="/user.slice/user-0.slice/session-1.scope"),
]


@pytest.fixture(autouse=True)
def outsider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is none of the made-up processes, and nobody has a namespace unless a test says so."""
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1})
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda _pid: 4026531840)
    monkeypatch.setattr(_systemd, "_suspended", lambda: 0.0)
    _accounts.group_name.cache_clear()


def unit(**facts: t.Any) -> UnitState:
    return UnitState(**dict({"name": "qwen.service", "load_state": "loaded", "control_group": HERE}, **facts))


def pids(owned: _ownership.Owned) -> t.List[int]:
    return sorted(ref.pid for ref in owned.processes)


def ways(owned: _ownership.Owned, pid: int) -> t.List[str]:
    return next(found for ref, found in owned.processes.items() if ref.pid == pid)


def test_the_control_group_and_those_nested_in_it() -> None:
    table = Table(
        [
            *BASE,
            process(100, cgroup=HERE),
            process(101, cgroup=HERE + "/payload/worker"),
            process(102, cgroup=HERE + "-other"),
            process(103, cgroup="/system.slice/qwen.service.d"),
        ]
    )
    assert pids(_ownership.of_unit(table, unit())) == [100, 101]


def test_leftovers_of_a_unit_that_has_no_control_group_any_more() -> None:
    table = Table([*BASE, process(100, cgroup="/gpu.slice/gpu-a.slice/qwen.service")])
    assert pids(_ownership.of_unit(table, unit(control_group=""))) == [100]


@pytest.mark.parametrize(
    ("group", "ours"),
    [
        (HERE, True),
        (HERE + "/payload", True),
        (HERE + "/sub/deeper/init.scope", True),
        # What a manager inside a delegated group calls its parts is its own affair.
        (HERE + "/app.slice/other.service", True),
        (HERE + "/system.slice/docker-%s.scope" % ("a1" * 32), True),
        ("/moved.slice/qwen.service/payload", True),  # to another slice, since systemd was asked
        ("/_qwen.service", True),  # systemd puts a _ before a name that the kernel uses too
        ("/__qwen.service", False),
        (HERE + "-worker", False),
        (HERE[:-1], False),
        ("/system.slice/other.service/qwen.service", False),
        ("/system.slice/x.slice", False),
        ("/user.slice/user-5.slice/user@5.service/app.slice/qwen.service", False),
        ("/docker/%s/system.slice/qwen.service" % ("a1" * 32), False),
        ("/../qwen.service", False),
    ],
)
def test_nested_and_delegated_groups(group: str, ours: bool) -> None:
    assert pids(_ownership.of_unit(Table([*BASE, process(100, cgroup=group)]), unit())) == ([100] if ours else [])


@pytest.mark.parametrize("group", ["", "/"])
def test_the_root_control_group_is_never_an_ownership_set(group: str) -> None:
    assert pids(_ownership.of_unit(Table(BASE), unit(control_group=group))) == []


def test_a_unit_of_a_user_with_the_same_name_is_another_one() -> None:
    table = Table([*BASE, process(100, cgroup="/user.slice/user-7.slice/user@7.service/app.slice/qwen.service")])
    assert pids(_ownership.of_unit(table, unit())) == []


@pytest.mark.parametrize("own", [0, 4026531840, 4026532999])
def test_nothing_follows_from_a_namespace_that_everybody_shares(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    """Also not from one that cannot be read: unknown is not the same."""
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: own if pid == "self" else 4026531840)
    table = Table([*BASE, process(100, cgroup=HERE), process(101, 100)])
    assert pids(_ownership.of_unit(table, unit())) == [100, 101]
    assert pids(_ownership.of_pids(table, [ProcessRef(100, 100)])) == [100, 101]
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda _pid: 0)
    assert pids(_ownership.of_unit(table, unit())) == [100, 101]
    # Process 1 hides its namespace, as it does from an ordinary user: all others would look strange.
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: {1: 0, "self": 5}.get(pid, 4026531840))
    assert pids(_ownership.of_unit(table, unit())) == [100, 101]


def test_a_namespace_of_its_own_is_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = {100: 5, 101: 5, 102: 6}
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: strange.get(pid, 4026531840))
    table = Table([*BASE, process(100, cgroup=HERE), process(101), process(102)])
    owned = _ownership.of_unit(table, unit())
    assert pids(owned) == [100, 101]
    assert ways(owned, 101) == ["mount_namespace"]
    without = Table([*BASE, process(101), process(102), process(103)])
    strange[103] = 5
    later = _ownership.of_unit(without, unit(), previous=owned)
    assert pids(later) == [101, 103]
    assert ways(later, 101) == ["mount_namespace"]


def test_who_was_found_by_a_namespace_leads_to_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's shell in the service's namespace may enter the next one."""
    strange = {100: 5, 101: 5, 102: 6, 104: 7}
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: strange.get(pid, 4026531840))
    rows = [*BASE, process(100, cgroup=HERE), process(101), process(102), process(103, 101), process(104)]
    first = _ownership.of_unit(Table(rows), unit())
    assert (pids(first), first.namespaces) == ([100, 101, 103], {5})
    strange.update({101: 6, 103: 7})
    second = _ownership.of_unit(Table(rows), unit(), previous=first)
    assert (pids(second), second.namespaces) == ([100, 101, 103], {5})
    # A firmly owned one does lead to where it went.
    strange[100] = 6
    third = _ownership.of_unit(Table(rows), unit(), previous=second)
    assert (pids(third), ways(third, 102)) == ([100, 101, 102, 103], ["mount_namespace"])


def test_a_namespace_that_all_have_left_is_another_one_when_its_number_is_in_use_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strange = {100: 5, 101: 5, 102: 5}
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: strange.get(pid, 4026531840))
    first = _ownership.of_unit(Table([*BASE, process(100, cgroup=HERE), process(101)]), unit())
    kept = _ownership.of_unit(Table([*BASE, process(101), process(102)]), unit(), previous=first)
    assert (pids(kept), kept.namespaces) == ([101, 102], {5})
    for rows in ([process(102)], [process(101, start=900), process(102)], [process(101, state="Z"), process(102)]):
        assert 102 not in pids(_ownership.of_unit(Table([*BASE, *rows]), unit(), previous=first))
    empty = _ownership.of_unit(Table(BASE), unit(), previous=kept)
    assert (empty.namespaces, pids(_ownership.of_unit(Table([*BASE, process(102)]), unit(), previous=empty))) == (
        set(),
        [],
    )


def test_descent() -> None:
    table = Table([*BASE, process(100, cgroup=HERE), process(101, 100), process(102, 101), process(103)])
    owned = _ownership.of_unit(table, unit())
    assert pids(owned) == [100, 101, 102]
    assert owned.roots == [ProcessRef(100, 100)]


def test_session_and_group_of_an_owned_leader() -> None:
    table = Table([*BASE, process(100, cgroup=HERE), process(101, session=100), process(102, pgrp=100, session=9)])
    owned = _ownership.of_unit(table, unit())
    assert ways(owned, 101) == ["session"]
    assert ways(owned, 102) == ["process_group"]


def test_session_zero_is_no_session() -> None:
    table = Table([*BASE, process(100, 50, session=0, pgrp=0, cgroup=HERE)])
    assert pids(_ownership.of_unit(table, unit())) == [100]
    assert pids(_ownership.of_pids(table, [ProcessRef(100, 100)])) == [100]


def test_a_shell_and_what_else_it_started_are_not_owned() -> None:
    table = Table([*BASE, process(63, 62, session=61, pgrp=63), process(64, 62, session=61, pgrp=64)])
    assert pids(_ownership.of_pids(table, [ProcessRef(63, 100)])) == [63]


def test_a_session_whose_leader_is_dead_and_unknown_is_not_owned() -> None:
    table = Table([*BASE, process(100, session=99, pgrp=99, cgroup=HERE), process(101, session=99, pgrp=99)])
    assert pids(_ownership.of_unit(table, unit())) == [100]


def ended_main(start: int, ended: float) -> t.Tuple[Table, UnitState]:
    state = parse_show("qwen.service", "ExecMainPID=99\nExecMainExitTimestampMonotonic=%d\n" % (ended * 1e6))
    return Table([*BASE, process(101, session=99, pgrp=99, start=start)]), state


def test_the_session_of_the_dead_main_process() -> None:
    assert pids(_ownership.of_unit(*ended_main(start=10 * TICKS, ended=20))) == [101]


def test_a_later_session_with_the_number_of_the_dead_main_process() -> None:
    assert pids(_ownership.of_unit(*ended_main(start=30 * TICKS, ended=20))) == []


@pytest.mark.parametrize(("born", "proved"), [(19, True), (20, True), (21, False), (1010, False)])
def test_on_a_host_that_slept_only_what_is_sure_proves_a_session(
    monkeypatch: pytest.MonkeyPatch, born: int, proved: bool
) -> None:
    """systemd's clock stood still for 1000 s, before or after the end at its 20 s."""
    monkeypatch.setattr(_systemd, "_suspended", lambda: 1000.0)
    assert pids(_ownership.of_unit(*ended_main(start=born * TICKS, ended=20))) == ([101] if proved else [])


def test_stamps_that_are_no_numbers_prove_nothing() -> None:
    for text in (
        "ExecMainPID=99\nExecMainExitTimestampMonotonic=\n",
        "ExecMainPID=x\nExecMainExitTimestampMonotonic=9\n",
    ):
        table, _state = ended_main(start=1, ended=20)
        assert pids(_ownership.of_unit(table, parse_show("qwen.service", text))) == []


def test_what_an_earlier_look_found_stays_owned() -> None:
    first = _ownership.of_unit(Table([*BASE, process(100, cgroup=HERE), process(101, 100, session=100)]), unit())
    later = Table([*BASE, process(101, 1, session=100), process(102, 1, session=100), process(103, 101)])
    owned = _ownership.of_unit(later, unit(control_group=""), previous=first)
    assert pids(owned) == [101, 102, 103]
    assert ways(owned, 101) == ways(first, 101) == ["descendant", "session"]
    reused = Table([*BASE, process(101, 1, session=100, start=999)])
    assert pids(_ownership.of_pids(reused, [], previous=first)) == [101]  # by its session, not by its number
    alone = Table([*BASE, process(101, 1, start=999)])
    assert pids(_ownership.of_pids(alone, [], previous=first)) == []
    led = Table([*BASE, process(100, start=999), process(105, 100, session=100, start=999)])
    assert pids(_ownership.of_pids(led, [], previous=first)) == []


def test_the_mark_is_found_wherever_it_went() -> None:
    table = Table([*BASE, process(100, gids=(0, MARK), cgroup="/system.slice/run-1.scope"), process(101, gids=(0,))])
    owned = _ownership.of_unit(table, unit(), mark_gid=MARK)
    assert pids(owned) == [100]
    assert ways(owned, 100) == ["mark"]


def test_weak_evidence_does_not_lead_to_more_of_it() -> None:
    table = Table(
        [
            *BASE,
            process(100, cgroup=HERE),
            process(101, session=100),  # weak
            process(102, pgrp=101),  # of a group that a weak one leads
            process(103, 101),  # a child of the weak one
            process(104, session=103),
        ]
    )
    owned = _ownership.of_unit(table, unit())
    assert pids(owned) == [100, 101, 103]
    assert {ref.pid for ref in owned.firm} == {100}


def test_kernel_threads_process_one_and_the_caller_are_never_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1, 100, 101})
    refs = [ProcessRef(pid, 100) for pid in (1, 2, 100)]
    table = Table([*BASE, process(100, cgroup=HERE, gids=(MARK,)), process(101, 100), process(102, 100)])
    assert pids(_ownership.of_pids(table, refs)) == []
    assert pids(_ownership.of_unit(table, unit(main_pid=1, control_pid=100), mark_gid=MARK)) == []
    monkeypatch.setattr(_ownership, "own_line", lambda _table: set())
    odd = [process(1, 0, cgroup=HERE, gids=(MARK,)), process(2, 0, cgroup=HERE, kernel_thread=True, gids=(MARK,))]
    assert (
        pids(_ownership.of_unit(Table([*odd, process(3, 2, kernel_thread=True)]), unit(main_pid=2), mark_gid=MARK))
        == []
    )
    nobody = _ownership.Owned(leaders={0, 1})
    assert pids(_ownership.of_pids(Table(BASE), [], previous=nobody)) == []


def test_strangers_are_those_whom_only_weak_evidence_names() -> None:
    table = Table(
        [
            *BASE,
            process(100, cgroup=HERE, uid=5),
            process(101, session=100, uid=5),
            process(102, session=100, uid=6),
            process(103, 100, uid=7),
            process(104, cgroup=HERE, uid=8),
            process(105, session=100, uid=5, cgroup="/system.slice/db.service"),
            process(106, 102, uid=6),
        ]
    )
    owned = _ownership.of_unit(table, unit())
    assert {ref.pid for ref in _ownership.foreign(table, owned)} == {102, 105, 106}
    assert {ref.pid for ref in _ownership.foreign(table, owned, any_user=True)} == {105}


@pytest.mark.parametrize(
    "place",
    [
        "/user.slice/user-5.slice/user@5.service/init.scope",
        "/user.slice/user-5.slice/user@5.service/app.slice/run-r2.scope",
    ],
)
def test_the_manager_of_a_user_who_is_a_member_of_the_group_is_left_alone(place: str) -> None:
    table = Table([*BASE, process(100, cgroup=HERE, uid=5), process(110, gids=(900,), uid=5, cgroup=place)])
    owned = _ownership.of_unit(table, unit(), mark_gid=900)
    assert {ref.pid for ref in _ownership.foreign(table, owned, any_user=True)} == {110}


@pytest.mark.parametrize(
    "place",
    [
        "/handmade",
        "/slurm/uid_0/job_1",
        "/user.slice/user-0.slice/session-7.scope",
        "/user.slice/user-0.slice/user@0.service/app.slice/x.service",
        "/system.slice/run-r1.scope",
        "/docker/" + "b2" * 32,
    ],
)
def test_a_shell_that_entered_the_namespace_is_a_stranger(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: 5 if pid in (100, 101, 102) else 4026531840)
    table = Table(
        [
            *BASE,
            process(100, cgroup=HERE),
            process(101, 62, cgroup=place),
            process(103, 101, cgroup=place),
            process(102),
        ]
    )
    owned = _ownership.of_unit(table, unit())
    assert pids(owned) == [100, 101, 102, 103]
    assert {ref.pid for ref in _ownership.foreign(table, owned, any_user=True)} == {101, 103}


def test_who_shares_the_session_scope_of_a_server_started_by_hand_is_none() -> None:
    scope = "/user.slice/user-0.slice/session-7.scope"
    table = Table([*BASE, process(100, cgroup=scope), process(101, session=100, cgroup=scope)])
    owned = _ownership.of_pids(table, [ProcessRef(100, 100)])
    assert pids(owned) == [100, 101]
    assert _ownership.foreign(table, owned) == set()


def test_the_unit_itself_tells_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"gpuops-abc": 900, "gpuops-def": 901, "video": 44}
    monkeypatch.setattr(_ownership, "group_number", numbers.get)
    monkeypatch.setattr(_ownership, "group_name", {number: name for name, number in numbers.items()}.get)
    state = unit(raw={"SupplementaryGroups": "gpuops-abc 901 video 44 gpuops-none"})
    assert _ownership.marks_of(state, 950) == {900, 901, 950}
    worker = process(101, gids=(900,), cgroup="/system.slice/run-r1.scope")
    table = Table([*BASE, process(100, cgroup=HERE), worker, process(102, gids=(44,)), process(103, gids=(950,))])
    owned = _ownership.of_unit(table, state)
    assert (pids(owned), ways(owned, 101), owned.marks) == ([100, 101], ["mark"], {900, 901})
    # Once the unit's file is gone, what was known goes on.
    later = _ownership.of_unit(Table([*BASE, worker, process(110, gids=(901,))]), unit(), previous=owned)
    assert pids(later) == [101, 110]


@pytest.mark.parametrize(
    ("place", "ours"),
    [
        ("/system.slice/engine@2.service", False),
        ("/system.slice/engine@2.service/nested", False),
        ("/system.slice/run-r1.scope", True),
        ("/system.slice", True),
        (HERE + "/nested", True),
    ],
)
def test_a_mark_that_another_unit_gives_as_well_proves_nothing_there(place: str, ours: bool) -> None:
    table = Table([*BASE, process(100, cgroup=HERE), process(101, gids=(900,), cgroup=place)])
    assert pids(_ownership.of_unit(table, unit(), mark_gid=900)) == ([100, 101] if ours else [100])


def test_who_logs_in_with_the_mark_is_left_alone() -> None:
    scope = "/user.slice/user-5.slice/session-7.scope"
    table = Table(
        [
            *BASE,
            process(100, cgroup=HERE, gids=(900,), uid=5),
            process(101, gids=(900,), uid=5, cgroup="/system.slice/run-r1.scope"),
            process(110, 60, gids=(900,), uid=5, cgroup=scope),
            process(111, 110, gids=(900,), uid=5, cgroup=scope),
        ]
    )
    owned = _ownership.of_unit(table, unit(), mark_gid=900)
    assert (ways(owned, 101), ways(owned, 110)) == (["mark"], ["mark"])
    assert {ref.pid for ref in owned.firm} == {100, 101}
    assert {ref.pid for ref in _ownership.foreign(table, owned, any_user=True)} == {110, 111}


def test_namespaces_of_all_are_asked_for_only_where_one_of_the_service_is_strange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: t.List[t.Union[int, str]] = []
    monkeypatch.setattr(_ownership, "_mount_namespace", lambda pid: asked.append(pid) or (5 if pid == 104 else 4026))
    others = [process(200 + n) for n in range(20)]
    _ownership.of_unit(Table([*BASE, process(100, cgroup=HERE), process(101, 100), *others]), unit())
    assert sorted(map(str, asked)) == ["1", "100", "101", "self"]
    asked.clear()
    _ownership.of_unit(Table([*BASE, process(104, cgroup=HERE), *others]), unit())
    assert {200, 219, 104} <= set(asked)


A, B = "a1" * 32, "b2" * 32
# Titles

TITLES = re.compile("^VLLM::")
ENGINE = "VLLM::Worker_TP"
SESSION = "/user.slice/user-5.slice/session-7.scope"
SCOPE = "/system.slice/run-r1.scope"
MANAGER = "/user.slice/user-5.slice/user@5.service/init.scope"


@pytest.fixture(autouse=True)
def definitions(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """No service is defined on the made-up host unless a test says so."""
    monkeypatch.setattr(_service, "FOLDER", str(tmp_path))
    monkeypatch.setattr(_service.names, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(_service.load, "__defaults__", (str(tmp_path),))
    return tmp_path


def define(folder: pathlib.Path, name: str, **facts: t.Any) -> None:
    (folder / (name + ".json")).write_text(json.dumps(dict(facts, name=name)))


def titled(*rows: Process, raw: t.Optional[t.Dict[str, str]] = None, **facts: t.Any) -> _ownership.Owned:
    state = unit(raw={"User": "5"} if raw is None else raw)
    return _ownership.of_unit(Table([*BASE, *rows]), state, titles=TITLES, **facts)


def orphan(pid: int = 101, **facts: t.Any) -> Process:
    return process(pid, **dict({"name": ENGINE, "uid": 5, "cgroup": "/"}, **facts))


FRONT = process(100, cgroup=HERE, uid=5, name="python3")


@pytest.mark.parametrize("front", [[FRONT], []], ids=["alive", "dead"])
def test_an_orphan_with_the_title_and_nowhere_in_particular_is_owned_with_its_children(front: t.List[Process]) -> None:
    owned = titled(*front, orphan(), process(102, 101, uid=5), process(103, session=101, pgrp=101, uid=5))
    assert pids(owned) == [*[p.pid for p in front], 101, 102]
    assert ways(owned, 101) == ["title"]
    assert ways(owned, 102) == ["descendant"]
    assert {ref.pid for ref in owned.firm} == {p.pid for p in front}
    assert owned.suspects == []
    assert _ownership.foreign(Table([*BASE, *front, orphan()]), owned) == set()


def test_without_titles_nobody_is_looked_for_by_name() -> None:
    owned = _ownership.of_unit(Table([*BASE, FRONT, orphan()]), unit(raw={"User": "5"}))
    assert (pids(owned), owned.suspects) == ([100], [])


def test_an_orphan_of_the_manager_of_its_user_is_one_too() -> None:
    manager = process(200, uid=5, name="systemd", cgroup=MANAGER)
    assert pids(titled(FRONT, manager, orphan(ppid=200))) == [100, 101]
    # What is no manager, or that of somebody else, has started it and not inherited it.
    for other in (
        process(200, uid=5, name="systemd", cgroup=SESSION),
        process(200, uid=5, name="bash", cgroup=MANAGER),
        process(200, uid=6, name="systemd", cgroup=MANAGER),
    ):
        assert pids(titled(FRONT, other, orphan(ppid=200))) == [100]


@pytest.mark.parametrize(
    "stranger",
    [
        orphan(uid=6),  # of another user
        orphan(name="VLLM"),
        orphan(ppid=60),  # somebody's living child
        orphan(ppid=0),  # whose parent cannot be seen
        orphan(cgroup="/system.slice/other.service"),
        orphan(cgroup="/system.slice/other.service/payload"),
        orphan(cgroup="/user.slice/user-5.slice/user@5.service/app.slice/x.service"),
        orphan(cgroup="/docker/" + "a1" * 32),
        orphan(cgroup="/lxc.payload.web/x"),
        orphan(state="Z"),
        orphan(kernel_thread=True),
        orphan(kernel_thread=True, cgroup=SCOPE),
        orphan(gids=(5, 888)),  # with the mark of another service, by its definition
    ],
)
@pytest.mark.parametrize("front", [[FRONT], []], ids=["alive", "dead"])
def test_who_cannot_be_the_service_s_is_not_even_suspected(
    definitions: pathlib.Path, front: t.List[Process], stranger: Process
) -> None:
    define(definitions, "other", unit="other.service", engine="sglang", mark_gid=888)
    define(definitions, "qwen", unit="qwen.service", engine="vllm", mark_gid=MARK)
    owned = titled(*front, stranger, mark_gid=MARK)
    assert (pids(owned), owned.suspects) == ([p.pid for p in front], [])


@pytest.mark.parametrize(
    "place",
    [
        SESSION,
        SCOPE,
        "/htcondor/slot1_2",
        "/slurm/uid_5/job_7",
        "",
        "/..",
        "/init.scope",
        "/a.slice/x",
        "/user.slice/user-5.slice/user@5.service/app.slice/run-r7.scope",
    ],
)
@pytest.mark.parametrize("front", [[FRONT], []], ids=["alive", "dead"])
def test_one_that_is_apart_is_named_only(front: t.List[Process], place: str) -> None:
    owned = titled(*front, orphan(cgroup=place))
    assert pids(owned) == [p.pid for p in front]
    assert owned.suspects == [ProcessRef(101, 100)]


def test_a_suspect_that_the_mark_tells_is_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grp.getgrgid", lambda _gid: grp.struct_group(("gpuops-0123456789ab", "x", MARK, [])))
    owned = titled(FRONT, orphan(cgroup=SCOPE, gids=(5, MARK)), mark_gid=MARK)
    assert (ways(owned, 101), owned.suspects) == (["mark"], [])
    stranger = titled(FRONT, orphan(gids=(5, MARK)), mark_gid=MARK + 1)
    assert (pids(stranger), stranger.suspects) == ([100], [])


@pytest.mark.parametrize(
    "other",
    [
        orphan(300, cgroup="/system.slice/other.service"),  # its worker
        orphan(300, ppid=299, cgroup="/system.slice/other.service"),
        orphan(300, ppid=299, cgroup=SESSION),  # of an engine that somebody runs by hand
        orphan(300, gids=(5, 888)),
    ],
)
@pytest.mark.parametrize("front", [[FRONT], []], ids=["alive", "dead"])
@pytest.mark.parametrize("place", ["/", SCOPE, "/system.slice"])
def test_beside_another_service_of_the_engine_and_user_nothing_is_taken_by_its_title(
    definitions: pathlib.Path, front: t.List[Process], other: Process, place: str
) -> None:
    """An orphan may be either's, be its service alive or not: of two that look alike neither takes the other's."""
    define(definitions, "other", unit="other", engine="sglang", mark_gid=888)
    define(definitions, "qwen", unit="qwen", engine="vllm", mark_gid=MARK)
    rows = [*front, other, orphan(cgroup=place), process(299, uid=5, cgroup=other.cgroup)]
    owned = titled(*rows, mark_gid=MARK)
    assert pids(owned) == [p.pid for p in front]
    assert owned.suspects == [ProcessRef(101, 100)]


@pytest.mark.parametrize(
    ("other", "own", "taken"),
    [("vllm", "vllm", False), ("sglang", "vllm", True), (None, "vllm", False), ("sglang", None, False)],
)
def test_a_dead_service_of_the_same_engine_is_known_by_its_definition(
    definitions: pathlib.Path, other: t.Optional[str], own: t.Optional[str], taken: bool
) -> None:
    define(definitions, "other", unit="other", engine=other)
    if own:
        define(definitions, "qwen", unit="qwen.service", engine=own)
    owned = titled(FRONT, orphan())
    assert pids(owned) == ([100, 101] if taken else [100])
    assert owned.suspects == ([] if taken else [ProcessRef(101, 100)])


def test_a_definition_that_cannot_be_read_may_be_of_the_same_engine(definitions: pathlib.Path) -> None:
    define(definitions, "qwen", unit="qwen.service", engine="vllm")
    assert pids(titled(FRONT, orphan())) == [100, 101]
    (definitions / "broken.json").write_text("{")
    owned = titled(FRONT, orphan())
    assert (pids(owned), owned.suspects) == ([100], [ProcessRef(101, 100)])


@pytest.mark.parametrize(
    ("began", "ended", "taken"),
    [(0.5, 0, True), (0.5, 2.0, True), (2.5, 0, False), (0.1, 0.2, True), (0.1, 0.15, True), (0, 0, False)],
)
def test_only_one_of_the_last_life_is_taken(began: float, ended: float, taken: bool) -> None:
    raw = {"User": "5", "ExecMainStartTimestampMonotonic": "%d" % (began * 1e6)}
    raw["ExecMainExitTimestampMonotonic"] = "%d" % (ended * 1e6)
    owned = titled(orphan(start=int(1.0 * TICKS)), raw=raw)
    assert pids(owned) == ([101] if taken else [])
    assert owned.suspects == ([] if taken else [ProcessRef(101, int(1.0 * TICKS))])
    late = titled(orphan(start=int(3.5 * TICKS)), raw=raw)
    assert pids(late) == ([101] if began > 0 and ended == 0 else [])


def test_on_a_host_that_slept_a_title_is_taken_only_of_what_is_surely_of_the_last_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = {"User": "5", "ExecMainStartTimestampMonotonic": "10000000"}
    rows = [orphan(start=11 * TICKS), orphan(102, start=1011 * TICKS)]
    assert pids(titled(*rows, raw=raw)) == [101, 102]
    monkeypatch.setattr(_systemd, "_suspended", lambda: 1000.0)
    owned = titled(*rows, raw=raw)
    assert (pids(owned), [ref.pid for ref in owned.suspects]) == ([102], [101])


def test_a_directory_server_is_asked_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[int] = []

    def unknown(gid: int) -> t.NoReturn:
        asked.append(gid)
        raise KeyError(gid)

    monkeypatch.setattr("grp.getgrgid", unknown)
    rows = [orphan(pid, gids=(5, 10, 11, 12)) for pid in range(101, 121)]
    owned = None
    for _look in range(3):
        owned = titled(FRONT, *rows, orphan(300, cgroup=SCOPE, gids=(5, 12)), previous=owned)
    assert sorted(asked) == [5, 10, 11, 12]


def test_of_a_dead_service_the_user_is_the_unit_s() -> None:
    assert pids(titled(orphan(uid=0), raw={"User": ""})) == [101]
    assert pids(titled(orphan(uid=0), raw={"User": "root"})) == [101]
    for raw in ({}, {"User": "nobody-of-this-name"}, {"User": "6"}):
        owned = titled(orphan(uid=0), raw=raw)
        assert (pids(owned), owned.suspects) == ([], [])
    absent = UnitState("qwen.service", raw={"User": ""})
    assert pids(_ownership.of_unit(Table([*BASE, orphan(uid=0)]), absent, titles=TITLES)) == []
    # While anything lives, its users count and not the unit's.
    assert pids(titled(FRONT, orphan(uid=6), raw={"User": "6"})) == [100]


def test_the_caller_is_not_taken_for_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "own_line", lambda _table: {1, 101})
    owned = titled(FRONT, orphan(), orphan(102, cgroup=SCOPE))
    assert (pids(owned), owned.suspects) == ([100], [ProcessRef(102, 100)])


def test_what_a_title_told_stays_owned() -> None:
    first = titled(FRONT, orphan())
    later = titled(orphan(cgroup=SCOPE), orphan(300, ppid=299), previous=first)
    assert pids(later) == [101]
    assert later.suspects == []


# Containers and spared processes


def test_whoever_is_in_a_container_of_the_unit_is_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = "/system.slice/docker-%s.scope/container" % A
    rows = [
        FRONT,
        process(101, 90, cgroup=inside, uid=7),
        process(102, 101, cgroup=inside + "/sub", uid=8, session=101),
        process(103, cgroup="/system.slice/docker-%s.scope" % B),
        process(104, 101, cgroup="/docker/%s/docker/%s" % (A, B)),
        process(105, cgroup="/machine.slice/libpod-conmon-%s.scope" % A),
        process(90, cgroup="/system.slice/docker.service"),
    ]
    mine = {A: Container("docker", A, "engine")}
    owned = _ownership.of_unit(Table([*BASE, *rows]), unit(), containers=mine)
    assert pids(owned) == [100, 101, 102, 104]
    assert ways(owned, 101) == ["container"]
    assert ways(owned, 104) == ["container", "descendant"]
    assert ProcessRef(101, 100) in owned.firm
    assert owned.containers == mine
    assert _ownership.foreign(Table([*BASE, *rows]), owned) == set()
    later = _ownership.of_unit(Table([*BASE, *rows[1:], process(106, cgroup=inside)]), unit(), previous=owned)
    assert pids(later) == [101, 102, 104, 106]
    assert later.containers == mine
    assert pids(_ownership.of_unit(Table([*BASE, *rows]), unit())) == [100]


def test_a_machine_is_not_a_container_of_another_kind_with_its_name() -> None:
    rows = [
        process(101, cgroup="/machine.slice/machine-web.scope/payload"),
        process(102, cgroup="/machine.slice/web.scope/payload/init.scope"),
        process(103, cgroup="/lxc.payload.web/init.scope"),
        process(104, cgroup="/lxc/web"),
        process(105, cgroup="/system.slice/web.scope"),
    ]
    mine = {"web": Container("nspawn", "web", "web")}
    assert pids(_ownership.of_unit(Table([*BASE, *rows]), unit(), containers=mine)) == [101, 102]


def test_nothing_follows_from_a_spared_process() -> None:
    rows = [
        process(100, uid=5, cgroup="/system.slice/x.service"),
        process(101, 100, uid=5),
        process(102, session=100, uid=5),
        process(110, uid=6, cgroup="/system.slice/y.service"),
        process(111, 110, uid=6),
    ]
    refs = [ProcessRef(110, 100)]
    spared = {ProcessRef(100, 100): "allowed"}
    table = Table([*BASE, *rows])
    owned = _ownership.of_pids(table, refs, found_by="gpu_holder", spared=spared)
    assert pids(owned) == [100, 110, 111]
    assert ways(owned, 100) == ways(owned, 110) == ["gpu_holder"]
    assert owned.spared == spared
    assert owned.roots == refs
    assert owned.users == {6}
    assert owned.leaders == {110, 111}
    assert _ownership.foreign(table, owned) == set()
    later = _ownership.of_pids(table, [], previous=owned)
    assert (pids(later), later.spared) == ([100, 110, 111], spared)
    # Not even as a child of an owned one.
    child = Table([*BASE, process(110), process(120, 110), process(121, 120)])
    owned = _ownership.of_pids(child, refs, spared={ProcessRef(120, 100): "allowed"})
    assert pids(owned) == [110, 120]
    assert {ref.pid for ref in owned.firm} == {110}


# Places

SLICE = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod55c6c714_b240_4dec_9a45_57b61696ab6e.slice"
USER = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize(
    ("path", "unit_name", "container"),
    [
        # without a container
        ("/system.slice/qwen.service", "qwen.service", None),
        ("/system.slice/qwen.service/payload", "qwen.service", None),
        ("/a.slice/a-b.slice/run-r1.scope", "run-r1.scope", None),
        ("/system.slice/_cgroup.service", "cgroup.service", None),
        (USER + "/app.slice/x.service", "user@1000.service", None),
        ("/init.scope", "init.scope", None),
        ("/../other.service", None, None),  # seen from a cgroup namespace: nobody knows what lies above
        ("/", None, None),
        ("", None, None),
        ("/system.slice/docker.service", "docker.service", None),
        ("/system.slice/docker-%s.scope" % ("a1" * 31), "docker-%s.scope" % ("a1" * 31), None),
        # docker: drivers systemd and cgroupfs, rootless, a group inside
        ("/system.slice/docker-%s.scope" % A, "docker-%s.scope" % A, A),
        ("/docker/" + A, None, A),
        (USER + "/user.slice/docker-%s.scope" % A, "user@1000.service", A),
        ("/system.slice/docker-%s.scope/init.scope" % A, "docker-%s.scope" % A, A),
        # podman: system, rootless, cgroupfs, in a unit of its own; and its monitors
        ("/machine.slice/libpod-%s.scope/container" % A, "libpod-%s.scope" % A, A),
        (USER + "/user.slice/libpod-%s.scope/container" % A, "user@1000.service", A),
        ("/libpod_parent/libpod-" + A, None, A),
        ("/system.slice/c.service/libpod-payload-" + A, "c.service", A),
        ("/system.slice/c.service/runtime", "c.service", None),
        ("/machine.slice/libpod-conmon-%s.scope" % A, "libpod-conmon-%s.scope" % A, None),
        ("/libpod_parent/conmon", None, None),
        ("/machine.slice/machine-libpod_pod_%s.slice/libpod-%s.scope" % (B, A), "libpod-%s.scope" % A, A),
        # kubernetes: containerd and cri-o, each with both drivers; nerdctl
        (SLICE + "/cri-containerd-%s.scope" % A, "cri-containerd-%s.scope" % A, A),
        (SLICE + "/crio-%s.scope/container" % A, "crio-%s.scope" % A, A),
        (SLICE + "/crio-conmon-%s.scope" % A, "crio-conmon-%s.scope" % A, None),
        ("/kubepods/burstable/pod55c6c714-b240-4dec-9a45-57b61696ab6e/" + A, None, A),
        ("/kubepods/besteffort/pod55c6c714-b240-4dec-9a45-57b61696ab6e/crio-" + A, None, A),
        ("/kubepods/besteffort/pod55c6c714-b240-4dec-9a45-57b61696ab6e/crio-conmon-" + A, None, None),
        ("/system.slice/containerd.service/kubepods-podx.slice:cri-containerd:" + A, "containerd.service", A),
        (USER + "/user.slice/nerdctl-%s.scope" % A, "user@1000.service", A),
        ("/default/" + A, None, A),
        # LXC, LXD and Proxmox VE; and its monitors
        ("/lxc.payload.web/system.slice/x.service", None, "web"),
        ("/lxc.payload/web/init.scope", None, "web"),
        ("/lxc.payload/lxc/system.slice/x.service", None, "lxc"),
        ("/lxc/101/ns/system.slice/x.service", None, "101"),
        ("/lxc/web", None, "web"),
        (USER + "/app.slice/lxc.payload.web", "user@1000.service", "web"),
        ("/lxc.monitor.web", None, None),
        ("/lxc.monitor/101", None, None),
        ("/lxc", None, None),
        # systemd-nspawn and other machines; and what runs them
        ("/machine.slice/machine-web\\x2d1.scope/payload/init.scope", "machine-web\\x2d1.scope", "web-1"),
        ("/machine.slice/machine-web.scope", "machine-web.scope", "web"),
        ("/machine.slice/machine-web.scope/supervisor", "machine-web.scope", None),
        ("/machine.slice/web.scope/payload", "web.scope", "web"),  # not registered
        ("/machine.slice/web.scope/payload/init.scope", "web.scope", "web"),
        ("/machine.slice/web.scope/supervisor", "web.scope", None),
        ("/system.slice/run-r1.scope/sub", "run-r1.scope", None),
        ("/machine.slice/systemd-nspawn@web.service/payload/x", "systemd-nspawn@web.service", "web"),
        ("/machine.slice/systemd-nspawn@web.service/supervisor", "systemd-nspawn@web.service", None),
        ("/machine.slice/machine-qemu\\x2d1\\x2dvm.scope", "machine-qemu\\x2d1\\x2dvm.scope", None),
        # one in another: the inner one
        ("/docker/%s/kubelet.slice/kubelet-kubepods.slice/cri-containerd-%s.scope" % (A, B), None, B),
        ("/lxc.payload.web/system.slice/docker-%s.scope" % A, None, A),
        ("/docker/%s/machine.slice/machine-web.scope/payload" % A, None, "web"),
        ("/docker/%s/machine.slice/libpod-conmon-%s.scope" % (A, B), None, A),
        # names that somebody made up
        ("/lxc.payload.a b", None, None),
        ("/lxc/\udcff", None, None),
    ],
)
def test_the_unit_and_container_of_a_process(path: str, unit_name: str | None, container: str | None) -> None:
    assert _ownership.attribute(process(5, cgroup=path)) == (unit_name, container)


def test_a_cgroup_of_any_name_gives_one_printable_line() -> None:
    """Names of real units stay what they are; whoever may make a cgroup may call it anything."""
    for name, shown in (
        ("getty@tty1.service", "getty@tty1.service"),
        ("dev-disk\\x2dby.mount", "dev-disk\\x2dby.mount"),
        ("a\udcffb\x1b[2J.service", "a\\udcffb\\x1b[2J.service"),
    ):
        assert _ownership.attribute(process(5, cgroup="/system.slice/" + name))[0] == shown


def test_marks() -> None:
    assert _ownership.check_mark(None) is None
    assert _ownership.check_mark(2000000) == 2000000
    for gid in (0, -1, 1):
        with pytest.raises(UsageError, match="is not an ownership mark"):
            _ownership.check_mark(gid)


def test_every_evidence_is_in_the_table_and_in_the_documentation() -> None:
    source = inspect.getsource(_ownership)
    words = set(re.findall(r'"(\w+)", (?:True|False|parent|not)', source)) | {
        "main_pid",
        "control_pid",
        "pid",
        "gpu_holder",
    }
    words |= {"session", "process_group"} if '"session" if' in source else set()
    returned = yaml.safe_load(process_tree_stop.RETURN)["processes"]["contains"]["found_by"]["description"]
    assert set(re.findall(r"V\((\w+)\)", str(returned))) == words
    table = str(_ownership.__doc__).split("====\n")[2]
    evidence = re.findall(r"^([a-z_, ]+?)  ", table, re.M)
    assert {word for row in evidence for word in row.split(", ")} - {"the same of a unit's dead main"} == words


def test_a_session_that_was_empty_is_somebody_elses_when_its_number_is_in_use_again() -> None:
    leader, worker = process(100, cgroup=HERE), process(101, 100, session=101, pgrp=101)
    first = _ownership.of_unit(Table([*BASE, leader, worker, process(102, session=100, pgrp=100)]), unit())
    assert pids(first) == [100, 101, 102]
    # While somebody is in it the number stays: who is born into it then belongs to it.
    orphans = [worker, process(102, session=100, pgrp=100), process(103, session=100, pgrp=100)]
    second = _ownership.of_unit(Table([*BASE, *orphans]), unit(), previous=first)
    assert pids(second) == [101, 102, 103]
    third = _ownership.of_unit(Table([*BASE, worker]), unit(), previous=second)
    later = process(104, session=100, pgrp=100, start=900)
    assert pids(_ownership.of_unit(Table([*BASE, worker, later]), unit(), previous=third)) == [101]
    # Nor does one that a stranger leads, when he is gone again.
    stranger = process(100, start=900)
    third = _ownership.of_unit(Table([*BASE, worker, stranger]), unit(), previous=second)
    assert pids(_ownership.of_unit(Table([*BASE, worker, later]), unit(), previous=third)) == [101]


def test_nothing_follows_from_a_stranger_who_is_left_alone() -> None:
    front = process(100, uid=7, cgroup=HERE)
    stranger, child = process(101, pgrp=100, session=50), process(102, 101, uid=7)
    grandchild, member = process(103, 102, uid=7), process(104, 101, uid=7, session=100, pgrp=104)
    table = Table([*BASE, front, stranger, child, grandchild, member])
    owned = _ownership.of_unit(table, unit())
    assert sorted(ref.pid for ref in _ownership.foreign(table, owned)) == [101, 102, 103]
    assert _ownership.foreign(table, owned, any_user=True) == set()
