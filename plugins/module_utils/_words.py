# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What an operator writes to name processes: wrong words are told before anything is looked at."""

from __future__ import annotations

import math
import pwd
from typing import Any, Mapping

from ._errors import UsageError

__all__ = ["check_words", "user_id"]

MOST_UID = 2**32


def check_words(params: Mapping[str, Any]) -> None:
    """A UsageError for what is empty, and for what has no meaning beside the rest."""
    create_time, user = params.get("create_time"), params.get("user")
    if create_time is not None and not math.isfinite(create_time):
        raise UsageError('"create_time" must be a number of seconds, not %s' % create_time)
    for name in ("unit", "pidfile", "pattern", "user"):
        text = params.get(name)
        if text == "":
            raise UsageError('"%s" is empty' % name)
        if text and ("\0" in text or ("\n" in text and name != "pattern")):
            raise UsageError('"%s" holds a %s: leave it out' % (name, "null byte" if "\0" in text else "line break"))
    by_number = params.get("pid") is not None or params.get("pidfile") is not None
    if create_time is not None and not by_number:
        raise UsageError('"create_time" says which process is meant by "pid" or "pidfile": leave it out here')
    if user is not None and not (by_number or params.get("pattern") or params.get("gpus")):
        raise UsageError('"user" has no meaning for a unit, which may run as several users: leave it out here')


def user_id(name: str) -> int:
    """The number of an account, or the number itself where no account bears it."""
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # no such account, or no name of any
        if len(name) <= 10 and name.isascii() and name.isdecimal() and int(name) < MOST_UID:
            return int(name)
        raise UsageError('the user "%s" does not exist on this host' % name) from None
