# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Attempts at one token, directly and through the route, with the engine's own counters as a witness."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from . import _generation, _http, _limits, _load
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import UsageError

__all__ = ("Attempt", "Policy", "Probe", "attempt", "run", "sides_of")

COUNT_SHARE = 2.0  # seconds at most for one look at the counters
USUAL_PROMPT = 64  # bytes of the prompt that is asked without another


@dataclass(frozen=True)
class Policy:
    """How often to ask, and how long an answer may take."""

    timeout: float = 30.0
    max_ttft: t.Optional[float] = None
    max_total: t.Optional[float] = None
    count: int = 1
    interval: float = 1.0

    @property
    def limited(self) -> bool:
        """Whether slow is a failure."""
        return self.max_ttft is not None or self.max_total is not None

    def check(self) -> None:
        _limits.at_least(0.1, timeout=self.timeout)
        _limits.at_least(0, interval=self.interval)
        _limits.at_least(1, count=self.count)
        _limits.more_than_zero(max_ttft=self.max_ttft, max_total=self.max_total)


class Attempt(t.NamedTuple):
    """One probe of all sides."""

    verdict: str
    msg: str
    direct: t.Optional[_generation.Side]
    route: t.Optional[_generation.Side]
    counters: t.Optional[t.Dict[str, t.Any]]

    @property
    def late(self) -> bool:
        """Whether a request of ours may live on in the server."""
        return any(side is not None and side.verdict in ("wedged", "busy") for side in (self.direct, self.route))

    def as_dict(self) -> t.Dict[str, t.Any]:
        return {
            "verdict": self.verdict,
            "direct": None if self.direct is None else self.direct.as_dict(),
            "route": None if self.route is None else self.route.as_dict(),
        }


class Probe(t.NamedTuple):
    """All attempts. The gravest verdict counts; slow is good unless a limit was set."""

    verdict: str
    msg: str
    ok: bool
    attempts: t.List[Attempt]
    elapsed: float

    def as_dict(self) -> t.Dict[str, t.Any]:
        last = self.attempts[-1].as_dict()
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "msg": self.msg,
            "direct": last["direct"],
            "route": last["route"],
            "counters": self.attempts[-1].counters,
            "attempts": [one.as_dict() for one in self.attempts],
            "elapsed": round(self.elapsed, 3),
        }


def sides_of(url: t.Optional[str], route_url: t.Optional[str], definition: t.Mapping[str, t.Any]) -> t.Dict[str, str]:
    """The sides to probe; the definition of the service counts only when the caller names none."""
    if not url and not route_url:
        url, route_url = definition.get("url"), definition.get("route_url")
    found = {_generation.DIRECT: url, _generation.ROUTE: route_url}
    sides = {name: value for name, value in found.items() if value}
    if not sides:
        raise UsageError('there is nothing to probe: give "url" or "route_url"')
    return sides


def run(
    sides: t.Mapping[str, str],
    question: _generation.Question,
    access: _http.Access,
    policy: Policy,
    tick: t.Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Probe:
    """Probe ``policy.count`` times. What timed out may live on in the server, so that attempt is the last."""
    policy.check()
    began = clock.monotonic()
    attempts: t.List[Attempt] = []
    for number in range(policy.count):
        if number:
            clock.sleep(policy.interval)
        tick()
        attempts.append(attempt(sides, question, access, policy, tick))
        if attempts[-1].late:
            break
    verdict = _generation.worst(one.verdict for one in attempts)
    msg = next(one.msg for one in attempts if one.verdict == verdict)
    ok = verdict == "ok" or (verdict == "slow" and not policy.limited)
    return Probe(verdict, msg, ok, attempts, clock.monotonic() - began)


def attempt(
    sides: t.Mapping[str, str],
    question: _generation.Question,
    access: _http.Access,
    policy: Policy,
    tick: t.Callable[[], None] = lambda: None,
) -> Attempt:
    """One probe of all sides within ``policy.timeout`` seconds, looks at the counters included."""
    deadline = Deadline(policy.timeout)
    profile, url = question.profile, sides.get(_generation.DIRECT)
    share = 0.0 if url is None or profile.metrics is None else min(COUNT_SHARE, policy.timeout / 10)

    def count() -> t.Optional[_load.Load]:
        return _load.read(profile, url, access, share).load if url is not None and share else None

    before, after = count(), None
    found = _generation.probe(sides, question, access, deadline.remaining - share, tick)
    direct, route = found.get(_generation.DIRECT), found.get(_generation.ROUTE)
    moved = None
    if direct is not None and direct.verdict == "wedged":
        after = count()
        prompt = USUAL_PROMPT if question.prompt is None else len(question.prompt.encode())
        moved = _load.others(profile, before, after, len(sides), prompt)
        if moved:
            direct.verdict = "busy"
            direct.error += ", while the engine generated for others"
    for side in found.values():
        _generation.slow(side, policy.max_ttft, policy.max_total, policy.timeout / 2)
    verdict, msg = _generation.overall(direct, route)
    counters = None
    if share:
        counters = {
            "before": None if before is None else dict(before.tokens),
            "after": None if after is None else dict(after.tokens),
            "moved": moved,
        }
    return Attempt(verdict, msg, direct, route, counters)
