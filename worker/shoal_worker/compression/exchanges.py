"""How compressed gradients become the sum over all ranks, with the same bits on every rank.

Payloads cannot be added by a transport, and one that adds bfloat16 rounds at every rank. So:

- `Chunked` (fp16, bf16, int8, sign): each rank owns a part of the bucket. All send it that part compressed (all-to-all); it adds up in
  float32, in the order of ranks, and sends the sum back compressed (all-gather). Every rank, the owner too, takes what was sent. An
  all-reduce of the uncompressed bucket sends as often, so the saving is the compressor's own, whatever the number of ranks.
- `Gathered` (topk): every rank gets the payloads of all and adds them up in the order of ranks. Right where a payload is much smaller than
  2/n of the bucket; a sum of n sparse vectors is no longer sparse.
- By all-reduce (randomk in sparse.py, powersgd.py): what is sent is linear in the gradient, so the transport adds it, in float32.

An exchange is written as a generator: it yields each collective that it has issued, does what can be done meanwhile before that, and is
resumed when the collective is complete. All ranks must resume their exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from shoal_worker.backends.base import Handle
from shoal_worker.compression.base import Errand, Exchange, GradientCompressor, Steps
from shoal_worker.compression.randomness import KeyedRandom

# ------------------------------------------------------------------------------------------------------------ in chunks


@dataclass(frozen=True)
class Chunks:
    """A bucket cut into one part for each rank. Those of the last ranks may be shorter, or empty."""

    numel: int
    length: int
    """Number of elements in each part but the last."""
    count: int

    @classmethod
    def of(cls, numel: int, world_size: int, alignment: int) -> Chunks:
        """Parts that begin at multiples of `alignment`."""
        share = -(-numel // world_size)
        return cls(numel, -(-share // alignment) * alignment, world_size)

    def bounds(self, rank: int) -> slice:
        """Where the part of that rank lies."""
        return slice(min(self.numel, rank * self.length), min(self.numel, (rank + 1) * self.length))


class Chunked(Exchange):
    """All-to-all of compressed parts, sum in float32, all-gather of the compressed sums."""

    def wire_bytes(self, compressor: GradientCompressor, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None) -> int:
        chunks = Chunks.of(numel, world_size, compressor.alignment)
        return 2 * (world_size - 1) * compressor.payload_bytes((chunks.length,))

    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        chunks = Chunks.of(values.numel(), errand.backend.world_size, compressor.alignment)
        own = chunks.bounds(errand.backend.rank)
        total = values[own]
        sent, received = yield from scatter_sum(compressor, values, total, chunks, errand)

        # Both buffers have done their service, and now serve the other way round.
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
    compressor: GradientCompressor, values: torch.Tensor, total: torch.Tensor, chunks: Chunks, errand: Errand
) -> Generator[Handle, None, tuple[torch.Tensor, torch.Tensor]]:
    """Sums each part of the bucket on the rank that owns it: writes this rank's into `total`, which may be that part of `values`.

    Returns the buffers sent and received, for further use; their taker gives them back.
    """
    own = chunks.bounds(errand.backend.rank)
    if compressor.error_feedback:
        values = errand.memory.compensated_gradient(values, own)
    parts = [values[chunks.bounds(rank)] for rank in range(chunks.count)]
    size = compressor.payload_bytes((chunks.length,))
    sent, received = (errand.scratch.take((chunks.count, size), torch.uint8, values.device) for _ in range(2))
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


def _compress_part(compressor: GradientCompressor, part: torch.Tensor, payload: torch.Tensor, chunks: Chunks, random: KeyedRandom) -> None:
    # What the payload does not fill goes on the wire as well, and is not to be old memory.
    (payload if part.numel() < chunks.length else payload[-4:]).zero_()
    compressor.compress_into(part, payload, random)


# -------------------------------------------------------------------------------------------------------- whole buckets


class Gathered(Exchange):
    """All-gather of payloads."""

    def wire_bytes(self, compressor: GradientCompressor, numel: int, world_size: int, shapes: Sequence[Sequence[int]] | None) -> int:
        return (world_size - 1) * compressor.payload_bytes((numel,))

    def reduce(self, compressor: GradientCompressor, values: torch.Tensor, errand: Errand) -> Steps:
        given = errand.memory.compensated_gradient(values) if compressor.error_feedback else values
        payload = values.new_zeros(compressor.payload_bytes(values.shape), dtype=torch.uint8)
        compressor.compress_into(given, payload, errand.random(compressor.seed))
        gathered = errand.scratch.take((errand.backend.world_size, payload.numel()), torch.uint8, values.device)
        handle = errand.backend.all_gather(gathered, payload, async_op=True)
        if compressor.error_feedback:
            compressor.decompress_into(payload, given, alpha=-1)
        yield handle
        values.zero_()
        for one in gathered:
            compressor.decompress_into(one, values, alpha=1)
        errand.scratch.give_back(gathered)


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Bytes that a rank sends in an all-reduce of `size` bytes, on average over ranks, rounded up."""
    return -(-2 * (world_size - 1) * size // world_size)
