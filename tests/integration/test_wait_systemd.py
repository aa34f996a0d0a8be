# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The wait through SSH and its action plugin, on the oldest and the newest systemd: what happens while it lasts.

The verdicts themselves are in the Molecule scenario ``wait`` and in ``test_readiness_systemd.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import typing as t
from pathlib import Path

import pytest
from fleet import REPO, Fleet

ENGINE = REPO / "tests" / "fakes" / "engine.py"
HOSTS = ("gpu1=bullseye,user=ops", "gpu2=trixie")
OLD, NEW = "gpu1", "gpu2"
PORT = 9200
# gpu03 qwen: loading weights 63 % · GPU 71204 MiB · 4 m 12 s, moved 2 s ago
LIVE = re.compile(r"^(gpu[12]) (\S+): (.+)$", re.M)
BAR = re.compile(r"loading weights (\d+) %")
EACH = 2.0  # seconds of one percent of a long load
BEGINNING = 15.0  # in which each change ends a slice, where nothing is read beside it
LATE = 5.0
SLICE = 60.0  # longer than any slice lasts
# Who has the folder open: the slice that writes its line there, and the child that removes it when the slice is killed.
HOLDERS = """
import glob, os
def held(pid):
    try:
        return "/run/gpuops/lines" in map(os.readlink, glob.glob("/proc/%s/fd/*" % pid))
    except OSError:
        return False
def parent(pid):
    return open("/proc/%s/stat" % pid).read().rpartition(")")[2].split()[1]
found = [pid for pid in os.listdir("/proc") if pid.isdigit() and held(pid)]
print(*sorted(found, key=lambda pid: parent(pid) in found))
"""

Answer = t.Dict[str, t.Any]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab takes root")


@pytest.fixture(scope="module")
def fleet() -> t.Iterator[Fleet]:
    found = Fleet("test-wait")
    found.down()
    found.up(HOSTS)
    try:
        found.install_agent()
        for host in (OLD, NEW):
            found.put(host, ENGINE, "/opt/engine.py", "0755")
        yield found
    finally:
        found.down()


class Run(t.NamedTuple):
    """One run of a playbook."""

    status: int
    out: str
    err: str

    @property
    def answers(self) -> t.Dict[str, Answer]:
        found = re.findall(r"ANSWER-(\w+) (\{.*\}) REWSNA", self.out)
        return {host: json.loads(json.loads('"%s"' % text)) for host, text in found}

    def live(self, host: str) -> t.List[str]:
        """What was shown of a host while it lasted."""
        return [text for name, _service, text in LIVE.findall(self.out + "\n" + self.err) if name == host]


class Lab:
    """Both hosts, one unit at a time on each."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.unit = "it.service"

    def run(self, host: str, command: str, checked: bool = True) -> str:
        return self.fleet.run(host, command, checked=checked)

    def start(self, host: str, arguments: str, *lines: str) -> None:
        text = "[Service]\nExecStart=/usr/bin/python3 /opt/engine.py --port %d --engine vllm %s\n" % (PORT, arguments)
        source = self.folder / "unit"
        source.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
        self.fleet.put(host, source, "/run/systemd/system/" + self.unit)
        self.run(host, "systemctl kill --signal=KILL {0}; systemctl stop {0}".format(self.unit), checked=False)
        self.run(host, "systemctl daemon-reload; systemctl start --no-block " + self.unit)

    def options(self, **options: t.Any) -> t.Dict[str, t.Any]:
        given: t.Dict[str, t.Any] = {"unit": self.unit, "url": "http://127.0.0.1:%d" % PORT, "engine": "vllm"}
        given.update(model="tiny", timeout=60, stall_timeout=10, report_only=True)
        given.update(options)
        return given

    def wait(self, host: str, **options: t.Any) -> Answer:
        return self.fleet.module(host, "wait_model_ready", **self.options(**options))

    def play(
        self,
        hosts: str,
        keywords: t.Optional[t.Dict[str, t.Any]] = None,
        arguments: t.Sequence[str] = (),
        **options: t.Any,
    ) -> Run:
        """The wait as a task of a playbook, with keywords of its own."""
        return self.watch([], hosts, keywords, arguments, **options)

    def watch(
        self,
        lines: t.List[t.Tuple[float, str]],
        hosts: str,
        keywords: t.Optional[t.Dict[str, t.Any]] = None,
        arguments: t.Sequence[str] = (),
        **options: t.Any,
    ) -> Run:
        """The same; each of its lines is put to the others as it comes, with the moment."""
        process = self.begin(hosts, keywords, arguments, **options)
        limit = threading.Timer(300, process.kill)
        limit.start()
        errors: t.List[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
        reader.start()
        for line in process.stdout:
            lines.append((time.time(), line))
        reader.join()
        limit.cancel()
        return Run(process.wait(), "".join(line for _when, line in lines), errors[0])

    def begin(
        self,
        hosts: str,
        keywords: t.Optional[t.Dict[str, t.Any]] = None,
        arguments: t.Sequence[str] = (),
        **options: t.Any,
    ) -> t.Any:
        """The playbook, which runs."""
        waiting: t.Dict[str, t.Any] = {"gpuops.serving.wait_model_ready": self.options(**options), "register": "answer"}
        shown = {"msg": "ANSWER-{{ inventory_hostname }} {{ answer | to_json }} REWSNA"}
        tasks = [dict(waiting, **(keywords or {})), {"ansible.builtin.debug": shown}]
        book = self.folder / "play.json"
        book.write_text(json.dumps([{"hosts": hosts, "gather_facts": False, "tasks": tasks}]), encoding="utf-8")
        argv = ["ansible-playbook", "-i", str(self.fleet.folder / "inventory.yml"), *arguments, str(book)]
        environment = dict(self.fleet.environment(), ANSIBLE_CALLBACK_RESULT_FORMAT="json", PYTHONUNBUFFERED="1")
        return subprocess.Popen(
            argv, env=environment, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def names(self, host: str) -> t.List[str]:
        """The lines that slices have written down on a host."""
        return self.run(host, "ls -A /run/gpuops/lines", checked=False).split()

    def holders(self, host: str) -> t.List[str]:
        """The processes that have their folder open, a slice before its child."""
        return self.run(host, "python3 -c '%s'" % HOLDERS.strip()).split()

    def readers(self, host: str) -> t.List[str]:
        """What reads such a line, on a host and here."""
        there = self.run(host, "ps -eo args").splitlines()
        here = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
        here = [line for line in here if "/run/gpuops-lab/%s/" % self.fleet.name in line]
        return [line for line in there + here if "a=/run/gpuops/lines/" in line]

    @contextlib.contextmanager
    def waiting(self, host: str, **options: t.Any) -> t.Iterator[t.List[Answer]]:
        """A wait that goes on while the body is run."""
        found: t.List[Answer] = []
        thread = threading.Thread(target=lambda: found.append(self.wait(host, **options)))
        thread.start()
        try:
            yield found
        finally:
            thread.join(150)

    def clean(self) -> None:
        for host in (OLD, NEW):
            units = "'it.service' 'other.service'"
            self.run(host, "systemctl kill --signal=KILL %s; systemctl stop %s" % (units, units), checked=False)
            self.run(host, "rm -rf /run/systemd/system/it.service /run/it; systemctl daemon-reload", checked=False)
            self.run(host, "systemctl reset-failed", checked=False)


def within(seconds: float, look: t.Callable[[], t.Any]) -> t.Any:
    """What a look finds, which must find something in so many seconds."""
    until = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, "not within %g s" % seconds
        time.sleep(0.2)


@pytest.fixture
def lab(fleet: Fleet, tmp_path: Path) -> t.Iterator[Lab]:
    found = Lab(fleet, tmp_path)
    yield found
    found.clean()


# What is shown while it lasts


def test_each_change_is_a_line_that_names_host_and_service(lab: Lab) -> None:
    for host in (OLD, NEW):
        lab.start(host, "--load 25 --log tqdm")
    run = lab.play("gpu_hosts")
    assert run.status == 0, run.out + run.err
    for host in (OLD, NEW):
        assert run.answers[host]["verdict"] == "ready"
        lines = run.live(host)
        percents = [int(found.group(1)) for found in map(BAR.search, lines) if found]
        assert len(percents) >= 3, lines
        assert percents == sorted(set(percents))
        assert all("moved" in line for line in lines if BAR.search(line))
        # No line of one host in that of another.
        assert not [line for line in lines if "gpu1" in line or "gpu2" in line]
    assert "resume" not in json.dumps(run.answers)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [({"no_log": True}, {}), ({"check_mode": True}, {}), ({}, {"progress": False})],
    ids=["no_log", "check_mode", "progress"],
)
def test_nothing_is_shown_where_it_must_not(
    lab: Lab, keywords: t.Dict[str, t.Any], options: t.Dict[str, t.Any]
) -> None:
    lab.start(NEW, "--load 8 --log tqdm")
    run = lab.play(NEW, keywords, **options)
    assert run.status == 0, run.out + run.err
    assert run.live(NEW) == []


def test_the_whole_of_a_long_wait_counts_for_the_deadline(lab: Lab) -> None:
    lab.start(NEW, "--load 100 --log tqdm")
    began = time.monotonic()
    found = lab.wait(NEW, timeout=25, stall_timeout=20)
    assert (found["verdict"], found["phase"]) == ("progressing", "loading_weights")
    assert 25 <= found["elapsed"] < 27
    assert time.monotonic() - began < 45
    assert found["tiers"][0]["at"] < 2, "a later slice must not begin anew"


def test_each_percent_of_a_long_load_is_shown_soon_and_nothing_is_left(lab: Lab) -> None:
    for host in (OLD, NEW):
        lab.run(host, "mkdir -p /run/it")
        lab.start(host, "--load %g --log tqdm --moments /run/it/moments" % (100 * EACH))
    lines: t.List[t.Tuple[float, str]] = []
    run = lab.watch(lines, "gpu_hosts", timeout=95, stall_timeout=30)
    calm = os.getloadavg()[0] < (os.cpu_count() or 1) + 1
    assert run.status == 0, run.out + run.err
    assert not run.err
    for host in (OLD, NEW):
        born = float(lab.run(host, "cat /run/it/moments").split()[1])
        shown = [(when, BAR.search(line)) for when, line in lines if line.startswith(host + " it: ")]
        percents = [(when, int(found.group(1))) for when, found in shown if found]
        due = {percent: born + EACH * percent for percent in range(100)}
        late = [
            min(when for when, found in percents if found >= percent) - due[percent]
            for percent in due
            if percents[0][0] + BEGINNING < due[percent] and percent <= percents[-1][1]
        ]
        print(host, "late by", *("%.1f" % seconds for seconds in late))
        assert len(late) >= 30
        # From one slice to the next a program is started here and there, which takes longer beside a full load.
        assert sorted(late)[len(late) * 8 // 10] <= LATE, late
        assert max(late) <= LATE or not calm, late
        assert [percent for _when, percent in percents] == sorted({percent for _when, percent in percents})
        assert run.answers[host]["verdict"] == "progressing"
        assert lab.names(host) == []
        assert lab.holders(host) == []


def test_the_line_of_a_slice_goes_with_it_when_it_is_killed(lab: Lab) -> None:
    def killed() -> t.List[str]:
        """The owner and mode of the line, the slice's child and the line, of a slice that was killed in its middle."""
        look = "$(python3 -c '%s'; ls -A /run/gpuops/lines)" % HOLDERS.strip()
        # On the host in one command: a slice may end at any moment.
        strike = "stat -c '%U %a' /run/gpuops/lines/$3 && kill -9 $1 && echo $2 $3"
        same = 'a=%s; sleep 3; b=%s; set -- $b; [ "$a" = "$b" ] && [ $# = 3 ] && ' % (look, look)
        found = lab.run(OLD, same + strike, checked=False).split()
        return found if len(found) == 4 else []

    lab.start(OLD, "--load 400 --log tqdm")
    runs: t.List[Run] = []
    thread = threading.Thread(target=lambda: runs.append(lab.play(OLD, timeout=200, stall_timeout=100)))
    thread.start()
    try:
        user, mode, guard, name = within(150, killed)
        assert (user, mode) == ("ops", "600")
        within(5, lambda: name not in lab.names(OLD))
        within(5, lambda: guard not in lab.holders(OLD))
    finally:
        thread.join(300)
    assert runs[0].status == 2, runs[0].out


def test_nothing_is_left_of_a_controller_that_was_killed(lab: Lab) -> None:
    for host in (OLD, NEW):
        lab.start(host, "--load 100 --log tqdm")
    process = lab.begin("gpu_hosts", timeout=90)
    try:
        for host in (OLD, NEW):
            within(40, lambda host=host: lab.readers(host) and lab.names(host))
    finally:
        process.kill()
        process.communicate()
    for host in (OLD, NEW):
        within(20, lambda host=host: not lab.holders(host))
        assert lab.names(host) == []
        within(10, lambda host=host: not lab.readers(host))


# The connection


def test_a_cable_that_is_pulled_late_ends_neither_the_wait_nor_its_lines(lab: Lab) -> None:
    def percents() -> int:
        return sum(BAR.search(line) is not None for _when, line in list(seen))

    lab.start(NEW, "--load 150 --log tqdm")
    seen: t.List[t.Tuple[float, str]] = []
    found: t.List[Run] = []
    thread = threading.Thread(target=lambda: found.append(lab.watch(seen, NEW, stall_timeout=60, timeout=250)))
    thread.start()
    within(90, lambda: percents() and time.time() > seen[2][0] + BEGINNING + 5 and percents() >= 8)
    lab.fleet.lab("cut", NEW)
    try:
        time.sleep(12)
    finally:
        lab.fleet.lab("heal", NEW)
        thread.join(300)
    (run,) = found
    answer, lines = run.answers[NEW], run.live(NEW)
    assert (answer["verdict"], answer["restarts"]) == ("ready", 0), run.out + run.err
    assert answer["tiers"][0]["at"] < BEGINNING
    back = lines.index("the connection is back")
    assert "lost" in lines[back - 1]
    for part in (lines[:back], lines[back:]):
        assert len([line for line in part if BAR.search(line)]) >= 8, lines
    # That of the lost slice goes with it.
    within(SLICE, lambda: not lab.names(NEW))


def test_a_cable_that_is_pulled_in_the_middle_does_not_end_the_wait(lab: Lab) -> None:
    lab.start(NEW, "--load 45 --log tqdm")
    with lab.waiting(NEW, stall_timeout=30, timeout=100) as found:
        time.sleep(14)  # the first slice has answered, on a busy machine too: what it saw must outlast the cut
        lab.fleet.lab("cut", NEW)
        try:
            time.sleep(14)
        finally:
            lab.fleet.lab("heal", NEW)
    assert found[0]["verdict"] == "ready", found
    assert found[0]["tiers"][0]["at"] < 3
    assert found[0]["restarts"] == 0
    assert found[0]["elapsed"] > 35


def test_a_cable_that_stays_pulled_makes_the_host_unreachable_in_time(lab: Lab) -> None:
    lab.start(NEW, "--load 100 --log tqdm")
    runs: t.List[Run] = []
    thread = threading.Thread(target=lambda: runs.append(lab.play(NEW, reconnect_timeout=10)))
    thread.start()
    time.sleep(7)
    began = time.monotonic()
    lab.fleet.lab("cut", NEW)
    try:
        thread.join(90)
    finally:
        lab.fleet.lab("heal", NEW)
    assert runs and runs[0].status == 4, runs
    assert "UNREACHABLE" in runs[0].out
    assert re.search(r"was lost while the unit .{2,20} was waited for.*last seen at: loading weights", runs[0].out)
    assert 9 < time.monotonic() - began < 45


# What the log may do


def test_a_bar_without_line_ends_is_read_from_a_log_file(lab: Lab) -> None:
    lab.run(NEW, "mkdir -p /run/it")
    lab.start(NEW, "--load 30 --log bar", "StandardOutput=append:/run/it/log")
    found = lab.wait(NEW, log_path="/run/it/log", timeout=7, stall_timeout=4)
    assert (found["verdict"], found["phase"]) == ("progressing", "loading_weights")
    assert 10 < found["percent"] < 95
    assert found["movement"]["percent"] < 2
    assert lab.wait(NEW, log_path="/run/it/log", stall_timeout=4)["verdict"] == "ready"


def test_a_log_file_that_is_rotated_in_the_middle_goes_on(lab: Lab) -> None:
    lab.run(NEW, "mkdir -p /run/it")
    lab.start(NEW, "--load 16 --log tqdm", "StandardOutput=append:/run/it/log")
    with lab.waiting(NEW, log_path="/run/it/log", stall_timeout=5) as found:
        time.sleep(6)
        lab.run(NEW, "cp /run/it/log /run/it/log.1; : > /run/it/log")
    assert found[0]["verdict"] == "ready", found


def test_a_journal_that_is_rotated_and_emptied_is_no_movement(lab: Lab) -> None:
    lab.start(NEW, "--load 600 --log tqdm --freeze-after 3")
    with lab.waiting(NEW, stall_timeout=7) as found:
        time.sleep(6)
        lab.run(NEW, "journalctl --rotate --quiet; journalctl --vacuum-time=1s --quiet", checked=False)
    assert found[0]["verdict"] == "stalled", found
    assert found[0]["elapsed"] < 3 + 7 + 3


def test_lines_that_journald_dropped_are_said(lab: Lab) -> None:
    # It tells of what it dropped with the first line that it takes again. On a disk with space it takes more than this.
    limits = ("LogRateLimitIntervalSec=3", "LogRateLimitBurst=1")
    lab.start(NEW, "--load 18 --log repeat --burn", *limits)
    found = lab.play(NEW, stall_timeout=5).answers[NEW]
    assert found["verdict"] == "ready"
    assert any("wrote too many at once" in text for text in found["warnings"]), found["warnings"]


def test_who_may_not_read_the_journal_is_told_so_and_the_wait_goes_on(lab: Lab) -> None:
    nobody = {"vars": {"ansible_become": False}}
    lab.start(OLD, "--load 1")
    found = lab.play(OLD, nobody, tier="unit").answers[OLD]
    assert found["verdict"] == "ready"
    lab.start(OLD, "--load 60 --log tqdm --burn")
    found = lab.play(OLD, nobody, timeout=8, stall_timeout=6).answers[OLD]
    assert found["verdict"] in ("progressing", "stalled")
    assert any("journal" in text for text in found["warnings"]), found["warnings"]


# What the unit may do


def test_a_unit_that_prepares_first_is_waited_for(lab: Lab) -> None:
    lab.start(NEW, "--load 2", "ExecStartPre=/bin/sleep 5")
    found = lab.wait(NEW)
    assert found["verdict"] == "ready"
    assert found["tiers"][0]["at"] > 2


def test_a_restart_by_somebody_else_begins_a_new_life(lab: Lab) -> None:
    lab.start(OLD, "--load 20 --log tqdm")
    with lab.waiting(OLD) as found:
        time.sleep(10)
        lab.run(OLD, "systemctl restart " + lab.unit)
    assert (found[0]["verdict"], found[0]["restarts"]) == ("ready", 1)
    assert found[0]["elapsed"] > 20


def test_a_unit_that_is_stopped_during_the_wait_is_dead(lab: Lab) -> None:
    lab.start(OLD, "--load 60 --log tqdm")
    with lab.waiting(OLD) as found:
        time.sleep(8)
        lab.run(OLD, "systemctl stop " + lab.unit)
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 12  # the way back of the answer included
    assert found[0]["verdict"] == "dead"
    assert "inactive" in found[0]["msg"]


def test_out_of_memory_names_who_holds_the_gpu(lab: Lab) -> None:
    lab.run(NEW, "systemd-run --quiet --unit=other --setenv=LAB_DECODE_MS=1 /usr/local/bin/lab-llama 9300 other")
    until = time.monotonic() + 20
    while "llama" not in lab.run(NEW, "ls /run/fake-nvml/holders; ps -eo comm", checked=False):
        assert time.monotonic() < until, "nobody came to hold the GPU"
        time.sleep(0.5)
    text = "[Service]\nExecStart=/usr/local/bin/lab-llama %d tiny\n" % PORT
    (lab.folder / "llama").write_text(text, encoding="utf-8")
    lab.fleet.put(NEW, lab.folder / "llama", "/run/systemd/system/it.service")
    lab.run(NEW, "systemctl daemon-reload; systemctl start --no-block it")
    found = lab.wait(NEW, engine="llama_cpp", gpus=["0"])
    assert (found["verdict"], found["cause"]["kind"]) == ("dead", "gpu_out_of_memory")
    assert "other.service" in json.dumps(found["cause"]["holders"])
    assert "other.service" in found["msg"]
    assert found["cause"]["figures"]["wanted_mib"] > found["cause"]["figures"]["free_mib"]


# The engines


@pytest.mark.parametrize("engine", ["sglang", "llama_cpp", "ovms", "triton", "tgi", "ollama", "openai"])
def test_each_profile_finds_its_way_to_a_token(lab: Lab, engine: str) -> None:
    lab.start(NEW, "--load 4 --engine %s" % engine)
    found = lab.wait(NEW, engine=engine)
    assert (found["verdict"], found["tier_reached"]) == ("ready", "generation"), found["msg"]
    assert all(tier["reached"] for tier in found["tiers"])


def test_a_certificate_that_nobody_signed_is_named_with_the_remedy(lab: Lab) -> None:
    pem = lab.folder / "both.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(lab.folder / "key"), "-out", str(pem)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    lab.run(NEW, "mkdir -p /run/it")
    lab.fleet.put(NEW, pem, "/run/it/ca.pem")
    pem.write_text(pem.read_text() + (lab.folder / "key").read_text())
    lab.fleet.put(NEW, pem, "/run/it/both.pem", "0600")
    lab.start(NEW, "--load 1 --tls /run/it/both.pem")
    url = "https://127.0.0.1:%d" % PORT
    found = lab.wait(NEW, url=url)
    assert found["verdict"] != "ready"
    assert "self-signed" in found["msg"] or "self signed" in found["msg"], found["msg"]
    assert "ca_path" in found["msg"]
    assert lab.wait(NEW, url=url, ca_path="/run/it/ca.pem")["verdict"] == "ready"
    assert lab.wait(NEW, url=url, validate_certs=False)["verdict"] == "ready"


# The command on the host


@pytest.mark.parametrize(
    ("arguments", "options", "code", "word"),
    [
        ("--load 3 --log tqdm", "", 0, "ready"),
        ("--load 60 --log tqdm --freeze-after 2", "--stall-timeout 4", 1, "stalled"),
        ("--load 60 --crash-after 2", "", 1, "dead"),
    ],
)
def test_the_command_ends_with_the_code_of_the_verdict(
    lab: Lab, arguments: str, options: str, code: int, word: str
) -> None:
    lab.start(NEW, arguments)
    command = "gpuops wait --unit %s --url http://127.0.0.1:%d --engine vllm --model tiny --timeout 60 --json %s"
    script = command % (lab.unit, PORT, options) + " 2>/run/it.err; echo CODE $?; cat /run/it.err"
    text = lab.run(NEW, script)
    assert "CODE %d" % code in text
    answer = json.loads(text.split("CODE")[0])
    assert answer["verdict"] == word
    assert answer["ok"] is (code == 0)


def test_the_command_draws_a_bar_on_a_terminal_and_lines_elsewhere(lab: Lab) -> None:
    command = "gpuops wait --unit %s --url http://127.0.0.1:%d --engine vllm --model tiny --timeout 60"
    command = command % (lab.unit, PORT)
    lab.start(NEW, "--load 6 --log tqdm")
    plain = lab.run(NEW, command + " 2>&1")
    assert "|" not in plain
    assert re.search(r"loading weights \d+ %", plain)
    lab.start(NEW, "--load 6 --log tqdm")
    bar = lab.run(NEW, 'TERM=xterm script --quiet --return --command "%s" /dev/null' % command)
    assert re.search(r"\|\S* *\| it: loading weights \d+ %", bar)
