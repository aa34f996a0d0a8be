# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The request of playbook audit_units: what is wrong with it, and what of it concerns one host."""

from __future__ import annotations

import math
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _limits
from ansible_collections.gpuops.serving.plugins.module_utils._audit_rules import RULES, SEVERITIES

from . import _services
from ._inventory_request import (
    each_host,
    listed,
    report_problems,
    service_problems,
    services_problem,
    short,
    switch_problem,
)

__all__ = ("problems", "share")


def problems(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], asked: str, limit: str, service: t.Any, path: t.Any
) -> t.List[str]:
    """One sentence for each mistake in the request, before any host is asked.

    ``hosts`` are those that the pattern ``asked`` and the limit select, ``path`` is where the report goes.
    """
    within = " within --limit %s" % limit if limit else ""
    if not hosts:
        return ['no host of the inventory%s fits the pattern "%s"' % (within, asked)]
    found = report_problems(path, "gpuops_audit_report")
    found += each_host(hosts, hostvars, CHECKS)
    return found or service_problems(hosts, hostvars, service, within)


def share(services: t.Any, service: t.Any, everyone: bool) -> t.Dict[str, t.Any]:
    """Whether a host with these services is asked, and for which units: None means all that serve an engine.

    ``everyone`` says that hosts were named, so that they are asked whether they have services or not.
    """
    wanted = listed(service)
    mine = [item for item in services or () if not wanted or "all" in wanted or str(item.get("name")) in wanted]
    if not wanted:
        return {"ask": everyone or bool(mine), "units": None}
    return {"ask": bool(mine), "units": list(dict.fromkeys(map(_services.unit_of, mine)))}


def _severity_problem(value: t.Any) -> t.Optional[str]:
    return None if value in SEVERITIES else 'must be one of %s, not "%s"' % (", ".join(SEVERITIES), short(value))


def _seconds_problem(value: t.Any) -> t.Optional[str]:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 0 <= number <= _limits.MOST:
        return None
    return 'must be a number of seconds up to %d, not "%s"' % (_limits.MOST, short(value))


def _rules_problem(value: t.Any) -> t.Optional[str]:
    strange = [rule for rule in listed(value) if rule not in RULES]
    return (
        'names the rule "%s", which does not exist: use one of %s' % (short(strange[0]), ", ".join(RULES))
        if strange
        else None
    )


CHECKS: t.Dict[str, t.Callable[[t.Any], t.Optional[str]]] = {
    "gpuops_audit_fail_on": _severity_problem,
    "gpuops_audit_fix": switch_problem,
    "gpuops_audit_fix_severity": _severity_problem,
    "gpuops_audit_ignore": _rules_problem,
    "gpuops_audit_load_time": _seconds_problem,
    "gpuops_services": services_problem,
}
