"""The gradients of a step, summed over the ranks, as far as this rank holds them: of its own shard and of the one that it mirrors.

It knows nothing of how a step ends (`engine.py`). The training thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from shoal_worker.sharding.collectives import Collectives
from shoal_worker.sharding.division import Division
from shoal_worker.sharding.exact import DIGITS, from_digits, square_digits
from shoal_worker.sharding.unit import Unit

_SQUARED_AT_ONCE: Final = 1 << 16
"""Elements. Their float64 copies stay in the cache; of a whole shard they would be four times as large as the shard, a step's peak."""


class CutGradients:
    """The gradients of all trained units."""

    def __init__(self, trained: Sequence[Unit], *, exact: bool) -> None:
        """`exact`: the norm's bits do not depend on the number of ranks."""
        self._trained = trained
        self._exact = exact

    @property
    def touched(self) -> list[bool]:
        """For each trained parameter: this rank used it in this step."""
        return [flag for unit in self._trained for flag in unit.touched]

    def pass_on(self, collectives: Collectives, division: Division) -> bool:
        """Gives the sums to the ranks that mirror them, where any do. False: the step is lost."""
        if not division.mirrors:
            return True
        on_their_way = []
        for unit in self._trained:
            gradient = unit.own.gradient
            if gradient is None:
                continue
            unit.mirror.gradient = torch.empty_like(gradient)
            on_their_way.append(collectives.pass_on(unit.mirror.gradient, gradient, stride=division.stride))
        return [pending.wait() for pending in on_their_way].count(False) == 0

    def squared_norm_part(self, counted: Sequence[Unit]) -> torch.Tensor:
        """What this rank's shards add to the squared norm, as float64 numbers to be summed over the ranks. `counted`: those units of which
        no other rank adds the same."""
        gradients = [unit.own.gradient for unit in counted if unit.own.gradient is not None]
        plain = torch.stack([_squared_norm(g).cpu() for g in gradients] or [torch.zeros((), dtype=torch.float64)]).sum().view(1)
        if not self._exact:
            return plain
        digits = [square_digits(g.float()) for g in gradients] if plain.isfinite() else []
        return torch.cat([plain, torch.stack(digits).sum(0) if digits else torch.zeros(DIGITS, dtype=torch.float64)])

    def squared_norm(self, summed: torch.Tensor) -> float:
        """Returns the squared norm of all gradients, from the sum of the ranks' parts."""
        return from_digits(summed[1:].tolist()) if self._exact and summed[0].isfinite() else float(summed[0])

    def hand_out(self, divisor: float, present: Sequence[bool]) -> None:
        """Gives the optimizer its gradients: the sums over `divisor`, but none for parameters that no rank used (`present`)."""
        flags = iter(present)
        for unit in self._trained:
            here = [next(flags) for _ in unit.parameters]
            for holding in unit.holdings:
                holding.hand_out(divisor, here)

    def scale(self, factor: float) -> None:
        """Multiplies the gradients that were handed out."""
        for unit in self._trained:
            for holding in unit.holdings:
                for piece in holding.pieces:
                    if piece.grad is not None:
                        piece.grad.mul_(factor)

    def norm_here(self) -> float:
        """Returns the norm of the gradients that were handed out, those of this rank's own shard and of the one that it mirrors."""
        pieces = (piece for unit in self._trained for holding in unit.holdings for piece in holding.pieces)
        gradients = [piece.grad for piece in pieces if piece.grad is not None]
        return math.sqrt(sum(float(_squared_norm(g)) for g in gradients))


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """In float64: the squares of large gradients are beyond float32."""
    return torch.stack([part.double().square().sum() for part in gradient.split(_SQUARED_AT_ONCE)]).sum()
