# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The only file of the library that knows Ansible: common options, and the guarded run of a module."""

from __future__ import annotations

import traceback
import typing as t

from ansible.module_utils.basic import AnsibleModule

from . import _foreign, _site, _verdicts
from ._errors import ServingError

Spec = t.Dict[str, t.Dict[str, t.Any]]
Result = t.Dict[str, t.Any]


SHORT = 4  # characters of a value that is found in too many other words
OURS = (*_verdicts.VERDICTS, "unit", "listener", "health", "model", "generation")  # with the tiers of a wait
HIDDEN = "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"


class Context:
    """What the body of a module gets to work with."""

    def __init__(self, module: AnsibleModule, params: t.Dict[str, t.Any]) -> None:
        self._module = module
        self.params = params
        self.check_mode: bool = module.check_mode

    def warn(self, text: str) -> None:
        self._module.warn(_foreign.seen(text))


def service_spec() -> Spec:
    return {"service": {"type": "str"}}


def mutating_spec() -> Spec:
    return {"run_id": {"type": "str"}}


def http_spec() -> Spec:
    return {
        "api_key": {"type": "str", "no_log": True},
        # A header may carry a key as well.
        "headers": {"type": "dict", "no_log": True},
        "validate_certs": {"type": "bool", "default": True},
        "ca_path": {"type": "path"},
    }


def run_module(
    argument_spec: Spec,
    body: t.Callable[[Context], Result],
    *,
    fill: t.Optional[t.Mapping[str, str]] = None,
    requires: t.Sequence[str] = (),
    mutating: bool = False,
    nothing: t.Optional[t.Mapping[str, t.Any]] = None,
    **rules: t.Any,
) -> None:
    """Run ``body`` and answer for it.

    ``fill`` maps options to keys of the service's definition, for the options that the caller left out;
    without it the definition is not looked at.
    ``nothing`` is what an answer has in it that has found nothing out.
    ``rules`` are handed to :class:`AnsibleModule` (``mutually_exclusive``, ``required_one_of`` and so on).
    """
    module = AnsibleModule(argument_spec=argument_spec, supports_check_mode=True, **rules)
    try:
        _site.require(requires)
        params = dict(module.params)
        _spare_our_words(module)
        # What only some tasks need is loaded there alone: a module compiles what it imports on every run.
        if fill is not None and params.get("service"):
            from . import _service

            params = _service.fill(params, fill)
        if "api_key" in argument_spec and not params.get("api_key"):
            key_file = params.get("definition", {}).get("api_key_file")
            if key_file:
                from . import _service

                params["api_key"] = _service.read_key(key_file)
                module.no_log_values.add(params["api_key"])
        context = Context(module, params)
        if mutating and not module.check_mode:
            from . import _lease, _service

            # A unit that is named alone is under the lease of its service all the same.
            service = params.get("service") or _service.of_unit(params.get("unit") or "")
            with _lease.operation(service, params.get("run_id")):
                result = body(context)
        else:
            result = body(context)
        verdict = _verdicts.lookup(result["verdict"])
    except ServingError as error:
        failure = {**(nothing or {}), **{key: value for key, value in error.result.items() if key != "msg"}}
        failure.setdefault("changed", False)
        failure.setdefault("ok", False)
        failure.setdefault("verdict", "error")
        module.fail_json(msg=_foreign.seen(error.message), **_foreign.valid(failure))
    except Exception as error:
        module.fail_json(
            msg=_foreign.seen(
                "an internal error: %s: %s; please report it with the traceback" % (type(error).__name__, error)
            ),
            changed=False,
            ok=False,
            verdict="error",
            exception=_foreign.valid(traceback.format_exc()),
            **(nothing or {}),
        )
    _answer(module, result, verdict)


def _spare_our_words(module: AnsibleModule) -> None:
    """Ansible replaces each value of a secret option wherever it is found in the answer, and changes numbers as well.

    A header "ready" would blank the verdict, and "1" any number. What is a part of our own words, or that short, is no
    longer looked for; in what the module was called with it is left out instead.
    """
    common = {value for value in module.no_log_values if len(value) < SHORT or any(value in word for word in OURS)}
    if not common:
        return
    module.no_log_values -= common
    for name, option in module.argument_spec.items():
        if option.get("no_log") and module.params.get(name) is not None:
            module.params[name] = HIDDEN


def _answer(module: AnsibleModule, result: Result, verdict: _verdicts.Verdict) -> None:
    """Exit with a body's result: good, bad but only reported, or failed."""
    result.setdefault("changed", False)
    result.setdefault("ok", verdict.ok)
    fails = verdict.fails or not result["ok"]
    result = _foreign.valid(result)
    if isinstance(result.get("msg"), str):
        result["msg"] = _foreign.seen(result["msg"])
    if fails and not module.params.get("report_only"):
        module.fail_json(**result)
    module.exit_json(**result)
