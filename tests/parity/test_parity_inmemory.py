"""Strategies x models x optimizers x worlds on the in-memory backend, against one process.

In float64 the parameters are those of a plain torch loop, to 1e-10: on whole batches, and where a BatchNorm makes the loss depend on how
samples are grouped, accumulating the same micro-batches. With `deterministic=True` parameters and buffers in float32 are bitwise those of
a world of one.

`make test` runs every strategy with every model, each with one optimizer and one world; `make parity` runs all.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import shoal
import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.models import MODELS, SAMPLES, make_data, make_model

BATCH = 8
MICRO = 2
EPOCHS = 2
MAX_NORM = 0.5
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]  # local_sgd and async_sgd are other algorithms than one process's
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
WORLDS = [2, 3, 4]
GROUPED = {"cnn"}
"""Models whose loss depends on how samples are grouped."""

State = dict[str, torch.Tensor]


def _cells() -> list[Any]:
    subset = set()
    for number, (strategy, model) in enumerate(itertools.product(STRATEGIES, MODELS)):
        subset.add((strategy, model, list(OPTIMIZERS)[(number + number // 4) % 2], WORLDS[number % 3]))
    cells = itertools.product(STRATEGIES, MODELS, OPTIMIZERS, WORLDS)
    return [pytest.param(*cell, marks=() if cell in subset else pytest.mark.matrix) for cell in cells]


@functools.cache
def alone(model: str, optimizer: str) -> State:
    """The parameters after training in plain torch, in float64."""
    net, data = make_model(model, torch.float64), make_data(model, torch.float64)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    size = MICRO if model in GROUPED else BATCH
    for start in [*range(0, SAMPLES, BATCH)] * EPOCHS:
        for part in range(start, start + BATCH, size):
            x, y = data[part : part + size]
            (F.cross_entropy(net(x), y) * size / BATCH).backward()
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        stepper.step()
        stepper.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def train(strategy: str, model: str, optimizer: str, dtype: torch.dtype, *, micro: bool, max_norm: float | None, **options: Any) -> State:
    """What one rank does: the same training under `strategy`. Returns the whole parameters and buffers."""
    net, data = make_model(model, dtype), make_data(model, dtype)
    distributed, stepper = shoal.as_distributed(
        net, OPTIMIZERS[optimizer](net.parameters()), strategy=strategy, minimum_parameter_group_size=64, **options
    )
    loader = shoal.ElasticDataLoader(data, global_batch_size=BATCH, micro_batch_size=MICRO if micro else None, shuffle=False)
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for x, y in step:
                F.cross_entropy(distributed(x), y).backward()
            if max_norm is not None:
                distributed.clip_grad_norm_(max_norm)
            assert stepper.step()
            stepper.zero_grad()
    return distributed.full_state_dict()


def deterministic(strategy: str, model: str, optimizer: str, world: int) -> list[State]:
    """By rank, in float32."""
    return shoal.launch(
        lambda: train(strategy, model, optimizer, torch.float32, micro=True, max_norm=None, deterministic=True), world_size=world
    )


@functools.cache
def one_rank(model: str, optimizer: str) -> State:
    """A world of one."""
    return deterministic("ddp", model, optimizer, 1)[0]


@pytest.mark.parametrize(("strategy", "model", "optimizer", "world"), _cells())
def test_ranks_train_as_one_process_does(strategy: str, model: str, optimizer: str, world: int) -> None:
    micro = model in GROUPED
    ranks = shoal.launch(lambda: train(strategy, model, optimizer, torch.float64, micro=micro, max_norm=MAX_NORM), world_size=world)
    for state in ranks:
        for name, expected in alone(model, optimizer).items():
            torch.testing.assert_close(state[name], expected, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("strategy", "model", "optimizer", "world"), _cells())
def test_deterministic_ranks_end_bitwise_as_one(strategy: str, model: str, optimizer: str, world: int) -> None:
    expected = one_rank(model, optimizer)
    for state in deterministic(strategy, model, optimizer, world):
        assert state.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
