#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: wait_engine_idle
short_description: Wait until an engine has nothing left to do
version_added: 1.0.0
description:
  - Reads the engine's own metrics until nothing runs and nothing waits on two looks in a row, with token counters that
    stood still between them. A gauge alone is weak, since a wedged engine may report zero.
  - Withdraw the engine from its gateway first, with M(gpuops.serving.gateway_backend). Otherwise the next request may
    come right after the answer.
  - Nothing is changed. In check mode the engine is looked at, but not waited for.
requirements:
  - requests on the managed host. The role P(gpuops.serving.host_agent#role) installs it.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._http
  - gpuops.serving._profile
options:
  url:
    description:
      - The engine itself, such as V(http://127.0.0.1:8000). Never the gateway.
      - A user name, a password or a query in it is refused. A key belongs in O(api_key) or O(headers).
      - Default is that of O(service).
    type: str
  engine:
    description:
      - The profile of the engine. Default is that of O(service), else V(openai).
      - V(openai) and V(ollama) know no metrics, so that the answer is V(unknown) while the server runs.
      - SGLang has metrics only with C(--enable-metrics), llama.cpp only with C(--metrics), OVMS only with
        C(--metrics_enable), vLLM always, except with C(--disable-log-stats). Triton counts what runs only where the
        backend of the model does.
    type: str
    choices: [llama_cpp, vllm, sglang, ovms, triton, tgi, ollama, openai]
  timeout:
    description:
      - Seconds to wait. V(0) means one look, and a second one to confirm it.
      - A look that is quiet at the very end is confirmed by one more, at most 0.2 seconds later.
    type: float
    default: 300
  interval:
    description:
      - Seconds between two looks. At least V(0.01).
      - When less than that is left of O(timeout), the next look comes at its end.
    type: float
    default: 0.5
  run_id:
    description: The run that holds the lease of O(service). With it, the lease is renewed while the wait lasts.
    type: str
  report_only:
    description: Do not fail the task, whatever the verdict; RV(ok) tells.
    type: bool
    default: false
seealso:
  - module: gpuops.serving.gateway_backend
"""

EXAMPLES = r"""
- name: Drain for at most ten minutes
  gpuops.serving.wait_engine_idle:
    service: qwen
    timeout: 600

- name: Is anybody being served
  gpuops.serving.wait_engine_idle:
    url: http://127.0.0.1:8000
    engine: vllm
    timeout: 0
    report_only: true
"""

RETURN = r"""
verdict:
  description:
    - V(idle), or V(absent) when connections were refused at two looks in a row, so that there is nothing to drain. That
      says nothing of processes. A connection that is closed without an answer proves nothing, and is V(unknown).
    - V(busy) when work was left at the end; V(unknown) when the metrics could not be read. Without metrics at two looks
      in a row it is V(unknown) at once, and the message says what turns them on.
  type: str
  returned: always
  sample: idle
ok:
  description: Whether the verdict is V(idle) or V(absent).
  type: bool
  returned: always
  sample: true
load:
  description: The last look, or null when there was none.
  type: dict
  returned: always
  contains:
    running:
      description: Requests that are worked on.
      type: float
      sample: 0.0
    waiting:
      description: Requests that wait, or null where the engine does not tell.
      type: float
      sample: 0.0
    kv_use:
      description: Use of the cache, between 0 and 1, or null where the engine does not tell.
      type: float
      sample: 0.02
    tokens:
      description: Token counters by name.
      type: dict
      sample: {"vllm:generation_tokens_total": 1812.0}
still_for:
  description:
    - For V(busy), how many seconds no token counter had moved when the wait ended. An engine with requests that has
      made no token for minutes is wedged, and no longer wait will drain it.
    - Null for any other verdict, and where no counters tell.
  type: float
  returned: always
  sample:
readings:
  description: How many times the engine was looked at.
  type: int
  returned: always
  sample: 2
elapsed:
  description: Seconds that the call took.
  type: float
  returned: always
  sample: 0.53
"""

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _engines, _http, _lease, _load
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import SYSTEM_CLOCK
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    if not params["url"]:
        raise UsageError('there is nothing to look at: give "url", or a service whose definition has one')
    began = SYSTEM_CLOCK.monotonic()
    found = _load.drain(
        _engines.get(params["engine"], params["profile"]),
        params["url"],
        _http.check(
            _http.Access(params["api_key"], params["headers"] or {}, params["validate_certs"], params["ca_path"])
        ),
        0 if ctx.check_mode else params["timeout"],
        params["interval"],
        _lease.keeper_of(params, ctx.check_mode),
    )
    return dict(found.as_dict(), elapsed=round(SYSTEM_CLOCK.monotonic() - began, 3))


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.http_spec(),
            "url": {"type": "str"},
            "engine": {"type": "str", "choices": _engines.NAMES},
            "profile": {"type": "dict"},
            "timeout": {"type": "float", "default": 300},
            "interval": {"type": "float", "default": 0.5},
            "run_id": {"type": "str"},
            "report_only": {"type": "bool", "default": False},
        },
        body,
        fill={"url": "url", "engine": "engine", "profile": "profile"},
        requires=("requests",),
    )


if __name__ == "__main__":
    main()
