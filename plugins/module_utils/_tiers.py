# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a wait for a model looks at, what it is asked for, and what it answers."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass, field

from . import _generation, _http, _limits
from ._deadline import Deadline
from ._errors import UsageError
from ._progress import Activity
from ._systemd import UnitState

__all__ = ("NOTHING", "TIERS", "Ending", "Listener", "LogLine", "Options", "Target", "Tier")

TIERS = ("unit", "listener", "health", "model", "generation")
# The answer of a wait that has found nothing out.
NOTHING: t.Dict[str, t.Any] = {
    "tier_reached": "",
    "tiers": [],
    "phase": "",
    "percent": None,
    "movement": {},
    "restarts": 0,
    "cause": None,
    "log_tail": [],
    "unit_state": None,
    "elapsed": 0.0,
}


class Listener(t.NamedTuple):
    """Who listens on the engine's port.

    ``owned``: a process of the unit. ``forwarder``: one that takes connections in for the unit, by what is seen of it.
    ``translated``: nobody on this host, but the unit's processes live in a network of their own. ``none``: nobody.
    ``foreign``: somebody else, maybe besides the unit. ``unserved``: one that takes connections in, with nobody behind
    it yet. ``unexplained``: who it is, or for whom it listens, cannot be seen; ``unseen``: the same, and only because
    this process has too few rights. ``silence`` is what to say when nobody
    listens and nobody answers.
    """

    kind: str
    detail: str = ""
    silence: str = "nothing listens on the port"


class LogLine(t.NamedTuple):
    """A line of the log of a service."""

    text: str
    own: bool  # whether the service itself wrote it in this life, rather than systemd
    at: t.Optional[float] = None  # when, on the monotonic clock; None where that is not known


class Target(t.Protocol):
    """The service that is waited for, as the host shows it."""

    # What could not be seen, each said once.
    warnings: t.List[str]

    @property
    def port_number(self) -> int:
        """Where the engine answers."""

    @property
    def keyed(self) -> bool:
        """Whether the engine is given a key, or a header that may be one."""

    def bound(self, deadline: Deadline) -> None:
        """From here on no question takes longer than what is left of the deadline, or a second more."""

    def unit(self, now: bool = False) -> t.Optional[UnitState]:
        """The state of the unit, or None when there is only a URL; ``now`` takes none that was asked for before."""

    def activity(self, state: UnitState) -> Activity:
        """What the owned processes have used; also remembers which they are."""

    def log(self, state: UnitState) -> t.List[LogLine]:
        """New lines."""

    def listener(self, state: UnitState) -> Listener:
        """Who listens on the port."""

    def sockets(self) -> t.Optional[t.FrozenSet[int]]:
        """The sockets that listen on the port, by the kernel's numbers; None where they cannot be read. Costs little.

        One that is the unit's stays so for as long as it listens.
        """

    def knock(self) -> bool:
        """Whether a connection to the port is taken. Costs next to nothing, and never waits long."""

    def peek(self, path: str) -> t.Optional[int]:
        """The status that a GET answers with at once; None without one. Costs little, and never waits long."""

    def get(self, path: str, timeout: float, method: str = "GET") -> _http.Answer:
        """Ask the engine."""

    def greet(self, path: str, timeout: float) -> _http.Answer:
        """Ask whoever is there, without the key and the headers that are for the engine alone."""

    def generate(self, model: t.Optional[str], timeout: float, tick: t.Callable[[], None]) -> _generation.Side:
        """Ask the engine for one token."""

    def save(self) -> t.Dict[str, t.Any]:
        """What another process needs to go on from here."""

    def restore(self, saved: t.Mapping[str, t.Any]) -> None:
        """Go on from what another process has saved."""

    def close(self) -> None:
        """End what runs on the side."""


class Options(t.NamedTuple):
    """What to wait for, and how long."""

    model: t.Optional[str] = None
    tier: str = "generation"
    max_restarts: int = 3
    interval: float = 1.0
    generation_timeout: float = 60.0
    timeout: float = 1800.0
    stall_timeout: float = 300.0

    def check(self) -> None:
        if self.tier not in TIERS:
            raise UsageError('the tier "%s" is not known: use one of %s' % (self.tier, ", ".join(TIERS)))
        _limits.at_least(1, max_restarts=self.max_restarts)
        _limits.more_than_zero(
            timeout=self.timeout,
            stall_timeout=self.stall_timeout,
            interval=self.interval,
            generation_timeout=self.generation_timeout,
        )


@dataclass
class Tier:
    name: str
    reached: t.Optional[bool] = False
    at: t.Optional[float] = None
    detail: str = ""


@dataclass
class Ending:
    """A final verdict and its sentence."""

    verdict: str
    msg: str
    cause: t.Optional[t.Dict[str, t.Any]] = field(default=None)
