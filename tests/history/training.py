"""The workers' script in a checked history: they train on leased batches until the file that ends
the run exists.

The model has a dense part and a small sparse table, except under bsp, which takes no tables. Each
sample has three ids: one shared by a quarter of all samples, so that workers push it at the same
time; one of its own; and one shared by a few. An epoch pushes more rows than the table keeps, so
rows are constantly evicted by number and by age. At the end of each epoch, whole buckets are read
for a checkpoint. At the start, the servers load the buckets of a checkpoint that an earlier run has
saved.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import shoal_worker.api as shoal
import torch
from shoal_worker.sparse_tables.embedding import SparseEmbedding
from torch import nn
from torch.utils.data import TensorDataset

from tests.integration.worker_async.train import FEATURES, problem

BATCH_SIZE = 4
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_ENDLESS = 1 << 30
_DIM = 4
_IDS = 3
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads consecutive numbers over all 64 bits, as signed numbers."""


def table() -> SparseEmbedding:
    """Returns the sparse table, which has three buckets."""
    adagrad = partial(torch.optim.Adagrad, lr=0.05, lr_decay=1e-4)
    return SparseEmbedding(
        None,
        _DIM,
        name="users",
        optimizer=adagrad,
        seed=3,
        scale=0.1,
        buckets=3,
        max_rows=180,
        max_age=48,
    )


class Network(nn.Module):
    """A network that gives each of two servers several partitions."""

    def __init__(self, *, has_table: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = FEATURES + has_table * _DIM * _IDS
        self.users = table() if has_table else None
        self.layers = nn.Sequential(
            nn.Linear(width, 12),
            nn.Tanh(),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, 1),
        )

    def forward(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.users is not None:
            features = torch.cat([features, self.users(ids).flatten(1)], dim=1)
        made: torch.Tensor = self.layers(features)
        return made


def samples() -> TensorDataset:
    """Returns features, ids and targets."""
    features, targets = problem().tensors
    number = torch.arange(len(features))
    ids = torch.stack([number % 4, 100 + number // 8, 1000 + number], dim=1) * _GAMMA
    return TensorDataset(features, ids, targets)


def main(arguments: Sequence[str]) -> int:
    """Trains as configured. `arguments`: one JSON object. `end`: the file that ends the run;
    `longest_step_s`: upper bound of a step's duration, which is drawn with `seed`; `options`: of
    async_sgd; `checkpoints`: directory from which to resume and to which to save; empty: neither
    checkpoints nor a sparse table. Rows of the table are sometimes looked up ahead."""
    config: dict[str, Any] = json.loads(arguments[0])
    end, pace = Path(config["end"]), random.Random(config["seed"])
    options = {
        **config["options"],
        "lease_ahead": timedelta(seconds=config["options"]["lease_ahead"]),
    }
    shoal.init()
    checkpoints = config["checkpoints"]
    net = Network(has_table=bool(checkpoints))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(net.parameters(), **ADAM), strategy="async_sgd", **options
    )
    loader = shoal.ElasticDataLoader(
        samples(), batch_size=BATCH_SIZE, name="train", look_ahead=bool(checkpoints)
    )
    if checkpoints:
        shoal.resume(checkpoints)
    for _ in loader.epochs(_ENDLESS):
        for features, ids, targets in loader:
            if (
                net.users is not None
                and pace.random() < 0.5
                and (upcoming := loader.peek()) is not None
            ):
                net.users.prefetch(upcoming[1])
            model.train_step((features, ids), targets, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pace.uniform(0, config["longest_step_s"]))
        if checkpoints:
            shoal.save_checkpoint(checkpoints, keep=1)
        if end.exists():
            break
    # unlike an interpreter, the zygote's children do not wait at their end for a checkpoint that is
    # being written
    shoal.shutdown()
    return 0
