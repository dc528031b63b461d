"""The training loop of T11, under async_sgd: `shoal run ... --servers 1 --server-backups 1 -m
benchmarks.workers.train_async`.

A tally of the pushes (`tally`) is trained in addition to the model. When the harness ends the run,
each worker writes the number of its acknowledged pushes to a file, and rank 0 writes the tally as
applied by the servers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import shoal
import torch
from torch import nn
from torch.utils.data import ConcatDataset

from benchmarks.errors import MeasurementError
from benchmarks.workers import training
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.tally import (
    APPLIED,
    LEAVE,
    OPTIMIZER_GROUP,
    PUSHES_PER_WORKER,
    STOP,
    acknowledged_file,
)
from benchmarks.workers.workload import Workload, parser, workload_of

_TIMEOUT_S: Final = 120
_POLL_S: Final = 0.02


class Tallied(nn.Module):
    """A model together with a tally of the pushes."""

    def __init__(self, net: nn.Module, ranks: int) -> None:
        super().__init__()
        self.net = net
        self.tally = nn.Parameter(torch.zeros(ranks, PUSHES_PER_WORKER))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(inputs)
        return out


def main() -> None:
    """Trains until the harness ends the run. The entire run is within one epoch, because at the end
    of an epoch workers would wait for each other."""
    workload = workload_of(parser().parse_args())
    shoal.init()
    module = Tallied(training.network(workload), workload.ranks)
    groups = [
        {"params": list(module.net.parameters())},
        {"params": [module.tally], **OPTIMIZER_GROUP},
    ]
    model, optimizer = shoal.as_distributed(
        module, torch.optim.Adam(groups, lr=1e-4), strategy="async_sgd"
    )
    dataset = training.dataset(workload)
    batches = PUSHES_PER_WORKER * workload.ranks
    loader = shoal.ElasticDataLoader(
        ConcatDataset([dataset] * -(-batches * workload.batch // len(dataset))),
        batch_size=workload.batch,
    )
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    rank, pushes = shoal.rank(), 0
    for inputs, labels in loader:
        if pushes == PUSHES_PER_WORKER:
            raise MeasurementError(
                f"rank {rank} has pushed {pushes} times, which is all that the tally can count: "
                "measure for less long"
            )
        (training.loss_fn(model(inputs), labels) + module.tally[rank, pushes]).backward()
        if optimizer.step():
            pushes += 1
            log.committed(
                group=shoal.generation(), world_size=shoal.world_size(), rank=rank, step=pushes
            )
        optimizer.zero_grad()
        if (workload.log / STOP).exists():
            break
    _write(workload.log / acknowledged_file(rank), pushes)
    if rank == 0:
        _wait_until(
            lambda: all(
                (workload.log / acknowledged_file(other)).exists()
                for other in range(workload.ranks)
            )
        )
        _write(
            workload.log / APPLIED, {"tally": _applied(model.full_state_dict()["tally"], workload)}
        )
    _wait_until((workload.log / LEAVE).exists)


def _applied(tally: torch.Tensor, workload: Workload) -> list[list[float]]:
    return [
        row[: int(row.nonzero().max()) + 1 if row.any() else 0].tolist()
        for row in tally.view(workload.ranks, -1)
    ]


def _wait_until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` returns True. Raises MeasurementError after two minutes."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise MeasurementError(f"the harness or another worker said nothing for {_TIMEOUT_S} s")
        time.sleep(_POLL_S)


def _write(path: Path, content: object) -> None:
    """Writes a file atomically, because other processes read it as soon as it exists."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)


if __name__ == "__main__":
    main()
