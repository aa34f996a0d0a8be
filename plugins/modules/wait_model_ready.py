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
  - Climbs the tiers C(unit) (active, its main process stable), C(listener) (the port is open and belongs to the unit),
    C(health), C(model) (the right one is listed) and C(generation) (one token came back), and returns as soon as
    O(tier) is reached.
  - Tells a slow start from one that hangs. As long as anything moves, the wait goes on until O(timeout); when nothing
    has moved for O(stall_timeout), it ends.
  - A port belongs to the unit when all that listen on it, at the addresses of O(url), are processes of the unit. Behind
    what takes connections in for others, such as the proxy of a container engine, address translation, or a socket of
    systemd with C(systemd-socket-proxyd), the process must be the unit's that listens in its own network, or in that of
    its container. Where it cannot be seen who that is, such a way in counts only when the unit runs a container client,
    has a process in a network of its own, or is started by that socket unit. Otherwise C(listener) is not reached, and
    its detail says what was seen.
  - Who listens is judged again before each question that carries the key, and before the end, if a socket has come to
    the port or gone from it since.
  - Movement is a log line that was not there before, a growing percentage, or what the processes of the unit use of
    processor time, reads, memory, GPU memory and network. A line that repeats with another number or time is none. GPU
    utilisation is not looked at.
  - A unit that is dead, or is restarted again and again, is reported at once, with the line of the log that tells why.
  - "Where the wait stands is shown while it lasts, one line for each change, such as
    C(gpu03 qwen: loading weights 63 % · GPU 71204 MiB · 4 m 12 s, moved 2 s ago). For that the wait is cut into slices
    of some seconds each, and what one slice has seen the next one knows. A connection that is lost meanwhile is made
    again, and the wait goes on; see O(reconnect_timeout). With C(async) the wait is one call, and nothing is shown."
  - Nothing is changed. In check mode the service is looked at once, for 10 seconds at most, and not waited for. One
    that is not ready at that moment fails with V(progressing). No token is asked for of an engine that may load a model
    for it (see O(generation_timeout)), so such a one is V(ready) up to O(tier=model) only.
requirements:
  - requests and psutil on the managed host. The role P(gpuops.serving.host_agent#role) installs them.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._http
  - gpuops.serving._profile
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
    choices: [llama_cpp, vllm, sglang, ovms, triton, tgi, ollama, openai]
  model:
    description: The model that must be listed. Default is that of O(service), else any.
    type: str
  gpus:
    description:
      - The GPUs of the service, by index, UUID or PCI address. Their memory is watched for movement, and when the start
        runs out of it, RV(cause.holders) names who else holds them.
      - Default is that of O(service), else all. An empty list means that none is looked at.
    type: list
    elements: str
  log_path:
    description:
      - A file that the engine writes its log to, where that is not the journal. It may appear later, and be rotated.
      - Of the lines that are in it at the first look, those count that surely are of the present life of the unit, by
        their time stamps or because the file is younger than that life. Else only the last one may.
      - Default is that of O(service), else the journal is read.
    type: str
  tier:
    description:
      - The tier to reach.
      - V(unit) is reached when the unit is active and its main process has lived for 3 seconds or made a token. A unit
        of C(Type=notify) is active when it has told systemd that it is ready.
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
      - A value above O(timeout) is refused. One that O(service) brings is no longer than an O(timeout) that is given.
    type: float
  generation_timeout:
    description:
      - Seconds that one attempt to get a token may take. When it ends without one, and nothing of the unit moved
        meanwhile, the engine is wedged. When something moved, such as a compiler, it is tried again.
      - Where O(stall_timeout) is less, an attempt ends as soon as nothing has moved for that long. That is a wedge too,
        if the attempt had the whole of that time.
      - An engine that loads the model with the first request, and gives up the load together with that request (Ollama,
        or C(loads_on_request) in O(profile)), is not cut short by it. Such an attempt ends when nothing has moved for
        O(stall_timeout), or with O(timeout).
    type: float
    default: 60
  max_restarts:
    description: How many restarts during the wait make a restart loop. At least V(1).
    type: int
    default: 3
  interval:
    description:
      - Seconds between two looks at everything. The first ones follow each other faster.
      - Whether the port opens, or the engine answers otherwise than before, is seen within a fraction of a second,
        whatever the interval.
    type: float
    default: 1
  progress:
    description:
      - Show lines while it lasts. They go to the standard error where a program reads the standard output.
      - Nothing is shown in check mode, with C(async), and with C(no_log) on the task.
    type: bool
    default: true
  reconnect_timeout:
    description:
      - Seconds for which a lost connection to the host is made again, counted from when the loss is seen. Then the host
        is unreachable, and the message says where the wait stood last. The whole wait takes no longer than
        O(timeout) and this.
      - Without C(ServerAliveInterval) in the arguments of SSH, a connection that is cut in silence is not known to be
        lost. C(-o ServerAliveInterval=3 -o ServerAliveCountMax=2 -o ConnectTimeout=3) shows it after 8 s.
    type: float
    default: 60
  run_id:
    description:
      - The run that holds the lease of O(service), or of the service that O(unit) is defined by. With it, the lease is
        renewed while the wait lasts.
    type: str
  report_only:
    description:
      - Do not fail the task, whatever the verdict; RV(ok) tells.
      - With RV(verdict) V(error) there is none, and the task fails all the same.
    type: bool
    default: false
  resume:
    description: How the controller asks for one slice of the wait. Never set it.
    type: str
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
    - V(progressing) when O(timeout) ended before nothing had moved for O(stall_timeout), and something had moved since
      the first look. Also when it ended while systemd waits before it starts the unit again.
    - V(stalled) when nothing had moved for O(stall_timeout), or in the whole of a shorter wait, and without a O(unit)
      whenever O(timeout) ended. A unit that systemd is about to start again is not stalled.
    - V(restart_loop) after O(max_restarts) restarts; V(dead) when the unit failed or is inactive with nothing about to
      start it, or does not exist.
    - V(wrong_server) when the port belongs to another process, or another program or model answers, or what answers
      cannot be asked, because TLS fails, it speaks no HTTP, it redirects to another server or its answer is too large.
      Also instead of V(stalled) when others than O(model) are listed to the end.
    - V(auth_error) when the API key is refused, or there is none and the engine wants one; V(unknown) when the rights
      do not suffice to see whose process listens.
    - V(wedged) when the model is listed, but no token comes, by an attempt that had the whole of O(generation_timeout)
      (or of O(stall_timeout) where that is less) while nothing moved, or by at least three answers in a row, over at
      least 5 seconds (and O(generation_timeout) where something moves), that are no good ones. An engine that says that
      it is overloaded (status 429 or 503) is not wedged.
    - V(error) when the wait itself failed, by wrong options, by a host that cannot be asked or was lost, or because the
      module was killed. The other values then are what was found out before, mostly nothing.
    - A host that does not answer for a while, such as one whose systemd is busy, ends the wait as V(error) only when
      that lasts for 60 seconds.
  type: str
  returned: always
  sample: ready
msg:
  description:
    - What was waited for, the verdict, how far the load had come, why, and after C(next) what to do where that is one
      thing.
  type: str
  returned: always
  sample: >-
    the service "qwen" (unit "gpuops-qwen.service") is stalled: for 300 s nothing moved, at loading weights 16 %: the
    tier "listener" is not reached: nothing listens on port 8002; next: py-spy dump --pid 4711, then gpuops stop qwen
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
  description:
    - What the engine is doing by its log, such as V(loading_weights), V(compiling) or V(capturing_graphs).
    - V(started) once a token came back, whatever the log said last; empty when the log was not read.
  type: str
  returned: always
  sample: loading_weights
percent:
  description: The last progress in the log, or null; always V(100.0) once a token came back.
  type: float
  returned: always
  sample: 62.5
movement:
  description:
    - Seconds since each sign last moved, of C(log), C(percent), C(cpu), C(io), C(memory), C(gpu_memory), C(network),
      C(tier) and C(restart). A sign that never moved is not there.
  type: dict
  returned: always
  sample: {"cpu": 0.4, "log": 31.2}
restarts:
  description: Restarts of the unit during the wait, by systemd and by hand. Each counts once.
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
        - V(gpu_out_of_memory), V(host_out_of_memory), V(port_in_use), V(driver_mismatch), V(gpu_missing), V(gpu_error),
          V(disk_full), V(too_many_files), V(model_not_found), V(model_access_denied), V(model_corrupt),
          V(model_unsupported), V(library_missing), V(bad_arguments), V(communication_failed), V(watchdog),
          V(permission_denied), V(warmup_failed), V(model_failed), V(child_failed), V(timeout), V(condition),
          V(bad_unit), V(killed) or V(exited).
      type: str
      sample: gpu_out_of_memory
    line:
      description: The line that says so.
      type: str
      sample: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.97 GiB."
    figures:
      description: In MiB, as far as the line tells them, what was C(free_mib), C(wanted_mib) and there (C(total_mib)).
      type: dict
      returned: when memory of a GPU ran out and the line tells any
      sample: {"free_mib": 3170.3, "total_mib": 81559.0, "wanted_mib": 73403.1}
    holders:
      description: Who else holds the GPUs, at the end of the wait.
      type: list
      elements: str
      returned: when memory of a GPU ran out and it can be seen; empty when it is nobody
      sample: ['process 4711 "python3" (user qwen, unit old.service) holds 78102 MiB on GPU 0']
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

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _lease, _tiers, _waiting


def body(ctx: _ansible.Context) -> _ansible.Result:
    keep = _lease.keeper_of(ctx.params, ctx.check_mode)
    return _waiting.run(ctx.params, ctx.check_mode, keep, ctx.warn)


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.http_spec(),
            "unit": {"type": "str"},
            "url": {"type": "str"},
            "engine": {
                "type": "str",
                "choices": ["llama_cpp", "ollama", "openai", "ovms", "sglang", "tgi", "triton", "vllm"],
            },
            "profile": {"type": "dict"},
            "model": {"type": "str"},
            "gpus": {"type": "list", "elements": "str"},
            "log_path": {"type": "str"},
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
            "progress": {"type": "bool", "default": True},
            "reconnect_timeout": {"type": "float", "default": 60},
            "run_id": {"type": "str"},
            "report_only": {"type": "bool", "default": False},
            # A token is long and of no use to anybody: not in the host's log, either.
            "resume": {"type": "str", "no_log": True},
        },
        body,
        fill=_waiting.FILL,
        requires=("requests", "psutil"),
        nothing=_tiers.NOTHING,
    )


if __name__ == "__main__":
    main()
