"""One step of a worker as the servers are told of it, and its gradients as the payloads that are sent: as they are, or compressed.

Belongs to the thread that speaks to the server: see `ServerLink`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.asynchronous.options import Revision
from shoal_worker.asynchronous.tensors import Part
from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.pushes import CompressedPushes


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One step of this worker: what every server is told."""

    clock: int
    """Iterations finished with this one."""
    revision: Revision
    """Hyperparameters that the push is to be applied with, or newer ones."""
    gradients: Mapping[str, memoryview]
    """By tensor; only those that have one."""
    pull: bool
    batch: int = 0
    """Key of the leased batch that the gradients were computed on; 0: none."""


class Payload(NamedTuple):
    """What is sent of a part."""

    part: Part
    codec: int
    data: memoryview


class Payloads:
    """Makes them, of one server's parts."""

    def __init__(self, compressor: GradientCompressor | None, *, stream: int) -> None:
        """`compressor`: of gradients; None: they are sent as they are. `stream`: see `CompressedPushes`."""
        self._compressed = None if compressor is None else CompressedPushes(compressor, stream=stream)

    def values(self, parts: Iterable[Part]) -> Iterator[Payload]:
        """The tensors' values, made as they are sent."""
        return (Payload(part, pb.CODEC_RAW, part.of(part.tensor.values())) for part in parts)

    @contextmanager
    def gradients(self, parts: Sequence[Part], iteration: Iteration) -> Iterator[list[Payload]]:
        """For one push, however often it is attempted: the bytes are the same each time. Whoever leaves without an error has pushed them:
        what was left out is owed to the next push. A server that knew the push's batch from another worker counts as well: the two owe
        the same kind of thing, once each."""
        compressed = self._compressed
        if compressed is None:
            yield [Payload(part, pb.CODEC_RAW, part.of(iteration.gradients[part.tensor.name])) for part in parts]
            return
        payloads = []
        answered = compressed.refused
        try:
            for part in parts:
                gradient = _gradient(part, iteration)
                # Numbered by the clock: a push may get another sequence number at the next attempt.
                codec, data = compressed.encode(gradient, partition=part.partition_id, sequence=iteration.clock)
                payloads.append(Payload(part, codec, data))
            yield payloads
            answered = compressed.acknowledged
        finally:
            for payload in payloads:
                answered(payload.part.partition_id)


def _gradient(part: Part, iteration: Iteration) -> torch.Tensor:
    raw, dtype = part.of(iteration.gradients[part.tensor.name]), part.tensor.parameter.dtype
    return torch.frombuffer(raw, dtype=dtype) if raw.nbytes else torch.empty(0, dtype=dtype)
