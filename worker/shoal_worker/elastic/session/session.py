"""The elastic session: this process's training run, alone or as a member of a job.

It combines parts, which make the decisions:

- `step_lifecycle.py`: begins, commits and aborts steps. Called by loaders (`loader_interface.py`),
  and by engines through the session (`strategy_interface.py`).
- `step_boundaries.py`: what happens between two steps, and how this process's part in the run ends.
- `formation.py`: forms generations, and brings their ranks to the same state.
- `committed_state.py`: the state that this process holds.
- `member.py`: its place among the ranks. `membership.py` and `link.py` get it from a coordinator,
  `fixed.py` from `shoal.launch`.

Here: opening and closing, identity, operations between steps, and the end of a run, which no rank
leaves while a peer may be in doubt about the last step. Operations are run again on a new group
until they succeed, unless a peer that finished them still has the result. Everything runs on the
training thread, except what `Membership`, `CoordinatorLink` and `StateDonor` do on theirs,
`mark_lost`, `is_gone`, and the check that `fence` gives.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
from shoal_common.errors import PreconditionError, ShoalError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.contract.loader_interface import StateLostError, StepStatus, StopTraining
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.row_store import RowStore
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.coordinator.member import LeaveReason, Member
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import Body, GroupChannel, Operations
from shoal_worker.elastic.group.transfer import StateDonor, StateExchange
from shoal_worker.elastic.group.waiting import Where
from shoal_worker.elastic.recovery.formation import GROUP_LOST, Formation
from shoal_worker.elastic.recovery.step_boundaries import Departure
from shoal_worker.elastic.recovery.step_lifecycle import StepLifecycle
from shoal_worker.elastic.session.files_written import WhenWritten
from shoal_worker.elastic.state.batches_compared import EvaluationComparison
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.replicas_compared import apart_at_the_end
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from shoal_worker.state.tree import StatePart

_log = logging.getLogger(__name__)

LAST_STEP_PATIENCE: Final = timedelta(seconds=30)
_LOOK: Final = timedelta(seconds=0.05)
"""Interval at which a leaving rank checks whether its peers have committed the last step, which
they report in heartbeats."""


def await_last_step(formation: Formation, held: CommittedState) -> None:
    """Returns when all peers have committed the last step. A peer that is in doubt about it asks in
    the next generation, which this rank forms with it. Waits no longer than LAST_STEP_PATIENCE
    while the coordinator is unreachable."""
    give_up_at = time.monotonic() + LAST_STEP_PATIENCE.total_seconds()
    while not formation.must_move and not formation.peers_have(held.steps):
        formation.settle()
        if time.monotonic() > give_up_at:
            _log.warning(
                "leaving without confirmation that all peers committed step %d, after waiting "
                "%.0f s for it",
                held.steps,
                LAST_STEP_PATIENCE.total_seconds(),
            )
            return
        time.sleep(_LOOK.total_seconds())


class Session:
    """Training run of one process. The `StrategySession` of its strategy; `lifecycle` is the
    `LoaderSession` of its loaders."""

    def __init__(
        self,
        settings: WorkerSettings,
        membership: Member | None,
        donor: StateDonor | None,
        metrics: WorkerMetrics,
    ) -> None:
        """`membership` and `donor`: both None in a world of one. If only `donor` is None, no state
        is sent (async_sgd)."""
        self.settings = settings
        self.metrics = metrics
        self.progress = ProgressMeter(metrics)
        self._membership = membership
        self._held = CommittedState(live=membership is None)
        self._exchange = StateExchange(donor, settings, metrics) if donor is not None else None
        self.donor = donor
        """Sends state to peers; None in a world of one."""
        self.missed: str | None = None
        """Reason why this process's end is a failure although its script considers it good."""
        self.outcome: StepStatus | None = None
        """Outcome of the last step that the script finished."""
        self._left_from: Generation | None = None
        """The generation in which this process sent its leave message."""
        self._left_as_first = True
        """True if it was the first of that generation, or of no generation."""
        self._formation: Formation | None = None
        if membership is not None:
            membership.observe(self.progress)
            self._formation = Formation(
                membership,
                self._held,
                self._exchange,
                settings=settings,
                metrics=metrics,
                progress=self.progress,
            )
        self._departure = Departure(membership, self._held)
        self.lifecycle = StepLifecycle(
            self._held,
            self._formation,
            self._departure,
            operation=self._confirm,
            progress=self.progress,
            metrics=metrics,
            drain_grace=timedelta(seconds=settings.drain_grace_s),
        )

    # ------------------------------------------------------------------------------------- identity

    @property
    def elastic(self) -> bool:
        """True if this is a member of a job or a rank of a launch; False in a world of one."""
        return self._membership is not None

    @property
    def membership(self) -> Member | None:
        """Membership among the ranks; None in a world of one."""
        return self._membership

    @property
    def registered(self) -> RegisteredState:
        """Objects registered by the user."""
        return self._held.registered

    @property
    def engine(self) -> TrainingEngine:
        """Engine of the run's model. Used while a step is in progress."""
        return self._held.engine

    @property
    def operations(self) -> Operations:
        """Operations between steps since the last commit."""
        return self._held.operations

    @property
    def is_joining(self) -> bool:
        """True if this process replays its script and has not reached its first live batch, or is a
        spare and will."""
        return self._held.phase.replaying or (self._held.has_engine and self._held.engine.idle)

    @property
    def is_redoing(self) -> bool:
        """True if committed steps were undone, and this process's script, ahead of its state, has
        not reached the loader's next one."""
        return self._held.phase.now is Phase.RETURNED

    @property
    def has_left(self) -> bool:
        """True if this process has left its job, which continues without it, so that its state
        counts for nothing."""
        return self._held.phase.now is Phase.LEFT

    @property
    def group(self) -> Group | None:
        """Connected ranks of this generation; None in a world of one and before the first."""
        return self._formation.group if self._formation is not None else None

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a world of one."""
        generation = self._generation
        return generation.rank if generation is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        generation = self._generation
        return generation.world_size if generation is not None else 1

    @property
    def script_place(self) -> tuple[int, int]:
        """(rank, number of ranks) for scripts; (-1, -1) while this process replays its script and
        has neither, as in torch for a process that belongs to no group. After `close` the last
        values remain: a script that has left its job must not mistake itself for rank 0."""
        left = self._left_from
        if left is not None:
            return left.rank, left.world_size
        return (-1, -1) if self._held.phase.replaying else (self.rank, self.world_size)

    @property
    def when_written(self) -> WhenWritten | None:
        """Writer and time of a file written now, also after `close`; None if the script's actions
        do not belong to the run."""
        generation = self._left_from or self._generation
        if generation is None or self.is_joining or self.is_redoing:
            return None
        return WhenWritten(generation.rank, generation.number, self.steps)

    @property
    def is_first(self) -> bool:
        """True if this process acts for all ranks, for example to write files: it has the state,
        and no lower rank has."""
        if self._formation is None:
            return self._left_as_first
        return not self.is_joining and self._formation.is_first

    @property
    def generation(self) -> int:
        """Number of the generation that this process works in; 0 before the first and in a world of
        one."""
        generation = self._generation
        return generation.number if generation is not None else 0

    @property
    def ranks_may_come(self) -> bool:
        """True if ranks may join, as in `StrategySession`."""
        return self._membership is not None and self._membership.only_backend is None

    @property
    def begins(self) -> bool:
        """True if the ranks are those that the run was started with: none has left or joined
        yet."""
        generation = self._generation
        return generation is None or generation.begins_run

    @property
    def steps(self) -> int:
        """Committed steps of the run."""
        return self._held.steps

    def on_waiting(self, where: Callable[[], Where | None]) -> None:
        """Sets the function that returns the script's position when it waits for its peers: see
        `Waiting.where`."""
        if self._formation is not None:
            self._formation.where = where

    @property
    def strategy(self) -> str:
        """Name of the strategy; empty before `as_distributed`."""
        return self._held.engine.strategy if self._held.has_engine else ""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.settings.local_index % torch.cuda.device_count())

    @property
    def default_backend(self) -> str:
        """Backend of groups if the user names none."""
        only = self._membership.only_backend if self._membership is not None else None
        return only or ("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def _generation(self) -> Generation | None:
        return self._formation.generation if self._formation is not None else None

    # ------------------------------------------------------------------------------------ beginning

    def join(self) -> None:
        """Opens the session with the coordinator. In a new job, waits for a rank; a joiner of a
        running one first replays its script."""
        membership = self._membership
        assert membership is not None
        try:
            joining = membership.join()
        except PreconditionError as refusal:
            if refusal.reason != "RUN_ENDED":
                raise
            _log.warning("the run has ended; there is nothing left to join")
            raise SystemExit(0) from refusal
        except StopTraining as stop:
            _log.info("leaving before the coordinator answered: %s", stop)
            raise SystemExit(0) from stop
        if joining:
            return
        self._await_rank(membership)
        generation = membership.link.newest_generation
        # A member without a rank in the first generation joins a later one, whose other members
        # have begun.
        if (
            generation is None
            or len(generation.joining) == generation.world_size
            or generation.rank not in generation.joining
        ):
            self._held.phase.begin()

    def attach(self, engine: TrainingEngine) -> None:
        """Adds `engine` to the session and gives all ranks the first one's weights.

        Raises:
            PreconditionError: there is one already.
        """
        held, membership, formation = self._held, self._membership, self._formation
        held.set_engine(engine)
        if self.progress.tally_writer is not None:
            self.progress.tally_writer.strategy(engine.strategy)
        if membership is None or formation is None:
            held.begin(0, secrets.token_hex(8))
            return
        membership.serve(engine)
        if engine.asynchronous:
            if not held.phase.holds_state:
                self._await_rank(membership)
                held.phase.begin()
            held.begin(0, self.settings.job_id)  # its workers begin at any time
        elif held.phase.holds_state:
            try:
                formation.synchronize_first()
            except StopTraining as stop:
                self._departure.exit_drained(str(stop))  # as in _await_rank

    def _await_rank(self, membership: Member) -> None:
        membership.link.ready()
        try:
            membership.await_generation()
        except StopTraining as stop:
            # it never took part in the run, so its script has nothing to do
            self._departure.exit_drained(str(stop))

    def trains(self, engine: object) -> bool:
        """Returns whether `engine` is the run's model; a clone of it is not."""
        return self._held.has_engine and self._held.engine is engine

    # ----------------------------------------------------------------- steps: see `StrategySession`

    @property
    def step(self) -> Step | None:
        """Step in progress."""
        return self._held.step

    def ensure_step(self) -> Step:
        """Returns the current step; begins one in a user's own loop, where no loader does."""
        return self.lifecycle.ensure()

    def note_inputs(self, *inputs: Any) -> None:
        """Records the inputs of a training call of the model. See `BatchComparison`."""
        self.lifecycle.note_inputs(inputs)

    def note_evaluated(self, *inputs: Any) -> None:
        """Records that the model was called with `inputs`, but not to train. See
        `EvaluationComparison`."""
        self.lifecycle.note_evaluated(inputs)

    @property
    def evaluations(self) -> EvaluationComparison:
        """Evaluations of this rank outside of `shoal.evaluate`."""
        return self._held.evaluations

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Implements `StrategySession.note_trained`."""
        self._held.registered.note_trained(trained)

    def settle_collectives(self) -> None:
        """Implements `StepLifecycle.settle_collectives`."""
        self.lifecycle.settle_collectives()

    def prepare_step(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply the step. Does nothing if the step is lost."""
        self.lifecycle.settle_collectives()
        self.lifecycle.require().prepare()

    def mark_lost(self, error: BaseException) -> None:
        """Marks the step as lost because a collective failed. May be called from a collective's
        callback."""
        self.lifecycle.mark_lost(error)

    def abort_step(self, reason: str) -> None:
        """Aborts the current step, as every rank concludes by itself."""
        step = self.lifecycle.require()
        step.fail(reason)
        step.abort()

    def reduce_and_commit(self) -> None:
        """Implements `StrategySession.reduce_and_commit`."""
        self.lifecycle.reduce_and_commit()

    def reduce_if_whole(self) -> None:
        """Implements `StrategySession.reduce_if_whole`."""
        self.lifecycle.reduce_if_whole()

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Applies the step if every member's part is included; otherwise re-forms. See
        `StepLifecycle.finish`."""
        self.outcome = self.lifecycle.finish(apply)
        return self.outcome

    def give_up_step(self, stop: StopTraining) -> StepStatus:
        """Gives up the current step of asynchronous training because the run ended for this
        member."""
        self.outcome = self.lifecycle.give_up(stop)
        return self.outcome

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Keeps the state so that the steps committed from now on are undone if the group fails
        before `release`. See `CommittedState.keep`."""
        self._held.keep(replica)

    def release(self) -> None:
        """Confirms the steps since `keep` on all ranks."""
        self._held.release()

    # ----------------------------------------------------------------------------------- operations

    def operation(self, kind: str, body: Body, *, answers: bool = True) -> Any:
        """Runs `body` on all ranks and returns its result, which must be the same JSON value on
        every rank.

        Repeats it if the membership changes meanwhile. A joiner runs it alone. After steps were
        undone, every rank runs it alone: all ranks have the same state, but their scripts reach
        this point again at different times. This may also happen during the operation, if the state
        is found lost. If this process has become a spare, it cannot return an answer: the process
        ends (SystemExit), unless `answers` is False because nobody uses the answer.
        """
        self._check_between_steps(kind)
        formation = self._formation
        if self._membership is None and not self.has_left:
            alone = body(LocalChannel())
            self._held.operations.keep(alone)  # numbered as among ranks
            return alone
        if (
            formation is None
            or self._held.phase.replaying
            or self.has_left
            or self._held.engine.asynchronous
        ):
            return body(LocalChannel())
        while self.lifecycle.returning.under_way or not self.is_redoing:
            if self._held.engine.idle:
                if answers:
                    # Its answer would not be the run's.
                    self._departure.exit_spare(
                        "there are too few ranks for another replica that includes this rank, "
                        f"and its script has reached {kind}"
                    )
                break
            known, result = self._held.operations.take_known()
            if known:
                return result
            try:
                if self.row_store is not None:
                    # A rank that leaves may wait for rows that only this one pushes, and comes to
                    # this operation with them. An error of a server is not one of the group.
                    self.row_store.settle()
                try:
                    channel = formation.channel(kind)
                    failpoint("session.in_operation")
                    with self.operations.in_progress(kind):
                        result = body(channel)
                except GROUP_LOST as error:
                    formation.recover(error, in_operation=True)
                    continue
            except StopTraining as stop:
                # The job is stopped and the group is gone: there is no other to do it with.
                self._departure.obey(stop)
                return body(LocalChannel())
            except StateLostError as lost:
                self.lifecycle.returning.go_back(lost)
            else:
                self._held.operations.keep(result)
                failpoint("session.after_operation")
                self.progress.entered()
                return result
        return body(LocalChannel())

    def _check_between_steps(self, kind: str) -> None:
        """Raises PreconditionError in the middle of a step: a fault in the operation would require
        repeating it, and the step's gradients could not be kept."""
        step = self._held.step
        # The step of a user's own loop begins with any forward pass.
        own_loop = (
            step is not None
            and step.source is None
            and step.phase is StepPhase.OPEN
            and not self._held.engine.partly_updated
        )
        if (
            step is not None
            and step.handed_out
            and not step.left
            and not own_loop
            and not self._held.engine.asynchronous
        ):
            raise PreconditionError(
                f"{kind} was called inside a step; call it after optimizer.step(), before the "
                "next batch",
                reason="STEP_NOT_FINISHED",
            )
        self.lifecycle.drop_partly_updated()  # in a loop that was left

    def _confirm(self, kind: str) -> None:
        self.operation(kind, lambda channel: channel.exchange(b"") and None, answers=False)

    # ---------------------------------------------------------------------------------- checkpoints

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete committed state: model, optimizer (see `TrainingEngine`), registered
        objects, cursors. May share memory with them. Part of an operation."""
        return self._held.capture(self._held.engine.assemble(channel))

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the result of `assemble`; None if the state is not sharded.
        Part of an operation."""
        part = self._held.engine.part(channel)
        return replace(part, state=self._held.capture(part.state)) if part is not None else None

    def warn_of_given_up(self) -> None:
        """Warns like `CommittedState.warn_of_given_up`."""
        self._held.warn_of_given_up()

    @property
    def row_store(self) -> RowStore | None:
        """Rows of the model's sparse tables; None if it has none."""
        return self._held.engine.row_store if self._held.has_engine else None

    @property
    def run(self) -> str:
        """Name of the run in checkpoints, unique for each run that began from scratch."""
        return self._held.run

    @property
    def is_asynchronous(self) -> bool:
        """True if workers of this session's job begin and end at any time and take independent
        steps (`async_sgd`)."""
        return self._held.has_engine and self._held.engine.asynchronous

    @property
    def member_id(self) -> str:
        """This process's name in its generation; empty in a world of one."""
        generation = self._generation
        return generation.me.member_id if generation is not None else ""

    def is_gone(self, member_id: str) -> bool:
        """Returns whether a member of an earlier generation no longer belongs to the run.
        Thread-safe."""
        membership = self._membership
        return membership is not None and membership.has_left(member_id)

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """Lets this rank compute with the unsharded model, without its peers, within the block. All
        ranks of an operation enter it."""
        return self._held.engine.whole_for(channel) if self._held.has_engine else nullcontext()

    def replace_state(self, channel: Channel, captured: Mapping[str, Any] | None) -> None:
        """Gives all ranks the state that the first one read from a checkpoint (`captured`; None on
        the others). Part of an operation."""
        if captured is not None:
            # of a checkpoint: the script may draw its batches differently from the one that saved
            # it
            captured = {**self._held.with_own_tables(captured), "batches_compared": 0}
        if self._formation is not None and isinstance(channel, GroupChannel):
            self._formation.replace_state(channel, captured)
        elif captured is not None:  # in this process alone; peers will get it from here
            self._held.restore(captured)
            self._held.name = StateName(self.generation, int(captured["steps"]))

    def on_state_lost(self, fallback: Callable[[], bool]) -> None:
        """Sets the function that loads the newest checkpoint here and returns whether there was
        one. Called if all holders of the state are gone."""
        if self._formation is not None:
            self._formation.syncing.fallback = fallback

    def go_back_by(self, load: Callable[[], str | None]) -> None:
        """Sets the function that replaces the state with the newest checkpoint, together with all
        ranks, and returns why it cannot, or None. Called in a step when the remaining ranks hold
        only part of the state."""
        self.lifecycle.returning.load = load

    def cannot_return(self, captured: Mapping[str, Any]) -> str | None:
        """Returns why this process's script cannot continue from a checkpoint's state; None if it
        can."""
        return self._held.cannot_return(captured)

    def fence(self) -> Callable[[], None]:
        """Returns a check that this process may still publish its current state: it raises
        StaleGenerationError if the process was evicted since."""
        membership, generation = self._membership, self.generation
        return (
            (lambda: membership.check_current(generation))
            if membership is not None
            else lambda: None
        )

    # -------------------------------------------------------------------------------------- the end

    def on_close(self, callback: Callable[[], None]) -> None:
        """Registers a callback, called once before this process leaves its job."""
        self._departure.on_leave(callback)

    def close(self, *, failed: str | None = None) -> None:
        """Leaves the job: finished, or failed with a reason. Later calls find a world of one."""
        if failed is None:
            self.lifecycle.drop_partly_updated()
        if self._membership is not None:
            if self._held.phase.now is Phase.ARRIVING and failed is None:
                # It has a rank, and its peers wait for it. If this counted as a normal end of the
                # script, the run would be over for all.
                failed = self.missed = (
                    "the script finished without reaching the training loop that its peers are in"
                )
            if self.lifecycle.diverged is not None and failed is None:
                # the script has caught the error that reported this
                failed = self.missed = self.lifecycle.diverged
            if failed is None:
                self._await_the_others()
                self._departure.finish()
                failed = self.missed
            preempted = (
                self._formation is not None
                and self._formation.preempted
                and self._departure.stopped is not None
            )
            good = LeaveReason.DRAINED if preempted else LeaveReason.FINISHED
            apart = self._departure.send_leave(
                LeaveReason.FAILED if failed is not None else good, failed or ""
            )
            if apart:
                failed = self.missed = apart_at_the_end(apart)
        elif failed is None:
            self._departure.finish()
        if (
            failed is None
            and not self._held.phase.replaying
            and (unclaimed := self._held.unclaimed())
        ):
            _log.warning(
                "the loaded state of %s was not used, because this script created no object of "
                "that name. Give objects and loaders the same names as in the run that saved them",
                ", ".join(unclaimed),
            )
        self._held.registered.let_go()
        if self._exchange is not None:
            self._exchange.close()
        if self._membership is not None:
            self._left_from, self._left_as_first = self._generation, self.is_first
        self._membership = self._formation = self._exchange = None
        self.lifecycle.leave_peers()

    def _await_the_others(self) -> None:
        """Waits while another rank may still need this one: its part of the state, or its
        confirmation that the last step counts."""
        held, formation = self._held, self._formation
        has_part = (
            held.has_engine
            and not held.engine.asynchronous
            and not self.is_joining
            and not self.has_left
        )
        if formation is None or not has_part or held.steps == 0:
            return
        try:
            if held.engine.is_sharded and (self._departure.stopped is None or formation.healthy):
                self._confirm("end of the run")
            elif held.operations.finished == 0:
                # otherwise all have ended the last step, or could not have taken part
                await_last_step(formation, held)
        except (ShoalError, StopTraining) as error:
            # what was to be kept together is no longer needed
            if isinstance(error, ShoalError) and error.reason == "RANKS_DIVERGED":
                self.missed = str(error)
            _log.info("the ranks did not finish together: %s", error)
