# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The page about the architecture names every room of the library, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_rooms_is_that_of_the_library() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| room | subject |", 1)[1].split("\n\n", 1)[0]
    named = [word for row in table.splitlines()[2:] for word in re.findall(r"`(_\w+)`", row.split("|")[1])]
    rooms = {path.stem for path in (ROOT / "plugins" / "module_utils").glob("_*.py")} - {"__init__"}
    assert set(named) == rooms
    assert len(named) == len(rooms)
