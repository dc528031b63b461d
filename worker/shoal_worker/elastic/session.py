"""The elastic session: begins, commits and loses steps, and keeps this rank's state in step with its peers'.

The rules (DESIGN: "Elastic training"), in the order in which a reader meets them below:

- A step begins at a border. There, and only there, joiners come in and drained members go: when the last step's control word said so, on
  all ranks.
- A step is applied on a rank only when all its collectives completed, so every member's part is in it. There is no vote: after a failure
  some ranks may have applied it and others not. The highest state name wins, and those behind take the state of those ahead.
- A failure inside a step never raises out of the user's forward or backward pass. It marks the step lost; `finish_step` then re-forms and
  says LOST, and the loader deals the same samples again.
- Operations between steps are run again on a new group until they succeed, unless a peer that finished them still has the result.
- A joiner is a spectator of its first generation until all others stand at a border; there it is fed. So it never sees a state in the
  middle of the users' code between two steps.

Everything here runs on the training thread, except what `Membership`, `CoordinatorLink` and `StateDonor` do on theirs.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    MembershipChanged,
    PreconditionError,
    UnavailableError,
)
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_worker.backends.registry import backend_class
from shoal_worker.elastic.contract import Drained, Leases, Placement, Share, StepSource, StepStatus, StopTraining
from shoal_worker.elastic.group import Channel, Group, LocalChannel
from shoal_worker.elastic.membership import Membership
from shoal_worker.elastic.operations import Body, GroupChannel, Operations, spectate
from shoal_worker.elastic.progress import ProgressMeter
from shoal_worker.elastic.randomness import seed_generators
from shoal_worker.elastic.reconcile import STANDING_LENGTH, Reconciliation, Standing, StateName, reconcile
from shoal_worker.elastic.registered import RegisteredState
from shoal_worker.elastic.transfer import StateDonor, take_state
from shoal_worker.failpoints import failpoint
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings
from shoal_worker.state.digest import state_digest

_log = logging.getLogger(__name__)

_GROUP_LOST = (MembershipChanged, UnavailableError)
"""What a collective or a transfer raises when the group it ran on is over: the cure is a new generation."""

_BORDER = "border"


class Replica(Protocol):
    """A strategy's model and optimizer, as the session sees them. All methods run on the training thread."""

    strategy: ClassVar[str]
    asynchronous: ClassVar[bool]
    """No process group: every iteration is a step of its own (async_sgd)."""
    backend_name: str

    def capture(self) -> dict[str, Any]:
        """The committed state of model and optimizer, buffers included. Shares memory with them."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a captured state, whole."""
        ...

    def has_values(self) -> bool:
        """False while parameters are on the meta device."""
        ...

    def step_begins(self) -> None: ...
    def lease_batches(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `StepClock`. Raises ConfigurationError unless asynchronous."""
        ...

    def micro_batch_begins(self) -> None: ...
    def micro_batch_ends(self, weight: float) -> None: ...
    def finish_reduction(self) -> None:
        """Blocks until the gradients of all ranks are summed, or the step is marked lost."""
        ...

    def discard_step(self) -> None:
        """Puts back what the lost step changed: buffers, gradients."""
        ...

    def commit_step(self) -> None:
        """The step was applied: what it left in the buffers is now the committed state."""
        ...


@dataclasses.dataclass
class Step:
    """A step in progress."""

    placement: Placement
    source: StepSource | None
    share: Share | None = None
    handed_out: bool = False
    micro_batch: float | None = None
    """Weight of the micro-batch that is being computed."""
    lost: str | None = None
    """Why the step is void; None: it is not."""
    control: list[float] | None = None
    """The control word summed over all ranks; None: not reduced yet."""
    loss: float | None = None
    """This rank's mean loss, if told."""


CONTROL_LENGTH = 3
"""Border wanted; loss times weight; weight of the losses told."""


class Session:
    """This process's training run: alone, or as a member of a job."""

    def __init__(self, settings: WorkerSettings, membership: Membership | None, donor: StateDonor | None, metrics: WorkerMetrics) -> None:
        """`membership` and `donor`: both None in a world of one."""
        self.settings = settings
        self.metrics = metrics
        self.progress = ProgressMeter(metrics)
        self.registered = RegisteredState()
        self._membership = membership
        self._donor = donor
        self._replica: Replica | None = None
        self._sources: weakref.WeakValueDictionary[str, StepSource] = weakref.WeakValueDictionary()
        self._pending_sources: dict[str, Any] = {}
        self._operations = Operations()
        self._state: StateName | None = None
        self._poisoned = False
        self._live = membership is None
        """It has the job's state. False in a joiner until it was fed."""
        self._replaying = False
        """A joiner's script has not come to its first live batch: what it asks for is answered locally."""
        self._spectators: tuple[int, ...] = ()
        self._border_due = False
        self._step: Step | None = None
        self._stopped: str | None = None
        self._failed_at: float | None = None
        self._fallback: Callable[[], None] | None = None
        self._on_close: list[Callable[[], None]] = []
        if membership is not None:
            membership.link.progress = self.progress.message

    # ------------------------------------------------------------------------------------------------------------ identity

    @property
    def elastic(self) -> bool:
        """A member of a job; False: a world of one without a coordinator."""
        return self._membership is not None

    @property
    def membership(self) -> Membership | None:
        """The session with the coordinator; None in a world of one."""
        return self._membership

    @property
    def is_joining(self) -> bool:
        """This process replays its script and has not received the peers' state yet."""
        return self._replaying

    @property
    def group(self) -> Group | None:
        """The ranks of this generation, connected; None in a world of one and before the first."""
        return self._membership.group if self._membership is not None else None

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a world of one."""
        generation = self._generation()
        return generation.rank if generation is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        generation = self._generation()
        return generation.world_size if generation is not None else 1

    @property
    def generation(self) -> int:
        """Number of the generation this process works in; 0 before the first and in a world of one."""
        generation = self._generation()
        return generation.number if generation is not None else 0

    @property
    def steps(self) -> int:
        """Committed steps of the run."""
        return self._state.step if self._state is not None else 0

    @property
    def strategy(self) -> str:
        """Name of the strategy; empty before `as_distributed`."""
        return self._replica.strategy if self._replica is not None else ""

    @property
    def step(self) -> Step | None:
        """The step in progress."""
        return self._step

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.settings.local_index % torch.cuda.device_count())

    def join(self) -> None:
        """Opens the session with the coordinator. In a fresh job, waits for a rank; a joiner of a running one first replays its script."""
        membership = self._membership
        assert membership is not None
        try:
            joining = membership.join().joining
        except PreconditionError as refusal:
            if refusal.reason != "JOB_CLOSED":
                raise
            _log.warning("the run is over, there is nothing left to join")
            raise SystemExit(0) from refusal
        if joining:
            self._replaying = True
            return
        self._live = True
        membership.link.ready()
        try:
            membership.await_generation()
        except StopTraining as stop:
            _log.warning("leaving before the start: %s", stop)
            membership.leave(pb.Leave.REASON_DRAINED, str(stop))
            raise SystemExit(0) from stop

    # -------------------------------------------------------------------------------------------------------------- attach

    def attach(self, replica: Replica) -> None:
        """Takes `replica` into the session and gives all ranks rank 0's weights.

        Raises:
            PreconditionError: there is one already.
        """
        if self._replica is not None:
            raise PreconditionError(
                "as_distributed was called a second time; a process trains one model and optimizer: put several modules into one nn.Module"
            )
        self._replica = replica
        membership = self._membership
        if membership is None:
            self._state = StateName(0, 0)
            return
        if replica.asynchronous:
            if not self._live:
                membership.link.ready()
                try:
                    membership.await_generation()
                except StopTraining as stop:  # it never had a part in the run, so there is nothing for its script to do
                    self._exit_drained(Drained(str(stop)))
                self._live, self._replaying = True, False
            self._state = StateName(0, 0)
            return
        membership.make_backend = backend_class(replica.backend_name)
        if not self._live:
            return
        if membership.group is None:
            self._reform()
        while self._state is None:
            group = self._require_group()
            try:
                self._synchronize_first(group)
            except _GROUP_LOST as error:
                self._recover(error)

    def _synchronize_first(self, group: Group) -> None:
        replica = self._require_replica()
        channel = GroupChannel(group, "attach", self._spectators)
        mine = f"{state_digest(replica.capture()):016x}" if replica.has_values() else "meta"
        digests = [d.decode() for d in channel.exchange(mine.encode())]
        if digests[0] == "meta":
            raise ConfigurationError("rank 0's parameters are on the meta device: its weights win, so it must have values")
        if any(d != digests[0] for d in digests):
            if channel.rank == 0:
                with self._require_donor().offering(replica.capture(), group.generation.nonce):
                    channel.exchange(b"")
            else:
                state = self._take([0], group) if mine != digests[0] else None
                channel.exchange(b"")
                if state is not None:
                    replica.restore(state)
        self._state = StateName(group.generation.number, 0)

    # ------------------------------------------------------------------------------------------------- StepClock: the loader

    def register_source(self, source: StepSource) -> None:
        """See `StepClock`."""
        if self._sources.get(source.name, source) is not source:
            raise ConfigurationError(
                f"two training loaders have the name {source.name!r}; give each a name of its own: ElasticDataLoader(..., name=...)"
            )
        self._sources[source.name] = source
        if source.name in self._pending_sources:
            source.load_state_dict(self._pending_sources.pop(source.name))

    def begin_step(self, source: StepSource | None) -> Placement:
        """See `StepClock`. None: the user's own loop, without a loader of Shoal's."""
        step = self._step
        if step is not None and step.source is None and source is not None:
            # A forward pass before the loop (a dry run, a summary) began it; nobody means to finish it.
            self._require_replica().discard_step()
            step = self._step = None
        if step is not None and step.handed_out:
            raise PreconditionError(
                "the next batch was asked for, but optimizer.step() was not called for the last one; call it once per iteration, or make "
                "the loader with train=False if it is only read",
                reason="STEP_NOT_FINISHED",
            )
        if step is not None and step.source is source and self._settled(step.placement):
            return step.placement
        self._step = None
        if self._stopped is not None:
            raise StopTraining(self._stopped)
        try:
            self._settle_border()
        except Drained as drained:
            self._exit_drained(drained)
        except StopTraining as stop:
            self._stopped = str(stop)
            raise
        self._step = Step(placement=Placement(generation=self.generation, rank=self.rank, world_size=self.world_size), source=source)
        self.registered.step_begins()
        self._require_replica().step_begins()
        self.progress.entered()
        return self._step.placement

    def assign(self, share: Share) -> None:
        """See `StepClock`."""
        step = self._require_step()
        if share.total_weight is None and share.micro_batches is None:
            share = dataclasses.replace(share, total_weight=self._sum_weights(share.weight))
        step.share = share
        step.handed_out = True
        self._replaying = False

    def begin_micro_batch(self, *, index: int, weight: float, key: Sequence[int]) -> None:
        """See `StepClock`."""
        step = self._require_step()
        step.handed_out = True
        step.micro_batch = weight
        seed_generators(key)
        if step.share is not None and step.share.micro_batches is not None:
            self._require_replica().micro_batch_begins()

    def end_micro_batch(self) -> None:
        """See `StepClock`."""
        step = self._step
        if step is None or step.micro_batch is None:
            return
        weight, step.micro_batch = step.micro_batch, None
        if step.share is not None and step.share.micro_batches is not None and step.lost is None:
            self._require_replica().micro_batch_ends(weight)

    def finish_batches(self) -> None:
        """See `StepClock`."""
        self._require_step().handed_out = True
        self._require_replica().finish_reduction()

    def end_epoch(self, source: StepSource) -> None:
        """See `StepClock`."""
        if self._replica is not None and not self._replica.asynchronous and self._stopped is None:
            self.operation("end of epoch", lambda channel: channel.exchange(b"") and None)

    def lease_batches(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """See `StepClock`."""
        return self._require_replica().lease_batches(
            loader=loader, epoch=epoch, batches_in_epoch=batches_in_epoch, finished=finished, want=want
        )

    # --------------------------------------------------------------------------------------------------- steps: the strategy

    def ensure_step(self) -> Step:
        """The step in progress; begins one in a user's own loop, where no loader does."""
        if self._step is None:
            try:
                placement = self.begin_step(None)
            except StopTraining as stop:
                raise SystemExit(0) from stop  # in the user's own loop there is no loader that could end it
            self.assign(Share(weight=1.0, total_weight=float(placement.world_size), micro_batches=None))
        return self._require_step()

    def control_word(self) -> list[float]:
        """What this rank adds to the step's control word."""
        step = self._require_step()
        weight = step.share.weight if step.share is not None and step.loss is not None else 0.0
        wanted = self._membership is not None and self._membership.changes
        return [float(wanted), step.loss * weight if step.loss is not None and weight > 0 else 0.0, weight]

    def take_control_word(self, summed: Sequence[float]) -> None:
        """The control word came back: the same on all ranks."""
        self._require_step().control = list(summed)

    def mark_lost(self, error: BaseException) -> None:
        """A collective of the step failed. May be called from a collective's callback."""
        step = self._step
        if step is not None and step.lost is None:
            step.lost = str(error)
            self._failed_at = self._failed_at or time.monotonic()

    def finish_reduction_if_whole(self) -> None:
        """Inside one plain batch: its backward pass was the whole of this rank's part, so the sum over the ranks is due."""
        step = self._require_step()
        if step.share is None or step.share.micro_batches is None:
            self._require_replica().finish_reduction()

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Applies the step if every member's part is in it; else re-forms.

        `apply` updates the parameters. If it raises, this rank's state is torn: the error goes up, and the rank never gives its state away.
        """
        self.end_micro_batch()
        step = self._require_step()
        replica = self._require_replica()
        replica.finish_reduction()
        if step.lost is not None:
            return self._lose(step)
        failpoint("session.before_apply")
        self._poisoned = True
        apply()
        failpoint("session.after_apply")
        self._poisoned = False
        self._commit(step)
        failpoint("session.after_commit")
        return StepStatus.COMMITTED

    def _commit(self, step: Step) -> None:
        self._state = StateName(step.placement.generation, self.steps + 1)
        self._step = None
        self._require_replica().commit_step()
        samples = 0
        if step.source is not None:
            samples = step.source.committed(step.placement)
            self.progress.epoch = step.source.epoch
        self.registered.step_committed()
        self._operations.committed()
        self._border_due = step.control is not None and step.control[0] > 0
        loss = step.control[1] / step.control[2] if step.control is not None and step.control[2] > 0 else step.loss
        self.progress.committed(steps=self.steps, samples=samples, loss=loss)
        if self._failed_at is not None:
            self.metrics.recovery_seconds.observe(time.monotonic() - self._failed_at)
            self._failed_at = None

    def _lose(self, step: Step) -> StepStatus:
        """The step is void on this rank: nothing was applied. Re-forms, which may bring this rank the state that its peers reached."""
        self._step = None
        self._require_replica().discard_step()
        self.registered.step_void()
        self.metrics.steps_lost.inc()
        _log.warning("step %d is lost: %s", self.steps, step.lost)
        try:
            self._recover(MembershipChanged(step.lost or "lost"))
        except Drained as drained:
            self._exit_drained(drained)
        except StopTraining as stop:
            self._stopped = str(stop)
        return StepStatus.LOST

    def give_up_step(self, stop: StopTraining) -> StepStatus:
        """The run ended for this member while a step of asynchronous training was in progress."""
        self._step = None
        self._require_replica().discard_step()
        self.registered.step_void()
        if isinstance(stop, Drained):
            self._exit_drained(stop)
        self._stopped = str(stop)
        return StepStatus.LOST

    def _sum_weights(self, weight: float) -> float:
        group = self.group
        if group is None or group.world_size == 1:
            return weight
        total = torch.tensor([weight], dtype=torch.float64, device=group.device)
        try:
            group.all_reduce(total)
        except MembershipChanged as error:
            self.mark_lost(error)
            return max(weight, 1.0)
        return float(total)

    # ---------------------------------------------------------------------------------------------------------- operations

    def operation(self, kind: str, body: Body) -> Any:
        """Runs `body` on all ranks and returns its result, which must be the same JSON value on every rank.

        Runs it again when the membership changes on the way. In a joiner it runs over this process alone.
        """
        if self._membership is None or self.is_joining or self._require_replica().asynchronous:
            return body(LocalChannel())
        while True:
            known, result = self._operations.take_known()
            if known:
                return result
            group = self._membership.group
            try:
                if group is None:
                    raise MembershipChanged("there is no group")
                failpoint("session.in_operation")
                result = body(GroupChannel(group, kind, self._spectators))
            except _GROUP_LOST as error:
                try:
                    self._recover(error)
                except Drained as drained:
                    self._exit_drained(drained)
                except StopTraining as stop:
                    # The job is stopped and the group is gone: there is no other to do it with.
                    self._stopped = str(stop)
                    return body(LocalChannel())
            else:
                self._operations.keep(result)
                failpoint("session.after_operation")
                self.progress.entered()
                return result

    def replace_state(self, channel: Channel, captured: Mapping[str, Any] | None) -> None:
        """Gives all ranks the state that rank 0 read from a checkpoint (`captured`; None on the others). Part of an operation."""
        group = self.group
        if group is None or self._membership is None or isinstance(channel, LocalChannel):
            if captured is not None:
                self.restore_alone(captured)
            return
        if channel.rank == 0:
            assert captured is not None
            with self._require_donor().offering(captured, group.generation.nonce):
                channel.exchange(b"")
            state: Mapping[str, Any] = captured
        else:
            first = next(r for r in range(group.world_size) if r not in self._spectators)
            state = self._take([first], group)
            channel.exchange(b"")
        self._restore(state, skip_advances=False)
        self._state = StateName(group.generation.number, int(state["steps"]))
        self._operations.committed()

    def capture(self) -> dict[str, Any]:
        """The committed state: model, optimizer, registered objects, cursors. Shares memory with them."""
        return {
            "replica": self._require_replica().capture(),
            "registered": self.registered.capture(),
            "sources": {name: source.state_dict() for name, source in self._sources.items()} | self._pending_sources,
            "steps": self.steps,
        }

    def fence(self) -> Callable[[], None]:
        """A check that this process may still publish what it holds now: raises StaleGenerationError if it was put out of the job since."""
        membership, generation = self._membership, self.generation
        return (lambda: membership.check_current(generation)) if membership is not None else lambda: None

    def restore_alone(self, captured: Mapping[str, Any]) -> None:
        """Takes over a checkpoint's state in this process alone; peers will get it from here."""
        self._restore(captured, skip_advances=False)
        self._state = StateName(self.generation, int(captured["steps"]))

    def on_state_lost(self, fallback: Callable[[], None]) -> None:
        """`fallback` loads the newest checkpoint into this process; it is called if every process that held the state is gone."""
        self._fallback = fallback

    # ------------------------------------------------------------------------------------------------------------- the end

    def on_close(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, before this process says goodbye to its job."""
        self._on_close.append(callback)

    def close(self, *, failed: str | None = None) -> None:
        """Leaves the job: finished, or failed with a reason."""
        if self._membership is not None:
            reason = pb.Leave.REASON_FAILED if failed is not None else pb.Leave.REASON_FINISHED
            self._take_leave()
            self._membership.leave(reason, failed or "")
        if self._donor is not None:
            self._donor.close()
        self._membership = self._donor = None
        self._live, self._replaying = True, False

    def _exit_drained(self, drained: Drained) -> None:
        _log.info("leaving at the border: %s", drained)
        if self._membership is not None:
            for source in list(self._sources.values()):
                source.leaving()
            self._take_leave()
            self._membership.leave(pb.Leave.REASON_DRAINED, str(drained))
        raise SystemExit(0)

    def _take_leave(self) -> None:
        while self._on_close:
            self._on_close.pop()()

    # --------------------------------------------------------------------------------------------- borders and re-forming

    def _settled(self, placement: Placement) -> bool:
        """Nothing has happened since `placement` was given at this border. An operation in between may have re-formed."""
        healthy = self.group is None or self.group.broken is None
        if self._require_replica().asynchronous and self._membership is not None:
            # It comes here again and again while it waits for a batch.
            healthy = self._membership.link.stopped is None and self._membership.link.draining is None
        return self._live and not self._border_due and healthy and placement.generation == self.generation

    def _settle_border(self) -> None:
        membership = self._membership
        if membership is None:
            return
        if self._require_replica().asynchronous:
            self._stop_if_asked(membership)
            return
        if not self._live:
            membership.link.ready()
            self._reform()
        elif self._border_due:
            self._stop_if_asked(membership)
            self._reform()
        elif self.group is None or self.group.broken is not None:
            self._recover(MembershipChanged(self.group.broken if self.group is not None and self.group.broken else "there is no group"))
        while self._spectators:
            group = self._require_group()
            started = time.monotonic()
            try:
                self._feed_spectators(group)
            except _GROUP_LOST as error:
                self._recover(error)
            else:
                self.metrics.join_seconds.observe(time.monotonic() - started)

    def _stop_if_asked(self, membership: Membership) -> None:
        if membership.link.refused is not None:
            membership.leave_group("the coordinator put this member out")
            raise membership.link.refused
        if membership.link.stopped is not None:
            raise StopTraining(membership.link.stopped)
        if membership.link.draining is not None:
            raise Drained(membership.link.draining)

    def _recover(self, error: BaseException) -> None:
        """A group failed under this rank: reports it and forms the next one."""
        assert self._membership is not None
        self._failed_at = self._failed_at or time.monotonic()
        self._membership.failed(error)
        self._reform()

    def _reform(self) -> None:
        """Forms newer generations until one stands and this rank's state agrees with its peers'."""
        membership = self._membership
        assert membership is not None
        give_up_at = time.monotonic() + self.settings.rendezvous_timeout.total_seconds()
        while True:
            started = time.monotonic()
            try:
                group = membership.form()
                self._reconcile(group)
            except _GROUP_LOST as error:
                _log.info("a generation did not form: %s", error)
                membership.failed(error)
                if time.monotonic() > give_up_at:
                    raise DeadlineError(
                        f"no generation formed for {self.settings.rendezvous_timeout_s:.0f} s (SHOAL_RENDEZVOUS_TIMEOUT_S); "
                        f"the last try: {error}"
                    ) from error
            else:
                self._border_due = False
                self.progress.entered()
                self.metrics.generation_formed(group.generation, time.monotonic() - started)
                return

    def _standing(self) -> Standing:
        return Standing(
            state=self._state if self._live else None,
            attached=self._replica is not None,
            spectator=not self._live,
            poisoned=self._poisoned,
            operations=self._operations.finished,
        )

    def _reconcile(self, group: Group) -> None:
        failpoint("session.before_reconcile")
        gathered = group.all_gather_integers(self._standing().encode())
        assert all(len(row) == STANDING_LENGTH for row in gathered)
        plan = reconcile([Standing.decode(row) for row in gathered])
        if plan.state_lost and not plan.spectators:
            raise PreconditionError(
                f"the state {plan.newest} is lost: no rank that holds it can give it (an update failed half way on each); "
                "restart from a checkpoint"
            )
        if plan.behind and plan.donors:
            self._catch_up(group, plan)
        if plan.results_from is not None:
            answers = group.exchange(self._operations.encode() if group.rank == plan.results_from else b"")
            if group.rank in plan.behind:
                self._operations.restart(answers[plan.results_from], passed=False)
            elif group.rank not in plan.spectators:
                self._operations.extend(answers[plan.results_from])
        self._spectators = plan.spectators

    def _catch_up(self, group: Group, plan: Reconciliation) -> None:
        """Those behind take the newest state, at once: their own step did not happen, so their code stands where the donors' stood."""
        if group.rank in plan.behind:
            state = self._take(plan.donors, group)
            group.exchange(b"")
            self._restore(state, skip_advances=True)
            self._operations.restart(b"", passed=False)
            self._state, self._poisoned = plan.newest, False
            _log.info("took the peers' state %s", self._state)
        elif group.rank in plan.donors:
            with self._require_donor().offering(self.capture(), group.generation.nonce):
                group.exchange(b"")
        else:
            group.exchange(b"")

    def _feed_spectators(self, group: Group) -> None:
        """The border at which joiners become members. Everybody is here when the first exchange is over."""
        members = [r for r in range(group.world_size) if r not in self._spectators]
        if group.rank not in self._spectators:
            GroupChannel(group, _BORDER, self._spectators).exchange(b"")
            donating = not self._poisoned
        elif members:
            spectate(group, self._spectators, _BORDER)
            donating = False
        else:
            # Nobody who held the state is left: the lowest rank starts again, from the newest checkpoint if the script resumes from one.
            donating = group.rank == self._spectators[0]
            if donating and self._fallback is not None:
                self._fallback()
        failpoint("session.at_border")
        flags = [row[0] for row in group.all_gather_integers([int(donating)])]
        donors = [r for r, flag in enumerate(flags) if flag]
        receivers = [r for r in self._spectators if r not in donors]
        if not donors:
            raise PreconditionError("no rank can give its state to the joiners; restart from a checkpoint")
        if group.rank in donors:
            if self._state is None:
                self._state = StateName(group.generation.number, 0)
            captured = self.capture() if receivers else {}
            captured["operations"] = self._operations.encode()
            captured["state"] = list(self._state)
            with self._require_donor().offering(captured, group.generation.nonce):
                group.exchange(b"")
        else:
            state = self._take(donors, group)
            group.exchange(b"")
            self._restore(state, skip_advances=False)
            self._operations.restart(state["operations"], passed=True)
            self._state = StateName(*state["state"])
        self._live = True
        self._spectators = ()

    def _take(self, donors: Sequence[int], group: Group) -> Any:
        started = time.monotonic()
        addresses = [group.generation.peers[r].donor_address for r in donors]
        try:
            with group.guarding() as guard:
                state, size = take_state(addresses, group.generation.nonce, timeout=self.settings.collective_timeout, guard=guard)
        except CorruptDataError as damage:
            raise UnavailableError(str(damage), reason=damage.reason) from damage  # what the peer holds is whole: ask again
        elapsed = time.monotonic() - started
        self.metrics.transferred(size, elapsed)
        _log.info("took %.1f MB of state from %d donor(s) in %.3f s", size / 1e6, len(donors), elapsed)
        return state

    def _restore(self, captured: Mapping[str, Any], *, skip_advances: bool) -> None:
        self._require_replica().restore(captured["replica"])
        self.registered.restore(captured["registered"], skip_advances=skip_advances)
        sources = dict(captured["sources"])
        for name, source in self._sources.items():
            if name in sources:
                source.load_state_dict(sources.pop(name))
        self._pending_sources = sources

    # ----------------------------------------------------------------------------------------------------------- invariants

    def _generation(self) -> Any:
        if self._membership is None:
            return None
        if self._membership.group is not None:
            return self._membership.group.generation
        return self._membership.link.newest_generation if self._live else None

    def _require_replica(self) -> Replica:
        if self._replica is None:
            raise PreconditionError("call shoal.as_distributed(model, optimizer, ...) before the training loop")
        return self._replica

    def _require_step(self) -> Step:
        if self._step is None:
            raise PreconditionError("no step has begun: iterate over the loader, or call the model, before optimizer.step()")
        return self._step

    def _require_group(self) -> Group:
        group = self.group
        assert group is not None
        return group

    def _require_donor(self) -> StateDonor:
        assert self._donor is not None
        return self._donor
