"""From the pieces of one upload to a tensor that is known to be sound: size, checksum, only finite numbers. Nothing is applied here.

A `Scratch` is one buffer, reused for every push: it belongs to the thread that owns the shard, and what it returned is overwritten by the
next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from shoal_common.errors import CorruptDataError, InvalidRequestError
from shoal_common.wire import checksum

from shoal_ps_server.shard.layout import PartitionSpec


@dataclass(frozen=True, kw_only=True)
class UploadHeader:
    """What a member says of one partition that it sends, checked at the door."""

    spec: PartitionSpec
    member_id: str
    generation: int
    sequence: int
    """1, 2, 3, ... per (member, partition); 0 in Initialize."""
    base_version: int
    """The version that a gradient was computed on, >= 1; 0 in Initialize."""
    clock: int
    """Iterations that the member has finished with this."""
    checksum: int
    """xxh3-64 of the payload; 0: not computed."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One partition as it came: its payload is in pieces, `header.spec.nbytes` in all."""

    header: UploadHeader
    pieces: Sequence[memoryview]


class Scratch:
    """The buffer in which gradients are put together."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def gradient(self, upload: Upload) -> torch.Tensor:
        """The upload as a tensor that lives until the next call. Raises as `assemble` does."""
        spec = upload.header.spec
        nbytes = spec.nbytes
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return assemble(upload, self._bytes[:nbytes].view(spec.element.torch))


def assemble(upload: Upload, into: torch.Tensor) -> torch.Tensor:
    """Copies the upload's payload into a flat tensor of its size, and checks it there.

    Raises CorruptDataError / CHECKSUM_MISMATCH, and InvalidRequestError / GRADIENT_NOT_FINITE, naming the tensor; `into` is rubbish then.
    """
    target = bytes_of(into)
    position = 0
    for piece in upload.pieces:
        end = position + piece.nbytes
        # Through numpy, which gives up the GIL.
        np.copyto(np.frombuffer(target[position:end], np.uint8), np.frombuffer(piece, np.uint8))
        position = end
    header = upload.header
    if header.checksum and (found := checksum(target)) != header.checksum:
        raise CorruptDataError(
            f"{describe(header.spec)}: the payload's xxh3-64 is {found:#018x}, its header says {header.checksum:#018x}; send it again",
            reason="CHECKSUM_MISMATCH",
        )
    _check_finite(header.spec, into)
    return into


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes, where they are, writable."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type] # numpy's stubs for 3.11 lack __buffer__


def describe(spec: PartitionSpec) -> str:
    """A partition, for people."""
    return f"tensor {spec.tensor!r}, partition {spec.partition_id} (elements {spec.offset} to {spec.offset + spec.length})"


def _check_finite(spec: PartitionSpec, values: torch.Tensor) -> None:
    # A sum is not finite when an element is not, and is 50 times cheaper than isfinite(). It can overflow by itself, so it only acquits.
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if bool(torch.isfinite(total)):
        return
    culprits = torch.isfinite(values).logical_not_()
    if count := int(culprits.sum()):
        first = spec.offset + int(culprits.to(torch.uint8).argmax())
        raise InvalidRequestError(
            f"{describe(spec)}: {count} of {spec.length} values are NaN or infinite, the first is element {first}; "
            "nothing of this partition was applied, and its sequence number is still free",
            reason="GRADIENT_NOT_FINITE",
        )
