# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One stop as a task or a person asks for it: from the options to the answer."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping

from . import _selection
from ._stop import Options, Stopper

__all__ = ["stop"]


def stop(
    params: Mapping[str, Any],
    check_mode: bool,
    tick: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Stop what the options select, or say what would be done. ``tick`` is called before each look."""
    if os.geteuid() != 0:
        warn("not run as root: processes of other users may not be found, and cannot be signalled")
    options = _options(params)
    selection = _selection.select(params)
    for text in selection.warnings:
        warn(text)
    if selection.scan is None:
        return _selection.nothing(selection)
    return Stopper(selection.what, selection.scan, options, unit=selection.unit, tick=tick).run(check_mode)


def _options(params: Mapping[str, Any]) -> Options:
    return Options(
        signal=params["signal"],
        grace=params["grace"],
        kill_grace=params["kill_grace"],
        timeout=params["timeout"],
        order=params["order"],
        protected=tuple(params["protected"]),
        allow_foreign_users=params["allow_foreign_users"],
        reset_failed=params["reset_failed"],
    )
