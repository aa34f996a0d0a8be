# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From what an operator names to the processes meant."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
import types
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _inside,
    _pidfile,
    _selection,
    _service,
    _stopping,
    _titles,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._places import Container
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Process, ProcessRef, Table
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import UnitState
from host import process

SIGNS = (("\0", "null byte"), ("\n", "line break"))


def test_a_pid_file_without_a_pid(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "engine.pid"
    for text in ("", "x", "-5", "0", str(10**20), "9" * 64):
        path.write_text(text)
        with pytest.raises(ServingError, match="holds no process id"):
            _selection.pid_in_file(str(path))


def test_patterns_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        _selection.by_pattern("(", "root")
    with pytest.raises(UsageError, match="is not a regular expression"):
        _selection.by_pattern("(" * 5000 + ")" * 5000, "root")
    for everything in ("", ".*", "x?", "^"):
        with pytest.raises(UsageError, match="fits every process"):
            _selection.by_pattern(everything, "root")
    with pytest.raises(UsageError, match='the user "nobody-here" does not exist'):
        _selection.by_pattern("x", "nobody-here")


def definitions(monkeypatch: pytest.MonkeyPatch, **found: t.Dict[str, t.Any] | ServingError) -> None:
    """What /etc/gpuops/services holds."""

    def load(name: str, _folder: str = "") -> t.Dict[str, t.Any]:
        definition = found[name]
        if isinstance(definition, ServingError):
            raise definition
        return definition

    monkeypatch.setattr(_service, "names", lambda _folder="": sorted(found))
    monkeypatch.setattr(_service, "load", load)


def test_the_mark_of_a_unit_is_that_of_the_service_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ServingError("the definition cannot be used")
    definitions(monkeypatch, a=broken, b={"unit": "qwen", "mark_gid": 987654}, c={"unit": "x.service"})
    assert _selection.mark_of(None, "qwen.service", {}) == 987654
    assert _selection.mark_of(None, "qwen", {}) == 987654
    assert _selection.mark_of("b", "other.service", {"mark_gid": 987655}) == 987655
    with pytest.raises(ServingError, match="the definition cannot be used"):
        _selection.mark_of(None, "other.service", {})  # it may be the one
    definitions(monkeypatch, c={"unit": "x.service"}, d={})
    assert _selection.mark_of(None, "other.service", {}) is None


def test_the_engine_and_the_mark_are_found_by_any_name_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    for defined in ("gpuops-qwen2.5", "gpuops-qwen2.5.service"):
        definitions(monkeypatch, a={"unit": defined, "mark_gid": 987654, "engine": "vllm"})
        for unit in ("gpuops-qwen2.5", "gpuops-qwen2.5.service"):
            assert _selection.mark_of(None, unit, {}) == 987654
            assert _selection._titles(None, unit) is not None
        state = UnitState("gpuops-qwen2.5.service")
        assert _titles._others(state) == (set(), True)  # it is not a service beside itself


def test_command_lines_that_cannot_be_read_do_not_make_every_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: t.List[float] = []
    monkeypatch.setattr(_selection.time, "monotonic", lambda: sum(limits))
    monkeypatch.setattr(_inside, "command_lines", lambda _refs, limit: limits.append(limit) or {})
    scan = _selection.by_pattern("engine", "root")
    table = Table([process(10, name="engine", cgroup="/"), process(11, cgroup="/")])
    for _look in range(20):
        assert [ref.pid for ref in scan(table, None, None).processes] == [10]
    assert sum(limits) < _selection.LINE_READING + 20 * 0.11


@pytest.mark.parametrize("name", ["system.slice", "user.slice", "x.target", "x.socket", "dev-sda.device"])
def test_units_that_hold_more_than_a_service_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=r"its name must end in \.service or \.scope"):
        _selection.select({"unit": name})
    with pytest.raises(UsageError, match=r"its name must end in \.service$"):
        _selection.select({"unit": name}, (".service",))


@pytest.mark.parametrize(
    "name", ["init.scope", "session-7.scope", "user@0.service", "user@0", "systemd-logind.service"]
)
def test_sessions_and_the_host_itself_are_refused(name: str) -> None:
    with pytest.raises(_selection.Refused, match="holds the sessions of users or this host itself"):
        _selection.select({"unit": name})


@pytest.mark.parametrize("pid", [0, -5, 10**20, 2**22 + 1])
def test_numbers_that_are_no_process_id(pid: int) -> None:
    with pytest.raises(UsageError, match='"pid" must be a process id from 1 to'):
        _selection.select({"pid": pid})


@pytest.mark.parametrize("option", ["unit", "pidfile", "pattern"])
def test_an_empty_name_is_none(option: str) -> None:
    with pytest.raises(UsageError, match='"%s" is empty' % option):
        _selection.select({option: "", "user": "root"})


@pytest.mark.parametrize("created", [float("nan"), float("inf")])
def test_a_creation_time_that_is_none(created: float) -> None:
    with pytest.raises(UsageError, match='"create_time" must be'):
        _selection.select({"pid": 5, "create_time": created})


def test_a_creation_time_is_no_length_of_time() -> None:
    """Seconds of the epoch are more than any wait may be."""
    chosen = _selection.select({"pid": 2**22 - 1, "create_time": 1795986558.41})
    assert chosen.scan is None


def test_pid_files_that_are_no_files(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "engine.pid").write_text("10\n")
    (tmp_path / "link").symlink_to(tmp_path / "engine.pid")
    for name in ("fifo", ""):
        with pytest.raises(UsageError, match="is not a regular file"):
            _selection.pid_in_file(str(tmp_path / name))
    with pytest.raises(ServingError, match="it is a symbolic link"):
        _selection.pid_in_file(str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("owner", "group", "mode", "uid", "why"),
    [
        (0, 0, 0o644, 0, None),
        (0, 0, 0o644, 5, None),
        (0, 0, 0o664, 0, None),
        (5, 5, 0o664, 5, None),
        (5, 5, 0o644, 0, "belongs to the user"),
        (5, 5, 0o644, 6, "belongs to the user"),
        (0, 0, 0o666, 0, "can be written by others"),
        (5, 5, 0o666, 5, "can be written by others"),
        (0, 5, 0o664, 0, "can be written by others"),
    ],
)
def test_a_pid_file_speaks_for_its_own_users_processes_only(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    owner: int,
    group: int,
    mode: int,
    uid: int,
    why: t.Optional[str],
) -> None:
    path = tmp_path / "engine.pid"
    path.write_text("10\n")
    real = os.fstat
    facts = types.SimpleNamespace(st_mode=0o100000 | mode, st_uid=owner, st_gid=group, st_mtime=1e10)
    monkeypatch.setattr(_pidfile.os, "fstat", lambda fd: facts if fd >= 0 else real(fd))
    monkeypatch.setattr(Table, "snapshot", lambda: Table([process(10, uid=uid)]))
    found = _selection.pid_in_file(str(path))
    monkeypatch.undo()
    monkeypatch.setattr(Table, "snapshot", lambda: Table([process(10, uid=uid)]))
    if why is None:
        assert _selection.by_pidfile(str(path), found, None, None) is not None
    else:
        with pytest.raises(_selection.Refused, match=why):
            _selection.by_pidfile(str(path), found, None, None)


def test_a_pattern_that_never_ends_on_an_empty_text_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(_signal: int, _frame: t.Any) -> t.NoReturn:
        raise AssertionError("it was looked for in this process")

    monkeypatch.setattr(_selection, "MATCHING", 0.3)
    previous = signal.signal(signal.SIGALRM, here)
    signal.alarm(5)
    try:
        with pytest.raises(_selection.Refused, match="cannot be looked for: no answer within"):
            _selection.by_pattern("(?:|){40}(?=x)", "root")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def test_the_number_of_a_thread_is_no_process() -> None:
    end, started = threading.Event(), threading.Event()
    numbers: t.List[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        started.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(10)
        said = "^the number %d is a thread of the process %d: name that$" % (numbers[0], os.getpid())
        with pytest.raises(UsageError, match=said):
            _selection.by_pid(numbers[0], None, None)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("name", ["²", "9" * 5000, "\uff14\uff12", "4294967296", "-1", "a\0b", "00000000042"])
def test_a_user_that_is_neither_an_account_nor_a_number(name: str) -> None:
    with pytest.raises(UsageError, match="does not exist on this host"):
        _selection.user_id(name)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        *(({"unit": "a%s.service" % sign}, '"unit" holds a ' + word) for sign, word in SIGNS),
        *(({"pidfile": "/run/a%s" % sign}, '"pidfile" holds a ' + word) for sign, word in SIGNS),
        *(({"pid": 1, "user": "ro%sot" % sign}, '"user" holds a ' + word) for sign, word in SIGNS),
        ({"pattern": "a\0", "user": "root"}, '"pattern" holds a null byte'),
    ],
)
def test_signs_that_no_name_holds(params: t.Dict[str, t.Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _selection.select(params)


def test_a_pattern_may_have_lines() -> None:
    _selection.check_words({"pattern": "a\nb", "user": "root"})
    with pytest.raises(UsageError, match='"user" holds a line break'):
        _selection.check_words({"pattern": "a\nb", "user": "ro\not"})


def test_a_pattern_that_would_never_end_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inside, "command_lines", lambda refs, _limit: dict.fromkeys(refs, "a" * 64 + "!"))
    monkeypatch.setattr(_selection, "MATCHING", 0.3)
    scan = _selection.by_pattern("(a+)+$", "root")
    table, began = Table([process(10, cgroup="/")]), time.monotonic()
    with pytest.raises(_selection.Refused, match="cannot be looked for: no answer within"):
        scan(table, None, None)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("place", "unit"),
    [
        ("/system.slice/systemd-journald.service", "systemd-journald.service"),
        ("/system.slice/qwen.service/nested", "qwen.service"),
        ("/init.scope", "init.scope"),
        ("/user.slice/user-0.slice/user@0.service/init.scope", "user@0.service"),
        ("/user.slice/user-0.slice/user@0.service/app.slice/x.service", None),
        ("/user.slice/user-0.slice/session-7.scope", None),
        ("/", None),
    ],
)
def test_a_pattern_that_fits_a_service_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, unit: t.Optional[str]
) -> None:
    monkeypatch.setattr(_inside, "command_lines", lambda refs, _limit: dict.fromkeys(refs, "x"))
    scan = _selection.by_pattern(".", "root")
    table = Table([process(10, cgroup="/"), process(11, cgroup=place)])
    if unit is None:
        assert [ref.pid for ref in scan(table, None, None).processes] == [10, 11]
    else:
        with pytest.raises(_selection.Refused, match='11 "p11" of the unit "%s"' % unit):
            scan(table, None, None)
        # What came to be during the stop is not refused any more, and not stopped.
        scan = _selection.by_pattern(".", "root")
        first = scan(Table([process(10, cgroup="/")]), None, None)
        assert [ref.pid for ref in scan(table, None, first).processes] == [10]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        *(("ssh.service", True), ("sshd.service", True), ("ssh@5-10.0.0.1:22-10.0.0.2:999.service", True)),
        *(("dbus.service", True), ("dbus-broker.service", True), ("systemd-udevd.service", True)),
        *(("sshx.service", False), ("dbus-x.service", False), ("my-ssh.service", False)),
        *(("systemd-nspawn@engine.service", False), ("systemd-vmspawn@engine.service", False)),
        *(("systemd-nspawn.service", True), ("systemd-fsck@nspawn@1.service", True)),
    ],
)
def test_units_that_the_host_and_the_way_to_it_need(monkeypatch: pytest.MonkeyPatch, name: str, refused: bool) -> None:
    monkeypatch.setattr(Table, "snapshot", lambda: Table([process(10, cgroup="/system.slice/" + name)]))
    monkeypatch.setattr(_selection._systemd, "require_floor", lambda: None)
    definitions(monkeypatch)
    if refused:
        for selector in ({"unit": name}, {"pid": 10}) if ":" not in name else ({"pid": 10},):
            with pytest.raises(_selection.Refused, match="this host"):
                _selection.select(selector)
    else:
        assert _selection.select({"unit": name}).unit == name
        assert _selection.select({"pid": 10}).warnings == [
            'the process 10 belongs to the unit "%s", which may start it again: stop the unit instead' % name
        ]


def test_the_ssh_server_and_its_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/user.slice/user-0.slice/session-7.scope"
    for name in ("sshd", "sshd-session", "sshd-auth"):
        table = Table([process(10, name=name, cgroup=place)])
        monkeypatch.setattr(Table, "snapshot", lambda table=table: table)
        with pytest.raises(_selection.Refused, match="is the SSH server or one of its connections"):
            _selection.by_pid(10, None, None)
        with pytest.raises(_selection.Refused, match='the pattern "ssh" is too wide: the process 10'):
            _selection.by_pattern("ssh", "root")(table, None, None)
        # One that comes during the stop is left alone.
        scan = _selection.by_pattern("ssh", "root")
        assert scan(table, None, scan(Table([]), None, None)).processes == {}
    table = Table([process(10, name="sshd-like", cgroup=place)])
    monkeypatch.setattr(Table, "snapshot", lambda: table)
    assert _selection.by_pid(10, None, None) is not None


USER_MANAGER = "/user.slice/user-1000.slice/user@1000.service"


@pytest.mark.parametrize("place", ["/app.slice/x.service", "/app.slice/x.scope", "/x.service/nested", "/session.slice"])
def test_nobody_is_told_to_stop_the_manager_of_a_user(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """It would end all of that user's work, and is refused."""
    table = Table([process(10, cgroup=USER_MANAGER + place)])
    monkeypatch.setattr(Table, "snapshot", lambda: table)
    chosen = _selection.select({"pid": 10})
    assert chosen.scan is not None
    assert chosen.warnings == []


@pytest.mark.parametrize("created", [None, 1.0])
@pytest.mark.parametrize("selector", ["pid", "pidfile"])
def test_who_was_checked_is_who_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, selector: str, created: t.Optional[float]
) -> None:
    """However often the process table is read meanwhile, and whoever bears the number by then."""
    path = tmp_path / "engine.pid"
    path.write_text("10\n")
    checked = process(10, cgroup="/", name="engine")
    heir = process(10, cgroup="/system.slice/other.service", ref=ProcessRef(10, 150), name="heir", uid=1)
    shown = [checked]
    monkeypatch.setattr(Table, "snapshot", lambda: Table([shown.pop(0) if shown else heir]))
    given = {"pid": 10} if selector == "pid" else {"pidfile": str(path)}
    chosen = _selection.select(dict(given, create_time=created))
    assert chosen.scan is not None
    assert chosen.warnings == []
    assert chosen.scan(Table([heir]), None, None).processes == {}
    assert set(chosen.scan(Table([checked]), None, None).processes) == {checked.ref}


class Lines:
    """The command lines of a made-up host, and how often each was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: t.Dict[int, str] = {}
        self.read: t.List[int] = []
        monkeypatch.setattr(_inside, "command_lines", self)

    def __call__(self, refs: t.Iterable[ProcessRef], _limit: float) -> t.Dict[ProcessRef, str]:
        wanted = list(refs)
        self.read += [ref.pid for ref in wanted]
        return {ref: self.texts[ref.pid] for ref in wanted if ref.pid in self.texts}


def fitting(scan: t.Any, previous: t.Any, *processes: Process) -> t.Any:
    return scan(Table(processes), None, previous)


def pids(owned: t.Any) -> t.List[int]:
    return sorted(ref.pid for ref in owned.processes)


def test_a_worker_that_becomes_another_program_during_the_stop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    lines.texts = {10: "serve it", 11: "sh -c worker"}
    scan = _selection.by_pattern("^serve|^WORKER", "root")
    front = process(10, cgroup="/", settled=True)
    first = fitting(scan, None, front, process(11, cgroup="/", name="python3"))
    assert pids(first) == [10]
    lines.texts[11] = "serve worker"  # the same name, another program
    assert pids(fitting(scan, first, front, process(11, cgroup="/", name="python3"))) == [10, 11]
    assert lines.read == [10, 11, 11]


def test_who_takes_on_another_name_during_the_stop_is_found_however_old(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    lines.texts = {11: "x", 12: "x", 13: "x"}
    scan = _selection.by_pattern("^WORKER|^serve", "root")
    old = [process(pid, cgroup="/", name="python3", settled=True) for pid in (11, 12, 13)]
    owned = fitting(scan, None, *old)
    assert pids(owned) == []
    owned = fitting(scan, owned, *old)
    assert lines.read == [11, 12, 13]  # nobody is read again who has neither changed nor is young
    lines.texts[12] = "serve it"
    changed = [process(11, cgroup="/", name="WORKER", settled=True), process(12, cgroup="/", name="y", settled=True)]
    owned = fitting(scan, owned, *changed, old[2])
    assert pids(owned) == [11, 12]
    # Once it was meant it stays so, whatever it is called then.
    assert pids(fitting(scan, owned, *old)) == [11, 12]


def test_a_line_read_while_the_process_was_young_is_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines(monkeypatch)
    lines.texts = {11: "sh"}
    scan = _selection.by_pattern("^serve", "root")
    owned = fitting(scan, None, process(11, cgroup="/"))
    lines.texts = {11: "serve"}
    owned = fitting(scan, owned, process(11, cgroup="/", settled=True))
    assert pids(owned) == [11]
    fitting(scan, owned, process(11, cgroup="/", settled=True))
    assert lines.read == [11, 11]


@pytest.mark.parametrize(
    "facts", [{"cgroup": "/system.slice/x.service"}, {"cgroup": "/", "name": "sshd"}, {"cgroup": "/", "uid": 1}]
)
def test_whoever_comes_to_fit_is_left_alone_where_the_first_look_would_refuse_it(
    monkeypatch: pytest.MonkeyPatch, facts: t.Dict[str, t.Any]
) -> None:
    lines = Lines(monkeypatch)
    lines.texts = {11: "sh"}
    scan = _selection.by_pattern("^serve", "root")
    owned = fitting(scan, None, process(11, **facts))
    lines.texts = {11: "serve"}
    for _look in range(2):
        owned = fitting(scan, owned, process(11, **facts))
        assert pids(owned) == []


def test_a_text_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[t.List[str]] = []
    right = _selection._search
    monkeypatch.setattr(_selection, "_search", lambda p, texts, first: asked.append(texts) or right(p, texts, first))
    Lines(monkeypatch).texts = {11: "a", 12: "a", 13: "b"}
    scan = _selection.by_pattern("^serve", "root")
    owned = None
    for _look in range(3):
        owned = fitting(scan, owned, *(process(pid, cgroup="/", name="python3") for pid in (11, 12, 13)))
    assert asked == [["a", "b", "python3"], [], []]


def test_a_process_in_a_container_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ab" * 32
    table = Table([process(10, cgroup="/system.slice/docker-%s.scope" % name)])
    monkeypatch.setattr(Table, "snapshot", lambda: table)
    [text] = _selection.select({"pid": 10}).warnings
    assert text.endswith('the container "%s", which may start it again: stop the container instead' % name)


def test_a_user_may_be_a_number_that_no_account_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([process(10, uid=54321, cgroup="/")])
    monkeypatch.setattr(Table, "snapshot", lambda: table)
    assert _selection.by_pid(10, None, "54321") is not None
    with pytest.raises(_selection.Refused, match='belongs to the user "54321", not to "root"'):
        _selection.by_pid(10, None, "root")
    with pytest.raises(UsageError, match='the user "nobody-here" does not exist'):
        _selection.by_pid(10, None, "nobody-here")


DEFAULTS: t.Dict[str, t.Any] = {
    "signal": "TERM",
    "grace": None,
    "kill_grace": 10.0,
    "timeout": None,
    "order": "parent_first",
    "protected": [],
    "allow_foreign_users": False,
    "reset_failed": False,
}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "nothing is named that could be stopped"),
        ({"pid": 7, "gpus": ["0"]}, '"pid" and "gpus" exclude each other'),
        ({"service": "qwen", "pid": 7}, '"service" and "pid" exclude each other'),
        ({"service": "qwen"}, 'no unit is known for the service "qwen"'),
        ({"service": "qwen", "gpus": ["0"]}, '"service" and "gpus" exclude each other'),
        ({"pattern": "x"}, '"pattern" needs "user"'),
        ({"pattern": "x", "user": ""}, '"user" is empty'),
        ({"pattern": "x", "user": "root", "create_time": 5.0}, '"create_time" says which process is meant'),
        ({"unit": "x", "create_time": 5.0}, '"create_time" says which process is meant'),
        ({"unit": "x", "user": "root"}, '"user" has no meaning for a unit'),
        ({"gpus": ["0"], "user": "root", "create_time": 5.0}, '"create_time" says which process is meant'),
        ({"gpus": ["0"], "user": ""}, '"user" is empty'),
        ({"unit": "x", "allowed_holders": []}, '"allowed_holders" says who may go on to hold "gpus"'),
        ({"pid": 7, "engine": "vllm"}, '"engine" tells what the processes of a unit are called'),
        ({"unit": "x", "engine": "nosuch"}, 'the engine "nosuch" is not known'),
        ({"pid": 7, "protected": ["a", ""]}, '"protected" holds an empty name'),
        ({"pid": 7, "grace": -1.0}, '"grace" must be at least 0'),
        ({"pid": 7, "timeout": float("nan")}, '"timeout" must be a number'),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, params: t.Dict[str, t.Any], said: str
) -> None:
    monkeypatch.setattr(Table, "snapshot", lambda **_known: pytest.fail("the processes were looked at"))
    monkeypatch.setattr(_selection._systemd, "require_floor", lambda: None)
    definitions(monkeypatch)
    for check_mode in (True, False):
        with pytest.raises(UsageError, match=said):
            _stopping.stop(dict(DEFAULTS, **params), check_mode)


def test_a_protected_name_is_found_however_it_is_written() -> None:
    """The kernel cuts names: a longer one in the list would protect nobody."""
    assert _stopping._protected(["nv", "nvidia-persistenced", "a b\xff"]) == (
        "nv",
        "nvidia-persistenced",
        "a b\xff",
        "nvidia-persiste",
    )
    assert _stopping._protected(["two\nlines"]) == ("two\nlines", "two\\nlines")


def test_warnings_of_the_looks_are_told_even_when_the_stop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _selection.Selection("it", None)

    def scan(_table: Table, _state: t.Any, _previous: t.Any) -> t.Any:
        chosen.warnings.append("seen by a look")
        raise _selection.Refused("no")

    chosen.scan = scan
    monkeypatch.setattr(_selection, "select", lambda _params: chosen)
    told: t.List[str] = []
    with pytest.raises(_selection.Refused) as refused:
        _stopping.stop(dict(DEFAULTS, pid=7), False, warn=told.append)
    assert "seen by a look" in told
    assert refused.value.result["verdict"] == "refused"
    assert refused.value.result["processes"] == []
    assert refused.value.result["changed"] is False


@pytest.mark.parametrize(("verdict", "raised"), [("stopped", True), ("absent", True), ("survivors", False)])
def test_a_doubt_about_the_looks_is_no_good_end(monkeypatch: pytest.MonkeyPatch, verdict: str, raised: bool) -> None:
    chosen = _selection.Selection("it", lambda *_look: pytest.fail("looked"), doubt=lambda: "the driver is silent")
    monkeypatch.setattr(
        _stopping.Stopper, "run", lambda _self, _check: {"verdict": verdict, "msg": "x", "changed": True}
    )
    if raised:
        with pytest.raises(ServingError, match="the driver is silent") as failed:
            _stopping.carry_out(chosen, _stopping.Options(), False)
        assert failed.value.result == {"verdict": "error", "msg": "x", "changed": True}
    else:
        assert _stopping.carry_out(chosen, _stopping.Options(), False)["verdict"] == "survivors"


def test_the_titles_are_those_of_the_engine_or_of_the_service_that_names_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    definitions(monkeypatch, a={"unit": "qwen.service", "engine": "vllm"}, b={"unit": "x.service", "engine": "strange"})
    for engine, unit, name, fits in (
        ("vllm", "y.service", "VLLM::Worker", True),
        ("sglang", "qwen.service", "VLLM::Worker", False),
        (None, "qwen.service", "VLLM::Worker", True),
        (None, "qwen.service", "my-VLLM::Worker", False),
    ):
        titles = _selection._titles(engine, unit)
        assert titles is not None
        assert bool(titles.search(name)) is fits
    for engine, unit in ((None, "x.service"), (None, "y.service"), ("openai", "y.service")):
        assert _selection._titles(engine, unit) is None


def test_a_service_names_the_titles_of_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"profile": {"titles": ["^mine::"]}}
    definitions(monkeypatch, a={"unit": "qwen.service", **own}, b={"unit": "x.service", "engine": "vllm", **own})
    for engine, unit, definition in ((None, "qwen", {}), (None, "x.service", {}), ("vllm", "y.service", own)):
        titles = _selection._titles(engine, unit, definition)
        assert titles is not None
        assert titles.search("mine::worker")
        assert not titles.search("VLLM::Worker")


def test_a_unit_brings_its_containers_and_they_are_kept() -> None:
    """The tracker is shown what is owned without them, and what is in them is owned from then on."""
    first, second = "ab" * 32, "cd" * 32
    table = Table(
        [
            process(10, cgroup="/system.slice/qwen.service"),
            *(process(20 + n, cgroup="/system.slice/docker-%s.scope" % name) for n, name in enumerate((first, second))),
        ]
    )
    state = _selection.UnitState("qwen.service", control_group="/system.slice/qwen.service")
    asked: t.List[t.List[int]] = []
    told = [[first], [first], [second], [second], []]

    class Tracker:
        def containers(self, _table: t.Any, _state: t.Any, owned: t.Any) -> t.Dict[str, t.Any]:
            asked.append(sorted(ref.pid for ref in owned.processes))
            return {name: Container("docker", name, "qwen") for name in told.pop(0)}

    scan = _selection.by_unit(None, None, Tracker())  # type: ignore[arg-type]
    owned = scan(table, state, None)
    assert {ref.pid: ways for ref, ways in owned.processes.items()} == {10: ["cgroup"], 20: ["container"]}
    assert asked == [[10], [10, 20]]
    for _look in range(2):
        owned = scan(table, state, owned)
        assert sorted(ref.pid for ref in owned.processes) == [10, 20, 21]
        assert set(owned.containers) == {first, second}
