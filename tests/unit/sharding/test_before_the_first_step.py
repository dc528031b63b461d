"""Until the first step begins, all ranks have all parameters, and the model can be used like a
plain module without losing anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import torch
from torch import nn


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_predictions_and_evaluations_before_the_first_step_change_nothing(
    strategy: str, world_size: int, tmp_path: Path
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3)), nn.Linear(40, 2)
        )
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        x = torch.ones(1, 40)
        with torch.no_grad():
            output = net(x)
        model, _ = shoal.as_distributed(net, torch.optim.AdamW(net.parameters()), strategy=strategy)
        for _ in range(2):
            assert model.predict(x).equal(output)
            assert shoal.evaluate(model, [x] * 4, lambda model, batch: {"sum": model(batch).sum()})[
                "sum"
            ] == 4 * float(output.sum())
        shoal.save_checkpoint(tmp_path)
        assert shoal.resume(tmp_path)
        assert model.predict(x).equal(output)
        assert {name: value.tolist() for name, value in model.full_state_dict().items()} == {
            n: v.tolist() for n, v in expected.items()
        }

    shoal.launch(body, world_size=world_size)
