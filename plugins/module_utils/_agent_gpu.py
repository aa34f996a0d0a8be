# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command ``gpuops gpu-clear``: the module gpu_clear with its options and defaults."""

from __future__ import annotations

import argparse
import json
import sys
import typing as t

from . import _foreign, _gpu, _gpu_options, _gpu_text, _service, _verdicts
from ._deadline import Deadline
from ._errors import UsageError

__all__ = ["add", "listed", "rule", "run"]

DEFAULTS = _gpu_options.Options()


def add(commands: t.Any) -> None:
    """Describe the command to the parser."""
    command = commands.add_parser(
        "gpu-clear", allow_abbrev=False, help="say whether GPUs are free, and who holds them if not"
    )
    command.add_argument("--service", metavar="NAME", help="judge the GPUs of this service (default: all GPUs)")
    command.add_argument("--gpus", metavar="GPU,...", type=listed, help="judge these: index, UUID or PCI address")
    command.add_argument(
        "--vendor", choices=["auto", *_gpu_options.VENDORS], default="auto", help="whose GPUs (default: those here)"
    )
    command.add_argument("--expected-gpus", metavar="N", type=int, help="fail where fewer are known")
    command.add_argument("--allow-no-gpu", action="store_true", help="a host without GPU and driver is clear")
    command.add_argument(
        "--memory-tolerance", metavar="MIB", type=int, help="what an idle GPU may use (64, for AMD and Intel 512)"
    )
    command.add_argument(
        "--allowed-holder",
        metavar="KEY=VALUE,...",
        type=rule,
        action="append",
        dest="allowed_holders",
        help="a process that may hold a GPU, by name, user and unit; repeat it; replaces the default list",
    )
    command.add_argument("--unit", metavar="UNIT", help="judge only what the processes of this unit hold")
    command.add_argument(
        "--timeout", metavar="S", type=float, default=0.0, help="wait so long for them to become clear (default: 0)"
    )
    command.add_argument(
        "--interval", metavar="S", type=float, default=DEFAULTS.interval, help="between two looks (default: 1)"
    )
    command.add_argument(
        "--confirmations",
        metavar="N",
        type=int,
        default=DEFAULTS.confirmations,
        help="clear looks in a row that are needed when waiting (default: 2)",
    )
    command.add_argument("--json", action="store_true", help="print the whole result as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        params = _service.fill({**vars(arguments)}, {"gpus": "gpus"})
        options = _gpu_options.of_params(params)
    except UsageError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "verdict": "error", "msg": error.message}))
        raise
    if params["gpus"] == []:
        reading = _gpu.uses_none(arguments.service)
    else:
        reading = _gpu.wait_clear(options, Deadline(arguments.timeout))
    if arguments.json:
        print(json.dumps({**reading.as_dict(), "ok": reading.verdict == "clear", "warnings": reading.warnings}))
    else:
        for line in _gpu_text.lines(reading.devices):
            print(_foreign.seen(line))
        print(_foreign.seen("%s: %s" % (reading.verdict, reading.message)))
        for text in reading.warnings:
            print(_foreign.seen("gpuops: warning: %s" % text), file=sys.stderr)
    return _verdicts.lookup(reading.verdict).exit_code


def listed(text: str) -> t.List[str]:
    """Names with commas between them."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError("no GPU is named")
    return found


def rule(text: str) -> t.Dict[str, str]:
    """A rule of who may hold a device, from a word of the command line."""
    found: t.Dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in _gpu_options.RULE_KEYS or not equals or not value:
            raise argparse.ArgumentTypeError(
                '"%s" is no rule: give %s, each as KEY=VALUE' % (text, ", ".join(_gpu_options.RULE_KEYS))
            )
        found[key] = value
    return found
