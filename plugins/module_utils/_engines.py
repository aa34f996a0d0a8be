# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The profile of an engine by its name, and what it says of a line of the log or the name of a process."""

from __future__ import annotations

import re
import typing as t

from . import _matching
from ._answers import Listed, listed, meaning, names_model
from ._causes import CAUSES
from ._errors import UsageError
from ._profile import Phase, Profile
from ._profiles import PROFILES

__all__ = [
    "CAUSES",
    "NAMES",
    "PROFILES",
    "Listed",
    "Phase",
    "Profile",
    "get",
    "listed",
    "match",
    "meaning",
    "names_model",
    "overall",
    "phase_of",
    "titles",
]

NAMES = list(PROFILES)


def get(name: t.Optional[str], overrides: t.Optional[t.Mapping[str, t.Any]] = None) -> Profile:
    """The profile of an engine; without a name, the one that assumes least. ``overrides`` are fields and values."""
    try:
        profile = PROFILES[name or "openai"]
    except KeyError:
        raise UsageError(
            'the engine "%s" is not known: use one of %s, the last for any other that answers like OpenAI'
            % (name, ", ".join(PROFILES))
        ) from None
    if not overrides:
        return profile
    # Loaded where it is asked for: a module compiles what it imports on every run.
    from ._overrides import override

    return override(profile, overrides)


def titles(name: t.Optional[str], overrides: t.Optional[t.Mapping[str, t.Any]] = None) -> t.Optional[t.Pattern[str]]:
    """What the names of an engine's processes are known by; none where a name proves nothing."""
    patterns = get(name, overrides).titles
    return re.compile("|".join(patterns)) if patterns else None


def match(patterns: t.Sequence[t.Sequence[t.Any]], line: str) -> t.Optional[str]:
    """The word of the first pattern that a line fits."""
    for row in patterns:
        if re.search(row[0], line, re.IGNORECASE):
            return str(row[1])
    return None


def phase_of(profile: Profile, line: str) -> t.Optional[Phase]:
    """The phase of the load that a line of the log tells of."""
    find = _matching.finder(profile, "phases")
    return next((phase for phase in profile.phases if find(phase.pattern, line) is not None), None)


def overall(profile: Profile, word: str, percent: t.Optional[float]) -> t.Optional[float]:
    """How far the whole load has come, roughly, from its phase and the percentage within; None when nobody knows."""
    share = next((phase.share for phase in profile.phases if phase.word == word and phase.share is not None), None)
    if share is None:
        return None
    begin, end = share
    return round(begin + (end - begin) * min(max(percent or 0.0, 0.0), 100.0) / 100.0, 1)
