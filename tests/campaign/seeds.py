# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""From a seed to the description of one forest beside which one service is stopped, and to what must become of it."""

from __future__ import annotations

import random
import typing as t

from promise import GROUND, INIT, Facts, Fate, Node, facts_of, fate_of, newborn_is_owned

MARK = 987654
USERS = {0: "root", 1: "daemon", 2: "bin", 3: "sys"}
STRANGE = ("a b c", ") R 1 (x", "two\nlines", "b\xffd", "back\\slash", "systemd", "python3", "x (deleted)")
MOST = 40  # nodes before those that are born at the end
Tree = t.Dict[str, t.Any]


class Builder:
    """The nodes of one forest while they are made up."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.token = "%04x" % self.rng.randrange(16**4)
        self.nodes: t.List[Node] = []
        self.dead: t.Set[int] = set()

    def odds(self, chance: float) -> bool:
        return self.rng.random() < chance

    def add(self, by: t.Optional[int], **keys: t.Any) -> Node:
        node = dict({"id": len(self.nodes) + 1}, **{key: value for key, value in keys.items() if value})
        if by is not None:
            node["by"] = by
        self.nodes.append(node)
        return node

    def facts(self) -> t.Dict[int, Facts]:
        return facts_of(self.nodes, self.dead)

    def node(self, number: int) -> Node:
        return self.nodes[number - 1]

    def name(self, kind: str) -> t.Dict[str, t.Any]:
        """A name; a decoy's may be very like a worker's."""
        number, rng = self.rng.randrange(100), self.rng
        workers = ("eng%s" % self.token, "eng%s-w%d" % (self.token, number), "ray::%s" % self.token, "VLLM::Worker")
        decoys = (
            "eng%s%d" % (self.token, number),
            "xeng%s" % self.token,
            "Eng%s" % self.token,
            "eng%s-wx" % self.token,
        )
        keys: t.Dict[str, t.Any] = {"name": rng.choice(workers if kind == "service" or self.odds(0.35) else decoys)}
        if self.odds(0.1):
            keys["name"] = rng.choice(STRANGE if kind == "service" else STRANGE + ("sshd",))
        if self.odds(0.3):
            keys["title"] = "serve %s%s" % (self.token, "" if kind == "service" or self.odds(0.3) else "x")
        return keys

    def grow(self, creators: t.List[int], kind: str, root_extras: t.Callable[[], t.Dict[str, t.Any]]) -> None:
        """One more process, or a process behind one or two that end: a double fork, a daemon."""
        by: t.Optional[int] = self.rng.choice(creators[:1] * 2 + creators)
        by = None if by == GROUND else by
        for _step in range(self.rng.choice((0, 0, 0, 1, 1, 2))):
            between = self.add(
                by, leave=True, session=self.odds(0.4), group=self.odds(0.1), **self.extras(by, root_extras)
            )
            by = between["id"]
        node = self.add(by, **self.name(kind), **self.extras(by, root_extras))
        if self.odds(0.25):
            node["session"] = True
        elif self.odds(0.15):
            node["group"] = True
        elif self.odds(0.15):
            self.join(node)
        if self.odds(0.12) and self.uid(by) == 0:
            node["uid"] = self.rng.choice((1, 1, 2, 3))
        if self.odds(0.06):
            node["reaper"] = True
        if self.odds(0.12):
            node["exec"] = "sleep"
            node["name"] = "sleep"
        elif self.odds(0.06) and by is not None:
            node["zombie"] = True
            for key in ("uid", "join", "reaper"):
                node.pop(key, None)
            if self.odds(0.6):  # what a zombie leads
                self.add(node["id"], **self.name(kind))
            return
        creators.append(node["id"])

    def extras(self, by: t.Optional[int], root_extras: t.Callable[[], t.Dict[str, t.Any]]) -> t.Dict[str, t.Any]:
        return root_extras() if self.uid(by) == 0 else {}

    def uid(self, number: t.Optional[int]) -> int:
        return self.facts()[number].uid if number is not None else 0

    def join(self, node: Node, target: int = 0) -> None:
        """Into the group of an earlier process of the same session."""
        facts = self.facts()
        mine = facts[node["id"]]
        fit = [
            f.id
            for f in facts.values()
            if f.alive and f.group == f.id and f.session == mine.session and f.id < mine.id and f.id != mine.group
        ]
        fit = [number for number in fit if target in (0, number)]
        if fit and not any(node.get(key) for key in ("session", "group", "zombie", "leave")):
            node["join"] = self.rng.choice(fit)

    # What each does when it is asked to end

    def behave(self, fate: Fate, unit: bool, calm: bool = False) -> None:
        facts = self.facts()
        entered = {node["enter"] for node in self.nodes if "enter" in node}
        groups: t.Dict[int, t.List[Facts]] = {}
        for fact in facts.values():
            if fact.alive:
                groups.setdefault(fact.group, []).append(fact)
        for node in list(self.nodes):
            fact = facts[node["id"]]
            if not fact.alive:
                continue
            alike = not calm and self.may_stop(node, fact, groups[fact.group], fate)
            if fact.id in fate.gone:
                self.misbehave(node, fate, facts, unit, alike)
                continue
            fragile = self.odds(0.25) and "exec" not in node
            if not fragile:
                node["blocks"] = True
            if self.odds(0.04) and alike and fact.session == fact.id and "exec" not in node and not fragile:
                node["stopped"] = True
            elif self.odds(0.02) and not {"exec", "moved"} & set(node):  # nobody can move a main thread that has ended
                node["threads"] = True
        for number in entered:  # it is in no namespace then that could be entered
            self.node(number).pop("threads", None)

    def may_stop(self, node: Node, fact: Facts, group: t.Sequence[Facts], fate: Fate) -> bool:
        """Whether the kernel leaves alone a group in which this process is stopped, until the stop has begun.

        It signals all of a group with stopped members whose last tie to the rest of its session ends: so nobody above
        ends before, nobody joined from elsewhere, and during the stop all of it is of one fate.
        """
        if self.dead or len({member.id in fate.gone for member in group}) > 1:
            return False
        if any("join" in self.node(member.id) for member in group):
            return False
        above = node.get("by")
        while above is not None and fact.session != node["id"]:
            if self.node(above).get("leave") or self.node(above).get("zombie"):
                return False
            above = self.node(above).get("by")
        return True

    def misbehave(self, node: Node, fate: Fate, facts: t.Dict[int, Facts], unit: bool, alike: bool) -> None:
        kind = self.rng.choice(("",) * 9 + ("ignores",) * 4 + ("blocks",) * 2 + ("slow",) * 2 + ("on_term",) * 4)
        if kind in ("ignores", "blocks"):
            node[kind] = True
        elif kind == "slow" and "exec" not in node:
            node["slow"] = self.rng.choice((0.05, 0.1, 0.2))
        elif kind == "on_term" and "exec" not in node:
            stays = self.odds(0.4)
            if newborn_is_owned(fate, facts, node["id"], stays, unit):
                node.update(on_term=True, stays=stays)
                raced = not newborn_is_owned(fate, facts, node["id"], False, unit)
                self.bear(node, 0 if raced else 2, unit and facts[node["id"]].marked)
        elif self.odds(0.08) and alike and "exec" not in node:
            node["stopped"] = True
        elif self.odds(0.03) and not {"exec", "moved"} & set(node):
            node["threads"] = True

    def bear(self, node: Node, depth: int, marked: bool) -> None:
        """Who is created when the node is asked to end."""
        for _child in range(self.rng.choice((1, 1, 2))):
            child = self.add(node["id"], born=True, **self.name("service"))
            if marked and self.odds(0.3):
                child["session"] = True
            if depth and self.odds(0.4):
                child["on_term"] = True
                self.bear(child, depth - 1, marked)
            elif self.odds(0.4):
                child["ignores"] = True

    def options(self) -> t.Dict[str, t.Any]:
        return {
            "signal": self.rng.choice(("TERM",) * 5 + ("INT", "HUP", "QUIT")),
            "grace": self.rng.choice((0.2, 0.3, 0.4)),
            "kill_grace": 4.0,
            "order": self.rng.choice(("parent_first", "parent_first", "all")),
            "allow_foreign_users": self.odds(0.15),
        }


REFUSED = (
    "wrong_time",
    "old_pidfile",
    "reused_pidfile",
    "open_pidfile",
    "strange_pidfile",
    "wrong_user",
    "own",
    "init",
    "ssh",
)


def plain(seed: int) -> Tree:
    """A forest without systemd; a unit is made up where a mark or a namespace shall count."""
    build = Builder(seed)
    rng, odds = build.rng, build.odds
    selector = rng.choice(("pid",) * 5 + ("timed", "pidfile", "pidfile", "pattern", "pattern") + ("unit",) * 4)
    refusal = ""
    if odds(0.07):
        selector, refusal = "refused", rng.choice(REFUSED)
    elif odds(0.02):
        selector, refusal = "pid", "dead"
    unit = selector == "unit"

    def root_extras() -> t.Dict[str, t.Any]:
        if not unit:
            return {"mounts": odds(0.03)}
        return {"mounts": odds(0.06), "unmark": odds(0.08)}

    ground: t.List[int] = [GROUND]
    if odds(0.6):  # a shell that it was started from
        shell = build.add(None, **build.name("decoy"), session=odds(0.7), group=odds(0.3), reaper=odds(0.25))
        ground.append(shell["id"])
    by: t.Optional[int] = ground[-1] if ground[-1] != GROUND else None
    if odds(0.35):
        by = build.add(by, leave=True, session=odds(0.6))["id"]
    front = build.add(by, **build.name("service"), session=odds(0.5), group=odds(0.25), mounts=unit and odds(0.35))
    if odds(0.3):
        front["uid"] = rng.choice((1, 1, 2))
    if unit and odds(0.75):
        front["mark"] = MARK
    if selector == "pattern":
        front["name"] = "eng" + build.token
    elif refusal == "ssh":
        front["name"] = "sshd"
    creators, first = [front["id"]], front["id"]
    for _worker in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 11))):
        if len(build.nodes) < MOST:
            build.grow(creators, "service", root_extras)
    for _decoy in range(rng.choice((1, 2, 3, 4, 6))):
        begin = len(build.nodes)
        build.grow(ground, "decoy", dict)
        for node in build.nodes[begin:]:
            if odds(0.25) and not node.get("join"):
                build.join(node, first)
                if "join" in node and "exec" not in node and odds(0.4):  # a child of his that looks like a worker
                    build.add(
                        node["id"],
                        session=odds(0.7),
                        uid=0 if build.uid(node["id"]) else front.get("uid"),
                        **build.name("service"),
                    )
    if unit and build.facts()[first].mounts and odds(0.3):
        build.add(None, **build.name("decoy"), enter=first, uid=rng.choice((0, 3)), session=odds(0.5))
    options = build.options()
    tree: Tree = {"seed": seed, "kind": "plain", "selector": selector, "refusal": refusal, "front": first}
    if refusal in ("reused_pidfile", "dead") or (unit and odds(0.2)):
        if build.facts()[first].parent in (INIT, GROUND):  # who collect it
            build.dead = {first}
        elif refusal:
            refusal = tree["refusal"] = "wrong_time"
            tree["selector"] = "refused"
    for node in build.nodes:  # a pattern that fits the SSH server is refused
        if selector == "pattern" and node.get("name") == "sshd":
            node["name"] = "x"
    facts = build.facts()
    if selector == "pattern":
        tree["user"] = facts[first].uid
    roots = {"pattern": _matching(facts, build.token, facts[first].uid)}.get(selector, {first})
    if unit:
        roots = {f.id for f in facts.values() if f.marked} | {first}

    def fate() -> Fate:
        chosen = set() if refusal else roots
        main = first if unit and first in build.dead else 0
        return fate_of(
            facts,
            chosen,
            dead_main=main,
            unit=unit,
            allow_foreign_users=options["allow_foreign_users"],
            protected=options.get("protected", ()),
        )

    end = fate()
    if odds(0.08) and len(end.gone) > 2 and selector != "pattern":
        kept = rng.choice(sorted(end.gone - {first}))
        build.node(kept)["name"] = "keep" + build.token
        build.node(kept).pop("exec", None)
        options["protected"] = ["keep" + build.token]
        facts = build.facts()
        end = fate()
    build.behave(end, unit, calm=bool(refusal))
    if not refusal and odds(0.3):
        _succeed(build, end, facts, tree)
        options["grace"] = 0.6 if "heir" in tree else options["grace"]
    return _finished(tree, build, end, options, check=odds(0.15))


def _finished(tree: Tree, build: Builder, end: Fate, options: t.Dict[str, t.Any], check: bool) -> Tree:
    refusal = tree.get("refusal")
    if refusal:
        verdict = "absent" if refusal == "dead" else "refused"
    elif end.named:
        verdict = "survivors"
    else:
        verdict = "stopped" if end.gone else "absent"
    tree.update(
        token=build.token,
        nodes=build.nodes,
        options=options,
        dead=sorted(build.dead),
        gone=sorted(end.gone),
        named=sorted(end.named),
        maybe_named=sorted(end.maybe_named),
        verdict=verdict,
        check=check,
    )
    return tree


def _matching(facts: t.Mapping[int, Facts], token: str, uid: int) -> t.Set[int]:
    """Whom the pattern of the tree fits, by the same rule in other words."""
    found = set()
    for fact in facts.values():
        stem, dash, rest = fact.name.partition("-w")
        by_name = stem == "eng" + token and (not dash or rest.isdigit())
        by_line = fact.title == "serve " + token
        if fact.alive and fact.uid == uid and (by_name or by_line):
            found.add(fact.id)
    return found


def pattern_of(token: str) -> str:
    return r"^eng%s(-w\d+)?$|^serve %s( 100000)?$" % (token, token)


def _succeed(build: Builder, end: Fate, facts: t.Mapping[int, Facts], tree: Tree) -> None:
    """Somebody else gets the number of an owned process that ends, while the stop goes on.

    It must end early and be collected at once; somebody deaf keeps the stop going.
    """
    quick = ("ignores", "blocks", "on_term", "slow", "stopped", "threads")
    fit = [
        n for n in end.gone if facts[n].parent in (INIT, GROUND) and not any(build.node(n).get(key) for key in quick)
    ]
    deaf = [n for n in end.gone if build.node(n).get("ignores") or build.node(n).get("blocks")]
    # The kernel gives nobody a number that a session or a group still bears.
    borne = {n for f in facts.values() if f.alive for n in (f.session, f.group) if n != f.id}
    fit = sorted(set(fit) - borne)
    leading = [n for n in fit if n in end.leaders]
    if not fit or not deaf:
        return
    victim = build.rng.choice(leading if leading and build.odds(0.8) else fit)
    left = build.odds(0.5)
    names = {"name": "eng" + build.token} if tree["selector"] != "pattern" else {"name": "x", "title": "x"}
    heir = build.add(None, late=victim, session=True, leave=left, blocks=not left, **names)
    build.add(heir["id"], late=victim, blocks=True, **names)
    tree["heir"], tree["of"] = heir["id"], victim
