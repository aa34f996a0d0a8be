# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From GPUs to the processes that may be ended, or to a refusal."""

from __future__ import annotations

import dataclasses
import os
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _holders, _lease, _selection, _service, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Reading
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_device import Device, Holder, Identity
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Process, ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from ansible_collections.gpuops.serving.plugins.module_utils._verdicts import worst
from host import process

SESSION = "/user.slice/user-0.slice/session-7.scope"
DOCKER = "/system.slice/docker-%s.scope" % ("ab" * 32)


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Machine:
    """What the next readings show; the last of them stays. Reading takes no time here unless that is said."""

    def __init__(self, *processes: Process, **params: t.Any) -> None:
        self.table = Table(processes)
        self.shown: t.List[t.Union[Reading, ServingError]] = []
        self.read = 0
        self.takes = 0.0
        self.limits: t.List[float] = []
        self.clock = FakeClock()
        params = dict({"gpus": ["0"], "user": "root", "allow_foreign_users": False}, **params)
        self.selection = _holders.select(params, self.clock, self.look)
        self.previous: t.Any = None

    def look(self, _options: t.Any, limit: t.Any) -> Reading:
        self.read += 1
        self.limits.append(limit)
        self.clock.sleep(min(self.takes, limit))
        reading = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if isinstance(reading, ServingError):
            raise reading
        return reading

    def scan(self, *shown: t.Any) -> t.Dict[int, t.List[str]]:
        """One look of the stop, and by pid how its processes were found."""
        self.shown = list(shown) or self.shown
        assert self.selection.scan is not None
        self.previous = self.selection.scan(self.table, None, self.previous)
        return {ref.pid: ways for ref, ways in self.previous.processes.items()}

    @property
    def spared(self) -> t.Dict[int, str]:
        return {ref.pid: word for ref, word in self.previous.spared.items()}

    def holds(self, pid: int, kind: str = "compute", memory: t.Optional[int] = 1000, **facts: t.Any) -> Holder:
        source = ["node"] if kind == "node" else ["driver", "node"]
        holder = Holder(pid, kind, source, None if kind == "node" else memory)
        found = self.table.get(pid)
        if found is not None:
            holder.identity = Identity(round(found.create_time, 2), found.name, found.user, None, None, "S", True)
        return dataclasses.replace(holder, **facts)


def device(*holders: Holder, used: t.Optional[int] = 1000, index: int = 0, **verdict: str) -> Device:
    found = Device(index, "nvidia", memory_used=used, memory_total=80000, holders=list(holders))
    word = verdict or {"verdict": "busy", "reason": "held_by_process"}
    return found.decide(word["verdict"], word["reason"], "its sentence")


def clear(*holders: Holder, **facts: t.Any) -> Device:
    return device(*holders, used=facts.pop("used", 0), verdict="clear", reason="idle", **facts)


def shows(*devices: Device) -> Reading:
    return Reading(verdict=worst(found.verdict for found in devices), devices=list(devices))


def in_session(pid: int, ppid: int = 1, **facts: t.Any) -> Process:
    return process(pid, ppid, **dict({"cgroup": SESSION}, **facts))


def warned(machine: Machine) -> str:
    return "\n".join(machine.selection.warnings)


def test_the_users_must_be_named() -> None:
    with pytest.raises(UsageError, match='"gpus" needs "user"'):
        Machine(user=None)
    with pytest.raises(UsageError, match="contradict each other"):
        Machine(allow_foreign_users=True)
    with pytest.raises(UsageError, match='the user "nobody-here" does not exist'):
        Machine(user="nobody-here")


@pytest.mark.parametrize(
    ("gpus", "said"),
    [([], '"gpus" is empty'), (["all", "0"], '"all" names no GPU'), (["0", "0"], "twice"), (["x"], "names no GPU")],
)
def test_names_that_mean_no_device(gpus: t.List[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Machine(gpus=gpus)


def test_a_rule_that_says_nothing() -> None:
    with pytest.raises(UsageError, match='a rule of "allowed_holders" is empty'):
        Machine(allowed_holders=[{"name": None}])


def test_holders_and_what_they_own_but_not_their_parents() -> None:
    shell, front, child = in_session(10, name="bash"), in_session(11, 10), in_session(12, 11)
    machine = Machine(shell, front, child)
    assert machine.scan(shows(device(machine.holds(11)))) == {11: ["gpu_holder"], 12: ["descendant"]}
    assert 'the parent 10 "bash" (user root) of the holder 11 "p11" is not ended, and may start it again' in warned(
        machine
    )
    machine.scan()
    assert len(machine.selection.warnings) == 1


def test_a_parent_that_is_ended_too_is_not_warned_of() -> None:
    machine = Machine(in_session(10), in_session(11, 10), in_session(12, 11))
    machine.scan(shows(device(machine.holds(10), machine.holds(12))))
    assert machine.selection.warnings == []


def test_a_dead_one_is_waited_for_until_its_parent_collects_it() -> None:
    machine = Machine(in_session(10), in_session(11, 10, state="Z"))
    with pytest.raises(_selection.Refused, match="or dead and stuck in the driver"):
        machine.scan(shows(device(machine.holds(11))))


def test_a_child_of_process_1_has_no_parent_that_counts() -> None:
    machine = Machine(process(1, 0, cgroup="/init.scope"), in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    assert machine.selection.warnings == []


def test_only_the_devices_that_are_meant_are_asked_for() -> None:
    machine = Machine(in_session(11), gpus=["1", "GPU-a"])
    asked: t.List[t.Any] = []

    def look(options: t.Any, limit: t.Any) -> Reading:
        asked.append((options.gpus, options.allowed_holders, limit))
        return shows(clear())

    for gpus, timeout in ((["1", "GPU-a"], None), (["all"], 3.0)):
        params = {"gpus": gpus, "user": "root", "allow_foreign_users": False, "timeout": timeout}
        params["allowed_holders"] = [{"user": "gdm"}]
        scan = _holders.select(params, machine.clock, look).scan
        assert scan is not None
        scan(machine.table, None, None)
    assert asked == [(["1", "GPU-a"], [{"user": "gdm"}], 10.0), (None, [{"user": "gdm"}], 1.0)]


def test_no_holder_at_all() -> None:
    machine = Machine(in_session(11))
    assert machine.scan(shows(clear())) == {}
    assert machine.scan() == {}
    assert machine.read == 1  # nothing was signalled, so that nothing can have changed


def test_holders_of_other_users_are_all_named() -> None:
    machine = Machine(in_session(11), in_session(12, uid=1), in_session(13, uid=65534))
    with pytest.raises(_selection.Refused) as refused:
        machine.scan(shows(device(machine.holds(11), machine.holds(12), machine.holds(13))))
    assert refused.value.message == (
        'nothing was signalled: not of the user "root": 12 "p12" (user daemon), 13 "p13" (user nobody)'
    )
    assert refused.value.result["verdict"] == "refused"


def test_the_holders_of_every_user_where_that_is_said() -> None:
    machine = Machine(in_session(11), in_session(12, uid=1), user=None, allow_foreign_users=True)
    assert set(machine.scan(shows(device(machine.holds(11), machine.holds(12))))) == {11, 12}


def test_allowed_holders_are_shown_and_spared() -> None:
    machine = Machine(in_session(11), in_session(12, 11, uid=1))
    allowed = machine.holds(12, allowed=True)
    assert machine.scan(shows(device(machine.holds(11), allowed))) == {
        11: ["gpu_holder"],
        12: ["gpu_holder", "descendant"],
    }
    assert machine.spared == {12: "allowed"}
    only = Machine(in_session(12, uid=1))
    assert set(only.scan(shows(clear(only.holds(12, allowed=True))))) == {12}
    assert only.spared == {12: "allowed"}


def test_a_protected_name_is_spared_whoever_runs_it() -> None:
    machine = Machine(in_session(11), in_session(12, uid=1, name="keep"), protected=["keep"])
    machine.scan(shows(device(machine.holds(11), machine.holds(12))))
    assert machine.spared == {12: "protected"}


def test_a_node_alone_is_named_and_left_alone() -> None:
    machine = Machine(in_session(11), in_session(12, uid=1))
    shown = shows(device(machine.holds(11), machine.holds(12, "node")))
    assert set(machine.scan(shown)) == {11}
    assert '12 "p12" (user daemon) has the device node of GPU 0 open and is not ended for it' in warned(machine)


def in_use(*holders: Holder, used: int = 1000) -> Device:
    return device(*holders, used=used, verdict="busy", reason="node_held_memory_in_use")


def test_a_node_alone_counts_while_memory_is_in_use_for_long() -> None:
    machine = Machine(in_session(12))
    assert set(machine.scan(shows(in_use(machine.holds(12, "node"))))) == {12}
    assert machine.clock.now - 100.0 == pytest.approx(_holders.SETTLE)
    untold = Machine(in_session(12))
    unreadable = device(untold.holds(12, "node"), used=None, verdict="busy", reason="node_held_memory_unreadable")
    assert set(untold.scan(shows(unreadable))) == {12}
    assert untold.clock.now == 100.0


def test_a_monitor_of_a_device_that_is_just_being_given_back_is_no_holder() -> None:
    machine = Machine(in_session(12))
    monitor = machine.holds(12, "node")
    assert machine.scan(shows(in_use(monitor)), shows(in_use(monitor)), shows(clear(monitor))) == {}
    assert machine.read == 3


def test_memory_that_may_be_on_its_way_back_is_no_proof_and_no_end() -> None:
    machine = Machine(in_session(12))
    monitor = machine.holds(12, "node")
    with pytest.raises(_selection.Refused, match="GPU 0: its sentence; it may be on its way back to the driver"):
        machine.scan(shows(device(machine.holds(4711), monitor)), shows(in_use(monitor)))


def test_one_that_is_listed_on_one_device_and_has_the_node_of_another() -> None:
    machine = Machine(in_session(12))
    both = shows(device(machine.holds(12)), in_use(machine.holds(12, "node")))
    assert set(machine.scan(both)) == {12}
    assert machine.clock.now == 100.0


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"cgroup": DOCKER}, 'runs in the container "%s": stop the container instead' % ("ab" * 32)),
        ({"cgroup": "/system.slice/dbus.service"}, 'belongs to the unit "dbus.service", which this host'),
        ({"cgroup": "/system.slice/ssh.service"}, 'belongs to the unit "ssh.service", which this host'),
        (
            {"cgroup": "/user.slice/user-0.slice/user@0.service/init.scope"},
            'the unit "user@0.service", which this host',
        ),
        ({"name": "sshd"}, "is the SSH server"),
        ({"kernel_thread": True}, "is a kernel thread"),
        ({"ref": ProcessRef(1, 100)}, "is the init process"),
        ({"ref": ProcessRef(os.getpid(), 100)}, "is one that this task runs in"),
    ],
)
def test_what_is_never_ended(facts: t.Dict[str, t.Any], said: str) -> None:
    pid = facts["ref"].pid if "ref" in facts else 12
    machine = Machine(in_session(11), in_session(pid, **facts))
    with pytest.raises(_selection.Refused, match="nothing was signalled") as refused:
        machine.scan(shows(device(machine.holds(11), machine.holds(pid))))
    assert said in refused.value.message
    assert '"p11"' not in refused.value.message


def units(monkeypatch: pytest.MonkeyPatch, **facts: t.Any) -> None:
    def show(unit: str, _timeout: float = 10.0) -> UnitState:
        if "error" in facts:
            raise ServingError(facts["error"])
        return UnitState(unit, **facts)

    monkeypatch.setattr(_systemd, "show", show)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"active_state": "active"}, 'belongs to the unit "qwen.service", which is active and may start it again'),
        ({"active_state": "deactivating"}, "which is deactivating and may"),
        ({"active_state": "activating", "sub_state": "auto-restart"}, "which is between two lives and may"),
        ({"active_state": "failed", "job": 7}, "which is failed and may"),
        ({"error": "no answer"}, 'belongs to the unit "qwen.service", of which nothing more is known: no answer'),
    ],
)
def test_a_holder_of_a_unit_at_work_is_the_units_business(
    monkeypatch: pytest.MonkeyPatch, facts: t.Dict[str, t.Any], said: str
) -> None:
    units(monkeypatch, **facts)
    machine = Machine(process(11))
    with pytest.raises(_selection.Refused, match=said):
        machine.scan(shows(device(machine.holds(11))))


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_what_a_unit_left_behind_may_be_ended(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    units(monkeypatch, active_state=state)
    monkeypatch.setattr(_service, "names", lambda *_folder: [])
    machine = Machine(process(11))
    assert machine.scan(shows(device(machine.holds(11)))) == {11: ["gpu_holder"]}


def test_what_a_unit_left_behind_is_not_taken_from_a_run_that_works_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    units(monkeypatch)
    monkeypatch.setattr(_service, "of_unit", lambda _unit: "qwen")
    for left, refused in ((30.0, True), (-1.0, False)):
        monkeypatch.setattr(_lease, "read", lambda _name, left=left: _lease.Lease("r1", "ops", "stop", 0.0, left))
        machine = Machine(process(11))
        if refused:
            with pytest.raises(_selection.Refused, match='the service "qwen" is in use by run "r1" of ops'):
                machine.scan(shows(device(machine.holds(11))))
        else:
            assert set(machine.scan(shows(device(machine.holds(11))))) == {11}


def test_a_user_managers_own_unit_is_what_people_start() -> None:
    place = "/user.slice/user-0.slice/user@0.service/app.slice/notebook.service"
    machine = Machine(in_session(10, name="systemd"), process(11, 10, cgroup=place))
    assert set(machine.scan(shows(device(machine.holds(11))))) == {11}
    assert 'the parent 10 "systemd"' in warned(machine)


def test_another_process_by_the_number_is_refused() -> None:
    machine = Machine(in_session(11))
    holder = machine.holds(11)
    assert holder.identity is not None
    for created, fits in ((1.0, True), (2.0, True), (1.02, False), (1.5, False), (3.0, False)):
        holder.identity = holder.identity._replace(create_time=created)
        machine.previous = None
        if fits:
            assert set(machine.scan(shows(device(holder)))) == {11}
        else:
            with pytest.raises(_selection.Refused, match="it cannot be told which process here that is"):
                machine.scan(shows(device(holder)))


def test_a_number_that_only_the_driver_knows_is_refused() -> None:
    machine = Machine(in_session(11))
    lost = machine.holds(4711)
    with pytest.raises(_selection.Refused, match="process 4711, which is not in the process table here,") as refused:
        machine.scan(shows(device(machine.holds(11), lost)))
    assert "another process table" in refused.value.message
    outside = machine.holds(11, outside=True, identity=None)
    with pytest.raises(_selection.Refused, match="a process that the driver calls 11"):
        machine.scan(shows(device(outside)))


def test_one_that_ends_while_the_devices_are_read_is_waited_for() -> None:
    machine = Machine(in_session(11))
    lost = machine.holds(4711)
    assert set(machine.scan(shows(device(lost, machine.holds(11))), shows(device(machine.holds(11))))) == {11}


def test_one_that_is_born_while_the_devices_are_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(in_session(11))
    born = in_session(12)
    monkeypatch.setattr(Table, "of", lambda pids, _proc: Table([born] if list(pids) == [12] else []))
    late = machine.holds(12, identity=Identity(1.0, "p12", "root", None, None, "S", True))
    assert set(machine.scan(shows(device(machine.holds(11), late)))) == {11, 12}
    assert machine.read == 2


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [("unknown", "processes_unreadable"), ("error", "driver_error"), ("unknown", "nodes_unreadable")],
)
def test_what_cannot_be_seen_is_no_complete_list(verdict: str, reason: str) -> None:
    machine = Machine(in_session(11))
    blind = device(index=1, verdict=verdict, reason=reason)
    with pytest.raises(_selection.Refused, match=r"it cannot be seen who holds the devices: GPU 1: .* \(%s\)" % reason):
        machine.scan(shows(device(machine.holds(11)), blind))


def test_a_host_without_a_driver_is_refused() -> None:
    machine = Machine()
    reading = Reading(verdict="error", reason="no_stack", detail="there is no GPU on this host and no driver for one")
    with pytest.raises(_selection.Refused, match="nothing was signalled: there is no GPU on this host"):
        machine.scan(reading)


def test_memory_that_nobody_visible_holds_is_refused_unless_it_is_given_back_soon() -> None:
    machine = Machine(in_session(11))
    held = device(verdict="busy", reason="held_by_unresolvable")
    with pytest.raises(_selection.Refused, match="nothing was signalled: GPU 0: its sentence"):
        machine.scan(shows(held))
    assert Machine().scan(shows(held), shows(held), shows(clear())) == {}


def test_a_wrong_use_that_shows_only_in_the_reading_is_none_of_the_services() -> None:
    machine = Machine()
    with pytest.raises(UsageError, match="twice") as wrong:
        machine.scan(UsageError("the list of GPUs names GPU 0 twice"))
    assert wrong.value.result["verdict"] == "error"


def ended(machine: Machine, *pids: int) -> None:
    machine.table = Table([found for found in machine.table if found.pid not in pids])


def test_readings_are_rare_while_the_holders_live_and_one_is_made_when_they_are_gone() -> None:
    machine = Machine(in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    for _look in range(10):
        machine.clock.sleep(0.3)
        machine.scan()
    assert machine.read == 2
    ended(machine, 11)
    assert machine.scan(shows(clear())) == {}
    assert machine.read == 3
    machine.scan()
    assert machine.read == 3
    machine.clock.sleep(_holders.AFTER)
    machine.scan()
    assert machine.read == 4


def test_a_holder_that_starts_again_is_ended_again() -> None:
    machine = Machine(in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    machine.table = Table([in_session(12)])
    assert machine.scan(shows(device(machine.holds(12)))) == {12: ["gpu_holder"]}
    machine.table = Table([])
    assert machine.scan(shows(clear())) == {}
    assert machine.read == 3


def test_a_new_holder_of_somebody_else_is_a_survivor_that_is_left_alone() -> None:
    machine = Machine(in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    machine.table = Table([in_session(12, uid=1)])
    for _look in range(2):
        assert machine.scan(shows(device(machine.holds(12)))) == {12: ["gpu_holder"]}
        assert machine.spared == {12: "foreign"}
        machine.clock.sleep(1)
    assert 'a new holder is left alone: not of the user "root": 12 "p12" (user daemon)' in warned(machine)


def test_a_node_alone_is_no_new_holder_while_drivers_give_memory_back() -> None:
    machine = Machine(in_session(11), in_session(12, uid=1))
    machine.scan(shows(device(machine.holds(11), machine.holds(12, "node"))))
    ended(machine, 11)
    assert machine.scan(shows(in_use(machine.holds(12, "node")))) == {}
    assert "not clear yet: GPU 0: its sentence" in warned(machine)
    machine.clock.sleep(1)
    machine.scan(shows(clear(machine.holds(12, "node"))))
    assert "not clear yet" not in warned(machine)


def test_a_reading_that_fails_is_borne_while_the_holders_live_and_never_taken_for_an_end() -> None:
    machine = Machine(in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    machine.clock.sleep(3)
    silent = shows(device(verdict="error", reason="timeout"))
    assert machine.scan(silent) == {11: ["gpu_holder"]}
    assert machine.selection.doubt() != ""
    ended(machine, 11)
    machine.scan(silent)
    assert machine.selection.doubt().startswith("it is not known who holds the devices now: GPU 0")
    assert machine.read == 4
    machine.clock.sleep(_holders.AFTER)
    machine.scan(shows(clear()))
    assert machine.selection.doubt() == ""


def test_a_reading_that_fails_once_is_made_again() -> None:
    machine = Machine(in_session(11))
    machine.scan(shows(device(machine.holds(11))))
    ended(machine, 11)
    assert machine.scan(shows(device(verdict="error", reason="timeout")), shows(clear())) == {}
    assert machine.selection.doubt() == ""


LIMITS = [
    (None, 1.0),
    (60.0, 1.0),
    (15.0, 0.5),
    (3.0, 0.1),
    (0.5, 1 / 60),
]  # what the caller gives, and the share of it


@pytest.mark.parametrize(("timeout", "share"), LIMITS)
@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("takes", [0.1, 0.4, 0.9, 100.0])
@pytest.mark.parametrize("born", [True, False])
def test_a_later_reading_keeps_to_its_part_of_the_limit_however_often_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch, timeout: t.Optional[float], share: float, lives: bool, takes: float, born: bool
) -> None:
    monkeypatch.setattr(Table, "of", lambda _pids, _proc: Table([]))
    machine = Machine(in_session(11), timeout=timeout)
    machine.scan(shows(device(machine.holds(11))))
    if not lives:
        ended(machine, 11)
    machine.clock.sleep(_holders.EVERY)
    late = machine.holds(12, identity=Identity(1.0, "p12", "root", None, None, "S", True))
    machine.takes, began = takes, machine.clock.now
    silent = device(*[late] * born, verdict="error", reason="timeout")
    machine.scan(shows(silent))
    assert machine.clock.now - began <= max(_holders.LEAST_LOOK, _holders.LATER_LOOK * share) + 1e-6
    assert min(machine.limits) > _holders.SHORTEST - 1e-6  # else it only hides what was read before
    assert machine.selection.doubt() != ""


def test_a_reading_after_the_end_of_the_limit_has_no_more_than_a_second() -> None:
    machine = Machine(in_session(11), timeout=20.0)
    machine.scan(shows(device(machine.holds(11))))
    machine.clock.sleep(20.0)
    machine.takes, began = 100.0, machine.clock.now
    machine.scan(shows(device(verdict="error", reason="timeout")))
    assert machine.clock.now - began == pytest.approx(1.0)


@pytest.mark.parametrize(("timeout", "share"), LIMITS)
@pytest.mark.parametrize("takes", [0.3, 2.0, 100.0])
def test_the_first_readings_keep_to_half_of_the_limit(timeout: t.Optional[float], share: float, takes: float) -> None:
    machine = Machine(in_session(11), timeout=timeout)
    machine.takes, began = takes, machine.clock.now
    with pytest.raises(_selection.Refused):
        machine.scan(shows(device(machine.holds(11), machine.holds(4711))))
    whole = (_holders.FIRST_LOOK + _holders.SETTLE) * share
    assert machine.clock.now - began <= max(_holders.LEAST_LOOK, whole) + 1e-6


def crowd(machine: Machine) -> Device:
    return device(*(machine.holds(found.pid) for found in machine.table))


def test_a_unit_is_asked_about_once_whatever_number_of_holders_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[str] = []
    monkeypatch.setattr(_service, "names", lambda *_folder: [])
    monkeypatch.setattr(_systemd, "show", lambda unit, _limit: asked.append(unit) or UnitState(unit))
    places = ["/system.slice/%s.service" % ("a", "b")[n % 2] for n in range(64)]
    machine = Machine(*(process(100 + n, cgroup=place) for n, place in enumerate(places)))
    assert len(machine.scan(shows(crowd(machine)))) == 64
    assert sorted(asked) == ["a.service", "b.service"]
    # A later reading asks again: a unit that was at rest may be at work by then.
    machine.table.add([process(300, cgroup="/system.slice/a.service")])
    machine.clock.sleep(_holders.EVERY)
    machine.scan(shows(crowd(machine)))
    assert sorted(asked) == ["a.service", "a.service", "b.service"]


@pytest.mark.parametrize(("timeout", "share"), LIMITS)
@pytest.mark.parametrize("takes", [0.2, 100.0])
def test_all_answers_about_units_keep_to_one_part_of_the_limit(
    monkeypatch: pytest.MonkeyPatch, timeout: t.Optional[float], share: float, takes: float
) -> None:
    machine = Machine(*(process(100 + n, cgroup="/system.slice/u%d.service" % n) for n in range(64)), timeout=timeout)

    def show(unit: str, limit: float) -> UnitState:
        machine.clock.sleep(min(takes, limit))
        if takes > limit:
            raise ServingError("no answer")
        return UnitState(unit, active_state="active")

    monkeypatch.setattr(_systemd, "show", show)
    began = machine.clock.now
    with pytest.raises(_selection.Refused) as refused:
        machine.scan(shows(crowd(machine)))
    assert machine.clock.now - began <= max(_holders.LEAST_LOOK, _holders.UNIT_ANSWERS * share) + 1e-6
    for number in range(64):
        assert 'belongs to the unit "u%d.service"' % number in refused.value.message
    assert "of which nothing more is known: systemd took too long over others" in refused.value.message


def test_a_sentence_keeps_every_sign_of_the_names_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    units(monkeypatch, active_state="active")
    machine = Machine(in_session(11, name="100%s", cgroup="/system.slice/q%d.service"), user="1")
    with pytest.raises(_selection.Refused) as refused:
        machine.scan(shows(device(machine.holds(11))))
    assert '11 "100%s" (user root) belongs to the unit "q%d.service", which is active' in refused.value.message


def test_a_strange_number_at_the_end_is_no_end() -> None:
    machine = Machine(in_session(11))
    gone = machine.holds(11)
    machine.scan(shows(device(gone)))
    ended(machine, 11)
    # What was ended may be listed for a moment more.
    assert machine.scan(shows(device(machine.holds(11), verdict="busy", reason="held_by_unresolvable"))) == {}
    assert machine.selection.doubt() == ""
    machine.clock.sleep(1)
    machine.scan(shows(device(machine.holds(4711))))
    assert "process 4711, which is not in the process table here" in machine.selection.doubt()
