# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The judgement on one device, fact by fact."""

from __future__ import annotations

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu_reasons
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_device import (
    DEFAULT_ALLOWED,
    DEFAULT_MOST,
    Device,
    Identity,
)
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_judge import allowed, judge
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import NodeFacts
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_options import Options
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_view import View
from ansible_collections.gpuops.serving.plugins.modules import gpu_clear

ENGINE = Identity(1764439200.25, "sglang::schedul", "sglang", "sglang.service", None, "S", True)
DAEMON = Identity(1764430000.0, "nvidia-persiste", "root", "nvidia-persistenced.service", None, "S", True)
STRANGER = Identity(1764439000.0, "python3", "alice", "session-3.scope", None, "S", False)
PEOPLE = {10: ENGINE, 20: DAEMON, 30: STRANGER}


HOST, INSIDE = View("host", None), View("own", "docker")


def listed(pid, memory, kind="compute", source="driver"):
    return {"pid": pid, "memory": memory, "kind": kind, "source": source}


def look(used=3, processes=(), nodes=(), hidden=0, error="", options=None, view=HOST, vendor="nvidia", **more):
    facts = {
        "index": 0,
        "reason": "",
        "detail": "",
        "nodes": [] if nodes is None else ["nvidia0"],
        "memory_used": used,
        "memory_total": 46068,
        "memory_basis": "used" if used is not None else "not_available",
        "processes": list(processes),
        "lists": "complete",
        **more,
    }
    held = nodes if isinstance(nodes, dict) else {"nvidia0": list(nodes or ())}
    return judge(vendor, facts, NodeFacts(held, hidden=hidden, error=error), view, PEOPLE.get, options or Options())


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        ({}, "clear", "idle"),
        ({"used": 64}, "clear", "idle"),
        ({"used": 65}, "busy", "held_by_unresolvable"),
        ({"used": 44003, "processes": [listed(10, 44000)]}, "busy", "held_by_process"),
        # memory in use and nobody in sight
        ({"used": 44003}, "busy", "held_by_unresolvable"),
        # the driver lists a process that is not in the process table, even with no memory to show for it
        ({"processes": [listed(99, 0)]}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(99, None)]}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(10, 0)]}, "busy", "held_by_process"),
        # only the device node is open
        ({"nodes": [10]}, "clear", "idle"),
        ({"used": 500, "nodes": [10]}, "busy", "node_held_memory_in_use"),
        ({"used": None, "nodes": [10]}, "busy", "node_held_memory_unreadable"),
        # the driver does not tell the memory in use
        ({"used": None}, "clear", "judged_by_holders"),
        ({"used": None, "processes": [listed(10, None)]}, "busy", "held_by_process"),
        ({"used": None, "hidden": 3}, "unknown", "nodes_unreadable"),
        ({"used": None, "nodes": None}, "unknown", "nodes_unreadable"),
        ({"used": None, "lists": "absent"}, "unknown", "processes_unreadable"),
        # partitions that nobody tells of may be held
        ({"partitioned": True}, "unknown", "partitions_unreadable"),
        ({"partitioned": True, "processes": [listed(10, 5)]}, "busy", "held_by_process"),
        ({"partitioned": True, "partitions": []}, "clear", "idle"),
        # the device does not answer
        ({"reason": "gpu_lost", "detail": "the driver answers: GPU is lost (code 15)"}, "error", "gpu_lost"),
        # allowed holders are no obstacle, whatever else is
        ({"processes": [listed(20, 30)], "used": 33}, "clear", "only_excused"),
        ({"processes": [listed(20, 300)], "used": 303}, "clear", "only_excused"),
        ({"nodes": [20]}, "clear", "idle"),
        ({"used": None, "nodes": [20]}, "clear", "judged_by_holders"),
        # their names excuse little
        ({"processes": [listed(20, 512)], "used": 515}, "clear", "only_excused"),
        ({"processes": [listed(20, 513)], "used": 515}, "busy", "held_by_process"),
        ({"processes": [listed(20, 44000)], "used": 44003}, "busy", "held_by_process"),
        ({"processes": [listed(20, 44000)], "used": None}, "busy", "held_by_process"),
        ({"processes": [listed(20, None)], "used": None}, "busy", "held_by_process"),
        ({"processes": [listed(20, 300)], "used": 44000}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(20, None)], "used": 44000}, "unknown", "memory_unattributed"),
        ({"nodes": [20], "used": 44000}, "busy", "held_by_unresolvable"),
        # process lists that may not be read
        ({"used": None, "memory_denied": True}, "unknown", "memory_unreadable"),
        ({"lists": "denied"}, "unknown", "processes_unreadable"),
        ({"lists": "absent"}, "clear", "idle"),
        ({"lists": "absent", "nodes": [10]}, "unknown", "processes_unreadable"),
        ({"lists": "absent", "nodes": [20]}, "clear", "idle"),
        # the second source is missing altogether
        ({"nodes": None}, "unknown", "nodes_unreadable"),
        ({"error": "/proc cannot be listed: Permission denied"}, "unknown", "nodes_unreadable"),
        # what could not be seen may be a holder, whatever else is clear
        ({"hidden": 5}, "unknown", "nodes_unreadable"),
        ({"hidden": 5, "used": 44003}, "busy", "held_by_unresolvable"),
        # a sum of visible processes is no measurement of the device, and still one of them
        ({"used": 0, "memory_basis": "clients"}, "clear", "idle"),
        ({"used": 100, "memory_basis": "clients", "processes": [listed(10, 100)]}, "busy", "held_by_process"),
    ],
)
def test_verdict(given, verdict, reason):
    device = look(**given)
    assert (device.verdict, device.reason) == (verdict, reason)
    assert device.detail


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        ({"used": 44003, "processes": [listed(30, 44000)]}, "clear", "only_excused"),
        ({"used": 44003, "processes": [listed(10, 44000)]}, "busy", "held_by_process"),
        ({"used": 44003, "processes": [listed(30, 20000)]}, "busy", "held_by_unresolvable"),
        ({"used": 44003, "processes": [listed(30, None)]}, "unknown", "memory_unattributed"),
        ({"used": 44003, "processes": [listed(99, 44000)]}, "busy", "held_by_unresolvable"),
        ({"used": None, "processes": [listed(30, None)]}, "clear", "judged_by_holders"),
        ({"used": None, "nodes": [30]}, "clear", "judged_by_holders"),
    ],
)
def test_verdict_on_one_unit(given, verdict, reason):
    device = look(options=Options(unit="sglang.service"), **given)
    assert (device.verdict, device.reason) == (verdict, reason)


def test_holders_of_both_sources_are_merged():
    for first, second in ((400, 420), (420, 400)):
        device = look(used=500, processes=[listed(10, first), listed(10, second, "graphics")], nodes=[10, 20])
        assert device.holders[0].memory == 420
    assert [(h.pid, h.kind, h.source, h.memory, h.allowed) for h in device.holders] == [
        (10, "compute", ["driver", "node"], 420, False),
        (20, "node", ["node"], None, True),
    ]


def test_holders_are_told_even_of_a_sick_device():
    device = look(reason="gpu_lost", detail="x", nodes=[10])
    assert device.verdict == "error"
    assert [h.pid for h in device.holders] == [10]


def test_the_sentence_names_the_holder():
    device = look(used=44003, processes=[listed(10, 44000)])
    assert device.detail == 'process 10 "sglang::schedul" (user sglang, unit sglang.service) holds 44000 MiB'
    device = look(used=44003, processes=[listed(99, None)])
    assert device.detail == "process 99, which is not in the process table here, holds memory of unknown size"


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ({"name": "nvidia-persistenced"}, True),  # the kernel keeps 15 characters
        ({"name": "nvidia-persiste"}, True),
        ({"name": "nvidia"}, False),
        ({"name": "nvidia-persistenced", "user": "alice"}, False),
        ({"user": "root", "unit": None}, True),
        ({"unit": "nvidia-persistenced.service"}, True),
        ({}, False),
        ({"name": None}, False),
        ({"unit": None, "name": None, "user": None}, False),
    ],
)
def test_allowed(rule, fits):
    assert allowed(DAEMON, [rule]) is fits


def test_nobody_invisible_is_allowed():
    assert not allowed(None, [{"name": "nvidia-persistenced"}])


def test_a_rule_of_the_caller_excuses_all():
    options = Options(allowed_holders=[{"name": "nvidia-persistenced"}])
    for processes, used in (([listed(20, 44000)], 44003), ([listed(20, None)], None)):
        assert look(used=used, processes=processes, options=options).verdict == "clear"


def test_who_holds_more_than_a_name_excuses_is_named():
    device = look(used=44003, processes=[listed(20, 44000)])
    assert device.detail == (
        'process 20 "nvidia-persiste" (user root, unit nvidia-persistenced.service) holds 44000 MiB '
        "(its name alone excuses 512 MiB)"
    )
    allowed_holders = yaml.safe_load(gpu_clear.DOCUMENTATION)["options"]["allowed_holders"]
    assert "at most %d MiB" % DEFAULT_MOST in " ".join(allowed_holders["description"])
    for rule in DEFAULT_ALLOWED:
        assert "C(%s)" % rule["name"] in " ".join(allowed_holders["description"])


def test_memory_is_tolerated_by_vendor_unless_the_caller_says():
    found = {vendor: look(used=300, vendor=vendor).verdict for vendor in ("nvidia", "amd", "intel")}
    assert found == {"nvidia": "busy", "amd": "clear", "intel": "clear"}
    assert look(used=300, options=Options(memory_tolerance=300)).verdict == "clear"
    assert look(used=300, vendor="amd", options=Options(memory_tolerance=0)).verdict == "busy"


def test_what_each_source_says_is_told():
    """One entry for each source: the process is taken if either shows it, with the larger memory."""
    processes = [listed(10, 100, source="kfd"), listed(10, 120, source="fdinfo"), listed(30, 5, source="kfd")]
    device = look(used=300, vendor="amd", processes=processes, nodes=[10], remarks=["the two disagree"])
    assert [(h.pid, h.source, h.memory) for h in device.holders] == [
        (10, ["kfd", "fdinfo", "node"], 120),
        (30, ["kfd"], 5),
    ]
    assert device.disagreements == ["the two disagree", "the driver lists process 30, which has no device node open"]
    assert device.verdict == "busy"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"processes": [listed(10, 40)], "nodes": [10]}, []),
        ({"processes": [listed(10, 40)]}, ["the driver lists process 10, which has no device node open"]),
        # not known whether it has one
        ({"processes": [listed(10, 40)], "hidden": 1}, []),
        ({"processes": [listed(99, 40)]}, ["the driver lists process 99, which is not in the process table here"]),
        # an open node alone proves little
        ({"nodes": [10]}, []),
        (
            {"nodes": [10], "used": 400},
            ["process 10 has the device node open while memory is in use, and is not listed"],
        ),
        ({"nodes": [20], "used": 400}, []),
    ],
)
def test_sources_that_contradict_each_other(given, told):
    assert look(**given).disagreements == told


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        # memory is the device's own, whoever can be seen
        ({}, "clear", "idle"),
        ({"used": 44003}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(99, 40)]}, "busy", "held_by_unresolvable"),
        # without it, a holder outside would not be seen
        ({"used": None}, "unknown", "outside_not_visible"),
        ({"used": 0, "memory_basis": "clients"}, "unknown", "outside_not_visible"),
        # a number that only the driver knows may be another process's, outside
        ({"processes": [listed(20, 30)]}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(20, 30, source="kfd")]}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(20, 30)], "nodes": [20]}, "clear", "only_excused"),
        ({"processes": [listed(20, 30, source="fdinfo")]}, "clear", "only_excused"),
    ],
)
def test_inside_a_container(given, verdict, reason):
    device = look(view=INSIDE, **given)
    assert (device.verdict, device.reason) == (verdict, reason)
    if reason in ("held_by_unresolvable", "outside_not_visible"):
        assert device.detail.endswith(INSIDE.sentence)


def test_nobody_is_taken_for_a_stranger_by_a_number_from_outside():
    options = Options(unit="sglang.service")
    given = {"used": 44003, "processes": [listed(30, 44000)], "options": options}
    assert look(**given).verdict == "clear"
    assert look(view=INSIDE, **given).verdict == "busy"
    assert look(view=INSIDE, nodes=[30], **given).verdict == "clear"
    assert look(view=View("unknown", None), **given).verdict == "busy"


def test_memory_that_several_share_is_counted_once():
    """Each of two foreign processes has the same 10000 MiB; the other half of what is in use is nobody's."""
    shared = [dict(listed(pid, 10000, source="fdinfo"), clients={"7": 10000}) for pid in (30, 40)]
    options = Options(unit="sglang.service")
    people = {**PEOPLE, 40: STRANGER}
    facts = {"index": 0, "nodes": ["renderD128"], "memory_used": 20000, "processes": shared, "lists": "complete"}

    def verdict(used):
        device = judge("amd", {**facts, "memory_used": used}, NodeFacts({}), HOST, people.get, options)
        return device.verdict, device.reason, device.detail

    assert verdict(20000) == (
        "busy",
        "held_by_unresolvable",
        "10000 of 20000 MiB in use are held by no visible process, 512 are tolerated",
    )
    assert verdict(10100)[:2] == ("clear", "only_excused")
    shared[0]["memory"] = 10300  # of which it shares 10000
    assert verdict(10900)[2] == "600 of 10900 MiB in use are held by no visible process, 512 are tolerated"


def part(index, used=3, **more):
    return {
        "index": index,
        "uuid": "MIG-%d" % index,
        "nodes": ["nvidia-cap%d" % (20 + index)],
        "memory_used": used,
        "memory_total": 20096,
        "memory_basis": "used",
        "processes": [],
        "lists": "complete",
        **more,
    }


@pytest.mark.parametrize(
    ("partitions", "given", "verdict", "reason"),
    [
        ([part(0), part(1)], {}, "clear", "idle"),
        ([part(0), part(1, 9000, processes=[listed(10, 8990)])], {}, "busy", "held_by_process"),
        ([part(0), part(1, 9000)], {}, "busy", "held_by_unresolvable"),
        ([part(0), part(1, 9000)], {"nodes": {"nvidia-cap21": [10]}}, "busy", "node_held_memory_in_use"),
        # another partition's node is no holder of this one
        ([part(0), part(1, 9000)], {"nodes": {"nvidia-cap20": [10]}}, "busy", "held_by_unresolvable"),
        # the whole device's node stands in where a partition's own is not known
        ([part(0, None, nodes=[])], {"nodes": [10]}, "busy", "node_held_memory_unreadable"),
        ([part(0), part(1, lists="denied")], {}, "unknown", "processes_unreadable"),
        ([part(0), part(1, reason="gpu_lost", detail="lost")], {}, "error", "gpu_lost"),
        ([part(0, 9000), part(1, reason="gpu_lost", detail="lost")], {}, "error", "gpu_lost"),
        # the device itself: its lists may not be read, which is usual, and its partitions answer for it
        ([part(0)], {"lists": "denied"}, "clear", "idle"),
        ([part(0)], {"used": None, "lists": "denied", "memory_denied": True}, "clear", "idle"),
        ([part(0), part(1, None, memory_denied=True)], {"used": 6}, "unknown", "memory_unreadable"),
        # held outside of the partitions
        ([part(0)], {"used": 5000}, "busy", "held_by_unresolvable"),
        ([part(0, 4000, processes=[listed(20, 400)])], {"used": 4000}, "busy", "held_by_unresolvable"),
        ([part(0)], {"processes": [listed(10, 100, "graphics")], "used": 103}, "busy", "held_by_process"),
        ([part(0)], {"error": "/proc cannot be listed"}, "unknown", "nodes_unreadable"),
        # a partition that tells no memory of its own explains no more than its processes hold
        ([part(0), part(1, None)], {"used": 40000}, "busy", "held_by_unresolvable"),
        ([part(0), part(1, None)], {"used": 6}, "clear", "idle"),
        ([part(0), part(1, None, processes=[listed(20, 400)])], {"used": 406}, "clear", "idle"),
        ([part(0), part(1, None, processes=[listed(20, 400)])], {"used": 900}, "busy", "held_by_unresolvable"),
    ],
)
def test_a_partitioned_device_is_as_bad_as_its_worst_partition(partitions, given, verdict, reason):
    device = look(
        used=given.pop("used", sum(p["memory_used"] or 0 for p in partitions)),
        partitioned=True,
        partitions=partitions,
        **given,
    )
    assert (device.verdict, device.reason) == (verdict, reason)
    assert device.detail
    assert [p.uuid for p in device.partitions] == [p["uuid"] for p in partitions]


def test_compute_instances_share_the_memory_of_their_gpu_instance():
    """Memory is counted once, and what a process on one of them holds is no riddle on the other."""
    shared = {"gi": 1, "nodes": ["nvidia-cap21"], "used": 9000}
    pair = [part(0, ci=0, **shared), part(1, ci=1, processes=[listed(10, 8990)], **shared)]
    held = {"nvidia-cap21": [10]}
    device = look(used=9000, partitioned=True, partitions=pair, nodes=held)
    assert [(p.verdict, [h.pid for h in p.holders]) for p in device.partitions] == [("clear", []), ("busy", [10])]
    device = look(used=14000, partitioned=True, partitions=pair, nodes=held)
    assert device.detail.startswith(
        "5000 MiB are in use outside of its partitions by no visible process, 64 are tolerated; partition 1 "
    )
    quiet = [part(0, ci=0, **shared), part(1, ci=1, **shared)]
    device = look(used=9000, partitioned=True, partitions=quiet)
    assert [p.reason for p in device.partitions] == ["held_by_unresolvable"] * 2
    idle = [part(0, gi=1, ci=0), part(1, gi=1, ci=1), part(2, gi=2, ci=0)]
    assert look(used=6, partitioned=True, partitions=idle).verdict == "clear"
    device = look(used=5000, partitioned=True, partitions=idle)
    assert (device.verdict, device.detail) == (
        "busy",
        "4994 MiB are in use outside of its partitions by no visible process, 64 are tolerated",
    )
    both = [part(n, 8000, gi=1, ci=n, nodes=["nvidia-cap21"], processes=[listed(30, 4000)]) for n in range(2)]
    device = look(used=8000, partitioned=True, partitions=both, options=Options(unit="sglang.service"))
    assert [p.detail[:22] for p in device.partitions] == ["4000 of 8000 MiB in us"] * 2
    untold = [part(0, ci=0, **shared), part(1, ci=1, processes=[listed(20, None)], **shared)]
    device = look(used=9000, partitioned=True, partitions=untold)
    assert [p.reason for p in device.partitions] == ["memory_unattributed"] * 2
    assert device.verdict == "unknown"


def test_a_holder_of_a_partition_is_told_there_and_only_there():
    device = look(
        used=8000,
        partitioned=True,
        partitions=[part(0, 8000, processes=[listed(10, 7990)])],
        processes=[listed(10, 7990)],
        nodes={"nvidia0": [10, 30], "nvidia-cap20": [10]},
    )
    assert [(h.pid, h.source) for h in device.partitions[0].holders] == [(10, ["driver", "node"])]
    assert [(h.pid, h.kind) for h in device.holders] == [(30, "node")]
    assert device.memory_used == 8000
    assert device.detail.startswith('partition 0 of GPU 0: process 10 "sglang::schedul"')


def test_a_reason_stands_for_one_verdict():
    with pytest.raises(ValueError, match='"idle" does not stand for "busy"'):
        Device(index=0, vendor="nvidia").decide("busy", "idle", "")
    assert {verdict for verdict, _meaning in _gpu_reasons.DEVICE.values()} == {"clear", "busy", "unknown", "error"}


def test_who_may_not_look_is_not_told_that_there_is_nobody():
    """The holder may be before him; a reset or a reboot would be the wrong remedy."""
    device = look(used=44003, processes=[listed(20, 44000)], hidden=12, view=INSIDE)
    assert device.reason == "held_by_unresolvable"
    assert device.detail.startswith(
        "a process that the driver calls 20, and that cannot be told from others here, holds 44000 MiB; "
        "the open files of 12 processes or more could not be read"
    )
    assert device.disagreements == ["the driver lists number 20, which no process here is known to be"]


def test_a_share_that_is_not_told_apart_is_named_beside_the_tolerance():
    device = look(used=544, memory_basis="used_and_reserved")
    assert device.detail == (
        "544 MiB are in use by no visible process, 64 are tolerated; the driver's own share is in it: "
        "if an idle device shows as much, raise the tolerance to that"
    )


def test_who_is_excused_is_named_in_the_sentence():
    device = look(used=44003, processes=[listed(30, 44000)], options=Options(unit="sglang.service"))
    assert device.detail == (
        'process 30 "python3" (user alice, unit session-3.scope) holds 44000 MiB, excused; '
        "3 MiB are in use by others, 64 are tolerated"
    )
