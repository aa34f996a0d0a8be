# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What one look at a service asks for, what it leaves out, and what the next process needs to go on."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _engines,
    _generation,
    _http,
    _journal,
    _listening,
    _logfile,
    _members,
    _ownership,
    _processes,
    _systemd,
    _target,
)
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Listener
from service import FakeClock

UNIT = "x.service"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests is no file system that hangs."""
    monkeypatch.setattr(_logfile, "PATIENCE", 30.0)


def target(url: str = "http://127.0.0.1:9", unit: t.Optional[str] = UNIT, **options: t.Any) -> _target.HostTarget:
    return _target.HostTarget(unit, url, _generation.Question(_engines.get(None)), _http.Access(), **options)


def state(**fields: t.Any) -> _systemd.UnitState:
    given = {"active_state": "active", "sub_state": "running", "main_pid": os.getpid(), "invocation_id": "a", **fields}
    return _systemd.UnitState(UNIT, **given)


class Systemd:
    """Answers with ``now``, and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: _systemd.UnitState) -> None:
        self.now, self.asked = now, 0
        self.given = 0.0  # seconds for the last answer
        monkeypatch.setattr(_systemd, "show", self.show)

    def show(self, _name: str, timeout: float) -> _systemd.UnitState:
        self.asked += 1
        self.given = timeout
        return self.now


def test_a_unit_whose_main_process_lives_is_asked_about_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, state())
    one = target()
    assert [one.unit() for _look in range(5)] == [systemd.now] * 5
    assert systemd.asked == 1
    one._state_at -= _target.UNIT_AGE
    one.unit()
    assert systemd.asked == 2


def test_what_a_verdict_rests_on_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(monkeypatch, state())
    one = target()
    one.unit()
    systemd.now = state(active_state="deactivating", sub_state="stop-sigterm")
    assert one.unit() != systemd.now
    assert one.unit(now=True) == systemd.now
    assert systemd.asked == 2


def test_the_death_of_the_main_process_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        systemd = Systemd(monkeypatch, state(main_pid=child.pid))
        one = target()
        one.unit()
        one.unit()
        assert systemd.asked == 1
        child.kill()
        child.wait()
        systemd.now = state(active_state="failed", sub_state="failed", main_pid=0)
        found = one.unit()
        assert found is not None and found.active_state == "failed"


@pytest.mark.parametrize(
    ("elapsed", "given"),
    [(0.0, [10.0, 5.0, 10.0, 10.0, 2.0]), (26.0, [4.0, 4.0, 4.0, 4.0, 2.0]), (29.9, [1.0] * 5), (40.0, [1.0] * 5)],
)
def test_no_question_outlasts_the_deadline_by_more_than_a_second(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, given: t.List[float]
) -> None:
    """Whatever of the host hangs: systemd, journald, who resolves names, who tells sockets, who runs containers."""
    systemd = Systemd(monkeypatch, state())
    asked: t.Dict[str, float] = {}
    monkeypatch.setattr(_journal, "journal", lambda _unit, timeout, **_more: asked.update(journal=timeout) or [])
    monkeypatch.setattr(_journal, "remarks", lambda timeout: asked.update(journal=timeout) or [])
    monkeypatch.setattr(_listening, "addresses_of", lambda _host, timeout: asked.update(names=timeout) or [])
    monkeypatch.setattr(_listening, "activated", lambda _unit, _port, timeout: bool(asked.update(sockets=timeout)))
    clock = FakeClock()
    one = target("http://engine:9")
    one.bound(Deadline(30.0, clock))
    clock.now = elapsed
    one.unit()
    one.log(state())
    one.knock()
    one._activated(UNIT)
    tracker = one.members.patience(_members.TRACKING)
    assert [systemd.given, asked["journal"], asked["names"], asked["sockets"], tracker] == pytest.approx(given)
    one.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"active_state": "activating", "sub_state": "start-post", "job": 7},
        {"active_state": "activating", "sub_state": "auto-restart", "main_pid": 0},
        {"active_state": "failed", "main_pid": 0},
        {"active_state": "deactivating", "sub_state": "stop-sigterm"},
        {"job": 9},
    ],
)
def test_a_unit_on_its_way_is_asked_about_at_each_look(
    monkeypatch: pytest.MonkeyPatch, fields: t.Dict[str, t.Any]
) -> None:
    systemd = Systemd(monkeypatch, state(**fields))
    one = target()
    for _look in range(3):
        one.unit()
    assert systemd.asked == 3


def test_while_nobody_listens_no_look_at_all_processes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listening, "rows_of_all", lambda: pytest.fail("looked at all"))
    one = target()
    for _look in range(10):
        assert one.listener(state(main_pid=0)).kind == "none"
    assert one.members.looks == 1


def test_a_port_that_the_unit_has_takes_no_look_at_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listening, "rows_of_all", lambda: pytest.fail("looked at all"))
    owned = _ownership.Owned()
    monkeypatch.setattr(_ownership, "of_unit", lambda *arguments, **options: owned)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        one = target("http://127.0.0.1:%d" % server.getsockname()[1])
        (me,) = _processes.Table.of([os.getpid()])
        owned.add(me, "cgroup", True)
        assert one.listener(state()).kind == "none"
        server.listen(1)
        assert one.listener(state()) == Listener("owned", "process %d of the unit listens" % os.getpid())
        assert one.members.looks == 1


def test_who_comes_to_the_port_is_told_by_the_numbers_of_its_sockets() -> None:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        port = first.getsockname()[1]
        seen = target("http://127.0.0.1:%d" % port)
        assert seen.sockets() == frozenset()
        first.listen(1)
        alone = seen.sockets()
        assert alone == {os.fstat(first.fileno()).st_ino}
        second.bind(("127.0.0.1", port))
        second.listen(1)
        assert seen.sockets() == {*alone, os.fstat(second.fileno()).st_ino}
        first.close()
        assert seen.sockets() == {os.fstat(second.fileno()).st_ino}


@pytest.mark.parametrize(("uid", "kind"), [(0, "unexplained"), (1000, "unseen")])
def test_an_answer_that_explains_nothing_is_not_sought_at_each_look(
    monkeypatch: pytest.MonkeyPatch, uid: int, kind: str
) -> None:
    looked: t.List[int] = []

    def rows() -> t.List[_listening.Row]:
        looked.append(1)
        return [_listening.Row("127.0.0.1", None, port)]

    monkeypatch.setattr(_listening, "rows_of_all", rows)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        one = target("http://127.0.0.1:%d" % port)
        assert {one.listener(state(main_pid=0)).kind for _look in range(5)} == {kind}
        assert len(looked) == 1
        assert one._doubt is not None
        one._doubt = (one._doubt[0], one._doubt[1] - _target.DOUBT_AGE, one._doubt[2])
        one.listener(state(main_pid=0))
        assert len(looked) == 2


class Journal:
    """In the place of the reader."""

    def __init__(self, *records: _journal.Record) -> None:
        self.records, self.warnings = list(records), {"journal": "the journal is away"}

    def read(self, _state: t.Any) -> t.List[_journal.Record]:
        return self.records

    def close(self) -> None:
        pass


def record(message: str, pid: int = 77, dropped: int = 0) -> _journal.Record:
    return _journal.Record("s=1", 1, 1, "a", pid, 6, message, dropped=dropped)


def lines(one: _target.HostTarget, of: t.Any) -> t.List[t.Tuple[str, bool]]:
    return [(line.text, line.own) for line in one.log(of)]


def test_lines_are_the_services_own_or_systemds() -> None:
    one = target()
    one._journal = Journal(record("mine"), record("Started.", pid=1), record("Suppressed 3 messages", dropped=3))  # type: ignore[assignment]
    assert lines(one, state()) == [("mine", True), ("Started.", False), ("Suppressed 3 messages", False)]
    assert one.warnings == ["the journal is away"]


def test_what_the_caller_and_its_ancestors_write_is_no_line_of_the_service() -> None:
    """A wait may run in the unit itself, by ExecStartPost=, where each of its own lines would be movement."""
    one = target()
    shown = (record("qwen: loading", pid=os.getpid()), record("of its shell", pid=os.getppid()), record("mine"))
    one._journal = Journal(*shown, record("Started.", pid=1))  # type: ignore[assignment]
    assert lines(one, state(main_pid=77)) == [("mine", True), ("Started.", False)]
    assert lines(one, state(main_pid=77)) == [("mine", True), ("Started.", False)]


def test_what_the_main_process_writes_is_the_services_even_if_it_started_the_wait() -> None:
    one = target()
    one._journal = Journal(record("loading", pid=os.getppid()))  # type: ignore[assignment]
    assert lines(one, state(main_pid=os.getppid())) == [("loading", True)]


def test_of_a_log_file_what_is_new_counts_and_of_the_journal_what_systemd_says(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    path.write_text("of an earlier life\n")
    one = target(log_path=str(path))
    one._journal = Journal(record("a line of a wrapper"), record("Started.", pid=1))  # type: ignore[assignment]
    assert lines(one, state()) == [("Started.", False), ("of an earlier life", False)]
    with path.open("a") as stream:
        stream.write("new\n")
    assert lines(one, state())[1:] == [("new", True)]
    path.unlink()
    path.mkdir()
    one.log(state())
    assert one.warnings == [
        "the journal is away",
        'the log file "%s" cannot be read: it is no regular file' % path,
    ]
    one.close()


def started(seconds_ago: float) -> t.Dict[str, str]:
    stamp = time.clock_gettime(time.CLOCK_MONOTONIC) - seconds_ago
    return {"ExecMainStartTimestampMonotonic": "%d" % (stamp * 1e6)}


DEAD = {"active_state": "failed", "sub_state": "failed", "main_pid": 0}


@pytest.mark.parametrize(
    ("fields", "ago", "age", "own"),
    [
        # The file is younger than the life: all of it is of this life, also while it runs.
        (DEAD, 5, 0, 500),
        ({"active_state": "inactive", "sub_state": "dead", "main_pid": 0}, 5, 0, 500),
        ({}, 5, 0, 500),
        ({"active_state": "activating", "sub_state": "auto-restart", "main_pid": 0}, 5, 0, 500),
        # It is older, and its lines have no stamps: only what was written last surely is of this life.
        (DEAD, 5, 60, 1),
        ({}, 5, 60, 1),
        # The main process that systemd tells of is not that of the life that begins.
        ({"active_state": "failed", "main_pid": 0, "job": 7}, 5, 0, 0),
        ({"active_state": "activating", "sub_state": "start-pre", "main_pid": 0}, 5, 0, 0),
        # Nobody has written since it was started last, or it never was.
        (DEAD, -60, 120, 0),
        ({}, -60, 120, 0),
        (DEAD, None, 0, 0),
    ],
)
def test_what_was_in_a_log_file_before_the_first_look_counts_when_it_is_of_this_life(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: t.Dict[str, t.Any],
    ago: t.Optional[float],
    age: float,
    own: int,
) -> None:
    path = tmp_path / "log"
    path.write_text("".join("line %d\n" % number for number in range(500)))
    monkeypatch.setattr(_logfile, "_born", lambda _number: time.time() - age)
    one = target(log_path=str(path))
    one._journal = Journal()  # type: ignore[assignment]
    found = one.log(state(**fields, raw={} if ago is None else started(ago)))
    assert [line.text for line in found] == ["line %d" % number for number in range(500)]
    assert [line.text for line in found if line.own] == ["line %d" % number for number in range(500 - own, 500)]
    one.close()


def test_by_its_stamps_a_log_file_tells_of_each_life_apart(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    now = time.time()

    def line(age: float, text: str) -> str:
        return "INFO %s [x.py:1] %s\n" % (time.strftime("%m-%d %H:%M:%S", time.localtime(now - age)), text)

    path.write_text(
        line(90, "CUDA out of memory") + "RuntimeError\n" + line(50, "loading") + "address already in use\n"
    )
    monkeypatch.setattr(_logfile, "_born", lambda _number: None)
    one = target(log_path=str(path))
    one._journal = Journal()  # type: ignore[assignment]
    found = one.log(state(raw=started(60)))
    assert [line.own for line in found] == [False, False, True, True]
    one.close()


def test_the_time_at_which_a_file_was_made_is_told(tmp_path: pathlib.Path) -> None:
    before = time.time()
    path = tmp_path / "log"
    path.write_text("x")
    os.utime(path, (1.0, 1.0))
    with path.open() as stream:
        found = _logfile._born(stream.fileno())
    assert found is None or before - 1.0 <= found <= time.time() + 1.0
    assert _logfile._born(-1) is None


def test_what_cannot_be_seen_of_processes_is_said_once() -> None:
    one = target()
    one._unreadable = True
    for _look in range(3):
        one._gather_warnings()
    assert one.warnings == ["what the processes of the unit read and write cannot be seen: run as root, or with become"]


def test_the_next_process_goes_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    first = target(log_path=str(path))
    first._journal._cursor = "s=7"  # type: ignore[union-attr]
    first._journal.warnings = {"denied": "the journal is closed"}  # type: ignore[union-attr]
    first._file.read()  # type: ignore[union-attr]
    first.knock()
    first._unreadable = True
    saved = json.loads(json.dumps(first.save()))
    first.close()
    assert len(json.dumps(saved)) < 2000
    with path.open("a") as stream:
        stream.write("new\n")
    second = target(log_path=str(path))
    second.restore(saved)
    assert json.loads(json.dumps(second.save())) == saved
    assert second._file.read() == [("new", True)]  # type: ignore[union-attr]
    assert second.warnings == [
        "what the processes of the unit read and write cannot be seen: run as root, or with become",
        "the journal is closed",
    ]
    second.close()
    other = target()
    other.restore({"version": 0})
    assert other.save() == target().save()


def test_without_a_unit_there_is_neither_a_journal_nor_a_state() -> None:
    one = target(unit=None)
    assert one.unit() is None
    assert one.save()["journal"] is None
    one.restore(one.save())


def test_a_name_is_looked_up_for_a_knock_and_not_at_each_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[str] = []

    def addresses_of(host: str, _timeout: float) -> t.List[str]:
        asked.append(host)
        raise _target.ServingError("no such host")

    monkeypatch.setattr(_listening, "addresses_of", addresses_of)
    one = target("http://engine.example.com:8000", unit=None)
    assert [one.knock() for _look in range(5)] == [False] * 5
    assert one.peek("/health") is None
    assert asked == ["engine.example.com"]


@pytest.mark.parametrize(
    ("fields", "listens", "port", "awaited"),
    [
        ({}, "active", 9, "x.socket"),
        ({}, "inactive", 9, ""),
        ({}, "active", 10, ""),
        ({"active_state": "failed"}, "active", 9, ""),
        ({"job": 7}, "active", 9, ""),
        ({"raw": {"TriggeredBy": "x.timer x.path"}}, "active", 9, ""),
    ],
)
def test_a_unit_at_rest_is_awaited_where_its_socket_listens_on_the_port(
    monkeypatch: pytest.MonkeyPatch, fields: t.Dict[str, t.Any], listens: str, port: int, awaited: str
) -> None:
    given = {"active_state": "inactive", "sub_state": "dead", "main_pid": 0, "raw": {"TriggeredBy": "x.timer x.socket"}}
    resting = state(**dict(given, **fields))
    units = {UNIT: resting, "x.socket": _systemd.UnitState("x.socket", active_state=listens)}
    monkeypatch.setattr(_systemd, "show", lambda name, _timeout: units[name])
    monkeypatch.setattr(_listening, "_properties", lambda *_arguments: "[::]:%d (Stream)" % port)
    found = target().unit()
    assert found is not None and found.awaited == awaited
