# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A restart by systemctl leaves every worker of the life before, and the new life runs beside them."""

from __future__ import annotations

import json
import typing as t

SIX = {"plain", "own_session", "double", "daemon", "deaf", "scope"}


def look(host: t.Any, moment: str) -> t.Dict[str, t.Any]:
    return t.cast(t.Dict[str, t.Any], json.loads(host.file("/var/tmp/%s.json" % moment).content_string))


def living(found: t.Dict[str, t.Any]) -> t.Set[str]:
    return {name for name, what in found.items() if what["alive"]}


def test_all_were_there(host: t.Any) -> None:
    assert living(look(host, "before")) == SIX | {"front", "editor", "neighbour"}


def test_only_the_front_process_has_ended(host: t.Any) -> None:
    assert living(look(host, "restarted")) == SIX | {"editor", "neighbour"}


def test_the_new_life_runs_beside_them(host: t.Any) -> None:
    assert host.check_output("systemctl is-active engine") == "active"
    assert int(host.check_output("systemctl show -p MainPID --value engine")) != look(host, "before")["front"]["pid"]
