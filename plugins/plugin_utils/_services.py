# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The items of ``gpuops_services``: what is wrong with them, and what they say once every gap is filled."""

from __future__ import annotations

import difflib
import json
import re
import typing as t

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

from . import _systemd_text

Item = t.Mapping[str, t.Any]

ENV_FOLDER = "/etc/gpuops/env"
UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:_.\\@-]*\.service\Z")
PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z", re.I)
WILDCARDS = ("0.0.0.0", "::", "[::]", "*")  # noqa: S104

# Options that mean something only in a unit that the role writes.
UNIT_OPTIONS = (
    "command args env group create_user supplementary_groups working_directory description api_key_env restart_delay "
    "start_burst cpu_quota memory_max limit_nofile limit_memlock tasks_max"
).split()

OPTIONS = (
    "name engine model host port url gpus unit manage_unit api_key user stop_timeout ready_timeout stall_timeout gateway"
).split() + UNIT_OPTIONS
LISTS = ("gpus", "command", "args", "supplementary_groups")
MAPPINGS = ("env", "gateway")
GATEWAY_OPTIONS = "type host backend server socket url min_healthy".split()

# The variable in which an engine takes its API key. The others know only their command line or a file.
API_KEY_VARIABLES = {"llama_cpp": "LLAMA_API_KEY", "vllm": "VLLM_API_KEY"}

DEFAULTS: t.Dict[str, t.Any] = {
    "engine": "openai",
    "model": None,
    "host": "127.0.0.1",
    "stop_timeout": 120,
    "ready_timeout": 1800,
    "stall_timeout": 300,
    "restart_delay": 15,
    "start_burst": 3,
    "limit_nofile": 1048576,
    "limit_memlock": "infinity",
    "tasks_max": "infinity",
}
START_MARGIN = 60


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
            if value is not None and (isinstance(value, str) or not isinstance(value, kinds)):  # type: ignore[arg-type]
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
    engine = _value(service, "engine")
    if engine not in _engines.PROFILES:
        found.append('the engine "%s" %s is not known: use one of %s' % (engine, of, ", ".join(_engines.PROFILES)))
    unit = unit_of(service)
    if not UNIT_NAME.match(unit):
        found.append('the unit "%s" %s is not the name of a service unit: it must end in .service' % (unit, of))
    for option in ("stop_timeout", "ready_timeout", "stall_timeout", "restart_delay", "start_burst"):
        value = _value(service, option)
        if not _is_number(value) or float(value) <= 0:
            found.append('the %s "%s" %s is not a number above 0' % (option, value, of))
    return found + (_managed_problems(service, of) if is_managed(service) else _unmanaged_problems(service, of))


def _address_problems(service: Item, of: str) -> t.List[str]:
    if service.get("port") is None:
        return [] if service.get("url") else ["neither the port nor the url %s is given" % of]
    port = str(service["port"])
    if not port.isdigit() or not 0 < int(port) < 65536:
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
    try:
        exec_start(service)
    except ValueError as error:
        found.append("the command %s cannot be used: %s" % (of, error))
    try:
        _systemd_text.environment_file(environment(service))
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
        claims = [("unit", unit_of(service)), ("port", str(service.get("port")))]
        claims += [("GPU", str(gpu)) for gpu in service.get("gpus") or ()]
        for kind, value in claims:
            other = owners.setdefault((kind, value), name)
            if other != name and value != "None":
                found.append('the services "%s" and "%s" share the %s "%s"' % (other, name, kind, value))
    return found


def resolve(services: t.Sequence[Item], selected: t.Container[str] = ()) -> t.List[t.Dict[str, t.Any]]:
    """The services with every gap filled, without their secrets. Call it for services without problems."""
    return [_resolve(service) for service in services if not selected or service["name"] in selected]


def _resolve(service: Item) -> t.Dict[str, t.Any]:
    managed = is_managed(service)
    name = str(service["name"])
    delay, burst = float(_value(service, "restart_delay")), int(_value(service, "start_burst"))
    stop, ready = float(_value(service, "stop_timeout")), float(_value(service, "ready_timeout"))
    item = {
        "name": name,
        "unit": unit_of(service),
        "manage_unit": managed,
        "user": service.get("user") or ("root" if managed else None),
        "create_user": boolean(service.get("create_user") or False),
        "env_path": "%s/%s.env" % (ENV_FOLDER, name),
        "key_path": "%s/%s.key" % (ENV_FOLDER, name),
        "has_env": managed and bool(environment(service)),
        "has_key": bool(service.get("api_key")),
        "mark_group": _service.mark_group(name) if managed else None,
        "definition": definition(service),
    }
    if not managed:
        return item
    item.update(
        description=_systemd_text.plain(
            service.get("description") or "Inference service %s (%s)" % (name, _value(service, "engine"))
        ),
        exec_start=exec_start(service),
        accounts=_accounts(service),
        group=service.get("group"),
        supplementary_groups=list(service.get("supplementary_groups") or ()),
        working_directory=_systemd_text.plain(str(service.get("working_directory") or "")),
        visible_gpus=",".join(map(str, service.get("gpus") or ())),
        stop_timeout=_number(stop),
        restart_delay=_number(delay),
        start_burst=burst,
        # All starts that the burst allows, each with its whole load and its end, must fall into the interval;
        # with the default of 10 s an engine that dies after a load of minutes would be started for ever.
        start_interval=_number(burst * (ready + delay + stop) + START_MARGIN),
        cpu_quota=service.get("cpu_quota"),
        memory_max=service.get("memory_max"),
        limit_nofile=_value(service, "limit_nofile"),
        limit_memlock=_value(service, "limit_memlock"),
        tasks_max=_value(service, "tasks_max"),
    )
    return item


def _accounts(service: Item) -> t.List[t.Dict[str, str]]:
    """What must exist on the host before anything is written. Numbers need no entry."""
    user = service.get("user")
    wanted = [("passwd", user)] if user and not boolean(service.get("create_user") or False) else []
    wanted += [("group", name) for name in [service.get("group"), *(service.get("supplementary_groups") or ())] if name]
    return [
        {"database": database, "name": str(name), "service": str(service["name"])}
        for database, name in wanted
        if str(name) != "root" and not str(name).isdigit()
    ]


def definition(service: Item) -> t.Dict[str, t.Any]:
    """What the host keeps of a service; nothing secret. The role adds the number of the mark group."""
    managed = is_managed(service)
    name = str(service["name"])
    gateway = service.get("gateway") or {}
    return {
        "name": name,
        "unit": unit_of(service),
        "manage_unit": managed,
        "url": service.get("url") or default_url(service),
        "route_url": gateway.get("url") if gateway.get("type", "none") != "none" else None,
        "engine": _value(service, "engine"),
        "model": _value(service, "model"),
        "gpus": [str(gpu) for gpu in service.get("gpus") or ()] or None,
        "user": service.get("user") or ("root" if managed else None),
        "mark_group": _service.mark_group(name) if managed else None,
        "api_key_file": "%s/%s.key" % (ENV_FOLDER, name) if service.get("api_key") else None,
        "stop_timeout": _number(_value(service, "stop_timeout")),
        "ready_timeout": _number(_value(service, "ready_timeout")),
        "stall_timeout": _number(_value(service, "stall_timeout")),
    }


def secrets(services: t.Sequence[Item], name: str) -> t.Dict[str, str]:
    """The text of the two files of a service that only root may read."""
    for service in services:
        if service["name"] == name:
            text = _systemd_text.environment_file(environment(service)) if is_managed(service) else ""
            key = str(service.get("api_key") or "")
            return {"env": text, "key": key + "\n" if key else ""}
    raise ValueError('there is no service "%s"' % name)


def environment(service: Item) -> t.Dict[str, str]:
    """The variables of the environment file; what the operator says wins over the API key."""
    found = {}
    variable = service.get("api_key_env") or API_KEY_VARIABLES.get(str(_value(service, "engine")))
    if variable and service.get("api_key"):
        found[str(variable)] = str(service["api_key"])
    found.update({str(key): _text(value) for key, value in (service.get("env") or {}).items()})
    return found


def exec_start(service: Item) -> str:
    words = [_text(word) for word in [*(service.get("command") or ()), *(service.get("args") or ())]]
    return _systemd_text.command_line(words) if words else ""


def default_url(service: Item) -> str:
    host = str(_value(service, "host"))
    if host in WILDCARDS:
        host = "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = "[%s]" % host
    return "http://%s:%s" % (host, service["port"])


def unit_of(service: Item) -> str:
    return str(service.get("unit") or "gpuops-%s.service" % service.get("name"))


def is_managed(service: Item) -> bool:
    value = service.get("manage_unit")
    return True if value is None else bool(boolean(value))


def _value(service: Item, option: str) -> t.Any:
    value = service.get(option)
    return DEFAULTS.get(option) if value is None else value


def _text(value: t.Any) -> str:
    """YAML's true and numbers as a person would type them in a shell; lists and mappings as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)


def _is_number(value: t.Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _number(value: t.Any) -> t.Union[int, float]:
    number = float(value)
    return int(number) if number.is_integer() else number
