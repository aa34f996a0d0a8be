# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the host agent: the same checks as the modules, for systemd units and for people."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import typing as t

from . import _gpu, _service, _site, _verdicts
from ._deadline import Deadline
from ._errors import ServingError, UsageError
from ._gpu_judge import Options

# The agent lies in HOME/lib/gpuops.
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def version(options: argparse.Namespace) -> int:
    """What is installed here, and which interpreter it runs in."""
    del options
    found = {
        "agent": _stamp()[:16] or "unknown",
        "python": platform.python_version(),
        "missing": _site.missing(("psutil", "pynvml", "requests")),
        "services": _service.names(),
    }
    print(json.dumps(found))
    return 1 if found["missing"] else 0


def gpu_clear(options: argparse.Namespace) -> int:
    """Whether GPUs are free, by the rules and defaults of the module of that name."""
    _site.require(("pynvml",))
    params: t.Dict[str, t.Any] = {"service": options.service, "gpus": options.gpus}
    params = _service.fill(params, {"gpus": "gpus"})
    if params["gpus"] == []:
        reading = _gpu.Reading(
            verdict="clear", reason="no_gpu", detail='the service "%s" uses no GPU' % options.service
        )
        return _answer(reading, options.json)
    chosen = Options(gpus=params["gpus"], mark_gid=params.get("definition", {}).get("mark_gid"))
    if options.memory_tolerance is not None:
        chosen.memory_tolerance = options.memory_tolerance
    return _answer(_gpu.wait_clear(chosen, Deadline(options.timeout)), options.json)


def _answer(reading: _gpu.Reading, as_json: bool) -> int:
    if as_json:
        print(json.dumps(reading.as_dict()))
    else:
        print("%s: %s" % (reading.verdict, reading.message))
        for text in reading.warnings:
            print("gpuops: %s" % text, file=sys.stderr)
    return _verdicts.lookup(reading.verdict).exit_code


def _stamp() -> str:
    try:
        with open(os.path.join(HOME, ".stamp"), encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def _listed(text: str) -> t.List[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError("no GPU is named")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuops",
        description="Checks of GPU inference services on this host.",
        epilog="Exit status: 0 good, 1 bad, 2 unknown or an error, %d wrong use." % _verdicts.USAGE_EXIT_CODE,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser("version", help="say what is installed here, as JSON")
    command.set_defaults(run=version)
    command = commands.add_parser("gpu-clear", help="say whether GPUs are free, and who holds them if not")
    command.add_argument("--service", metavar="NAME", help="judge the GPUs of this service (default: all GPUs)")
    command.add_argument("--gpus", metavar="GPU,...", type=_listed, help="judge these: index, UUID or PCI address")
    command.add_argument("--memory-tolerance", metavar="MIB", type=int, help="memory in use that an idle GPU may show")
    command.add_argument(
        "--timeout", metavar="S", type=float, default=0.0, help="wait so long for them to become clear"
    )
    command.add_argument("--json", action="store_true", help="print the whole result as JSON")
    command.set_defaults(run=gpu_clear)
    return parser


def main(argv: t.Optional[t.Sequence[str]] = None) -> int:
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return _verdicts.USAGE_EXIT_CODE if stop.code else 0
    try:
        return int(options.run(options))
    except UsageError as error:
        print("gpuops: %s" % error.message, file=sys.stderr)
        return _verdicts.USAGE_EXIT_CODE
    except ServingError as error:
        print("gpuops: %s" % error.message, file=sys.stderr)
        return 2
