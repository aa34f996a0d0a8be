# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What Ansible ships to a host: the archive of each module holds every room that the module uses.

An import of a missing file inside ``try:`` or a function is dropped silently when the archive is built, so a
misspelt room would show only on a host.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import subprocess
import sys
import typing as t
import zipfile

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODULES = sorted(name[:-3] for name in os.listdir(os.path.join(ROOT, "plugins", "modules")) if name.endswith(".py"))
ROOMS = sorted(name[:-3] for name in os.listdir(os.path.join(ROOT, "plugins", "module_utils")) if name.endswith(".py"))
PREFIX = "ansible_collections/gpuops/serving/plugins/module_utils/"


# In a process of its own: Ansible's loader takes over how collections are imported.
BUILD = """
import sys
from ansible.executor.module_common import modify_module
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar

init_plugin_loader()
built = modify_module(
    module_name="gpuops.serving." + sys.argv[1],
    module_path=sys.argv[2],
    module_args={},
    templar=Templar(loader=DataLoader()),
    task_vars={"ansible_python_interpreter": sys.executable},
    module_compression="ZIP_STORED",
)
sys.stdout.buffer.write(built[0] if isinstance(built, tuple) else built.b_module_data)
"""


def archive(name: str) -> bytes:
    path = os.path.join(ROOT, "plugins", "modules", name + ".py")
    environment = dict(os.environ, ANSIBLE_COLLECTIONS_PATH=os.path.join(ROOT, ".cache", "collections"))
    built = subprocess.run(
        [sys.executable, "-c", BUILD, name, path], capture_output=True, check=True, timeout=60, env=environment
    )
    candidates = re.findall(rb"[\"']([A-Za-z0-9+/=\n]{2000,})[\"']", built.stdout)
    assert candidates, "no archive was found in the module"
    return base64.b64decode(max(candidates, key=len))


def imported_rooms(path: str) -> t.Set[str]:
    """Every room that a file imports, wherever in it the statement stands."""
    with open(path, encoding="utf-8") as handle:
        tree = ast.parse(handle.read())
    found: t.Set[str] = set()
    base = "ansible_collections.gpuops.serving.plugins.module_utils"
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if (node.level == 1 and not module) or module == base:
            found.update(alias.name for alias in node.names)
        elif node.level == 1:
            found.add(module.split(".")[0])
        elif module.startswith(base + "."):
            found.add(module[len(base) + 1 :].split(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_that_is_imported_exists(room: str) -> None:
    path = os.path.join(ROOT, "plugins", "module_utils", room + ".py")
    assert imported_rooms(path) <= set(ROOMS)


@pytest.mark.parametrize("name", MODULES)
def test_the_archive_holds_every_room_and_each_can_be_imported_from_it(name: str, tmp_path: t.Any) -> None:
    wanted = imported_rooms(os.path.join(ROOT, "plugins", "modules", name + ".py"))
    assert "_ansible" in wanted
    pending = set(wanted)
    while pending:
        room = pending.pop()
        more = imported_rooms(os.path.join(ROOT, "plugins", "module_utils", room + ".py")) - wanted
        wanted |= more
        pending |= more
    content = archive(name)
    with zipfile.ZipFile(io.BytesIO(content)) as held:
        shipped = {
            entry[len(PREFIX) : -3] for entry in held.namelist() if entry.startswith(PREFIX) and entry.endswith(".py")
        }
    assert shipped - {"__init__"} == wanted - {"__init__"}
    path = tmp_path / "module.zip"
    path.write_bytes(content)
    code = "import importlib, sys; sys.path.insert(0, sys.argv[1]); " + "; ".join(
        "importlib.import_module('%s%s')" % (PREFIX.replace("/", "."), room) for room in sorted(wanted)
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code, str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
