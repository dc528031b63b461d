"""Commits a step, the same under every strategy: reduce, vote, commit, settle.

An engine says how gradients are summed (`reduce`), which numbers travel with the step vote and over
which ranks (`sum_commit`), and what the result means (`take_commit`). A rank that missed the commit
all-reduce receives the result from a peer, by the same `take_commit` (`formation.py`). Runs on the
training thread, outside of passes or at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal_common.errors import MembershipChanged
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.state.strategy_interface import TrainingEngine


class StepOwner(Protocol):
    """The owner of a step: the run's session, or that of one of several models."""

    @property
    def step(self) -> Step | None: ...
    def step_vote(self) -> list[float]: ...
    def take_step_vote(self, summed: Sequence[float]) -> None: ...
    def mark_lost(self, error: BaseException) -> None: ...
    def settle_step(self) -> None: ...


def reduce_and_commit(owner: StepOwner, engine: TrainingEngine) -> None:
    """Returns when the outcome of the current step is known: the gradients of all ranks are summed
    and the commit all-reduce is done, or the survivors agree that the step is aborted. Called
    again, it checks that no gradients were added since. Raises ShoalError."""
    step = owner.step
    if step is not None and step.share is not None and step.lost is None:
        engine.reduce(step)
        if step.phase is StepPhase.PREPARED and step.lost is None:
            _commit(owner, engine, step)
    owner.settle_step()


def _commit(owner: StepOwner, engine: TrainingEngine, step: Step) -> None:
    """Runs the commit all-reduce of a prepared step."""
    vote = owner.step_vote()
    try:
        summed, payload = engine.sum_commit(step, vote)
        failpoint("step.closed")
    except MembershipChanged as error:
        owner.mark_lost(error)
        return
    owner.take_step_vote(summed)
    engine.take_commit(payload)
