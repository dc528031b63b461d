"""The models of the parity matrix and their data. Each model is small and has a property that
sharding easily gets wrong.

No parameter has a gradient that is zero in exact arithmetic (a bias before a BatchNorm, a key's
bias in attention), because AdamW would take full-size steps from its rounding errors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 24
CLASSES = 7
TOKENS = 11
LENGTH = 8


class Mlp(nn.Module):
    """A network with parameters of odd sizes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, CLASSES)
        )
        self.layers[2].bias.requires_grad_(False)

    def pipeline_blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """A convolutional network with buffers, whose loss depends on the grouping of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.flat = nn.Sequential(nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 16, CLASSES)

    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.convolution, self.norm, self.flat, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.flat(self.norm(self.convolution(x))))


class Embedded(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.places.weight


class Attention(nn.Module):
    """Attention with two heads, whose projections are packed into one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.width = nn.LayerNorm(width), width
        self.packed, self.projection = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, self.width // 2)).transpose(1, 2)
            for part in self.packed(self.norm(h)).chunk(3, dim=-1)
        )
        return h + self.projection(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Feedforward(nn.Module):
    """The second half of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.mlp(self.norm(h))


class Head(nn.Module):
    """Computes the classes in the dimension that cross_entropy expects."""

    def __init__(self, width: int, tied: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.out.weight = tied.weight

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(h)).transpose(1, 2)


class Gpt(nn.Module):
    """A language model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        width = 12
        self.embedded, self.attention, self.feedforward = (
            Embedded(width),
            Attention(width),
            Feedforward(width),
        )
        self.head = Head(width, self.embedded.tokens)

    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.embedded, self.attention, self.feedforward, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.feedforward(self.attention(self.embedded(x))))


class Bag(nn.Module):
    """A model with a table of which most rows have no gradient in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(41, 12, mode="mean")
        self.head = nn.Linear(12, CLASSES)

    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.bag, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(x))


MODELS = {"mlp": Mlp, "cnn": Cnn, "gpt": Gpt, "bag": Bag}


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Returns the model with the same weights in every call."""
    torch.manual_seed(3)
    return MODELS[name]().to(dtype)


def make_data(name: str, dtype: torch.dtype) -> TensorDataset:
    """Returns the same inputs and targets on every call."""
    generator = torch.Generator().manual_seed(5)
    if name == "gpt":
        text = torch.randint(TOKENS, (SAMPLES, LENGTH + 1), generator=generator)
        return TensorDataset(text[:, :-1], text[:, 1:])
    classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    if name == "bag":
        return TensorDataset(torch.randint(41, (SAMPLES, 4), generator=generator), classes)
    shape = (7,) if name == "mlp" else (1, 6, 6)
    return TensorDataset(
        torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype), classes
    )
