# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From facts about units to findings: pure, so that each rule can be tried without a host."""

from __future__ import annotations

import math
import typing as t

from ._audit_command import Port, is_gate, stops, switches, waits
from ._audit_rules import RULES, SEVERITIES
from ._clients import Client

__all__ = ("Finding", "Listens", "Unit", "applied", "judge", "seconds", "start_limit")

Command = t.Tuple[str, ...]
Setting = t.Tuple[str, str, str]  # section, directive, value

# On these a failure of the engine begins the next life.
RESTARTS = ("always", "on-failure", "on-abnormal", "on-abort", "on-watchdog")
START_MARGIN = 60.0
BURST = 3  # where the unit has none, or more than whole loads are worth
MOST_BURST = 10
DRAIN = 60.0  # for an engine that is not known
FOREVER = float("inf")
# The fields that hold what a drop-in sets.
TEXTS = {"KillMode": "kill_mode", "Restart": "restart"}
NUMBERS = {
    "TimeoutStartSec": "timeout_start",
    "TimeoutStopSec": "timeout_stop",
    "StartLimitIntervalSec": "limit_interval",
    "StartLimitBurst": "limit_burst",
}


class Unit(t.NamedTuple):
    """What a unit is, with everything that drop-ins changed in it. Times are seconds."""

    name: str
    load_state: str = "loaded"
    load_error: str = ""
    transient: bool = False
    # Whether it runs, or would be started by the host itself.
    claims: bool = True
    kind: str = "simple"  # Type=
    kill_mode: str = "control-group"
    send_sigkill: bool = True
    restart: str = "no"
    restart_delay: float = 0.1
    restart_steps: int = 0
    restart_most: float = FOREVER
    limit_interval: float = 10.0
    limit_burst: int = 5
    timeout_start: float = 90.0
    timeout_stop: float = 90.0
    pid_file: str = ""
    # ExecStart=, what comes before (ExecCondition=, ExecStartPre=) and behind it, and ExecStopPost=.
    start: t.Tuple[Command, ...] = ()
    before: t.Tuple[Command, ...] = ()
    after: t.Tuple[Command, ...] = ()
    stop: t.Tuple[Command, ...] = ()  # ExecStop=
    stop_post: t.Tuple[Command, ...] = ()
    clients: t.Tuple[Client, ...] = ()
    # How the unit calls the client of a container, such as /usr/bin/docker.
    client_path: str = ""
    marked: bool = False
    # Whether a login session takes its processes out of a unit here.
    sessions: bool = False
    engine: str = ""
    load_time: float = 0.0
    drain: float = 0.0
    # Why it is taken to need so long, for messages.
    drain_from: str = ""
    # Units that systemd never lets run beside it.
    conflicts: t.FrozenSet[str] = frozenset()
    gpus: t.Tuple[str, ...] = ()
    ports: t.Tuple[Port, ...] = ()


class Listens(t.NamedTuple):
    """A socket that listens now, and the unit whose process has it."""

    unit: str
    port: Port


class Finding(t.NamedTuple):
    """One thing that is wrong with a unit."""

    rule: str
    severity: str
    value: str  # of the directive, as it is now
    why: str
    settings: t.Tuple[Setting, ...] = ()

    @property
    def directive(self) -> str:
        return RULES[self.rule].directive


def judge(units: t.Sequence[Unit], listens: t.Sequence[Listens] = ()) -> t.Dict[str, t.List[Finding]]:
    """The findings of each unit, the worst first. ``listens`` is what other units have open now."""
    found = {}
    for unit in units:
        findings = list(_own(unit)) if unit.load_state == "loaded" else list(_unread(unit))
        if unit.load_state == "loaded" and unit.claims:
            others = [other for other in units if other.claims and other.name != unit.name and not _apart(unit, other)]
            findings += [*_gpus(unit, others), *_ports(unit, others, listens)]
        found[unit.name] = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    return found


def _apart(one: Unit, other: Unit) -> bool:
    return other.name in one.conflicts or one.name in other.conflicts


def _finding(rule: str, value: str, more: str = "", settings: t.Sequence[Setting] = (), severity: str = "") -> Finding:
    known = RULES[rule]
    return Finding(rule, severity or known.severity, value, known.why + more, tuple(settings))


def _unread(unit: Unit) -> t.Iterator[Finding]:
    if unit.load_state in ("bad-setting", "error"):
        yield _finding("not_loadable", unit.load_state, (": " + unit.load_error) if unit.load_error else "")


def _own(unit: Unit) -> t.Iterator[Finding]:
    if unit.kill_mode in ("process", "none"):
        yield _finding("kill_mode", unit.kill_mode, settings=[("Service", "KillMode", "mixed")])
    if not unit.send_sigkill:
        yield _finding("send_sigkill", "no", settings=[("Service", "SendSIGKILL", "yes")])
    yield from _timeouts(unit)
    yield from _restarts(unit)
    if unit.kind == "forking" and not unit.pid_file:
        yield _finding("forking_pidfile", "Type=forking")
    yield from _clients(unit)
    yield from _switched(unit)


def _timeouts(unit: Unit) -> t.Iterator[Finding]:
    if unit.timeout_start < unit.load_time and _starts_with_load(unit):
        wanted = _whole(2 * unit.load_time)
        yield _finding(
            "timeout_start",
            seconds(unit.timeout_start),
            " (the load may take %s s)" % seconds(unit.load_time),
            [("Service", "TimeoutStartSec", wanted)],
        )
    need = unit.drain or DRAIN
    setting = ("Service", "TimeoutStopSec", _whole(need))
    if unit.timeout_stop == FOREVER:
        yield _finding("timeout_stop_none", "infinity", settings=[setting])
    elif unit.timeout_stop < unit.drain:
        more = " (%s s: %s)" % (seconds(need), unit.drain_from) if unit.drain_from else ""
        yield _finding("timeout_stop", seconds(unit.timeout_stop), more, [setting])


def _starts_with_load(unit: Unit) -> bool:
    """Whether systemd waits for the load before the start is over."""
    if any(waits(command) for command in unit.after):
        return True
    if unit.kind not in ("notify", "notify-reload"):
        return False
    words = [word for command in unit.start for word in command]
    if any("systemd-notify" in word for word in words):
        return False
    if any(client.manager == "podman" for client in unit.clients):
        return not any(word.endswith(("sdnotify=conmon", "sdnotify=ignore")) for word in words) and not any(
            (one, two) in (("--sdnotify", "conmon"), ("--sdnotify", "ignore")) for one, two in zip(words, words[1:])
        )
    return True


def _restarts(unit: Unit) -> t.Iterator[Finding]:
    if unit.restart not in RESTARTS or unit.restart_delay == FOREVER:
        return
    interval, burst = unit.limit_interval, unit.limit_burst
    value = "%s with StartLimitBurst=%d" % (seconds(interval), burst)
    if interval <= 0 or burst <= 0:
        yield _finding("start_limit_off", value, settings=start_limit(unit))
    elif sum(_delay(unit, number) for number in range(min(burst, 10000))) >= interval:
        more = " (RestartSec=%s)" % seconds(unit.restart_delay)
        yield _finding("start_limit_never", value, more, start_limit(unit))
    elif unit.load_time and burst * (unit.load_time + unit.restart_delay) >= interval:
        more = " (the load may take %s s)" % seconds(unit.load_time)
        yield _finding("start_limit_load", value, more, start_limit(unit))
    if unit.restart == "always" and unit.engine and not any(is_gate(command) for command in unit.before):
        yield _finding("restart_always", "always", settings=[("Service", "Restart", "on-failure")])


def _delay(unit: Unit, number: int) -> float:
    """What systemd waits before the restart of this number, counted from 0."""
    first, most = unit.restart_delay, unit.restart_most
    if not unit.restart_steps or most == FOREVER or most <= first or first <= 0:
        return first
    return min(most, first * math.pow(most / first, min(1.0, number / unit.restart_steps)))


def start_limit(unit: Unit) -> t.List[Setting]:
    """A start limit that trips after so many whole lives: a load, a stop and the longest delay each."""
    burst = unit.limit_burst if 0 < unit.limit_burst <= MOST_BURST else BURST
    stop = unit.timeout_stop if unit.drain <= unit.timeout_stop < FOREVER else unit.drain or DRAIN
    delay = unit.restart_most if unit.restart_steps and unit.restart_most < FOREVER else unit.restart_delay
    interval = burst * (unit.load_time + stop + delay) + START_MARGIN
    settings = [("Unit", "StartLimitIntervalSec", _whole(interval))]
    return settings + [("Unit", "StartLimitBurst", str(burst))] * (burst != unit.limit_burst)


def _clients(unit: Unit) -> t.Iterator[Finding]:
    words = [word for command in unit.start for word in command]
    for client in unit.clients:
        split = any(word == "--cgroups=split" for word in words) or ("--cgroups", "split") in zip(words, words[1:])
        if client.keep_unit or (client.manager == "podman" and split):
            continue
        what = "%s %s" % (client.manager, client.verb)
        # Where no client stays, none can be killed: then ExecStop= does as well.
        ends = unit.stop_post + (unit.stop if unit.kind == "oneshot" else ())
        if any(stops(command) for command in ends):
            yield _finding("container_client", what, severity="notice")
            continue
        settings: t.List[Setting] = []
        known = client.manager in ("docker", "podman", "nerdctl") and client.verb in ("run", "start")
        if known and len(client.names) == 1 and unit.client_path and not client.elsewhere:
            # Whatever else says which daemon or store is meant stands before the verb.
            words_of_stop = [unit.client_path, *client.options, "stop", "-t", "10", client.names[0]]
            if all(_plain(word) for word in words_of_stop):
                settings = [("Service", "ExecStopPost", "-" + " ".join(words_of_stop))]
        yield _finding("container_client", what, settings=settings)
        return


def _plain(word: str) -> bool:
    return bool(word) and all(sign.isascii() and (sign.isalnum() or sign in "_@+=:,./-") for sign in word)


def _switched(unit: Unit) -> t.Iterator[Finding]:
    told: t.Set[str] = set()
    for tool, session in (switch for command in unit.start for switch in switches(command)):
        rule = "login_session" if session and unit.sessions else "mark_lost"
        if rule not in told:
            told.add(rule)
            yield _finding(rule, tool, severity="warning" if rule == "mark_lost" and unit.marked else "")


def applied(unit: Unit, settings: t.Sequence[Setting]) -> Unit:
    """The unit as it will be with these settings."""
    fields: t.Dict[str, t.Any] = {}
    for _section, directive, value in settings:
        if directive == "ExecStopPost":
            fields["stop_post"] = (*unit.stop_post, tuple(value.lstrip("-").split()))
        elif directive in TEXTS:
            fields[TEXTS[directive]] = value
        elif directive in NUMBERS:
            fields[NUMBERS[directive]] = int(value) if directive == "StartLimitBurst" else float(value)
        else:
            fields["send_sigkill"] = value == "yes"
    return unit._replace(**fields)


def _gpus(unit: Unit, others: t.Sequence[Unit]) -> t.Iterator[Finding]:
    for other in others:
        common = [gpu for gpu in unit.gpus if gpu in other.gpus]
        if common:
            yield _finding("shared_gpu", ",".join(common), " (%s too: GPU %s)" % (other.name, ", ".join(common)))


def _ports(unit: Unit, others: t.Sequence[Unit], listens: t.Sequence[Listens]) -> t.Iterator[Finding]:
    told: t.Set[t.Tuple[int, str]] = set()
    rivals = [Listens(other.name, port) for other in others for port in other.ports] + list(listens)
    for port in unit.ports:
        for rival in rivals:
            if (
                rival.unit in (unit.name, *unit.conflicts)
                or not _meet(port, rival.port)
                or (port.number, rival.unit) in told
            ):
                continue
            told.add((port.number, rival.unit))
            how = "%s listens there" if rival in listens else "%s too"
            yield _finding("shared_port", str(port.number), " (%s: port %d)" % (how % rival.unit, port.number))


def _meet(one: Port, other: Port) -> bool:
    """Whether two cannot both listen: the same port, at the same address or one of them at all."""
    local = ("localhost", "127.0.0.1")
    if one.number != other.number:
        return False
    same = one.address == other.address or (one.address in local and other.address in local)
    return same or not one.address or not other.address


def seconds(value: float) -> str:
    """A time as systemd reads it."""
    return "infinity" if value == FOREVER else "%d" % value if float(value).is_integer() else "%.3f" % value


def _whole(value: float) -> str:
    return "%d" % math.ceil(value)
