# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _service
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
    path.write_text("sk-1\n", encoding="utf-8")
    assert _service.read_key(str(path)) == "sk-1"


def test_the_mark_group_is_short_and_differs_by_name() -> None:
    assert _service.mark_group("qwen") == "gpuops-67f2d2251462"
    assert _service.mark_group("a") != _service.mark_group("b")
    assert len(_service.mark_group("x" * 63)) == 19
