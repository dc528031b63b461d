from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_FLOAT16: _ClassVar[Codec]
    CODEC_BFLOAT16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_SIGN: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]
    CODEC_RANDOMK: _ClassVar[Codec]
    CODEC_POWERSGD: _ClassVar[Codec]
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT64: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_FLOAT16: Codec
CODEC_BFLOAT16: Codec
CODEC_INT8: Codec
CODEC_SIGN: Codec
CODEC_TOPK: Codec
CODEC_RANDOMK: Codec
CODEC_POWERSGD: Codec

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "hyperparameters", "groups", "delay_compensation")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DELAY_COMPENSATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    hyperparameters: _containers.ScalarMap[str, float]
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    delay_compensation: float
    def __init__(self, name: _Optional[str] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ..., delay_compensation: _Optional[float] = ...) -> None: ...

class ParameterGroup(_message.Message):
    __slots__ = ("tensors", "hyperparameters")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    hyperparameters: _containers.ScalarMap[str, float]
    def __init__(self, tensors: _Optional[_Iterable[str]] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("mode", "bound")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Consistency.Mode]
        MODE_ASP: _ClassVar[Consistency.Mode]
        MODE_SSP: _ClassVar[Consistency.Mode]
        MODE_BSP: _ClassVar[Consistency.Mode]
    MODE_UNSPECIFIED: Consistency.Mode
    MODE_ASP: Consistency.Mode
    MODE_SSP: Consistency.Mode
    MODE_BSP: Consistency.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    mode: Consistency.Mode
    bound: int
    def __init__(self, mode: _Optional[_Union[Consistency.Mode, str]] = ..., bound: _Optional[int] = ...) -> None: ...

class ConfigureOptimizerRequest(_message.Message):
    __slots__ = ("job_id", "optimizer", "consistency")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    optimizer: OptimizerSpec
    consistency: Consistency
    def __init__(self, job_id: _Optional[str] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ...) -> None: ...

class ConfigureOptimizerResponse(_message.Message):
    __slots__ = ("configured",)
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    configured: bool
    def __init__(self, configured: _Optional[bool] = ...) -> None: ...

class SetHyperparametersRequest(_message.Message):
    __slots__ = ("job_id", "revision", "hyperparameters", "groups")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    revision: int
    hyperparameters: _containers.ScalarMap[str, float]
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    def __init__(self, job_id: _Optional[str] = ..., revision: _Optional[int] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ...) -> None: ...

class SetHyperparametersResponse(_message.Message):
    __slots__ = ("applied",)
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    applied: bool
    def __init__(self, applied: _Optional[bool] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("job_id", "member_id", "generation", "partition_id", "shard_map_epoch", "sequence", "base_version", "clock", "dtype", "codec", "length", "payload_bytes", "checksum", "batch", "absent_pieces", "finished_batches", "rows")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ABSENT_PIECES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    generation: int
    partition_id: int
    shard_map_epoch: int
    sequence: int
    base_version: int
    clock: int
    dtype: Dtype
    codec: Codec
    length: int
    payload_bytes: int
    checksum: int
    batch: int
    absent_pieces: _containers.RepeatedScalarFieldContainer[int]
    finished_batches: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., partition_id: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., base_version: _Optional[int] = ..., clock: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., codec: _Optional[_Union[Codec, str]] = ..., length: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., batch: _Optional[int] = ..., absent_pieces: _Optional[_Iterable[int]] = ..., finished_batches: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PartitionResult]
    def __init__(self, results: _Optional[_Iterable[_Union[PartitionResult, _Mapping]]] = ...) -> None: ...

class PartitionResult(_message.Message):
    __slots__ = ("partition_id", "version", "staleness", "duplicate", "known_batch")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BATCH_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    version: int
    staleness: int
    duplicate: bool
    known_batch: bool
    def __init__(self, partition_id: _Optional[int] = ..., version: _Optional[int] = ..., staleness: _Optional[int] = ..., duplicate: _Optional[bool] = ..., known_batch: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "generation", "shard_map_epoch", "partitions", "clock", "wait_ms", "checksums", "codec")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    generation: int
    shard_map_epoch: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionPull]
    clock: int
    wait_ms: int
    checksums: bool
    codec: Codec
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionPull, _Mapping]]] = ..., clock: _Optional[int] = ..., wait_ms: _Optional[int] = ..., checksums: _Optional[bool] = ..., codec: _Optional[_Union[Codec, str]] = ...) -> None: ...

class PartitionPull(_message.Message):
    __slots__ = ("partition_id", "newer_than", "ids")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NEWER_THAN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    newer_than: int
    ids: bytes
    def __init__(self, partition_id: _Optional[int] = ..., newer_than: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("partition_id", "version", "dtype", "codec", "length", "payload_bytes", "unchanged", "checksum")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    version: int
    dtype: Dtype
    codec: Codec
    length: int
    payload_bytes: int
    unchanged: bool
    checksum: int
    def __init__(self, partition_id: _Optional[int] = ..., version: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., codec: _Optional[_Union[Codec, str]] = ..., length: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., unchanged: _Optional[bool] = ..., checksum: _Optional[int] = ...) -> None: ...

class PullChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ReadRowsRequest(_message.Message):
    __slots__ = ("job_id", "shard_map_epoch", "partition_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    shard_map_epoch: int
    partition_id: int
    def __init__(self, job_id: _Optional[str] = ..., shard_map_epoch: _Optional[int] = ..., partition_id: _Optional[int] = ...) -> None: ...

class RowsHeader(_message.Message):
    __slots__ = ("partition_id", "payload_bytes", "checksum", "version", "job_id", "member_id", "generation", "shard_map_epoch", "restoration")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESTORATION_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    payload_bytes: int
    checksum: int
    version: int
    job_id: str
    member_id: str
    generation: int
    shard_map_epoch: int
    restoration: int
    def __init__(self, partition_id: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., version: _Optional[int] = ..., job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., restoration: _Optional[int] = ...) -> None: ...

class RowsChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: RowsHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[RowsHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class RestoreRowsResponse(_message.Message):
    __slots__ = ("version", "duplicate")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    duplicate: bool
    def __init__(self, version: _Optional[int] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class OpenDataRequest(_message.Message):
    __slots__ = ("job_id", "member_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ...) -> None: ...

class OpenDataResponse(_message.Message):
    __slots__ = ("ticket", "tcp_port", "memory_name")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NAME_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    tcp_port: int
    memory_name: str
    def __init__(self, ticket: _Optional[bytes] = ..., tcp_port: _Optional[int] = ..., memory_name: _Optional[str] = ...) -> None: ...

class AdvanceClockRequest(_message.Message):
    __slots__ = ("job_id", "member_id", "clock", "has_read", "place", "generation", "shard_map_epoch")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    HAS_READ_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    member_id: str
    clock: int
    has_read: bool
    place: int
    generation: int
    shard_map_epoch: int
    def __init__(self, job_id: _Optional[str] = ..., member_id: _Optional[str] = ..., clock: _Optional[int] = ..., has_read: _Optional[bool] = ..., place: _Optional[int] = ..., generation: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class AdvanceClockResponse(_message.Message):
    __slots__ = ("slowest_clock",)
    SLOWEST_CLOCK_FIELD_NUMBER: _ClassVar[int]
    slowest_clock: int
    def __init__(self, slowest_clock: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("path", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("begin", "kept")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    begin: FollowBegin
    kept: FollowKept
    def __init__(self, begin: _Optional[_Union[FollowBegin, _Mapping]] = ..., kept: _Optional[_Union[FollowKept, _Mapping]] = ...) -> None: ...

class FollowBegin(_message.Message):
    __slots__ = ("job_id", "server_id", "epoch", "format")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server_id: str
    epoch: int
    format: int
    def __init__(self, job_id: _Optional[str] = ..., server_id: _Optional[str] = ..., epoch: _Optional[int] = ..., format: _Optional[int] = ...) -> None: ...

class FollowKept(_message.Message):
    __slots__ = ("position", "whole")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    position: int
    whole: bool
    def __init__(self, position: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class FollowChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: FollowHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[FollowHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FollowHeader(_message.Message):
    __slots__ = ("kind", "fields", "payload_bytes", "position")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[FollowHeader.Kind]
        KIND_STATE: _ClassVar[FollowHeader.Kind]
        KIND_PARTITION: _ClassVar[FollowHeader.Kind]
        KIND_WHOLE: _ClassVar[FollowHeader.Kind]
        KIND_RECORD: _ClassVar[FollowHeader.Kind]
    KIND_UNSPECIFIED: FollowHeader.Kind
    KIND_STATE: FollowHeader.Kind
    KIND_PARTITION: FollowHeader.Kind
    KIND_WHOLE: FollowHeader.Kind
    KIND_RECORD: FollowHeader.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    kind: FollowHeader.Kind
    fields: bytes
    payload_bytes: int
    position: int
    def __init__(self, kind: _Optional[_Union[FollowHeader.Kind, str]] = ..., fields: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class TakePartitionsResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class GetServerRequest(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    def __init__(self, member_id: _Optional[str] = ...) -> None: ...

class GetServerResponse(_message.Message):
    __slots__ = ("server_id", "job_id", "server_index", "stored_bytes", "shard_map_epoch", "pushes_applied", "pushes_deduplicated", "optimizer", "consistency", "partitions", "clocks", "iterations")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class IterationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUSHES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_DEDUPLICATED_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    job_id: str
    server_index: int
    stored_bytes: int
    shard_map_epoch: int
    pushes_applied: int
    pushes_deduplicated: int
    optimizer: OptimizerSpec
    consistency: Consistency
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionVersion]
    clocks: _containers.ScalarMap[str, int]
    iterations: _containers.ScalarMap[str, int]
    def __init__(self, server_id: _Optional[str] = ..., job_id: _Optional[str] = ..., server_index: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., pushes_applied: _Optional[int] = ..., pushes_deduplicated: _Optional[int] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., partitions: _Optional[_Iterable[_Union[PartitionVersion, _Mapping]]] = ..., clocks: _Optional[_Mapping[str, int]] = ..., iterations: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PartitionVersion(_message.Message):
    __slots__ = ("partition_id", "version", "sequence", "moving", "restoration")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    RESTORATION_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    version: int
    sequence: int
    moving: bool
    restoration: int
    def __init__(self, partition_id: _Optional[int] = ..., version: _Optional[int] = ..., sequence: _Optional[int] = ..., moving: _Optional[bool] = ..., restoration: _Optional[int] = ...) -> None: ...
