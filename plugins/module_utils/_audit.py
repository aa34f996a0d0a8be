# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One audit as it is asked for: which units, what is wrong with them, what is cured, what is left."""

from __future__ import annotations

import os
import time
import typing as t

from . import _audit_dropin, _audit_find, _audit_judge, _audit_units, _limits, _systemd
from ._audit_judge import Finding
from ._audit_rules import RULES, SEVERITIES
from ._audit_units import Facts, Told
from ._engines import NAMES
from ._errors import UsageError

__all__ = ("Request", "audit")

WORDS = ("clean", "minor", "flawed", "not_found", "unknown")
UNTOLD = {"not-found": "not_found", "masked": "unknown", "stub": "unknown", "merged": "unknown"}
UNTOLD["unreadable"] = "unknown"
Result = t.Dict[str, t.Any]


class Request(t.NamedTuple):
    """What is asked of an audit. No units means every one that serves an engine."""

    units: t.Optional[t.Sequence[str]] = None
    told: Told = Told()
    ignore: t.Sequence[str] = ()
    fix: bool = False
    fix_severity: str = "warning"
    absent: bool = False
    fail_on: str = "critical"


class Plan(t.NamedTuple):
    """What becomes of the drop-in of one unit."""

    existing: _audit_dropin.Existing
    text: str  # empty: no file
    # Of the findings that are not cured, why not, by their rule.
    held_up: t.Dict[str, str]
    cured: t.Tuple[str, ...]  # rules
    settings: t.Tuple[_audit_judge.Setting, ...] = ()

    @property
    def changes(self) -> bool:
        return not self.existing.foreign and self.text != self.existing.text


def check(request: Request) -> t.List[str]:
    """The full names of the units, and one sentence for what makes no sense, before anything is looked at."""
    unknown = [rule for rule in request.ignore if rule not in RULES]
    if unknown:
        raise UsageError('the rule "%s" does not exist: use one of %s' % (unknown[0], ", ".join(RULES)))
    if request.told.engine is not None and request.told.engine not in NAMES:
        raise UsageError('the engine "%s" is not known: use one of %s' % (request.told.engine, ", ".join(NAMES)))
    _limits.at_least(0, load_time=request.told.load_time, drain_time=request.told.drain_time)
    if request.units is not None and not request.units:
        raise UsageError('"units" is empty: name a unit, or leave it out for all that serve an engine')
    if request.fix and request.absent:
        raise UsageError('"fix" writes drop-ins, and "state=absent" removes them: leave one of them out')
    names = []
    for unit in request.units or ():
        name = _systemd.unit_name(unit)
        if not name.endswith(".service"):
            raise UsageError('the unit "%s" is no service: only services are audited' % name)
        if "@." in name:
            raise UsageError('the unit "%s" is a template: name one of its instances' % name)
        names.append(name)
    return list(dict.fromkeys(names))


def audit(request: Request, check_mode: bool = False) -> Result:
    """Judge, cure what is to be cured, and answer."""
    began = time.monotonic()
    names = check(request)
    _systemd.require_floor()
    if (request.fix or request.absent) and os.geteuid() != 0:
        raise UsageError("drop-ins are written by root only: run as root, or with become")
    sight = _audit_find.look()
    facts, others = _facts(names, request, sight)
    findings = _judged(facts, others, request)
    plans = {one.unit.name: _plan(one, findings[one.unit.name], request) for one in facts}
    changes = [name for name, plan in plans.items() if plan.changes]
    changed = bool(changes) or any(_is_stale(one, plans[one.unit.name]) for one in facts)
    if check_mode or not changed:
        later = [one._replace(unit=_audit_judge.applied(one.unit, plans[one.unit.name].settings)) for one in facts]
        left = _judged(later, others, request)
    else:
        for name in changes:
            _put(plans[name])
        _audit_units.reload()
        again = _audit_units.read(list(plans), request.told, sight.engines)
        facts = [one for one in again if one.unit.name in plans]
        left = _judged(facts, others, request)
    rows = []
    for one in facts:
        plan = plans[one.unit.name]
        rows.append(_row(one, _both(findings[one.unit.name], left[one.unit.name], plan), plan, request))
    result = _answer(rows, request)
    result.update(
        changed=changed,
        systemd=_systemd.version(),
        elapsed=round(time.monotonic() - began, 3),
        warnings=list(dict.fromkeys([*(() if names else _seen(sight, facts)), *_warnings(facts)])),
    )
    if changes:
        result["diff"] = [_diff(plans[name]) for name in changes]
    return result


def _facts(names: t.Sequence[str], request: Request, sight: _audit_find.Sight) -> t.Tuple[t.List[Facts], t.List[Facts]]:
    """The units that are asked for, and the others that may want the same GPU or port."""
    all_of_them = _audit_units.read(names, request.told, sight.engines) if names else []
    asked = {one.unit.name for one in all_of_them}
    # What the caller says is said of the units that he names, or of all where he names none.
    more = _audit_units.read(
        [name for name in (*sight.names, *sight.perhaps) if name not in asked],
        Told() if names else request.told,
        sight.engines,
    )
    # A command line that looks like an engine's from afar, and is none; and what is named by an alias.
    serving = [one for one in more if one.unit.name not in asked and (one.serves or one.unit.name not in sight.perhaps)]
    return (all_of_them, serving) if names else (sorted(serving, key=lambda one: one.unit.name), [])


def _judged(facts: t.Sequence[Facts], others: t.Sequence[Facts], request: Request) -> t.Dict[str, t.List[Finding]]:
    units = [one.unit for one in (*facts, *others)]
    judged = _audit_judge.judge(units, _audit_find.listens(units))
    return {
        one.unit.name: [finding for finding in judged[one.unit.name] if finding.rule not in request.ignore]
        for one in facts
    }


def _put(plan: Plan) -> None:
    if plan.text:
        _audit_dropin.write(plan.existing.path, plan.text)
    else:
        _audit_dropin.remove(plan.existing.path)


def _plan(one: Facts, findings: t.Sequence[Finding], request: Request) -> Plan:
    existing = _audit_dropin.look(one.unit.name)
    if request.absent:
        return Plan(existing, existing.text if existing.foreign else "", {}, ())
    held_up: t.Dict[str, str] = {}
    cured: t.List[str] = []
    lines: t.List[_audit_dropin.Line] = []
    directives = [directive for finding in findings for _section, directive, _value in finding.settings]
    behind = _audit_dropin.overriding(one.drop_ins, directives) if directives else {}
    most = SEVERITIES.index(request.fix_severity)
    for finding in findings:
        own = [_audit_dropin.Line(*setting, rule=finding.rule) for setting in finding.settings]
        later = next((behind[line.directive] for line in own if line.directive in behind), "")
        if not own:
            continue
        if one.unit.transient:
            held_up[finding.rule] = "the unit is transient: whoever starts it has to set %s" % own[0].directive
        elif existing.foreign:
            held_up[finding.rule] = existing.foreign
        elif later:
            held_up[finding.rule] = "%s sets %s afterwards: change it there" % (later, own[0].directive)
        elif request.fix and SEVERITIES.index(finding.severity) <= most:
            lines += own
            cured.append(finding.rule)
    if not lines:
        return Plan(existing, existing.text, held_up, ())
    text = _audit_dropin.render(_audit_dropin.merge(_audit_dropin.parse(existing.text), lines))
    settings = tuple((line.section, line.directive, line.value) for line in lines)
    return Plan(existing, text, held_up, tuple(cured), settings)


def _is_stale(one: Facts, plan: Plan) -> bool:
    """Whether our drop-in lies there and systemd has not read it: somebody was stopped in between."""
    if plan.changes or not plan.cured or plan.existing.foreign:
        return False
    return plan.existing.path not in one.drop_ins or one.need_reload


def _both(before: t.Sequence[Finding], after: t.Sequence[Finding], plan: Plan) -> t.List[t.Tuple[Finding, bool, str]]:
    """What was cured and what is still wrong, each with whether it was cured, and what keeps it from being so."""
    left = {one.rule: one for one in after}
    shown = [(one, True, "") for one in before if one.rule in plan.cured and one.rule not in left]
    for one in after:
        why = plan.held_up.get(one.rule, "")
        if one.rule in plan.cured:
            same = any(old.rule == one.rule and old.severity == one.severity for old in before)
            why = "the drop-in is there, and systemd goes by something else" if same else "a drop-in cannot do more"
        elif not one.settings:
            why = "no drop-in can cure it"
        shown.append((one, False, why))
    return sorted(shown, key=lambda row: SEVERITIES.index(row[0].severity))


def _row(one: Facts, findings: t.Sequence[t.Tuple[Finding, bool, str]], plan: Plan, request: Request) -> Result:
    unit = one.unit
    rows = [_finding(*finding) for finding in findings]
    left = [row["severity"] for row in rows if not row["fixed"]]
    verdict = UNTOLD.get(unit.load_state) or _verdict(left, request.fail_on)
    reason = {
        "not_found": "it does not exist on this host",
        "unknown": unit.load_error or "it is %s, so that systemd tells nothing of it" % unit.load_state,
    }
    return {
        "name": unit.name,
        "verdict": verdict,
        "reason": reason.get(verdict, ""),
        "service": one.service,
        "engine": unit.engine or None,
        "engine_from": one.engine_from or None,
        "load_time": unit.load_time,
        "drain_time": unit.drain,
        "gpus": list(unit.gpus),
        "ports": [port.number for port in unit.ports],
        "load_state": unit.load_state,
        "active_state": one.active_state,
        "fragment": one.fragment,
        "drop_in": plan.existing.path if plan.text and not plan.existing.foreign else None,
        "findings": rows,
    }


def _finding(finding: Finding, fixed: bool, held_up: str) -> Result:
    lines = [_audit_dropin.Line(*setting, rule=finding.rule) for setting in finding.settings]
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "directive": finding.directive,
        "value": finding.value,
        "why": finding.why,
        "cure": RULES[finding.rule].cure,
        "drop_in": _audit_dropin.render(lines) if lines else None,
        "fixed": fixed,
        "held_up": held_up,
    }


def _verdict(severities: t.Sequence[str], fail_on: str) -> str:
    if not severities:
        return "clean"
    worst = min(map(SEVERITIES.index, severities))
    return "flawed" if worst <= SEVERITIES.index(fail_on) else "minor"


def _answer(rows: t.Sequence[Result], request: Request) -> Result:
    left = [row for unit in rows for row in unit["findings"] if not row["fixed"]]
    words = [unit["verdict"] for unit in rows] or ["clean"]
    return {
        "verdict": max(words, key=WORDS.index),
        "msg": _message(rows, request),
        "units": list(rows),
        "counts": {word: sum(row["severity"] == word for row in left) for word in SEVERITIES},
    }


def _message(rows: t.Sequence[Result], request: Request) -> str:
    if not rows:
        return "no service unit of this host serves an engine or holds a GPU"
    parts = []
    for unit in rows:
        left = list(dict.fromkeys(row["rule"] for row in unit["findings"] if not row["fixed"]))
        if unit["verdict"] in ("not_found", "unknown"):
            parts.append('"%s": %s' % (unit["name"], unit["reason"]))
        elif left:
            parts.append('"%s": %s' % (unit["name"], ", ".join(left)))
    if not parts:
        return "%d unit%s: nothing is wrong" % (len(rows), "" if len(rows) == 1 else "s")
    return "%d of %d unit%s: %s" % (len(parts), len(rows), "" if len(rows) == 1 else "s", "; ".join(parts))


def _seen(sight: _audit_find.Sight, facts: t.Sequence[Facts]) -> t.Iterator[str]:
    yield from sight.warnings
    yield from sight.unjudged(any(one.unit.clients for one in facts))


def _warnings(facts: t.Sequence[Facts]) -> t.Iterator[str]:
    for one in facts:
        yield from one.warnings
        if one.need_reload:
            yield (
                'the files of the unit "%s" have changed since systemd read them: what was judged is what is in force, '
                'until "systemctl daemon-reload"' % one.unit.name
            )


def _diff(plan: Plan) -> Result:
    return {
        "before": plan.existing.text,
        "after": plan.text,
        "before_header": plan.existing.path if plan.existing.text else "/dev/null",
        "after_header": plan.existing.path if plan.text else "/dev/null",
    }
