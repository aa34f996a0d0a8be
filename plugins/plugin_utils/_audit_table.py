# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the hosts of an inventory answered to unit_audit: one report, and the same as a table for a terminal.

A host that gave no answer, or none that can be understood, is never clean.
"""

from __future__ import annotations

import datetime
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils._audit_rules import SEVERITIES

from ._host_answers import NOISE, failed, plain, silent, some, visible

__all__ = ("report", "table")

SCHEMA = 1
WORDS = ("clean", "minor", "flawed", "not_found", "unknown", "error")
GOOD = ("clean", "minor")
HEADINGS = ("ok", "host", "unit", "severity", "rule", "is now", "cure")

Entry = t.Dict[str, t.Any]


def report(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], asked: t.Collection[str], variable: str) -> Entry:
    """The answers of ``hosts``, in their order, from what each registered as ``variable``.

    ``asked`` are those that were still in the play: what others hold in the variable is of an earlier one.
    """
    entries: t.Dict[str, Entry] = {}
    living = set(asked)
    for host in hosts:
        result = hostvars[host].get(variable) if host in living else None
        if result is None or not result.get("skipped"):
            entries[str(host)] = _entry(plain(result))
    words = [entry["verdict"] for entry in entries.values()]
    units = [unit for entry in entries.values() for unit in entry["units"]]
    left = [row["severity"] for unit in units for row in unit["findings"] if not row["fixed"]]
    verdict = max(words, key=WORDS.index) if words else "unknown"
    bad = ["%s (%s)" % (visible(host), entry["verdict"]) for host, entry in entries.items() if not entry["ok"]]
    good = "%s: nothing that fails the audit" % _count("unit", len(units))
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "verdict": verdict,
        "ok": verdict in GOOD,
        "msg": "not every unit is in order: %s" % ", ".join(some(bad)) if bad else good,
        "counts": {
            "hosts": _counts(words, WORDS),
            "units": _counts([unit["verdict"] for unit in units], WORDS),
            "findings": _counts(left, SEVERITIES),
        },
        "hosts": entries,
    }


def table(found: t.Mapping[str, t.Any]) -> t.List[str]:
    """A report as lines: the headings, a line a finding, what there is to say of a whole host or unit, the counts."""
    rows: t.List[t.List[str]] = [list(HEADINGS)]
    notes: t.Dict[int, str] = {}
    for host, entry in found["hosts"].items():
        name = visible(host)
        for unit in entry["units"]:
            mark, unit_name = _mark(unit["verdict"]), visible(unit["name"])
            for row in unit["findings"]:
                rows.append([mark, name, unit_name, *_finding(row)])
            if not unit["findings"]:
                notes[len(rows)] = visible(unit["reason"]) or unit["verdict"]
                rows.append([mark, name, unit_name])
        if not entry["units"]:
            notes[len(rows)] = "%s, %s" % (entry["verdict"], visible(entry["msg"]))
            rows.append([_mark(entry["verdict"]), name])
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(HEADINGS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([*cells, notes[number]] if number in notes else cells).rstrip())
    counts = found["counts"]
    parts = [_text("host", counts["hosts"], WORDS), _text("unit", counts["units"], WORDS)]
    return [*lines, "; ".join([*parts, _text("finding", counts["findings"], SEVERITIES)])]


def _entry(result: t.Optional[Entry]) -> Entry:
    """The answer of one host. Whatever is not understood is an error."""
    unanswered = silent(result, units=[])
    if result is None or unanswered is not None:
        return unanswered or {}
    units = result.get("units")
    if result.get("verdict") not in WORDS[:-1] or not isinstance(units, list) or not all(map(_is_unit, units)):
        return failed(result, units=[])
    verdict = str(result["verdict"])
    entry: Entry = {"verdict": verdict, "ok": verdict in GOOD, "answered": True, "reason": "", "msg": ""}
    entry.update({key: value for key, value in result.items() if key not in (*NOISE, "diff") and key not in entry})
    entry.update(msg=str(result.get("msg", "")), changed=bool(result.get("changed")), units=units)
    entry["warnings"] = result.get("warnings", [])
    return {key: value for key, value in entry.items() if not key.startswith("_ansible")}


def _is_unit(value: t.Any) -> bool:
    rows = value.get("findings") if isinstance(value, dict) else None
    if not isinstance(rows, list) or value.get("verdict") not in WORDS:
        return False
    return all(isinstance(row, dict) and row.get("severity") in SEVERITIES for row in rows)


def _finding(row: Entry) -> t.List[str]:
    cure = "cured by a drop-in" if row.get("fixed") else row.get("held_up") or row.get("cure") or ""
    value = "%s=%s" % (row["directive"], row["value"]) if row.get("directive") else row.get("value") or ""
    return [visible(text) for text in (row["severity"], row.get("rule") or "", value, cure)]


def _mark(verdict: str) -> str:
    return "yes" if verdict in GOOD else "NO"


def _counts(words: t.Sequence[str], known: t.Sequence[str]) -> t.Dict[str, int]:
    return {"all": len(words), **{word: words.count(word) for word in known}}


def _count(noun: str, count: int) -> str:
    return "%d %s%s" % (count, noun, "" if count == 1 else "s")


def _text(noun: str, counts: t.Mapping[str, int], known: t.Sequence[str]) -> str:
    parts = ["%d %s" % (counts[word], word.replace("_", " ")) for word in known if counts[word]]
    return _count(noun, counts["all"]) + ": " * bool(parts) + ", ".join(parts)
