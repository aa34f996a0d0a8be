# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The test driver library is what its documentation says, so that others can use it."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pynvml
import pytest
from gpu_host import FAKES, driver_library

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "test_driver_library.md"
SOURCES = {path.name: path.read_text() for path in sorted(FAKES.glob("nvml*"))}


def block(language):
    [found] = re.findall(r"^```%s\n(.*?)^```$" % language, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def test_the_example_works_in_a_project_of_its_own(tmp_path):
    shutil.copytree(FAKES, tmp_path / "fakes/nvml")
    (tmp_path / "test_example.py").write_text(block("python"))
    subprocess.run(["sh", "-ec", block("sh")], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_every_key_is_documented():
    asked = set()
    for source in SOURCES.values():
        asked.update(re.findall(r"(?:number|text|size)_of\([^,]+, \"([a-z_]+)\"", source))
        asked.update(re.findall(r"lookup\((?:scenario|text), \"([a-z_]+)\"", source))
    assert {"devices", "mig", "gi", "memory_free", "instance", "driver_version"} <= asked
    page = PAGE.read_text()
    for key in asked:
        assert re.search(r"(^|[`.])%s[`=]" % key, page, re.MULTILINE), key


def test_each_file_has_one_subject():
    assert {name: text.count("\n") for name, text in SOURCES.items() if text.count("\n") > 350} == {}


@pytest.fixture(name="library")
def fixture_library(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_DIR", str(tmp_path))
    return ctypes.CDLL(str(driver_library(tmp_path_factory)))


def test_every_code_has_the_words_of_the_real_library(library):
    library.nvmlErrorString.restype = ctypes.c_char_p
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and value != 999}
    assert [code for code in sorted(codes) if library.nvmlErrorString(code) == b"Unknown Error"] == []
    assert library.nvmlErrorString(999) == b"Unknown Error"


def test_every_function_is_one_that_the_binding_knows(library):
    """So that none is misspelt; nvmlInit is for other callers, and older versions are for older bindings."""
    exported = set(re.findall(r"^API .*?(nvml\w+)\(", "\n".join(SOURCES.values()), re.MULTILINE))
    exported |= {
        name + suffix
        for name in re.findall(r"^LIST\((\w+)", SOURCES["nvml_use.h"], re.MULTILINE)
        for suffix in ("", "_v2", "_v3")
    }
    binding = pathlib.Path(pynvml.__file__).read_text()
    assert len(exported) > 35
    for name in exported:
        assert hasattr(library, name)
    known = {name for name in exported if '"%s"' % name in binding}
    assert {bare(name) for name in exported} - {"nvmlInit"} == {bare(name) for name in known}


def bare(name):
    return re.sub(r"_v\d$", "", name)


def test_before_the_start_and_after_the_end_nothing_answers(library):
    count = ctypes.c_uint()
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1
    assert library.nvmlInit_v2() == 0
    assert (library.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value) == (0, 1)
    assert library.nvmlShutdown() == 0
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1


def test_an_instance_by_its_uuid_and_what_it_does_not_have(library, tmp_path):
    (tmp_path / "scenario").write_text("device.0.mig=1\ndevice.0.mig.4.gi=9\ndevice.0.mig.4.ci=2\n")
    assert library.nvmlInit_v2() == 0
    try:
        handle, whole, number = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
        uuid = b"MIG-00000000-0000-0000-0010-000000000004"
        assert library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0
        assert (library.nvmlDeviceGetGpuInstanceId(handle, ctypes.byref(number)), number.value) == (0, 9)
        assert (library.nvmlDeviceGetComputeInstanceId(handle, ctypes.byref(number)), number.value) == (0, 2)
        assert (library.nvmlDeviceIsMigDeviceHandle(handle, ctypes.byref(number)), number.value) == (0, 1)
        assert library.nvmlDeviceGetMinorNumber(handle, ctypes.byref(number)) == 3
        assert library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(whole)) == 0
        assert (library.nvmlDeviceGetMinorNumber(whole, ctypes.byref(number)), number.value) == (0, 0)
        assert library.nvmlDeviceGetGpuInstanceId(whole, ctypes.byref(number)) == 2
        assert library.nvmlDeviceGetHandleByUUID(uuid[:-1] + b"5", ctypes.byref(handle)) == 6
        # An instance that is removed while somebody has its handle.
        os.truncate(tmp_path / "scenario", 0)
        assert library.nvmlDeviceGetGpuInstanceId(handle, ctypes.byref(number)) == 6
    finally:
        library.nvmlShutdown()
