"""What every process group of Shoal's is to torch: a Python class with a name, whose collectives torch looks up by many names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import GroupName

if TYPE_CHECKING:
    # The stub has other overloads of the constructor and the collectives than those that C++ calls and these classes have.
    _ProcessGroup: TypeAlias = Any
else:
    _ProcessGroup = dist.ProcessGroup


class NamedGroup(_ProcessGroup):
    """A process group of `size` ranks, of which this is `rank`."""

    backend_name: ClassVar[str]
    """The name that torch knows it by. Not that of a backend of torch's own: torch would look for its C++ part in here."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = GroupName(name)

    def getBackendName(self) -> str:  # noqa: N802 - looked up by this name
        """Looked up by torch's C++ code."""
        return self.backend_name

    @property
    def group_name(self) -> GroupName:
        """The name under which torch's functional collectives know the group."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name


def _collective(name: str) -> Any:
    def issue(self: ForwardingGroup, *arguments: Any, **options: Any) -> Work:
        return self._issue(name, arguments, options)

    issue.__name__ = name
    issue.__doc__ = f"`ProcessGroup.{name}`."
    return issue


class ForwardingGroup(NamedGroup):
    """Issues collectives on a native group, by their names there."""

    def _issue(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Work:
        """Starts the native group's collective of that name."""
        raise NotImplementedError

    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective("all_gather_single_coalesced")
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
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _collective("reduce_scatter_single_coalesced")
    scatter = _collective("scatter")
    send = _collective("send")
