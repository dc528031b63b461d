"""The training loop of T10, with Shoal under any strategy. One rank is slow, and rank 0 reports
when the loss on a validation set is low enough.

A worker does not simulate slowness by longer computations: with more workers than cores, they would
slow the other workers down too. Instead, it sleeps until its forward and backward passes have taken
the intended time. Rank 0 evaluates the loss during this sleep, so that the evaluation does not add
to the measured time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

TRAINED_ON: Final = 1408
"""Number of training images; the other 389 are the validation set."""
WIDTH: Final = 128
STAYS_STEPS: Final = 12
"""Number of rank 0's steps for which the loss must stay low enough, so that a loss that is low by
chance does not count. The time of these steps does not count."""
_MANY_EPOCHS: Final = 1_000_000


def flags() -> argparse.ArgumentParser:
    """Returns the parser of this worker's command line."""
    own = argparse.ArgumentParser()
    own.add_argument("--strategy", required=True)
    own.add_argument("--options", type=json.loads, default={}, help="of the strategy, as JSON")
    own.add_argument("--learning-rate", type=float, required=True)
    own.add_argument("--ranks", type=int, required=True)
    own.add_argument("--batch", type=int, required=True, help="samples per rank and step")
    own.add_argument(
        "--micro-batch",
        type=int,
        default=0,
        help="samples in a micro-batch, which are dealt by speed; 0: plain batches",
    )
    own.add_argument("--compute-ms", type=float, required=True, help="time of forward and backward")
    own.add_argument(
        "--slow", type=float, required=True, help="how many times as long the last rank takes"
    )
    own.add_argument("--target", type=float, required=True, help="loss to reach")
    own.add_argument(
        "--look-every",
        type=int,
        required=True,
        help="steps of rank 0 between two looks at the loss",
    )
    own.add_argument("--within-s", type=float, required=True, help="give up after so long")
    own.add_argument(
        "--output",
        type=Path,
        required=True,
        help="file that rank 0 writes when the loss is reached or given up",
    )
    return own


class Looks:
    """The losses evaluated by rank 0, with their times."""

    def __init__(self, target: float, *, every: int) -> None:
        """`target`: loss to reach. `every`: number of rank 0's steps between two evaluations."""
        self._target = target
        self._needed = 1 + -(-STAYS_STEPS // every)
        self._first_s = 0.0
        self.times_s: list[float] = []
        """Times since the first evaluation."""
        self.losses: list[float] = []

    def look(self, loss: float, at_s: float) -> None:
        """Records the loss of the parameters at the time `at_s`, by CLOCK_MONOTONIC. Times are
        counted from that of the first call."""
        if not self.times_s:
            self._first_s = at_s
        self.times_s.append(at_s - self._first_s)
        self.losses.append(loss)

    @property
    def reached_s(self) -> float | None:
        """Time at which the loss became low enough and stayed so for some steps; None if it has
        not."""
        last = self.losses[-self._needed :]
        return (
            self.times_s[-self._needed]
            if len(last) == self._needed and max(last) <= self._target
            else None
        )


def main() -> None:
    """Trains until the harness ends the run."""
    options = flags().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shoal.init()
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(net.parameters(), options.learning_rate)
    model, stepper = shoal.as_distributed(
        net, optimizer, strategy=options.strategy, **options.options
    )
    train, (images, labels) = digits()
    batches = (
        {"batch_size": options.batch}
        if options.strategy == "async_sgd"
        else {"global_batch_size": options.batch * options.ranks}
    )
    if options.micro_batch:
        batches["micro_batch_size"] = options.micro_batch
    by_speed = {"balance": True} if options.micro_batch else {}
    loader = shoal.ElasticDataLoader(train, **batches, **by_speed)
    compute_s = (
        options.compute_ms / 1e3 * (options.slow if shoal.rank() == options.ranks - 1 else 1)
    )
    if options.micro_batch:
        compute_s *= options.micro_batch / options.batch
    looks, step = Looks(options.target, every=options.look_every), 0
    for _ in loader.epochs(_MANY_EPOCHS):
        for batches_of_step in loader.steps():
            look = shoal.rank() == 0 and step % options.look_every == 0
            for inputs, targets in batches_of_step:
                begun_s = time.monotonic()
                if look and not options.output.exists():
                    looks.look(_loss(model, images, labels), begun_s)
                    if looks.reached_s is not None or looks.times_s[-1] > options.within_s:
                        _write(options.output, looks, step)
                look = False
                nn.functional.cross_entropy(model(inputs), targets).backward()
                time.sleep(max(0.0, begun_s + compute_s - time.monotonic()))
            stepper.step()
            stepper.zero_grad()
            step += 1


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Returns scikit-learn's handwritten digits, shuffled in the same way in all processes: the
    training set and the validation set."""
    # takes a second, unneeded where only the flags are read
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images.reshape(-1, 64) / 16, dtype=torch.float32)[order]
    labels = torch.tensor(found.target)[order]
    return TensorDataset(images[:TRAINED_ON], labels[:TRAINED_ON]), (
        images[TRAINED_ON:],
        labels[TRAINED_ON:],
    )


def _loss(model: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.module(images), labels))


def _write(path: Path, looks: Looks, steps: int) -> None:
    """Writes the results to a file atomically, because the harness reads the file as soon as it
    exists."""
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps(
            {
                "reached_s": looks.reached_s,
                "steps": steps,
                "times_s": looks.times_s,
                "losses": looks.losses,
            }
        )
    )
    partial.rename(path)


if __name__ == "__main__":
    main()
