# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What hosts carry beyond Debian: nothing yet."""

from __future__ import annotations

from pathlib import Path

from .state import Host, Lab


def build(roles: list[str]) -> dict[str, list[Path]]:
    return {}


def configure(lab: Lab, host: Host) -> None:
    return None
