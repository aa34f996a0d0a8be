# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The request of playbook gpu_clear_check: what is wrong with it, and what of it concerns one host."""

from __future__ import annotations

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_options, _gpu_select, _limits
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

from ._inventory_request import (
    each_host,
    listed,
    pattern,
    report_problems,
    service_problems,
    services_problem,
    short,
    switch_problem,
)

__all__ = ("pattern", "problems", "share")

VENDORS = ("auto", *sorted(_gpu_options.VENDORS))


def problems(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], asked: str, limit: str, service: t.Any, path: t.Any
) -> t.List[str]:
    """One sentence for each mistake in the request, before any host is asked.

    ``hosts`` are those that the pattern ``asked`` and the limit select, ``path`` is where the report goes.
    """
    within = " within --limit %s" % limit if limit else ""
    if not hosts:
        return ['no host of the inventory%s fits the pattern "%s"' % (within, asked)]
    found = report_problems(path, "gpuops_gpu_report")
    found += each_host(hosts, hostvars, CHECKS)
    return found or service_problems(hosts, hostvars, service, within)


def share(services: t.Any, service: t.Any, everyone: bool, gpus: t.Any) -> t.Dict[str, t.Any]:
    """Whether a host with these services is asked, and for which devices: None means all of them.

    ``everyone`` says that hosts were named, so that they are asked whether they have services or not.
    """
    wanted = listed(service)
    mine = [item for item in services or () if not wanted or "all" in wanted or str(item.get("name")) in wanted]
    devices = listed(gpus) or None
    if not wanted:
        return {"ask": everyone or bool(mine), "gpus": devices}
    if devices is None and all(item.get("gpus") is not None for item in mine):
        # Several services may share a device.
        devices = list(dict.fromkeys(str(gpu) for item in mine for gpu in item["gpus"]))
    return {"ask": bool(mine) and devices != [], "gpus": devices}


def _count_problem(value: t.Any) -> t.Optional[str]:
    text = "" if isinstance(value, bool) or not isinstance(value, (int, str)) else str(value).strip()
    if text.isascii() and text.isdigit() and int(text) <= _limits.MOST:
        return None
    return 'must be a whole number from 0 to %d, not "%s"' % (_limits.MOST, short(value))


def _vendor_problem(value: t.Any) -> t.Optional[str]:
    return None if value in VENDORS else 'must be one of %s, not "%s"' % (", ".join(VENDORS), short(value))


def _gpus_problem(value: t.Any) -> t.Optional[str]:
    try:
        _gpu_select.check(listed(value))
    except UsageError as error:
        return "is wrong: %s" % error.message
    return None


def _holders_problem(value: t.Any) -> t.Optional[str]:
    keys = _gpu_options.RULE_KEYS
    for rule in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(rule, t.Mapping) or not rule or not all(key in keys and rule[key] for key in rule):
            return 'must be a list of rules with %s, such as [{"name": "nvtop"}]' % ", ".join(keys)
    return None


CHECKS: t.Dict[str, t.Callable[[t.Any], t.Optional[str]]] = {
    "gpuops_gpu_tolerance": _count_problem,
    "gpuops_expected_gpus": _count_problem,
    "gpuops_allow_no_gpu": switch_problem,
    "gpuops_allowed_holders": _holders_problem,
    "gpuops_vendor": _vendor_problem,
    "gpuops_gpus": _gpus_problem,
    "gpuops_services": services_problem,
}
