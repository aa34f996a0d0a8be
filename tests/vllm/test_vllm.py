# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The real vLLM, deployed by the role on a lab host, is waited for, probed, wedged, drained and stopped.

What these tests say of vLLM itself is what its profile rests on: where a new release behaves otherwise, they fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _causes, _engines, _load, _progress
from fleet import Fleet

HERE = Path(__file__).resolve().parent
FOLDER = os.environ.get("VLLM_FOLDER", "")
RELEASES = {"python3.11": "bookworm", "python3.13": "trixie"}
NAME, HOST, UNIT = "test-vllm", "gpu1", "gpuops-tiny.service"
PORT, KEY = 8000, "known-to-these-tests-alone"
URL = "http://127.0.0.1:%d" % PORT
COMMAND = "/opt/vllm/bin/vllm serve %s --served-model-name tiny --port 8000 --enforce-eager --dtype float32 %s"
MODEL, LENGTH = "/opt/vllm/models/tiny", "--max-model-len 8192"
DROP_INS = "/run/systemd/system/%s.d" % UNIT
STOP_TIMEOUT = 20
START_TIMEOUT = 480  # seconds; 40 on an idle machine with two processors
PROFILE = _engines.PROFILES["vllm"]

Answer = t.Dict[str, t.Any]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root"),
    pytest.mark.skipif(not FOLDER, reason="the real vLLM is not installed: run make test-vllm, which installs it"),
]

# By number and creation time, as a process is known: "pid" and "start" in, the signal sent.
_SIGNAL = """
import os, signal, sys
pid, start, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
handle = os.pidfd_open(pid)
assert int(open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()[19]) == start
signal.pidfd_send_signal(handle, getattr(signal, name))
"""
# Everything of the unit's account, whatever its control group.
_LOOK = """
import glob, json, os, pwd
found, user = [], pwd.getpwnam("vllm").pw_uid
for folder in glob.glob("/proc/[0-9]*"):
    try:
        head, _, tail = open(folder + "/stat").read().rpartition(")")
        fields = tail.split()
        words = open(folder + "/cmdline", "rb").read().split(b"\\0")
        if os.stat(folder).st_uid == user and fields[0] not in "ZX":
            found.append({"pid": int(folder[6:]), "start": int(fields[19]), "parent": int(fields[1]),
                          "state": fields[0], "title": words[0].decode(), "name": head.partition("(")[2],
                          "cgroup": open(folder + "/cgroup").read().strip().rpartition(":")[2]})
    except OSError:
        continue
print(json.dumps(found))
"""


class Vllm:
    """The one service of the one host."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.usual = False  # whether it was started as it was deployed, and nothing was done to it

    def run(self, command: str, checked: bool = True, timeout: float = 120) -> str:
        return self.fleet.run(HOST, command, checked=checked, timeout=timeout)

    def python(self, code: str, *words: object) -> str:
        source = self.folder / "code.py"
        source.write_text(code, encoding="utf-8")
        self.fleet.put(HOST, source, "/run/code.py")
        return self.run("python3 /run/code.py %s" % " ".join(str(word) for word in words))

    def module(self, module: str, **options: t.Any) -> Answer:
        return self.fleet.module(HOST, module, service="tiny", **options)

    def look(self, **options: t.Any) -> Answer:
        """The wait, where it is short."""
        return self.module("wait_model_ready", timeout=80, stall_timeout=80, report_only=True, **options)

    # Its life

    def drop_in(self, *lines: str, command: str = "") -> None:
        """Change the unit as its owner would, until the next ``clear``."""
        changed = ["ExecStart=", "ExecStart=" + command] if command else []
        source = self.folder / "drop-in.conf"
        source.write_text("\n".join(["[Service]", *changed, *lines, ""]), encoding="utf-8")
        self.run("mkdir -p " + DROP_INS)
        self.fleet.put(HOST, source, DROP_INS + "/test.conf")
        self.run("systemctl daemon-reload")

    def clear(self) -> None:
        self.run("systemctl kill --signal=KILL --kill-who=all {u}; systemctl stop {u}".format(u=UNIT), checked=False)
        self.run("systemctl stop client.service squatter.service", checked=False)
        self.run("rm -rf %s; systemctl daemon-reload; systemctl reset-failed" % DROP_INS)
        self.until(lambda: not self.processes(), 20, "processes of vLLM outlived SIGKILL")
        self.usual = False

    def start(self) -> None:
        self.run("systemctl start --no-block " + UNIT)

    def wait(self) -> t.Tuple[Answer, t.List[str]]:
        """To the end of a start, which may be minutes away: the answer, and what was shown meanwhile."""
        command = "gpuops wait tiny --interval 0.2 --timeout %d --json 2>/run/wait.err; cat /run/wait.err"
        answer, *shown = self.run(command % START_TIMEOUT, timeout=START_TIMEOUT + 60).splitlines()
        return json.loads(answer), shown

    def ready(self) -> None:
        found = self.wait()[0]
        assert found["verdict"] == "ready", found

    # What is there

    def processes(self) -> t.List[t.Dict[str, t.Any]]:
        return t.cast("t.List[t.Dict[str, t.Any]]", json.loads(self.python(_LOOK)))

    def one(self, title: str) -> t.Dict[str, t.Any]:
        (found,) = [row for row in self.processes() if row["title"] == title]
        return found

    def signal(self, process: t.Mapping[str, t.Any], name: str) -> None:
        self.python(_SIGNAL, process["pid"], process["start"], name)

    def property(self, name: str) -> str:
        return self.run("systemctl show -P %s %s" % (name, UNIT))

    def journal(self) -> t.List[str]:
        """The log of the unit's latest life."""
        return self.run("journalctl -o cat --no-pager _SYSTEMD_INVOCATION_ID=%s" % self.property("InvocationID")).split(
            "\n"
        )

    def status(self, path: str) -> int:
        code = (
            "import sys, urllib.error, urllib.request as u\n"
            "try:\n print(u.urlopen(u.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]}), "
            "timeout=10).status)\nexcept urllib.error.HTTPError as error:\n print(error.code)\n"
        )
        return int(self.python(code, URL + path, KEY))

    def metrics(self) -> _load.Load:
        text = self.python("import urllib.request as u; print(u.urlopen('%s/metrics').read().decode())" % URL)
        return _load.load_of(PROFILE, _load.parse(text))

    def client(self, tokens: int) -> None:
        """Begin a stream, and return once tokens come."""
        self.run("rm -f /run/client.json; systemctl reset-failed client.service 2>/dev/null || :")
        words = "%s %s %d /run/client.json" % (URL, KEY, tokens)
        self.run("systemd-run --quiet --collect --unit=client python3 /opt/stream.py " + words)
        self.until(lambda: self.stream()["events"] >= 3, 60, "no token came")

    def stream(self) -> t.Dict[str, t.Any]:
        text = self.run("cat /run/client.json 2>/dev/null || echo '{\"events\": 0}'")
        return t.cast("t.Dict[str, t.Any]", json.loads(text))

    def until(self, found: t.Callable[[], bool], seconds: float, otherwise: str) -> None:
        end = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < end, otherwise
            time.sleep(0.3)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[Vllm]:
    (python,) = (Path(FOLDER) / "lib").glob("python3.*")
    fleet = Fleet(NAME, HERE / "services.yml")
    fleet.down()
    fleet.up(["%s=%s" % (HOST, RELEASES[python.name])], ["%s:/opt/vllm" % FOLDER])
    try:
        fleet.run(HOST, "useradd --system --create-home --home-dir /var/lib/vllm vllm")
        fleet.run(HOST, "ln -s /opt/vllm/lib/libnuma.so.1 /usr/local/lib/ && ldconfig")
        fleet.put(HOST, HERE / "stream.py", "/opt/stream.py")
        fleet.playbook("deploy", "-e", "gpuops_hosts=" + HOST)
        yield Vllm(fleet, tmp_path_factory.mktemp("vllm"))
    finally:
        fleet.down()


@pytest.fixture
def vllm(host: Vllm) -> t.Iterator[Vllm]:
    """At rest, to be started as the test wishes."""
    host.clear()
    yield host
    host.clear()


@pytest.fixture
def serving(host: Vllm) -> Vllm:
    """As it was deployed, and ready. A test that does something to it says so."""
    if not host.usual:
        host.clear()
        host.start()
        host.ready()
        host.usual = True
    return host


@contextlib.contextmanager
def stopped(vllm: Vllm, title: str) -> t.Iterator[t.Dict[str, t.Any]]:
    """One of its processes, frozen while the body runs."""
    process = vllm.one(title)
    vllm.signal(process, "SIGSTOP")
    try:
        yield process
    finally:
        vllm.signal(process, "SIGCONT")


# A start that goes well


def test_a_load_goes_through_its_phases_and_ends_with_a_token(host: Vllm) -> None:
    host.clear()
    host.start()
    found, shown = host.wait()
    assert (found["verdict"], found["tier_reached"], found["phase"]) == ("ready", "generation", "started")
    assert (found["cause"], found["restarts"]) == (None, 0)
    main = host.property("MainPID")
    details = [(tier["name"], tier["detail"]) for tier in found["tiers"]]
    assert details[:4] == [
        ("unit", "active (running), main process %s" % main),
        ("listener", "process %s of the unit listens" % main),
        ("health", "status 200"),
        ("model", 'lists "tiny"'),
    ]
    assert re.fullmatch(r"a token after \d+\.\d+ s", details[4][1])
    # The port opens when the load is over, so it is no sign of progress.
    moments = [tier["at"] for tier in found["tiers"]]
    assert moments == sorted(moments)
    assert moments[0] < 3 < moments[1]
    words = [line.partition(": ")[2].partition(" · ")[0] for line in shown if line.startswith("tiny: ")]
    assert "initialising" in words
    percents = [
        int(word[len("loading weights ") : -len(" %")])
        for word in words
        if re.fullmatch(r"loading weights \d+ %", word)
    ]
    assert percents == sorted(set(percents))
    # So small a model is loaded between two lines that are shown; the log has each step.
    told = [_progress.percent_in(line) for line in host.journal() if "Loading safetensors" in line]
    steps = [percent for percent in told if percent is not None]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] == 100
    assert any(0 < percent < 100 for percent in steps), steps
    assert set(percents) <= {int(percent) for percent in steps}
    host.usual = True


def test_each_phase_of_the_log_is_told_once_and_in_the_order_of_the_profile(serving: Vllm) -> None:
    lines = serving.journal()
    told = [phase.word for phase in (_engines.phase_of(PROFILE, line) for line in lines) if phase is not None]
    changes = [word for at, word in enumerate(told) if at == 0 or told[at - 1] != word]
    # Nothing is compiled and no graph is captured on the processor with --enforce-eager.
    assert changes == ["initialising", "loading_weights", "allocating_kv_cache", "warming_up", "started"]
    assert [line for line in lines if _causes.cause_of(PROFILE, line) is not None] == []
    assert "version 0.32.0" in "\n".join(lines), "tell in docs/facts.md which release was tried"


# What it answers


def test_another_model_is_not_there(serving: Vllm) -> None:
    found = serving.look(model="large")
    assert (found["verdict"], found["tier_reached"]) == ("wrong_server", "health")
    assert found["msg"].endswith(' has a wrong_server: the model "large" is not listed: there are "tiny"')
    probe = serving.module("route_probe", model="large", timeout=30, report_only=True)
    assert (probe["verdict"], probe["direct"]["status"]) == ("wrong_model", 404)


def test_another_key_is_refused_where_it_counts(serving: Vllm) -> None:
    found = serving.look(api_key="another")
    assert (found["verdict"], found["tier_reached"]) == ("auth_error", "health")


def test_the_metrics_bear_the_names_of_the_profile_and_tell_of_load(serving: Vllm) -> None:
    before = serving.metrics()
    assert (before.running, before.waiting, before.kv_use) == (0, 0, 0)
    assert sorted(before.tokens) == sorted([*PROFILE.tokens, *PROFILE.prompt_tokens])
    probe = serving.module("route_probe", timeout=60)
    assert (probe["verdict"], probe["direct"]["tokens"], probe["direct"]["model"]) == ("ok", 1, "tiny")
    (tokens,) = PROFILE.tokens
    assert serving.metrics().tokens[tokens] == before.tokens[tokens] + 1
    serving.client(4000)
    busy = serving.metrics()
    assert (busy.running, busy.waiting) == (1, 0)
    assert busy.kv_use is not None and 0 < busy.kv_use < 1
    assert busy.tokens[tokens] > before.tokens[tokens] + 1
    found = serving.module("wait_engine_idle", timeout=5, report_only=True)
    assert found["ok"] is False
    serving.run("systemctl stop client.service")
    assert serving.module("wait_engine_idle", timeout=60)["ok"] is True


# Up, and useless


@pytest.mark.parametrize("title", ["VLLM::Worker", "VLLM::EngineCore"])
def test_a_process_that_stands_still_makes_it_wedged_whatever_its_health_says(serving: Vllm, title: str) -> None:
    with stopped(serving, title) as process:
        assert serving.one(title)["state"] == "T"
        assert [serving.status(path) for path in ("/health", "/ping", "/v1/models")] == [200, 200, 200]
        found = serving.look(generation_timeout=8)
        assert (found["verdict"], found["tier_reached"], found["ok"]) == ("wedged", "model", False)
        probe = serving.module("route_probe", timeout=8, report_only=True)
        assert probe["verdict"] == "wedged"
        assert serving.metrics().running == 0, "the gauge tells of it: docs/facts.md says that it does not"
    assert process["cgroup"].endswith("/" + UNIT)
    # What was asked meanwhile is answered first.
    serving.ready()


def test_a_worker_that_is_killed_ends_the_service_as_if_somebody_had_asked_for_it(serving: Vllm) -> None:
    serving.usual = False
    serving.signal(serving.one("VLLM::Worker"), "SIGKILL")
    serving.until(lambda: not serving.processes(), 60, "processes of vLLM outlived its worker")
    found = serving.look()
    assert (found["verdict"], found["cause"]["kind"]) == ("dead", "child_failed")
    assert "died unexpectedly" in found["cause"]["line"]
    # The front ends with status 0, so that Restart=on-failure leaves it at that.
    state = [serving.property(name) for name in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")]
    assert state == ["inactive", "success", "0", "0"]


# A start that fails


@pytest.mark.parametrize(
    ("model", "arguments", "kind", "word"),
    [
        (MODEL, "--max-model-len 131072", "gpu_out_of_memory", "max seq len"),
        (MODEL, "--max-model-len 262144", "bad_arguments", "max_model_len"),
        (MODEL, "--no-such-option", "bad_arguments", "--no-such-option"),
        ("/opt/vllm/models/none", LENGTH, "model_not_found", "/opt/vllm/models/none"),
    ],
    ids=["memory", "length", "option", "model"],
)
def test_a_start_that_fails_is_dead_with_its_cause(
    vllm: Vllm, model: str, arguments: str, kind: str, word: str
) -> None:
    vllm.drop_in("Restart=no", command=COMMAND % (model, arguments))
    vllm.start()
    found = vllm.wait()[0]
    assert (found["verdict"], found["cause"]["kind"]) == ("dead", kind), found["cause"]
    assert word in found["cause"]["line"]
    assert found["unit_state"]["active_state"] == "failed"
    assert vllm.processes() == []
    if kind == "gpu_out_of_memory":
        figures = found["cause"]["figures"]
        assert figures["wanted_mib"] == 12288
        assert 1000 < figures["free_mib"] <= 1024


def test_a_port_that_somebody_else_has_is_told_at_once(vllm: Vllm) -> None:
    vllm.run("systemd-run --quiet --collect --unit=squatter python3 -m http.server %d" % PORT)
    vllm.drop_in("Restart=no")
    vllm.start()
    found = vllm.wait()[0]
    assert found["verdict"] == "wrong_server"
    assert "squatter.service" in found["msg"]
    assert found["elapsed"] < 30


# The stop


def test_a_stop_cuts_streams_at_once_or_at_the_end_of_its_time(serving: Vllm) -> None:
    """Without --shutdown-timeout the engine ends at once. Whether its front learns of that is a race that it may lose:
    then it waits for clients that wait for it."""
    serving.usual = False
    serving.client(8000)
    found = serving.module("process_tree_stop", reset_failed=True)
    assert (found["verdict"], found["changed"], found["survivors"]) == ("stopped", True, [])
    names = [process["name"] for process in found["processes"]]
    assert [names.count(name) for name in ("VLLM::EngineCor", "VLLM::Worker")] == [1, 1]
    assert serving.processes() == []
    if "EngineDeadError" in serving.run("journalctl -o cat --no-pager -n 200 -u " + UNIT):
        assert found["elapsed"] < STOP_TIMEOUT / 2
    else:
        assert STOP_TIMEOUT <= found["elapsed"] < STOP_TIMEOUT + 20, "it has an end of its own: see on_sigterm"
    serving.until(lambda: bool(serving.stream()["over"]), 10, "the client still waits")
    assert serving.stream()["finish"] is None


def test_a_stop_without_clients_is_quick(serving: Vllm) -> None:
    serving.usual = False
    found = serving.module("process_tree_stop")
    assert (found["verdict"], found["survivors"]) == ("stopped", [])
    assert found["elapsed"] < STOP_TIMEOUT - 5
    assert serving.property("Result") == "success"
    assert serving.module("process_tree_stop")["verdict"] == "absent"


def test_with_a_shutdown_timeout_it_drains(vllm: Vllm) -> None:
    vllm.drop_in("TimeoutStopSec=150", command=COMMAND % (MODEL, LENGTH + " --shutdown-timeout 120"))
    vllm.start()
    vllm.ready()
    vllm.client(200)
    vllm.run("systemctl stop --no-block " + UNIT)
    vllm.until(lambda: vllm.property("SubState") == "stop-sigterm", 10, "the stop did not begin")
    before = vllm.stream()["events"]
    refused = vllm.module("route_probe", timeout=15, report_only=True)
    assert (refused["verdict"], refused["direct"]["status"]) == ("error_response", 500)
    vllm.until(lambda: bool(vllm.stream()["over"]), 120, "the stream did not end")
    ended = time.monotonic()
    stream = vllm.stream()
    assert (stream["finish"], stream["error"]) == ("length", None)
    assert stream["events"] > before
    vllm.until(lambda: vllm.property("ActiveState") == "inactive", 30, "it went on after its last stream")
    assert time.monotonic() - ended < 30, "more than stop_advice gives it"
    assert vllm.processes() == []


def test_orphans_of_a_killed_front_are_found_and_ended(vllm: Vllm) -> None:
    vllm.drop_in("KillMode=process", "Restart=no")
    vllm.start()
    vllm.ready()
    (front,) = [row for row in vllm.processes() if str(row["pid"]) == vllm.property("MainPID")]
    vllm.signal(front, "SIGKILL")
    vllm.until(lambda: vllm.property("ActiveState") == "failed", 20, "the unit did not fail")
    time.sleep(15)
    orphans = {row["title"]: row for row in vllm.processes()}
    assert {"VLLM::EngineCore", "VLLM::Worker"} <= set(orphans), "it ends its orphans by itself"
    assert orphans["VLLM::EngineCore"]["parent"] == 1
    assert not vllm.run("ss -ltnH 'sport = :%d'" % PORT), "the port looks free, which proves nothing"
    refused = vllm.module("service_start")
    assert (refused["verdict"], refused["changed"]) == ("survivors", False)
    found = vllm.module("process_tree_stop", engine="vllm")
    assert (found["verdict"], found["changed"], found["survivors"]) == ("stopped", True, [])
    by_name = {process["name"]: process for process in found["processes"]}
    for name in ("VLLM::EngineCor", "VLLM::Worker"):
        assert "cgroup" in by_name[name]["found_by"]
        assert "mark" in by_name[name]["found_by"]
        # The engine core ends its worker itself, where it gets to it first.
        assert by_name[name]["outcome"] in ("ended", "gone")
    assert vllm.processes() == []
