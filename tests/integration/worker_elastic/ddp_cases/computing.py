"""Cases of different computations, and of buffers."""

from __future__ import annotations

from typing import Any

import torch
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.worker_elastic.ddp_cases.case import (
    Place,
    Ranks,
    State,
    batches,
    case,
    cases,
    mse,
    network,
    sgd,
    state,
    train,
)


@case
def tied_weights(place: Place) -> State:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return train(place, net, mse)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@cases(reentrant=True, non_reentrant=False)
def activation_checkpointing(place: Place, reentrant: bool) -> State:
    return train(place, Checkpointed(reentrant=reentrant), mse, bucket_cap_mb=1)


@cases(before=True, after=False)
def torch_compile(place: Place, before: bool) -> State:
    net = network()
    given = torch.compile(net, backend="eager") if before else net
    model, optimizer = place.distribute(given, sgd(net))
    if not before:
        model = torch.compile(model, backend="eager")
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    trained = model.full_state_dict() if isinstance(place, Ranks) else net.state_dict()
    return {name: tensor.detach().clone() for name, tensor in trained.items()}


@case
def channels_last_convolutions(place: Place) -> State:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    net(torch.zeros(1, 2, 4, 4))
    net = net.to(memory_format=torch.channels_last)
    return train(
        place,
        net,
        lambda model, x, y: mse(model, x.new_ones(len(x), 2, 4, 4) * x.sum(1).view(-1, 1, 1, 1), y),
    )


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).float()).double()


@case
def parameters_of_several_dtypes(place: Place) -> State:
    return train(place, TwoDtypes(), mse)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex128) @ self.weight).sum(-1)


@case
def complex_parameters(place: Place) -> State:
    return train(place, Complex(), mse)


@case
def training_in_evaluation_mode(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in batches():
        optimizer.zero_grad()
        with torch.no_grad():
            # a loop without a loader: its step begins with a forward pass in training mode
            model(place.part(x))
        if isinstance(place, Ranks):
            current_session().lifecycle.ensure_step()
        model.eval()
        mse(model, place.part(x), place.part(y)).backward()
        model.train()
        optimizer.step()
    return state(net)


@cases(
    sgd=lambda p: torch.optim.SGD(p, 0.1),
    sparse_adam=lambda p: torch.optim.SparseAdam(list(p), 0.1),
)
def sparse_gradients(place: Place, make: Any) -> State:
    table = nn.Embedding(20, 3, sparse=True)
    model, optimizer = place.distribute(table, make(table.parameters()))
    for x, y in batches():
        optimizer.zero_grad()
        rows = place.part((x[:, 0] * 4).long().clamp(-9, 9) + 9)
        nn.functional.mse_loss(model(rows), place.part(y)).backward()
        optimizer.step()
    return state(table)


class Averages(nn.Module):
    """Assigns a new tensor to one buffer in each step, as moving averages often do, and never
    changes the other buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer(
            "constant", torch.tensor([0.1, 1 / 3, -float("inf"), 7e5], dtype=torch.float32)
        )
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.cache = torch.zeros(len(self.cache) + 1)
        return self.net(x)


@case
def reassigned_buffers(place: Place) -> State:
    net = Averages()
    constant = net.constant.clone()
    trained = train(place, net, mse)
    assert torch.equal(trained.pop("constant"), constant)  # bit for bit
    return trained


@case
def buffers_changed_behind_the_backward_pass(place: Place) -> State:
    """Each rank changes buffers by its own samples after the backward pass, as codebooks are
    updated, and only one rank changes a counter."""
    net = Averages()
    net.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in batches(4):
        optimizer.zero_grad()
        own = place.part(x)
        mse(model, own, place.part(y)).backward()
        net.average.lerp_(own.mean(0), 0.5)
        if place.rank == 0:
            net.counter.add_(1 << 30)  # changes that differ between ranks are summed
        optimizer.step()
    return state(net)
