# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Each rule of an audit: a unit that breaks it, and units that look like it and do not."""

from __future__ import annotations

import configparser
import pathlib
import typing as t

import jinja2
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _audit_judge, _audit_rules, _systemd
from ansible_collections.gpuops.serving.plugins.module_utils._audit_command import Port
from ansible_collections.gpuops.serving.plugins.module_utils._audit_judge import Finding, Listens, Unit, judge
from ansible_collections.gpuops.serving.plugins.module_utils._clients import Client
from ansible_collections.gpuops.serving.plugins.plugin_utils import _services

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOREVER = float("inf")
# A unit without a fault, of an engine that loads for five minutes.
GOOD = Unit(
    "qwen.service",
    kind="exec",
    kill_mode="mixed",
    restart="on-failure",
    restart_delay=15.0,
    limit_interval=1500.0,
    limit_burst=3,
    timeout_stop=120.0,
    start=(("/opt/vllm/bin/vllm", "serve", "m"),),
    engine="vllm",
    load_time=300.0,
    drain=60.0,
    drain_from="what vLLM needs",
)
DOCKER = ("/usr/bin/docker", "run", "--rm", "--name", "qwen", "vllm/vllm-openai")
CLIENT: t.Dict[str, t.Any] = {
    "start": (DOCKER,),
    "clients": (Client("docker", "run", ("qwen",), image="vllm/vllm-openai"),),
    "client_path": "/usr/bin/docker",
}
PODMAN = {**CLIENT, "clients": (Client("podman", "run", ("qwen",)),), "client_path": "/usr/bin/podman"}


def found(**changes: t.Any) -> t.List[Finding]:
    return judge([GOOD._replace(**changes)])["qwen.service"]


def rules(**changes: t.Any) -> t.List[str]:
    return [finding.rule for finding in found(**changes)]


def start(*words: str, **more: t.Any) -> t.Dict[str, t.Any]:
    return {"start": (words,), **more}


TRUE: t.List[t.Tuple[str, str, t.Dict[str, t.Any]]] = [
    ("kill_mode", "critical", {"kill_mode": "process"}),
    ("kill_mode", "critical", {"kill_mode": "none"}),
    ("send_sigkill", "critical", {"send_sigkill": False}),
    ("not_loadable", "critical", {"load_state": "bad-setting", "load_error": "Unit x has a bad unit file setting"}),
    ("timeout_start", "critical", {"kind": "notify", "timeout_start": 90.0}),
    ("timeout_start", "critical", {"kind": "notify-reload", "timeout_start": 299.0}),
    ("timeout_start", "critical", {"after": (("/bin/sh", "-c", "until curl -f localhost; do sleep 1; done"),)}),
    ("timeout_start", "critical", {"after": (("/usr/local/bin/gpuops", "wait", "qwen"),)}),
    ("timeout_start", "critical", {"after": (("/opt/wait-for-model.sh",),)}),
    ("timeout_start", "critical", {"after": (("/usr/bin/curl", "--retry", "99", "localhost:8000/health"),)}),
    ("start_limit_off", "warning", {"limit_interval": 0.0}),
    ("start_limit_off", "warning", {"limit_burst": 0}),
    ("start_limit_never", "warning", {"limit_interval": 10.0, "limit_burst": 5, "restart_delay": 2.0}),
    ("start_limit_never", "warning", {"limit_interval": 9.0, "limit_burst": 3, "restart_delay": 3.0}),
    ("start_limit_never", "warning", {"limit_interval": 10.0, "limit_burst": 1000, "restart_delay": 0.1}),
    # 1 + 4.6 + 21.5 s
    (
        "start_limit_never",
        "warning",
        {"limit_interval": 27.0, "restart_delay": 1.0, "restart_steps": 3, "restart_most": 100.0},
    ),
    ("start_limit_load", "warning", {"limit_interval": 10.0, "limit_burst": 5, "restart_delay": 0.1}),
    ("start_limit_load", "warning", {"limit_interval": 945.0}),
    ("start_limit_load", "warning", {"limit_interval": 10.0, "limit_burst": 99, "restart_delay": 0.1}),
    ("timeout_stop", "warning", {"timeout_stop": 59.0}),
    ("timeout_stop_none", "warning", {"timeout_stop": FOREVER}),
    ("restart_always", "warning", {"restart": "always"}),
    ("restart_always", "warning", {"restart": "always", "before": (("/bin/mkdir", "-p", "/run/x"),)}),
    ("restart_always", "warning", {"restart": "always", "before": (("/usr/bin/docker", "rm", "-f", "qwen"),)}),
    ("restart_always", "warning", {"restart": "always", "before": (("/bin/sh", "-c", "sleep 5; rm -f /x"),)}),
    ("restart_always", "warning", {"restart": "always", "before": (("/usr/bin/nvidia-smi", "-pm", "1"),)}),
    ("forking_pidfile", "warning", {"kind": "forking"}),
    ("container_client", "warning", CLIENT),
    ("container_client", "warning", PODMAN),
    ("container_client", "notice", {**CLIENT, "stop_post": (("/usr/bin/docker", "rm", "-f", "qwen"),)}),
    ("container_client", "warning", {**CLIENT, "stop_post": (("/usr/bin/docker", "ps"),)}),
    ("container_client", "warning", {**CLIENT, "stop": (("/usr/bin/docker", "stop", "qwen"),)}),
    ("container_client", "notice", {**CLIENT, "kind": "oneshot", "stop": (("/usr/bin/docker", "stop", "qwen"),)}),
    ("container_client", "warning", {"clients": (Client("nspawn", "run", ("qwen",)),)}),
    ("container_client", "warning", {"clients": (Client("docker", "compose"),)}),
    ("login_session", "critical", start("/bin/su", "vllm", "-c", "vllm serve m", sessions=True)),
    ("login_session", "critical", start("/usr/sbin/runuser", "-l", "vllm", "-c", "vllm serve m", sessions=True)),
    ("login_session", "critical", start("/usr/bin/sudo", "-iu", "vllm", "vllm", "serve", "m", sessions=True)),
    ("mark_lost", "notice", start("/bin/su", "vllm", "-c", "vllm serve m", sessions=False)),
    ("mark_lost", "notice", start("/usr/sbin/runuser", "-u", "vllm", "--", "/opt/vllm", "serve", sessions=True)),
    ("mark_lost", "warning", start("/usr/sbin/runuser", "-u", "vllm", "--", "/opt/vllm", "serve", marked=True)),
    ("mark_lost", "notice", start("/usr/bin/setpriv", "--reuid=vllm", "--init-groups", "/opt/vllm", "serve", "m")),
    ("mark_lost", "notice", start("/usr/bin/setpriv", "--clear-groups", "/opt/vllm", "serve", "m")),
    ("mark_lost", "notice", start("/usr/bin/sudo", "-u", "vllm", "/opt/vllm", "serve", "m")),
    ("mark_lost", "notice", start("/usr/local/bin/gosu", "vllm", "/opt/vllm", "serve", "m")),
    ("mark_lost", "notice", start("/bin/bash", "-c", "cd /opt && exec gosu vllm ./vllm serve m")),
    ("mark_lost", "notice", start("/usr/bin/nice", "-n", "5", "/usr/sbin/runuser", "-u", "vllm", "/opt/vllm")),
    ("mark_lost", "notice", start("/sbin/start-stop-daemon", "--start", "--chuid", "vllm", "--exec", "/opt/vllm")),
]

FALSE: t.List[t.Dict[str, t.Any]] = [
    {},
    {"kill_mode": "control-group"},
    {"kind": "notify", "timeout_start": FOREVER},
    {"kind": "notify", "timeout_start": 300.0},
    {"kind": "exec", "timeout_start": 1.0},  # the start is over before the load
    {"after": (("/bin/sleep", "5"),), "timeout_start": 10.0},
    {"after": (("/usr/bin/curl", "-d", "started", "https://chat.example/hook"),), "timeout_start": 10.0},
    {"kind": "notify", "start": (("/bin/sh", "-c", "systemd-notify --ready; exec vllm serve m"),)},
    {"restart": "no", "limit_interval": 0.0},
    {"restart": "on-success", "limit_interval": 10.0, "restart_delay": 60.0},
    {"limit_interval": FOREVER},
    {"limit_interval": 10.0, "restart_delay": FOREVER},  # it is never restarted
    {"limit_interval": 945.1},
    {"limit_interval": 10.0, "limit_burst": 5, "restart_delay": 0.1, "load_time": 0.0},
    # 1 + 4.6 + 21.5 s
    {"limit_interval": 27.2, "restart_delay": 1.0, "restart_steps": 3, "restart_most": 100.0, "load_time": 0.0},
    {"timeout_stop": 60.0},
    {"timeout_stop": 1.0, "drain": 0.0, "engine": ""},
    {"restart": "always", "engine": "", "load_time": 0.0},
    {"restart": "always", "before": (("/usr/local/bin/gpuops", "gpu-clear"),)},
    {"restart": "always", "before": (("/bin/sh", "-c", "while nvidia-smi | grep -q python; do sleep 1; done"),)},
    {"restart": "always", "before": (("/opt/check-gpus",),)},
    {"restart": "always", "before": (("\0",),)},
    {"kind": "forking", "pid_file": "/run/qwen.pid"},
    {**PODMAN, "start": (("/usr/bin/podman", "run", "--cgroups=split", "x"),)},
    {**PODMAN, "start": (("/usr/bin/podman", "run", "--cgroups", "split", "x"),)},
    {"clients": (Client("nspawn", "run", ("qwen",), keep_unit=True),)},
    start("/usr/bin/setpriv", "--reuid=vllm", "--keep-groups", "/opt/vllm", "serve", "--groups", "3"),
    start("/usr/bin/sudo", "-P", "-u", "vllm", "/opt/vllm", "serve", "m"),
    start("/opt/vllm", "serve", "su"),
    start("/usr/bin/sudo", "-nPu", "vllm", "/opt/vllm", "serve", "m", "-i"),
    start("/usr/bin/chroot", "/srv", "/opt/vllm", "serve", "m", "--groups=3"),
    start("/bin/bash", "-c", "echo su; exec /opt/vllm serve runuser"),
    {"marked": True, "sessions": True},
]


@pytest.mark.parametrize(("rule", "severity", "changes"), TRUE)
def test_a_unit_that_breaks_a_rule(rule: str, severity: str, changes: t.Dict[str, t.Any]) -> None:
    (finding,) = found(**changes)
    assert (finding.rule, finding.severity) == (rule, severity)
    assert finding.why.startswith(_audit_rules.RULES[rule].why)
    assert finding.value


def test_every_rule_is_tried() -> None:
    tried = {rule for rule, _severity, _changes in TRUE} | {"shared_gpu", "shared_port"}
    assert tried == set(_audit_rules.RULES)


@pytest.mark.parametrize("changes", FALSE)
def test_a_unit_that_only_looks_like_it(changes: t.Dict[str, t.Any]) -> None:
    assert found(**changes) == []


@pytest.mark.parametrize(
    "options", [("--sdnotify=conmon",), ("--sdnotify", "conmon"), ("--sdnotify=ignore",)], ids=" ".join
)
def test_conmon_tells_that_a_container_runs_and_not_that_the_model_serves(options: t.Tuple[str, ...]) -> None:
    words = ("/usr/bin/podman", "run", "--cgroups=split", *options, "x")
    assert rules(**{**PODMAN, "start": (words,)}, kind="notify") == []
    assert rules(**{**PODMAN, "start": (words[:3] + ("x",),)}, kind="notify") == ["timeout_start"]


@pytest.mark.parametrize(("rule", "severity", "changes"), TRUE)
def test_what_a_drop_in_sets_cures_the_finding(rule: str, severity: str, changes: t.Dict[str, t.Any]) -> None:
    unit = GOOD._replace(**changes)
    (finding,) = judge([unit])[unit.name]
    if not finding.settings:
        return
    assert {directive for _section, directive, _value in finding.settings} <= set(_audit_rules.RULES[rule].sets)
    left = judge([_audit_judge.applied(unit, finding.settings)])[unit.name]
    # SIGKILL of the client is cured, and that its limits do not reach the container is not.
    assert [(one.rule, one.severity) for one in left] == ([(rule, "notice")] if rule == "container_client" else [])


@pytest.mark.parametrize("rule", [rule for rule in _audit_rules.RULES.values() if rule.sets], ids=lambda rule: rule.id)
def test_a_rule_that_promises_a_drop_in_has_one(rule: _audit_rules.Rule) -> None:
    settings = [one for id_, _severity, changes in TRUE if id_ == rule.id for one in found(**changes)[0].settings]
    assert {directive for _section, directive, _value in settings} == set(rule.sets)


def test_the_start_limit_holds_as_many_lives_as_the_burst() -> None:
    (finding,) = found(limit_interval=10.0, limit_burst=5, restart_delay=10.0)
    # 5 times 300 s to load, 120 s to stop and 10 s before the next, and a minute
    assert finding.settings == (("Unit", "StartLimitIntervalSec", "2210"),)
    (finding,) = found(limit_interval=10.0, limit_burst=0)
    assert finding.settings == (("Unit", "StartLimitIntervalSec", "1365"), ("Unit", "StartLimitBurst", "3"))
    (finding,) = found(limit_interval=10.0, limit_burst=1000)
    assert finding.settings[1] == ("Unit", "StartLimitBurst", "3")


def test_a_start_limit_leaves_room_for_the_stop_that_another_line_sets() -> None:
    findings = {one.rule: one.settings for one in found(limit_interval=0.0, timeout_stop=10.0, drain=200.0)}
    assert findings["timeout_stop"] == (("Service", "TimeoutStopSec", "200"),)
    assert findings["start_limit_off"] == (("Unit", "StartLimitIntervalSec", "1605"),)


@pytest.mark.parametrize(
    "client",
    [
        Client("docker", "run"),
        Client("docker", "run", ("a", "b")),
        Client("docker", "exec", ("a",)),
        Client("docker", "run", ("a",), elsewhere="its host tcp://x"),
        Client("docker", "run", ("a",), options=("--root", "/a b")),
    ],
)
def test_a_container_that_is_not_surely_known_is_stopped_by_no_drop_in(client: Client) -> None:
    (finding,) = found(**{**CLIENT, "clients": (client,)})
    assert (finding.rule, finding.settings) == ("container_client", ())


def test_a_container_is_stopped_by_its_name_with_the_options_of_its_client() -> None:
    (finding,) = found(**{**CLIENT, "clients": (Client("docker", "run", ("qwen",), options=("--host", "unix:///x")),)})
    line = "-/usr/bin/docker --host unix:///x stop -t 10 qwen"
    assert finding.settings == (("Service", "ExecStopPost", line),)
    assert found(**{**CLIENT, "client_path": ""})[0].settings == ()


# Two units


def pair(one: t.Dict[str, t.Any], other: t.Dict[str, t.Any], *listens: Listens) -> t.List[t.Tuple[str, str]]:
    units = [GOOD._replace(**one), GOOD._replace(name="other.service", **other)]
    return [(name, finding.rule) for name, found in judge(units, listens).items() for finding in found]


BOTH_GPU = [("qwen.service", "shared_gpu"), ("other.service", "shared_gpu")]
BOTH_PORT = [("qwen.service", "shared_port"), ("other.service", "shared_port")]
HERE = Port(8000)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"gpus": ("0", "1")}, {"gpus": ("1", "2")}, BOTH_GPU),
        ({"gpus": ("0", "1")}, {"gpus": ("2", "3")}, []),
        ({"gpus": ("0",)}, {"gpus": ()}, []),
        ({"gpus": ("0",)}, {"gpus": ("0",), "claims": False}, []),
        ({"gpus": ("0",), "claims": False}, {"gpus": ("0",)}, []),
        ({"ports": (HERE,)}, {"ports": (HERE,)}, BOTH_PORT),
        ({"ports": (HERE,)}, {"ports": (Port(8001),)}, []),
        ({"ports": (HERE,)}, {"ports": (Port(8000, "10.0.0.1"),)}, BOTH_PORT),
        ({"ports": (Port(8000, "10.0.0.2"),)}, {"ports": (Port(8000, "10.0.0.1"),)}, []),
        ({"ports": (Port(8000, "localhost"),)}, {"ports": (Port(8000, "127.0.0.1"),)}, BOTH_PORT),
        ({"ports": (HERE,)}, {"ports": (HERE,), "claims": False}, []),
        ({"gpus": ("0",), "conflicts": frozenset(["other.service"])}, {"gpus": ("0",)}, []),
        ({"ports": (HERE,)}, {"ports": (HERE,), "conflicts": frozenset(["qwen.service"])}, []),
    ],
)
def test_two_units_that_want_the_same(
    one: t.Dict[str, t.Any], other: t.Dict[str, t.Any], expected: t.List[t.Tuple[str, str]]
) -> None:
    assert pair(one, other) == expected


def test_another_unit_that_listens_on_the_port_now_is_told_once() -> None:
    assert pair({"ports": (HERE,)}, {}, Listens("nginx.service", HERE), Listens("nginx.service", HERE)) == [
        ("qwen.service", "shared_port")
    ]
    assert pair({"ports": (HERE,)}, {}, Listens("qwen.service", HERE)) == []
    never = {"ports": (HERE,), "conflicts": frozenset(["nginx.service"])}
    assert pair(never, {}, Listens("nginx.service", HERE)) == []
    (finding,) = judge([GOOD._replace(ports=(HERE,))], [Listens("nginx.service", HERE)])["qwen.service"]
    assert finding.why.endswith("(nginx.service listens there: port 8000)")


def test_a_unit_that_does_not_exist_breaks_no_rule() -> None:
    for state in ("not-found", "masked"):
        assert found(load_state=state, kill_mode="process") == []


def test_the_worst_finding_comes_first() -> None:
    assert rules(restart="always", kill_mode="none", timeout_stop=FOREVER) == [
        "kill_mode",
        "timeout_stop_none",
        "restart_always",
    ]


# The units that this collection writes


@pytest.mark.parametrize("changes", [{}, {"ready_timeout": 5400, "stop_timeout": 600}, {"start_burst": 1}])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp", "tgi", "openai"])
def test_the_units_of_the_role_break_no_rule(engine: str, changes: t.Dict[str, t.Any]) -> None:
    service = {"name": "qwen", "engine": engine, "port": 8000, "command": ["/opt/e"], "gpus": ["0"], "user": "e"}
    (item,) = _services.resolve([{**service, **changes}])
    template = ROOT / "roles" / "inference_service" / "templates" / "unit.service.j2"
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(template.read_text(encoding="utf-8")).render(service=item)
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    head, body = parser["Unit"], parser["Service"]
    unit = Unit(
        item["unit"],
        kind=body["Type"],
        kill_mode=body["KillMode"],
        restart=body["Restart"],
        restart_delay=float(body["RestartSec"]),
        limit_interval=float(head["StartLimitIntervalSec"]),
        limit_burst=int(head["StartLimitBurst"]),
        timeout_stop=float(body["TimeoutStopSec"]),
        start=((body["ExecStart"],),),
        marked="gpuops-" in body["SupplementaryGroups"],
        sessions=True,
        engine=engine,
        load_time=float(item["definition"]["ready_timeout"]),
        drain=float(item["definition"]["stop_timeout"]),
    )
    assert "SendSIGKILL" not in body
    assert judge([unit]) == {item["unit"]: []}


def test_spans_of_systemd_are_written_as_whole_seconds() -> None:
    assert _audit_judge.seconds(_systemd.parse_span("1min 30s")) == "90"
    assert _audit_judge.seconds(FOREVER) == "infinity"
    (finding,) = found(timeout_stop=60.0, drain=60.2)
    assert finding.settings == (("Service", "TimeoutStopSec", "61"),)
