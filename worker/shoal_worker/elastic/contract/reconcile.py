"""Reconciles the ranks of a new generation, so that all have the same state and the same position
in their scripts. The decision is a pure function of every rank's status.

Each rank of a new generation sends its `RankStatus` to all others (one all-gather), and every rank
computes the same `Reconciliation` from the same list. No I/O, no torch.

A generation is established only when all its members have the same state and their scripts have
received the same number of step outcomes. Until then, some scripts must advance. If a rank in doubt
learns that its step is committed, it must apply the step. If a rank has not begun a step that its
peers have already aborted, it must begin and abort that step too. Every survivor's script therefore
receives the same outcomes in the same order, and makes the same decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StateName(NamedTuple):
    """Name of a committed state: the generation that committed it, and the step. Names are compared
    in this order.

    Ranks whose states have the same name have the same state. A repeated step gets a higher name
    than the aborted attempt could have had, because its generation is later. A rank that was cut
    off with a different state can therefore never override the other ranks' newer state.
    """

    generation: int
    step: int


class Interrupted(NamedTuple):
    """Generation and activity of a rank when its group failed."""

    generation: int
    in_operation: bool
    """True if the rank was in an operation between steps rather than in a step."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank when a generation forms."""

    state: StateName | None
    """Name of this rank's newest committed state; None if its state does not count, as in a fresh
    process."""
    doubt: StateName | None = None
    """Name that the state after the current step would have. This rank has prepared the step and
    does not know its outcome. None if there is no such step."""
    outcomes: int = 0
    """Number of step outcomes received by the rank's script, including the outcome of the current
    step."""
    attached: bool
    """True if the rank has a model and can therefore receive a state."""
    learner: bool
    """True if the rank is a learner: a joiner that is replaying its script. It receives its state
    only at the next step boundary, where the scripts of all ranks are at the same position."""
    poisoned: bool
    """True if an update raised an exception before it was complete. This rank must then not send
    its state."""
    operations: int
    """Number of operations between steps that the rank has finished since the last commit."""
    rewinds: bool = False
    """True if the rank's current step was undone together with all other steps of its round. The
    operations between these steps will then be repeated."""
    interrupted: Interrupted | None = None
    """Activity of the rank when its group failed. None if it was idle, or if it has since received
    a state or results, which put its script at the senders' position."""

    def encode(self) -> list[int]:
        """Returns the status as integers, for an all-gather of int64."""
        flags = [int(self.attached), int(self.learner), int(self.poisoned), int(self.rewinds)]
        names = [*(self.state or (-1, -1)), *(self.doubt or (-1, -1))]
        return [*names, self.outcomes, *flags, self.operations, *(self.interrupted or (-1, 0))]

    @classmethod
    def decode(cls, values: Sequence[int]) -> RankStatus:
        """Restores a status from the result of `encode`."""
        (
            generation,
            step,
            doubt_generation,
            doubt_step,
            outcomes,
            attached,
            learner,
            poisoned,
            rewinds,
            *rest,
        ) = values
        operations, *interrupted = rest
        interrupted_in, in_operation = interrupted
        return cls(
            state=None if generation < 0 else StateName(generation, step),
            doubt=None if doubt_generation < 0 else StateName(doubt_generation, doubt_step),
            outcomes=outcomes,
            attached=bool(attached),
            learner=bool(learner),
            poisoned=bool(poisoned),
            operations=operations,
            rewinds=bool(rewinds),
            interrupted=None
            if interrupted_in < 0
            else Interrupted(interrupted_in, bool(in_operation)),
        )


RANK_STATUS_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """Decision about what each rank of a new generation does."""

    newest: StateName | None
    """State that all ranks continue from; None if no rank has one."""
    donors: tuple[int, ...]
    """Ranks that have the newest state and may send it, ascending."""
    committed: tuple[int, ...]
    """Ranks in doubt about the step that led to `newest`. They must apply it, because it is
    committed."""
    behind: tuple[int, ...]
    """Ranks that must receive the newest state now: their state is older or missing, and applying
    their current step would not produce it."""
    overtaken: tuple[int, ...]
    """Ranks whose peers took steps without them. Their state is older or missing, and they have
    received fewer outcomes. They could receive the newest state, but their scripts cannot catch up.
    Their processes therefore exit and are replaced."""
    moving: tuple[int, ...]
    """Ranks whose scripts must advance before the generation can be established; empty if the
    generation can be established now."""
    outcomes: int
    """Number of outcomes that all members must have received."""
    learners: tuple[int, ...]
    """Ranks that receive the state at the next step boundary."""
    results_from: int | None
    """Rank that sends the results of the operations finished since `newest` was committed; None if
    no rank lacks results."""
    results_to: tuple[int, ...]
    """Ranks that have the newest state but lack results of operations finished since then."""
    apart: tuple[int, ...]
    """Ranks that were in an operation while other ranks with the same state and the same number of
    finished operations were in a step. Their scripts have diverged, so the ranks would wait for
    each other again in the next generation. Empty if there are none."""

    @property
    def state_lost(self) -> bool:
        """True if a state existed, but no rank that has the newest state can send it. The remaining
        ranks must restore a checkpoint."""
        return self.newest is not None and not self.donors


def reconcile(statuses: Sequence[RankStatus]) -> Reconciliation:
    """Decides what each rank does, from the status of all ranks in rank order. Must be called on
    every rank, with the same list."""
    members = [r for r, s in enumerate(statuses) if not s.learner]
    newest = max((state for r in members if (state := statuses[r].state) is not None), default=None)
    current = tuple(r for r in members if newest is not None and statuses[r].state == newest)
    donors = tuple(r for r in current if not statuses[r].poisoned)
    committed = tuple(
        r
        for r in members
        if newest is not None and statuses[r].doubt == newest and not statuses[r].poisoned
    )
    outcomes = max((statuses[r].outcomes for r in members), default=0)
    lacking = tuple(
        r
        for r in members
        if newest is not None and statuses[r].attached and (r not in donors and r not in committed)
    )
    overtaken = tuple(r for r in lacking if statuses[r].outcomes < outcomes)
    behind = tuple(r for r in lacking if r not in overtaken)
    moving = tuple(
        r
        for r in members
        if r in committed or (r not in lacking and statuses[r].outcomes < outcomes)
    )
    operations = max((statuses[r].operations for r in donors), default=0)
    furthest = next((r for r in donors if statuses[r].operations == operations), None)
    results_to = _lacking(statuses, donors, furthest)
    return Reconciliation(
        newest=newest,
        donors=donors,
        committed=committed,
        behind=behind,
        overtaken=overtaken,
        moving=moving,
        outcomes=outcomes,
        learners=tuple(r for r, s in enumerate(statuses) if s.learner),
        results_from=furthest if (behind or results_to) and operations > 0 else None,
        results_to=results_to,
        apart=_apart({r: statuses[r] for r in donors}, operations),
    )


def _lacking(
    statuses: Sequence[RankStatus], donors: Sequence[int], furthest: int | None
) -> tuple[int, ...]:
    """Returns the ranks among `donors` that need operation results, because they have finished
    fewer operations than rank `furthest`. If `furthest` undoes its round, only ranks that have
    received fewer step outcomes need the results."""
    if furthest is None:
        return ()
    most = statuses[furthest]
    return tuple(
        r
        for r in donors
        if statuses[r].operations < most.operations
        and (not most.rewinds or statuses[r].outcomes < most.outcomes)
    )


def _apart(holders: Mapping[int, RankStatus], operations: int) -> tuple[int, ...]:
    """Returns the ranks that were in an operation when their group failed, although another rank
    with the same state had begun the next step without this operation."""
    interrupted = {
        r: s.interrupted
        for r, s in holders.items()
        if s.interrupted is not None and s.operations == operations
    }
    in_step = {each.generation for each in interrupted.values() if not each.in_operation}
    return tuple(
        r for r, each in interrupted.items() if each.in_operation and each.generation in in_step
    )
