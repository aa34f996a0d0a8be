# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The judgement on one device, fact by fact."""

from __future__ import annotations

import pytest
import yaml
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_judge import (
    DEFAULT_ALLOWED,
    DEFAULT_MOST,
    Identity,
    Options,
    allowed,
    judge,
)
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import NodeFacts
from ansible_collections.gpuops.serving.plugins.modules import gpu_clear

ENGINE = Identity(1764439200.25, "sglang::schedul", "sglang", "sglang.service", None, "S", True)
DAEMON = Identity(1764430000.0, "nvidia-persiste", "root", "nvidia-persistenced.service", None, "S", True)
STRANGER = Identity(1764439000.0, "python3", "alice", "session-3.scope", None, "S", False)
PEOPLE = {10: ENGINE, 20: DAEMON, 30: STRANGER}


def listed(pid, memory, kind="compute"):
    return {"pid": pid, "memory": memory, "kind": kind}


def look(used=3, processes=(), nodes=(), hidden=0, minor=0, error="", options=None, **more):
    facts = {
        "index": 0,
        "reason": "",
        "detail": "",
        "memory_used": used,
        "memory_total": 46068,
        "memory_basis": "used" if used is not None else "not_available",
        "processes": list(processes),
        "unreadable": {},
        **more,
    }
    node_facts = NodeFacts({0: list(nodes)}, hidden, error)
    return judge("nvidia", facts, node_facts, minor, PEOPLE.get, options or Options())


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
        ({"used": None, "minor": None}, "unknown", "nodes_unreadable"),
        ({"used": None, "unreadable": {"compute": 3}}, "unknown", "processes_unreadable"),
        ({"used": None, "unreadable": {"mps": 13, "graphics": 3}}, "clear", "judged_by_holders"),
        # partitioned devices are not judged yet, and so never clear
        ({"mig": True}, "unknown", "partitioned"),
        # the device does not answer
        ({"reason": "gpu_lost", "detail": "the driver answers: GPU is lost (code 15)"}, "error", "gpu_lost"),
        # allowed holders are no obstacle, whatever else is
        ({"processes": [listed(20, 30)], "used": 33}, "clear", "idle"),
        ({"processes": [listed(20, 300)], "used": 303}, "clear", "idle"),
        ({"nodes": [20]}, "clear", "idle"),
        ({"used": None, "nodes": [20]}, "clear", "judged_by_holders"),
        # their names excuse little
        ({"processes": [listed(20, 512)], "used": 515}, "clear", "idle"),
        ({"processes": [listed(20, 513)], "used": 515}, "busy", "held_by_process"),
        ({"processes": [listed(20, 44000)], "used": 44003}, "busy", "held_by_process"),
        ({"processes": [listed(20, 44000)], "used": None}, "busy", "held_by_process"),
        ({"processes": [listed(20, None)], "used": None}, "busy", "held_by_process"),
        ({"processes": [listed(20, 300)], "used": 44000}, "busy", "held_by_unresolvable"),
        ({"processes": [listed(20, None)], "used": 44000}, "unknown", "memory_unattributed"),
        ({"nodes": [20], "used": 44000}, "busy", "held_by_unresolvable"),
        # process lists that may not be read
        ({"unreadable": {"compute": 4}}, "unknown", "processes_unreadable"),
        ({"unreadable": {"mps": 4}}, "unknown", "processes_unreadable"),
        ({"unreadable": {"mps": 13}}, "clear", "idle"),
        ({"unreadable": {"compute": 3}}, "clear", "idle"),
        ({"unreadable": {"compute": 3}, "nodes": [10]}, "unknown", "processes_unreadable"),
        ({"unreadable": {"compute": 3}, "hidden": 1}, "unknown", "processes_unreadable"),
        # the second source is missing altogether
        ({"minor": None}, "unknown", "nodes_unreadable"),
        ({"error": "/proc cannot be listed: Permission denied"}, "unknown", "nodes_unreadable"),
        ({"hidden": 5}, "clear", "idle"),
    ],
)
def test_verdict(given, verdict, reason):
    device = look(**given)
    assert (device.verdict, device.reason) == (verdict, reason)
    assert device.detail


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        ({"used": 44003, "processes": [listed(30, 44000)]}, "clear", "idle"),
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
    device = look(used=500, processes=[listed(10, 400), listed(10, 420, "graphics")], nodes=[10, 20])
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
