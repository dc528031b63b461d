"""Small models to be pipelined, and the results of one process for the same batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_worker.pipelining.micro_batches import MicroBatch, cut_batch
from shoal_worker.pipelining.rank_pipeline import (
    Pipeline,
    PipelineSettings,
    shared_exist,
    sum_shared,
)
from torch import nn

VOCABULARY = 13


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(6, 6), nn.ReLU(inplace=True)]
    return nn.Sequential(
        nn.Sequential(*layers[:8]), nn.Sequential(*layers[8:]), nn.Linear(6, 3)
    ).double()


def cnn() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        for _ in range(7)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)).double()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x_BTD)).split(x_BTD.shape[-1], dim=-1)
        return x_BTD + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT)
        )


class GPT(nn.Module):
    """A GPT with tied embeddings, whose layers return tuples as older ones of Hugging Face do."""

    def __init__(self, layers: int = 7, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(16, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(GPTLayer(width, dropout) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.transformer["wte"].weight
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.transformer["wte"](tokens) * self.scale + self.transformer["wpe"](
            torch.arange(length)
        )
        x = self.transformer["drop"](x)
        allowed = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
        for layer in self.transformer["h"]:
            x, _ = layer(x, mask=allowed)
        return self.head(self.transformer["ln_f"](x)) * self.scale


class GPTLayer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        x_BTD = self.attention(x_BTD, mask)
        return x_BTD + self.dropout(torch.tanh(self.linear(x_BTD))), None


Gradients = dict[str, torch.Tensor | None]

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "gpt": GPT, "cnn": cnn}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str, rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "gpt":
        both = torch.randint(0, VOCABULARY, (2, rows, 5), generator=generator)
        return both[0], both[1]
    shape = (rows, 6) if name == "mlp" else (rows, 3, 4, 4)
    return torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (rows,), generator=generator
    )


def cross_entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1))


def pipeline_of(module: nn.Module, group: Any, **settings: Any) -> Pipeline:
    """Makes a pipeline of a copy of the module."""
    return Pipeline(copy.deepcopy(module), PipelineSettings(**settings), group=group)


def train(pipeline: Pipeline, inputs: Any, targets: Any = None, **options: Any) -> float:
    """Runs a batch through the pipeline and returns the loss. Adds the gradients, and sums those of
    shared parameters over their stages."""
    parts = cut_batch(inputs, targets, count=pipeline.settings.micro_batches, **options)
    loss = float(pipeline.train_on(parts, None if targets is None else cross_entropy))
    shared, own = (
        pipeline.split.shared,
        dict(pipeline.module.named_parameters(remove_duplicate=False)),
    )
    sum_shared(
        shared, pipeline.rank_of, own, pipeline.links, shared_exist(shared, own, pipeline.links)
    )
    return loss


def gradients_here(pipeline: Pipeline) -> Gradients:
    """Returns the gradients of the parameters on this rank's stages, by name in the full model."""
    stages = {stage for stage, rank in enumerate(pipeline.rank_of) if rank == pipeline.links.rank}
    return {
        name: p.grad
        for name, p in pipeline.module.named_parameters()
        if stages & set(pipeline.split.placement[name])
    }


def alone(
    module: nn.Module, batches: Sequence[MicroBatch]
) -> tuple[float, Gradients, dict[str, torch.Tensor]]:
    """Trains one process that accumulates the same micro-batches; returns the loss, the gradients,
    and the parameters and buffers after it."""
    module = copy.deepcopy(module)
    weight = sum(one.weight for one in batches)
    total = 0.0
    for one in batches:
        loss = cross_entropy(module(*one.call.args, **one.call.kwargs), one.targets)
        share: Any = loss * (one.weight / weight)
        if share.requires_grad:
            share.backward()
        total += float(share.detach())
    return total, {name: p.grad for name, p in module.named_parameters()}, module.state_dict()
