"""The task of a T17 worker, its command line, and the absence of its place. No torch here: the
harness imports this module too."""

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
    """One run of this number of steps, over exactly the samples that these need; each sample should
    be trained once."""

    ledgers: Path
    """Directory of the ledgers."""
    model: str
    """One of `MODELS`."""
    ranks: int
    """Workers at full strength."""
    batch: int
    """Samples per rank per step at full strength."""
    steps: int

    def arguments(self) -> list[str]:
        """The command line that `task_of` reads."""
        return [
            f"--ledgers={self.ledgers}",
            f"--model={self.model}",
            f"--ranks={self.ranks}",
            f"--batch={self.batch}",
            f"--steps={self.steps}",
        ]

    @property
    def global_batch(self) -> int:
        """Samples per step at full strength."""
        return self.batch * self.ranks

    @property
    def samples(self) -> int:
        """Size of the dataset, which is trained for one epoch."""
        return self.global_batch * self.steps

    def wait_for_place(self) -> None:
        """Blocks while this worker's place is absent. A replacement starts immediately, and waits
        here after its imports."""
        _wait(lambda: not (self.ledgers / ABSENT).exists(), "the end of the absence")

    def wait_for_all(self) -> None:
        """Blocks until as many workers have started a ledger as there are at full strength; without
        it, systems without a launcher would start with fewer."""
        _wait(
            lambda: len(list(self.ledgers.glob(f"*{LEDGER_SUFFIX}"))) >= self.ranks,
            f"{self.ranks} workers to begin",
        )


def parser() -> argparse.ArgumentParser:
    """Returns a parser of the flags that all workers have."""
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
