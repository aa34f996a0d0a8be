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
  - A process belongs to the service when it is in the unit's control group or one nested in it, or in a container that
    the unit runs the client of; when it descends from an owned process; when it is in a session or process group whose
    leader is or was owned; when it carries the service's ownership mark (a supplementary group); when it shares a mount
    namespace, which is not the host's, with an owned process; or when it is an orphan that bears a name of the
    service's engine, and nobody else can be meant. The word of each is in RV(processes[].found_by), and the page
    C(docs/what-counts-as-owned.md) of the collection has the rules.
  - A unit is stopped through systemd, so that C(Restart=) does not start it again meanwhile, and a container through
    its manager. What outlives that, because of C(KillMode=process) or because it moved to another control group, is
    ended afterwards.
  - Process 1, kernel threads, the processes that the task itself runs in, and any process whose creation time is not
    the one that was seen first are never signalled. A call that names one of them, or the SSH server, is refused.
  - The call ends within its O(timeout), whatever the processes do.
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
      - Refused are a unit that the task itself runs in or below, login sessions, user managers, C(init.scope),
        C(systemd-*.service) but for C(systemd-nspawn@) and C(systemd-vmspawn@), and the units of the SSH server and of
        D-Bus.
      - May be given together with O(service), and then takes the place of the unit in its definition.
    type: str
  pid:
    description:
      - The process to stop, with all that it owns.
      - One of the units that O(unit) refuses is refused as well. For one of another system service there is a warning,
        since that may start it again.
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
        So is one that fits the SSH server or an empty text, or takes more than 2 seconds.
      - It is looked for again at each look. A process that takes on another name during the stop, or another program in
        its first 5 seconds, is stopped as well when it fits then.
    type: str
  gpus:
    description:
      - The devices whose holders are to be ended, with all that they own, as people do with
        C(fuser -k /dev/nvidia*). Each is an index, a UUID or a PCI address as for M(gpuops.serving.gpu_clear). V(all)
        alone means all devices. Look with check mode first.
      - Needs O(user) or O(allow_foreign_users=true), since anybody may hold a device.
      - A holder is what makes M(gpuops.serving.gpu_clear) call the device busy. A process that only has a device node
        open is one in two cases alone. One is that the device has had memory in use for 5 seconds which no listed
        process explains. The other is that the device does not tell its memory. In any other case such a process is
        named in a warning and left alone.
      - "Nothing at all is signalled when one of these is so:"
      - B(user) - a holder is of another user.
      - B(unit) - a holder is in a system service that is not at rest. Stop the unit.
      - B(container) - a holder is in a container. Stop the container.
      - B(untouchable) - a holder is one that is never signalled, as the description of this module lists them.
      - B(unknown) - a holder cannot be told by its number and creation time.
      - B(incomplete) - a device gives no complete answer.
      - What a unit that is at rest has left behind may be ended, unless a run has a fresh lease of its service.
      - The parents of holders are not ended. One that lives may start its child again, and is named in a warning.
      - A holder that comes later is ended as well if it is one that may be, else it is left alone and the verdict is
        V(survivors).
      - V(stopped) says that no holder is left, not that the device is clear. That is for M(gpuops.serving.gpu_clear).
    type: list
    elements: str
  user:
    description:
      - With O(pattern) or O(gpus), the user whose processes are meant. Required there, but for O(gpus) with
        O(allow_foreign_users=true). A number where no account bears it.
      - With O(pid) or O(pidfile), the user whom the process must belong to; else it is refused.
      - An error with anything else.
    type: str
  allowed_holders:
    description:
      - With O(gpus), processes that may go on to hold a device. They are shown with the outcome V(allowed) and never
        signalled.
      - A rule fits when everything that it gives is equal. The list replaces the default, which is that of
        M(gpuops.serving.gpu_clear), up to 512 MiB for each process.
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
  engine:
    description:
      - With O(unit) or O(service), the profile of the engine, V(vllm) or V(sglang) or another one that the library
        knows. An orphan that bears one of its names counts as the service's under strict rules; see the page
        C(docs/what-counts-as-owned.md). Others that bear one are RV(suspects).
      - Default is the engine in the definition of the service, else none, so that no name counts.
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
        30 seconds for a front process, and at most 15 seconds for the rest.
    type: float
  kill_grace:
    description: How long to wait in seconds for processes to be gone after C(SIGKILL).
    type: float
    default: 10
  timeout:
    description:
      - Hard limit for all of it in seconds, from the first look on. A short limit shortens the waits. Of it at most a
        third is kept free for C(SIGKILL), and at most another third for the rest after the front process.
      - Each request to systemd has what is left of it, at most 10 seconds.
      - What is added to it. When the time is over, systemd still has one second for the answer that the verdict needs.
        A reading of O(gpus) that is due then has one second, and systemd one more for the units of new holders. For the
        warnings after the end of a unit, systemd has one second in all.
      - Before the call begins it waits, for up to 30 seconds, until nobody else is changing the service. That is not
        part of it.
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
      - Names of processes that are never signalled and do not count as left over. The first 15 bytes count, because
        the kernel keeps no more.
      - The whole call is refused when such a process would be ended all the same, by systemd with its unit, or by the
        manager of the container that it is in. With C(KillMode=process) that is so for the unit's main process and the
        one that C(ExecStop=) and the like run.
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
      - With O(gpus), the holders of every user are meant. It then excludes O(user).
    type: bool
    default: false
  reset_failed:
    description: When all is stopped and the unit is in a failed state, reset that state and its start counter.
    type: bool
    default: false
notes:
  - Run it as root. An ordinary user cannot signal the processes of others, nor see all of what marks them.
  - "What is done for each state of a unit. Active or reloading: it is stopped through systemd. Activating: the stop
    takes the place of the start. Between two lives of C(Restart=): it is stopped, so that the next does not begin.
    Deactivating, because somebody else asked for it: that stop is waited for, and not asked for again. Inactive,
    masked, or failed, also by its start limit: what is left of it is ended, and systemd is not asked; a failed state
    stays unless O(reset_failed) is set. A masked unit that still runs is stopped like any other. Not found: what
    carries its mark is ended, else the verdict is V(absent)."
  - "A unit that somebody starts again while it is being stopped is asked for at most three times. Then the verdict is
    V(survivors), and what runs by then is not signalled."
  - On the host itself the command C(gpuops stop) does the same, with the same options, and C(--plan) for check mode.
  - Processes that another unit started on the service's behalf belong to that unit and are not found here, unless they
    carry the mark or are in a container of the service.
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
    engine: sglang
    grace: 120

- name: See what would be stopped, in which order and with which signal
  gpuops.serving.process_tree_stop:
    unit: sglang.service
  check_mode: true
  register: plan

- name: Stop a server that was started by hand
  gpuops.serving.process_tree_stop:
    pattern: 'vllm\.entrypoints|VLLM::'
    user: inference

- name: Stop the very process that gpu_clear has named
  gpuops.serving.process_tree_stop:
    pid: 4711
    create_time: 1795986558.41

- name: See who holds two GPUs and would be ended
  gpuops.serving.process_tree_stop:
    gpus: ["0", "1"]
    user: inference
  check_mode: true
  register: holders

- name: End them, and leave a desktop alone
  gpuops.serving.process_tree_stop:
    gpus: ["0", "1"]
    user: inference
    allowed_holders:
      - name: Xorg
      - name: gnome-shell
        user: gdm

- name: End whatever holds any GPU, whoever started it
  gpuops.serving.process_tree_stop:
    gpus: [all]
    allow_foreign_users: true
"""

RETURN = r"""
verdict:
  description:
    - V(absent) when there was nothing to stop, V(stopped), V(survivors) when owned processes are left,
      V(unkillable) when some of them outlived C(SIGKILL), or V(refused) when nothing was signalled, with the reason in
      RV(msg). V(error) when the options make no sense, or when it is not known at the end who holds O(gpus).
    - In check mode V(stopped) means that there is something to stop, and V(survivors) that some of it would be left.
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
plan:
  description:
    - What is done, in this order, as the first look shows it. Each step is only for those that are left by then.
    - In check mode nothing of it is done.
  type: list
  elements: dict
  returned: when the call was not refused before the first look
  contains:
    step:
      description: Its number, from 1.
      type: int
    action:
      description:
        - V(systemd_stop) when systemd is asked to stop the unit, V(container_stop) when the manager of a container is
          asked to stop that, V(signal) when the processes are signalled.
      type: str
    signal:
      description: The signal, such as V(TERM) or V(KILL). V(null) where systemd or a manager is asked.
      type: str
    target:
      description: The unit or the container that is asked for, V(null) for signals.
      type: str
    manager:
      description: Who is asked, V(systemd) or the manager of the container, such as V(docker). V(null) for signals.
      type: str
    wait:
      description: How long the step is waited for at most, in seconds.
      type: float
    processes:
      description: Whom it is for.
      type: list
      elements: dict
      contains:
        pid:
          description: Process id.
          type: int
        name:
          description: Its name.
          type: str
        found_by:
          description: As in RV(processes[].found_by).
          type: list
          elements: str
processes:
  description: Every process that was found to be owned, at most 1000 of them.
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
    command:
      description:
        - How its command line begins, as the first look shows it. At most four words, and none from one on that may
          hold a key. Empty where it was not read.
      type: str
    user:
      description: The user that it runs as.
      type: str
    state:
      description: Its state when it was last seen, as in C(/proc/PID/stat).
      type: str
    found_by:
      description:
        - What makes it owned, or made it so when it was first seen. One or more of V(main_pid) and V(control_pid) of
          the unit, V(pid) that was named, V(gpu_holder), V(cgroup), V(container), V(mark), V(descendant), V(session),
          V(process_group), V(mount_namespace), V(title) of the engine.
      type: list
      elements: str
    role:
      description:
        - V(main) and V(control) are the unit's, V(member) is an ordinary one, V(escaped) is outside the unit's control
          group, V(root) is the front process of a tree without a unit.
      type: str
    signals:
      description:
        - What it was sent, in order; V(systemd) stands for the unit's own stop, and the name of a manager, such as
          V(docker), for that of a container. In check mode the first of them.
      type: list
      elements: str
    outcome:
      description:
        - V(ended) after a signal, V(gone) without one, V(survived), V(unkillable), V(denied) by the kernel, or left
          alone as V(foreign), V(protected) or V(allowed). V(planned) in check mode.
      type: str
    seconds:
      description: From the first signal to its end.
      type: float
unlisted:
  description: How many more there were than RV(processes) shows.
  type: int
  returned: when the call was not refused before the first look
  sample: 0
survivors:
  description: Those of RV(processes) that are left against the caller's will.
  type: list
  elements: dict
  returned: when the call was not refused before the first look
  contains:
    why:
      description: Why it was left alone, empty for all but V(foreign) ones.
      type: str
    wchan:
      description: Where in the kernel it waits, where that is known. The other keys are those of RV(processes).
      type: str
    stack:
      description:
        - Where in the kernel it is, innermost first, for one that is stuck there. Empty for others, and where that may
          not be read, or not in time.
      type: list
      elements: str
suspects:
  description:
    - Processes that are not owned and were never signalled, but look as if they might be. They bear a name of the
      service's engine, and have lost their parent. They do not change the verdict. Look at each.
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
    name:
      description: Its name.
      type: str
    user:
      description: The user that it runs as.
      type: str
    unit:
      description: The unit that it runs in, V(null) without one.
      type: str
    why:
      description: What speaks for it, and what is missing.
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
marks:
  description:
    - The groups that mark the unit's processes, from the definition of its service and from the unit itself, which may
      give any group named C(gpuops-) and more in C(SupplementaryGroups=). Empty without a unit, and when it has none. A
      warning says so when the unit gives none.
  type: list
  elements: str
  returned: when the call was not refused before the first look
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
    triggered_by:
      description: The sockets, timers and paths that start it. A warning names those that are active.
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
