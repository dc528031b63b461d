"""Commits a step, in the same way under every strategy: reduce, vote, commit, settle.

An engine defines how gradients are summed (`reduce`), which numbers are sent with the step vote and
to which ranks (`sum_commit`), and how the result is used (`take_commit`). A rank that missed the
commit all-reduce receives the result from a peer and passes it to the same `take_commit`
(`formation.py`). Runs on the training thread, outside of passes or at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal_common.errors import MembershipChanged
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.state.strategy_interface import TrainingEngine


class StepOwner(Protocol):
    """Owner of a step: the run's session, or the session of one of several models."""

    @property
    def step(self) -> Step | None: ...
    def step_vote(self) -> list[float]: ...
    def take_step_vote(self, summed: Sequence[float]) -> None: ...
    def mark_lost(self, error: BaseException) -> None: ...
    def settle_step(self) -> None: ...


def reduce_and_commit(owner: StepOwner, engine: TrainingEngine) -> None:
    """Reduces and commits the current step, and returns when its outcome is known. Either all
    gradients are summed and the commit all-reduce is done, or the survivors agree that the step is
    aborted. If called again, checks that no gradients were added since. Raises ShoalError."""
    step = owner.step
    if step is not None and step.share is not None and step.lost is None:
        engine.reduce(step)
        if step.phase is StepPhase.PREPARED and step.lost is None:
            _commit(owner, engine, step)
    owner.settle_step()


def _commit(owner: StepOwner, engine: TrainingEngine, step: Step) -> None:
    """Runs the commit all-reduce of a prepared step and passes its result to `owner` and `engine`.
    On failure, marks the step as lost."""
    vote = owner.step_vote()
    try:
        summed, payload = engine.sum_commit(step, vote)
        failpoint("step.closed")
    except MembershipChanged as error:
        owner.mark_lost(error)
        return
    owner.take_step_vote(summed)
    engine.take_commit(payload)
