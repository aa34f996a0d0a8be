# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The command ``gpuops wait``: the module wait_model_ready with its options and defaults."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
import typing as t

from . import _agent_answer, _agent_gpu, _engines, _service, _wait_text
from ._errors import UsageError
from ._tiers import NOTHING, TIERS

if t.TYPE_CHECKING:
    from ._readiness import Wait

__all__ = ["add", "run"]

HEARTBEAT = 60.0  # seconds after which a line is printed although nothing changed
FASTEST, SLOWER = 1.0, 5.0  # seconds between two lines: for a change, and for one of the percentage alone
REDRAWN = 0.25
ENDS = (signal.SIGTERM, signal.SIGHUP)
BAR = "|{bar:20}| {desc}"
WIDTH, HEIGHT = 100, 24  # of a terminal that does not tell its own
# Options that have another name here than in the module, and where a word that is one names something else.
FLAGS = {"api_key": "--api-key-file", "headers": "--header-file", "validate_certs": "--no-validate-certs"}
OPTION = re.compile(
    '(?<!tier )(?<!service )(?<!model )(?<!unit )"(unit|url|engine|profile|model|gpus|log_path|tier|timeout|ca_path'
    '|stall_timeout|generation_timeout|max_restarts|interval|api_key|headers|validate_certs)"(?! in /)'
)


def add(commands: t.Any) -> None:
    """Describe the command to the parser."""
    command = commands.add_parser(
        "wait",
        allow_abbrev=False,
        help="wait until a model generates, and say why when it does not",
        description="Wait as long as something moves. Name a service of this host, or a unit and a URL.",
    )
    which = command.add_argument_group("what to wait for")
    which.add_argument("service", nargs="?", metavar="NAME", help="a service that is defined on this host")
    which.add_argument("--unit", metavar="UNIT", help="the systemd unit of the engine")
    which.add_argument("--url", metavar="URL", help="the engine itself, such as http://127.0.0.1:8000")
    which.add_argument("--engine", choices=list(_engines.PROFILES), help="its profile (default: openai)")
    which.add_argument("--profile", metavar="JSON", type=_mapping, help="what is different here from that profile")
    which.add_argument("--model", metavar="MODEL", help="the model that must be listed (default: any)")
    which.add_argument(
        "--gpus", metavar="GPU,...", type=_agent_gpu.listed, help="the GPUs of the service: index, UUID, PCI address"
    )
    which.add_argument("--log-path", metavar="FILE", help="where the engine logs, if not to the journal")
    which.add_argument("--tier", choices=list(TIERS), default="generation", help="what to reach (default: generation)")
    how = command.add_argument_group("how long to wait")
    how.add_argument("--timeout", metavar="S", type=float, help="for all of it, whatever moves (default: 1800)")
    how.add_argument("--stall-timeout", metavar="S", type=float, help="while nothing moves (default: 300)")
    how.add_argument(
        "--generation-timeout", metavar="S", type=float, default=60.0, help="for one attempt at a token (default: 60)"
    )
    how.add_argument(
        "--max-restarts", metavar="N", type=int, default=3, help="restarts that make a restart loop (default: 3)"
    )
    how.add_argument("--interval", metavar="S", type=float, default=1.0, help="between two looks (default: 1)")
    access = command.add_argument_group("how to reach the engine")
    access.add_argument("--api-key-file", metavar="FILE", help="a file that holds the API key")
    access.add_argument(
        "--header-file", metavar="FILE", help='a file that holds headers, one "Name: value" a line; for secret ones'
    )
    access.add_argument(
        "--header",
        metavar="NAME=VALUE",
        type=_header,
        action="append",
        dest="headers",
        help="a header that is no secret: all users of the host see it in the process list; repeat it",
    )
    access.add_argument(
        "--no-validate-certs", action="store_false", dest="validate_certs", help="take any TLS certificate"
    )
    access.add_argument("--ca-path", metavar="FILE", help="certificates to verify with instead of the system's")
    command.add_argument("--no-progress", action="store_false", dest="progress", help="show nothing while it lasts")
    command.add_argument("--check", action="store_true", help="look once, and do not wait")
    command.add_argument("--json", action="store_true", help="print the whole result as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with _ended_by_signals():
        return _agent_answer.tell(
            lambda warn: _wait(arguments, warn),
            arguments.json,
            _wait_text.lines,
            sentence=_wait_text.answer,
            nothing=NOTHING,
        )


@contextlib.contextmanager
def _ended_by_signals() -> t.Iterator[None]:
    # Who ignores one wants the wait to go on.
    before = {number: signal.getsignal(number) for number in ENDS}
    usual = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, before[number])


def _end(number: int, _frame: object) -> t.NoReturn:
    """End as the signal would, but not before what was begun is ended: nobody asks for a token any more."""
    for other in ENDS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _wait(arguments: argparse.Namespace, warn: t.Callable[[str], None]) -> t.Dict[str, t.Any]:
    try:
        result = _asked(arguments, warn)
    except UsageError as error:
        raise UsageError(_spoken(error.message), **error.result) from None
    reason, then, remedy = str(result["msg"]).rpartition(_wait_text.NEXT)
    return {**result, "msg": reason + then + _spoken(remedy)} if then else result


def _spoken(text: str) -> str:
    """The same, with the options as they are called here."""
    return OPTION.sub(lambda found: FLAGS.get(found.group(1), "--" + found.group(1).replace("_", "-")), text)


def _asked(arguments: argparse.Namespace, warn: t.Callable[[str], None]) -> t.Dict[str, t.Any]:
    # Loaded where it is asked for: the other commands are called by units, and need none of it.
    from . import _waiting

    params = _service.fill({**vars(arguments)}, _waiting.FILL)
    params["headers"] = _headers(params.pop("header_file"), params["headers"])
    key_file = params["api_key_file"] or params.get("definition", {}).get("api_key_file")
    params["api_key"] = _service.read_key(key_file) if key_file else None
    name = _wait_text.subject(params)
    watch = _progress(name) if params["progress"] and not params["check"] else _Watch()
    try:
        with watch:
            return _waiting.run(params, check_mode=params["check"], warn=warn, watch=watch)
    except (KeyboardInterrupt, SystemExit):  # a signal that ends it is the second
        if watch.wait is not None and sys.stderr is not None:
            with contextlib.suppress(OSError):
                print("%s: broken off at: %s" % (name, _wait_text.line(watch.wait.live())), file=sys.stderr)
        raise


def _headers(path: t.Optional[str], given: t.Optional[t.Sequence[t.Tuple[str, str]]]) -> t.Optional[t.Dict[str, str]]:
    """Those of the file, and those of the command line, which win whatever the case of their letters."""
    named = dict(given or ())
    lower = {name.lower() for name in named}
    of_file = _service.read_headers(path).items() if path is not None else ()
    found = {name: value for name, value in of_file if name.lower() not in lower}
    return {**found, **named} or None


def _mapping(text: str) -> t.Dict[str, t.Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('"%s" is no JSON object' % text)
    return found


def _header(text: str) -> t.Tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError("a header is given as NAME=VALUE")  # what is wrong may be a key
    return name, value


# While it lasts


def _progress(name: str) -> _Watch:
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return _Bar(tqdm, name)
    return _Lines(name)


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


class _Watch:
    """Sees the wait all the time, and shows nothing."""

    wait: t.Optional[Wait] = None

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __call__(self, wait: Wait) -> None:
        self.wait = wait


class _Lines(_Watch):
    """One line for each change, and one now and then."""

    def __init__(self, name: str, clock: t.Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._key: t.Optional[t.List[t.Any]] = None
        self._at = clock()

    def __call__(self, wait: Wait) -> None:
        super().__call__(wait)
        now = self._clock()
        if now - self._at < FASTEST:  # whatever changed would not be shown yet
            return
        live = wait.live()
        key = _wait_text.key(live)
        pause = {"much": FASTEST, "little": SLOWER}.get(_wait_text.changed(self._key, key), HEARTBEAT)
        if now - self._at < pause:
            return
        self._key, self._at = key, now
        with contextlib.suppress(OSError):  # a terminal that is gone must not break off a wait
            print("%s: %s" % (self._name, _wait_text.line(live)), file=sys.stderr, flush=True)


class _Bar(_Watch):
    """One line that is drawn anew: how far the whole load has come as far as that can be told, and what goes on."""

    def __init__(self, tqdm: t.Any, name: str, clock: t.Callable[[], float] = time.monotonic) -> None:
        width = _width()
        self._bar = tqdm(
            total=100,
            bar_format=BAR,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=width > 0,
            ncols=None if width > 0 else WIDTH,
            nrows=None if width > 0 else HEIGHT,
        )
        self._name, self._clock, self._at = name, clock, float("-inf")

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):
            self._bar.close()

    def __call__(self, wait: Wait) -> None:
        super().__call__(wait)
        now = self._clock()
        if now - self._at < REDRAWN:
            return
        self._at = now
        live = wait.live()
        share = live["percent"] if live["overall"] is None else live["overall"]
        self._bar.n = 0 if share is None else int(share)
        with contextlib.suppress(OSError):  # a terminal that is gone must not break off a wait
            self._bar.set_description_str("%s: %s" % (self._name, _wait_text.line(live)), refresh=True)
