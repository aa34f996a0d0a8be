# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The errors that the library raises; modules and the host command line turn them into answers."""

from __future__ import annotations

import typing as t


class ServingError(Exception):
    """Something went wrong that an operator must know about.

    ``message`` is one sentence for a person. ``result`` holds what was found out before the failure,
    in the same shape as a successful answer.
    """

    def __init__(self, message: str, **result: t.Any) -> None:
        super().__init__(message)
        self.message = message
        self.result = result


class UsageError(ServingError):
    """The caller asked for something that makes no sense; nothing was read or touched."""


class MissingLibrary(ServingError):
    """A Python distribution that the library needs is not importable here."""
