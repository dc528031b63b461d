"""Draws the faults of T17 (times, victims and absences) from a seed. This module kills nothing.

The time between two kills is a shortest gap plus an exponentially distributed time, as for
independent failures. The shortest gap is long enough for one absence and the recovery from it, so
only one worker is absent at a time. With the same seed, every system gets the same faults at the
same times after its first step. A system that needs more time for the run gets additional faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: a worker is killed, and no replacement may join for a while."""

    at_s: float
    """Time of the kill, in seconds since all workers had taken their first step together."""
    victim: float
    """Position of the victim in the list of living workers, as a fraction of its length."""
    absent_s: float
    """Time from the kill until a replacement may join."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Distribution of the faults' times and durations, and the seed from which faults are drawn."""

    mean_gap_s: float
    """Mean time between two kills, and before the first kill, in seconds."""
    shortest_gap_s: float
    longest_absence_s: float
    """Longest absence in seconds. Absences are uniformly distributed between a tenth of it and the
    longest."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.longest_absence_s < self.shortest_gap_s < self.mean_gap_s:
            raise ValueError(
                f"absences up to {self.longest_absence_s} s, gaps from {self.shortest_gap_s} s and "
                f"{self.mean_gap_s} s on average: expected increasing times above 0"
            )

    def slowed(self, factor: float) -> Schedule:
        """Returns a schedule whose times and absences are multiplied by `factor`, with the same
        seed."""
        return replace(
            self,
            mean_gap_s=factor * self.mean_gap_s,
            shortest_gap_s=factor * self.shortest_gap_s,
            longest_absence_s=factor * self.longest_absence_s,
        )

    def faults(self) -> Iterator[Fault]:
        """Yields an endless sequence of faults, in order."""
        generator = random.Random(self.seed)
        at_s = 0.0
        while True:
            at_s += self.shortest_gap_s + generator.expovariate(
                1 / (self.mean_gap_s - self.shortest_gap_s)
            )
            yield Fault(
                at_s=at_s,
                victim=generator.random(),
                absent_s=generator.uniform(self.longest_absence_s / 10, self.longest_absence_s),
            )
