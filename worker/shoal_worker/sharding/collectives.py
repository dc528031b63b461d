"""Collectives for sharding, on the session's current group.

A failure inside a step raises no error, because the calling forward or backward pass is the user's
code. Instead, the step is marked as failed (`Step.lost`), results are zeros, and nothing more is
sent in that step. Outside of a step (evaluation, gathering a state), a failure raises an error, and
the session retries the entire operation. The same rules apply to the compressed reduce-scatter,
which replaces the plain one with `gradient_compression=`.

If ranks gather blocks in different orders, they exchange the wrong data. If the blocks have the
same size, no collective fails, and ranks would silently compute with the values of a different
block. Each rank therefore records a trace of the collectives that it issues in a step, and a check
word of the trace is compared in the commit all-reduce. If the blocks differ in size, a collective
fails, and the step is aborted before its commit all-reduce; the ranks then compare their traces at
the next rendezvous.

Runs on the training thread and, in backward passes, on autograd's thread.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged, PreconditionError
from shoal_common.failpoints import failpoint
from typing_extensions import override

from shoal_worker.compression.compressed_reduction import Reduction
from shoal_worker.elastic.contract.step import agree
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.engine.step.failed_collectives import LosingStep, await_ordered
from shoal_worker.sharding.layout import Division

if TYPE_CHECKING:
    from shoal_worker.elastic.group.group import Group
    from shoal_worker.elastic.state.strategy_interface import StrategySession
    from shoal_worker.engine.step.compressed import GradientCompression

_CHECK_BITS: Final = 20
"""Number of bits in a check word. With 20 bits, the sum of squares over up to 8192 ranks is exact
in float64."""


class IssuedCollectives:
    """Trace of the collectives issued by one rank in one step."""

    def __init__(self) -> None:
        self._step = 0
        self._codes: list[int] = []
        self._check = 0

    def begin(self, step: int) -> None:
        """Clears the trace when the step with this number begins. `step`: number of this model's
        step."""
        self._step, self._check = step, 0
        self._codes.clear()

    def add(self, kind: str, unit: int) -> None:
        """Records a collective for the unit with index `unit`. `kind`: "gather" or "reduce"."""
        code = 2 * unit + (kind == "reduce")
        self._codes.append(code)
        self._check = zlib.crc32(code.to_bytes(4, "little"), self._check)

    def word(self) -> list[float]:
        """Returns this rank's check word as numbers that the commit all-reduce sums across
        ranks."""
        value = float(self._check & ((1 << _CHECK_BITS) - 1))
        return [1.0, value, value * value]

    def encode(self) -> bytes:
        """Encodes the trace, for `compare` on other ranks."""
        return json.dumps([self._step, *self._codes]).encode() if self._codes else b""

    @staticmethod
    def check(summed: Sequence[float], strategy: str) -> None:
        """Raises PreconditionError if the ranks have issued different collectives. `summed`: sum of
        all ranks' results of `word`."""
        if not agree(summed):
            raise _different(strategy)

    @staticmethod
    def compare(issued: Sequence[bytes], strategy: str) -> None:
        """Compares the ranks' traces after a failure. Within one step, a shorter trace must be a
        prefix of every longer one. `issued`: the ranks' encoded traces.

        Raises:
            PreconditionError: the traces differ.
        """
        steps: dict[int, list[list[int]]] = {}
        for each in filter(None, issued):
            step, *codes = json.loads(each)
            steps.setdefault(step, []).append(codes)
        for logs in steps.values():
            longest = max(logs, key=len)
            if any(codes != longest[: len(codes)] for codes in logs):
                raise _different(strategy)


def _different(strategy: str) -> PreconditionError:
    return PreconditionError(
        "the ranks gathered the model's blocks in different orders, which mixed up the blocks "
        f"and invalidated the step: with strategy={strategy!r}, every rank's passes must run all "
        "blocks in the same order. Choose larger blocks (shard_modules=), inside which ranks may "
        "differ, or use zero2, which gathers nothing in a pass",
        reason="RANKS_DIVERGED",
    )


class Pending(Protocol):
    """A collective in progress."""

    def wait(self) -> bool:
        """Waits for the result, and returns True if later computations can use it. Must be called
        only once.

        In a step on a GPU, only the device waits for the result; whether the collective has
        succeeded is known only once the step is prepared.
        """
        ...


class Collectives(Protocol):
    """Interface to the collectives that units need. All calls must be made on all ranks, in the
    same order."""

    @property
    def lost(self) -> bool:
        """True if a collective of the step has failed. No more collectives are then issued in the
        step."""
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Starts an all-gather of the ranks' `shard` tensors into `full`, in rank order. Both are
        flat tensors of the same dtype."""
        ...

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Pending:
        """Starts a reduce-scatter of the ranks' `full` tensors, and writes this rank's part of the
        sum to `shard`."""
        ...

    def pass_on(self, received: torch.Tensor, sent: torch.Tensor, *, stride: int) -> Pending:
        """Starts sending `sent` to rank (rank + stride) mod N, and receiving a tensor of the same
        size from rank (rank - stride) mod N."""
        ...


class _Ended:
    def __init__(self, succeeded: bool) -> None:
        self._succeeded = succeeded

    def wait(self) -> bool:
        """Returns immediately, because the collective has already ended."""
        return self._succeeded


_DONE: Final = _Ended(True)
_FAILED: Final = _Ended(False)


class SessionCollectives:
    """Collectives on the session's current group. If there is only one rank, tensors are only
    copied."""

    def __init__(self, session: StrategySession) -> None:
        self._session = session

    @property
    def lost(self) -> bool:
        """True if a collective of the step has failed; see `Collectives.lost`."""
        step = self._session.step
        return step is not None and step.lost is not None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Starts an all-gather of `shard` into `full`."""
        # The shard may share memory with the result, and must survive a failure.
        in_place = full.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        cleared = None if in_place else full
        return self._issue(
            self._shard_group,
            cleared,
            lambda group: group.all_gather_async(full, shard),
            alone=lambda: _copy(full, shard),
        )

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Pending:
        """Starts a reduce-scatter of `full` into `shard`."""

        def start(group: Group) -> dist.Work | None:
            work = group.reduce_scatter_async(shard, full)
            failpoint("reduction.under_way")
            return work

        return self._issue(self._shard_group, shard, start, alone=lambda: _copy(shard, full))

    def pass_on(self, received: torch.Tensor, sent: torch.Tensor, *, stride: int) -> Pending:
        """Starts sending `sent` to rank (rank + stride) mod N, and receiving `received` from rank
        (rank - stride) mod N."""
        group = self._group
        rank, size = (group.rank, group.world_size) if group is not None else (0, 1)
        to, source = (rank + stride) % size, (rank - stride) % size
        receives = [received.numel() if r == source else 0 for r in range(size)]
        sends = [sent.numel() if r == to else 0 for r in range(size)]
        return self._issue(
            group,
            None,
            lambda group: group.all_to_all_async(received, sent, receives, sends),
            alone=lambda: None,
        )

    @property
    def _group(self) -> Group | None:
        """Group of all ranks that train the model."""
        return self._session.group

    @property
    def _shard_group(self) -> Group | None:
        """Group of the ranks that form one replica and together have all shards."""
        return self._group

    def _issue(
        self,
        group: Group | None,
        cleared: torch.Tensor | None,
        start: Callable[[Group], dist.Work | None],
        alone: Callable[[], None],
    ) -> Pending:
        if self.lost:
            _clear(cleared)
            return _FAILED
        if group is None or group.world_size == 1:
            alone()
            return _DONE
        with LosingStep(self._session, raises_outside=True) as issuing:
            work = start(group)
        if issuing.failed:
            _clear(cleared)
            return _FAILED
        assert work is not None, "a collective over several ranks returns a handle"
        return _Issued(self._session, group, work, cleared)


class PartCollectives(SessionCollectives):
    """Collectives on a subgroup of the session's current group. Usable only as long as that group
    exists."""

    def __init__(self, session: StrategySession, part: Group) -> None:
        super().__init__(session)
        self._part = part

    @property
    def rank(self) -> int:
        """This process's rank in the subgroup."""
        return self._part.rank

    @property
    def _group(self) -> Group:
        return self._part


class ReplicatedCollectives(SessionCollectives):
    """Collectives for several replicas. Parameters are gathered within the rank's replica.
    Gradients are reduce-scattered within each replica, and then each shard is summed across
    replicas."""

    def __init__(self, session: StrategySession) -> None:
        super().__init__(session)
        self._within: Group | None = None
        self._across: Group | None = None

    def connect(self, group: Group, division: Division) -> None:
        """Connects subgroups of a new group: one within each replica, and one for each shard across
        replicas. Must be called on every rank of the group.

        Raises:
            MembershipChanged: the group has ended.
        """
        replica, position = division.replica(group.rank), division.position(group.rank)
        within = [
            range(begin, begin + division.shards)
            for begin in range(0, group.world_size, division.shards)
        ]
        across = [
            range(first, group.world_size, division.shards) for first in range(division.shards)
        ]
        self._within = group.subgroup(
            within[replica], f"replica {replica * division.shards}", within
        )
        self._across = (
            group.subgroup(across[position], f"shard {position}", across)
            if division.replicas > 1
            else None
        )

    @property
    def _shard_group(self) -> Group | None:
        return self._within

    @override
    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Pending:
        scattered = super().reduce_scatter(shard, full)
        across = self._across
        if across is None:
            return scattered
        return _Then(
            scattered,
            lambda: self._issue(
                across, shard, lambda group: group.all_reduce_async(shard), alone=lambda: None
            ),
        )


class _Then:
    """Two collectives, one after the other."""

    def __init__(self, first: Pending, second: Callable[[], Pending]) -> None:
        self._first, self._second = first, second

    def wait(self) -> bool:
        """Waits for the first collective, then starts the second one and waits for it."""
        return self._first.wait() and self._second().wait()


class _Issued:
    def __init__(
        self, session: StrategySession, group: Group, work: dist.Work, cleared: torch.Tensor | None
    ) -> None:
        self._session = session
        self._group = group
        self._work = work
        self._cleared = cleared

    def wait(self) -> bool:
        """Waits for the collective. If it has failed, fills its tensor with zeros."""
        group, work = self._group, self._work
        del self._group, self._work  # both references would keep sockets open
        succeeded = await_ordered(self._session, group, work)
        if not succeeded:
            _clear(self._cleared)
        return succeeded


def _clear(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        tensor.zero_()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.copy_(source)


class CompressedScatter:
    """Callable that starts a compressed reduce-scatter of one unit's gradients."""

    def __init__(
        self, compression: GradientCompression, session: StrategySession, number: int
    ) -> None:
        """`number`: index of the unit, which must be the same on all ranks."""
        self._compression = compression
        self._session = session
        self._number = number

    def __call__(self, shard: torch.Tensor, full: torch.Tensor) -> Pending:
        """Starts a compressed reduce-scatter of `full` into `shard`."""
        session, group = self._session, self._session.group
        step = session.step
        with LosingStep(session):
            if step is not None and step.lost is not None:
                raise MembershipChanged(step.lost)
            if group is None or group.world_size == 1:
                self._compression.pay(full, "units", self._number)
                shard.copy_(full)
                return _Scattering(session, None, None, shard)
            return _Scattering(
                session,
                group,
                self._compression.start_scatter(group, shard, full, self._number),
                shard,
            )
        shard.zero_()
        return _Scattering(session, None, None, None)


class _Scattering:
    def __init__(
        self,
        session: StrategySession,
        group: Group | None,
        reduction: Reduction | None,
        shard: torch.Tensor | None,
    ) -> None:
        """`shard`: destination of the sum; None if the step has failed. `reduction`: the reduction
        in progress; None if the result is already available."""
        self._session = session
        self._group = group
        self._reduction = reduction
        self._shard = shard

    def wait(self) -> bool:
        """Waits for the reduction. If the step has failed, fills the shard with zeros."""
        group, reduction, shard = self._group, self._reduction, self._shard
        del self._group, self._reduction  # these references would keep sockets open
        if shard is None or group is None or reduction is None:
            return shard is not None
        with (
            LosingStep(self._session) as waiting,
            group.own_collectives("compressed reduce_scatter"),
        ):
            reduction.wait()
        if waiting.failed:
            reduction.abandon()
            shard.zero_()
        return not waiting.failed
