# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring a lab up and take it down, also when the last attempt was cut short."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, Sequence

from . import access, cgroups, layers, machines, network, roots, state
from .common import REPO, RUN, LabError, locked, write
from .hosts import HostSpec
from .state import Host, Lab


def require() -> None:
    """Say in one sentence what this machine lacks."""
    if os.geteuid() != 0:
        raise LabError("the lab must be run as root: it mounts file systems and starts systemd-nspawn.")
    for program, package in (
        ("systemd-nspawn", "systemd-container"),
        ("mmdebstrap", "mmdebstrap"),
        ("ip", "iproute2"),
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        ("nsenter", "util-linux"),
    ):
        if shutil.which(program) is None:
            raise LabError(f"the lab needs '{program}': install the package '{package}' (make prereqs does).")
    cgroups.unified_root()


def _claim(name: str, hosts: list[HostSpec], binds: Sequence[str]) -> Lab:
    """Record the lab before anything of it exists, so that whatever becomes of us can be found and removed."""
    with locked(RUN / ".lock"):
        old = state.load(name)
        if old is not None:
            raise LabError(f"lab '{name}' exists, from '{old.repository}': remove it with 'lab.py down --name {name}'.")
        index = network.free_index({lab.index for lab in state.all_labs()})
        lab = Lab(name, index, str(REPO), binds=list(binds))
        for number, spec in enumerate(hosts, 1):
            lab.hosts.append(
                Host(spec.name, spec.release, spec.role, spec.user, spec.legacy, number, network.address(index, number))
            )
        lab.save()
    return lab


def build(roles: list[str], releases: Iterable[str]) -> tuple[dict[str, Path], dict[str, list[Path]]]:
    """Build what hosts are made of, unless it is in the cache: their roots, and what lies above them by role."""
    require()
    with ThreadPoolExecutor(max_workers=1) as pool:
        building = pool.submit(layers.build, roles)
        return roots.build_roots(releases), building.result()


def up(name: str, hosts: list[HostSpec], binds: Sequence[str] = ()) -> Lab:
    """Build what is missing, boot the hosts and return when all answer SSH."""
    found, extra = build([host.role for host in hosts], [host.release for host in hosts])
    machines.raise_inotify_limit()
    started = time.monotonic()
    with locked(RUN / f".{name}.lock"):
        lab = _claim(name, hosts, binds)
        try:
            shutil.rmtree(access.folder(lab), ignore_errors=True)
            keys = access.make_keys(lab)
            machines.mount_lab(lab)
            access.control_folder(lab).mkdir(mode=0o700)
            network.create(lab.index)
            for host in lab.hosts:
                machines.prepare(lab, host, [*extra.get(host.role, []), found[host.release]], keys[host.name])
                layers.configure(lab, host)
                machines.boot(lab, host)
            access.write_ssh_config(lab)
            access.write_inventory(lab)
            access.wait_for_ssh(lab, lab.hosts)
            write(access.folder(lab) / "state.json", state.record(name).read_text(encoding="utf-8"))
        except BaseException:
            _remove(lab)
            raise
    print(f"lab: {len(hosts)} hosts up in {time.monotonic() - started:.1f} s", flush=True)
    return lab


def down(name: str) -> bool:
    """Remove a lab; say whether there was one. Repeating it does no harm."""
    require()
    with locked(RUN / f".{name}.lock"):
        lab = state.load(name)
        if lab is None:
            return False
        _remove(lab)
    return True


def _remove(lab: Lab) -> None:
    """Remove everything a lab has, in whatever state it is; the record goes last."""
    if access.control_folder(lab).is_dir():
        access.close_connections(lab)
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda host: machines.power_off(lab, host), lab.hosts))
    cgroups.remove(lab.name)
    network.remove(lab.index)
    machines.unmount_lab(lab.folder)
    state.record(lab.name).unlink(missing_ok=True)


def kill(lab: Lab, host: Host) -> None:
    """Pull the plug of a host; it stays down until reboot()."""
    machines.power_off(lab, host)
    host.pid = host.start = 0
    lab.save()


def reboot(lab: Lab, host: Host, timeout: float = 60.0) -> None:
    """Reboot a host in the orderly way, or boot it if it is down; return when it answers SSH."""
    if state.running(host):
        old = machines.leader(host)
        subprocess.run(
            machines.inside(host, ["systemctl", "--no-block", "reboot"]), capture_output=True, check=False, timeout=20
        )
        _wait_for_new_leader(host, old, timeout)
    else:
        machines.power_off(lab, host)
        machines.boot(lab, host)
    access.wait_for_ssh(lab, [host], timeout)


def _wait_for_new_leader(host: Host, old: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if machines.leader(host) != old:
                return
        except LabError:
            if not state.running(host):
                raise
        time.sleep(0.1)
    raise LabError(f"host '{host.name}' did not reboot within {timeout:.0f} s.")


def leftovers(name: str) -> list[str]:
    """Name what is left of a lab that should be gone; for tests."""
    found = [str(path) for path in (RUN / name, state.record(name)) if path.exists()]
    found += [
        line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if f"{RUN}/{name}/" in line
    ]
    found += [str(group) for group in cgroups.groups(name) if group.exists()]
    return found
