"""Commits a step, in the same way under every strategy: sum the gradients, run the commit
all-reduce with the step vote, and settle the outcome.

An engine defines how gradients are summed (`reduce`), which numbers are summed with the step vote,
and across which ranks (`sum_commit`), and how the result is used (`take_commit`). A rank that
missed the commit all-reduce receives the result from a peer and passes it to the same `take_commit`
(`formation.py`). Runs on the training thread, outside of passes or at their end."""

from __future__ import annotations

from typing import Protocol

from shoal_common.errors import MembershipChanged
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.state.strategy_interface import TrainingEngine


class StepOwner(Protocol):
    """Owner of a step: the run's lifecycle, or the session of one of several models."""

    def step_vote(self, step: Step) -> list[float]: ...
    def mark_lost(self, error: BaseException) -> None: ...
    def settle_step(self, step: Step) -> None: ...


def reduce_and_commit(owner: StepOwner, engine: TrainingEngine, step: Step) -> None:
    """Reduces and commits the current step, and returns when its outcome is known: either all
    gradients have been summed and the commit all-reduce has succeeded, or the survivors have agreed
    that the step is aborted. If called again, only checks that no gradients have been added since.
    Raises ShoalError."""
    if step.share is not None and step.lost is None:
        engine.reduce(step)
        if step.phase is StepPhase.PREPARED and step.lost is None:
            _commit(owner, engine, step)
    if step.lost is not None:
        owner.settle_step(step)


def _commit(owner: StepOwner, engine: TrainingEngine, step: Step) -> None:
    """Runs the commit all-reduce of a prepared step and passes its result to `step` and `engine`.
    On failure, marks the step as failed."""
    vote = owner.step_vote(step)
    try:
        summed, payload = engine.sum_commit(step, vote)
        failpoint("step.summed")
    except MembershipChanged as error:
        owner.mark_lost(error)
        return
    step.decide(summed)
    engine.take_commit(payload)
