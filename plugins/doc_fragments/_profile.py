# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The option of modules that know an engine by its profile."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  profile:
    description:
      - What this engine does otherwise than its profile says, as a mapping of fields to values; see the page
        C(docs/engines.md).
      - A regular expression in it that takes more than half a second of the processor for one line of the log is not
        used any more, and a warning names it.
      - Default is that of O(service).
    type: dict
"""
