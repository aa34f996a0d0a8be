# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The facts about units that are judged, as systemd, the definitions and the files that they name tell them."""

from __future__ import annotations

import json
import os
import re
import typing as t

from . import _audit_command, _clients, _engines, _files, _service, _systemd
from ._audit_judge import Unit
from ._errors import ServingError

__all__ = ("LOAD", "Facts", "mentioning", "read", "reload", "usable")

TIMEOUT = 30.0
FILES = 2.0  # seconds for the environment files of one unit
LOAD = 300.0  # seconds that a load may take where nobody says it
AT_ONCE = 100  # units in one question
MOST_TEXT = 1 << 20  # bytes of one unit file
PROPERTIES = (
    "Id,LoadState,LoadError,ActiveState,UnitFileState,Transient,NeedDaemonReload,FragmentPath,DropInPaths,Type,KillMode,"
    "SendSIGKILL,Restart,RestartUSec,RestartSteps,RestartMaxDelayUSec,StartLimitIntervalUSec,StartLimitBurst,"
    "TimeoutStartUSec,TimeoutStopUSec,PIDFile,SupplementaryGroups,Conflicts,ConflictedBy"
)
COMMANDS = ("ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost", "ExecStop", "ExecStopPost")
AWAKE = ("active", "activating", "reloading", "refreshing")
ENABLED = ("enabled", "enabled-runtime", "generated")
# A file may bear any name; systemd knows a unit by these signs alone.
SERVICE = re.compile(r"[A-Za-z0-9:_.\\@-]+\.service\Z")
PAM = ("/etc/pam.d", "/usr/lib/pam.d")


class Facts(t.NamedTuple):
    """A unit, and what is told of it beside its judgement."""

    unit: Unit
    service: t.Optional[str]
    engine_from: str
    serves: bool  # an engine, by what is known here; what the caller says of it is left aside
    active_state: str
    fragment: str
    drop_ins: t.Tuple[str, ...]
    need_reload: bool
    warnings: t.Tuple[str, ...] = ()


class Told(t.NamedTuple):
    """What the caller says of the units, in place of what is found out."""

    engine: t.Optional[str] = None
    load_time: t.Optional[float] = None
    drain_time: t.Optional[float] = None


def read(names: t.Sequence[str], told: Told, seen: t.Mapping[str, str]) -> t.List[Facts]:
    """The facts of each unit once, whatever aliases it was named by. ``seen`` is the engine that processes tell."""
    found: t.Dict[str, Facts] = {}
    sessions = _sessions()
    for raw in _show(names, PROPERTIES):
        name = raw.get("Id", "")
        if not name or name in found:
            continue
        try:
            found[name] = _facts(name, raw, told, seen.get(name, ""), sessions)
        except ServingError as error:
            # One that goes away meanwhile, or does not tell, hides no other.
            unit = Unit(name, load_state="unreadable", load_error=error.message)
            found[name] = Facts(
                unit, None, "", True, raw.get("ActiveState", ""), raw.get("FragmentPath", ""), (), False
            )
    return list(found.values())


def reload() -> None:
    """Let systemd read all units anew; it starts and stops none."""
    rc, _out, err = _systemd._systemctl(["daemon-reload"], TIMEOUT)
    if rc != 0:
        raise ServingError("systemd did not read its units anew: %s" % _systemd.said(rc, err))


def usable(name: str) -> bool:
    """Whether systemd takes this for the name of one service."""
    return SERVICE.match(name) is not None and len(name) < 256 and "@." not in name


def mentioning(hint: t.Pattern[str]) -> t.List[str]:
    """The service units whose files, or whose drop-ins, hold a word, whether they run or not.

    The files are read instead of asking systemd for every unit: its list of unit files takes seconds.
    """
    rc, out, err = _systemd._systemctl(["show", "--property=UnitPath", "--value"], TIMEOUT)
    if rc != 0:
        raise ServingError("the folders of this host's units cannot be told: %s" % _systemd.said(rc, err))
    found: t.Dict[str, None] = {}
    folders = list(dict.fromkeys(word for word in out.split() if word.startswith("/")))
    for folder in folders:
        for name in _listdir(folder):
            path = os.path.join(folder, name)
            if name.endswith(".service"):
                texts = [path]
            elif name.endswith(".service.d"):
                name, texts = name[:-2], [os.path.join(path, entry) for entry in _listdir(path)]
            else:
                continue
            if name not in found and any(hint.search(_text(text)) for text in texts):
                found[name] = None
    templates = [name for name in found if SERVICE.match(name) and "@." in name]
    return [name for name in found if usable(name)] + (_instances(templates, folders) if templates else [])


def _listdir(folder: str) -> t.List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        if not os.path.isfile(path):  # a link to /dev/null masks a unit
            return ""
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(MOST_TEXT)
    except OSError:
        return ""


def _instances(templates: t.Sequence[str], folders: t.Sequence[str]) -> t.List[str]:
    """The instances of templates that systemd has loaded, as those that run are, or that something wants."""
    words = ["list-units", "--all", "--type=service", "--no-legend", "--plain", "--"]
    _rc, out, _err = _systemd._systemctl(words + [name.replace("@.", "@*.") for name in templates], TIMEOUT)
    found = {line.split()[0] for line in out.splitlines() if line.strip()}
    starts = tuple(name.partition(".service")[0] for name in templates)
    for folder in folders:
        for name in _listdir(folder):
            if name.endswith((".wants", ".requires")):
                wanted = _listdir(os.path.join(folder, name))
                found |= {one for one in wanted if one.startswith(starts)}
    return sorted(filter(usable, found))


def _show(names: t.Sequence[str], properties: str) -> t.Iterator[t.Dict[str, str]]:
    for begin in range(0, len(names), AT_ONCE):
        some = list(names[begin : begin + AT_ONCE])
        rc, out, err = _systemd._systemctl(["show", "--property=" + properties, "--", *some], TIMEOUT)
        if rc != 0:
            raise ServingError("the units cannot be read: %s" % _systemd.said(rc, err))
        for block in re.split(r"\n{2,}", out.strip("\n")):
            raw: t.Dict[str, str] = {}
            for line in block.split("\n"):
                key, equals, value = line.partition("=")
                if equals:
                    raw[key] = raw[key] + "\n" + value if key in raw else value
            yield raw


def _facts(name: str, raw: t.Mapping[str, str], told: Told, seen: str, sessions: bool) -> Facts:
    get = raw.get
    service, definition, warnings = _definition(name)
    lines, variables = _lines(name) if get("LoadState") == "loaded" else ({}, {})
    start = tuple(tuple(_clients.expand(list(words), variables)) for words in lines.get("ExecStart", ()))
    words = [word for command in start for word in command]
    clients = tuple(client for command in start for client in _clients.find(list(command), variables))
    container = clients[0].image if clients and clients[0].verb == "run" else "" if clients else None
    by_words = next(filter(None, (_audit_command.engine_of(command, container or "") for command in start)), "")
    sources = (
        (told.engine, "option"),
        (definition.get("engine"), "definition"),
        (by_words, "command"),
        (seen, "processes"),
    )
    engine, engine_from = next(((str(one), source) for one, source in sources if one), ("", ""))
    profile = _profile(engine, definition, warnings)
    drain, drain_from = _drain(told, definition, profile, by_words, start)
    unit = Unit(
        name=name,
        load_state=get("LoadState", "not-found"),
        load_error=_error(get("LoadError", "")),
        transient=get("Transient") == "yes",
        claims=get("ActiveState") in AWAKE or get("UnitFileState") in ENABLED,
        kind=get("Type", "simple"),
        kill_mode=get("KillMode", "control-group"),
        send_sigkill=get("SendSIGKILL", "yes") != "no",
        restart=get("Restart", "no"),
        restart_delay=_systemd.parse_span(get("RestartUSec", "100ms")),
        restart_steps=_systemd.number(get("RestartSteps", "")),
        restart_most=_systemd.parse_span(get("RestartMaxDelayUSec", "infinity")),
        limit_interval=_systemd.parse_span(get("StartLimitIntervalUSec", "10s")),
        limit_burst=_systemd.number(get("StartLimitBurst", "5")),
        timeout_start=_systemd.parse_span(get("TimeoutStartUSec", "90s")),
        timeout_stop=_systemd.parse_span(get("TimeoutStopUSec", "90s")),
        pid_file=get("PIDFile", ""),
        start=start,
        before=tuple(map(tuple, (*lines.get("ExecCondition", ()), *lines.get("ExecStartPre", ())))),
        after=tuple(map(tuple, lines.get("ExecStartPost", ()))),
        stop=tuple(map(tuple, lines.get("ExecStop", ()))),
        stop_post=tuple(map(tuple, lines.get("ExecStopPost", ()))),
        conflicts=frozenset((get("Conflicts", "") + " " + get("ConflictedBy", "")).split()),
        clients=clients,
        client_path=_client_path(words),
        marked=any(group.startswith("gpuops-") for group in get("SupplementaryGroups", "").split()),
        sessions=sessions,
        engine=engine,
        load_time=_load_time(told, definition, engine, profile),
        drain=drain,
        drain_from=drain_from,
        gpus=_gpus(definition, engine, words, variables, container),
        ports=_ports(definition, engine, profile, words, variables, container),
    )
    return Facts(
        unit,
        service,
        engine_from,
        bool(service or by_words or seen),
        get("ActiveState", ""),
        get("FragmentPath", ""),
        tuple(path for path in get("DropInPaths", "").split() if path.startswith("/")),
        get("NeedDaemonReload") == "yes",
        tuple(warnings),
    )


def _definition(name: str) -> t.Tuple[t.Optional[str], t.Mapping[str, t.Any], t.List[str]]:
    match = _service.match(name)
    return match.name, match.definition, [match.unreadable.message] if match.unreadable else []


def _profile(engine: str, definition: t.Mapping[str, t.Any], warnings: t.List[str]) -> t.Optional[_engines.Profile]:
    if not engine:
        return None
    try:
        return _engines.get(engine, definition.get("profile"))
    except ServingError as error:
        warnings.append(error.message)
        return _engines.PROFILES.get(engine)


def _drain(
    told: Told,
    definition: t.Mapping[str, t.Any],
    profile: t.Optional[_engines.Profile],
    by_words: str,
    start: t.Sequence[t.Sequence[str]],
) -> t.Tuple[float, str]:
    if told.drain_time is not None:
        return told.drain_time, "as drain_time says"
    own = _number(definition.get("stop_timeout"))
    if own:
        return own, "stop_timeout of its definition"
    asked = max((_audit_command.drain_of(by_words, command) for command in start), default=0.0)
    if asked:
        return asked, "%s and 30 s to end" % _audit_command.DRAIN_OPTIONS[by_words]
    if profile is not None and profile.stop_timeout:
        return float(profile.stop_timeout), "what %s needs" % profile.title
    return 0.0, ""


def _load_time(
    told: Told, definition: t.Mapping[str, t.Any], engine: str, profile: t.Optional[_engines.Profile]
) -> float:
    if told.load_time is not None:
        return told.load_time
    if profile is None or profile.loads_on_request:
        return 0.0
    return _number(definition.get("ready_timeout")) or LOAD


def _number(value: t.Any) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e7
    return float(value) if good else 0.0


def _gpus(
    definition: t.Mapping[str, t.Any],
    engine: str,
    words: t.Sequence[str],
    variables: t.Mapping[str, str],
    container: t.Optional[str],
) -> t.Tuple[str, ...]:
    named = definition.get("gpus")
    if isinstance(named, list):
        return tuple(map(str, named))
    return _audit_command.gpus_of(engine, words, variables, container)


def _ports(
    definition: t.Mapping[str, t.Any],
    engine: str,
    profile: t.Optional[_engines.Profile],
    words: t.Sequence[str],
    variables: t.Mapping[str, str],
    container: t.Optional[str],
) -> t.Tuple[_audit_command.Port, ...]:
    url = re.match(r"https?://(\[[0-9a-f:]+\]|[^/:]*):([0-9]{1,5})(?:/|\Z)", str(definition.get("url") or ""))
    if url:
        address = _audit_command.option(words, *_audit_command.HOST_OPTIONS) if words else ""
        return (_audit_command.port(url.group(2), address or url.group(1)),)
    default = profile.port if profile is not None else None
    return _audit_command.ports_of(engine, words, default, variables, container) if words and engine else ()


def _lines(name: str) -> t.Tuple[t.Dict[str, t.List[t.List[str]]], t.Dict[str, str]]:
    """The commands of a unit word by word, which `systemctl show` does not tell, and its variables."""
    # The first sign may be no digit; a unit's name has no other signs than those of ASCII.
    escaped = "".join(c if c.isalnum() and (i or not c.isdigit()) else "_%02x" % ord(c) for i, c in enumerate(name))
    words = ["busctl", "--json=short", "get-property", "org.freedesktop.systemd1"]
    words += ["/org/freedesktop/systemd1/unit/" + escaped, "org.freedesktop.systemd1.Service"]
    rc, out, err = _systemd.call([*words, *COMMANDS, "Environment", "EnvironmentFiles"], TIMEOUT)
    try:
        data = [json.loads(line)["data"] for line in out.splitlines() if line.strip()] if rc == 0 else []
    except (ValueError, KeyError, TypeError):
        data = []
    if len(data) != len(COMMANDS) + 2:
        raise ServingError('the commands of the unit "%s" cannot be read: %s' % (name, _systemd.said(rc, err)))
    lines = {kind: [[str(entry[0]), *map(str, entry[1][1:])] for entry in rows] for kind, rows in zip(COMMANDS, data)}
    variables = dict(pair.split("=", 1) for pair in data[-2] if "=" in pair)
    paths = [str(path) for path, _optional in data[-1]]
    texts = _files.texts(paths, FILES) if paths else {}
    for path in paths:
        variables.update(_variables(texts.get(path, "")))
    return lines, variables


def _variables(text: str) -> t.Dict[str, str]:
    """The variables in an environment file, as far as simple lines tell them."""
    found = re.findall(r"^[ \t]*([A-Za-z_][A-Za-z0-9_]*)=(.*?)[ \t]*$", text, re.M)
    return {
        name: value[1:-1] if value[:1] in ('"', "'") and len(value) > 1 and value[-1] == value[0] else value
        for name, value in found
    }


def _client_path(words: t.Sequence[str]) -> str:
    """The program that is the client of a container, where it is named by its whole path."""
    for command in _audit_command.commands(words):
        if os.path.basename(command[0]) in _clients.MANAGERS:
            return command[0] if command[0].startswith("/") else ""
    return ""


def _error(text: str) -> str:
    """The words of LoadError=, without the name of the error."""
    match = re.search(r'"(.*)"', text)
    return match.group(1).rstrip(".") if match else ""


def _sessions() -> bool:
    """Whether what opens a login session on this host registers it, which moves its processes into a scope."""
    for folder in PAM:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            try:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as stream:
                    if re.search(r"^[^#\n]*\bpam_systemd\.so\b", stream.read(1 << 16), re.M):
                        return True
            except OSError:
                continue
    return False
