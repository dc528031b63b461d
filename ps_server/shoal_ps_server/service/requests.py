"""Converts protobuf messages to immutable values. Only this module checks whether requests are well
formed.

Checks that depend on the server's state (such as whether the member is admitted, or whether the
partition has values) are made by the owner of that state. Every error names the field, its value
and the expectation.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Final

import numpy as np
from shoal_common.errors import InvalidRequestError, LimitError, UnknownResourceError
from shoal_common.formats import codecs
from shoal_common.formats.wire import LARGEST_PAYLOAD_BYTES
from shoal_common.tables.values import Ids
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_ps_server.consistency.clocks import Consistency, ConsistencyMode
from shoal_ps_server.shard.layout import Layout, PartitionSpec
from shoal_ps_server.shard.optimizer import OptimizerSettings, ParameterGroup, optimizer_settings
from shoal_ps_server.shard.payload import ID_BYTES, UploadHeader, check_ids, describe

_FIRST_MESSAGE_WAIT: Final = timedelta(seconds=10)
LONGEST_WAIT: Final = timedelta(minutes=10)
MODES: Final[Mapping[int, ConsistencyMode]] = {
    pb.Consistency.MODE_ASP: ConsistencyMode.ASP,
    pb.Consistency.MODE_SSP: ConsistencyMode.SSP,
    pb.Consistency.MODE_BSP: ConsistencyMode.BSP,
}


class UploadKind(enum.Enum):
    """Kind of an upload stream."""

    INITIALIZE = "Initialize"
    PUSH = "Push"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A partition requested in a pull."""

    spec: PartitionSpec
    newer_than: int
    ids: Ids | None = None
    """Requested rows of a bucket; None if the partition is not a bucket."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A validated PullRequest."""

    member_id: str
    """Id of the pulling member; empty for a read-only client."""
    generation: int
    partitions: tuple[Wanted, ...]
    clock: int
    wait: timedelta
    checksums: bool
    codec: int
    """RAW, or one of `codecs.FOR_VALUES`. Values that the codec would not make smaller are sent
    raw."""


@dataclass(frozen=True, kw_only=True)
class HyperparameterChange:
    """Contents of a SetHyperparametersRequest."""

    revision: int
    hyperparameters: Mapping[str, float]
    groups: tuple[ParameterGroup, ...]


def check_job(job_id: str, expected: str) -> None:
    """Raises UnknownResourceError / JOB_UNKNOWN if a request is for a job other than `expected`."""
    if job_id != expected:
        raise UnknownResourceError(
            f"this server holds job {expected!r}, not {job_id!r}; ask the coordinator for the "
            "servers of that job",
            reason="JOB_UNKNOWN",
        )


def parse_upload_header(header: pb.PushHeader, layout: Layout, kind: UploadKind) -> UploadHeader:
    """Parses the header of a partition. Must be called before its payload is stored.

    Raises:
        LimitError: PAYLOAD_TOO_LARGE.
        UnknownResourceError: PARTITION_UNKNOWN.
        InvalidRequestError: DTYPE_MISMATCH, CODEC_UNSUPPORTED, PIECES_INVALID, ROWS_INVALID,
            LENGTH_MISMATCH, PAYLOAD_SIZE_MISMATCH, SEQUENCE_INVALID, REQUEST_INVALID.
    """
    if header.payload_bytes > LARGEST_PAYLOAD_BYTES:
        raise LimitError(
            f"payload_bytes={header.payload_bytes}: expected at most {LARGEST_PAYLOAD_BYTES} for "
            "a partition",
            reason="PAYLOAD_TOO_LARGE",
        )
    spec = partition_of(header.partition_id, layout)
    if header.dtype != spec.element.wire:
        raise InvalidRequestError(
            f"{describe(spec)}: dtype={_enum_name(pb.Dtype, header.dtype)}: expected "
            f"{spec.element.name}",
            reason="DTYPE_MISMATCH",
        )
    if header.codec != pb.CODEC_RAW and kind is UploadKind.INITIALIZE:
        raise InvalidRequestError(
            f"{describe(spec)}: codec={_enum_name(pb.Codec, header.codec)}: expected CODEC_RAW "
            "for initial values",
            reason="CODEC_UNSUPPORTED",
        )
    absent = _absent_pieces(header, spec, kind)
    rows = _rows(header, spec, kind)
    length = spec.length_without(absent) if spec.bucket is None else rows * spec.bucket.dim
    nbytes = length * spec.element.itemsize + ID_BYTES * rows
    if header.length != length:
        raise InvalidRequestError(
            f"{describe(spec)}: length={header.length}: expected {length} elements",
            reason="LENGTH_MISMATCH",
        )
    if header.codec != pb.CODEC_RAW:
        codecs.check_size(
            header.codec, header.payload_bytes, length, len(spec.pieces) - len(absent)
        )
    elif header.payload_bytes != nbytes:
        raise InvalidRequestError(
            f"{describe(spec)}: payload_bytes={header.payload_bytes}, but {length} elements of "
            f"{spec.element.name} take {nbytes}",
            reason="PAYLOAD_SIZE_MISMATCH",
        )
    first = 1 if kind is UploadKind.PUSH else 0
    if header.sequence < first:
        raise InvalidRequestError(
            f"{describe(spec)}: sequence={header.sequence}: expected {first} or more",
            reason="SEQUENCE_INVALID",
        )
    return UploadHeader(
        spec=spec,
        member_id=parse_member(header.member_id),
        generation=at_least("generation", header.generation, 0),
        sequence=header.sequence,
        base_version=at_least("base_version", header.base_version, first),
        clock=at_least("clock", header.clock, 0),
        codec=header.codec,
        payload_bytes=header.payload_bytes,
        checksum=header.checksum,
        batch=header.batch,
        absent=absent,
        finished_batches=tuple(header.finished_batches),
        rows=rows,
    )


def parse_pull(request: pb.PullRequest, layout: Layout) -> Pull:
    """Parses a pull request. Raises UnknownResourceError / PARTITION_UNKNOWN, LimitError /
    PAYLOAD_TOO_LARGE and InvalidRequestError."""
    longest_ms = LONGEST_WAIT // timedelta(milliseconds=1)
    if not 0 <= request.wait_ms <= longest_ms:
        raise InvalidRequestError(f"wait_ms={request.wait_ms}: expected 0 to {longest_ms}")
    wanted = tuple(
        _wanted(each, partition_of(each.partition_id, layout)) for each in request.partitions
    )
    if len({each.spec.partition_id for each in wanted}) < len(wanted):
        raise InvalidRequestError(
            "partitions contains a duplicate; request each partition at most once"
        )
    return Pull(
        member_id=parse_member(request.member_id) if request.member_id else "",
        generation=at_least("generation", request.generation, 0),
        partitions=wanted
        or tuple(
            Wanted(spec=spec, newer_than=0)
            for spec in layout.partitions.values()
            if spec.bucket is None
        ),
        clock=at_least("clock", request.clock, 0),
        wait=timedelta(milliseconds=request.wait_ms),
        checksums=request.checksums,
        codec=_pull_codec(request.codec),
    )


def _wanted(message: pb.PartitionPull, spec: PartitionSpec) -> Wanted:
    newer_than = at_least("newer_than", message.newer_than, 0)
    if spec.bucket is None:
        if message.ids:
            raise InvalidRequestError(
                f"{describe(spec)}: ids are set, but only buckets of a sparse table have "
                "rows; leave ids empty",
                reason="ROWS_INVALID",
            )
        return Wanted(spec=spec, newer_than=newer_than)
    if len(message.ids) % ID_BYTES:
        raise InvalidRequestError(
            f"{describe(spec)}: ids has {len(message.ids)} bytes; expected 8 bytes per id",
            reason="ROWS_INVALID",
        )
    ids = np.frombuffer(message.ids, dtype="<i8").astype(np.int64)
    if (nbytes := len(ids) * spec.bucket.dim * spec.element.itemsize) > LARGEST_PAYLOAD_BYTES:
        raise LimitError(
            f"{describe(spec)}: {len(ids)} rows take {nbytes} bytes; request at most "
            f"{LARGEST_PAYLOAD_BYTES} at once",
            reason="PAYLOAD_TOO_LARGE",
        )
    check_ids(spec, spec.bucket, ids)
    return Wanted(spec=spec, newer_than=newer_than, ids=ids)


def _pull_codec(codec: int) -> int:
    if codec in (codecs.UNSPECIFIED, codecs.RAW):
        return codecs.RAW
    if codec not in codecs.FOR_VALUES:
        raise InvalidRequestError(
            f"codec={codecs.name(codec)} cannot be used in a pull, since it omits values; "
            f"expected CODEC_RAW, {', '.join(map(codecs.name, codecs.FOR_VALUES))}",
            reason="CODEC_UNSUPPORTED",
        )
    return codec


def parse_optimizer(spec: pb.OptimizerSpec, tensors: frozenset[str] | None) -> OptimizerSettings:
    """Parses an optimizer. Raises InvalidRequestError / OPTIMIZER_INVALID.

    `tensors`: all tensors of the job, used to check parameter groups; None if they are unknown.
    """
    return optimizer_settings(
        name=spec.name,
        hyperparameters=dict(spec.hyperparameters),
        groups=_parameter_groups(spec.groups),
        tensors=tensors,
        delay_compensation=spec.delay_compensation,
    )


async def parse_begin(requests: AsyncIterator[pb.FollowRequest]) -> pb.FollowBegin:
    """Waits for the first message of a Follow stream and returns its FollowBegin. Raises
    InvalidRequestError if the message does not arrive in time or is of a different kind."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_WAIT.total_seconds()):
            async for request in requests:
                if request.WhichOneof("message") == "begin":
                    begin: pb.FollowBegin = request.begin
                    return begin
                break
    raise InvalidRequestError(
        "a Follow stream does not begin with `begin`; send it first", reason="STREAM_MALFORMED"
    )


def parse_consistency(consistency: pb.Consistency) -> Consistency:
    """Parses a consistency model. Raises InvalidRequestError / CONSISTENCY_INVALID."""
    mode = MODES.get(consistency.mode)
    if mode is None:
        raise InvalidRequestError(
            f"consistency.mode={_enum_name(pb.Consistency.Mode, consistency.mode)}: expected "
            "MODE_ASP, MODE_SSP or MODE_BSP",
            reason="CONSISTENCY_INVALID",
        )
    if consistency.bound < 0 or (mode is not ConsistencyMode.SSP and consistency.bound):
        raise InvalidRequestError(
            f"consistency.bound={consistency.bound}: expected 0 or more with ssp, and 0 with asp "
            "and bsp",
            reason="CONSISTENCY_INVALID",
        )
    return Consistency(mode=mode, bound=consistency.bound)


def parse_hyperparameter_change(request: pb.SetHyperparametersRequest) -> HyperparameterChange:
    """Parses a SetHyperparametersRequest. Raises InvalidRequestError."""
    return HyperparameterChange(
        revision=at_least("revision", request.revision, 1),
        hyperparameters=dict(request.hyperparameters),
        groups=_parameter_groups(request.groups),
    )


def parse_member(member_id: str) -> str:
    """Checks a member id. Raises InvalidRequestError."""
    if not 1 <= len(member_id) <= 128:
        raise InvalidRequestError(f"member_id={member_id[:128]!r}: expected 1 to 128 characters")
    return member_id


def at_least(field: str, value: int, least: int) -> int:
    """Checks that `value` is at least `least`. Raises InvalidRequestError."""
    if value < least:
        raise InvalidRequestError(f"{field}={value}: expected {least} or more")
    return value


def _parameter_groups(groups: Iterable[pb.ParameterGroup]) -> tuple[ParameterGroup, ...]:
    return tuple(
        ParameterGroup(
            tensors=frozenset(group.tensors), hyperparameters=dict(group.hyperparameters)
        )
        for group in groups
    )


def partition_of(partition_id: int, layout: Layout) -> PartitionSpec:
    """Returns a partition of this server. Raises UnknownResourceError / PARTITION_UNKNOWN if the
    partition does not exist or belongs to a different server."""
    spec = layout.partitions.get(partition_id)
    if spec is not None:
        return spec
    owner = layout.owners.get(partition_id)
    where = (
        f"it belongs to server {owner}, but this is server {layout.server_index}"
        if owner is not None
        else "the job has no such partition"
    )
    raise UnknownResourceError(
        f"partition {partition_id}: {where} (shard map epoch {layout.epoch})",
        reason="PARTITION_UNKNOWN",
    )


def _absent_pieces(header: pb.PushHeader, spec: PartitionSpec, kind: UploadKind) -> tuple[int, ...]:
    absent = tuple(header.absent_pieces)
    if not absent:
        return ()
    if kind is UploadKind.INITIALIZE:
        raise InvalidRequestError(
            f"{describe(spec)}: absent_pieces: expected none for initial values",
            reason="PIECES_INVALID",
        )
    count = len(spec.pieces)
    if (
        absent[0] < 0
        or absent[-1] >= count
        or len(absent) >= count
        or any(a >= b for a, b in pairwise(absent))
    ):
        raise InvalidRequestError(
            f"{describe(spec)}: "
            f"absent_pieces={list(absent[:5])}{' and more' if len(absent) > 5 else ''}: expected "
            f"ascending positions from 0 to {count - 1}, but not all of them",
            reason="PIECES_INVALID",
        )
    return absent


def _rows(header: pb.PushHeader, spec: PartitionSpec, kind: UploadKind) -> int:
    if spec.bucket is None:
        if header.rows:
            raise InvalidRequestError(
                f"{describe(spec)}: rows={header.rows}: expected 0, since the partition is "
                "not a bucket of a sparse table",
                reason="ROWS_INVALID",
            )
        return 0
    if kind is UploadKind.INITIALIZE:
        raise InvalidRequestError(
            f"{describe(spec)}: the rows of a sparse table need no initial values; send only Push",
            reason="ROWS_INVALID",
        )
    if header.codec != pb.CODEC_RAW:
        raise InvalidRequestError(
            f"{describe(spec)}: codec={_enum_name(pb.Codec, header.codec)}: expected CODEC_RAW "
            "for rows",
            reason="CODEC_UNSUPPORTED",
        )
    return at_least("rows", header.rows, 0)


def _enum_name(
    enum_type: type[pb.Dtype] | type[pb.Codec] | type[pb.Consistency.Mode], value: int
) -> str:
    names: dict[int, str] = {number: name for name, number in enum_type.items()}
    return names.get(value, str(value))
