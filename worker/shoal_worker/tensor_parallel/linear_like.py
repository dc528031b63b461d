"""Layers that multiply by a matrix, whichever way round they keep it: nn.Linear (out x in) and Hugging Face's Conv1D (in x out)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LinearLike:
    """What is known of such a layer without its values."""

    in_features: int
    out_features: int
    output_dimension: int
    """Dimension of the weight along which outputs lie: 0 for nn.Linear, 1 for Conv1D."""


def linear_like(module: nn.Module) -> LinearLike | None:
    """The layer's shape; None for any other module, and for one whose weight is computed (parametrizations)."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return LinearLike(weight.shape[1], weight.shape[0], 0)
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == weight.shape[1]:
        return LinearLike(weight.shape[0], weight.shape[1], 1)
    return None
