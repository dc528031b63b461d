"""Compression to one bit per value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
from shoal_common.formats import codecs
from shoal_common.formats.codecs import SIGN_BLOCK, blocks
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

_SIGNS_OF_BYTES: Final = (
    1
    - 2
    * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
        np.float32
    )
).copy()
"""Signs encoded in each byte: row b contains the eight signs of byte b."""


@dataclass(frozen=True, kw_only=True)
class SignCompressor(GradientCompressor):
    """Scaled signs: sign(x) times the mean magnitude of the value's block of 1024 (EF-signSGD:
    Karimireddy et al. 2019, algorithm 1 and section 3).

    For a block of d values, ||x - C(x)||^2 = (1 - ||x||_1^2 / (d ||x||^2)) ||x||^2 (lemma 8): a
    biased contraction, which converges only with error feedback. A NaN makes its block NaN; an
    infinity makes its block infinite.

    A sum across ranks is compressed again before it is sent back, with separate error feedback on
    the rank that computes the sum (Tang et al. 2019, DoubleSqueeze, algorithm 1; as in 1-bit Adam,
    Tang et al. 2021).
    """

    name: ClassVar[str] = "sign"
    codec: ClassVar[int] = codecs.SIGN
    alignment: ClassVar[int] = SIGN_BLOCK

    error_feedback: bool = True

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return blocked_payload_bytes(self.codec, shape)

    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        values = tensor.view(-1)
        scales, packed = _parts(payload, values.numel())
        for start, end in tiles(values.numel(), values.device):
            torch_scales = scales[start // SIGN_BLOCK : blocks(end, SIGN_BLOCK)]
            _mean_magnitudes(values[start:end], torch_scales)
            _pack(values[start:end] < 0, packed[start // 8 : blocks(end, 8)])

    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        values = out.view(-1)
        scales, packed = _parts(payload, values.numel())
        for start, end in tiles(values.numel(), values.device):
            target = _signs(packed[start // 8 : blocks(end, 8)])[: end - start]
            scale_blocks(target, scales[start // SIGN_BLOCK : blocks(end, SIGN_BLOCK)], SIGN_BLOCK)
            if alpha is None:
                values[start:end].copy_(target)
            else:
                values[start:end].add_(target, alpha=alpha)

    def exchange(self) -> Exchange:
        return Chunked()


def _parts(payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a payload's magnitudes and packed signs."""
    start = 4 * blocks(count, SIGN_BLOCK)
    return payload[:start].view(torch.float32), payload[start : start + blocks(count, 8)]


def _mean_magnitudes(values: torch.Tensor, out: torch.Tensor) -> None:
    whole = values.numel() // SIGN_BLOCK
    torch.mean(values[: whole * SIGN_BLOCK].view(-1, SIGN_BLOCK).abs(), dim=1, out=out[:whole])
    if whole < out.numel():
        out[whole] = values[whole * SIGN_BLOCK :].abs().mean()


def _pack(negative: torch.Tensor, out: torch.Tensor) -> None:
    if scratch.in_host_memory(negative.device):
        out.copy_(torch.from_numpy(np.packbits(negative.numpy(), bitorder="little")))
        return
    rows = functional.pad(negative, (0, -negative.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=rows.device)
    torch.sum(rows * weights, dim=1, dtype=torch.uint8, out=out)


def _signs(packed: torch.Tensor) -> torch.Tensor:
    """Returns eight values of 1 or -1 for each byte."""
    if scratch.in_host_memory(packed.device):
        return torch.from_numpy(np.take(_SIGNS_OF_BYTES, packed.numpy(), axis=0, mode="clip")).view(
            -1
        )
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return (1 - 2 * bits.float()).view(-1)
