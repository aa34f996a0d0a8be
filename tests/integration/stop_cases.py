# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Real processes are stopped, and nothing else is.

``test_stop.py`` runs this file in a process id namespace of its own: a mistake in what belongs to a service must not
be able to reach the machine that finds it. Every signal to a process that the test did not grow is a failure, and
every bystander must come through untouched.
"""

from __future__ import annotations

import os
import pathlib
import signal
import tempfile
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _inside, _ownership, _processes, _selection
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._processes import ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._selection import Refused
from ansible_collections.gpuops.serving.plugins.module_utils._stop import Options, Stopper
from ansible_collections.gpuops.serving.plugins.module_utils._survey import Scan
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from confined import fixture_confined  # noqa: F401
from grove import FOREST, Forest, cared_for

MARK = 987654
QUICK: t.Dict[str, t.Any] = {"grace": 2.0, "kill_grace": 2.0}


@pytest.fixture(name="forest")
def fixture_forest() -> t.Iterator[Forest]:
    # Not under tmp_path, whose parents only root may enter: processes of other users belong to the forest too.
    with tempfile.TemporaryDirectory(prefix="forest-") as name:
        os.chmod(name, 0o777)
        yield from cared_for(pathlib.Path(name))


def stop(forest: Forest, name: str = "front", check_mode: bool = False, **options: t.Any) -> t.Dict[str, t.Any]:
    scan = _selection.by_pid(forest.ref(name).pid, None, None)
    assert scan is not None
    return stopper(forest, scan, **dict(QUICK, **options)).run(check_mode)


def stopper(forest: Forest, scan: Scan, **options: t.Any) -> Stopper:
    return Stopper("it", scan, Options(**options), send=forest.send)


def unit(forest: Forest, front: str = "front") -> UnitState:
    """A unit with this main process and no control group to find the others by."""
    main = forest.ref(front).pid if forest.alive(front) else 0
    return UnitState("made-up.service", load_state="loaded", main_pid=main)


def by_name(result: t.Dict[str, t.Any], name: str) -> t.Dict[str, t.Any]:
    return next(process for process in result["processes"] if process["name"] == name)


def test_a_tree_ends_and_the_shell_that_started_it_gets_no_signal(forest: Forest) -> None:
    forest.grow(
        {
            "id": "shell",
            "session": True,
            "all_deaf": True,
            "children": [
                {"id": "decoy", "all_deaf": True},
                {
                    "id": "front",
                    "name": "front",
                    "children": [
                        {"id": "plain", "name": "plain"},
                        {"id": "own_session", "name": "own_session", "session": True},
                        {"id": "deaf", "name": "deaf", "deaf": True},
                    ],
                },
            ],
        }
    )
    result = stop(forest)
    assert result["verdict"] == "stopped"
    assert result["changed"] is True
    assert not any(forest.alive(name) for name in ("front", "plain", "own_session", "deaf"))
    assert forest.untouched("decoy")
    assert forest.untouched("shell")
    assert by_name(result, "front")["signals"] == ["TERM"]
    assert by_name(result, "front")["role"] == "root"
    assert by_name(result, "deaf")["signals"] == ["TERM", "KILL"]
    assert {process["outcome"] for process in result["processes"]} == {"ended"}
    assert result["survivors"] == []


def test_the_front_process_is_asked_first(forest: Forest) -> None:
    forest.grow({"id": "front", "slow": 0.5, "children": [{"id": "worker", "name": "worker", "deaf": True}]})
    scan = _selection.by_pid(forest.ref("front").pid, None, None)
    assert scan is not None
    sent: t.List[t.Tuple[int, int, bool]] = []

    def send(ref: ProcessRef, number: int) -> str:
        sent.append((ref.pid, number, forest.alive("front")))
        return forest.send(ref, number)

    assert Stopper("it", scan, Options(**QUICK), send=send).run()["verdict"] == "stopped"
    worker = forest.ref("worker").pid
    assert sent[0] == (forest.ref("front").pid, signal.SIGTERM, True)
    assert sent[1:] == [(worker, signal.SIGTERM, False), (worker, signal.SIGKILL, False)]


def test_all_at_once(forest: Forest) -> None:
    forest.grow({"id": "front", "deaf": True, "children": [{"id": "worker", "deaf": True}]})
    result = stop(forest, order="all", grace=0.5)
    assert [process["signals"] for process in result["processes"]] == [["TERM", "KILL"]] * 2
    assert result["elapsed"] < 1.5


def test_orphans_of_a_session_that_the_front_leads(forest: Forest) -> None:
    forest.grow(
        {
            "id": "front",
            "session": True,
            "children": [{"id": "double", "name": "double", "double": True}, {"id": "plain"}],
        }
    )
    result = stop(forest)
    assert result["verdict"] == "stopped"
    assert not forest.alive("double")
    assert "session" in by_name(result, "double")["found_by"]


def test_a_process_group_that_the_front_leads(forest: Forest) -> None:
    forest.grow({"id": "front", "group": True, "children": [{"id": "double", "name": "double", "double": True}]})
    result = stop(forest)
    assert not forest.alive("double")
    assert "process_group" in by_name(result, "double")["found_by"]


def test_a_daemonised_worker_is_found_by_its_mark_alone(forest: Forest) -> None:
    forest.grow(
        {"id": "front", "mark": MARK, "children": [{"id": "worker", "name": "worker", "daemon": True, "deaf": True}]},
        {"id": "decoy", "all_deaf": True},
    )

    def scan(table: Table, _state: t.Any, previous: t.Any) -> _ownership.Owned:
        return _ownership.of_unit(table, unit(forest), mark_gid=MARK, previous=previous)

    result = stopper(forest, scan, **QUICK).run()
    assert result["verdict"] == "stopped"
    assert by_name(result, "worker")["found_by"] == ["mark"]
    assert not forest.alive("worker")
    assert forest.untouched("decoy")


def test_without_the_mark_that_worker_would_not_be_found(forest: Forest) -> None:
    forest.grow({"id": "front", "mark": MARK, "children": [{"id": "worker", "daemon": True}]})
    assert stop(forest)["verdict"] == "stopped"
    assert forest.alive("worker")


def test_a_shared_mount_namespace_is_found_and_the_hosts_own_is_not_one(forest: Forest) -> None:
    forest.grow(
        {"id": "front", "mounts": True, "children": [{"id": "worker", "name": "worker", "daemon": True}]},
        {"id": "decoy", "all_deaf": True},
    )
    plain = _ownership.of_pids(Table.snapshot(), [forest.ref("front")])
    assert set(plain.processes) == {forest.ref("front")}
    owned = _ownership.of_unit(Table.snapshot(), unit(forest))
    assert set(owned.processes) == {forest.ref("front"), forest.ref("worker")}
    assert owned.processes[forest.ref("worker")] == ["mount_namespace"]
    bare = _ownership.of_unit(Table.snapshot(), unit(forest, "decoy"))
    assert set(bare.processes) == {forest.ref("decoy")}


def test_a_process_born_from_term_ends_too(forest: Forest) -> None:
    forest.grow(
        {"id": "front", "session": True, "on_term": {"id": "late", "name": "late", "deaf": True}}, wait=["front"]
    )
    result = stop(forest)
    assert result["verdict"] == "stopped", result
    assert not forest.alive("late")
    assert by_name(result, "late")["signals"][-1] == "KILL"


def test_a_stopped_process_gets_to_act_on_its_signal(forest: Forest) -> None:
    forest.grow({"id": "front", "children": [{"id": "worker", "name": "worker", "stopped": True}]})
    result = stop(forest, order="all")
    assert result["verdict"] == "stopped"
    assert by_name(result, "worker")["signals"] == ["TERM", "CONT"]
    assert signal.SIGTERM in forest.heard("worker")


def test_a_zombie_is_gone_and_its_parent_is_named(forest: Forest) -> None:
    forest.grow(
        {
            "id": "keeper",
            "name": "keeper",
            "all_deaf": True,
            "children": [{"id": "front", "name": "front", "zombie": True}],
        }
    )
    time.sleep(0.1)
    assert not forest.alive("front")
    assert _selection.by_pid(forest.ref("front").pid, None, None) is None
    result = stop(forest, "keeper", check_mode=True)
    assert [process["name"] for process in result["processes"]] == ["keeper"]
    assert result["zombies"] == [
        {"pid": forest.ref("front").pid, "name": "front", "parent": forest.ref("keeper").pid, "parent_name": "keeper"}
    ]


def test_a_dead_main_thread_with_living_threads_is_alive(forest: Forest) -> None:
    forest.grow({"id": "front", "threads": True})
    time.sleep(0.2)
    process = Table.snapshot().by_ref(forest.ref("front"))
    assert process is not None and process.state == "Z" and process.threads > 1
    assert forest.alive("front")
    assert stop(forest, grace=0.5)["verdict"] == "stopped"
    assert not forest.alive("front")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a b c", "a b c"),
        (") R 1 (x", ") R 1 (x"),
        ("two\nlines", "two\\nlines"),
        ("b\xffd", "b\\xffd"),
        ("back\\slash", "back\\\\slash"),
    ],
)
def test_names_of_any_bytes(forest: Forest, raw: str, shown: str) -> None:
    forest.grow({"id": "front", "name": raw})
    result = stop(forest)
    assert result["verdict"] == "stopped"
    assert [process["name"] for process in result["processes"]] == [shown]


def test_another_creation_time_is_another_process(forest: Forest) -> None:
    forest.grow({"id": "front", "all_deaf": True})
    ref = forest.ref("front")
    process = Table.snapshot().by_ref(ref)
    assert process is not None
    with pytest.raises(Refused, match='the process %d is ".*" now: it was created at' % ref.pid):
        _selection.by_pid(ref.pid, process.create_time - 60, None)
    assert _selection.by_pid(ref.pid, process.create_time, None) is not None
    assert _processes.send(ProcessRef(ref.pid, ref.start + 1), signal.SIGTERM) == "gone"
    assert forest.untouched("front")


def test_a_pid_file_older_than_the_process_is_refused(forest: Forest, tmp_path: pathlib.Path) -> None:
    forest.grow({"id": "front", "all_deaf": True})
    pidfile = tmp_path / "engine.pid"
    pidfile.write_text("%d\n" % forest.ref("front").pid)
    assert _selection.by_pidfile(str(pidfile), _selection.pid_in_file(str(pidfile)), None, None) is not None
    hour_ago = time.time() - 3600
    os.utime(pidfile, (hour_ago, hour_ago))
    with pytest.raises(Refused, match="is another one now"):
        _selection.by_pidfile(str(pidfile), _selection.pid_in_file(str(pidfile)), None, None)
    assert forest.untouched("front")
    assert _selection.pid_in_file(str(tmp_path / "none.pid")) is None


def test_the_wrong_user_is_refused(forest: Forest) -> None:
    forest.grow({"id": "front", "all_deaf": True})
    with pytest.raises(Refused, match='belongs to the user "root", not to "daemon"'):
        _selection.by_pid(forest.ref("front").pid, None, "daemon")


@pytest.mark.parametrize("pid", [1, 2, os.getpid(), os.getppid()])
def test_what_is_never_stopped(pid: int) -> None:
    with pytest.raises(Refused):
        _selection.by_pid(pid, None, None)


def test_a_strangers_process_in_the_session_is_named_and_left_alone(forest: Forest) -> None:
    stranger = {"id": "stranger", "name": "stranger", "uid": 1, "double": True, "all_deaf": True}
    forest.grow({"id": "front", "session": True, "children": [stranger]})
    result = stop(forest, grace=0.5)
    assert result["verdict"] == "survivors"
    assert by_name(result, "stranger")["outcome"] == "foreign"
    assert [process["name"] for process in result["survivors"]] == ["stranger"]
    assert '"stranger" (foreign)' in result["msg"]
    assert forest.untouched("stranger")


def test_a_strangers_process_is_stopped_when_allowed(forest: Forest) -> None:
    forest.grow({"id": "front", "session": True, "children": [{"id": "stranger", "uid": 1, "double": True}]})
    assert stop(forest, allow_foreign_users=True)["verdict"] == "stopped"
    assert not forest.alive("stranger")


def test_a_child_that_changed_its_user_is_ours(forest: Forest) -> None:
    forest.grow({"id": "front", "children": [{"id": "worker", "uid": 1}]})
    assert stop(forest)["verdict"] == "stopped"
    assert not forest.alive("worker")


def test_protected_names_are_left_alone(forest: Forest) -> None:
    forest.grow({"id": "front", "children": [{"id": "keep", "name": "keep", "all_deaf": True}, {"id": "worker"}]})
    result = stop(forest, protected=("keep",))
    assert result["verdict"] == "stopped"
    assert by_name(result, "keep")["outcome"] == "protected"
    assert forest.untouched("keep")
    assert not forest.alive("worker")


def test_check_mode_names_the_plan_and_touches_nothing(forest: Forest) -> None:
    child = {"id": "worker", "name": "worker", "all_deaf": True}
    forest.grow({"id": "front", "name": "front", "all_deaf": True, "children": [child]})
    plan = stop(forest, check_mode=True)
    assert plan["verdict"] == "stopped"
    assert plan["changed"] is True
    assert '%d "worker"' % forest.ref("worker").pid in plan["msg"]
    assert [process["outcome"] for process in plan["processes"]] == ["planned", "planned"]
    assert forest.untouched("front") and forest.untouched("worker")
    real = stop(forest, grace=0.3)
    assert set(plan) == set(real)
    assert set(plan["processes"][0]) == set(real["processes"][0])


def test_what_outlives_sigkill_is_unkillable_and_in_time(forest: Forest) -> None:
    forest.grow({"id": "front", "name": "front"})
    scan = _selection.by_pid(forest.ref("front").pid, None, None)
    assert scan is not None
    options = Options(grace=0.5, kill_grace=0.5)
    result = Stopper("it", scan, options, send=lambda _ref, _number: "sent").run()
    assert result["verdict"] == "unkillable"
    assert result["survivors"][0]["pid"] == forest.ref("front").pid
    assert result["survivors"][0]["wchan"] != ""
    assert result["elapsed"] < 0.5 + 0.5 + 0.5 + 5


def test_the_hard_limit_keeps_time_for_the_kill(forest: Forest) -> None:
    forest.grow({"id": "front", "deaf": True, "children": [{"id": "worker", "deaf": True}]})
    result = stop(forest, grace=30.0, kill_grace=1.0, timeout=2.0)
    assert result["verdict"] == "stopped"
    assert result["elapsed"] < 2.5


def test_a_pattern_finds_names_and_command_lines_of_one_user_only(
    forest: Forest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_selection, "service_of", lambda _process: None)  # these tests may run in a service themselves
    forest.grow(
        {"id": "front", "name": "sglang::sched-7", "uid": 1},
        {"id": "decoy", "name": "sglang::sched-7", "all_deaf": True},
    )
    result = stopper(forest, _selection.by_pattern("^sglang::sched-7$", "daemon"), **QUICK).run()
    assert result["verdict"] == "stopped"
    assert [process["pid"] for process in result["processes"]] == [forest.ref("front").pid]
    assert forest.untouched("decoy")
    by_line = _selection.by_pattern("forest.py %s" % forest.folder, "root")
    found = stopper(forest, by_line, **QUICK).run(check_mode=True)
    names = ("decoy", "by_session", "by_child", "by_orphan")
    assert {process["pid"] for process in found["processes"]} == {forest.ref(name).pid for name in names}


def test_a_group_with_another_meaning_is_no_mark() -> None:
    assert _ownership.check_mark(MARK) == MARK
    for gid in (0, 1, 100):
        with pytest.raises(UsageError, match="is not an ownership mark"):
            _ownership.check_mark(gid)


def test_a_second_stop_finds_nothing(forest: Forest) -> None:
    forest.grow({"id": "front"})
    scan = _selection.by_pid(forest.ref("front").pid, None, None)
    assert scan is not None
    assert stopper(forest, scan, **QUICK).run()["verdict"] == "stopped"
    again = stopper(forest, scan, **QUICK).run()
    assert (again["verdict"], again["changed"], again["processes"]) == ("absent", False, [])


def test_command_lines_are_read(forest: Forest) -> None:
    forest.grow({"id": "front"})
    ref = forest.ref("front")
    assert str(FOREST) in _inside.command_lines([ref])[ref]


def test_a_bomb_of_forks_does_not_outlast_the_limit(forest: Forest) -> None:
    late = {"id": "l1", "on_term": {"id": "l2", "on_term": {"id": "l3", "deaf": True}}}
    forest.grow({"id": "front", "session": True, "on_term": late}, wait=["front"])
    result = stop(forest)
    assert result["verdict"] == "stopped", result
    # One that was asked before it could heed may have ended without a word: what counts is that nobody is left.
    lines = _inside.command_lines([process.ref for process in Table.snapshot()])
    left = {ref.pid for ref, line in lines.items() if "forest.py %s" % forest.folder in line}
    assert left == {forest.ref(name).pid for name in ("by_session", "by_child", "by_orphan", "by_user")}
