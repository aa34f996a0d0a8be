# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From what an operator names to the processes meant."""

from __future__ import annotations

import pathlib
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _processes, _selection, _service
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._processes import Table
from host import process


def test_a_pid_file_without_a_pid(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "engine.pid"
    for text in ("", "x", "-5", "0"):
        path.write_text(text)
        with pytest.raises(ServingError, match="holds no process id"):
            _selection.pid_in_file(str(path))


def test_patterns_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="is not a regular expression"):
        _selection.by_pattern("(", "root")
    with pytest.raises(UsageError, match='the user "nobody-here" does not exist'):
        _selection.by_pattern("x", "nobody-here")


def definitions(monkeypatch: pytest.MonkeyPatch, **found: t.Dict[str, t.Any] | ServingError) -> None:
    """What /etc/gpuops/services holds."""

    def load(name: str) -> t.Dict[str, t.Any]:
        definition = found[name]
        if isinstance(definition, ServingError):
            raise definition
        return definition

    monkeypatch.setattr(_service, "names", lambda: sorted(found))
    monkeypatch.setattr(_service, "load", load)


def test_the_mark_of_a_unit_is_that_of_the_service_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ServingError("the definition cannot be used")
    definitions(monkeypatch, a=broken, b={"unit": "qwen", "mark_gid": 987654}, c={"unit": "x.service"})
    assert _selection.mark_of(None, "qwen.service", {}) == 987654
    assert _selection.mark_of(None, "qwen", {}) == 987654
    assert _selection.mark_of("b", "other.service", {"mark_gid": 987655}) == 987655
    with pytest.raises(ServingError, match="the definition cannot be used"):
        _selection.mark_of(None, "other.service", {})  # it may be the one
    definitions(monkeypatch, c={"unit": "x.service"}, d={})
    assert _selection.mark_of(None, "other.service", {}) is None


def test_command_lines_that_cannot_be_read_do_not_make_every_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: t.List[float] = []
    monkeypatch.setattr(_selection.time, "monotonic", lambda: sum(limits))
    monkeypatch.setattr(_processes, "command_lines", lambda _refs, limit: limits.append(limit) or {})
    scan = _selection.by_pattern("engine", "root")
    table = Table([process(10, name="engine"), process(11)])
    for _look in range(20):
        assert [ref.pid for ref in scan(table, None, None).processes] == [10]
    assert sum(limits) < _selection.LINE_READING + 20 * 0.11


@pytest.mark.parametrize("name", ["system.slice", "user.slice", "x.target", "x.socket", "dev-sda.device"])
def test_units_that_hold_more_than_a_service_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=r"its name must end in \.service or \.scope"):
        _selection.select({"unit": name})
    with pytest.raises(UsageError, match=r"its name must end in \.service$"):
        _selection.select({"unit": name}, (".service",))


@pytest.mark.parametrize(
    "name", ["init.scope", "session-7.scope", "user@0.service", "user@0", "systemd-logind.service"]
)
def test_sessions_and_the_host_itself_are_refused(name: str) -> None:
    with pytest.raises(_selection.Refused, match="holds the sessions of users or this host itself"):
        _selection.select({"unit": name})
