"""A tensor that counts, individually and exactly, the pushes that a parameter server has applied,
while the model trains beside it.

The tally has an element for each push of each worker. A push's gradient is 1 at its own element and
0 elsewhere, because the element is added to the loss. The servers step the tally as a separate
parameter group of Adam, with both betas 0, eps 1 and a learning rate of 2 (Kingma and Ba, ICLR
2015, algorithm 1). The step is then 2 g / (|g| + 1), which is exactly 1 where the gradient is 1,
and 0 where it is 0. The negated element is therefore the number of times that its push was applied.

No torch here: the harness imports this module too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PUSHES_PER_WORKER: Final = 1 << 16
"""Elements per worker; more pushes cannot be counted."""
OPTIMIZER_GROUP: Final[Mapping[str, Any]] = {"lr": 2.0, "betas": (0.0, 0.0), "eps": 1.0}
"""Settings of the tally's parameter group in `torch.optim.Adam`."""


STOP: Final = "stop"
"""File of the step logs' directory that ends the training."""
LEAVE: Final = "leave"
"""File that makes the workers exit."""
APPLIED: Final = "applied.json"
"""File with the tally's values at the end: a row for each rank, without the zeros after the last
applied push."""


def acknowledged_file(rank: int) -> str:
    """Returns the name of the file with the number of acknowledged pushes of this rank."""
    return f"acknowledged-{rank}.json"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Outcome of the pushes of a run."""

    acknowledged: int
    lost: int
    """Pushes that were acknowledged but not applied."""
    twice: int
    """Number of repeated applications, including those of pushes that were never acknowledged."""


def account(
    tally: Sequence[Sequence[float]], acknowledged: Sequence[int], versions: Sequence[int]
) -> Account:
    """Compares what the servers have applied with the responses that the workers received, at the
    end of a run, when nothing is under way.

    Args:
        tally: the tally's values, a row for each worker; zeros at its end may be left out.
        acknowledged: how many pushes of each worker were acknowledged.
        versions: of each partition: 1 with its first values, and one more for each push that it
            applied. The partitions that hold no part of the tally are judged by this alone.
    """
    lost = twice = 0
    for row, count in zip(tally, acknowledged, strict=True):
        expected = [1] * count + [0] * (len(row) - count)
        applied = [-round(value) for value in row] + [0] * (count - len(row))
        lost += sum(max(0, due - times) for due, times in zip(expected, applied, strict=True))
        twice += sum(max(0, times - due) for due, times in zip(expected, applied, strict=True))
    version = 1 + sum(acknowledged)
    return Account(
        acknowledged=sum(acknowledged),
        lost=max(lost, version - min(versions)),
        twice=max(twice, max(versions) - version),
    )
