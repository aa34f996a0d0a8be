# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the product promises of a forest, told from its description alone; the library is never asked.

The promise is the page docs/what-counts-as-owned.md, its table "The evidence" above all. Where its words leave
something open, this is how they are read here, whatever the library does:

- A dead process that is not collected yet still leads its session: its leader "is owned, or was". One that is gone
  before the first look leads nothing any more, except a unit's main process, whose number systemd knows as long as it
  remembers it: always when the unit failed, and else nobody can tell how long.
- The users and places that weak evidence must fit are those of processes with firm evidence, not those that other weak
  evidence shows: two strangers do not vouch for each other.
- Who is only named and left alone is not owned, so nothing follows from him: his children need evidence of their own.
- A child of a process with weak evidence is owned, as "its parent is owned" says, and its evidence is weak.
  A session, a group or a namespace that such a child makes speaks for nobody.
- What counts is the first look: who is a stranger then stays one, also when the main process ends afterwards.
- A number says nothing: whoever bears the number of an owned process that is gone is somebody else, and leads his own.
- With a pid, a pid file or a pattern a mount namespace is no evidence, since there is no unit that it would be of.
- A process with a protected name is never signalled, its children are.
"""

from __future__ import annotations

import typing as t

INIT, GROUND = 0, -1
Node = t.Dict[str, t.Any]


class Facts(t.NamedTuple):
    """How one process stands in the world at the first look."""

    id: int
    alive: bool
    zombie: bool
    parent: int  # nodes, INIT or GROUND
    session: int
    group: int
    uid: int
    marked: bool
    mounts: int  # the node that made the namespace, 0 for the host's
    place: str  # the unit that it is in
    name: str
    title: str


def facts_of(nodes: t.Sequence[Node], dead: t.Collection[int] = ()) -> t.Dict[int, Facts]:
    """The facts of all nodes; ``dead`` are those that somebody ended and collected before the first look."""
    found: t.Dict[int, Facts] = {}
    births: t.Dict[int, str] = {}  # the units that they were created in
    titles: t.Dict[int, str] = {}  # those that children inherit: they are created before another program takes over
    by_id = {node["id"]: node for node in nodes}

    def lives(node: Node) -> bool:
        return not (node.get("leave") or node.get("zombie") or node["id"] in dead)

    def parent_of(node: Node) -> int:
        top = GROUND if node.get("top") is None else INIT
        creator = node.get("by")
        if creator is None or lives(by_id[creator]):
            return top if creator is None else int(creator)
        while creator is not None:
            above = by_id[creator]
            if above.get("reaper") and lives(above):
                return int(creator)
            creator = above.get("by")
        return INIT

    for node in nodes:
        number, creator = node["id"], found.get(node.get("by") or 0)
        session = creator.session if creator else (number if node.get("top") else GROUND)
        group = creator.group if creator else (number if node.get("top") else GROUND)
        if node.get("session"):
            session = group = number
        if node.get("group"):
            group = number
        if "join" in node:
            group = found[node["join"]].group
        mounts = creator.mounts if creator else (number if node.get("private") else 0)
        if node.get("mounts"):
            mounts = number
        if "enter" in node:
            mounts = found[node["enter"]].mounts
        marked = "mark" in node or bool(node.get("has_mark")) or bool(creator and creator.marked)
        if node.get("unmark") or node.get("exec") in ("setpriv", "runuser"):
            marked = False
        uid = node.get("uid") or (creator.uid if creator else 0)
        if node.get("exec") == "setpriv":
            uid = 1
        titles[number] = node.get("title", titles.get(node.get("by") or 0, ""))
        births[number] = node.get("place") or births.get(node.get("by") or 0, "")
        found[number] = Facts(
            id=number,
            alive=lives(node) and not node.get("born"),
            zombie=bool(node.get("zombie")) and parent_of(node) > INIT,  # others are collected at once
            parent=parent_of(node),
            session=session,
            group=group,
            uid=uid,
            marked=marked,
            mounts=mounts,
            place=node.get("moved") or births[number],
            name=node.get("name", creator.name if creator else ""),
            title=node.get("title", "sleep") if "exec" in node else titles[number],
        )
    return found


class Fate(t.NamedTuple):
    """Who must be gone, who must be named and left alone, who may be named; everybody else must live unmentioned."""

    gone: t.Set[int]
    named: t.Set[int]
    maybe_named: t.Set[int]
    firm: t.Set[int]
    leaders: t.Set[int]  # whose sessions and groups are owned
    users: t.Set[int]
    places: t.Set[str]


def _descendants(facts: t.Mapping[int, Facts], roots: t.Iterable[int]) -> t.Set[int]:
    found = set(roots)
    grown = True
    while grown:
        new = {f.id for f in facts.values() if (f.alive or f.zombie) and f.parent in found and f.id not in found}
        found |= new
        grown = bool(new)
    return found


def fate_of(
    facts: t.Mapping[int, Facts],
    roots: t.Collection[int],
    *,
    dead_main: int = 0,
    unit: bool = False,
    allow_foreign_users: bool = False,
    protected: t.Collection[str] = (),
) -> Fate:
    """What must become of everybody, with these processes selected.

    ``dead_main`` is the main process of the unit that is gone; who was born while it lived has firm evidence.
    """
    living = {f.id: f for f in facts.values() if f.alive}
    firm = {number for number in roots if number in living}
    if dead_main:
        firm |= {f.id for f in living.values() if dead_main in (f.session, f.group)}
    firm = _descendants(facts, firm)
    leaders = {n for n in firm if n in (facts[n].session, facts[n].group)}
    users = {facts[n].uid for n in firm}
    places = {facts[n].place for n in firm}
    spaces = {facts[n].mounts for n in firm if n in living and facts[n].mounts} if unit else set()

    def fits(fact: Facts) -> bool:
        here = not fact.place or fact.place in places
        return here and (allow_foreign_users or fact.uid in users)

    def shown(fact: Facts) -> bool:
        led = fact.session in leaders or fact.group in leaders
        return fact.id not in firm and (led or fact.mounts in spaces)

    weak = {f.id for f in living.values() if shown(f) and fits(f)}
    named = {f.id for f in living.values() if shown(f)} - weak
    grown = True
    while grown:
        grown = False
        for fact in living.values():
            if fact.parent in weak and fact.id not in weak | firm | named:
                (weak if fits(fact) else named).add(fact.id)
                grown = True
    gone = {n for n in firm | weak if n in living}
    kept = {n for n in gone if living[n].name in protected and protected}
    below = {n for n in _descendants(facts, named) if n in living} - gone - named
    return Fate(gone - kept, named - kept, below, firm, leaders, users, places)


def newborn_is_owned(fate: Fate, facts: t.Mapping[int, Facts], creator: int, stays: bool, unit: bool) -> bool:
    """Whether a child that an owned process creates when it is asked to end is provably owned, without a race.

    One whose creator is gone before anybody looks needs more than descent.
    """
    fact = facts[creator]
    if creator not in fate.gone:
        return False
    if unit and (fact.marked or fact.place == "unit"):
        return True
    led = fact.session in fate.leaders or fact.group in fate.leaders
    return stays or (led and fact.uid in fate.users and (not fact.place or fact.place in fate.places))
