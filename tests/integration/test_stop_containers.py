# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What units run through docker, podman and systemd-nspawn: the real ones, on the oldest and the newest systemd."""

from __future__ import annotations

import os
import time
import typing as t

import pytest
from containerhosts import PACKAGES, ContainerHosts
from labhosts import Results, verdicts

HOSTS = {"old": "bullseye", "new": "trixie", "legacy": "bullseye,legacy=1"}
# crun kills more than its container where the control groups are the legacy ones of a lab host: no docker there.
DAEMONS = ("old", "new")
UNIT = "engine.service"
# Process 1 of a container is deaf to TERM unless it handles it, as many an engine is.
ENGINE = "/bin/busybox sh -c '/bin/busybox sleep 98761 & exec /bin/busybox sleep 98762'"
PROCESSES = ["busybox", "busybox"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")

SET_UP_ALL = r"""
ldconfig; mkdir -p /srv/tree/bin /srv/tree/usr /srv/tree/etc; cp /bin/busybox /srv/tree/bin
echo ID=tiny > /srv/tree/etc/os-release; systemctl daemon-reload
systemd-run --quiet --unit=bystander systemd-nspawn --quiet --console=pipe --register=no -x -D /srv/tree -M bystander \
    /bin/busybox sleep 98763
"""
SET_UP = r"""
docker tag tiny another
docker run --detach --name bystander --network=host tiny /bin/busybox sleep 98763 >/dev/null
podman run --detach --name bystander tiny /bin/busybox sleep 98763 >/dev/null
"""
# Everything here that must not be touched, with the pids of its processes and their create times.
BYSTANDERS = r"""
for p in $(pgrep -f "[s]leep 98763"); do cut -d' ' -f22 "/proc/$p/stat"; done | sort
systemctl show -P InvocationID -P MainPID ssh dockerd systemd-journald bystander
"""
CLEAN = r"""
systemctl kill -s KILL --kill-who=all engine 2>/dev/null || :; systemctl stop engine 2>/dev/null || :
! test -d /run/systemd/nspawn/unix-export/engine || umount /run/systemd/nspawn/unix-export/engine || :
rm -f /etc/systemd/system/engine.service; systemctl daemon-reload; systemctl reset-failed
for p in $(pgrep -f "[s]leep 9876[12]" || :); do kill -9 $p 2>/dev/null || :; done
test -x /usr/bin/docker || exit 0
docker rm --force engine >/dev/null 2>&1 || :; podman rm --force engine >/dev/null 2>&1 || :
"""


LAB = ContainerHosts("test-ctr", HOSTS)
everywhere, wait_for = LAB.everywhere, LAB.wait


@pytest.fixture(scope="module", autouse=True)
def fixture_lab() -> t.Iterator[None]:
    with LAB.up():
        LAB.install({host: PACKAGES if host in DAEMONS else PACKAGES[:2] for host in HOSTS})
        everywhere(SET_UP_ALL)
        LAB.at = DAEMONS
        LAB.prepare()
        everywhere(SET_UP)
        yield


def stop(check: bool = False, **options: t.Any) -> Results:
    return LAB.module("process_tree_stop", check, **dict({"unit": UNIT, "grace": 2}, **options))


def unit(exec_start: str, *lines: str) -> None:
    text = "[Service]\nExecStart=%s\n%s\n" % (exec_start, "\n".join(lines))
    everywhere("cat > /etc/systemd/system/%s; systemctl daemon-reload; systemctl reset-failed" % UNIT, text)


def start(exec_start: str, *lines: str) -> None:
    unit(exec_start, *lines)
    everywhere("systemctl start %s" % UNIT)
    # The runtime that started it may be at work a moment longer, in the same group.
    wait_for('test "$(pgrep -cf "^/bin/busybox sleep 9876[12]")" = 2 && ! pgrep -x "crun|runc|lab-runtime"')


def kill_front() -> None:
    everywhere("systemctl kill -s KILL --kill-who=main %s" % UNIT)
    wait_for("systemctl is-failed --quiet %s" % UNIT)


def inside(results: Results, way: str = "container", beside: t.Collection[str] = ()) -> None:
    """Whoever was in the container was found by it, with nobody but those named beside, and none is left."""
    for host, result in results.items():
        found = {process["name"]: process for process in result["processes"] if way in process["found_by"]}
        assert set(found) - set(beside) == {"busybox"}, (host, result["processes"])
        assert result["survivors"] == []
    everywhere("! pgrep -f '^/bin/busybox sleep 9876[12]'")


@pytest.fixture(autouse=True)
def fixture_clean(request: pytest.FixtureRequest) -> t.Iterator[None]:
    LAB.at = tuple(HOSTS) if "machine" in request.node.name else DAEMONS
    before = everywhere(BYSTANDERS)
    yield
    everywhere(CLEAN)
    assert everywhere(BYSTANDERS) == before


def signals(results: Results, name: str = "busybox") -> t.Set[str]:
    return {signal for r in results.values() for p in r["processes"] if p["name"] == name for signal in p["signals"]}


def test_a_container_whose_client_is_dead_is_stopped_through_docker_and_stays_so() -> None:
    start("/usr/bin/docker run --name=${N} --restart=always --network=host tiny " + ENGINE, "Environment=N=engine")
    kill_front()
    plan = stop(check=True)
    assert verdicts(plan) == {("stopped", True)}
    for result in plan.values():
        steps = [(step["action"], step["signal"], [p["name"] for p in step["processes"]]) for step in result["plan"]]
        assert steps[0] == ("container_stop", None, PROCESSES)
        assert steps[-1][:2] == ("signal", "KILL")
    results = stop()
    assert verdicts(results) == {("stopped", True)}
    inside(results)
    assert "docker" in signals(results)
    for result in results.values():
        assert sorted(p["name"] for p in result["processes"]) == PROCESSES
    time.sleep(1.5)  # docker's own pause before it starts one again begins with a tenth of a second
    everywhere(
        "! pgrep -f '^/bin/busybox sleep 9876[12]'; test $(docker inspect -f '{{.State.Running}}' engine) = false"
    )


def test_an_active_unit_of_a_user_whose_script_starts_the_container() -> None:
    everywhere("docker create --name engine --network=host tiny %s >/dev/null" % ENGINE)
    everywhere(
        "cat > /opt/start.sh; chmod 755 /opt/start.sh", '#!/bin/sh\nname=engine\ndocker start --attach "$name"\n'
    )
    start(
        "/opt/start.sh", "User=ops", "SupplementaryGroups=docker", "TimeoutStopSec=1", "Restart=always", "RestartSec=1"
    )
    results = stop(grace=3)
    assert verdicts(results) == {("stopped", True)}
    inside(results)
    assert signals(results, "docker") == {"systemd"}
    for result in results.values():
        assert result["unit_state"]["active_state"] in ("inactive", "failed")
    time.sleep(1.5)  # longer than RestartSec
    everywhere("! pgrep -f '^/bin/busybox sleep 9876[12]'")


def test_a_container_that_somebody_else_made_keeps_running() -> None:
    everywhere("docker run --detach --name engine --network=host another /bin/busybox sleep 98764 >/dev/null; sleep 2")
    unit("/usr/bin/docker run --name engine --network=host tiny " + ENGINE)
    everywhere("systemctl start %s" % UNIT)
    wait_for("systemctl is-failed --quiet %s" % UNIT)
    results = stop()
    assert verdicts(results) == {("absent", False)}
    assert all("is left alone" in result["said"] for result in results.values())
    everywhere("pgrep -f '^/bin/busybox sleep 98764'")


def test_a_container_of_podman_whose_client_is_dead() -> None:
    start("/usr/bin/podman run --name engine --replace tiny " + ENGINE, "KillMode=process")
    kill_front()
    results = stop()
    assert verdicts(results) == {("stopped", True)}
    inside(results)
    assert "podman" in signals(results)
    wait_for("! pgrep -f '^/usr/bin/conmon .* -n engine'")


def test_a_container_of_podman_in_the_unit_s_own_group() -> None:
    start(
        "/usr/bin/podman run --cgroups=split --name engine --replace tiny " + ENGINE, "TimeoutStopSec=1", "Delegate=yes"
    )
    results = stop(grace=3)
    assert verdicts(results) == {("stopped", True)}
    # The client hands the signal on by its runtime, which is a moment in the group then.
    inside(results, "cgroup", {"podman", "conmon", "lab-runtime", "crun"})


@pytest.mark.parametrize("options", ["", "--register=no"])
def test_a_machine_outside_the_unit_outlives_its_front_and_is_ended(options: str) -> None:
    start("/usr/bin/systemd-nspawn --quiet --console=pipe -D /srv/tree -M engine %s %s" % (options, ENGINE))
    kill_front()
    wait_for('test "$(pgrep -cf "^/bin/busybox sleep 9876[12]")" = 2')
    results = stop(grace=1)
    assert verdicts(results) == {("stopped", True)}
    inside(results)
    for result in results.values():
        by = {tuple(process["found_by"]) for process in result["processes"]}
        assert all("container" in ways for ways in by)


def test_a_machine_in_the_unit_s_own_group() -> None:
    nspawn = "/usr/bin/systemd-nspawn --quiet --console=pipe --keep-unit --register=no -D /srv/tree -M engine "
    start(nspawn + ENGINE, "KillMode=process")
    kill_front()
    results = stop(grace=1)
    assert verdicts(results) == {("stopped", True)}
    inside(results, "cgroup")
