# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Items of gpuops_services: refused in one sentence, completed, and never with a secret in what may be shown."""

from __future__ import annotations

import pathlib
import typing as t

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _engines, _service
from ansible_collections.gpuops.serving.plugins.plugin_utils import _service_checks, _services

ROOT = pathlib.Path(__file__).resolve().parents[2]

GOOD: dict[str, t.Any] = {"name": "chat", "engine": "vllm", "port": 8000, "command": ["/opt/vllm/bin/vllm", "serve"]}


def item(**changes: t.Any) -> dict[str, t.Any]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not None}


def specified() -> dict[str, dict[str, t.Any]]:
    path = ROOT / "roles" / "inference_service" / "meta" / "argument_specs.yml"
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    return dict(spec["inference_service_services"]["options"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"name": "Chat!"},
            'the service name "Chat!" is not usable: it must start with a lower-case letter or digit, hold only '
            "lower-case letters, digits, '_', '.' and '-', and be at most 63 characters long",
        ),
        ({"port": None}, 'neither the port nor the url of the service "chat" is given'),
        ({"port": 70000}, 'the port "70000" of the service "chat" is not a number from 1 to 65535'),
        ({"port": "http"}, 'the port "http" of the service "chat" is not a number from 1 to 65535'),
        (
            {"engine": "vlllm"},
            'the engine "vlllm" of the service "chat" is not known: use one of ' + ", ".join(_engines.PROFILES),
        ),
        ({"modle": "x"}, 'the option "modle" of the service "chat" does not exist: use "model"'),
        ({"xyz": 1}, 'the option "xyz" of the service "chat" does not exist'),
        ({"gpus": 0}, 'the gpus of the service "chat" is not a list'),
        ({"args": "--port 1"}, 'the args of the service "chat" is not a list'),
        ({"env": ["A=b"]}, 'the env of the service "chat" is not a mapping'),
        ({"log_path": "x.log"}, 'the log_path "x.log" of the service "chat" is not absolute'),
        ({"profile": ["x"]}, 'the profile of the service "chat" is not a mapping'),
        (
            {"profile": {"health": "x"}},
            'the profile of the service "chat" cannot be used: the profile of the engine "vllm" cannot be changed: '
            '"health" must be a path that begins with "/"',
        ),
        (
            {"gateway": {"type": "haproxy", "sever": "a"}},
            'the gateway option "sever" of the service "chat" does not exist: use "server"',
        ),
        (
            {"command": None},
            'the command of the service "chat" is missing: name its program, or set manage_unit to false',
        ),
        (
            {"command": ["vllm"]},
            'the command of the service "chat" cannot be used: the program "vllm" is not an absolute path',
        ),
        (
            {"command": ["/opt/$V/v"]},
            'the command of the service "chat" cannot be used: the program "/opt/$V/v" has a dollar sign in its path',
        ),
        (
            {"args": ["a\nb"]},
            'the command of the service "chat" cannot be used: the word "a" holds a line break or a null byte',
        ),
        (
            {"env": {"A-B": "c"}},
            'the environment of the service "chat" cannot be used: "A-B" is not the name of a variable',
        ),
        (
            {"env": {"K": "s3cret\n"}},
            'the environment of the service "chat" cannot be used: the value of "K" holds a line break or a null byte',
        ),
        (
            {"unit": "chat"},
            'the unit "chat" of the service "chat" is not the name of a service unit: it must end in .service',
        ),
        ({"unit": "../x.service"}, None),
        ({"stop_timeout": 0}, 'the stop_timeout "0" of the service "chat" is not a number above 0'),
        ({"ready_timeout": "soon"}, 'the ready_timeout "soon" of the service "chat" is not a number above 0'),
        (
            {"gpus": ["0000:65:00.0"]},
            'the GPU "0000:65:00.0" of the service "chat" is given by PCI address, which CUDA does not take: '
            "use its index or UUID",
        ),
        ({"working_directory": "srv"}, 'the working_directory "srv" of the service "chat" is not absolute'),
        ({"cpu_quota": "2"}, 'the cpu_quota "2" of the service "chat" is not a percentage such as 200%'),
        ({"description": "a\nExecStart=/bin/sh"}, 'the description of the service "chat" holds a line break'),
        (
            {"gateway": {"type": "nginx"}},
            'the gateway type "nginx" of the service "chat" is not known: use none or haproxy',
        ),
        ({"gateway": {"type": "haproxy", "host": "gw"}}, 'the gateway of the service "chat" has no backend'),
        (
            {"manage_unit": False, "command": None},
            'the unit of the service "chat" is not named, and manage_unit is false: name the unit that is there',
        ),
        (
            {"manage_unit": False, "unit": "x.service", "env": {"A": "b"}},
            'command and env of the service "chat" cannot be used: its unit is not managed (manage_unit is false)',
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(changes: dict[str, t.Any], sentence: str | None) -> None:
    found = _service_checks.problems([item(**changes)])
    assert len(found) == 1
    if sentence is not None:
        assert found == [sentence]


@pytest.mark.parametrize(
    ("other", "sentences"),
    [
        ({}, ['the name "chat" is given to 2 services']),
        ({"name": "embed"}, ['the services "chat" and "embed" share the port "8000"']),
        ({"name": "embed", "port": 8001, "gpus": [1]}, ['the services "chat" and "embed" share the GPU "1"']),
        (
            {"name": "embed", "port": 8001, "unit": "gpuops-chat.service"},
            ['the services "chat" and "embed" share the unit "gpuops-chat.service"'],
        ),
        ({"name": "embed", "port": 8001, "gpus": ["2"]}, []),
        ({"name": "embed", "port": None, "url": "https://127.0.0.1:9443"}, []),
    ],
)
def test_services_of_one_host_share_nothing(other: dict[str, t.Any], sentences: list[str]) -> None:
    assert _service_checks.problems([item(gpus=["0", 1]), item(**other)]) == sentences


def test_a_unit_of_others_needs_little() -> None:
    service = {"name": "old", "port": 30000, "engine": "sglang", "unit": "sglang.service", "manage_unit": False}
    assert _service_checks.problems([service]) == []
    (found,) = _services.resolve([service])
    assert found["mark_group"] is None
    assert found["definition"]["user"] is None
    assert "exec_start" not in found


def test_the_definition_has_what_modules_look_for_and_no_secret() -> None:
    service = item(api_key="k3y", env={"TOKEN": "t0ken"}, gpus=[0], gateway={"type": "haproxy", "url": "http://gw"})
    (found,) = _services.resolve([service])
    assert found["definition"] == {
        "name": "chat",
        "unit": "gpuops-chat.service",
        "manage_unit": True,
        "url": "http://127.0.0.1:8000",
        "route_url": "http://gw",
        "engine": "vllm",
        "log_path": None,
        "profile": None,
        "model": None,
        "gpus": ["0"],
        "user": "root",
        "mark_group": _service.mark_group("chat"),
        "api_key_file": "/etc/gpuops/env/chat.key",
        "stop_timeout": 120,
        "ready_timeout": 1800,
        "stall_timeout": 300,
    }
    assert "k3y" not in repr(found)
    assert "t0ken" not in repr(found)


def test_what_the_engine_does_otherwise_goes_into_the_definition() -> None:
    (found,) = _services.resolve([item(profile={"metrics_port": 9002, "running": ["x"]})])
    assert found["definition"]["profile"] == {"metrics_port": 9002, "running": ["x"]}
    assert _service_checks.problems([item(profile={"metrics_port": 9002})]) == []


def test_secrets_go_into_the_two_files_of_root() -> None:
    service = item(api_key='a"b$c', env={"NUMBER": 1, "SWITCH": True, "LIST": ["x"]})
    assert _services.secrets([service], "chat") == {
        "env": 'LIST="[\\"x\\"]"\nNUMBER="1"\nSWITCH="true"\nVLLM_API_KEY="a\\"b\\$c"\n',
        "key": 'a"b$c\n',
    }


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("llama_cpp", 'LLAMA_API_KEY="k"\n'),
        ("vllm", 'VLLM_API_KEY="k"\n'),
        ("tgi", 'API_KEY="k"\n'),
        ("sglang", ""),
        ("ollama", ""),
    ],
)
def test_the_key_is_given_as_the_engine_takes_it(engine: str, text: str) -> None:
    assert _services.secrets([item(engine=engine, api_key="k")], "chat")["env"] == text


def test_what_the_operator_sets_wins_over_the_key() -> None:
    service = item(api_key="one", env={"VLLM_API_KEY": "two"})
    assert _services.secrets([service], "chat")["env"] == 'VLLM_API_KEY="two"\n'


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("10.0.0.1", "http://10.0.0.1:8000"),
    ],
)
def test_the_url_is_one_that_the_host_itself_can_ask(host: str | None, url: str) -> None:
    assert _services.definition(item(host=host))["url"] == url


@pytest.mark.parametrize(
    ("gpus", "defined", "visible"), [(None, None, None), ([], [], ""), ([0, "GPU-1"], ["0", "GPU-1"], "0,GPU-1")]
)
def test_no_list_of_gpus_means_all_and_an_empty_one_none(gpus: t.Any, defined: t.Any, visible: t.Any) -> None:
    (found,) = _services.resolve([item(gpus=gpus)])
    assert found["definition"]["gpus"] == defined
    assert found["visible_gpus"] == visible


@pytest.mark.parametrize("ready", [30, 600, 7200])
def test_the_start_limit_can_be_reached_by_an_engine_that_dies_after_its_longest_load(ready: int) -> None:
    (found,) = _services.resolve([item(ready_timeout=ready)])
    longest_round = ready + found["restart_delay"] + found["stop_timeout"]
    assert found["start_interval"] > found["start_burst"] * longest_round


def test_only_selected_services_are_resolved() -> None:
    services = [item(), item(name="embed", port=8001)]
    assert [found["name"] for found in _services.resolve(services, ["embed"])] == ["embed"]


def test_the_documented_defaults_are_those_of_the_code() -> None:
    documented = {name: option["default"] for name, option in specified().items() if "default" in option}
    for name in ("manage_unit", "create_user"):
        documented.pop(name)
    code = {name: str(value) for name, value in _services.DEFAULTS.items() if value is not None}
    assert {name: str(value) for name, value in documented.items()} == code


def test_every_option_is_documented() -> None:
    assert sorted(_service_checks.OPTIONS) == sorted(specified())
    assert sorted(_service_checks.GATEWAY_OPTIONS) == sorted(specified()["gateway"]["options"])


def test_types_agree_with_the_documentation() -> None:
    types = {name: option["type"] for name, option in specified().items()}
    assert sorted(name for name in types if types[name] == "list") == sorted(_service_checks.LISTS)
    assert sorted(name for name in types if types[name] == "dict") == sorted(_service_checks.MAPPINGS)


def test_the_documented_engines_are_the_known_ones() -> None:
    assert set(specified()["engine"]["choices"]) == set(_engines.PROFILES)


@pytest.mark.parametrize("services", ["chat", {"name": "chat"}, ["chat"]])
def test_what_is_no_list_of_services_is_one_sentence(services: t.Any) -> None:
    assert _service_checks.problems(services) == ["gpuops_services is not a list of services"]
