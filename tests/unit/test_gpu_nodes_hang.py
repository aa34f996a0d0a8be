# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A look at all nodes that meets what hangs, on made-up tables."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _bounded, _gpu_nodes, _gpu_tables
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nodes import scan
from proc_tables import MAP, Proc


@pytest.fixture(autouse=True)
def stuck_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_bounded, "STUCK_FOLDER", str(tmp_path / "stuck"))
    monkeypatch.setattr(_bounded, "KILL_WAIT", 0.05)


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def hang(monkeypatch, *parts):
    """Opening a table of these hangs, as a lock does that is never let go."""
    real = os.open

    def wait(path, *more, **named):
        if str(path).endswith(parts):
            time.sleep(60)
        return real(path, *more, **named)

    monkeypatch.setattr(_gpu_tables.os, "open", wait)


@pytest.mark.parametrize(
    ("tables", "holders", "hung"),
    [
        (["/10/fd"], {"nvidia0": [20, 30], "nvidia1": [10, 20, 30]}, [10]),
        (["/10/maps"], {"nvidia0": [10, 20, 30], "nvidia1": [20, 30]}, [10]),
        (["/10/maps", "/20/maps"], {"nvidia0": [10, 20, 30], "nvidia1": [30]}, [10, 20]),
        (["/10/fd", "/10/maps", "/30/fd"], {"nvidia0": [20], "nvidia1": [20, 30]}, [10, 30]),
    ],
)
def test_what_hangs_is_left_out_and_named_and_the_rest_is_read(proc, monkeypatch, tables, holders, hung):
    for pid in (10, 20, 30):
        proc(pid, "/dev/nvidia0", maps=MAP % ("rw-s", 7, "/dev/nvidia1"))
    hang(monkeypatch, *tables)
    monkeypatch.setattr(_gpu_nodes, "SLICE", 0.6)
    began = time.monotonic()
    facts = scan(proc=proc.root, limit=5)
    assert (facts.holders, facts.hung, facts.hidden, facts.error) == (holders, hung, len(hung), "")
    assert time.monotonic() - began < 3


def test_when_the_time_is_over_what_was_read_is_told_and_the_rest_is_hidden(proc, monkeypatch):
    for pid in range(10, 20):
        proc(pid, "/dev/nvidia0")
    hang(monkeypatch, "/maps")
    facts = scan(proc=proc.root, limit=0.5)
    assert facts.holders == {"nvidia0": list(range(10, 20))}
    assert facts.hidden == 11  # all of them, and process 1
    assert facts.error == "the open files of all processes cannot be read: no answer within 0.5 s"


def test_a_slow_look_goes_on_where_it_was(proc, monkeypatch):
    """Slow is not stuck: nothing is left out, and what was told is not read again."""
    for pid in range(10, 50):
        proc(pid, "/dev/nvidia0")
    read, log = _gpu_nodes.open_nodes, proc.root + "/log"

    def slow(process, *more):
        time.sleep(0.04)
        with open(log, "a") as handle:
            handle.write(process + "\n")
        read(process, *more)

    monkeypatch.setattr(_gpu_nodes, "open_nodes", slow)
    facts = scan(proc=proc.root)
    assert (facts.holders, facts.hidden, facts.error) == ({"nvidia0": list(range(10, 50))}, 0, "")
    with open(log) as handle:
        assert len(handle.readlines()) < 41 + 20


def test_a_child_that_cannot_be_ended_is_not_followed_by_another(proc, monkeypatch):
    proc(10, "/dev/nvidia0", maps=MAP % ("rw-s", 7, "/dev/nvidia1"))
    proc(20, maps=MAP % ("rw-s", 7, "/dev/nvidia1"))
    with monkeypatch.context() as patched:
        hang(patched, "/10/maps")
        patched.setattr(_gpu_nodes, "SLICE", 0.6)
        patched.setattr(_bounded, "_kill", lambda _pid: None)
        facts = scan(proc=proc.root)
    assert (facts.holders, facts.hung) == ({"nvidia0": [10], "nvidia1": [20]}, [10])
    ((child, _start),) = _bounded.stuck_children()
    try:
        again = scan(proc=proc.root)  # which would see the mapping now, if it looked
        assert (again.holders, again.hung, again.hidden) == (facts.holders, [10], 1)
        assert _bounded.stuck_children() == [(child, _start)]
    finally:
        os.kill(child, 9)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)  # its parent, which was spared as well
    assert scan(proc=proc.root).holders == {"nvidia0": [10], "nvidia1": [10, 20]}


def test_a_child_that_never_began_hangs_on_nobody(proc, monkeypatch):
    proc(10, "/dev/nvidia0")
    monkeypatch.setattr(_gpu_nodes._Scan, "_read", lambda *_more: time.sleep(60))
    facts = scan(proc=proc.root, limit=0.3)
    assert (facts.hung, facts.hidden) == ([], 2)
    assert facts.error


def test_who_is_gone_hides_nothing_although_a_child_still_hangs_on_it(proc):
    proc(10, "/dev/nvidia0")
    _bounded.remember("nodes-maps-77", os.getpid())
    facts = scan(proc=proc.root)
    assert (facts.holders, facts.hung, facts.hidden) == ({"nvidia0": [10]}, [], 0)


def test_nothing_is_read_while_a_child_hangs_in_its_end(proc, monkeypatch):
    proc(10, "/dev/nvidia0")
    _bounded.remember("nodes", os.getpid())
    facts = scan(proc=proc.root)
    assert facts.holders == {}
    assert facts.error == (
        "the open files of all processes cannot be read: process %d has not come back from an earlier call"
        % os.getpid()
    )


@pytest.mark.parametrize("name", ["open_nodes", "mapped_nodes"])
def test_what_goes_wrong_in_either_child_is_told(proc, monkeypatch, name):
    def fail(*_more):
        raise ValueError("no such thing")

    monkeypatch.setattr(_gpu_nodes, name, fail)
    facts = scan(proc=proc.root)
    assert facts.error.endswith("ValueError: no such thing")
