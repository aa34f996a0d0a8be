# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is said of a stop: the plan before it, the verdict and every process after it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from . import _inside, _ownership, _processes
from ._accounts import group_name
from ._survey import Member

if TYPE_CHECKING:
    from ._stop import Stopper

__all__ = ["beginning", "describe", "forecast", "judge", "plan", "result", "settle"]

MOST_LISTED = 1000  # processes in an answer; what forks all the time may have left tens of thousands

MOST_WORDS, MOST_LETTERS = 4, 100  # of a command line
LINES = 1.0  # seconds that reading command lines may take
SECRET = re.compile(r"key|token|secret|passw|auth|credential|bearer|://[^/]*@|^(?:sk|hf|ghp)[-_]", re.IGNORECASE)
REMEDIES = (
    ("unkillable", "what does not end after SIGKILL waits in a driver or a file system: see wchan and stack"),
    ("denied", "run as root, or with become"),
    ("survived", "give it more time: grace, kill_grace, timeout"),
    ("foreign", "what is not proved to belong to it is never signalled: if it does, stop it by its pid"),
)


def describe(stop: Stopper) -> None:
    """Read how the command line of each begins: names alone, such as python3, do not tell whose processes they are."""
    members = list(stop.survey.members.values())[:MOST_LISTED]
    lines = _inside.command_lines((member.ref for member in members), LINES)
    for member in members:
        member.command = beginning(lines.get(member.ref, ""))


def beginning(line: str) -> str:
    """The first words of a command line; none of a key, which may stand in one."""
    words: list[str] = []
    for word in line.split()[:MOST_WORDS]:
        if SECRET.search(word) or (word.startswith("-") and word != "-m"):
            break  # what follows an option may be a key, whatever the option is called
        words.append(word)
    return " ".join(words)[:MOST_LETTERS]


def plan(stop: Stopper) -> list[dict[str, Any]]:
    """Who is asked by whom, in which order and with which signal, as the first look shows it."""
    steps: list[dict[str, Any]] = []
    left = stop.survey.ours()

    def step(
        action: str,
        word: str | None,
        target: str | None,
        wait: float,
        members: list[Member],
        manager: str | None = None,
    ) -> list[Member]:
        """Add a step, and say who is left for the next."""
        refs = {member.ref for member in members}
        steps.append(
            {
                "step": len(steps) + 1,
                "action": action,
                "signal": word,
                "target": target,
                "manager": manager,
                "wait": round(wait, 1),
                "processes": [member.brief() for member in members[:MOST_LISTED]],
            }
        )
        return [member for member in left if member.ref not in refs]

    state = stop.state
    if state is not None and not state.at_rest:
        asked = [member for member in left if stop.survey.falls_to_systemd(member)]
        left = step("systemd_stop", None, state.name, stop.before_kill(stop.grace), asked, "systemd")
        first = False
    else:
        first = stop.options.order == "parent_first" and any(not member.top for member in left)
    top_wait, rest_wait = stop.before_kill(stop.grace, keep=stop.rest_grace), stop.before_kill(stop.rest_grace)
    for name, container in stop.survey.containers.items():
        asked = [member for member in left if member.container == name and container.stop]
        if asked or container.restarts:
            wait = stop.before_kill(stop.grace) if first else rest_wait
            left = step("container_stop", None, container.name, wait, asked, container.manager)
    if first:
        tops = [member for member in left if member.top]
        if tops:
            left = step("signal", stop.options.signal, None, top_wait, tops)
    if left:
        step("signal", stop.options.signal, None, rest_wait, left)
    if steps:
        wait = stop.options.kill_grace if stop.options.timeout is None else stop.options.timeout
        step("signal", "KILL", None, min(stop.options.kill_grace, wait), stop.survey.ours())
    return steps


def forecast(stop: Stopper) -> dict[str, Any]:
    """The answer of check mode."""
    busy = stop.state is not None and not stop.state.at_rest
    ours = stop.survey.ours()
    restarts = any(container.restarts for container in stop.survey.containers.values())
    failed = stop.options.reset_failed and stop.state is not None and stop.state.active_state == "failed"
    stop.changed = bool(busy or ours or failed or restarts)
    for step in reversed(stop.plan[:-1]):
        pids = {process["pid"] for process in step["processes"]}
        for member in ours:
            if member.process.pid in pids:
                member.signals = [step["manager"] or step["signal"]]
    for member in stop.survey.members.values():
        if member.standing != "ours":
            member.outcome = member.standing
    if not busy and not ours and not restarts:
        stop.reset = bool(failed)
        return judge(stop, check_mode=True)
    names = ", ".join('%d "%s"' % (m.process.pid, m.process.name) for m in ours[:MOST_LISTED])
    text = "%s would be stopped: %s" % (stop.what, names or "it owns no process")
    left = [m for m in stop.survey.members.values() if m.outcome == "foreign" and m.ref in stop.survey.living]
    if left:
        names = ", ".join('%d "%s" (foreign)' % (m.process.pid, m.process.name) for m in left[:MOST_LISTED])
        return result(
            stop, "survivors", "%s; but %d would be left: %s; %s" % (text, len(left), names, dict(REMEDIES)["foreign"])
        )
    return result(stop, "stopped", text)


def settle(stop: Stopper) -> list[Member]:
    """Write down what became of everybody, as the last look showed it; who is left against the caller's will."""
    left = []
    for member in stop.survey.members.values():
        if member.ref not in stop.survey.living:
            continue
        if member.standing != "ours":
            member.outcome = member.standing
        elif member.denied and "KILL" not in member.signals:
            member.outcome = "denied"
        elif "KILL" in member.signals and not stop.restarted:
            member.outcome = "unkillable"
        else:
            member.outcome = "survived"
        if member.outcome not in ("protected", "allowed"):
            left.append(member)
    return left


def judge(stop: Stopper, check_mode: bool = False) -> dict[str, Any]:
    """The answer after a stop, from what its last look showed."""
    survivors = settle(stop)
    unkillable = any(member.outcome == "unkillable" for member in survivors)
    awake = stop.state is not None and not stop.state.at_rest
    if survivors or awake or stop.managers.doubt():
        return result(stop, "unkillable" if unkillable else "survivors", _complaint(stop, survivors, awake))
    ended = sum(1 for m in stop.survey.members.values() if m.outcome in ("ended", "gone"))
    if ended or (stop.changed and not stop.reset):
        return result(stop, "stopped", "%s is stopped: %s" % (stop.what, _ended(ended)))
    return result(stop, "absent", "there was nothing to stop: %s" % _nothing(stop, check_mode))


def _ended(number: int) -> str:
    if number == 0:
        return "it owned no process"
    return "1 process ended, none is left" if number == 1 else "%d processes ended, none is left" % number


def _nothing(stop: Stopper, check_mode: bool) -> str:
    state = stop.state
    if state is not None and not state.found:
        return "%s does not exist on this host, and owns no process" % stop.what
    text = "%s owns no process" % stop.what
    if stop.reset:
        return text + ", its failed state %s reset" % ("would be" if check_mode else "was")
    if state is not None and state.active_state == "failed":
        return text + ", and systemd calls it failed (%s): reset_failed clears that" % (state.result or "unknown")
    return text


def _complaint(stop: Stopper, survivors: list[Member], awake: bool) -> str:
    if stop.restarted:
        return (
            "%s was started again by somebody else while it was being stopped: see systemctl list-jobs, "
            "its timers and sockets, then stop it again" % stop.what
        )
    state = stop.state
    if not survivors and not awake:
        return "%s is stopped, but %s" % (stop.what, stop.managers.doubt())
    if not survivors and state is not None:
        doing = ", with a job of systemd's waiting" if state.job else ""
        return "%s did not come to rest: systemd says it is %s (%s)%s" % (
            stop.what,
            state.active_state,
            state.sub_state,
            doing,
        )
    named = ", ".join('%d "%s" (%s)' % (m.process.pid, m.process.name, m.outcome) for m in survivors[:MOST_LISTED])
    words = {member.outcome for member in survivors}
    text = "%d of %d processes of %s are left%s: %s" % (
        len(survivors),
        len(stop.survey.members),
        stop.what,
        ", and the unit is not at rest" if awake else "",
        named,
    )
    return "; ".join([text, *(remedy for word, remedy in REMEDIES if word in words)])


def result(stop: Stopper, verdict: str, msg: str) -> dict[str, Any]:
    """The answer, whatever it is: the same keys for all."""
    members = list(stop.survey.members.values())
    left = [m for m in members if m.outcome in ("foreign", "denied", "unkillable", "survived")]
    # Where one waits that could end tells nothing.
    stuck = (m.ref for m in left[:MOST_LISTED] if m.outcome == "unkillable" or m.process.state == "D")
    stacks = _inside.kernel_stacks(stuck)
    survivors = [
        dict(m.as_result(), why=_doubt(m), wchan=_inside.waiting_in(m.ref), stack=stacks.get(m.ref, []))
        for m in left[:MOST_LISTED]
    ]
    if len(members) > MOST_LISTED:
        refs = {member.ref for member in left}
        members = left + [member for member in members if member.ref not in refs]
    return {
        "verdict": verdict,
        "changed": stop.changed,
        "msg": msg,
        "plan": stop.plan,
        "processes": [member.as_result() for member in members[:MOST_LISTED]],
        "unlisted": max(0, len(members) - MOST_LISTED),
        "survivors": survivors,
        "suspects": [_suspect(stop, process) for process in list(stop.survey.suspects.values())[:MOST_LISTED]],
        "zombies": list(stop.survey.zombies.values())[:MOST_LISTED],
        "marks": sorted(group_name(gid) or str(gid) for gid in stop.survey.marks),
        "unit_state": stop.state.as_result() if stop.state is not None else None,
        "elapsed": round(stop.elapsed, 2),
    }


def _doubt(member: Member) -> str:
    """Why somebody is left alone, empty for all others."""
    if member.outcome != "foreign":
        return ""
    unit, container = _ownership.attribute(member.process)
    place = 'the container "%s"' % container if container else 'the unit "%s"' % unit if unit else "no unit"
    return 'only %s speaks for it, and it runs as the user "%s" in %s' % (
        " and ".join(member.found_by),
        member.process.user,
        place,
    )


def _suspect(stop: Stopper, process: _processes.Process) -> dict[str, Any]:
    unit = _ownership.attribute(process)[0]
    why = "it bears a name of the same engine and has lost its parent, but nothing ties it to %s" % stop.what
    if stop.state is not None and stop.state.name in process.cgroup.split("/"):
        why = "the manager %s of a user runs a unit of this name: stop it there" % (unit or "in a container")
    return {
        "pid": process.pid,
        "create_time": round(process.create_time, 2),
        "name": process.name,
        "user": process.user,
        "unit": unit,
        "why": why,
    }
