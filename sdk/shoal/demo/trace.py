"""Writes and reads records of the steps committed by the demo's workers. Each process writes one
file of JSON lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ENVIRONMENT = "SHOAL_DEMO_TRACE_DIR"


@dataclass(frozen=True, kw_only=True)
class CommittedStep:
    """One committed step, as recorded by one worker."""

    unix_s: float
    member: str
    rank: int
    generation: int
    step: int
    loss: float
    samples: int
    staleness: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Final result of `shoal.evaluate`."""

    correct: float
    samples: float

    @property
    def share(self) -> float:
        """Fraction of correct answers."""
        return self.correct / self.samples


class TraceWriter:
    """Writes the trace file of this process."""

    def __init__(self) -> None:
        self._member = os.environ.get("SHOAL_MEMBER_ID", "alone")
        directory = os.environ.get(ENVIRONMENT)
        self._file = (
            (Path(directory) / f"{self._member}.jsonl").open("a", buffering=1)
            if directory
            else None
        )

    def committed(
        self,
        *,
        rank: int,
        generation: int,
        step: int,
        loss: float,
        samples: int,
        staleness: float = 0.0,
    ) -> None:
        """Records one committed step."""
        self._write(
            "step",
            asdict(
                CommittedStep(
                    unix_s=time.time(),
                    member=self._member,
                    rank=rank,
                    generation=generation,
                    step=step,
                    loss=loss,
                    samples=samples,
                    staleness=staleness,
                )
            ),
        )

    def accuracy(self, sums: dict[str, float]) -> None:
        """Records the result on the test set."""
        self._write("accuracy", {"correct": sums["correct"], "samples": sums["samples"]})

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Records of all workers in one run."""

    steps: tuple[CommittedStep, ...]
    """Committed steps of all workers, ordered by time."""
    accuracies: tuple[Accuracy, ...]

    def loss_curve(self, *, common_steps: bool) -> tuple[list[float], list[float]]:
        """Returns the times in seconds since the first step, and the loss at each time.

        `common_steps`: True if the workers share steps; the loss of a step is then the mean over
        the workers that recorded it. Otherwise each push is a separate point.
        """
        if not self.steps:
            return [], []
        start = self.steps[0].unix_s
        by_step: dict[tuple[int, int, str], list[CommittedStep]] = {}
        for s in self.steps:
            by_step.setdefault((s.generation, s.step, "" if common_steps else s.member), []).append(
                s
            )
        groups: Iterable[list[CommittedStep]] = by_step.values()
        points = sorted(
            (min(s.unix_s for s in g) - start, sum(s.loss for s in g) / len(g)) for g in groups
        )
        return [t for t, _ in points], [loss for _, loss in points]


def read(directory: Path) -> Trace:
    """Reads all trace files in `directory`. Skips lines that are incomplete because their worker
    was killed."""
    steps: list[CommittedStep] = []
    accuracies: list[Accuracy] = []
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            fields = json.loads(line)
            kind = fields.pop("kind")
            if kind == "step":
                steps.append(CommittedStep(**fields))
            else:
                accuracies.append(Accuracy(**fields))
    return Trace(steps=tuple(sorted(steps, key=lambda s: s.unix_s)), accuracies=tuple(accuracies))
