# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The definition of a service as the host keeps it, and how it fills the options of a module."""

from __future__ import annotations

import hashlib
import json
import os
import re
import typing as t

from ._errors import ServingError, UsageError

FOLDER = "/etc/gpuops/services"
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")


def _is_gid(value: t.Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_GID


MOST_SECRET = 1 << 20  # bytes of a file with a key or headers
MOST_GID = 2**32 - 2  # the one above means no group at all
# The unit comes first: what is wrong in a definition concerns the unit alone that it names.
KINDS: t.Tuple[t.Tuple[str, t.Callable[[t.Any], bool], str], ...] = (
    ("unit", lambda value: isinstance(value, str) and bool(value), "the name of a unit"),
    ("engine", lambda value: isinstance(value, str), "the name of an engine"),
    ("log_path", lambda value: isinstance(value, str) and value.startswith("/"), "the absolute path of a file"),
    ("profile", lambda value: isinstance(value, dict), "a mapping of fields of the engine's profile to values"),
    ("mark_gid", _is_gid, "the number of a group, from 1 to %d" % MOST_GID),
)


class Misfit(ServingError):
    """A value in a definition is of a wrong kind."""

    def __init__(self, name: str, path: str, key: str, kind: str, definition: t.Dict[str, t.Any]) -> None:
        super().__init__(
            'the definition of the service "%s" cannot be used: "%s" in %s must be %s' % (name, key, path, kind)
        )
        self.unit = None if key == "unit" else unit_of(definition)


def check_name(name: str) -> str:
    if not NAME.match(name):
        raise UsageError(
            'the service name "%s" is not usable: it must start with a lower-case letter or digit, hold only '
            "lower-case letters, digits, '_', '.' and '-', and be at most 63 characters long" % name
        )
    return name


def mark_group(name: str) -> str:
    """The group that marks every process of a service. Short, because groupadd refuses long names and dots."""
    return "gpuops-" + hashlib.sha256(name.encode()).hexdigest()[:12]


def load(name: str, folder: str = FOLDER) -> t.Dict[str, t.Any]:
    """The definition of one service; names what exists when it does not."""
    check_name(name)
    path = os.path.join(folder, name + ".json")
    try:
        with open(path, encoding="utf-8") as handle:
            definition = json.load(handle)
    except FileNotFoundError:
        known = ", ".join('"%s"' % entry for entry in names(folder)) or "none"
        raise UsageError(
            'the service "%s" is not defined on this host: %s does not exist (defined here: %s)' % (name, path, known)
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ServingError('the definition of the service "%s" cannot be used: %s: %s' % (name, path, error)) from error
    if not isinstance(definition, dict) or definition.get("name") != name:
        raise ServingError(
            'the definition of the service "%s" cannot be used: %s describes something else' % (name, path)
        )
    for key, fits, kind in KINDS:
        if definition.get(key) is not None and not fits(definition[key]):
            raise Misfit(name, path, key, kind, definition)
    return definition


def names(folder: str = FOLDER) -> t.List[str]:
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return sorted(entry[: -len(".json")] for entry in found if entry.endswith(".json"))


class Match(t.NamedTuple):
    """The service that a unit is defined by, if any, and why a definition that may be the one cannot be read."""

    name: t.Optional[str]
    definition: t.Dict[str, t.Any]
    unreadable: t.Optional[ServingError]


def unit_of(definition: t.Mapping[str, t.Any]) -> str:
    """The full name of the unit that a definition names, empty when it names none."""
    # Loaded where it is asked for: a module compiles what it imports on every run.
    from ._systemd import unit_name

    try:
        return unit_name(str(definition.get("unit") or ""))
    except ServingError:
        return ""


def match(unit: str, folder: str = "") -> Match:
    """The service whose definition names this unit; either may leave the ending off."""
    folder = folder or FOLDER
    wanted = unit_of({"unit": unit})
    unreadable: t.Optional[ServingError] = None
    for name in names(folder) if wanted else ():
        try:
            definition = load(name, folder)
        except Misfit as error:
            if error.unit in (None, wanted):
                unreadable = unreadable or error
            continue
        except ServingError as error:
            unreadable = unreadable or error
            continue
        if unit_of(definition) == wanted:
            return Match(name, definition, None)
    return Match(None, {}, unreadable)


def of_unit(unit: str, folder: str = "") -> t.Optional[str]:
    """The name of the service that a unit is defined by.

    What cannot be read cannot be matched; whoever works on that service by name is told.
    """
    return match(unit, folder).name


def fill(params: t.Dict[str, t.Any], mapping: t.Mapping[str, str], folder: str = FOLDER) -> t.Dict[str, t.Any]:
    """Options with the gaps filled from the definition of ``params["service"]``.

    ``mapping`` is option name to key of the definition. An option that the caller gave always wins.
    A service without a definition on this host is an error, unless the caller gave one of those options:
    then the name serves for locks and messages alone, which is how units that others wrote are worked on.
    ``of_definition`` of the answer names the options that it has filled.
    """
    filled = dict(params)
    name = params.get("service")
    if not name:
        return filled
    given = any(params.get(option) is not None for option in mapping)
    if given and name not in names(folder):
        filled["definition"] = {}
        check_name(name)
        return filled
    definition = load(name, folder)
    of_definition: t.List[str] = []
    for option, key in mapping.items():
        if filled.get(option) is None and definition.get(key) is not None:
            filled[option] = definition[key]
            of_definition.append(option)
    filled["definition"], filled["of_definition"] = definition, of_definition
    return filled


def read_key(path: str) -> str:
    """The API key in a file that only root should read."""
    key = _secret_text(path, "API key").strip()
    if not key:
        raise ServingError('the API key file "%s" cannot be used: it holds no key' % path)
    return key


def read_headers(path: str) -> t.Dict[str, str]:
    """The headers in a file that only root should read, one ``Name: value`` a line. No value is ever repeated."""
    found: t.Dict[str, str] = {}
    for number, line in enumerate(_secret_text(path, "header").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        name = name.strip()
        wrong = "" if colon and name else 'is not "Name: value"'
        if name.lower() in (known.lower() for known in found):
            wrong = 'names a header again: "%s"' % name
        if wrong:
            raise ServingError('the header file "%s" cannot be used: line %d %s' % (path, number, wrong))
        found[name] = value.strip()
    if not found:
        raise ServingError('the header file "%s" cannot be used: it holds no header' % path)
    return found


def _secret_text(path: str, what: str) -> str:
    # Loaded where it is asked for: a module compiles what it imports on every run.
    from ._files import regular

    try:
        return regular(path, MOST_SECRET).decode("utf-8")
    except OSError as error:
        raise ServingError('the %s file "%s" cannot be read: %s' % (what, path, error.strerror)) from error
    except ValueError:
        raise ServingError('the %s file "%s" cannot be read: it does not hold text in UTF-8' % (what, path)) from None
