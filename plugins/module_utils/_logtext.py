# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Bytes of a log as lines that can be shown: progress bars step by step, without colours, bounded."""

from __future__ import annotations

import re
import typing as t

__all__ = ("LINE_WIDTH", "line_of", "lines_of")

LINE_WIDTH = 4096  # characters of a line that are kept
MOST_LINES = 1000  # of one message or file, the last ones

# Colours and cursor movements; titles and links, which end in a bell or in a sequence of their own.
ESCAPE_SEQUENCE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Only these end a line, or go back to its beginning.
ENDS = re.compile(rb"[\r\n]+")


def line_of(raw: bytes) -> str:
    """One line as text; what is no text is marked as such."""
    # A character has four bytes at most, and a colour hides as many again.
    # Zeros are what a file has where it was emptied under a writer.
    text = raw.replace(b"\0", b"")[: LINE_WIDTH * 8].decode("utf-8", "replace")
    if not text.isprintable():  # most lines are
        text = ESCAPE_SEQUENCE.sub("", text)
    return CONTROL.sub("", text).rstrip()[:LINE_WIDTH]


def lines_of(raw: bytes) -> t.List[str]:
    """The lines in it that hold something."""
    return [line for line in map(line_of, ENDS.split(raw)[-MOST_LINES:]) if line]
