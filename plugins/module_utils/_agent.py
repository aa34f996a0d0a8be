# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command line of the host agent: the same checks as the modules, for systemd units and for people."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import typing as t

from . import _agent_gpu, _agent_stop, _agent_wait, _foreign, _service, _site, _verdicts
from ._errors import ServingError, UsageError

# The agent lies in HOME/lib/gpuops.
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def version(options: argparse.Namespace) -> int:
    """What is installed here, and which interpreter it runs in."""
    del options
    found = {
        "agent": _stamp()[:16] or "unknown",
        "python": platform.python_version(),
        "missing": _site.missing(("psutil", "pynvml", "requests", "tqdm")),
        "services": _service.names(),
    }
    print(json.dumps(found))
    return 1 if found["missing"] else 0


def _stamp() -> str:
    try:
        with open(os.path.join(HOME, ".stamp"), encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuops",
        description="Checks of GPU inference services on this host.",
        epilog="Exit status: 0 good, 1 bad, 2 unknown or an error, %d wrong use." % _verdicts.USAGE_EXIT_CODE,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser("version", help="say what is installed here, as JSON")
    command.set_defaults(run=version)
    _agent_gpu.add(commands)
    _agent_stop.add(commands)
    _agent_wait.add(commands)
    return parser


def main(argv: t.Optional[t.Sequence[str]] = None) -> int:
    if sys.stdout is None:  # closed by the caller: what is not told must not be done either
        return _fail("the answer cannot be written: the standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of processes and units may be any bytes
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return _verdicts.USAGE_EXIT_CODE if stop.code else 0
    # Whatever fails to be written is then no failure of the work, nor the other way round.
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        code = _work(options)
    try:
        sys.stdout.write(answer.getvalue())
        sys.stdout.flush()
    except OSError as error:  # nobody reads the answer, or it cannot be written: then it is none
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _fail("the answer cannot be written: %s" % error.strerror)
    return code


def _work(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _fail("this host refused what the work needs: %s" % error)
    except UsageError as error:
        return _fail(error.message, _verdicts.USAGE_EXIT_CODE)
    except ServingError as error:
        return _fail(error.message)


def _fail(message: str, code: int = 2) -> int:
    if sys.stderr is not None:  # print would take the standard output instead
        with contextlib.suppress(OSError):
            print(_foreign.seen("gpuops: %s" % message), file=sys.stderr)
    return code
