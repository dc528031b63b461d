"""What every gradient compressor offers: a tensor as fewer bytes, and back; and what an exchange of compressed gradients is given.

A compressor is a frozen value: it has settings and no state. What a step leaves behind (error feedback, warm starts) lies in a `Memory`,
per rank and bucket; the ways to sum compressed gradients over ranks are in exchanges.py. Payloads are those of shoal_common.codecs.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from shoal_common import codecs
from shoal_common.errors import ConfigurationError

from shoal_worker import scratch
from shoal_worker.backends.base import CommunicationBackend, Handle
from shoal_worker.compression.memory import BucketMemory
from shoal_worker.compression.randomness import KeyedRandom
from shoal_worker.scratch import ScratchMemory

_TILE: Final = 1 << 17
"""Values that are worked on at a time on the CPU: 512 KiB stay in a core's own cache over several operations."""


@dataclass(frozen=True, kw_only=True)
class GradientCompressor(abc.ABC):
    """Compresses gradients. Settings only; safe to share.

    Tensors given are float32, contiguous and of one dimension unless a compressor says otherwise; payloads are uint8, on the same device.
    """

    name: ClassVar[str]
    """What users select it by."""
    codec: ClassVar[int]
    """shoal.v1.Codec of its payloads."""
    alignment: ClassVar[int] = 1
    """Parts of a tensor that are compressed on their own begin at multiples of this, so that they share no block."""

    error_feedback: bool = False
    """Adds what compression left out of a step to the next step's gradient (Karimireddy et al. 2019). One float32 per gradient element
    and rank, twice while a step is under way."""
    seed: int = 0
    """Where its random numbers begin; the same on all ranks."""

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Size of the payload of a tensor of that shape; depends on nothing else. A multiple of 4."""

    @abc.abstractmethod
    def compress_into(self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom) -> None:
        """Writes the payload of `tensor` into `payload`, which is of its size. `tensor` is left as it is."""

    @abc.abstractmethod
    def decompress_into(self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None) -> None:
        """Writes the payload's values into `out`; with `alpha`, adds them to it times `alpha` instead."""

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """How buckets compressed with it are summed over ranks."""

    def compress(self, tensor: torch.Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0) -> torch.Tensor:
        """The payload of `tensor`. Random numbers are keyed by the seed and the three numbers: equal ones give equal bits.

        Raises:
            ConfigurationError: the tensor is not float32 and contiguous.
        """
        _check(tensor)
        payload = torch.zeros(self.payload_bytes(tensor.shape), dtype=torch.uint8, device=tensor.device)
        self.compress_into(tensor, payload, KeyedRandom(self.seed, step, rank, bucket))
        return payload

    def decompress(self, payload: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The float32 tensor of that shape that a payload of `compress` stands for."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        self.decompress_into(payload, out)
        return out

    def wire_bytes(self, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None = None) -> int:
        """Bytes that each rank sends to sum one bucket of `numel` elements over `world_size` ranks.

        `shapes`: of the tensors in the bucket, in order, for compressors that look at matrices; None: the bucket is one vector. The
        transport's own framing is not counted; an all-reduce of b bytes counts as 2 b (world_size - 1) / world_size.
        """
        if world_size == 1 or numel == 0:
            return 0
        return self.exchange().wire_bytes(self, numel, world_size, shapes)


def tiles(length: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Pieces of a tensor to work on one after another: of cache size on the CPU, the whole on a device."""
    size = _TILE if scratch.in_host_memory(device) else max(1, length)
    for start in range(0, length, size):
        yield start, min(start + size, length)


def scale_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiplies each block of `block` values, the last of which may be short, by its scale, in place."""
    whole = values.numel() // block
    values[: whole * block].view(-1, block).mul_(scales[:whole, None])
    if whole < scales.numel():
        values[whole * block :].mul_(scales[whole])


def blocked_payload_bytes(codec: int, shape: Sequence[int], kept: int = 0) -> int:
    """`codecs.payload_bytes` of a tensor's shape."""
    return codecs.payload_bytes(codec, math.prod(shape), kept)


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be compressed; "
            "expected float32 and contiguous: pass tensor.float().contiguous()"
        )


Steps = Generator[Handle, None, None]
"""Yields each collective that an exchange has issued; resumed when it is complete (exchanges.py)."""

_STAGES = 2
"""At most so many stages of an exchange draw random numbers."""
_EVERYBODY = -1
"""In place of a rank: random numbers that all ranks draw alike."""


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One bucket on its way."""

    backend: CommunicationBackend
    memory: BucketMemory
    scratch: ScratchMemory
    bucket: int
    """Its index: the same on all ranks."""
    step: int
    shapes: Sequence[Sequence[int]] | None
    """Shapes of the tensors in it, in order; None: one vector."""
    round: int = 0
    """How often it was sent before in the step."""

    def random(self, seed: int, *, stage: int = 0, shared: bool = False) -> KeyedRandom:
        """Random numbers for one stage of the exchange, of this rank or of all."""
        return KeyedRandom(seed, self.step, _EVERYBODY if shared else self.backend.rank, self.bucket, _STAGES * self.round + stage)


class Exchange(abc.ABC):
    """Sums a bucket over ranks."""

    @abc.abstractmethod
    def wire_bytes(self, compressor: GradientCompressor, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None) -> int:
        """See `GradientCompressor.wire_bytes`."""

    @abc.abstractmethod
    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        """Replaces `values` (float32, one dimension) by the sum over ranks."""
