# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a service says of its own engine, other than its profile: checked, and put in place."""

from __future__ import annotations

import difflib
import re
import typing as t

from ._errors import UsageError
from ._profile import Patterns, Phase, Profile

__all__ = ("CHECKS", "override")

SHAPES = ("openai", "triton_index", "ollama_tags", "ovms_config")
MEANINGS = ("ready", "loading", "dead")
ENDPOINTS = ("completions", "chat", "generate")
METHODS = ("GET", "POST")
# Names that are no engine's own: who claimed them would own half the host.
COMMON_NAMES = ("systemd", "bash", "sh", "python", "python3", "sshd", "dockerd", "containerd", "conmon")

Check = t.Callable[[t.Any], t.Any]


def override(profile: Profile, overrides: t.Mapping[str, t.Any]) -> Profile:
    of = 'the profile of the engine "%s" cannot be changed: ' % profile.name
    if not isinstance(overrides, t.Mapping):
        raise UsageError(of + "the changes must be a mapping of fields to values")
    values: t.Dict[str, t.Any] = {}
    for field, value in overrides.items():
        if field not in CHECKS:
            near = difflib.get_close_matches(str(field), list(CHECKS), 1)
            raise UsageError(
                '%s"%s" is no field of it: use %s'
                % (of, field, '"%s"' % near[0] if near else ", ".join(sorted(CHECKS)))
            )
        try:
            values[field] = CHECKS[field](value)
        except ValueError as error:
            raise UsageError('%s"%s" must be %s' % (of, field, error)) from None
    return profile._replace(known={**profile.known, **dict.fromkeys(values, "given")}, **values)


def _text(value: t.Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _maybe(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _path(value: t.Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or re.search(r"[\s?#]", value):
        raise ValueError('a path that begins with "/"')
    return value


def _flag(value: t.Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _number(low: int, high: int) -> Check:
    def check(value: t.Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError("a number from %d to %d" % (low, high))
        return value

    return check


def _one_of(*words: str) -> Check:
    def check(value: t.Any) -> str:
        if value not in words:
            raise ValueError("one of %s" % ", ".join(words))
        return str(value)

    return check


def _texts(value: t.Any) -> t.Tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) and entry for entry in value):
        raise ValueError("a list of texts")
    return tuple(value)


def _pattern(value: t.Any) -> str:
    if not isinstance(value, str):
        raise ValueError("made of regular expressions")
    try:
        expression = re.compile(value, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError('made of regular expressions: "%s" is none: %s' % (value, error)) from None
    if expression.search(""):
        raise ValueError('made of regular expressions that need something: "%s" is found in an empty text' % value)
    return value


def _patterns(value: t.Any) -> Patterns:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(row, (list, tuple)) and len(row) == 2 for row in value
    ):
        raise ValueError("a list of pairs: a regular expression, and its word")
    return tuple((_pattern(pattern), _word(word)) for pattern, word in value)


def _word(value: t.Any) -> str:
    if not isinstance(value, str) or not re.match(r"[a-z0-9_]+\Z", value):
        raise ValueError("made of words of lower-case letters, digits and underscores")
    return value


def _phases(value: t.Any) -> t.Tuple[Phase, ...]:
    what = "a list of phases: a regular expression, its word, and maybe its share as two percentages"
    if not isinstance(value, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in value):
        raise ValueError(what)
    found = []
    for row in value:
        share = row[2] if len(row) == 3 else None
        if len(row) not in (2, 3) or not (share is None or _is_share(share)):
            raise ValueError(what)
        found.append(Phase(_pattern(row[0]), _word(row[1]), None if share is None else (share[0], share[1])))
    return tuple(found)


def _is_share(value: t.Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value)
        and 0 <= value[0] <= value[1] <= 100
    )


def _titles(value: t.Any) -> t.Tuple[str, ...]:
    for pattern in _texts(value):
        expression = re.compile(_pattern(pattern))
        common = next((name for name in COMMON_NAMES if expression.search(name)), None)
        if common is not None:
            raise ValueError('names that only this engine\'s processes bear: "%s" fits "%s"' % (pattern, common))
    return tuple(value)


def _statuses(value: t.Any) -> t.Tuple[t.Tuple[int, str], ...]:
    """JSON has no numbers for keys."""
    what = "a mapping of HTTP statuses to %s" % ", ".join(MEANINGS)
    if not isinstance(value, t.Mapping) or not all(word in MEANINGS for word in value.values()):
        raise ValueError(what)
    if not all(re.match(r"[1-5][0-9][0-9]\Z", str(status)) for status in value):
        raise ValueError(what)
    return tuple((int(status), str(word)) for status, word in value.items())


def _endpoints(value: t.Any) -> t.Tuple[t.Tuple[str, str], ...]:
    if not isinstance(value, t.Mapping) or not value or not all(kind in ENDPOINTS for kind in value):
        raise ValueError("a mapping of %s to paths" % ", ".join(ENDPOINTS))
    return tuple((str(kind), _path(path)) for kind, path in value.items())


CHECKS: t.Dict[str, Check] = {
    "title": _text,
    "port": _maybe(_number(1, 65535)),
    "opens_early": _maybe(_flag),
    "health": _maybe(_path),
    "health_status": _statuses,
    "models": _path,
    "models_method": _one_of(*METHODS),
    "models_shape": _one_of(*SHAPES),
    "owned_by": _text,
    "models_static": _flag,
    "loads_on_request": _flag,
    "endpoints": _endpoints,
    "metrics": _maybe(_path),
    "metrics_port": _maybe(_number(1, 65535)),
    "metrics_remedy": _text,
    "running": _texts,
    "waiting": _texts,
    "adds_up": _flag,
    "marker": _text,
    "kv_use": _texts,
    "tokens": _texts,
    "prompt_tokens": _texts,
    "steps": _texts,
    "phases": _phases,
    "fatal": _patterns,
    "titles": _titles,
    "on_sigterm": _text,
    "stop_timeout": _maybe(_number(1, 86400)),
    "stop_advice": _text,
}
