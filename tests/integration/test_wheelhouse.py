# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The host agent's archive: resolvable for every Python and machine served, complete, and installed at one stroke."""

from __future__ import annotations

import ast
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import time
import typing as t
import zipfile

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.plugin_utils import _agent_archive as archive

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHONS = ["3.%d" % minor for minor in range(8, 15)]
MACHINES = ["x86_64", "aarch64"]
TARGETS = [archive.target(python, machine) for python in PYTHONS for machine in MACHINES]
HERE = archive.target("%d.%d" % sys.version_info[:2], os.uname().machine)
NEEDED = (
    *("psutil/__init__.py", "requests/__init__.py", "pynvml.py", "tqdm/__init__.py"),
    *("urllib3/", "idna/", "certifi/", "charset_nor"),
)


def requirements() -> t.Any:
    text = (ROOT / "roles/host_agent/defaults/main.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["host_agent_requirements"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Filled for all targets; a few at a time, since each is a pip of its own."""
    folder = str(tmp_path_factory.mktemp("wheels"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda target: archive.build(target, requirements(), folder), TARGETS))
    return folder


def contents(cache: str, target: archive.Target) -> zipfile.ZipFile:
    return zipfile.ZipFile(archive.archive_path(target, requirements(), cache))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_python_and_machine_gets_exactly_what_the_table_says(cache: str, target: archive.Target) -> None:
    lines = archive.pins(requirements(), target.python)
    wheels = sorted(os.listdir(archive.fetch(target, lines, cache)))
    found = sorted("%s==%s" % tuple(wheel.split("-")[:2]) for wheel in wheels)
    # One more wheel than lines would be a dependency that the hash of the archive does not know.
    assert found == sorted(line.replace("-", "_") for line in lines)
    for wheel in wheels:
        assert wheel.endswith("-none-any.whl") or target.machine in wheel


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_distribution_agrees_to_run_on_that_python(cache: str, target: archive.Target) -> None:
    minor = int(target.python.split(".")[1])
    with contents(cache, target) as opened:
        for name in opened.namelist():
            if name.endswith(".dist-info/METADATA"):
                asked = re.search(r"^Requires-Python: >=3\.(\d+)", opened.read(name).decode(), re.M)
                assert asked is None or int(asked.group(1)) <= minor, name


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_archive_holds_what_it_must(cache: str, target: archive.Target) -> None:
    with contents(cache, target) as opened:
        names = opened.namelist()
        for needed in NEEDED:
            assert any(name.startswith("payload/site/" + needed) for name in names), needed
        for room in archive.library_files():
            assert "payload/lib/gpuops/" + room in names
        assert "payload/lib/gpuops/_ansible.py" not in names
        assert opened.read("payload/.stamp").decode().strip() == archive.stamp(target, requirements())
        compiled = [name for name in names if name.endswith(".so") and "/psutil/" in name]
        assert compiled


@pytest.mark.parametrize("python", PYTHONS)
def test_every_shipped_file_is_written_for_that_python(cache: str, python: str) -> None:
    """Parsed with the grammar of the oldest Python, since not every distribution says what it needs."""
    minor = int(python.split(".")[1])
    refused, parsed = [], 0
    with contents(cache, archive.target(python, "x86_64")) as opened:
        for name in opened.namelist():
            if name.endswith(".py"):
                parsed += 1
                try:
                    ast.parse(opened.read(name), name, feature_version=(3, min(minor, sys.version_info[1])))
                except SyntaxError as error:
                    refused.append("%s: %s" % (name, error))
    assert refused == []
    assert parsed > 100  # the library and its distributions


def test_equal_content_makes_equal_archives(cache: str, tmp_path: pathlib.Path) -> None:
    os.symlink(archive.fetch(HERE, archive.pins(requirements(), HERE.python), cache), tmp_path / "linked")
    again = tmp_path / "again.pyz"
    archive._pack(str(again), str(tmp_path / "linked"), archive.stamp(HERE, requirements()))
    assert again.read_bytes() == pathlib.Path(archive.archive_path(HERE, requirements(), cache)).read_bytes()


def test_many_hosts_at_once_build_one_archive(
    tmp_path: pathlib.Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = archive.fetch(HERE, archive.pins(requirements(), HERE.python), cache)
    fetched = []

    def slow_fetch(*args: object) -> str:
        fetched.append(args)
        time.sleep(0.2)
        return wheels

    monkeypatch.setattr(archive, "fetch", slow_fetch)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: archive.build(HERE, requirements(), str(tmp_path)), range(8)))
    assert len(paths) == 1
    assert len(fetched) == 1


def test_a_wheelhouse_is_enough_and_what_it_lacks_is_named(cache: str, tmp_path: pathlib.Path) -> None:
    wheels = archive.fetch(HERE, archive.pins(requirements(), HERE.python), cache)
    assert os.path.exists(archive.build(HERE, requirements(), str(tmp_path / "cache"), wheels))
    other = dict(requirements(), psutil={"default": "0.0.1"})
    with pytest.raises(archive.ArchiveError) as error:
        archive.build(HERE, other, str(tmp_path / "cache"), wheels)
    assert str(error.value) == (
        "the libraries of the host agent for %s cannot be fetched: No matching distribution found for psutil==0.0.1: "
        'put the missing wheels into "%s"' % (HERE, wheels)
    )


@pytest.mark.parametrize(
    ("python", "machine", "sentence"),
    [
        ("3.7", "x86_64", "the host agent cannot be built for Python 3.7: 3.8 is the oldest that is served"),
        ("3.11", "ppc64le", 'the host agent cannot be built for the machine "ppc64le": x86_64 and aarch64 are served'),
        ("three", "x86_64", 'the Python version "three" is not understood: give it as MAJOR.MINOR'),
    ],
)
def test_a_host_that_is_not_served_is_one_sentence(python: str, machine: str, sentence: str) -> None:
    with pytest.raises(archive.ArchiveError, match="^" + re.escape(sentence)):
        archive.target(python, machine)


def install(cache: str, prefix: pathlib.Path) -> subprocess.Popen[bytes]:
    path = archive.archive_path(HERE, requirements(), cache)
    return subprocess.Popen([sys.executable, path, "--prefix", str(prefix)], stdout=subprocess.PIPE)


def version(prefix: pathlib.Path) -> t.Any:
    ran = subprocess.run([str(prefix / "opt/gpuops/bin/gpuops"), "version"], stdout=subprocess.PIPE)
    return json.loads(ran.stdout)


def test_an_archive_installs_itself_and_the_command_runs(cache: str, tmp_path: pathlib.Path) -> None:
    changes = json.loads(install(cache, tmp_path).communicate()[0])["changes"]
    assert str(tmp_path / "opt/gpuops") in changes
    assert version(tmp_path)["agent"] == archive.stamp(HERE, requirements())[:16]
    for path in (tmp_path / "opt/gpuops").rglob("*"):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
    assert stat.S_IMODE((tmp_path / "etc/gpuops/env").stat().st_mode) == 0o700
    # Again, over what is there: only the content is exchanged, and nothing is left beside it.
    assert json.loads(install(cache, tmp_path).communicate()[0])["changes"] == [str(tmp_path / "opt/gpuops")]
    assert os.listdir(tmp_path / "opt") == ["gpuops"]


def test_a_killed_installation_leaves_a_working_one_or_none(cache: str, tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    install(cache, tmp_path).communicate()
    whole = time.monotonic() - begun
    for step in range(1, 10):
        running = install(cache, tmp_path)
        time.sleep(whole * step / 9)
        running.send_signal(signal.SIGKILL)
        running.communicate()
        if (tmp_path / "opt/gpuops").exists():
            assert version(tmp_path)["agent"] == archive.stamp(HERE, requirements())[:16]
    assert install(cache, tmp_path).communicate()[0]
    assert os.listdir(tmp_path / "opt") == ["gpuops"]


def test_an_archive_that_does_not_work_here_changes_nothing(cache: str, tmp_path: pathlib.Path) -> None:
    install(cache, tmp_path).communicate()
    broken = tmp_path / "broken.pyz"
    path = archive.archive_path(HERE, requirements(), cache)
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(broken, "w") as bad:
        for name in good.namelist():
            if not name.startswith("payload/site/psutil/"):
                bad.writestr(name, good.read(name))
    before = (tmp_path / "opt/gpuops").stat().st_ino
    ran = subprocess.run([sys.executable, broken, "--prefix", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith("the host agent cannot be installed: the libraries do not work with ")
    assert (tmp_path / "opt/gpuops").stat().st_ino == before
    assert os.listdir(tmp_path / "opt") == ["gpuops"]
