"""A sum of squares that is exact, so that it does not depend on how the elements are spread over ranks.

Squares of float32 numbers are exact in float64. Each is cut into digits of 20 bits at fixed places; the digits of one place add up to whole
numbers below 2^53 for 2^31 elements, which float64 holds exactly, also when they travel in an all-reduce. (The idea of a long accumulator:
Kulisch, "Computer Arithmetic and Validity", 2013, chapter 8.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import torch

_BITS: Final = 20
_HIGHEST: Final = 260
"""Exponent above all squares of float32."""
DIGITS: Final = 28
"""Down to 2^-300: below the square of the smallest float32."""


def square_digits(values: torch.Tensor) -> torch.Tensor:
    """The digits of the sum of squares of finite float32 `values`: float64 [DIGITS], whole numbers, on the CPU."""
    rest = values.double().square()
    digits = torch.zeros(DIGITS, dtype=torch.float64)
    largest = float(rest.max()) if rest.numel() else 0.0
    if largest == 0.0:
        return digits
    place = max(0, (_HIGHEST - math.frexp(largest)[1]) // _BITS)
    while place < DIGITS and largest > 0.0:
        quantum = math.ldexp(1.0, _HIGHEST - (place + 1) * _BITS)
        whole = (rest / quantum).floor()
        digits[place] = whole.sum().cpu()
        rest = rest - whole * quantum
        largest = float(rest.max())
        place += 1
    return digits


def from_digits(digits: Sequence[float]) -> float:
    """The sum that the digits stand for, rounded once."""
    total = sum(Fraction(int(digit)) * Fraction(2) ** (_HIGHEST - (place + 1) * _BITS) for place, digit in enumerate(digits))
    return float(total)
