"""The decoder on Shoal, under any strategy: `shoal run ... -m benchmarks.workers.train_strategy --strategy fsdp`."""

from __future__ import annotations

import json

import shoal

from benchmarks.workers import blocks
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of

TRAIN_STEP_ALONE = ("pipeline", "hybrid")
"""Strategies that may have stages, so that no rank calls the whole model."""


def main() -> None:
    """Trains until told otherwise."""
    flags = parser()
    flags.add_argument("--strategy", required=True)
    flags.add_argument("--options", default="{}", help="of the strategy, as JSON")
    flags.add_argument("--replicas", type=int, default=0, help="that share the global batch; 0: every rank is one")
    options = flags.parse_args()
    workload = workload_of(options)
    shoal.init()
    net = blocks.network(workload)
    model, optimizer = shoal.as_distributed(net, blocks.optimizer_of(net), strategy=options.strategy, **json.loads(options.options))
    global_batch = workload.batch * (options.replicas or workload.ranks)
    loader = shoal.ElasticDataLoader(blocks.dataset(workload), global_batch_size=global_batch)
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    for _ in loader.epochs(blocks.MANY_EPOCHS):
        for inputs, labels in loader:
            if options.strategy in TRAIN_STEP_ALONE:
                model.train_step(inputs, labels, loss_fn=blocks.loss_fn)
            else:
                blocks.loss_fn(model(inputs), labels).backward()
            if optimizer.step():
                log.committed(group=shoal.generation(), world_size=shoal.world_size(), rank=shoal.rank(), step=loader.global_step)
            optimizer.zero_grad()
            if log.done:
                return


if __name__ == "__main__":
    main()
