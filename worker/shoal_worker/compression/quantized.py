"""Compression to fewer bits per value: half precision (half the bytes, one rounding), and 8-bit
integers with one scale per block and stochastic rounding, which makes the expected value exact.

Sums across ranks are computed in float32 (`Chunked` in base.py), never in half precision: each rank
rounds its elements once, and the sum is rounded once, for any number of ranks. Error feedback is
off by default, because the error is relative to each element and nearly unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
from shoal_common.formats import codecs
from shoal_common.formats.codecs import INT8_BLOCK, INT8_LARGEST, blocks
from torch.nn import functional

from shoal_worker import scratch
from shoal_worker.compression.base import (
    Chunked,
    Exchange,
    GradientCompressor,
    KeyedRandom,
    blocked_payload_bytes,
    scale_blocks,
    tiles,
)


@dataclass(frozen=True, kw_only=True)
class _HalfCompressor(GradientCompressor):
    alignment: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype]

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return blocked_payload_bytes(self.codec, shape)

    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        self._values(payload, tensor.numel()).copy_(tensor.view(-1))

    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        values, target = self._values(payload, out.numel()), out.view(-1)
        if alpha is None:
            target.copy_(values)
            return
        for start, end in tiles(target.numel(), target.device):
            # torch would first convert the entire operand to float32
            target[start:end].add_(values[start:end].float(), alpha=alpha)

    def _values(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        return payload[: 2 * count].view(self.dtype)

    def exchange(self) -> Exchange:
        return Chunked()


@dataclass(frozen=True, kw_only=True)
class Float16Compressor(_HalfCompressor):
    """IEEE half precision (Micikevicius et al. 2018, section 3).

    |x - C(x)| <= 2^-11 |x| for 2^-14 <= |x| <= 65504, and <= 2^-25 below. Larger values become
    infinite. Therefore use a GradScaler, which detects the infinity and lowers its scale, or use
    bf16. NaN and infinities are preserved.
    """

    name: ClassVar[str] = "fp16"
    codec: ClassVar[int] = codecs.FLOAT16
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BFloat16Compressor(_HalfCompressor):
    """bfloat16: float32's range with 8 significant bits.

    |x - C(x)| <= 2^-8 |x|, unless x is a denormal number. NaN and infinities are preserved.
    """

    name: ClassVar[str] = "bf16"
    codec: ClassVar[int] = codecs.BFLOAT16
    dtype: ClassVar[torch.dtype] = torch.bfloat16


_SMALLEST: Final = 256 * torch.finfo(torch.float32).tiny
"""Blocks whose largest magnitude is below this value (3e-36) are set to zero, because their scale
would be a denormal number."""


@dataclass(frozen=True, kw_only=True)
class Int8Compressor(GradientCompressor):
    """QSGD (Alistarh et al. 2017, section 3.1) with 127 levels, scaled by the largest magnitude of
    each block of 256 values, as in the paper's experiments.

    With s = max|block| / 127: |x - C(x)| < s (1 + 2^-16) for each value; the mean of C(x) over the
    random numbers is x, up to 2^-17 s; the variance is at most s^2 / 4 per value. The compressor is
    unbiased, so it needs no error feedback. If a block contains NaN or infinity, its scale, and
    therefore each of its values, is NaN or infinite.

    A sum across ranks is compressed again before it is sent back, with different random numbers,
    and remains unbiased.
    """

    name: ClassVar[str] = "int8"
    codec: ClassVar[int] = codecs.INT8
    alignment: ClassVar[int] = INT8_BLOCK

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return blocked_payload_bytes(self.codec, shape)

    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        values = tensor.view(-1)
        scales, levels = _parts(payload, values.numel())
        for start, end in tiles(values.numel(), values.device):
            of_tile = slice(start // INT8_BLOCK, blocks(end, INT8_BLOCK))
            _quantize(
                values[start:end],
                random.noise16(end - start, values.device),
                scales[of_tile],
                levels[start:end],
            )

    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        values = out.view(-1)
        scales, levels = _parts(payload, values.numel())
        for start, end in tiles(values.numel(), values.device):
            target = values[start:end] if alpha is None else torch.empty_like(values[start:end])
            target.copy_(levels[start:end])
            scale_blocks(target, scales[start // INT8_BLOCK : blocks(end, INT8_BLOCK)], INT8_BLOCK)
            if alpha is not None:
                values[start:end].add_(target, alpha=alpha)

    def exchange(self) -> Exchange:
        return Chunked()


def _parts(payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a payload's scales and levels."""
    start = 4 * blocks(count, INT8_BLOCK)
    return payload[:start].view(torch.float32), payload[start : start + count].view(torch.int8)


def _quantize(
    values: torch.Tensor, noise: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor
) -> None:
    missing = -values.numel() % INT8_BLOCK
    rows = (functional.pad(values, (0, missing)) if missing else values).view(-1, INT8_BLOCK)
    largest = _largest_magnitudes(rows)
    torch.mul(largest, 1 / INT8_LARGEST, out=scales)
    scales.masked_fill_(largest < _SMALLEST, 0)
    inverse = torch.where(scales > 0, scales.reciprocal(), 0)
    scaled = (rows * inverse[:, None]).view(-1)[: values.numel()]
    # Noise between -1/2 and 1/2, so that the probability of rounding a value up equals its
    # fractional part.
    scaled.add_(noise, alpha=2**-16).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    levels.copy_(scaled)


def _largest_magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude in each row; NaN for a row that contains NaN."""
    if scratch.in_host_memory(rows.device):
        # torch's reductions over short rows take 4 times as long
        return torch.from_numpy(np.abs(rows.numpy()).max(axis=1))
    return rows.abs().amax(dim=1)
