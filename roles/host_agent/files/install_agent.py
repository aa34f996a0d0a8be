# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The start of an agent archive: runs on the managed host, out of the zip file it is part of.

It needs nothing but Python 3.8: no pip, no network. Everything is unpacked beside the old content and tried there;
then the two are exchanged. A run that is killed leaves the old content, the new content or none, never a mixture.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import typing as t
import zipfile

PAYLOAD = "payload/"
AT_FDCWD = -100
RENAME_EXCHANGE = 2

COMMAND = """#!%s -I
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "lib"))

from gpuops._agent import main

sys.exit(main())
"""

TRIAL = "import sys; sys.path[:0] = sys.argv[1:]; import psutil, pynvml, requests, tqdm; import gpuops._agent"

# Without default dependencies, so that neither the target nor multi-user.target waits for the services it wants.
TARGET = """[Unit]
Description=Inference services of this host
DefaultDependencies=no
Conflicts=shutdown.target
Before=shutdown.target

[Install]
WantedBy=multi-user.target
"""


class Paths(t.NamedTuple):
    """Where everything goes, below ``prefix`` so that it can be tried elsewhere."""

    prefix: str

    def below(self, path: str) -> str:
        return os.path.join(self.prefix, path.lstrip("/"))

    @property
    def home(self) -> str:
        return self.below("/opt/gpuops")


def install(archive: str, paths: Paths) -> t.List[str]:
    """Bring the host to what the archive holds; returns what was changed."""
    parent = os.path.dirname(paths.home)
    os.makedirs(parent, exist_ok=True)
    _sweep(parent)
    changes = []
    fresh = tempfile.mkdtemp(prefix=".gpuops-", dir=parent)
    try:
        _unpack(archive, fresh)
        _try(fresh, paths.home)
        if _replace(fresh, paths.home):
            shutil.rmtree(fresh, ignore_errors=True)
        changes.append(paths.home)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    changes += _link("/opt/gpuops/bin/gpuops", paths.below("/usr/local/bin/gpuops"))
    for folder, mode in (
        ("/etc/gpuops", 0o755),
        ("/etc/gpuops/services", 0o755),
        ("/etc/gpuops/env", 0o700),
        ("/var/lib/gpuops", 0o755),
    ):
        changes += _folder(paths.below(folder), mode)
    changes += _target(paths)
    return changes


def _sweep(parent: str) -> None:
    """What killed runs left behind. The caller holds the lock, so none of it is in use."""
    for entry in os.listdir(parent):
        if entry.startswith(".gpuops-"):
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


def _unpack(archive: str, fresh: str) -> None:
    os.chmod(fresh, 0o755)
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if not name.startswith(PAYLOAD) or name.endswith("/"):
                continue
            target = os.path.join(fresh, name[len(PAYLOAD) :])
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with opened.open(name) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink)
    command = os.path.join(fresh, "bin", "gpuops")
    os.makedirs(os.path.dirname(command), exist_ok=True)
    with open(command, "w", encoding="utf-8") as handle:
        handle.write(COMMAND % sys.executable)
    os.chmod(command, 0o755)


def _try(fresh: str, home: str) -> None:
    """Import everything once, where it does no harm yet. Compiled here, because later users may not write."""
    for folder in ("lib", "site"):
        compileall.compile_dir(os.path.join(fresh, folder), ddir=os.path.join(home, folder), quiet=2)
    # Without the site-packages of the host: this must not succeed through what it happens to have.
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", TRIAL, os.path.join(fresh, "lib"), os.path.join(fresh, "site")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    if tried.returncode:
        reason = tried.stdout.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise RuntimeError("the libraries do not work with %s: %s" % (sys.executable, "".join(reason)))


def _replace(fresh: str, home: str) -> bool:
    """Put ``fresh`` in the place of ``home``; says whether the old content is in ``fresh`` now."""
    if not os.path.lexists(home):
        os.rename(fresh, home)
        return False
    if _exchange(fresh, home):
        return True
    # A file system without exchange: for a moment there is no agent at all.
    aside = fresh + "-old"
    os.rename(home, aside)
    os.rename(fresh, home)
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _exchange(one: str, other: str) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def _link(content: str, path: str) -> t.List[str]:
    if os.path.islink(path) and os.readlink(path) == content:
        return []
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = "%s.%d" % (path, os.getpid())
    os.symlink(content, temporary)
    os.replace(temporary, path)
    return [path]


def _folder(path: str, mode: int) -> t.List[str]:
    known = os.path.isdir(path)
    os.makedirs(path, exist_ok=True)
    if known and os.stat(path).st_mode & 0o7777 == mode:
        return []
    os.chmod(path, mode)
    return [path]


def _target(paths: Paths) -> t.List[str]:
    """The target that all services belong to, enabled."""
    path = paths.below("/etc/systemd/system/gpuops.target")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    changes = []
    try:
        with open(path, encoding="utf-8") as handle:
            known = handle.read()
    except OSError:
        known = ""
    if known != TARGET:
        temporary = "%s.%d" % (path, os.getpid())
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.write(TARGET)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        changes.append(path)
    wanted = paths.below("/etc/systemd/system/multi-user.target.wants/gpuops.target")
    changes += _link("/etc/systemd/system/gpuops.target", wanted)
    if changes and paths.prefix == "/" and os.path.isdir("/run/systemd/system"):
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=60)
        subprocess.run(["systemctl", "start", "--no-block", "gpuops.target"], check=True, timeout=60)
    return changes


def main(argv: t.Optional[t.Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Install the host agent of gpuops.serving out of this archive.")
    parser.add_argument("--prefix", default="/", help="install below this folder (default: /)")
    options = parser.parse_args(argv)
    paths = Paths(options.prefix)
    if paths.prefix == "/" and os.geteuid() != 0:
        print("the host agent cannot be installed: this is not root: use become", file=sys.stderr)
        return 1
    os.umask(0o022)
    os.makedirs(paths.below("/run"), exist_ok=True)
    with open(paths.below("/run/gpuops-agent.lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            changes = install(os.path.abspath(sys.argv[0]), paths)
        except (OSError, RuntimeError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            print("the host agent cannot be installed: %s" % error, file=sys.stderr)
            return 1
    print(json.dumps({"changes": changes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
