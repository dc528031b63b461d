"""Tiny transformers models of each family that `tensor` shards without a plan, with typical
batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WORDS = 96
LENGTH = 12

_SIZES: Mapping[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ENCODER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", _SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8, **_SIZES}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {"vocab_size": WORDS, **_ENCODER}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 16, "patch_size": 4, "num_labels": 5, **_ENCODER},
    ),
}
"""Family -> its model class, its configuration class, and the configuration's values."""
GENERATING = tuple(family for family in FAMILIES if family not in ("bert", "vit"))


def build(family: str) -> nn.Module:
    """Builds a small model of the family in float64, with the same values on each call."""
    import transformers  # imported here because it takes more than a second

    model, configuration, values = FAMILIES[family]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, configuration)(**values))
    assert isinstance(built, nn.Module)
    return built.double()


def batch(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Returns the model's keyword arguments. One of several sequences is padded, and its padding is
    masked."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {
            "pixel_values": torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, 5, (4,), generator=generator),
        }
    words = torch.randint(2, WORDS, (4, LENGTH), generator=generator)
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 3 :] = 0
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }
