"""The task of a T17 worker, the command line that describes it, and the wait during an absence (the
time in which a killed worker may not be replaced).

The module does not import torch, because the harness imports it too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODELS: Final = ("gpt", "cnn")
ABSENT: Final = "absent"
"""Name of a file in the ledgers' directory. While it exists, a worker that starts does not join."""
LEDGER_SUFFIX: Final = ".ledger"
_POLL_S: Final = 0.01
_PATIENCE_S: Final = 120
"""Longest wait for other workers, or for the end of an absence."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run with a fixed number of steps. The dataset has exactly as many samples as the
    steps need, so each sample should be trained once."""

    ledgers: Path
    """Directory of the ledgers."""
    model: str
    """One of `MODELS`."""
    ranks: int
    """Number of workers when none is absent."""
    batch: int
    """Number of samples per rank and step when no worker is absent."""
    steps: int

    def arguments(self) -> list[str]:
        """Returns the command-line arguments from which `task_of` restores this task."""
        return [
            f"--ledgers={self.ledgers}",
            f"--model={self.model}",
            f"--ranks={self.ranks}",
            f"--batch={self.batch}",
            f"--steps={self.steps}",
        ]

    @property
    def global_batch(self) -> int:
        """Number of samples in a step, over all ranks."""
        return self.batch * self.ranks

    @property
    def samples(self) -> int:
        """Number of samples in the dataset, which is trained for one epoch."""
        return self.global_batch * self.steps

    def wait_for_place(self) -> None:
        """Blocks until no absence is in progress. The replacement of a killed worker is started
        immediately, and waits here once it has imported its modules."""
        _wait(lambda: not (self.ledgers / ABSENT).exists(), "the end of the absence")

    def wait_for_all(self) -> None:
        """Blocks until `ranks` workers have started a ledger. Otherwise, systems without a launcher
        would start training with fewer workers."""
        _wait(
            lambda: len(list(self.ledgers.glob(f"*{LEDGER_SUFFIX}"))) >= self.ranks,
            f"{self.ranks} workers to begin",
        )


def parser() -> argparse.ArgumentParser:
    """Returns a parser for the flags that all worker programs have."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--ledgers", type=Path, required=True)
    flags.add_argument("--model", choices=MODELS, required=True)
    for name in ("ranks", "batch", "steps"):
        flags.add_argument(f"--{name}", type=int, required=True)
    return flags


def task_of(options: argparse.Namespace) -> Task:
    """Returns the task that the flags describe."""
    return Task(
        ledgers=options.ledgers,
        model=options.model,
        ranks=options.ranks,
        batch=options.batch,
        steps=options.steps,
    )


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE_S} s for {what}")
        time.sleep(_POLL_S)
