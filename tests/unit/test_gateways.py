# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gateway_haproxy, _gateways, _lease
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Clock
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._gateways import Server

STATISTICS = """\
# pxname,svname,qcur,qmax,scur,smax,slim,stot,status,weight,act,bck,check_status
front,FRONTEND,,,3,9,99,100,OPEN,,,,
qwen,gpu1,0,0,2,5,,50,UP,100,1,0,L7OK
qwen,gpu2,1,0,3,5,,50,DRAIN,0,1,0,L7OK
qwen,gpu3,0,0,0,5,,50,MAINT,100,1,0,
qwen,gpu4,0,0,0,5,,50,no check,1,1,0,
qwen,gpu5,0,0,0,5,,50,UP 1/3,50,1,0,* L7STS
qwen,BACKEND,0,0,5,9,99,100,UP,150,2,0,
other,gpu1,0,0,0,5,,50,DOWN,100,1,0,L4CON

"""
STATE = """\
1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight
3 qwen 1 gpu1 10.0.0.1 2 0 1 1
3 qwen 2 gpu2 10.0.0.2 2 8 1 1
3 qwen 3 gpu3 10.0.0.3 0 5 1 1
3 qwen 4 gpu4 10.0.0.4 2 0 1 1
3 qwen 5 gpu5 10.0.0.5 2 64 1 1
4 other 1 gpu1 10.0.0.1 0 0 1 1

"""
UP = Server("ready", "UP", 0, 100, True)


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


class Gateway:
    """A gateway whose server a loses a session a second, and is found up ``rise`` seconds after it was put back."""

    backend = "qwen"

    def __init__(self, a: Server, *others: Server, rise: float = 0) -> None:
        self.clock = FakeClock()
        self.a, self.others, self.rise = a, others, rise
        self.at = 0.0
        self.told: t.List[str] = []

    def servers(self) -> t.Dict[str, Server]:
        now = self.a
        if now.withdrawn:
            now = now._replace(sessions=max(0, now.sessions - int(self.clock.now)))
        elif self.told and self.clock.now < self.at + self.rise:
            now = now._replace(operational="DOWN 1/2")
        found = {"a": now}
        found.update({"s%d" % number: other for number, other in enumerate(self.others)})
        return found

    def set_state(self, server: str, state: str) -> None:
        self.told.append("%s %s" % (server, state))
        self.at = self.clock.now
        self.a = self.a._replace(admin="drain" if state == "drained" else "ready")

    def change(self, state: str, timeout: float = 10, interval: float = 0.5, **options: t.Any) -> _gateways.Change:
        return _gateways.change(self, "a", state, timeout, interval, clock=self.clock, **options)


def test_haproxy_is_read_from_both_tables() -> None:
    found = _gateway_haproxy.parse(STATISTICS, STATE, "qwen")
    assert found == {
        "gpu1": Server("ready", "UP", 2, 100, True),
        # Requests that wait for this very server count as sessions.
        "gpu2": Server("drain", "DRAIN", 4, 0, True),
        "gpu3": Server("maint", "MAINT", 0, 100, True),
        "gpu4": Server("ready", "no check", 0, 1, False),
        "gpu5": Server("ready", "UP 1/3", 0, 50, True),
    }
    assert [name for name, server in found.items() if server.serves] == ["gpu1", "gpu5"]


def test_a_name_that_would_be_another_command_is_refused() -> None:
    with pytest.raises(UsageError):
        _gateway_haproxy.Haproxy("/s", "qwen", "gpu1 state ready; show info")


@pytest.mark.parametrize("path", ["/run/" + "x" * 200, "/run/" + "\u00e9" * 60, "/run/s\0"])
def test_a_path_that_no_socket_can_have_is_refused(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        _gateway_haproxy.Haproxy(path, "qwen", "gpu1")
    assert caught.value.message.endswith("is no path of a socket: it may have 107 bytes")


def test_the_backends_of_a_gateway_are_known_and_another_program_has_none() -> None:
    assert _gateway_haproxy.backends(STATE) == ["other", "qwen"]
    assert _gateway_haproxy.backends("HTTP/1.1 400 Bad Request\n# x\ny") == []
    assert _gateway_haproxy.parse("HTTP/1.1 400 Bad Request", "Bad Request", "qwen") == {}


def test_a_server_drains_until_two_looks_find_no_session() -> None:
    gateway = Gateway(UP._replace(sessions=4), UP)
    done = gateway.change("drained")
    assert (done.verdict, done.changed, done.before.sessions, done.after.sessions) == ("drained", True, 4, 0)
    assert gateway.told == ["a drained"]
    assert gateway.clock.now == pytest.approx(4.5)


def test_sessions_that_are_left_make_it_busy_and_leave_it_withdrawn() -> None:
    gateway = Gateway(UP._replace(sessions=40), UP)
    done = gateway.change("drained")
    assert (done.verdict, done.after.admin) == ("busy", "drain")
    assert done.msg == 'the server "a" gets no new requests, but after 10 s it still has 30 sessions'


def test_no_time_means_one_look() -> None:
    assert Gateway(UP._replace(sessions=1), UP).change("drained", timeout=0).verdict == "busy"
    assert Gateway(UP, UP).change("drained", timeout=0).verdict == "drained"


@pytest.mark.parametrize(
    ("sessions", "timeout", "verdict"),
    [(0, 2, "drained"), (1, 2, "drained"), (2, 2, "drained"), (9, 2, "busy"), (0, 0, "drained"), (1, 0, "busy")],
)
def test_a_long_interval_never_outlasts_the_time_that_is_left(sessions: int, timeout: float, verdict: str) -> None:
    gateway = Gateway(UP._replace(sessions=sessions), UP)
    assert gateway.change("drained", timeout, 3600).verdict == verdict
    assert gateway.clock.now <= timeout + 0.3
    gateway = Gateway(UP._replace(admin="drain"), rise=sessions)
    assert gateway.change("ready", timeout, 3600).verdict == ("ready" if sessions <= timeout else "error")
    assert gateway.clock.now <= timeout + 0.3


def test_it_is_idempotent() -> None:
    gateway = Gateway(UP._replace(admin="drain", operational="DRAIN"))
    assert gateway.change("drained").changed is False
    assert Gateway(UP).change("ready").changed is False
    assert gateway.told == []


def test_maintenance_by_somebody_else_counts_as_withdrawn_and_is_not_touched() -> None:
    gateway = Gateway(UP._replace(admin="maint", operational="MAINT"))
    done = gateway.change("drained")
    assert (done.verdict, done.changed, gateway.told) == ("drained", False, [])


@pytest.mark.parametrize(
    ("a", "others", "min_healthy", "verdict"),
    [
        (UP, [UP, UP], 2, "drained"),
        (UP, [UP], 2, "refused"),
        (UP, [], 1, "refused"),
        (UP, [], 0, "drained"),
        (UP, [UP._replace(operational="DOWN")], 1, "refused"),
        (UP, [UP._replace(admin="drain")], 1, "refused"),
        (UP, [UP._replace(weight=0)], 1, "refused"),
        (UP, [UP._replace(operational="no check", checked=False)], 1, "refused"),
        # What is down takes nothing away when it goes.
        (UP._replace(operational="DOWN"), [], 1, "drained"),
        (UP._replace(operational="no check", checked=False), [], 1, "refused"),
        (UP._replace(admin="drain"), [], 1, "drained"),
    ],
)
def test_too_few_healthy_others_are_a_refusal(
    a: Server, others: t.List[Server], min_healthy: int, verdict: str
) -> None:
    gateway = Gateway(a, *others)
    done = gateway.change("drained", min_healthy=min_healthy)
    assert done.verdict == verdict
    if verdict == "refused":
        assert (done.changed, gateway.told) == (False, [])


def test_a_refusal_says_how_many_there_are() -> None:
    assert Gateway(UP, UP).change("drained", min_healthy=2).msg == (
        'the server "a" is not withdrawn from the backend "qwen": 2 healthy others must stay, and those that are '
        'healthy are: "s0"; to withdraw it all the same, set min_healthy: 0'
    )


def test_ready_waits_until_the_gateway_finds_it_up() -> None:
    gateway = Gateway(UP._replace(admin="drain"), rise=3)
    done = gateway.change("ready")
    assert (done.verdict, done.changed, done.after.operational) == ("ready", True, "UP")
    assert 3 <= gateway.clock.now < 4


def test_a_server_that_does_not_come_up_is_an_error() -> None:
    done = Gateway(UP._replace(admin="drain"), rise=30).change("ready")
    assert (done.verdict, done.msg) == (
        "error",
        'the server "a" is put back, but after 10 s the gateway does not send to it: the gateway says DOWN 1/2',
    )


@pytest.mark.parametrize(
    ("checked", "weight", "verdict", "msg"),
    [
        (
            True,
            0,
            "error",
            'the server "a" is put back, but after 10 s the gateway does not send to it: its weight is 0',
        ),
        (
            False,
            0,
            "error",
            'the server "a" is put back, but after 10 s the gateway does not send to it: its weight is 0',
        ),
        (False, 1, "ready", 'the gateway sends requests to the server "a", but it does not check its health'),
        (True, 1, "ready", 'the gateway sends requests to the server "a" (UP)'),
    ],
)
def test_ready_says_what_it_rests_on(checked: bool, weight: int, verdict: str, msg: str) -> None:
    words = "UP" if checked else "no check"
    done = Gateway(Server("ready", words, 0, weight, checked), UP).change("ready")
    assert (done.verdict, done.msg, done.as_dict()["health_checked"]) == (verdict, msg, checked)
    withdrawn = Gateway(Server("drain", "DRAIN", 0, 1, True), UP).change("drained")
    assert withdrawn.as_dict()["health_checked"] is None


def test_a_lock_that_is_held_names_the_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: t.Any) -> None:
    monkeypatch.setattr(_lease, "LOCK_FOLDER", str(tmp_path))
    with _gateways.exclusive("/run/s", "qwen"), pytest.raises(ServingError) as caught:
        with _gateways.exclusive("/run/s", "qwen", 0):
            raise AssertionError("both hold the lock")
    assert caught.value.result["verdict"] == "refused"
    assert caught.value.message == (
        'the backend "qwen" of the gateway at "/run/s" is being changed by process %d and was not free within 0 s: '
        "wait for it to end, then try again" % os.getpid()
    )
    with _gateways.exclusive("/run/s", "qwen"), _gateways.exclusive("/run/s", "other", 0):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": -1},
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"min_healthy": -1},
        {"interval": -1},
        {"interval": float("inf")},
        {"interval": float("nan")},
    ],
)
def test_limits_below_the_least_touch_nothing(options: t.Dict[str, t.Any]) -> None:
    gateway = Gateway(UP, UP)
    with pytest.raises(UsageError):
        gateway.change("drained", **options)
    assert gateway.told == []


def test_check_mode_changes_nothing_and_takes_no_time() -> None:
    gateway = Gateway(UP._replace(sessions=9), UP)
    done = gateway.change("drained", check_mode=True)
    assert (done.verdict, done.changed, done.after, gateway.told) == ("drained", True, done.before, [])
    assert gateway.clock.now == 0
    assert done.msg == 'the server "a" would be withdrawn'


def test_somebody_who_puts_it_back_meanwhile_is_noticed() -> None:
    gateway = Gateway(UP._replace(sessions=9), UP)
    original = gateway.servers

    def servers() -> t.Dict[str, Server]:
        if gateway.clock.now > 2:
            gateway.a = gateway.a._replace(admin="ready")
        return original()

    gateway.servers = servers  # type: ignore[method-assign]
    assert gateway.change("drained").verdict == "error"
