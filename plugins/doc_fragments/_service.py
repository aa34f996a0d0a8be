# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Options shared by modules that work on a named service."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  service:
    description:
      - Name of a service that is defined on the host in C(/etc/gpuops/services/NAME.json), as the role
        P(gpuops.serving.inference_service#role) writes it.
      - The definition fills the options that the task leaves out. An option that the task gives always wins.
      - A service without a definition is an error, unless the task gives what the definition would fill. Then the name
        serves for locks, leases and messages alone, which is how units that others wrote are worked on.
    type: str
"""

    MUTATING = r"""
options:
  run_id:
    description:
      - The run that holds the lease of O(service), as M(gpuops.serving.service_lease) returned it.
      - With it, the call renews the lease, and answers RV(verdict=refused) without doing anything when the lease
        has gone to another run in the meantime.
      - Without it, a call that changes something is refused while another run holds a fresh lease.
    type: str
"""
