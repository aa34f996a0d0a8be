#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_lease
short_description: Let one run at a time change a service
version_added: 1.0.0
description:
  - Takes, renews or gives back the lease of a service on its host, so that two playbook runs never work on the same
    service at once.
  - A lease expires after 60 seconds unless a module call of its run renews it. A run that was killed therefore blocks
    the next one for a minute at most after its last module has ended.
  - A run that takes over an expired lease first waits until no process of the earlier run is changing the service
    any more.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
options:
  service:
    description: Name of the service. It need not be defined on the host.
    type: str
    required: true
  state:
    description:
      - V(present) takes the lease, or renews it when O(run_id) holds it already.
      - V(absent) gives it back. Giving back a lease that is not there changes nothing.
    type: str
    choices: [present, absent]
    default: present
  run_id:
    description:
      - Identifier of the run. With O(state=present) one is made up and returned when it is left out.
      - Required with O(state=absent).
    type: str
  controller:
    description: Where the run is steered from, for the message that another run gets to see.
    type: str
    default: unknown
  phase:
    description: What the run is about to do, for the message that another run gets to see.
    type: str
    default: start
  term:
    description:
      - Seconds after which the lease expires unless it is renewed. Every module call of the run renews it for 60.
      - More is for a step during which no module call on this host can renew it.
    type: float
    default: 60
  wait:
    description:
      - How long to wait for another run's lease to expire or to be given back, in seconds.
      - With the default V(0), a fresh lease of another run is refused at once.
    type: float
    default: 0
  force:
    description:
      - Take the lease from another run that still renews it. For a run that is known to be dead, whose last module goes
        on waiting on the host; that module is then refused. A process that is changing the service is still waited for.
    type: bool
    default: false
  lock_timeout:
    description:
      - How long to wait, in seconds, for a process that an earlier run left behind and that still changes the service.
    type: float
    default: 60
"""

EXAMPLES = r"""
- name: Take the lease of the service
  gpuops.serving.service_lease:
    service: qwen
    controller: deploy01
    phase: preflight
  register: lease

- name: Give the lease back
  gpuops.serving.service_lease:
    service: qwen
    run_id: "{{ lease.run_id }}"
    state: absent
"""

RETURN = r"""
verdict:
  description: V(held), V(released), or V(refused) when another run has the lease.
  type: str
  returned: always
  sample: held
ok:
  description: Whether the lease is as it was asked for.
  type: bool
  returned: always
  sample: true
run_id:
  description: The run that holds, or held, the lease.
  type: str
  returned: when the lease was taken or given back
  sample: 5b0a4c0e7d5f4d0c
taken_over_from:
  description: The earlier run, whose lease had expired or was taken by force.
  type: dict
  returned: when there was one
lease:
  description: The other run's lease (C(run_id), C(controller), C(phase), C(since), C(expires_in), C(fresh)).
  type: dict
  returned: when refused
elapsed:
  description: Seconds that the call waited.
  type: float
  returned: when the lease was taken
  sample: 0.0
"""

import uuid

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _lease
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


def present(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    for option in ("term", "wait", "lock_timeout"):
        if not 0 <= params[option] < float("inf"):
            raise UsageError("%s must be a number of seconds, not %g" % (option, params[option]))
    run_id = params["run_id"] or uuid.uuid4().hex[:16]
    deadline = Deadline(params["wait"])
    if ctx.check_mode:
        current = _lease.read(params["service"])
        taken = current is not None and current.fresh and current.run_id != run_id and not params["force"]
        return {
            "verdict": "refused" if taken else "held",
            "changed": not taken and (current is None or current.run_id != run_id),
            "run_id": run_id,
            "elapsed": 0.0,
            "msg": 'the lease of "%s" %s'
            % (params["service"], "is held by " + current.describe() if taken and current else "is free"),
        }
    while True:
        try:
            before = _lease.read(params["service"])
            earlier = _lease.take(
                params["service"], run_id, params["controller"], params["phase"], params["term"], params["force"]
            )
            break
        except _lease.Lost:
            if deadline.expired:
                raise
            deadline.sleep(0.5)
    # Waits for a process that an earlier run left behind.
    with _lease.locked(params["service"], params["lock_timeout"]):
        pass
    result: _ansible.Result = {
        "verdict": "held",
        "changed": before is None or before.run_id != run_id,
        "run_id": run_id,
        "elapsed": deadline.elapsed,
        "msg": 'the lease of "%s" is held by run "%s"' % (params["service"], run_id),
    }
    if earlier is not None:
        result["taken_over_from"] = earlier.as_dict()
        result["msg"] += ", taken over from %s" % earlier.describe()
    return result


def absent(ctx: _ansible.Context) -> _ansible.Result:
    service, run_id = ctx.params["service"], ctx.params["run_id"]
    if not run_id:
        raise UsageError('giving back the lease of "%s" needs run_id' % service)
    current = _lease.read(service)
    changed = current is not None if ctx.check_mode else _lease.release(service, run_id)
    return {
        "verdict": "released",
        "changed": changed,
        "run_id": run_id,
        "msg": 'the lease of "%s" %s' % (service, "is given back" if changed else "was not held"),
    }


def body(ctx: _ansible.Context) -> _ansible.Result:
    return absent(ctx) if ctx.params["state"] == "absent" else present(ctx)


def main() -> None:
    _ansible.run_module(
        {
            "service": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "run_id": {"type": "str"},
            "controller": {"type": "str", "default": "unknown"},
            "phase": {"type": "str", "default": "start"},
            "term": {"type": "float", "default": _lease.TERM},
            "wait": {"type": "float", "default": 0},
            "force": {"type": "bool", "default": False},
            "lock_timeout": {"type": "float", "default": 60},
        },
        body,
    )


if __name__ == "__main__":
    main()
