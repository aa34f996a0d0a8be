#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_start
short_description: Start the unit of a service once, unless an earlier life of it is still there
version_added: 1.0.0
description:
  - Starts the unit through systemd and returns as soon as its main process runs, which says nothing about the model
    being loaded. Use M(gpuops.serving.wait_model_ready) for that.
  - Refuses to start a unit while processes of its earlier life are alive, and names them.
    M(gpuops.serving.process_tree_stop) ends them.
  - Refuses to start a unit while a GPU that it needs is not clear, and names the holder. M(gpuops.serving.gpu_clear)
    waits for that.
  - A unit that waits for its next automatic restart (C(activating) to systemd) does not run. When nothing of its
    earlier life is alive it is stopped, so that the wait is over, and started at once.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._service.mutating
options:
  unit:
    description:
      - The systemd unit to start, a C(.service). A bare name is a service.
      - May be given together with O(service), and then takes the place of the unit in its definition.
    type: str
  timeout:
    description:
      - How long in seconds systemd may take to get the main process, or a gate before it, to run.
      - A stop that somebody else has begun is waited for within the same time.
      - When the time is over, systemd still has a second for the answer that tells where the unit is.
    type: float
    default: 30
  reset_failed:
    description: Reset a failed state and the start counter first, since a start limit that was hit refuses every start.
    type: bool
    default: true
  gpus:
    description:
      - The GPUs that must be clear, each as index, UUID or PCI address. An empty list means that the unit uses none.
      - Default are those of O(service), and all of the host when its definition names none. For a unit without a
        definition, nothing is looked at unless this is given.
    type: list
    elements: str
  memory_tolerance:
    description:
      - MiB that may be in use on an idle device.
      - Default is that of M(gpuops.serving.gpu_clear) for the vendor.
    type: int
seealso:
  - module: gpuops.serving.gpu_clear
  - module: gpuops.serving.process_tree_stop
  - module: gpuops.serving.wait_model_ready
"""

EXAMPLES = r"""
- name: Start a service
  gpuops.serving.service_start:
    service: qwen

- name: Start a hand-written unit
  gpuops.serving.service_start:
    unit: sglang.service
"""

RETURN = r"""
verdict:
  description:
    - V(started), or V(running) when the unit was active or on its way there already, other than by waiting for its next
      automatic restart.
    - V(survivors) when processes of an earlier life are alive, V(refused) when the unit is masked, held by a condition,
      or still stopping, V(failed) when its process ended at once, V(not_found) when there is no such unit.
    - V(busy), V(unknown) or V(error) when a GPU is not clear, as M(gpuops.serving.gpu_clear) says it.
  type: str
  returned: always
  sample: started
ok:
  description: Whether the unit runs.
  type: bool
  returned: always
msg:
  description: The verdict in one sentence.
  type: str
  returned: always
  sample: "the unit \"sglang.service\" is started: its main process is 4711"
survivors:
  description: Processes of an earlier life, with the keys of RV(gpuops.serving.process_tree_stop#module:processes).
  type: list
  elements: dict
  returned: unless another run holds the lease
unit_state:
  description:
    - What systemd says of the unit at the end, with the keys of
      RV(gpuops.serving.process_tree_stop#module:unit_state).
  type: dict
  returned: unless another run holds the lease
invocation_id:
  description: Identifier of the unit's present run, empty in check mode.
  type: str
  returned: unless another run holds the lease
main_pid:
  description: The main process of the unit, 0 while a gate before it still runs.
  type: int
  returned: unless another run holds the lease
elapsed:
  description: Duration in seconds.
  type: float
  returned: unless another run holds the lease
"""

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import (
    _ansible,
    _gpu,
    _limits,
    _selection,
    _start,
)
from ansible_collections.gpuops.serving.plugins.module_utils._errors import UsageError


def gate_of(params: t.Mapping[str, t.Any]) -> t.Optional[_start.Gate]:
    """Whether the GPUs of the unit are clear; nothing to ask when it uses none, or when nobody said which."""
    if params["gpus"] == [] or (params["gpus"] is None and not params.get("definition")):
        return None
    options = _gpu.Options(gpus=params["gpus"], memory_tolerance=params["memory_tolerance"])

    def gate() -> t.Optional[t.Tuple[str, str]]:
        reading = _gpu.read(options)
        return None if reading.verdict == "clear" else (reading.verdict, reading.message)

    return gate


def start(context: _ansible.Context) -> t.Dict[str, t.Any]:
    params = context.params
    _limits.at_least(0, timeout=params["timeout"], memory_tolerance=params["memory_tolerance"])
    if not params.get("unit"):
        raise UsageError('the definition of the service "%s" names no unit' % params.get("service"))
    selection = _selection.select(params, (".service",))
    result = _start.start(
        selection,
        timeout=params["timeout"],
        reset_failed=params["reset_failed"],
        check_mode=context.check_mode,
        gate=gate_of(params),
    )
    if result["unit_state"]["need_reload"]:
        context.warn(
            'the file of the unit "%s" has changed since systemd read it, and the change is not in force: type '
            '"systemctl daemon-reload" on the host and restart the service' % params["unit"]
        )
    return result


def main() -> None:
    _ansible.run_module(
        dict(
            _ansible.service_spec(),
            **_ansible.mutating_spec(),
            unit={"type": "str"},
            timeout={"type": "float", "default": 30},
            reset_failed={"type": "bool", "default": True},
            gpus={"type": "list", "elements": "str"},
            memory_tolerance={"type": "int"},
        ),
        start,
        fill={"unit": "unit", "gpus": "gpus"},
        mutating=True,
        required_one_of=[("service", "unit")],
    )


if __name__ == "__main__":
    main()
