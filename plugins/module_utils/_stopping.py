# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One stop as a task or a person asks for it: from the options to the answer."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, Mapping

from . import _ownership, _processes, _selection, _systemd
from ._accounts import group_name
from ._deadline import SYSTEM_CLOCK, Clock, Deadline
from ._errors import ServingError, UsageError
from ._processes import ProcessRef
from ._selection import Selection
from ._stop import Options, Stopper
from ._survey import Survey

__all__ = ["FILL", "SELECTORS", "carry_out", "stop"]

FILL = {"unit": "unit", "engine": "engine"}  # options that the definition of a service fills, and its keys
SELECTORS = ("unit", "pid", "pidfile", "pattern", "gpus")
MOST_TRIGGERS, TRIGGER_ANSWERS = 4, 1.0  # how many are asked about, and the seconds that systemd has for all of them
LEAST_ANSWER = 0.1  # seconds that one answer takes at least
NAME_BYTES = 15  # the kernel keeps no more of a name


def stop(
    params: Mapping[str, Any],
    check_mode: bool,
    tick: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda _text: None,
    watch: Callable[[Survey], None] = lambda _survey: None,
) -> dict[str, Any]:
    """Stop what the options select, or say what would be done.

    ``tick`` is called before each look, and ``watch`` is then shown what the one before has found.
    """
    if os.geteuid() != 0:
        warn("not run as root: processes of other users may not be found, and cannot be signalled")
    params = dict(params, protected=_protected(params["protected"]))
    options = _options(params)
    selection = _select(params)
    if selection.scan is None:
        return _selection.nothing(selection)
    return carry_out(selection, options, check_mode, tick=tick, warn=warn, watch=watch)


def carry_out(
    selection: Selection,
    options: Options,
    check_mode: bool,
    tick: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda _text: None,
    watch: Callable[[Survey], None] = lambda _survey: None,
    send: Callable[[ProcessRef, int], str] = _processes.send,
) -> dict[str, Any]:
    """Stop what was selected."""
    assert selection.scan is not None

    def before_look() -> None:
        tick()
        watch(stopper.survey)

    stopper = Stopper(selection.what, selection.scan, options, unit=selection.unit, tick=before_look, send=send)
    try:
        result = stopper.run(check_mode)
    finally:
        for text in selection.warnings:  # a look may have added to them
            warn(text)
    for text in [*_unmarked(stopper), *_dependents(result), *_triggers(result, check_mode)]:
        warn(text)
    doubt = selection.doubt()
    if doubt and result["verdict"] in ("absent", "stopped"):
        raise ServingError(doubt, **dict(result, verdict="error"))
    return result


def _unmarked(stopper: Stopper) -> Iterator[str]:
    """Why a worker of the unit may not be found, however far it went."""
    state = stopper.state
    if state is None or not state.found or "SupplementaryGroups" not in state.raw or _ownership.marks_of(state):
        return
    names = [group_name(gid) for gid in sorted(stopper.survey.marks)]
    yield (
        'the unit "%s" gives its processes no ownership mark: a worker that left its control group, session and tree '
        "is not found; SupplementaryGroups=%s in the unit marks them"
        % (state.name, names[0] if names else "gpuops-...")
    )


def _dependents(result: Mapping[str, Any]) -> Iterator[str]:
    """Which other units end because the unit does."""
    names = (result.get("unit_state") or {}).get("stops_with")
    if names and any(step["action"] == "systemd_stop" for step in result["plan"]) and result["verdict"] != "refused":
        yield "systemd stops %s together with it; starting it does not start them again" % ", ".join(
            '"%s"' % name for name in names
        )


def _triggers(result: Mapping[str, Any], check_mode: bool, clock: Clock = SYSTEM_CLOCK) -> Iterator[str]:
    """What may start the unit again although it was stopped, or would be."""
    state = result.get("unit_state")
    if state is None or result["verdict"] == "refused":
        return
    said = 'the unit "%s" may be started again by "%s", which is active: stop that first'
    if not result["changed"]:
        said = 'the unit "%s" may be started by "%s", which is active: stop that too'
    elif check_mode:
        said = 'the unit "%s" would be stopped, but may be started again by "%s", which is active: stop that first'
    end = Deadline(TRIGGER_ANSWERS, clock)
    for name in state["triggered_by"][:MOST_TRIGGERS]:
        if end.remaining < LEAST_ANSWER:
            return
        with contextlib.suppress(ServingError):  # the stop has its answer already
            if _systemd.show(name, end.remaining).awake:
                yield said % (state["name"], name)


def _select(params: Mapping[str, Any]) -> Selection:
    given = [name for name in SELECTORS if params.get(name) is not None]
    if len(given) > 1:
        raise UsageError('"%s" and "%s" exclude each other: give one of them' % (given[0], given[1]))
    if params.get("service") and given not in ([], ["unit"]):
        raise UsageError('"service" and "%s" exclude each other: give one of them' % given[0])
    if not given and not params.get("service"):
        raise UsageError("nothing is named that could be stopped: give one of service, %s" % ", ".join(SELECTORS))
    if params.get("allowed_holders") is not None and given != ["gpus"]:
        raise UsageError('"allowed_holders" says who may go on to hold "gpus": leave it out here')
    if params.get("engine") and given not in ([], ["unit"]):
        raise UsageError('"engine" tells what the processes of a unit are called: leave it out here')
    if given != ["gpus"]:
        return _selection.select(params)
    # Loaded where it is asked for: a module compiles what it imports on every run.
    from . import _holders

    _selection.check_words(params)
    return _holders.select(params)


def _protected(names: Any) -> tuple[str, ...]:
    """The names as the process table shows them, which is cut and with strange bytes escaped, and as they are."""
    if "" in names:
        raise UsageError('"protected" holds an empty name')
    cut = [_processes.escape(name.encode("utf-8", "surrogateescape")[:NAME_BYTES]) for name in names]
    return tuple(dict.fromkeys([*names, *cut]))


def _options(params: Mapping[str, Any]) -> Options:
    return Options(
        signal=params["signal"],
        grace=params["grace"],
        kill_grace=params["kill_grace"],
        timeout=params["timeout"],
        order=params["order"],
        protected=tuple(params["protected"]),
        allow_foreign_users=params["allow_foreign_users"],
        reset_failed=params["reset_failed"],
    )
