"""What the ranks of a new generation do about their standings: a pure decision from what every rank
says of itself.

Each rank of a new generation sends its `Standing` to all others (one all-gather), and every rank
computes the same `Reconciliation` from the same list. No I/O, no torch.

A generation stands only when all its members are at one: on one state, with equally many outcomes
of steps behind or before them. Until then some have to move first, each in its own script: a rank
in doubt, which is told that its step counts, has to apply it; a rank whose peers already lost the
step that it has not begun has to begin it, and lose it as well. So every survivor's script sees the
same outcomes in the same order, and whatever it advances by them stays alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StateName(NamedTuple):
    """Names a committed state: the generation that committed it and the step, compared in this
    order.

    Two ranks that hold equal names hold equal states. A step redone in a later generation gets a
    higher name than the void attempt could have had, so a rank that was cut off with a state nobody
    else has can never win over the others' newer one.
    """

    generation: int
    step: int


class Interrupted(NamedTuple):
    """What a rank was in when its group failed."""

    generation: int
    in_operation: bool
    """Between steps; else in a step."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What one rank says of itself when a generation forms."""

    state: StateName | None
    """Newest state it holds that is not its own alone; None: none that counts (a fresh process)."""
    doubt: StateName | None = None
    """What the state would be called if the step in progress counted, which this rank has sealed
    and does not know. None: there is none."""
    outcomes: int = 0
    """Outcomes of steps that its script has been told of, with that of the step in progress."""
    attached: bool
    """It has a model, so that it can take a state."""
    spectator: bool
    """A joiner: it replays its script and takes its state only at the next border, where all ranks'
    user code stands at the same line."""
    poisoned: bool
    """An update raised half way through: it must not give its state to anyone."""
    operations: int
    """Operations between steps that it has finished since its state was committed."""
    rewinds: bool = False
    """The step that it is in is lost, and with it the round that the step ends: what was finished
    in the round will be done again."""
    interrupted: Interrupted | None = None
    """None: in nothing, or it has taken a state or results since, and its script stands where
    theirs did."""

    def encode(self) -> list[int]:
        """Returns it as integers, for an all-gather of int64."""
        flags = [int(self.attached), int(self.spectator), int(self.poisoned), int(self.rewinds)]
        names = [*(self.state or (-1, -1)), *(self.doubt or (-1, -1))]
        return [*names, self.outcomes, *flags, self.operations, *(self.interrupted or (-1, 0))]

    @classmethod
    def decode(cls, values: Sequence[int]) -> Standing:
        """Inverse of `encode`."""
        (
            generation,
            step,
            doubt_generation,
            doubt_step,
            outcomes,
            attached,
            spectator,
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
            spectator=bool(spectator),
            poisoned=bool(poisoned),
            operations=operations,
            rewinds=bool(rewinds),
            interrupted=None
            if interrupted_in < 0
            else Interrupted(interrupted_in, bool(in_operation)),
        )


STANDING_LENGTH = 12


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """What the ranks do about their standings."""

    newest: StateName | None
    """The state all go on from; None: nobody holds one."""
    donors: tuple[int, ...]
    """Ranks that hold it and may give it; ascending."""
    decided: tuple[int, ...]
    """Ranks whose step in doubt is the one that led to `newest`: it counts."""
    behind: tuple[int, ...]
    """Ranks that must take the state now: they hold an older one, or none, and no step in progress
    leads them to the newest."""
    overtaken: tuple[int, ...]
    """Ranks whose peers took steps without them: they hold an older state, or none, and were told
    of fewer outcomes. A state can be sent to them, but their scripts cannot come to where the
    others' are: their processes end and are replaced. No other rank is `behind` by steps."""
    moving: tuple[int, ...]
    """Ranks whose scripts have to move before the generation can stand; empty: it stands."""
    outcomes: int
    """What all members' count of outcomes has to become."""
    spectators: tuple[int, ...]
    """Ranks that take the state at the next border."""
    results_from: int | None
    """A rank that has the results of all operations that a donor finished since; None: no results
    need to travel."""
    results_to: tuple[int, ...]
    """Ranks of the same state that lack some of them."""
    apart: tuple[int, ...]
    """Ranks that were in an operation, after the same ones and on the same state, while others of
    their group were in a step: ranks diverged, and would wait for each
    other in the next generation as well. Empty: none."""

    @property
    def state_lost(self) -> bool:
        """A state existed, but no rank that holds the newest may give it: what is left must start
        from a checkpoint."""
        return self.newest is not None and not self.donors


def reconcile(standings: Sequence[Standing]) -> Reconciliation:
    """Decides, from the standings in rank order. Every rank must pass the same list."""
    members = [r for r, s in enumerate(standings) if not s.spectator]
    newest = max(
        (state for r in members if (state := standings[r].state) is not None), default=None
    )
    current = tuple(r for r in members if newest is not None and standings[r].state == newest)
    donors = tuple(r for r in current if not standings[r].poisoned)
    decided = tuple(
        r
        for r in members
        if newest is not None and standings[r].doubt == newest and not standings[r].poisoned
    )
    outcomes = max((standings[r].outcomes for r in members), default=0)
    lacking = tuple(
        r
        for r in members
        if newest is not None and standings[r].attached and (r not in donors and r not in decided)
    )
    overtaken = tuple(r for r in lacking if standings[r].outcomes < outcomes)
    behind = tuple(r for r in lacking if r not in overtaken)
    moving = tuple(
        r
        for r in members
        if r in decided or (r not in lacking and standings[r].outcomes < outcomes)
    )
    operations = max((standings[r].operations for r in donors), default=0)
    furthest = next((r for r in donors if standings[r].operations == operations), None)
    results_to = _lacking(standings, donors, furthest)
    return Reconciliation(
        newest=newest,
        donors=donors,
        decided=decided,
        behind=behind,
        overtaken=overtaken,
        moving=moving,
        outcomes=outcomes,
        spectators=tuple(r for r, s in enumerate(standings) if s.spectator),
        results_from=furthest if (behind or results_to) and operations > 0 else None,
        results_to=results_to,
        apart=_apart({r: standings[r] for r in donors}, operations),
    )


def _lacking(
    standings: Sequence[Standing], donors: Sequence[int], furthest: int | None
) -> tuple[int, ...]:
    """Among ranks of one state, those that have finished fewer operations than `furthest`. Where
    that one rewinds, those that have rewound before it lack nothing; only who has to come to the
    same step yet passes the operations on the way."""
    if furthest is None:
        return ()
    most = standings[furthest]
    return tuple(
        r
        for r in donors
        if standings[r].operations < most.operations
        and (not most.rewinds or standings[r].outcomes < most.outcomes)
    )


def _apart(holders: Mapping[int, Standing], operations: int) -> tuple[int, ...]:
    """Among ranks of one state, those in an operation that no other has finished, while another is
    in the step that follows."""
    interrupted = {
        r: s.interrupted
        for r, s in holders.items()
        if s.interrupted is not None and s.operations == operations
    }
    in_step = {each.generation for each in interrupted.values() if not each.in_operation}
    return tuple(
        r for r, each in interrupted.items() if each.in_operation and each.generation in in_step
    )
