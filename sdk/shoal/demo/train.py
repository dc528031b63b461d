"""Training script of the demo's workers: an ordinary training loop, with Shoal's lines marked.
`python -m shoal.demo.train ddp|async_sgd`."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn

import shoal
from shoal.demo import digits
from shoal.demo.trace import TraceWriter

GLOBAL_BATCH = 96
SLOW_INDEX = "SHOAL_DEMO_SLOW_INDEX"
SLOW_FACTOR = 4


def main() -> None:
    """Trains, evaluates, and records the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=["ddp", "async_sgd"])
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)

    shoal.init()  # Shoal
    torch.manual_seed(0)
    train_set, test_set = digits.datasets()
    net = digits.network()
    model: shoal.ShardedModel
    optimizer: shoal.ShardedOptimizer
    if options.strategy == "ddp":
        # Shoal
        model, optimizer = shoal.as_distributed(net, torch.optim.AdamW(net.parameters(), 1e-3))
        loader = shoal.ElasticDataLoader(train_set, global_batch_size=GLOBAL_BATCH)  # Shoal
    else:
        sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        model, optimizer = shoal.as_distributed(net, sgd, strategy="async_sgd")  # Shoal
        loader = shoal.ElasticDataLoader(train_set, batch_size=GLOBAL_BATCH // 3)  # Shoal
    test_loader = shoal.ElasticDataLoader(test_set, global_batch_size=120, train=False)

    trace = TraceWriter()
    drag = Drag(
        SLOW_FACTOR
        if os.environ.get(SLOW_INDEX) == os.environ.get("SHOAL_LOCAL_INDEX", "none")
        else 1
    )
    for _ in loader.epochs(options.epochs):
        for images, labels in loader:
            drag.begin()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            drag.hold()
            shoal.report(loss=loss)
            generation = shoal.generation()
            committed = optimizer.step()
            drag.end()
            if committed:
                trace.committed(
                    rank=shoal.rank(),
                    generation=generation,
                    step=loader.global_step,
                    loss=loss.item(),
                    samples=len(labels),
                    staleness=optimizer.last_staleness
                    if isinstance(optimizer, shoal.AsyncSGDOptimizer)
                    else 0.0,
                )
            optimizer.zero_grad()

    sums = shoal.evaluate(model, test_loader, count_correct)  # Shoal
    trace.accuracy(sums)
    if shoal.rank() == 0:
        print(f"test accuracy {sums['correct'] / sums['samples']:.4f}", flush=True)


class Drag:
    """Simulates a slow machine: makes each iteration take `factor` times as long as the fastest
    iteration so far. The previous iteration is not used for comparison, since it may have included
    waiting for other workers."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._own_s: float | None = None
        self._held_s = 0.0
        self._began_s = 0.0

    def begin(self) -> None:
        """Records the start of an iteration. Must be called when the iteration's batch has been
        received."""
        self._began_s = time.perf_counter()

    def hold(self) -> None:
        """Waits, between the computation of the gradient and its push, so that the gradient becomes
        stale."""
        self._held_s = (self._factor - 1) * (self._own_s or 0.0)
        time.sleep(self._held_s)  # a plain delay: this is the slow machine's part of the step

    def end(self) -> None:
        """Records the end of a step."""
        taken_s = time.perf_counter() - self._began_s - self._held_s
        self._own_s = taken_s if self._own_s is None else min(self._own_s, taken_s)


def count_correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Returns the numbers of correct answers and of samples in one batch, for `shoal.evaluate`."""
    images, labels = batch
    return {
        "correct": float((model(images).argmax(1) == labels).sum()),
        "samples": float(len(labels)),
    }


if __name__ == "__main__":
    main()
