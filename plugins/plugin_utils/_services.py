# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The items of ``gpuops_services`` once every gap is filled. What is wrong with them is said in ``_service_checks``."""

from __future__ import annotations

import json
import typing as t

from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.gpuops.serving.plugins.module_utils import _service

from . import _systemd_text

Item = t.Mapping[str, t.Any]

ENV_FOLDER = "/etc/gpuops/env"
WILDCARDS = ("0.0.0.0", "::", "[::]", "*")

# The variable in which an engine takes its API key. The others know only their command line or a file.
API_KEY_VARIABLES = {"llama_cpp": "LLAMA_API_KEY", "vllm": "VLLM_API_KEY", "tgi": "API_KEY"}

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


def resolve(services: t.Sequence[Item], selected: t.Container[str] = ()) -> t.List[t.Dict[str, t.Any]]:
    """The services with every gap filled, without their secrets. Call it for services without problems."""
    return [_resolve(service) for service in services if not selected or service["name"] in selected]


def _resolve(service: Item) -> t.Dict[str, t.Any]:
    managed = is_managed(service)
    name = str(service["name"])
    delay, burst = float(value_of(service, "restart_delay")), int(value_of(service, "start_burst"))
    stop, ready = float(value_of(service, "stop_timeout")), float(value_of(service, "ready_timeout"))
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
            service.get("description") or "Inference service %s (%s)" % (name, value_of(service, "engine"))
        ),
        exec_start=exec_start(service),
        accounts=_accounts(service),
        group=service.get("group"),
        supplementary_groups=list(service.get("supplementary_groups") or ()),
        working_directory=_systemd_text.plain(str(service.get("working_directory") or "")),
        visible_gpus=None if service.get("gpus") is None else ",".join(map(str, service["gpus"])),
        stop_timeout=_number(stop),
        restart_delay=_number(delay),
        start_burst=burst,
        # All starts that the burst allows, each with its whole load and its end, must fall into the interval;
        # with the default of 10 s an engine that dies after a load of minutes would be started for ever.
        start_interval=_number(burst * (ready + delay + stop) + START_MARGIN),
        cpu_quota=service.get("cpu_quota"),
        memory_max=service.get("memory_max"),
        limit_nofile=value_of(service, "limit_nofile"),
        limit_memlock=value_of(service, "limit_memlock"),
        tasks_max=value_of(service, "tasks_max"),
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
        "url": service.get("url") or (default_url(service) if service.get("port") else None),
        "route_url": gateway.get("url") if gateway.get("type", "none") != "none" else None,
        "engine": value_of(service, "engine"),
        "log_path": service.get("log_path") or None,
        "profile": dict(service["profile"]) if service.get("profile") else None,
        "model": value_of(service, "model"),
        # None is all GPUs of the host, an empty list is none of them.
        "gpus": None if service.get("gpus") is None else [str(gpu) for gpu in service["gpus"]],
        "user": service.get("user") or ("root" if managed else None),
        "mark_group": _service.mark_group(name) if managed else None,
        "api_key_file": "%s/%s.key" % (ENV_FOLDER, name) if service.get("api_key") else None,
        "stop_timeout": _number(value_of(service, "stop_timeout")),
        "ready_timeout": _number(value_of(service, "ready_timeout")),
        "stall_timeout": _number(value_of(service, "stall_timeout")),
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
    variable = service.get("api_key_env") or API_KEY_VARIABLES.get(str(value_of(service, "engine")))
    if variable and service.get("api_key"):
        found[str(variable)] = str(service["api_key"])
    found.update({str(key): _text(value) for key, value in (service.get("env") or {}).items()})
    return found


def exec_start(service: Item) -> str:
    words = [_text(word) for word in [*(service.get("command") or ()), *(service.get("args") or ())]]
    return _systemd_text.command_line(words) if words else ""


def default_url(service: Item) -> str:
    host = str(value_of(service, "host"))
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


def value_of(service: Item, option: str) -> t.Any:
    """What the item says, else the default."""
    value = service.get(option)
    return DEFAULTS.get(option) if value is None else value


def _text(value: t.Any) -> str:
    """YAML's true and numbers as a person would type them in a shell; lists and mappings as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return str(value)


def _number(value: t.Any) -> t.Union[int, float]:
    number = float(value)
    return int(number) if number.is_integer() else number
