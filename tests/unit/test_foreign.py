# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What others wrote, fit to be told."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _foreign

KEY = 'sk-01/23"45+67\u00e9'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("a\tb\r\nc", "a b  c"),
        ("\x1b[2Jx\x07\x7f", "\\x1b[2Jx\\x07\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800x\udcff", "\\ud800x\\udcff"),
        ("user\u202egnp.exe \u2066x \u200f", "user\\u202egnp.exe \\u2066x \\u200f"),
        ("a\u2028b\ufeff", "a\\u2028b\\ufeff"),
        ("\u6a21\u578b \u00fc \U0001f600", "\u6a21\u578b \u00fc \U0001f600"),
    ],
)
def test_a_text_is_one_line_in_which_everything_can_be_seen(text: str, shown: str) -> None:
    assert _foreign.plain(text) == _foreign.seen(text) == shown
    shown.encode()


def test_a_long_text_says_how_much_is_missing() -> None:
    assert _foreign.plain("x" * 7, 7) == "x" * 7
    assert _foreign.plain("x" * 10, 7) == "xxxxxxx... (3 more characters)"
    assert len(_foreign.plain("x" * 1000000)) < 2100


def test_halves_of_characters_are_found_wherever_they_are() -> None:
    value = {"a\ud800": ["x\n", ("\udcff", 1)], "b": {"c": None, "d": True}}
    assert _foreign.valid(value) == {"a\\ud800": ["x\n", ["\\udcff", 1]], "b": {"c": None, "d": True}}


def test_words_of_ours_are_left_alone_and_all_else_is_changed() -> None:
    value = {"verdict": "ready", "tiers": [{"name": "health", "detail": "ready"}], "at": 1.5}
    assert _foreign.walked(value, str.upper, keep=("verdict", "name")) == {
        "verdict": "ready",
        "tiers": [{"name": "health", "detail": "READY"}],
        "at": 1.5,
    }


@pytest.mark.parametrize(
    "echo",
    [
        KEY,
        json.dumps(KEY),
        json.dumps(KEY).replace("/", "\\/"),
        json.dumps({"key": KEY}, ensure_ascii=False),
        repr({"key": KEY}),
        repr({"it's": KEY}),
        quote(KEY, safe=""),
        quote(KEY),
        "Bearer %s %s" % (KEY, KEY),
    ],
)
def test_a_key_is_masked_in_every_spelling(echo: str) -> None:
    secrets = _foreign.secrets_of(KEY, {})
    for text in (echo, "before " + echo + " behind"):
        assert "23" not in _foreign.masked(text, secrets)
        assert _foreign.MASK in _foreign.masked(text, secrets)


@pytest.mark.parametrize("length", range(_foreign.SHORTEST, len("sk-0123456789abcdef") + 1))
def test_a_key_of_which_the_end_is_missing_is_masked_too(length: int) -> None:
    key = "sk-0123456789abcdef"
    assert _foreign.masked("status 500: " + key[:length], [key]) == "status 500: " + _foreign.MASK


@pytest.mark.parametrize("key", ["aaaaaaaaaaaaaaab", "sk-sk-sk-sk-sk-sk"])
def test_a_key_that_repeats_itself_is_masked_where_it_is_cut(key: str) -> None:
    for length in range(_foreign.SHORTEST, len(key)):
        assert _foreign.masked("x " + key[:length], [key]) == "x " + _foreign.MASK


def test_headers_are_secret_as_a_whole_and_in_words_and_decoded() -> None:
    secrets = _foreign.secrets_of(None, {"A": "Basic b3BzOmh1bnRlcjItaHVudGVy", "B": "Token abcdefghij", "C": 7})
    told = _foreign.masked("ops:hunter2-hunter b3BzOmh1bnRlcjItaHVudGVy hunter2-hunter abcdefghij 7 Token", secrets)
    assert told == " ".join([_foreign.MASK] * 4 + ["7", "Token"])
    assert _foreign.secrets_of("", None) == []


def test_secrets_are_masked_before_a_text_is_cut() -> None:
    key = "sk-0123456789abcdef"
    for begin in range(60):
        told = _foreign.Veil([key], 50)("x" * begin + key + " rest")
        assert "012345" not in told


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h:1/login", "https://h:1/login"),
        ("https://user:pass@h:1/login?token=secret#secret", "https://h:1/login"),
        ("http://user:pa@ss@h/x", "http://h/x"),
        ("http://user:pa/ss@h/x", "http://..."),
        ("/login?token=secret", "/login"),
        ("http://h/\x1b[2J\n", "http://h/\\x1b[2J"),
    ],
)
def test_where_a_url_leads_is_told_without_what_may_be_secret(url: str, shown: str) -> None:
    assert _foreign.place(url) == shown


def test_a_long_url_is_cut() -> None:
    assert len(_foreign.place("http://h/" + "x" * 100000)) < 250


def test_a_great_answer_is_walked_in_time() -> None:
    texts = ["x" * 1000] * 100
    secrets = ["y" * 2000, "x" * 8 + "z" * 2000]
    assert _foreign.walked(texts, _foreign.Veil(secrets)) == ["x" * 992 + _foreign.MASK] * 100
