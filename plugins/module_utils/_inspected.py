# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a container manager says of a container, and whether the container is the unit's own."""

from __future__ import annotations

import calendar
import json
import re
import time
from typing import NamedTuple

from ._accounts import account
from ._clients import Client, same_image
from ._places import containers_of
from ._processes import Table
from ._systemd import SLACK, UnitState

__all__ = ["Facts", "elsewhere", "in_last_life", "not_his", "parse", "refusal"]

LAG = 4.0  # seconds between a client's end and what its daemon writes down


class Facts(NamedTuple):
    """What a manager says of a container."""

    id: str
    name: str
    created: float
    started: float
    pid: int
    image: str
    restarted: bool  # its manager may have started it by itself


def refusal(client: Client, facts: Facts, state: UnitState, now: float) -> str:
    """Why a container of that name is not the unit's own, empty when it is.

    One that the unit creates is its own when it was created in the unit's last life, or in an earlier one, which its
    image tells: a new life fails as long as the old container bears the name. One that the unit only starts is its own
    unless somebody else must have started it.
    """
    ended = state.ended
    if client.verb == "run":
        if not in_last_life(state, facts.created, now) and not same_image(client.image, facts.image):
            return 'it was not created by the unit in its last life, and its image is "%s", not "%s"' % (
                facts.image,
                client.image or "one that the unit tells",
            )
    elif state.began is None:
        return "systemd knows of no life of the unit since the host was started, so somebody else started it"
    late = ended is not None and _since_boot(facts.started, now) > ended.earliest + SLACK + LAG
    if late and not facts.restarted:
        return "it was started after the unit's main process had ended, and no restart policy did that"
    return ""


def _since_boot(moment: float, now: float) -> float:
    """A time of the wall clock, which says ``now`` at this moment, in seconds since boot."""
    return moment - now + time.clock_gettime(time.CLOCK_BOOTTIME)


def in_last_life(state: UnitState, moment: float, now: float) -> bool:
    """Whether a time of the wall clock was while the unit's main process lived, or a daemon's lag after that."""
    return moment <= now + SLACK + LAG and state.in_last_life(_since_boot(moment, now), LAG)


def elsewhere(table: Table, state: UnitState, facts: Facts) -> str:
    """Why the container seems to run on another host, empty when its first process is in it here."""
    if facts.pid <= 0:
        return ""
    process = table.get(facts.pid) or Table.of([facts.pid], table.proc).get(facts.pid)
    inside = state.control_group not in ("", "/") and process is not None
    if process is not None and (
        facts.id in containers_of(process) or (inside and process.cgroup.startswith(state.control_group + "/"))
    ):
        return ""
    return "its process %d is not in it on this host" % facts.pid


def not_his(table: Table, facts: Facts, uid: int) -> str:
    """Why what a user says of the container proves nothing, empty when all in it is his own."""
    ranges = [(uid, 1), *_subordinate(uid)]
    for process in table:
        if facts.id in containers_of(process) and not any(first <= process.uid < first + n for first, n in ranges):
            return 'its process %d "%s" is of the user "%s"' % (process.pid, process.name, process.user)
    return ""


def _subordinate(uid: int) -> list[tuple[int, int]]:
    known = account(uid)
    if known is None:
        return []
    try:
        names = (str(uid), known.pw_name)
        with open("/etc/subuid", encoding="utf-8", errors="replace") as stream:
            rows = [line.strip().split(":") for line in stream]
        return [(int(row[1]), int(row[2])) for row in rows if len(row) == 3 and row[0] in names]
    except (OSError, ValueError):
        return []


def parse(text: str) -> Facts | None:
    try:
        rows = json.loads(text)
        row = rows[0]
        found, policy = row["State"], (row.get("HostConfig") or {}).get("RestartPolicy") or {}
        identity = str(row["Id"])
        if len(rows) != 1 or not re.match(r"[0-9a-f]{64}\Z", identity):
            return None
        runs = bool(found.get("Running")) or bool(found.get("Paused"))
        restarting = bool(found.get("Restarting"))
        return Facts(
            id=identity,
            name=str(row.get("Name") or "").lstrip("/"),
            created=_moment(str(row["Created"])),
            started=_moment(str(found.get("StartedAt") or "")),
            pid=int(found.get("Pid") or 0) if runs else 0,
            image=str(row.get("ImageName") or (row.get("Config") or {}).get("Image") or ""),
            restarted=restarting or (runs and str(policy.get("Name") or "no") != "no"),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _moment(text: str) -> float:
    """Seconds of a time such as 2026-01-02T03:04:05.678901234+01:00."""
    match = re.match(r"(\d+)-(\d+)-(\d+)[T ](\d+):(\d+):(\d+)(\.\d+)?\s?(Z|([+-])(\d\d):?(\d\d))?", text)
    if match is None:
        return 0.0
    numbers = tuple(int(part) for part in match.groups()[:6])
    offset = (int(match.group(10)) * 3600 + int(match.group(11)) * 60) if match.group(9) else 0
    offset = -offset if match.group(9) == "-" else offset
    return calendar.timegm((*numbers, 0, 0, 0)) + float(match.group(7) or 0) - offset
