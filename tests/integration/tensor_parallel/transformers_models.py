"""Tiny models of transformers, of each family that `tensor` splits without a plan, with batches as their users have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
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


def _gpt2() -> nn.Module:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=0, **none)
    )


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **_ENCODER))


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **_SIZES)),
    "t5": _t5,
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **_ENCODER)),
    "vit": _vit,
}
GENERATING = tuple(family for family in FAMILIES if family not in ("bert", "vit"))


def build(family: str) -> nn.Module:
    """A small model of the family, in float64, with the same values on each call."""
    torch.manual_seed(0)
    return FAMILIES[family]().double()


def batch(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model. One sequence of several is padded, and masked where it is."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {
            "pixel_values": torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, 5, (4,), generator=generator),
        }
    words = torch.randint(2, WORDS, (4, LENGTH), generator=generator)
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}
