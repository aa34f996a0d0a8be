#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: route_probe
short_description: Tell whether one token comes back, from the engine and through its gateway
version_added: 1.0.0
description:
  - Asks an engine for one token, directly, through its gateway, or both at the same time, and says from both answers
    what is wrong.
  - A timeout is a failure. What has not answered within O(timeout) is cut off and its connection closed, so that
    probes never pile up, whatever the server does.
  - Proof of a token is a count of one in the usage, or a token in the answer. The first token of a healthy engine may
    decode to an empty text. A usage that counts no token outweighs whatever else the answer holds, and so does an error
    in it, or a C(finish_reason) of V(error) or V(abort).
  - Nothing is changed. In check mode the probe is made all the same.
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
      - The engine itself, such as V(http://127.0.0.1:8000).
      - A user name, a password or a query in it is refused. A key belongs in O(api_key) or O(headers).
      - With neither O(url) nor O(route_url), both are taken from the definition of O(service). Otherwise only what is
        given is probed.
    type: str
  route_url:
    description: The gateway in front of the engine.
    type: str
  engine:
    description:
      - The profile of the engine, which says where it answers and what it counts.
      - Default is that of O(service), else V(openai), which fits any server that answers like OpenAI.
    type: str
    choices: [llama_cpp, vllm, sglang, ovms, triton, tgi, ollama, openai]
  model:
    description:
      - The model to ask, which must also be the one that answers. What stands before the last slash is not compared.
      - Default is that of O(service), else the first that the server lists.
    type: str
  timeout:
    description:
      - Hard limit in seconds of one attempt, whatever the servers do. At least V(0.1).
      - An attempt that ran into it is the last.
    type: float
    default: 30
  max_ttft:
    description: Seconds that the first token may take. More is V(slow), and then the task fails.
    type: float
  max_total:
    description: Seconds that the whole answer may take. More is V(slow), and then the task fails.
    type: float
  count:
    description: How many attempts to make. The gravest verdict counts.
    type: int
    default: 1
  interval:
    description: Seconds between two attempts.
    type: float
    default: 1
  endpoint:
    description: >-
      What to ask. V(auto) asks for a completion, and for a chat where there are no completions; of Triton, what its
      generate extension gives.
    type: str
    choices: [auto, completions, chat]
    default: auto
  prompt:
    description: The prompt. By default it holds a random word, so that no cache can answer.
    type: str
  run_id:
    description: The run that holds the lease of O(service). With it, the lease is renewed while the probe lasts.
    type: str
  report_only:
    description: Do not fail the task, whatever the verdict; RV(ok) tells.
    type: bool
    default: false
seealso:
  - module: gpuops.serving.wait_model_ready
"""

EXAMPLES = r"""
- name: One token must come back within 10 seconds, directly and through the gateway
  gpuops.serving.route_probe:
    url: http://127.0.0.1:8000
    route_url: http://gateway.example.com:8000
    engine: vllm
    model: qwen3-32b
    timeout: 10

- name: Probe a service as it is defined on the host, three times, with a limit for the first token
  gpuops.serving.route_probe:
    service: qwen
    count: 3
    max_ttft: 2

- name: Look without failing
  gpuops.serving.route_probe:
    service: qwen
    report_only: true
  register: probe
"""

RETURN = r"""
verdict:
  description:
    - V(ok), or V(slow), which fails only when a limit was set.
    - V(route_broken) when the engine generates and the route does not.
    - V(wedged) when no whole answer came in time; V(busy) when none came but the token counters of the engine moved
      meanwhile by more than the probe itself can have moved them, or when it said that it is overloaded; V(dead) when
      nothing listens.
    - V(wrong_model) when another model answered or the server does not have it; V(empty_response) when the answer holds
      no token; V(error_response) for any other answer that is not a good one, a connection that was closed without one,
      or a probe that itself failed; V(auth_error) for status 401 or 403.
    - V(misconfigured) when the URL leads to something else, such as a web page, another host, an unknown name, a host
      to which there is no route, or a server whose certificate is not trusted.
  type: str
  returned: always
  sample: route_broken
ok:
  description: Whether a token came back, and within the limits.
  type: bool
  returned: always
  sample: false
direct:
  description: The last probe of O(url), or null without one.
  type: dict
  returned: always
  contains:
    verdict:
      description: The verdict of this side alone.
      type: str
      sample: ok
    url:
      description: What was asked.
      type: str
      sample: http://127.0.0.1:8000/v1/completions
    endpoint:
      description: V(completions) or V(chat), or null when none answered.
      type: str
      sample: completions
    status:
      description: HTTP status, or null without an answer.
      type: int
      sample: 200
    ttft:
      description: Seconds to the first token, or null.
      type: float
      sample: 0.112
    total:
      description: Seconds to the end of the answer.
      type: float
      sample: 0.115
    model:
      description: The model that says it answered, or null.
      type: str
      sample: qwen3-32b
    tokens:
      description: Tokens that came back, or null.
      type: int
      sample: 1
    error:
      description: What was wrong, empty when nothing was.
      type: str
      sample: ""
route:
  description: The last probe of O(route_url), with the keys of RV(direct), or null without one.
  type: dict
  returned: always
counters:
  description: Whether the engine generated for anybody while the last attempt lasted. Null without O(url) or metrics.
  type: dict
  returned: always
  contains:
    before:
      description: Token counters before the attempt.
      type: dict
      sample: {"vllm:generation_tokens_total": 1812.0}
    after:
      description: Token counters after an attempt that timed out, else null.
      type: dict
      sample: {"vllm:generation_tokens_total": 1925.0}
    moved:
      description:
        - Whether they moved by more than the probe itself can have moved them. Null when that is not known, or when
          there was an answer.
      type: bool
      sample: true
attempts:
  description: Every attempt.
  type: list
  elements: dict
  returned: always
  contains:
    verdict:
      description: Its verdict.
      type: str
      sample: ok
    direct:
      description: As RV(direct).
      type: dict
    route:
      description: As RV(route).
      type: dict
elapsed:
  description: Seconds that the call took.
  type: float
  returned: always
  sample: 0.151
"""

from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ansible,
    _engines,
    _generation,
    _http,
    _lease,
    _probe,
)


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    profile = _engines.get(params["engine"], params["profile"])
    found = _probe.run(
        _probe.sides_of(params["url"], params["route_url"], params.get("definition") or {}),
        _generation.Question(profile, params["model"], params["endpoint"], params["prompt"]),
        _http.check(
            _http.Access(params["api_key"], params["headers"] or {}, params["validate_certs"], params["ca_path"])
        ),
        _probe.Policy(params["timeout"], params["max_ttft"], params["max_total"], params["count"], params["interval"]),
        _lease.keeper_of(params, ctx.check_mode),
    )
    if found.ok and found.verdict == "slow":
        ctx.warn(found.msg)
    return found.as_dict()


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.http_spec(),
            "url": {"type": "str"},
            "route_url": {"type": "str"},
            "engine": {"type": "str", "choices": _engines.NAMES},
            "profile": {"type": "dict"},
            "model": {"type": "str"},
            "timeout": {"type": "float", "default": 30},
            "max_ttft": {"type": "float"},
            "max_total": {"type": "float"},
            "count": {"type": "int", "default": 1},
            "interval": {"type": "float", "default": 1},
            "endpoint": {"type": "str", "choices": ["auto", "completions", "chat"], "default": "auto"},
            "prompt": {"type": "str"},
            "run_id": {"type": "str"},
            "report_only": {"type": "bool", "default": False},
        },
        body,
        fill={"engine": "engine", "profile": "profile", "model": "model"},
        requires=("requests",),
    )


if __name__ == "__main__":
    main()
