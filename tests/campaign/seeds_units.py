# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From a seed to the description of a systemd unit, what wandered off from it, and the decoy units beside it."""

from __future__ import annotations

import typing as t

from promise import INIT, Fate, fate_of
from seeds import MOST, Builder, Tree, _finished

KEPT = "keep"


def names(seed: int) -> t.Dict[str, str]:
    """Units of one tree; those of the decoys are very like the service's."""
    return {
        "unit": "eng-%d.service" % seed,
        "d1": "eng-%dx.service" % seed,
        "d2": "xeng-%d.service" % seed,
        "s1": "eng-%d-a.scope" % seed,
        "s2": "eng-%d-b.scope" % seed,
        "ds": "eng-%d.scope" % seed,
    }


def unit(seed: int) -> Tree:
    """A forest whose service is a real unit."""
    build = Builder(seed)
    rng, odds = build.rng, build.odds
    kill_mode = rng.choice(("control-group",) * 3 + ("mixed",) * 3 + ("process",) * 4 + ("none",) * 2)
    state = rng.choice(("active",) * 6 + ("front_dead",) * 2 + ("stopped",) * 2)
    uid = rng.choice((0, 0, 1))
    marked, private = odds(0.7), odds(0.2)
    front = build.add(
        None, **build.name("service"), top="unit", place="unit", has_mark=marked, private=private, uid=uid
    )

    def root_extras() -> t.Dict[str, t.Any]:
        return {"unmark": odds(0.1), "nested": odds(0.1), "mounts": odds(0.03)}

    creators = [front["id"]]
    for _worker in range(rng.choice((1, 2, 3, 4, 5, 6, 8))):
        if len(build.nodes) < MOST:
            build.grow(creators, "service", root_extras)
    for place in rng.sample(("d1", "d2", "ds"), rng.choice((1, 2, 2, 3))):
        top = build.add(None, **build.name("decoy"), top=place, place=place, uid=rng.choice((0, 1)))
        decoys = [top["id"]]
        for _decoy in range(rng.choice((0, 1, 2))):
            build.grow(decoys, "decoy", dict)
    if private and odds(0.4):  # somebody who looks around in the service's namespace
        decoy = next(node for node in build.nodes if node.get("place") in ("d1", "d2", "ds"))
        if not decoy.get("uid"):
            build.add(decoy["id"], **build.name("decoy"), enter=front["id"], session=odds(0.5))
    _wander(build, front["id"])
    options = dict(build.options(), grace=rng.choice((0.4, 1.0)), signal="TERM")
    tree: Tree = {
        "seed": seed,
        "kind": "unit",
        "selector": "systemd",
        "refusal": "",
        "front": front["id"],
        "kill_mode": kill_mode,
        "state": state,
        "restart": state == "active" and odds(0.4),
        "marked": marked,
        "private": private,
        "user": uid,
    }
    if state != "active" and not (state == "stopped" and kill_mode == "none"):
        build.dead = {front["id"]}
        if kill_mode in ("control-group", "mixed"):
            build.dead |= {f.id for f in build.facts().values() if f.alive and f.place == "unit"}
    facts = build.facts()
    if any(facts[number].parent > INIT for number in build.dead):
        # A parent outside of the unit would keep a dead one of it: whether the dead vouch for their user is left open.
        tree["state"], build.dead = "active", set()
        facts = build.facts()
    inside = sorted(f.id for f in facts.values() if f.alive and f.place == "unit" and f.id != front["id"])
    refused = False
    if odds(0.08) and inside:
        kept = build.node(rng.choice(inside))
        if "exec" not in kept:
            kept["name"] = KEPT + build.token
            options["protected"] = [kept["name"]]
            facts = build.facts()
            refused = tree["state"] == "active" and kill_mode in ("control-group", "mixed")

    def fate(known: bool) -> Fate:
        roots = {f.id for f in facts.values() if f.marked or f.place == "unit"} | {front["id"]}
        return fate_of(
            facts,
            set() if refused else roots,
            dead_main=front["id"] if known and not refused else 0,
            unit=True,
            allow_foreign_users=options["allow_foreign_users"],
            protected=options.get("protected", ()),
        )

    end = fate(front["id"] in build.dead)
    if tree["state"] == "stopped" and end != fate(False):
        # systemd forgets the main process of a unit that was stopped and did not fail, some generations sooner.
        tree["state"] = "front_dead"
    build.behave(end, True, calm=refused)
    for node in build.nodes:  # whoever is dead by then behaves in some way until then
        if node["id"] in build.dead and odds(0.3) and "exec" not in node:
            node["ignores"] = True
    tree["refusal"] = "protected" if refused else ""
    return _finished(tree, build, end, options, check=odds(0.15))


def _wander(build: Builder, front: int) -> None:
    """Who leaves the control group, and who loses the mark in it."""
    facts = build.facts()
    creators = {node.get("by") for node in build.nodes}
    for node in list(build.nodes):
        fact = facts[node["id"]]
        if not fact.alive or fact.place != "unit" or fact.id == front or node.get("nested"):
            continue
        leaf = node["id"] not in creators and fact.uid == 0
        if build.odds(0.25):
            node["moved"] = build.rng.choice(("s1", "s2"))
            node["name"] = "eng" + build.token  # systemd moves nobody with a line break in the name
            node.pop("exec", None)
            if leaf and build.odds(0.5):  # by its own doing
                node.update(exec="scope", name="sleep", moved="own%d" % node["id"])
        elif leaf and build.odds(0.15):
            node["exec"] = build.rng.choice(("setpriv", "setpriv", "runuser"))
            node["name"] = "sleep"
