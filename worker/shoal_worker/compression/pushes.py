"""Compressed gradients for parameter servers: payloads that a server decodes by itself, with error feedback per partition.

A push to a partition is applied as a whole or refused as a whole, so what compression left out of it counts once the server has
acknowledged it. It does not send: the asynchronous engine does. Belongs to the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.compression.base import GradientCompressor, KeyedRandom
from shoal_worker.compression.memory import Memory


class CompressedPushes:
    """Encodes one worker's pushes."""

    def __init__(self, compressor: GradientCompressor, *, stream: int) -> None:
        """`stream`: a number of this worker's own, so that workers do not round alike.

        Raises:
            ConfigurationError: PowerSGD, whose second factor is a sum over ranks.
        """
        if not compressor.codec:
            raise ConfigurationError(
                f"gradient_compression={compressor.name!r} is not for parameter servers: it needs sums over all ranks; take topk, int8 "
                "or another"
            )
        self.compressor = compressor
        self._stream = stream
        self._memory = Memory()
        self._unanswered: set[int] = set()

    def encode(
        self, gradient: torch.Tensor, *, partition: int, sequence: int, places: Sequence[tuple[int, int]] = (), length: int = 0
    ) -> tuple[int, memoryview]:
        """Codec and payload of one partition's gradient, for PushHeader and PushChunk. Retries of the push send the same payload.

        `gradient` is floating-point, of one dimension, and is left as it is. `sequence` is the push's, which its random numbers follow
        from. A NaN or infinity in it reaches the server, which refuses the push. `places`: where `gradient` lies in a partition of `length`
        elements, of which the rest has no gradient and keeps what it is owed; none: it is the whole.

        Raises:
            ConfigurationError: a gradient that cannot be compressed.
            PreconditionError (PUSH_UNANSWERED): the partition's last push was neither acknowledged nor refused.
        """
        if not gradient.is_floating_point() or gradient.dim() != 1:
            raise ConfigurationError(
                f"a gradient of {gradient.dtype} and shape {tuple(gradient.shape)}: expected floating-point and one dimension"
            )
        if partition in self._unanswered:
            raise PreconditionError(
                f"partition {partition} was pushed and not answered: acknowledge or refuse that push first", reason="PUSH_UNANSWERED"
            )
        values = gradient.detach().float().contiguous()
        compressor = self.compressor
        random = KeyedRandom(compressor.seed, sequence, self._stream, partition)
        payload = torch.zeros(compressor.payload_bytes(values.shape), dtype=torch.uint8, device=values.device)
        if not compressor.error_feedback:
            compressor.compress_into(values, payload, random)
        else:
            whole = _spread(values, places, length) if places else values
            owed = self._memory.bucket(partition).compensated_gradient(whole)
            given = torch.cat([owed[begin:end] for begin, end in places]) if places else owed
            compressor.compress_into(given, payload, random)
            compressor.decompress_into(payload, given, alpha=-1)
            if places:
                _put(given, places, owed)
        self._unanswered.add(partition)
        return compressor.codec, payload.cpu().numpy().data

    def acknowledged(self, partition: int) -> None:
        """The server has applied the push: what was left out of it is owed to the next."""
        self._unanswered.discard(partition)
        self._memory.bucket(partition).commit()

    def refused(self, partition: int) -> None:
        """The server has not applied the push, and will not."""
        self._unanswered.discard(partition)
        self._memory.bucket(partition).rollback()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This worker's residuals. References, valid until the next acknowledgement."""
        return self._memory.state_dict(warm=False)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over residuals.

        Raises:
            CorruptDataError (STATE_INVALID): not what `state_dict` gives; nothing is changed.
        """
        self._memory.load_state_dict(state, warm=False)


def _spread(values: torch.Tensor, places: Sequence[tuple[int, int]], length: int) -> torch.Tensor:
    """Zeros, but for `values` at `places`."""
    whole = values.new_zeros(length)
    _put(values, places, whole)
    return whole


def _put(values: torch.Tensor, places: Sequence[tuple[int, int]], into: torch.Tensor) -> None:
    position = 0
    for begin, end in places:
        into[begin:end] = values[position : position + end - begin]
        position += end - begin
