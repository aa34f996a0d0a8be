# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The managers of a service's containers during its stop: what they were asked, and whether they have answered."""

from __future__ import annotations

from . import _containers
from ._deadline import Clock
from ._survey import Member, Survey

__all__ = ["Managers"]


class Managers:
    """A container is stopped by its manager, which would start it again otherwise; each is asked once."""

    def __init__(self, survey: Survey, clock: Clock) -> None:
        self._survey = survey
        self._clock = clock
        self._requests: dict[str, _containers.Request] = {}

    def waiting(self) -> bool:
        """Whether there is a container of which nothing need run, and that its manager would start again."""
        return any(self._restarts(name) for name in self._survey.containers)

    def ask(self, seconds: float) -> bool:
        """Ask for the stop of each that runs or would start again, within ``seconds``; says whether any was asked."""
        asked = False
        for name, container in self._survey.containers.items():
            inside = [m for m in self._survey.ours() if m.container == name]
            if not container.stop or name in self._requests or not (inside or container.restarts):
                continue
            self._requests[name] = _containers.Request(container, seconds)
            asked = True
            for member in inside:
                member.signals.append(container.manager)
                member.signalled_at = self._clock.monotonic()
        return asked

    def at_work_on(self, member: Member) -> bool:
        """Whether the process is in a container whose manager was asked and has not answered yet."""
        request = self._requests.get(member.container or "")
        return request is not None and not request.done

    def answered(self) -> bool:
        return all(request.done for request in self._requests.values())

    def doubt(self) -> str:
        """Why a container may be started again by its manager, empty when none may."""
        for name, request in self._requests.items():
            container = self._survey.containers[name]
            if container.restarts and request.failed and "no such container" not in request.failed.lower():
                return 'the %s container "%s" may start again: its stop failed: %s' % (
                    container.manager,
                    container.name,
                    request.failed,
                )
        return ""

    def end(self) -> None:
        """Leave no request behind."""
        for request in self._requests.values():
            request.end()

    def _restarts(self, name: str) -> bool:
        container = self._survey.containers[name]
        return bool(container.restarts and container.stop) and name not in self._requests
