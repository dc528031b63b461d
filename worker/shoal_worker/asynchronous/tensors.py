"""A module's parameters and gradients as bytes in host memory, to be sent from there and received into.

On the CPU these are the tensors' own memory: nothing is copied. Tensors of a device, and those that do not lie in one piece, go through
a host copy each. Belongs to the training thread, except for the bytes themselves, which the servers' threads read and write during an
exchange.

Beside them, as plain values: which part of which tensor lies on which server, as the coordinator's shard map says, and which gradients of a
step travel, and as what (`Iteration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from shoal_common.errors import ConfigurationError, InvalidRequestError, PreconditionError
from shoal_common.wire import DtypeInfo, dtype_info
from shoal_protos.v1 import coordinator_pb2 as coordinator_pb
from shoal_protos.v1 import parameter_server_pb2 as pb
from torch import nn

from shoal_worker.asynchronous.options import Revision
from shoal_worker.compression.base import GradientCompressor
from shoal_worker.compression.pushes import CompressedPushes

# ----------------------------------------------------------------------------------------------------------------------- tensors as bytes

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_EMPTY = memoryview(bytearray())


class HostTensor:
    """One declared tensor: a parameter of the module."""

    def __init__(self, name: str, parameter: nn.Parameter, *, trained: bool) -> None:
        """`trained`: the optimizer has it, so that it is pushed and pulled in every step; the others only get their first values.

        Raises:
            ConfigurationError: a dtype that servers do not hold.
        """
        if parameter.dtype not in _NAMES:
            raise ConfigurationError(
                f"parameter {name!r} has dtype {parameter.dtype}; parameter servers hold {', '.join(_NAMES.values())}: convert it, or make "
                "it a buffer"
            )
        self.name = name
        self.parameter = parameter
        self.trained = trained
        self.dtype: DtypeInfo = dtype_info(_NAMES[parameter.dtype])
        self._shape, self._torch_dtype = parameter.shape, parameter.dtype
        self._values: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    @property
    def spec(self) -> coordinator_pb.TensorSpec:
        """For DeclareTensors."""
        return coordinator_pb.TensorSpec(name=self.name, shape=list(self._shape), dtype=self.dtype.name)

    def target(self) -> memoryview:
        """The bytes into which values are received; `publish` makes them the parameter's.

        Raises:
            ConfigurationError: the parameter was given another shape or dtype since `as_distributed`.
        """
        self._check_unchanged()
        data = self.parameter.detach()
        if _is_host_memory(data):
            return tensor_bytes(data)
        if self._values is None:
            self._values = _host_like(data)
            self._values.copy_(data)  # so that a pull of a part leaves the rest as it is
        return tensor_bytes(self._values)

    def values(self) -> memoryview:
        """The bytes of the parameter's values as they are now. Raises as `target`."""
        view = self.target()
        data = self.parameter.detach()
        if self._values is not None and not _is_host_memory(data):
            self._values.copy_(data)
        return view

    def publish(self) -> None:
        """What was received becomes the parameter's values; on a device once its stream comes to it."""
        data = self.parameter.detach()
        if not _is_host_memory(data) and self._values is not None:
            data.copy_(self._values, non_blocking=True)
        else:
            # Written behind autograd's back: a graph that saved the older values must notice, as after any update in place.
            torch.autograd.graph.increment_version(self.parameter)

    def gradient(self) -> memoryview | None:
        """The gradient's bytes; None: there is none in this step. From a device, they are there once its stream has come to the copy."""
        if self.parameter.grad is None:
            return None
        self._check_unchanged()
        gradient = self.parameter.grad.detach()
        if gradient.dtype is self._torch_dtype and _is_host_memory(gradient):
            return tensor_bytes(gradient)
        if self._gradient is None:
            self._gradient = _host_like(self.parameter.detach())
        self._gradient.copy_(gradient, non_blocking=True)
        return tensor_bytes(self._gradient)

    def _check_unchanged(self) -> None:
        parameter = self.parameter
        if parameter.shape != self._shape or parameter.dtype is not self._torch_dtype:
            raise ConfigurationError(
                f"parameter {self.name!r} is now {parameter.dtype} of shape {tuple(parameter.shape)}, the servers hold "
                f"{self._torch_dtype} of {tuple(self._shape)}; convert the model before as_distributed"
            )


def gradients(tensors: Iterable[HostTensor]) -> list[memoryview | None]:
    """Each tensor's gradient in host memory; blocks until copies from a device are there. They must not change until they are sent."""
    views: list[memoryview | None] = []
    devices: set[torch.device] = set()
    for tensor in tensors:
        views.append(tensor.gradient())
        devices.add(tensor.parameter.device)
    _synchronize(devices)
    return views


def publish(tensors: Sequence[HostTensor]) -> None:
    """What was received becomes the parameters' values; returns when it has."""
    for tensor in tensors:
        tensor.publish()
    _synchronize({tensor.parameter.device for tensor in tensors})


def check_gradients(tensors: Iterable[HostTensor]) -> None:
    """Refuses gradients that servers would refuse, before anything is sent.

    Raises:
        ConfigurationError: a sparse one.
        InvalidRequestError (GRADIENT_NOT_FINITE): NaN or infinite values, naming the parameter.
    """
    found = [(tensor.name, tensor.parameter.grad.detach()) for tensor in tensors if tensor.parameter.grad is not None]
    for name, gradient in found:
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {name!r} is {gradient.layout}; parameter servers take dense ones: make the embedding with sparse=False"
            )
    if _surely_finite([gradient for _, gradient in found]):
        return
    for name, gradient in found:
        if culprits := int(gradient.isfinite().logical_not_().sum()):
            raise InvalidRequestError(
                f"the gradient of {name!r} has {culprits} of {gradient.numel()} values that are NaN or infinite; nothing was pushed. Leave "
                "the batch out (optimizer.zero_grad(), then optimizer.step()), clip, or lower the learning rate",
                reason="GRADIENT_NOT_FINITE",
            )


def _surely_finite(found: Sequence[torch.Tensor]) -> bool:
    """A sum is not finite when an element is not, and far cheaper than isfinite(). It can overflow by itself, so it only acquits."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in found:
        wide = torch.float64 if gradient.dtype is torch.float64 else torch.float32
        sums.setdefault(gradient.device, []).append(gradient.sum(dtype=wide).double())
    # One question per device, since each waits for what it has to do.
    return all(bool(torch.stack(totals).isfinite().all()) for totals in sums.values())


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _is_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    if tensor.numel() == 0:
        return _EMPTY
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition: a run of elements of one tensor, the unit that is pushed and pulled."""

    partition_id: int
    tensor: HostTensor
    begin: int
    """First byte in the tensor's memory."""
    length: int
    """Elements."""

    @property
    def dtype(self) -> DtypeInfo:
        """Element type of the tensor that this is a part of."""
        return self.tensor.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the partition."""
        return self.length * self.dtype.item_bytes

    def of(self, memory: memoryview) -> memoryview:
        """This part of the tensor's memory, or of memory laid out like it."""
        return memory[self.begin : self.begin + self.size_bytes]


@dataclass(frozen=True, kw_only=True)
class ServerShare:
    """What one server holds."""

    index: int
    address: str
    """host:port when the map was read; a restarted server may have another one."""
    epoch: int
    """The shard map's."""
    parts: tuple[Part, ...]


def shares(shard_map: coordinator_pb.ShardMap, tensors: Sequence[HostTensor]) -> tuple[ServerShare, ...]:
    """The servers that hold something, by index.

    Raises:
        PreconditionError (SHARD_MAP_INCOMPLETE): a partition's server is not registered.
    """
    by_name: Mapping[str, HostTensor] = {tensor.name: tensor for tensor in tensors}
    parts: dict[int, list[Part]] = {}
    for partition in shard_map.partitions:
        tensor = by_name[shard_map.tensors[partition.tensor_index].name]
        part = Part(
            partition_id=partition.partition_id,
            tensor=tensor,
            begin=partition.offset * tensor.dtype.item_bytes,
            length=partition.length,
        )
        parts.setdefault(partition.primary, []).append(part)
    addresses = {server.server_index: server.address for server in shard_map.servers}
    missing = sorted(parts.keys() - addresses.keys())
    if missing:
        raise PreconditionError(
            f"the shard map gives partitions to the servers {missing}, but names only {sorted(addresses)}; restart the job's parameter "
            "servers",
            reason="SHARD_MAP_INCOMPLETE",
        )
    return tuple(
        ServerShare(index=index, address=addresses[index], epoch=shard_map.epoch, parts=tuple(parts[index])) for index in sorted(parts)
    )


# ---------------------------------------------------------------------------------------------------------------------- what a step sends
#
# One step of a worker as the servers are told of it, and its gradients as the payloads that are sent: as they are, or compressed.
#
# Belongs to the thread that speaks to the server: see `ServerLink`.


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One step of this worker: what every server is told."""

    clock: int
    """How many iterations this worker has finished, this one included."""
    revision: Revision
    """Hyperparameters that the push is to be applied with, or newer ones."""
    gradients: Mapping[str, memoryview]
    """The gradients of this step as bytes, by the name of the tensor; a tensor without a gradient is left out."""
    pull: bool
    batch: int = 0
    """Key of the leased batch that the gradients were computed on; 0: none."""


class Payload(NamedTuple):
    """What is sent of a part."""

    part: Part
    codec: int
    data: memoryview


class Payloads:
    """Makes the payloads of one server's parts."""

    def __init__(self, compressor: GradientCompressor | None, *, stream: int) -> None:
        """`compressor`: of gradients; None: they are sent as they are. `stream`: see `CompressedPushes`."""
        self._compressed = None if compressor is None else CompressedPushes(compressor, stream=stream)

    def values(self, parts: Iterable[Part]) -> Iterator[Payload]:
        """The tensors' values, made as they are sent."""
        return (Payload(part, pb.CODEC_RAW, part.of(part.tensor.values())) for part in parts)

    @contextmanager
    def gradients(self, parts: Sequence[Part], iteration: Iteration) -> Iterator[list[Payload]]:
        """Gives the payloads of one push, the same bytes however often the push is attempted. Leaving the context without an error says
        that they were pushed: what compression left out is then owed to the next push. A server that knew the push's batch from another
        worker counts as well: the two owe the same kind of thing, once each."""
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
