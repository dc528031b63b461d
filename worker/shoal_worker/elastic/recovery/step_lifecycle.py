"""Begins the run's steps at step boundaries. Commits steps to which every rank has contributed, and
aborts all others.

- A step begins at a step boundary (`step_boundaries.py`). If the last step vote has requested a
  change of the membership, it takes place there, on all ranks.
- A step is committed if at least one surviving rank has received the result of its commit
  all-reduce (`step.py`). Then every survivor applies it, and its script receives COMMITTED.
  Otherwise, no rank applies it, all scripts receive LOST, and the loader deals the same samples
  again.
- A failure inside a step never raises an exception in the user's forward or backward pass. When the
  step's outcome is needed (`reduce_and_commit`), the survivors form the next generation and tell
  each other which results they have received (`formation.py`). `finish_step` returns when that
  generation is established.

Implements the interface `LoaderSession` for loaders. Engines call it through the session
(`strategy_interface.py`). `CommittedState` owns the step in progress and the script's phase. All
methods run on the training thread, except `mark_lost`, which a collective's callback may call.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.loader_interface import (
    Leases,
    LeftOver,
    Placement,
    Share,
    StateLostError,
    StepSource,
    StepStatus,
    StopTraining,
    WeighRows,
)
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.step import Difference, Step, StepPhase, not_finished
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.divergence import ends_apart, settings_apart, steps_apart
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.recovery.formation import Formation
from shoal_worker.elastic.recovery.return_to_checkpoint import ReturnToCheckpoint
from shoal_worker.elastic.recovery.step_boundaries import ALONE, Departure, StepBoundaries
from shoal_worker.elastic.recovery.step_commit import reduce_and_commit
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.replicas_compared import (
    compare_after_step,
    compare_before_update,
    note_last_state,
)
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.randomness import seed_generators
from shoal_worker.state.tree import flatten

_log = logging.getLogger(__name__)


class StepLifecycle:
    """Begins, commits and aborts steps."""

    def __init__(
        self,
        held: CommittedState,
        formation: Formation | None,
        departure: Departure,
        *,
        operation: Callable[[str], object],
        progress: ProgressMeter,
        metrics: WorkerMetrics,
        drain_grace: timedelta = timedelta(0),
        speed: float | None = None,
    ) -> None:
        """`formation`: None in a world of one. `operation`: function that runs an operation of the
        given kind in which ranks only wait for each other. `drain_grace`: see `StepBoundaries`.
        `speed`: see `LoaderSession.speed`.
        """
        self._held = held
        self._speed = speed
        self._formation = formation
        self._elastic = formation is not None
        self._state_checked = False
        self._boundaries = StepBoundaries(held, formation, drain_grace=drain_grace)
        self.returning = ReturnToCheckpoint(held, self._boundaries)
        self._departure = departure
        self.before_step: Callable[[], None] = lambda: None
        """Callback that runs whenever a step begins."""
        self._stop: StopTraining | None = None
        """StopTraining that was raised at the current step's boundary, or while the survivors were
        determining the step's outcome. It takes effect when the step ends."""
        self.diverged: str | None = None
        """Error message if state that must be the same on all ranks was found to differ. From then
        on, no step is committed, even if the script catches the error.
        """
        self.outcome: StepStatus | None = None
        """Outcome of the script's last finished step; None before the first."""
        self._operation = operation
        self._progress = progress
        self._metrics = metrics

    @property
    def step(self) -> Step | None:
        """Step in progress."""
        return self._held.step

    @property
    def _group(self) -> Group | None:
        """Connected ranks that take steps in the current generation; None in a world of one."""
        return self._formation.working if self._formation is not None else None

    # ------------------------------------------------------------------- LoaderSession: the loaders

    def register_source(self, source: StepSource) -> None:
        """Registers a training loader (`LoaderSession.register_source`)."""
        self._held.add_source(source)

    def begin_step(self, source: StepSource | None) -> Placement:
        """Begins a step at a step boundary (`LoaderSession.begin_step`). `source`: the loader; None
        in a loop without a Shoal loader."""
        if self.diverged is not None:
            raise self._divergence(self.diverged)
        step = self.step
        if step is not None and (step.left or (step.source is None and source is not None)):
            # The script does not intend to finish this step: it has only looked at a batch, or run
            # a forward pass before the loop (a dry run, a summary).
            if not step.left and self._held.engine.partly_updated:
                raise PreconditionError(
                    "an optimizer was stepped twice for one batch, or before the loop began. "
                    "With several models, each optimizer may step at most once per batch; "
                    "request a new batch for each further step",
                    reason="STEP_NOT_FINISHED",
                )
            self._held.engine.discard_step()
            step = self._held.step = None
        if step is not None and step.handed_out:
            engine = self._held.engine
            raise not_finished(
                elsewhere=step.source is not source and engine.partly_updated,
                asynchronous=engine.asynchronous,
            )
        if step is not None and step.source is source and self._boundaries.settled(step.placement):
            return step.placement
        step = self._begin(source)
        while self._held.engine.idle:
            # the ranks are assigned to replicas in the run's first step, and this rank is a spare
            step = self._begin(source)
        self._progress.entered()
        return step.placement

    def _begin(self, source: StepSource | None) -> Step:
        """Handles the step boundary, and begins a step of `source`."""
        self._held.step = None
        self._held.registered.put_back_again()
        self.before_step()
        if self._departure.stopped is not None:
            raise StopTraining(self._departure.stopped)
        try:
            self._settle(source)
        except LeftOver as alone:
            self._departure.exit_spare(str(alone))
        except StopTraining as stop:
            if self._held.phase.replaying or self._held.engine.idle:
                # no state, so the rest of this process's script has nothing to report
                self._departure.exit_drained(str(stop))
            if not self._peers_have_ended(self._held.steps) or source is None:
                self._departure.obey(stop)
                raise
            # raised later: if the script only looks at the batch and then leaves its loop, it
            # behaves like its peers' scripts
            self._stop = stop
        step = self._held.begin_step(self._boundaries.placement, source)
        if self._stop is not None:
            step.fail(str(self._stop))
        self._held.phase.resume()
        self._held.registered.step_begins()
        self._held.engine.step_begins()
        self._progress.begun()
        return step

    def enter_epochs(self, source: StepSource, *, call: str) -> int:
        """Enters a loop over epochs and returns its first epoch (`LoaderSession.enter_epochs`)."""
        if self._departure.stopped is not None:
            raise StopTraining(self._departure.stopped)
        if self._held.early_stop.passes(source.name):
            raise StopTraining("early stopping had ended this loop before the resume")
        if not self._held.phase.holds_state or self._held.engine.asynchronous:
            self.begin_step(source)
        return self._held.enter_epochs(source, call)

    def epochs_left(self, source: StepSource) -> None:
        """Records that the script has left a loop over epochs (`LoaderSession.epochs_left`)."""
        if not self._held.engine.asynchronous:
            self._held.early_stop.left(source.name, step=self._held.steps)

    def epoch_opens(self, source: StepSource, epoch: int, *, epochs: int, call: str) -> None:
        """Records that a loop over epochs hands out `epoch` (`LoaderSession.epoch_opens`). On the
        first rank, warns if the loop has another length than in the checkpoint."""
        differs = self._held.epoch_opens(source, epoch, call)
        if differs and (self._formation is None or self._formation.is_first):
            _log.warning("%s", differs)
        self._progress.takes_own_steps = self._held.engine.asynchronous
        self._progress.steps_in_all = self._held.steps_in_all(
            source, epochs, known=self._progress.steps_in_all
        )

    def is_elsewhere(self, source: StepSource, epoch: int) -> bool:
        """Returns whether a joiner's script must skip this iteration
        (`LoaderSession.is_elsewhere`)."""
        return self._held.phase.replaying and self._boundaries.peers_elsewhere(source, epoch)

    @property
    def waited_s(self) -> float:
        """Total time in seconds that the training thread has waited for its peers
        (`LoaderSession.waited_s`)."""
        return self._progress.waits.total_s

    @property
    def steps_alone(self) -> bool:
        """True if ranks take steps independently (`LoaderSession.steps_alone`)."""
        return self._held.engine.steps_alone

    @property
    def speed(self) -> float | None:
        """Relative speed set by the user (`LoaderSession.speed`)."""
        return self._speed

    def assign(self, share: Share) -> None:
        """Creates the step with this rank's share (`LoaderSession.assign`)."""
        step = self.require()
        if (
            share.total_weight is None
            and share.micro_batches is None
            and not self._held.engine.steps_alone
        ):
            summed = self.sum_numbers([share.weight])
            share = dataclasses.replace(
                share, total_weight=summed[0] if summed is not None else max(share.weight, 1.0)
            )
        self._progress.share = share.of_equal
        step.assign(share)
        step.handed_out = True
        may_be_lost = self._elastic and not self._held.engine.asynchronous
        self._held.registered.step_taken(
            may_be_lost=may_be_lost, comes_again=step.source is not None
        )
        if self._held.phase.replaying:
            step.first_live = True
            self._held.phase.arrive()
            self._held.arrived(step.source)
        else:
            self._held.reached(step.source)

    def sum_numbers(self, values: Sequence[float], *, or_own: bool = False) -> list[float] | None:
        """Sums numbers across all ranks (`LoaderSession.sum_numbers`)."""
        if self._held.engine.steps_alone and not or_own:
            raise ConfigurationError(
                "a ShardedStream needs an exchange between ranks in every step, but under this "
                "strategy ranks take steps independently; use another strategy, or a stream that "
                "every rank reads (an IterableDataset)"
            )
        step = self.require()
        if step.lost is not None:
            return None
        group = self._group
        if group is not None and group.generation.number != step.placement.generation:
            return None  # the peers may be at a different position
        if group is None or group.world_size == 1 or self._held.engine.steps_alone:
            return [*values]
        try:
            return group.sum_numbers(values)
        except MembershipChanged as error:
            self.mark_lost(error)
            return None

    def offer_numbers(self, values: Sequence[float]) -> None:
        """Stores an offer for the end of the round (`LoaderSession.offer_numbers`)."""
        self.require().offered = values

    def begin_micro_batch(
        self,
        *,
        index: int,
        weight: float,
        samples: int,
        key: Sequence[int],
        weigh: WeighRows | None,
    ) -> None:
        """Begins a micro-batch before it is handed out (`LoaderSession.begin_micro_batch`)."""
        step = self.require()
        step.handed_out = True
        step.taken += 1
        step.micro_batch, step.micro_batch_index, step.weigh = weight, index, weigh
        step.samples = samples
        seed_generators(key)
        if step.in_micro_batches:
            self._held.engine.micro_batch_begins()
        else:
            self._held.engine.batch_begins()

    def end_micro_batch(self) -> None:
        """Ends the current micro-batch after its backward pass
        (`LoaderSession.end_micro_batch`)."""
        step = self.step
        if step is None or step.micro_batch is None:
            return
        weight, step.micro_batch, step.weigh = step.micro_batch, None, None
        step.micro_batches_weight += weight
        if step.in_micro_batches and step.lost is None:
            self._held.registered.check_scalers()
            self._held.engine.micro_batch_ends(weight)

    def finish_batches(self) -> None:
        """Reduces the gradients after the inner loop over micro-batches
        (`LoaderSession.finish_batches`)."""
        if self.step is None:
            raise PreconditionError(
                "optimizer.step() was called inside the loop over the step's micro-batches; call "
                "it after that loop"
            )
        self.step.handed_out = True
        self.reduce_and_commit()

    def loop_left(self, source: StepSource) -> None:
        """Records that the script has left the current step's loop (`LoaderSession.loop_left`)."""
        step = self.step
        if step is not None and step.source is source and step.handed_out:
            if step.first_live and not step.left:
                self._held.phase.fall_behind()
            step.left = True
            self.drop_partly_updated()
        elif step is None:
            # the batch of an aborted step will not be repeated in this loop
            self._held.registered.put_back_again()

    def loop_ended(self) -> None:
        """Computes digests of the state at the end of a loop (`LoaderSession.loop_ended`)."""
        note_last_state(self._held, self._group)

    def drop_partly_updated(self) -> None:
        """Undoes the current step's updates if only some of several models have been updated and
        the step will not be finished.
        """
        if self.step is not None and self._held.engine.partly_updated:
            self._held.registered.step_undone()
            self._held.engine.discard_step()
            self._held.step = None

    def batch_passed(self, source: StepSource) -> None:
        """Ends a step that has updated only some of several models
        (`LoaderSession.batch_passed`)."""
        step = self.step
        if step is not None and step.source is source and self._held.engine.partly_updated:
            self.finish_step(lambda: None)

    def passed_over(self, source: StepSource) -> None:
        """Records that an iteration has ended without steps (`LoaderSession.passed_over`)."""
        self._held.registered.passed_over()

    def end_epoch(self, source: StepSource) -> None:
        """Waits until all ranks have ended the epoch (`LoaderSession.end_epoch`)."""
        if (
            self._held.has_engine
            and not self._held.engine.asynchronous
            and self._departure.stopped is None
        ):
            self._operation("end of epoch")

    def lease_batches(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Leases batches for this rank (`LoaderSession.lease_batches`). Stops training in this
        process if the job has stopped."""
        try:
            return self._held.engine.lease_batches(
                loader=loader,
                epoch=epoch,
                batches_in_epoch=batches_in_epoch,
                finished=finished,
                want=want,
                at_hand=at_hand,
            )
        except StopTraining as stop:
            self._departure.obey(stop)
            raise

    def wait_for_others(self, what: str | None) -> None:
        """Records what this rank is waiting for (`LoaderSession.wait_for_others`)."""
        self._progress.waits.hold(what)

    # --------------------------------------------------------------------------------- the strategy

    def require(self) -> Step:
        """Returns the current step. Raises PreconditionError if there is none."""
        if self.step is None:
            raise PreconditionError(
                "no step has begun; iterate over the loader, or call the model, before "
                "optimizer.step()"
            )
        return self.step

    def ensure_step(self) -> Step:
        """Returns the current step. In a loop without a Shoal loader, begins a step if there is
        none.

        If a joiner's script has loaders but has not reached its loop, returns a placeholder step
        that does not belong to the run.
        """
        if self._rehearsing:
            return Step(
                placement=ALONE,
                source=None,
                share=Share(weight=1.0, total_weight=1.0, micro_batches=None),
            )
        step = self.step
        if (
            step is not None
            and step.source is not None
            and not step.handed_out
            and self._held.engine.asynchronous
        ):
            # The loader has not handed out a batch: it found none to lease at the end of its epoch,
            # or the script is between two epochs. This pass belongs to a loop without a loader.
            self._held.step = None
        if self.step is None:
            try:
                placement = self.begin_step(None)
            except StopTraining:
                if self._peers_have_ended(self._held.steps):
                    raise self._apart_from_the_end(self._held.steps) from None
                sys.exit(0)  # without a Shoal loader, nothing else ends the loop
            self.assign(
                Share(weight=1.0, total_weight=float(placement.world_size), micro_batches=None)
            )
        return self.require()

    def step_vote(self, step: Step) -> list[float]:
        """Returns this rank's part of the step vote. `step`: the run's step or, if there are
        several models, one model's step. Raises PreconditionError if this rank's part of the step
        is incomplete."""
        step.check_complete()
        step.evaluated = self._held.evaluations.digest
        return self._boundaries.step_vote(step)

    def settle_collectives(self) -> None:
        """Waits until all collectives issued in the step have ended (`Group.settle`). If one has
        failed, marks the step as failed."""
        group = self._formation.group if self._formation is not None else None
        if group is not None and self.require().lost is None:
            try:
                group.settle()
            except MembershipChanged as error:
                self.mark_lost(error)

    def prepare_step(self) -> None:
        """Marks the step as prepared (`StepControl.prepare_step`). Does nothing if the step has
        failed."""
        self.settle_collectives()
        self.require().prepare()

    def mark_lost(self, error: BaseException) -> None:
        """Marks the step as failed because a collective has failed. May be called by a collective's
        callback."""
        step = self.step
        if step is not None:
            step.fail(str(error))
            if self._formation is not None:
                self._formation.failed(str(error))

    def abort_step(self, reason: str) -> None:
        """Aborts the current step, without communication. Ranks that take steps together must all
        make the same decision."""
        step = self.require()
        step.fail(reason)
        step.abort()

    def settle_step(self, step: Step) -> None:
        """Waits until the outcome of the current step is known. If its group has failed before this
        rank received the result of the commit all-reduce, forms the next generation and asks the
        peers there. The step is committed if a survivor has received the result, otherwise aborted.
        Raises ShoalError."""
        if not step.unresolved or self._stop is not None:
            return
        # Peers may receive the committed state in the following call.
        self._held.registered.withdraw()
        self._held.engine.withdraw_updates()
        try:
            self._boundaries.ask(step.lost or "lost")
        except StopTraining as stop:
            self._stop = stop
            _log.warning(
                "the outcome of step %d is unknown, and no peer is left that could know it: %s",
                self._held.steps,
                stop,
            )
        if step.unresolved:
            step.abort()
        if step.phase is StepPhase.COMMITTED:
            self._held.engine.reinstate_updates()
            self._held.registered.reinstate()

    def reduce_and_commit(self) -> None:
        """Sums the gradients and commits the step (`StepControl.reduce_and_commit`)."""
        engine, step = self._held.engine, self.step
        if step is not None:
            reduce_and_commit(self, engine, step)

    def reduce_if_complete(self) -> None:
        """Commits the step as soon as the backward pass of this rank's only batch has ended. Does
        nothing in a step with micro-batches.
        """
        if not self._rehearsing and not self.require().in_micro_batches:
            self.reduce_and_commit()

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Ends the current step. If it is committed, calls `apply` and returns COMMITTED. If it is
        aborted, forms a new group if necessary and returns LOST.

        `apply` updates the parameters. If it raises an exception, this rank's state is torn: the
        exception propagates, and the rank never sends its state to others.
        """
        self.outcome = self._finish(apply)
        return self.outcome

    def _finish(self, apply: Callable[[], None]) -> StepStatus:
        if self._rehearsing:
            self._abort()
            return StepStatus.LOST
        step, engine = self.require(), self._held.engine
        if self.diverged is not None:
            raise self._divergence(self.diverged)
        self._check_sound()
        engine.reinstate_updates()
        step.check_complete()
        self._held.check_repeated(step)
        self.end_micro_batch()
        reduce_and_commit(self, engine, step)
        if step.lost is not None:
            self._lose(step)
            return StepStatus.LOST
        self.check_agreement(step, engine)
        if step.refused is not None:
            raise step.refused
        self._apply(apply, engine)
        self._commit(step, engine)
        self._check_state_travels()
        failpoint("session.after_commit")
        if step.control is not None:
            self._compare_ranks(step, engine)
        self._end(engine, updated=True)
        return StepStatus.COMMITTED

    def check_agreement(self, step: Step, engine: TrainingEngine) -> None:
        """Checks that all ranks take the same step and make the same update. If their parts of the
        step vote differ, raises PreconditionError, on all ranks. `step`, `engine`: step and engine
        of the run, or of one model if there are several.
        """
        held = self._held
        match step.difference:
            case Difference.POSITION:
                raise steps_apart(held.place(step.source), step.source, self._group, step.of)
            case Difference.SETTINGS:
                raise settings_apart(held.registered.settings, self._group)
            case Difference.WRITES:
                raise engine.writes_apart()
            case Difference.WRITES_BETWEEN:
                self._compare_before_update(engine.unsharded_everywhere())

    def apply_within(self, apply: Callable[[], None]) -> None:
        """Updates one of several models in a step whose outcome is not yet known. If `apply` raises
        an exception, this rank's state is torn."""
        self._check_sound()
        self._apply(apply, self._held.engine)

    def _check_sound(self) -> None:
        """Checks that the state may be changed. Raises PreconditionError if the state is torn."""
        if self._held.phase.now is Phase.ARRIVING:
            # the script has not merely looked at its first training batch, because it finishes
            # the step after its loop
            self._held.phase.arrive()
        if self._held.phase.now is Phase.TORN:
            raise PreconditionError(
                "an update of this process failed midway, which left its state inconsistent; do "
                "not catch that error: let it end the process, so that a replacement receives "
                "the peers' state",
                reason="STATE_TORN",
            )

    def _apply(self, apply: Callable[[], None], engine: TrainingEngine) -> None:
        held = self._held
        held.registered.check_groups()
        failpoint("session.before_apply")
        here = not engine.asynchronous  # otherwise only values on the servers change, if any
        if here:
            held.phase.tear()  # the state stays torn if the following code raises
        held.registered.applying = True
        try:
            apply()
        finally:
            held.registered.applying = False
        failpoint("session.after_apply")
        if here:
            held.phase.mend()

    def _check_state_travels(self) -> None:
        """Checks that the state can be sent to joiners. Called after this process's first committed
        step, which creates the optimizer's state. Raises ConfigurationError (STATE_UNSUPPORTED) if
        the state cannot be sent, instead of failing only when a joiner needs it."""
        if self._state_checked or not self._elastic or self._held.engine.asynchronous:
            return
        self._state_checked = True
        try:
            self._held.engine.check_optimizer_state()
            flatten(self._held.capture())
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}. A run must be able to send its state to workers that join, and to "
                "save it in checkpoints",
                reason=error.reason,
            ) from error

    def note_inputs(self, *inputs: Any) -> None:
        """Records the model's inputs in a training call, for comparison with other ranks' inputs.
        Inputs from a Shoal loader are not recorded, because the loader gives each rank different
        samples."""
        held, step = self._held, self.step
        if step is not None:
            step.touched = True
        if (
            held.batches.due
            and (step is None or step.source is None)
            and not self._rehearsing
            and self._compares_batches
        ):
            held.batches.note(inputs)

    @property
    def _compares_batches(self) -> bool:
        group = self._group
        return (
            group is not None
            and group.world_size > 1
            and self._held.engine.consistency_check_every > 0
        )

    def note_evaluated(self, *inputs: Any) -> None:
        """Records the model's inputs in a call outside of training. A call within a step is not
        recorded, because it is not an evaluation; it may run a teacher model, for example.
        """
        evaluations = self._held.evaluations
        if (
            evaluations.due
            and self.step is None
            and not self._held.phase.replaying
            and self._compares_batches
        ):
            evaluations.note(inputs)

    def _compare_before_update(self, whole: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Compares the ranks' state before an update, because they have recorded different writes
        between steps. The values may still be the same. `whole`: state that every rank has in full.
        Raises PreconditionError (REPLICAS_DIVERGED), on all ranks.
        """
        group = self._group
        if group is None or group.world_size == 1 or self._held.engine.consistency_check_every == 0:
            return
        self.diverged = compare_before_update(self._held, whole, self._held.engine.working(group))
        if self.diverged is not None:
            raise self._divergence(self.diverged)

    def _compare_ranks(self, step: Step, engine: TrainingEngine) -> None:
        """Compares the ranks' batches in the first steps of a loop without a Shoal loader, the
        evaluations since the last step and, every few steps, the ranks' state. Raises
        PreconditionError (SAME_BATCHES, REPLICAS_DIVERGED), on all ranks."""
        held, group = self._held, self._group
        if (
            step.source is None
            and held.batches.due
            and self._compares_batches
            and group is not None
        ):
            held.batches.compare(group, step.placement)
        held.evaluations.conclude(step, warns=group is not None and group.rank == 0)
        self.diverged = compare_after_step(held, engine, group)
        if self.diverged is not None:
            raise self._divergence(self.diverged)

    @staticmethod
    def _divergence(said: str) -> PreconditionError:
        error = PreconditionError(said, reason="REPLICAS_DIVERGED")
        error.on_all_ranks = True
        return error

    def give_up_step(self, stop: StopTraining) -> StepStatus:
        """Aborts the current step of asynchronous training, because the run has ended for this
        member. Returns LOST.
        """
        self._abort()
        self._departure.obey(stop)
        self.outcome = StepStatus.LOST
        return self.outcome

    @property
    def _rehearsing(self) -> bool:
        """True if a joiner's script has not reached its loop yet. Calls to the model then do not
        belong to a step. Always False in a loop without a Shoal loader, where the first call to the
        model begins the first step.
        """
        return self.step is None and self._held.phase.replaying and bool(self._held.sources)

    def leave_peers(self) -> None:
        """Switches to a world of one after this process has left its job."""
        self._formation = None
        self._boundaries.leave_peers()
        self._held.phase.be_alone()

    def _commit(self, step: Step, engine: TrainingEngine) -> None:
        held, source, progress = self._held, step.source, self._progress
        before = held.samples
        held.committed(step)
        held.registered.step_committed()
        engine.commit_step()
        samples = 0
        if source is not None:
            samples = source.committed(
                step.placement, known=step.known, pushed=step.pushed, summed=step.summed
            )
            progress.epoch = source.epoch
        if not held.in_round:
            held.operations.committed()
        progress.committed(steps=held.steps, samples=samples, loss=step.mean_loss)
        if progress.tally_writer is not None:
            progress.tally(
                held.steps,
                held.samples,
                held.samples - before,
                generation=self._boundaries.generation,
                asynchronous=engine.asynchronous,
                known=step.known,
                pushed=step.pushed != (),
            )
        self._boundaries.committed(step)

    def _lose(self, step: Step) -> None:
        """Aborts the step, as all other ranks do."""
        held = self._held
        _log.warning("step %d is lost: %s", held.steps, step.lost)
        self._progress.lost()
        self._abort()
        reached = held.steps
        held.go_back()
        held.lost(step)
        if self._peers_have_ended(reached) and not held.engine.asynchronous:
            self._stop = None
            raise self._apart_from_the_end(reached)
        self._end(held.engine, updated=False)

    def _end(self, engine: TrainingEngine, *, updated: bool) -> None:
        """Ends the step. If its group has failed, forms a new group before the script receives the
        outcome. `updated`: True if the step is committed.

        If the state turns out to be lost, it is replaced with a checkpoint's state, and steps are
        repeated. The step's outcome does not change, because peers whose scripts were past this
        step when the group failed have already received the outcome.
        """
        stop, self._stop = self._stop, None
        try:
            if stop is not None:
                raise stop
            self._boundaries.step_ended(engine, updated=updated)
        except StopTraining as asked:
            self._departure.obey(asked)
        except StateLostError as lost:
            self.returning.go_back(lost)

    def _peers_have_ended(self, reached: int) -> bool:
        """Returns whether a peer's script has finished after at most `reached` steps. `reached`:
        number of steps that this process had committed before its current step, including steps of
        a round that has since been undone."""
        ended_with = self._boundaries.finished_steps
        return ended_with is not None and ended_with <= reached

    def _apart_from_the_end(self, reached: int) -> PreconditionError:
        return ends_apart(self._boundaries.finished_steps or 0, reached + 1)

    def _settle(self, source: StepSource | None) -> None:
        """Handles the step boundary with `StepBoundaries.settle`. If the state is lost, first
        returns to a checkpoint, or raises StateLostError."""
        try:
            self._boundaries.settle(source)
        except StateLostError as lost:
            self.returning.go_back(lost)
            self._boundaries.settle(source)

    def _abort(self) -> None:
        self._held.batches.drop()
        self._held.registered.step_aborted()
        self._held.engine.discard_step()
        self._held.step = None
