#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rollout_report
short_description: Add a host to the report of a rollout
version_added: 1.0.0
description:
  - Rewrites a JSON report on the controller with what one host did, and returns the table so far.
  - The role P(gpuops.serving.clean_restart#role) runs it for each host, also for one that failed or is lost, so that
    the report is complete however the rollout ends.
  - Several hosts may report at once. A report of another rollout is begun anew.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
options:
  path:
    description: Path of the report. Missing folders are made.
    type: path
    required: true
  rollout:
    description: Identifier of the run.
    type: str
    required: true
  action:
    description: What the run does, for example V(restart).
    type: str
    default: restart
  host:
    description: Inventory name of the host.
    type: str
    required: true
  service:
    description: Name of the service.
    type: str
    required: true
  phases:
    description: The phases that were entered, in order.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the phase.
        type: str
        required: true
      at:
        description: When it was entered, in seconds of the controller's clock.
        type: float
        required: true
  ended:
    description: When the last phase ended, in seconds of the controller's clock.
    type: float
    required: true
  failure:
    description: What failed; empty when nothing did. The key C(lost) says that the host did not answer any more.
    type: dict
    default: {}
  details:
    description: Further results to keep.
    type: dict
    default: {}
  next_command:
    description: What to type when the cause of a failure is mended.
    type: str
    default: ""
  remaining:
    description:
      - The hosts that O(next_command) names behind C(--limit). A host that comes through is taken out of the command in
        the report, so that what is typed restarts none twice.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Report a host
  gpuops.serving.rollout_report:
    path: /tmp/report.json
    rollout: 20260102T030405-00ab12
    host: gpu1
    service: qwen
    phases:
      - name: stop
        at: 1767323045.0
    ended: 1767323047.5
  delegate_to: localhost
  become: false
"""

RETURN = r"""
verdict:
  description: Always V(ok).
  type: str
  returned: success
  sample: ok
ok:
  description: Whether the report was written.
  type: bool
  returned: always
  sample: true
table:
  description: The report so far as lines of text, the heading first.
  type: list
  elements: str
  returned: success
next_command:
  description: What to type, without the hosts that came through meanwhile; empty when nothing failed.
  type: str
  returned: success
  sample: ansible-playbook gpuops.serving.rolling_restart -e service=qwen --limit gpu2,gpu3
"""

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _report


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    new = _report.entry(
        params["host"],
        params["service"],
        params["phases"],
        params["ended"],
        params["failure"],
        params["details"],
        params["next_command"],
        params["remaining"],
    )
    if ctx.check_mode:
        report = {"hosts": [new]}
    else:
        report = _report.add(params["path"], params["rollout"], params["action"], new)
    return {
        "verdict": "ok",
        "changed": False,
        "table": _report.table(report),
        "next_command": new.get("next_command", ""),
        "msg": 'the report "%s" holds %d hosts' % (params["path"], len(report["hosts"])),
    }


def main() -> None:
    _ansible.run_module(
        {
            "path": {"type": "path", "required": True},
            "rollout": {"type": "str", "required": True},
            "action": {"type": "str", "default": "restart"},
            "host": {"type": "str", "required": True},
            "service": {"type": "str", "required": True},
            "phases": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"name": {"type": "str", "required": True}, "at": {"type": "float", "required": True}},
            },
            "ended": {"type": "float", "required": True},
            "failure": {"type": "dict", "default": {}},
            "details": {"type": "dict", "default": {}},
            "next_command": {"type": "str", "default": ""},
            "remaining": {"type": "list", "elements": "str", "default": []},
        },
        body,
    )


if __name__ == "__main__":
    main()
