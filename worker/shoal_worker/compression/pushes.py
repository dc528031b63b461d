"""Encodes compressed gradients for parameter servers, with error feedback per partition. A server
can decode each payload without any other data.

A server either applies a push to a partition completely or rejects it. The compression error is
therefore recorded only once the server is known to have applied the push, and the next push to that
partition must not be encoded earlier. As a result, whatever fails, the gradients that the server
has decoded and applied, plus the residual, equal the sum of the original gradients of these pushes.

The asynchronous engine sends the payloads. May be used by only one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.compression.base import GradientCompressor, KeyedRandom, PieceShapes
from shoal_worker.compression.memory import RESIDUAL, Memory


class CompressedPushes:
    """Encodes one worker's pushes to parameter servers."""

    def __init__(self, compressor: GradientCompressor, *, stream: int) -> None:
        """Creates the encoder. `stream`: number unique to this worker, so that workers draw
        different random numbers."""
        self.compressor = compressor
        self._stream = stream
        self._memory = Memory()
        self._unanswered: set[int] = set()

    def encode(
        self,
        gradient: torch.Tensor,
        *,
        partition: int,
        sequence: int,
        places: Sequence[tuple[int, int]] = (),
        length: int = 0,
        shapes: PieceShapes | None = None,
    ) -> tuple[int, memoryview]:
        """Returns the codec and the payload of one partition's gradient, for PushHeader and
        PushChunk. A retry of the push must send the same payload.

        Args:
            gradient: floating-point, one-dimensional; not changed. A NaN or infinity is sent to the
                server, which then rejects the push.
            sequence: sequence number of the push, which determines the random numbers.
            places: ranges of the partition that `gradient` covers; empty: the entire partition. The
                rest of the partition has no gradient and keeps its residual.
            length: number of elements of the partition, if `places` is given.
            shapes: shapes of the pieces of `gradient`; None: `gradient` is one vector.

        Raises:
            ConfigurationError: the gradient cannot be compressed.
            PreconditionError (PUSH_UNANSWERED): the outcome of the partition's last push has not
                been reported.
        """
        if not gradient.is_floating_point() or gradient.dim() != 1:
            raise ConfigurationError(
                f"gradient of dtype {gradient.dtype} and shape {tuple(gradient.shape)}: expected "
                "a floating-point vector"
            )
        if partition in self._unanswered:
            raise PreconditionError(
                f"the outcome of the last push to partition {partition} is not known yet; record "
                "it with settle() before encoding the next push",
                reason="PUSH_UNANSWERED",
            )
        values = gradient.detach().float().contiguous()
        compressor = self.compressor
        random = KeyedRandom(compressor.seed, sequence, self._stream, partition)
        shapes = {0: (1, values.numel())} if shapes is None else shapes
        memory = self._memory.bucket(partition)
        if not compressor.error_feedback:
            payload = compressor.compress_pieces(values, shapes, memory, random)
        else:
            whole = _spread(values, places, length) if places else values
            owed = memory.compensated_gradient(whole)
            given = torch.cat([owed[begin:end] for begin, end in places]) if places else owed
            payload = compressor.compress_pieces(given, shapes, memory, random)
            compressor.take_off_pieces(payload, given, shapes)
            if places:
                _put(given, places, owed)
        self._unanswered.add(partition)
        return compressor.codec, payload.cpu().numpy().data

    def settle(self, partition: int, *, applied: bool) -> None:
        """Records the outcome of a partition's last push.

        `applied`: True if the server has applied the push, whose compression error then becomes the
        residual. False if the server has rejected the push, or if another worker's push had already
        delivered the same batch; the previous residual then remains.
        """
        self._unanswered.discard(partition)
        memory = self._memory.bucket(partition)
        if applied:
            memory.commit()
        else:
            memory.rollback()

    @property
    def unanswered(self) -> frozenset[int]:
        """Partitions whose last encoded push has no recorded outcome."""
        return frozenset(self._unanswered)

    def owed(self, partition: int) -> torch.Tensor | None:
        """Returns the residual of a partition, in the layout of the partition; None if there is
        none. The tensor is a reference, valid until the next push."""
        return dict(self._memory.bucket(partition).items(warm=False)).get(RESIDUAL)


def _spread(values: torch.Tensor, places: Sequence[tuple[int, int]], length: int) -> torch.Tensor:
    """Returns a vector of `length` elements with `values` at `places` and zeros elsewhere."""
    whole = values.new_zeros(length)
    _put(values, places, whole)
    return whole


def _put(values: torch.Tensor, places: Sequence[tuple[int, int]], into: torch.Tensor) -> None:
    position = 0
    for begin, end in places:
        into[begin:end] = values[position : position + end - begin]
        position += end - begin
