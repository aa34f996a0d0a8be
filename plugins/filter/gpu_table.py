# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.gpuops.serving.plugins.plugin_utils import _gpu_check, _gpu_table

try:
    from ansible.utils.unsafe_proxy import wrap_var
except ImportError:  # newer cores take no result of a filter for a template

    def wrap_var(value: t.Any) -> t.Any:
        return value


def _report(*arguments: t.Any) -> t.Any:
    """What hosts and processes are called is never a template."""
    return wrap_var(_gpu_table.report(*arguments))


def _table(found: t.Mapping[str, t.Any]) -> t.Any:
    return wrap_var(_gpu_table.table(found))


class FilterModule:
    """The check of an inventory's GPUs: its request, its report, its table."""

    def filters(self) -> t.Dict[str, t.Callable[..., t.Any]]:
        return {
            "gpu_check_pattern": _gpu_check.pattern,
            "gpu_check_problems": _gpu_check.problems,
            "gpu_check_share": _gpu_check.share,
            "gpu_report": _report,
            "gpu_table": _table,
        }
