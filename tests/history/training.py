"""What the workers of a checked history run: leased batches, until somebody makes the file that ends it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal_worker.api as shoal
import torch
from torch import nn

from tests.integration.worker_async.train import FEATURES, problem

BATCH_SIZE = 4
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_ENDLESS = 1 << 30


def network() -> nn.Module:
    """One of which each of two servers gets several partitions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))


def main(arguments: Sequence[str]) -> int:
    """`arguments`: one JSON object. `end`: the file; `longest_step_s`: of a step's own time, drawn with `seed`; `options`: of async_sgd."""
    config: dict[str, Any] = json.loads(arguments[0])
    end, pace = Path(config["end"]), random.Random(config["seed"])
    options = {**config["options"], "lease_ahead": timedelta(seconds=config["options"]["lease_ahead"])}
    shoal.init()
    net = network()
    model, optimizer = shoal.as_distributed(net, torch.optim.Adam(net.parameters(), **ADAM), strategy="async_sgd", **options)
    loader = shoal.ElasticDataLoader(problem(), batch_size=BATCH_SIZE, name="train")
    for _ in loader.epochs(_ENDLESS):
        for inputs, targets in loader:
            model.train_step(inputs, targets, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pace.uniform(0, config["longest_step_s"]))
        if end.exists():
            break
    return 0
