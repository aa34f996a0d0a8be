# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Write a Llama with random weights in several files, so that its load takes steps; run by the Python that has vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# The attention kernel for the processor knows no heads smaller than 64.
HEAD, HEADS, LAYERS = 64, 8, 24
# The context is longer than the memory of the tests' unit holds: one of them asks for all of it.
WIDTH, INNER, CONTEXT = HEAD * HEADS, 2048, 131072
BEGIN, END = "<s>", "</s>"


def tokenizer() -> Tokenizer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate([BEGIN, END, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BEGIN, END])
    return made


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    vocabulary = made.get_vocab_size()
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def texts(name: str, content: object) -> None:
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
    }
    texts("config.json", config)
    texts("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END})
    parts = [{"model.embed_tokens.weight": matrix(vocabulary, WIDTH)}]
    for layer in range(LAYERS):
        start = "model.layers.%d." % layer
        part = {start + name + ".weight": torch.ones(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
        part.update({start + "self_attn.%s_proj.weight" % name: matrix(WIDTH, WIDTH) for name in "qkvo"})
        part.update({start + "mlp.%s_proj.weight" % name: matrix(INNER, WIDTH) for name in ("gate", "up")})
        part[start + "mlp.down_proj.weight"] = matrix(WIDTH, INNER)
        parts.append(part)
    parts.append({"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": matrix(vocabulary, WIDTH)})
    where = {}
    for at, part in enumerate(parts, 1):
        name = "model-%05d-of-%05d.safetensors" % (at, len(parts))
        save_file(part, folder / name, {"format": "pt"})
        (folder / name).chmod(0o644)
        where.update(dict.fromkeys(part, name))
    texts("model.safetensors.index.json", {"metadata": {}, "weight_map": where})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
