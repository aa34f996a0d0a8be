# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a module answers for what its body found, and for what it raised."""

from __future__ import annotations

import json
import typing as t

import pytest
from ansible.module_utils import basic
from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ansible,
    _lease,
    _service,
    _site,
    _wait_request,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import ServingError, UsageError

Body = t.Callable[[_ansible.Context], _ansible.Result]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: t.Any
) -> t.Callable[..., t.Tuple[int, t.Dict[str, t.Any]]]:
    """Run a body as a module with the given arguments; return its exit status and what it printed."""
    monkeypatch.setattr(_lease, "STATE_FOLDER", str(tmp_path / "state"))
    monkeypatch.setattr(_lease, "LOCK_FOLDER", str(tmp_path / "run"))

    def call(
        body: Body,
        spec: t.Optional[_ansible.Spec] = None,
        check: bool = False,
        arguments: t.Any = None,
        **options: t.Any,
    ) -> t.Tuple[int, t.Dict[str, t.Any]]:
        values = dict(arguments or {}, _ansible_check_mode=check, _ansible_remote_tmp=str(tmp_path))
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps({"ANSIBLE_MODULE_ARGS": values}).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit) as ended:
            _ansible.run_module(spec or {}, body, **options)
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    return call


def test_a_good_verdict_is_ok_and_says_whether_something_changed(run: t.Any) -> None:
    code, result = run(lambda ctx: {"verdict": "stopped", "changed": True, "msg": "done"})
    assert (code, result["ok"], result["changed"], result.get("failed", False)) == (0, True, True, False)
    code, result = run(lambda ctx: {"verdict": "clear", "msg": "done"})
    assert (code, result["ok"], result["changed"]) == (0, True, False)


@pytest.mark.parametrize("verdict", ["busy", "unknown", "error", "survivors", "refused", "wedged", "progressing"])
def test_a_bad_verdict_fails_with_the_result_attached(run: t.Any, verdict: str) -> None:
    code, result = run(lambda ctx: {"verdict": verdict, "msg": "why", "found": [1]})
    assert code == 1
    assert (result["failed"], result["ok"], result["msg"], result["found"]) == (True, False, "why", [1])


def test_report_only_does_not_fail_and_is_not_ok(run: t.Any) -> None:
    spec = {"report_only": {"type": "bool", "default": False}}
    code, result = run(lambda ctx: {"verdict": "busy", "msg": "why"}, spec, arguments={"report_only": True})
    assert (code, result["ok"], result.get("failed", False)) == (0, False, False)


def test_a_good_verdict_that_breaks_a_limit_fails(run: t.Any) -> None:
    code, result = run(lambda ctx: {"verdict": "slow", "ok": False, "msg": "over the limit"})
    assert (code, result["failed"], result["ok"]) == (1, True, False)


def test_a_word_that_is_no_verdict_is_an_internal_error_not_an_answer(run: t.Any) -> None:
    code, result = run(lambda ctx: {"verdict": "fine", "msg": "why"})
    assert (code, result["failed"], result["ok"]) == (1, True, False)


@pytest.mark.parametrize("kind", [ServingError, UsageError])
def test_an_error_of_the_library_is_its_sentence_and_its_result(run: t.Any, kind: t.Type[ServingError]) -> None:
    def body(ctx: _ansible.Context) -> _ansible.Result:
        raise kind('the unit "x" is not there: typo', verdict="refused", seen=[2])

    code, result = run(body)
    assert code == 1
    assert (result["msg"], result["verdict"], result["seen"]) == ('the unit "x" is not there: typo', "refused", [2])
    assert (result["ok"], result["changed"]) == (False, False)


def test_an_error_without_a_verdict_of_its_own_is_an_error(run: t.Any) -> None:
    def body(ctx: _ansible.Context) -> _ansible.Result:
        raise UsageError("the timeout must not be negative")

    code, result = run(body)
    assert (code, result["verdict"], result["ok"]) == (1, "error", False)


@pytest.mark.parametrize("error", [ServingError("no", tiers=[1]), UsageError("no"), ValueError("a bug")])
def test_an_error_has_all_that_an_answer_has(run: t.Any, error: Exception) -> None:
    def body(_ctx: t.Any) -> t.Any:
        raise error

    nothing = {"tiers": [], "elapsed": 0.0, "cause": None}
    _code, result = run(body, nothing=nothing)
    assert result["verdict"] == "error"
    found = getattr(error, "result", {})
    assert {name: result[name] for name in nothing} == {**nothing, **found}


def test_an_error_in_the_middle_keeps_what_was_found_and_says_its_own_sentence(run: t.Any) -> None:
    def body(ctx: _ansible.Context) -> _ansible.Result:
        raise ServingError("the lease is gone", msg="2 processes are left", verdict="survivors", survivors=[1])

    code, result = run(body)
    assert (code, result["msg"], result["verdict"]) == (1, "the lease is gone", "survivors")
    assert result["survivors"] == [1]


def test_a_bug_is_called_one(run: t.Any) -> None:
    code, result = run(lambda ctx: {"verdict": 1 / 0})
    assert code == 1
    assert result["msg"].startswith("an internal error: ZeroDivisionError: division by zero")
    assert result["verdict"] == "error"
    assert (result["failed"], result["ok"], result["changed"]) == (True, False, False)


def test_a_missing_library_is_said_before_anything_is_done(run: t.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_site.DISTRIBUTIONS, "no_such_module_x", "no-such-distribution")
    called: t.List[int] = []
    code, result = run(lambda ctx: called.append(1) or {"verdict": "clear"}, requires=["no_such_module_x"])
    assert (code, called) == (1, [])
    assert 'the Python distribution "no-such-distribution" is missing' in result["msg"]


def test_a_key_from_the_definition_is_never_printed(
    run: t.Any, tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-secret-1234\n", encoding="utf-8")
    definition = {"name": "qwen", "api_key_file": str(tmp_path / "key")}
    (tmp_path / "qwen.json").write_text(json.dumps(definition), encoding="utf-8")
    real = _service.fill
    monkeypatch.setattr(_service, "fill", lambda params, mapping: real(params, mapping, str(tmp_path)))
    seen: t.List[str] = []

    def body(ctx: _ansible.Context) -> _ansible.Result:
        seen.append(ctx.params["api_key"])
        return {"verdict": "ok", "msg": "asked with sk-secret-1234"}

    spec = dict(_ansible.service_spec(), **_ansible.http_spec())
    code, result = run(body, spec, fill={"url": "url"}, arguments={"service": "qwen"})
    assert (code, seen) == (0, ["sk-secret-1234"])
    assert "sk-secret-1234" not in json.dumps(result)


def test_an_empty_key_file_garbles_no_answer(run: t.Any, tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("\n", encoding="utf-8")
    definition = {"name": "qwen", "api_key_file": str(tmp_path / "key")}
    (tmp_path / "qwen.json").write_text(json.dumps(definition), encoding="utf-8")
    real = _service.fill
    monkeypatch.setattr(_service, "fill", lambda params, mapping: real(params, mapping, str(tmp_path)))
    spec = dict(_ansible.service_spec(), **_ansible.http_spec())
    code, result = run(lambda ctx: {"verdict": "ok"}, spec, fill={"url": "url"}, arguments={"service": "qwen"})
    assert (code, result["verdict"]) == (1, "error")
    assert result["msg"] == 'the API key file "%s" cannot be used: it holds no key' % (tmp_path / "key")


@pytest.mark.parametrize("value", ["1", "e", "s", ":", "=", "/", "u", "E", "0", "00", "progressing", "\u00e9", "D800"])
def test_no_header_damages_the_token_of_a_slice(run: t.Any, value: str) -> None:
    content = {"live": {"timeout": 1800.0, "phase": "e"}, "wait": {"looks": 1, "words": [value, "é", "x" * 999]}}

    def body(ctx: _ansible.Context) -> _ansible.Result:
        return {"verdict": "progressing", "msg": "the wait goes on", "resume": _wait_request.pack(content)}

    arguments = {"headers": {"X-Priority": value}, "api_key": value * 2}
    _code, result = run(body, dict(_ansible.http_spec()), arguments=arguments)
    assert _wait_request.live(result["resume"]) == content["live"]
    assert _wait_request.asked(_wait_request.request(8.0, True, result["resume"])).token == content


def test_a_change_under_another_runs_lease_is_refused_and_not_begun(run: t.Any) -> None:
    _lease.take("qwen", "one", "ops@deploy01", "stop")
    spec = dict(_ansible.service_spec(), **_ansible.mutating_spec())
    called: t.List[int] = []
    code, result = run(
        lambda ctx: called.append(1) or {"verdict": "stopped"},
        spec,
        mutating=True,
        arguments={"service": "qwen", "run_id": "two"},
    )
    assert (code, called, result["verdict"], result["ok"]) == (1, [], "refused", False)
    code, result = run(
        lambda ctx: {"verdict": "stopped", "msg": "done"},
        spec,
        mutating=True,
        arguments={"service": "qwen", "run_id": "one"},
    )
    assert (code, result["verdict"]) == (0, "stopped")


def test_a_unit_is_under_the_lease_of_the_service_that_names_it(
    run: t.Any, tmp_path: t.Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_service, "FOLDER", str(tmp_path))
    (tmp_path / "qwen.json").write_text('{"name": "qwen", "unit": "gpuops-qwen.service"}', encoding="utf-8")
    _lease.take("qwen", "one", "ops@deploy01", "stop")
    spec = dict(_ansible.service_spec(), **_ansible.mutating_spec(), unit={"type": "str"})
    for unit in ("gpuops-qwen.service", "gpuops-qwen"):
        code, result = run(lambda ctx: {"verdict": "stopped"}, spec, mutating=True, arguments={"unit": unit})
        assert (code, result["verdict"]) == (1, "refused")
    code, result = run(
        lambda ctx: {"verdict": "stopped", "msg": "done"}, spec, mutating=True, arguments={"unit": "other.service"}
    )
    assert code == 0


def test_check_mode_takes_no_lock(run: t.Any, tmp_path: t.Any) -> None:
    spec = dict(_ansible.service_spec(), **_ansible.mutating_spec())
    code, _result = run(
        lambda ctx: {"verdict": "stopped", "msg": "would", "changed": ctx.check_mode},
        spec,
        check=True,
        mutating=True,
        arguments={"service": "qwen"},
    )
    assert code == 0
    assert not (tmp_path / "run").exists()


def test_an_answer_can_be_read_whatever_others_wrote(run: t.Any) -> None:
    """A half of a character would make Ansible refuse all of it, and a terminal obeys what it is shown."""
    code, result = run(lambda ctx: {"verdict": "stalled", "msg": "a\ud800\x1b[2J\nb", "tiers": [{"detail": "\udcff"}]})
    assert (code, result["msg"], result["tiers"]) == (1, "a\\ud800\\x1b[2J b", [{"detail": "\\udcff"}])

    def fail(_ctx: _ansible.Context) -> _ansible.Result:
        raise ServingError("a\x1b[2J\ud800", found=["\udcff"])

    code, result = run(fail)
    assert (code, result["msg"], result["found"]) == (1, "a\\x1b[2J\\ud800", ["\\udcff"])


@pytest.mark.parametrize("value", ["ready", "read", "1", "generation", "e"])
def test_a_header_blanks_no_word_or_number_of_ours(run: t.Any, value: str) -> None:
    def body(ctx: _ansible.Context) -> _ansible.Result:
        assert ctx.params["headers"] == {"X-A": value, "X-B": "sk-0123456789"}
        return {"verdict": "ready", "msg": "sk-0123456789", "tier_reached": "generation", "elapsed": 14.1}

    arguments = {"headers": {"X-A": value, "X-B": "sk-0123456789"}, "api_key": "sk-abcdefghij"}
    code, result = run(body, _ansible.http_spec(), arguments=arguments)
    assert (code, result["verdict"], result["tier_reached"], result["elapsed"]) == (0, "ready", "generation", 14.1)
    assert "0123456789" not in str(result) and "abcdefghij" not in str(result)
    assert result["invocation"]["module_args"]["headers"] == _ansible.HIDDEN
