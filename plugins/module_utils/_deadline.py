# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Bounded waiting on a monotonic clock that tests can replace.

The clock is that of the host, the same in every process of it: what was written down in one can be gone on with in
another, as long as the host is not booted anew.
"""

from __future__ import annotations

import time
import typing as t

__all__ = ("LATE", "SYSTEM_CLOCK", "Clock", "Deadline", "StallWindow")

LATE = 1.0  # seconds that one question may take beyond a deadline: a last look must have the chance of an answer


class Clock:
    """The clock and the sleep of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK = Clock()


class Deadline:
    """A hard end in ``seconds`` from now, or from a ``start`` on the same clock. Nothing renews it."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM_CLOCK, start: t.Optional[float] = None) -> None:
        self.clock = clock
        self.seconds = max(0.0, float(seconds))
        self.start = clock.monotonic() if start is None else start

    @property
    def elapsed(self) -> float:
        return self.clock.monotonic() - self.start

    @property
    def remaining(self) -> float:
        return max(0.0, self.seconds - self.elapsed)

    @property
    def expired(self) -> bool:
        return self.elapsed >= self.seconds

    def clamp(self, seconds: float) -> float:
        """``seconds``, or what is left of the deadline when that is less."""
        return min(max(0.0, seconds), self.remaining)

    def patience(self, most: float) -> float:
        """Seconds for one question that may hang: ``most``, or what is left, but that little that an answer takes."""
        return min(most, max(LATE, self.remaining))

    def sleep(self, seconds: float) -> None:
        """Sleep, but never past the end."""
        pause = self.clamp(seconds)
        if pause > 0:
            self.clock.sleep(pause)


class StallWindow:
    """A window that movement renews, inside a deadline that it never extends."""

    def __init__(self, seconds: float, deadline: Deadline) -> None:
        self.seconds = float(seconds)
        self.deadline = deadline
        self.last = deadline.clock.monotonic()  # when it moved, on the clock of the deadline

    def moved(self, at: t.Optional[float] = None) -> float:
        """Renew it from the moment ``at`` where that is known, and never from one to come; answers from which.

        What has moved since is not taken back.
        """
        now = self.deadline.clock.monotonic()
        when = now if at is None else min(at, now)
        self.last = max(self.last, when)
        return when

    @property
    def age(self) -> float:
        """Seconds since the last movement."""
        return self.deadline.clock.monotonic() - self.last

    @property
    def remaining(self) -> float:
        return max(0.0, self.last + self.seconds - self.deadline.clock.monotonic())

    @property
    def stalled(self) -> bool:
        return self.remaining <= 0.0
