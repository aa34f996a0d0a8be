# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Text as systemd reads it: command lines, environment files and plain values.

A unit file has three layers that change text: quotes and backslashes, specifiers (``%``) and variables (``$``).
An environment file has only the first.
"""

from __future__ import annotations

import re
import typing as t

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def command_line(words: t.Sequence[str]) -> str:
    """The value of ``ExecStart=`` that gives the program exactly these words.

    :raises ValueError: for what cannot be written, or could be written but is surely a mistake.
    """
    program = words[0]
    if not program.startswith("/"):
        raise ValueError('the program "%s" is not an absolute path' % program)
    if "$" in program:
        # Variables are not replaced in the path of the program, so that the dollar cannot be doubled there.
        raise ValueError('the program "%s" has a dollar sign in its path' % program)
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    if "\n" in word or "\r" in word or "\0" in word:
        raise ValueError('the word "%s" holds a line break or a null byte' % word.splitlines()[0].replace("\0", "?"))
    if _PLAIN_WORD.match(word):
        return word
    quoted = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"%s"' % "".join(_visible(character) for character in quoted)


def _visible(character: str) -> str:
    return "\\x%02x" % ord(character) if ord(character) < 32 or ord(character) == 127 else character


def plain(value: str) -> str:
    """A value that systemd does not split into words, such as a description or a folder."""
    return value.replace("%", "%%")


def environment_file(variables: t.Mapping[str, str]) -> str:
    """The lines of an environment file, sorted by name. Everything is quoted, so nothing is read as more than text."""
    lines = []
    for name in sorted(variables):
        value = variables[name]
        if not _NAME.match(name):
            raise ValueError('"%s" is not the name of a variable' % name)
        if "\n" in value or "\r" in value or "\0" in value:
            # Not shown: a value may be a secret.
            raise ValueError('the value of "%s" holds a line break or a null byte' % name)
        lines.append('%s="%s"\n' % (name, re.sub(r'(["\\`$])', r"\\\1", value)))
    return "".join(lines)
