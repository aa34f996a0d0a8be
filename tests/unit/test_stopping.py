# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is said beside the answer of a stop."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _selection, _stopping, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._systemd import NoAnswer, UnitState
from host import Host


@pytest.mark.parametrize("check_mode", [True, False])
@pytest.mark.parametrize(("socket", "warned"), [("active", 1), ("inactive", 0), (None, 0)])
def test_what_may_start_the_unit_again_is_named(
    monkeypatch: pytest.MonkeyPatch, socket: t.Optional[str], warned: int, check_mode: bool
) -> None:
    host = Host(monkeypatch, raw={"TriggeredBy": "qwen.timer qwen.socket"})

    def show(unit: str, timeout: float = 10.0) -> UnitState:
        if unit == "qwen.socket":
            if socket is None:
                raise NoAnswer("no answer")
            return UnitState(unit, load_state="loaded", active_state=socket)
        return UnitState(unit, load_state="loaded") if unit == "qwen.timer" else host.show(unit)

    monkeypatch.setattr(_systemd, "show", show)
    said: t.List[str] = []
    chosen = _selection.Selection('the unit "qwen.service"', _selection.by_unit(None), "qwen.service")
    result = _stopping.carry_out(chosen, _stopping.Options(), check_mode, warn=said.append)
    assert result["unit_state"]["triggered_by"] == ["qwen.socket", "qwen.timer"]
    text = 'the unit "qwen.service" may be started again by "qwen.socket", which is active: stop that first'
    assert said == [text] * warned
