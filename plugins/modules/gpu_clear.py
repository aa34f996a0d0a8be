#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_clear
short_description: Tell whether GPUs are free
version_added: 1.0.0
description:
  - Looks at GPUs of NVIDIA, AMD and Intel through two independent sources, what the vendor's driver tells and who has
    the device nodes open or mapped, and says of each device whether it is clear. It never ends a process.
  - What cannot be seen is never called clear. A device that the driver does not answer for, memory in use by no
    visible process, and process lists that may not be read all make the task fail, each with its own
    RV(gpus[].reason).
  - Every call into the driver runs in a child process with a time limit, and one sick device does not hide the others.
    A child that hangs in the kernel is left behind, listed in RV(stuck_probes), and never counted as a holder; while
    it lives, its device answers V(error) without another call.
  - GPU utilisation decides nothing. A device that reports 90 % or more while nothing holds it is clear, with a warning.
  - Without root the processes of others cannot be looked into, so that no device is called clear. What is not V(busy)
    or V(error) is then V(unknown), and says what could not be seen.
  - The page C(docs/when-is-a-gpu-clear.md) of the collection has all rules and every reason.
requirements:
  - nvidia-ml-py on managed hosts with NVIDIA devices. The role P(gpuops.serving.host_agent#role) installs it.
  - Nothing for AMD and Intel. What amdsmi tells is used where it can be imported.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._service
  - gpuops.serving._service.mutating
  - gpuops.serving._attributes
options:
  gpus:
    description:
      - The devices to judge, each as an index, a UUID or a PCI address. The index is that of C(nvidia-smi) for NVIDIA,
        and the place in the order of PCI addresses for AMD and Intel. A UUID with C(MIG-) in front names a partition.
      - Default is the devices of O(service), else all devices. The graphics of a processor is then left out where the
        host has other devices, and named in RV(not_judged).
      - A device that no driver knows makes the task fail. So does an index on a host with devices of several vendors,
        unless O(vendor) tells which is meant.
    type: list
    elements: str
  vendor:
    description:
      - Whose devices to look at. V(auto) means those of every vendor that the host has.
      - A vendor of whom the host has neither a device nor a driver makes the task fail, unless O(allow_no_gpu) is set.
    type: str
    choices: [auto, nvidia, amd, intel]
    default: auto
  expected_gpus:
    description:
      - How many devices must be known in all. Fewer is an error, even when those are clear. More is a warning.
    type: int
  allow_no_gpu:
    description:
      - Call a host clear that has no GPU and no driver at all, for plays that meet both kinds of hosts.
      - A GPU on the PCI bus, a device node, or a driver that runs without a device remains an error. So does a host
        without a GPU when O(gpus) names one or O(expected_gpus) is not V(0).
    type: bool
    default: false
  memory_tolerance:
    description:
      - Memory in MiB that may be in use on an idle device, beside what allowed and foreign processes hold.
      - Drivers keep some memory on an idle device. A process that uses the device takes hundreds of MiB.
      - Default is 64 for NVIDIA, and 512 for AMD and Intel, whose drivers do not tell their own share apart (an
        idle MI300X shows some 300 MiB).
      - NVIDIA drivers before 510 do not tell it apart either (RV(gpus[].memory_basis=used_and_reserved)).
        Should a device never become clear for this reason, raise the tolerance to what it shows when idle.
    type: int
  allowed_holders:
    description:
      - Processes that may hold a device. They are shown with RV(gpus[].holders[].allowed), never hidden, and the memory
        that the driver says they hold does not count.
      - A rule fits when everything that it gives is equal.
      - The list replaces the default, which is C(nvidia-persistenced), C(nvidia-powerd), C(nv-fabricmanager),
        C(nv-hostengine), C(dcgm-exporter), C(Xorg) and C(systemd-logind). Anybody may bear such a
        name, so the default excuses at most 512 MiB of each process, and none where the driver tells nothing of the
        memory. A rule of this list excuses whatever its process holds.
    type: list
    elements: dict
    suboptions:
      name:
        description: Name of the process, compared with the first 15 characters, because the kernel keeps no more.
        type: str
      user:
        description: Account that the process runs under.
        type: str
      unit:
        description: Systemd unit that the process runs in.
        type: str
  unit:
    description:
      - Judge only what the processes of this systemd unit hold, for devices that several services share. What others
        hold is reported as RV(gpus[].holders[].foreign) and does not make a device busy.
      - A process that left the unit is still the unit's when it carries the ownership mark. The mark is that of
        O(service), else of the service whose definition on the host names the unit.
      - Memory in use that no visible process explains still makes it busy.
      - In a container with a process table of its own, a process that only the driver lists is not named and never
        taken for foreign or allowed, because its number is that of a process outside.
      - O(service) does not fill this option, because after a stop a leftover that is no longer recognised as the
        service's own would pass as somebody else's.
    type: str
  timeout:
    description:
      - Limit in seconds for the devices to become clear. A look that is under way when it ends gets a few seconds more.
      - V(0) means one look, whatever O(confirmations) says.
    type: float
    default: 0
  interval:
    description: Seconds between two looks.
    type: float
    default: 1
  confirmations:
    description:
      - How many looks in a row must be clear. Drivers give memory back up to some seconds after the process is gone.
      - When O(timeout) ends before that many clear looks, the answer is V(unknown).
    type: int
    default: 2
  report_only:
    description: Do not fail the task, whatever the verdict; RV(ok) tells.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: All GPUs must become free within a minute of the stop
  gpuops.serving.gpu_clear:
    timeout: 60

- name: Two GPUs, one look, report who holds them without failing
  gpuops.serving.gpu_clear:
    gpus: ["0", "GPU-8f6b0c5e-7c07-7d5c-9d0b-0f7c1e0d2a11"]
    report_only: true
  register: gpus

- name: The devices of a service, of a host that must have eight in all
  gpuops.serving.gpu_clear:
    service: qwen
    expected_gpus: 8
    timeout: 60

- name: Hosts with and without GPUs, of whatever vendor, and a monitor that may stay
  gpuops.serving.gpu_clear:
    allow_no_gpu: true
    allowed_holders:
      - name: nvtop
      - unit: dcgm-exporter.service

- name: Two AMD cards of a host that has others as well
  gpuops.serving.gpu_clear:
    vendor: amd
    gpus: ["0", "1"]

- name: On shared GPUs, only what one service holds counts
  gpuops.serving.gpu_clear:
    unit: gpuops-qwen.service
    gpus: ["0"]
    timeout: 60
"""

RETURN = r"""
verdict:
  description:
    - The worst of the devices' verdicts, in the order V(clear), V(busy), V(unknown), V(error).
  type: str
  returned: always
  sample: busy
ok:
  description: Whether the verdict is V(clear).
  type: bool
  returned: always
  sample: false
reason:
  description:
    - Why there is an answer that comes from no single device. Empty otherwise.
    - V(binding_missing) or V(binding_wrong) for nvidia-ml-py; V(library_missing), V(driver_not_loaded),
      V(driver_mismatch), V(driver_too_old), V(no_permission), V(no_power), V(gpu_lost), V(reset_required),
      V(blocked_by_system), V(driver_error), V(timeout) or V(stuck) when a driver does not answer at all; V(internal)
      when our call into it ended without an answer; V(bus_unreadable) when the devices cannot be listed; V(no_gpu) when
      none is known; V(no_stack) when the host has neither GPU nor driver; V(fewer_gpus) when fewer than
      O(expected_gpus) are known; V(unconfirmed) when O(timeout) ended before O(confirmations) clear looks.
  type: str
  returned: unless the options were refused
  sample: ""
gpus:
  description: The devices, in the order of O(gpus), else by vendor and in the vendor's order.
  type: list
  elements: dict
  returned: unless the options were refused
  contains:
    index:
      description: Index in the vendor's order, or null for a device that was not found by another name.
      type: int
      sample: 0
    uuid:
      description: UUID, or null where the device does not tell.
      type: str
      sample: GPU-8f6b0c5e-7c07-7d5c-9d0b-0f7c1e0d2a11
    pci:
      description: PCI address, or null where the device does not tell.
      type: str
      sample: "00000000:17:00.0"
    vendor:
      description: V(nvidia), V(amd) or V(intel); V(unknown) for one that was not found on a host with several.
      type: str
      sample: nvidia
    integrated:
      description: Whether it is the graphics of a processor, without memory of its own.
      type: bool
      sample: false
    name:
      description: Product name.
      type: str
      sample: NVIDIA L40S
    verdict:
      description: V(clear), V(busy), V(unknown) or V(error).
      type: str
      sample: busy
    reason:
      description:
        - For V(clear), V(idle); V(only_excused) when allowed or foreign processes hold it; V(judged_by_holders) when
          the driver does not tell the memory in use.
        - For V(busy), V(held_by_process); V(held_by_unresolvable) when memory is in use by no process that is visible
          here; V(node_held_memory_in_use) or V(node_held_memory_unreadable) when a process has the device node open
          while memory is in use or cannot be read.
        - For V(unknown), V(processes_unreadable), V(nodes_unreadable), V(memory_unreadable), V(outside_not_visible),
          V(memory_unattributed) or V(partitions_unreadable).
        - For V(error), V(gpu_lost), V(reset_required), V(blocked_by_system), V(driver_mismatch), V(driver_not_loaded),
          V(passed_through), V(no_permission), V(no_power), V(driver_too_old), V(library_missing),
          V(driver_error), V(timeout), V(stuck), V(internal) or V(not_found).
      type: str
      sample: held_by_process
    detail:
      description: The reason as a sentence.
      type: str
      sample: process 4711 "llama-server" (user llama, unit llama.service) holds 44000 MiB
    memory_used:
      description: Memory in use in MiB, or null where the driver does not tell. Never 0 for unknown.
      type: int
      sample: 44003
    memory_total:
      description: Memory of the device in MiB, or null where the driver does not tell.
      type: int
      sample: 46068
    memory_basis:
      description:
        - V(used) without the driver's own share, V(used_and_reserved) where that is not told apart,
          V(clients) for the sum of what visible processes hold, where the device does not tell, V(not_available).
      type: str
      sample: used
    holders:
      description: Who holds the device, by either source.
      type: list
      elements: dict
      contains:
        pid:
          description: Process id, as this host sees it.
          type: int
          sample: 4711
        create_time:
          description: When the process began, in seconds of the epoch. Null, as all that follows from the process
            table, for a process that is not visible here, such as one of another PID namespace.
          type: float
          sample: 1764439200.25
        name:
          description: Name of the process as the kernel keeps it, at most 15 bytes, unprintable ones escaped.
          type: str
          sample: llama-server
        user:
          description: Account of the process.
          type: str
          sample: llama
        unit:
          description: Systemd unit whose cgroup the process is in, or null.
          type: str
          sample: llama.service
        container:
          description: Id, for LXC and nspawn the name, of the container whose cgroup the process is in, or null.
          type: str
          sample:
        state:
          description: State letter of the process.
          type: str
          sample: S
        memory:
          description: Memory that the driver says it holds, in MiB, or null. On integrated graphics it is the host's.
          type: int
          sample: 44000
        kind:
          description: V(compute), V(graphics), V(mps), or V(node) for a process that only has the device node open.
          type: str
          sample: compute
        source:
          description:
            - Who says so. V(driver) is the vendor's management library, V(kfd) the compute part of AMD's kernel driver,
              V(fdinfo) the kernel driver's account of an open file, V(node) an open or mapped device node.
          type: list
          elements: str
          sample: [driver, node]
        allowed:
          description: Whether a rule of O(allowed_holders) fits.
          type: bool
          sample: false
        foreign:
          description: Whether the process is not one of O(unit). Always V(false) without O(unit).
          type: bool
          sample: false
    partitions:
      description: The partitions (MIG) of the device, each with the keys of a device. The worst decides for it.
      type: list
      elements: dict
      sample: []
    disagreements:
      description: Sentences on what the sources contradict each other in. They do not decide by themselves.
      type: list
      elements: str
      sample: ["the driver lists process 4711, which has no device node open"]
not_judged:
  description: Devices that were left out, because the host has others and nobody named them.
  type: list
  elements: dict
  returned: unless the options were refused
  contains:
    index:
      description: Index in the vendor's order.
      type: int
      sample: 0
    pci:
      description: PCI address.
      type: str
      sample: "0000:00:02.0"
    vendor:
      description: Vendor of the device.
      type: str
      sample: intel
    name:
      description: Product name, or null.
      type: str
      sample:
gpu_count:
  description: How many devices are known in all, those of RV(not_judged) left out; null when no driver answers.
  type: int
  returned: unless the options were refused
  sample: 4
driver_version:
  description: Version of the driver, the first one where several tell theirs, or null.
  type: str
  returned: unless the options were refused
  sample: 550.127.05
container:
  description: Kind of the container that this host is, such as V(docker), V(lxc) or V(systemd-nspawn), or null.
  type: str
  returned: when devices were looked at
  sample:
sees_all_processes:
  description:
    - Whether the process table of this host is that of the whole machine. In a container with a table of its own a
      device is judged by its memory, and by processes outside only as far as the driver lists them.
  type: bool
  returned: when devices were looked at
  sample: true
stuck_probes:
  description:
    - Pids of our own calls that hang in a driver, or on an open file, and cannot be ended, also of those that had
      answered before.
  type: list
  elements: int
  returned: unless the options were refused
  sample: []
readings:
  description: How many times the devices were looked at.
  type: int
  returned: unless the options were refused
  sample: 3
elapsed:
  description: Seconds that the call took.
  type: float
  returned: unless the options were refused
  sample: 2.045
"""

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _gpu_options
from ansible_collections.gpuops.serving.plugins.module_utils._deadline import Deadline
from ansible_collections.gpuops.serving.plugins.module_utils._gpu import Reading, read, uses_none, wait_clear


def body(ctx: _ansible.Context) -> _ansible.Result:
    options = _gpu_options.of_params(ctx.params)
    if options.gpus == [] and ctx.params.get("definition", {}).get("gpus") == []:
        return uses_none(ctx.params["service"]).as_dict()
    look = read
    if ctx.params["run_id"] and not ctx.check_mode:
        look = _under_lease(ctx.params["service"], ctx.params["run_id"])
    reading = wait_clear(options, Deadline(ctx.params["timeout"]), look)
    for text in reading.warnings:
        ctx.warn(text)
    return reading.as_dict()


def _under_lease(service: t.Optional[str], run_id: str) -> t.Callable[..., Reading]:
    """A look that first sees that the run still has its lease."""
    from ansible_collections.gpuops.serving.plugins.module_utils import _lease

    keep = _lease.keeper(service, run_id)

    def look(wanted: _gpu_options.Options, limit: t.Optional[float]) -> Reading:
        keep()
        return read(wanted, limit)

    return look


def main() -> None:
    _ansible.run_module(
        {
            **_ansible.service_spec(),
            **_ansible.mutating_spec(),
            "gpus": {"type": "list", "elements": "str"},
            "vendor": {"type": "str", "choices": ["auto", "nvidia", "amd", "intel"], "default": "auto"},
            "expected_gpus": {"type": "int"},
            "allow_no_gpu": {"type": "bool", "default": False},
            "memory_tolerance": {"type": "int"},
            "allowed_holders": {
                "type": "list",
                "elements": "dict",
                "options": {"name": {"type": "str"}, "user": {"type": "str"}, "unit": {"type": "str"}},
            },
            "unit": {"type": "str"},
            "timeout": {"type": "float", "default": 0},
            "interval": {"type": "float", "default": 1},
            "confirmations": {"type": "int", "default": 2},
            "report_only": {"type": "bool", "default": False},
        },
        body,
        fill={"gpus": "gpus"},
    )


if __name__ == "__main__":
    main()
