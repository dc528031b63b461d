"""The interface of gradient compressors, which convert a tensor to fewer bytes and back, and the
methods of summing compressed gradients across ranks.

A compressor is immutable: it has settings, but no state. Any state between steps (error feedback,
warm starts) is in a `Memory`, which each rank has for each bucket. An `Exchange` sums a bucket
across ranks. shoal_common.formats.codecs defines the payload format.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import torch
from shoal_common.errors import ConfigurationError
from shoal_common.formats import codecs

from shoal_worker import scratch
from shoal_worker.backends.base import CommunicationBackend, Handle
from shoal_worker.compression.memory import BucketMemory
from shoal_worker.scratch import ScratchMemory

# ----------------------------------------------------------------------------------- random numbers
#
# Random numbers that depend only on a key, so that a repeated step rounds identically.
#
# torch's global generators are not used, because the user's loop draws from them. The CPU uses
# numpy's SFC64, which is 7 times as fast as torch's Mersenne Twister. A GPU uses its own generator,
# whose numbers differ from the CPU's but are just as repeatable.

_MASK: Final = (1 << 64) - 1


class KeyedRandom:
    """A stream of random numbers that is determined by a key of integers, such as (seed, step,
    rank, bucket). Must be used by only one thread."""

    def __init__(self, *key: int) -> None:
        self._key = [part & _MASK for part in key]
        self._numpy: np.random.Generator | None = None
        self._torch: torch.Generator | None = None

    def noise16(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns `count` int16 values, uniformly distributed over all 65536 possible values."""
        if scratch.in_host_memory(device):
            words = self.numpy().bit_generator.random_raw(-(-count // 4))
            return torch.from_numpy(words.view(np.int16)[:count])
        return torch.randint(
            -32768, 32768, (count,), dtype=torch.int16, device=device, generator=self._on(device)
        )

    def normal(self, rows: int, columns: int) -> torch.Tensor:
        """Returns standard normal float32 values. They are generated on the host, so that they do
        not depend on the device."""
        return torch.from_numpy(self.numpy().standard_normal((rows, columns), dtype=np.float32))

    def numpy(self) -> np.random.Generator:
        """Returns this stream's NumPy generator."""
        if self._numpy is None:
            self._numpy = np.random.Generator(np.random.SFC64(np.random.SeedSequence(self._key)))
        return self._numpy

    def _on(self, device: torch.device) -> torch.Generator:
        if self._torch is None:
            low, high = np.random.SeedSequence(self._key).generate_state(2)
            self._torch = torch.Generator(device).manual_seed(int(high) << 31 | int(low))
        return self._torch


# -------------------------------------------------------------------------------------- compressors

PieceShapes = Mapping[int, tuple[int, int]]
"""Shapes of the pieces of tensors in a partition: position of the piece, in ascending order -> its
rows and columns (`codecs.piece_shape`)."""

_TILE: Final = 1 << 17
"""Number of values processed at a time on the CPU. Several operations on these 512 KiB run in the
core's own cache."""


@dataclass(frozen=True, kw_only=True)
class GradientCompressor(abc.ABC):
    """Base class of gradient compressors. Contains only settings, so one instance can be shared.

    Input tensors must be float32, contiguous and one-dimensional, unless a compressor states
    otherwise. Payloads are uint8 tensors on the same device.
    """

    name: ClassVar[str]
    """Name that users pass to select the compressor."""
    codec: ClassVar[int]
    """Number in shoal.v1.Codec that identifies the payloads of pushes to parameter servers."""
    of_matrices: ClassVar[bool] = False
    """True if the compressor treats tensors as matrices and therefore does not support sharded
    gradients."""
    alignment: ClassVar[int] = 1
    """The parts of a tensor that are compressed separately begin at multiples of this number of
    elements, so that no block belongs to two parts."""

    error_feedback: bool = False
    """True if the compression error of a step is added to the next step's gradient (Karimireddy et
    al. 2019). Each rank then needs memory for one float32 per gradient element, and for a second
    one during a step."""
    seed: int = 0
    """Seed of the random numbers; the same on all ranks."""

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Returns the size of the payload of a tensor of this shape, in bytes; a multiple of 4. The
        size depends only on the shape and the compressor's settings."""

    @abc.abstractmethod
    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        """Writes the payload of `tensor` into `payload`, whose size must be
        `payload_bytes(tensor.shape)`. Does not change `tensor`."""

    @abc.abstractmethod
    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        """Decodes the payload into `out`. With `alpha`, adds `alpha` times the decoded values to
        `out` instead."""

    def compress_pieces(
        self, values: torch.Tensor, shapes: PieceShapes, memory: BucketMemory, random: KeyedRandom
    ) -> torch.Tensor:
        """Returns the payload of a push to a parameter server.

        Args:
            values: concatenated pieces of tensors. Most compressors treat them as one vector.
            shapes: rows and columns of each piece, by its index in the partition.
            memory: the partition's state, to which a compressor may propose a warm start for the
                next push.
        """
        payload = torch.zeros(
            self.payload_bytes(values.shape), dtype=torch.uint8, device=values.device
        )
        self.compress_into(values, payload, random)
        return payload

    def take_off_pieces(
        self, payload: torch.Tensor, values: torch.Tensor, shapes: PieceShapes
    ) -> None:
        """Subtracts the values that the server will decode from `payload`, a result of
        `compress_pieces`, from `values`. What remains in `values` is the compression error."""
        self.decompress_into(payload, values, alpha=-1)

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """Returns the exchange that sums buckets across ranks with this compressor."""

    def compress(
        self, tensor: torch.Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> torch.Tensor:
        """Returns the payload of `tensor`. The seed, step, rank and bucket determine the random
        numbers, so the same arguments give the same bits.

        Raises:
            ConfigurationError: the tensor is not float32 and contiguous.
        """
        _check(tensor)
        payload = torch.zeros(
            self.payload_bytes(tensor.shape), dtype=torch.uint8, device=tensor.device
        )
        self.compress_into(tensor, payload, KeyedRandom(self.seed, step, rank, bucket))
        return payload

    def decompress(self, payload: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Decodes a payload returned by `compress` into a float32 tensor of this shape."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        self.decompress_into(payload, out)
        return out

    def wire_bytes(
        self, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None = None
    ) -> int:
        """Returns the number of bytes that each rank sends to sum one bucket of `numel` elements
        across `world_size` ranks.

        `shapes`: shapes of the tensors in the bucket, in order, for compressors that use matrices;
        None: the bucket is one vector. Headers of the transport are not included. An all-reduce of
        b bytes is assumed to send 2 b (world_size - 1) / world_size bytes per rank.
        """
        if world_size == 1 or numel == 0:
            return 0
        return self.exchange().wire_bytes(self, numel, world_size, shapes)


def tiles(length: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yields the ranges in which to process a tensor, one after another: on the CPU, ranges that
    fit in the cache; on a GPU, the entire tensor."""
    size = _TILE if scratch.in_host_memory(device) else max(1, length)
    for start in range(0, length, size):
        yield start, min(start + size, length)


def scale_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiplies each block of `block` consecutive values by its scale, in place. The last block
    may be shorter."""
    whole = values.numel() // block
    values[: whole * block].view(-1, block).mul_(scales[:whole, None])
    if whole < scales.numel():
        values[whole * block :].mul_(scales[whole])


def blocked_payload_bytes(codec: int, shape: Sequence[int], kept: int = 0) -> int:
    """Returns the payload size for a tensor of this shape (`codecs.payload_bytes`)."""
    return codecs.payload_bytes(codec, math.prod(shape), kept)


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"cannot compress a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; expected float32 and contiguous: pass tensor.float().contiguous()"
        )


Steps = Generator[Handle, None, None]
"""Generator that runs an exchange. It yields the handle of each collective that it issues, and is
resumed when that collective is complete."""

_STAGES = 2
"""Maximum number of stages of an exchange that draw random numbers."""
_EVERYBODY = -1
"""Used instead of the rank in the key of random numbers that are the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Errand:
    """Arguments of the exchange of one bucket in one step."""

    backend: CommunicationBackend
    memory: BucketMemory
    scratch: ScratchMemory
    bucket: int
    """Index of the bucket: the same on all ranks."""
    step: int
    shapes: Sequence[Sequence[int]] | None
    """Shapes of the tensors in the bucket, in order; None: the bucket is one vector."""
    round: int = 0
    """Number of times that the bucket has already been exchanged in this step."""

    def random(self, seed: int, *, stage: int = 0, shared: bool = False) -> KeyedRandom:
        """Returns the random numbers for one stage of the exchange. `shared`: True if all ranks
        must draw the same numbers; False if each rank draws its own."""
        return KeyedRandom(
            seed,
            self.step,
            _EVERYBODY if shared else self.backend.rank,
            self.bucket,
            _STAGES * self.round + stage,
        )


class Exchange(abc.ABC):
    """A method of summing a bucket across ranks."""

    @abc.abstractmethod
    def wire_bytes(
        self,
        compressor: GradientCompressor,
        numel: int,
        world_size: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> int:
        """Returns the number of bytes that each rank sends to sum one bucket."""

    @abc.abstractmethod
    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        """Replaces `values` (float32, one-dimensional) with their sum across ranks."""


# ---------------------------------------------------------------------------------------- exchanges
#
# Methods of summing compressed gradients over all ranks, with bitwise equal results.
#
# An ordinary all-reduce cannot add payloads, and an all-reduce of bfloat16 values rounds at every
# rank. There are therefore three methods:
#
# - `Chunked` (fp16, bf16, int8, sign): each rank owns a part of the bucket. All ranks send the
#   owner their compressed data for that part (all-to-all). The owner computes the sum in float32,
#   in rank order, and sends it back compressed (all-gather). Every rank, including the owner, uses
#   the decompressed sum. A ring all-reduce of the uncompressed bucket sends the same number of
#   elements, so traffic shrinks by the compressor's ratio for any number of ranks.
# - `Gathered` (topk): every rank receives the payloads of all ranks and sums them in rank order.
#   This is best for payloads much smaller than 2/n of the bucket, and necessary because a sum of n
#   sparse vectors is no longer sparse.
# - All-reduce (randomk in sparse.py, powersgd.py): the data sent is linear in the gradient, so an
#   ordinary float32 all-reduce can add it.
#
# An exchange is a generator: it yields each collective's handle after all work that can be done
# while the collective runs, and is resumed when the collective is complete. All ranks must resume
# their exchanges in the same order.

# ------------------------------------------------------------------------------------------ chunked


@dataclass(frozen=True)
class Chunks:
    """Division of a bucket into one part per rank. The last parts may be shorter or empty."""

    numel: int
    length: int
    """Number of elements in each part, except in the last parts if they are shorter."""
    count: int

    @classmethod
    def of(cls, numel: int, world_size: int, alignment: int) -> Chunks:
        """Divides a bucket into parts that begin at multiples of `alignment`."""
        share = -(-numel // world_size)
        return cls(numel, -(-share // alignment) * alignment, world_size)

    def bounds(self, rank: int) -> slice:
        """Returns the range of the bucket that is the part of `rank`."""
        return slice(min(self.numel, rank * self.length), min(self.numel, (rank + 1) * self.length))


class Chunked(Exchange):
    """Exchange by an all-to-all of compressed parts, a sum in float32, and an all-gather of the
    compressed sums."""

    def wire_bytes(
        self,
        compressor: GradientCompressor,
        numel: int,
        world_size: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> int:
        chunks = Chunks.of(numel, world_size, compressor.alignment)
        return 2 * (world_size - 1) * compressor.payload_bytes((chunks.length,))

    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        chunks = Chunks.of(values.numel(), errand.backend.world_size, compressor.alignment)
        own = chunks.bounds(errand.backend.rank)
        total = values[own]
        sent, received = yield from scatter_sum(compressor, values, total, chunks, errand)

        # Both buffers are free now and are reused with swapped roles.
        gathered, payload = sent, received[0]
        if compressor.error_feedback:
            total = errand.memory.compensated_sum(own.start, total)
        _compress_part(compressor, total, payload, chunks, errand.random(compressor.seed, stage=1))
        handle = errand.backend.all_gather(gathered, payload, async_op=True)
        if compressor.error_feedback:
            compressor.decompress_into(payload, total, alpha=-1)
        yield handle
        for rank in range(chunks.count):
            compressor.decompress_into(gathered[rank], values[chunks.bounds(rank)])
        errand.scratch.give_back(sent, received)


def scatter_sum(
    compressor: GradientCompressor,
    values: torch.Tensor,
    total: torch.Tensor,
    chunks: Chunks,
    errand: Errand,
) -> Generator[Handle, None, tuple[torch.Tensor, torch.Tensor]]:
    """Sums each part of the bucket on the rank that owns it. Writes the sum of this rank's part to
    `total`, which may be that part of `values`.

    Returns the send buffer and the receive buffer. The caller may reuse them, and must then return
    them to the pool.
    """
    own = chunks.bounds(errand.backend.rank)
    if compressor.error_feedback:
        values = errand.memory.compensated_gradient(values, own)
    parts = [values[chunks.bounds(rank)] for rank in range(chunks.count)]
    size = compressor.payload_bytes((chunks.length,))
    sent, received = (
        errand.scratch.take((chunks.count, size), torch.uint8, values.device) for _ in range(2)
    )
    random = errand.random(compressor.seed)
    for part, payload in zip(parts, sent, strict=True):
        _compress_part(compressor, part, payload, chunks, random)
    handle = errand.backend.all_to_all(received, sent, async_op=True)
    if compressor.error_feedback:
        for part, payload in zip(parts, sent, strict=True):
            compressor.decompress_into(payload, part, alpha=-1)
    yield handle
    compressor.decompress_into(received[0], total)
    for payload in received[1:]:
        compressor.decompress_into(payload, total, alpha=1)
    return sent, received


def _compress_part(
    compressor: GradientCompressor,
    part: torch.Tensor,
    payload: torch.Tensor,
    chunks: Chunks,
    random: KeyedRandom,
) -> None:
    # The unused end of the payload is sent as well, so it must not expose old memory.
    (payload if part.numel() < chunks.length else payload[-4:]).zero_()
    compressor.compress_into(part, payload, random)


# ---------------------------------------------------------------------------------- unsplit buckets


class Gathered(Exchange):
    """Exchange by an all-gather of all ranks' payloads."""

    def wire_bytes(
        self,
        compressor: GradientCompressor,
        numel: int,
        world_size: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> int:
        return (world_size - 1) * compressor.payload_bytes((numel,))

    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        given = errand.memory.compensated_gradient(values) if compressor.error_feedback else values
        payload = values.new_zeros(compressor.payload_bytes(values.shape), dtype=torch.uint8)
        compressor.compress_into(given, payload, errand.random(compressor.seed))
        gathered = errand.scratch.take(
            (errand.backend.world_size, payload.numel()), torch.uint8, values.device
        )
        handle = errand.backend.all_gather(gathered, payload, async_op=True)
        if compressor.error_feedback:
            compressor.decompress_into(payload, given, alpha=-1)
        yield handle
        values.zero_()
        for one in gathered:
            compressor.decompress_into(one, values, alpha=1)
        errand.scratch.give_back(gathered)


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Returns the number of bytes that a rank sends in an all-reduce of `size` bytes, averaged over
    ranks and rounded up."""
    return -(-2 * (world_size - 1) * size // world_size)
