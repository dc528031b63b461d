"""What ranks tell each other in the middle of a step.

Where a rank dies before it has told the others, that is missing with some of them, or with all. The
step may count all the same, if its gradients were summed before: under ddp in the last backward
pass, under the other strategies behind this. Whether all have it is asked behind the step
(`fit_loop.py`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from shoal_worker.elastic import collectives
from shoal_worker.elastic.session import Session
from shoal_worker.engine.ranks_in_passes import RanksInPasses

_FIRST: Final = 4096
"""Bytes that go at once, with the length of all before them. The rest, of the longest, follows."""
_LENGTH: Final = 8


class InStep:
    """The ranks of a step, for values of any length."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranks = RanksInPasses(session, "what was logged")

    def gather(self, value: Any, *, kind: str) -> list[Any] | None:
        """Everybody's `value`, in rank order; None: a rank was lost. Every rank calls it, in the
        step, before `optimizer.step()`.

        Args:
            value: what `shoal.gather` takes.
            kind: what it is called in errors.
        """
        own = collectives.packed(value, kind)
        session = self._session
        if (
            session.step is None
            or session.is_joining
            or session.group is None
            or session.group.world_size == 1
        ):
            return [collectives.unpacked(own)]
        data = torch.frombuffer(
            bytearray(len(own).to_bytes(_LENGTH, "little") + own), dtype=torch.uint8
        )
        first = self._ranks.gather(_padded(data[:_FIRST], _FIRST))
        if first is None:
            return None
        lengths = [int.from_bytes(bytes(row[:_LENGTH].tolist()), "little") for row in first]
        rest = max(lengths) + _LENGTH - _FIRST
        if rest > 0:
            more = self._ranks.gather(_padded(data[_FIRST:], rest))
            if more is None:
                return None
            first = torch.cat([first, more], 1)
        return [
            collectives.unpacked(row[_LENGTH : _LENGTH + length].numpy().tobytes())
            for row, length in zip(first, lengths, strict=True)
        ]


def _padded(data: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([data, data.new_zeros(length - len(data))])
