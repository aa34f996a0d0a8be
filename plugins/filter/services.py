# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.gpuops.serving.plugins.plugin_utils import _service_checks, _services


class FilterModule:
    """The services of a host: checked, completed, and their secrets."""

    def filters(self) -> t.Dict[str, t.Callable[..., t.Any]]:
        return {
            "service_problems": _service_checks.problems,
            "service_items": _services.resolve,
            "service_secrets": _services.secrets,
        }
