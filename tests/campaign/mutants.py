# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Wrong libraries, each of which the campaign must find at its small size."""

from __future__ import annotations

import typing as t


def replace(owner: t.Any, name: str, value: t.Any) -> None:
    """Put something else in the place of what is there: a name that is there no more would change nothing, unseen."""
    if not hasattr(owner, name):
        raise AttributeError("%s has no %s that could be replaced" % (getattr(owner, "__name__", owner), name))
    setattr(owner, name, value)


def no_sessions() -> None:
    """Sessions and process groups are no evidence."""
    from gpuops import _ownership

    replace(_ownership, "_leads", lambda *_arguments: False)


def any_session() -> None:
    """A session belongs to the service when anything of the service is in it: the shell that started it goes too."""
    from gpuops import _ownership

    def leads(table: t.Any, owned: t.Any, leader: int) -> bool:
        shared = {n for ref in owned.processes for p in [table.by_ref(ref)] if p for n in (p.session, p.pgrp)}
        return leader > 1 and leader in shared

    replace(_ownership, "_leads", leads)


def by_name() -> None:
    """Whoever is called like an owned process is taken for one."""
    from gpuops import _ownership

    def wrong(right: t.Callable[..., t.Any]) -> t.Callable[..., t.Any]:
        def owned_by_name(table: t.Any, *arguments: t.Any, **options: t.Any) -> t.Any:
            owned = right(table, *arguments, **options)
            own = _ownership.own_line(table)
            names = {p.name for p in map(table.by_ref, list(owned.processes)) if p is not None}
            for process in table:
                if process.name in names and process.pid not in own:
                    owned.add(process, "name", True)
            return owned

        return owned_by_name

    replace(_ownership, "of_pids", wrong(_ownership.of_pids))
    replace(_ownership, "of_unit", wrong(_ownership.of_unit))


def numbers_only() -> None:
    """A process is its number; when it was created does not matter."""
    from gpuops import _processes

    replace(_processes.Table, "by_ref", lambda self, ref: self.get(ref.pid))


def old_files() -> None:
    """Whoever bears the number that is given or in a pid file is the one meant, whenever it was created."""
    from gpuops import _selection

    replace(_selection, "CLOCK_SLIP", 1e9)


def strangers_too() -> None:
    """Weak evidence is enough for anybody's process, wherever it is."""
    from gpuops import _ownership

    replace(_ownership, "foreign", lambda *_arguments, **_options: set())


def no_mark() -> None:
    """The mark is not looked at."""
    from gpuops import _ownership

    right = _ownership.of_unit
    replace(_ownership, "of_unit", lambda *arguments, **options: right(*arguments, **dict(options, mark_gid=None)))


def asks_only() -> None:
    """Nobody is killed who does not heed the signal."""
    from gpuops import _processes, _stop

    right = _processes.send

    def send(ref: t.Any, number: int) -> str:
        return "sent" if number == 9 else right(ref, number)

    defaults = _stop.Stopper.__init__.__defaults__ or ()
    if right not in defaults:
        raise AttributeError("a stop sends its signals in another way than %s" % right)
    _stop.Stopper.__init__.__defaults__ = tuple(send if value is right else value for value in defaults)


MUTANTS: t.Dict[str, t.Callable[[], None]] = {
    "no_sessions": no_sessions,
    "any_session": any_session,
    "by_name": by_name,
    "numbers_only": numbers_only,
    "old_files": old_files,
    "strangers_too": strangers_too,
    "no_mark": no_mark,
    "asks_only": asks_only,
}


def apply(name: str) -> None:
    MUTANTS[name]()
