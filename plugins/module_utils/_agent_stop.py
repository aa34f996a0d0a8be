# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command ``gpuops stop``: the module process_tree_stop with its options and defaults."""

from __future__ import annotations

import argparse
import contextlib
import sys
import typing as t

from . import _agent_answer, _agent_gpu, _foreign, _lease, _service, _stop_text, _stopping

__all__ = ["add", "run"]


def add(commands: t.Any) -> None:
    """Describe the command to the parser."""
    command = commands.add_parser(
        "stop",
        allow_abbrev=False,
        help="stop every process that a service owns, and prove it",
        description="Stop all processes of a service, a unit, a tree or a GPU, and no other. --plan only shows whom.",
    )
    which = command.add_argument_group("what to stop, exactly one of")
    which.add_argument("service", nargs="?", metavar="NAME", help="a service that is defined on this host")
    which.add_argument("--unit", metavar="UNIT", help="a systemd unit, also together with NAME")
    which.add_argument("--pid", metavar="PID", type=int, help="a process with all that it owns")
    which.add_argument("--pidfile", metavar="FILE", help="the process whose number the file holds")
    which.add_argument("--pattern", metavar="RE", help="processes of --user by name or command line")
    which.add_argument(
        "--gpus", metavar="GPU,...", type=_agent_gpu.listed, help="the holders of these: index, UUID, PCI address, all"
    )
    more = command.add_argument_group("more about that")
    more.add_argument("--create-time", metavar="S", type=float, help="of --pid or --pidfile, in seconds of the epoch")
    more.add_argument("--user", metavar="USER", help="whose processes are meant by --pattern, --gpus, --pid, --pidfile")
    more.add_argument(
        "--allowed-holder",
        metavar="KEY=VALUE,...",
        type=_agent_gpu.rule,
        action="append",
        dest="allowed_holders",
        help="who may go on to hold --gpus, by name, user and unit; repeat it; replaces the default list",
    )
    more.add_argument("--engine", metavar="ENGINE", help="whose names the processes of a unit bear")
    how = command.add_argument_group("how to stop it")
    how.add_argument("--plan", "--check", action="store_true", help="show who would be stopped, and touch nothing")
    how.add_argument(
        "--signal", choices=["TERM", "INT", "QUIT", "HUP"], default="TERM", help="what asks to end (default: TERM)"
    )
    how.add_argument(
        "--grace", metavar="S", type=float, help="to wait after asking (default: the unit's own, or 30; the rest 15)"
    )
    how.add_argument("--kill-grace", metavar="S", type=float, default=10.0, help="to wait after KILL (default: 10)")
    how.add_argument("--timeout", metavar="S", type=float, help="for all of it (default: the waits and 5)")
    how.add_argument(
        "--order",
        choices=["parent_first", "all"],
        default="parent_first",
        help="the front process first, or all at once (default: parent_first)",
    )
    how.add_argument(
        "--protected", metavar="NAME", action="append", default=[], help="a process name to leave alone; repeat it"
    )
    how.add_argument("--allow-foreign-users", action="store_true", help="also those whom only weak evidence speaks for")
    how.add_argument("--reset-failed", action="store_true", help="reset a failed unit and its start counter")
    command.add_argument("--json", action="store_true", help="print the whole result as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    def work(warn: t.Callable[[str], None]) -> t.Dict[str, t.Any]:
        return _stop(_service.fill({**vars(arguments)}, _stopping.FILL), warn)

    def lines(result: t.Mapping[str, t.Any]) -> t.Iterable[str]:
        return _stop_text.lines(result, arguments.plan)

    return _agent_answer.tell(work, arguments.json, lines, lambda result: _word(result, arguments.plan))


def _stop(params: t.Dict[str, t.Any], warn: t.Callable[[str], None]) -> t.Dict[str, t.Any]:
    if params["plan"]:
        return _stopping.stop(params, True, warn=warn)
    # A unit that is named alone is under the lease of its service all the same.
    service = params["service"] or _service.of_unit(params["unit"] or "")
    with _lease.operation(service, None):
        return _stopping.stop(params, False, warn=warn, watch=_Progress())


def _word(result: t.Mapping[str, t.Any], plan: bool) -> str:
    return "plan" if plan and result["verdict"] == "stopped" else str(result["verdict"])


class _Progress:
    """One line for each change, where a person is looking."""

    def __init__(self) -> None:
        self._last = ""
        self._shown = sys.stderr.isatty()

    def __call__(self, survey: t.Any) -> None:
        if not self._shown or not survey.members:
            return
        text = _stop_text.progress(survey.ours())
        if text != self._last:
            self._last = text
            with contextlib.suppress(OSError):  # a terminal that is gone must not break off a stop
                print(_foreign.seen("gpuops: %s" % text), file=sys.stderr, flush=True)
