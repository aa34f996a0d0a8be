# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The words of evidence are the same in the code, on the page about ownership and in the module's documentation."""

from __future__ import annotations

import ast
import pathlib
import re
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _ownership

REPO = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "what-counts-as-owned.md").read_text(encoding="utf-8")
ROOMS = REPO / "plugins" / "module_utils"


def given() -> t.Set[str]:
    """Every word that a room gives as evidence, read from the sources."""
    found: t.Set[str] = set()
    for path in ROOMS.glob("_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words: t.List[ast.AST] = [word.value for word in node.keywords if word.arg == "found_by"]
            if name == "add" and len(node.args) == 3:
                words.append(node.args[1])
            for word in words:
                for part in ast.walk(word):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        found.add(part.value)
    return found


def test_the_rooms_give_no_other_word() -> None:
    assert {"cgroup", "mark", "descendant", "title"} <= given()
    assert given() <= set(_ownership.EVIDENCE)
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOMS.glob("_*.py") if path.name != "_ownership.py")
    own = (ROOMS / "_ownership.py").read_text(encoding="utf-8")
    rest = own[own.index("@dataclass") :] + sources
    assert [word for word in _ownership.EVIDENCE if '"%s"' % word not in rest] == []


def test_the_page_explains_each_of_them_once() -> None:
    table = PAGE.split("## The evidence", 1)[1].split("\n- ", 1)[0]
    assert sorted(re.findall(r"^\| `([a-z_]+)` \|", table, re.M)) == sorted(["found_by", *_ownership.EVIDENCE])


def test_the_module_documents_each_of_them() -> None:
    text = (REPO / "plugins" / "modules" / "process_tree_stop.py").read_text(encoding="utf-8")
    described = text.split("    found_by:\n", 1)[1].split("    role:\n", 1)[0]
    assert sorted(re.findall(r"V\(([a-z_]+)\)", described)) == sorted(_ownership.EVIDENCE)


def test_the_page_names_every_outcome_and_role_that_it_explains_as_the_module_does() -> None:
    text = (REPO / "plugins" / "modules" / "process_tree_stop.py").read_text(encoding="utf-8")
    for word in re.findall(r"(?:outcome|role) `([a-z_]+)`", PAGE):
        assert "V(%s)" % word in text, word
    for word in re.findall(r"`(--[a-z-]+)`", PAGE):
        assert word in (ROOMS / "_agent_stop.py").read_text(encoding="utf-8"), word
