# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import json
import os
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _agent_stop, _lease, _service, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError

FILL = {"unit": "unit", "url": "url", "gpus": "gpus"}


@pytest.fixture
def folder(tmp_path: t.Any) -> str:
    definition = {"name": "qwen", "unit": "gpuops-qwen.service", "url": "http://127.0.0.1:8080", "gpus": []}
    (tmp_path / "qwen.json").write_text(json.dumps(definition), encoding="utf-8")
    return str(tmp_path)


def test_the_definition_fills_the_gaps_and_an_option_wins(folder: str) -> None:
    filled = _service.fill({"service": "qwen", "unit": "other.service", "url": None, "gpus": None}, FILL, folder)
    assert (filled["unit"], filled["url"], filled["gpus"]) == ("other.service", "http://127.0.0.1:8080", [])


def test_without_a_service_nothing_is_filled(folder: str) -> None:
    assert _service.fill({"service": None, "url": None}, FILL, folder) == {"service": None, "url": None}


def test_an_unknown_service_names_what_is_defined(folder: str) -> None:
    with pytest.raises(UsageError) as caught:
        _service.fill({"service": "llama", "unit": None}, FILL, folder)
    assert caught.value.message == (
        'the service "llama" is not defined on this host: %s does not exist (defined here: "qwen")'
        % os.path.join(folder, "llama.json")
    )


def test_an_unknown_service_with_explicit_options_is_a_name_alone(folder: str) -> None:
    filled = _service.fill({"service": "legacy", "unit": "x.service", "url": None}, FILL, folder)
    assert (filled["unit"], filled["url"], filled["definition"]) == ("x.service", None, {})


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "other"}'])
def test_a_damaged_definition_is_an_error(folder: str, content: str) -> None:
    with open(os.path.join(folder, "bad.json"), "w", encoding="utf-8") as handle:
        handle.write(content)
    with pytest.raises(ServingError, match='the definition of the service "bad" cannot be used'):
        _service.load("bad", folder)


WRONG: t.List[t.Tuple[str, t.Any]] = [
    *(("unit", value) for value in (5, "", ["q"], False)),
    *(("engine", value) for value in (5, ["vllm"], {})),
    *(("log_path", value) for value in ("x", 7, "")),
    *(("profile", value) for value in ("x", [], 7)),
    *(("mark_gid", value) for value in (True, "7", 7.0, 0, -1, 2**32 - 1, [7])),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_of_a_wrong_kind_is_named(tmp_path: t.Any, key: str, value: t.Any) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"name": "bad", "unit": "b", "engine": "vllm", "mark_gid": 7, key: value}))
    with pytest.raises(ServingError) as caught:
        _service.load("bad", str(tmp_path))
    assert type(caught.value) is not UsageError
    assert caught.value.message.startswith(
        'the definition of the service "bad" cannot be used: "%s" in %s must be ' % (key, path)
    )
    # It can concern the unit that it names, and every one when that is what is wrong.
    found = _service.match("b", str(tmp_path))
    assert (found.name, str(found.unreadable)) == (None, caught.value.message)
    assert (_service.match("other", str(tmp_path)).unreadable is not None) is (key == "unit")


def test_values_of_the_right_kind(tmp_path: t.Any) -> None:
    for more in ({}, {"mark_gid": 1}, {"mark_gid": 2**32 - 2}, {"unit": None, "engine": None, "mark_gid": None}):
        (tmp_path / "good.json").write_text(json.dumps({"name": "good", **more}))
        assert _service.load("good", str(tmp_path)) == {"name": "good", **more}


@pytest.mark.parametrize("name", ["../qwen", "a/b", "Qwen", "", ".x", "qwen\n"])
def test_a_name_that_is_a_path_is_refused(folder: str, name: str) -> None:
    with pytest.raises(UsageError, match="is not usable"):
        _service.load(name, folder)


def test_a_key_file_that_cannot_be_used_is_one_sentence_without_its_content(tmp_path: t.Any) -> None:
    path = tmp_path / "key"
    with pytest.raises(ServingError, match="cannot be read: No such file"):
        _service.read_key(str(path))
    path.write_bytes(b"\xff\xfesecret")
    with pytest.raises(ServingError) as caught:
        _service.read_key(str(path))
    assert caught.value.message == 'the API key file "%s" cannot be read: it does not hold text in UTF-8' % path
    for nothing in ("", "\n", " \t\r\n"):
        path.write_text(nothing, encoding="utf-8")
        with pytest.raises(ServingError) as caught:
            _service.read_key(str(path))
        assert caught.value.message == 'the API key file "%s" cannot be used: it holds no key' % path
    path.write_text("sk-1\n", encoding="utf-8")
    assert _service.read_key(str(path)) == "sk-1"


def test_the_mark_group_is_short_and_differs_by_name() -> None:
    assert _service.mark_group("qwen") == "gpuops-67f2d2251462"
    assert _service.mark_group("a") != _service.mark_group("b")
    assert len(_service.mark_group("x" * 63)) == 19


@pytest.mark.parametrize("defined", ["gpuops-qwen2.5", "gpuops-qwen2.5.service", "eng@1.2", "eng.scope", "a.b.service"])
def test_a_unit_is_found_however_it_and_its_definition_write_its_name(tmp_path: t.Any, defined: str) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"name": "other", "unit": "gpuops-qwen2"}), encoding="utf-8")
    (tmp_path / "none.json").write_text(json.dumps({"name": "none", "unit": ""}), encoding="utf-8")
    (tmp_path / "odd.json").write_text(json.dumps({"name": "odd", "unit": "a b"}), encoding="utf-8")
    (tmp_path / "qwen.json").write_text(json.dumps({"name": "qwen", "unit": defined}), encoding="utf-8")
    full = _systemd.unit_name(defined)
    for asked in {defined, full, full[: -len(".service")] if full.endswith(".service") else full}:
        assert _service.of_unit(asked, str(tmp_path)) == "qwen"
        assert _service.match(asked, str(tmp_path)) == ("qwen", {"name": "qwen", "unit": defined}, None)
    for strange in ("", "a b", "qwen", "gpuops-qwen2.5.scope", "gpuops-qwen2.5.slice"):
        assert _service.of_unit(strange, str(tmp_path)) is None


def test_a_definition_that_cannot_be_read_may_be_the_one_unless_another_is(tmp_path: t.Any) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "qwen.json").write_text(json.dumps({"name": "qwen", "unit": "q"}), encoding="utf-8")
    assert _service.match("q.service", str(tmp_path)) == ("qwen", {"name": "qwen", "unit": "q"}, None)
    found = _service.match("other", str(tmp_path))
    assert (found.name, found.definition) == (None, {})
    assert "bad.json" in str(found.unreadable)
    assert _service.of_unit("other", str(tmp_path)) is None


@pytest.mark.parametrize("unit", ["gpuops-qwen2.5", "gpuops-qwen2.5.service"])
@pytest.mark.parametrize("defined", ["gpuops-qwen2.5", "gpuops-qwen2.5.service"])
def test_a_stop_by_unit_is_under_the_lease_of_its_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: t.Any, unit: str, defined: str
) -> None:
    (tmp_path / "q.json").write_text(json.dumps({"name": "q", "unit": defined}), encoding="utf-8")
    monkeypatch.setattr(_service, "FOLDER", str(tmp_path))
    locked: t.List[t.Any] = []

    @contextlib.contextmanager
    def operation(service: t.Any, run_id: t.Any) -> t.Iterator[None]:
        locked.append(service)
        yield

    monkeypatch.setattr(_lease, "operation", operation)
    monkeypatch.setattr(_agent_stop._stopping, "stop", lambda *_arguments, **_options: {})
    _agent_stop._stop({"plan": False, "service": None, "unit": unit}, lambda _text: None)
    assert locked == ["q"]


@pytest.mark.parametrize("read", [_service.read_key, _service.read_headers])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fifo", "it is no regular file"),
        ("zero", "it is no regular file"),
        ("folder", "it is no regular file"),
        ("large", "it is larger than 1024 KiB"),
        ("null", "its name is none"),
        ("none", "No such file or directory"),
    ],
)
def test_a_file_with_secrets_is_a_regular_one_of_some_size(
    tmp_path: t.Any, read: t.Callable[[str], t.Any], kind: str, why: str
) -> None:
    """Anything else would hang, or never end."""
    path = str(tmp_path / "file")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path = "/dev/zero"
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "large":
        with open(path, "wb") as handle:
            handle.truncate(1 << 40)
    elif kind == "null":
        path += "\0"
    with pytest.raises(ServingError) as caught:
        read(path)
    assert caught.value.message.endswith(' file "%s" cannot be read: %s' % (path, why))


def test_what_the_definition_has_filled_is_known(tmp_path: t.Any) -> None:
    (tmp_path / "q.json").write_text(json.dumps({"name": "q", "stall_timeout": 300, "url": "u"}), encoding="utf-8")
    mapping = {"timeout": "ready_timeout", "stall_timeout": "stall_timeout", "url": "url"}
    found = _service.fill({"service": "q", "timeout": 60, "stall_timeout": None, "url": "v"}, mapping, str(tmp_path))
    assert (found["timeout"], found["stall_timeout"], found["url"]) == (60, 300, "v")
    assert found["of_definition"] == ["stall_timeout"]
