"""Performs the collectives of one fully sharded step, without computation: each block's parameters
are gathered twice, and its gradients are reduce-scattered once.

`torchrun ... -m benchmarks.workers.collectives --backend gloo`, or `--backend shoal_gloo`. Both
make the same calls to torch.distributed as torch's FSDP2. While a block would be computed, the
gather of the next block is in flight.
"""

from __future__ import annotations

from typing import Any

import shoal_worker.backends  # noqa: F401 - makes torch know "shoal_gloo"
import torch
import torch.distributed as dist

from benchmarks.workers import blocks
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of


class Sharded:
    """The tensors of one block: its parameters and gradients, unsharded and sharded."""

    def __init__(self, numel: int, ranks: int) -> None:
        self.shard = torch.ones(-(-numel // ranks))
        self.full = torch.empty(len(self.shard) * ranks)
        self.gradient = torch.ones(len(self.shard) * ranks)
        self.summed = torch.empty(len(self.shard))

    def gather(self) -> Any:
        """Starts the all-gather of the parameters."""
        return dist.all_gather_into_tensor(self.full, self.shard, async_op=True)

    def reduce(self) -> Any:
        """Starts the reduce-scatter of the gradients."""
        return dist.reduce_scatter_tensor(self.summed, self.gradient, async_op=True)


def main() -> None:
    """Runs steps until the harness stops this process."""
    flags = parser()
    flags.add_argument("--backend", choices=("gloo", "shoal_gloo"), required=True)
    options = flags.parse_args()
    workload = workload_of(options)
    dist.init_process_group(options.backend)
    net = blocks.network(workload)
    inner = [sum(p.numel() for p in block.parameters()) for block in net.layers]
    outer = sum(p.numel() for p in net.parameters()) - sum(inner)
    sharded = [Sharded(numel, workload.ranks) for numel in (outer, *inner)]
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    step = 0
    while not log.done:
        _one_step(sharded)
        step += 1
        log.committed(group=0, world_size=workload.ranks, rank=dist.get_rank(), step=step)
    dist.destroy_process_group()


def _one_step(sharded: list[Sharded]) -> None:
    for units in (sharded, sharded[:0:-1]):
        # the outermost stays gathered between forward and backward pass
        following = units[0].gather()
        for number in range(len(units)):
            this, following = (
                following,
                units[number + 1].gather() if number + 1 < len(units) else None,
            )
            this.wait()
            if units is not sharded:
                units[number].reduce().wait()
    sharded[0].reduce().wait()


if __name__ == "__main__":
    main()
