"""Steps of torch's optimizers over parameters of which some are DTensors and some plain.

Their foreach and fused forms take lists of one kind only. Nothing here decides which form is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def one_kind_per_group(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, each of the optimizer's groups that has both kinds is two, with the same settings; for the time of a `step()`.

    Settings that the step changes (counters that some optimizers keep in their groups) are kept.
    """
    groups = optimizer.param_groups
    halves = []
    for group in groups:
        split = [p for p in group["params"] if isinstance(p, DTensor)]
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        halves.append([{**group, "params": own} for own in (split, plain)] if split and plain else [group])
    optimizer.param_groups = [half for pair in halves for half in pair]
    try:
        yield
    finally:
        for group, (first, *others) in zip(groups, halves, strict=True):
            if others:
                group.update({name: value for name, value in first.items() if name != "params"})
        optimizer.param_groups = groups
