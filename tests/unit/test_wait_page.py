# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The words of a wait are the same in the code, on its page, in the module's documentation and in the scenario."""

from __future__ import annotations

import pathlib
import re
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _causes, _progress, _tiers, _verdicts, _wait_text

REPO = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "slow-stalled-looping-dead.md").read_text(encoding="utf-8")
MODULE = yaml.safe_load(
    (REPO / "plugins" / "modules" / "wait_model_ready.py")
    .read_text(encoding="utf-8")
    .split('DOCUMENTATION = r"""', 1)[1]
    .split('"""', 1)[0]
)
RETURN = yaml.safe_load(
    (REPO / "plugins" / "modules" / "wait_model_ready.py")
    .read_text(encoding="utf-8")
    .split('RETURN = r"""', 1)[1]
    .split('"""', 1)[0]
)
CASES = yaml.safe_load((REPO / "molecule" / "wait" / "vars" / "cases.yml").read_text(encoding="utf-8"))["cases"]
WORDS = ("ready", "progressing", "stalled", "restart_loop", "dead", "wrong_server", "wedged", "auth_error")


def first_column(section: str) -> t.List[str]:
    """The words that begin the rows of a section's table."""
    text = PAGE.split("## " + section, 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([a-z_]+)` \|", text, re.M)


def values(description: t.Any) -> t.List[str]:
    return re.findall(r"V\(([a-z_]+)\)", " ".join(description) if isinstance(description, list) else description)


def test_the_decision_table_has_each_verdict_once_and_no_other() -> None:
    assert first_column("The decision table") == [*WORDS, "unknown", "refused", "error"]
    assert all(word in _verdicts.VERDICTS for word in WORDS)
    assert {*WORDS, "unknown"} <= set(values(RETURN["verdict"]["description"]))


def test_the_message_that_is_shown_is_one_that_is_said() -> None:
    result = {
        "verdict": "stalled",
        "msg": 'for 300 s nothing moved: the tier "listener" is not reached: nothing listens on port 8002',
        "tier_reached": "unit",
        "phase": "loading_weights",
        "percent": 16.0,
        "movement": {},
        "cause": None,
        "log_tail": [],
        "unit_state": {"name": "gpuops-qwen.service", "main_pid": 4711},
    }
    text = _wait_text.sentence(result, _wait_text.Named("qwen", "gpuops-qwen", defined=True))
    assert "\n%s\n" % text in PAGE
    assert RETURN["msg"]["sample"] == text


def test_every_verdict_is_reached_on_real_systemd() -> None:
    assert {case["expected"]["verdict"] for case in CASES} == set(WORDS)
    assert len({case["name"] for case in CASES}) == len(CASES)


def test_the_page_has_each_sign_of_movement_with_its_figure() -> None:
    assert tuple(first_column("What counts as movement")) == _progress.SIGNALS
    table = PAGE.split("## What counts as movement", 1)[1].split("\n## ", 1)[0]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.+)$", table, re.M))
    for sign, figure in (
        ("cpu", "%g %% of a core" % (100 * _progress.CPU_SHARE)),
        ("io", "%d MiB a second" % (_progress.READ_RATE >> 20)),
        ("memory", "%d MiB" % (_progress.MEMORY_STEP >> 20)),
        ("gpu_memory", "%d MiB" % _progress.GPU_STEP),
        ("network", "%d KiB a second" % (_progress.NETWORK_RATE >> 10)),
    ):
        assert figure in rows[sign], sign


def test_the_module_documents_each_sign() -> None:
    text = " ".join(RETURN["movement"]["description"])
    assert set(_progress.SIGNALS) <= set(re.findall(r"C\(([a-z_]+)\)", text))


def test_the_page_has_each_tier_in_its_order() -> None:
    assert tuple(first_column("The tiers")) == _tiers.TIERS


def test_the_page_says_of_each_cause_what_the_code_says() -> None:
    text = PAGE.split("## Causes", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \| [^|]+ \|$", text, re.M)
    assert dict(rows) == _causes.KINDS
    assert len(rows) == len(_causes.KINDS)


@pytest.mark.parametrize("option", ["timeout", "stall_timeout", "max_restarts", "generation_timeout"])
def test_the_page_names_the_defaults(option: str) -> None:
    default = _tiers.Options._field_defaults[option]
    text = PAGE.split("## How long to wait", 1)[1].split("\n## ", 1)[0]
    (found,) = re.findall(r"^- `%s` \(([\d.]+)(?: s)?\)|^- `%s` (?:\D*?)\(?([\d.]+)?" % (option, option), text, re.M)
    if found[0]:
        assert float(found[0]) == default


def test_every_option_that_the_page_names_is_one() -> None:
    for word in ("timeout", "stall_timeout", "max_restarts", "generation_timeout", "reconnect_timeout", "progress"):
        assert "`%s" % word in PAGE
        assert word in MODULE["options"], word
    assert {"log_path", "gpus"} <= set(MODULE["options"])
    assert "gpuops.serving._profile" in MODULE["extends_documentation_fragment"]
