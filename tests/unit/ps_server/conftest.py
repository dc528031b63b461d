"""Factory of partitions, uploads and shards for the parameter server tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from shoal_common.formats.wire import checksum
from shoal_common.tables.declaration import TableSpec
from shoal_common.tables.wire import pushed_payload
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import Bucket, Layout, PartitionSpec, Piece
from shoal_ps_server.shard.optimizer import OptimizerSettings, optimizer_settings
from shoal_ps_server.shard.payload import Upload, UploadHeader, bytes_of
from shoal_ps_server.shard.shard import Shard


class Make:
    """Creates partitions, uploads and shards with sensible defaults."""

    def spec(
        self,
        partition_id: int = 0,
        *,
        length: int = 6,
        dtype: str = "float32",
        tensor: str = "weight",
        offset: int = 0,
    ) -> PartitionSpec:
        """Returns a partition with one piece."""
        return self.packed(partition_id, (tensor, length), dtype=dtype, offset=offset)

    def packed(
        self,
        partition_id: int = 0,
        *pieces: tuple[str, int],
        dtype: str = "float32",
        offset: int = 0,
    ) -> PartitionSpec:
        """Returns a partition with several pieces, given as tensor names and numbers of
        elements."""
        return PartitionSpec(
            partition_id=partition_id,
            pieces=tuple(
                Piece(tensor=tensor, offset=offset, length=length) for tensor, length in pieces
            ),
            element=BY_NAME[dtype],
        )

    def layout(self, *specs: PartitionSpec, epoch: int = 1) -> Layout:
        specs = specs or (self.spec(),)
        return Layout(
            epoch=epoch,
            server_index=0,
            partitions={spec.partition_id: spec for spec in specs},
            owners={spec.partition_id: 0 for spec in specs},
            tensors=frozenset(piece.tensor for spec in specs for piece in spec.pieces),
        )

    def upload(
        self,
        values: torch.Tensor | Sequence[float],
        spec: PartitionSpec | None = None,
        *,
        member: str = "a",
        sequence: int = 1,
        base_version: int = 1,
        cuts: Sequence[int] = (),
        digest: int | None = None,
        batch: int = 0,
        absent: Sequence[int] = (),
        finished: Sequence[int] = (),
    ) -> Upload:
        """Returns a complete upload of `values`.

        cuts: byte positions at which the payload is split into chunks.
        digest: checksum in the header; None computes the right one.
        """
        spec = spec or self.spec()
        data = bytes(bytes_of(torch.as_tensor(values, dtype=spec.element.torch)))
        edges = [0, *sorted(cuts), len(data)]
        header = UploadHeader(
            spec=spec,
            member_id=member,
            generation=1,
            sequence=sequence,
            base_version=base_version,
            clock=sequence,
            codec=pb.CODEC_RAW,
            payload_bytes=len(data),
            checksum=checksum(data) if digest is None else digest,
            batch=batch,
            absent=tuple(absent),
            finished_batches=tuple(finished),
        )
        upload = Upload(header)
        for start, end in pairwise(edges):
            upload.add(memoryview(data)[start:end])
        return upload

    def bucket(
        self, partition_id: int = 0, *, dim: int = 4, rows: int = 0, number: int = 0, **table: Any
    ) -> PartitionSpec:
        """Returns a bucket of a sparse table, by default the table's only one. `table`: fields of
        the table's specification."""
        defaults = {
            "buckets": 1,
            "seed": 7,
            "initializer": "normal",
            "scale": 0.1,
            "optimizer": "adagrad",
            "hyperparameters": {"lr": 0.1},
        }
        spec = TableSpec.with_defaults(**{**defaults, **table})
        assert spec.contradiction() == ""
        return PartitionSpec(
            partition_id=partition_id,
            pieces=(),
            element=BY_NAME["float32"],
            bucket=Bucket(table="users", rows=rows, dim=dim, number=number, spec=spec),
        )

    def rows(
        self,
        ids: Sequence[int],
        gradients: Any = 1.0,
        spec: PartitionSpec | None = None,
        *,
        member: str = "a",
        sequence: int = 1,
        base_version: int = 1,
        batch: int = 0,
    ) -> Upload:
        """Returns a push of rows to a sparse table. `gradients` has the shape `[len(ids), dim]` or
        is broadcast to it."""
        spec = spec or self.bucket()
        assert spec.bucket is not None
        given = np.broadcast_to(np.asarray(gradients, np.float32), (len(ids), spec.bucket.dim))
        data = pushed_payload(np.asarray(ids, np.int64).reshape(-1), given)
        header = UploadHeader(
            spec=spec,
            member_id=member,
            generation=1,
            sequence=sequence,
            base_version=base_version,
            clock=sequence,
            codec=pb.CODEC_RAW,
            payload_bytes=data.nbytes,
            checksum=checksum(data),
            batch=batch,
            rows=len(ids),
        )
        upload = Upload(header)
        upload.add(data)
        return upload

    def sgd(self, **hyperparameters: float) -> OptimizerSettings:
        return optimizer_settings(name="sgd", hyperparameters={"lr": 0.5, **hyperparameters})

    def shard(
        self, *specs: PartitionSpec, optimizer: OptimizerSettings | None = None, values: Any = None
    ) -> Shard:
        """Returns a shard with every partition at version 1, filled with `values` or zeros."""
        layout = self.layout(*specs)
        shard = Shard(optimizer=optimizer or self.sgd())
        shard.adopt(layout)
        for spec in layout.partitions.values():
            shard.initialize(
                self.upload(
                    torch.zeros(spec.length) if values is None else values,
                    spec,
                    sequence=0,
                    base_version=0,
                )
            )
        return shard

    def values(self, shard: Shard, partition_id: int = 0) -> torch.Tensor:
        """Returns the values that a pull would return."""
        image = shard.image(partition_id)
        assert image is not None
        return image.values


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()
