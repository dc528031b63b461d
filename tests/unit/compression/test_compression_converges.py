"""Training on compressed gradients: logistic regression on handwritten digits, 4 ranks in one
process, 150 steps of plain SGD.

Without compression, the final loss over all digits is 0.224. Measured losses with error feedback
(or without, where that is the default) and with it switched off: fp16, bf16, int8 0.224; topk (2 %)
0.213 / 0.68; randomk (5 %) 0.194 / 0.26; sign 0.219 / 0.39; powersgd (rank 2) 0.221 / 0.49.
"""

from __future__ import annotations

import functools

import pytest
import torch
from shoal_worker.compression import GradientCompressor, parse_compression
from torch.nn import functional

from tests.unit.compression.lockstep import reduce_together, reductions

WORLD, STEPS, BATCH, RATE = 4, 150, 256, 1.0
CLASSES, PIXELS = 10, 64
SHAPES = [(CLASSES, PIXELS), (CLASSES,)]
COMPRESSORS = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "topk": {"ratio": 0.02},
    "randomk": {"ratio": 0.05},
    "sign": {},
    "powersgd": {"rank": 2},
}


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    # imported here because only these tests need it, and it takes more than a second
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def loss(weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    matrix, bias = weights.split([CLASSES * PIXELS, CLASSES])
    return functional.cross_entropy(images @ matrix.view(CLASSES, PIXELS).t() + bias, labels)


def trained(compressor: GradientCompressor | None) -> float:
    """Trains and returns the final loss over all digits."""
    images, labels = digits()
    weights = torch.zeros(CLASSES * PIXELS + CLASSES)
    generator = torch.Generator().manual_seed(0)
    ranks = reductions(compressor, WORLD) if compressor is not None else []
    for step in range(STEPS):
        batch = torch.randperm(len(images), generator=generator)[:BATCH]
        parts = []
        for mine in batch.chunk(WORLD):
            variable = weights.clone().requires_grad_()
            parts.append(
                torch.autograd.grad(loss(variable, images[mine], labels[mine]) / WORLD, variable)[0]
            )
        total = (
            reduce_together(ranks, parts, step=step, shapes=SHAPES)[0][0] if ranks else sum(parts)
        )
        weights -= RATE * total
    return float(loss(weights, images, labels))


@functools.cache
def uncompressed() -> float:
    return trained(None)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_training_reaches_the_uncompressed_loss_within_a_tenth(name):
    compressor = parse_compression({"name": name, **COMPRESSORS[name]})
    margin = 1.001 if name in ("fp16", "bf16") else 1.1
    assert trained(compressor) < uncompressed() * margin


@pytest.mark.parametrize(
    ("name", "factor"), [("topk", 2), ("sign", 1.5), ("powersgd", 1.7), ("randomk", 1.1)]
)
def test_biased_compression_without_error_feedback_falls_behind(name, factor):
    compressor = parse_compression({"name": name, **COMPRESSORS[name], "error_feedback": False})
    assert trained(compressor) > uncompressed() * factor
