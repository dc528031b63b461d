"""Process groups for torch that are written in Python.

`NamedGroup` provides the names that torch asks for. `ForwardingGroup` passes collectives to a
native group under their native names. `PythonGroup` converts every call into a `Collective`
(collective.py) or a transfer between two ranks.

torch calls collectives by many names: C++ code (DDP's reducer, functional collectives) uses the
names that its trampoline supports, and Python code (dist.*, FSDP2) uses all of them. A subclass of
`PythonGroup` only implements `_issue`, `_send` and `_receive`. This module does not depend on any
transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from shoal_common.errors import InvalidRequestError
from torch.distributed import Work
from torch.distributed.distributed_c10d import GroupName

from shoal_worker.backends.collective import Collective, Kind

if TYPE_CHECKING:
    # The overloads in the stub differ from the constructor and the collectives that C++ calls and
    # these classes implement.
    _ProcessGroup: TypeAlias = Any
else:
    _ProcessGroup = dist.ProcessGroup


class NamedGroup(_ProcessGroup):
    """Process group of rank `rank` among `size` ranks."""

    backend_name: ClassVar[str]
    """Name of the backend in torch's registry. Must differ from the names of torch's own backends,
    because torch would look for their C++ part in this group."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = GroupName(name)

    def getBackendName(self) -> str:  # noqa: N802 - looked up by this name
        """Returns the name of the backend. Called by torch's C++ code."""
        return self.backend_name

    @property
    def group_name(self) -> GroupName:
        """Name of the group in torch's functional collectives."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    def _get_backend(self, device: torch.device) -> NamedGroup:
        """Returns the group itself. torch asks the backend of a device for its capabilities; a
        group written in Python has no separate backend."""
        return self

    supports_coalescing: ClassVar[bool] = False
    supports_splitting: ClassVar[bool] = False
    supports_reconfigure: ClassVar[bool] = False


def _collective(name: str) -> Any:
    def issue(self: ForwardingGroup, *arguments: Any, **options: Any) -> Work:
        return self._issue(name, arguments, options)

    issue.__name__ = name
    issue.__doc__ = f"`ProcessGroup.{name}`."
    return issue


class ForwardingGroup(NamedGroup):
    """Process group that passes each collective to a native process group, under the name that the
    installed torch uses for it."""

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        """Starts the native group's collective called `name`."""
        raise NotImplementedError

    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective(
        "all_gather_single_coalesced"
    )
    _allgather_base = all_gather_single = _collective("all_gather_single")
    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    alltoall = _collective("alltoall")
    alltoall_base = all_to_all_single = _collective("all_to_all_single")
    barrier = _collective("barrier")
    broadcast = _collective("broadcast")
    gather = _collective("gather")
    recv = _collective("recv")
    recv_anysource = _collective("recv_anysource")
    reduce = _collective("reduce")
    reduce_scatter = _collective("reduce_scatter")
    _reduce_scatter_base = reduce_scatter_single = _collective("reduce_scatter_single")
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective(
        "reduce_scatter_single_coalesced"
    )
    scatter = _collective("scatter")
    send = _collective("send")


Tensors = list[torch.Tensor]


class PythonGroup(NamedGroup):
    """Process group that converts torch's calls into `Collective` objects and transfers, which its
    subclass carries out."""

    def _issue(self, call: Collective) -> Work:
        """Starts a collective."""
        raise NotImplementedError

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Starts sending a tensor to rank `peer`."""
        raise NotImplementedError

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        """Starts receiving a tensor from rank `peer`; None: from the first rank that sends."""
        raise NotImplementedError

    @property
    def _device_types(self) -> list[torch.device]:  # device for the bytes of object collectives
        return [torch.device("cpu")]

    # --- collectives, by torch's names

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Implements `ProcessGroup.allreduce`."""
        return self._in_place(Kind.ALL_REDUCE, tensors, op=_op(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Implements `ProcessGroup.reduce`."""
        return self._in_place(Kind.REDUCE, tensors, op=_op(opts), root=opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Implements `ProcessGroup.broadcast`."""
        return self._in_place(Kind.BROADCAST, tensors, root=opts.rootRank)

    def allgather(
        self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.allgather` for one or several tensors."""
        outputs = [
            part for parts in output_tensors for part in self._by_rank(parts, "output_tensors")
        ]
        return self._issue(
            Collective(
                kind=Kind.ALL_GATHER, inputs=input_tensors, outputs=outputs, result=output_tensors
            )
        )

    def allgather_coalesced(
        self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.allgather_coalesced`: the outputs are one list per rank, with
        one tensor per input."""
        by_input = [list(parts) for parts in zip(*output_lists, strict=True)]
        return self.allgather(by_input, input_list)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.all_gather_single_coalesced`."""
        parts = [part for output in outputs for part in self._rows(output, "output")]
        return self._issue(
            Collective(kind=Kind.ALL_GATHER, inputs=inputs, outputs=parts, result=outputs)
        )

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.all_gather_single`."""
        return self.all_gather_single_coalesced([output], [input])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        """Implements `ProcessGroup.reduce_scatter`."""
        parts = [part for given in inputs for part in self._by_rank(given, "input_tensors")]
        return self._issue(
            Collective(
                kind=Kind.REDUCE_SCATTER,
                inputs=parts,
                outputs=outputs,
                op=_op(opts),
                result=outputs,
            )
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.reduce_scatter_single_coalesced`."""
        return self.reduce_scatter(outputs, [self._rows(given, "input") for given in inputs], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:
        """Implements `ProcessGroup.reduce_scatter_single`."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        """Implements `ProcessGroup.gather`; only the root has outputs."""
        outputs = (
            self._by_rank(output_tensors[0], "output_tensors")
            if self.rank() == opts.rootRank
            else []
        )
        return self._issue(
            Collective(
                kind=Kind.GATHER,
                inputs=input_tensors,
                outputs=outputs,
                root=opts.rootRank,
                result=output_tensors,
            )
        )

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        """Implements `ProcessGroup.scatter`; only the root has inputs."""
        inputs = (
            self._by_rank(input_tensors[0], "input_tensors") if self.rank() == opts.rootRank else []
        )
        return self._issue(
            Collective(
                kind=Kind.SCATTER,
                inputs=inputs,
                outputs=output_tensors,
                root=opts.rootRank,
                result=output_tensors,
            )
        )

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Implements `ProcessGroup.alltoall`."""
        inputs, outputs = (
            self._by_rank(input_tensors, "input_tensors"),
            self._by_rank(output_tensors, "output_tensors"),
        )
        return self._issue(
            Collective(kind=Kind.ALL_TO_ALL, inputs=inputs, outputs=outputs, result=output_tensors)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Implements `ProcessGroup.all_to_all_single`. Sizes are numbers of rows (first dimension)
        per rank; if they are empty, all parts have the same size."""
        outputs, inputs = (
            self._parts(output, output_sizes, "output"),
            self._parts(input, input_sizes, "input"),
        )
        return self._issue(
            Collective(kind=Kind.ALL_TO_ALL, inputs=inputs, outputs=outputs, result=[output])
        )

    def barrier(self, opts: Any = None) -> Work:
        """Implements `ProcessGroup.barrier`."""
        return self._issue(Collective(kind=Kind.BARRIER))

    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        # torch's names
        """Implements `ProcessGroup.send`."""
        return self._send(_only(tensors), self._peer(dstRank), tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:  # noqa: N803
        # torch's names
        """Implements `ProcessGroup.recv`."""
        return self._receive(_only(tensors), self._peer(srcRank), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Implements `ProcessGroup.recv_anysource`."""
        return self._receive(_only(tensors), None, tag)

    # --- parts

    def _in_place(
        self, kind: Kind, tensors: Any, *, op: Any = None, root: int | None = None
    ) -> Work:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self._issue(
            Collective(kind=kind, inputs=given, outputs=given, op=op, root=root, result=given)
        )

    def _by_rank(self, parts: Sequence[torch.Tensor], field: str) -> Tensors:
        if len(parts) != self.size():
            raise InvalidRequestError(
                f"{field} holds {len(parts)} tensors; expected one for each of {self.size()} ranks"
            )
        return list(parts)

    def _rows(self, tensor: torch.Tensor, field: str) -> Tensors:
        """Splits the tensor into one part per rank, in rank order, all with the same number of
        elements."""
        if tensor.numel() % self.size():
            raise InvalidRequestError(
                f"{field} has {tensor.numel()} elements; expected a multiple of {self.size()} ranks"
            )
        return list(_contiguous(tensor, field).view(self.size(), -1).unbind(0))

    def _parts(self, tensor: torch.Tensor, sizes: list[int], field: str) -> Tensors:
        """Splits the tensor into one part per rank, in rank order, with the given numbers of
        rows."""
        if not sizes:
            return self._rows(tensor, field)
        if len(sizes) != self.size() or sum(sizes) != tensor.shape[0]:
            raise InvalidRequestError(
                f"{field} sizes {sizes}: expected {self.size()} sizes that sum to "
                f"{tensor.shape[0]} rows"
            )
        return list(_contiguous(tensor, field).split(sizes))

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size() or rank == self.rank():
            raise InvalidRequestError(
                f"rank {rank}: expected a rank from 0 to {self.size() - 1} other than {self.rank()}"
            )
        return rank


def _op(opts: Any) -> Any:
    """Returns the reduction from torch's options. `opts`: options, a reduction itself, or None for
    the default, SUM."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _only(tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise InvalidRequestError(f"{len(tensors)} tensors in one transfer; expected one")
    return tensors[0]


def _contiguous(tensor: torch.Tensor, field: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidRequestError(
            f"{field} of shape {tuple(tensor.shape)} is not contiguous; pass {field}.contiguous()"
        )
    return tensor.data
