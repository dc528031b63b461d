"""Converts the chunks of one upload to a validated tensor: checks its size, its checksum, and that
all numbers are finite. Does not apply it.

Rows of a sparse table are sent as their ids followed by their gradients. The tensor then contains
the bytes of the payload (see `split_rows`).

Each chunk is copied and checked when it arrives, while it is in the processor's cache. The message
that contained it is then released, so that the next message can reuse its memory. A compressed
partition is decoded once it is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash
from shoal_common.errors import CorruptDataError, InvalidRequestError
from shoal_common.formats import codecs
from shoal_common.tables.values import Ids, Values, buckets_of
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.shard.layout import Bucket, PartitionSpec

ID_BYTES: Final = 8
_WITH_NORMS: Final = frozenset({torch.float32, torch.float64})
"""Dtypes whose sum of squares is computed quickly, without conversion to another type."""
_CALM_SQUARES: Final = 1e32
"""Largest sum of squares that is certainly free of overflow."""


@dataclass(frozen=True, kw_only=True)
class UploadHeader:
    """Validated header of one partition sent by a member."""

    spec: PartitionSpec
    member_id: str
    generation: int
    sequence: int
    """1, 2, 3, ... per (member, partition); 0 in Initialize."""
    base_version: int
    """Version that the gradient was computed on, at least 1; 0 in Initialize."""
    clock: int
    """Number of iterations that the member has finished, including this push's iteration."""
    codec: int
    """Value of shoal.v1.Codec."""
    payload_bytes: int
    """Size of the payload in bytes, validated against the codec and the partition's length."""
    checksum: int
    """xxh3-64 of the payload; 0 if the sender did not compute it."""
    batch: int = 0
    """Key of the leased batch that the gradient was computed on, the same for any member that
    pushes the batch; 0 if there is none."""
    absent: tuple[int, ...] = ()
    """Positions of the partition's pieces that are not in the payload, ascending."""
    finished_batches: tuple[int, ...] = ()
    """Keys of batches that the member has pushed to all servers."""
    rows: int = 0
    """Number of table rows with gradients in the payload; 0 for partitions that are not buckets."""

    @property
    def length(self) -> int:
        """Number of elements of the decoded payload."""
        return (
            self.spec.length_without(self.absent)
            if self.spec.bucket is None
            else self.rows * self.spec.bucket.dim
        )


class Upload:
    """A partition, or some of its pieces, while it is being received. Pass the chunks to `add`
    until `missing` is 0, then read `values`."""

    def __init__(self, header: UploadHeader) -> None:
        self.header = header
        self._compressed = header.codec != pb.CODEC_RAW
        self._as_bytes = self._compressed or header.spec.bucket is not None
        element = torch.uint8 if self._as_bytes else header.spec.element.torch
        self._tensor = torch.empty(
            header.payload_bytes if self._as_bytes else header.length, dtype=element
        )
        """The received data."""
        self._bytes = np.asarray(bytes_of(self._tensor))
        self._received = 0
        self._digest = xxhash.xxh3_64() if header.checksum else None
        self._seen = 0
        """Number of elements covered by `_largest`."""
        self._largest = 0.0
        self._values: torch.Tensor | None = None

    @property
    def received(self) -> int:
        """Number of bytes received so far."""
        return self._received

    @property
    def missing(self) -> int:
        """Number of bytes that have not been received yet."""
        return self._bytes.nbytes - self._received

    @property
    def payload(self) -> memoryview:
        """The payload as received. With CODEC_RAW, this is the memory of `values`."""
        return self._bytes.data

    def add(self, chunk: memoryview) -> None:
        """Copies the next bytes of the payload. Raises the errors of `room`."""
        self.room(chunk.nbytes)[:] = chunk
        self.came(chunk.nbytes)

    def room(self, nbytes: int) -> memoryview:
        """Returns the memory for the next `nbytes` of the payload. The caller must fill it and
        report the bytes with `came`, either all at once or as they are written.

        Raises InvalidRequestError / PAYLOAD_SIZE_MISMATCH if the header declares fewer bytes.
        """
        if nbytes > self.missing:
            raise InvalidRequestError(
                f"{describe(self.header.spec)}: received {self._received + nbytes} bytes, but the "
                f"header declares {self._bytes.nbytes}",
                reason="PAYLOAD_SIZE_MISMATCH",
            )
        return self._bytes.data[self._received : self._received + nbytes]

    def came(self, nbytes: int) -> None:
        """Includes the next `nbytes`, which have just been written, in the checksum and, for
        uncompressed values, in `largest`. This is done immediately, while the bytes are still in
        the processor's cache."""
        end = self._received + nbytes
        if self._digest is not None:
            self._digest.update(self._bytes.data[self._received : end])
        self._received = end
        if not self._as_bytes:
            self._look_up_to(end // self.header.spec.element.itemsize)

    def values(self) -> torch.Tensor:
        """Returns all received values, piece after piece. For rows of a table, returns the bytes of
        the payload (`split_rows`). Each call returns the same tensor. Must not be called before the
        upload is complete.

        Raises CorruptDataError / CHECKSUM_MISMATCH, and InvalidRequestError: PAYLOAD_INVALID,
        ROWS_INVALID, or GRADIENT_NOT_FINITE with the name of the tensor or the row.
        """
        assert self.missing == 0, "the caller adds every chunk first"
        if self._values is None:
            self._values = self._checked()
        return self._values

    @property
    def largest(self) -> float:
        """Largest magnitude among the `values`, or an upper bound for it (`bound_of`); 0 if there
        are no elements. Raises the errors of `values`."""
        self.values()
        return self._largest

    def _checked(self) -> torch.Tensor:
        spec = self.header.spec
        if self._digest is not None and (found := self._digest.intdigest()) != self.header.checksum:
            raise CorruptDataError(
                f"{describe(spec)}: the payload's xxh3-64 is {found:#018x}, but its header "
                f"declares {self.header.checksum:#018x}; send it again",
                reason="CHECKSUM_MISMATCH",
            )
        if spec.bucket is not None:
            ids, gradients = split_rows(self._tensor, spec.bucket.dim)
            check_ids(spec, spec.bucket, ids)
            if (ids[1:] <= ids[:-1]).any():
                raise _wrong_rows(spec, "the ids of a push: expected unique ids in ascending order")
            self._largest = largest_of(torch.from_numpy(gradients))
            if not math.isfinite(self._largest):
                _check_rows_finite(spec, ids, gradients)
            return self._tensor
        values = self._decoded() if self._compressed else self._tensor
        if self._compressed:
            self._largest = bound_of(values)
        if not math.isfinite(self._largest):
            _check_finite(self.header, values)
        return values

    def _decoded(self) -> torch.Tensor:
        """Decodes the payload. Codecs produce float32, which is then converted to the partition's
        dtype."""
        spec = self.header.spec
        values = torch.empty(self.header.length, dtype=torch.float32)
        try:
            codecs.decode(
                self.header.codec,
                self._bytes.data,
                values.numpy(),
                spec.shapes_without(self.header.absent),
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{describe(spec)}: {error}; the partition is unchanged, and its sequence number "
                "can be reused",
                reason=error.reason,
            ) from error
        return values.to(spec.element.torch)

    def _look_up_to(self, end: int) -> None:
        if end > self._seen:
            found = bound_of(self._tensor[self._seen : end])
            if not math.isnan(self._largest) and not found <= self._largest:  # even if it is NaN
                self._largest = found
            self._seen = end


def bound_of(values: torch.Tensor) -> float:
    """Returns an upper bound for the magnitudes of all values, up to rounding; NaN if any value is
    NaN.

    The bound is usually the norm, which takes a quarter of the time needed for the maximum. If the
    norm is above about 1e16, the exact maximum is returned.
    """
    if values.dtype in _WITH_NORMS:
        squares = float(torch.dot(values, values))
        if squares < _CALM_SQUARES:
            return math.sqrt(squares)
    return largest_of(values)


def largest_of(values: torch.Tensor) -> float:
    """Returns the largest magnitude; NaN if any value is NaN. Faster by a factor of 20 than
    checking the values with isfinite()."""
    if not values.numel():
        return 0.0
    least, most = torch.aminmax(values)
    return float(torch.maximum(-least, most))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns a writable view of a contiguous tensor's bytes."""
    if not tensor.numel():  # the strides of such a tensor may be arbitrary
        return memoryview(bytearray())
    # numpy's stubs for 3.11 lack __buffer__
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def split_rows(payload: torch.Tensor, dim: int) -> tuple[Ids, Values]:
    """Splits a payload of rows into ids and gradients, `[rows, dim]`. Both are views."""
    raw = payload.numpy()
    rows = raw.nbytes // (ID_BYTES + 4 * dim)
    return raw[: ID_BYTES * rows].view(np.int64), raw[ID_BYTES * rows :].view(np.float32).reshape(
        rows, dim
    )


def check_ids(spec: PartitionSpec, bucket: Bucket, ids: Ids) -> None:
    """Raises InvalidRequestError / ROWS_INVALID if an id does not belong to the table or to the
    bucket of `spec`."""
    if bucket.rows and ((ids < 0) | (ids >= bucket.rows)).any():
        culprit = int(ids[(ids < 0) | (ids >= bucket.rows)][0])
        raise _wrong_rows(spec, f"id {culprit}: expected 0 to {bucket.rows - 1}, the declared rows")
    elsewhere = buckets_of(ids, bucket.spec.buckets) != bucket.number
    if elsewhere.any():
        culprit = int(ids[elsewhere][0])
        raise _wrong_rows(spec, f"id {culprit} belongs to another bucket of the table")


def describe(spec: PartitionSpec) -> str:
    """Returns a human-readable description of a partition."""
    if spec.bucket is not None:
        return (
            f"partition {spec.partition_id} (bucket {spec.bucket.number} of table "
            f"{spec.bucket.table!r})"
        )
    first, last = spec.pieces[0], spec.pieces[-1]
    if len(spec.pieces) == 1:
        return (
            f"partition {spec.partition_id} (elements {first.offset} to "
            f"{first.offset + first.length} of tensor {first.tensor!r})"
        )
    return (
        f"partition {spec.partition_id} ({len(spec.pieces)} pieces of tensors, {first.tensor!r} "
        f"to {last.tensor!r})"
    )


def _check_finite(header: UploadHeader, values: torch.Tensor) -> None:
    culprits = torch.isfinite(values).logical_not_()
    if count := int(culprits.sum()):
        first = header.spec.name_of(int(culprits.to(torch.uint8).argmax()), header.absent)
        raise InvalidRequestError(
            f"{describe(header.spec)}: {count} of {values.numel()} values are NaN or infinite, "
            f"the first at {first}; the partition is unchanged, and its sequence number can be "
            "reused",
            reason="GRADIENT_NOT_FINITE",
        )


def _check_rows_finite(spec: PartitionSpec, ids: Ids, gradients: Values) -> None:
    culprits = ~np.isfinite(gradients).all(axis=1)
    if count := int(culprits.sum()):
        raise InvalidRequestError(
            f"{describe(spec)}: the gradients of {count} of {len(ids)} rows are NaN or infinite, "
            f"the first with id {ids[culprits][0]}; the partition is unchanged, and its sequence "
            "number can be reused",
            reason="GRADIENT_NOT_FINITE",
        )


def _wrong_rows(spec: PartitionSpec, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{describe(spec)}: {what}; the partition is unchanged", reason="ROWS_INVALID"
    )
