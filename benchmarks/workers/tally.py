"""Counts exactly how often each push to a parameter server was applied, by means of a tensor, the
tally, that is trained together with a model.

The tally has an element for each push of each worker. For each push, the worker adds the push's
element to the loss, so the gradient of the tally is 1 at this element and 0 elsewhere. On the
servers, the tally is a separate parameter group of Adam, with both betas 0, eps 1 and a learning
rate of 2 (Kingma and Ba, ICLR 2015, algorithm 1). An update then subtracts 2 g / (|g| + 1), which
is exactly 1 where the gradient g is 1, and 0 where it is 0. The negated element is therefore the
number of times that its push was applied.

The module does not import torch, because the harness imports it too.
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
    """Returns the name of the file in which a rank writes the number of its acknowledged pushes."""
    return f"acknowledged-{rank}.json"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Number of acknowledged, lost and repeated pushes of a run."""

    acknowledged: int
    lost: int
    """Number of pushes that were acknowledged but not applied."""
    twice: int
    """Number of times that a push was applied although it had already been applied, or was never
    acknowledged."""


def account(
    tally: Sequence[Sequence[float]], acknowledged: Sequence[int], versions: Sequence[int]
) -> Account:
    """Compares the pushes that the servers have applied with those that they have acknowledged.
    Must be called at the end of a run, when no push is in progress.

    Args:
        tally: values of the tally, with a row for each worker. Trailing zeros of a row may be left
            out.
        acknowledged: number of acknowledged pushes of each worker.
        versions: version of each partition: 1 for its first values, plus the number of pushes
            applied to it. For a partition without part of the tally, this is the only evidence.
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
