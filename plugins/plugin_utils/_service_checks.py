# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is wrong with the items of ``gpuops_services``: one sentence each, before any host is touched."""

from __future__ import annotations

import difflib
import math
import re
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

from . import _services, _systemd_text
from ._services import Item

UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:_.\\@-]*\.service\Z")
PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z", re.I)

COMMON_OPTIONS = (
    *("name", "engine", "profile", "model", "host", "port", "url", "gpus", "unit", "manage_unit", "api_key", "user"),
    *("log_path", "stop_timeout", "ready_timeout", "stall_timeout", "gateway"),
)
# Options that mean something only in a unit that the role writes.
UNIT_OPTIONS = (
    *("command", "args", "env", "group", "create_user", "supplementary_groups", "working_directory", "description"),
    *("api_key_env", "restart_delay", "start_burst", "cpu_quota", "memory_max", "limit_nofile", "limit_memlock"),
    "tasks_max",
)
OPTIONS = COMMON_OPTIONS + UNIT_OPTIONS
LISTS = ("gpus", "command", "args", "supplementary_groups")
MAPPINGS = ("env", "gateway", "profile")
GATEWAY_OPTIONS = ("type", "host", "backend", "server", "socket", "url", "min_healthy")


def problems(services: t.Sequence[Item]) -> t.List[str]:
    """One sentence for each thing that is wrong with the services of one host."""
    if not isinstance(services, (list, tuple)) or not all(isinstance(service, t.Mapping) for service in services):
        return ["gpuops_services is not a list of services"]
    found: t.List[str] = []
    for service in services:
        found += _shape_problems(service) or _item_problems(service)
    return found or _clashes(services)


def _shape_problems(service: Item) -> t.List[str]:
    """Names and types; what comes after may rely on them."""
    of = 'of the service "%s"' % service.get("name", "")
    found = _unknown(service, OPTIONS, "option", of)
    for options, kinds, noun in ((LISTS, (list, tuple), "list"), (MAPPINGS, t.Mapping, "mapping")):
        for option in options:
            value = service.get(option)
            if value is not None and (isinstance(value, str) or not isinstance(value, kinds)):
                found.append("the %s %s is not a %s" % (option, of, noun))
    if not found:
        found = _unknown(service.get("gateway") or {}, GATEWAY_OPTIONS, "gateway option", of)
    return found


def _unknown(given: t.Iterable[str], known: t.Sequence[str], noun: str, of: str) -> t.List[str]:
    found = []
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(str(option), known, 1)
            found.append('the %s "%s" %s does not exist%s' % (noun, option, of, ': use "%s"' % near[0] if near else ""))
    return found


def _item_problems(service: Item) -> t.List[str]:
    name = str(service.get("name", ""))
    try:
        _service.check_name(name)
    except UsageError as error:
        return [error.message]
    of = 'of the service "%s"' % name
    found = _address_problems(service, of) + _gateway_problems(service, of)
    engine = _services.value_of(service, "engine")
    if engine not in _engines.PROFILES:
        found.append('the engine "%s" %s is not known: use one of %s' % (engine, of, ", ".join(_engines.PROFILES)))
    else:
        found += _profile_problems(engine, service.get("profile"), of)
    if service.get("log_path") and not str(service["log_path"]).startswith("/"):
        found.append('the log_path "%s" %s is not absolute' % (service["log_path"], of))
    unit = _services.unit_of(service)
    if not UNIT_NAME.match(unit):
        found.append('the unit "%s" %s is not the name of a service unit: it must end in .service' % (unit, of))
    for option in ("stop_timeout", "ready_timeout", "stall_timeout", "restart_delay", "start_burst"):
        value = _services.value_of(service, option)
        if not _is_number(value) or float(value) <= 0:
            found.append('the %s "%s" %s is not a number above 0' % (option, value, of))
    rest = _managed_problems if _services.is_managed(service) else _unmanaged_problems
    return found + rest(service, of)


def _profile_problems(engine: str, profile: t.Optional[Item], of: str) -> t.List[str]:
    try:
        _engines.get(engine, profile)
    except UsageError as error:
        return ["the profile %s cannot be used: %s" % (of, error.message)]
    return []


def _address_problems(service: Item, of: str) -> t.List[str]:
    if service.get("port") is None:
        return [] if service.get("url") else ["neither the port nor the url %s is given" % of]
    port = str(service["port"])
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        return ['the port "%s" %s is not a number from 1 to 65535' % (port, of)]
    return []


def _gateway_problems(service: Item, of: str) -> t.List[str]:
    gateway = service.get("gateway") or {}
    kind = gateway.get("type", "none")
    if kind == "none":
        return []
    if kind != "haproxy":
        return ['the gateway type "%s" %s is not known: use none or haproxy' % (kind, of)]
    return ["the gateway %s has no %s" % (of, key) for key in ("host", "backend") if not gateway.get(key)]


def _unmanaged_problems(service: Item, of: str) -> t.List[str]:
    if not service.get("unit"):
        return ["the unit %s is not named, and manage_unit is false: name the unit that is there" % of]
    given = [option for option in UNIT_OPTIONS if service.get(option) is not None]
    if given:
        return ["%s %s cannot be used: its unit is not managed (manage_unit is false)" % (" and ".join(given), of)]
    return []


def _managed_problems(service: Item, of: str) -> t.List[str]:
    found: t.List[str] = []
    if not service.get("command"):
        found.append("the command %s is missing: name its program, or set manage_unit to false" % of)
    else:
        try:
            _services.exec_start(service)
        except ValueError as error:
            found.append("the command %s cannot be used: %s" % (of, error))
    try:
        _systemd_text.environment_file(_services.environment(service))
    except ValueError as error:
        found.append("the environment %s cannot be used: %s" % (of, error))
    addresses = [gpu for gpu in map(str, service.get("gpus") or ()) if PCI_ADDRESS.match(gpu)]
    if addresses:
        found.append(
            'the GPU "%s" %s is given by PCI address, which CUDA does not take: use its index or UUID'
            % (addresses[0], of)
        )
    for option in ("user", "group", "working_directory", "description", "cpu_quota", "memory_max"):
        if re.search(r"[\n\r\0]", str(service.get(option) or "")):
            found.append("the %s %s holds a line break" % (option, of))
        elif str(service.get(option) or "").endswith("\\"):
            found.append("the %s %s ends in a backslash, which would join it to the next line" % (option, of))
    if service.get("working_directory") and not str(service["working_directory"]).startswith("/"):
        found.append('the working_directory "%s" %s is not absolute' % (service["working_directory"], of))
    if service.get("cpu_quota") and not re.match(r"[1-9][0-9]*%\Z", str(service["cpu_quota"])):
        found.append('the cpu_quota "%s" %s is not a percentage such as 200%%' % (service["cpu_quota"], of))
    return found


def _clashes(services: t.Sequence[Item]) -> t.List[str]:
    """What two services of one host must not share."""
    names = [str(service["name"]) for service in services]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        return ['the name "%s" is given to %d services' % (name, names.count(name)) for name in twice]
    owners: t.Dict[t.Tuple[str, str], str] = {}
    found = []
    for service in services:
        name = str(service["name"])
        claims = [("unit", _services.unit_of(service)), ("port", str(service.get("port")))]
        claims += [("GPU", str(gpu)) for gpu in service.get("gpus") or ()]
        for kind, value in claims:
            other = owners.setdefault((kind, value), name)
            if other != name and value != "None":
                found.append('the services "%s" and "%s" share the %s "%s"' % (other, name, kind, value))
    return found


def _is_number(value: t.Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
