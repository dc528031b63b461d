"""A checkpoint is not saved if the run could not be resumed from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import CorruptDataError
from shoal_worker.checkpoint.files import complete_in
from shoal_worker.mesh.parts import ModelParts
from shoal_worker.sharding.sharded_state import ShardedState
from torch import nn


@pytest.mark.parametrize(
    ("strategy", "sharded", "where"),
    [
        ("zero3", None, ShardedState),
        ("fsdp", False, ShardedState),
        ("pipeline", None, ModelParts),
    ],
)
def test_a_state_that_lost_a_tensor_s_shape_is_not_saved(
    strategy: str,
    sharded: bool | None,
    where: type[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = where._as_one_process

    def damaged(*args: Any) -> dict[str, Any]:
        state: dict[str, Any] = complete(*args)
        state["model"]["1.weight"] = state["model"]["1.weight"][:0]
        return state

    def rank() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model, optimizer = shoal.as_distributed(
            net, torch.optim.AdamW(net.parameters()), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(8, 4)), global_batch_size=4
        )
        for (x,) in loader:
            if strategy == "pipeline":
                model.train_step(x, loss_fn=lambda out, _: out.square().mean(), targets=x)
            else:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(CorruptDataError, match=r"was not saved.*1\.weight") as raised:
            shoal.save_checkpoint(tmp_path, sharded=sharded)
        assert raised.value.reason == "MODEL_DIFFERS"

    monkeypatch.setattr(where, "_as_one_process", damaged)
    shoal.launch(rank, world_size=2)
    assert not complete_in(tmp_path)
