# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The journal as journalctl exports it, from a stand-in that prints what a test wrote down."""

from __future__ import annotations

import os
import pathlib
import struct
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _journal, _journal_reader, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError

ACTIVE = _systemd.UnitState("x.service", active_state="active", sub_state="running", main_pid=7, invocation_id="ab")
DEAD = _systemd.UnitState("x.service", active_state="failed", sub_state="failed", invocation_id="ab")


def entry(message: t.Union[str, bytes, None], number: int = 1, **fields: str) -> bytes:
    """An entry as journalctl writes it: what is no printable text comes with its length before it."""
    given = {
        "__CURSOR": "s=%d" % number,
        "__REALTIME_TIMESTAMP": "1700000000000000",
        "__MONOTONIC_TIMESTAMP": str(number),
        "_BOOT_ID": "b1",
        "_PID": "77",
        "PRIORITY": "4",
        "_SYSTEMD_INVOCATION_ID": "ab",
    }
    given.update(fields)
    data = b"".join(b"%s=%s\n" % (name.encode(), value.encode()) for name, value in given.items())
    if isinstance(message, str):
        data += b"MESSAGE=%s\n" % message.encode()
    elif message is not None:
        data += b"MESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\n"
    return data + b"\n"


def messages(data: bytes, piece: int = 1 << 20) -> t.List[str]:
    parser = _journal.Parser()
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    return [record.message for part in pieces for record in parser.feed(part)]


def test_a_record() -> None:
    (record,) = _journal.Parser().feed(entry("Load weight begin.", 42))
    assert record == _journal.Record(
        "s=42", 1700000000000000, 42, "ab", 77, 4, "Load weight begin.", boot="b1", dropped=0
    )


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("plain", ["plain"]),
        (
            b"Loading:  25%|##\rLoading:  50%|####\rLoading: 75%",
            ["Loading:  25%|##", "Loading:  50%|####", "Loading: 75%"],
        ),
        (b"bad \xff byte", ["bad \ufffd byte"]),
        (b"\x1b[32mgreen\x1b[0m text", ["green text"]),
        (b"\x1b]8;;http://x\x07link\x1b]8;;\x1b\\ and \x07bell", ["link and bell"]),
        (None, [""]),
        ("", [""]),
        (b"a\nb", ["a", "b"]),
        (b"MESSAGE=inside\n\n__CURSOR=s=9", ["MESSAGE=inside", "__CURSOR=s=9"]),
        ("a = b = c", ["a = b = c"]),
        ("a\x85b\u2028c", ["a\x85b\u2028c"]),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_messages(message: t.Union[str, bytes, None], lines: t.List[str], piece: int) -> None:
    assert messages(entry(message) + entry("next", 2), piece) == [*lines, "next"]


def test_a_message_in_several_fields_is_one_line_each() -> None:
    data = entry("one").replace(b"MESSAGE=one\n", b"MESSAGE=one\nMESSAGE=two\n")
    assert messages(data) == ["one", "two"]


def test_what_journalctl_remarks_between_entries_is_no_record() -> None:
    data = b"-- No entries --\n" + entry("x") + b"-- Boot 0123456789abcdef0123456789abcdef --\n" + entry("y", 2)
    assert messages(data) == ["x", "y"]


@pytest.mark.parametrize("piece", [4096, 100003])
@pytest.mark.parametrize("binary", [False, True])
def test_a_message_without_end_is_cut_and_never_kept_whole(binary: bool, piece: int) -> None:
    text = "y" * (3 << 20)
    data = entry(text.encode() if binary else text) + entry("next", 2)
    parser = _journal.Parser()
    found, most = [], 0
    for at in range(0, len(data), piece):
        found += [record.message for record in parser.feed(data[at : at + piece])]
        most = max(most, len(parser._data))
    assert found == ["y" * 4096, "next"]
    assert most <= _journal.FIELD_LIMIT + piece + 16


def test_a_message_of_very_many_lines_is_bounded() -> None:
    found = messages(entry(b"\r".join(b"%d" % number for number in range(9000))))
    assert len(found) == 1000 and found[-1] == "8999"


# A whole call, by a program of that name


class Journalctl:
    """Prints the file ``out``, and follows it where it is asked to; notes how it was called."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.log, self.err, self.status = (folder / name for name in ("out", "calls", "err", "status"))
        self.out.write_bytes(b"")
        self.err.write_bytes(b"")
        self.status.write_text("0")
        program = folder / "bin" / "journalctl"
        program.parent.mkdir()
        program.write_text(
            '#!/bin/sh\ncd %s\necho "$@" >>calls\ncat err >&2\ncase "$*" in\n'
            "*--follow*) cat follow; exec sleep 60 ;;\n*) cat out; exit $(cat status) ;;\nesac\n" % folder
        )
        program.chmod(0o755)
        (folder / "follow").write_bytes(b"")
        self.follow = folder / "follow"
        monkeypatch.setenv("PATH", "%s:%s" % (program.parent, os.environ["PATH"]))

    @property
    def calls(self) -> t.List[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def journalctl(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Journalctl:
    return Journalctl(tmp_path, monkeypatch)


def test_the_journal_of_one_run_has_systemds_own_lines_too(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("x"))
    found = _journal.journal("qwen", invocation="ab", after_cursor="s=9", lines=7)
    assert [record.message for record in found] == ["x"]
    (command,) = journalctl.calls
    assert "--all" in command and "--lines=7" in command and "--after-cursor=s=9" in command
    assert command.endswith(
        "_SYSTEMD_INVOCATION_ID=ab + INVOCATION_ID=ab UNIT=qwen.service + OBJECT_SYSTEMD_INVOCATION_ID=ab _UID=0"
    )


def test_a_failure_is_one_sentence(journalctl: Journalctl) -> None:
    journalctl.status.write_text("1")
    journalctl.err.write_text("Failed to seek to cursor: Invalid argument\n")
    with pytest.raises(ServingError) as caught:
        _journal.journal("qwen")
    assert caught.value.message == (
        'the journal of the unit "qwen" cannot be read: Failed to seek to cursor: Invalid argument'
    )
    assert _journal.remarks() == ["Failed to seek to cursor: Invalid argument"]
    assert journalctl.calls[-1] == "--no-pager --lines=0"


def test_a_journal_that_never_ends_costs_no_more_than_the_time_and_the_bytes(
    journalctl: Journalctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _journal.Stream(["--follow"])
    began = time.monotonic()
    assert b"".join(stream.read(0.2)) == b""
    assert 0.2 <= time.monotonic() - began < 2.0
    stream.close()
    journalctl.out.write_bytes(b"".join(entry("z" * 100, number) for number in range(2000)))
    monkeypatch.setattr(_journal, "READ_LIMIT", 100000)
    few = _journal.Stream(["x"])
    assert 100000 <= len(b"".join(few.read(5.0, 100000))) <= 100000 + 65536
    few.close()


def test_without_the_program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: t.Any, **_options: t.Any) -> t.NoReturn:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(_journal.subprocess, "Popen", fail)
    reader = _journal_reader.Reader("x.service")
    assert reader.read(ACTIVE) == []
    assert list(reader.warnings.values()) == ['the command "journalctl" cannot run: No such file or directory']


# Following one unit


def lines(reader: _journal_reader.Reader, state: _systemd.UnitState = ACTIVE, wanted: int = 0) -> t.List[str]:
    """What the reader tells; a follower is given the time to start."""
    found: t.List[str] = []
    end = time.monotonic() + 10
    while True:
        found += [record.message for record in reader.read(state)]
        if len(found) >= wanted or time.monotonic() > end:
            return found
        time.sleep(0.01)


def test_each_line_is_told_once_by_one_program_that_follows(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1) + entry("two", 2))
    journalctl.follow.write_bytes(entry("two", 2) + entry("three", 3))
    reader = _journal_reader.Reader("x.service")
    assert lines(reader) == ["one", "two"]
    assert lines(reader, wanted=1) == ["three"]
    for _look in range(5):
        assert lines(reader) == []
    assert len(journalctl.calls) == 2
    assert "--lines=2000" in journalctl.calls[0] and "_SYSTEMD_INVOCATION_ID=ab" in journalctl.calls[0]
    assert "--follow --no-tail" in journalctl.calls[1] and "--after-cursor=s=2" in journalctl.calls[1]
    assert reader.warnings == {}
    reader.close()


def test_all_that_a_dead_unit_wrote_is_there_at_once(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    reader = _journal_reader.Reader("x.service")
    assert lines(reader) == ["one"]
    journalctl.out.write_bytes(entry("last words", 2))
    assert lines(reader, DEAD) == ["last words"]
    assert [call for call in journalctl.calls if "--lines=5000" in call and "--after-cursor=s=1" in call] != []
    reader.close()


def test_a_later_slice_goes_on_after_the_last_line(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    first = _journal_reader.Reader("x.service")
    lines(first)
    saved = first.save()
    first.close()
    second = _journal_reader.Reader("x.service")
    second.restore(saved)
    journalctl.out.write_bytes(entry("two", 2))
    assert lines(second) == ["two"]
    assert [call for call in journalctl.calls if "--lines=5000" in call and "--after-cursor=s=1" in call] != []
    second.close()


def test_a_place_that_was_vacuumed_away_repeats_nothing(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1) + entry("two", 2))
    first = _journal_reader.Reader("x.service")
    lines(first)
    first.close()
    program = pathlib.Path(os.environ["PATH"].split(":")[0]) / "journalctl"
    text = program.read_text().replace(
        "case", 'case "$*" in *after-cursor=s=2*) echo no such cursor >&2; exit 1 ;; esac\ncase', 1
    )
    program.write_text(text)
    second = _journal_reader.Reader("x.service")
    second.restore(first.save())
    journalctl.out.write_bytes(entry("one", 1) + entry("two", 2) + entry("three", 3))
    assert lines(second) == ["three"]
    assert second.warnings == {}
    second.close()


def test_lines_that_journald_left_out_are_counted_and_said(journalctl: Journalctl) -> None:
    note = entry("Suppressed 412 messages from x.service", 2, _PID="200", N_DROPPED="412")
    journalctl.out.write_bytes(entry("one") + note)
    reader = _journal_reader.Reader("x.service")
    assert [record.dropped for record in reader.read(ACTIVE)] == [0, 412]
    assert list(reader.warnings.values()) == [
        'the journal left out 412 lines of the unit "x.service", which wrote too many at once'
    ]
    reader.close()


@pytest.mark.parametrize(
    ("said", "status", "warning"),
    [
        (
            "Hint: You are currently not seeing messages from other users and the system.",
            0,
            'the journal of the unit "x.service" cannot be read in full: run as root, or with become',
        ),
        (
            "No journal files were opened due to insufficient permissions.",
            1,
            'the journal of the unit "x.service" cannot be read in full: run as root, or with become',
        ),
        (
            "No journal files were found.",
            0,
            "this host keeps no journal: what the service writes cannot be seen there",
        ),
        (
            "Journal file /var/log/journal/a/system.journal corrupted, ignoring file.",
            0,
            "a part of the journal cannot be read: Journal file /var/log/journal/a/system.journal corrupted, "
            "ignoring file",
        ),
        (
            "Failed to open journal: Oh",
            1,
            'the journal of the unit "x.service" cannot be read: Failed to open journal: Oh',
        ),
    ],
)
def test_what_cannot_be_read_is_said_and_ends_nothing(
    journalctl: Journalctl, said: str, status: int, warning: str
) -> None:
    journalctl.err.write_text(said + "\n")
    journalctl.status.write_text(str(status))
    reader = _journal_reader.Reader("x.service")
    for _look in range(3):
        assert reader.read(ACTIVE) == []
    assert list(reader.warnings.values()) == [warning]
    assert len(journalctl.calls) == 2  # the journal, and what is wrong with it; not at each look
    reader.close()


def test_a_new_life_is_read_at_once(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    reader = _journal_reader.Reader("x.service")
    lines(reader)
    journalctl.out.write_bytes(entry("crashed", 2) + entry("again", 3, _SYSTEMD_INVOCATION_ID="cd"))
    next_life = _systemd.UnitState(**dict(vars(ACTIVE), invocation_id="cd"))
    assert lines(reader, next_life) == ["crashed"]
    saved = reader.save()
    assert (saved["cursor"], saved["stamp"]) == ("s=2", 2)
    assert lines(reader, next_life) == ["again"]
    assert reader.save()["cursor"] == "s=3"
    reader.close()


def test_a_life_that_begins_between_two_slices_is_told_apart_from_the_last_one(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    first = _journal_reader.Reader("x.service")
    lines(first)
    saved = first.save()
    first.close()
    second = _journal_reader.Reader("x.service")
    second.restore(saved)
    journalctl.out.write_bytes(entry("crashed", 2) + entry("again", 3, _SYSTEMD_INVOCATION_ID="cd"))
    next_life = _systemd.UnitState(**dict(vars(ACTIVE), invocation_id="cd"))
    assert lines(second, next_life) == ["crashed"]
    assert second.save()["cursor"] == "s=2"
    assert lines(second, next_life) == ["again"]
    second.close()


def test_a_later_slice_asks_first_once_and_then_follows(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    first = _journal_reader.Reader("x.service")
    lines(first)
    first.close()
    second = _journal_reader.Reader("x.service")
    second.restore(first.save())
    before = len(journalctl.calls)
    journalctl.out.write_bytes(entry("two", 2))
    journalctl.follow.write_bytes(entry("three", 3))
    assert lines(second) == ["two"]
    assert lines(second, wanted=1) == ["three"]
    for _look in range(5):
        assert lines(second) == []
    assert ["--follow" in call for call in journalctl.calls[before:]] == [False, True]
    second.close()


def test_a_follower_that_ends_is_begun_again_and_not_at_each_look(
    journalctl: Journalctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    journalctl.follow.write_bytes(entry("two", 2))
    program = pathlib.Path(os.environ["PATH"].split(":")[0]) / "journalctl"
    program.write_text(program.read_text().replace("cat follow; exec sleep 60", "cat follow; exit 0"))
    reader = _journal_reader.Reader("x.service")
    assert lines(reader) == ["one"]
    assert lines(reader, wanted=1) == ["two"]
    end = time.monotonic() + 5
    while reader._follower is not None and time.monotonic() < end:
        reader.read(ACTIVE)
    reader.read(ACTIVE)
    assert reader._follower is None and len(journalctl.calls) == 2
    reader._next = 0.0
    journalctl.follow.write_bytes(entry("three", 3))
    assert lines(reader, wanted=1) == ["three"]
    assert "--after-cursor=s=2" in journalctl.calls[2]
    reader.close()


def test_a_journal_that_is_too_slow_costs_its_patience_once_and_is_followed_from_then_on(
    journalctl: Journalctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_journal_reader, "PATIENCE", 0.2)
    program = pathlib.Path(os.environ["PATH"].split(":")[0]) / "journalctl"
    program.write_text(program.read_text().replace("cat out; exit", "exec sleep 60; exit"))
    journalctl.follow.write_bytes(entry("from now on", 9))
    reader = _journal_reader.Reader("x.service")
    assert reader.read(ACTIVE) == []
    assert list(reader.warnings.values()) == ['the journal of the unit "x.service" did not answer within 0.2 s']
    assert lines(reader, wanted=1) == ["from now on"]
    began = time.monotonic()
    for _look in range(20):
        reader.read(ACTIVE)
    assert time.monotonic() - began < 0.2
    assert len(journalctl.calls) == 2 and "--follow --lines=0" in journalctl.calls[1]
    saved = reader.save()
    assert saved["cursor"] == "s=9"
    reader.close()
    for cursor in ("s=9", None):
        later = _journal_reader.Reader("x.service")
        later.restore(dict(saved, cursor=cursor))
        began = time.monotonic()
        later.read(ACTIVE)
        assert time.monotonic() - began < 0.15 and later._follower is not None
        later.close()


def test_a_unit_that_is_known_by_an_alias_is_followed_by_its_name(journalctl: Journalctl) -> None:
    """In the journal an alias names nothing: without an error, a question by it answers nothing."""
    journalctl.out.write_bytes(entry("one", 1))
    reader = _journal_reader.Reader("alias.service")
    assert lines(reader) == ["one"]
    journalctl.follow.write_bytes(entry("two", 2))
    assert lines(reader, wanted=1) == ["two"]
    reader.close()
    journalctl.out.write_bytes(entry("three", 3))
    assert lines(reader, DEAD) == ["three"]
    assert [call for call in journalctl.calls if "alias" in call] == []
    assert len([call for call in journalctl.calls if "--unit=x.service" in call]) == 2
    assert "UNIT=x.service" in journalctl.calls[0]


FORGOTTEN = _systemd.UnitState("x.service", active_state="inactive", sub_state="dead")
PID_1 = {"_PID": "1", "_SYSTEMD_INVOCATION_ID": "", "INVOCATION_ID": ""}


@pytest.mark.parametrize(
    ("written", "told"),
    [
        # The last life, with a process that was gone before journald could look it up.
        (
            [
                entry("older", 1, _SYSTEMD_INVOCATION_ID="cd"),
                entry("Starting x.service...", 2),
                entry("said", 3, _SYSTEMD_INVOCATION_ID=""),
                entry("all done", 4),
            ],
            ["Starting x.service...", "said", "all done"],
        ),
        # A start after it that systemd skipped, or a unit that it cannot load.
        (
            [entry("older", 1), entry("x.service was skipped because of", 2, **PID_1), entry("again", 3, **PID_1)],
            ["x.service was skipped because of", "again"],
        ),
        ([entry("x.service was skipped because of", 1, **PID_1)], ["x.service was skipped because of"]),
        # Of an earlier boot.
        ([entry("long ago", 1, _BOOT_ID="b0")], []),
        ([], []),
    ],
)
def test_of_a_unit_that_systemd_has_forgotten_its_last_life_is_told(
    journalctl: Journalctl, monkeypatch: pytest.MonkeyPatch, written: t.List[bytes], told: t.List[str]
) -> None:
    monkeypatch.setattr(_journal_reader, "_boot", lambda: "b1")
    journalctl.out.write_bytes(b"".join(written))
    reader = _journal_reader.Reader("x.service")
    assert lines(reader, FORGOTTEN) == told
    asked = [call for call in journalctl.calls if "--unit=x.service" in call]
    assert len(asked) == 1 and "--lines=2000" in asked[0]
    reader.close()


def test_what_systemd_says_when_it_forgets_a_unit_is_told_at_once(journalctl: Journalctl) -> None:
    journalctl.out.write_bytes(entry("one", 1))
    reader = _journal_reader.Reader("x.service")
    assert lines(reader) == ["one"]
    journalctl.out.write_bytes(entry("all done", 2) + entry("x.service: Succeeded.", 3, **PID_1))
    assert lines(reader, FORGOTTEN) == ["all done", "x.service: Succeeded."]
    reader.close()


def test_the_boot_is_named_as_the_journal_does() -> None:
    assert len(_journal_reader._boot()) == 32
