# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The check of an inventory: what is refused, who is asked for what, what the report and the table say."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.plugin_utils import _gpu_check, _gpu_table

HOLDER = {"pid": 4711, "name": "llama-server", "user": "llama", "unit": "llama.service", "memory": 44000}


def gpu(index: t.Optional[int] = 0, verdict: str = "clear", reason: str = "idle", **more: t.Any) -> t.Dict[str, t.Any]:
    facts = {"index": index, "vendor": "nvidia", "memory_used": 3, "memory_total": 46068, "holders": [], "detail": ""}
    return {**facts, "verdict": verdict, "reason": reason, **more}


def answer(*gpus: t.Dict[str, t.Any], verdict: str = "clear", **more: t.Any) -> t.Dict[str, t.Any]:
    return {"verdict": verdict, "ok": verdict == "clear", "msg": "so it is", "gpus": list(gpus), **more}


def report(answers: t.Dict[str, t.Any], asked: t.Optional[t.List[str]] = None) -> t.Dict[str, t.Any]:
    hostvars = {host: {} if result is None else {"reading": result} for host, result in answers.items()}
    return _gpu_table.report(list(answers), hostvars, list(answers) if asked is None else asked, "reading")


def lines(answers: t.Dict[str, t.Any]) -> t.List[str]:
    return _gpu_table.table(report(answers))


BUSY = gpu(0, "busy", "held_by_process", memory_used=44003, holders=[HOLDER])


def test_a_table_of_all_kinds_of_hosts() -> None:
    answers = {
        "gpu10": answer(gpu(0), gpu(1)),
        "gpu2": answer(BUSY, verdict="busy"),
        "gone": {"unreachable": True, "msg": "Connection timed out"},
        "broken": {"failed": True, "msg": "MODULE FAILURE\nSee stdout", "module_stdout": "a\npython3: not found\n"},
        "skipped": {"skipped": True},
    }
    assert lines(answers) == [
        "clear  host    gpu  vendor  verdict  reason           memory MiB   holders",
        "yes    gpu10   0    nvidia  clear    idle             3/46068      none",
        "yes    gpu10   1    nvidia  clear    idle             3/46068      none",
        "NO     gpu2    0    nvidia  busy     held_by_process  44003/46068  "
        "pid 4711 llama-server, user llama, unit llama.service, 44000 MiB",
        "NO     gone    unknown, the host does not answer",
        "NO     broken  error, MODULE FAILURE: python3: not found",
        "4 hosts: 1 clear, 1 busy, 1 unknown, 1 error; 3 GPUs: 2 clear, 1 busy",
    ]


def test_the_report_of_the_same() -> None:
    found = report({"a": answer(BUSY, verdict="busy"), "b": {"unreachable": True, "msg": "timed out\r\n"}})
    assert (found["schema"], found["verdict"], found["ok"]) == (1, "unknown", False)
    assert found["msg"] == "not every GPU is clear: a (busy), b (unknown)"
    assert found["counts"] == {
        "hosts": {"all": 2, "clear": 0, "busy": 1, "unknown": 1, "error": 0},
        "gpus": {"all": 1, "clear": 0, "busy": 1, "unknown": 0, "error": 0},
    }
    assert found["hosts"]["a"]["gpus"] == [BUSY]
    assert found["hosts"]["b"] == {
        "verdict": "unknown",
        "ok": False,
        "answered": False,
        "reason": "unreachable",
        "msg": "the host does not answer",
        "cause": "timed out",
        "gpus": [],
        "warnings": [],
    }


def test_what_ansible_adds_is_left_out_and_what_the_module_returns_is_kept() -> None:
    result = answer(gpu(), invocation={"x": 1}, failed_when_result=False, failed=False, _ansible_no_log=False, n=2)
    entry = report({"a": result})["hosts"]["a"]
    assert sorted(entry) == ["answered", "gpus", "msg", "n", "ok", "reason", "verdict", "warnings"]


def test_all_clear() -> None:
    found = report({"a": answer(gpu())})
    assert (found["ok"], found["verdict"], found["msg"]) == (True, "clear", "all GPUs of 1 host are clear")


def test_nobody_is_not_clear() -> None:
    found = report({"a": {"skipped": True}})
    assert (found["ok"], found["verdict"], found["hosts"]) == (False, "unknown", {})
    assert _gpu_table.table(found)[-1] == "0 hosts; 0 GPUs"


def test_an_answer_of_an_earlier_look_is_not_taken() -> None:
    found = report({"a": answer(gpu()), "b": answer(gpu())}, asked=["b"])
    assert found["hosts"]["a"]["verdict"] == "unknown"
    assert found["hosts"]["a"]["msg"] == "the host was not asked: it had failed before in this run"
    assert found["hosts"]["b"]["verdict"] == "clear"


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (None, "unknown"),
        ({}, "error"),
        ({"msg": " \n"}, "error"),
        ({"verdict": "fine", "gpus": []}, "error"),
        ({"verdict": ["clear"]}, "error"),
        (answer(gpu(0, "great")), "error"),
        ({"verdict": "clear", "gpus": ["clear"]}, "error"),
        (answer(gpu(), failed=True), "error"),
        (answer(gpu(0, "busy", "held_by_process")), "busy"),
        (answer(), "clear"),
    ],
)
def test_what_is_not_understood_is_never_clear(result: t.Any, verdict: str) -> None:
    found = report({"a": result})
    assert (found["hosts"]["a"]["verdict"], found["ok"]) == (verdict, verdict == "clear")


def test_a_host_of_which_there_is_more_to_say_than_its_devices_show() -> None:
    few = answer(gpu(), verdict="error", msg="8 GPUs are expected, but the driver knows only 1")
    none = answer(verdict="clear", msg="there is no GPU on this host and no driver for one")
    assert lines({"few": few, "none": none})[1:3] == [
        "yes    few   0    nvidia  clear    idle    3/46068     none",
        "NO     few   error, 8 GPUs are expected, but the driver knows only 1",
    ]
    assert lines({"none": none})[1] == "yes    none  clear, there is no GPU on this host and no driver for one"


def test_a_device_without_holders_says_why_it_is_not_clear() -> None:
    lost = gpu(3, "error", "gpu_lost", memory_used=None, memory_total=None, detail="the driver says\nit is lost")
    assert lines({"a": answer(lost, verdict="error")})[1].split(None, 5)[5] == (
        "gpu_lost  ?/?         the driver says it is lost"
    )
    missing = gpu(None, "error", "not_found", detail="no driver here knows such a device")
    assert lines({"a": answer(missing, verdict="error")})[1].startswith("NO     a     ?    nvidia")


def test_partitions_have_lines_of_their_own() -> None:
    part = gpu(1, "busy", "held_by_process", holders=[HOLDER])
    found = report({"a": answer(gpu(0, "busy", "held_by_process", partitions=[gpu(0), part]), verdict="busy")})
    rows = [line.split()[:3] for line in _gpu_table.table(found)[1:4]]
    assert rows == [["NO", "a", "0"], ["yes", "a", "0/0"], ["NO", "a", "0/1"]]
    assert found["counts"]["gpus"]["all"] == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"unit": None}, "pid 4711 llama-server, user llama, unit none, 44000 MiB"),
        ({"memory": None}, "pid 4711 llama-server, user llama, unit llama.service, memory unknown"),
        (
            {"memory": None, "kind": "node", "allowed": True},
            "pid 4711 llama-server, user llama, unit llama.service, only the node is open, allowed",
        ),
        (
            {"container": "0123456789abcdef", "foreign": True},
            "pid 4711 llama-server, user llama, unit llama.service, container 0123456789ab, 44000 MiB, foreign",
        ),
        ({"name": None, "user": None}, "pid 4711, not visible there, 44000 MiB"),
        ({"name": "a\x1b[31m", "unit": "b\nc"}, "pid 4711 a\\x1b[31m, user llama, unit b c, 44000 MiB"),
    ],
)
def test_a_holder_in_words(changes: t.Dict[str, t.Any], text: str) -> None:
    held = gpu(0, "busy", "held_by_process", holders=[{**HOLDER, **changes}, HOLDER])
    line = lines({"a": answer(held, verdict="busy")})[1]
    assert line.endswith("  %s; pid 4711 llama-server, user llama, unit llama.service, 44000 MiB" % text)


def test_the_summary_names_the_first_twenty() -> None:
    found = report({"h%d" % number: {"unreachable": True} for number in range(23)})
    assert found["msg"].endswith("h19 (unknown), and 3 more")
    assert found["msg"].count("(unknown)") == 20


# The request


def problems(values: t.Any, hosts: t.Sequence[str] = ("a",), service: t.Any = None, path: t.Any = None) -> t.List[str]:
    hostvars = {host: values if not isinstance(values, list) else values[n] for n, host in enumerate(hosts)}
    return _gpu_check.problems(list(hosts), hostvars, "all", "", service, path)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("gpu_tolerance", "-1", 'gpuops_gpu_tolerance must be a whole number from 0 to 2000000, not "-1"'),
        ("gpu_tolerance", 1.5, 'gpuops_gpu_tolerance must be a whole number from 0 to 2000000, not "1.5"'),
        ("expected_gpus", "eight", 'gpuops_expected_gpus must be a whole number from 0 to 2000000, not "eight"'),
        ("expected_gpus", True, 'gpuops_expected_gpus must be a whole number from 0 to 2000000, not "True"'),
        ("expected_gpus", "", 'gpuops_expected_gpus must be a whole number from 0 to 2000000, not ""'),
        ("expected_gpus", "9999999", 'gpuops_expected_gpus must be a whole number from 0 to 2000000, not "9999999"'),
        (
            "allowed_holders",
            ["nvtop"],
            'gpuops_allowed_holders must be a list of rules with name, user, unit, such as [{"name": "nvtop"}]',
        ),
        ("allow_no_gpu", "perhaps", 'gpuops_allow_no_gpu must be true or false, not "perhaps"'),
        ("vendor", "matrox", 'gpuops_vendor must be one of auto, amd, intel, nvidia, not "matrox"'),
        ("gpus", "0,first", 'gpuops_gpus is wrong: "first" names no GPU: give an index, a UUID or a PCI address'),
        ("gpus", [0, "0"], "gpuops_gpus is wrong: the list of GPUs names one twice: 0, 0"),
        (
            "gpus",
            "",
            "gpuops_gpus is wrong: the list of GPUs is empty: name at least one, or leave the list out to mean all",
        ),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(name: str, value: t.Any, sentence: str) -> None:
    assert problems({"gpuops_" + name: value}) == [sentence]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gpuops_gpu_tolerance": "0", "gpuops_expected_gpus": 8, "gpuops_allow_no_gpu": "yes", "gpuops_vendor": "amd"},
        {"gpuops_gpus": 0},
        {"gpuops_gpus": "0, 1"},
        {"gpuops_gpus": ["0000:17:00.0", "GPU-1"]},
        {"gpuops_allow_no_gpu": False, "gpuops_services": [{"name": "a"}, {"name": "b", "gpus": []}]},
        {"gpuops_services": ""},
    ],
)
def test_a_good_value_is_taken(values: t.Dict[str, t.Any]) -> None:
    assert problems(values) == []


class Unresolved(t.Dict[str, t.Any]):
    """Variables of a host as newer cores give them: what refers to something undefined raises."""

    def get(self, key: str, default: t.Any = None) -> t.Any:
        if key == "gpuops_gpus":
            raise KeyError("nothing")
        return default


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (Unresolved(), "gpuops_gpus cannot be resolved: 'nothing'"),
        ({"gpuops_expected_gpus": "{{ nothing }}"}, 'gpuops_expected_gpus cannot be resolved: "{{ nothing }}"'),
        ({"gpuops_services": "{{ nothing }}"}, 'gpuops_services cannot be resolved: "{{ nothing }}"'),
        ({"gpuops_services": "chat"}, "gpuops_services is not a list of services"),
        ({"gpuops_services": ["chat"]}, "gpuops_services is not a list of services"),
        (
            {"gpuops_services": [{"name": "a", "gpus": "0"}]},
            "gpuops_services holds a service whose gpus are no list",
        ),
    ],
)
def test_what_would_leave_a_host_out_or_ask_it_less_is_refused(values: t.Any, sentence: str) -> None:
    assert problems(values) == [sentence]


def test_a_mistake_names_its_hosts_unless_it_is_everywhere() -> None:
    bad = {"gpuops_expected_gpus": "x"}
    sentence = 'gpuops_expected_gpus must be a whole number from 0 to 2000000, not "x"'
    assert problems([bad, {}, bad], ("a", "b", "c")) == ["a, c: " + sentence]
    assert problems([bad, bad], ("a", "b")) == [sentence]
    hosts = ["h%d" % number for number in range(8)]
    assert problems([bad] * 7 + [{}], hosts) == ["h0, h1, h2, h3, h4 and 2 more: " + sentence]


def test_no_host_is_refused() -> None:
    assert _gpu_check.problems([], {}, "nosuch", "a*", None, None) == [
        'no host of the inventory within --limit a* fits the pattern "nosuch"'
    ]


def test_a_report_that_cannot_be_written_is_refused(tmp_path: t.Any) -> None:
    assert problems({}, path=str(tmp_path / "new.json")) == []
    assert problems({}, path=str(tmp_path)) == ['gpuops_gpu_report "%s" is a folder: name a file' % tmp_path]
    lost = str(tmp_path / "no" / "new.json")
    assert problems({}, path=lost) == [
        'gpuops_gpu_report "%s" cannot be written: there is no folder "%s"' % (lost, tmp_path / "no")
    ]
    assert problems({}, path="") == ["gpuops_gpu_report is no file name"]


def service(name: str, gpus: t.Any = None) -> t.Dict[str, t.Any]:
    return {"name": name} if gpus is None else {"name": name, "gpus": gpus}


def test_a_service_that_nobody_has_is_refused() -> None:
    values = [{"gpuops_services": [service("b")]}, {"gpuops_services": [service("a")]}, {}]
    assert problems(values, "xyz", "a,b") == []
    assert problems(values, "xyz", ["all"]) == []
    assert problems(values, "xyz", "a,c") == [
        'the service "c" is not in gpuops_services of any selected host (there are: a, b)'
    ]
    assert problems(values, "xyz", " ") == ["service names no service: give a name, several with commas, or all"]
    assert problems({}, "x", "a") == ["no host has gpuops_services in the inventory: add the list to a host or a group"]


MINE = [service("chat", ["0", 1]), service("embed", [1, 2]), service("whole"), service("cpu", [])]


@pytest.mark.parametrize(
    ("services", "asked", "everyone", "gpus", "ask", "devices"),
    [
        ([], None, False, None, False, None),
        ([], None, True, None, True, None),
        ([], None, True, "0,1", True, ["0", "1"]),
        (MINE, None, False, None, True, None),
        (MINE, "chat", False, None, True, ["0", "1"]),
        (MINE, "chat, embed", True, None, True, ["0", "1", "2"]),
        (MINE, "chat,whole", False, None, True, None),
        (MINE, ["all"], False, None, True, None),
        (MINE, "cpu", False, None, False, []),
        (MINE, "cpu", False, 3, True, ["3"]),
        (MINE, "chat", False, ["5"], True, ["5"]),
        (MINE, "other", True, None, False, []),
        ([], "all", True, None, False, []),
    ],
)
def test_the_share_of_a_host(
    services: t.Any, asked: t.Any, everyone: bool, gpus: t.Any, ask: bool, devices: t.Any
) -> None:
    assert _gpu_check.share(services, asked, everyone, gpus) == {"ask": ask, "gpus": devices}


@pytest.mark.parametrize(("hosts", "text"), [("a:!b", "a:!b"), (["a", "!b"], "a,!b"), ("", "")])
def test_a_list_of_patterns_is_one_pattern(hosts: t.Any, text: str) -> None:
    assert _gpu_check.pattern(hosts) == text
