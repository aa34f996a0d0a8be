# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import math
import os
import time
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _files, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError

RUNNING = """Restart=always
TimeoutStopUSec=1min 30s
MainPID=812
ControlPID=0
ExecMainPID=812
ExecMainCode=0
NRestarts=3
Result=success
ControlGroup=/system.slice/sglang.service
KillMode=process
Id=sglang.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
NeedDaemonReload=yes
InvocationID=5d2f9c1f9a3c4b6c8a4a3e0f3d6d5b11
"""


def test_a_running_unit() -> None:
    state = _systemd.parse_show("sglang.service", RUNNING)
    assert (state.name, state.load_state, state.active_state) == ("sglang.service", "loaded", "active")
    assert (state.main_pid, state.n_restarts, state.job) == (812, 3, 0)
    assert state.timeout_stop == 90.0
    assert state.kill_mode == "process"
    assert state.need_reload is True
    assert state.raw["ExecMainPID"] == "812"
    assert state.found and not state.at_rest


def test_what_systemd_stops_together_with_a_unit_is_named() -> None:
    text = "Id=a.service\nRequiredBy=gpuops.target side.service\nBoundBy=b.service\nConsistsOf=side.service\n"
    assert _systemd.parse_show("a.service", text).as_result()["stops_with"] == ["b.service", "side.service"]
    assert _systemd.parse_show("a.service", "Id=a.service\n").stops_with == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ('org.freedesktop.systemd1.BadUnitSetting "Unit a.service has a bad unit file setting."',)
        + ("Unit a.service has a bad unit file setting",),
        ('org.freedesktop.DBus.Error.InvalidArgs "Unknown "x" here."', 'Unknown "x" here'),
        ("something else.", "something else"),
        ("", ""),
    ],
)
def test_why_a_unit_cannot_be_loaded_is_told_in_words(error: str, text: str) -> None:
    assert _systemd.parse_show("a.service", "Id=a.service\nLoadError=%s\n" % error).load_error == text


@pytest.mark.parametrize(
    ("answers", "failed"),
    [
        ("ConditionResult=no\nAssertResult=no\nConditionTimestampMonotonic=0\n", False),
        ("ConditionResult=no\nAssertResult=no\nConditionTimestampMonotonic=17963018747\n", True),
        ("ConditionResult=yes\nAssertResult=no\nConditionTimestampMonotonic=17963018747\n", True),
        ("ConditionResult=yes\nAssertResult=yes\nConditionTimestampMonotonic=17963018747\n", False),
        ("", False),
    ],
)
def test_a_condition_that_was_never_looked_at_is_not_unmet(answers: str, failed: bool) -> None:
    assert _systemd.parse_show("a.service", "Id=a.service\n" + answers).condition_failed is failed


@pytest.mark.parametrize("kind", ["FragmentPath", "DropInPaths", "EnvironmentFiles"])
@pytest.mark.parametrize(("age", "changed"), [(10, True), (1000, False)])
def test_a_file_written_after_the_start_is_a_change(tmp_path: t.Any, kind: str, age: float, changed: bool) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    os.utime(path, (time.time() - age, time.time() - age))
    started = int((time.monotonic() - 100) * 1e6)
    text = "Id=a.service\nExecMainStartTimestampMonotonic=%d\n%s=/none %s (ignore_errors=no)\n" % (started, kind, path)
    assert _systemd.parse_show("a.service", text).as_result()["changed_since_start"] is changed
    assert not _systemd.parse_show("a.service", text.replace(str(started), "0")).changed_since_start


def test_only_files_that_may_be_elsewhere_are_looked_at_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child for each answer costs more than a look, and a look at a dead file server hangs."""
    far: t.List[t.Any] = []
    looked: t.List[str] = []
    real = os.stat
    monkeypatch.setattr(_bounded, "run", lambda _look, limit, key: far.append((limit, key)) or _bounded.Outcome("ok"))
    monkeypatch.setattr(_files.os, "stat", lambda path, *rest, **more: looked.append(path) or real(path, *rest, **more))
    started = int((time.monotonic() - 100) * 1e6)
    links = ("/etc/mtab", "/etc/os-release")
    assert os.path.islink(links[0]) or os.path.islink(links[1])
    for paths, near, away in (
        ("/etc/hostname /etc/default/none", ["/etc/hostname", "/etc/default/none"], False),
        (
            "/run/systemd/system/none.service /usr/lib/none",
            ["/run/systemd/system/none.service", "/usr/lib/none"],
            False,
        ),
        ("/home/engine/env", [], True),
        ("/etc/hostname /srv/env", ["/etc/hostname"], True),
        ("/etc/../srv/env", [], True),
        ("/run/user/5/env", [], True),
        (next(link for link in links if os.path.islink(link)), [], True),
    ):
        looked.clear()
        far.clear()
        text = "ExecMainStartTimestampMonotonic=%d\nFragmentPath=%s\n" % (started, paths)
        _systemd.parse_show("a.service", text).as_result()
        assert ([path for path in looked if isinstance(path, str)], far) == (
            near,
            [(_systemd.LOOKING, "files-of-a.service")] * away,
        )


def test_a_file_on_a_dead_server_does_not_hold_up_the_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: t.Any) -> None:
    real = os.stat

    def stat(path: t.Any, *rest: t.Any, **more: t.Any) -> t.Any:
        if str(path).endswith("stuck"):
            time.sleep(60)
        return real(path, *rest, **more)

    (tmp_path / "changed").write_text("")
    started = int((time.monotonic() - 100) * 1e6)
    text = "ExecMainStartTimestampMonotonic=%d\nEnvironmentFiles=%s/changed (ignore_errors=no) %s/stuck\n"
    monkeypatch.setattr(_files.os, "stat", stat)
    monkeypatch.setattr(_systemd, "LOOKING", 0.3)
    began = time.monotonic()
    assert _systemd.parse_show("a.service", text % (started, tmp_path, tmp_path)).changed_since_start
    assert time.monotonic() - began < 5


def test_when_a_main_process_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_systemd, "_suspended", lambda: 0.0)
    text = "ExecMainStartTimestampMonotonic=%s\nExecMainExitTimestampMonotonic=%s\n"
    state = _systemd.parse_show("a.service", text % ("50000000", "60000000"))
    assert (state.began, state.ended) == ((50.0, 50.0), (60.0, 60.0))
    found = [state.in_last_life(moment) for moment in (48.9, 49.1, 55.0, 60.9, 61.1)]
    assert found == [False, True, True, True, False]
    assert [state.in_last_life(moment, 4.0) for moment in (64.9, 65.1)] == [True, False]
    monkeypatch.setattr(_systemd, "_suspended", lambda: 8.0)
    assert (state.began, state.ended) == ((50.0, 58.0), (60.0, 68.0))
    assert [state.in_last_life(moment) for moment in (56.9, 57.1, 60.9, 61.1)] == [False, True, True, False]
    for began, ended, lives in (("", "", None), ("0", "0", None), ("x", "-1", None), ("70000000", "60000000", True)):
        state = _systemd.parse_show("a.service", text % (began, ended))
        assert (state.ended, state.in_last_life(1e9)) == (None, bool(lives))


def test_how_long_the_host_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_systemd.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(_systemd.time, "clock_gettime", lambda clock: {time.CLOCK_BOOTTIME: 130.0}[clock])
    assert _systemd._suspended() == 30.0


def test_a_unit_that_does_not_exist_is_a_state() -> None:
    state = _systemd.parse_show("x.service", "Id=x.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead\n")
    assert not state.found
    assert state.at_rest


def test_a_unit_that_outlived_its_file_is_found() -> None:
    assert _systemd.parse_show("x.service", "LoadState=not-found\nActiveState=active\n").found


def test_a_queued_job_is_not_rest() -> None:
    assert not _systemd.parse_show("x.service", "LoadState=loaded\nActiveState=inactive\nJob=44\n").at_rest


@pytest.mark.parametrize(
    ("active", "sub", "runs", "between_lives", "at_rest"),
    [
        ("active", "running", True, False, False),
        ("activating", "start-pre", True, False, False),
        ("reloading", "reload", True, False, False),
        ("refreshing", "refresh", True, False, False),
        ("activating", "auto-restart", False, True, False),
        ("activating", "auto-restart-queued", False, True, False),
        ("failed", "failed-before-auto-restart", False, True, False),
        ("deactivating", "stop-sigterm", False, False, False),
        ("failed", "failed", False, False, True),
        ("inactive", "dead", False, False, True),
    ],
)
def test_a_unit_between_two_lives_neither_runs_nor_rests(
    active: str, sub: str, runs: bool, between_lives: bool, at_rest: bool
) -> None:
    state = _systemd.UnitState("x.service", active_state=active, sub_state=sub)
    assert (state.runs, state.between_lives, state.at_rest) == (runs, between_lives, at_rest)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1min 30s", 90.0),
        ("5s", 5.0),
        ("1h 2min 3s", 3723.0),
        ("1d", 86400.0),
        ("500ms", 0.5),
        ("1min 30.5s", 90.5),
        ("infinity", math.inf),
        ("", math.inf),
        ("0", 0.0),
        ("90000000", 90.0),
    ],
)
def test_time_spans(text: str, seconds: float) -> None:
    assert _systemd.parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("qwen", "qwen.service"),
        ("qwen.service", "qwen.service"),
        ("a@b", "a@b.service"),
        ("gpuops.target", "gpuops.target"),
    ],
)
def test_unit_names(given: str, full: str) -> None:
    assert _systemd.unit_name(given) == full


@pytest.mark.parametrize("name", ["", "a b", "--now", "a;b", "ä", "foo\n", "foo.service\n"])
def test_names_that_are_not_units(name: str) -> None:
    if name == "--now":
        assert _systemd.unit_name(name) == "--now.service"  # every call ends its options with --
        return
    with pytest.raises(UsageError, match="is not usable: it is not a systemd unit name"):
        _systemd.unit_name(name)


@pytest.mark.parametrize("sign", ["\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"])
def test_only_a_line_feed_ends_a_line(monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    state = _systemd.parse_show("a.service", "Id=a.service\nLoadError=x%sMainPID=7\nMainPID=5\n" % sign)
    assert (state.main_pid, state.raw["LoadError"]) == (5, "x%sMainPID=7" % sign)
    state = _systemd.parse_show("a.service", "MainPID=5\nStatusText=x%sMainPID=7\n" % sign)
    assert state.main_pid == 5
    Calls(monkeypatch, (0, "1 b.service start x%s2 a.service start y\n3 a.service stop z\n" % sign, ""))
    assert _systemd.job_type("a.service") == "stop"


class Calls:
    """Answers of systemctl, in turn, and the commands that asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: t.Tuple[int, str, str]) -> None:
        self.commands: t.List[t.List[str]] = []
        left = list(answers)

        def call(arguments: t.List[str], _timeout: float) -> t.Tuple[int, str, str]:
            self.commands.append(arguments)
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(_systemd, "call", call)
        monkeypatch.setattr(_systemd, "present", lambda: True)


def test_start_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, (0, "", ""))
    _systemd.start("qwen")
    assert calls.commands == [
        ["systemctl", "--no-pager", "--no-ask-password", "start", "--no-block", "--", "qwen.service"]
    ]


def test_a_refused_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, (1, "", "Failed to start qwen.service: Unit qwen.service is masked."))
    with pytest.raises(ServingError) as caught:
        _systemd.start("qwen")
    assert caught.value.message == (
        'the unit "qwen.service" was not started: Failed to start qwen.service: Unit qwen.service is masked'
    )


def test_resetting_a_unit_that_is_not_loaded_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, (1, "", "Failed to reset failed state of unit qwen.service: Unit qwen.service not loaded."))
    _systemd.reset_failed("qwen")
    Calls(monkeypatch, (1, "", "Failed to reset failed state: Access denied"))
    with pytest.raises(ServingError, match="was not reset: Failed to reset failed state: Access denied"):
        _systemd.reset_failed("qwen")


def test_an_old_systemd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(monkeypatch, (0, "systemd 245 (245.4-4ubuntu3)\n+PAM", ""))
    with pytest.raises(ServingError, match="systemd 245 is too old: 247 or newer is required"):
        _systemd.require_floor()
    Calls(monkeypatch, (0, "systemd 257 (257.4-1)\n", ""))
    _systemd.require_floor()


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(_systemd.NoAnswer, match=r"did not answer within 0\.2 s"):
        _systemd.call(["sleep", "30"], 0.2)


def test_a_command_that_is_missing() -> None:
    with pytest.raises(ServingError, match='the command "no-such-tool" cannot run: No such file'):
        _systemd.call(["no-such-tool"], 1.0)


def test_a_host_without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_systemd, "present", lambda: False)
    with pytest.raises(ServingError, match="systemd does not manage this host"):
        _systemd.show("qwen")


class Bus:
    """A systemd that is being executed anew: its answers in turn, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: t.Tuple[int, str, str]) -> None:
        self.now, self.limits = 100.0, []  # type: float, t.List[float]
        left = list(answers)

        def call(_arguments: t.List[str], timeout: float) -> t.Tuple[int, str, str]:
            self.limits.append(timeout)
            return left.pop(0) if len(left) > 1 else left[0]

        def sleep(seconds: float) -> None:
            self.now += seconds

        monkeypatch.setattr(_systemd, "call", call)
        monkeypatch.setattr(_systemd, "present", lambda: True)
        monkeypatch.setattr(_systemd.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(_systemd.time, "sleep", sleep)


BROKEN = [
    "Message recipient disconnected from message bus without replying",
    "Failed to get properties: Transport endpoint is not connected",
    "Failed to connect to bus: Connection refused",
    "Failed to stop x.service: Connection reset by peer",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_connection_that_breaks_is_no_answer_about_the_unit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    bus = Bus(monkeypatch, (1, "", text), (1, "", text), (0, "Id=x.service\nMainPID=5\n", ""))
    assert _systemd.show("x", 10.0).main_pid == 5
    assert bus.now == pytest.approx(100.4)
    assert bus.limits == pytest.approx([10.0, 9.8, 9.6])


@pytest.mark.parametrize("text", BROKEN)
def test_a_request_on_a_connection_that_stays_broken_may_have_been_heard(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    bus = Bus(monkeypatch, (1, "", text))
    with pytest.raises(_systemd.NoAnswer) as caught:
        _systemd.request_stop("x", 1.0)
    assert caught.value.message == "systemd could not be reached for 1 s: %s" % text
    assert 100.7 <= bus.now <= 101.0


def test_a_refusal_is_not_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(monkeypatch, (1, "", "Access denied"))
    with pytest.raises(ServingError, match="was not stopped: Access denied"):
        _systemd.request_stop("x", 1.0)
    assert bus.limits == [1.0]


def test_a_command_that_does_not_answer_is_named_without_long_lists() -> None:
    many = "--property=" + ",".join("Property%d" % number for number in range(40))
    assert _systemd._named(["systemctl", "show", many, "--output=json", "--", "x" * 90 + ".service"]) == (
        "systemctl show --property=... --output=json -- " + "x" * 90 + ".service"
    )
    with pytest.raises(_systemd.NoAnswer) as caught:
        _systemd.call(["sh", "-c", "exec sleep 60", many], 0.1)
    assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("7", 7), (b"7", 7), (str(2**64 - 1), 2**64 - 1)),
        # Digits of other scripts, and what is too long for Python to read at all.
        *(("", 0), (b"", 0), ("x", 0), (b"-1", 0), ("\u00b2", 0), ("\u0663", 0), ("9" * 5000, 0), (b"9" * 5000, 0)),
    ],
)
def test_a_number_is_one_that_systemd_writes_or_none(text: t.Union[str, bytes], number: int) -> None:
    assert _systemd.number(text) == number
