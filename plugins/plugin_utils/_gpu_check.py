# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The request of playbook gpu_clear_check: what is wrong with it, and what of it concerns one host."""

from __future__ import annotations

import os
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_options, _gpu_select, _limits
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

__all__ = ("pattern", "problems", "share")

VENDORS = ("auto", *sorted(_gpu_options.VENDORS))
YES_OR_NO = ("true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f")


def pattern(hosts: t.Any) -> str:
    """The pattern of hosts as one text; a list of patterns is meant as Ansible means it."""
    return ",".join(map(str, hosts)) if isinstance(hosts, (list, tuple)) else str(hosts)


def problems(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], asked: str, limit: str, service: t.Any, path: t.Any
) -> t.List[str]:
    """One sentence for each mistake in the request, before any host is asked.

    ``hosts`` are those that the pattern ``asked`` and the limit select, ``path`` is where the report goes.
    """
    within = " within --limit %s" % limit if limit else ""
    if not hosts:
        return ['no host of the inventory%s fits the pattern "%s"' % (within, asked)]
    found = _report_problems(path)
    where: t.Dict[str, t.List[str]] = {}
    for host in hosts:
        for sentence in _host_problems(hostvars[host]):
            where.setdefault(sentence, []).append(str(host))
    for sentence, bad in where.items():
        # What is wrong everywhere was set once.
        found.append(sentence if len(bad) == len(hosts) else "%s: %s" % (_names(bad), sentence))
    return found or _service_problems(hosts, hostvars, service, within)


def share(services: t.Any, service: t.Any, everyone: bool, gpus: t.Any) -> t.Dict[str, t.Any]:
    """Whether a host with these services is asked, and for which devices: None means all of them.

    ``everyone`` says that hosts were named, so that they are asked whether they have services or not.
    """
    wanted = _listed(service)
    mine = [item for item in services or () if not wanted or "all" in wanted or str(item.get("name")) in wanted]
    devices = _listed(gpus) or None
    if not wanted:
        return {"ask": everyone or bool(mine), "gpus": devices}
    if devices is None and all(item.get("gpus") is not None for item in mine):
        # Several services may share a device.
        devices = list(dict.fromkeys(str(gpu) for item in mine for gpu in item["gpus"]))
    return {"ask": bool(mine) and devices != [], "gpus": devices}


def _report_problems(path: t.Any) -> t.List[str]:
    if path is None:
        return []
    if not isinstance(path, str) or not path.strip():
        return ["gpuops_gpu_report is no file name"]
    full = os.path.abspath(os.path.join(os.environ.get("PWD", ""), os.path.expanduser(path)))
    folder = os.path.dirname(full)
    if os.path.isdir(full):
        return ['gpuops_gpu_report "%s" is a folder: name a file' % path]
    if not os.path.isdir(folder):
        return ['gpuops_gpu_report "%s" cannot be written: there is no folder "%s"' % (path, folder)]
    if not os.access(full if os.path.exists(full) else folder, os.W_OK):
        return ['gpuops_gpu_report "%s" cannot be written: permission denied' % path]
    return []


def _host_problems(values: t.Mapping[str, t.Any]) -> t.Iterator[str]:
    for name, problem in CHECKS.items():
        try:
            value = values.get(name)
            sentence = None if value is None else problem(value)
        except Exception as error:  # of Ansible, whose kinds differ by version
            yield "%s cannot be resolved: %s" % (name, error)
            continue
        # What refers to something undefined stays a template, or raises, by version.
        if isinstance(value, str) and "{{" in value:
            yield '%s cannot be resolved: "%s"' % (name, _short(value))
        elif sentence:
            yield "%s %s" % (name, sentence)


def _count_problem(value: t.Any) -> t.Optional[str]:
    text = "" if isinstance(value, bool) or not isinstance(value, (int, str)) else str(value).strip()
    if text.isascii() and text.isdigit() and int(text) <= _limits.MOST:
        return None
    return 'must be a whole number from 0 to %d, not "%s"' % (_limits.MOST, _short(value))


def _switch_problem(value: t.Any) -> t.Optional[str]:
    if isinstance(value, bool) or str(value).lower() in YES_OR_NO:
        return None
    return 'must be true or false, not "%s"' % _short(value)


def _vendor_problem(value: t.Any) -> t.Optional[str]:
    return None if value in VENDORS else 'must be one of %s, not "%s"' % (", ".join(VENDORS), _short(value))


def _gpus_problem(value: t.Any) -> t.Optional[str]:
    try:
        _gpu_select.check(_listed(value))
    except UsageError as error:
        return "is wrong: %s" % error.message
    return None


def _services_problem(value: t.Any) -> t.Optional[str]:
    """Only what decides whether a host is asked, and for what; the rest is the business of other playbooks."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, t.Mapping) for item in value):
        if all(isinstance(item.get("gpus"), (list, tuple, type(None))) for item in value):
            return None
        return "holds a service whose gpus are no list"
    return None if value == "" else "is not a list of services"


def _holders_problem(value: t.Any) -> t.Optional[str]:
    keys = _gpu_options.RULE_KEYS
    for rule in value if isinstance(value, (list, tuple)) else [None]:
        if not isinstance(rule, t.Mapping) or not rule or not all(key in keys and rule[key] for key in rule):
            return 'must be a list of rules with %s, such as [{"name": "nvtop"}]' % ", ".join(keys)
    return None


CHECKS: t.Dict[str, t.Callable[[t.Any], t.Optional[str]]] = {
    "gpuops_gpu_tolerance": _count_problem,
    "gpuops_expected_gpus": _count_problem,
    "gpuops_allow_no_gpu": _switch_problem,
    "gpuops_allowed_holders": _holders_problem,
    "gpuops_vendor": _vendor_problem,
    "gpuops_gpus": _gpus_problem,
    "gpuops_services": _services_problem,
}


def _service_problems(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], service: t.Any, within: str
) -> t.List[str]:
    if service is None:
        return []
    wanted = _listed(service)
    if not wanted:
        return ["service names no service: give a name, several with commas, or all"]
    known = sorted({str(item.get("name")) for host in hosts for item in hostvars[host].get("gpuops_services") or ()})
    if not known:
        return ["no host%s has gpuops_services in the inventory: add the list to a host or a group" % within]
    strange = [name for name in wanted if name not in (*known, "all")]
    if strange:
        return [
            'the service "%s" is not in gpuops_services of any selected host (there are: %s)'
            % ('", "'.join(strange), ", ".join(known))
        ]
    return []


def _listed(value: t.Any) -> t.List[str]:
    """A list, or a text with commas, as the module itself takes both; a single number is one name."""
    entries = value if isinstance(value, (list, tuple)) else str("" if value is None else value).split(",")
    return [text for text in (str(entry).strip() for entry in entries) if text]


def _names(hosts: t.Sequence[str], most: int = 5) -> str:
    return ", ".join(hosts[:most]) + (" and %d more" % (len(hosts) - most) if len(hosts) > most else "")


def _short(value: t.Any) -> str:
    return str(value)[:40]
