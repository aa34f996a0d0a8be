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
    decode to an empty text.
  - Nothing is changed. In check mode the probe is made all the same.
requirements:
  - requests on the managed host. The role P(gpuops.serving.host_agent#role) installs it.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._http
options:
  url:
    description:
      - The engine itself, such as V(http://127.0.0.1:8000).
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
    choices: [llama_cpp, vllm, sglang, openai]
  model:
    description:
      - The model to ask, which must also be the one that answers. What stands before the last slash is not compared.
      - Default is that of O(service), else the first that the server lists.
    type: str
  timeout:
    description:
      - Hard limit in seconds of one attempt, whatever the servers do.
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
    description: What to ask. V(auto) asks for a completion, and for a chat where there are no completions.
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
      meanwhile, or when it said that it is overloaded; V(dead) when nothing listens or the connection was closed
      without an answer.
    - V(wrong_model) when another model answered or the server does not have it; V(empty_response) when the answer holds
      no token; V(error_response) for any other answer that is not a good one; V(auth_error) for status 401 or 403.
    - V(misconfigured) when the URL leads to something else, such as a web page, another host, an unknown name, or a
      server whose certificate is not trusted.
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
      description: Whether they moved, or null when that is not known.
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

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ansible,
    _engines,
    _generation,
    _http,
    _lease,
    _load,
)
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import SYSTEM_CLOCK, Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


def urls_of(params: _ansible.Result) -> t.Dict[str, str]:
    """The sides to probe; the definition counts only when the caller names none."""
    url, route_url = params["url"], params["route_url"]
    if not url and not route_url:
        definition = params.get("definition") or {}
        url, route_url = definition.get("url"), definition.get("route_url")
    sides = {_generation.DIRECT: url, _generation.ROUTE: route_url}
    found = {name: value for name, value in sides.items() if value}
    if not found:
        raise UsageError('there is nothing to probe: give "url" or "route_url"')
    return found


def attempt(
    sides: t.Mapping[str, str],
    question: _generation.Question,
    access: _http.Access,
    params: _ansible.Result,
    tick: t.Callable[[], None],
) -> t.Tuple[str, str, t.Dict[str, t.Any]]:
    """One probe of all sides, with the engine's own counters as a witness."""
    deadline = Deadline(params["timeout"])
    # Counters are read within the hard total: a small share of it before the probe and one after.
    share = min(2.0, params["timeout"] / 10)
    counted = question.profile.metrics is not None and _generation.DIRECT in sides
    before = after = None
    if counted:
        before = _load.read(question.profile, sides[_generation.DIRECT], access, share).load
    found = _generation.probe(sides, question, access, deadline.remaining - (share if counted else 0.0), tick)
    direct, route = found.get(_generation.DIRECT), found.get(_generation.ROUTE)
    if counted and direct is not None and direct.verdict == "wedged":
        after = _load.read(question.profile, sides[_generation.DIRECT], access, share).load
        if _load.moved(before, after):
            direct.verdict = "busy"
            direct.error += ", while the engine generated for others"
    for side in found.values():
        _generation.slow(side, params["max_ttft"], params["max_total"], params["timeout"] / 2)
    verdict, msg = _generation.overall(direct, route)
    counters = None
    if counted:
        counters = {
            "before": None if before is None else dict(before.tokens),
            "after": None if after is None else dict(after.tokens),
            "moved": _load.moved(before, after),
        }
    return (
        verdict,
        msg,
        {
            "verdict": verdict,
            "direct": None if direct is None else direct.as_dict(),
            "route": None if route is None else route.as_dict(),
            "counters": counters,
        },
    )


def body(ctx: _ansible.Context) -> _ansible.Result:
    params = ctx.params
    for name, least in (("timeout", 0.1), ("interval", 0), ("count", 1)):
        if params[name] < least:
            raise UsageError('"%s" must be at least %s, not %s' % (name, least, params[name]))
    sides = urls_of(params)
    question = _generation.Question(
        _engines.get(params["engine"]), params["model"], params["endpoint"], params["prompt"]
    )
    access = _http.Access(params["api_key"], params["headers"] or {}, params["validate_certs"], params["ca_path"])
    keep = _lease.keeper(params["service"], None if ctx.check_mode else params["run_id"])
    began = SYSTEM_CLOCK.monotonic()
    rounds = []
    for number in range(params["count"]):
        if number:
            SYSTEM_CLOCK.sleep(params["interval"])
        keep()
        rounds.append(attempt(sides, question, access, params, keep))
        if any((rounds[-1][2][side] or {}).get("verdict") in ("wedged", "busy") for side in ("direct", "route")):
            break  # what timed out may live on in the server
    verdict = _generation.worst(word for word, _msg, _row in rounds)
    msg = next(text for word, text, _row in rounds if word == verdict)
    last = rounds[-1][2]
    result = {
        "verdict": verdict,
        "msg": msg,
        "direct": last["direct"],
        "route": last["route"],
        "counters": last["counters"],
        "attempts": [{key: row[key] for key in ("verdict", "direct", "route")} for _word, _msg, row in rounds],
        "elapsed": round(SYSTEM_CLOCK.monotonic() - began, 3),
    }
    if verdict == "slow":
        if params["max_ttft"] is not None or params["max_total"] is not None:
            result["ok"] = False
        else:
            ctx.warn(msg)
    return result


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.http_spec(),
            "url": {"type": "str"},
            "route_url": {"type": "str"},
            "engine": {"type": "str", "choices": ["llama_cpp", "vllm", "sglang", "openai"]},
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
        fill={"engine": "engine", "model": "model"},
        requires=("requests",),
    )


if __name__ == "__main__":
    main()
