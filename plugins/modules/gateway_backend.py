#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_backend
short_description: Withdraw a server from its gateway until it has no sessions, and put it back
version_added: 1.0.0
description:
  - Withdraws one server of a backend and waits until its last session has ended, or puts it back and waits until the
    gateway finds it up and sends to it.
  - A gateway that does not check the health of a server takes it for up. Then M(gpuops.serving.route_probe) is the only
    proof.
  - Runs on the host of the gateway. Delegate the task to it.
  - A withdrawn server is in the state C(drain), in which the gateway goes on checking its health, so that it is known
    to be up before the first request goes to it again. A server that somebody put into C(maint) counts as withdrawn and
    is left as it is; putting it back ends C(maint) too, and RV(before.admin) tells.
  - No sessions at the gateway says nothing about requests that took another way. M(gpuops.serving.wait_engine_idle)
    asks the engine itself.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
options:
  type:
    description: The kind of gateway.
    type: str
    choices: [haproxy]
    default: haproxy
  socket:
    description:
      - The runtime socket of HAProxy, a C(stats socket) with C(level admin).
    type: path
    default: /run/haproxy/admin.sock
  backend:
    description: The backend.
    type: str
    required: true
  server:
    description: The server in the backend.
    type: str
    required: true
  state:
    description: What the server shall be.
    type: str
    choices: [drained, ready]
    required: true
  min_healthy:
    description:
      - How many other servers of the backend must be up, by a health check, and not withdrawn. With fewer, a server
        that is not withdrawn yet stays where it is, and the answer is V(refused).
      - Withdrawing a server that is down is never refused, because nothing is taken away.
      - V(0) withdraws the last one too.
    type: int
    default: 1
  timeout:
    description:
      - Seconds to wait for the sessions to end or the server to be up. V(0) asks for the state and takes one look.
      - A look that finds no session at the very end is confirmed by one more, at most 0.2 seconds later. What the
        gateway itself takes to answer, 5 seconds at most each time, and up to 30 seconds for another task that changes
        the same backend come on top.
      - A server that is still busy then stays withdrawn, and its sessions go on.
    type: float
    default: 300
  interval:
    description:
      - Seconds between two looks. Two in a row must find no session. At least V(0.01).
      - When less than that is left of O(timeout), the next look comes at its end.
    type: float
    default: 0.5
  report_only:
    description: Do not fail the task because of the verdict; RV(ok) tells.
    type: bool
    default: false
seealso:
  - module: gpuops.serving.wait_engine_idle
"""

EXAMPLES = r"""
- name: Withdraw this host while at least two others serve, and let its requests end
  gpuops.serving.gateway_backend:
    backend: qwen
    server: "{{ inventory_hostname }}"
    state: drained
    min_healthy: 2
    timeout: 600
  delegate_to: gateway

- name: Put it back, and wait until it is sent to
  gpuops.serving.gateway_backend:
    backend: qwen
    server: "{{ inventory_hostname }}"
    state: ready
    timeout: 60
  delegate_to: gateway
"""

RETURN = r"""
verdict:
  description:
    - V(drained) when the server gets no requests and has no sessions; V(ready) when the gateway sends to it. A server
      whose health the gateway does not check is sent to whether it is up or not, and RV(health_checked) tells.
    - V(busy) when it still had sessions at the end; V(refused) when too few others are healthy, or another task changed
      the backend for too long, and then nothing was changed; V(error) when the gateway did not send to the server in
      time, because it is not up or its weight is 0, or when somebody else changed its state meanwhile.
  type: str
  returned: when the gateway answered
  sample: drained
ok:
  description: Whether the server is as it shall be.
  type: bool
  returned: always
  sample: true
before:
  description: The server as it was found.
  type: dict
  returned: when the gateway answered
  contains:
    admin:
      description: What the gateway was told, V(ready), V(drain) or V(maint).
      type: str
      sample: ready
    operational:
      description: What the gateway finds, in its own words.
      type: str
      sample: UP
    sessions:
      description: Requests that the server works on, and those that wait for it at the gateway.
      type: int
      sample: 7
    weight:
      description: Its share of the requests.
      type: int
      sample: 100
after:
  description: The server at the end, with the keys of RV(before). In check mode as RV(before).
  type: dict
  returned: when the gateway answered
health_checked:
  description:
    - Whether the gateway checks the health of the server. Without a check, V(ready) says only that requests are sent to
      it. Null while it is withdrawn, when not every gateway says.
  type: bool
  returned: when the gateway answered
  sample: true
healthy_others:
  description: The other servers of the backend that were up and not withdrawn.
  type: list
  elements: str
  returned: when the gateway answered
  sample: [gpu2, gpu3]
elapsed:
  description: Seconds that the call took.
  type: float
  returned: when the gateway answered
  sample: 12.52
"""

import contextlib

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _gateways
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import SYSTEM_CLOCK
from ansible_collections.gpuops.serving.plugins.module_utils._gateway_haproxy import Haproxy


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    began = SYSTEM_CLOCK.monotonic()
    place, backend = params["socket"], params["backend"]
    done = _gateways.change(
        Haproxy(place, backend, params["server"]),
        params["server"],
        params["state"],
        params["timeout"],
        params["interval"],
        min_healthy=params["min_healthy"],
        check_mode=ctx.check_mode,
        lock=contextlib.nullcontext if ctx.check_mode else lambda: _gateways.exclusive(place, backend),
    )
    return dict(done.as_dict(), elapsed=round(SYSTEM_CLOCK.monotonic() - began, 3))


def main() -> None:
    _ansible.run_module(
        {
            "type": {"type": "str", "choices": ["haproxy"], "default": "haproxy"},
            "socket": {"type": "path", "default": "/run/haproxy/admin.sock"},
            "backend": {"type": "str", "required": True},
            "server": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "ready"], "required": True},
            "min_healthy": {"type": "int", "default": 1},
            "timeout": {"type": "float", "default": 300},
            "interval": {"type": "float", "default": 0.5},
            "report_only": {"type": "bool", "default": False},
        },
        body,
    )


if __name__ == "__main__":
    main()
