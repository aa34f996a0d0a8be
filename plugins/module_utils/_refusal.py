# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Why a stop must not even begin: whom it would end besides, or that systemd would not do it."""

from __future__ import annotations

from ._places import HOST_UNITS
from ._survey import Survey
from ._systemd import UnitState

__all__ = ["why"]


def why(survey: Survey) -> str:
    """Why nothing may be signalled, as the first look shows it; empty when all may."""
    state, own = survey.state, survey.own
    if state is not None and own is not None:
        return 'this task itself runs below the process %d "%s" of the unit "%s"' % (own.pid, own.name, state.name)
    if state is not None:
        text = _unit(survey, state)
        if text:
            return text
    for member in survey.members.values():
        if member.standing in ("protected", "allowed"):
            who = 'the protected process %d "%s"' % (member.process.pid, member.process.name)
            if state is not None and not state.at_rest and survey.falls_to_systemd(member):
                return 'systemd would end %s together with the unit "%s"' % (who, state.name)
            container = survey.containers.get(member.container or "")
            if container is not None and container.stop:
                return '%s would end %s together with the container "%s"' % (container.manager, who, container.name)
    return ""


def _unit(survey: Survey, state: UnitState) -> str:
    """Why systemd must not stop the unit: its own name counts, not an alias, and what stops together with it."""
    text = 'the unit "%s" holds the sessions of users or this host itself, not a service'
    if HOST_UNITS.match(state.name):
        return text % state.name
    if state.at_rest:
        return ""
    if state.refuses_stop:
        return 'systemd stops the unit "%s" for nobody but units that depend on it (RefuseManualStop=)' % state.name
    for name in state.stops_with:
        if HOST_UNITS.match(name):
            return '%s, and systemd would stop it together with "%s"' % (text % name, state.name)
        if name in survey.own_units:
            return 'this task itself runs in the unit "%s", which systemd would stop together with "%s"' % (
                name,
                state.name,
            )
    return ""
