"""How the ranks of a generation are divided: into replicas of the model, and each replica into pipeline stages and tensor-parallel parts.

Neighbouring ranks share a tensor-parallel group (they are of one host), then a pipeline; replicas lie behind each other. What is left over
when no further replica can be made are spares. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Coordinate(NamedTuple):
    """A rank's place on the three axes."""

    pipeline: int
    tensor: int
    data: int


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of the three axes."""

    pipeline: int
    tensor: int
    data: int

    @property
    def replica_size(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.pipeline * self.tensor

    @property
    def working(self) -> int:
        """Ranks that are no spares: those below this one."""
        return self.replica_size * self.data

    def at(self, rank: int) -> Coordinate | None:
        """Where a rank is; None: a spare."""
        if rank >= self.working:
            return None
        replica, within = divmod(rank, self.replica_size)
        stage, part = divmod(within, self.tensor)
        return Coordinate(stage, part, replica)

    def rank(self, pipeline: int, tensor: int, data: int) -> int:
        """The inverse of `at`."""
        return data * self.replica_size + pipeline * self.tensor + tensor

    def lines(self) -> Iterator[tuple[str, str, list[int]]]:
        """All groups along one axis, in an order that is the same on every rank: the axis, a name, and the ranks."""
        yield "all", "working", list(range(self.working))
        for data in range(self.data):
            for stage in range(self.pipeline):
                yield "tensor", f"tensor {data} {stage}", [self.rank(stage, part, data) for part in range(self.tensor)]
            for part in range(self.tensor):
                yield "pipeline", f"pipeline {data} {part}", [self.rank(stage, part, data) for stage in range(self.pipeline)]
        for stage in range(self.pipeline):
            for part in range(self.tensor):
                yield "data", f"data {stage} {part}", [self.rank(stage, part, data) for data in range(self.data)]
