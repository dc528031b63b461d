"""The training loop of T9, with Shoal or with torch's DDP. Trains the same network on the same
batches of handwritten digits until the loss is low enough. Each rank writes its results to a file.

The loss is the model's loss on a fixed set of images. It is evaluated between steps; the evaluation
is not included in the measured time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.machines import sent_bytes

LEARNING_RATE = 0.3
LOOKED_AT = 300
"""Number of images on which the loss is evaluated."""


def main() -> None:
    """Trains as specified by the command line."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--system", choices=("shoal", "torch"), required=True)
    flags.add_argument("--options", type=json.loads, default={}, help="of as_distributed")
    flags.add_argument("--preset", default="", help="as_distributed_for_PRESET")
    flags.add_argument("--width", type=int, required=True)
    flags.add_argument("--batch", type=int, required=True, help="samples per rank")
    flags.add_argument("--target", type=float, required=True, help="loss to reach")
    flags.add_argument(
        "--steps", type=int, required=True, help="leave after so many, whatever the loss is"
    )
    flags.add_argument("--output", type=Path, required=True, help="directory")
    options = flags.parse_args()
    torch.set_num_threads(1)
    net = network(options.width)
    parameters = [tuple(p.shape) for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    found = (_shoal if options.system == "shoal" else _torch)(net, optimizer, options)
    (options.output / f"{found['rank']}.json").write_text(
        json.dumps(found | {"formula_bytes": _formula(options, parameters)})
    )


def _shoal(
    net: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> dict[str, Any]:
    import shoal

    shoal.init()
    distribute = (
        getattr(shoal, f"as_distributed_for_{options.preset}")
        if options.preset
        else shoal.as_distributed
    )
    model, stepper = distribute(net, optimizer, **options.options)
    return train(model, stepper, rank=shoal.rank(), ranks=shoal.world_size(), options=options)


def _torch(
    net: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    found = train(
        model, optimizer, rank=dist.get_rank(), ranks=dist.get_world_size(), options=options
    )
    dist.barrier()
    dist.destroy_process_group()
    return found


def network(width: int) -> nn.Module:
    """Returns a network of three wide layers, so that the computation of a step takes little time
    compared with sending its gradients over a slow link."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def train(
    model: Any, optimizer: Any, *, rank: int, ranks: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains until the loss is reached. Returns the duration of each step in seconds, the loss
    after it, and the number of bytes that this machine sent per step."""
    digits = load_digits()
    images = torch.tensor(digits.images.reshape(-1, 64) / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(1)
    seconds: list[float] = []
    losses: list[float] = []
    sent = 0
    step = _step(model, optimizer)
    while len(seconds) <= options.steps and (not losses or losses[-1] > options.target):
        chosen = torch.randperm(len(images), generator=generator)[
            rank * options.batch : (rank + 1) * options.batch
        ]
        if len(seconds) == 1:
            sent = sent_bytes()  # the first step connects
        begun = time.perf_counter()
        step(images[chosen], labels[chosen])
        seconds.append(time.perf_counter() - begun)
        with torch.no_grad():
            losses.append(
                float(
                    nn.functional.cross_entropy(
                        model.module(images[:LOOKED_AT]), labels[:LOOKED_AT]
                    )
                )
            )
    return {
        "rank": rank,
        "ranks": ranks,
        "seconds": seconds,
        "losses": losses,
        "reached": losses[-1] <= options.target,
        "sent_bytes_per_step": (sent_bytes() - sent) / max(1, len(seconds) - 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "pid": os.getpid(),
    }


def _step(model: Any, optimizer: Any) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _formula(options: argparse.Namespace, shapes: list[tuple[int, ...]]) -> int:
    """Returns the number of gradient bytes that a rank should send per step
    (docs/strategies/compression.md), if the entire model is one bucket."""
    from shoal_worker.config import ShardingConfiguration

    numel, ranks = sum(math.prod(shape) for shape in shapes), 2
    config = (
        getattr(ShardingConfiguration, f"for_{options.preset}")()
        if options.preset
        else ShardingConfiguration(**options.options)
    )
    if options.system == "torch" or config.compressor is None:
        return 2 * 4 * numel * (ranks - 1) // ranks
    return config.compressor.wire_bytes(numel, ranks, shapes)


if __name__ == "__main__":
    main()
