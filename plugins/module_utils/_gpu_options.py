# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What to judge and by which rules, as the module and the command line both take it."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from . import _limits
from ._errors import UsageError
from ._gpu_select import check

__all__ = ["VENDORS", "Options", "Rule", "check_rules", "of_params"]

Rule = t.Mapping[str, t.Any]

VENDORS = ("nvidia", "amd", "intel")
RULE_KEYS = ("name", "user", "unit")
# MiB that an idle device may show. The drivers of AMD and Intel do not tell their own share apart: an idle MI300X
# shows 284 MiB.
TOLERANCE = {"nvidia": 64, "amd": 512, "intel": 512}


@dataclass
class Options:
    """What to judge and by which rules."""

    gpus: t.Optional[t.List[str]] = None
    vendor: str = "auto"
    expected_gpus: t.Optional[int] = None
    allow_no_gpu: bool = False
    memory_tolerance: t.Optional[int] = None  # the vendor's
    allowed_holders: t.Optional[t.Sequence[Rule]] = None  # by the default rules, up to DEFAULT_MOST each
    unit: t.Optional[str] = None
    mark_gid: t.Optional[int] = None
    interval: float = 1.0
    confirmations: int = 2

    def tolerance(self, vendor: str) -> int:
        return TOLERANCE[vendor] if self.memory_tolerance is None else self.memory_tolerance


def check_rules(rules: t.Optional[t.Sequence[Rule]]) -> t.Optional[t.Sequence[Rule]]:
    """The rules of who may hold a device, unless one of them says nothing."""
    for rule in rules or ():
        if not any(rule.get(key) for key in RULE_KEYS):
            raise UsageError('a rule of "allowed_holders" is empty: give a name, a user or a unit')
    return rules


def of_params(params: t.Mapping[str, t.Any]) -> Options:
    """Options from a module's parameters; a UsageError for what makes no sense, before anything is read."""
    names = ("timeout", "interval", "memory_tolerance", "expected_gpus")
    _limits.at_least(0, **{name: params[name] for name in names})
    _limits.at_least(1, confirmations=params["confirmations"])
    rules = check_rules(params["allowed_holders"])
    if params["gpus"] not in (None, []):
        check(params["gpus"])
    elif params["gpus"] == [] and params["expected_gpus"] is not None:
        raise UsageError('"expected_gpus" counts the GPUs of the host, and none is looked at: leave it out')
    mark_gid = None
    if params["unit"] is not None:
        from . import _selection, _systemd

        _systemd.unit_name(params["unit"])
        mark_gid = _selection.mark_of(params.get("service"), params["unit"], params.get("definition") or {})
    return Options(
        gpus=params["gpus"],
        vendor=params["vendor"],
        expected_gpus=params["expected_gpus"],
        allow_no_gpu=params["allow_no_gpu"],
        memory_tolerance=params["memory_tolerance"],
        allowed_holders=rules,
        unit=params["unit"],
        mark_gid=mark_gid,
        interval=params["interval"],
        confirmations=params["confirmations"],
    )
