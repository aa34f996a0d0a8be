# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A wait as text for people: where it stands, and what it found."""

from __future__ import annotations

import re
import typing as t

__all__ = ("changed", "key", "line", "lines", "span", "stage", "subject")

Live = t.Mapping[str, t.Any]
Key = t.List[t.Any]

# What is waited for when the log tells no phase, by the tier that is missing.
STAGES = {
    "unit": "waiting for the unit",
    "listener": "starting, the port is not open",
    "health": "the port is open, not healthy yet",
    "model": "healthy, the model is not listed yet",
    "generation": "the model is listed, waiting for a token",
}
ASKING = 1.0  # seconds without an answer that are worth a word
QUIET = 15.0  # seconds without movement that are worth a word
TAIL = 10
UNLISTED = 120  # characters of what is said of a model that is not listed


def subject(params: t.Mapping[str, t.Any]) -> str:
    """What a line calls that which is waited for."""
    unit = str(params.get("unit") or "")
    unit = unit[: -len(".service")] if unit.endswith(".service") else unit
    return str(params.get("service") or unit or _address(str(params.get("url") or "")))


def _address(url: str) -> str:
    """A URL without what may be a secret in it. The host refuses one with a user or a query, but it is asked later."""
    # A password may hold any character, so where it ends cannot be told.
    return "" if "@" in url else re.split("[?#]", url, maxsplit=1)[0]


def span(seconds: float) -> str:
    """A time as people say it."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return "%d h %02d m" % (hours, minutes)
    return "%d m %02d s" % (minutes, whole % 60) if minutes else "%d s" % whole


def stage(live: Live) -> str:
    """What goes on, by the log as long as the port is closed, then by the tier that is missing."""
    phase, missing = str(live.get("phase") or ""), str(live.get("missing") or "")
    if missing in ("listener", "health") and phase not in ("", "started"):
        return phase.replace("_", " ")
    if (live.get("asking") or 0.0) >= ASKING:
        return "asking for a token"
    if missing == "model" and live.get("unlisted"):
        return str(live["unlisted"])[:UNLISTED]
    return STAGES.get(missing, "ready")


def key(live: Live) -> Key:
    """What a change of is worth a line; the percentage is the last of it."""
    percent = live.get("percent") if _shows_percent(live) else None
    return [stage(live), live.get("restarts"), _still(live), None if percent is None else int(percent)]


def changed(before: t.Optional[t.Sequence[t.Any]], now: Key) -> str:
    """Whether there is something to tell: ``much``, ``little`` (it moves on as before) or nothing."""
    if before is None or list(before[:2]) != now[:2] or (now[2] and not before[2]):
        return "much"
    return "little" if list(before[2:]) != now[2:] else ""


def line(live: Live) -> str:
    """Where the wait stands, in one line."""
    head = stage(live)
    if _shows_percent(live):
        head += " %d %%" % int(live["percent"])
    elif (live.get("asking") or 0.0) >= ASKING:
        head += ", " + span(live["asking"])
    parts = [head]
    if live.get("memory") is not None:
        parts.append("%d MiB" % live["memory"])
    if live.get("restarts"):
        parts.append("restarted %s" % ("once" if live["restarts"] == 1 else "%d times" % live["restarts"]))
    parts.append(span(live.get("elapsed") or 0.0))
    text = " · ".join(parts)
    moved = live.get("moved")
    if moved is None:
        return text
    if _still(live):
        return text + ", nothing moved for %s (stalled at %s)" % (span(moved), span(live["stall_timeout"]))
    return text + ", moved %s ago" % span(moved)


def lines(result: t.Mapping[str, t.Any]) -> t.List[str]:
    """What there is to say of the end of a wait besides its own sentence."""
    found = []
    for tier in result.get("tiers") or ():
        word = {True: "reached", False: "not reached", None: "not judged"}[tier["reached"]]
        at = " at %s" % span(tier["at"]) if tier["at"] is not None else ""
        found.append("%-10s  %s%s%s" % (tier["name"], word, at, ": " + tier["detail"] if tier["detail"] else ""))
    cause = result.get("cause")
    if cause:
        found.append("cause: %s: %s" % (cause["kind"], cause["line"]))
        figures = cause.get("figures") or {}
        if figures:
            sizes = ["%s %g MiB" % (name[: -len("_mib")], size) for name, size in figures.items()]
            found.append("memory: " + ", ".join(sizes))
        found += ["holds the GPU: " + holder for holder in cause.get("holders") or ()]
    if result.get("verdict") != "ready":
        found += ["log: " + entry for entry in (result.get("log_tail") or [])[-TAIL:]]
    return found


def _shows_percent(live: Live) -> bool:
    """Whether the percentage is that of the stage which is shown."""
    return live.get("percent") is not None and live.get("missing") in ("listener", "health")


def _still(live: Live) -> bool:
    moved, stall = live.get("moved"), live.get("stall_timeout") or 0.0
    return moved is not None and moved >= max(min(QUIET, stall / 2), stall / 5)
