# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""process_tree_stop on units in every state that systemd knows, on real hosts of three generations and a legacy one.

All units are brought into their states side by side; then each is planned and stopped, one after the other.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import typing as t

import pytest
from fourhosts import HOSTS, FourHosts, Result, mark_group

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")


RUNS = "ExecStart=/opt/st/{n} infinity"


class Case(t.NamedTuple):
    """One state. {n} in any text is the case's name: its unit is st-{n}, its processes run /opt/st/{n}."""

    service: str = RUNS  # empty: there is no file
    prepare: str = "systemctl start st-{n}"
    state: str = "active"  # what ActiveState is before, with LoadState and SubState where they matter
    verdict: str = "stopped"
    changed: bool = True
    words: str = "is stopped"
    ended: int = 1
    after: str = "loaded inactive dead"
    unit: str = "st-{n}"
    options: t.Dict[str, t.Any] = {}
    head: str = ""  # lines of [Unit]
    check: str = "true"  # holds afterwards


MASK = "systemctl mask --quiet st-{n} 2>/dev/null"
GATE = "systemctl start --no-block st-{n}"
FAILS = "ExecStart=/bin/false"
ONE_START = "StartLimitBurst=1\nStartLimitIntervalSec=1h"
# A restart, since systemd forgets an idle unit and its counter between a stop and a start.
LIMIT_HIT = "systemctl start st-{n}; systemctl restart st-{n} 2>/dev/null || :"
FAILED = "loaded failed failed"
NOTHING = "there was nothing to stop"
LEAVES = "ExecStart=/bin/sh -c '/opt/st/{n} infinity & sleep 0.3; exit 1'\nKillMode=process"

CASES: t.Dict[str, Case] = {
    "masked": Case(
        prepare=MASK,
        state="masked inactive",
        verdict="absent",
        changed=False,
        words=NOTHING,
        ended=0,
        after="masked inactive dead",
    ),
    "masked_active": Case(
        prepare="systemctl start st-{n}; " + MASK, state="masked active", after="masked inactive dead"
    ),
    "missing": Case(
        service="",
        prepare="true",
        state="not-found inactive",
        verdict="absent",
        changed=False,
        words="does not exist on this host",
        ended=0,
        after="not-found inactive dead",
    ),
    "removed": Case(
        prepare="systemctl start st-{n}; rm /run/systemd/system/st-{n}.service; systemctl daemon-reload",
        state="not-found active",
        after="not-found inactive dead",
    ),
    "bad_setting": Case(
        prepare="systemctl start st-{n}; echo '[Service]' >/run/systemd/system/st-{n}.service; systemctl daemon-reload",
        state="bad-setting active",
        after="bad-setting failed failed",
    ),
    "failed": Case(FAILS, "systemctl start st-{n} || :", "failed", "absent", False, NOTHING, 0, FAILED),
    "failed_reset": Case(
        FAILS,
        "systemctl start st-{n} || :",
        "failed",
        "absent",
        True,
        "its failed state was reset",
        0,
        options={"reset_failed": True},
    ),
    "failed_leftover": Case(LEAVES, GATE + "; sleep 1", "failed", after=FAILED, check="! pgrep -f '^/opt/st/{n} '"),
    "start_limit": Case(
        RUNS,
        LIMIT_HIT,
        "failed",
        "absent",
        False,
        NOTHING,
        0,
        FAILED,
        head=ONE_START,
        check="test $(systemctl show -P Result st-{n}) = start-limit-hit",
    ),
    "start_limit_reset": Case(
        RUNS,
        LIMIT_HIT,
        "failed",
        "absent",
        True,
        "its failed state was reset",
        0,
        head=ONE_START,
        options={"reset_failed": True},
        check="systemctl start st-{n}",
    ),
    "start_pre": Case(
        "ExecStartPre=/opt/st/{n} infinity\nExecStart=/bin/true", GATE, "activating start-pre", after=FAILED
    ),
    "start_post": Case(
        "ExecStart=/opt/st/{n} infinity\nExecStartPost=/opt/st/{n} infinity",
        GATE,
        "activating start-post",
        ended=2,
        after=FAILED,
    ),
    "never_tells": Case("Type=notify\n" + RUNS, GATE, "activating start"),
    "auto_restart": Case(
        LEAVES + "\nRestart=always\nRestartSec=300",
        GATE + "; sleep 1",
        "activating auto-restart",
    ),
    "queued": Case(
        prepare="systemctl start --no-block st-queued_before st-{n}",
        state="inactive",
        head="After=st-queued_before.service",
        ended=0,
        words="it owned no process",
    ),
    "reloading": Case(
        RUNS + "\nExecReload=/opt/st/{n} infinity",
        "systemctl start st-{n}; systemctl reload --no-block st-{n}",
        "reloading reload",
        ended=2,
        after=FAILED,
    ),
    "remains": Case("Type=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true", ended=0, state="active exited"),
    "oneshot": Case("Type=oneshot\n" + RUNS, GATE, "activating start", after=FAILED),
    "forking": Case(
        "Type=forking\nPIDFile=/run/{n}.pid\nExecStart=/bin/sh -c '/opt/st/{n} infinity & echo $! >/run/{n}.pid'"
    ),
    "instance": Case(
        prepare="systemctl start st-inst@{n} st-inst@other",
        unit="st-inst@{n}",
        after="loaded inactive dead",
        check="systemctl is-active --quiet st-inst@other",
    ),
    "template": Case(
        service="",
        prepare="true",
        state="",
        verdict="error",
        changed=False,
        words="is a template: name one of its instances, such as",
        ended=0,
        unit="st-inst@",
        after="",
        check="systemctl is-active --quiet st-inst@other",
    ),
    "alias": Case(
        prepare="systemctl start st-{n}; ln -s st-{n}.service /run/systemd/system/st-other-{n}.service;"
        " systemctl daemon-reload",
        unit="st-other-{n}",
    ),
    "scope": Case(
        service="",
        prepare="setsid systemd-run --quiet --scope --unit=st-{n} /opt/st/{n} infinity >/dev/null 2>&1 &",
        unit="st-{n}.scope",
        after="not-found inactive dead",
        state="active running",
    ),
    "users_own": Case(
        service="",
        prepare="as_user systemctl --user start st-{n}",
        state="not-found inactive",
        verdict="absent",
        changed=False,
        words="does not exist on this host",
        ended=0,
        after="not-found inactive dead",
        check="pgrep -u daemon -f '^/opt/st/{n} '",
    ),
    "same_name": Case(
        prepare="systemctl start st-{n}; as_user systemctl --user start st-{n}",
        check="pgrep -u daemon -f '^/opt/st/{n} '",
    ),
    "partners": Case(
        prepare="systemctl start st-{n} st-bound st-part", check="! systemctl is-active --quiet st-bound st-part"
    ),
    "partner": Case(
        prepare="systemctl start st-{n} st-whole",
        head="PartOf=st-whole.service",
        check="systemctl is-active --quiet st-whole",
    ),
    "refuses": Case(
        head="RefuseManualStop=yes",
        verdict="refused",
        changed=False,
        words="RefuseManualStop",
        ended=0,
        after="loaded active running",
    ),
    "never_killed": Case(
        "ExecStart=/bin/sh -c 'trap \"\" TERM; /opt/st/{n} infinity & while :; do wait; done'\n"
        "SendSIGKILL=no\nTimeoutStopSec=1",
        ended=2,
        options={"grace": 4},
        after=FAILED,
    ),
    "frozen": Case(prepare="systemctl start st-{n}; systemctl freeze st-{n} || :", options={"grace": 3}),
}

# Units that only stand beside the cases.
OTHERS = {
    "st-queued_before.service": "[Service]\nType=oneshot\nExecStart=/bin/sleep infinity\n",
    "st-inst@.service": "[Service]\nExecStart=/opt/st/%i infinity\n",
    "st-bound.service": "[Unit]\nBindsTo=st-partners.service\n[Service]\nExecStart=/bin/sleep infinity\n",
    "st-part.service": "[Unit]\nPartOf=st-partners.service\n[Service]\nExecStart=/bin/sleep infinity\n",
    "st-whole.service": "[Service]\nExecStart=/bin/sleep infinity\n",
}
AS_USER = """
as_user() { setpriv --reuid=daemon --regid=daemon --clear-groups env XDG_RUNTIME_DIR=/run/user/1 "$@"; }
"""
PLANNED_ON = "mid"
SHOW = "systemctl show -p LoadState -p ActiveState -p SubState {0} | cut -d= -f2 | tr '\\n' ' '"


class Story(t.NamedTuple):
    """What became of one case on one host."""

    before: str
    plan: Result
    planned: str
    answer: Result
    after: str
    checked: str
    left: str


def full(case: Case, name: str) -> str:
    return case.unit.replace("{n}", name)


def states(hosts: FourHosts) -> t.Dict[str, t.Dict[str, str]]:
    script = "".join("echo %s $(%s); " % (name, SHOW.format(full(case, name))) for name, case in CASES.items())
    found: t.Dict[str, t.Dict[str, str]] = {}
    for host, text in hosts.everywhere(script).items():
        rows = [line.partition(" ") for line in text.splitlines()]
        found[host] = {name: state for name, _space, state in rows}
    return found


def prepare(hosts: FourHosts) -> None:
    files = {"/run/systemd/system/" + name: text for name, text in OTHERS.items()}
    script = AS_USER + "mkdir -p /opt/st; ln -sf /bin/sleep /opt/st/other; systemctl start user@1.service; "
    for name, case in CASES.items():
        script += "ln -sf /bin/sleep /opt/st/%s; " % name
        if case.service:
            text = "[Unit]\n%s\n[Service]\nTimeoutStartSec=infinity\n%s\n" % (case.head, case.service)
            files["/run/systemd/system/st-%s.service" % name] = text.replace("{n}", name)
    own = "/run/user/1/systemd/user/st-%s.service"
    for name in ("users_own", "same_name"):
        files[own % name] = "[Service]\nExecStart=/opt/st/%s infinity\n" % name
    script += "systemctl daemon-reload; chown -R daemon /run/user/1/systemd; as_user systemctl --user daemon-reload; "
    for name, case in CASES.items():
        script += case.prepare.replace("{n}", name) + ("\n" if case.prepare.endswith("&") else ";\n")
    write = "import json, os, sys\nfor path, text in json.load(sys.stdin).items():\n"
    write += " os.makedirs(os.path.dirname(path), exist_ok=True)\n open(path, 'w').write(text)\n"
    hosts.everywhere("systemctl start user@1.service; python3 -c %s" % shlex.quote(write), json.dumps(files))
    hosts.everywhere(script)


@pytest.fixture(scope="module", name="hosts")
def fixture_hosts() -> t.Iterator[FourHosts]:
    hosts = FourHosts("test-states")
    with hosts.up():
        yield hosts


@pytest.fixture(scope="module", name="stories")
def fixture_stories(hosts: FourHosts) -> t.Dict[str, t.Dict[str, Story]]:
    prepare(hosts)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        before = states(hosts)
        if all(fits(case, before[host][name]) for host in HOSTS for name, case in CASES.items()):
            break
    calls = [dict(case.options, unit=full(case, name)) for name, case in CASES.items()]
    plans = hosts.stop(*calls, check=True, hosts=[PLANNED_ON])[PLANNED_ON]
    planned = states(hosts)
    answers = hosts.stop(*calls)
    after = states(hosts)
    checks = left = ""
    for name, case in CASES.items():
        checks += "if %s >/dev/null; then echo %s; fi; " % (case.check.replace("{n}", name), name)
        left += "if pgrep -u root -f '^/opt/st/%s ' >/dev/null; then echo %s; fi; " % (name, name)
    lefts, checked = hosts.everywhere(left), hosts.everywhere(checks)
    found: t.Dict[str, t.Dict[str, Story]] = {name: {} for name in CASES}
    for host in HOSTS:
        for place, name in enumerate(CASES):
            found[name][host] = Story(
                before[host][name],
                plans[place],
                planned[host][name],
                answers[host][place],
                after[host][name],
                "yes" if name in checked[host].split() else "no",
                "left" if name in lefts[host].split() else "gone",
            )
    return found


def fits(case: Case, state: str) -> bool:
    return set(case.state.split()) <= set(state.split())


@pytest.mark.parametrize("name", CASES)
def test_a_state(stories: t.Dict[str, t.Dict[str, Story]], name: str) -> None:
    case = CASES[name]
    for host, story in stories[name].items():
        assert fits(case, story.before), "%s: %s" % (host, story.before)
        answer = story.answer
        assert (answer["verdict"], answer["changed"]) == (case.verdict, case.changed), "%s: %s" % (host, answer)
        assert case.words.replace("{n}", name) in answer["msg"], "%s: %s" % (host, answer["msg"])
        assert story.after.strip() == case.after, host
        assert story.checked == "yes", host
        if host == PLANNED_ON:  # it says the same and changes nothing
            assert (story.plan["verdict"], story.plan["changed"]) == (case.verdict, case.changed), story.plan["msg"]
            assert story.planned == story.before
        if case.verdict in ("error", "refused"):
            continue
        assert story.left == "gone", host
        ended = [process for process in answer["processes"] if process["outcome"] in ("ended", "gone")]
        assert len(ended) == case.ended, "%s: %s" % (host, answer["processes"])
        if host == PLANNED_ON:
            assert {p["pid"] for p in story.plan["processes"]} == {p["pid"] for p in answer["processes"]}


SLOW = "ExecStop=/bin/sh -c 'echo stop >>/run/{0}.stops; while test ! -e /run/{0}.go; do sleep 0.1; done'"


@pytest.mark.parametrize("kind", ["stop", "restart"])
def test_what_somebody_else_asked_for_is_joined_or_ended(hosts: FourHosts, kind: str) -> None:
    """One life is stopped once: systemd runs no second ExecStop, and a stop under way gets no second job."""
    name = "other-" + kind
    lines = ["[Service]", "ExecStart=/opt/st/%s infinity" % name, "TimeoutStopSec=90", SLOW.format(name)]
    hosts.everywhere("cat >/run/systemd/system/st-%s.service" % name, "\n".join(lines) + "\n")
    # Every job of the unit that is seen, from before our call to the end.
    watch = 'while j=$(systemctl show -P Job st-{0}); test -n "$j" -a "$j" != 0; do echo $j; sleep 0.1; done'
    begin = "mkdir -p /opt/st; ln -sf /bin/sleep /opt/st/{0}; systemctl daemon-reload; systemctl start st-{0};"
    begin += " systemctl {1} --no-block st-{0}\nsetsid sh -c '%s' >/run/{0}.jobs 2>&1 </dev/null &" % watch
    hosts.everywhere(begin.format(name, kind))
    let_go = "setsid sh -c 'sleep 8; touch /run/%s.go' >/dev/null 2>&1 &" % name
    answers = hosts.stop({"unit": "st-" + name}, first=let_go)
    jobs = hosts.everywhere("sort -u /run/%s.jobs | wc -l" % name)
    stops = hosts.everywhere("cat /run/{0}.stops | wc -l; pgrep -fc '^/opt/st/{0} ' || :".format(name))
    for host, (answer,) in answers.items():
        assert (answer["verdict"], answer["changed"]) == ("stopped", True), "%s: %s" % (host, answer["msg"])
        assert answer["elapsed"] > 0.3, host  # it was still on its way
        assert answer["unit_state"]["active_state"] == "inactive", host
        assert stops[host].split() == ["1", "0"], host
        if kind == "stop":
            assert jobs[host].split() == ["1"], host


# Who spreads from one service in every way that takes a process out of sight of its parent, with the mark lost or not.
DAEMON = {"daemon": True, "deaf": True}
FAMILY = {
    "id": "front",
    "name": "front",
    "children": [
        {"id": "titled", "name": "titled", "title": "VLLM::Worker_TP0", **DAEMON},
        {"id": "early", "name": "early", "double": True},
        {"id": "threads", "name": "threads", "threads": True, "daemon": True},
        {"id": "stopped", "name": "stopped", "stopped": True, "session": True},
        {"id": "bred", "name": "bred", "on_term": {"id": "late", "name": "late", "deaf": True}},
        {"id": "odd", "name": "a) (b\n\xff", "daemon": True},
    ],
}


@pytest.mark.parametrize("kill_mode", ["control-group", "process"])
def test_a_family_in_a_scope_with_titles_over_environments(hosts: FourHosts, kill_mode: str) -> None:
    """P2, P4, P6, P7, P11, P12: found by the mark alone in a scope, by the control group alone without the mark."""
    service = "family-" + kill_mode
    mark = mark_group(service)
    folder = "/tmp/family"
    grow = "/usr/bin/python3 /opt/forest.py --stay %s @/opt/%%s.json" % folder
    scope = [{"id": "scoped", "name": "scoped", "title": "VLLM::Worker_TP1", "deaf": True}]
    lines = [
        "ExecStart=" + grow % "family",
        "ExecStartPost=/bin/sh -c 'setsid systemd-run --quiet --scope %s >/dev/null 2>&1 &'" % (grow % "scoped"),
        # runuser sets the groups anew: the mark is lost, the control group is not.
        "ExecStartPost=/bin/sh -c 'setsid runuser -u daemon -- sleep 98762 >/dev/null 2>&1 &'",
        "SupplementaryGroups=" + mark,
        "KillMode=" + kill_mode,
        "TimeoutStopSec=2",
    ]
    hosts.everywhere("cat >/opt/family.json", json.dumps([FAMILY]))
    hosts.everywhere("cat >/opt/scoped.json", json.dumps(scope))
    hosts.everywhere("cat >/run/systemd/system/st-family.service", "[Service]\n%s\n" % "\n".join(lines))
    ready = ["front", "scoped", *(child["id"] for child in FAMILY["children"])]
    hosts.everywhere(
        "groupadd --force --system %s; rm -rf %s; mkdir -m 777 %s; systemctl daemon-reload; systemctl start st-family"
        % (mark, folder, folder)
    )
    hosts.wait(
        "cd %s 2>/dev/null && ls %s >/dev/null 2>&1 && pgrep -u daemon -f '[s]leep 98762'" % (folder, " ".join(ready))
    )
    facts = hosts.everywhere(
        "tr -d '\\0' </proc/$(cut -d' ' -f1 %s/scoped)/environ | wc -c; pgrep -u daemon -f '[s]leep 98762'" % folder
    )
    found = hosts.stop_one(unit="st-family", service=service, grace=3)
    left = hosts.everywhere(
        "for f in $(ls %s | grep -v '[.]'); do read p s < %s/$f || :; if test -e /proc/$p/stat && grep -q \" $s \""
        " /proc/$p/stat && ! grep -q 'State:.Z' /proc/$p/status; then echo $f; fi; done; pgrep -f '[s]leep 98762' || :"
        % (folder, folder)
    )
    for host, answer in found.items():
        environment, unmarked = facts[host].split()
        assert environment == "0", host
        assert (answer["verdict"], answer["changed"]) == ("stopped", True), "%s: %s" % (host, answer["msg"])
        assert left[host] == "", host
        by_name = {process["name"]: process for process in answer["processes"]}
        assert by_name["scoped"]["found_by"] == ["mark"], host
        assert by_name["scoped"]["role"] == "escaped", host
        (lost,) = [process for process in answer["processes"] if process["pid"] == int(unmarked)]
        assert "cgroup" in lost["found_by"] and "mark" not in lost["found_by"], host
        assert lost["user"] == "daemon", host
        assert {"titled", "early", "threads", "stopped", "bred", "a) (b\\n\\xff"} <= set(by_name), host
        if kill_mode == "process":
            assert by_name["titled"]["signals"] == ["TERM", "KILL"], host
            assert by_name["stopped"]["signals"] == ["TERM", "CONT"], host
            assert "late" in by_name, host


STORM = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
end = time.monotonic() + 90
def breed():
    # Every one hands on to another and ends: a list of them is old when it has been read.
    while time.monotonic() < end and os.fork() == 0:
        time.sleep(0.5)
for _ in range(150):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        breed()
        os._exit(0)
time.sleep(90)
"""


@pytest.mark.parametrize("host", HOSTS)
def test_a_storm_of_forks_in_a_unit_ends_in_time(hosts: FourHosts, host: str) -> None:
    """P6: 150 lines of processes that fork all the time and do not heed SIGTERM, in a unit at rest that left them."""
    hosts.on(host, "cat >/opt/storm.py", STORM)
    text = "[Service]\nExecStart=/usr/bin/python3 /opt/storm.py\nKillMode=process\n"
    hosts.on(host, "cat >/run/systemd/system/st-storm.service; systemctl daemon-reload; systemctl start st-storm", text)
    counted = "test $(pgrep -fc '[s]torm.py' || :) -ge 100"
    hosts.on(host, "for i in $(seq 200); do if %s; then break; fi; sleep 0.1; done; %s" % (counted, counted))
    hosts.on(host, "systemctl stop st-storm; %s" % counted)
    answer = hosts.stop({"unit": "st-storm", "grace": 2, "kill_grace": 10}, hosts=[host])[host][0]
    assert hosts.on(host, "pgrep -f '[s]torm.py' || :") == ""
    assert answer["verdict"] == "stopped", answer["msg"][:300]
    assert answer["elapsed"] < 2 + 2 + 10 + 5
