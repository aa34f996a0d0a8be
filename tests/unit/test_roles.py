# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What every role promises: documented variables that equal the defaults, own names, facts only where facts are."""

from __future__ import annotations

import collections
import pathlib
import re
import typing as t

import jinja2
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLES = sorted(path.parent.name for path in ROOT.glob("roles/*/tasks"))


def load(role: str, path: str) -> t.Any:
    found = ROOT / "roles" / role / path
    return yaml.safe_load(found.read_text(encoding="utf-8")) if found.exists() else None


def options(role: str) -> dict[str, dict[str, t.Any]]:
    return dict(load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"])


def texts(role: str) -> t.Iterator[tuple[pathlib.Path, str]]:
    for path in sorted((ROOT / "roles" / role).rglob("*")):
        if path.suffix in (".yml", ".j2"):
            yield path, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_documented_with_its_value(role: str) -> None:
    defaults = load(role, "defaults/main.yml")
    specified = {name: option["default"] for name, option in options(role).items() if "default" in option}
    assert specified == defaults


@pytest.mark.parametrize("role", ROLES)
def test_a_variable_without_a_default_is_required(role: str) -> None:
    bare = [name for name, option in options(role).items() if "default" not in option and not option.get("required")]
    assert bare == []


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_bears_the_name_of_its_role(role: str) -> None:
    own = [*options(role), *(load(role, "vars/main.yml") or {})]
    assert [name for name in own if not name.startswith(role + "_")] == []


@pytest.mark.parametrize("role", ROLES)
def test_variables_that_are_not_documented_are_marked_private(role: str) -> None:
    known = options(role)
    assert [name for name in load(role, "vars/main.yml") or {} if "__" not in name and name not in known] == []


@pytest.mark.parametrize("role", ROLES)
def test_facts_are_read_from_ansible_facts(role: str) -> None:
    injected = re.compile(r"\bansible_(?:distribution|architecture|python\b|os_family|hostname|default_ipv4)\w*")
    for path, text in texts(role):
        assert not injected.search(text), path


@pytest.mark.parametrize("role", ROLES)
def test_every_task_has_a_name(role: str) -> None:
    for path in sorted((ROOT / "roles" / role / "tasks").rglob("*.yml")):
        for task in yaml.safe_load(path.read_text(encoding="utf-8")):
            assert task.get("name"), path


@pytest.mark.parametrize("role", ROLES)
def test_every_role_explains_itself(role: str) -> None:
    readme = ROOT / "roles" / role / "README.md"
    assert readme.exists()
    text = readme.read_text(encoding="utf-8")
    missing = [name for name in options(role) if name not in text]
    assert missing == []


def test_the_unit_of_a_service_lets_systemd_count_what_comes_from_the_network() -> None:
    """Without the count a download that says nothing cannot be seen to move."""
    path = ROOT / "roles" / "inference_service" / "templates" / "unit.service.j2"
    service = collections.defaultdict(str, supplementary_groups=[], mark_group="gpuops-1", unit="gpuops-chat.service")
    text = jinja2.Template(path.read_text(encoding="utf-8")).render(service=service)
    sections = {part.split("]", 1)[0]: part.splitlines() for part in text.split("\n[")[1:]}
    assert sections["Service"].count("IPAccounting=yes") == 1
    assert "IPAccounting=yes" not in sections["Unit"] + sections["Install"]
