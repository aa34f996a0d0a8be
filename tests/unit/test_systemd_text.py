# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Words reach a program through systemd exactly as they were written (the lab proves the same with real systemd)."""

from __future__ import annotations

import pytest
from ansible_collections.gpuops.serving.plugins.plugin_utils import _systemd_text


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--port=8000", "--port=8000"),
        ("a b", '"a b"'),
        ("", '""'),
        (";", '";"'),
        ("100%", '"100%%"'),
        ("%n", '"%%n"'),
        ("$HOME", '"$$HOME"'),
        ("${HOME}", '"$${HOME}"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("it's", '"it\'s"'),
        ("C:\\x", '"C:\\\\x"'),
        ("ends in \\", '"ends in \\\\"'),
        ("tab\there", '"tab\\x09here"'),
        ('{"a": [1]}', '"{\\"a\\": [1]}"'),
        ("größe", '"größe"'),
        ("#x", '"#x"'),
        ("-", "-"),
    ],
)
def test_a_word_is_quoted(word: str, written: str) -> None:
    assert _systemd_text.command_line(["/bin/x", word]) == "/bin/x " + written


@pytest.mark.parametrize(
    ("program", "written"),
    [("/opt/a b/run", '"/opt/a b/run"'), ("/opt/50%/run", '"/opt/50%%/run"'), ("/bin/@x", "/bin/@x")],
)
def test_a_program_is_quoted(program: str, written: str) -> None:
    assert _systemd_text.command_line([program]) == written


@pytest.mark.parametrize("program", ["run", "./run", "-/bin/run", "@/bin/run", "/opt/$X/run", ""])
def test_a_program_that_systemd_would_read_otherwise_is_refused(program: str) -> None:
    with pytest.raises(ValueError, match="the program "):
        _systemd_text.command_line([program])


@pytest.mark.parametrize("word", ["a\nb", "\n", "a\rb", "a\0b"])
def test_line_breaks_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="holds a line break or a null byte"):
        _systemd_text.command_line(["/bin/x", word])


def test_an_environment_file_quotes_everything_and_is_sorted() -> None:
    text = _systemd_text.environment_file({"B": "a \"b\" 'c' $d `e` \\f # g ;", "A": "%h"})
    assert text == 'A="%h"\nB="a \\"b\\" \'c\' \\$d \\`e\\` \\\\f # g ;"\n'


def test_a_value_that_is_refused_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r'^the value of "KEY" holds a line break or a null byte$'):
        _systemd_text.environment_file({"KEY": "s3cret\n"})


def test_a_plain_value_keeps_its_percent_signs() -> None:
    assert _systemd_text.plain("100% of it") == "100%% of it"
