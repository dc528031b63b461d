"""The interface of gradient compressors: converts a tensor to fewer bytes and back, and sums
compressed gradients over ranks.

A compressor is an immutable value: it has settings and no state. The state between steps (error
feedback, warm starts) is in a `Memory`, per rank and bucket; the methods of summing compressed
gradients over ranks are exchanges. Payloads are those of shoal_common.formats.codecs.
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
# Random numbers that depend on what they are for and on nothing else, so that a step that is redone
# rounds alike.
#
# Not torch's global generators: the user's loop draws from those. On the CPU numpy's SFC64 draws, 7
# times as fast as torch's Mersenne Twister; a device has its own generator, so its numbers are
# others than the CPU's, but as repeatable.

_MASK: Final = (1 << 64) - 1


class KeyedRandom:
    """A stream of random numbers identified by integers, such as (seed, step, rank, bucket).
    Belongs to one thread."""

    def __init__(self, *key: int) -> None:
        self._key = [part & _MASK for part in key]
        self._numpy: np.random.Generator | None = None
        self._torch: torch.Generator | None = None

    def noise16(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns `count` int16 values, uniformly distributed over all 65536 values."""
        if scratch.in_host_memory(device):
            words = self.numpy().bit_generator.random_raw(-(-count // 4))
            return torch.from_numpy(words.view(np.int16)[:count])
        return torch.randint(
            -32768, 32768, (count,), dtype=torch.int16, device=device, generator=self._on(device)
        )

    def normal(self, rows: int, columns: int) -> torch.Tensor:
        """Returns standard normal float32 values in host memory, independent of the device on which
        they are used."""
        return torch.from_numpy(self.numpy().standard_normal((rows, columns), dtype=np.float32))

    def numpy(self) -> np.random.Generator:
        """Returns the CPU's stream itself."""
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
"""Rows and columns of each piece (`codecs.piece_shape`) by its position in the partition,
ascending."""

_TILE: Final = 1 << 17
"""Number of values processed at a time on the CPU: 512 KiB stay in a core's own cache over several
operations."""


@dataclass(frozen=True, kw_only=True)
class GradientCompressor(abc.ABC):
    """Compresses gradients. Settings only; safe to share.

    Tensors given are float32, contiguous and of one dimension unless a compressor says otherwise;
    payloads are uint8, on the same device.
    """

    name: ClassVar[str]
    """Name by which users select it."""
    codec: ClassVar[int]
    """shoal.v1.Codec of a worker's pushes to parameter servers."""
    of_matrices: ClassVar[bool] = False
    """True if it treats tensors as matrices, so that it cannot be used with sharded gradients."""
    alignment: ClassVar[int] = 1
    """Parts of a tensor that are compressed separately begin at multiples of this, so that they
    share no block."""

    error_feedback: bool = False
    """Adds a step's compression error to the next step's gradient (Karimireddy et al. 2019). One
    float32 per gradient element and rank, two during a step."""
    seed: int = 0
    """Seed of its random numbers; the same on all ranks."""

    @abc.abstractmethod
    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Size of the payload of a tensor of that shape; depends on nothing else. A multiple of
        4."""

    @abc.abstractmethod
    def compress_into(
        self, tensor: torch.Tensor, payload: torch.Tensor, random: KeyedRandom
    ) -> None:
        """Writes the payload of `tensor` into `payload`, which has the right size. `tensor` is not
        changed."""

    @abc.abstractmethod
    def decompress_into(
        self, payload: torch.Tensor, out: torch.Tensor, *, alpha: float | None = None
    ) -> None:
        """Writes the payload's values into `out`; with `alpha`, adds them to it times `alpha`
        instead."""

    def compress_pieces(
        self, values: torch.Tensor, shapes: PieceShapes, memory: BucketMemory, random: KeyedRandom
    ) -> torch.Tensor:
        """Returns the payload of a push to a parameter server, for pieces of tensors one after
        another in `values`; most compressors treat them as one vector.

        `shapes`: rows and columns of each, by its position in the partition. The starting point of
        the next push is proposed to `memory`.
        """
        payload = torch.zeros(
            self.payload_bytes(values.shape), dtype=torch.uint8, device=values.device
        )
        self.compress_into(values, payload, random)
        return payload

    def take_off_pieces(
        self, payload: torch.Tensor, values: torch.Tensor, shapes: PieceShapes
    ) -> None:
        """Subtracts the server's decoding of such a payload from `values`, which then hold the
        compression error."""
        self.decompress_into(payload, values, alpha=-1)

    @abc.abstractmethod
    def exchange(self) -> Exchange:
        """Returns the method of summing buckets over ranks."""

    def compress(
        self, tensor: torch.Tensor, *, step: int = 0, rank: int = 0, bucket: int = 0
    ) -> torch.Tensor:
        """Returns the payload of `tensor`. Random numbers are keyed by the seed and the three
        numbers: equal ones give equal bits.

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
        """Returns the float32 tensor of that shape encoded in a payload of `compress`."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        self.decompress_into(payload, out)
        return out

    def wire_bytes(
        self, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None = None
    ) -> int:
        """Returns the number of bytes that each rank sends to sum one bucket of `numel` elements
        over `world_size` ranks.

        `shapes`: of the tensors in the bucket, in order, for compressors that use matrices; None:
        the bucket is one vector. The transport's own framing is not counted; an all-reduce of b
        bytes counts as 2 b (world_size - 1) / world_size.
        """
        if world_size == 1 or numel == 0:
            return 0
        return self.exchange().wire_bytes(self, numel, world_size, shapes)


def tiles(length: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yields ranges of a tensor to be processed one after another: of cache size on the CPU, the
    whole tensor on a device."""
    size = _TILE if scratch.in_host_memory(device) else max(1, length)
    for start in range(0, length, size):
        yield start, min(start + size, length)


def scale_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiplies each block of `block` values (the last may be shorter) by its scale, in place."""
    whole = values.numel() // block
    values[: whole * block].view(-1, block).mul_(scales[:whole, None])
    if whole < scales.numel():
        values[whole * block :].mul_(scales[whole])


def blocked_payload_bytes(codec: int, shape: Sequence[int], kept: int = 0) -> int:
    """Returns `codecs.payload_bytes` for a tensor's shape."""
    return codecs.payload_bytes(codec, math.prod(shape), kept)


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"cannot compress a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; expected float32 and contiguous: pass tensor.float().contiguous()"
        )


Steps = Generator[Handle, None, None]
"""Yields each collective that an exchange has issued; resumed when it is complete."""

_STAGES = 2
"""Maximum number of stages of an exchange that draw random numbers."""
_EVERYBODY = -1
"""Used instead of a rank for random numbers that all ranks draw alike."""


@dataclass(frozen=True, kw_only=True)
class Errand:
    """The transfer of one bucket."""

    backend: CommunicationBackend
    memory: BucketMemory
    scratch: ScratchMemory
    bucket: int
    """Index of the bucket: the same on all ranks."""
    step: int
    shapes: Sequence[Sequence[int]] | None
    """Shapes of the tensors in it, in order; None: one vector."""
    round: int = 0
    """Number of times it was sent before in the step."""

    def random(self, seed: int, *, stage: int = 0, shared: bool = False) -> KeyedRandom:
        """Returns random numbers for one stage of the exchange, of this rank or of all."""
        return KeyedRandom(
            seed,
            self.step,
            _EVERYBODY if shared else self.backend.rank,
            self.bucket,
            _STAGES * self.round + stage,
        )


class Exchange(abc.ABC):
    """Sums a bucket over ranks."""

    @abc.abstractmethod
    def wire_bytes(
        self,
        compressor: GradientCompressor,
        numel: int,
        world_size: int,
        shapes: Sequence[Sequence[int]] | None,
    ) -> int:
        """Implements `GradientCompressor.wire_bytes`."""

    @abc.abstractmethod
    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        """Replaces `values` (float32, one dimension) by the sum over ranks."""


# ---------------------------------------------------------------------------------------- exchanges
#
# How compressed gradients become the sum over all ranks, with the same bits on every rank.
#
# Payloads cannot be added by a transport, and one that adds bfloat16 rounds at every rank. So:
#
# - `Chunked` (fp16, bf16, int8, sign): each rank owns a part of the bucket. All send it that part
#   compressed (all-to-all); it adds up in float32, in the order of ranks, and sends the sum back
#   compressed (all-gather). Every rank, the owner too, takes what was sent. An all-reduce of the
#   uncompressed bucket sends as often, so the saving is the compressor's own, whatever the number
#   of ranks.
# - `Gathered` (topk): every rank gets the payloads of all and adds them up in the order of ranks.
#   Right where a payload is much smaller than 2/n of the bucket; a sum of n sparse vectors is no
#   longer sparse.
# - By all-reduce (randomk in sparse.py, powersgd.py): what is sent is linear in the gradient, so
#   the transport adds it, in float32.
#
# An exchange is written as a generator: it yields each collective that it has issued, does what can
# be done meanwhile before that, and is resumed when the collective is complete. All ranks must
# resume their exchanges in the same order.

# ---------------------------------------------------------------------------------------- in chunks


@dataclass(frozen=True)
class Chunks:
    """A bucket divided into one part for each rank. Those of the last ranks may be shorter or
    empty."""

    numel: int
    length: int
    """Number of elements in each part but the last."""
    count: int

    @classmethod
    def of(cls, numel: int, world_size: int, alignment: int) -> Chunks:
        """Returns parts that begin at multiples of `alignment`."""
        share = -(-numel // world_size)
        return cls(numel, -(-share // alignment) * alignment, world_size)

    def bounds(self, rank: int) -> slice:
        """Returns the range of a rank's part."""
        return slice(min(self.numel, rank * self.length), min(self.numel, (rank + 1) * self.length))


class Chunked(Exchange):
    """All-to-all of compressed parts, sum in float32, all-gather of the compressed sums."""

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
    """Sums each part of the bucket on the rank that owns it: writes this rank's into `total`, which
    may be that part of `values`.

    Returns the buffers sent and received, for further use; the caller gives them back.
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
    # The unused rest of the payload is sent as well, and must not contain old memory.
    (payload if part.numel() < chunks.length else payload[-4:]).zero_()
    compressor.compress_into(part, payload, random)


# ------------------------------------------------------------------------------------ whole buckets


class Gathered(Exchange):
    """All-gather of payloads."""

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
