# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What units and systemd wrote to the journal, as records; each call bounded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from . import _systemd
from ._errors import ServingError

__all__ = ["Record", "journal", "records"]

JOURNAL_LINES = 5000
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")


@dataclass
class Record:
    """One line of the journal."""

    cursor: str
    realtime: int
    monotonic: int
    invocation: str
    pid: int
    priority: int
    message: str


def _text(value: Any) -> str:
    """A field of the journal: text, an array of bytes where it is not clean text, or several of either."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(item & 0xFF for item in value).decode("utf-8", "replace")
        return "\n".join(_text(item) for item in value)
    return ""


def records(text: str) -> list[Record]:
    """The records of ``journalctl --output=json``; a progress bar becomes one record a step."""
    found = []
    for line in text.split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        message = ESCAPE_SEQUENCE.sub("", _text(entry.get("MESSAGE")))
        parts = [part.rstrip() for part in re.split(r"[\r\n]+", message)]
        for part in [part for part in parts if part] or [""]:
            found.append(
                Record(
                    cursor=_text(entry.get("__CURSOR")),
                    realtime=_systemd.number(_text(entry.get("__REALTIME_TIMESTAMP"))),
                    monotonic=_systemd.number(_text(entry.get("__MONOTONIC_TIMESTAMP"))),
                    invocation=_text(entry.get("_SYSTEMD_INVOCATION_ID")) or _text(entry.get("INVOCATION_ID")),
                    pid=_systemd.number(_text(entry.get("_PID"))),
                    priority=_systemd.number(_text(entry.get("PRIORITY", "6"))),
                    message=part,
                )
            )
    return found


def journal(
    unit: str,
    invocation: str | None = None,
    after_cursor: str | None = None,
    lines: int | None = None,
    timeout: float = 10.0,
) -> list[Record]:
    """What the unit and systemd about the unit wrote, oldest first.

    Without a cursor these are the newest lines, after a cursor the ones that follow it; at most ``lines`` either way.
    """
    unit = _systemd.unit_name(unit)
    # --all, since a long field would otherwise be an empty one.
    arguments = [
        "journalctl",
        "--no-pager",
        "--quiet",
        "--all",
        "--output=json",
        "--lines=%d" % (lines or JOURNAL_LINES),
    ]
    if after_cursor:
        arguments.append("--after-cursor=" + after_cursor)
    if invocation:
        arguments += ["_SYSTEMD_INVOCATION_ID=" + invocation, "+", "INVOCATION_ID=" + invocation, "UNIT=" + unit]
    else:
        arguments += ["--unit=" + unit]
    rc, out, err = _systemd.call(arguments, timeout)
    if rc != 0:
        raise ServingError('the journal of the unit "%s" cannot be read: %s' % (unit, _systemd.said(rc, err)))
    return records(out)
