"""Where the user's script stands among its training loops: in which loader, which epoch, which step.

All ranks must stand at one place when they take a step together, and deal its samples alike. So a place rides, as a few small numbers, in
the control word of each step; and a joiner is told its peers' place when it is fed, so that its script passes over every loop before it.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_BASE = 1 << 20
"""Each number and its square are sent, and summed over up to 8192 ranks they are exact in float64."""
_DEALING = 2
"""Digits of `ScriptPosition.dealing`: of two that differ, one in 2^40 looks the same."""

PLACE_WORD_LENGTH = 1 + 2 * (3 + _DEALING)
"""Numbers that a place takes in a control word."""


class ScriptPosition(NamedTuple):
    """One step of one loop. Without a loader of Shoal's: no name, and zeros."""

    loader: str
    """Its name; empty: the user's own loop."""
    number: int
    """Number of the loader, in the order in which the script made them; from 1."""
    epoch: int
    step: int
    """In the epoch."""
    dealing: int = 0
    """Digest of what the loader deals by, and of the step: where one does not tell ranks' loaders apart, that of the next step does."""

    def word(self) -> list[float]:
        """What this rank adds to the control word. From the ranks' sum, `agree` says whether all added the same."""
        values = (self.number % _BASE, self.epoch % _BASE, self.step % _BASE, *_digits(self.dealing, _DEALING))
        return [1.0, *map(float, values), *(float(value * value) for value in values)]


def agree(summed: Sequence[float]) -> bool:
    """Whether all ranks added the same numbers to a word, such as `ScriptPosition.word`: the mean of squares is the square of the mean for
    equal numbers only."""
    count, *numbers = map(int, summed)  # their products are exact as integers only
    half = len(numbers) // 2
    return all(count * squares == total * total for total, squares in zip(numbers[:half], numbers[half:], strict=True))


def _digits(value: int, count: int) -> list[int]:
    """The last `count` digits of `value`, the last one first."""
    return [value // _BASE**index % _BASE for index in range(count)]
