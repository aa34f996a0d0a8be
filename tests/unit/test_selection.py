# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From what an operator names to the processes meant."""

from __future__ import annotations

import os
import pathlib
import time
import types
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _processes, _selection, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Table
from host import process


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

    def load(name: str) -> t.Dict[str, t.Any]:
        definition = found[name]
        if isinstance(definition, ServingError):
            raise definition
        return definition

    monkeypatch.setattr(_service, "names", lambda: sorted(found))
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


def test_command_lines_that_cannot_be_read_do_not_make_every_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: t.List[float] = []
    monkeypatch.setattr(_selection.time, "monotonic", lambda: sum(limits))
    monkeypatch.setattr(_processes, "command_lines", lambda _refs, limit: limits.append(limit) or {})
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
    monkeypatch.setattr(_selection.os, "fstat", lambda fd: facts if fd >= 0 else real(fd))
    monkeypatch.setattr(Table, "snapshot", lambda: Table([process(10, uid=uid)]))
    found = _selection.pid_in_file(str(path))
    monkeypatch.undo()
    monkeypatch.setattr(Table, "snapshot", lambda: Table([process(10, uid=uid)]))
    if why is None:
        assert _selection.by_pidfile(str(path), found, None, None) is not None
    else:
        with pytest.raises(_selection.Refused, match=why):
            _selection.by_pidfile(str(path), found, None, None)


def test_a_pattern_that_would_never_end_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "command_lines", lambda refs, _limit: dict.fromkeys(refs, "a" * 64 + "!"))
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
    monkeypatch.setattr(_processes, "command_lines", lambda refs, _limit: dict.fromkeys(refs, "x"))
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
