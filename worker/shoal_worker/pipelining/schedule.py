"""torch's pipeline schedules as data: each rank's order of computation and communication.

torch.distributed.pipelining computes the orders and inserts sends and receives that cannot
deadlock; executor.py executes the orders. If a schedule requires more micro-batches than there are,
the order is computed for the required number, and the actions of the missing micro-batches are then
removed. The remaining order is valid. Schedules can be selected by torch's names, or by the short
names below.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shoal_common.errors import ConfigurationError, InternalError
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from shoal_worker.torch_internals import schedule_parts

_Action, _add_send_recv = schedule_parts()


class Kind(enum.StrEnum):
    """Kind of an action. The values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    """The entire backward pass of a stage."""
    BACKWARD_INPUT = "I"
    """First half of a split backward pass: the gradients of the stage's inputs, which the previous
    stage needs."""
    BACKWARD_WEIGHT = "W"
    """Second half of a split backward pass, which runs later: the gradients of the parameters."""
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


_COMPUTES: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Action:
    """One action in a rank's order, for one stage and micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """Properties of a schedule."""

    name: str
    torch_class: str
    stages_per_rank: int | None
    """Number of stages that the schedule requires on each rank; None: any number."""
    v_shaped: bool = False
    """True if stages are assigned to ranks in a V (0 1 1 0) instead of round-robin (0 1 0 1)."""

    @property
    def default_stages_per_rank(self) -> int:
        """Number of stages on each rank if the user does not specify it."""
        return self.stages_per_rank or 2


_KINDS: Final = {
    kind.name: kind
    for kind in (
        ScheduleKind(name="gpipe", torch_class="GPipe", stages_per_rank=1),
        ScheduleKind(name="1f1b", torch_class="1F1B", stages_per_rank=1),
        ScheduleKind(name="interleaved_1f1b", torch_class="Interleaved1F1B", stages_per_rank=None),
        ScheduleKind(name="looped_bfs", torch_class="LoopedBFS", stages_per_rank=None),
        ScheduleKind(name="zero_bubble", torch_class="InterleavedZeroBubble", stages_per_rank=None),
        ScheduleKind(name="zbv", torch_class="ZBVZeroBubble", stages_per_rank=2, v_shaped=True),
        ScheduleKind(name="dualpipe_v", torch_class="DualPipeV", stages_per_rank=2, v_shaped=True),
    )
}


def schedule_names() -> list[str]:
    """Returns the names accepted by `schedule=`."""
    return list(_KINDS)


def schedule_kind(name: str) -> ScheduleKind:
    """Returns a schedule by its short name or by torch's name.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known names.
    """
    wanted = name.lower().removeprefix("schedule")
    for kind in _KINDS.values():
        if wanted in {kind.name, kind.torch_class.lower()}:
            return kind
    raise ConfigurationError(f"schedule={name!r}: expected one of {', '.join(_KINDS)}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order of actions for all ranks of one pipeline."""

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    """Rank of each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.rank_of)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of one rank in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


def stage_ranks(kind: ScheduleKind, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the rank of each stage."""
    there = tuple(range(ranks))
    if kind.v_shaped:
        return there + there[::-1]
    return there * stages_per_rank


def checked_stages_per_rank(kind: ScheduleKind, stages_per_rank: int | None) -> int:
    """Returns the number of stages on each rank.

    Raises:
        ConfigurationError: the schedule does not work with that number.
    """
    count = kind.default_stages_per_rank if stages_per_rank is None else stages_per_rank
    if count < 1 or (kind.stages_per_rank is not None and count != kind.stages_per_rank):
        expected = "at least 1" if kind.stages_per_rank is None else str(kind.stages_per_rank)
        raise ConfigurationError(
            f"stages_per_rank={count} with schedule={kind.name!r}: expected {expected}"
        )
    return count


@functools.lru_cache(maxsize=64)
def training_schedule(
    name: str, *, ranks: int, stages_per_rank: int, micro_batches: int
) -> Schedule:
    """Returns the order of a training step: forward and backward passes of `micro_batches`
    micro-batches.

    Raises:
        ConfigurationError: the schedule does not work with these numbers.
    """
    kind = schedule_kind(name)
    rank_of = stage_ranks(kind, ranks, checked_stages_per_rank(kind, stages_per_rank))
    if kind.name == "1f1b":
        order = _one_forward_one_backward(ranks, micro_batches)
    else:
        order = _torch_order(kind, ranks, stages_per_rank, micro_batches)
    _check_complete(kind.name, rank_of, micro_batches, order)
    return _with_communication(kind.name, micro_batches, rank_of, order)


@functools.lru_cache(maxsize=64)
def forward_schedule(rank_of: tuple[int, ...], micro_batches: int) -> Schedule:
    """Returns an order of forward passes only. Each rank runs all micro-batches through one of its
    stages before it starts the next stage."""
    order = {
        rank: [
            _Action(stage, torch_schedules.FORWARD, index)
            for stage, owner in enumerate(rank_of)
            if owner == rank
            for index in range(micro_batches)
        ]
        for rank in sorted(set(rank_of))
    }
    return _with_communication("forward", micro_batches, rank_of, order)


class _StandIn:
    """Stage without a model, with the attributes from which torch's schedules compute an order."""

    def __init__(self, index: int, stages: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = (
            index,
            stages,
            rank,
            ranks,
        )
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.submod = nn.Module()
        self.is_first, self.is_last = index == 0, index == stages - 1


def _one_forward_one_backward(ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Returns the order of torch's Schedule1F1B. It is computed here because torch 2.13's order
    lacks the first forward pass of the last stage."""
    order: dict[int, list[Any]] = {}
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        forward = [_Action(rank, torch_schedules.FORWARD, index) for index in range(micro_batches)]
        backward = [
            _Action(rank, torch_schedules.FULL_BACKWARD, index) for index in range(micro_batches)
        ]
        alternating = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
        order[rank] = [*forward[:ahead], *alternating, *backward[micro_batches - ahead :]]
    return order


def _check_complete(
    name: str, rank_of: Sequence[int], micro_batches: int, order: Mapping[int, Sequence[Any]]
) -> None:
    """Raises an error unless each micro-batch passes each stage once forward and once backward, on
    the rank that has the stage."""
    expected = {(stage, index) for stage in range(len(rank_of)) for index in range(micro_batches)}
    done: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in _COMPUTES}
    for rank, actions in order.items():
        for action in actions:
            if rank_of[action.stage_index] != rank:
                raise InternalError(
                    f"schedule {name!r}: stage {action.stage_index} runs on rank {rank}; expected "
                    f"rank {rank_of[action.stage_index]}"
                )
            done[Kind(action.computation_type.value)].append(
                (action.stage_index, action.microbatch_index)
            )
    backward = done[Kind.BACKWARD] + done[Kind.BACKWARD_INPUT]
    split_right = sorted(done[Kind.BACKWARD_INPUT]) == sorted(done[Kind.BACKWARD_WEIGHT])
    if (
        sorted(done[Kind.FORWARD]) != sorted(expected)
        or sorted(backward) != sorted(expected)
        or not split_right
    ):
        raise InternalError(
            f"schedule {name!r} for {len(rank_of)} stages and {micro_batches} micro-batches is "
            "incomplete; this is a bug, please report it"
        )


def _torch_order(
    kind: ScheduleKind, ranks: int, stages_per_rank: int, micro_batches: int
) -> dict[int, list[Any]]:
    """Returns the computations of torch's schedule by rank. If the schedule requires more
    micro-batches than there are, the actions of the missing micro-batches are removed."""
    make: Callable[..., Any] = torch_schedules.get_schedule_class(kind.torch_class)
    stages = [
        _StandIn(rank * stages_per_rank, ranks * stages_per_rank, 0, ranks)
        for rank in range(stages_per_rank)
    ]
    single = isinstance(make, type) and issubclass(make, torch_schedules.PipelineScheduleSingle)
    given: Any = stages[0] if single else stages
    refusal: ValueError | None = None
    for wanted in range(micro_batches, micro_batches + 2 * ranks * stages_per_rank + 1):
        try:
            order = make(given, wanted, scale_grads=False).pipeline_order
        except ValueError as error:  # too few micro-batches for torch, or not a multiple
            refusal = error
            continue
        return {rank: list(_computations(order[rank], micro_batches)) for rank in range(ranks)}
    raise ConfigurationError(
        f"schedule={kind.name!r} with {ranks} ranks, stages_per_rank={stages_per_rank} and "
        f"{micro_batches} micro-batches: {refusal}"
    )


def _computations(order: Iterable[Any], micro_batches: int) -> Iterable[Any]:
    for action in order:
        for part in (
            (action,) if action is None or action.sub_actions is None else action.sub_actions
        ):
            if (
                part is not None
                and part.computation_type.value in _COMPUTES
                and part.microbatch_index < micro_batches
            ):
                yield part


def _with_communication(
    name: str, micro_batches: int, rank_of: tuple[int, ...], order: Mapping[int, Sequence[Any]]
) -> Schedule:
    complete = _add_send_recv(
        {rank: list(actions) for rank, actions in order.items() if actions},
        stage_to_rank=lambda stage: rank_of[stage],
        num_stages=len(rank_of),
    )
    return Schedule(
        name=name,
        micro_batches=micro_batches,
        rank_of=rank_of,
        actions=tuple(
            tuple(
                Action(
                    Kind(one.computation_type.value),
                    one.stage_index,
                    int(one.microbatch_index or 0),
                )
                for one in complete.get(rank, [])
            )
            for rank in range(max(rank_of) + 1)
        ),
    )
