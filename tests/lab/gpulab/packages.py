# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian packages that single tests put on a lab host, unpacked and kept by the hash of what they are."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Sequence

from .common import CACHE, LabError, command, digest, locked
from .roots import build_root, mirror
from .state import Host, Lab

LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")
_FALLBACK = "http://deb.debian.org/debian"


def tree(release: str, names: Sequence[str]) -> Path:
    """Return a folder with these packages and what they need beyond the root of *release*, unpacked."""
    root = build_root(release)
    target = CACHE / "packages" / f"{root.name}-{digest(names)}"
    with locked(target.with_name(f".{release}.lock")):
        if target.is_dir():
            return target
        started = time.monotonic()
        work = target.with_name(f".building-{release}")
        shutil.rmtree(work, ignore_errors=True)
        _download(root, work, release, names)
        fresh = work / "tree"
        fresh.mkdir()
        for package in sorted((work / "archives").glob("*.deb")):
            command("dpkg-deb", "-x", package, fresh)
        for part in LEFT_OUT:
            shutil.rmtree(fresh / part, ignore_errors=True)
        fresh.rename(target)
        shutil.rmtree(work)
        for old in target.parent.glob(f"{release}-*"):
            if not old.name.startswith(root.name):  # of a root that is built in another way by now
                shutil.rmtree(old, ignore_errors=True)
        print(f"lab: packages for {release} unpacked in {time.monotonic() - started:.0f} s", flush=True)
    return target


def put(lab: Lab, host: Host, folder: Path) -> None:
    """Copy an unpacked tree over the root of a host, from outside: much faster than through its network."""
    root = lab.folder / host.name / "root"
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as archive:
        unpack = ["tar", "-C", str(root), "-x", "--keep-directory-symlink"]
        done = subprocess.run(unpack, stdin=archive.stdout, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0 or archive.returncode != 0:
        raise LabError(f"'{folder.name}' could not be unpacked on '{host.name}': {done.stderr.strip()[-300:]}")


def _download(root: Path, work: Path, release: str, names: Sequence[str]) -> None:
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True)
    for folder in (work, *work.rglob("*")):
        shutil.chown(folder, "root", "root")
        folder.chmod(0o755)
    (work / "sources").write_text(f"deb {mirror() or _FALLBACK} {release} main\n", encoding="utf-8")
    options = {
        "Dir::Etc::SourceList": work / "sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": root / "var/lib/dpkg/status",
        "Dir::Cache::Archives": work / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Acquire::Languages": "none",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    words = ["apt-get", "--quiet", "--assume-yes", *(f"-o{key}={value}" for key, value in options.items())]
    command(*words, "update", timeout=120)
    command(*words, "--download-only", "install", *names, timeout=300)
