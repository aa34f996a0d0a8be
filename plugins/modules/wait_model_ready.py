#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_model_ready
short_description: Wait for a model as long as it moves, and say why when it does not
version_added: 1.0.0
description:
  - Climbs the tiers C(unit) (active), C(listener) (the port is open and belongs to the unit), C(health), C(model) (the
    right one is listed) and C(generation) (one token came back), and returns as soon as O(tier) is reached.
  - Tells a slow start from one that hangs. As long as anything moves, the wait goes on until O(timeout); when nothing
    has moved for O(stall_timeout), it ends.
  - A port belongs to the unit when all that listen on it, at the addresses of O(url), are processes of the unit. What
    takes connections in for others, such as the proxy of a container engine, address translation or the socket of a
    socket unit, counts only when the unit runs a container client, has a process in a network of its own, or is started
    by that socket unit. Otherwise C(listener) is not reached, and its detail says what was seen. A unit that leaves its
    container to a daemon shows nothing of that kind, so wait for its O(url) without O(unit).
  - Movement is a log line that was not there before, a growing percentage, processor time, bytes read or memory of the
    processes of the unit. A line that repeats with another number or time is none. GPU utilisation is not looked at.
  - A unit that is dead, or is restarted again and again, is reported at once, with the line of the log that tells why.
  - Nothing is changed. In check mode the service is looked at once, and not waited for.
requirements:
  - requests and psutil on the managed host. The role P(gpuops.serving.host_agent#role) installs them.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._http
options:
  unit:
    description:
      - The systemd unit of the engine. Default is that of O(service).
      - Without a unit, the tiers C(unit) and C(listener) are not judged and no movement can be seen, so that only
        O(timeout) ends the wait.
    type: str
  url:
    description:
      - The engine itself, such as V(http://127.0.0.1:8000). Never the gateway.
      - A user name, a password or a query in it is refused. A key belongs in O(api_key) or O(headers).
      - With O(unit), it must lead to an address of the managed host. What answers elsewhere proves nothing of the unit.
      - Default is that of O(service).
    type: str
  engine:
    description: The profile of the engine. Default is that of O(service), else V(openai).
    type: str
    choices: [llama_cpp, vllm, sglang, openai]
  model:
    description: The model that must be listed. Default is that of O(service), else any.
    type: str
  tier:
    description: The tier to reach.
    type: str
    choices: [unit, listener, health, model, generation]
    default: generation
  timeout:
    description:
      - Hard limit in seconds, whatever moves.
      - Default is the C(ready_timeout) of O(service), else V(1800).
    type: float
  stall_timeout:
    description:
      - Seconds without any movement after which the start counts as stalled.
      - Default is the C(stall_timeout) of O(service), else V(300).
    type: float
  generation_timeout:
    description:
      - Seconds that one attempt to get a token may take. When it ends without one, and nothing of the unit moved
        meanwhile, the engine is wedged. When something moved, such as a compiler, it is tried again.
    type: float
    default: 60
  max_restarts:
    description: How many restarts during the wait make a restart loop. At least V(1).
    type: int
    default: 3
  interval:
    description: Seconds between two looks. The first ones follow each other faster.
    type: float
    default: 1
  run_id:
    description: The run that holds the lease of O(service). With it, the lease is renewed while the wait lasts.
    type: str
  report_only:
    description: Do not fail the task, whatever the verdict; RV(ok) tells.
    type: bool
    default: false
seealso:
  - module: gpuops.serving.service_start
  - module: gpuops.serving.route_probe
"""

EXAMPLES = r"""
- name: Wait for a service as it is defined on the host
  gpuops.serving.wait_model_ready:
    service: qwen

- name: Wait for a hand-written unit, up to half an hour while it moves, two minutes while it does not
  gpuops.serving.wait_model_ready:
    unit: vllm.service
    url: http://127.0.0.1:8000
    engine: vllm
    model: qwen3-32b
    timeout: 1800
    stall_timeout: 120

- name: Only see that the right process listens
  gpuops.serving.wait_model_ready:
    service: qwen
    tier: listener
    timeout: 60
"""

RETURN = r"""
verdict:
  description:
    - V(ready) when O(tier) is reached.
    - V(progressing) when O(timeout) ended before nothing had moved for O(stall_timeout); V(stalled) when nothing had,
      and without a O(unit) whenever O(timeout) ended.
    - V(restart_loop) after O(max_restarts) restarts; V(dead) when the unit failed, is inactive with nothing about to
      start it, or does not exist.
    - V(wrong_server) when the port belongs to another process, or another program or model answers; V(auth_error) when
      the API key is refused.
    - V(wedged) when the model is listed, but no token comes, by an attempt that had the whole of O(generation_timeout),
      or by three answers that are no good ones. An engine that says that it is overloaded (status 429 or 503) is not
      wedged.
  type: str
  returned: always
  sample: ready
ok:
  description: Whether the tier is reached.
  type: bool
  returned: always
  sample: true
tier_reached:
  description: The highest tier reached, or empty.
  type: str
  returned: always
  sample: generation
tiers:
  description: The tiers up to O(tier), lowest first.
  type: list
  elements: dict
  returned: always
  contains:
    name:
      description: The tier.
      type: str
      sample: listener
    reached:
      description: Whether it is reached, or null when it was not judged.
      type: bool
      sample: true
    at:
      description: Seconds into the wait at which it was reached, or null.
      type: float
      sample: 12.301
    detail:
      description: What was seen.
      type: str
      sample: process 4711 of the unit listens
phase:
  description: What the engine is doing by its log, such as V(loading_weights), V(compiling) or V(capturing_graphs).
  type: str
  returned: always
  sample: loading_weights
percent:
  description: The last progress in the log, or null.
  type: float
  returned: always
  sample: 62.5
movement:
  description:
    - Seconds since each sign last moved, of C(log), C(percent), C(cpu), C(io), C(memory), C(tier) and C(restart).
      A sign that never moved is not there.
  type: dict
  returned: always
  sample: {"cpu": 0.4, "log": 31.2}
restarts:
  description: Restarts of the unit during the wait.
  type: int
  returned: always
  sample: 0
cause:
  description: What the log or systemd says to be the cause, or null.
  type: dict
  returned: always
  contains:
    kind:
      description:
        - V(gpu_out_of_memory), V(port_in_use), V(driver_mismatch), V(model_not_found), V(host_out_of_memory),
          V(bad_arguments), V(permission_denied), V(child_failed), V(killed) or V(exited).
      type: str
      sample: gpu_out_of_memory
    line:
      description: The line that says so.
      type: str
      sample: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB."
log_tail:
  description: The last lines of the unit's log, as far as it was read. Empty after a wait that was ready at once.
  type: list
  elements: str
  returned: always
unit_state:
  description: The unit at the end, with the keys of RV(gpuops.serving.process_tree_stop#module:unit_state), or null.
  type: dict
  returned: always
elapsed:
  description: Seconds that the call took.
  type: float
  returned: always
  sample: 14.207
"""

from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ansible,
    _engines,
    _generation,
    _http,
    _lease,
    _selection,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError
from ansible_collections.gpuops.serving.plugins.module_utils._readiness import Wait
from ansible_collections.gpuops.serving.plugins.module_utils._target import HostTarget
from ansible_collections.gpuops.serving.plugins.module_utils._tiers import Options


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    if not params["url"]:
        raise UsageError('there is nothing to wait for: give "url", or a service whose definition has one')
    _http.join(params["url"], "/")
    profile = _engines.get(params["engine"])
    access = _http.check(
        _http.Access(params["api_key"], params["headers"] or {}, params["validate_certs"], params["ca_path"])
    )
    mark_gid = _selection.mark_of(params["service"], params["unit"], params.get("definition") or {})
    target = HostTarget(params["unit"], params["url"], _generation.Question(profile), access, mark_gid)
    given = {name: params[name] for name in Options._fields if params[name] is not None}
    if params["unit"]:
        target.check_here()
    wait = Wait(target, profile, Options(**given))
    keep = _lease.keeper(params["service"], None if ctx.check_mode else params["run_id"])
    return wait.as_dict(wait.run(keep, once=ctx.check_mode))


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.http_spec(),
            "unit": {"type": "str"},
            "url": {"type": "str"},
            "engine": {"type": "str", "choices": ["llama_cpp", "vllm", "sglang", "openai"]},
            "model": {"type": "str"},
            "tier": {
                "type": "str",
                "choices": ["unit", "listener", "health", "model", "generation"],
                "default": "generation",
            },
            "timeout": {"type": "float"},
            "stall_timeout": {"type": "float"},
            "generation_timeout": {"type": "float", "default": 60},
            "max_restarts": {"type": "int", "default": 3},
            "interval": {"type": "float", "default": 1},
            "run_id": {"type": "str"},
            "report_only": {"type": "bool", "default": False},
        },
        body,
        fill={
            "unit": "unit",
            "url": "url",
            "engine": "engine",
            "model": "model",
            "timeout": "ready_timeout",
            "stall_timeout": "stall_timeout",
        },
        requires=("requests", "psutil"),
    )


if __name__ == "__main__":
    main()
