# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Minimal Debian roots, built once with mmdebstrap and kept by the hash of their recipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable

from .common import CACHE, LAB, LabError, command, digest, in_use, locked, tree_parts

PACKAGES = (
    "ca-certificates",
    "dbus",
    "haproxy",
    "iproute2",
    "libpam-systemd",
    "openssh-server",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
)
# Timers and consoles that only cost boot time and processor time in a host that lives for minutes.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "systemd-networkd.service",
    "systemd-timesyncd.service",
)
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*", "/var/cache/apt/*.bin")
FILES = LAB / "files" / "root"
_RECIPE = 3  # raise when finish() changes


def root_id(release: str) -> str:
    """Name the root of *release* by everything that goes into it."""
    parts: list[str | bytes] = [str(_RECIPE), release, *PACKAGES, "/", *MASKED, "/", *LEFT_OUT]
    return f"{release}-{digest([*parts, *tree_parts(FILES)])}"


def root_path(release: str) -> Path:
    """Return the folder of the cached root, whether it exists or not."""
    return CACHE / "roots" / root_id(release)


def mirror() -> str:
    """Return the Debian mirror this machine already uses; empty leaves the choice to mmdebstrap."""
    override = os.environ.get("LAB_MIRROR")
    if override:
        return override
    try:
        lines = command("apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages")
    except LabError:
        return ""
    for line in lines.splitlines():
        origin, label, uri = (line.split("|") + ["", "", ""])[:3]
        if origin == label == "Debian" and uri:
            return uri.rstrip("/")
    return ""


def _apt_options() -> list[str]:
    """Pass this machine's apt proxies on, and leave translations out."""
    options = ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"']
    for scheme in ("http", "https"):
        proxy = command("apt-config", "dump", "--format", "%v", f"Acquire::{scheme}::Proxy").strip()
        if proxy:
            options.append(f'--aptopt=Acquire::{scheme}::Proxy "{proxy}"')
    return options


def _finish(root: Path) -> None:
    """Turn a fresh Debian root into a lab host."""
    shutil.copytree(FILES, root, dirs_exist_ok=True, symlinks=True)
    for path in FILES.rglob("*"):
        target = root / path.relative_to(FILES)
        os.chown(target, 0, 0)
        if path.parent.name == "sudoers.d":
            target.chmod(0o440)
    # /tmp of the caller may not exist inside, and its locale surely does not.
    inside = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "chroot", str(root)]
    command(*inside, "useradd", "--create-home", "--shell", "/bin/bash", "ops")
    command(*inside, "systemctl", "disable", "haproxy.service")
    command(*inside, "systemctl", "enable", "lab-network.service")
    command(*inside, "systemctl", "set-default", "multi-user.target")
    for unit in MASKED:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    for name in (*(root / "etc/ssh").glob("ssh_host_*"), *(root / "var/lib/apt/lists").glob("*_*")):
        name.unlink()
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "var/log/journal").mkdir(exist_ok=True)


def build_root(release: str) -> Path:
    """Return the root of *release*, building it if this recipe was never built here."""
    target = root_path(release)
    with locked(target.with_name(f".{release}.lock")):
        if target.is_dir():
            return target
        started = time.monotonic()
        fresh = target.with_name(f".building-{release}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        log = target.with_name(f"{release}.log")
        argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--components=main"]
        argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT] + _apt_options()
        argv += [f"--include={','.join(PACKAGES)}", release, str(fresh)]
        argv += [mirror()] if mirror() else []
        with open(log, "w", encoding="utf-8") as handle:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, check=False)
        if done.returncode != 0:
            errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E:")]
            shutil.rmtree(fresh, ignore_errors=True)
            why = errors[0][2:].strip() if errors else "no reason given"
            raise LabError(f"the root of '{release}' could not be built: {why}; the whole log is in '{log}'.")
        _finish(fresh)
        fresh.rename(target)
        for old in target.parent.glob(f"{release}-*"):
            if old != target and not in_use(old):
                shutil.rmtree(old, ignore_errors=True)
        print(f"lab: root of {release} built in {time.monotonic() - started:.0f} s", flush=True)
    return target


def build_roots(releases: Iterable[str]) -> dict[str, Path]:
    """Build the missing roots side by side."""
    wanted = sorted(set(releases))
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
        return dict(zip(wanted, pool.map(build_root, wanted)))
