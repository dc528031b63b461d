"""Exchanges values between ranks in the middle of a step.

If a rank dies before it has sent its value, some or all of the other ranks do not receive it. The
step may nevertheless be committed if its gradients have already been summed: under ddp they are
summed in the last backward pass, under other strategies after this exchange. After the step, the
loop therefore checks whether all ranks have the values (`lightning/fit_loop.py`, `trl.py`).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.step.ranks_in_passes import RanksInPasses

_FIRST: Final = 4096
"""Number of bytes of a value that are sent in the first round, together with the value's total
length. The rest is sent in a second round, padded to the length of the longest value."""
_LENGTH: Final = 8


class InStep:
    """Exchanges values of any size among the ranks that take part in a step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranks = RanksInPasses(session, "what was logged")

    def gather(self, value: Any, *, kind: str) -> list[Any] | None:
        """Returns the values of all ranks in rank order; None if a rank was lost. Must be called on
        every rank within a step, before `optimizer.step()`.

        Args:
            value: any value accepted by `shoal.gather`.
            kind: description of the value, used in errors.
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
