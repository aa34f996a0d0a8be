# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A judge that is blind on one eye is found out.

Each case is a machine of the test driver library with real processes and open nodes. The table is right for the code as
it is, and wrong for each mutant: code that ignores what one of the sources says.
"""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _gpu
from gpu_host import driver_library, made

NO_MEMORY = {"device__0__error__nvmlDeviceGetMemoryInfo": 3}

# name: what the driver says, who holds (arguments, node), the verdict and its reason
CASES: dict[str, tuple[dict[str, t.Any], list[tuple[tuple[str, ...], t.Any]], tuple[str, str]]] = {
    "idle": ({}, [], ("clear", "idle")),
    "an engine": ({}, [(("--memory", "44000"), "nvidia0")], ("busy", "held_by_process")),
    "listed, no node open, little memory": ({}, [(("--memory", "10"), None)], ("busy", "held_by_process")),
    "listed through MPS": ({}, [(("--memory", "10", "--kind", "mps"), None)], ("busy", "held_by_process")),
    "memory that nobody visible holds": ({"device__0__memory_hidden": 44000}, [], ("busy", "held_by_unresolvable")),
    "listed and not in the process table": (
        {"device__0__process__0": "4194303,na,compute"},
        [],
        ("busy", "held_by_unresolvable"),
    ),
    "node open, memory free": ({}, [(("--unlisted",), "nvidia0")], ("clear", "idle")),
    "node open, memory in use": (
        {"device__0__memory_hidden": 400},
        [(("--unlisted",), "nvidia0")],
        ("busy", "node_held_memory_in_use"),
    ),
    "node open, memory not told": (NO_MEMORY, [(("--unlisted",), "nvidia0")], ("busy", "node_held_memory_unreadable")),
    "nobody, memory not told": (NO_MEMORY, [], ("clear", "judged_by_holders")),
    "a device that is lost": ({"device__0__error__nvmlDeviceGetMemoryInfo": 15}, [], ("error", "gpu_lost")),
    "lists that may not be read": (
        {"device__0__error__nvmlDeviceGetComputeRunningProcesses": 4},
        [],
        ("unknown", "processes_unreadable"),
    ),
    "full load by its sensor, nobody there": ({"device__0__utilization": 100}, [], ("clear", "idle")),
}


@pytest.fixture(name="lab")
def fixture_lab(tmp_path, tmp_path_factory, monkeypatch):
    yield from made(tmp_path, driver_library(tmp_path_factory), monkeypatch)


def play(lab, name):
    scenario, holders, _expected = CASES[name]
    lab.scenario(**scenario)
    children = [lab.hold(*arguments, node=node) for arguments, node in holders]
    [device] = lab.look().devices
    for child in children:
        lab.end(child)
    return device.verdict, device.reason


@pytest.mark.parametrize("name", CASES)
def test_case(lab, name):
    assert play(lab, name) == CASES[name][2]


def forget(**facts):
    def mutate(monkeypatch):
        real = _gpu.judge

        def judge(vendor, told, *others):
            return real(vendor, {**told, **facts}, *others)

        monkeypatch.setattr(_gpu, "judge", judge)

    return mutate


def ignore_nodes(monkeypatch):
    real = _gpu._gpu_nodes.scan

    def scan(*arguments):
        facts = real(*arguments)
        facts.holders.clear()
        return facts

    monkeypatch.setattr(_gpu._gpu_nodes, "scan", scan)


def believe_utilisation(monkeypatch):
    real = _gpu.judge

    def judge(*arguments):
        device = real(*arguments)
        return device.decide("busy", "held_by_process", "") if device.utilization else device

    monkeypatch.setattr(_gpu, "judge", judge)


MUTANTS = {
    "the driver's lists are ignored": (
        forget(processes=[]),
        {"listed, no node open, little memory", "listed through MPS", "listed and not in the process table"},
    ),
    "open nodes are ignored": (ignore_nodes, {"node open, memory not told", "node open, memory in use"}),
    "memory is ignored": (
        forget(memory_used=0),
        {
            *("memory that nobody visible holds", "node open, memory in use"),
            *("node open, memory not told", "nobody, memory not told"),
        },
    ),
    "errors are ignored": (forget(reason="", nodes=["nvidia0"], memory_used=0), {"a device that is lost"}),
    "denied lists are empty lists": (forget(lists="complete"), {"lists that may not be read"}),
    "utilisation counts": (believe_utilisation, {"full load by its sensor, nobody there"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found_out(lab, monkeypatch, mutant):
    mutate, cases = MUTANTS[mutant]
    mutate(monkeypatch)
    found_out = {name for name in cases if play(lab, name) != CASES[name][2]}
    assert found_out == cases
