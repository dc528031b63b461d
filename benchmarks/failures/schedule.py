"""The faults of T17, drawn from a seed: times, victims and absences. Nothing is killed here.

The gaps between kills are a shortest gap, in which one absence and the recovery from it fit, plus
an exponentially distributed time, as for independent failures. Only one worker is therefore absent
at a time. With the same seed, every system gets the same faults at the same times after its first
step; a slower system meets later faults as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A worker is killed, and its place is absent for a while."""

    at_s: float
    """Time since the first step of all workers."""
    victim: float
    """Place of the victim among the workers that are alive, as a number from 0 to 1."""
    absent_s: float
    """Time from the kill until a replacement may join."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Average frequency and duration of the faults, and the seed that draws them."""

    mean_gap_s: float
    """Mean time between two kills, or before the first."""
    shortest_gap_s: float
    longest_absence_s: float
    """Longest absence. Absences are uniformly distributed between a tenth of it and all of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.longest_absence_s < self.shortest_gap_s < self.mean_gap_s:
            raise ValueError(
                f"absences up to {self.longest_absence_s} s, gaps from {self.shortest_gap_s} s and "
                f"{self.mean_gap_s} s on average: expected increasing times above 0"
            )

    def slowed(self, factor: float) -> Schedule:
        """Returns the same schedule with all times and absences multiplied by a factor."""
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
