# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Four kinds of host (systemd 247, 252, 257, and legacy control groups) on which tests stop units, all at once."""

from __future__ import annotations

import contextlib
import hashlib
import typing as t

from gpulab import common
from labhosts import LabHosts, Result

HOSTS = {"old": "bullseye", "mid": "bookworm", "new": "trixie", "legacy": "bullseye,legacy=1"}
FOREST = common.REPO / "tests" / "fakes" / "forest.py"

__all__ = ("HOSTS", "FourHosts", "Result", "mark_group")


def mark_group(service: str) -> str:
    """The group that marks the processes of a service."""
    return "gpuops-" + hashlib.sha256(service.encode()).hexdigest()[:12]


class FourHosts(LabHosts):
    """A lab of the four kinds, with what it takes to grow processes there."""

    def __init__(self, name: str) -> None:
        super().__init__(name, HOSTS)

    @contextlib.contextmanager
    def up(self) -> t.Iterator[None]:
        with super().up():
            self.everywhere("cat > /opt/forest.py", FOREST.read_text(encoding="utf-8"))
            yield

    def stop(
        self,
        *calls: t.Dict[str, t.Any],
        check: bool = False,
        hosts: t.Sequence[str] = tuple(HOSTS),
        first: str = "true",
    ) -> t.Dict[str, t.List[Result]]:
        """Call process_tree_stop once for each of these options; what each host answered.

        ``first`` is a shell command that each host runs right before.
        """
        return self.modules("process_tree_stop", *calls, check=check, hosts=hosts, first=first)

    def stop_one(self, check: bool = False, **options: t.Any) -> t.Dict[str, Result]:
        """The same for a single call."""
        return {host: answers[0] for host, answers in self.stop(options, check=check).items()}
