"""How a model is sharded: the settings that are common to all strategies. Strategy-specific options are keyword arguments of
`as_distributed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal_common.errors import ConfigurationError

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.registry import parse_compression


@dataclass(frozen=True, kw_only=True)
class ShardingConfiguration:
    """Settings of a distributed model and optimizer.

    Raises:
        ConfigurationError: values that cannot work, or contradict each other.
    """

    auto_sync_gradients: bool = True
    """Reduce gradients during the backward pass. False: the loop calls `model.synchronize_gradients()` before `optimizer.step()`."""
    bucket_cap_mb: int = 25
    """MiB of gradients that travel in one all-reduce; >= 1."""
    minimum_parameter_group_size: int = 1024
    """Elements that travel together at least: what is left over goes along with the bucket before it; >= 1."""
    gradient_compression: str | Mapping[str, Any] | GradientCompressor | None = None
    """How gradients travel: None as they are; else a compressor's name ("bf16", "topk", ...), a name with settings
    ({"name": "topk", "ratio": 0.001}), or a `GradientCompressor`, which the field holds afterwards. See docs/strategies/compression.md."""
    loss_reduction: str = "mean"
    """What the loop's loss does over a batch: "mean", or "sum"."""
    deterministic: bool = False
    """Sum micro-batch gradients in float64, so that the result is bitwise the same for any world size. Needs `micro_batch_size` on the
    loader."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb < 1:
            raise ConfigurationError(f"bucket_cap_mb={self.bucket_cap_mb}: expected at least 1 MiB")
        if self.minimum_parameter_group_size < 1:
            raise ConfigurationError(f"minimum_parameter_group_size={self.minimum_parameter_group_size}: expected at least 1 element")
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(f'loss_reduction={self.loss_reduction!r}: expected "mean" or "sum"')
        object.__setattr__(self, "gradient_compression", parse_compression(self.gradient_compression))
        if self.deterministic and self.compressor is not None:
            raise ConfigurationError(
                f"deterministic=True with gradient_compression={self.compressor.name!r}: what a compressor leaves out depends on how many "
                "ranks there are, so results cannot be bitwise the same for any world size; leave one of the two out"
            )

    @property
    def compressor(self) -> GradientCompressor | None:
        """`gradient_compression`, read."""
        return self.gradient_compression if isinstance(self.gradient_compression, GradientCompressor) else None

    @classmethod
    def for_high_bandwidth(cls, **overrides: object) -> ShardingConfiguration:
        """For fast links (NVLink, 100 Gbit/s): larger messages, nothing compressed."""
        return cls(**({"bucket_cap_mb": 100} | overrides))  # type: ignore[arg-type]

    @classmethod
    def for_low_bandwidth(cls, **overrides: object) -> ShardingConfiguration:
        """For slow links: small buckets, so that sending starts early in the backward pass."""
        return cls(**({"bucket_cap_mb": 4} | overrides))  # type: ignore[arg-type]
