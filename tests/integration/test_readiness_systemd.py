# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The wait under real systemd and a real journal, on the oldest and a newer host of the lab."""

from __future__ import annotations

import base64
import inspect
import json
import os
import re
import threading
import time
import typing as t
from pathlib import Path

import pytest
from fleet import Fleet

ENGINE = Path(__file__).resolve().parents[1] / "fakes" / "engine.py"
HOSTS = ("gpu1=bullseye,user=ops", "gpu2=bookworm")
OLD, NEW = "gpu1", "gpu2"
PORT = 9000
URL = "http://127.0.0.1:%d" % PORT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")


@pytest.fixture(scope="module")
def fleet() -> t.Iterator[Fleet]:
    found = Fleet("test-ready")
    found.down()
    found.up(HOSTS)
    try:
        found.install_agent()
        for host in (OLD, NEW):
            found.run(host, "mkdir -p /opt/fake")
            found.put(host, ENGINE, "/opt/fake/engine.py", "0755")
        yield found
    finally:
        found.down()


class Host:
    """One host with one unit at a time."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.count = 0

    def run(self, command: str, checked: bool = True) -> str:
        return self.fleet.run(self.name, command, checked=checked)

    def unit(self, arguments: str, **properties: str) -> str:
        """Write and start a unit that runs the simulated engine."""
        self.count += 1
        unit = "fake-%d.service" % self.count
        lines = ["[Service]", "ExecStart=/usr/bin/python3 /opt/fake/engine.py --port %d %s" % (PORT, arguments)]
        limits = {key: value for key, value in properties.items() if key.startswith("StartLimit")}
        lines += ["%s=%s" % pair for pair in properties.items() if pair[0] not in limits]
        lines += ["[Unit]", *("%s=%s" % pair for pair in limits.items())]
        text = "\\n".join(lines)
        self.run("printf '%b\\n' \"" + text + '" > /run/systemd/system/' + unit)
        self.run("systemctl daemon-reload; systemctl start --no-block " + unit)
        return unit

    def write(self, path: str, content: str) -> None:
        self.run("echo %s | base64 -d > %s" % (base64.b64encode((content + "\n").encode()).decode(), path))

    def script(self, text: str, **properties: str) -> str:
        """Write and start a unit that runs a shell script."""
        self.count += 1
        unit = "fake-%d.service" % self.count
        lines = ["[Unit]", "StartLimitBurst=2", "StartLimitIntervalSec=600"]
        lines += ["[Service]", "ExecStart=/bin/sh /opt/fake/%d.sh" % self.count]
        lines += ["%s=%s" % pair for pair in properties.items()]
        for path, content in (
            ("/opt/fake/%d.sh" % self.count, text),
            ("/run/systemd/system/" + unit, "\n".join(lines)),
        ):
            self.write(path, content)
        self.run("systemctl daemon-reload; systemctl start --no-block " + unit)
        return unit

    def define(self, unit: str, text: str) -> None:
        self.write("/run/systemd/system/" + unit, text)

    def wait(self, unit: t.Optional[str], **options: t.Any) -> t.Dict[str, t.Any]:
        given: t.Dict[str, t.Any] = {"url": URL, "engine": "sglang", "model": "tiny", "timeout": 40, "interval": 0.5}
        if unit:
            given["unit"] = unit
        given.update(options)
        return self.fleet.module(self.name, "wait_model_ready", **given)

    def clean(self) -> None:
        self.run("systemctl kill --signal=KILL 'fake-*.service'; systemctl stop 'fake-*.service'", checked=False)
        self.run("rm -f /run/systemd/system/fake-*; systemctl daemon-reload; systemctl reset-failed", checked=False)


@pytest.fixture
def old(fleet: Fleet) -> t.Iterator[Host]:
    host = Host(fleet, OLD)
    yield host
    host.clean()


def on_both_hosts(body: t.Callable[..., None]) -> t.Callable[..., None]:
    """The same test on both hosts at the same time: most of it is waiting."""

    def run(fleet: Fleet, **given: t.Any) -> None:
        failures: t.List[t.Tuple[str, BaseException]] = []

        def at(name: str) -> None:
            host = Host(fleet, name)
            try:
                body(host=host, **given)
            except BaseException as error:
                failures.append((name, error))
            finally:
                host.clean()

        threads = [threading.Thread(target=at, args=(name,)) for name in (OLD, NEW)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, error in failures:
            print("on %s: %r" % (name, error))
        if failures:
            raise failures[0][1]

    signature = inspect.signature(body)
    parameters = [one.replace(name="fleet") if one.name == "host" else one for one in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = body.__name__, body.__doc__
    return run


@on_both_hosts
def test_a_service_that_loads_becomes_ready_and_its_listener_is_its_own(host: Host) -> None:
    found = host.wait(host.unit("--workers 2 --topology daemon --load 8", KillMode="control-group"))
    assert (found["verdict"], found["tier_reached"], found["restarts"]) == ("ready", "generation", 0)
    tiers = {tier["name"]: tier for tier in found["tiers"]}
    assert "of the unit listens" in tiers["listener"]["detail"]
    assert 0 < tiers["listener"]["at"] < 12
    assert found["phase"] == "started"
    assert found["changed"] is False


def test_a_silent_load_that_computes_is_waited_for(old: Host) -> None:
    found = old.wait(old.unit("--load 9 --log silent --burn"), stall_timeout=4)
    assert found["verdict"] == "ready"


@pytest.mark.parametrize("log", ["silent", "repeat"])
def test_a_load_that_only_sleeps_is_stalled(old: Host, log: str) -> None:
    found = old.wait(old.unit("--load 60 --log %s" % log), stall_timeout=5)
    assert (found["verdict"], found["tier_reached"]) == ("stalled", "unit")
    assert found["elapsed"] < 12
    assert found["movement"].get("cpu", 99) > 4


def test_bars_without_line_ends_are_progress_and_the_percentage_is_shown(old: Host) -> None:
    unit = old.unit("--load 14 --log tqdm")
    found = old.wait(unit, stall_timeout=4, timeout=8)
    assert (found["verdict"], found["phase"]) == ("progressing", "loading_weights")
    assert 20 < found["percent"] < 90
    assert old.wait(unit, stall_timeout=4)["verdict"] == "ready"


@on_both_hosts
def test_a_crash_loop_is_reported_long_before_the_timeout(host: Host) -> None:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB."
    unit = host.unit("--load 60 --crash-after 1 --last-words '%s'" % words, Restart="always", RestartSec="1")
    found = host.wait(unit, max_restarts=2, timeout=60)
    assert (found["verdict"], found["restarts"]) == ("restart_loop", 2)
    cause = {"kind": "gpu_out_of_memory", "line": words, "figures": {"wanted_mib": 44001.3}}
    cause["holders"] = []  # the hosts have a GPU, and nobody else is on it
    assert found["cause"] == cause
    assert found["elapsed"] < 15


@on_both_hosts
def test_a_crash_without_restart_is_dead_at_once_and_the_last_word_is_kept(host: Host) -> None:
    unit = host.unit("--load 60 --crash-after 2 --exit-code 3 --last-words 'the tokenizer is sulking'")
    found = host.wait(unit)
    assert found["verdict"] == "dead"
    said = 'the unit "%s" is dead: it failed(, at [a-z ]+( [0-9]+ %%)?)?: its main process exited with status 3; next: '
    assert re.match(said % re.escape(unit), found["msg"]), found["msg"]
    assert found["cause"] == {"kind": "exited", "line": "the tokenizer is sulking"}
    assert found["elapsed"] < 6


def test_a_start_limit_that_was_hit_is_dead_and_says_so(old: Host) -> None:
    unit = old.unit(
        "--load 60 --crash-after 0.3",
        Restart="always",
        RestartSec="0.2",
        StartLimitBurst="2",
        StartLimitIntervalSec="60",
    )
    found = old.wait(unit, max_restarts=9)
    assert (found["verdict"], found["unit_state"]["active_state"]) == ("dead", "failed")
    assert "systemd gave up after" in found["msg"]


def test_a_main_process_that_is_killed_in_mid_load_is_dead_within_two_seconds(old: Host) -> None:
    unit = old.unit("--load 60 --log silent --burn")
    answer: t.List[t.Dict[str, t.Any]] = []
    waiting = threading.Thread(target=lambda: answer.append(old.wait(unit)))
    waiting.start()
    time.sleep(4)
    old.run("systemctl kill --signal=KILL --kill-who=main " + unit)
    killed = time.monotonic()
    waiting.join(20)
    assert time.monotonic() - killed < 3.5  # the way back of the answer included
    assert answer[0]["verdict"] == "dead"
    assert answer[0]["cause"]["kind"] == "killed"


STAMP = "$(date '+INFO %m-%d %H:%M:%S') [x.py:1] "
OLD_WORDS = "torch.OutOfMemoryError: CUDA out of memory"
# Two lives: the first one says of what it died, and the second one too, before anybody looks.
TWO_LIVES = """
if [ ! -e /run/fake-lives ]; then
    touch /run/fake-lives
    echo "%(stamp)s%(old)s"
    exit 1
fi
echo "%(stamp)sloading"
sleep 1.5
echo "%(stamp)s%(words)s"
sleep %(then)s
exit 3
"""


def is_awake(host: Host, unit: str) -> bool:
    return host.run("systemctl is-active " + unit, checked=False).strip() in ("active", "activating")


@pytest.mark.parametrize(
    ("stamp", "words", "then", "kind"),
    [
        (STAMP, "OSError: [Errno 98] address already in use", 9, "port_in_use"),
        (STAMP, "all is well", 9, "exited"),
        (STAMP, "OSError: [Errno 98] address already in use", 0, "port_in_use"),
        # Without stamps, only of the last line it is known that it is of this life.
        ("", "OSError: [Errno 98] address already in use", 9, "port_in_use"),
        ("", "all is well", 9, "exited"),
        ("", "all is well", 0, "exited"),
    ],
)
@on_both_hosts
def test_what_this_life_said_in_a_log_file_before_the_first_look_is_its_cause(
    host: Host, stamp: str, words: str, then: int, kind: str
) -> None:
    host.run("rm -f /run/fake-lives /run/fake-log; touch -d yesterday /run/fake-log")
    text = TWO_LIVES % {"stamp": stamp, "old": OLD_WORDS, "words": words, "then": then}
    unit = host.script(text, Restart="on-failure", RestartSec="2.5", StandardOutput="append:/run/fake-log")
    until = time.monotonic() + 30
    while words not in host.run("cat /run/fake-log") or (not then and is_awake(host, unit)):
        assert time.monotonic() < until
        time.sleep(0.3)
    found = host.wait(unit, log_path="/run/fake-log", timeout=40, stall_timeout=40)
    assert found["verdict"] == "dead", found
    assert (found["cause"] or {"kind": "exited"})["kind"] == kind
    assert OLD_WORDS not in str(found["cause"])
    assert any(OLD_WORDS in line for line in found["log_tail"])


# It answers twice, and then never again.
HANGING = """#!/bin/sh
echo >> /run/fake-calls
[ $(wc -l < /run/fake-calls) -gt 2 ] && exec sleep 60
exec /bin/systemctl "$@"
"""


@on_both_hosts
def test_a_systemctl_that_hangs_does_not_hold_up_the_end(host: Host) -> None:
    unit = host.unit("--load 60 --log silent --burn")
    try:
        host.run("rm -f /run/fake-calls")
        host.write("/usr/local/bin/systemctl", HANGING)
        host.run("chmod 755 /usr/local/bin/systemctl")
        found = host.wait(unit, timeout=12, stall_timeout=12)
    finally:
        host.run("rm -f /usr/local/bin/systemctl")
    assert found["verdict"] == "progressing", found
    assert 12 <= found["elapsed"] <= 13.5
    assert host.run("wc -l < /run/fake-calls").strip() in ("3", "4")


def test_another_program_on_the_port_is_the_wrong_server(old: Host) -> None:
    old.run("systemd-run --quiet --unit=fake-web python3 -m http.server %d" % PORT)
    unit = old.unit("--load 20")
    time.sleep(3)  # until it counts as stable
    found = old.wait(unit)
    assert (found["verdict"], found["tier_reached"]) == ("wrong_server", "unit")
    assert "fake-web.service" in found["msg"]
    assert found["elapsed"] < 5


def test_a_port_that_is_taken_is_named_when_the_engine_gives_up(old: Host) -> None:
    old.run("systemd-run --quiet --unit=fake-web python3 -m http.server %d" % PORT)
    unit = old.unit("--load 0")
    until = time.monotonic() + 15
    while is_awake(old, unit):
        assert time.monotonic() < until, "the engine did not give up"
        time.sleep(0.5)
    found = old.wait(unit)
    assert found["verdict"] == "dead"
    assert found["cause"]["kind"] == "port_in_use"
    assert "address already in use" in found["cause"]["line"]


# It answers, writes down whatever key comes to it, and lets others listen beside it, or takes the port when it can.
SERVER = """
import http.server, json, socket, sys, time
status, keys, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open(keys, "a") as seen:
            seen.write(self.headers.get("Authorization", "") + "\\n")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps({"data": [{"id": "tiny", "owned_by": "sglang"}], "model": "tiny",
            "choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
class Shared(http.server.HTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
Shared(("127.0.0.1", port), Handler).serve_forever()
"""
GO = "until [ -e /run/fake-go ]; do sleep 0.1; done; "


@pytest.mark.parametrize("way", ["left", "shared"])
@on_both_hosts
def test_a_port_that_comes_to_another_unit_gets_no_key_and_is_never_ready(host: Host, way: str) -> None:
    """The unit's own server still loads when it is killed, or when another listens beside it."""
    coded = base64.b64encode(SERVER.encode()).decode()
    host.run("echo %s | base64 -d > /opt/fake/server.py" % coded)
    host.run("rm -f /run/fake-go; : > /run/fake-own; : > /run/fake-keys")
    end = "kill -9 $k; " if way == "left" else ""
    own = "python3 /opt/fake/server.py 503 /run/fake-own %d & k=$!; " % PORT
    unit = host.script(own + GO + end + "exec sleep 300")
    host.script(GO + "sleep 0.2; exec python3 /opt/fake/server.py 200 /run/fake-keys %d" % PORT)
    answer: t.List[t.Dict[str, t.Any]] = []
    waiting = threading.Thread(target=lambda: answer.append(host.wait(unit, api_key="sk-of-the-unit")))
    waiting.start()
    until = time.monotonic() + 40
    while host.run("cat /run/fake-own").count("Bearer sk-of-the-unit") < 5:
        assert time.monotonic() < until
        time.sleep(0.2)
    host.run("touch /run/fake-go")
    waiting.join(60)
    (found,) = answer
    assert (found["verdict"], found["tier_reached"]) == ("wrong_server", "unit"), found["msg"]
    assert " belongs to another process than the unit's: " in found["msg"]
    assert "fake-%d.service" % host.count in found["msg"]
    assert host.run("cat /run/fake-keys") == ""


@pytest.mark.parametrize(
    ("arguments", "verdict", "tier"),
    [
        ("--model other", "wrong_server", "health"),
        ("--bug hang_post", "wedged", "model"),
        ("--bug error_500", "wedged", "model"),
        ("--bug wrong_model", "wrong_server", "model"),
        ("--bug html", "wrong_server", "listener"),
        ("--api-key secret", "auth_error", "health"),
    ],
)
def test_an_engine_that_listens_but_is_not_right_is_never_ready(
    old: Host, arguments: str, verdict: str, tier: str
) -> None:
    found = old.wait(old.unit("--load 1 " + arguments), generation_timeout=3, stall_timeout=10)
    assert (found["verdict"], found["tier_reached"]) == (verdict, tier), found["msg"]
    assert found["elapsed"] < 20


@on_both_hosts
def test_a_silent_attempt_at_a_token_ends_with_the_window_and_is_shown_while_it_lasts(host: Host) -> None:
    unit = host.unit("--load 1 --bug hang_post")
    words = "gpuops wait --unit %s --url %s --engine sglang --model tiny" % (unit, URL)
    limits = "--timeout 60 --stall-timeout 5 --generation-timeout 60 --json"
    said = host.run("%s %s 2>&1; echo" % (words, limits))
    lines, _brace, document = said.partition("{")
    found = json.loads("{" + document)
    assert (found["verdict"], found["tier_reached"]) == ("wedged", "model")
    assert 5 <= found["elapsed"] < 15
    assert found["tiers"][-1]["detail"] in ("wedged: no answer within %d s" % seconds for seconds in (5, 6))
    assert ": asking for a token, 1 s" in lines


def test_a_unit_that_does_not_exist_or_is_at_rest_is_dead(old: Host) -> None:
    said = 'the unit "nothing.service" is dead: it does not exist on this host'
    assert old.wait("nothing.service")["msg"] == said
    unit = old.unit("--load 0")
    old.wait(unit)
    old.run("systemctl stop " + unit)
    said = 'the unit "%s" is dead: it is inactive, and nothing is about to start it' % unit
    msg = old.wait(unit)["msg"]
    assert msg.startswith(said) and "; next: journalctl -u %s" % unit in msg


def test_the_real_engine_is_ready_by_its_own_profile(fleet: Fleet) -> None:
    host = Host(fleet, NEW)
    text = "[Service]\\nExecStart=/usr/local/bin/lab-llama %d tiny" % PORT
    try:
        host.run("printf '%b\\n' \"" + text + '" > /run/systemd/system/fake-llama.service; systemctl daemon-reload')
        host.run("systemctl start fake-llama.service")
        found = host.wait("fake-llama.service", engine="llama_cpp", model="tiny")
        assert (found["verdict"], found["tier_reached"]) == ("ready", "generation")
        probe = fleet.module(NEW, "route_probe", url=URL, engine="llama_cpp", model="tiny")
        assert (probe["verdict"], probe["direct"]["tokens"], probe["direct"]["model"]) == ("ok", 1, "tiny")
        idle = fleet.module(NEW, "wait_engine_idle", url=URL, engine="llama_cpp", timeout=5)
        assert idle["verdict"] == "idle"
    finally:
        host.clean()


def test_the_lease_is_renewed_while_it_waits_and_a_lost_one_ends_the_wait(old: Host) -> None:
    unit = old.unit("--load 60 --log silent --burn")
    lease = old.fleet.module(OLD, "service_lease", service="ready-test", run_id="r1", controller="here")
    assert lease["ok"], lease
    answer: t.List[t.Dict[str, t.Any]] = []
    waiting = threading.Thread(target=lambda: answer.append(old.wait(unit, service="ready-test", run_id="r1")))
    waiting.start()
    time.sleep(9)
    old.run("rm /var/lib/gpuops/ready-test/lease.json")
    waiting.join(20)
    assert answer[0]["verdict"] == "refused"


@on_both_hosts
def test_a_unit_that_is_named_by_an_alias_is_read_like_any_other(host: Host) -> None:
    unit = host.unit("--load 12 --log tqdm")
    host.run("ln -s %s /run/systemd/system/fake-alias.service; systemctl daemon-reload" % unit)
    found = host.wait("fake-alias.service", stall_timeout=4)
    assert (found["verdict"], found["unit_state"]["name"]) == ("ready", unit), found["msg"]


BOOM = "boom: the flux capacitor is empty"
LOOP = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=always\n"


@pytest.mark.parametrize(
    ("unit", "line", "msg"),
    [
        (
            "RestartSec=1\nExecStart=/bin/sh -c 'sleep 1; echo %s; exit 1'" % BOOM,
            BOOM,
            'its main process exited with status 1, with the last word "%s"' % BOOM,
        ),
        # Too fast to be seen between two lives.
        ("ExecStart=/bin/false", "its main process exited with status 1", "its main process exited with status 1"),
        (
            "RestartSec=1\nRestartMode=direct\nExecStart=/bin/sh -c 'sleep 1; echo %s; kill -9 $$$$'" % BOOM,
            BOOM,
            'its main process was killed by signal 9, with the last word "%s"' % BOOM,
        ),
    ],
)
@on_both_hosts
def test_a_loop_without_a_known_line_is_told_by_the_last_word(host: Host, unit: str, line: str, msg: str) -> None:
    host.define("fake-loop.service", LOOP + unit)
    host.run("systemctl daemon-reload; systemctl start --no-block fake-loop.service")
    found = host.wait("fake-loop.service", max_restarts=2)
    assert found["verdict"] == "restart_loop"
    assert found["cause"] == {"kind": "killed" if "killed" in msg else "exited", "line": line}
    assert found["msg"].endswith(" times: %s; next: gpuops stop --unit fake-loop.service" % msg)


VAGUE = "WARNING: permission denied: /root/.cache"
ENDS: t.Dict[str, t.Tuple[str, str, str]] = {
    "start": (
        "Type=notify\nTimeoutStartSec=2\nExecStart=/bin/sh -c 'echo %s; exec sleep 60'" % VAGUE,
        "timeout",
        "it was not up within TimeoutStartSec=, so systemd ended it",
    ),
    "start-clean": (
        "Type=notify\nTimeoutStartSec=2\nExecStart=/bin/sh -c 'trap \"exit 0\" TERM; while :; do sleep 0.1; done'",
        "timeout",
        "it was not up within TimeoutStartSec=, so systemd ended it",
    ),
    "watchdog": (
        "Type=notify\nNotifyAccess=all\nWatchdogSec=2\nExecStart=/bin/sh -c 'systemd-notify --ready; exec sleep 60'",
        "watchdog",
        "it gave no sign of life for WatchdogSec=, so systemd ended it",
    ),
    "runtime": (
        "RuntimeMaxSec=2\nExecStart=/bin/sleep 60",
        "timeout",
        "it ran for as long as RuntimeMaxSec= allows, so systemd ended it",
    ),
    "gate": (
        "ExecStartPre=/bin/sh -c 'echo the GPUs are busy; exit 7'\nExecStart=/bin/true",
        "exited",
        "the GPUs are busy",
    ),
    "clean": ("ExecStart=/bin/sh -c 'echo all done; sleep 2'", "exited", "all done"),
    "setting": ("ExecStart=not/absolute", "bad_unit", "not/absolute"),
    "command": ("ExecStart=/no/such/model-server", "bad_unit", "/no/such/model-server"),
    "user": ("User=nobody-of-that-name\nExecStart=/bin/true", "bad_unit", "user credentials"),
    "folder": ("WorkingDirectory=/no/such\nExecStart=/bin/true", "bad_unit", "working directory"),
    "environment": ("EnvironmentFile=/no/such\nExecStart=/bin/true", "bad_unit", "Failed to load environment files"),
    "condition": ("ExecStart=/bin/true\n[Unit]\nConditionPathExists=/no/such", "condition", "skipped"),
    "assertion": ("ExecStart=/bin/true\n[Unit]\nAssertPathExists=/no/such", "condition", "asserts failed"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@on_both_hosts
def test_what_systemd_knows_of_an_end_is_its_cause(host: Host, when: str) -> None:
    """Each is waited for from its start, or looked at when it is over and systemd may have forgotten it."""
    for name, (text, _kind, _line) in ENDS.items():
        host.define("fake-%s.service" % name, "[Service]\n" + text)
    host.run("systemctl daemon-reload")
    units = " ".join("fake-%s.service" % name for name in ENDS)
    ask = "gpuops wait --unit %s --url %s --engine sglang --model tiny --timeout 60 --stall-timeout 40 --json"
    ask += " > /run/%s.json 2> /dev/null"
    start = "systemctl start --no-block %s; "
    names = {name: "fake-%s.service" % name for name in ENDS}
    if when == "before":
        waits = ["(%s) &" % ((start + ask) % (unit, unit, URL, unit)) for unit in names.values()]
        host.run(" ".join(waits) + " wait", checked=False)
    else:
        host.run(
            start % units + "sleep 8; " + "; ".join(ask % (unit, URL, unit) for unit in names.values()), checked=False
        )
    for name, (_text, kind, line) in ENDS.items():
        found = json.loads(host.run("cat /run/%s.json" % names[name]))
        assert found["verdict"] == "dead", (name, found["msg"])
        assert found["cause"] is not None, (name, found["msg"], found["log_tail"])
        assert found["cause"]["kind"] == kind and line in found["cause"]["line"], (name, found["cause"], found["msg"])
        assert found["log_tail"] != [], name


@on_both_hosts
def test_a_stop_that_systemd_had_to_end_says_so(host: Host) -> None:
    text = "[Service]\nTimeoutStopSec=2\nExecStart=/bin/sh -c 'trap \"\" TERM; while :; do sleep 0.1; done'"
    host.define("fake-deaf.service", text)
    host.run("systemctl daemon-reload; systemctl start fake-deaf.service; systemctl stop --no-block fake-deaf.service")
    found = host.wait("fake-deaf.service")
    text = "it did not stop within TimeoutStopSec=, so systemd killed it"
    assert (found["verdict"], found["cause"]) == ("dead", {"kind": "timeout", "line": text})


@on_both_hosts
def test_a_unit_that_its_socket_starts_is_waited_for(host: Host) -> None:
    host.define("fake-late.socket", "[Socket]\nListenStream=127.0.0.1:%d" % PORT)
    engine = "/usr/bin/python3 /opt/fake/engine.py --port 9001 --load 3"
    proxy = "/lib/systemd/systemd-socket-proxyd 127.0.0.1:9001"
    host.define("fake-late.service", "[Service]\nExecStart=/bin/sh -c '%s & exec %s'" % (engine, proxy))
    host.run("systemctl daemon-reload; systemctl start fake-late.socket")
    found = host.wait("fake-late.service")
    assert found["verdict"] == "ready", found["msg"]
    host.run("systemctl stop fake-late.socket fake-late.service")
    assert host.wait("fake-late.service")["verdict"] == "dead"
