# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Take a server out of its gateway until it has no sessions, and put it back until the gateway sends to it again."""

from __future__ import annotations

import contextlib
import hashlib
import typing as t

from . import _lease, _limits
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError

__all__ = ("Change", "Gateway", "Server", "change", "exclusive")

CONFIRMATIONS = 2
LAST_PAUSE = 0.2  # before the look that confirms one at the very end
LOCK_WAIT = 30.0


class Server(t.NamedTuple):
    """One server as its gateway sees it.

    ``admin`` is what the gateway was told (``ready``, ``drain``, ``maint``), ``operational`` what it finds itself.
    """

    admin: str
    operational: str
    sessions: int
    weight: int
    checked: bool

    @property
    def withdrawn(self) -> bool:
        return self.admin != "ready"

    @property
    def serves(self) -> bool:
        """Proved to be up, and sent to. ``UP 1/3`` is still up, ``DOWN 1/2`` is not yet."""
        return not self.withdrawn and self.checked and self.operational.startswith("UP") and self.weight > 0

    @property
    def health_checked(self) -> t.Optional[bool]:
        """Whether the gateway checks its health; of a withdrawn server not every gateway says."""
        return None if self.withdrawn else self.checked

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "admin": self.admin,
            "operational": self.operational,
            "sessions": self.sessions,
            "weight": self.weight,
        }


class Gateway(t.Protocol):
    """What a driver does for one backend."""

    backend: str

    def servers(self) -> t.Dict[str, Server]:
        """The servers of the backend, by name."""

    def set_state(self, server: str, state: str) -> None:
        """Ask for ``drained`` or ``ready``."""


class Change(t.NamedTuple):
    """What was found, what was done, and what came of it."""

    verdict: str
    msg: str
    changed: bool
    before: Server
    after: Server
    healthy_others: t.List[str]

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "verdict": self.verdict,
            "msg": self.msg,
            "changed": self.changed,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "health_checked": self.after.health_checked,
            "healthy_others": self.healthy_others,
        }


@contextlib.contextmanager
def exclusive(place: str, backend: str, timeout: float = LOCK_WAIT) -> t.Iterator[None]:
    """The lock of one backend of the gateway at ``place`` on this host."""
    key = "gateway-" + hashlib.sha256(("%s %s" % (place, backend)).encode()).hexdigest()[:12]
    try:
        with _lease.locked(key, timeout):
            yield
    except _lease.Lost as error:
        known = 'the backend "%s" of the gateway at "%s"' % (backend, place)
        raise ServingError(error.message.replace('the service "%s"' % key, known), **error.result) from error


def change(
    gateway: Gateway,
    server: str,
    state: str,
    timeout: float,
    interval: float,
    min_healthy: int = 1,
    check_mode: bool = False,
    lock: t.Callable[[], t.ContextManager[t.Any]] = contextlib.nullcontext,
    clock: Clock = SYSTEM_CLOCK,
) -> Change:
    """Bring one server to ``state`` and wait until it is really there.

    ``lock`` is held while others are counted and the server is changed: two that withdraw in the same moment must not
    count each other as healthy.
    """
    _limits.at_least(0, timeout=timeout, min_healthy=min_healthy)
    _limits.at_least(0.01, interval=interval)
    deadline = Deadline(timeout, clock)
    with lock():
        plan = _plan(gateway, server, state, min_healthy)
        if plan.verdict == "refused" or check_mode:
            return plan
        if plan.changed:
            gateway.set_state(server, state)
    wait = _wait_drained if state == "drained" else _wait_ready
    verdict, msg, after = wait(gateway, server, deadline, interval)
    return plan._replace(verdict=verdict, msg=msg, after=after)


def _plan(gateway: Gateway, server: str, state: str, min_healthy: int) -> Change:
    """What would be done, as the answer of a check."""
    servers = gateway.servers()
    before = servers[server]
    others = sorted(name for name, other in servers.items() if name != server and other.serves)
    withdraw = state == "drained"
    needed = not before.withdrawn if withdraw else before.withdrawn
    # A server that is down takes nothing away when it goes.
    if withdraw and needed and (before.serves or not before.checked) and len(others) < min_healthy:
        names = ", ".join('"%s"' % name for name in others) or "none"
        msg = (
            'the server "%s" is not withdrawn from the backend "%s": %d healthy others must stay, and those that are '
            "healthy are: %s; to withdraw it all the same, set min_healthy: 0"
            % (server, gateway.backend, min_healthy, names)
        )
        return Change("refused", msg, False, before, before, others)
    verb = "withdrawn" if withdraw else "put back"
    msg = 'the server "%s" %s' % (server, "would be %s" % verb if needed else "is %s already" % verb)
    return Change(state, msg, needed, before, before, others)


def _wait_drained(gateway: Gateway, server: str, deadline: Deadline, interval: float) -> t.Tuple[str, str, Server]:
    """Two looks in a row: a request that was being handed over during the first is a session in the second."""
    empty = 0
    while True:
        now = gateway.servers()[server]
        if not now.withdrawn:
            return "error", 'the server "%s" was put back by somebody else while it drained' % server, now
        empty = empty + 1 if now.sessions == 0 else 0
        if empty >= CONFIRMATIONS:
            return "drained", 'the server "%s" gets no requests and has no sessions' % server, now
        if deadline.expired and not empty:
            msg = 'the server "%s" gets no new requests, but after %g s it still has %d sessions' % (
                server,
                deadline.seconds,
                now.sessions,
            )
            return "busy", msg, now
        # An empty look at the very end is confirmed by one more, a moment later.
        left = max(deadline.remaining, LAST_PAUSE) if empty else deadline.remaining
        deadline.clock.sleep(min(interval, left))


def _wait_ready(gateway: Gateway, server: str, deadline: Deadline, interval: float) -> t.Tuple[str, str, Server]:
    while True:
        now = gateway.servers()[server]
        if now.withdrawn:
            return "error", 'the server "%s" was put back, but it is kept in the state "%s"' % (server, now.admin), now
        if now.serves:
            return "ready", 'the gateway sends requests to the server "%s" (%s)' % (server, now.operational), now
        if not now.checked and now.weight > 0:
            msg = 'the gateway sends requests to the server "%s", but it does not check its health' % server
            return "ready", msg, now
        if deadline.expired:
            why = "its weight is 0" if now.weight <= 0 else "the gateway says %s" % now.operational
            text = 'the server "%s" is put back, but after %g s the gateway does not send to it: %s'
            return "error", text % (server, deadline.seconds, why), now
        deadline.sleep(interval)
