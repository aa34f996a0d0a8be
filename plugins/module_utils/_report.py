# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The report of a rollout: one JSON file on the controller, rewritten whole whenever a host is done."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import typing as t

from ._deadline import Deadline
from ._errors import ServingError

SCHEMA = 1
LOCK_TIMEOUT = 30.0

Entry = t.Dict[str, t.Any]


def entry(
    host: str,
    service: str,
    phases: t.Sequence[t.Mapping[str, t.Any]],
    ended: float,
    failure: t.Mapping[str, t.Any],
    details: t.Mapping[str, t.Any],
    next_command: str,
    remaining: t.Sequence[str] = (),
) -> Entry:
    """What one host did: each phase with its seconds, how it ended, and what to type when it did not end well.

    ``remaining`` are the hosts that this command names behind ``--limit``.
    """
    times = [float(phase["at"]) for phase in phases] + [float(ended)]
    rows = [
        {"name": phase["name"], "seconds": round(times[index + 1] - times[index], 3)}
        for index, phase in enumerate(phases)
    ]
    outcome = "ok"
    if failure:
        outcome = "lost" if failure.get("lost") else "failed"
    found: Entry = {
        "host": host,
        "service": service,
        "outcome": outcome,
        "seconds": round(times[-1] - times[0], 3),
        "phases": rows,
        "details": dict(details),
    }
    if failure:
        found["failure"] = dict(failure)
        found["next_command"] = next_command
        found["remaining"] = list(remaining)
    return found


def _prune(hosts: t.Sequence[Entry]) -> None:
    """Name no host that came through in what is to be typed: partners of one that failed end before or after it."""
    through = {(done["host"], done["service"]) for done in hosts if done["outcome"] == "ok"}
    for told in hosts:
        before = told.get("remaining", [])
        after = [host for host in before if (host, told["service"]) not in through]
        if after != before:
            named, left = (" --limit " + shlex.quote(",".join(names)) for names in (before, after))
            told["remaining"], told["next_command"] = after, told["next_command"].replace(named, left, 1)


def add(path: str, rollout: str, action: str, new: Entry) -> t.Dict[str, t.Any]:
    """Put an entry into the report of its rollout. A report of another rollout is begun anew."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        folder, name = os.path.split(os.path.abspath(path))
        lock = os.open(os.path.join(folder, ".%s.lock" % name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ServingError('the report "%s" cannot be written: %s' % (path, error.strerror)) from error
    try:
        _wait_for(lock, path)
        report = _load(path)
        if report.get("rollout") != rollout:
            report = {"schema": SCHEMA, "rollout": rollout, "action": action, "hosts": []}
        same = (new["host"], new["service"])
        report["hosts"] = [old for old in report["hosts"] if (old["host"], old["service"]) != same] + [new]
        _prune(report["hosts"])
        temporary = "%s.%d" % (path, os.getpid())
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(report, handle, indent=2)
            handle.write("\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ServingError('the report "%s" cannot be written: %s' % (path, error.strerror)) from error
    finally:
        os.close(lock)
    return report


def table(report: t.Mapping[str, t.Any]) -> t.List[str]:
    """The report as lines for a terminal: a row a host, a column a phase."""
    hosts = report["hosts"]
    names: t.List[str] = []
    for host in hosts:
        names.extend(phase["name"] for phase in host["phases"] if phase["name"] not in names)
    rows = [["host", "service", "outcome"] + names + ["total"]]
    for host in hosts:
        seconds = {phase["name"]: "%.1f" % phase["seconds"] for phase in host["phases"]}
        rows.append(
            [host["host"], host["service"], host["outcome"]]
            + [seconds.get(name, "-") for name in names]
            + ["%.1f" % host["seconds"]]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _wait_for(lock: int, path: str) -> None:
    deadline = Deadline(LOCK_TIMEOUT)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline.expired:
                raise ServingError(
                    'the report "%s" cannot be written: another process has held its lock for %g s'
                    % (path, LOCK_TIMEOUT)
                ) from None
        deadline.sleep(0.05)


def _load(path: str) -> t.Dict[str, t.Any]:
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}
