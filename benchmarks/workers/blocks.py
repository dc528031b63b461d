"""The model, the data and the optimizer of T6, T7 and T8. The model is a small decoder of equal
blocks.

Its modules are named as in Llama, so that tensor parallelism recognizes the layers. The blocks are
in one list, so that they can be sharded one by one and assigned to pipeline stages. At a width of
256, the model has about 3.4 million parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workers.workload import Workload

WORDS = 512
TOKENS = 16
"""Tokens per sample."""
BLOCKS = 4
HEAD_WIDTH = 32
SAMPLES_PER_RANK = 512
MANY_EPOCHS = 1_000_000


class Attention(nn.Module):
    """Causal attention with heads of `HEAD_WIDTH`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // HEAD_WIDTH
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """MLP with a hidden layer that is four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm and output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def network(workload: Workload) -> Decoder:
    """Returns the network, with the same initial parameters in all processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Decoder(workload.width)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer with two moments per parameter, so that its state is twice as large as
    the parameters."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def dataset(workload: Workload) -> TensorDataset:
    """Returns sequences of random tokens, the same in all processes. The target of each token is
    the token itself."""
    words = torch.randint(
        0,
        WORDS,
        (SAMPLES_PER_RANK * workload.ranks, TOKENS),
        generator=torch.Generator().manual_seed(1),
    )
    return TensorDataset(words, words)
