"""Implements `shoal.process_group()`: a torch process group for calls between steps. Each call is
an operation of all ranks and survives faults.

Each `torch.distributed` call with this group is one operation (`operations.py`). All ranks' tensors
are exchanged, and every rank computes the same results, or the same error, from the same bytes.
After a fault, the remaining ranks repeat the operation.

The data that a script sends may depend on its rank or on the number of ranks. Examples are a buffer
filled by one rank, a list with one entry per rank, and a value divided by the number of ranks.
torch itself reads rank and size while it gathers objects. The group therefore continues to return
the rank and size that it first returned. Once these are outdated, the next call raises
MembershipChanged on all ranks instead of returning a result, and the script must ask for them
again. This happens even if the script has not used them, because the group cannot know that.

Everything runs on the training thread. Calls inside a step are refused, because a fault there would
destroy the gradients. Messages between two ranks are refused as well, because they could not be
repeated after one of the two fails.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from torch.distributed import Work
from torch.utils.data import DataLoader

from shoal_worker.backends.collective import (
    Collective,
    Kind,
    UnmatchedCollectiveError,
    check_op,
    execute,
    op_name,
)
from shoal_worker.backends.python_group import PythonGroup, Tensors
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.torch_internals import c10d, in_backward

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.session.session import Session

REDUCTIONS: Final = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
"""Names of the supported reductions, as in torch."""


def process_group(session: Session) -> SurvivingGroup:
    """Returns the process group of a session, and registers it with torch
    (`shoal.process_group`)."""
    for group in c10d._world.pg_map:
        if isinstance(group, SurvivingGroup) and group.session is session:
            return group
    default = c10d._world.default_pg
    if isinstance(default, SurvivingGroup):  # belongs to a session that has ended
        default = None
    own = (session.rank, session.world_size)
    if default is not None and (session.ranks_may_come or (default.rank(), default.size()) != own):
        raise PreconditionError(
            "process_group(): this process has a default process group, in which it is rank "
            f"{default.rank()} of {default.size()}, but in Shoal's job it is rank {session.rank} "
            f"of {session.world_size}, and faults change these numbers. Leave out "
            "torch.distributed.init_process_group",
            reason="DEFAULT_GROUP_EXISTS",
        )
    group = SurvivingGroup(session)
    _make_known(group, default=default is None)
    return group


class SurvivingGroup(PythonGroup):
    """torch process group of a session's current ranks. Its members change with the membership."""

    backend_name: ClassVar[str] = "shoal_surviving"

    def __init__(self, session: Session) -> None:
        """`session`: session whose ranks form the group."""
        super().__init__(session.rank, session.world_size, "shoal_surviving")
        self.session = session
        self._asked: tuple[int, int] | None = None
        """Rank and number of ranks as first returned to the script; None if the script has not
        asked for them since it was last notified of a change."""
        self._answered: tuple[int, tuple[int, int]] | None = None
        """Number of committed steps at the last operation, and (rank, number of ranks) in that
        operation."""

    # --- rank and size

    def rank(self) -> int:
        """Returns the rank that this process had in the last call, if there has been a call since
        the last step; otherwise its current rank. Returns -1 if the script is not at its peers'
        position, so that the script does not act as rank 0. torch's own code, which asks for the
        rank within its calls, receives 0 in that case, as in a world of one."""
        if (
            self.session.elastic
            and not self.session.has_left
            and self._by_itself
            and not _is_torch(sys._getframe(1))
        ):
            return -1
        return self._script_place()[0]

    def size(self) -> int:
        """Returns the number of ranks that took part in the last call, if there has been one since
        the last step; otherwise the current number."""
        return self._script_place()[1]

    def _script_place(self) -> tuple[int, int]:
        place = self.place
        if self._asked is None and not _is_dataloader(sys._getframe(2)):
            self._asked = place
        return place

    @property
    def place(self) -> tuple[int, int]:
        """Rank and number of ranks, as returned by `rank` and `size`, but without recording that
        the script has asked for them."""
        session = self.session
        if not session.elastic or session.has_left or self._by_itself:
            return 0, 1
        if self._answered is not None and self._answered[0] == session.steps:
            return self._answered[1]
        return session.rank, session.world_size

    @property
    def _by_itself(self) -> bool:
        """True if the script is not at its peers' position. Its calls are then answered locally
        (see `Session.operation`)."""
        return self.session.is_joining or self.session.is_redoing

    # --- collectives

    def _issue(self, call: Collective) -> Work:
        name = call.kind.value
        self._check(call, name)
        payload = self._packed(call)

        def body(channel: Channel) -> list[str]:
            return [base64.b64encode(each).decode() for each in channel.exchange(payload)]

        received = [_unpacked(each) for each in self.session.operation(f"torch's {name}", body)]
        self._conclude(call, name, received)
        return CompletedWork(call.result)

    def _check(self, call: Collective, name: str) -> None:
        session = self.session
        if session.elastic and session.is_asynchronous:
            raise PreconditionError(
                f"torch.distributed's {name} with shoal.process_group() under "
                "strategy='async_sgd': its workers take steps independently and have no "
                "collectives; report values with shoal.report"
            )
        if in_backward():
            raise PreconditionError(
                f"torch.distributed's {name} with shoal.process_group() was called in a backward "
                "pass; call it after optimizer.step(), before the next batch. For losses over "
                "the samples of all ranks use shoal.whole_batch",
                reason="STEP_NOT_FINISHED",
            )
        if call.op is not None:
            operator = str(getattr(call.op, "op", call.op)).rpartition(".")[2]
            if operator not in REDUCTIONS:
                raise ConfigurationError(
                    f"{name} with ReduceOp.{operator}: shoal.process_group() supports only "
                    f"{', '.join(REDUCTIONS)}"
                )
            for one in call.inputs:
                check_op(call.op, one.dtype)
        for one in (*call.inputs, *call.outputs):
            if one.layout is not torch.strided or one.is_meta:
                raise ConfigurationError(
                    f"{name} of a tensor with layout {one.layout} on {one.device}: expected a "
                    "dense tensor with values"
                )

    def _packed(self, call: Collective) -> bytes:
        place = self.place
        sends = call.kind is not Kind.BROADCAST or call.root == place[0]
        document = {
            "member": self.session.member_id,
            "asked": self._asked,
            "place": place,
            "op": None if call.op is None else op_name(call.op),
            "root": call.root,
            "inputs": [_said(one) for one in call.inputs],
            "outputs": [_said(one) for one in call.outputs],
            "sends": sends,
        }
        given = (
            {str(number): one.detach() for number, one in enumerate(call.inputs)} if sends else {}
        )
        return dump_tensors(given, {"call": json.dumps(document)})

    def _conclude(
        self,
        call: Collective,
        name: str,
        received: Sequence[tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]],
    ) -> None:
        """Computes this rank's results from all ranks' data, and writes them to the outputs of the
        call. If the ranks have changed, or their calls do not match, raises an error on all ranks.
        """
        documents = [document for document, _ in received]
        size = len(received)
        own = next(
            (
                number
                for number, each in enumerate(documents)
                if each["member"] == self.session.member_id
            ),
            None,
        )
        before = self._asked or self.place
        self._answered = (
            None if own is None or self._by_itself else (self.session.steps, (own, size))
        )
        moved = own is None or any(
            _has_moved(each, number, size, call.kind) for number, each in enumerate(documents)
        )
        if moved:
            self._asked = None
            raise MembershipChanged(
                f"torch.distributed's {name} with shoal.process_group(): the ranks have changed "
                f"since the script asked for them, when this was rank {before[0]} of {before[1]}; "
                f"{size} ranks took part. No tensor was written. Call get_rank and get_world_size "
                "of the group again, and repeat the code that used their results",
                reason="RANKS_CHANGED",
            )
        _check_alike(name, call.kind, documents, size)
        calls = [_rebuilt(call, document, tensors) for document, tensors in received]
        execute(calls)
        assert own is not None, "otherwise the ranks have changed"
        with torch.no_grad():
            for output, result in zip(call.outputs, calls[own].outputs, strict=True):
                output.data.copy_(result.view(output.shape))

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        raise self._refused("send")

    def _receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Work:
        raise self._refused("recv")

    def _refused(self, name: str) -> PreconditionError:
        return PreconditionError(
            f"torch.distributed's {name} with shoal.process_group(): messages between two ranks "
            "cannot be repeated after a fault. Use all_gather, broadcast or scatter, which all "
            "ranks call"
        )

    def _peer(self, rank: int) -> int:
        return rank

    def _by_rank(self, parts: Sequence[torch.Tensor], field: str) -> Tensors:
        return list(parts)  # the operation checks the number of parts, on all ranks

    def _rows(self, tensor: torch.Tensor, field: str) -> Tensors:
        size = self.place[1]
        if not tensor.is_contiguous() or tensor.numel() % size:
            return (
                super()._rows(tensor, field) if self._asked in (None, self.place) else [tensor.data]
            )
        return list(tensor.data.view(size, -1).unbind(0))


def _is_torch(caller: FrameType | None) -> bool:
    """Returns whether the caller is code of `torch.distributed` itself, rather than a script that
    calls `get_rank`. `caller`: the calling frame."""
    if caller is not None and caller.f_code is dist.get_rank.__code__:
        caller = caller.f_back
    return caller is not None and str(caller.f_globals.get("__name__")).startswith(
        "torch.distributed"
    )


def _is_dataloader(caller: FrameType | None) -> bool:
    """Returns whether the caller is torch's DataLoader, directly or through `torch.distributed`. It
    asks for the rank whenever an iteration begins, and uses it only for data pipes."""
    while caller is not None and caller.f_globals.get("__name__") == dist.get_rank.__module__:
        caller = caller.f_back
    return caller is not None and caller.f_globals.get("__name__") == DataLoader.__module__


class CompletedWork(Work):
    """`Work` of a call that is complete when it returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Returns True: the call has completed."""
        return True

    def is_completed(self) -> bool:
        """Returns True: the call has completed."""
        return True

    def is_success(self) -> bool:
        """Returns True: the call has succeeded."""
        return True

    def exception(self) -> None:
        """Returns None: the call has succeeded."""

    def result(self) -> Any:
        """Returns the caller's output tensors."""
        return self._result

    def get_future(self) -> Any:
        """Returns a completed future with the output tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class _SameRanks(Mapping[int, int]):
    """Mapping from global ranks to group ranks, in the form that torch expects. Maps each current
    rank to itself."""

    def __init__(self, group: SurvivingGroup) -> None:
        self._group = group

    def __getitem__(self, rank: int) -> int:
        if not 0 <= rank < self._group.place[1]:
            raise KeyError(rank)
        return rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._group.size()))

    def __len__(self) -> int:
        return self._group.size()


def _make_known(group: SurvivingGroup, *, default: bool) -> None:
    """Registers the group with torch's Python code. Makes it the default group if `default`,
    because `torch.distributed.get_rank(group)` first looks for a default group, regardless of
    `group`."""
    world: Any = c10d._world
    world.pg_map[group] = (group.backend_name, None)
    world.pg_names[group] = group.group_name
    world.pg_group_ranks[group] = _SameRanks(group)
    world.pg_backend_config[group] = f"cpu:{group.backend_name}"
    if default:
        world.default_pg = group


def _said(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _unpacked(payload: str) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    tensors, document = load_tensors(base64.b64decode(payload))
    return json.loads(document["call"]), tensors


def _has_moved(document: Mapping[str, Any], number: int, size: int, kind: Kind) -> bool:
    """Returns whether a rank prepared its part of the call for a rank number or a number of ranks
    that is no longer current. `number`: the rank's current number. `size`: current number of ranks.
    """
    actual = [number, size]
    if document["asked"] is not None and document["asked"] != actual:
        return True
    return kind not in (Kind.ALL_REDUCE, Kind.BARRIER) and document["place"] != actual


def _check_alike(name: str, kind: Kind, documents: Sequence[Mapping[str, Any]], size: int) -> None:
    """Checks that the ranks' parts of a call match. Otherwise raises UnmatchedCollectiveError, on
    all ranks."""
    like = kind in (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.REDUCE_SCATTER)
    first = documents[0]
    for number, each in enumerate(documents):
        for field in ("op", "root", *(("inputs",) if like else ())):
            if each[field] != first[field]:
                raise UnmatchedCollectiveError(
                    f"torch.distributed's {name}: rank 0 passed {field} {first[field]}, but rank "
                    f"{number} passed {each[field]}; expected the same on all ranks. For values "
                    "that differ in shape use shoal.gather"
                )
        root = each["root"]
        if root is not None and not 0 <= root < size:
            raise UnmatchedCollectiveError(
                f"torch.distributed's {name}: root is {root}; expected a rank from 0 to {size - 1}"
            )
        counts = _COUNTS[kind](len(each["inputs"]), len(each["outputs"]), size, number == root)
        if not counts:
            raise UnmatchedCollectiveError(
                f"torch.distributed's {name}: rank {number} passed {len(each['inputs'])} input "
                f"tensors and {len(each['outputs'])} output tensors; expected one for each of "
                f"{size} ranks on the side that is scattered or gathered"
            )
    kinds = {
        dtype for document in documents for dtype, _ in (*document["inputs"], *document["outputs"])
    }
    if len(kinds) > 1:
        raise UnmatchedCollectiveError(
            f"torch.distributed's {name} of tensors of {' and '.join(sorted(kinds))}: expected "
            "the same dtype on all ranks"
        )


_COUNTS: Final[Mapping[Kind, Any]] = {
    Kind.ALL_REDUCE: lambda given, taken, size, is_root: given == taken,
    Kind.BROADCAST: lambda given, taken, size, is_root: given == taken,
    Kind.REDUCE: lambda given, taken, size, is_root: given == taken,
    Kind.ALL_GATHER: lambda given, taken, size, is_root: taken == given * size,
    Kind.REDUCE_SCATTER: lambda given, taken, size, is_root: given == taken * size,
    Kind.GATHER: lambda given, taken, size, is_root: (
        given == 1 and taken == (size if is_root else 0)
    ),
    Kind.SCATTER: lambda given, taken, size, is_root: (
        taken == 1 and given == (size if is_root else 0)
    ),
    Kind.ALL_TO_ALL: lambda given, taken, size, is_root: given == taken == size,
    Kind.BARRIER: lambda given, taken, size, is_root: True,
}
"""Kind of call -> function that returns whether a rank passed the right numbers of inputs and
outputs."""


def _rebuilt(
    own: Collective, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Collective:
    """Reconstructs another rank's call from the data sent by that rank, with memory for its
    results."""
    inputs = [
        tensors[str(n)] if document["sends"] else _room(said)
        for n, said in enumerate(document["inputs"])
    ]
    in_place = own.kind in (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
    outputs = inputs if in_place else [_room(said) for said in document["outputs"]]
    return Collective(kind=own.kind, inputs=inputs, outputs=outputs, op=own.op, root=own.root)


def _room(said: Sequence[Any]) -> torch.Tensor:
    dtype, shape = said
    return torch.empty(shape, dtype=getattr(torch, dtype))
