# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The randomised campaign of process_tree_stop at its small size; ``make bench`` runs the large one."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import typing as t

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "campaign"))

import campaign
import mutants
import promise
import seeds
import seeds_units

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a process id namespace and a lab take root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
]
SMALL = range(1, 151)
HEIRS = range(1, 1001)  # 67 of them have one
# Trees in which a library of its time killed somebody else, or left somebody alive.
FOUND = (169, 208, 673, 721, 972, 1643, 5482)
FOUND_ON_LEGACY = 68832801
HOSTS = {"mid": "bookworm", "legacy": "bullseye,legacy=1"}
UNITS = 16  # on each host


@pytest.fixture(name="library", scope="module")
def fixture_library() -> t.Iterator[pathlib.Path]:
    with campaign.library() as folder:
        yield folder


def fresh() -> int:
    """Trees that nobody has tried yet; a failure prints the seed and the command that runs it again."""
    return 10**6 + int.from_bytes(os.urandom(4), "big") % 10**8


def test_plain_forests(library: pathlib.Path) -> None:
    tally = campaign.Tally()
    first = fresh()
    print("fresh seeds from %d on" % first)
    wanted = [*FOUND, *SMALL, *range(first, first + 20)]
    campaign.run_plain(wanted, tally.take, library, 8)
    print(tally.line())
    assert tally.failures == [], "\n".join(map(campaign.told, tally.failures))
    assert tally.trees == {"plain": len(wanted)}
    assert tally.ended > 500
    assert tally.heirs > 3
    assert set(tally.verdicts) == {"stopped", "survivors", "absent", "refused"}


def test_systemd_units(library: pathlib.Path) -> None:
    tally = campaign.Tally()
    first = fresh()
    print("fresh seeds from %d on" % first)
    with campaign.lab("test-campaign", HOSTS) as hosts:
        campaign.run_units(first, UNITS, tally.take, library, hosts, specs=HOSTS)
        legacy = {"legacy": hosts["legacy"]}
        campaign.run_units(FOUND_ON_LEGACY, 1, tally.take, library, legacy, specs=HOSTS)
    print(tally.line())
    assert tally.failures == [], "\n".join(map(campaign.told, tally.failures))
    assert tally.trees == {"unit": UNITS * len(HOSTS) + 1}
    assert tally.ended > 50


@pytest.mark.parametrize("mutant", mutants.MUTANTS)
def test_a_wrong_library_is_found(library: pathlib.Path, mutant: str) -> None:
    wanted = list(SMALL)
    if mutant == "numbers_only":
        # The few trees in which somebody else gets the number of one that ended, and not all of them tell each time:
        # it is chance whether he has it before the stop looks again.
        wanted = [seed for seed in HEIRS if "heir" in seeds.plain(seed)]
    elif mutant == "old_files":
        wanted = [seed for seed in wanted if seeds.plain(seed)["refusal"] == "wrong_time"]
    answers: t.List[campaign.Answer] = []
    campaign.run_plain(wanted, answers.append, library, 6, mutant, until_found=True)
    assert any(map(campaign.tells, answers)), [(answer["seed"], answer["problems"]) for answer in answers]


def test_a_tree_that_comes_to_no_end_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found: t.Dict[int, t.List[t.List[str]]] = {1: [], 2: [["broken", "x"]], 4: [["broken", "x"], ["wrong", "y"]]}

    class Worker:
        """Dies over the third tree."""

        def __init__(self, *_arguments: t.Any) -> None:
            pass

        def one(self, seed: int) -> t.Optional[campaign.Answer]:
            return {"seed": seed, "kind": "plain", "problems": found[seed]} if seed in found else None

        def end(self) -> None:
            pass

    monkeypatch.setattr(campaign, "Worker", Worker)
    answers: t.List[campaign.Answer] = []
    campaign.run_plain(range(1, 9), answers.append, pathlib.Path(), workers=1, until_found=True)
    assert [(answer["seed"], campaign.tells(answer)) for answer in answers] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]


def test_a_seed_is_one_tree() -> None:
    for seed in range(50):
        assert seeds.plain(seed) == seeds.plain(seed)
        assert seeds_units.unit(seed) == seeds_units.unit(seed)


def test_the_trees_hold_what_they_are_to_hold() -> None:
    trees = [seeds.plain(seed) for seed in range(900)] + [seeds_units.unit(seed) for seed in range(200)]
    keys = {key for tree in trees for node in tree["nodes"] for key in node}
    assert keys >= {
        *("leave", "session", "group", "join", "zombie", "exec", "ignores", "blocks", "on_term", "stays", "born"),
        *("slow", "stopped", "threads", "uid", "mark", "unmark", "mounts", "enter", "reaper", "late"),
        *("moved", "nested", "private", "has_mark", "top"),
    }
    assert {tree["state"] for tree in trees if tree["kind"] == "unit"} == {"active", "front_dead", "stopped"}
    assert {tree["refusal"] for tree in trees} >= {*seeds.REFUSED, "dead", "protected"}
    # Both directions: who is owned ends, and who only looks like it lives.
    assert sum(len(tree["gone"]) for tree in trees) > 2000
    assert sum(len(tree["named"]) for tree in trees) > 40


def node(number: int, by: int = 0, **keys: t.Any) -> promise.Node:
    return dict({"id": number}, **({"by": by} if by else {}), **keys)


def test_the_promise_in_small() -> None:
    forest = [
        node(1, session=True),
        node(2, 1),
        node(3, 1, leave=True),
        node(4, 3),  # an orphan in the front's session
        node(5, 3, session=True),  # one that left it
        node(6, 3, uid=2),  # a stranger in it
        node(7, 6, session=True),  # and his child, in a session of its own
        node(8, 4, session=True),
        node(9, 8, leave=True),
        node(10, 9),  # an orphan in a session that only weak evidence speaks for
    ]
    facts = promise.facts_of(forest)
    assert (facts[4].parent, facts[4].session, facts[7].parent, facts[10].session) == (promise.INIT, 1, 6, 8)
    fate = promise.fate_of(facts, {1})
    assert fate.gone == {1, 2, 4, 8}
    assert fate.named == {6}
    assert fate.maybe_named == {7}
    assert promise.fate_of(facts, {1}, allow_foreign_users=True).gone == {1, 2, 4, 6, 7, 8}
    dead = promise.facts_of(forest, {1})
    assert promise.fate_of(dead, {1}, dead_main=1, unit=True).gone == {2, 4, 6, 7, 8, 10}
