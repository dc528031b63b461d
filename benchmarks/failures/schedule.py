"""The faults of T17, drawn from a seed. They are times, victims and absences; nothing here kills.

The gaps between kills are exponential, as those of independent failures are, beyond a shortest gap
in which an absence and the recovery from it have room: one worker is absent at a time. The same
seed gives every system the same faults at the same times since its first step; a system that needs
longer meets the later ones too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A worker is killed, and its place is absent for a while."""

    at_s: float
    """Since the first step of all workers."""
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
    """Absences are uniform from a tenth of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.longest_absence_s < self.shortest_gap_s < self.mean_gap_s:
            raise ValueError(
                f"absences up to {self.longest_absence_s} s, gaps from {self.shortest_gap_s} s and "
                f"{self.mean_gap_s} s on average: expected increasing times above 0"
            )

    def slowed(self, factor: float) -> Schedule:
        """Returns the same faults so many times further apart, with absences as much longer."""
        return replace(
            self,
            mean_gap_s=factor * self.mean_gap_s,
            shortest_gap_s=factor * self.shortest_gap_s,
            longest_absence_s=factor * self.longest_absence_s,
        )

    def faults(self) -> Iterator[Fault]:
        """Yields the faults without end, in order."""
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
