"""The parts of DDP cases: uses of torch's DDP, each of which is a small training run that returns
its parameters.

A case runs twice: in plain torch on the full batch, and on the ranks of a job, each with its part
of the batch. See ddp_ranks.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import shoal
import torch
from torch import nn

WORLD = 2
BATCH = 8
STEPS = 4
TOLERANCE = 1e-10

State = dict[str, torch.Tensor]


class Alone:
    """Runs a case in plain torch."""

    rank, size = 0, 1

    def distribute(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> tuple[Any, Any]:
        net.no_sync = contextlib.nullcontext
        net.clip_grad_norm_ = lambda norm: nn.utils.clip_grad_norm_(net.parameters(), norm)
        return net, optimizer

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class Ranks:
    """Runs a case on the ranks of this process's job."""

    size = WORLD

    @property
    def rank(self) -> int:
        return shoal.rank()

    def distribute(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
    ) -> tuple[Any, Any]:
        return shoal.as_distributed(net, optimizer, **options)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(WORLD)[self.rank]


Place = Alone | Ranks
CASES: dict[str, Callable[[Place], State]] = {}


def case(run: Callable[[Place], State]) -> Callable[[Place], State]:
    CASES[run.__name__] = run
    return run


def cases(
    **variants: Any,
) -> Callable[[Callable[[Place, Any], State]], Callable[[Place, Any], State]]:
    def register(run: Callable[[Place, Any], State]) -> Callable[[Place, Any], State]:
        for name, variant in variants.items():
            CASES[f"{run.__name__}[{name}]"] = lambda place, variant=variant: run(place, variant)
        return run

    return register


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 3, generator=generator)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def state(net: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def train(
    place: Place,
    net: nn.Module,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    **options: Any,
) -> State:
    """Trains `net` with SGD in the usual loop."""
    model, optimizer = place.distribute(net, sgd(net), **options)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)


def mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)
