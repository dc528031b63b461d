"""Who gives state to whom after a re-forming: a pure decision from what every rank says of itself.

Each rank of a new generation sends its `Standing` to all others (one all-gather), and every rank computes the same `Reconciliation` from
the same list. No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StateName(NamedTuple):
    """Names a committed state: the generation that committed it and the step, compared in this order.

    Two ranks that hold equal names hold equal states. A step redone in a later generation gets a higher name than the void attempt could
    have had, so a rank that was cut off with a state nobody else has can never win over the others' newer one.
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
    """Newest state it holds; None: none that counts (a fresh process)."""
    attached: bool
    """It has a model, so that it can take a state."""
    spectator: bool
    """A joiner: it replays its script and takes its state only at the next border, where all ranks' user code stands at the same line."""
    poisoned: bool
    """An update raised half way through: it must not give its state to anyone."""
    operations: int
    """Operations between steps that it has finished since its state was committed."""
    interrupted: Interrupted | None = None
    """None: in nothing, or it has taken a state or results since, and its script stands where theirs did."""

    def encode(self) -> list[int]:
        """As integers, for an all-gather of int64."""
        state = self.state or StateName(-1, -1)
        flags = [int(self.attached), int(self.spectator), int(self.poisoned)]
        return [*state, *flags, self.operations, *(self.interrupted or (-1, 0))]

    @classmethod
    def decode(cls, values: Sequence[int]) -> Standing:
        """Inverse of `encode`."""
        generation, step, attached, spectator, poisoned, operations, interrupted_in, in_operation = values
        return cls(
            state=None if generation < 0 else StateName(generation, step),
            attached=bool(attached),
            spectator=bool(spectator),
            poisoned=bool(poisoned),
            operations=operations,
            interrupted=None if interrupted_in < 0 else Interrupted(interrupted_in, bool(in_operation)),
        )


STANDING_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """What the ranks do about their standings."""

    newest: StateName | None
    """The state all go on from; None: nobody holds one."""
    donors: tuple[int, ...]
    """Ranks that hold it and may give it; ascending."""
    behind: tuple[int, ...]
    """Ranks that must take it now, because they hold an older one or none."""
    spectators: tuple[int, ...]
    """Ranks that take it at the next border."""
    results_from: int | None
    """A rank that has the results of all operations that a donor finished since; None: all are equally far, no results need to travel."""
    apart: tuple[int, ...]
    """Ranks that were in an operation, after the same ones and on the same state, while others of their group were in a step: the ranks'
    scripts went different ways, and would wait for each other in the next generation as well. Empty: none."""

    @property
    def state_lost(self) -> bool:
        """A state existed, but no rank that holds the newest may give it: what is left must start from a checkpoint."""
        return self.newest is not None and not self.donors


def reconcile(standings: Sequence[Standing]) -> Reconciliation:
    """Decides, from the standings in rank order. Every rank must pass the same list."""
    holders = [s.state for s in standings if s.state is not None and not s.spectator]
    newest = max(holders, default=None)
    current = tuple(r for r, s in enumerate(standings) if newest is not None and s.state == newest and not s.spectator)
    donors = tuple(r for r in current if not standings[r].poisoned)
    behind = tuple(
        r for r, s in enumerate(standings) if newest is not None and s.attached and not s.spectator and (s.state != newest or s.poisoned)
    )
    operations = max((standings[r].operations for r in donors), default=0)
    uneven = bool(behind) or any(standings[r].operations != operations for r in donors)
    furthest = next((r for r in donors if standings[r].operations == operations), None)
    return Reconciliation(
        newest=newest,
        donors=donors,
        behind=behind,
        spectators=tuple(r for r, s in enumerate(standings) if s.spectator),
        results_from=furthest if uneven and operations > 0 else None,
        apart=() if uneven else _apart(standings),
    )


def _apart(standings: Sequence[Standing]) -> tuple[int, ...]:
    """For ranks of one state."""
    interrupted = {r: s.interrupted for r, s in enumerate(standings) if s.interrupted is not None and not s.spectator}
    in_step = {each.generation for each in interrupted.values() if not each.in_operation}
    return tuple(r for r, each in interrupted.items() if each.in_operation and each.generation in in_step)
