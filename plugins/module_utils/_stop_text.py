# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A stop, or the plan of one, as text for people: who and why, what became of each, and who is left."""

from __future__ import annotations

import typing as t

__all__ = ["lines", "progress"]

Result = t.Mapping[str, t.Any]

HEAD = ("PID", "USER", "NAME", "ROLE", "FOUND BY")
PLANNED = ("STATE", "WILL GET", "COMMAND")
DONE = ("GOT", "OUTCOME", "SECONDS", "COMMAND")
SHOWN = 6  # processes in one step of a plan, and in a line of progress


def lines(result: Result, plan: bool) -> t.List[str]:
    """All there is to say but the verdict's own sentence."""
    found = _table(result.get("processes") or (), plan)
    if result.get("unlisted"):
        found.append("and %d more" % result["unlisted"])
    if plan and result.get("plan"):
        found += ["", *_steps(result["plan"])]
    notes = [*_survivors(result), *_zombies(result), *_suspects(result), *_unit(result)]
    return found + ([""] if found and notes else []) + notes


def progress(members: t.Sequence[t.Any]) -> str:
    """Who is still waited for, in one line."""
    if not members:
        return "nobody is left, looking again"
    named = ['%d "%s"%s' % (m.process.pid, m.process.name, _got(m.signals)) for m in members[:SHOWN]]
    more = ", and %d more" % (len(members) - SHOWN) if len(members) > SHOWN else ""
    return "%d left: %s%s" % (len(members), ", ".join(named), more)


def _got(signals: t.Sequence[str]) -> str:
    return " (%s)" % ", ".join(signals) if signals else ""


def _table(processes: t.Iterable[Result], plan: bool) -> t.List[str]:
    rows: t.List[t.Tuple[str, ...]] = []
    for process in processes:
        who = (str(process["pid"]), process["user"], process["name"], process["role"], ", ".join(process["found_by"]))
        command = process.get("command", "")
        if plan:
            # What is left alone has its outcome already.
            then = ", ".join(process["signals"]) if process["outcome"] == "planned" else process["outcome"]
            rows.append((*who, process["state"], then, command))
        else:
            seconds = "" if process["seconds"] is None else "%.1f" % process["seconds"]
            rows.append((*who, ", ".join(process["signals"]) or "nothing", process["outcome"], seconds, command))
    if not rows:
        return []
    table = [(*HEAD, *(PLANNED if plan else DONE)), *rows]
    widths = [max(len(row[n]) for row in table) for n in range(len(table[0]))]
    # A command line is as long as it likes: it is the last.
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]


def _steps(plan: t.Sequence[Result]) -> t.List[str]:
    found = ["Steps, each only for those that are left by then:"]
    for step in plan:
        target = ' "%s"' % step["target"] if step.get("target") else ""
        what = {
            "systemd_stop": "systemd stops the unit%s" % target,
            "container_stop": "%s stops the container%s" % (step.get("manager") or "its manager", target),
        }.get(step["action"], "%s" % step["signal"])
        named = ['%d "%s"' % (process["pid"], process["name"]) for process in step["processes"][:SHOWN]]
        if len(step["processes"]) > SHOWN:
            named.append("and %d more" % (len(step["processes"]) - SHOWN))
        found.append(
            "%3d. %s, then up to %g s: %s" % (step["step"], what, step["wait"], ", ".join(named) or "no process")
        )
    return found


def _survivors(result: Result) -> t.Iterator[str]:
    for process in result.get("survivors") or ():
        text = 'left: %d "%s" (user %s), %s, state %s' % (
            process["pid"],
            process["name"],
            process["user"],
            process["outcome"],
            process["state"],
        )
        if process.get("why"):
            text += ": " + process["why"]
        yield text + (", waits in %s" % process["wchan"] if process.get("wchan") else "")
        if process.get("stack"):
            yield "  kernel stack: " + ", ".join(process["stack"])


def _zombies(result: Result) -> t.Iterator[str]:
    for process in result.get("zombies") or ():
        yield 'dead, holds nothing: %d "%s", not collected by its parent %d "%s"' % (
            process["pid"],
            process["name"],
            process["parent"],
            process["parent_name"],
        )


def _suspects(result: Result) -> t.Iterator[str]:
    for process in result.get("suspects") or ():
        yield 'not ended, look at it: %d "%s" (user %s, unit %s): %s' % (
            process["pid"],
            process["name"],
            process["user"],
            process["unit"] or "none",
            process["why"],
        )


def _unit(result: Result) -> t.Iterator[str]:
    state = result.get("unit_state")
    if state:
        yield 'unit "%s": %s (%s), result %s' % (
            state["name"],
            state["active_state"],
            state["sub_state"],
            state["result"] or "unknown",
        )
