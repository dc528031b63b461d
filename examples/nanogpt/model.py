"""A small GPT with the interface of nanoGPT's model.py."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class GPTConfig:
    """Sizes of the model."""

    block_size: int = 32
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


class GPT(nn.Module):
    """Decoder-only transformer. The output layer shares its weight with the token embedding."""

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.n_embd, config.n_head, 4 * config.n_embd, 0.0, "gelu", 1e-5, True, True
            )
            for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets):
        length = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=idx.device)
        h = self.tokens(idx) + self.places(torch.arange(length, device=idx.device))
        for block in self.blocks:
            h = block(h, mask, is_causal=True)
        logits = self.head(self.norm(h))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
