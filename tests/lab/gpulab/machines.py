# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts: systemd-nspawn on an overlay of a cached root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

from . import cgroups, network
from .common import BUILD, LabError, command, write
from .state import Host, Lab, running, started_at

_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_FLOOR = 1024


def raise_inotify_limit() -> None:
    """Each booted systemd takes a few inotify instances; with 128 the twentieth host hangs half-booted."""
    if int(_INOTIFY.read_text(encoding="utf-8")) < _INOTIFY_FLOOR:
        _INOTIFY.write_text(str(_INOTIFY_FLOOR), encoding="utf-8")


def mount_lab(lab: Lab) -> None:
    """Mount the file system that holds the hosts' changes: memory, so that it works on any checkout and is quick."""
    lab.folder.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", "mode=0755,size=75%", "gpuops-lab", lab.folder)


def prepare(lab: Lab, host: Host, layers: list[Path], keys: dict[str, str]) -> None:
    """Lay the overlay of a host and write the files that make it this host."""
    place = lab.folder / host.name
    for part in ("upper", "work", "root"):
        (place / part).mkdir(parents=True, exist_ok=True)
    for layer in layers:
        if any(sign in str(layer) for sign in ":,\\"):
            raise LabError(f"the checkout cannot carry a lab: overlayfs refuses the path '{layer}'.")
    lower = ":".join(str(layer) for layer in layers)
    options = f"lowerdir={lower},upperdir={place / 'upper'},workdir={place / 'work'}"
    command("mount", "-t", "overlay", "-o", options, "gpuops-lab", place / "root")
    root = place / "root"
    everyone = "".join(f"{one.address} {one.name}\n" for one in lab.hosts)
    write(root / "etc/hostname", f"{host.name}\n")
    write(root / "etc/hosts", f"127.0.0.1 localhost\n{everyone}")
    write(root / "etc/machine-id", uuid.uuid4().hex + "\n")
    write(
        root / "etc/lab-network",
        f"ADDRESS={host.address}/24\nMAC={network.mac(lab.index, host.number)}\n",
    )
    write(root / "etc/ssh/ssh_host_ed25519_key", keys["host_private"], 0o600)
    write(root / "etc/ssh/ssh_host_ed25519_key.pub", keys["host_public"])
    home = root / ("root" if host.user == "root" else f"home/{host.user}")
    owner = home.stat()
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    write(home / ".ssh/authorized_keys", keys["user_public"], 0o600)
    for path in (home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(path, owner.st_uid, owner.st_gid)


# The watch waits until it is recorded and in its group, so that whoever cleans up finds it and all that it starts.
# A guest that reboots makes systemd-nspawn end with status 133; then its next life begins.
_WATCH = """
groups=$1
shift
read -r go || exit 1
while :; do
    (for group in $groups; do echo 0 > "$group" || exit 1; done; exec "$@" < /dev/null)
    [ $? = 133 ] || exit 1
done
"""


def boot(lab: Lab, host: Host) -> None:
    """Start a host, record it and return at once; the caller waits for SSH."""
    console = BUILD / lab.name / "console" / f"{host.name}.log"
    console.parent.mkdir(parents=True, exist_ok=True)
    network.drop_cable(f"{lab.name}-{host.name}")
    groups = " ".join(str(path) for path in cgroups.create(lab.name, host.name, "host"))
    argv = ["systemd-nspawn", "--quiet", "--boot", f"--directory={lab.folder / host.name / 'root'}"]
    argv += [f"--machine={lab.name}-{host.name}", f"--hostname={host.name}", "--register=no", "--keep-unit"]
    argv += [f"--network-bridge={network.bridge_name(lab.index)}", "--link-journal=no", "--resolv-conf=off"]
    argv += ["--timezone=off", "--console=read-only", *(f"--bind-ro={bind}" for bind in lab.binds)]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "0" if host.legacy else "1",
    }
    network.remember(lab.index, host.number)
    with open(console, "ab") as output:
        process = subprocess.Popen(
            ["sh", "-c", _WATCH, "lab-host", groups, *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        host.pid, host.start = process.pid, started_at(process.pid)
        for entry in cgroups.create(lab.name, host.name, "watch"):
            entry.write_text(str(process.pid), encoding="utf-8")
        lab.save()
        pipe.write(b"go\n")


def leader(host: Host) -> int:
    """Return the pid, on this machine, of the host's init."""
    if running(host):
        nspawn = _children(host.pid)
        init = _children(nspawn[0]) if nspawn else []
        if init:
            return init[0]
    raise LabError(f"host '{host.name}' is not running.")


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def inside(host: Host, argv: list[str], *, terminal: bool = False) -> list[str]:
    """Return the command line that runs *argv* on a host as root, whether its network works or not."""
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd=/"]
    unit = ["systemd-run", "--quiet", "--wait", "--collect", "--pty" if terminal else "--pipe", "--setenv=HOME=/root"]
    return ["nsenter", "--target", str(leader(host)), *spaces, "--", "env", "-i", *_ENVIRONMENT, *unit, "--", *argv]


_ENVIRONMENT = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "TERM=linux")


def power_off(lab: Lab, host: Host) -> None:
    """End a host at once, as by pulling its plug."""
    if running(host):
        handle = os.pidfd_open(host.pid)
        try:
            if running(host):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    cgroups.kill(lab.name, host.name)
    network.drop_cable(f"{lab.name}-{host.name}")
    cgroups.remove(lab.name, host.name)
    with contextlib.suppress(OSError):
        os.waitpid(host.pid, 0)  # only when this very process started it


def unmount_lab(lab_folder: Path) -> None:
    """Unmount everything at and below the lab's folder, innermost first."""
    for _ in range(50):
        places = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
        below = [place for place in places if place == str(lab_folder) or place.startswith(f"{lab_folder}/")]
        if not below:
            break
        for place in sorted(below, key=len, reverse=True):
            subprocess.run(["umount", place], stderr=subprocess.DEVNULL, check=False)
        time.sleep(0.05)
    else:
        raise LabError(f"'{lab_folder}' cannot be unmounted: a process still works in it.")
    if lab_folder.is_dir():
        shutil.rmtree(lab_folder)
