"""Cases of optimizers, schedulers and train_step."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.integration.worker_elastic.ddp_cases.case import (
    Alone,
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
)


@case
def parameter_groups_with_settings_of_their_own(place: Place) -> State:
    net = network()
    groups = [
        {"params": net[0].parameters(), "lr": 0.01},
        {"params": net[2].parameters(), "weight_decay": 0.1},
    ]
    model, optimizer = place.distribute(net, torch.optim.AdamW(groups, 0.1))
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)


@cases(
    step=lambda o: lr_scheduler.StepLR(o, 2),
    cosine=lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    one_cycle=lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    cyclic=lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    sequential=lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]
    ),
    plateau=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
)
def learning_rate_schedules(place: Place, make: Any) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scheduler = make(optimizer)
    if isinstance(place, Ranks):
        shoal.register_state(scheduler=scheduler)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
        scheduler.step(
            *([float(number)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
        )
    return state(net) | {"lr": torch.tensor([g["lr"] for g in optimizer.param_groups])}


@case
def clipping(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        norms.append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
    return state(net) | {"norms": torch.tensor(norms)}


@case
def a_gradient_scaler(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if isinstance(place, Ranks):
        shoal.register_state(scaler=scaler)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        bad = number == 3 and place.rank == 0  # on one rank only: all ranks must skip the step
        scaler.scale(
            mse(model, place.part(x), place.part(y)) * (float("inf") if bad else 1.0)
        ).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
    return state(net) | {"scale": torch.tensor(scaler.get_scale())}


@case
def a_gradient_scaler_before_the_reduction(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scaler = torch.amp.GradScaler("cpu")
    if isinstance(place, Ranks):
        (x, y), *_ = batches()
        with model.no_sync():
            scaler.scale(mse(model, place.part(x), place.part(y))).backward()
        with pytest.raises(shoal.PreconditionError, match="GradScaler"):
            scaler.step(optimizer)
        model.synchronize_gradients()
        assert optimizer.step()
    return {}


@cases(automatic={}, by_hand={"auto_sync_gradients": False})
def train_step_in_one_call(place: Place, options: dict[str, bool]) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net), **options)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        if isinstance(place, Alone):
            loss = mse(model, x, y)
            loss.backward()
        else:
            loss = model.train_step(place.part(x), place.part(y), nn.functional.mse_loss)
        losses.append(float(loss.detach()))
        optimizer.step()
    return state(net) | {"losses": torch.tensor(losses)}


@case
def synchronization_by_hand(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net), auto_sync_gradients=False)
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        if isinstance(place, Ranks):
            model.synchronize_gradients()
            model.synchronize_gradients()  # the second call changes nothing
        optimizer.step()
    return state(net)


@case
def steps_of_unequal_shares(place: Place) -> State:
    xs, ys = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    dataset = torch.utils.data.TensorDataset(xs, ys)
    net = network()
    if isinstance(place, Alone):
        optimizer = sgd(net)
        for x, y in zip(xs.split(7), ys.split(7), strict=True):
            optimizer.zero_grad()
            mse(net, x, y).backward()
            optimizer.step()
        return state(net)
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in shoal.ElasticDataLoader(dataset, global_batch_size=7, shuffle=False):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        assert optimizer.step()
    return state(net)
