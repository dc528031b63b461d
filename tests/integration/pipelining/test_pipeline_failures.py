"""Stages that fail and ranks that disagree: all ranks get an error, and none waits forever."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError, MembershipChanged
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.rank_pipeline import Pipeline, PipelineSettings
from torch import nn

from tests.integration.pipelining.models import batch, made, pipeline_of, train
from tests.integration.pipelining.threads import errors_of_grid, run_line


class _Fails(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.where = where
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.calls == 3 and self.where == "forward":
            raise ArithmeticError("the stage is out of order")
        if self.calls == 3 and self.where == "backward":

            def fail(_: torch.Tensor) -> None:
                raise ArithmeticError("the stage is out of order")

            y.register_hook(fail)
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_a_stage_that_fails_ends_all_ranks_with_its_reason(schedule: str, where: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), _Fails(""), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    inputs, targets = batch("mlp", 4)
    begun = time.monotonic()

    def body(rank: int, replica: int, group: Any, data: Any) -> None:
        own = copy.deepcopy(module)
        own[1].where = where
        train(Pipeline(own, PipelineSettings(schedule=schedule), group=group), inputs, targets)

    errors = errors_of_grid(2, 1, body)
    assert len(errors) == 2
    first = [rank for rank, error in errors.items() if isinstance(error, ArithmeticError)]
    assert len(first) == 1
    note = errors[first[0]].__notes__[0]
    assert note.startswith(
        f"in pipeline stage {1 if schedule == 'zbv' else 0}, micro-batch 2, {where}"
    )
    others = [error for rank, error in errors.items() if rank not in first]
    assert all(isinstance(error, MembershipChanged) for error in others), errors
    assert any("out of order" in str(error) for error in others)
    assert time.monotonic() - begun < 60  # the groups' timeout is 120 s


def test_ranks_with_different_batches_are_reported() -> None:
    def body(rank: int, replica: int, group: Any, data: Any) -> None:
        train(pipeline_of(made("mlp"), group), *batch("mlp", 4 + rank))

    errors = errors_of_grid(2, 1, body)
    assert any(
        "all ranks of a replica must pass the same batch" in str(error) for error in errors.values()
    )
    assert all(
        isinstance(error, ConfigurationError | MembershipChanged) for error in errors.values()
    )


def test_loss_that_is_not_a_scalar_and_output_without_a_loss_are_refused() -> None:
    inputs, targets = batch("mlp", 4)

    def unreduced(rank: int, group: Any) -> None:
        pipeline_of(made("mlp"), group).train_on(
            cut_batch(inputs, targets, count=4),
            lambda o, t: nn.functional.cross_entropy(o, t, reduction="none").repeat(2),
        )

    def no_loss(rank: int, group: Any) -> None:
        train(pipeline_of(made("mlp"), group), inputs)

    with pytest.raises(
        ConfigurationError,
        match=r"the loss of a micro-batch is \(2,\); expected a tensor of one element",
    ):
        run_line(2, unreduced)
    with pytest.raises(
        ConfigurationError,
        match=r"requires an output with a \.loss tensor, but the model returned Tensor",
    ):
        run_line(2, no_loss)
