# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The page about the audit: its tables are those of the data, and what it names exists."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _audit_dropin, _audit_rules
from ansible_collections.gpuops.serving.plugins.plugin_utils import _audit_check

REPO = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "unit-audit.md").read_text(encoding="utf-8")
PLAYBOOK = (REPO / "playbooks" / "audit_units.yml").read_text(encoding="utf-8")


def writer() -> t.Any:
    spec = importlib.util.spec_from_file_location("audit_page", REPO / "tests" / "docs" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room


def test_the_tables_of_the_page_are_those_of_the_data() -> None:
    room = writer()
    assert re.findall(r"<!-- table: (\w+) -->", PAGE) == list(room.TABLES)
    assert room.rendered(PAGE) == PAGE, "run: make docs"
    assert room.rendered(PAGE.replace("| `kill_mode` |", "| `kil_mode` |")) == PAGE


@pytest.mark.parametrize("rule", _audit_rules.RULES.values(), ids=lambda rule: rule.id)
def test_no_rule_breaks_the_table(rule: _audit_rules.Rule) -> None:
    assert rule.severity in _audit_rules.SEVERITIES
    assert not any("|" in text or "\n" in text for text in rule if isinstance(text, str))


def test_the_file_that_is_written_is_named() -> None:
    assert "/etc/systemd/system/UNIT.d/" + _audit_dropin.NAME in PAGE


def test_every_variable_of_the_playbook_is_checked_and_told_of() -> None:
    used = set(re.findall(r"\{\{ (gpuops_audit_\w+) \| default\(omit\)", PLAYBOOK))
    assert used == {name for name in _audit_check.CHECKS if name != "gpuops_services"}
    head = PLAYBOOK.split("- name:", 1)[0]
    assert all(re.search(r"^# %s +\S" % name, head, re.M) for name in used)
    named = set(re.findall(r"gpuops_audit_\w+", PAGE))
    assert named <= {*used, "gpuops_audit_report"}


def test_the_playbook_hands_over_only_options_that_exist() -> None:
    text = (REPO / "plugins" / "modules" / "unit_audit.py").read_text(encoding="utf-8")
    options = set(yaml.safe_load(text.split('DOCUMENTATION = r"""', 1)[1].split('"""', 1)[0])["options"])
    call = PLAYBOOK.split("gpuops.serving.unit_audit:", 2)[1].split("register:", 1)[0]
    assert set(re.findall(r"^        (\w+):", call, re.M)) <= options
