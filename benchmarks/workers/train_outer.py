"""The training loop of T16: async_sgd with or without outer steps, for a given number of epochs.
Each rank reports the bytes that it sent and received, and rank 0 also reports the loss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import shoal
import torch
from torch import nn

from benchmarks.workers.train_straggler import WIDTH, digits
from benchmarks.workers.wire import traffic

OUTER: Final[dict[str, Callable[[Any, int], torch.optim.Optimizer]]] = {
    "delayed": lambda parameters, ranks: shoal.optim.DelayedNesterov(
        parameters, 0.7, 0.9, every=ranks
    ),
    "nesterov": lambda parameters, ranks: torch.optim.SGD(
        parameters, 0.7, momentum=0.9, nesterov=True
    ),
    "mean": lambda parameters, ranks: torch.optim.SGD(parameters, 1 / ranks),
}
"""Outer optimizers for a given number of ranks, by the value of `--outer`."""


def flags() -> argparse.ArgumentParser:
    """Returns the parser of this worker's command line."""
    own = argparse.ArgumentParser()
    own.add_argument("--inner-steps", type=int, default=0, help="0: none, each step is a push")
    own.add_argument("--outer", choices=sorted(OUTER), default="delayed")
    own.add_argument("--learning-rate", type=float, required=True, help="of AdamW")
    own.add_argument("--ranks", type=int, required=True)
    own.add_argument("--batch", type=int, required=True, help="samples per step")
    own.add_argument("--epochs", type=int, required=True)
    own.add_argument("--output", type=Path, required=True, help="directory")
    return own


def main() -> None:
    """Trains as specified by the command line."""
    options = flags().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shoal.init()
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    outer: dict[str, Any] = {}
    if options.inner_steps:
        outer = {
            "inner_steps": options.inner_steps,
            "outer_optimizer": OUTER[options.outer](net.parameters(), options.ranks),
        }
    inner = torch.optim.AdamW(net.parameters(), options.learning_rate)
    model, optimizer = shoal.as_distributed(net, inner, strategy="async_sgd", **outer)
    train, (images, labels) = digits()
    loader = shoal.ElasticDataLoader(train, batch_size=options.batch)
    before = None
    for _ in loader.epochs(options.epochs):
        for inputs, targets in loader:
            before = before or traffic()  # the first values are there
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = traffic().since(before or traffic())
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(net(images), labels))
    found = {
        "steps": loader.global_step,
        "sent": moved.sent,
        "received": moved.received,
        "loss": loss,
    }
    partial = options.output / f"{shoal.rank()}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(options.output / f"{shoal.rank()}.json")


if __name__ == "__main__":
    main()
