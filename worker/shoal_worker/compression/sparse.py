"""Compression to a few values: the largest values with their positions, or randomly chosen
values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from shoal_common.errors import ConfigurationError
from shoal_common.formats import codecs
from shoal_common.formats.codecs import (
    RANDOMK_HEADER_BYTES,
    TOPK_BLOCK,
    blocks,
    randomk_draw,
    randomk_places,
)

from shoal_worker import scratch
from shoal_worker.compression.base import (
    Errand,
    Exchange,
    Gathered,
    GradientCompressor,
    KeyedRandom,
    Steps,
    all_reduce_bytes,
    blocked_payload_bytes,
    tiles,
)

_SAMPLES: Final = 1 << 16
"""Number of values sampled to estimate a threshold."""
_SURPLUS: Final = 1.25
"""Number of values that an estimated threshold should select, as a multiple of k. If it selects
fewer than k values, all values must be searched."""


@dataclass(frozen=True, kw_only=True)
class _SparseCompressor(GradientCompressor):
    error_feedback: bool = True
    ratio: float = 0.01
    """Fraction of the values to send, above 0 and at most 1. At least one value is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigurationError(
                f"{self.name}: ratio={self.ratio}; expected a fraction above 0 and at most 1"
            )

    def kept(self, count: int) -> int:
        """Returns how many of `count` values are sent."""
        return min(count, max(1, math.ceil(self.ratio * count)))

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return blocked_payload_bytes(self.codec, shape, self.kept(math.prod(shape)))


@dataclass(frozen=True, kw_only=True)
class TopKCompressor(_SparseCompressor):
    """The k values of largest magnitude (Stich et al. 2018; Lin et al. 2018, deep gradient
    compression).

    ||x - C(x)||^2 <= (1 - k/n) ||x||^2 (Stich et al., lemma A.1), and the compressor is biased, so
    it needs error feedback. NaN is treated as larger than any number, followed by infinities, so
    non-finite values are always sent. A threshold estimated from a sample speeds up the exact
    selection of the k largest values (hierarchical selection, Lin et al.): on the CPU, it is 20
    times as fast as torch.topk.

    Ranks select different positions, so each rank sends its payload of 6 k bytes to every other
    rank.
    """

    name: ClassVar[str] = "topk"
    codec: ClassVar[int] = codecs.TOPK

    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        values = tensor.view(-1)
        counts, kept, within = _topk_parts(payload, values.numel(), self.kept(values.numel()))
        places = _largest(values, kept.numel())
        counts.copy_(torch.bincount(places >> 16, minlength=counts.numel()))
        torch.index_select(values, 0, places, out=kept)
        within.copy_(places & (TOPK_BLOCK - 1))

    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        values = out.view(-1)
        counts, kept, within = _topk_parts(payload, values.numel(), self.kept(values.numel()))
        starts = torch.arange(counts.numel(), device=values.device) * TOPK_BLOCK
        places = torch.repeat_interleave(starts, counts, output_size=kept.numel())
        places += within.long() & (TOPK_BLOCK - 1)  # the positions are unsigned
        if alpha is None:
            values.zero_()
        values.index_add_(0, places, kept, alpha=1 if alpha is None else alpha)

    def exchange(self) -> Exchange:
        return Gathered()


@dataclass(frozen=True, kw_only=True)
class RandomKCompressor(_SparseCompressor):
    """k values at random positions, the same on all ranks (Stich et al. 2018; Wangni et al. 2018).

    Each position is equally likely to be sent, so on average ||x - C(x)||^2 = (1 - k/n) ||x||^2
    with error feedback (the default). Without error feedback, sent values are multiplied by n/k:
    the expected value is then x, and the expected squared error is (n/k - 1) ||x||^2. If any value
    is NaN or infinite, all sent values are NaN.

    All ranks draw the same positions from (seed, step, bucket), so only the values are sent, and an
    ordinary all-reduce sums them.
    """

    name: ClassVar[str] = "randomk"
    codec: ClassVar[int] = codecs.RANDOMK

    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        values = tensor.view(-1)
        count = values.numel()
        start, stride = randomk_draw(random.numpy(), count)
        header = np.array([start, stride], np.int64).view(np.uint8)
        payload[:RANDOMK_HEADER_BYTES].copy_(torch.from_numpy(header))
        self.select_into(
            values, self._kept_of(payload, count), self._places(start, stride, count, values.device)
        )

    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        values = out.view(-1)
        count = values.numel()
        start, stride = payload[:RANDOMK_HEADER_BYTES].clone().view(torch.int64).tolist()
        if alpha is None:
            values.zero_()
        kept = self._kept_of(payload, count)
        values.index_add_(
            0,
            self._places(start, stride, count, values.device),
            kept,
            alpha=1 if alpha is None else alpha,
        )

    def draw(self, count: int, random: KeyedRandom, device: torch.device) -> torch.Tensor:
        """Returns the positions of the values to send."""
        return self._places(*randomk_draw(random.numpy(), count), count, device)

    def select_into(self, values: torch.Tensor, out: torch.Tensor, places: torch.Tensor) -> None:
        """Writes the values to send to `out`."""
        torch.index_select(values, 0, places, out=out)
        if not self.error_feedback:
            out.mul_(values.numel() / max(1, out.numel()))
        if values.numel():
            low, high = torch.aminmax(values)
            out.add_(low * 0 + high * 0)  # NaN if any value is not finite

    def exchange(self) -> Exchange:
        return _Summed(self)

    def _places(self, start: int, stride: int, count: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(randomk_places(start, stride, self.kept(count), count)).to(device)

    def _kept_of(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        return payload[RANDOMK_HEADER_BYTES : RANDOMK_HEADER_BYTES + 4 * self.kept(count)].view(
            torch.float32
        )


@dataclass(frozen=True)
class _Summed(Exchange):
    """Exchange by an all-reduce of the selected values, whose positions are the same on all
    ranks."""

    chosen: RandomKCompressor

    def wire_bytes(
        self,
        compressor: GradientCompressor,
        numel: int,
        world_size: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> int:
        return all_reduce_bytes(4 * self.chosen.kept(numel), world_size)

    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        chosen = self.chosen
        given = errand.memory.compensated_gradient(values) if chosen.error_feedback else values
        places = chosen.draw(values.numel(), errand.random(chosen.seed, shared=True), values.device)
        kept = values.new_empty(places.numel())
        chosen.select_into(given, kept, places)
        handle = errand.backend.all_reduce(kept, async_op=True)
        if chosen.error_feedback:
            given.index_fill_(0, places, 0)
        yield handle
        values.zero_()
        values.index_copy_(0, places, kept)


def _topk_parts(
    payload: torch.Tensor, count: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the number of values in each block, the values, and their positions within the blocks
    (unsigned, although the dtype is int16)."""
    values_at = 4 * blocks(count, TOPK_BLOCK)
    within_at = values_at + 4 * kept
    parts = (
        payload[:values_at],
        payload[values_at:within_at],
        payload[within_at : within_at + 2 * kept],
    )
    return parts[0].view(torch.int32), parts[1].view(torch.float32), parts[2].view(torch.int16)


def _largest(values: torch.Tensor, kept: int) -> torch.Tensor:
    """Returns the positions of the `kept` values of largest magnitude, in ascending order."""
    if scratch.in_host_memory(values.device):
        return torch.from_numpy(_largest_on_cpu(values.numpy(), kept))
    return torch.topk(values.abs(), kept, sorted=False).indices.sort().values


def _largest_on_cpu(values: NDArray[np.float32], kept: int) -> NDArray[np.int64]:
    candidates = _candidates(values, kept)
    if candidates is None:
        return _largest_of(np.abs(values), kept)
    if candidates.size < kept:
        # All other values are zero, so any of them can be chosen. Among the first `kept` positions,
        # enough are not candidates.
        spare = np.ones(kept, bool)
        spare[candidates[candidates < kept]] = False
        return np.sort(
            np.concatenate([candidates, np.flatnonzero(spare)[: kept - candidates.size]])
        )
    return candidates[_largest_of(np.abs(values[candidates]), kept)]


def _candidates(values: NDArray[np.float32], kept: int) -> NDArray[np.int64] | None:
    """Returns the positions, in ascending order, of all values above a threshold estimated from a
    sample. They include the `kept` largest values, unless fewer than `kept` values are not zero.
    Returns None if the tensor is too small for sampling, or if the threshold selects too few
    values."""
    count = values.size
    if count <= _SAMPLES or kept * _SURPLUS * 2 > count:
        return None
    sample = np.abs(values[:: count // _SAMPLES])
    wanted = min(sample.size, math.ceil(_SURPLUS * kept * sample.size / count) + 16)
    threshold = np.partition(sample, sample.size - wanted)[sample.size - wanted]
    # Negated, because NaN compares false and must be selected.
    pieces = [
        np.flatnonzero(~(np.abs(values[start:end]) <= threshold)) + start
        for start, end in tiles(count, torch.device("cpu"))
    ]
    found = np.concatenate(pieces)
    return found if found.size >= kept or threshold == 0 else None


def _largest_of(magnitudes: NDArray[np.float32], kept: int) -> NDArray[np.int64]:
    if kept == 0:
        return np.empty(0, np.int64)
    return np.sort(np.argpartition(magnitudes, magnitudes.size - kept)[magnitudes.size - kept :])
