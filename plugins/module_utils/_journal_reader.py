# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The journal of one unit, followed over its lives: each line once, and what cannot be read said in words."""

from __future__ import annotations

import time
import typing as t

from . import _journal
from ._errors import ServingError
from ._systemd import NoAnswer, UnitState

__all__ = ("Reader",)

FIRST_LINES = 2000
PATIENCE = 5.0  # seconds for a journal that does not answer
AGAIN = 3.0  # seconds until it is asked again where there was nothing or where it failed
DENIED = ("insufficient permissions", "not seeing messages from other users")
NONE = ("No journal files were found",)
DAMAGED = ("corrupted", "truncated", "unsupported feature")


class Reader:
    """Reads on from where it was, in this process or in an earlier one.

    A journalctl that follows costs nothing while nothing is written, where one for each look would cost a hundredth of
    a core. What has to be complete is asked for at once: the first look, and all of a unit that does not run.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.warnings: t.Dict[str, str] = {}
        self.patience: t.Callable[[float], float] = lambda most: most  # for a question that may hang
        self._cursor: t.Optional[str] = None
        self._boot, self._stamp = "", 0  # of the last record
        self._dropped = 0
        self._life: t.Optional[str] = None
        self._ask_first = False  # whether an earlier process was here, and what came since is not known
        self._follower: t.Optional[_journal.Stream] = None
        self._parser = _journal.Parser()
        self._next = float("-inf")  # no question before
        self._checked = self._slow = False
        self._held: t.List[_journal.Record] = []  # of a life that has only begun
        self._held_after: t.Tuple[t.Optional[str], str, int] = (None, "", 0)

    def read(self, state: UnitState) -> t.List[_journal.Record]:
        """The lines since the last call; at the first one in a new life, those of the lives before it."""
        self.unit = state.name or self.unit  # an alias names nothing in the journal
        held, self._held = self._held, []
        return held + self._read(state)

    def _read(self, state: UnitState) -> t.List[_journal.Record]:
        new_life = self._life != state.invocation_id
        ask = new_life or self._ask_first
        if ask or not state.runs or (not self._cursor and self._follower is None and not self._slow):
            if not ask and state.runs and time.monotonic() < self._next:
                return []
            self._ask_first = False
            self.close()
            before = self._place
            found = self._taken(self._once(state))
            if new_life and self._life is not None and state.invocation_id:
                # First all of the life that is over, so that nobody takes the first words of the next for its last.
                found = self._hold_back(found, state.invocation_id, before)
            self._life = state.invocation_id
            if state.runs and (self._cursor or self._slow):
                self._follow()
        elif self._follower is not None:
            found = self._taken(self._poll(self._follower))
        else:
            found = []
            if time.monotonic() >= self._next:
                self._follow()
        return found

    @property
    def _place(self) -> t.Tuple[t.Optional[str], str, int]:
        return self._cursor, self._boot, self._stamp

    def _hold_back(
        self, found: t.List[_journal.Record], life: str, before: t.Tuple[t.Optional[str], str, int]
    ) -> t.List[_journal.Record]:
        first = next((at for at, one in enumerate(found) if one.invocation == life), len(found))
        self._held = found[first:]
        told = found[first - 1] if first else None
        self._held_after = before if told is None else (told.cursor, told.boot, told.monotonic)
        return found[:first]

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def save(self) -> t.Dict[str, t.Any]:
        cursor, boot, stamp = self._held_after if self._held else self._place
        return {
            "cursor": cursor,
            "boot": boot,
            "stamp": stamp,
            "dropped": self._dropped,
            "checked": self._checked,
            "slow": self._slow,
            "life": self._life,
            "warnings": dict(self.warnings),
        }

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        self._cursor, self._boot, self._stamp = saved["cursor"], saved["boot"], saved["stamp"]
        self._dropped, self.warnings = saved["dropped"], dict(saved["warnings"])
        self._checked, self._slow = saved["checked"], saved["slow"]
        # One that is slow is followed at once: to ask it first would cost its patience in each slice.
        self._life, self._ask_first = saved["life"], not self._slow

    def _once(self, state: UnitState) -> t.List[_journal.Record]:
        found = None
        if self._cursor:
            found = self._ask(after_cursor=self._cursor)
        if found is None and state.invocation_id:
            # The place where it was is gone, or there was none: what is of this life and later than all that was seen.
            found = self._ask(invocation=state.invocation_id, lines=FIRST_LINES)
            found = [one for one in found or () if one.boot != self._boot or one.monotonic > self._stamp]
        if not found and not self._cursor and not state.invocation_id:
            # systemd has forgotten its last life, or has not begun the first.
            found = _last_life(self._ask(lines=FIRST_LINES) or ())
        if not found:
            self._next = time.monotonic() + AGAIN
            if not self._cursor and not self._slow:
                self._check()
        return found or []

    def _check(self) -> None:
        """Nothing at all is there: find out once whether that is because it may not be seen."""
        if self._checked:
            return
        self._checked = True
        try:
            remarks = _journal.remarks(self.patience(PATIENCE))
        except ServingError:
            return  # said already
        text = "\n".join(remarks)
        if any(words in text for words in DENIED):
            self.warnings = {
                "denied": 'the journal of the unit "%s" cannot be read in full: run as root, or with become' % self.unit
            }
        elif any(words in text for words in NONE):
            self.warnings["none"] = "this host keeps no journal: what the service writes cannot be seen there"
        damaged = next((line for line in remarks if any(words in line for words in DAMAGED)), None)
        if damaged:
            self.warnings["damaged"] = "a part of the journal cannot be read: %s" % damaged.strip().rstrip(".")

    def _ask(self, **options: t.Any) -> t.Optional[t.List[_journal.Record]]:
        try:
            found = _journal.journal(self.unit, timeout=self.patience(PATIENCE), **options)
        except NoAnswer as error:
            self.warnings["journal"] = error.message
            self._slow = True
            return []
        except ServingError as error:
            if "after_cursor" not in options:
                self.warnings["journal"] = error.message
            self._next = time.monotonic() + AGAIN
            return None
        self.warnings.pop("journal", None)
        return found

    def _follow(self) -> None:
        # From where the last line was; of a journal that is too slow for that, from now on.
        begin = "--no-tail" if self._cursor else "--lines=0"
        arguments = ["--follow", begin, *_journal.arguments_of(self.unit, after_cursor=self._cursor)]
        self._next = time.monotonic() + AGAIN  # not again before, should it end at once
        try:
            self._follower, self._parser = _journal.Stream(arguments), _journal.Parser()
        except ServingError as error:
            self.warnings["journal"] = error.message

    def _poll(self, follower: _journal.Stream) -> t.List[_journal.Record]:
        found: t.List[_journal.Record] = []
        for chunk in follower.read():
            found += self._parser.feed(chunk)
        if follower.ended:
            # Rotated away under it, or the host has no more watches to give: the next one goes on at the same place.
            if follower.close() and not found:
                self._cursor = None
            self._follower = None
        return found

    def _taken(self, found: t.List[_journal.Record]) -> t.List[_journal.Record]:
        if found and found[0].cursor == self._cursor:
            found = [one for one in found if one.cursor != self._cursor]
        for cursor, one in {one.cursor: one for one in found}.items():
            self._cursor, self._boot, self._stamp = cursor or self._cursor, one.boot, one.monotonic
            self._dropped += one.dropped
        if self._dropped:
            self.warnings["dropped"] = (
                'the journal left out %d lines of the unit "%s", which wrote too many at once'
                % (self._dropped, self.unit)
            )
        return found


def _last_life(found: t.Sequence[_journal.Record]) -> t.List[_journal.Record]:
    """What is of the last life in this boot, or of a start after it that systemd skipped or refused."""
    here = _boot()
    found = [one for one in found if not here or one.boot in ("", here)]
    if not found:
        return []
    if found[-1].pid == 1 and not found[-1].invocation:
        first = next((at for at in range(len(found) - 1, -1, -1) if found[at].invocation or found[at].pid != 1), -1)
        return found[first + 1 :]
    life = next((one.invocation for one in reversed(found) if one.invocation), "")
    first = next((at for at, one in enumerate(found) if one.invocation == life), 0)
    return found[first:]


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip().replace("-", "")
    except OSError:
        return ""
