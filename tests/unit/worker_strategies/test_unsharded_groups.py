"""`optimizer.param_groups` shows a script the model's own parameters and the settings, although the
inner optimizer updates shards."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import PreconditionError
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import TensorDataset

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(strategy: str, **options: Any) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    groups = [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias], "lr": 0.02},
    ]
    inner = torch.optim.Adam(groups, lr=0.01)
    model, optimizer = shoal.as_distributed(
        net, inner, strategy=strategy, minimum_parameter_group_size=1, **options
    )
    return net, model, optimizer, inner


def steps(model: Any, optimizer: Any, after: Callable[[int], object] = lambda number: None) -> None:
    for number, (x,) in enumerate(shoal.ElasticDataLoader(TensorDataset(X), global_batch_size=8)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        after(number)


def elements(strategy: str) -> list[list[int]]:
    _, model, optimizer, _ = make(strategy)
    steps(model, optimizer)
    return [[p.numel() for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "tensor", "hybrid"])
def test_each_parameter_appears_once_and_unsharded_on_every_rank(strategy: str) -> None:
    """Every rank sees each parameter once and unsharded in `param_groups`, even if ranks mirror
    each other's shards."""
    ranks = 2 if strategy == "tensor" else 3
    assert shoal.launch(elements, strategy, world_size=ranks) == [[[32, 16], [8, 2]]] * ranks


def settings(strategy: str) -> None:
    _, model, optimizer, inner = make(strategy)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    steps(model, optimizer, lambda number: scheduler.step())
    group = optimizer.param_groups[1]
    assert group is optimizer.param_groups[1]
    assert group["lr"] == inner.param_groups[1]["lr"] == pytest.approx(0.02 / 4)
    group["weight_decay"] = 0.5
    assert inner.param_groups[1]["weight_decay"] == 0.5
    inner.param_groups[0]["lr"] = 0.25
    plain = dict(optimizer.param_groups[0])
    assert type(plain) is dict
    assert (
        plain["lr"]
        == {**optimizer.param_groups[0]}["lr"]
        == optimizer.param_groups[0].get("lr")
        == 0.25
    )
    assert plain.keys() == inner.param_groups[0].keys() == copy.copy(plain).keys()
    assert isinstance(group, dict)
    json.dumps({name: value for name, value in group.items() if name != "params"})


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_settings_are_read_and_written_through(strategy: str) -> None:
    shoal.launch(settings, strategy, world_size=2)


def asks_for_state(strategy: str) -> None:
    _, model, optimizer, inner = make(strategy)
    steps(model, optimizer)
    known = len(inner.state)
    with pytest.raises(
        shoal.PreconditionError,
        match=r"optimizer\.state\[parameter\].*optimizer\.state_dict\(\) on every rank",
    ):
        optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert len(inner.state) == known == len(list(optimizer.state))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_request_for_a_parameters_state_is_refused_instead_of_creating_one(strategy: str) -> None:
    shoal.launch(asks_for_state, strategy, world_size=2)


def with_hook(strategy: str, register: Callable[[Any], Any]) -> None:
    _, model, optimizer, _ = make(strategy)
    steps(model, optimizer)


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_step_hooks_of_all_optimizers_are_refused_where_they_would_see_shards(
    register: Callable[[Any], Any],
) -> None:
    seen: list[Any] = []

    def looks(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(optimizer)

    handle = register(looks)
    try:
        shoal.launch(with_hook, "ddp", register, world_size=2)
        assert seen
        with pytest.raises(
            shoal.ConfigurationError,
            match=r"the global step hook '.*looks'.*'zero1'.*in the loop",
        ):
            shoal.launch(with_hook, "zero1", register, world_size=2)
    finally:
        handle.remove()


def adds_a_group(strategy: str) -> None:
    _, model, optimizer, _ = make(strategy)
    steps(model, optimizer)
    optimizer.param_groups.append({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    steps(model, optimizer)


def test_a_group_that_a_script_appends_is_refused() -> None:
    with pytest.raises(
        shoal.PreconditionError,
        match=r"add parameter groups to the optimizer before as_distributed",
    ):
        shoal.launch(adds_a_group, "zero1", world_size=2)


def scaled(strategy: str, *, in_parts: bool = False) -> list[Any]:
    """Trains with a grad scaler that unscales and clips. The gradients of the second step
    overflow.

    `in_parts`: in steps of micro-batches.
    """
    _, model, optimizer, _ = make(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    norms = []
    loader = shoal.ElasticDataLoader(
        TensorDataset(X),
        global_batch_size=8,
        micro_batch_size=2 if in_parts else None,
        shuffle=False,
    )
    for number, step in enumerate(loader.steps() if in_parts else ([batch] for batch in loader)):
        optimizer.zero_grad()
        factor = float("inf") if number == 1 else 1.0
        for (x,) in step:
            scaler.scale(model(x).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        norms.append(float(model.clip_grad_norm_(0.1)))
        scaler.step(optimizer)
        scaler.update()
    return [
        norms[0],
        norms[2],
        scaler.get_scale(),
        {name: value.tolist() for name, value in model.full_state_dict().items()},
    ]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hybrid", "tensor"])
def test_grad_scaler_unscales_the_gradients_that_ranks_update(
    strategy: str, in_parts: bool
) -> None:
    (expected,) = shoal.launch(scaled, "ddp", world_size=1)
    trained = functools.partial(scaled, strategy, in_parts=in_parts)
    for norm, last, scale, values in shoal.launch(trained, world_size=2):
        assert [norm, last, scale] == pytest.approx(expected[:3], rel=1e-9)
        for name, value in values.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[3][name]))


def scaled_in_parts(strategy: str) -> list[float]:
    """Trains on five samples in micro-batches of one. In the last step, two of three ranks have
    none."""
    _, model, optimizer, _ = make(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in shoal.ElasticDataLoader(
        TensorDataset(X[:5]), global_batch_size=4, micro_batch_size=1, shuffle=False
    ).steps():
        for (x,) in step:
            scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [
        value
        for tensor in model.full_state_dict().values()
        for value in tensor.double().reshape(-1).tolist()
    ]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hybrid"])
def test_a_grad_scaler_finds_the_gradients_of_a_rank_that_had_no_micro_batch(strategy: str) -> None:
    (expected,) = shoal.launch(scaled_in_parts, "ddp", world_size=1)
    for values in shoal.launch(scaled_in_parts, strategy, world_size=3):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected))


def unscaled_early(strategy: str) -> None:
    _, model, optimizer, _ = make(strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in shoal.ElasticDataLoader(
        TensorDataset(X[:8]), global_batch_size=4, micro_batch_size=1, shuffle=False
    ).steps():
        for number, (x,) in enumerate(step):
            scaler.scale(model(x).square().mean()).backward()
            if number == 1:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hybrid"])
def test_unscaling_before_the_last_micro_batch_is_refused(strategy: str) -> None:
    with pytest.raises(
        PreconditionError, match=r"unscale_\(\) was called inside the loop over the step's micro"
    ):
        shoal.launch(unscaled_early, strategy, world_size=2)


class MostlyIdle(nn.Module):
    """A model with one gradient that is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.used + 0 * self.idle.sum()


def unscaled_norms(strategy: str) -> list[float]:
    """Returns the gradients' norm before and after clipping, in a step with a grad scaler."""
    net = MostlyIdle()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms = []
    data = TensorDataset(torch.full((3, 1), 4.0))
    for (x,) in shoal.ElasticDataLoader(data, global_batch_size=3):
        scaler.scale(model(x).mean()).backward()
        scaler.unscale_(optimizer)
        norms += [float(model.clip_grad_norm_(1.0)), float(model.clip_grad_norm_(1.0))]
        scaler.step(optimizer)
        scaler.update()
    return norms


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hybrid"])
def test_a_rank_whose_gradients_are_all_zero_reports_the_unscaled_norm(strategy: str) -> None:
    for norms in shoal.launch(unscaled_norms, strategy, world_size=3):
        assert norms == pytest.approx([4.0, 1.0], rel=1e-5)


def scaled_on_few(*, registered_early: bool) -> list[Any]:
    """Trains in steps of two micro-batches, of which one of three ranks has none from the first
    step on. The gradients of the second step overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if registered_early:
        shoal.register_state(scaler=scaler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model, optimizer = shoal.as_distributed(net, torch.optim.Adam(net.parameters(), lr=0.01))
    steps = shoal.ElasticDataLoader(
        TensorDataset(X[:8]), global_batch_size=2, micro_batch_size=1, shuffle=False
    ).steps()
    for number, step in enumerate(steps):
        for (x,) in step:
            factor = float("inf") if number == 1 else 1.0
            scaler.scale(model(x).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [
        scaler.get_scale(),
        {name: value.tolist() for name, value in model.full_state_dict().items()},
    ]


@pytest.mark.parametrize("registered_early", [False, True])
def test_a_rank_without_a_micro_batch_in_the_first_step_can_use_a_grad_scaler(
    registered_early: bool,
) -> None:
    trained = functools.partial(scaled_on_few, registered_early=registered_early)
    ((scale, expected),) = shoal.launch(trained, world_size=1)
    for its_scale, values in shoal.launch(trained, world_size=3):
        assert its_scale == scale == 8.0
        for name, value in values.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]))


def compares_groups(strategy: str) -> list[Any]:
    _, _, optimizer, _ = make(strategy)
    one, *others = optimizer.param_groups
    one |= {"lr": 0.5}
    optimizer.param_groups[0] = one
    answers = [
        one["lr"],
        optimizer.optimizer.param_groups[0]["lr"],
        one == dict(one),
        one == {},
        "lr" in list(reversed(one)),
    ]
    return [*answers, *[one == other for other in others], optimizer.state.get("nothing") is None]


def test_groups_are_compared_and_merged_as_dicts_are() -> None:
    for answers in shoal.launch(compares_groups, "zero1", world_size=2):
        assert answers[:5] == [0.5, 0.5, True, False, True]
        assert not any(answers[5:-1])
        assert answers[-1]
