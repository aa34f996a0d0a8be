# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One operation for each service at a time.

Two locks, because the module of a killed controller goes on running on the host for a while:

* the *lease*, a file that says which run owns the service. It is renewed by every module call of that run and
  expires after :data:`TERM` seconds, so that a dead run blocks nobody for long;
* a *lock* (flock) that each mutating process holds while it lives, so that a run which takes an expired lease
  over still waits for the module that the dead run left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import typing as t

from . import _service
from ._deadline import Deadline
from ._errors import ServingError, UsageError

TERM = 60.0
STATE_FOLDER = "/var/lib/gpuops"
LOCK_FOLDER = "/run/gpuops"
LOCK_POLL = 0.1
LEASE_LOCK_TIMEOUT = 10.0


class Lease(t.NamedTuple):
    """Who owns a service: the run, where it is steered from, what it is doing, and for how much longer."""

    run_id: str
    controller: str
    phase: str
    since: float
    expires_in: float

    @property
    def fresh(self) -> bool:
        return self.expires_in > 0

    def describe(self) -> str:
        return 'run "%s" of %s, in phase "%s", for %.0f s now' % (self.run_id, self.controller, self.phase, self.age)

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.since)

    def as_dict(self) -> t.Dict[str, t.Any]:
        return dict(self._asdict(), fresh=self.fresh)


class Lost(ServingError):
    """The lease belongs to another run."""


def read(service: str) -> t.Optional[Lease]:
    """The lease of a service, fresh or expired, or None."""
    try:
        with open(_path(service), encoding="utf-8") as handle:
            found = json.load(handle)
        expires_in = _expires_in(found)
        return Lease(
            str(found["run_id"]), str(found["controller"]), str(found["phase"]), float(found["since"]), expires_in
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # A damaged lease must not lock a service for ever, nor hide an owner: it counts as expired.
        return Lease("unreadable", "unknown", "unknown", time.time(), 0.0)


def take(
    service: str, run_id: str, controller: str, phase: str, term: float = TERM, force: bool = False
) -> t.Optional[Lease]:
    """Make ``run_id`` the owner for ``term`` seconds, and return the earlier owner if there was one.

    A fresh lease of another run is refused, unless ``force`` says that it is known to be dead.
    """
    with _file_lock(service):
        current = read(service)
        if current is not None and current.fresh and current.run_id != run_id and not force:
            raise _lost(service, current)
        since = current.since if current is not None and current.run_id == run_id else time.time()
        _write(service, run_id, controller, phase, since, term)
    return current if current is not None and current.run_id != run_id else None


def renew(service: t.Optional[str], run_id: t.Optional[str], phase: t.Optional[str] = None) -> None:
    """Prolong the lease; raise when it is no longer this run's."""
    if not service or not run_id:
        return
    with _file_lock(service):
        current = read(service)
        if current is None or current.run_id != run_id:
            raise _lost(service, current)
        try:
            _write(service, run_id, current.controller, phase or current.phase, current.since)
        except ServingError:
            # A full disk must not break off a run that still owns the service.
            if not current.fresh:
                raise


def keeper(service: t.Optional[str], run_id: t.Optional[str], every: float = 5.0) -> t.Callable[[], None]:
    """A function to call often during a long wait: it renews the lease, but not more often than ``every`` seconds."""
    last = [float("-inf")]

    def keep() -> None:
        now = time.monotonic()
        if now - last[0] >= every:
            renew(service, run_id)
            last[0] = now

    return keep


def keeper_of(params: t.Mapping[str, t.Any], check_mode: bool) -> t.Callable[[], None]:
    """The keeper for the options of a module that only waits; a UsageError for a run whose lease cannot be found."""
    run_id, service = params["run_id"], params["service"]
    if run_id and not service:
        service = _service.of_unit(params.get("unit") or "")
        if not service:
            raise UsageError('"run_id" is the run that holds the lease of a service: give "service" too')
    return keeper(service, None if check_mode else run_id)


def release(service: str, run_id: str) -> bool:
    """Give the lease back; says whether there was one to give back. Another run's fresh lease is left alone."""
    with _file_lock(service):
        current = read(service)
        if current is None:
            return False
        if current.run_id != run_id and current.fresh:
            raise _lost(service, current)
        os.unlink(_path(service))
        return True


@contextlib.contextmanager
def operation(service: t.Optional[str], run_id: t.Optional[str], timeout: float = 30.0) -> t.Iterator[None]:
    """Hold the lock of a service while something is changed.

    Without a service there is nothing to lock. With a run id the lease must be that run's, and is renewed;
    without one nobody else's fresh lease may stand.
    """
    if not service:
        yield
        return
    with locked(service, timeout):
        if run_id:
            renew(service, run_id)
        else:
            current = read(service)
            if current is not None and current.fresh:
                raise _lost(service, current)
        yield


@contextlib.contextmanager
def locked(service: str, timeout: float) -> t.Iterator[None]:
    """The flock of a service: waits for the process that holds it, within ``timeout``."""
    with _flock(
        os.path.join(LOCK_FOLDER, _service.check_name(service) + ".lock"), 'the service "%s"' % service, timeout
    ):
        yield


@contextlib.contextmanager
def _flock(path: str, what: str, timeout: float) -> t.Iterator[None]:
    handle = _open_lock(path)
    deadline = Deadline(timeout)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if deadline.expired:
                raise Lost(
                    "%s is being changed by process %s and was not free within %g s: wait for it to end, then try again"
                    % (what, _holder(handle), timeout),
                    verdict="refused",
                )
            deadline.sleep(LOCK_POLL)
        with contextlib.suppress(OSError):  # a full disk: the lock counts, not who it says holds it
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(handle)


def _open_lock(path: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        remedy = ": run as root, or with become" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise ServingError('the lock "%s" cannot be opened: %s%s' % (path, error.strerror, remedy)) from error


def _holder(handle: int) -> str:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return text or "unknown"


def _path(service: str) -> str:
    return os.path.join(STATE_FOLDER, _service.check_name(service), "lease.json")


def _lost(service: str, current: t.Optional[Lease]) -> Lost:
    if current is None:
        return Lost(
            'the service "%s" is not leased to this run any more: the lease is gone, so this call did nothing'
            % service,
            verdict="refused",
        )
    return Lost(
        'the service "%s" is in use by %s: wait for that run to end (its lease expires in %.0f s unless it is renewed)'
        % (service, current.describe(), max(0.0, current.expires_in)),
        verdict="refused",
        lease=current.as_dict(),
    )


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
            return handle.read().strip()
    except OSError:
        return ""


def _expires_in(found: t.Dict[str, t.Any]) -> float:
    """Left on the monotonic clock of this boot: stepping the wall clock neither ends nor prolongs a lease."""
    if found["boot_id"] != _boot_id():
        return 0.0
    return float(found["renewed_monotonic"]) + float(found["term"]) - time.monotonic()


def _write(service: str, run_id: str, controller: str, phase: str, since: float, term: float = TERM) -> None:
    path = _path(service)
    record = {
        "run_id": run_id,
        "controller": controller,
        "phase": phase,
        "since": since,
        "term": term,
        "boot_id": _boot_id(),
        "renewed_monotonic": time.monotonic(),
    }
    temporary = "%s.%d" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        try:
            with open(temporary, "w", encoding="utf-8") as handle:
                json.dump(record, handle)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ServingError(
            'the lease of the service "%s" cannot be written: %s: %s' % (service, path, error.strerror)
        ) from error


def _file_lock(service: str) -> t.ContextManager[None]:
    """Two controllers that read and write the lease in the same moment take turns."""
    path = os.path.join(LOCK_FOLDER, "lease", _service.check_name(service) + ".lock")
    return _flock(path, 'the lease of the service "%s"' % service, LEASE_LOCK_TIMEOUT)
