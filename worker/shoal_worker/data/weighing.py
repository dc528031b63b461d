"""What batches weigh in the mean over a step: their samples, or what the user's `weight_fn` says. So do the parts that a pipeline cuts them
into. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from torch.utils import _pytree as pytree

WeightFn = Callable[[Any], float]


def weight_of(batch: Any, weight_fn: WeightFn) -> float:
    """What `weight_fn` says. Raises ConfigurationError: that is no weight."""
    weight = float(weight_fn(batch))
    if not math.isfinite(weight) or weight < 0:
        raise ConfigurationError(f"weight_fn gave {weight}; expected a finite number of at least 0")
    return weight


def weights_of_rows(batch: Any, weight_fn: WeightFn, rows: Sequence[int]) -> list[float]:
    """What parts of a batch weigh, of so many rows each.

    Raises:
        ConfigurationError: the batch cannot be cut so, or the parts do not weigh together what the whole does.
    """
    leaves, structure = pytree.tree_flatten(batch)
    cut = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 0]
    lengths = {len(one) for one in cut}
    if lengths != {sum(rows)}:
        raise ConfigurationError(
            f"train_step was given {sum(rows)} rows of a batch whose tensors have {sorted(lengths)}: with weight_fn= a pipeline weighs the "
            "same rows of the loader's batch as it trains on; pass the batch as the loader gave it, or leave weight_fn out"
        )
    parts = [one.split(list(rows)) if isinstance(one, torch.Tensor) and one.dim() > 0 else [one] * len(rows) for one in leaves]
    weights = [weight_of(pytree.tree_unflatten([part[index] for part in parts], structure), weight_fn) for index in range(len(rows))]
    whole = weight_of(batch, weight_fn)
    if not math.isclose(sum(weights), whole, rel_tol=1e-4):
        raise ConfigurationError(
            f"weight_fn gave {whole} for a batch, and {sum(weights)} for its {len(rows)} micro-batches together: a pipeline needs weights "
            "that add up, such as numbers of samples or tokens, counted in tensors with a row for each sample"
        )
    return weights
