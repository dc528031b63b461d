"""This rank's summed gradients of a step, for its own shard and the shard that it mirrors.

The squared norm can be summed exactly, so that it does not depend on the distribution of elements
across ranks. Squares of float32 numbers are exact in float64. Each square is split into digits of
20 bits at fixed positions. For up to 2^31 elements, the digits at one position add up to an integer
below 2^53, so their sum in float64 is exact, even in an all-reduce. (The idea of a long
accumulator: Kulisch, "Computer Arithmetic and Validity", 2013, chapter 8.)

`engine.py` decides how a step ends. May be used only on the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import torch

from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.layout import Division
from shoal_worker.sharding.unit import Unit

_BITS: Final = 20
_HIGHEST: Final = 260
"""Binary exponent above the exponents of all squares of float32 numbers."""
DIGITS: Final = 28
"""Number of digits. The last one is 2^-300, below the square of the smallest float32 number."""


def square_digits(values: torch.Tensor) -> torch.Tensor:
    """Returns the digits of the sum of the squares of `values`, which must be finite and float32.
    The digits are integers in a float64 tensor of shape [DIGITS] on the CPU."""
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
    """Returns the sum that the digits represent, rounded only once."""
    total = sum(
        Fraction(int(digit)) * Fraction(2) ** (_HIGHEST - (place + 1) * _BITS)
        for place, digit in enumerate(digits)
    )
    return float(total)


_SQUARED_AT_ONCE: Final = 1 << 16
"""Number of elements processed at a time on a CPU, so that their float64 copies fit in the cache.
Copies of an entire shard would be four times as large as the shard and determine the step's peak
memory."""


class CutGradients:
    """Gradients of all trained units on this rank, for its own and its mirrored shard."""

    def __init__(self, trained: Sequence[Unit], *, exact: bool) -> None:
        """`exact`: True if the norm must be bitwise independent of the number of ranks."""
        self._trained = trained
        self._exact = exact

    @property
    def touched(self) -> list[bool]:
        """One flag per trained parameter: True if this rank has used it in this step."""
        return [flag for unit in self._trained for flag in unit.touched]

    def pass_on(self, collectives: Collectives, division: Division) -> bool:
        """Sends the gradient sums to the ranks that mirror this rank's shard, if any. Returns False
        if the step has failed."""
        if not division.mirrors:
            return True
        on_their_way = []
        for unit in self._trained:
            gradient = unit.own.gradient
            if gradient is None:
                continue
            unit.mirror.gradient = torch.empty_like(gradient)
            on_their_way.append(
                collectives.pass_on(unit.mirror.gradient, gradient, stride=division.stride)
            )
        return [pending.wait() for pending in on_their_way].count(False) == 0

    def squared_norm_part(self, counted: Sequence[Unit]) -> torch.Tensor:
        """Returns this rank's part of the squared norm, as float64 numbers to be summed across
        ranks. `counted`: units whose shard on this rank is counted here; no other rank may count
        the same shard."""
        gradients = [unit.own.gradient for unit in counted if unit.own.gradient is not None]
        plain = squared_norms(gradients).sum().cpu().view(1)
        if not self._exact:
            return plain
        digits = [square_digits(g.float()) for g in gradients] if plain.isfinite() else []
        return torch.cat(
            [
                plain,
                torch.stack(digits).sum(0) if digits else torch.zeros(DIGITS, dtype=torch.float64),
            ]
        )

    def squared_norm(self, summed: torch.Tensor) -> float:
        """Returns the squared norm of all gradients. `summed`: sum of all ranks' results of
        `squared_norm_part`."""
        return (
            from_digits(summed[1:].tolist())
            if self._exact and summed[0].isfinite()
            else float(summed[0])
        )

    def hand_out(self, divisor: float, present: Sequence[bool]) -> None:
        """Sets the optimizer's gradients to the sums divided by `divisor`. `present`: for each
        parameter, True if any rank has used it; parameters that no rank has used get no
        gradient."""
        flags = iter(present)
        for unit in self._trained:
            here = [next(flags) for _ in unit.parameters]
            for holding in unit.holdings:
                holding.hand_out(divisor, here)
        for unit in self._trained:
            unit.placement.arrived()

    def scale(self, factor: float) -> None:
        """Multiplies the optimizer's gradients by `factor`."""
        pieces = (
            piece for unit in self._trained for holding in unit.holdings for piece in holding.pieces
        )
        if gradients := [piece.grad for piece in pieces if piece.grad is not None]:
            torch._foreach_mul_(gradients, factor)


def squared_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the squared norm of each gradient, on the gradient's device and without
    synchronizing. Computes in float64, because squares of large gradients overflow float32."""
    return (
        torch.stack([_squared_norm(each) for each in gradients])
        if gradients
        else torch.zeros(1, dtype=torch.float64)
    )


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.is_cpu:
        # a single kernel, which converts the values as it reads them
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return norm.square()
    return torch.stack(
        [part.double().square().sum() for part in gradient.split(_SQUARED_AT_ONCE)]
    ).sum()
