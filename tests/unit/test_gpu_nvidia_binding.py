# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which module "pynvml" is taken, and what is said of the others."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_nvml_binding as binding
from ansible_collections.gpuops.serving.plugins.module_utils import _site

GOOD = "".join("def %s(): pass\n" % name for name in binding.NEEDED)


@pytest.fixture(name="here")
def fixture_here(tmp_path, monkeypatch):
    """An interpreter that finds a module "pynvml" in this folder only."""
    there, site = tmp_path / "here", tmp_path / "site"
    there.mkdir()
    real = [path for path in sys.path if "site-packages" not in path and path != _site.SITE]
    monkeypatch.setattr(sys, "path", [str(there), *real])
    monkeypatch.setattr(_site, "SITE", str(site))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield there
    sys.modules.pop("pynvml", None)


def install(folder, distribution, version, path="pynvml.py", code=GOOD, record=None):
    folder.mkdir(exist_ok=True)
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(code)
    if distribution:
        info = folder / ("%s-%s.dist-info" % (distribution.replace("-", "_"), version))
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (distribution, version))
        (info / "RECORD").write_text("%s,,\n" % (path if record is None else record))


def test_none_at_all(here):
    found, reason, detail = binding.load()
    assert (found, reason) == (None, "binding_missing")
    assert detail == (
        'the Python distribution "nvidia-ml-py" is missing for %s: apply the role gpuops.serving.host_agent to this '
        "host, or install it for that interpreter" % sys.executable
    )


def test_the_right_one(here):
    install(here, "nvidia-ml-py", "13.615.71")
    found, reason, detail = binding.load()
    assert (found.__file__, reason, detail) == (str(here / "pynvml.py"), "", "")


def test_the_right_one_beside_the_wrapper_of_later_versions(here):
    install(here, "nvidia-ml-py", "13.615.71")
    install(here, "pynvml", "12.0.0", path="pynvml_utils/__init__.py")
    assert binding.load()[0] is not None


def test_the_old_package_hides_the_right_module(here):
    """A folder comes before a file of the same name, so it is the stranger that Python imports."""
    install(here, "nvidia-ml-py", "13.615.71")
    install(here, "pynvml", "11.5.3", path="pynvml/__init__.py")
    assert binding.load() == (
        None,
        "binding_wrong",
        'the module "pynvml" in %s/pynvml is of the Python distribution "pynvml" 11.5.3 and not of "nvidia-ml-py": '
        'uninstall "pynvml", then install "nvidia-ml-py" again' % here,
    )


def test_the_fork_lacks_what_is_needed(here):
    install(here, "nvidia-ml-py3", "7.352.0", code="def nvmlInit(): pass\n")
    assert binding.load() == (
        None,
        "binding_wrong",
        'the module "pynvml" in %s is of the Python distribution "nvidia-ml-py3" 7.352.0 and not of "nvidia-ml-py": '
        'uninstall "nvidia-ml-py3" and install "nvidia-ml-py"' % here,
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def nvmlInit(): pass\n", "it lacks nvmlInitWithFlags"),
        ("print 'for Python 2'\n", "it cannot be imported: SyntaxError: "),
        ("import no_such_module_of_ours\n", "it cannot be imported: ModuleNotFoundError: No module named "),
    ],
)
def test_a_right_one_that_is_too_old_or_broken(here, code, words):
    install(here, "nvidia-ml-py", "7.352.0", code=code)
    found, reason, detail = binding.load()
    assert (found, reason) == (None, "binding_wrong")
    assert detail.startswith(
        'the module "pynvml" of the Python distribution "nvidia-ml-py" 7.352.0 cannot be used, because ' + words
    )
    assert detail.endswith(': install "nvidia-ml-py" 11.495 or newer for %s' % sys.executable)


def test_a_file_of_that_name_that_belongs_to_nobody(here):
    install(here, None, None, code="")
    assert binding.load()[2].startswith('the module "pynvml" of %s/pynvml.py cannot be used, because it lacks ' % here)


def test_an_empty_folder_of_that_name(here):
    (here / "pynvml").mkdir()
    assert binding.load()[1:] == (
        "binding_wrong",
        'the module "pynvml" has no file: remove what Python finds under that name',
    )


def test_the_one_of_the_host_agent_stands_in_for_a_wrong_one(here, monkeypatch):
    install(here, "pynvml", "11.5.3", path="pynvml/__init__.py")
    site = here.parent / "site"
    install(site, "nvidia-ml-py", "13.615.71")
    monkeypatch.setattr(_site, "unsafe_reason", lambda path: path + " can be written by others than root")
    refused = binding.load()
    assert refused[1] == "binding_wrong"
    assert refused[2].endswith(" (%s is ignored: %s can be written by others than root)" % (site, site))
    monkeypatch.setattr(_site, "unsafe_reason", lambda path: None)
    found, reason, _ = binding.load()
    assert (found.__file__, reason) == (str(site / "pynvml.py"), "")
    import pynvml

    assert pynvml is found


def test_a_host_agent_without_it_changes_nothing(here, monkeypatch):
    install(here, "nvidia-ml-py3", "7.352.0", code="")
    (here.parent / "site").mkdir()
    monkeypatch.setattr(_site, "unsafe_reason", lambda path: None)
    assert 'distribution "nvidia-ml-py3" 7.352.0' in binding.load()[2]
