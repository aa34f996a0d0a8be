# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The processor time that others have used, for the parts of the bench that start programs and work on labs."""

from __future__ import annotations

import resource

from gpulab import cgroups

__all__ = ("guests", "processor")


def processor() -> float:
    """Seconds of processor time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def guests(lab: str) -> float:
    """Seconds of processor time of all hosts of a lab."""
    text = (cgroups.groups(lab)[0] / "cpu.stat").read_text(encoding="ascii")
    return int(dict(line.split() for line in text.splitlines())["usage_usec"]) / 1e6
