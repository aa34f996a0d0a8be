# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import pathlib
import signal
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _accounts, _inside, _processes
from ansible_collections.gpuops.serving.plugins.module_utils._processes import ProcessRef, Table


def write_process(proc: pathlib.Path, pid: int, **facts: t.Any) -> None:
    """A process of a made-up /proc."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = [
        facts.get("state", "S"),
        facts.get("ppid", 1),
        facts.get("pgrp", pid),
        facts.get("session", pid),
        *(0, -1),
        facts.get("flags", 0),
        *(0, 0, 0, 0),
        *facts.get("ticks", (7, 3)),
        *(0, 0, 20, 0),
        facts.get("threads", 1),
        0,
        facts.get("start", 1000),
        *(0, 0),
    ]
    name = facts.get("name", b"engine")
    (folder / "stat").write_bytes(b"%d (%s) " % (pid, name) + " ".join(map(str, fields)).encode() + b"\n")
    (folder / "status").write_text(
        "Name:\tx\nUid:\t%d\t0\t0\t0\nGid:\t5\t5\t5\t5\nNSpid:\t%s\nGroups:\t%s \n"
        % (facts.get("uid", 0), facts.get("nspid", str(pid)), facts.get("groups", "20 30"))
    )
    (folder / "cgroup").write_text(facts.get("cgroup", "0::/system.slice/qwen.service\n"))


@pytest.fixture(name="proc")
def fixture_proc(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1700000000\n")
    (tmp_path / "self").mkdir()
    return tmp_path


def test_a_row_of_the_table(proc: pathlib.Path) -> None:
    write_process(proc, 77, name=b"VLLM::EngineCor", uid=0, threads=9, start=250)
    process = Table.snapshot(str(proc)).get(77)
    assert process is not None
    assert process.ref == ProcessRef(77, 250)
    assert process.name == "VLLM::EngineCor"
    assert process.user == "root"
    assert process.gids == (5, 20, 30)
    assert process.threads == 9
    assert process.cpu_ticks == 10
    assert process.cgroup == "/system.slice/qwen.service"
    assert process.create_time == 1700000000 + 250 / os.sysconf("SC_CLK_TCK")
    assert not process.kernel_thread


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"a b", "a b"),
        (b"x) S 1 (y", "x) S 1 (y"),
        (b"(((", "((("),
        (b"two\nlines", "two\\nlines"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("münchen".encode(), "münchen"),
        (b"back\\n", "back\\\\n"),
        (b"", ""),
    ],
)
def test_names(proc: pathlib.Path, raw: bytes, name: str) -> None:
    write_process(proc, 5, name=raw, ppid=4)
    process = Table.snapshot(str(proc)).get(5)
    assert process is not None
    assert (process.name, process.ppid) == (name, 4)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("4:memory:/other\n1:name=systemd:/system.slice/a.service\n0::/\n", "/system.slice/a.service"),
        ("1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n", "/system.slice/a.service"),
        ("0::/\n", "/"),
        ("1:name=systemd:/\n0::/\n", "/"),
        ("0::/system.slice/a.service (deleted)\n", "/system.slice/a.service"),
        ("0::/a:b.slice/c.service\n", "/a:b.slice/c.service"),
        # Whoever may make a group may name it so; only the kernel's newline ends a line.
        ("0::/user.slice/x\v0::/system.slice/victim.service\n", "/user.slice/x\v0::/system.slice/victim.service"),
        ("0::/x\u20280::/y\n", "/x\u20280::/y"),
        ("", ""),
    ],
)
def test_the_hierarchy_that_systemd_tracks(proc: pathlib.Path, text: str, path: str) -> None:
    write_process(proc, 5, cgroup=text)
    process = Table.snapshot(str(proc)).get(5)
    assert process is not None
    assert process.cgroup == path


@pytest.mark.parametrize(
    ("state", "threads", "gone"),
    [
        ("S", 1, False),
        ("D", 1, False),
        ("T", 1, False),
        ("Z", 1, True),
        ("Z", 0, True),
        ("Z", 4, False),
        ("X", 1, True),
    ],
)
def test_what_counts_as_gone(proc: pathlib.Path, state: str, threads: int, gone: bool) -> None:
    write_process(proc, 5, state=state, threads=threads)
    process = Table.snapshot(str(proc)).get(5)
    assert process is not None
    assert process.gone is gone


LEGACY = "1:name=systemd:%s\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ({}, "/"),
        ({"5": "/", "6": "/", "7": "/system.slice/qwen.service"}, "/system.slice/qwen.service"),
        # Whichever comes last in the alphabet is not more right than another.
        ({"5": "/", "6": "/a.slice", "10": "/z.slice"}, "/a.slice"),
        ({"5": "/", "6": None, "7": "/a.slice"}, "/a.slice"),
        ({"5": "/", "6": None}, "/"),
        (None, "/"),
    ],
)
def test_the_group_of_a_process_whose_main_thread_has_ended(
    proc: pathlib.Path, groups: t.Optional[t.Dict[str, t.Optional[str]]], path: str
) -> None:
    """Its other threads tell; with none left to ask, it is still a process."""
    write_process(proc, 5, state="Z", threads=4, cgroup=LEGACY % "/")
    for thread, group in (groups or {}).items():
        (proc / "5" / "task" / thread).mkdir(parents=True)
        if group is not None:
            (proc / "5" / "task" / thread / "cgroup").write_text(LEGACY % group)
    if groups == {}:
        (proc / "5" / "task").mkdir()
    process = Table.snapshot(str(proc)).get(5)
    assert process is not None
    assert process.cgroup == path


def test_the_threads_of_a_process(proc: pathlib.Path) -> None:
    for thread in ("10", "9", "100"):
        (proc / "9" / "task" / thread).mkdir(parents=True)
    assert _processes.threads(9, str(proc)) == ["9", "10", "100"]
    assert _processes.threads(8, str(proc)) == []
    assert str(os.getpid()) in _processes.threads("self")


def test_a_directory_server_is_asked_once_for_each_account(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: t.List[t.Any] = []

    def unknown(key: t.Any) -> t.NoReturn:
        asked.append(key)
        raise KeyError(key)

    for room in ("pwd.getpwuid", "pwd.getpwnam", "grp.getgrgid"):
        monkeypatch.setattr(room, unknown)
    kept = (_accounts.account, _accounts.account_of, _accounts.group_name)
    for known in kept:
        known.cache_clear()
    try:
        for _look in range(3):
            assert _processes.user_name(4321) == "4321"
            assert (_accounts.account_of("nobody-here"), _accounts.group_name(4322)) == (None, "")
        assert asked == [4321, "nobody-here", 4322]
    finally:
        for known in kept:
            known.cache_clear()


def test_a_process_that_ends_while_it_is_read_is_left_out(proc: pathlib.Path) -> None:
    write_process(proc, 5)
    (proc / "5" / "status").unlink()
    write_process(proc, 6)
    assert [process.pid for process in Table.snapshot(str(proc))] == [6]


def test_a_table_of_some_processes_alone(proc: pathlib.Path) -> None:
    for pid in (5, 6, 7):
        write_process(proc, pid)
    table = Table.of([7, 5, 8, 7], str(proc))  # 8 has ended
    assert table.proc == str(proc)
    assert [process.pid for process in table] == [7, 5]


def test_descendants_are_listed_nearest_first_and_cycles_end(proc: pathlib.Path) -> None:
    for pid, ppid in ((10, 1), (11, 10), (12, 11), (13, 10), (20, 21), (21, 20)):
        write_process(proc, pid, ppid=ppid)
    table = Table.snapshot(str(proc))
    assert [process.pid for process in table.descendants([10])] == [11, 13, 12]
    assert [process.pid for process in table.descendants([20])] == [21]
    assert table.descendants([99]) == []
    assert [process.pid for process in table.children(10)] == [11, 13]


def test_kernel_threads(proc: pathlib.Path) -> None:
    write_process(proc, 5, flags=0x00208040)
    process = Table.snapshot(str(proc)).get(5)
    assert process is not None and process.kernel_thread


def test_a_reference_only_finds_its_own_process(proc: pathlib.Path) -> None:
    write_process(proc, 5, start=100)
    table = Table.snapshot(str(proc))
    assert table.by_ref(ProcessRef(5, 100)) is not None
    assert table.by_ref(ProcessRef(5, 101)) is None
    assert table.by_ref(ProcessRef(6, 100)) is None


def test_own_line_holds_oneself_and_all_ancestors() -> None:
    line = _processes.own_line(Table.snapshot())
    assert {os.getpid(), os.getppid(), 1} <= line


def test_a_wrong_identity_is_never_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: t.List[t.Any] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *args: sent.append(args), raising=False)
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    own = Table.snapshot().get(os.getpid())
    assert own is not None
    assert _processes.send(ProcessRef(own.pid, own.ref.start - 1), signal.SIGTERM) == "gone"
    assert _processes.send(ProcessRef(2**22 + 5, 1), signal.SIGTERM) == "gone"
    assert sent == []
    assert _processes.send(own.ref, 0) == "sent"
    assert len(sent) == 1


@pytest.mark.parametrize("missing", [True, False])
def test_signals_without_pidfd(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    sent: t.List[t.Any] = []
    if missing:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    else:

        def refused(_pid: int) -> int:
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    own = Table.snapshot().get(os.getpid())
    assert own is not None
    assert _processes.send(own.ref, signal.SIGTERM) == "sent"
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_a_signal_that_the_kernel_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", denied, raising=False)
    monkeypatch.setattr(os, "kill", denied)
    own = Table.snapshot().get(os.getpid())
    assert own is not None
    assert _processes.send(own.ref, signal.SIGTERM) == "denied"


def test_a_command_line_that_hangs_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def read(ref: ProcessRef) -> str:
        if ref.pid == 2:
            time.sleep(30)
        return "line %d" % ref.pid

    monkeypatch.setattr(_inside, "_command_line", read)
    refs = [ProcessRef(pid, 0) for pid in (1, 2, 3)]
    began = time.monotonic()
    assert _inside.command_lines(refs, timeout=2.5) == {refs[0]: "line 1", refs[2]: "line 3"}
    assert time.monotonic() - began < 3.5


def test_a_process_that_did_nothing_is_the_same_row_and_one_that_did_is_not(
    proc: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_process(proc, 5)
    write_process(proc, 6)
    monkeypatch.setattr(_processes, "YOUNG", float("-inf"))
    table = Table.snapshot(str(proc))
    stat = (proc / "6" / "stat").read_bytes()
    (proc / "6" / "stat").write_bytes(stat.replace(b") S ", b") T "))
    again = Table.snapshot(str(proc), known=table)
    assert again.get(5) is table.get(5)
    process = again.get(6)
    assert process is not None and process.state == "T"
    monkeypatch.setattr(_processes, "YOUNG", float("inf"))
    young = Table.snapshot(str(proc))
    assert Table.snapshot(str(proc), known=young).get(5) is not young.get(5)
