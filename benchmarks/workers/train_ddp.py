"""The training loop with torch's own DDP: `torchrun ... -m benchmarks.workers.train_ddp`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.workers import training
from benchmarks.workers.placing import joining, loading, place, settling
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of


def main() -> None:
    """Trains until the harness ends the run. After a restart, starts from scratch, so that the
    measured times of torchrun do not include writing and reading checkpoints."""
    group = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    workload = workload_of(parser().parse_args())
    device = place(workload, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(**joining(device))
    net = training.network(workload).to(device)
    optimizer = training.optimizer_of(net)
    model = DistributedDataParallel(net)
    dataset = training.dataset(workload)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=workload.batch, sampler=sampler, **loading(device))
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate, settle=settling(device))
    step = 0
    for epoch in range(training.MANY_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs, labels = (each.to(device, non_blocking=True) for each in batch)
            training.loss_fn(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            log.committed(
                group=group, world_size=dist.get_world_size(), rank=dist.get_rank(), step=step
            )
            optimizer.zero_grad()
            if log.done:
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
