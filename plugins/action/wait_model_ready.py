# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The controller's part in a long wait: it runs it in slices, shows where it stands, and outlives a lost link."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shlex
import signal
import threading
import time
import typing as t

from ansible import constants, context
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpuops.serving.plugins.module_utils import _tiers, _wait_request, _wait_text
from ansible_collections.gpuops.serving.plugins.plugin_utils import _wait_beside

display = Display()

HEARTBEAT = 60.0  # seconds after which a line is shown although nothing changed
AGAIN = 1.0  # seconds between two tries to connect
RECONNECT = 60.0
PARENT = 5.0  # seconds between two looks at whether the controller still lives
AFRESH = "wait again, nothing was changed"
MACHINES = ("json", "jsonl", "oneline", "null", "junit")

Result = t.Dict[str, t.Any]


class ActionModule(ActionBase):
    """One wait."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: t.Optional[str] = None, task_vars: t.Optional[t.Dict[str, t.Any]] = None) -> Result:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        if self._task.args.get("resume") is not None:
            raise AnsibleActionFail('"resume" is how the controller asks for a slice of a wait: leave it out')
        if self._task.async_val:
            return t.cast(
                Result, self._execute_module(module_args=dict(self._task.args), task_vars=variables, wrap_async=True)
            )
        screen = self._screen(variables)
        result = self._look(variables, screen) if self._task.check_mode else self._wait(variables, screen)
        if result.get("unreachable"):
            # Whatever is left there cannot be removed, and to try would put another failure in the place of this one.
            self._connection._shell.tmpdir = None
        elif result.get("failed") and "verdict" not in result:
            result = _broken_off(result, screen)
        return _cleaned(result)

    def _look(self, variables: t.Dict[str, t.Any], screen: Screen) -> Result:
        """One look, for check mode."""
        try:
            return t.cast(Result, self._execute_module(module_args=dict(self._task.args), task_vars=variables))
        except AnsibleConnectionFailure as error:
            return screen.not_reached(error)

    def _wait(self, variables: t.Dict[str, t.Any], screen: Screen) -> Result:
        patience = _number(self._task.args.get("reconnect_timeout"), RECONNECT)
        parent = os.getppid()
        with _bound_to(parent):
            return self._slices(variables, screen, patience, parent)

    def _slices(self, variables: t.Dict[str, t.Any], screen: Screen, patience: float, parent: int) -> Result:
        token, cap, damaged, whole, heard = "", float("inf"), 0, False, False
        try:
            self._greet()
        except AnsibleConnectionFailure as error:
            return screen.not_reached(error)
        began = time.monotonic()
        lost: t.Optional[float] = None  # when that was seen
        while True:
            name, argv = self._beside(screen.on and not whole)
            request = _wait_request.request(time.monotonic() - began, screen.on, token, whole, name, heard)
            try:
                with _wait_beside.Beside(argv, screen.show, 0.0 if heard else _wait_beside.FIRST) as beside:
                    result = t.cast(
                        Result,
                        self._execute_module(module_args=dict(self._task.args, resume=request), task_vars=variables),
                    )
                heard = beside.heard
                if result.get("unreachable"):
                    raise AnsibleConnectionFailure(str(result.get("msg", "")))
            except AnsibleConnectionFailure as error:
                now = time.monotonic()
                lost, heard = now if lost is None else lost, False
                if now - lost >= patience or now - began >= cap:
                    return screen.given_up(error, now - began, now - lost)
                screen.disconnected(patience - (now - lost))
                time.sleep(AGAIN)
                if self._connect_anew():
                    screen.connected()
                continue
            lost = None
            screen.connected()  # whatever the answer is
            if not result.get("resume") or whole:
                return result
            if os.getppid() != parent:
                raise AnsibleActionFail("the controller was killed: nobody waits for the answer any more")
            live = _wait_request.live(result["resume"])
            if live is None:
                damaged += 1
            else:
                token, damaged = str(result["resume"]), 0
                screen.show(live)
                cap = float(live["timeout"]) + patience
            # The last answer must be a whole one, whatever the clock of the host says; and where nothing can be handed
            # from slice to slice, the wait is one call from where it stood.
            whole = damaged > 1 or time.monotonic() - began >= cap
            if damaged > 1:
                display.warning(
                    "%s: what the host hands on from slice to slice comes back damaged: nothing more is shown until "
                    "the wait ends" % screen.name
                )

    def _beside(self, on: bool) -> t.Tuple[str, t.Optional[_wait_beside.Words]]:
        """The name of the line that the slice is to write, and what prints it; nothing where it cannot be read."""
        name = secrets.token_hex(16)
        argv = None
        if on:
            with contextlib.suppress(Exception):  # it reaches into the connection, and nothing depends on it
                argv = _wait_beside.command(self._connection, name)
        return ("", None) if argv is None else (name, argv)

    def _greet(self) -> None:
        """Reach the host once: one that cannot be reached to begin with is not waited for."""
        if self._is_pipelining_enabled("new"):
            self._low_level_execute_command(":", sudoable=False)
        elif self._connection._shell.tmpdir is None:
            self._make_tmp_path()

    def _connect_anew(self) -> bool:
        """Leave no trace of the connection that was lost, nor count on what was on the host before.

        Says whether the host is there again.
        """
        with contextlib.suppress(Exception):
            self._connection.reset()
        folder = self._connection._shell.tmpdir
        look = ":" if folder is None else "test -d " + shlex.quote(folder)
        try:
            found = self._low_level_execute_command(look, sudoable=False)
        except AnsibleConnectionFailure:
            return False
        if folder is not None and found["rc"] == 1:
            self._connection._shell.tmpdir = None
        return True

    def _screen(self, variables: t.Mapping[str, t.Any]) -> Screen:
        args = self._task.args
        host = str(self._task.delegate_to or variables.get("inventory_hostname") or "")
        shown = not self._task.no_log and bool(boolean(args.get("progress", True), strict=False))
        screen = Screen(("%s %s" % (host, _wait_text.subject(args))).strip(), shown)
        screen.host, screen.subject = 'the host "%s"' % host, _wait_text.named(args)
        return screen


class Screen:
    """What is shown of one wait: a line for each change, and one now and then."""

    def __init__(self, name: str, on: bool, clock: t.Callable[[], float] = time.monotonic) -> None:
        self.name, self.on, self.lost = name, on, False
        self.host, self.subject = "the host", "the service"  # in a sentence
        self.live: t.Mapping[str, t.Any] = {}  # where the wait stood last
        self._clock = clock
        self._key: t.Optional[t.List[t.Any]] = None
        self._at = clock()

    def show(self, live: t.Mapping[str, t.Any]) -> None:
        self.connected()
        self.live = live
        key = _wait_text.key(live)
        if _wait_text.changed(self._key, key) or self._clock() - self._at >= HEARTBEAT:
            self._key = key
            self._write(_wait_text.line(live))

    def disconnected(self, left: float) -> None:
        if not self.lost:
            self._write("the connection is lost, it is tried for %s more" % _wait_text.span(left))
        self.lost = True

    def connected(self) -> None:
        if self.lost:
            self._write("the connection is back")
        self.lost = False

    @property
    def last(self) -> str:
        """Where it stood, for the end of a sentence about a wait that could not be finished."""
        seen = "last seen at: " + _wait_text.line(self.live) if self.live else "nothing was seen of it"
        return seen + _wait_text.NEXT + AFRESH

    def answer(self, **facts: t.Any) -> Result:
        """What the slices told, in the words of an answer."""
        names = ("phase", "percent", "tier_reached", "restarts", "elapsed")
        known = {name: self.live[name] for name in names if name in self.live}
        return {**_tiers.NOTHING, **known, "changed": False, "ok": False, "verdict": "error", **facts}

    def not_reached(self, error: Exception) -> Result:
        text = "%s cannot be reached, so %s was not waited for: %s"
        return self.answer(unreachable=True, msg=text % (self.host, self.subject, error))

    def given_up(self, error: Exception, elapsed: float, tried: float) -> Result:
        text = "%s was lost while %s was waited for, and was tried again for %s: %s; %s"
        msg = text % (self.host, self.subject, _wait_text.span(tried), error, self.last)
        return self.answer(unreachable=True, msg=msg, elapsed=round(elapsed, 3))

    def _write(self, text: str) -> None:
        self._at = self._clock()
        if self.on:
            display.display("%s: %s" % (self.name, text), stderr=read_by_machine())


def read_by_machine() -> bool:
    """Whether the standard output is for a program, as far as the settings tell."""
    # Without a playbook what is printed is the result alone.
    if "module_name" in context.CLIARGS:
        return True
    return str(constants.DEFAULT_STDOUT_CALLBACK).rpartition(".")[2] in MACHINES


@contextlib.contextmanager
def _bound_to(parent: int, every: float = PARENT) -> t.Iterator[None]:
    """End this process soon after its parent was killed.

    The host keeps the lease as long as somebody listens to the slice, and nobody reads what would be heard now.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every):
            if os.getppid() != parent:
                _end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _end() -> t.NoReturn:
    """End this process and what holds its connections."""
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as stream:
            for pid in stream.read().split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGTERM)
    os._exit(1)


def _broken_off(result: Result, screen: Screen) -> Result:
    """The answer for a module that gave none: it was killed, or its arguments were refused."""
    if "rc" in result or "module_stdout" in result:
        text = "the wait for %s was broken off on %s: %s; %s"
        said = str(result.get("msg", "")).strip().rstrip(".")
        result["msg"] = text % (screen.subject, screen.host, said, screen.last)
    return screen.answer(**result)


def _number(value: t.Any, default: float) -> float:
    """A number as the module will take it, which also says what is wrong with one that it is not."""
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        return default


def _cleaned(result: Result) -> Result:
    """The result of the whole wait, without what the slices needed."""
    result.pop("resume", None)
    invocation = result.get("invocation")
    if isinstance(invocation, dict) and isinstance(invocation.get("module_args"), dict):
        invocation["module_args"].pop("resume", None)
    return result
