# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Regular expressions that a user wrote, each look for one bounded: some backtrack for longer than any wait lasts.

By its text nobody can tell such an expression without refusing good ones. So it is given the processor for a while, and
one that wants more is not used again. The time is that of the processor, so that a busy host makes no expression slow.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import typing as t

from ._profile import Profile

__all__ = ("finder", "given_up", "remarks", "search")

BUDGET = 0.5  # seconds of the processor for one line: what a good one takes is a thousandth of that

given_up: t.List[str] = []  # in this process


class _Over(Exception):
    """The budget is spent."""


def finder(profile: Profile, subject: str) -> t.Callable[[str, str], t.Optional[int]]:
    """How to look for the expressions of one subject of a profile: those of the library need no guard."""
    return search if profile.known.get(subject) == "given" else _plain


def _plain(pattern: str, line: str) -> t.Optional[int]:
    found = re.search(pattern, line, re.IGNORECASE)
    return None if found is None else found.start()


def search(pattern: str, line: str) -> t.Optional[int]:
    """Where a line has what the pattern describes, whatever the case of its letters; None where it has it nowhere."""
    if pattern in given_up:
        return None
    try:
        with _budget():
            return _plain(pattern, line)
    except _Over:
        given_up.append(pattern)
        return None


def remarks() -> t.List[str]:
    """What is to be said of those that were given up."""
    text = 'the expression "%s" in "profile" is not used any more: it took %g s for one line: write it more simply'
    return [text % (pattern, BUDGET) for pattern in given_up]


@contextlib.contextmanager
def _budget() -> t.Iterator[None]:
    # An expression that is being looked for lets signals in every few thousand steps, in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: t.Any) -> t.NoReturn:
        raise _Over

    before = signal.signal(signal.SIGVTALRM, over)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
