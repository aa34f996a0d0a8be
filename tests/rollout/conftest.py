# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One lab for all rollout tests: three hosts that serve, behind a gateway."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest
from fleet import GPU_HOSTS, UNITS, Fleet, Traffic


@pytest.fixture(scope="session")
def lab() -> t.Iterator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    fleet = Fleet("rollout")
    fleet.down()
    try:
        fleet.up()
        fleet.install_legacy()
        fleet.playbook("deploy")
        fleet.wait_backends(dict.fromkeys(GPU_HOSTS, "UP"), timeout=120)
        yield fleet
    finally:
        fleet.down()


@pytest.fixture
def fleet(lab: Fleet) -> Fleet:
    """The lab, with every host reachable, serving and restored, whatever an earlier test did."""
    for host in GPU_HOSTS:
        lab.lab("heal", host)
        lab.run(host, "rm -rf /var/lib/gpuops/qwen/lease.json")
        if lab.unit(host)["ActiveState"] != "active":
            lab.run(host, f"pkill -9 -f [s]glang::scheduler; systemctl reset-failed {UNITS[host]}", checked=False)
            lab.run(host, f"systemctl start {UNITS[host]}")
    lab.haproxy("; ".join(f"set server qwen/{host} state ready" for host in GPU_HOSTS))
    lab.wait_backends(dict.fromkeys(GPU_HOSTS, "UP"), timeout=60)
    return lab


@pytest.fixture
def traffic(fleet: Fleet, tmp_path: Path) -> t.Iterator[t.Callable[..., Traffic]]:
    running: t.List[Traffic] = []

    def start(*arguments: str) -> Traffic:
        running.append(Traffic(fleet, tmp_path / "traffic.json", *arguments))
        return running[-1]

    yield start
    for one in running:
        one.kill()
