# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The rules by which units are judged, as data; the page docs/unit-audit.md is written from them."""

from __future__ import annotations

import typing as t

__all__ = ("RULES", "SEVERITIES", "Rule")

# The worst one first.
SEVERITIES = ("critical", "warning", "notice")


class Rule(t.NamedTuple):
    """One way in which a unit is wrong."""

    id: str
    # A unit may be better or worse off than this; the finding has its own severity.
    severity: str
    directive: str
    # When it is found, and what looks like it and is not.
    when: str
    why: str
    cure: str
    # The directives that the drop-in sets, none where no drop-in can cure it. All are known to systemd 247.
    sets: t.Tuple[str, ...] = ()
    # How the claim is known.
    known: str = "tried on systemd 247, 252 and 257"


_LIMIT = "an interval that holds as many lives as the burst allows: each a load, a stop and the delay before the next"
_ALL = (
    Rule(
        "kill_mode",
        "critical",
        "KillMode",
        "`process` or `none`; `mixed` and `control-group` are right",
        "a stop ends the main process at most, and the workers of the engine live on with the memory of the GPU",
        "KillMode=mixed: the main process gets the signal and drains, and what is left when it has ended is killed",
        ("KillMode",),
    ),
    Rule(
        "send_sigkill",
        "critical",
        "SendSIGKILL",
        "`no`",
        "a process that ignores the signal outlives the stop, and the next start fails, or comes up beside it",
        "SendSIGKILL=yes",
        ("SendSIGKILL",),
    ),
    Rule(
        "login_session",
        "critical",
        "ExecStart",
        "`su`, `runuser -l`, `sudo -i`, where PAM has pam_systemd. `runuser -u` and `sudo -u` open no session",
        "it opens a login session, and the engine runs in its scope: outside the unit, out of reach of the unit's stop",
        "User= in place of the command",
    ),
    Rule(
        "timeout_start",
        "critical",
        "TimeoutStartSec",
        "below the time of a load, where the start is over only after it: `Type=notify`, or an `ExecStartPost=` that "
        "waits. Not where podman's conmon or a script tells systemd that it is ready",
        "systemd kills the engine in the middle of each load, for ever",
        "TimeoutStartSec= of twice the time of a load; or Type=exec, where the engine does not tell systemd itself",
        ("TimeoutStartSec",),
    ),
    Rule(
        "not_loadable",
        "critical",
        "",
        "systemd cannot load the unit",
        "systemd does not start a unit that it cannot read",
        "`systemd-analyze verify` of the unit says what is wrong",
    ),
    Rule(
        "start_limit_off",
        "warning",
        "StartLimitIntervalSec",
        "the interval or the burst is 0, and Restart= begins anew after a failure",
        "an engine that cannot start is started for ever, each time into what the last life left on the GPU",
        _LIMIT,
        ("StartLimitIntervalSec", "StartLimitBurst"),
    ),
    Rule(
        "start_limit_never",
        "warning",
        "StartLimitIntervalSec",
        "RestartSec= times the burst reaches the interval, growing delays (RestartSteps=) counted as they grow",
        "the interval is over before the burst is used up: the limit never trips, a broken engine is started for ever",
        _LIMIT,
        ("StartLimitIntervalSec", "StartLimitBurst"),
    ),
    Rule(
        "start_limit_load",
        "warning",
        "StartLimitIntervalSec",
        "the interval is shorter than as many loads and delays as the burst allows, as the default of 5 starts in 10 s "
        "is. Not for an engine that loads only when it is asked",
        "an engine that dies at the end of its load is started for ever, for the interval is over before it dies again",
        _LIMIT,
        ("StartLimitIntervalSec", "StartLimitBurst"),
    ),
    Rule(
        "timeout_stop",
        "warning",
        "TimeoutStopSec",
        "shorter than the engine needs to end what runs",
        "requests that would have been answered are cut by SIGKILL",
        "TimeoutStopSec= of the time that the engine needs",
        ("TimeoutStopSec",),
    ),
    Rule(
        "timeout_stop_none",
        "warning",
        "TimeoutStopSec",
        "`infinity` or `0`, which is the same",
        "a wedged engine that ignores the signal is waited for without end: stop and restart hang",
        "TimeoutStopSec= of the time that the engine needs",
        ("TimeoutStopSec",),
    ),
    Rule(
        "restart_always",
        "warning",
        "Restart",
        "`always` without a gate. An ExecCondition= or ExecStartPre= that may look at the GPU counts as one; "
        "mkdir, sleep, docker rm and the like do not",
        "nobody looks whether the GPU is clear before the next life: one that left memory in use is followed by one "
        "that finds no room, again and again",
        "Restart=on-failure, with a start limit; better an ExecStartPre= that waits until the GPU is clear",
        ("Restart",),
        "an incident; the words are those of systemd.service(5)",
    ),
    Rule(
        "forking_pidfile",
        "warning",
        "PIDFile",
        "`Type=forking` without PIDFile=",
        "systemd guesses the main process, and among several it takes none: then nobody notices when one of them dies",
        "run the engine in the foreground with Type=exec, or name the file that it writes in PIDFile=",
    ),
    Rule(
        "container_client",
        "warning",
        "ExecStart",
        "docker, podman, nerdctl, compose or systemd-nspawn. Not `podman run --cgroups=split` (Quadlet), nor nspawn "
        "with `--keep-unit`. A notice where an ExecStopPost= stops or removes the container",
        "the engine is in another control group: SIGKILL of the client leaves the container running, and limits of the "
        "unit do not reach it",
        "an ExecStopPost= that stops the container by its name, also after the client was killed",
        ("ExecStopPost",),
        "tried with docker 20.10 and 26.1, podman 3.0, 4.3 and 5.4, and nspawn of systemd 247, 252 and 257",
    ),
    Rule(
        "shared_gpu",
        "warning",
        "Environment",
        "another unit that runs or is enabled names the same device: by its definition, CUDA_VISIBLE_DEVICES and the "
        "like, `--gpus device=`, or `--base-gpu-id`. One that is stopped and disabled is no rival",
        "whichever starts second finds less memory than it counts on, and neither stop proves the GPU clear",
        "give each unit devices of its own, or disable one of them",
        (),
        "an incident",
    ),
    Rule(
        "shared_port",
        "warning",
        "ExecStart",
        "another unit that runs or is enabled is told the same port and a common address, or listens there now",
        "the second one cannot listen, or its clients talk to the first",
        "give each unit a port of its own, or disable one of them",
        (),
        "an incident",
    ),
    Rule(
        "mark_lost",
        "notice",
        "ExecStart",
        "`su`, `runuser`, `sudo` without `-P`, `setpriv` with `--init-groups`, `--clear-groups` or `--groups`, `gosu`, "
        "`su-exec`, `chroot --userspec` or `--groups`, `start-stop-daemon --chuid`, `capsh --user`. "
        "`setpriv --keep-groups` keeps it. A warning where the unit has a mark to lose",
        "it sets the groups of the process anew, so that the ownership mark is lost: a worker that leaves the unit's "
        "control group is not found",
        "User= in place of the command",
        (),
        "tried on systemd 247, 252 and 257, except gosu and su-exec: their documentation",
    ),
)

RULES: t.Dict[str, Rule] = {rule.id: rule for rule in _ALL}
