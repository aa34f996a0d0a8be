# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the requests of all checks of an inventory share: which hosts, which services, where the report goes."""

from __future__ import annotations

import os
import typing as t

__all__ = (
    *("Checks", "each_host", "listed", "pattern", "report_problems", "service_problems", "services_problem", "short"),
    "switch_problem",
)

YES_OR_NO = ("true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f")
# What is wrong with the value of a variable, if anything.
Checks = t.Mapping[str, t.Callable[[t.Any], t.Optional[str]]]


def pattern(hosts: t.Any) -> str:
    """The pattern of hosts as one text; a list of patterns is meant as Ansible means it."""
    return ",".join(map(str, hosts)) if isinstance(hosts, (list, tuple)) else str(hosts)


def report_problems(path: t.Any, variable: str) -> t.List[str]:
    if path is None:
        return []
    if not isinstance(path, str) or not path.strip():
        return ["%s is no file name" % variable]
    full = os.path.abspath(os.path.join(os.environ.get("PWD", ""), os.path.expanduser(path)))
    folder = os.path.dirname(full)
    if os.path.isdir(full):
        return ['%s "%s" is a folder: name a file' % (variable, path)]
    if not os.path.isdir(folder):
        return ['%s "%s" cannot be written: there is no folder "%s"' % (variable, path, folder)]
    if not os.access(full if os.path.exists(full) else folder, os.W_OK):
        return ['%s "%s" cannot be written: permission denied' % (variable, path)]
    return []


def each_host(hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], checks: Checks) -> t.List[str]:
    """One sentence for each mistake in the variables of hosts; what is wrong everywhere was set once."""
    where: t.Dict[str, t.List[str]] = {}
    for host in hosts:
        for sentence in host_problems(hostvars[host], checks):
            where.setdefault(sentence, []).append(str(host))
    return [
        sentence if len(bad) == len(hosts) else "%s: %s" % (names(bad), sentence) for sentence, bad in where.items()
    ]


def host_problems(values: t.Mapping[str, t.Any], checks: Checks) -> t.Iterator[str]:
    for name, problem in checks.items():
        try:
            value = values.get(name)
            sentence = None if value is None else problem(value)
        except Exception as error:  # of Ansible, whose kinds differ by version
            yield "%s cannot be resolved: %s" % (name, error)
            continue
        # What refers to something undefined stays a template, or raises, by version.
        if isinstance(value, str) and "{{" in value:
            yield '%s cannot be resolved: "%s"' % (name, short(value))
        elif sentence:
            yield "%s %s" % (name, sentence)


def switch_problem(value: t.Any) -> t.Optional[str]:
    if isinstance(value, bool) or str(value).lower() in YES_OR_NO:
        return None
    return 'must be true or false, not "%s"' % short(value)


def services_problem(value: t.Any) -> t.Optional[str]:
    """Only what decides whether a host is asked, and for what; the rest is the business of other playbooks."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, t.Mapping) for item in value):
        if all(isinstance(item.get("gpus"), (list, tuple, type(None))) for item in value):
            return None
        return "holds a service whose gpus are no list"
    return None if value == "" else "is not a list of services"


def service_problems(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], service: t.Any, within: str
) -> t.List[str]:
    if service is None:
        return []
    wanted = listed(service)
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


def listed(value: t.Any) -> t.List[str]:
    """A list, or a text with commas, as the module itself takes both; a single number is one name."""
    entries = value if isinstance(value, (list, tuple)) else str("" if value is None else value).split(",")
    return [text for text in (str(entry).strip() for entry in entries) if text]


def names(hosts: t.Sequence[str], most: int = 5) -> str:
    return ", ".join(hosts[:most]) + (" and %d more" % (len(hosts) - most) if len(hosts) > most else "")


def short(value: t.Any) -> str:
    return str(value)[:40]
