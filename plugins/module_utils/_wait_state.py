# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A long wait in slices: when a slice ends, what it tells while it lasts, and what the next one must know.

The controller shows what a slice found and asks for the next. It hands on the token that the slice gave it, of which it
reads where the wait stands alone, and counts the time by its own clock for the case that the token is of no use any
more: the host was booted anew.
"""

from __future__ import annotations

import contextlib
import time
import typing as t

from . import _wait_request, _wait_text
from ._deadline import SYSTEM_CLOCK, Clock
from ._readiness import Wait

__all__ = ("Slice", "boot_id")

FORMAT = 4
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Seconds that a change stands before it ends a slice. Readiness ends it at once, and near the end of a load it is
# better not to be between two slices.
SETTLE, NEAR_SETTLE = 1.0, 4.0
# Seconds before the end of a wait in which no slice ends: the next one would begin after it, and tell it late.
LATE = 3.0
# A slice costs the host what it takes to start a program, and a little that the program does not see. At the beginning
# every change ends one. Later a percentage alone does when that cost is a small share of what the slice has lasted, and
# not at all where it is read what a slice tells while it lasts.
LIVELY = 15.0
SHARE, UNSEEN = 0.015, 0.15
SHORTEST, LONGEST = 10.0, 55.0
AGAIN, ANEW = 1.0, 5.0  # seconds between two that are told: when something has changed, and when nothing has


def boot_id(path: str = BOOT_ID) -> str:
    try:
        with open(path, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


class Slice:
    """One slice of a wait. It is asked between two looks whether to end."""

    def __init__(
        self,
        make: t.Callable[[float], Wait],
        what: t.Sequence[t.Optional[str]],
        ask: _wait_request.Asked,
        boot: str,
        clock: Clock = SYSTEM_CLOCK,
        began: t.Optional[float] = None,
    ) -> None:
        """``make`` a wait that began at a moment; ``what`` is all that must be the same for a token to be of use.

        ``began`` is when this slice did, if there was something to be done before.
        """
        self.clock, self._boot, self._what = clock, boot, list(what)
        self._began, self._changed = clock.monotonic() if began is None else began, float("inf")
        self._lively, self._whole, self._heard = ask.lively, ask.whole, ask.heard
        self._looked = False  # whether there is anything to tell
        self._told = float("-inf")
        self._key: t.Optional[t.List[t.Any]] = None
        self._cost = time.process_time() + UNSEEN  # what it took to come here
        token = ask.token
        fits = [token.get("format"), token.get("boot"), token.get("what")] == [FORMAT, boot, self._what]
        self._shown: t.Optional[t.List[t.Any]] = None
        if fits:
            with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
                start = float(token["wait"]["start"])
                # Who asks for all that is left may have seen more time go by than the clock of this host has counted.
                self.wait = make(min(start, self._began - ask.elapsed) if ask.whole else start)
                self.wait.restore(token["wait"])
                self._shown = token["shown"]
                self._looked = True
                return
        self.wait = make(self._began - ask.elapsed)

    def __call__(self) -> bool:
        """Whether the slice has lasted long enough, or has something to tell."""
        self._looked = True
        if self._whole:
            return False
        now = self.clock.monotonic()
        age = now - self._began
        if age >= LONGEST + LATE:
            return True
        if self.wait.ends_within(LATE):
            return False
        if age >= LONGEST:
            return True
        if not self._lively:
            return False
        live = self.wait.live()
        change = _wait_text.changed(self._shown, _wait_text.key(live))
        if not change:
            self._changed = float("inf")
            return False
        self._changed = min(self._changed, now)
        if now - self._changed < (NEAR_SETTLE if live["near"] else SETTLE):
            return False
        if self.wait.deadline.elapsed < LIVELY:
            return True
        if change == "much":
            return age >= SHORTEST
        return not self._heard and age >= self._cost / SHARE

    def tell(self, write: t.Callable[[t.Dict[str, t.Any]], None]) -> None:
        """Write where the wait stands, unless that was written before. It is called all the time."""
        now = self.clock.monotonic()
        if not self._looked or now - self._told < AGAIN:
            return
        live = self.wait.live()
        key = _wait_text.key(live)
        if key != self._key or now - self._told >= ANEW:
            self._told, self._key = now, key
            write(live)

    def token(self) -> str:
        """What the next slice needs."""
        live = self.wait.live()
        content = {
            "format": FORMAT,
            "boot": self._boot,
            "what": self._what,
            "wait": self.wait.save(),
            "live": live,
            "shown": _wait_text.key(live) if self._lively else None,
        }
        return _wait_request.pack(content)
