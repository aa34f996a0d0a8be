# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the hosts of an inventory answered to gpu_clear: one report, and the same as a table for a terminal.

A host that gave no answer, or none that can be understood, is never clear.
"""

from __future__ import annotations

import datetime
import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils._verdicts import GPU_WORDS, worst

from ._host_answers import NOISE, failed, plain, silent, some, visible

__all__ = ("report", "table")

SCHEMA = 1
HEADINGS = ("clear", "host", "gpu", "vendor", "verdict", "reason", "memory MiB", "holders")

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
    devices = [gpu["verdict"] for entry in entries.values() for gpu in entry["gpus"]]
    verdict = worst(words)
    bad = ["%s (%s)" % (visible(host), entry["verdict"]) for host, entry in entries.items() if not entry["ok"]]
    all_clear = "all GPUs of %d host%s are clear" % (len(entries), "" if len(entries) == 1 else "s")
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "verdict": verdict,
        "ok": verdict == "clear",
        "msg": "not every GPU is clear: %s" % ", ".join(some(bad)) if bad else all_clear,
        "counts": {"hosts": _counts(words), "gpus": _counts(devices)},
        "hosts": entries,
    }


def table(found: t.Mapping[str, t.Any]) -> t.List[str]:
    """A report as lines: the headings, a line a device, what there is to say of a whole host, the counts."""
    rows: t.List[t.List[str]] = [list(HEADINGS)]
    notes: t.Dict[int, str] = {}
    for host, entry in found["hosts"].items():
        for gpu in entry["gpus"]:
            rows.extend(_rows(visible(host), gpu))
        # What the devices do not show: no answer, no device, fewer than expected.
        if not entry["gpus"] or entry["verdict"] != worst(gpu["verdict"] for gpu in entry["gpus"]):
            notes[len(rows)] = "%s, %s" % (entry["verdict"], visible(entry["msg"]))
            rows.append([_mark(entry["verdict"]), visible(host)])
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(HEADINGS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([*cells, notes[number]] if number in notes else cells).rstrip())
    counts = found["counts"]
    return [*lines, "%s; %s" % (_count_text("host", counts["hosts"]), _count_text("GPU", counts["gpus"]))]


def _entry(result: t.Optional[Entry]) -> Entry:
    """The answer of one host. Whatever is not understood is an error."""
    unanswered = silent(result, gpus=[])
    if result is None or unanswered is not None:
        return unanswered or {}
    gpus = result.get("gpus") or []
    words = [result.get("verdict")] + [gpu.get("verdict") if isinstance(gpu, dict) else None for gpu in gpus]
    if not all(word in GPU_WORDS for word in words):
        return failed(result, gpus=[])
    verdict = worst(map(str, words))
    if result.get("failed") and verdict == "clear":
        verdict = "error"
    entry: Entry = {"verdict": verdict, "ok": verdict == "clear", "answered": True, "reason": "", "msg": ""}
    entry.update({key: value for key, value in result.items() if key not in NOISE and key not in entry})
    entry.update(reason=result.get("reason", ""), msg=str(result.get("msg", "")), gpus=gpus)
    entry["warnings"] = result.get("warnings", [])
    return {key: value for key, value in entry.items() if not key.startswith("_ansible")}


def _rows(host: str, gpu: Entry, above: str = "") -> t.Iterator[t.List[str]]:
    name = above + ("?" if gpu.get("index") is None else str(gpu["index"]))
    holders = [_holder(holder) for holder in gpu.get("holders") or []]
    if not holders and gpu["verdict"] != "clear":
        holders = [visible(gpu.get("detail") or "")]
    memory = "/".join("?" if gpu.get(key) is None else str(gpu[key]) for key in ("memory_used", "memory_total"))
    words = [str(gpu.get(key) or "") for key in ("vendor", "verdict", "reason")]
    yield [_mark(gpu["verdict"]), host, name, *map(visible, words), memory, "; ".join(holders) or "none"]
    for partition in gpu.get("partitions") or []:
        yield from _rows(host, partition, name + "/")


def _holder(holder: Entry) -> str:
    if holder.get("name") is None:
        parts = ["pid %s, not visible there" % holder.get("pid")]
    else:
        parts = ["pid %s %s" % (holder.get("pid"), holder["name"]), "user %s" % holder.get("user")]
        parts.append("unit %s" % (holder.get("unit") or "none"))
        if holder.get("container"):
            parts.append("container %s" % str(holder["container"])[:12])
    if holder.get("memory") is not None:
        parts.append("%s MiB" % holder["memory"])
    else:
        parts.append("only the node is open" if holder.get("kind") == "node" else "memory unknown")
    parts += [word for word in ("allowed", "foreign") if holder.get(word)]
    return visible(", ".join(parts))


def _mark(verdict: str) -> str:
    return "yes" if verdict == "clear" else "NO"


def _counts(words: t.Sequence[str]) -> t.Dict[str, int]:
    return {"all": len(words), **{word: words.count(word) for word in GPU_WORDS}}


def _count_text(noun: str, counts: t.Mapping[str, int]) -> str:
    parts = ["%d %s" % (counts[word], word) for word in GPU_WORDS if counts[word]]
    return "%d %s%s%s" % (counts["all"], noun, "" if counts["all"] == 1 else "s", ": " * bool(parts) + ", ".join(parts))
