"""The statistics of the tables: quantiles, and ratios of paired runs with a confidence interval.

On a machine that also does other work, a single time means little. Systems to be compared therefore
run in alternation, and the ratio is computed for each pair of runs, so that anything that slows
both of them down cancels out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 10_000
CONFIDENCE = 0.95


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the quantile `share` (0.5: the median) of the values, interpolated linearly between
    neighbours as numpy does by default. With fewer than 100 values, p99 is close to the largest
    value."""
    if not values:
        raise ValueError("quantile of no values")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile {share}: expected a share from 0 to 1")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Ratio:
    """Returns the median of the ratios ours/theirs of all pairs. The confidence interval is a
    percentile bootstrap over pairs (Efron and Tibshirani, 1993, chapter 13)."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"paired_ratio: {len(ours)} and {len(theirs)} values; expected as many of each, and "
            "some"
        )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    generator = random.Random(seed)
    resampled = [
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples)
    ]
    return _interval(statistics.median(ratios), resampled)


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Returns the median of `ours` divided by the median of `theirs`. The values at the same index
    are from the same round. The bootstrap draws complete rounds, so that a slow round affects both
    medians."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"ratio_of_medians: {len(ours)} and {len(theirs)} values; expected as many of each, "
            "and some"
        )
    generator = random.Random(seed)
    rounds = range(len(ours))
    resampled = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(rounds, k=len(rounds))
        resampled.append(
            statistics.median([ours[i] for i in drawn])
            / statistics.median([theirs[i] for i in drawn])
        )
    return _interval(statistics.median(ours) / statistics.median(theirs), resampled)


def _interval(value: float, resampled: Sequence[float]) -> Ratio:
    tail = (1 - CONFIDENCE) / 2
    return Ratio(value=value, low=quantile(resampled, tail), high=quantile(resampled, 1 - tail))
