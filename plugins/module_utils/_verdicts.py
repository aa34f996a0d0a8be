# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every verdict of the collection, once: is it good, does a task fail on it, how does the command line exit."""

from __future__ import annotations

import typing as t


class Verdict(t.NamedTuple):
    ok: bool
    fails: bool
    exit_code: int


_GOOD = Verdict(True, False, 0)
_BAD = Verdict(False, True, 1)
_UNKNOWN = Verdict(False, True, 2)

GPU_WORDS = ("clear", "busy", "unknown", "error")

VERDICTS: t.Dict[str, Verdict] = {
    # GPU
    "clear": _GOOD,
    "unknown": _UNKNOWN,
    "error": _UNKNOWN,
    # stop
    "absent": _GOOD,
    "stopped": _GOOD,
    "survivors": _BAD,
    "unkillable": _BAD,
    "refused": _BAD,
    # start
    "started": _GOOD,
    "running": _GOOD,
    "failed": _BAD,
    "not_found": _BAD,
    # wait
    "ready": _GOOD,
    "progressing": _BAD,
    "stalled": _BAD,
    "restart_loop": _BAD,
    "dead": _BAD,
    "wrong_server": _BAD,
    "wedged": _BAD,
    "auth_error": _BAD,
    # probe
    "ok": _GOOD,
    # a latency limit that the caller set turns slow into a failure; that is decided where the limit is known
    "slow": Verdict(True, False, 0),
    "busy": _BAD,
    "route_broken": _BAD,
    "wrong_model": _BAD,
    "empty_response": _BAD,
    "error_response": _BAD,
    "misconfigured": _BAD,
    # drain, gateway, lease
    "idle": _GOOD,
    "drained": _GOOD,
    "held": _GOOD,
    "released": _GOOD,
    # audit; minor is less than the caller fails on
    "clean": _GOOD,
    "minor": _GOOD,
    "flawed": _BAD,
}

USAGE_EXIT_CODE = 3


def lookup(word: str) -> Verdict:
    """The meaning of a verdict. A word that is not in the table is a programming error."""
    return VERDICTS[word]


def worst(words: t.Iterable[str]) -> str:
    """The worst of several GPU verdicts; no words at all is unknown, never clear."""
    found = list(words)
    if not found:
        return "unknown"
    return max(found, key=GPU_WORDS.index)
