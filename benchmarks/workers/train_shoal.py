"""The training loop with Shoal: `shoal run ... -m benchmarks.workers.train_shoal`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import shoal

from benchmarks.workers import phases, training
from benchmarks.workers.placing import join, loading, settling
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of


def flags() -> argparse.ArgumentParser:
    """Returns the parser of this worker's command line, with the flags that describe a workload and
    additional ones."""
    own = parser()
    own.add_argument("--strategy", default="ddp")
    own.add_argument("--consistency-check-every", type=int, help="steps; the default is Shoal's")
    own.add_argument(
        "--phases", type=Path, help="directory in which to note when groups end and connect"
    )
    own.add_argument("--logs", action="store_true", help="print what Shoal logs")
    return own


def main() -> None:
    """Trains until the harness ends the run."""
    options = flags().parse_args()
    if options.logs:
        logging.basicConfig(level=logging.INFO)
    workload = workload_of(options)
    if options.phases is not None:
        phases.note_into(options.phases)
    device = join(workload)
    net = training.network(workload).to(device)
    every = options.consistency_check_every
    settings = {} if every is None else {"consistency_check_every": every}
    model, optimizer = shoal.as_distributed(
        net, training.optimizer_of(net), strategy=options.strategy, **settings
    )
    loader = shoal.ElasticDataLoader(
        training.dataset(workload), global_batch_size=workload.global_batch, **loading(device)
    )
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate, settle=settling(device))
    for _ in loader.epochs(training.MANY_EPOCHS):
        for batch in loader:
            inputs, labels = (each.to(device, non_blocking=True) for each in batch)
            training.loss_fn(model(inputs), labels).backward()
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
