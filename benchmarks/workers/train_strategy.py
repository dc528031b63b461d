"""Trains the decoder with Shoal, under any strategy: `shoal run ... -m
benchmarks.workers.train_strategy --strategy fsdp`."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

import shoal
import torch

from benchmarks.workers import blocks
from benchmarks.workers.placing import join, loading, settling
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of

_TRAIN_STEP_ALONE: Final = ("pipeline", "hybrid")
"""Strategies that may have stages, so that no rank can call the full model."""


def add_strategy(flags: argparse.ArgumentParser) -> None:
    """Adds the flags that select a strategy."""
    flags.add_argument("--strategy", required=True)
    flags.add_argument("--options", type=json.loads, default={}, help="of the strategy, as JSON")


def take_pass(model: Any, strategy: str, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Runs the forward and backward passes in the way that users write them for this strategy."""
    if strategy in _TRAIN_STEP_ALONE:
        model.train_step(inputs, labels, loss_fn=blocks.loss_fn)
    else:
        blocks.loss_fn(model(inputs), labels).backward()


def main() -> None:
    """Trains until the harness ends the run."""
    flags = parser()
    add_strategy(flags)
    flags.add_argument(
        "--replicas", type=int, default=0, help="that share the global batch; 0: every rank is one"
    )
    options = flags.parse_args()
    workload = workload_of(options)
    device = join(workload)
    net = blocks.network(workload).to(device)
    model, optimizer = shoal.as_distributed(
        net, blocks.optimizer_of(net), strategy=options.strategy, **options.options
    )
    global_batch = workload.batch * (options.replicas or workload.ranks)
    loader = shoal.ElasticDataLoader(
        blocks.dataset(workload), global_batch_size=global_batch, **loading(device)
    )
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate, settle=settling(device))
    for _ in loader.epochs(blocks.MANY_EPOCHS):
        for batch in loader:
            inputs, labels = (each.to(device, non_blocking=True) for each in batch)
            take_pass(model, options.strategy, inputs, labels)
            if optimizer.step():
                log.committed(
                    group=shoal.generation(),
                    world_size=shoal.world_size(),
                    rank=shoal.rank(),
                    step=loader.global_step,
                )
            optimizer.zero_grad()
            if log.done:
                return


if __name__ == "__main__":
    main()
