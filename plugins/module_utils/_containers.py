# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Containers whose client a unit runs: which they are, and how their manager is asked to stop them."""

from __future__ import annotations

from ._places import Container

__all__ = ["Container"]
