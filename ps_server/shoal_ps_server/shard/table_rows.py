"""Bucket of a sparse table: a partition that contains rows by id instead of a fixed vector of
values. A push changes rows, and a pull only reads them.

The version of a bucket starts at 1, because rows have values even before they are pushed: initial
values are computed from the id and not stored. The bucket therefore does not accept initial values,
and version - 1 is the number of pushes, including empty pushes.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from shoal_common.errors import InvalidRequestError, LimitError
from shoal_common.tables.rows import Rows, RowsImage
from shoal_common.tables.values import Ids
from typing_extensions import override

from shoal_ps_server.shard.layout import Bucket, PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings, is_calm
from shoal_ps_server.shard.partition import Partition, PartitionImage
from shoal_ps_server.shard.payload import UploadHeader, check_ids, describe, largest_of, split_rows
from shoal_ps_server.shard.reading import Copies, EncodedValues, Reading

LARGEST_BUCKET_BYTES: Final = 256 << 20
"""Maximum size of a bucket in bytes. For snapshots and for other servers, a bucket is copied in one
piece, and the server does no other work during the copy."""
_CALM: Final = 1e16
"""Magnitude whose square, as computed by Adagrad, is far below the largest float32."""


@dataclass(kw_only=True)
class TableRows(Partition):
    """A partition that is a bucket of a sparse table. The fields `optimizer`, `values` and `bases`
    of `Partition` are not used."""

    rows: Rows
    coming: int = 0
    """Maximum number of rows that pending pushes will create."""

    @classmethod
    def empty(cls, spec: PartitionSpec) -> TableRows:
        """Returns a bucket without pushed rows."""
        bucket = _bucket(spec)
        largest = bucket.spec.scale * 6  # initial values are never larger
        return cls(
            spec=spec, version=1, rows=Rows(bucket.spec, bucket.dim), largest_at_first=largest
        )

    @classmethod
    @override
    def restored(cls, image: PartitionImage, optimizer: OptimizerSettings | None) -> TableRows:
        assert image.rows is not None, "it is of a bucket"
        made = cls.empty(image.spec)
        bucket = _bucket(image.spec)
        made.rows = Rows(bucket.spec, bucket.dim, image.rows)
        made.version = image.version
        made.restoration = image.restoration
        made.settled = image.settled()
        made.largest_at_first = max(
            made.largest_at_first, largest_of(torch.from_numpy(image.rows.values))
        )
        return made

    def needs_trial(self, largest: float, optimizer: OptimizerSettings) -> bool:
        """Returns whether an update must first be tried on copies, like `Partition.needs_trial`.
        Uses the table's own optimizer in place of `optimizer`."""
        return not max(largest, self.largest_at_first) <= _CALM or not is_calm(
            dict(_bucket(self.spec).spec.hyperparameters)
        )

    @override
    def check_trial(
        self,
        gradient: torch.Tensor,
        absent: Collection[int],
        optimizer: OptimizerSettings,
        base: int = 0,
    ) -> None:
        ids, gradients = split_rows(gradient, _bucket(self.spec).dim)
        made = self.rows.updated(ids, gradients, self.version)
        for name, array in (("values", made.values), *made.state.items()):
            culprits = ~np.isfinite(array.reshape(len(ids), -1)).all(axis=1)
            if count := int(culprits.sum()):
                raise InvalidRequestError(
                    f"{describe(self.spec)}: the update would make {name} of {count} of "
                    f"{len(ids)} rows NaN or infinite, the first with id {ids[culprits][0]}. The "
                    "partition is unchanged, and its sequence number can be reused. Lower the "
                    "table's learning rate, or the loss",
                    reason="RESULT_NOT_FINITE",
                )

    def reserve(
        self, gradient: torch.Tensor, absent: Collection[int], optimizer: OptimizerSettings
    ) -> None:
        """Reserves memory for the rows that the push adds. Raises LimitError / MEMORY_EXHAUSTED if
        there is not enough memory, or if the bucket would exceed its maximum size."""
        bucket = _bucket(self.spec)
        ids, _ = split_rows(gradient, bucket.dim)
        more = self.coming + self.rows.count_new(ids)
        nbytes = (len(self.rows) + more) * self.rows.row_bytes
        if nbytes > LARGEST_BUCKET_BYTES:
            raise LimitError(
                f"{describe(self.spec)}: {len(self.rows) + more} rows take {nbytes} bytes, but a "
                f"bucket may have at most {LARGEST_BUCKET_BYTES}; the partition is unchanged. "
                "Declare the table with more buckets, or with max_rows or max_age",
                reason="MEMORY_EXHAUSTED",
            )
        try:
            self.rows.reserve(more)
        except MemoryError as error:
            raise LimitError(
                f"{describe(self.spec)}: not enough memory for {more} more rows; the partition is "
                "unchanged. Give the server more memory, the job more servers, or the table "
                "max_rows or max_age",
                reason="MEMORY_EXHAUSTED",
            ) from error

    @override
    def admit(self, push: UploadHeader, finished: Container[int], *, applies: bool) -> int:
        self.coming += push.rows * applies
        return super().admit(push, finished, applies=applies)

    @override
    def arrived(
        self, push: UploadHeader, finished: Container[int], *, applies: bool, refused: bool = False
    ) -> None:
        self.coming -= push.rows * applies
        super().arrived(push, finished, applies=applies, refused=refused)

    def apply(
        self,
        gradient: torch.Tensor,
        absent: Collection[int],
        optimizer: OptimizerSettings,
        copies: Copies,
        base: int = 0,
    ) -> None:
        """Applies a payload of rows, like `Partition.apply`. The version before the update is the
        step number."""
        ids, gradients = split_rows(gradient, _bucket(self.spec).dim)
        self.rows.update(ids, gradients, self.version)
        self.version += 1

    def prepared(self, image: RowsImage) -> Rows:
        """Converts an image to the rows for `put_in_place`, without changing the bucket. May be
        called from any thread.

        Raises InvalidRequestError / ROWS_INVALID for rows that cannot belong to this bucket, and
        LimitError / MEMORY_EXHAUSTED for too many rows.
        """
        bucket = _bucket(self.spec)
        begun = Rows(bucket.spec, bucket.dim)
        if misfit := begun.misfit(image):
            raise InvalidRequestError(
                f"{describe(self.spec)}: {misfit}; nothing was changed", reason="ROWS_INVALID"
            )
        check_ids(self.spec, bucket, image.ids)
        for name, array in (("rows", image.values), *image.state.items()):
            if not np.isfinite(array).all():
                raise InvalidRequestError(
                    f"{describe(self.spec)}: {name} contains NaN or infinity; nothing was changed",
                    reason="ROWS_INVALID",
                )
        if (nbytes := len(image.ids) * begun.row_bytes) > LARGEST_BUCKET_BYTES:
            raise LimitError(
                f"{describe(self.spec)}: {len(image.ids)} rows take {nbytes} bytes, but a bucket "
                f"may have at most {LARGEST_BUCKET_BYTES}; nothing was changed. Declare the table "
                "with more buckets",
                reason="MEMORY_EXHAUSTED",
            )
        try:
            return Rows(bucket.spec, bucket.dim, image)
        except MemoryError as error:
            raise LimitError(
                f"{describe(self.spec)}: not enough memory for {nbytes} bytes of rows; nothing "
                "was changed. Give the server more memory, or the job more servers",
                reason="MEMORY_EXHAUSTED",
            ) from error

    def takes(self, restoration: int) -> bool:
        """Returns whether a restoration still has to be carried out. No change to the bucket may be
        pending.

        `restoration`: number of the RestoreRows request, or 0, as in RowsHeader.restoration.
        """
        return (
            restoration > self.restoration
            if restoration
            else self.version == 1 and not self.restoration
        )

    def put_in_place(self, rows: Rows, version: int, restoration: int) -> None:
        """Replaces the bucket's rows and its version. `restoration`: number of the RestoreRows
        request (RowsHeader.restoration)."""
        self.rows, self.version, self.restoration = rows, version, restoration
        self.largest_at_first = max(self.largest_at_first, rows.largest)

    def read_rows(self, ids: Ids, copies: Copies) -> Reading:
        """Returns a `Reading` of a copy of the rows with these `ids`."""
        values = torch.from_numpy(self.rows.values(ids))
        return EncodedValues(values.view(-1).view(torch.uint8)).read(copies, version=self.version)

    def as_it_is(self) -> PartitionImage:
        """Returns a copy of the bucket. Unlike `Partition.as_it_is`, the image shares no memory
        with it."""
        return PartitionImage(
            spec=self.spec,
            version=self.version,
            values=torch.empty(0),
            runs=(),
            sequences=dict(self.settled.sequences),
            batches=dict(self.settled.batches),
            left=list(self.settled.left),
            rows=self.rows.image(),
            restoration=self.restoration,
        )

    @property
    def stored_rows(self) -> int:
        """Number of stored rows, which are the rows that have been pushed and not evicted."""
        return len(self.rows)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of rows and their optimizer state, including unused capacity."""
        return self.rows.nbytes


def _bucket(spec: PartitionSpec) -> Bucket:
    assert spec.bucket is not None, f"partition {spec.partition_id} is not a bucket of a table"
    return spec.bucket


def new_partition(spec: PartitionSpec) -> Partition:
    """Creates an empty partition for an entry of the layout."""
    return Partition(spec=spec) if spec.bucket is None else TableRows.empty(spec)


def restored_partition(image: PartitionImage, optimizer: OptimizerSettings | None) -> Partition:
    """Restores the partition from `image`."""
    return (Partition if image.spec.bucket is None else TableRows).restored(image, optimizer)
