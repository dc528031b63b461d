"""`GradientCompressionOptimizer`: an optimizer paired with a compressor, as an alternative to
`gradient_compression=`.

The pair itself does not compress anything: `as_distributed` takes it apart, and the engine
compresses the gradients that it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.registry import parse_compression
from shoal_worker.state.forwarding import ForwardingOptimizer


class GradientCompressionOptimizer(ForwardingOptimizer):
    """An optimizer whose gradients are compressed before they are sent.

    `as_distributed(model, GradientCompressionOptimizer(optimizer, "topk"))` is equivalent to
    `as_distributed(model, optimizer, gradient_compression="topk")`. Before or without that call,
    the pair behaves like the given optimizer. The compression state is part of the run's state, not
    of `state_dict()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        compressor: str | Mapping[str, Any] | GradientCompressor,
    ) -> None:
        """Pairs an optimizer with a compressor in any form that `gradient_compression=` accepts.

        Raises:
            ConfigurationError: `optimizer` is not an optimizer, or the compressor or its settings
                are invalid.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"GradientCompressionOptimizer({type(optimizer).__name__}, ...): expected a "
                "torch.optim.Optimizer"
            )
        found = parse_compression(compressor)
        if found is None:
            raise ConfigurationError(
                "GradientCompressionOptimizer(optimizer, None): expected a compressor; to train "
                "without one, use the optimizer directly"
            )
        super().__init__(optimizer)
        self.compressor = found

    def __repr__(self) -> str:
        return f"GradientCompressionOptimizer({self.optimizer!r}, {self.compressor!r})"


def take_apart(
    optimizer: torch.optim.Optimizer | None, configured: GradientCompressor | None
) -> tuple[torch.optim.Optimizer | None, GradientCompressor | None]:
    """Returns the user's optimizer and the compressor. If `optimizer` is a
    `GradientCompressionOptimizer`, both are taken from it; otherwise the compressor is
    `configured`.

    Raises:
        ConfigurationError: `optimizer` and `configured` specify different compressors, or
            `optimizer` wraps a second `GradientCompressionOptimizer`.
    """
    if not isinstance(optimizer, GradientCompressionOptimizer):
        return optimizer, configured
    if configured not in (None, optimizer.compressor):
        raise ConfigurationError(
            f"gradient_compression={configured!r} and {optimizer!r} both specify a compressor for "
            "the same model; leave one of them out"
        )
    if isinstance(optimizer.optimizer, GradientCompressionOptimizer):
        raise ConfigurationError(
            "a GradientCompressionOptimizer wraps another one, but gradients are compressed only "
            "once; wrap the optimizer itself"
        )
    return optimizer.optimizer, optimizer.compressor
