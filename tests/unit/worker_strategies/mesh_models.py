"""Models and data for the tests of tensor, pipeline and hybrid, and reference results of training
them in one process. All three strategies can split these models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 24
BATCH = 8
EPOCHS = 1
MAX_NORM = 0.5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.qkv, self.out_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """A language model whose output layer shares the embedding's weight. One bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1].mlp[2].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def make(name: str = "gpt", dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns the model with the same initial weights in every call."""
    torch.manual_seed(3)
    if name == "gpt":
        return Gpt().to(dtype)
    layers = [
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    ]
    return nn.Sequential(*layers).to(dtype)


def data(name: str = "gpt", dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Returns the same samples in every call."""
    generator = torch.Generator().manual_seed(5)
    if name == "gpt":
        text = torch.randint(11, (SAMPLES, 7), generator=generator)
        return TensorDataset(text[:, :-1], text[:, 1:])
    images = torch.randn(SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(images, torch.randint(5, (SAMPLES,), generator=generator))


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@functools.cache
def alone(
    name: str, optimizer: str, size: int = BATCH
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Trains in one process and returns the parameters and the optimizer state. Each batch is
    processed in micro-batches of `size` samples, whose gradients are accumulated."""
    net, samples = make(name), data(name)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for start in [*range(0, SAMPLES, BATCH)] * EPOCHS:
        for part in range(start, start + BATCH, size):
            x, y = samples[part : part + size]
            (loss_of(net(x), y) * size / BATCH).backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
    return {key: value.detach() for key, value in net.named_parameters()}, stepper.state_dict()
