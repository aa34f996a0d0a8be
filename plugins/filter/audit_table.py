# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.gpuops.serving.plugins.plugin_utils import _audit_check, _audit_table

try:
    from ansible.utils.unsafe_proxy import wrap_var
except ImportError:  # newer cores take no result of a filter for a template

    def wrap_var(value: t.Any) -> t.Any:
        return value


def _report(*arguments: t.Any) -> t.Any:
    """What hosts and units are called is never a template."""
    return wrap_var(_audit_table.report(*arguments))


def _table(found: t.Mapping[str, t.Any]) -> t.Any:
    return wrap_var(_audit_table.table(found))


class FilterModule:
    """The audit of an inventory's units: its request, its report, its table."""

    def filters(self) -> t.Dict[str, t.Callable[..., t.Any]]:
        return {
            "audit_problems": _audit_check.problems,
            "audit_share": _audit_check.share,
            "audit_report": _report,
            "audit_table": _table,
        }
