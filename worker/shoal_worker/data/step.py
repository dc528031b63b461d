"""One step, from the moment its samples are dealt to this rank until it commits or is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import PreconditionError

from shoal_worker.data.plan import Block
from shoal_worker.elastic.contract import Placement


@dataclass(kw_only=True)
class DealtStep:
    """What this rank was dealt. Forgotten when the step commits or the next border begins."""

    placement: Placement
    epoch: int
    number: int
    """Number of the step in its epoch, or of the leased batch."""
    positions: range
    """Positions of the whole global batch in the epoch's order."""
    blocks: tuple[Block, ...]
    """The blocks of samples that are this rank's."""
    handed_out: int = 0
    """Samples of this rank that the user's loop has got."""


class Step:
    """One global batch, as `ElasticDataLoader.steps()` gives it. Iterate it once: it yields this rank's micro-batches, perhaps none;
    without `micro_batch_size`, the one batch of this rank."""

    def __init__(self, dealt: DealtStep, batches: Iterator[Any]) -> None:
        self.epoch = dealt.epoch
        """0-based."""
        self.number = dealt.number
        """0-based within the epoch."""
        self._length = len(dealt.blocks)
        self._batches: Iterator[Any] | None = batches

    def __len__(self) -> int:
        """How many batches this rank gets."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Raises PreconditionError when called a second time: the samples would count twice."""
        if self._batches is None:
            raise PreconditionError(
                f"step {self.number} of epoch {self.epoch} was iterated before; a step hands out its batches once, "
                "so that no sample counts twice"
            )
        batches, self._batches = self._batches, None
        return batches
