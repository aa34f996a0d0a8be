# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run something that may hang, in a forked child, with a hard limit.

A call into a driver or a read of another process's memory can block in the kernel, where no signal reaches it.
Such a child is left behind and never waited for, also when it has answered already and hangs in its exit. With a
``key`` it is recorded, so that at most one lives for each subject: while it does, the next call answers ``stuck``
without trying again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import time
import typing as t

from . import _errors

__all__ = ("Outcome", "remember", "run", "stuck_child", "stuck_children")

STUCK_FOLDER = "/run/gpuops/stuck"
KILL_WAIT = 0.5
EXIT_WAIT = 5.0
TICK = 1.0
PR_SET_PDEATHSIG = 1
OVERDUE = 15.0  # seconds after its limit at which a child ends by itself: its caller must be gone
LONGEST = 1e7  # seconds that a timer takes

Report = t.Callable[[t.Dict[str, t.Any]], None]


class Outcome:
    """What came of a bounded call: ``ok``, ``timeout`` (ended), ``stuck`` (could not be ended) or ``error``."""

    def __init__(self, status: str, value: t.Any = None, error: str = "") -> None:
        self.status = status
        self.value = value
        self.error = error
        self.partial: t.List[t.Dict[str, t.Any]] = []
        self.elapsed = 0.0
        self.pid = 0  # the child's; another process may bear it by now unless the child was left behind
        # The child did not end: it hangs in its work, or it has answered and hangs in its exit, where the kernel closes
        # what it had open in a driver.
        self.left_behind = False

    @property
    def ok(self) -> bool:
        return self.status == "ok"


# Children that had not ended when they were left: each later call asks for them again, so that a caller that lives for
# long keeps none as a zombie.
_late: t.List[int] = []


def run(
    function: t.Callable[[Report], t.Any],
    timeout: float,
    key: t.Optional[str] = None,
    tick: t.Optional[t.Callable[[], None]] = None,
    dies_with_caller: bool = False,
) -> Outcome:
    """Call ``function(report)`` in a child and return its JSON-able value within ``timeout`` seconds.

    What the function passes to ``report`` before the limit is kept in ``partial``.
    With ``dies_with_caller`` the kernel ends the child when the caller is killed, so that none hangs on in a driver.
    ``tick`` is called about once a second in the caller meanwhile; when it raises, the child is ended.
    A :class:`ServingError` raised in the child is raised here as well.
    """
    if key is not None:
        stuck = stuck_child(key)
        if stuck is not None:
            return Outcome("stuck", error="process %d has not come back from an earlier call" % stuck)
    if dies_with_caller:
        import ctypes  # noqa: F401  # here, so that not every child loads it for itself
    _late[:] = [pid for pid in _late if not _reap(pid, 0.0)]
    began = time.monotonic()
    reader, writer = _pipe()
    caller = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(function, reader, writer, caller if dies_with_caller else 0, timeout + OVERDUE)
    os.close(writer)
    try:
        lines, finished = _collect(reader, began + timeout, tick)
    except BaseException:
        _end(pid, key)
        raise
    finally:
        os.close(reader)
    # A child that has answered may take as long to end as it was given to answer: the kernel is closing devices.
    gone = finished and _reap(pid, min(EXIT_WAIT, began + timeout - time.monotonic()))
    outcome = _settle(lines, finished, gone or _end(pid, key), timeout, pid)
    outcome.elapsed = time.monotonic() - began
    outcome.pid = pid
    return outcome


def stuck_children() -> t.List[t.Tuple[int, int]]:
    """(pid, start ticks) of every recorded child that is still there."""
    try:
        entries = sorted(os.listdir(STUCK_FOLDER))
    except OSError:
        return []
    found = []
    for entry in entries:
        record = _read_record(os.path.join(STUCK_FOLDER, entry))
        if record is not None:
            found.append(record)
    return found


def _pipe() -> t.Tuple[int, int]:
    """A pipe beside the standard files, even where the caller was started with some of those closed."""
    ends = []
    for number in os.pipe():
        ends.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(number)
    return ends[0], ends[1]


def _die_with(caller: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os._exit(70)  # it was killed before


def _child(
    function: t.Callable[[Report], t.Any], reader: int, writer: int, caller: int, limit: t.Optional[float] = None
) -> t.NoReturn:
    """``limit`` is when the kernel ends it, in case that the caller is gone by then and nobody else does."""
    code = 0
    try:
        if caller:
            _die_with(caller)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if limit is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
            signal.setitimer(signal.ITIMER_REAL, min(max(limit, 0.001), LONGEST))
        os.setsid()
        # What the child keeps open outlives a hang with it: the caller's output, its locks.
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for number in _open_files():
            if number > 2 and number != writer:
                _close_quietly(number)

        def report(part: t.Dict[str, t.Any]) -> None:
            _write(writer, {"partial": part})

        try:
            _write(writer, {"value": function(report)})
        except _errors.ServingError as error:
            _write(writer, {"raise": type(error).__name__, "message": error.message, "result": error.result})
        except Exception as error:
            _write(writer, {"error": "%s: %s" % (type(error).__name__, error)})
    except BaseException:
        code = 70
    finally:
        os._exit(code)


def _open_files() -> t.List[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return list(range(3, 256))


def _close_quietly(number: int) -> None:
    with contextlib.suppress(OSError):
        os.close(number)


def _write(writer: int, record: t.Dict[str, t.Any]) -> None:
    data = json.dumps(record).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _collect(
    reader: int, end: float, tick: t.Optional[t.Callable[[], None]] = None
) -> t.Tuple[t.List[t.Dict[str, t.Any]], bool]:
    """Records that arrive before ``end``, and whether the child closed its side by then."""
    pending = b""
    records: t.List[t.Dict[str, t.Any]] = []
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return records, False
        if not poller.poll((left if tick is None else min(left, TICK)) * 1000.0):
            if tick is not None:
                tick()
            continue
        chunk = os.read(reader, 65536)
        if not chunk:
            return records, True
        pending += chunk
        *whole, pending = pending.split(b"\n")
        records.extend(json.loads(line) for line in whole)


def _settle(records: t.List[t.Dict[str, t.Any]], finished: bool, gone: bool, timeout: float, pid: int) -> Outcome:
    partial = [record["partial"] for record in records if "partial" in record]
    last = next((record for record in records if "partial" not in record), None)
    if last is not None and "raise" in last:
        kind = getattr(_errors, last["raise"], _errors.ServingError)
        raise kind(last["message"], **last["result"])
    if last is not None and "error" in last:
        outcome = Outcome("error", error=last["error"])
    elif last is not None:
        outcome = Outcome("ok", value=last["value"])
    elif finished:
        outcome = Outcome("error", error="the child ended without an answer")
    elif gone:
        outcome = Outcome("timeout", error="no answer within %.3g s" % timeout)
    else:
        outcome = Outcome("stuck", error="no answer within %.3g s, and process %d cannot be ended" % (timeout, pid))
    outcome.partial = partial
    outcome.left_behind = not gone
    return outcome


def _end(pid: int, key: t.Optional[str]) -> bool:
    """Kill the child; one that stays is recorded. Says whether it is gone."""
    _kill(pid)
    gone = _reap(pid, KILL_WAIT)
    if not gone:
        _late.append(pid)
        if key is not None:
            remember(key, pid)
    return gone


def _kill(pid: int) -> None:
    # The child is ours and not yet reaped, so its pid cannot have been given to another process.
    # It leads its own group: whatever it started goes with it.
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


def _reap(pid: int, wait: float) -> bool:
    end = time.monotonic() + wait
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.005)


def _record_path(key: str) -> str:
    return os.path.join(STUCK_FOLDER, re.sub(r"[^A-Za-z0-9_.-]", "_", key) + ".json")


def remember(key: str, pid: int) -> None:
    """Record a child that could not be ended, for a caller that learns only from the outcome what it was stuck on."""
    start = _start_ticks(pid)
    if start is None:
        return
    path = _record_path(key)
    try:
        os.makedirs(STUCK_FOLDER, mode=0o755, exist_ok=True)
        temporary = "%s.%d" % (path, os.getpid())
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump({"pid": pid, "start": start}, handle)
        os.replace(temporary, path)
    except OSError:
        # Unprivileged or read-only: the next call may leave one more child, which is still bounded.
        pass


def stuck_child(key: str) -> t.Optional[int]:
    """The pid of the child that is recorded for ``key`` and still there."""
    record = _read_record(_record_path(key))
    return None if record is None else record[0]


def _read_record(path: str) -> t.Optional[t.Tuple[int, int]]:
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
        pid, start = int(found["pid"]), int(found["start"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    if _start_ticks(pid) != start:
        return None
    return pid, start


def _start_ticks(pid: int) -> t.Optional[int]:
    """Start time of a process that still exists and is not a zombie."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
