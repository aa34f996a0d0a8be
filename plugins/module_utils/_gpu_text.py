# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A reading of the GPUs as a table for people."""

from __future__ import annotations

import typing as t

from ._gpu_device import Device, Holder

__all__ = ["lines"]

HEAD = ("GPU", "VENDOR", "VERDICT", "USED MiB", "TOTAL MiB", "REASON")


def lines(devices: t.Sequence[Device]) -> t.List[str]:
    """The table: a line for each device and partition, and below it a line for each holder. None without devices."""
    rows: t.List[t.Tuple[t.Tuple[str, ...], t.Sequence[str]]] = []
    for device in devices:
        rows.append((_cells(device, ""), _notes(device)))
        for part in device.partitions:
            rows.append((_cells(part, "%s/" % device.index), _notes(part)))
    if not rows:
        return []
    widths = [max(len(cells[n]) for cells in [HEAD, *(row[0] for row in rows)]) for n in range(len(HEAD))]
    found = [_line(HEAD, widths)]
    for cells, notes in rows:
        found.append(_line(cells, widths))
        found.extend("  " + note for note in notes)
    return found


def _line(cells: t.Sequence[str], widths: t.Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()


def _cells(device: Device, before: str) -> t.Tuple[str, ...]:
    name = str(device.asked if device.index is None else device.index)
    memory = _mib(device.memory_used), _mib(device.memory_total)
    return (before + name, device.vendor, device.verdict, *memory, device.reason)


def _mib(value: t.Optional[int]) -> str:
    return "unknown" if value is None else str(value)


def _notes(device: Device) -> t.List[str]:
    notes = [*map(_holder, device.holders), *("contradiction: " + text for text in device.disagreements)]
    return notes if device.holders or device.verdict == "clear" or device.partitions else [device.detail, *notes]


def _holder(holder: Holder) -> str:
    text = str(holder)
    notes = [holder.kind, "by " + " and ".join(holder.source)] if holder.listed else []
    notes += [word for word in ("allowed", "foreign") if getattr(holder, word)]
    return "%s (%s)" % (text, ", ".join(notes)) if notes else text
