"""Optimizer state that cannot be sent to a worker is refused in the first step, not when the first
worker joins."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"elementwise_optimizer": True},
    "zero2": {"elementwise_optimizer": True},
    "zero3": {"elementwise_optimizer": True},
    "fsdp": {"elementwise_optimizer": True},
    "tensor": {"elementwise_optimizer": True},
    "hybrid": {"elementwise_optimizer": True},
    "local_sgd": {"sync_every": 2},
}


class Remembering(torch.optim.SGD):
    """An optimizer that stores the result of `remember` in the state of each parameter."""

    remember: Any = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = self.remember()
        return result


def train(optimizer_of: Any, strategy: str, options: dict[str, Any]) -> int:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = shoal.as_distributed(net, optimizer_of(net), strategy=strategy, **options)
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(48, 8)), global_batch_size=12
    )
    for (batch,) in loader:
        model.train_step(batch, loss_fn=lambda output, _: output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return loader.global_step


def remembering(remember: Any) -> Any:
    kind = type("Remembering", (Remembering,), {"remember": staticmethod(remember)})
    return lambda net: kind(net.parameters(), 0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "remember", [deque, lambda: torch.zeros(2, 2).to_sparse()], ids=["object", "sparse tensor"]
)
def test_first_step_names_state_that_cannot_be_sent_and_its_parameter(
    strategy: str, remember: Any
) -> None:
    steps: list[int] = []

    def rank() -> None:
        try:
            steps.append(train(remembering(remember), strategy, STRATEGIES[strategy]))
        except ConfigurationError:
            steps.append(-1)
            raise

    with pytest.raises(
        ConfigurationError,
        match=r"Remembering keeps an unsupported value in its state, 'history' of parameter '0\.",
    ) as refused:
        shoal.launch(rank, world_size=2)
    assert refused.value.reason == "STATE_UNSUPPORTED"
    assert set(steps) == {-1}


def test_a_setting_that_cannot_be_sent_is_refused_in_the_first_step() -> None:
    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": list(net.parameters()), "schedule": lambda step: 0.1}], 0.1
        )

    with pytest.raises(
        ConfigurationError, match=r"schedule.*function, which cannot be saved or sent"
    ):
        shoal.launch(train, optimizer, "ddp", {}, world_size=2)


def test_state_of_numbers_and_tensors_of_any_shape_is_accepted() -> None:
    made = remembering(lambda: torch.zeros(3, 5))
    for strategy in ("ddp", "zero2", "zero3", "tensor"):
        assert shoal.launch(train, made, strategy, STRATEGIES[strategy], world_size=2) == [4, 4]


def test_single_process_may_keep_any_state() -> None:
    assert train(remembering(deque), "ddp", {}) == 4
    shoal.shutdown()


class TwoDtypes(torch.optim.SGD):
    """An optimizer whose state of matrices has another dtype than its state of vectors."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(
                    parameter, dtype=torch.bfloat16 if group["half"] else torch.float32
                )
        return result


def two_dtypes(net: nn.Module) -> TwoDtypes:
    parameters = list(net.parameters())
    return TwoDtypes(
        [
            {"params": [p for p in parameters if p.dim() == 2], "half": True},
            {"params": [p for p in parameters if p.dim() == 1], "half": False},
        ],
        0.1,
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp"])
def test_a_state_with_several_dtypes_is_refused_if_it_is_sharded_as_one(strategy: str) -> None:
    """A sharded state is stored with one dtype, so a resumed run would differ."""
    with pytest.raises(
        ConfigurationError,
        match=r"'mean' as torch.bfloat16 for parameter '0.weight', but as torch.float32 for '0.b",
    ) as refused:
        shoal.launch(
            lambda: train(two_dtypes, strategy, STRATEGIES[strategy]),
            world_size=2,
        )
    assert refused.value.reason == "STATE_UNSUPPORTED"
