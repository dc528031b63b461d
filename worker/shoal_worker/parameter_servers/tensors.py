"""A module's parameters and gradients in host memory, for sending and receiving.

A contiguous CPU tensor uses its own memory. A tensor on a device, or with a non-contiguous layout,
uses a copy in host memory. A `HostTensor` may be used only on the training thread, except that the
threads that call the servers read and write its values during an exchange.

Also defines the parts of tensors on each server (`Piece`, `Partition`, `ServerShare`), as read from
the coordinator's shard map; the gradients of a step (`Iteration`); and their encoded form
(`Payload`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    InvalidRequestError,
    PreconditionError,
)
from shoal_common.formats import codecs
from shoal_common.formats.wire import DtypeInfo, dtype_info
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb
from torch import nn

from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.pushes import CompressedPushes
from shoal_worker.compression.registry import parse_compression
from shoal_worker.parameter_servers.options import Revision
from shoal_worker.parameter_servers.pushed_rows import PushedRows, buckets_of_servers

# --------------------------------------------------------------------------- tensors in host memory

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_EMPTY = memoryview(bytearray())


class HostTensor:
    """A parameter of the module that is declared to the servers, with a copy in host memory if it
    needs one."""

    def __init__(
        self, name: str, parameter: nn.Parameter, *, trained: bool, apart: bool = False
    ) -> None:
        """Declares a parameter.

        `trained`: True if the optimizer updates the parameter, which is then pushed and pulled in
        every step. Other parameters are pulled only once, for their initial values. `apart`: True
        if the parameter must not share a partition with other tensors.

        Raises:
            ConfigurationError: the servers do not support the dtype.
        """
        if parameter.dtype not in _NAMES:
            raise ConfigurationError(
                f"parameter {name!r} has dtype {parameter.dtype}, but parameter servers support "
                f"{', '.join(_NAMES.values())}; convert it, or register it as a buffer"
            )
        self.name = name
        self.parameter = parameter
        self.trained = trained
        self._apart = apart
        self.dtype: DtypeInfo = dtype_info(_NAMES[parameter.dtype])
        self._shape, self._torch_dtype = parameter.shape, parameter.dtype
        self._values: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        """The parameter's own memory, as last returned by `target`; None before that."""

    @property
    def spec(self) -> coordinator_pb.TensorSpec:
        """Returns the tensor's specification for the DeclareTensors RPC."""
        shape, dtype = list(self._shape), self.dtype.name
        return coordinator_pb.TensorSpec(
            name=self.name, shape=shape, dtype=dtype, frozen=not self.trained, apart=self._apart
        )

    @property
    def row(self) -> int:
        """Number of elements in one row, which is the slice of the tensor at one index of the first
        dimension."""
        return math.prod(self._shape[1:])

    def target(self) -> torch.Tensor:
        """Returns the flat tensor that receives values; `publish` copies them to the parameter.

        Raises:
            ConfigurationError: the parameter's shape or dtype has changed since `as_distributed`
                was called.
        """
        self._check_unchanged()
        if _is_host_memory(self.parameter):
            if self._own is None or self._own.data_ptr() != self.parameter.data_ptr():
                self._own = self.parameter.detach().reshape(-1)
            return self._own
        if self._values is None:
            self._values = _host_like(self.parameter)
            # so that pulling a part leaves the rest unchanged
            self._values.copy_(self.parameter.detach())
        return self._values.reshape(-1)

    def values(self) -> torch.Tensor:
        """Returns the parameter's current values as a flat tensor. Raises the same errors as
        `target`."""
        flat = self.target()
        if self._values is not None and not _is_host_memory(self.parameter):
            self._values.copy_(self.parameter.detach())
        return flat

    def publish(self) -> None:
        """Copies the received values into the parameter. On a device, the copy is queued on the
        device's stream."""
        if self._values is not None and not _is_host_memory(self.parameter):
            self.parameter.detach().copy_(self._values, non_blocking=True)

    def gradient(self) -> torch.Tensor | None:
        """Returns the flat gradient; None if the parameter has no gradient in this step. If the
        gradient is on a device, the returned copy is complete only once the device's stream has
        executed it."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        self._check_unchanged()
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.dtype is self._torch_dtype and _is_host_memory(gradient):
            return gradient.reshape(-1)
        if self._gradient is None:
            self._gradient = _host_like(self.parameter)
        self._gradient.copy_(gradient, non_blocking=True)
        return self._gradient.reshape(-1)

    def _check_unchanged(self) -> None:
        parameter = self.parameter
        if parameter.shape != self._shape or parameter.dtype is not self._torch_dtype:
            raise ConfigurationError(
                f"parameter {self.name!r} is now {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}, but the servers have {self._torch_dtype} of shape "
                f"{tuple(self._shape)}; convert the model before as_distributed"
            )


def gradients(tensors: Iterable[HostTensor]) -> dict[str, torch.Tensor]:
    """Returns the gradients, flat and in host memory: name -> tensor. Parameters without a gradient
    are omitted. Blocks until copies from a device are complete. The gradients must not be modified
    until they are sent.
    """
    found: dict[str, torch.Tensor] = {}
    devices: set[torch.device] = set()
    for tensor in tensors:
        if (gradient := tensor.gradient()) is not None:
            found[tensor.name] = gradient
            devices.add(tensor.parameter.device)
    _synchronize(devices)
    return found


def publish(tensors: Sequence[HostTensor]) -> None:
    """Copies the received values into the parameters. Returns once the copies are complete."""
    for tensor in tensors:
        tensor.publish()
    # These writes must not be hidden from autograd: a graph that saved the older values must detect
    # them, as after any in-place update.
    torch.autograd.graph.increment_version([tensor.parameter for tensor in tensors])
    _synchronize({tensor.parameter.device for tensor in tensors})


def check_gradients(tensors: Iterable[HostTensor]) -> None:
    """Rejects gradients that servers would reject, before anything is sent.

    Raises:
        ConfigurationError: a gradient is sparse.
        InvalidRequestError (GRADIENT_NOT_FINITE): a gradient contains NaN or infinite values; the
            message names the parameter.
    """
    found = [
        (tensor.name, tensor.parameter.grad)
        for tensor in tensors
        if tensor.parameter.grad is not None
    ]
    for name, gradient in found:
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {name!r} has layout {gradient.layout}, but parameter servers "
                "support only dense gradients; create the embedding with sparse=False"
            )
    for name, culprits in _not_finite(found):
        raise InvalidRequestError(
            f"{culprits} values in the gradient of {name!r} are NaN or infinite; nothing was "
            "pushed. Skip the batch (optimizer.zero_grad(), then optimizer.step()), clip "
            "gradients, or lower the learning rate",
            reason="GRADIENT_NOT_FINITE",
        )


def check_outer_gradients(found: Mapping[str, torch.Tensor], *, steps: int) -> None:
    """Checks the result of a round of `steps` inner steps, before anything is sent, for values that
    servers would reject.

    Raises:
        InvalidRequestError (GRADIENT_NOT_FINITE): the result contains NaN or infinite values; the
            message names the parameter.
    """
    for name, culprits in _not_finite(list(found.items())):
        raise InvalidRequestError(
            f"after {steps} inner steps, {culprits} values of {name!r} were NaN or infinite; "
            "nothing was pushed, and the values were reset to those at the start of the round. "
            "Skip the round (optimizer.zero_grad(), then optimizer.step()), clip gradients, or "
            "lower the learning rate; the inner optimizer's state may contain such values as well",
            reason="GRADIENT_NOT_FINITE",
        )


def _not_finite(found: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """Yields the names of tensors with NaN or infinite values, and the number of such values."""
    if _surely_finite([tensor for _, tensor in found]):
        return
    for name, tensor in found:
        if culprits := int(tensor.isfinite().logical_not_().sum()):
            yield name, f"{culprits} of {tensor.numel()}"


@torch.no_grad()
def _surely_finite(found: Sequence[torch.Tensor]) -> bool:
    """Returns whether all elements are known to be finite. Checks their sum, which is not finite if
    any element is not; this is much cheaper than isfinite(). Since a sum of finite elements can
    overflow, False means that some elements may not be finite.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in found:
        wide = torch.float64 if gradient.dtype is torch.float64 else torch.float32
        sums.setdefault((gradient.device, wide), []).append(gradient.sum(dtype=wide))
    # one synchronization for all tensors, because each one waits for the device
    return all(bool(torch.stack(totals).isfinite().all()) for totals in sums.values())


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _is_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda"
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns a view of the bytes of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return _EMPTY
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Contiguous range of one tensor's elements."""

    tensor: HostTensor
    begin: int
    """Index of the first element in the flat tensor."""
    end: int
    """Index after the last element in the flat tensor."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the matrix as which codecs treat this piece."""
        return codecs.piece_shape(offset=self.begin, length=self.length, row=self.tensor.row)

    def of(self, memory: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns this piece as a view of `memory`, which maps names to flat tensors."""
        whole = memory[self.tensor.name]
        return whole if self.length == whole.numel() else whole[self.begin : self.end]


class Partition:
    """Consecutive pieces of tensors that have the same dtype: the unit of pushes and pulls."""

    def __init__(self, partition_id: int, pieces: Sequence[Piece]) -> None:
        self.partition_id = partition_id
        self.pieces = tuple(pieces)
        self.dtype: DtypeInfo = pieces[0].tensor.dtype
        self.length = sum(piece.length for piece in pieces)
        """Number of elements."""
        self.size_bytes = self.length * self.dtype.item_bytes
        self.trained = any(piece.tensor.trained for piece in pieces)
        """True if any part of the partition is pushed and pulled in every step."""
        self._landing: torch.Tensor | None = None

    def absent_from(self, gradients: Collection[str]) -> tuple[int, ...]:
        """Returns the indices, within this partition, of the pieces whose tensors are missing from
        `gradients`."""
        return tuple(
            position
            for position, piece in enumerate(self.pieces)
            if piece.tensor.name not in gradients
        )

    def places(self, absent: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Returns the range (first element, end) of each piece within the partition. `absent`:
        indices of pieces to omit."""
        missing = frozenset(absent)
        bounds = pairwise(accumulate((piece.length for piece in self.pieces), initial=0))
        return tuple(each for position, each in enumerate(bounds) if position not in missing)

    def shapes(self, absent: Collection[int]) -> dict[int, tuple[int, int]]:
        """Returns the rows and columns of each piece, by the piece's index. `absent`: indices of
        pieces to omit."""
        missing = frozenset(absent)
        return {
            position: piece.shape
            for position, piece in enumerate(self.pieces)
            if position not in missing
        }

    def gathered(
        self, memory: Mapping[str, torch.Tensor], absent: Collection[int] = ()
    ) -> torch.Tensor:
        """Returns the concatenated pieces: a view if there is a single piece, otherwise a copy.
        `absent`: indices of pieces to omit. May be called from any thread."""
        missing = frozenset(absent)
        present = [
            piece.of(memory)
            for position, piece in enumerate(self.pieces)
            if position not in missing
        ]
        return present[0] if len(present) == 1 else torch.cat(present)

    def landing(self, memory: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns memory for receiving the partition; `landed` copies from it to the tensors."""
        if len(self.pieces) == 1:
            return self.pieces[0].of(memory)
        if self._landing is None:
            self._landing = torch.empty(
                self.length, dtype=self.pieces[0].of(memory).dtype, device="cpu"
            )
        return self._landing

    def landed(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Copies the received data from `landing` to the tensors."""
        if self._landing is not None:
            into = [piece.of(memory) for piece in self.pieces]
            torch._foreach_copy_(
                into, list(self._landing.split([piece.length for piece in self.pieces]))
            )


@dataclass(frozen=True, kw_only=True)
class ServerShare:
    """The partitions on one server."""

    index: int
    address: str
    """Address (host:port) at the time when the map was read. A restarted server may have a
    different address."""
    epoch: int
    """Epoch of the shard map that contains this share."""
    partitions: tuple[Partition, ...]
    buckets: tuple[int, ...] = ()
    """Partitions that are buckets of sparse tables."""


def shares(
    shard_map: coordinator_pb.ShardMap, tensors: Sequence[HostTensor]
) -> tuple[ServerShare, ...]:
    """Returns the servers with at least one partition, by index.

    Raises:
        PreconditionError (SHARD_MAP_INCOMPLETE): a partition's server is not registered.
    """
    by_name: Mapping[str, HostTensor] = {tensor.name: tensor for tensor in tensors}
    partitions: dict[int, list[Partition]] = {}
    buckets = buckets_of_servers(shard_map)
    for partition in shard_map.partitions:
        if partition.HasField("bucket"):
            continue
        pieces = []
        for piece in partition.pieces:
            tensor = by_name[shard_map.tensors[piece.tensor_index].name]
            pieces.append(Piece(tensor=tensor, begin=piece.offset, end=piece.offset + piece.length))
        partitions.setdefault(partition.primary, []).append(
            Partition(partition.partition_id, pieces)
        )
    addresses = {server.server_index: server.address for server in shard_map.servers}
    holders = partitions.keys() | buckets.keys()
    missing = sorted(holders - addresses.keys())
    if missing:
        raise PreconditionError(
            f"the shard map assigns partitions to servers {missing}, but lists only servers "
            f"{sorted(addresses)}; start the missing parameter servers again",
            reason="SHARD_MAP_INCOMPLETE",
        )
    return tuple(
        ServerShare(
            index=index,
            address=addresses[index],
            epoch=shard_map.epoch,
            partitions=tuple(partitions.get(index, ())),
            buckets=buckets.get(index, ()),
        )
        for index in sorted(holders)
    )


# -------------------------------------------------------------------------------- what a step sends
#
# One step of a worker as reported to the servers, and the payloads of its gradients, raw or
# compressed. May be used only by the thread that calls the server: see `ServerLink`.


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The data that this worker sends to the servers at the end of a step."""

    clock: int
    """Number of iterations finished by this worker, including this one."""
    revision: Revision
    """Hyperparameters to apply the push with, unless the servers already have newer ones."""
    gradients: Mapping[str, torch.Tensor]
    """Tensor name -> its flat gradient in this step, in host memory. Tensors without a gradient are
    omitted.
    """
    pull: bool
    batch: int = 0
    """Key of the leased batch used to compute the gradients; 0: no batch."""
    in_part: bool = False
    """True if other calls push the rest of the batch. A call to `ParameterServers.finished` then
    marks the end of the batch."""
    rows: Mapping[int, PushedRows] = field(default_factory=dict)
    """Pushes to buckets of sparse tables, by partition."""


class Payload(NamedTuple):
    """The data sent for a partition."""

    partition: Partition | PushedRows
    absent: tuple[int, ...]
    """Indices, within the partition, of the pieces that are omitted."""
    length: int
    """Number of elements of the decoded payload."""
    codec: int
    data: memoryview
    rows: int = 0
    """Number of rows of a sparse table in the payload."""


class Payloads:
    """Creates payloads for partitions. A partition's compression state belongs to the thread that
    calls the partition's server."""

    def __init__(
        self, compressor: GradientCompressor | None, partitions: Iterable[int], *, stream: int
    ) -> None:
        """`compressor`: compressor of gradients; None: no compression. `partitions`: all partitions
        of the job, by number. `stream`: see `CompressedPushes`.
        """
        self._compressed = (
            {}
            if compressor is None
            else {each: CompressedPushes(compressor, stream=stream) for each in partitions}
        )

    def values(self, partitions: Iterable[Partition]) -> Iterator[Payload]:
        """Yields the payloads of the tensors' values, each created just before it is sent."""
        for partition in partitions:
            memory = {piece.tensor.name: piece.tensor.values() for piece in partition.pieces}
            yield Payload(
                partition,
                (),
                partition.length,
                pb.CODEC_RAW,
                tensor_bytes(partition.gathered(memory)),
            )

    def gradient(self, partition: Partition, iteration: Iteration) -> Callable[[], Payload]:
        """Returns a function that returns the payload of one push of a partition. Every call
        returns the same bytes, so a push can be retried. The outcome of the push must be reported
        with `settle` before the next push."""
        compressed = self._compressed.get(partition.partition_id)
        if compressed is None:
            return lambda: _as_it_is(partition, iteration.gradients)
        absent = partition.absent_from(iteration.gradients)
        gradient = partition.gathered(iteration.gradients, absent)
        codec, data = compressed.encode(
            gradient,
            partition=partition.partition_id,
            # Numbered by the clock, because the push may have a different sequence number in the
            # next attempt.
            sequence=iteration.clock,
            places=partition.places(absent) if absent else (),
            length=partition.length,
            shapes=partition.shapes(absent),
        )
        payload = Payload(partition, absent, gradient.numel(), codec, data)
        return lambda: payload

    def rows(self, pushed: PushedRows) -> Callable[[], Payload]:
        """Returns a function that returns the uncompressed payload of rows of a table."""
        payload = Payload(pushed, (), pushed.length, pb.CODEC_RAW, pushed.data, pushed.rows)
        return lambda: payload

    def settle(self, partitions: Iterable[int], *, applied: Collection[int]) -> None:
        """Reports the outcome of the last push of these partitions, so that the compression error
        is carried over correctly. `applied`: those that have applied the push; their new
        compression error is added to the next push. The other partitions will never apply the push
        and keep their previous compression error."""
        for partition_id in partitions:
            compressed = self._compressed.get(partition_id)
            if compressed is not None and compressed.unanswered:
                compressed.settle(partition_id, applied=partition_id in applied)


def _as_it_is(partition: Partition, gradients: Mapping[str, torch.Tensor]) -> Payload:
    absent = partition.absent_from(gradients)
    gradient = partition.gathered(gradients, absent)
    return Payload(partition, absent, gradient.numel(), pb.CODEC_RAW, tensor_bytes(gradient))


class PulledValues:
    """Decodes values that the servers have sent in the compression that the user chose."""

    def __init__(self, compression: str | None) -> None:
        """`compression`: value of `AsyncOptions.pull_compression`."""
        self._compressor = parse_compression(compression)

    @property
    def codec(self) -> pb.Codec:
        """The requested codec. A server responds with this codec or with CODEC_RAW."""
        return (
            pb.CODEC_RAW if self._compressor is None else pb.Codec.ValueType(self._compressor.codec)
        )

    def room(self, codec: int, length: int) -> torch.Tensor:
        """Returns memory in which to receive the payload of `length` values.

        Raises:
            CorruptDataError (STREAM_MALFORMED): the codec was not requested.
        """
        if codec != self.codec:
            raise CorruptDataError(
                f"values arrived in codec {codec}; expected {self.codec} or CODEC_RAW",
                reason="STREAM_MALFORMED",
            )
        return torch.empty(codecs.payload_bytes(codec, length), dtype=torch.uint8)

    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        """Decodes a payload, received in the memory from `room`, into a flat host tensor."""
        assert self._compressor is not None, "the codec was not requested"
        out = into if into.dtype is torch.float32 else torch.empty(into.shape, dtype=torch.float32)
        self._compressor.decompress_into(payload, out)
        if out is not into:
            into.copy_(out)
