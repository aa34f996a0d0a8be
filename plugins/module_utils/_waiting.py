# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One wait as a task or a person asks for it: from the options, checked before anything is touched, to the answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import typing as t

from . import (
    _engines,
    _foreign,
    _generation,
    _http,
    _limits,
    _selection,
    _service,
    _systemd,
    _wait_line,
    _wait_request,
    _wait_state,
    _wait_text,
)
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError, UsageError
from ._readiness import Wait
from ._target import HostTarget
from ._tiers import TIERS, Ending, Options

__all__ = ("FILL", "Plan", "plan", "run")

Params = t.Mapping[str, t.Any]

# Options that the definition of a service fills, and its keys.
FILL = {
    "unit": "unit",
    "url": "url",
    "engine": "engine",
    "model": "model",
    "timeout": "ready_timeout",
    "stall_timeout": "stall_timeout",
    "log_path": "log_path",
    "gpus": "gpus",
    "profile": "profile",
}
OF_UNIT = ("unit", "listener")  # tiers that only a unit can be judged by
MOST_HOLDERS = 16
HOLDERS_LIMIT = 5.0  # seconds to ask who holds the GPUs
# What of an answer is in words of ours alone, whatever they have in common with a header.
OURS = ("verdict", "tier_reached", "phase", "kind", "name")


class Plan(t.NamedTuple):
    """What to wait for, checked."""

    target: HostTarget
    profile: _engines.Profile
    options: Options
    gpus: t.Optional[t.List[str]]
    veil: _foreign.Veil = _foreign.BARE
    named: _wait_text.Named = _wait_text.Named()

    def wait(self, clock: Clock = SYSTEM_CLOCK, start: t.Optional[float] = None) -> Wait:
        return Wait(self.target, self.profile, self.options, clock, start, self.veil)

    @property
    def what(self) -> t.List[t.Optional[str]]:
        """What must be the same for one wait to go on where another has left."""
        return [self.target.name, self.target.url, self.profile.name, self.options.tier, self.options.model]


def plan(params: Params) -> Plan:
    """What the options ask for; a UsageError for what makes no sense, before anything is read or touched."""
    unit, url = params["unit"], params["url"] or ""
    profile = _engines.get(params["engine"], params["profile"])
    given = {name: params[name] for name in Options._fields if params.get(name) is not None}
    given.update(_capped(params))
    options = Options(**given)
    options.check()
    _check_times(params)
    _check_words(params, profile)
    if url:
        _http.join(url, "/")
    if unit:
        _systemd.unit_name(unit)
    access = _http.check(
        _http.Access(params["api_key"], params["headers"] or {}, params["validate_certs"], params["ca_path"])
    )
    mark_gid = _selection.mark_of(params["service"], unit, params.get("definition") or {})
    target = HostTarget(
        unit,
        url,
        _generation.Question(profile),
        access,
        mark_gid,
        log_path=params["log_path"],
        gpus=params["gpus"],
    )
    # The first slice has looked, and what goes on from it has the addresses: names may be hard to resolve meanwhile.
    if unit and url and not _wait_request.goes_on(params.get("resume")):
        target.bound(Deadline(options.timeout))  # that of the wait begins with its first look
        target.check_here()
    named = _wait_text.Named(
        params["service"] or "",
        _systemd.unit_name(unit) if unit else "",
        url,
        params["log_path"] or "",
        bool(params.get("definition")),
        target.keyed,
    )
    return Plan(target, profile, options, params["gpus"], _foreign.Veil(_http.secrets_of(access)), named)


def _check_times(params: Params) -> None:
    _limits.at_least(0, reconnect_timeout=params.get("reconnect_timeout"))
    if _too_long(params) and not _of_definition(params):
        raise UsageError(
            '"stall_timeout" (%g s) is above "timeout" (%g s), so it could never end the wait: make it smaller'
            % (params["stall_timeout"], params["timeout"])
        )


def _too_long(params: Params) -> bool:
    timeout, stall = params["timeout"], params["stall_timeout"]
    return timeout is not None and stall is not None and stall > timeout


def _of_definition(params: Params) -> bool:
    """Whether one of the two times was not chosen for this wait."""
    return any(name in params.get("of_definition", ()) for name in ("timeout", "stall_timeout"))


def _capped(params: Params) -> t.Dict[str, t.Any]:
    """A stall timeout that was chosen without a thought of this timeout lasts as long as the wait at most."""
    return {"stall_timeout": params["timeout"]} if _too_long(params) and _of_definition(params) else {}


def _check_words(params: Params, profile: _engines.Profile) -> None:
    unit, url, tier = params["unit"], params["url"], params["tier"]
    if not unit and not url:
        if params["service"] and not params.get("definition"):
            _service.load(params["service"])  # which says so when there is none
        raise UsageError('there is nothing to wait for: give "unit" and "url", or a service whose definition has them')
    if not url and tier != "unit":
        raise UsageError('"url" is missing: without it only the tier "unit" can be waited for')
    if not unit and tier in OF_UNIT:
        raise UsageError('"unit" is missing: without it the tier "%s" cannot be judged' % tier)
    if tier == TIERS[-1] and not profile.endpoints:
        raise UsageError(
            'the tier "generation" cannot be reached: %s has no endpoint that makes a token: use the tier "model"'
            % profile.title
        )
    path = params["log_path"]
    if path is not None and not (isinstance(path, str) and os.path.isabs(path)):
        raise UsageError('"log_path" must be a path that begins with "/", not "%s"' % path)
    if path is not None and "\0" in path:
        raise UsageError('"log_path" holds a null byte: leave it out')
    if path is not None and not unit:
        raise UsageError('"log_path" is the log of the unit: give "unit" too')
    if params["gpus"]:
        # Loaded where it is asked for: a module compiles what it imports on every run.
        from . import _gpu_select

        _gpu_select.check(params["gpus"])


def run(
    params: Params,
    check_mode: bool = False,
    tick: t.Callable[[], None] = lambda: None,
    warn: t.Callable[[str], None] = lambda _text: None,
    watch: t.Optional[t.Callable[[Wait], None]] = None,
    clock: Clock = SYSTEM_CLOCK,
) -> t.Dict[str, t.Any]:
    """Wait as the options say, or for one slice of it. ``watch`` sees the wait all the time."""
    began = clock.monotonic()
    planned = plan(params)
    planned = planned._replace(named=planned.named._replace(once=check_mode))
    if params.get("resume") and not check_mode:
        try:
            return _slice(planned, params, tick, warn, clock, began)
        finally:
            planned.target.close()
    wait = planned.wait(clock, began)

    def seen() -> None:
        tick()
        if watch is not None:
            watch(wait)

    try:
        with _found_out(planned, wait):
            ending = wait.run(seen, once=check_mode)
        assert ending is not None
        return _answer(planned, wait, ending)
    finally:
        for text in planned.target.warnings:
            warn(planned.veil(text))
        planned.target.close()


def _slice(
    planned: Plan,
    params: Params,
    tick: t.Callable[[], None],
    warn: t.Callable[[str], None],
    clock: Clock,
    began: float,
) -> t.Dict[str, t.Any]:
    ask = _wait_request.asked(params["resume"])
    boot = _wait_state.boot_id()
    part = _wait_state.Slice(lambda start: planned.wait(clock, start), planned.what, ask, boot, clock, began)
    with _wait_line.opened(ask.line) as write:

        def keep() -> None:
            # A lease outlives its renewal by a minute: a controller that was killed must not hold it for much longer.
            if _unheard():
                raise ServingError("nobody waits for the answer any more")
            tick()
            if ask.line:
                part.tell(lambda live: write(json.dumps(_foreign.walked(live, planned.veil))))

        with _found_out(planned, part.wait):
            ending = part.wait.run(keep, leave=part)
    if ending is not None:
        # The target carries them from slice to slice, without what has been put right since and with the newest counts.
        for text in planned.target.warnings:
            warn(planned.veil(text))
        return _answer(planned, part.wait, ending)
    return {
        "verdict": "progressing",
        "msg": "the wait goes on",
        "resume": part.token(),
    }


def _unheard(number: int = 1) -> bool:
    """Whether the other end of the output is closed: the controller was killed, and its lease must not live on."""
    poller = select.poll()
    poller.register(number, select.POLLHUP)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _number, event in poller.poll(0))


@contextlib.contextmanager
def _found_out(planned: Plan, wait: Wait) -> t.Iterator[None]:
    """Let an error of the wait itself bring along what was found out before."""
    try:
        yield
    except ServingError as error:
        found = _foreign.walked(wait.as_dict(Ending("error", error.message)), planned.veil, keep=OURS)
        error.result = {**found, **error.result}
        raise


def _answer(planned: Plan, wait: Wait, ending: Ending) -> t.Dict[str, t.Any]:
    result = wait.as_dict(ending)
    cause = result["cause"]
    if cause is not None and cause["kind"] == "gpu_out_of_memory" and planned.gpus != []:
        holders = _holders(planned, wait.deadline.patience(HOLDERS_LIMIT))
        result["cause"] = cause if holders is None else {**cause, "holders": holders}
    told: t.Dict[str, t.Any] = _foreign.walked(result, planned.veil, keep=OURS)
    # What is secret may be cut in it, so it must be gone before.
    told["msg"] = planned.veil(_wait_text.sentence(told, planned.named))
    return told


def _holders(planned: Plan, limit: float) -> t.Optional[t.List[str]]:
    """Who else holds the GPUs, each with its pid, name, unit and memory; None where that cannot be seen."""
    from . import _gpu

    name = planned.target.name
    own = _systemd.unit_name(name) if name else None
    try:
        reading = _gpu.read(_gpu.Options(gpus=planned.gpus), limit)
    except ServingError:  # no reason to fail
        return None
    if not reading.devices:
        return None
    found: t.List[str] = []
    for device in reading.devices:
        for place in (device, *device.partitions):
            for holder in place.holders:
                if holder.identity is None or holder.identity.unit != own or own is None:
                    found.append("%s on %s" % (holder, place.label))
    return found[:MOST_HOLDERS]
