"""Trains with a single call to `optimize`, on ranks that may die. Writes its result as one JSON
file to OUTPUT; uses STRATEGY."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shoal
import torch
from torch import nn


def fit(strategy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy=strategy, deterministic=True
    )
    changes: list[list[int]] = []
    optimizer.on_membership_change(
        lambda before, after: changes.append([before.world_size, after.world_size])
    )
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = shoal.OptimizationInputData(
        training=(x[:80], x[:80].sum(1, keepdim=True)),
        validation=(x[80:], x[80:].sum(1, keepdim=True)),
        loss_fn=nn.functional.mse_loss,
        epochs=4,
        global_batch_size=16,
        micro_batch_size=4,
        patience=3,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    result = optimizer.optimize(data)
    parameters = {name: value.tolist() for name, value in model.full_state_dict().items()}
    return {"result": asdict(result), "changes": changes, "parameters": parameters}


if __name__ == "__main__":
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
        json.dumps(fit(os.environ["STRATEGY"]))
    )
