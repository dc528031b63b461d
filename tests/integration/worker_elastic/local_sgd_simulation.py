"""Local SGD without Shoal: replicas in one process, their updates, and the weighted mean of each
round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    net: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    sync_every: int
    epochs: int = 2
    samples: int = 36
    batch: int = 7
    micro: int | None = None
    average_optimizer_state: bool = False
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    outer_nesterov: bool = False

    @property
    def options(self) -> dict[str, float | bool]:
        names = (
            "sync_every",
            "average_optimizer_state",
            "outer_learning_rate",
            "outer_momentum",
            "outer_nesterov",
        )
        return {name: getattr(self, name) for name in names}

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        shape = self.samples, 4
        return torch.randn(shape, generator=generator, dtype=torch.float64), torch.randn(
            shape, generator=generator, dtype=torch.float64
        )


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)
    ).double()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 0.05)


RECIPES = {
    "each_step": Recipe(net=linear, optimizer=sgd, sync_every=1),
    "plain": Recipe(net=linear, optimizer=sgd, sync_every=3),
    "momentum": Recipe(net=linear, optimizer=momentum, sync_every=3),
    "long": Recipe(net=linear, optimizer=momentum, sync_every=3, epochs=6),
    "statistics": Recipe(net=normalized, optimizer=adamw, sync_every=2, samples=48, batch=12),
    "micro_batches": Recipe(net=linear, optimizer=adamw, sync_every=2, micro=3, batch=8),
    "averaged_state": Recipe(
        net=linear, optimizer=adamw, sync_every=2, average_optimizer_state=True
    ),
    "outer_momentum": Recipe(
        net=linear,
        optimizer=sgd,
        sync_every=2,
        outer_momentum=0.8,
        outer_learning_rate=0.7,
        outer_nesterov=True,
    ),
    "slow_momentum": Recipe(net=linear, optimizer=momentum, sync_every=3, outer_momentum=0.5),
}


def whole_batches(recipe: Recipe) -> State:
    """Trains one process on full batches, which is the result of ddp."""
    net = recipe.net()
    optimizer = recipe.optimizer(net)
    x, y = recipe.data()
    for _ in range(recipe.epochs):
        for xs, ys in zip(x.split(recipe.batch), y.split(recipe.batch), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(xs), ys).backward()
            optimizer.step()
    return net.state_dict()


def simulate(
    recipe: Recipe, world: int, *, then: tuple[int, int] | None = None, steps: int | None = None
) -> State:
    """Trains `world` replicas. `then` = (step, ranks): number of ranks from the round that begins
    with that step. `steps`: returns the mean after that many steps."""
    replicas = [recipe.net() for _ in range(world)]
    optimizers = [recipe.optimizer(net) for net in replicas]
    x, y = recipe.data()
    outer: State = {}
    number = 0
    for _ in range(recipe.epochs):
        batches = torch.arange(recipe.samples).split(recipe.batch)
        for first in range(0, len(batches), recipe.sync_every):
            if then is not None and then[0] == number:
                replicas, optimizers = replicas[: then[1]], optimizers[: then[1]]
            before = copy.deepcopy(replicas[0].state_dict())
            weights = [0.0] * len(replicas)
            for batch in batches[first : first + recipe.sync_every]:
                number += 1
                for rank, parts in enumerate(_deal(batch, len(replicas), recipe.micro)):
                    weights[rank] += sum(map(len, parts))
                    _step(replicas[rank], optimizers[rank], [(x[part], y[part]) for part in parts])
                if number == steps:
                    return _mean([net.state_dict() for net in replicas], weights)
            mean = _mean([net.state_dict() for net in replicas], weights)
            _move(before, mean, outer, recipe)
            for net in replicas:
                net.load_state_dict(mean)
            if recipe.average_optimizer_state:
                _average_states(optimizers)
    return replicas[0].state_dict()


def _deal(batch: torch.Tensor, ranks: int, micro: int | None) -> list[list[torch.Tensor]]:
    """Splits a batch into contiguous parts; the first parts have one sample or one micro-batch
    more."""
    units = list(batch.split(micro or 1))
    each, more = divmod(len(units), ranks)
    dealt = []
    for rank in range(ranks):
        count = each + (rank < more)
        mine, units = units[:count], units[count:]
        dealt.append(mine if micro or not mine else [torch.cat(mine)])
    return dealt


def _step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    total = sum(len(xs) for xs, _ in parts)
    if total == 0:
        return
    optimizer.zero_grad()
    for xs, ys in parts:
        (nn.functional.mse_loss(net(xs), ys) * len(xs) / total).backward()
    optimizer.step()


def _mean(states: Sequence[State], weights: Sequence[float]) -> State:
    total = sum(weights)
    mean = {}
    for name, like in states[0].items():
        value = sum(
            state[name].double() * weight / total
            for state, weight in zip(states, weights, strict=True)
        )
        assert isinstance(value, torch.Tensor)
        mean[name] = value if like.is_floating_point() else value.round().to(like.dtype)
    return mean


def _move(before: State, mean: State, outer: State, recipe: Recipe) -> None:
    if recipe.outer_momentum == 0 and recipe.outer_learning_rate == 1:
        return
    for name in mean:
        delta = before[name] - mean[name]
        outer[name] = recipe.outer_momentum * outer.get(name, torch.zeros_like(delta)) + delta
        moved = (
            delta + recipe.outer_momentum * outer[name] if recipe.outer_nesterov else outer[name]
        )
        mean[name] = before[name] - recipe.outer_learning_rate * moved


def _average_states(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for group in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
        for parameters in zip(*(own["params"] for own in group), strict=True):
            states = [
                optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)
            ]
            for key in states[0]:
                mean = torch.stack([state[key] for state in states]).mean(0)
                for state in states:
                    state[key].copy_(mean)
