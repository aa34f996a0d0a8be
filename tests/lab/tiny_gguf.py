#!/usr/bin/env python3
# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a tiny Llama model with random weights: it says nothing sensible, but a real engine loads and runs it."""

from __future__ import annotations

import sys

import gguf
import numpy as np

_LETTERS = 26
_WIDTH, _LAYERS, _HEADS, _INNER, _CONTEXT = 64, 1, 2, 128, 65536


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Every byte, and words enough that a few letters are a token; no end-of-sequence token is ever likely."""
    tokens = ["<unk>", "<s>", "</s>"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [gguf.TokenType.BYTE] * 256
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens += ["\u2581", *letters, *(f"\u2581{letter}" for letter in letters)]
    kinds += [gguf.TokenType.NORMAL] * (1 + 2 * len(letters))
    return tokens, [float(-index) for index in range(len(tokens))], [int(kind) for kind in kinds]


def write(path: str) -> None:
    """Write the model file; the same bytes every time."""
    random = np.random.default_rng(1)
    tokens, scores, kinds = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        return values

    writer.add_tensor("token_embd.weight", matrix(len(tokens), _WIDTH))
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(_WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{prefix}{name}.weight", matrix(_WIDTH, _WIDTH))
        writer.add_tensor(f"{prefix}ffn_gate.weight", matrix(_INNER, _WIDTH))
        writer.add_tensor(f"{prefix}ffn_up.weight", matrix(_INNER, _WIDTH))
        writer.add_tensor(f"{prefix}ffn_down.weight", matrix(_WIDTH, _INNER))
    writer.add_tensor("output_norm.weight", np.ones(_WIDTH, np.float32))
    # Letters are all it ever says: a control token would end an answer, a byte would not be text.
    output = 6 * matrix(len(tokens), _WIDTH)
    output[: len(tokens) - 2 * _LETTERS] = 0
    writer.add_tensor("output.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(sys.argv[1])
