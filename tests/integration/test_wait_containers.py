# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whose listener it is where a real docker, podman or systemd takes connections in for the engine, or for another one.

All units run side by side. Each is waited for at its own port, and some at the ports of others; then docker is started
anew without its proxies, and a few more are.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shlex
import typing as t

import pytest
from containerhosts import ANSWERS, HOST_FOLDERS, PACKAGES, ContainerHosts
from gpulab import common
from labhosts import Result

HOSTS = {"old": "bullseye", "new": "trixie"}
ENGINE = common.REPO / "tests" / "fakes" / "engine.py"
TITLE = "VLLM::APIServer"  # of the engine's process, as far as the kernel keeps it
PYTHON = "/usr/bin/python3 /opt/engine.py --engine vllm --load 0.2"
ALONE = PYTHON + " --port 8000"
DOCKER = "/usr/bin/docker run --name %p " + HOST_FOLDERS
PODMAN = "/usr/bin/podman run --name %p --replace " + HOST_FOLDERS
INSIDE = "tiny %s --host 0.0.0.0 --port 8000" % PYTHON
PROXY = "/lib/systemd/systemd-socket-proxyd 127.0.0.1:8000"
ROOTLESS = (
    "User=rl\nEnvironment=HOME=/home/rl XDG_RUNTIME_DIR=/run/rl\nExecStart=%s --network=slirp4netns -p %d:8000 %s"
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")

# The lines of each unit's service. Its port is what it is asked for at.
SERVICES = {
    "plain": "ExecStart=%s --port 9100" % PYTHON,
    "published": "ExecStart=%s -p 9101:8000 %s" % (DOCKER, INSIDE),
    "netavark": "ExecStart=%s -p 9102:8000 %s" % (PODMAN, INSIDE),
    "shared": "ExecStart=%s --network=host tiny %s --port 9103" % (DOCKER, PYTHON),
    "sharedpod": "ExecStart=%s --network=host tiny %s --port 9104" % (PODMAN, PYTHON),
    "monitored": "Type=notify\nNotifyAccess=all\n"
    "ExecStart=%s --cgroups=no-conmon --sdnotify=conmon -d -p 9105:8000 %s" % (PODMAN, INSIDE),
    "left": "Type=oneshot\nRemainAfterExit=yes\nExecStart=%s -d -p 9113:8000 %s" % (DOCKER, INSIDE),
    # Both of one user: what he runs without being root shares a mount namespace.
    "rootless": ROOTLESS % (PODMAN, 9114, INSIDE),
    "rootless2": ROOTLESS % (PODMAN, 9115, INSIDE),
    "private": "ExecStart=%s\nPrivateNetwork=yes" % ALONE,
    "joined": "ExecStart=%s\nNetworkNamespacePath=/run/netns/joined" % ALONE,
    "hidden": "ExecStart=%s %s" % (DOCKER, INSIDE),  # nothing leads to it
    "missed": "ExecStart=%s -p 9109:8000 tiny %s --port 8001" % (DOCKER, PYTHON),
    "missedpod": "ExecStart=%s -p 9110:8000 tiny %s --port 8001" % (PODMAN, PYTHON),
}
SOCKETS = {
    "private": (9106, "ExecStart=%s\nPrivateNetwork=yes" % PROXY, "JoinsNamespaceOf=private.service"),
    "joined": (9107, "ExecStart=%s\nNetworkNamespacePath=/run/netns/joined" % PROXY, ""),
    "late": (9108, "ExecStart=/bin/sleep infinity", ""),
}
PORTS = {"plain": 9100, "published": 9101, "netavark": 9102, "shared": 9103, "sharedpod": 9104, "monitored": 9105}
PORTS.update({"private": 9106, "joined": 9107, "missed": 9109, "missedpod": 9110})
READY = [name for name in PORTS if not name.startswith("missed")]
PORTS.update({"hidden": 9112, "left": 9113, "rootless": 9114, "rootless2": 9115})
READY = [name for name in PORTS if not name.startswith("missed")]
# A unit, the port of another at which it is waited for, and that other.
CROSSED = [
    ("plain", "published"),
    ("plain", "netavark"),
    ("plain", "private"),
    ("plain", "hidden"),
    ("published", "plain"),
    ("hidden", "published"),
    ("hidden", "shared"),
    ("netavark", "monitored"),
    ("left", "published"),
    ("rootless", "rootless2"),
    ("left", "published"),
    ("rootless", "rootless2"),
    ("published", "late"),
]
MISSED = [("missed", 9109), ("missedpod", 9110), ("published", 9199), ("private", 9199)]
# Without the proxies of docker.
MASKED = {"masked": "ExecStart=%s -p 9111:8000 %s" % (DOCKER, INSIDE)}
PORTS.update(masked=9111, late=9108)
LED = [("plain", "masked"), ("netavark", "masked")]

LAB = ContainerHosts("test-waitnet", HOSTS, networks=True)

Call = t.Tuple[str, int]
AT_ONCE = 4  # waits on one host
HERE = "A=$(ip -4 -o addr show host0 | sed 's/.*inet \\([0-9.]*\\).*/\\1/')"
WAIT = "gpuops wait --unit %s --url http://%s:%d --engine vllm --model tiny --timeout %g --json"
WAIT += " >/run/answer.%d 2>/dev/null"
# Connections to a port at which nobody listens, led on by the kernel alone, as Kubernetes does it.
LEAD = r"""
for i in $(seq 100); do
    to=$(docker inspect -f '{{.NetworkSettings.IPAddress}}' hidden 2>/dev/null || :); test -z "$to" || break; sleep 0.1
done
iptables -t nat -A OUTPUT -p tcp --dport 9112 -j DNAT --to-destination $to:8000
"""
# What the tests compare the answers with: name, id and pid of each container, name and main process of each unit.
SEEN = r"""
docker inspect -f '{{.Name}} {{.Id}} {{.State.Pid}}' $(docker ps -q) | sed 's,^/,,'
podman ps --no-trunc --format '{{.Names}} {{.ID}} {{.Pid}}'
for u in plain private joined late-proxy; do echo "$u - $(systemctl show --value -p MainPID $u)"; done
"""


def write(services: t.Dict[str, str], sockets: t.Mapping[str, t.Tuple[int, str, str]]) -> str:
    """A script that writes these units and starts them, all at once."""
    files = {"%s.service" % name: "[Service]\n" + text for name, text in services.items()}
    for name, (port, service, head) in sockets.items():
        files["%s-proxy.socket" % name] = "[Socket]\nListenStream=%d" % port
        files["%s-proxy.service" % name] = "[Unit]\n%s\n[Service]\n%s" % (head, service)
    lines = ["printf %%s %s >/etc/systemd/system/%s" % (shlex.quote(text + "\n"), name) for name, text in files.items()]
    units = " ".join(name for name in files if not name.endswith("-proxy.service"))
    return "\n".join([*lines, "systemctl daemon-reload", "systemctl start --no-block " + units])


def ask(calls: t.Sequence[Call], timeout: t.Callable[[Call], float]) -> t.Dict[Call, t.Dict[str, Result]]:
    """Wait for units at ports, for a few of them at once."""
    lines = []
    for number, call in enumerate(calls):
        address = "$A" if call[1] == PORTS["hidden"] else "127.0.0.1"
        lines.append(WAIT % (call[0], address, call[1], timeout(call), number))
    script = "%s; export A; xargs -P %d -d '\\n' -I@ sh -c @ || :\n" % (HERE, AT_ONCE)
    gather = "for n in $(seq 0 %d); do cat /run/answer.$n; echo; echo END; done" % (len(calls) - 1)
    said = LAB.everywhere(script + gather, "\n".join(lines) + "\n", timeout=400)
    found = {host: [json.loads(one) for one in text.split("END\n")[:-1]] for host, text in said.items()}
    return {call: {host: found[host][number] for host in found} for number, call in enumerate(calls)}


class Told(t.NamedTuple):
    """What was answered, and what each host runs: ids and pids by names."""

    answers: t.Dict[Call, t.Dict[str, Result]]
    seen: t.Dict[str, t.Dict[str, t.List[str]]]

    def add(self, calls: t.Sequence[Call]) -> None:
        self.answers.update(ask(calls, lambda call: 8 if call in MISSED else 60))
        for host, text in LAB.everywhere(SEEN).items():
            self.seen.setdefault(host, {}).update({line.split()[0]: line.split()[1:] for line in text.splitlines()})


@pytest.fixture(scope="module")
def told() -> t.Iterator[Told]:
    with LAB.up(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        agent = pool.submit(LAB.install_agent)
        LAB.install(dict.fromkeys(HOSTS, PACKAGES))
        LAB.everywhere("cat >/opt/engine.py; ip netns add joined; ip -n joined link set lo up", ENGINE.read_text())
        LAB.prepare()
        LAB.let_run("rl")
        LAB.everywhere(write(SERVICES, SOCKETS) + LEAD)
        agent.result()
        found = Told({}, {})
        # Those that have to wait until their time is over go first: the others are done meanwhile.
        found.add([*MISSED, *((name, PORTS[name]) for name in READY), *((one, PORTS[other]) for one, other in CROSSED)])
        LAB.everywhere(LAB.daemon(**{"userland-proxy": False}) + "(%s)\n" % ANSWERS + write(MASKED, {}))
        asked = {"unit": "masked", "url": "http://127.0.0.1:9111", "engine": "vllm", "model": "tiny", "timeout": 60}
        answer = LAB.module("wait_model_ready", **asked)
        found.add([(one, PORTS[other]) for one, other in LED])
        found.answers["masked", 9111] = answer
        yield found


def listener(answer: Result) -> str:
    return str(next(tier["detail"] for tier in answer["tiers"] if tier["name"] == "listener"))


BEHIND = r'process \d+ "docker-proxy" leads to process {pid} "{title}" of the unit, at port 8000 of 172[0-9.]+'
KEPT = (
    r'process \d+ "{keeper}" keeps the port for others, and connections come to process {pid} "{title}" of the unit, '
)
KEPT += r"at port 8000 of [0-9.]+"
JOINED = r'process \d+ "systemd(-socket-)?" .*leads to process {pid} "{title}" of the unit, at port 8000 of 127.0.0.1'
HOW = {
    "plain": "process {pid} of the unit listens",
    "shared": "process {pid} of the unit listens",
    "sharedpod": "process {pid} of the unit listens",
    "published": BEHIND,
    "rootless": r"process \d+ of the unit listens",
    "rootless2": r"process \d+ of the unit listens",
    "left": BEHIND,
    "netavark": KEPT.replace("{keeper}", "conmon"),
    "monitored": KEPT.replace("{keeper}", "conmon"),
    "masked": KEPT.replace("{keeper}", "dockerd"),
    "private": JOINED,
    "joined": JOINED,
    "hidden": 'the kernel leads connections to process {pid} "{title}" of the unit, at port 8000 of 172[0-9.]+',
}


@pytest.mark.parametrize("name", [*READY, "masked"])
def test_the_listener_is_the_process_of_the_unit_whatever_takes_connections_in(told: Told, name: str) -> None:
    for host, answer in told.answers[name, PORTS[name]].items():
        assert (answer["verdict"], answer["tier_reached"]) == ("ready", "generation"), answer["msg"]
        pid = told.seen[host].get(name, ["", "of rootlessport"])[1]
        wanted = HOW[name].replace("{pid}", pid).replace("{title}", TITLE)
        assert re.fullmatch(wanted, listener(answer)), (host, listener(answer))


@pytest.mark.parametrize(("name", "other"), CROSSED + LED)
def test_another_process_behind_the_port_is_named(told: Told, name: str, other: str) -> None:
    for host, answer in told.answers[name, PORTS[other]].items():
        assert answer["verdict"] == "wrong_server", (host, answer["msg"], listener(answer))
        if other.startswith("rootless"):
            assert re.search(r'\d+ "(rootlessport|exe)" \(unit %s\.service\)' % other, answer["msg"]), answer["msg"]
            continue
        identity, pid = told.seen[host]["late-proxy" if other == "late" else other]
        place = "unit %s.service" % ("late-proxy" if other == "late" else other)
        place = place if identity == "-" else "container " + identity[:12]
        wanted = '%s "%s" (%s)' % (pid, "sleep" if other == "late" else TITLE, place)
        assert re.search(r" has a wrong_server: port \d+ belongs to another process than the unit's: ", answer["msg"])
        assert wanted in answer["msg"], host


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            MISSED[0],
            r'process \d+ "docker-proxy" leads to port 8000 of 172[0-9.]+, where nobody listens; '
            r"the unit listens there on 8001",
        ),
        (
            MISSED[1],
            r'process \d+ "conmon" keeps the port for others, and no connection is taken; '
            r"in a network of its own the unit listens on 8001",
        ),
        (MISSED[2], "nothing listens on port 9199; in a network of its own the unit listens on 8000"),
        (MISSED[3], "nothing listens on port 9199; in a network of its own the unit listens on 8000"),
    ],
)
def test_a_container_that_listens_on_another_port_is_told_so_and_is_not_ready(
    told: Told, call: Call, words: str
) -> None:
    for host, answer in told.answers[call].items():
        assert answer["verdict"] in ("stalled", "progressing"), (host, answer["msg"])
        assert answer["tier_reached"] == "unit"
        assert re.search('the tier "listener" is not reached: %s; next: ' % words, answer["msg"]), (host, answer["msg"])
