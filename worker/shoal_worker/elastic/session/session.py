"""The elastic session: this process's part in a training run, as a member of a job or in a world of
one.

The session combines these parts, which make the decisions:

- `step_lifecycle.py`: begins, commits and aborts steps. Called by loaders (`loader_interface.py`)
  and engines (`strategy_interface.py`).
- `step_boundaries.py`: handles membership changes between two steps, and the end of this process's
  part in the run.
- `formation.py`: forms generations, and ensures that their ranks have the same state.
- `committed_state.py`: the state of the run in this process.
- `member.py`: this process's membership, assigned by a coordinator (`membership.py`, `link.py`) or
  by `shoal.launch` (`fixed.py`).

The session itself begins and ends this process's part in the run, provides its rank, and runs
operations between steps. At the end of a run, no rank leaves while a peer may be in doubt about the
last step. If the group fails in an operation, the operation is repeated on a new group, unless a
peer has finished it and still has the result.

Everything runs on the training thread, except the threads of `Membership`, `CoordinatorLink` and
`StateDonor`. Other threads may call only `StepLifecycle.mark_lost`, `is_gone` and the function
returned by `fence`.
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
from shoal_common.errors import CorruptDataError, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.generation import Generation
from shoal_worker.elastic.contract.loader_interface import Placement, StateLostError, StopTraining
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.row_store import RowStore
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.coordinator.member import LeaveReason, Member
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import Body, GroupChannel
from shoal_worker.elastic.group.transfer import StateDonor, StateExchange
from shoal_worker.elastic.group.waiting import Where
from shoal_worker.elastic.recovery.formation import GROUP_LOST, Formation
from shoal_worker.elastic.recovery.step_boundaries import Departure
from shoal_worker.elastic.recovery.step_lifecycle import StepLifecycle
from shoal_worker.elastic.session.files_written import WhenWritten
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.early_stop import EarlyStop
from shoal_worker.elastic.state.replicas_compared import apart_at_the_end
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from shoal_worker.state.tree import StatePart

_log = logging.getLogger(__name__)

LAST_STEP_PATIENCE: Final = timedelta(seconds=30)
_LOOK: Final = timedelta(seconds=0.05)
"""Interval at which a leaving rank checks whether its peers have committed the last step. Peers
report this in heartbeats."""


def await_last_step(formation: Formation, held: CommittedState) -> None:
    """Waits until all peers have committed the last step. If a peer is in doubt about the step,
    this rank takes part in the next generation, where the peer asks about the outcome. Waits at
    most LAST_STEP_PATIENCE while the coordinator is unreachable."""
    give_up_at = time.monotonic() + LAST_STEP_PATIENCE.total_seconds()
    while not formation.must_move and not formation.peers_have(held.steps):
        formation.settle()
        if time.monotonic() > give_up_at:
            _log.warning(
                "leaving without confirmation that all peers have committed step %d, after "
                "waiting %.0f s for it",
                held.steps,
                LAST_STEP_PATIENCE.total_seconds(),
            )
            return
        time.sleep(_LOOK.total_seconds())


class Session:
    """One process's part in a training run. Implements `StrategySession` for engines; `lifecycle`
    implements `StepControl` for engines and `LoaderSession` for loaders."""

    def __init__(
        self,
        settings: WorkerSettings,
        membership: Member | None,
        donor: StateDonor | None,
        metrics: WorkerMetrics,
    ) -> None:
        """`membership`: None in a world of one. `donor`: server that sends the state to peers; None
        in a world of one, or if state is not sent to peers (async_sgd)."""
        self.settings = settings
        self.metrics = metrics
        self.progress = ProgressMeter(metrics)
        self._membership = membership
        self._held = CommittedState(live=membership is None)
        self.registered = self._held.registered
        """Objects registered by the user."""
        self.operations = self._held.operations
        """Results of operations between steps since the last commit."""
        self.evaluations = self._held.evaluations
        """Record of evaluations that this rank runs without `shoal.evaluate`, for comparison with
        other ranks."""
        self._exchange = StateExchange(donor, settings, metrics) if donor is not None else None
        self.donor = donor
        """Server that sends the state to peers; None in a world of one, or if state is not sent to
        peers."""
        self.missed: str | None = None
        """Reason why this process counts as failed although its script succeeded; None if there is
        none."""
        self._left_from: Generation | None = None
        """This process's generation when it sent its leave message."""
        self._left_as_first = True
        """True if this process left as the first rank of its generation, or without a
        generation."""
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
            speed=settings.speed,
        )

    # ------------------------------------------------------------------------------------- identity

    @property
    def elastic(self) -> bool:
        """True if this process is a member of a job or a rank of a launch; False in a world of
        one."""
        return self._membership is not None

    @property
    def membership(self) -> Member | None:
        """Membership of this process; None in a world of one."""
        return self._membership

    @property
    def early_stop(self) -> EarlyStop:
        """Records which loop over epochs early stopping has ended, if any."""
        return self._held.early_stop

    @property
    def engine(self) -> TrainingEngine:
        """Engine that trains the run's model. Raises PreconditionError before `as_distributed`."""
        return self._held.engine

    @property
    def is_joining(self) -> bool:
        """True if this process is replaying its script and has not reached its first training
        batch, or if it is a spare, whose script will be replayed."""
        return self._held.phase.replaying or (self._held.has_engine and self._held.engine.idle)

    @property
    def is_redoing(self) -> bool:
        """True if committed steps have been undone and this process's script is ahead of its state.
        Becomes False with the loader's next step."""
        return self._held.phase.now is Phase.RETURNED

    @property
    def has_left(self) -> bool:
        """True if this process has left its job and the job continues. This process's state is then
        no longer the job's state."""
        return self._held.phase.now is Phase.LEFT

    @property
    def group(self) -> Group | None:
        """Connected ranks of the current generation; None in a world of one, and before the first
        generation."""
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
    def script_placement(self) -> Placement:
        """Generation, rank and number of ranks, for scripts. The rank and the number are -1 while
        this process is replaying its script and has no rank, as in torch for a process outside of a
        group. After `close`, the last values remain, so that the script of a process that has left
        its job does not act as rank 0."""
        generation = self._generation
        number = generation.number if generation is not None else 0
        ranked = self._left_from or generation
        if self._left_from is None and self._held.phase.replaying:
            return Placement(generation=number, rank=-1, world_size=-1)
        return Placement(
            generation=number,
            rank=ranked.rank if ranked is not None else 0,
            world_size=ranked.world_size if ranked is not None else 1,
        )

    @property
    def when_written(self) -> WhenWritten | None:
        """Rank, generation and step to record for a file written now. Remains available after
        `close`. None if the script's actions are not part of the run."""
        generation = self._left_from or self._generation
        if generation is None or self.is_joining or self.is_redoing:
            return None
        return WhenWritten(generation.rank, generation.number, self.steps)

    @property
    def is_first(self) -> bool:
        """True if this process acts on behalf of all ranks, for example to write files, because it
        is the lowest rank that has the state."""
        if self._formation is None:
            return self._left_as_first
        return not self.is_joining and self._formation.is_first

    @property
    def generation(self) -> int:
        """Number of this process's current generation; 0 before the first, and in a world of
        one."""
        generation = self._generation
        return generation.number if generation is not None else 0

    @property
    def newcomers(self) -> int:
        """Number of ranks in the current generation whose process had no rank in the previous
        generation."""
        generation = self._generation
        return len(generation.joining) if generation is not None else 0

    @property
    def ranks_may_come(self) -> bool:
        """True if further processes may join the job."""
        return self._membership is not None and self._membership.only_backend is None

    @property
    def begins(self) -> bool:
        """True if the run still has its initial ranks, because none has left or joined yet."""
        generation = self._generation
        return generation is None or generation.begins_run

    @property
    def steps(self) -> int:
        """Number of committed steps of the run."""
        return self._held.steps

    def on_waiting(self, where: Callable[[], Where | None]) -> None:
        """Sets the function that returns the script's position during a wait for peers; see
        `Waiting.where`."""
        if self._formation is not None:
            self._formation.where = where

    @property
    def strategy(self) -> str:
        """Name of the strategy; empty before `as_distributed`."""
        return self._held.engine.strategy if self._held.has_engine else ""

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.settings.local_index % torch.cuda.device_count())

    @property
    def default_backend(self) -> str:
        """Communication backend that is used if the user selects none."""
        only = self._membership.only_backend if self._membership is not None else None
        return only or ("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def _generation(self) -> Generation | None:
        return self._formation.generation if self._formation is not None else None

    # ------------------------------------------------------------------------------------ beginning

    def join(self) -> None:
        """Joins the job. In a new job, waits for a rank. In a running job, returns immediately;
        this process must first replay its script."""
        membership = self._membership
        assert membership is not None
        try:
            joining = membership.join()
        except PreconditionError as refusal:
            if refusal.reason != "RUN_ENDED":
                raise
            _log.warning("the run has already ended, so this process cannot join it")
            raise SystemExit(0) from refusal
        except StopTraining as stop:
            _log.info("leaving before the coordinator has answered: %s", stop)
            raise SystemExit(0) from stop
        if joining:
            return
        self._await_rank(membership)
        generation = membership.link.newest_generation
        # A member that has no rank in the first generation will join a later one, after other
        # members have begun training.
        if (
            generation is None
            or len(generation.joining) == generation.world_size
            or generation.rank not in generation.joining
        ):
            self._held.phase.begin()

    def refuse_second_call(self) -> None:
        """Raises PreconditionError if `as_distributed` has already been called. Must be the first
        check, because other checks would refuse the optimizer with a less helpful error."""
        self._held.refuse_second_engine()

    def attach(self, engine: TrainingEngine) -> None:
        """Sets the session's engine, and sends the first rank's weights to all other ranks.

        Raises:
            PreconditionError: the session already has an engine."""
        held, membership, formation = self._held, self._membership, self._formation
        held.set_engine(engine)
        if self.progress.tally_writer is not None:
            self.progress.tally_writer.strategy(engine.strategy)
        if membership is None or formation is None:
            held.begin(0, secrets.token_hex(8))
            held.note_built()
            return
        membership.serve(engine)
        if engine.asynchronous:
            if not held.phase.holds_state:
                self._await_rank(membership)
                held.phase.begin()
            held.begin(0, self.settings.job_id)  # workers of async_sgd begin at any time
        elif held.phase.holds_state:
            try:
                formation.synchronize_first()
            except StopTraining as stop:
                self._departure.exit_drained(str(stop))  # as in _await_rank
        held.note_built()

    def _await_rank(self, membership: Member) -> None:
        membership.link.ready()
        try:
            membership.await_generation()
        except StopTraining as stop:
            # this process has never taken part in the run, so its script has nothing to do
            self._departure.exit_drained(str(stop))

    def trains(self, engine: object) -> bool:
        """Returns whether `engine` trains the run's model, and not a clone of it."""
        return self._held.has_engine and self._held.engine is engine

    # ----------------------------------------------------------------- steps: see `StrategySession`

    @property
    def step(self) -> Step | None:
        """Step in progress."""
        return self._held.step

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Records which parameters of the model require gradients from now on."""
        self._held.registered.note_trained(trained)

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the state, so that steps committed from now on can be undone if the group fails
        before `release`; see `CommittedState.keep`."""
        self._held.keep(replica)

    def release(self) -> None:
        """Confirms, on all ranks, the steps since `keep`, so that they are never undone."""
        self._held.release()

    # ----------------------------------------------------------------------------------- operations

    def operation(self, kind: str, body: Body, *, answers: bool = True) -> Any:
        """Runs `body` on all ranks and returns its result, a JSON value that is the same on every
        rank.

        Repeats `body` if the membership changes while it runs. A joiner runs `body` alone. If
        committed steps have been undone, every rank runs `body` alone until the next step: all
        ranks have the same state, but their scripts reach this operation again at different times.
        The same applies if the state turns out to be lost during the operation and is replaced with
        a checkpoint's state. A process that has become a spare cannot compute the result and exits
        (SystemExit), unless `answers` is False because the result is not used.
        """
        self._check_between_steps(kind)
        formation = self._formation
        if self._membership is None and not self.has_left:
            alone = body(LocalChannel())
            self._held.operations.keep(alone)  # numbered in the same way as with several ranks
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
                    # a spare's result would not be the run's result
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
                    # A rank that is leaving may be waiting for rows that only this rank pushes; it
                    # reaches this operation once it has them. A server's error is not an error of
                    # the group.
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
                # The job is stopped and the group has ended, so no other group can run the
                # operation.
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
        """Raises PreconditionError if a step is in progress. A fault in an operation inside a step
        would lose the step's gradients, because the operation is then repeated in a new group."""
        step = self._held.step
        # In a loop without a Shoal loader, every forward pass may begin a step.
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
        self.lifecycle.drop_partly_updated()  # the step belongs to a loop that the script has left

    def _confirm(self, kind: str) -> None:
        self.operation(kind, lambda channel: channel.exchange(b"") and None, answers=False)

    # ---------------------------------------------------------------------------------- checkpoints

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete committed state: model, optimizer (see `TrainingEngine`), registered
        objects and cursors. The result may share memory with these. Must be called within an
        operation."""
        return self._held.capture(self._held.engine.assemble(channel))

    def part(self, channel: Channel) -> StatePart | None:
        """Returns this rank's part of the state that `assemble` returns; None if the state is not
        sharded. Must be called within an operation."""
        part = self._held.engine.part(channel)
        return replace(part, state=self._held.capture(part.state)) if part is not None else None

    def unfit(self, replica: Mapping[str, Any]) -> str:
        """Returns why the run could not be resumed from `replica`, the state of model and optimizer
        in a result of `assemble` or `part`; empty if it could. Called within an operation, on one
        rank."""
        engine = self._held.engine
        try:
            if engine.has_values():
                engine.check_state(replica)
        except CorruptDataError as error:
            return str(error)
        return ""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names, in the flattened result of `assemble`, of the parameters that did not require
        gradients when `as_distributed` was called."""
        return self._held.frozen

    @property
    def built(self) -> Mapping[str, Mapping[str, Any]]:
        """Descriptions (`describe_values`) of the frozen parameters' values as the run's script
        created them. Omits parameters whose original values are unknown."""
        return self._held.built

    def frozen_values(self) -> Mapping[str, torch.Tensor]:
        """Returns this rank's current values of the frozen parameters; empty if they are sharded.
        The tensors share memory with the model."""
        return self._held.frozen_values()

    def warn_of_given_up(self) -> None:
        """Logs a warning if a run that resumes from a state saved at this point would skip the rest
        of an epoch, or repeat part of it."""
        self._held.warn_of_given_up()

    @property
    def row_store(self) -> RowStore | None:
        """Rows of the model's sparse tables; None if there are none."""
        return self._held.engine.row_store if self._held.has_engine else None

    @property
    def run(self) -> str:
        """Name of the run, as stored in checkpoints. Each run that begins from scratch gets a
        unique name."""
        return self._held.run

    @property
    def is_asynchronous(self) -> bool:
        """True if workers of this session's job join and leave at any time and take independent
        steps (`async_sgd`)."""
        return self._held.has_engine and self._held.engine.asynchronous

    @property
    def member_id(self) -> str:
        """Id of this process as a member of its generation; empty in a world of one."""
        generation = self._generation
        return generation.me.member_id if generation is not None else ""

    def is_gone(self, member_id: str) -> bool:
        """Returns whether a member of an earlier generation no longer belongs to the run.
        Thread-safe."""
        membership = self._membership
        return membership is not None and membership.has_left(member_id)

    def unsharded_for(self, channel: Channel) -> AbstractContextManager[None]:
        """Unshards the model within the block, so that this rank can use it without its peers. Must
        be entered on all ranks of an operation."""
        return self._held.engine.unsharded_for(channel) if self._held.has_engine else nullcontext()

    def replace_state(self, channel: Channel, captured: Mapping[str, Any] | None) -> None:
        """Sends the state that the first rank has read from a checkpoint to all ranks. `captured`:
        that state; None on the other ranks. Must be called within an operation."""
        if captured is not None:
            # a resumed script may draw its batches differently than the script that saved the
            # checkpoint
            captured = {**self._held.with_own_tables(captured), "batches_compared": 0}
        if self._formation is not None and isinstance(channel, GroupChannel):
            self._formation.replace_state(channel, captured)
        elif captured is not None:  # only in this process, which sends it to peers later
            self._held.restore(captured)
            self._held.name = StateName(self.generation, int(captured["steps"]))

    def on_state_lost(self, fallback: Callable[[], bool]) -> None:
        """Sets the function that loads the newest checkpoint into this process and returns whether
        there was one. It is called if no rank with the state remains."""
        if self._formation is not None:
            self._formation.syncing.fallback = fallback

    def go_back_by(self, load: Callable[[], str | None]) -> None:
        """Sets the function that replaces a lost state with the newest checkpoint's state, on all
        ranks. It returns the reason for a failure, or None. It is called in a step if the remaining
        ranks have only part of the state."""
        self.lifecycle.returning.load = load

    def cannot_return(self, captured: Mapping[str, Any]) -> str | None:
        """Returns why this process's script cannot continue from a checkpoint's state; None if it
        can."""
        return self._held.cannot_return(captured)

    def fence(self) -> Callable[[], None]:
        """Returns a function that checks whether this process may still publish its current state.
        The function raises StaleGenerationError if the process has been evicted since `fence` was
        called."""
        membership, generation = self._membership, self.generation
        return (
            (lambda: membership.check_current(generation))
            if membership is not None
            else lambda: None
        )

    # -------------------------------------------------------------------------------------- the end

    def on_close(self, callback: Callable[[], None]) -> None:
        """Registers a callback that runs once, before this process leaves its job."""
        self._departure.on_leave(callback)

    def close(self, *, failed: str | None = None) -> None:
        """Leaves the job. `failed`: reason why the script failed; None: it succeeded. Later calls
        behave as in a world of one."""
        if failed is None:
            self.lifecycle.drop_partly_updated()
        self.progress.write_last()
        if self._membership is not None:
            if self._held.phase.now is Phase.ARRIVING and failed is None:
                # The process has a rank, and its peers wait for it. If this counted as success, the
                # run would end for all ranks.
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
        """Waits while a peer may still need this rank's part of the state, or its confirmation that
        the last step is committed."""
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
                # otherwise all ranks have finished the last step, or did not take part in it
                await_last_step(formation, held)
        except (ShoalError, StopTraining) as error:
            # the ranks no longer need each other's state
            if isinstance(error, ShoalError) and error.reason == "RANKS_DIVERGED":
                self.missed = str(error)
            _log.info("the ranks could not finish the run together: %s", error)
