# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The steps of the run, each with processes of its own. None changes a setting or signals what is not its own."""

from __future__ import annotations

import time
import typing as t

from findings import RELEASE, TOLERANCE, Findings
from outside import Child, Clock, Collection, Facts, Undone, end_by_pid, nodes, start_ticks

SMALL = 256  # MiB
SAID = ("verdict", "reason", "detail", "memory_used", "memory_basis", "holders")


class Bench:
    """One device to work on, and what every step needs."""

    def __init__(self, clock: Clock, collection: Collection, findings: Findings, patience: float) -> None:
        self.clock, self.collection, self.findings = clock, collection, findings
        self.patience = patience  # seconds for memory to come back
        self.gpu: Facts = {}

    @property
    def index(self) -> int:
        return int(self.gpu["index"])

    @property
    def node(self) -> t.Optional[str]:
        return None if self.gpu["minor"] is None else "nvidia%d" % self.gpu["minor"]

    def holder(self, *flags: str, memory: int = SMALL) -> Child:
        return Child(self.clock, "cuda_holder.py", "--pci", self.gpu["pci"], "--memory", str(memory), *flags)

    def driver(self) -> Facts:
        """What the driver says of the device now."""
        with Child(self.clock, "nvml_client.py", "facts", "--index", str(self.index)) as client:
            found = client.line()
        if "error" in found:
            raise Undone("the driver does not answer: %s" % found["error"])
        return t.cast(Facts, found["gpus"][0])

    def clear(self, way: str) -> Facts:
        """gpu_clear's answer for the device, at one look."""
        return self.clear_of(way, self.index)

    def clear_again(self, way: str) -> Facts:
        """gpu_clear's answer when the device is clear, or the time for it is over."""
        return self.clear_of(way, self.index, timeout=self.patience, interval=0.25)

    def clear_of(self, way: str, index: int, **options: t.Any) -> Facts:
        answer = self.collection.ask(way, "gpu_clear", gpus=[str(index)], report_only=True, **options)
        if not answer.get("gpus"):
            raise Undone("gpu_clear (%s) does not answer: %s" % (way, answer.get("msg")))
        said = {key: answer["gpus"][0].get(key) for key in SAID}
        return dict(said, readings=answer.get("readings"), elapsed=answer.get("elapsed"))


def to_allocation(child: Child) -> Facts:
    """Let a holder pass its stages up to the allocation."""
    child.stage("init")
    child.go()
    child.stage("context")
    child.go()
    return child.stage("allocate")


def used(memory: Facts) -> t.Optional[int]:
    found = memory["used_v1"] if memory["used_v2"] is None else memory["used_v2"]
    return t.cast(t.Optional[int], found)


def _stage(bench: Bench, child: Child, **more: t.Any) -> Facts:
    said = bench.driver()
    listed = [entry for entry in said["processes"] if entry["pid"] == child.pid]
    pids = sorted({entry["pid"] for entry in said["processes"]})
    return dict(nodes(child.pid), listed=listed, listed_pids=pids, memory_used=used(said["memory"]), **more)


def look_at_stages(bench: Bench) -> None:
    """Which nodes a process holds at each stage, whether it is listed, and what is in use."""
    findings = bench.findings
    seen = findings.data["stages"] = {}
    base = used(bench.gpu["memory"])
    with Child(bench.clock, "nvml_client.py", "stages") as client:
        client.stage("init")
        seen["nvml_init"] = _stage(bench, client)
        client.go()
        client.stage("queries")
        seen["nvml_queries"] = _stage(bench, client)
        answer = bench.clear(bench.collection.ways[0])
        seen["nvml_queries"]["gpu_clear"] = answer
        passed = answer["verdict"] == "clear" and not seen["nvml_queries"]["listed"]
        findings.check("library_is_no_holder", passed, answer["verdict"], answer["detail"] if not passed else "")
    with bench.holder("--invisible") as child:
        answer = child.line()
        seen["cuda_no_device"] = _stage(bench, child, answer=answer.get("error") or "success", code=answer.get("code"))
    with bench.holder() as child:
        findings.data["machine"]["cuda_version"] = child.stage("init")["cuda_version"]
        seen["cuda_init"] = _stage(bench, child)
        child.go()
        child.stage("context")
        seen["context"] = _stage(bench, child)
        child.go()
        child.stage("allocate")
        seen["allocation"] = _stage(bench, child, memory=SMALL)
        _judge_stages(bench, seen, base)
        _others(bench, seen)


def _judge_stages(bench: Bench, seen: Facts, base: t.Optional[int]) -> None:
    context, allocation = seen["context"], seen["allocation"]
    held = sorted(set(context["open"] + context["mapped"]))
    if bench.node is None:
        bench.findings.check("context_holds_node", None, held, "the driver does not tell the number of the node")
    else:
        bench.findings.check("context_holds_node", bench.node in held, held, "its node is %s" % bench.node)
    pids = context["listed_pids"]
    bench.findings.check("context_is_listed", bool(context["listed"]), pids, "")
    if base is None:
        bench.findings.check("allocation_is_in_use", None, None, "the driver does not tell the memory in use")
    else:
        more = allocation["memory_used"] - base
        bench.findings.check("allocation_is_in_use", more >= SMALL, more, "%d MiB are allocated" % SMALL)


def _others(bench: Bench, seen: Facts) -> None:
    others = [gpu for gpu in bench.findings.data["gpus"] if gpu["index"] != bench.index and gpu["clear_at_start"]]
    if not others:
        bench.findings.check("other_devices_stay_clear", None, None, "there is no other device that was clear")
        return
    held = set(seen["context"]["open"] + seen["context"]["mapped"])
    seen["context"]["other_nodes"] = sorted(held & {"nvidia%s" % gpu["minor"] for gpu in others})
    verdicts = {
        str(gpu["index"]): bench.clear_of(bench.collection.ways[0], gpu["index"])["verdict"] for gpu in others[:2]
    }
    passed = set(verdicts.values()) == {"clear"}
    nodes_held = ", ".join(seen["context"]["other_nodes"]) or "none"
    bench.findings.check("other_devices_stay_clear", passed, verdicts, "nodes of other devices held: %s" % nodes_held)


def release(bench: Bench) -> None:
    """How long after SIGKILL the memory, the list and the nodes take."""
    limit = bench.patience
    base, free = used(bench.gpu["memory"]), bench.gpu["memory"]["free_v2"]
    size = SMALL if free is None else max(SMALL, free // 2)
    with bench.holder(memory=size) as child:
        to_allocation(child)
        words = ["watch", "--index", str(bench.index), "--pid", str(child.pid), "--seconds", str(limit)]
        with Child(bench.clock, "nvml_client.py", *words, "--most", str((base or 0) + TOLERANCE)) as watcher:
            ready = watcher.stage("ready")
            killed = time.monotonic()
            child.kill()
            closed = ended = None
            while (closed is None or ended is None) and time.monotonic() < killed + limit:
                held = nodes(child.pid)
                closed = closed or (time.monotonic() if not held["open"] and not held["mapped"] else None)
                ended = ended or (time.monotonic() if child.ended else None)
                time.sleep(0.002)
            end = watcher.stage("end", limit + 10)

    def after(moment: t.Optional[float]) -> t.Optional[float]:
        return None if moment is None else max(0.0, round(moment - killed, 3))

    figures = {
        "allocated": size,
        "used_before": ready["used"],
        "used_at_end": end["used"],
        "memory_seconds": after(end["memory_at"]),
        "list_seconds": after(end["list_at"]),
        "nodes_seconds": after(closed),
        "process_seconds": after(ended),
        "readings": end["readings"],
    }
    bench.findings.data["release"] = figures
    for rule, key in (("memory_comes_back", "memory"), ("list_empties", "list"), ("nodes_close", "nodes")):
        seconds = figures[key + "_seconds"]
        if key == "memory" and base is None:
            bench.findings.check(rule, None, None, "the driver does not tell the memory in use")
            continue
        passed = seconds is not None and seconds <= min(limit, RELEASE)
        bench.findings.check(rule, passed, seconds, "" if passed else "watched for %g s" % limit)


def clear_and_busy(bench: Bench) -> None:
    """gpu_clear before, while and after a process holds the device, by the module's file and by the library."""
    told = bench.findings.data["gpu_clear"] = {}
    for way in bench.collection.ways:
        told[way] = {"before": bench.clear_again(way)}
        before = told[way]["before"]
        bench.findings.check("clear_before", before["verdict"] == "clear", before["verdict"], before["detail"], way)
    with bench.holder() as child:
        to_allocation(child)
        for way in bench.collection.ways:
            busy = told[way]["busy"] = bench.clear(way)
            ours = [holder for holder in busy["holders"] if holder["pid"] == child.pid]
            said = [{key: holder[key] for key in ("kind", "memory", "source")} for holder in ours]
            sources = sorted(ours[0]["source"]) if ours else []
            passed = busy["verdict"] == "busy" and sources == ["driver", "node"]
            figure = {"verdict": busy["verdict"], "reason": busy["reason"], "holder": said}
            bench.findings.check("busy_by_both_sources", passed, figure, busy["detail"], way)
    for way in bench.collection.ways:
        after = told[way]["after"] = bench.clear_again(way)
        detail = "%s readings, %s s" % (after["readings"], after["elapsed"])
        bench.findings.check("clear_after", after["verdict"] == "clear", after["verdict"], detail, way)


def inherited(bench: Bench) -> None:
    """A holder is killed, and its child, which has the nodes from it, lives on: does the memory stay, who is named?"""
    with bench.holder("--child") as child:
        orphan = to_allocation(child)["child"]
        start = start_ticks(orphan)
        try:
            held = nodes(orphan)
            child.kill()
            end = time.monotonic() + bench.clock.at_most(10.0)
            while not child.ended and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(1.0)  # what comes back at all mostly does in this time
            answer = bench.clear(bench.collection.ways[0])
        finally:
            end_by_pid(orphan, start)
    named = [holder for holder in answer["holders"] if holder["pid"] == orphan]
    base = used(bench.gpu["memory"])
    unknown = base is None or answer["memory_used"] is None
    kept = None if unknown else answer["memory_used"] > base + TOLERANCE
    bench.findings.data["inherited"] = dict(held, child=orphan, memory_kept=kept, gpu_clear=answer)
    passed = answer["verdict"] == "clear" if kept is False else answer["verdict"] == "busy" and bool(named)
    figure = {"verdict": answer["verdict"], "reason": answer["reason"], "named": bool(named)}
    bench.findings.check("inherited_nodes_are_named", passed, figure, answer["detail"])
