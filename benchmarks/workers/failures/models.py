"""The models and the data of T17, the same in all workers of all systems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workers import blocks
from benchmarks.workers.failures.task import Task

GPT_WIDTH = 128
CNN_WIDTH = 32
SIDE = 8
"""Pixels of an image's side."""
CLASSES = 10


class Images(nn.Module):
    """Three convolutions with group norms and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 1
        for _ in range(3):
            layers += [
                nn.Conv2d(width, CNN_WIDTH, 3, padding=1),
                nn.GroupNorm(4, CNN_WIDTH),
                nn.ReLU(),
            ]
            width = CNN_WIDTH
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(CNN_WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(images).mean((2, 3)))
        return out


def network(task: Task) -> nn.Module:
    """Returns the network, with the same initial parameters in all processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return blocks.Decoder(GPT_WIDTH) if task.model == "gpt" else Images()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW. Its moments are state that a recovery must preserve."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


def loss_of(task: Task) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns the loss function of the task, which computes the mean over the samples of a
    batch."""
    return blocks.loss_fn if task.model == "gpt" else F.cross_entropy


def dataset(task: Task) -> TensorDataset:
    """Returns random samples, the same in all processes: each with its index, input and target."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.arange(task.samples)
    if task.model == "gpt":
        words = torch.randint(0, blocks.WORDS, (task.samples, blocks.TOKENS), generator=generator)
        return TensorDataset(indices, words, words)
    images = torch.randn(task.samples, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(
        indices, images, torch.randint(0, CLASSES, (task.samples,), generator=generator)
    )


def order(task: Task) -> torch.Tensor:
    """Returns the indices of all samples in the order in which loops without their own loader train
    them. Step i trains the i-th global batch of this order."""
    return torch.randperm(task.samples, generator=torch.Generator().manual_seed(2))


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 digest of all parameters, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(state[name].detach().contiguous().numpy().tobytes())
    return sha.hexdigest()
