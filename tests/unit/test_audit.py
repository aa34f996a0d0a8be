# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One audit on a made-up host: what is refused, planned, cured, held up and removed."""

from __future__ import annotations

import os
import pathlib
import typing as t

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _audit,
    _audit_dropin,
    _audit_find,
    _audit_judge,
    _audit_units,
    _systemd,
)
from ansible_collections.gpuops.serving.plugins.module_utils._audit import Request
from ansible_collections.gpuops.serving.plugins.module_utils._audit_judge import Unit
from ansible_collections.gpuops.serving.plugins.module_utils._audit_units import Facts, Told
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError

BAD = Unit("qwen.service", kill_mode="process", engine="vllm", load_time=300.0, drain=60.0, timeout_stop=120.0)
GOOD = BAD._replace(name="tidy.service", kill_mode="mixed")
SCRIPT = ("/bin/su", "x", "-c", "vllm serve m")


class Host:
    """Units of which systemd reads the drop-ins anew when it is told to."""

    def __init__(self, folder: pathlib.Path, *units: Unit) -> None:
        self.folder = folder
        self.units = {unit.name: unit for unit in units}
        self.now = dict(self.units)
        self.need_reload = False
        self.deaf = False
        self.reloads = 0
        self.drop_ins: t.Dict[str, t.Tuple[str, ...]] = {}
        self.seen: t.List[str] = list(self.units)
        self.perhaps: t.List[str] = []

    def look(self) -> _audit_find.Sight:
        return _audit_find.Sight(self.seen, self.perhaps, {}, ["something was not seen"])

    def read(self, names: t.Sequence[str], told: Told, seen: t.Mapping[str, str]) -> t.List[Facts]:
        found = []
        for name in dict.fromkeys(names):
            unit = self.now.get(name, Unit(name, load_state="not-found"))
            files = self.drop_ins.get(name, ())
            serves = unit.engine != ""
            found.append(
                Facts(unit, None, "command" if serves else "", serves, "active", "/x", files, self.need_reload)
            )
        return found

    def path(self, name: str) -> pathlib.Path:
        return self.folder / (name + ".d") / _audit_dropin.NAME

    def reload(self) -> None:
        self.reloads += 1
        for name, unit in self.units.items():
            path = self.path(name)
            lines = _audit_dropin.parse(path.read_text(encoding="utf-8")) if path.exists() else []
            settings = [(line.section, line.directive, line.value) for line in lines]
            self.now[name] = unit if self.deaf else _audit_judge.applied(unit, settings)
            self.drop_ins[name] = (str(path),) if path.exists() else ()


@pytest.fixture(name="make")
def fixture_make(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> t.Callable[..., Host]:
    def make(*units: Unit) -> Host:
        host = Host(tmp_path, *units)
        look = _audit_dropin.look
        monkeypatch.setattr(_audit_dropin, "look", lambda unit: look(unit, str(tmp_path)))
        monkeypatch.setattr(_audit_find, "look", host.look)
        monkeypatch.setattr(_audit_find, "listens", lambda units: [])
        monkeypatch.setattr(_audit_units, "read", host.read)
        monkeypatch.setattr(_audit_units, "reload", host.reload)
        monkeypatch.setattr(_systemd, "version", lambda: 252)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        return host

    return make


def told(result: t.Dict[str, t.Any], unit: int = 0) -> t.List[t.Tuple[str, bool, str]]:
    return [(row["rule"], row["fixed"], row["held_up"]) for row in result["units"][unit]["findings"]]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Request(units=[]), '"units" is empty: name a unit, or leave it out for all that serve an engine'),
        (Request(units=["a b"]), 'the unit name "a b" is not usable: it is not a systemd unit name'),
        (Request(units=["ünit"]), 'the unit name "ünit" is not usable: it is not a systemd unit name'),
        (Request(units=["a.socket"]), 'the unit "a.socket" is no service: only services are audited'),
        (Request(units=["a@"]), 'the unit "a@.service" is a template: name one of its instances'),
        (Request(told=Told(engine="wllm")), 'the engine "wllm" is not known: use one of '),
        (Request(told=Told(load_time=-1)), '"load_time" must be at least 0, not -1'),
        (Request(told=Told(drain_time=float("nan"))), '"drain_time" must be a number up to 2000000, not nan'),
        (Request(ignore=["kil_mode"]), 'the rule "kil_mode" does not exist: use one of kill_mode, '),
        (Request(fix=True, absent=True), '"fix" writes drop-ins, and "state=absent" removes them: leave one of them '),
    ],
)
def test_what_makes_no_sense_is_one_sentence_before_anything(request_: Request, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        _audit.audit(request_)
    assert caught.value.message.startswith(sentence)
    assert "\n" not in caught.value.message


def test_an_ordinary_user_writes_no_drop_in(make: t.Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    make(BAD)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _audit.audit(Request())["verdict"] == "flawed"
    for request in (Request(fix=True), Request(absent=True)):
        with pytest.raises(UsageError, match="drop-ins are written by root only: run as root, or with become"):
            _audit.audit(request)


def test_without_fix_nothing_is_written(make: t.Callable[..., Host]) -> None:
    host = make(BAD, GOOD)
    result = _audit.audit(Request())
    assert (result["verdict"], result["changed"], result["counts"]["critical"]) == ("flawed", False, 1)
    assert result["msg"] == '1 of 2 units: "qwen.service": kill_mode'
    assert told(result) == [("kill_mode", False, "")]
    assert result["units"][0]["findings"][0]["drop_in"].endswith("\nKillMode=mixed\n")
    assert [unit["verdict"] for unit in result["units"]] == ["flawed", "clean"]
    assert result["warnings"] == ["something was not seen"]
    assert (host.reloads, os.listdir(host.folder), "diff" in result) == (0, [], False)


def test_check_mode_answers_as_the_real_run_does(make: t.Callable[..., Host]) -> None:
    client = BAD._replace(
        name="voyager.service",
        kill_mode="mixed",
        start=(("/usr/bin/docker", "run", "--name", "q", "i"),),
        clients=(_audit_judge.Client("docker", "run", ("q",)),),
        client_path="/usr/bin/docker",
    )
    host = make(BAD, GOOD, client)
    plan = _audit.audit(Request(fix=True), check_mode=True)
    assert (host.reloads, os.listdir(host.folder)) == (0, [])
    done = _audit.audit(Request(fix=True))
    for result in (plan, done):
        result.pop("elapsed")
    assert plan == done
    assert (done["verdict"], done["changed"], host.reloads) == ("minor", True, 1)
    assert told(done) == [("kill_mode", True, "")]
    assert told(done, 2) == [("container_client", False, "a drop-in cannot do more")]
    assert done["units"][0]["drop_in"] == str(host.path("qwen.service"))
    assert done["diff"][0]["after"] == host.path("qwen.service").read_text(encoding="utf-8")
    assert (done["diff"][0]["before"], done["diff"][0]["before_header"]) == ("", "/dev/null")

    again = _audit.audit(Request(fix=True))
    assert (again["changed"], again["verdict"], host.reloads, "diff" in again) == (False, "minor", 1, False)
    assert again["units"][0]["drop_in"] == str(host.path("qwen.service"))


def test_a_finding_that_comes_later_is_added_to_what_was_cured(make: t.Callable[..., Host]) -> None:
    host = make(BAD)
    _audit.audit(Request(fix=True))
    host.units["qwen.service"] = BAD._replace(send_sigkill=False)
    host.reload()
    result = _audit.audit(Request(fix=True))
    assert (result["verdict"], result["changed"], told(result)) == ("clean", True, [("send_sigkill", True, "")])
    text = host.path("qwen.service").read_text(encoding="utf-8")
    assert "KillMode=mixed" in text and "SendSIGKILL=yes" in text


def test_a_drop_in_that_systemd_has_not_read_is_read(make: t.Callable[..., Host]) -> None:
    host = make(BAD)
    _audit.audit(Request(fix=True))
    host.now["qwen.service"] = BAD
    host.drop_ins.clear()
    assert _audit.audit(Request(fix=True), check_mode=True)["changed"] is True
    result = _audit.audit(Request(fix=True))
    assert (result["changed"], result["verdict"], "diff" in result, host.reloads) == (True, "clean", False, 2)


def test_a_drop_in_of_somebody_else_is_left_alone(make: t.Callable[..., Host]) -> None:
    host = make(BAD)
    path = host.path("qwen.service")
    path.parent.mkdir()
    path.write_text("[Service]\nKillMode=process\n", encoding="utf-8")
    result = _audit.audit(Request(fix=True))
    assert told(result) == [("kill_mode", False, "somebody else wrote %s" % path)]
    assert (result["changed"], host.reloads, path.read_text(encoding="utf-8")) == (
        False,
        0,
        "[Service]\nKillMode=process\n",
    )
    assert _audit.audit(Request(absent=True))["changed"] is False
    assert path.exists()


def test_a_later_drop_in_wins_and_is_named(make: t.Callable[..., Host]) -> None:
    host = make(BAD)
    later = host.folder / "override.conf"
    later.write_text("[Service]\nKillMode=process\n", encoding="utf-8")
    host.drop_ins["qwen.service"] = (str(later),)
    result = _audit.audit(Request(fix=True))
    assert told(result) == [("kill_mode", False, "%s sets KillMode afterwards: change it there" % later)]
    assert result["changed"] is False


def test_a_setting_that_does_not_take_effect_is_not_called_cured(make: t.Callable[..., Host]) -> None:
    host = make(BAD)
    host.deaf = True
    result = _audit.audit(Request(fix=True))
    assert told(result) == [("kill_mode", False, "the drop-in is there, and systemd goes by something else")]
    assert (result["verdict"], result["changed"]) == ("flawed", True)


def test_a_transient_unit_gets_no_drop_in(make: t.Callable[..., Host]) -> None:
    make(BAD._replace(transient=True))
    result = _audit.audit(Request(fix=True))
    assert told(result) == [("kill_mode", False, "the unit is transient: whoever starts it has to set KillMode")]
    assert result["changed"] is False


def test_only_findings_that_are_severe_enough_are_cured(make: t.Callable[..., Host]) -> None:
    make(BAD._replace(timeout_stop=5.0))
    result = _audit.audit(Request(fix=True, fix_severity="critical"))
    assert told(result) == [("kill_mode", True, ""), ("timeout_stop", False, "")]
    assert result["verdict"] == "minor"


@pytest.mark.parametrize(("fail_on", "verdict"), [("critical", "minor"), ("warning", "minor"), ("notice", "flawed")])
def test_the_verdict_is_that_of_what_is_left(make: t.Callable[..., Host], fail_on: str, verdict: str) -> None:
    make(GOOD._replace(start=(SCRIPT,)))
    result = _audit.audit(Request(fail_on=fail_on))
    assert (result["verdict"], told(result)) == (verdict, [("mark_lost", False, "no drop-in can cure it")])


def test_a_rule_that_is_ignored_is_not_applied(make: t.Callable[..., Host]) -> None:
    make(BAD)
    result = _audit.audit(Request(ignore=["kill_mode"], fix=True))
    assert (result["verdict"], result["changed"], told(result)) == ("clean", False, [])
    assert result["msg"] == "1 unit: nothing is wrong"


def test_removal_takes_away_what_was_written_and_nothing_else(make: t.Callable[..., Host]) -> None:
    host = make(BAD, GOOD)
    _audit.audit(Request(fix=True))
    plan = _audit.audit(Request(absent=True), check_mode=True)
    assert (plan["changed"], host.path("qwen.service").exists()) == (True, True)
    result = _audit.audit(Request(absent=True))
    assert (result["changed"], result["verdict"], os.listdir(host.folder)) == (True, "flawed", [])
    assert (result["diff"][0]["after"], result["diff"][0]["after_header"]) == ("", "/dev/null")
    assert _audit.audit(Request(absent=True))["changed"] is False


def test_a_unit_that_is_named_is_judged_beside_the_others(make: t.Callable[..., Host]) -> None:
    make(GOOD._replace(gpus=("0",)), GOOD._replace(name="b.service", gpus=("0",)))
    result = _audit.audit(Request(units=["tidy"]))
    assert [unit["name"] for unit in result["units"]] == ["tidy.service"]
    assert told(result) == [("shared_gpu", False, "no drop-in can cure it")]
    assert result["warnings"] == []


def test_what_only_its_file_hints_at_has_to_serve_an_engine(make: t.Callable[..., Host]) -> None:
    host = make(BAD, GOOD._replace(name="vllm-exporter.service", engine="", kill_mode="process"))
    host.seen, host.perhaps = [], ["qwen.service", "vllm-exporter.service"]
    assert [unit["name"] for unit in _audit.audit(Request())["units"]] == ["qwen.service"]


@pytest.mark.parametrize(
    ("state", "verdict", "reason"),
    [
        ("not-found", "not_found", "it does not exist on this host"),
        ("masked", "unknown", "it is masked, so that systemd tells nothing of it"),
    ],
)
def test_a_unit_that_cannot_be_judged_is_never_clean(
    make: t.Callable[..., Host], state: str, verdict: str, reason: str
) -> None:
    make(BAD._replace(load_state=state))
    result = _audit.audit(Request(fix=True))
    assert (result["verdict"], result["changed"]) == (verdict, False)
    assert result["msg"] == '1 of 1 unit: "qwen.service": %s' % reason


def test_a_host_without_engines_is_clean(make: t.Callable[..., Host]) -> None:
    make()
    result = _audit.audit(Request(fix=True))
    assert (result["verdict"], result["changed"]) == ("clean", False)
    assert result["msg"] == "no service unit of this host serves an engine or holds a GPU"


def test_files_that_systemd_has_not_read_are_told_of(make: t.Callable[..., Host]) -> None:
    host = make(GOOD)
    host.need_reload = True
    assert 'the files of the unit "tidy.service" have changed' in _audit.audit(Request(units=["tidy"]))["warnings"][0]
