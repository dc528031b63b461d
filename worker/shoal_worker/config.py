"""Settings of a distributed model that are common to all strategies. Options of a single strategy
are keyword arguments of `as_distributed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.registry import parse_compression


@dataclass(frozen=True, kw_only=True)
class ShardingConfiguration:
    """Settings of a distributed model and optimizer.

    Raises:
        ConfigurationError: invalid or contradictory values.
    """

    auto_sync_gradients: bool = True
    """Reduce gradients during the backward pass. False: the loop calls
    `model.synchronize_gradients()` before `optimizer.step()`."""
    bucket_cap_mb: int = 25
    """Maximum size of one all-reduce of gradients, in MiB; >= 1."""
    minimum_parameter_group_size: int = 1024
    """Minimum number of elements sent together; >= 1. If fewer elements remain, they are added to
    the previous bucket."""
    gradient_compression: str | Mapping[str, Any] | GradientCompressor | None = None
    """Compression of gradients. None: no compression. Otherwise a compressor's name ("bf16",
    "topk", ...), a name with settings ({"name": "topk", "ratio": 0.001}), or a
    `GradientCompressor`. See docs/strategies/compression.md."""
    loss_reduction: str = "mean"
    """Reduction of the loop's loss over a batch: "mean" or "sum"."""
    deterministic: bool = False
    """Sum micro-batch gradients in float64, so that the result is bitwise the same for any world
    size. Requires `micro_batch_size` on the loader."""

    consistency_check_every: int = 100
    """Number of steps between comparisons of the ranks' common values (replicas, mirrored shards)
    by digests; 0: never. If values differ, all ranks raise an error that names the tensor. The last
    step's state is compared when ranks leave. A comparison reads a rank's state once."""

    param_dtype: torch.dtype | None = None
    """Dtype of parameters and inputs during computation, and of gathered parameters, such as
    torch.bfloat16. Each rank updates its shards in the parameters' own dtype. None: no conversion.
    Not for ddp, where `torch.autocast` can be used."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of gradients on the wire. Each gradient is summed in at least float32 and rounded once.
    None: the dtype of the sum. For ddp, use `gradient_compression="bf16"`."""
    shard_modules: Sequence[type[nn.Module] | str] | None = None
    """Modules that zero3, fsdp and hsdp gather as one unit each: classes of modules, or names of
    submodules. None: the children of containers that repeat a class (the layers of a transformer),
    if they have at least `minimum_parameter_group_size` elements."""
    prefetch_blocks: int | None = None
    """Number of blocks that zero3, fsdp and hsdp gather ahead of the block being computed. Each of
    them takes its full size in memory. 0: none. None: 1. Larger values help if links are slow, or
    if some blocks are computed faster than the next one is gathered. Must be the same on all
    ranks."""
    activation_checkpointing: bool | Sequence[type[nn.Module]] | Callable[[nn.Module], bool] = False
    """Modules that recompute their activations in the backward pass instead of keeping them:
    modules of the given classes, or modules selected by a function. True: the children of
    containers that repeat a class. (Chen et al., "Sublinear Memory Cost", 2016.)"""
    offload: Literal["cpu"] | Path | None = None
    """Location where shards and optimizer state are stored and updated. "cpu": host memory (no
    effect without a GPU). A directory: files in it, mapped into memory. None: on the parameters'
    device. For strategies with sharded state."""

    mirrors: Literal["device", "host"] | None = None
    """Location of the mirrors of zero1, zero2, zero3 and fsdp (copies of other ranks' shards and
    optimizer state) between updates. "device": on the device. "host": in the host's pinned memory;
    they are copied to the device for each update. None: on the device until peak usage of its
    memory exceeds 80 %, then on the host. Results are bitwise the same. No effect without a GPU."""

    def __post_init__(self) -> None:
        for field, unit in (("bucket_cap_mb", "MiB"), ("minimum_parameter_group_size", "elements")):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{field}={value!r}: expected a whole number of {unit}, at least 1"
                )
        every = self.consistency_check_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ConfigurationError(
                f"consistency_check_every={every!r}: expected a whole number of steps, or 0 for "
                "never"
            )
        for field in ("auto_sync_gradients", "deterministic"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigurationError(
                    f"{field}={getattr(self, field)!r}: expected True or False"
                )
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(
                f'loss_reduction={self.loss_reduction!r}: expected "mean" or "sum"'
            )
        if isinstance(self.offload, Path):  # the script may change its working directory later
            object.__setattr__(self, "offload", self.offload.absolute())
        if not (self.offload in (None, "cpu") or isinstance(self.offload, Path)):
            raise ConfigurationError(
                f'offload={self.offload!r}: expected "cpu", or a pathlib.Path of a directory for '
                "files"
            )
        if self.mirrors not in (None, "device", "host"):
            raise ConfigurationError(
                f'mirrors={self.mirrors!r}: expected "device" or "host", or None to choose by '
                "available memory"
            )
        if self.mirrors == "host" and self.offload is not None:
            raise ConfigurationError(
                f'mirrors="host" with offload={self.offload!r}: offload= already decides where '
                "shards and mirrors are stored and updated; leave mirrors out"
            )
        if isinstance(self.shard_modules, str | type):
            raise ConfigurationError(
                f"shard_modules={self.shard_modules!r}: expected a list of module classes or "
                "module names"
            )
        ahead = self.prefetch_blocks
        if ahead is not None and (
            not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0
        ):
            raise ConfigurationError(
                f"prefetch_blocks={ahead!r}: expected a whole number of blocks, 0 for no "
                "prefetching, or None for the default of 1"
            )
        object.__setattr__(
            self, "gradient_compression", parse_compression(self.gradient_compression)
        )
        self._check_dtypes()
        if self.deterministic and self.compressor is not None:
            raise ConfigurationError(
                f"deterministic=True with gradient_compression={self.compressor.name!r}: a "
                "compressor's errors depend on the number of ranks, so results cannot be bitwise "
                "equal for every world size; leave one of the two out"
            )

    def _check_dtypes(self) -> None:
        for field in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2
            ):
                raise ConfigurationError(
                    f"{field}={dtype!r}: expected a floating-point torch.dtype of two bytes or "
                    "more, or None"
                )
        if self.deterministic and self.reduce_dtype is not None:
            raise ConfigurationError(
                f"deterministic=True with reduce_dtype={self.reduce_dtype}: rounding of sums "
                "depends on the number of ranks, so results cannot be bitwise equal for every "
                "world size; leave one of the two out"
            )

        if self.reduce_dtype is not None and self.compressor is not None:
            raise ConfigurationError(
                f"reduce_dtype={self.reduce_dtype} with "
                f"gradient_compression={self.compressor.name!r}: both set the format in "
                "which gradients are sent; leave one of the two out"
            )

    @property
    def compressor(self) -> GradientCompressor | None:
        """Compressor selected by `gradient_compression`; None if gradients are not compressed."""
        return (
            self.gradient_compression
            if isinstance(self.gradient_compression, GradientCompressor)
            else None
        )

    @property
    def blocks_ahead(self) -> int:
        """Value of `prefetch_blocks`, or 1 if that is None."""
        return 1 if self.prefetch_blocks is None else self.prefetch_blocks

    @classmethod
    def for_high_bandwidth(cls, **overrides: object) -> ShardingConfiguration:
        """Returns settings for fast links (10 Gbit/s and more, NVLink): no compression, and buckets
        of 100 MiB, so that messages are fewer and larger."""
        return cls(**({"bucket_cap_mb": 100} | overrides))  # type: ignore[arg-type]

    @classmethod
    def for_low_bandwidth(cls, **overrides: object) -> ShardingConfiguration:
        """Returns settings for slow links (1 Gbit/s and less): `gradient_compression="powersgd"` of
        rank 4. In measurements (docs/explanation/compression.md#presets), it is among the fastest
        compressors, and needs at most a third more steps with any optimizer. Buckets have the
        default size, because little is sent. Suitable for ddp; strategies that shard gradients need
        a different compressor, which `as_distributed_for_low_bandwidth` selects."""
        return cls(**({"gradient_compression": "powersgd"} | overrides))  # type: ignore[arg-type]

    @classmethod
    def for_offload(cls, **overrides: object) -> ShardingConfiguration:
        """Returns settings for models whose shards and optimizer state do not fit on the device.
        Both are kept in host memory or, with `offload=Path(...)`, in files."""
        return cls(**({"offload": "cpu"} | overrides))  # type: ignore[arg-type]
