"""Trains the decoder with DeepSpeed's ZeRO, on CPUs over Gloo: `torchrun ... -m
benchmarks.workers.train_deepspeed --stage 3`, in the peers' environment (`benchmarks.peers`), with
DS_ACCELERATOR=cpu."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.workers import blocks
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of


def main() -> None:
    """Trains until the harness ends the run."""
    flags = parser()
    flags.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    options = flags.parse_args()
    workload = workload_of(options)
    deepspeed.init_distributed("gloo")
    net = blocks.network(workload)
    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as everybody else has
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=blocks.optimizer_of(net), config=config)
    dataset = blocks.dataset(workload)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=workload.batch, sampler=sampler)
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    step = 0
    for epoch in range(blocks.MANY_EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            engine.backward(blocks.loss_fn(engine(inputs), labels))
            engine.step()  # clears the gradients too
            step += 1
            log.committed(
                group=0, world_size=dist.get_world_size(), rank=dist.get_rank(), step=step
            )
            if log.done:
                os._exit(0)  # stage 3 aborts in its own threads when the interpreter ends (0.19.8)


if __name__ == "__main__":
    main()
