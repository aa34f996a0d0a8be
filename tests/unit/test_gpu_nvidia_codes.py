# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every return code of the driver library has its sentence."""

from __future__ import annotations

import re

import pynvml
import pytest
from ansible_collections.gpuops.serving.plugins.module_utils._gpu_nvml_codes import CODES, FIELD, explain

KNOWN = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


def test_every_code_of_the_binding_is_explained():
    """Red when a newer binding brings a code: give it a word and a sentence."""
    assert sorted(CODES) == sorted(set(KNOWN.values()))


@pytest.mark.parametrize("code", sorted(CODES))
def test_each_is_a_word_and_part_of_one_sentence(code):
    reason, sentence, remedy = CODES[code]
    assert re.fullmatch(r"[a-z_]+", reason)
    assert sentence[-1].isalpha() and ":" not in sentence
    assert remedy == "" or (remedy[0].islower() and not remedy.endswith("."))
    assert explain(pynvml.NVMLError(code)) == (
        reason,
        "%s (code %d)%s" % (sentence, code, "; " + remedy if remedy else ""),
    )


def test_what_differs_reads_differently():
    sentences = [sentence for _, sentence, _ in CODES.values()]
    assert len(set(sentences)) == len(sentences)
    remedies = [CODES[code][2] for code in (9, 12, 18)]
    assert all(remedies) and len(set(remedies)) == 3


def test_a_code_that_nobody_knows_is_an_error_with_the_words_of_the_library():
    class Stranger:
        value = 77

        def __str__(self):
            return "Brand new"

    assert explain(Stranger()) == ("driver_error", "the driver answers: Brand new (code 77)")


def test_what_is_about_one_field_only():
    """Not supported, no permission, not found, no such function, version or any more: all others are the device's."""
    assert sorted(FIELD) == [3, 4, 6, 13, 25, 26]
