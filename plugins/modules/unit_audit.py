#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_audit
short_description: Judge the systemd units that serve engines, and cure them by drop-ins
version_added: 1.0.0
description:
  - Judges service units as systemd has them in force, with all their drop-ins, also those that somebody wrote by hand.
    Each finding says how severe it is, which directive is meant, why it is wrong, and the drop-in that cures it.
  - With O(fix) it writes that drop-in, C(/etc/systemd/system/UNIT.d/50-gpuops-audit.conf), and lets systemd read its
    units anew when one changed. It never starts, stops or restarts a unit, and never changes a file that it did not
    write.
  - What a drop-in sets is in force at once, also for a unit that runs.
  - The page C(docs/unit-audit.md) of the collection has all rules, and how each is known.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
attributes:
  diff_mode:
    support: full
options:
  units:
    description:
      - The units to judge, each a service; a bare name is one. A unit that several names lead to is judged once.
      - Default is the unit of O(service), else every unit that serves an engine or holds a GPU. These are the units of
        the definitions in C(/etc/gpuops/services), those in which a process of a known engine runs or one that has a
        node of a GPU open, and those whose C(ExecStart=) starts a known engine.
      - Others are looked at all the same, since two units may want the same GPU or port.
    type: list
    elements: str
  service:
    description:
      - Name of a service that is defined on the host in C(/etc/gpuops/services/NAME.json). Its unit is judged.
      - Every unit that a definition names is judged by what the definition says of it, whether this is given or not.
    type: str
  engine:
    description:
      - The engine that the units serve, one of those on the page C(docs/engines.md).
      - Default is what the definition says, else what C(ExecStart=) starts, else what runs in the unit.
    type: str
  load_time:
    description:
      - How long in seconds a load may take until the model serves.
      - Default is C(ready_timeout) of the definition, else 300 for a known engine. V(0) judges nothing by it; so does
        Ollama, which loads when it is asked.
    type: float
  drain_time:
    description:
      - How long in seconds the engine needs to end what runs after it was told to.
      - Default is C(stop_timeout) of the definition, else what the command line gives it, else what is known of the
        engine.
    type: float
  ignore:
    description: Rules that are not applied.
    type: list
    elements: str
    default: []
  fix:
    description:
      - Write a drop-in for each unit with findings that one can cure.
      - One that was written before is kept and added to. One of the same name that somebody else wrote is left alone.
      - Where a drop-in with a later name sets the same directive, the finding stays and names that file.
    type: bool
    default: false
  fix_severity:
    description: The mildest findings that O(fix) cures.
    type: str
    choices: [critical, warning, notice]
    default: warning
  fail_on:
    description: The mildest finding that makes the task fail, unless it was cured.
    type: str
    choices: [critical, warning, notice]
    default: critical
  state:
    description:
      - V(absent) removes the drop-ins that this module wrote for the units.
      - In check mode the findings are then those with the drop-ins still there.
    type: str
    choices: [present, absent]
    default: present
  report_only:
    description: Do not fail the task, whatever the verdict; RV(ok) tells.
    type: bool
    default: false
seealso:
  - module: gpuops.serving.process_tree_stop
"""

EXAMPLES = r"""
- name: Judge every unit that serves an engine
  gpuops.serving.unit_audit:

- name: Judge one unit by what is known of its load
  gpuops.serving.unit_audit:
    units: [sglang.service]
    load_time: 640
    fail_on: warning

- name: Cure what a drop-in can cure
  gpuops.serving.unit_audit:
    fix: true

- name: Two services share a GPU on purpose
  gpuops.serving.unit_audit:
    ignore: [shared_gpu]

- name: Take the drop-ins away again
  gpuops.serving.unit_audit:
    state: absent
    report_only: true
"""

RETURN = r"""
verdict:
  description:
    - The worst of the units' verdicts, in the order V(clean), V(minor), V(flawed), V(not_found), V(unknown).
    - V(clean) also where the host has no such unit.
  type: str
  returned: always
  sample: flawed
ok:
  description: Whether the verdict is V(clean) or V(minor).
  type: bool
  returned: always
  sample: false
msg:
  description: One sentence that names the units and the rules that they break.
  type: str
  returned: always
  sample: '1 of 2 units: "sglang.service": kill_mode, start_limit_load'
units:
  description: The units, as they were named, else by name.
  type: list
  elements: dict
  returned: unless the options were refused
  contains:
    name:
      description: The unit's own name, also where an alias was given.
      type: str
      sample: sglang.service
    verdict:
      description:
        - V(clean) without a finding that is left, V(minor) when all that are left are milder than O(fail_on),
          V(flawed) otherwise; V(not_found) when there is no such unit; V(unknown) when nothing can be said, as of a
          masked one.
      type: str
      sample: flawed
    reason:
      description: Why nothing can be said, empty otherwise.
      type: str
      sample: ""
    service:
      description: The service whose definition names the unit, or null.
      type: str
      sample: null
    engine:
      description: The engine that it was judged by, or null.
      type: str
      sample: sglang
    engine_from:
      description: What told the engine, V(option), V(definition), V(command) or V(processes), or null.
      type: str
      sample: command
    load_time:
      description: Seconds that a load was taken to need, 0 when nothing was judged by it.
      type: float
      sample: 300.0
    drain_time:
      description: Seconds that the engine was taken to need to end, 0 where that is not known.
      type: float
      sample: 120.0
    gpus:
      description: The devices that the unit names for itself, as it names them.
      type: list
      elements: str
      sample: ["0", "1"]
    ports:
      description: The ports on which it is told to listen on this host.
      type: list
      elements: int
      sample: [30000]
    load_state:
      description: Systemd's LoadState.
      type: str
      sample: loaded
    active_state:
      description: Systemd's ActiveState.
      type: str
      sample: active
    fragment:
      description: The file of the unit.
      type: str
      sample: /etc/systemd/system/sglang.service
    drop_in:
      description: The drop-in of this module, once it is there or would be; else null.
      type: str
      sample: null
    findings:
      description: What is wrong, the worst first, with what was cured in this call.
      type: list
      elements: dict
      contains:
        rule:
          description: Name of the rule.
          type: str
          sample: kill_mode
        severity:
          description: V(critical), V(warning) or V(notice).
          type: str
          sample: critical
        directive:
          description: The directive that is meant, empty for the unit as a whole.
          type: str
          sample: KillMode
        value:
          description: What it is now.
          type: str
          sample: process
        why:
          description: What comes of it.
          type: str
          sample: a stop ends the main process at most, and the workers of the engine live on with the memory of the GPU
        cure:
          description: What cures it, in words.
          type: str
          sample: KillMode=mixed
        drop_in:
          description: The text of a drop-in that cures this finding alone, or null where none can.
          type: str
          sample: "[Service]\nKillMode=mixed\n"
        fixed:
          description: Whether it is cured, or would be in check mode.
          type: bool
          sample: false
        held_up:
          description: Why no drop-in cures it, empty where one can.
          type: str
          sample: ""
counts:
  description: How many findings are left, of each severity.
  type: dict
  returned: unless the options were refused
  sample: {critical: 1, warning: 1, notice: 0}
systemd:
  description: The version of systemd on the host.
  type: int
  returned: unless the options were refused
  sample: 252
elapsed:
  description: Duration in seconds.
  type: float
  returned: unless the options were refused
diff:
  description: The drop-ins before and after.
  type: list
  elements: dict
  returned: when one changes
"""

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _audit
from ansible_collections.gpuops.serving.plugins.module_utils._audit_rules import SEVERITIES
from ansible_collections.gpuops.serving.plugins.module_utils._audit_units import Told
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


def units_of(params: t.Mapping[str, t.Any]) -> t.Optional[t.List[str]]:
    """The units that are named, by the task or by the definition of the service."""
    units = params.get("units")
    if params.get("service") and not units:
        raise UsageError('the definition of the service "%s" names no unit' % params["service"])
    return [units] if isinstance(units, str) else units


def audit(context: _ansible.Context) -> t.Dict[str, t.Any]:
    params = context.params
    request = _audit.Request(
        units=units_of(params),
        told=Told(params["engine"], params["load_time"], params["drain_time"]),
        ignore=params["ignore"],
        fix=params["fix"],
        fix_severity=params["fix_severity"],
        absent=params["state"] == "absent",
        fail_on=params["fail_on"],
    )
    result = _audit.audit(request, context.check_mode)
    for warning in result.pop("warnings"):
        context.warn(warning)
    return result


def main() -> None:
    severities = list(SEVERITIES)
    _ansible.run_module(
        dict(
            _ansible.service_spec(),
            units={"type": "list", "elements": "str"},
            engine={"type": "str"},
            load_time={"type": "float"},
            drain_time={"type": "float"},
            ignore={"type": "list", "elements": "str", "default": []},
            fix={"type": "bool", "default": False},
            fix_severity={"type": "str", "choices": severities, "default": "warning"},
            fail_on={"type": "str", "choices": severities, "default": "critical"},
            state={"type": "str", "choices": ["present", "absent"], "default": "present"},
            report_only={"type": "bool", "default": False},
        ),
        audit,
        fill={"units": "unit"},
    )


if __name__ == "__main__":
    main()
