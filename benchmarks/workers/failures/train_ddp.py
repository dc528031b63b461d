"""T17's training loop with torch's DDP and checkpoints: `torchrun ... -m
benchmarks.workers.failures.train_ddp`.

Rank 0 saves checkpoints in a directory that all ranks share, and every rank loads them. The other
ranks do not wait until a checkpoint is written, but they wait for rank 0 in the next step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers.failures import models
from benchmarks.workers.failures.ledger import Ledger
from benchmarks.workers.failures.task import parser, task_of


def main() -> None:
    """Trains from the newest checkpoint to the last step."""
    flags = parser()
    flags.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0: once, at the end")
    options = flags.parse_args()
    task = task_of(options)
    task.wait_for_place()
    group = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ledger = Ledger(task.ledgers)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = models.network(task)
    optimizer = models.optimizer_of(net)
    checkpoint = task.ledgers / "checkpoint.pt"
    begun = _load(checkpoint, net, optimizer)
    model = DistributedDataParallel(net)
    dataset, loss_fn = models.dataset(task), models.loss_of(task)
    share = models.order(task).view(task.steps, world_size, task.batch)[:, rank]
    for step in range(begun + 1, task.steps + 1):
        indices, inputs, targets = dataset[share[step - 1]]
        ledger.tried(group=group, world_size=world_size, step=step, samples=indices.tolist())
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        ledger.committed()
        optimizer.zero_grad()
        if rank == 0 and step % (options.checkpoint_every or task.steps) == 0:
            ledger.saved(_save(checkpoint, net, optimizer, step))
    ledger.finished(digest=models.digest_of(net.state_dict()))
    dist.destroy_process_group()


def _save(file: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Replaces the checkpoint by the current state. Returns the seconds that this took."""
    started = time.perf_counter()
    partial = file.with_suffix(".partial")
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, partial)
    partial.replace(file)
    return time.perf_counter() - started


def _load(file: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the checkpoint and returns its step. Returns 0 if there is none."""
    if not file.exists():
        return 0
    state: dict[str, Any] = torch.load(file)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
