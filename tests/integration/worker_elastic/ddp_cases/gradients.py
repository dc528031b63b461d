"""Cases with several backward passes in a step, and with parameters that are unused in some of
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integration.worker_elastic.ddp_cases.case import (
    Alone,
    Place,
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


@cases(mean={}, sum={"loss_reduction": "sum"})
def two_backward_passes_in_a_step(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        nn.functional.l1_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        optimizer.step()
    return state(net)


@cases(mean={}, sum={"loss_reduction": "sum"})
def gradients_kept_over_two_steps(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for number, (x, y) in enumerate(batches()):
        nn.functional.mse_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        optimizer.step()
        if number % 2:
            optimizer.zero_grad(set_to_none=number == 1)
    return state(net)


@cases(mean={}, sum={"loss_reduction": "sum"})
def accumulation_without_synchronization(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for x, y in batches():
        optimizer.zero_grad()
        whole = place.part(x), place.part(y)
        with model.no_sync():
            nn.functional.mse_loss(
                model(whole[0][:2]), whole[1][:2], reduction=reduction
            ).backward()
        nn.functional.mse_loss(model(whole[0]), whole[1], reduction=reduction).backward()
        with model.no_sync():  # the last one is reduced in `step`
            nn.functional.l1_loss(model(whole[0]), whole[1], reduction=reduction).backward()
        optimizer.step()
    if isinstance(place, Alone):
        return state(_accumulated_alone(reduction))
    return state(net)


def _accumulated_alone(reduction: str) -> nn.Module:
    """Trains on the first two samples of each rank's part, then on all samples."""
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in batches():
        optimizer.zero_grad()
        some = torch.tensor([0, 1, 4, 5])
        nn.functional.mse_loss(net(x[some]), y[some], reduction=reduction).backward()
        nn.functional.mse_loss(net(x), y, reduction=reduction).backward()
        nn.functional.l1_loss(net(x), y, reduction=reduction).backward()
        optimizer.step()
    return net


@case
def two_losses_of_one_forward_pass(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in batches():
        optimizer.zero_grad()
        out = model(place.part(x))
        nn.functional.mse_loss(out, place.part(y)).backward(retain_graph=True)
        nn.functional.l1_loss(out, place.part(y)).backward()
        optimizer.step()
    return state(net)


@case
def a_gradient_penalty(place: Place) -> State:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, y) + slope.square().mean()

    return train(place, network(), loss)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        hidden = self.trunk(x).tanh()
        return torch.cat(
            [
                self.heads[head](part)
                for head, part in zip(heads, hidden.chunk(len(heads)), strict=True)
            ]
        )


@cases(same_on_all_ranks=(0, 0), differs_by_rank=(0, 1))
def an_unused_branch(place: Place, heads: tuple[int, int]) -> State:
    mine = heads if isinstance(place, Alone) else (heads[place.rank],)
    return train(place, Branches(), lambda model, x, y: nn.functional.mse_loss(model(x, mine), y))


@case
def a_branch_used_in_some_steps(place: Place) -> State:
    net = Branches()
    model, optimizer = place.distribute(net, torch.optim.AdamW(net.parameters(), 0.1))
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(place.part(x), (number % 2,)), place.part(y)).backward()
        assert (net.heads[1].weight.grad is None) == (number % 2 == 0)
        assert net.heads[2].weight.grad is None
        optimizer.step()
    return state(net)


@case
def a_rank_without_a_backward_pass(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = mse(model, place.part(x), place.part(y))
        if isinstance(place, Alone):
            part = number % 2
            loss = nn.functional.mse_loss(model(x.chunk(2)[part]), y.chunk(2)[part]) / 2
        if isinstance(place, Alone) or place.rank == number % 2:
            loss.backward()
        optimizer.step()
    return state(net)


@case
def frozen_parameters_that_are_unfrozen_later(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
    net[0].requires_grad_(False)
    for number, (x, y) in enumerate(batches(6)):
        if number == 2:
            net[0].requires_grad_(True)
        if number == 4:
            net[2].requires_grad_(False)
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)
