# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A wait as text for people: where it stands, and what it found."""

from __future__ import annotations

import re
import typing as t

__all__ = ("Named", "answer", "changed", "key", "line", "lines", "named", "sentence", "span", "stage", "subject")

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

# How the end of a wait is said: each has its verdict in it.
IS = {
    "ready": "is ready",
    "progressing": "is progressing",
    "stalled": "is stalled",
    "restart_loop": "is in a restart_loop",
    "dead": "is dead",
    "wrong_server": "has a wrong_server",
    "wedged": "is wedged",
    "auth_error": "has an auth_error",
    "unknown": "is in an unknown state",
}
NEXT = "; next: "
BELOW_THE_ENGINE = ("", "unit", "listener")  # tiers above which the log tells no more where it is
WIDEST = 400  # characters of a reason; the whole of it is in the result
YOUNG = 1.0  # seconds between the sign that moved last and others that are told with it


class Named(t.NamedTuple):
    """What is waited for, by the names that people have for it."""

    service: str = ""
    unit: str = ""
    url: str = ""
    log_path: str = ""
    defined: bool = False  # whether the host has a definition of the service
    keyed: bool = False  # whether a key was given
    once: bool = False  # whether it was looked at once, and not waited for

    def __str__(self) -> str:
        if self.service and self.unit:
            return 'the service "%s" (unit "%s")' % (self.service, self.unit)
        if self.unit:
            return 'the unit "%s"' % self.unit
        at = 'the engine at "%s"' % self.url if self.url else "the engine"
        return 'the service "%s", %s,' % (self.service, at) if self.service else at

    @property
    def stop(self) -> str:
        """The command that stops it by proof."""
        return "gpuops stop " + (self.service if self.service and self.defined else "--unit " + self.unit)

    @property
    def log(self) -> str:
        """The command that shows what it has logged."""
        return "tail " + self.log_path if self.log_path else "journalctl -u " + self.unit


def subject(params: t.Mapping[str, t.Any]) -> str:
    """What a line calls that which is waited for."""
    unit = str(params.get("unit") or "")
    unit = unit[: -len(".service")] if unit.endswith(".service") else unit
    return str(params.get("service") or unit or _address(str(params.get("url") or "")))


def named(params: t.Mapping[str, t.Any]) -> str:
    """The same in a sentence."""
    words = [str(params.get(name) or "") for name in ("service", "unit", "url")]
    if words[0] and not words[1]:
        return 'the service "%s"' % words[0]
    return str(Named(words[0], words[1], _address(words[2])))


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
        parts.append("%s %d MiB" % ("GPU" if live.get("on_gpu") else "memory", live["memory"]))
    if live.get("restarts"):
        parts.append(_restarted(live["restarts"]))
    parts.append(span(live.get("elapsed") or 0.0))
    text = " · ".join(parts)
    moved = live.get("moved")
    if moved is None:
        return text
    if _still(live):
        return text + ", nothing moved for %s (stalled at %s)" % (span(moved), span(live["stall_timeout"]))
    return text + ", moved %s ago" % span(moved)


def sentence(result: t.Mapping[str, t.Any], named: Named) -> str:
    """The end of a wait: what was waited for, its verdict, where it stood, why, and the remedy where there is one."""
    state = result.get("unit_state") or {}
    named = named._replace(unit=str(state.get("name") or named.unit)) if named.unit else named
    said = str(result["msg"])
    for lead, it in (("the service is ready: ", ""), ('the unit "%s" ' % named.unit, "it ")):
        if said.startswith(lead):
            said = it + said[len(lead) :]
    said = re.sub(r"something moved \d+ s ago", lambda found: found.group() + _signs(result), said, count=1)
    clause, colon, why = said.partition(": ")
    place = _place(result) if result["verdict"] in ("progressing", "stalled", "dead") else ""
    if place:
        clause += ", at " + place
    why = why if len(why) <= WIDEST else why[: WIDEST - 3] + "..."
    text = "%s %s: %s" % (named, IS[result["verdict"]], clause + colon + why + _held(result))
    remedy = _remedy(result, named)
    return text + NEXT + remedy if remedy else text


def answer(result: t.Mapping[str, t.Any]) -> str:
    """The sentence after its verdict, which it does not say again."""
    verdict = str(result["verdict"])
    head, found, rest = str(result["msg"]).partition(" %s: " % IS.get(verdict, "\0"))
    return "%s: %s" % (verdict, "%s: %s" % (head.rstrip(","), rest) if found else head)


def _place(result: t.Mapping[str, t.Any]) -> str:
    """How far the load had come by the log."""
    phase, percent = str(result["phase"] or ""), result["percent"]
    if result["tier_reached"] not in BELOW_THE_ENGINE or phase in ("", "started"):
        return ""
    return phase.replace("_", " ") + ("" if percent is None else " %d %%" % int(percent))


def _signs(result: t.Mapping[str, t.Any]) -> str:
    """The signs that moved last."""
    ages = result["movement"]
    last = [name for name, age in ages.items() if age <= min(ages.values()) + YOUNG]
    return " (%s)" % ", ".join(name.replace("_", " ") for name in last) if last else ""


def _held(result: t.Mapping[str, t.Any]) -> str:
    """Who else holds the GPUs, after a start that ran out of their memory."""
    holders = (result["cause"] or {}).get("holders")
    if holders is None:
        return ""
    if not holders:
        return "; no other process is seen to hold the GPUs"
    more = "" if len(holders) == 1 else ", and %d more" % (len(holders) - 1)
    return "; %s%s" % (holders[0], more)


def _remedy(result: t.Mapping[str, t.Any], named: Named) -> str:
    """What to do next, where that is one thing."""
    verdict, state = result["verdict"], result.get("unit_state") or {}
    if verdict == "auth_error":
        return 'give another "api_key"' if named.keyed else 'give "api_key"'
    if verdict == "progressing":
        return "" if named.once else 'wait again with a longer "timeout"'
    if not named.unit or verdict in ("ready", "wrong_server", "unknown"):
        return ""
    if verdict in ("stalled", "wedged"):
        pid = state.get("main_pid")
        return "py-spy dump --pid %d, then %s" % (pid, named.stop) if pid else named.log
    if verdict == "restart_loop":
        return named.stop
    if state.get("load_state") in ("not-found", "masked"):
        return "systemctl unmask " + named.unit if state["load_state"] == "masked" else ""
    if state.get("active_state") in ("failed", "inactive"):
        return named.log if result["log_tail"] else "systemctl start " + named.unit
    return named.stop


def lines(result: t.Mapping[str, t.Any]) -> t.List[str]:
    """What there is to say of the end of a wait besides its own sentence."""
    found = []
    for tier in result.get("tiers") or ():
        word = {True: "reached", False: "not reached", None: "not judged"}[tier["reached"]]
        at = " at %s" % span(tier["at"]) if tier["at"] is not None else ""
        found.append("%-10s  %s%s%s" % (tier["name"], word, at, ": " + tier["detail"] if tier["detail"] else ""))
    if result.get("tiers") and result.get("verdict") != "ready":
        found += _standing(result)
    cause = result.get("cause")
    if cause:
        found.append("cause: %s: %s" % (cause["kind"], cause["line"]))
        figures = cause.get("figures") or {}
        if figures:
            sizes = ["%s %g MiB" % (name[: -len("_mib")], size) for name, size in figures.items()]
            found.append("memory: " + ", ".join(sizes))
        found += ["holds the GPU: " + holder for holder in cause.get("holders") or ()]
        if cause.get("holders") == []:
            found.append("holds the GPU: no other process that can be seen")
    if result.get("verdict") != "ready":
        found += ["log: " + entry for entry in (result.get("log_tail") or [])[-TAIL:]]
    return found


def _standing(result: t.Mapping[str, t.Any]) -> t.List[str]:
    """Where a wait that failed stood, and which sign moved when."""
    phase, percent, restarts = result.get("phase"), result.get("percent"), result.get("restarts")
    words = [str(phase).replace("_", " ")] if phase else []
    words += ["%g %%" % percent] if percent is not None else []
    at = [" ".join(words)] if words else []
    at += [_restarted(restarts)] if restarts else []
    found = ["at: " + ", ".join(at)] if at else []
    moved = sorted((result.get("movement") or {}).items(), key=lambda sign: float(sign[1]))
    told = ["%s %g s ago" % (name.replace("_", " "), age) for name, age in moved]
    return [*found, "moved: " + (", ".join(told) or "nothing")]


def _restarted(times: int) -> str:
    return "restarted %s" % ("once" if times == 1 else "%d times" % times)


def _shows_percent(live: Live) -> bool:
    """Whether the percentage is that of the stage which is shown."""
    return live.get("percent") is not None and live.get("missing") in ("listener", "health")


def _still(live: Live) -> bool:
    moved, stall = live.get("moved"), live.get("stall_timeout") or 0.0
    return moved is not None and moved >= max(min(QUIET, stall / 2), stall / 5)
