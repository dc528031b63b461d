"""Gradient hooks on parameters (register_hook, register_post_accumulate_grad_hook) are called as in
one process, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

X = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OPTIONS: dict[str, dict[str, Any]] = {"pipeline": {"micro_batches": 2}}
CALLED = ["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
REFUSED = ["tensor", "pipeline", "hybrid"]

Register = Callable[[nn.Module, list[str]], None]


def halving(net: nn.Module, called: list[str]) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def doubling(net: nn.Module, called: list[str]) -> None:
    def double(own: torch.Tensor) -> None:
        assert own.grad is not None
        own.grad = own.grad * 2

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(double)


def noting(net: nn.Module, called: list[str]) -> None:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda own: called.append(str(tuple(own.shape)))
        )


def train(
    strategy: str | None, register: Register, when: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Trains three steps and returns the parameters and the hook calls of this rank.

    when: "before" registers the hooks before as_distributed, "after" after it, "between steps"
    after the first step, and "within a step" before the second step's forward pass.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model: Any = net
    called: list[str] = []
    batches: Any = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]
    if when == "before":
        register(net, called)
    if strategy is not None:
        model, optimizer = shoal.as_distributed(
            net, optimizer, strategy=strategy, **OPTIONS.get(strategy, {})
        )
        batches = shoal.ElasticDataLoader(TensorDataset(X, Y), global_batch_size=8, shuffle=False)
    if when == "after":
        register(net, called)
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        if when == "within a step" and i == 1:
            register(net, called)
        if strategy is None:
            functional.mse_loss(model(x), y).backward()
        else:
            model.train_step(x, y, functional.mse_loss)
        optimizer.step()
        if when == "between steps" and i == 0:
            register(net, called)
    return net.state_dict() if strategy is None else model.full_state_dict(), called


@pytest.mark.parametrize(
    ("register", "when"),
    [
        (halving, "before"),
        (noting, "after"),
        (halving, "between steps"),
        (doubling, "before"),
        (doubling, "after"),
        (doubling, "between steps"),
        (doubling, "within a step"),
    ],
)
@pytest.mark.parametrize("strategy", CALLED)
def test_hooks_are_called_as_in_one_process(strategy: str, register: Register, when: str) -> None:
    expected, calls = train(None, register, when)
    for state, called in shoal.launch(train, strategy, register, when, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        assert sorted(called) == sorted(calls)


@pytest.mark.parametrize("when", ["before", "after", "between steps"])
@pytest.mark.parametrize("register", [halving, noting])
@pytest.mark.parametrize("strategy", REFUSED)
def test_hooks_without_effect_are_refused(strategy: str, register: Register, when: str) -> None:
    with pytest.raises(
        shoal.ConfigurationError,
        match=r"parameter .* has a hook on its gradient.*ddp, zero1, .* call such hooks",
    ):
        shoal.launch(train, strategy, register, when, world_size=2)


def test_hooks_on_an_uninitialized_parameter_are_refused() -> None:
    def one() -> None:
        with torch.device("meta" if shoal.rank() else "cpu"):
            net = nn.Linear(6, 3)
        if shoal.rank():
            halving(net, [])
        model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        for x, y in shoal.ElasticDataLoader(
            TensorDataset(X.float(), Y.float()), global_batch_size=8
        ):
            model.train_step(x, y, functional.mse_loss)

    with pytest.raises(
        shoal.ConfigurationError, match="do not create the model on the meta device"
    ):
        shoal.launch(one, world_size=2)
