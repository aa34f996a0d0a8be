# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The archive of the host agent: built on the controller for the Python and the machine of a managed host.

An archive is one executable zip file: the library, the third-party distributions and the code that installs them.
Its name is a hash of everything that goes into it, so it is built once and never looked at again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import typing as t
import zipfile

FORMAT = "1"
COLLECTION = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = os.path.join(COLLECTION, "plugins", "module_utils")
INSTALLER = os.path.join(COLLECTION, "roles", "host_agent", "files", "install_agent.py")
NOT_SHIPPED = ("_ansible.py",)
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
OLDEST_PYTHON = (3, 8)
# The oldest C library first served is that of RHEL 8; wheels for older ones run there too.
PLATFORMS = ("manylinux_2_28_%s", "manylinux_2_17_%s", "manylinux2014_%s")
LONGEST_FETCH = 600
EPOCH = (1980, 1, 1, 0, 0, 0)

Requirements = t.Mapping[str, t.Mapping[str, str]]


class ArchiveError(Exception):
    """One sentence that says why there is no archive."""


class Target(t.NamedTuple):
    """What an archive is for."""

    python: str
    machine: str

    def __str__(self) -> str:
        return "Python %s on %s" % (self.python, self.machine)


def target(python: str, machine: str) -> Target:
    known = MACHINES.get(machine)
    if known is None:
        raise ArchiveError(
            'the host agent cannot be built for the machine "%s": x86_64 and aarch64 are served' % machine
        )
    try:
        version = tuple(int(part) for part in python.split("."))[:2]
    except ValueError:
        raise ArchiveError('the Python version "%s" is not understood: give it as MAJOR.MINOR' % python) from None
    if version < OLDEST_PYTHON:
        raise ArchiveError(
            "the host agent cannot be built for Python %s: 3.8 is the oldest that is served: "
            "set ansible_python_interpreter to a newer one" % python
        )
    return Target("%d.%d" % version, known)


def pins(requirements: Requirements, python: str) -> t.List[str]:
    """The exact versions for one Python: its own column of the table, else the default."""
    lines = []
    for name in sorted(requirements):
        versions = requirements[name]
        version = versions.get(python, versions.get("default"))
        if version is None:
            raise ArchiveError('host_agent_requirements has no version of "%s" for Python %s' % (name, python))
        lines.append("%s==%s" % (name, version))
    return lines


def library_files() -> t.List[str]:
    """The rooms of the library that a host gets."""
    return sorted(name for name in os.listdir(LIBRARY) if name.endswith(".py") and name not in NOT_SHIPPED)


def stamp(wanted: Target, requirements: Requirements) -> str:
    """The hash of all that goes into the archive. Nothing is built or fetched for it."""
    digest = hashlib.sha256()
    for part in (FORMAT, wanted.python, wanted.machine, *pins(requirements, wanted.python)):
        digest.update(part.encode() + b"\0")
    for path in [INSTALLER] + [os.path.join(LIBRARY, name) for name in library_files()]:
        with open(path, "rb") as handle:
            content = handle.read()
        digest.update(os.path.basename(path).encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def archive_path(wanted: Target, requirements: Requirements, cache: str) -> str:
    name = "agent-py%s-%s-%s.pyz" % (wanted.python, wanted.machine, stamp(wanted, requirements)[:16])
    return os.path.join(cache, name)


def build(wanted: Target, requirements: Requirements, cache: str, wheelhouse: str = "") -> str:
    """The path of the archive; built unless the cache has it. Safe for many hosts at once."""
    path = archive_path(wanted, requirements, cache)
    if os.path.exists(path):
        return path
    os.makedirs(cache, mode=0o700, exist_ok=True)
    lines = pins(requirements, wanted.python)
    with _lock(os.path.join(cache, "%s-%s.lock" % wanted)):
        if not os.path.exists(path):
            wheels = fetch(wanted, lines, cache, wheelhouse)
            _pack(path, wheels, stamp(wanted, requirements))
    return path


def fetch(wanted: Target, lines: t.Sequence[str], cache: str, wheelhouse: str = "") -> str:
    """A folder with the wheels of ``lines`` and all that they need; the cache's where it has them."""
    key = hashlib.sha256("\0".join(lines).encode()).hexdigest()[:16]
    folder = os.path.join(cache, "wheels-py%s-%s-%s" % (wanted.python, wanted.machine, key))
    if os.path.isdir(folder):
        return folder
    fresh = tempfile.mkdtemp(prefix=".fetch-", dir=cache)
    try:
        ran = _pip(wanted, lines, fresh, wheelhouse)
        if ran.returncode:
            raise ArchiveError(_fetch_failure(wanted, ran.stdout, wheelhouse))
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _pip(wanted: Target, lines: t.Sequence[str], folder: str, wheelhouse: str) -> subprocess.CompletedProcess[str]:
    command = pip_command() + ["download", "--quiet", "--disable-pip-version-check", "--no-input", "--dest", folder]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=" + wanted.python]
    command += ["--platform=" + platform % wanted.machine for platform in PLATFORMS]
    if wheelhouse:
        if not os.path.isdir(wheelhouse):
            raise ArchiveError('the wheelhouse "%s" is not a folder on the controller' % wheelhouse)
        command += ["--no-index", "--find-links=" + wheelhouse]
    try:
        return subprocess.run(
            command + list(lines),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_FETCH,
        )
    except subprocess.TimeoutExpired:
        raise ArchiveError(
            "the libraries of the host agent for %s were not fetched within %d s" % (wanted, LONGEST_FETCH)
        ) from None


def pip_command() -> t.List[str]:
    """A pip on the controller: that of Ansible's own Python, else the first one in the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ArchiveError(
        "the controller has no pip to fetch the libraries of the host agent: install pip for %s" % sys.executable
    )


def _fetch_failure(wanted: Target, output: str, wheelhouse: str) -> str:
    errors = [line.split("ERROR:", 1)[1].strip() for line in output.splitlines() if "ERROR:" in line]
    reason = errors[-1] if errors else (output.strip().splitlines() or ["pip said nothing"])[-1]
    remedy = (
        'put the missing wheels into "%s"' % wheelhouse
        if wheelhouse
        else "give the controller an index, or set host_agent_wheelhouse to a folder that holds the wheels"
    )
    return "the libraries of the host agent for %s cannot be fetched: %s: %s" % (wanted, reason, remedy)


def _pack(path: str, wheels: str, stamped: str) -> None:
    """Write the archive beside its place, then rename it: nobody ever sees half of one."""
    handle, temporary = tempfile.mkstemp(prefix=".agent-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "wb") as sink, zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
            _add_file(archive, "__main__.py", INSTALLER)
            _add(archive, "payload/.stamp", stamped.encode())
            for name in library_files():
                _add_file(archive, "payload/lib/gpuops/" + name, os.path.join(LIBRARY, name))
            for name in sorted(os.listdir(wheels)):
                _add_wheel(archive, os.path.join(wheels, name))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _add_wheel(archive: zipfile.ZipFile, path: str) -> None:
    """A wheel is a zip file of what belongs into site-packages; scripts and samples are not wanted there."""
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith("/") or ".data/" in name or name == "example.py":
                continue
            _add(archive, "payload/site/" + name, wheel.read(name))


def _add_file(archive: zipfile.ZipFile, name: str, path: str) -> None:
    with open(path, "rb") as handle:
        _add(archive, name, handle.read())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """With a fixed time, so that equal content makes equal archives."""
    info = zipfile.ZipInfo(name, EPOCH)
    info.external_attr = 0o644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


@contextlib.contextmanager
def _lock(path: str) -> t.Iterator[None]:
    with open(path, "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
