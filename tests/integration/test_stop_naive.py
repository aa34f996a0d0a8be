# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the usual ways of stopping a service leave alive and whom they hit; then process_tree_stop on the same.

One service with six workers: a plain child, a child in a session of its own, a double fork in the same session, a
daemonised one, a daemonised one that is deaf to SIGTERM, and one in a scope of its own. They show titles of their own,
as engines do. Every way has a service to itself, and beside it an editor that has its configuration open and a
neighbour whose worker bears the same title. What lives is read from /proc alone, by pid and start time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import typing as t
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from fourhosts import HOSTS, FourHosts, Result, mark_group

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")

SIX = {"plain", "own_session", "double", "daemon", "deaf", "scope"}
ALL = SIX | {"front"}
# What is run, with UNIT, WAY, MAIN (pid and process group of the front) and CGROUP set.
TERM_THEN_KILL = "{0}TERM {1} || :; sleep 1; {0}KILL {1} 2>/dev/null || :"
WAYS = {
    "restart": "systemctl restart $UNIT",
    "stop_process": "systemctl stop $UNIT",
    "stop_none": "systemctl stop $UNIT",
    "stop_mixed": "systemctl stop $UNIT",
    "stop_control_group": "systemctl stop $UNIT",
    "kill_front": "kill -KILL $MAIN",
    "cgroup_kill": "echo 1 > /sys/fs/cgroup$CGROUP/cgroup.kill",
    "psutil": "PYTHONPATH=/opt/lib python3 /opt/children_first.py $MAIN",
    "process_group": TERM_THEN_KILL.format("kill -s ", "-- -$MAIN"),
    "pkill_config": TERM_THEN_KILL.format("pkill -", "-f $WAY[.]json"),
    "pkill_title": TERM_THEN_KILL.format("pkill -", "-f $WAY::worker"),
    "hand_group": TERM_THEN_KILL.format("kill -s ", "-- -$(ps -o pgid= -p $MAIN | tr -d ' ')"),
    "untried": "true",
    "hand_untried": "true",
}
HAND = ("hand_group", "hand_untried")  # a front that a shell started, beside another job in the same process group
KILL_MODES = {"stop_none": "none", "stop_mixed": "mixed", "stop_control_group": "control-group"}
LEFT = {
    "restart": SIX,
    "stop_process": SIX,
    "stop_none": ALL,
    "stop_mixed": {"scope"},
    "stop_control_group": {"scope"},
    "kill_front": SIX,
    "cgroup_kill": {"scope"},
    "psutil": {"double", "daemon", "deaf", "scope"},
    "process_group": {"own_session", "daemon", "deaf", "scope"},
    "pkill_config": SIX,
    "pkill_title": {"front"},
    "hand_group": {"own_session"},
    "untried": ALL,
    "hand_untried": {"front", "plain", "own_session"},
}
PLANNED = ("restart", "psutil", "untried")  # shown first in check mode
HIT = {"pkill_config": {"editor"}, "pkill_title": {"neighbour"}, "hand_group": {"shell", "mate"}}
CHILDREN_FIRST = """
import psutil, sys
front = psutil.Process(int(sys.argv[1]))
processes = [*reversed(front.children(recursive=True)), front]
for process in processes:
    process.terminate()
for process in psutil.wait_procs(processes, 1)[1]:
    process.kill()
"""
# For each folder: who was ready in it when it was noted first, and whether that very process lives and what it heard.
CENSUS = """
import json, os, sys
note, found = "/tmp/naive.noted", {}
if not os.path.exists(note):
    names = [(way, name) for way in os.listdir("/tmp/naive") for name in os.listdir("/tmp/naive/" + way)]
    refs = [[w, n, open("/tmp/naive/%s/%s" % (w, n)).read().split()] for w, n in names if "." not in n]
    json.dump(refs, open(note, "w"))
for way, name, (pid, start) in json.load(open(note)):
    try:
        fields = open("/proc/%s/stat" % pid).read().rpartition(")")[2].split()
        alive = fields[0] not in "ZX" and fields[19] == start
    except OSError:
        alive = False
    heard = open("/tmp/naive/%s/%s.signals" % (way, name)).read().split()
    found.setdefault(way, {})[name] = [int(pid), alive, heard]
print(json.dumps(found))
"""


def workers(way: str) -> t.List[t.Dict[str, t.Any]]:
    kinds: t.Dict[str, t.Dict[str, bool]] = {
        "plain": {},
        "own_session": {"session": True},
        "double": {"double": True},
        "daemon": {"daemon": True},
        "deaf": {"daemon": True, "deaf": True},
    }
    return [dict(kind, id=name, name=name, title=way + "::worker") for name, kind in kinds.items()]


def trees(way: str) -> t.Dict[str, t.List[t.Dict[str, t.Any]]]:
    """What each file describes."""
    bystanders = [
        {"id": "editor", "name": "vi", "title": "vi /opt/naive/%s.json" % way, "all_deaf": True},
        {"id": "neighbour", "name": "worker", "title": way + "::worker", "all_deaf": True},
    ]
    front = {"id": "front", "name": "front", "children": workers(way)}
    if way in HAND:
        # Started by hand: without a unit and a mark, whoever left the tree cannot be told from the rest.
        front["children"] = [{"id": "plain", "name": "plain"}, {"id": "own_session", "session": True}]
        shell = {"id": "shell", "session": True, "all_deaf": True}
        return {"": [dict(shell, children=[{"id": "mate", "all_deaf": True}, front])], ".others": bystanders}
    scope = {"id": "scope", "name": "scope", "title": way + "::worker"}
    return {"": [front], ".scope": [scope], ".others": bystanders}


def unit_text(way: str) -> str:
    grow = "/usr/bin/python3 /opt/forest.py --stay /tmp/naive/{0} @/opt/naive/{0}"
    scope = "ExecStartPost=/bin/sh -c 'setsid systemd-run --quiet --scope %s.scope.json >/dev/null 2>&1 &'\n" % grow
    text = (
        "[Service]\nExecStart=" + grow + ".json\n" + scope + "SupplementaryGroups={1}\nKillMode={2}\nTimeoutStopSec=2\n"
    )
    return text.format(way, mark_group("naive-" + way), KILL_MODES.get(way, "process"))


def prepare(hosts: FourHosts) -> None:
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:

        def add(path: str, text: str) -> None:
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            tar.addfile(entry, BytesIO(text.encode()))

        # Its library is built for the stable interface of Python 3.6 and newer.
        tar.add(Path(psutil.__file__).parent, "opt/lib/psutil", filter=lambda e: None if "__pycache__" in e.name else e)
        add("opt/children_first.py", CHILDREN_FIRST)
        add("opt/census.py", CENSUS)
        for way in WAYS:
            for part, tree in trees(way).items():
                add("opt/naive/%s%s.json" % (way, part), json.dumps(tree))
            if way not in HAND:
                add("etc/systemd/system/naive-%s.service" % way, unit_text(way))
    archive = hosts.folder / "naive.tar"
    archive.write_bytes(packed.getvalue())
    units = " ".join("naive-%s" % way for way in WAYS if way not in HAND)
    script = "tar -xf - -C /; rm -rf /tmp/naive*; mkdir -p %s; " % " ".join("/tmp/naive/" + way for way in WAYS)
    script += "".join("groupadd --force --system %s; " % mark_group("naive-" + way) for way in WAYS)
    # Each tree of bystanders in a unit of its own: they are in other places, as in life.
    grow = "python3 /opt/forest.py --stay /tmp/naive/{0} @/opt/naive/{0}{1}.json"
    script += "systemctl daemon-reload; systemctl start --no-block %s; " % units
    for way in WAYS:
        script += "systemd-run --quiet --unit=others-%s -p KillMode=process %s; " % (way, grow.format(way, ".others"))
    for way in HAND:
        script += "setsid systemd-run --quiet --scope --unit=%s %s </dev/null >/dev/null 2>&1; " % (
            way,
            grow.format(way, "").replace(" --stay", ""),
        )
    ssh = ["ssh", "-F", str(hosts.folder / "ssh_config")]
    running = [
        subprocess.Popen(
            [*ssh, host, script], stdin=archive.open("rb"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for host in HOSTS
    ]
    assert [(process.communicate(timeout=60)[0], process.returncode) for process in running] == [("", 0)] * len(HOSTS)
    ready = [
        "/tmp/naive/%s/%s" % (way, node)
        for way in WAYS
        for node in (LEFT["hand_untried"] | HIT["hand_group"] if way in HAND else ALL) | {"editor", "neighbour"}
    ]
    hosts.wait("ls %s >/dev/null 2>&1" % " ".join(ready))


def naive_script() -> str:
    """All ways, each on its own service, side by side."""
    lines = []
    for way, script in WAYS.items():
        lines.append(
            "( WAY=%s UNIT=naive-%s; read MAIN _ < /tmp/naive/%s/front;"
            " CGROUP=$(systemctl show -P ControlGroup $UNIT);"
            " %s ) >/tmp/naive-%s.log 2>&1 || : &" % (way, way, way, script, way)
        )
    return "\n".join(lines) + "\nwait; sleep 0.3"


Census = t.Dict[str, t.Dict[str, t.List[t.Any]]]


class Story(t.NamedTuple):
    """What was alive when, on one host."""

    before: Census
    left: Census
    planned: Census
    after: Census
    plans: t.Dict[str, Result]
    answers: t.Dict[str, Result]
    marked: t.List[str]

    def names(self, moment: Census, way: str, of: t.Set[str]) -> t.Set[str]:
        return {name for name, (_pid, alive, _heard) in moment[way].items() if alive and name in of}

    def hit(self, way: str, since: Census, until: Census) -> t.Set[str]:
        """Bystanders that are dead or have heard a signal between two moments."""
        return {
            name
            for name, (_pid, alive, heard) in until[way].items()
            if name not in ALL and since[way][name][1] and (not alive or heard != since[way][name][2])
        }


@pytest.fixture(scope="module", name="stories")
def fixture_stories() -> t.Iterator[t.Dict[str, Story]]:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed")
    hosts = FourHosts("test-naive")
    with hosts.up():
        prepare(hosts)

        def census() -> t.Dict[str, Census]:
            return {host: json.loads(text) for host, text in hosts.everywhere("python3 /opt/census.py").items()}

        hosts.everywhere("cut -d' ' -f1 /tmp/naive/hand_untried/front > /run/hand.pid")
        before = census()
        hosts.everywhere(naive_script())
        left = census()
        calls: t.List[t.Dict[str, t.Any]] = [
            {"unit": "naive-" + way, "service": "naive-" + way, "grace": 0.5} for way in WAYS if way not in HAND
        ]
        calls.append({"pidfile": "/run/hand.pid", "grace": 0.5})
        some = [call for call in calls if call.get("unit", "")[len("naive-") :] in PLANNED]
        plans, planned, answers, after = hosts.stop(*some, check=True), census(), hosts.stop(*calls), census()
        gids = " ".join(mark_group("naive-" + way) for way in WAYS)
        marks = "for g in %s; do id=$(getent group $g | cut -d: -f3);" % gids
        marks += ' grep -l "^Groups:.*\\b$id\\b" /proc/[0-9]*/status || :; done'
        marked = hosts.everywhere(marks)
        order = [*(way for way in WAYS if way not in HAND), "hand_untried"]
        yield {
            host: Story(
                before[host],
                left[host],
                planned[host],
                after[host],
                dict(zip([way for way in order if way in PLANNED], plans[host])),
                dict(zip(order, answers[host])),
                marked[host].split(),
            )
            for host in HOSTS
        }


def test_everybody_was_there_at_first(stories: t.Dict[str, Story]) -> None:
    for story in stories.values():
        for way in WAYS:
            everybody = {name for name, (_pid, alive, _heard) in story.before[way].items() if alive}
            assert everybody == set(story.before[way])
            assert everybody >= {"front", "own_session", "editor", "neighbour"}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_way_leaves_alive(stories: t.Dict[str, Story], way: str) -> None:
    for host, story in stories.items():
        # Legacy control groups have no cgroup.kill.
        wanted = ALL if (way, host) == ("cgroup_kill", "legacy") else LEFT[way]
        assert story.names(story.left, way, ALL) == wanted, host


@pytest.mark.parametrize("way", WAYS)
def test_whom_a_way_hits(stories: t.Dict[str, Story], way: str) -> None:
    for host, story in stories.items():
        assert story.hit(way, story.before, story.left) == HIT.get(way, set()), host


@pytest.mark.parametrize("way", [way for way in WAYS if way != "hand_group"])
def test_what_was_left_is_ended_and_nobody_else(stories: t.Dict[str, Story], way: str) -> None:
    for host, story in stories.items():
        answer = story.answers[way]
        assert (answer["verdict"], answer["changed"]) == ("stopped", True), host
        left = {story.left[way][name][0] for name in story.names(story.left, way, ALL)}
        ended = {process["pid"] for process in answer["processes"] if process["outcome"] == "ended"}
        if way == "restart":  # and the next life, which began beside what the last one left
            assert ended > left, host
            assert len(ended) == 2 * len(SIX) + 1
        else:
            assert ended == left, host
        assert story.names(story.after, way, ALL) == set(), host
        assert story.hit(way, story.left, story.after) == set(), host


@pytest.mark.parametrize("way", PLANNED)
def test_check_mode_names_the_same_and_touches_nobody(stories: t.Dict[str, Story], way: str) -> None:
    for host, story in stories.items():
        plan, answer = story.plans[way], story.answers[way]
        assert (plan["verdict"], plan["changed"]) == ("stopped", True), host
        assert {process["outcome"] for process in plan["processes"]} == {"planned"}, host
        assert {process["pid"] for process in plan["processes"]} == {p["pid"] for p in answer["processes"]}, host
        assert story.planned[way] == story.left[way], host


def test_nobody_bears_a_mark_any_more(stories: t.Dict[str, Story]) -> None:
    for host, story in stories.items():
        assert story.marked == [], host


def test_from_the_start_without_a_naive_way(stories: t.Dict[str, Story]) -> None:
    for host, story in stories.items():
        assert story.names(story.after, "untried", ALL) == set(), host
        assert story.hit("untried", story.before, story.after) == set(), host
        ways = {process["name"]: process["found_by"] for process in story.answers["untried"]["processes"]}
        assert set(ways) == ALL
        assert ways["scope"] == ["mark"], host
        assert {process["outcome"] for process in story.answers["untried"]["processes"]} == {"ended"}
