"""What a cell's ranks do, and what one process does in plain torch: the same training, of the same model on the same samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from tests.parity.models import SAMPLES, make_data, make_model

BATCH: Final = 8
MICRO: Final = 2
EPOCHS: Final = 2
MAX_NORM: Final = 0.5
GROUPED: Final = {"cnn"}
"""Models whose loss depends on how samples are grouped."""
OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}

State = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Training:
    """What to train, and how."""

    model: str
    optimizer: str
    dtype: torch.dtype
    micro: bool
    """In micro-batches; else on whole batches."""
    max_norm: float | None
    strategy: str = "ddp"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one rank ended with."""

    state: State
    """The whole parameters and buffers."""
    seen: list[list[int]]
    """The samples that this rank was given in each step."""


class _Numbered(Dataset[Any]):
    """Each sample with its number."""

    def __init__(self, data: Dataset[Any]) -> None:
        self._data = data

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return *self._data[index], index


def train(what: Training) -> Outcome:
    """What one rank does."""
    net, data = make_model(what.model, what.dtype), make_data(what.model, what.dtype)
    distributed, stepper = shoal.as_distributed(
        net, OPTIMIZERS[what.optimizer](net.parameters()), strategy=what.strategy, minimum_parameter_group_size=64, **what.options
    )
    loader = shoal.ElasticDataLoader(
        _Numbered(data), global_batch_size=BATCH, micro_batch_size=MICRO if what.micro else None, shuffle=False
    )
    seen = []
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps() if what.micro else ([batch] for batch in loader):
            seen.append([])
            for x, y, numbers in step:
                F.cross_entropy(distributed(x), y).backward()
                seen[-1].extend(numbers.tolist())
            if what.max_norm is not None:
                distributed.clip_grad_norm_(what.max_norm)
            assert stepper.step()
            stepper.zero_grad()
    return Outcome(distributed.full_state_dict(), seen)


def dtype_of(check: str) -> torch.dtype:
    """What a cell computes in."""
    return torch.float64 if check == "float64" else torch.float32


@functools.cache
def alone(model: str, optimizer: str, dtype: torch.dtype, *, grouped: bool) -> State:
    """The parameters after training in plain torch: on whole batches, or accumulating the same micro-batches (`grouped`)."""
    net, data = make_model(model, dtype), make_data(model, dtype)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    size = MICRO if grouped else BATCH
    for start in [*range(0, SAMPLES, BATCH)] * EPOCHS:
        for begin in range(start, start + BATCH, size):
            x, y = data[begin : begin + size]
            (F.cross_entropy(net(x), y) * size / BATCH).backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def apart(model: str, optimizer: str, dtype: torch.dtype, seen: list[list[list[int]]], *, sync_every: int) -> State:
    """The parameters after local SGD in plain torch: a replica for each rank, trained on what that rank has seen (`seen`: by rank, by
    step), and averaged after each round, by the samples that each has had in it."""
    data = make_data(model, dtype)
    nets = [make_model(model, dtype) for _ in seen]
    steppers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    steps = SAMPLES // BATCH
    had = [0] * len(nets)
    for number in range(steps * EPOCHS):
        for rank, (net, stepper) in enumerate(zip(nets, steppers, strict=True)):
            samples = seen[rank][number]
            had[rank] += len(samples)
            x, y = data[samples]
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            stepper.step()
            stepper.zero_grad()
        in_epoch = number % steps + 1
        if in_epoch % sync_every == 0 or in_epoch == steps:
            _average(nets, [float(count) for count in had])
            had = [0] * len(nets)
    return {name: p.detach() for name, p in nets[0].named_parameters()}


@torch.no_grad()
def _average(nets: list[nn.Module], weights: list[float]) -> None:
    for same in zip(*(net.parameters() for net in nets), strict=True):
        mean = sum(p * weight for p, weight in zip(same, weights, strict=True)) / sum(weights)
        for p in same:
            p.copy_(mean)
