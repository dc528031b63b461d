"""Half precision on the wire: half the bytes, an error of one rounding.

Sums over ranks are taken in float32 (exchanges.py), never in half precision: an element is rounded once by each rank that sends it and once
as a sum, whatever the number of ranks. No error feedback by default: the error is relative to each element and unbiased enough to need
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from shoal_common import codecs

from shoal_worker.compression.base import Exchange, GradientCompressor, blocked_payload_bytes, tiles
from shoal_worker.compression.exchanges import Chunked
from shoal_worker.compression.randomness import KeyedRandom


@dataclass(frozen=True, kw_only=True)
class _HalfCompressor(GradientCompressor):
    alignment: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype]

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return blocked_payload_bytes(self.codec, shape)

    def compress_into(self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom) -> None:
        self._values(payload, tensor.numel()).copy_(tensor.view(-1))

    def decompress_into(self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None) -> None:
        values, target = self._values(payload, out.numel()), out.view(-1)
        if alpha is None:
            target.copy_(values)
            return
        for start, end in tiles(target.numel(), target.device):  # torch would convert the whole operand first
            target[start:end].add_(values[start:end].float(), alpha=alpha)

    def _values(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        return payload[: 2 * count].view(self.dtype)

    def exchange(self) -> Exchange:
        return Chunked()


@dataclass(frozen=True, kw_only=True)
class Float16Compressor(_HalfCompressor):
    """IEEE half precision (Micikevicius et al. 2018, section 3).

    |x - C(x)| <= 2^-11 |x| for 2^-14 <= |x| <= 65504, and <= 2^-25 below. Larger values become infinite: use it with a GradScaler,
    which sees that and lowers its scale, or take bf16. NaN and infinities stay what they are.
    """

    name: ClassVar[str] = "fp16"
    codec: ClassVar[int] = codecs.FLOAT16
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class BFloat16Compressor(_HalfCompressor):
    """bfloat16: float32's range with 8 significant bits.

    |x - C(x)| <= 2^-8 |x|, above denormal numbers. NaN and infinities stay what they are.
    """

    name: ClassVar[str] = "bf16"
    codec: ClassVar[int] = codecs.BFLOAT16
    dtype: ClassVar[torch.dtype] = torch.bfloat16
