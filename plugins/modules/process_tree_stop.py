#!/usr/bin/python
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: process_tree_stop
short_description: Stop every process that a service owns, and prove it
version_added: 1.0.0
description:
  - Ends all processes of a service, not only those that its front process knows of, and answers V(stopped) only when
    repeated looks at the process table show none of them any more.
  - A process belongs to the service when it is in the unit's control group or one nested in it, when it descends from
    an owned process, when it is in a session or process group whose leader is or was owned, when it carries the
    service's ownership mark (a supplementary group), or when it shares a mount namespace, which is not the host's, with
    an owned process.
  - A unit is stopped through systemd, so that C(Restart=) does not start it again meanwhile. What outlives that,
    because of C(KillMode=process) or because it moved to another control group, is ended afterwards.
  - Process 1, kernel threads, the processes that the task itself runs in, and any process whose creation time is not
    the one that was seen first are never signalled.
author:
  - gpuops.serving contributors (@gpuops)
extends_documentation_fragment:
  - gpuops.serving._attributes
  - gpuops.serving._service
  - gpuops.serving._service.mutating
options:
  unit:
    description:
      - The systemd unit to stop, a C(.service) or a C(.scope). A bare name is a service.
      - A unit that the task itself runs in or below, such as that of the SSH server, is refused, and so are login
        sessions, user managers, C(init.scope) and C(systemd-*.service).
      - May be given together with O(service), and then takes the place of the unit in its definition.
    type: str
  pid:
    description: The process to stop, with all that it owns.
    type: int
  create_time:
    description:
      - With O(pid) or O(pidfile), when the process was created, in seconds since the epoch as this module and
        M(gpuops.serving.gpu_clear) return it. A process that differs by more than a second is another one, and refused.
    type: float
  pidfile:
    description:
      - Regular file that holds the process id. A process younger than the file has been given the number of another
        one, and is refused. So is one whose user the file does not belong to, unless it is root's, and a file that
        others may write to.
    type: path
  pattern:
    description:
      - Regular expression, looked for in the names and command lines of the processes of O(user). All that match are
        stopped, with all that they own.
      - A pattern that fits a process in the control group of a system service is refused, with the name of the unit.
        So is one that fits an empty text, or takes more than 2 seconds.
    type: str
  user:
    description:
      - With O(pattern), the user whose processes are meant. Required there.
      - With O(pid) or O(pidfile), the user whom the process must belong to; else it is refused.
    type: str
  signal:
    description:
      - The signal that asks a process to end. A stopped process also gets C(CONT), so that it can.
      - Does not change what systemd sends to its unit, which is C(KillSignal=).
    type: str
    choices: [TERM, INT, QUIT, HUP]
    default: TERM
  grace:
    description:
      - How long to wait in seconds after asking, first for the unit or the front process, and then again for the rest.
      - The default is the unit's own stop timeout and 5 seconds more for a unit (90 seconds if it has none),
        30 seconds for a front process, and 15 seconds for the rest.
    type: float
  kill_grace:
    description: How long to wait in seconds for processes to be gone after C(SIGKILL).
    type: float
    default: 10
  timeout:
    description:
      - Hard limit for all of it in seconds, from the first look on. A short limit shortens the waits. Of it at most a
        third is kept free for C(SIGKILL), and at most another third for the rest after the front process.
      - Each request to systemd has what is left of it, at most 10 seconds. When the time is over, systemd still has one
        second for the answer that the verdict needs.
      - The default is the sum of both waits, O(kill_grace) and 5 seconds.
    type: float
  order:
    description:
      - V(parent_first) asks the front process, waits for it to wind up its workers, and only then asks those left.
      - V(all) asks all at once.
      - A unit is always asked through systemd, where C(KillMode=) decides.
    type: str
    choices: [parent_first, all]
    default: parent_first
  protected:
    description:
      - Names of processes that are never signalled and do not count as left over.
      - When systemd would end such a process with its unit, the whole call is refused.
    type: list
    elements: str
    default: []
  allow_foreign_users:
    description:
      - Also end processes of users whom nothing else of the service runs as, where only a shared session, process
        group or mount namespace speaks for them. Otherwise they are named and left alone, and the verdict is
        V(survivors).
      - With such weak evidence a process in another unit, in a login session or in a container that nothing else of
        the service runs in is always left alone and named.
    type: bool
    default: false
  reset_failed:
    description: When all is stopped and the unit is in a failed state, reset that state and its start counter.
    type: bool
    default: false
notes:
  - Run it as root. An ordinary user cannot signal the processes of others, nor see all of what marks them.
  - Processes that another unit started on the service's behalf, such as the containers of a container daemon, belong
    to that unit and are not found here, unless they carry the mark.
seealso:
  - module: gpuops.serving.gpu_clear
  - module: gpuops.serving.service_start
"""

EXAMPLES = r"""
- name: Stop a service as its definition on the host describes it
  gpuops.serving.process_tree_stop:
    service: qwen

- name: Stop a hand-written unit whose workers outlive it
  gpuops.serving.process_tree_stop:
    unit: sglang.service
    grace: 120

- name: See what would be stopped
  gpuops.serving.process_tree_stop:
    unit: sglang.service
  check_mode: true
  register: plan

- name: Stop a server that was started by hand
  gpuops.serving.process_tree_stop:
    pattern: 'vllm\.entrypoints|VLLM::'
    user: inference
"""

RETURN = r"""
verdict:
  description:
    - V(absent) when there was nothing to stop, V(stopped), V(survivors) when owned processes are left,
      V(unkillable) when some of them outlived C(SIGKILL), or V(refused) when nothing was done, with the reason in
      RV(msg).
    - In check mode V(stopped) means that there is something to stop.
  type: str
  returned: always
  sample: stopped
ok:
  description: Whether no process of the service is left.
  type: bool
  returned: always
msg:
  description: The verdict in one sentence.
  type: str
  returned: always
  sample: "the unit \"sglang.service\" is stopped: 7 processes ended, none is left"
processes:
  description: Every process that was found to be owned.
  type: list
  elements: dict
  returned: when the call was not refused before the first look
  contains:
    pid:
      description: Process id.
      type: int
    create_time:
      description: When it was created, in seconds since the epoch.
      type: float
    ppid:
      description: Process id of its parent.
      type: int
    name:
      description: Its name, with unprintable bytes escaped.
      type: str
    user:
      description: The user that it runs as.
      type: str
    state:
      description: Its state when it was last seen, as in C(/proc/PID/stat).
      type: str
    found_by:
      description:
        - What makes it owned, or made it so when it was first seen. One or more of V(main_pid), V(control_pid),
          V(pid), V(gpu_holder), V(cgroup), V(container), V(mark), V(descendant), V(session), V(process_group),
          V(mount_namespace), V(title).
      type: list
      elements: str
    role:
      description:
        - V(main) and V(control) are the unit's, V(member) is an ordinary one, V(escaped) is outside the unit's control
          group, V(root) is the front process of a tree without a unit.
      type: str
    signals:
      description:
        - What it was sent, in order; V(systemd) stands for the unit's own stop. In check mode the first of them.
      type: list
      elements: str
    outcome:
      description:
        - V(ended) after a signal, V(gone) without one, V(survived), V(unkillable), V(denied) by the kernel, or left
          alone as V(foreign) or V(protected). V(planned) in check mode.
      type: str
    seconds:
      description: From the first signal to its end.
      type: float
survivors:
  description: Those of RV(processes) that are left against the caller's will.
  type: list
  elements: dict
  returned: when the call was not refused before the first look
  contains:
    wchan:
      description: Where in the kernel it waits, where that is known. The other keys are those of RV(processes).
      type: str
zombies:
  description: Owned processes that are dead, with the parent that has not collected them. They hold nothing.
  type: list
  elements: dict
  returned: when the call was not refused before the first look
  contains:
    pid:
      description: Process id.
      type: int
    name:
      description: Its name.
      type: str
    parent:
      description: Process id of its parent.
      type: int
    parent_name:
      description: Name of its parent.
      type: str
unit_state:
  description: What systemd says of the unit at the end, V(null) without a unit.
  type: dict
  returned: when the call was not refused before the first look
  contains:
    name:
      description: Full name of the unit.
      type: str
    load_state:
      description: C(LoadState) of the unit, V(not-found) when there is none.
      type: str
    active_state:
      description: C(ActiveState) of the unit.
      type: str
    sub_state:
      description: C(SubState) of the unit.
      type: str
    result:
      description: C(Result) of its last run.
      type: str
    main_pid:
      description: Its main process, 0 without one.
      type: int
    n_restarts:
      description: How often systemd restarted it by itself.
      type: int
    invocation_id:
      description: Identifier of its last run.
      type: str
    control_group:
      description: Its control group, empty without one.
      type: str
    kill_mode:
      description: Its C(KillMode).
      type: str
    restart:
      description: Its C(Restart).
      type: str
    unit_file_state:
      description: Whether it is enabled, masked and so on.
      type: str
    stops_with:
      description:
        - The units that systemd stops together with it, since they require it, are bound to it or part of it. Starting
          it does not start them again.
      type: list
      elements: str
    changed_since_start:
      description:
        - Whether its file, a drop-in or its environment file was written after its main process was started, so that a
          restart changes what it runs.
      type: bool
    need_reload:
      description: Whether its file has changed since systemd read it.
      type: bool
elapsed:
  description: Duration in seconds.
  type: float
  returned: when the call was not refused before the first look
"""

import typing as t

from ansible_collections.gpuops.serving.plugins.module_utils import _ansible, _lease, _stopping


def stop(context: _ansible.Context) -> t.Dict[str, t.Any]:
    params = context.params
    keep = _lease.keeper(params["service"], None if context.check_mode else params["run_id"])
    return _stopping.stop(params, context.check_mode, keep, context.warn)


def main() -> None:
    _ansible.run_module(
        dict(
            _ansible.service_spec(),
            **_ansible.mutating_spec(),
            unit={"type": "str"},
            pid={"type": "int"},
            create_time={"type": "float"},
            pidfile={"type": "path"},
            pattern={"type": "str"},
            gpus={"type": "list", "elements": "str"},
            user={"type": "str"},
            allowed_holders={
                "type": "list",
                "elements": "dict",
                "options": {"name": {"type": "str"}, "user": {"type": "str"}, "unit": {"type": "str"}},
            },
            engine={"type": "str"},
            signal={"type": "str", "choices": ["TERM", "INT", "QUIT", "HUP"], "default": "TERM"},
            grace={"type": "float"},
            kill_grace={"type": "float", "default": 10},
            timeout={"type": "float"},
            order={"type": "str", "choices": ["parent_first", "all"], "default": "parent_first"},
            protected={"type": "list", "elements": "str", "default": []},
            allow_foreign_users={"type": "bool", "default": False},
            reset_failed={"type": "bool", "default": False},
        ),
        stop,
        fill=_stopping.FILL,
        mutating=True,
        required_one_of=[("service", "unit", "pid", "pidfile", "pattern", "gpus")],
        mutually_exclusive=[
            ("unit", "pid", "pidfile", "pattern", "gpus"),
            ("service", "pid"),
            ("service", "pidfile"),
            ("service", "pattern"),
            ("service", "gpus"),
        ],
        required_by={"pattern": ("user",)},
    )


if __name__ == "__main__":
    main()
