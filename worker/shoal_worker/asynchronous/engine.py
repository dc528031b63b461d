"""Engine of async_sgd. Each iteration pushes this worker's gradients to the parameter servers and
pulls the latest values.

With inner steps, an iteration is a round of steps (`outer_steps.py`): the user's optimizer runs on
this worker, and the servers run the outer optimizer. This module combines the other modules of the
package, and implements the interface that the model, the optimizer and the session use.

`strategies/async_sgd.py` describes the consequences for training. Everything here runs on the
training thread.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from shoal_common.errors import ConfigurationError, InternalError, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_common.formats import codecs
from typing_extensions import override

from shoal_worker.asynchronous.handover import Handover
from shoal_worker.asynchronous.optimizers import Optimizers
from shoal_worker.asynchronous.outer_steps import OuterSteps
from shoal_worker.asynchronous.participation import Participation
from shoal_worker.asynchronous.round_leases import RoundLeases
from shoal_worker.elastic.contract.loader_interface import (
    Leases,
    StepSource,
    StepStatus,
    StopTraining,
)
from shoal_worker.elastic.contract.row_store import RowStore
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.base import Engine, Setup
from shoal_worker.engine.state.module_state import ModuleState, load_captured
from shoal_worker.engine.state.parameters import check_optimizer_covers, check_trains, materialize
from shoal_worker.engine.step.pass_writes import WrittenParameters
from shoal_worker.engine.step.passes import Loss, call_module, loss_of
from shoal_worker.parameter_servers.coordination.job import Job
from shoal_worker.parameter_servers.coordination.leases import (
    CoordinatorLeases,
    LeaseSource,
    LocalLeases,
)
from shoal_worker.parameter_servers.coordination.own_cluster import OwnCluster
from shoal_worker.parameter_servers.options import AsyncOptions, check_configuration
from shoal_worker.parameter_servers.pushed_rows import PushedRows
from shoal_worker.parameter_servers.servers import ParameterServers
from shoal_worker.parameter_servers.tensors import HostTensor, Iteration, check_gradients, gradients
from shoal_worker.sparse_tables.worker_tables import Tables

_log = logging.getLogger(__name__)


class AsyncEngine(Engine):
    """Engine that trains a worker's copy of the model with values from the parameter servers."""

    asynchronous: ClassVar[bool] = True
    keeps_parameters_unsharded = True

    # ---------------------------------------------------------------------------------------- start

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        check_configuration(self.config, self.backend_name)
        self._own = cast(Session, setup.session)
        """The complete session. Unlike other engines, this one also needs its membership, metrics
        and shutdown."""
        self._async_options = AsyncOptions(**self._options)
        # otherwise the parameters are updated by this worker itself, in inner steps
        self.updates_parts = not self._async_options.inner_steps
        self._servers: ParameterServers | None = None
        self._participation: Participation | None = None
        self._optimizers: Optimizers | None = None
        self._leases: LeaseSource = LocalLeases()
        self._outer: OuterSteps | None = None
        """Rounds of inner steps, which are leased instead of single batches; None without inner
        steps."""
        self._job: Job | None = None
        self._own_cluster: OwnCluster | None = None
        self._tensors: list[HostTensor] = []
        self._started = False
        self._writes = WrittenParameters((), self.strategy)
        """Detects values that the script writes to parameters, which the servers' values would
        overwrite."""
        self._clock = 0
        """Number of finished iterations, as reported to the servers."""
        self._handover: Handover | None = None
        self._joins_late = False
        """True if the job was already running when this worker joined."""
        self._resumed = False
        """True if a checkpoint has been loaded."""
        self._placed = False
        """True once the first loader has been moved to the epoch of the other workers."""
        self._epochs: Mapping[str, int] = {}
        """Epochs of the state that this joiner has received from a peer, by name of the loader."""
        self._tables = Tables(self.module)
        if self._tables and self._async_options.in_step:
            raise ConfigurationError(
                'consistency="bsp" cannot be used with sparse tables: rows are looked up during '
                "the step, and updates do not wait until every worker has looked up its rows; use "
                '"asp" or "ssp"'
            )
        if self._tables and self._async_options.inner_steps:
            raise ConfigurationError(
                f"inner_steps={self._async_options.inner_steps} cannot be used with sparse tables, "
                "because the servers update their rows with each push; omit inner_steps"
            )
        check_trains(self.module)
        if any(buffer.is_meta for buffer in self.module.buffers()):
            raise ConfigurationError(
                "the model has buffers on the meta device, but under async_sgd each worker has its "
                "own buffers and receives none; build the model with values"
            )

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Attaches the optimizer, and declares the tensors to the coordinator, so that it assigns
        them to servers. Blocks until the servers are ready."""
        if optimizer is None:
            raise ConfigurationError(
                'strategy="async_sgd" requires the optimizer, because the servers run it: call '
                "as_distributed(model, optimizer, ...)"
            )
        check_optimizer_covers(self.module, optimizer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.optimizer = optimizer
        options = self._async_options
        optimizers = self._optimizers = Optimizers(optimizer, options, names)
        groups = {
            id(p): number
            for number, group in enumerate(optimizers.on_servers.param_groups)
            for p in group["params"]
        }
        # In a partition shared with other tensors, tensors with small gradients would contain none
        # of the largest values, and would be rounded to zero under the common scale of a block.
        compressor = self.config.compressor
        apart = compressor is not None and compressor.codec not in (
            codecs.FLOAT16,
            codecs.BFLOAT16,
            codecs.POWERSGD,
        )
        tensors = [
            HostTensor(name, p, trained=id(p) in groups, apart=apart)
            for name, p in self.module.named_parameters()
        ]
        # Tensors of one parameter group are adjacent on the servers, which can then step them
        # together.
        self._tensors = sorted(
            tensors, key=lambda tensor: groups.get(id(tensor.parameter), len(groups))
        )
        self._joins_late = self._session.is_joining
        self._session.attach(self)
        atexit.register(self._leave)
        self._own.on_close(self._leave)
        try:
            job = self._open_job(optimizers)
            if options.inner_steps:
                self._outer = self._outer_steps(optimizers, steps=options.inner_steps)
            shard_map = job.declare(
                [*(tensor.spec for tensor in self._tensors), *self._tables.specs()]
            )
            optimizers.schedule.check_layout(shard_map)
            self._servers = ParameterServers(
                job,
                shard_map,
                self._tensors,
                optimizers.schedule,
                options,
                self._own.metrics,
                self.config.compressor,
            )
            self._participation = Participation(self._servers, waited_for=options.waits_for_others)
            self._servers.configure()
            self._tables.connect(
                job, shard_map, patience=options.server_timeout, stopped=self._stopped
            )
        except StopTraining as stop:
            self._leave()
            self._own.lifecycle.give_up_step(stop)
            raise
        except BaseException:
            self._leave()
            raise

    def _open_job(self, optimizers: Optimizers) -> Job:
        membership, settings = self._own.membership, self._own.settings
        if membership is None:
            self._own_cluster = OwnCluster()
            link, channel = self._own_cluster.link, self._own_cluster.channel
        else:
            assert settings.coordinator is not None
            assert isinstance(membership, Membership), "a rank of a launch was refused"
            link, channel = membership.link, settings.channel(settings.coordinator)
        job = Job(
            link,
            channel,
            patience=settings.rendezvous_timeout,
            straggler_patience=settings.collective_timeout,
            transport=settings.server_transport,
            fell_back=lambda transport: self._own.metrics.transports_lost.labels(transport).inc(),
            interceptors=[self._own.metrics.calls],
        )
        self._own.progress.server_waits = lambda: job.waits.now
        if membership is not None:
            self._job, self._leases = (
                job,
                CoordinatorLeases(job, ahead=self._async_options.lease_ahead),
            )
            if self._own.donor is not None:
                self._handover = Handover(
                    self._own.donor, job, self._session.registered, optimizers, self.module
                )
        return job

    def _outer_steps(self, optimizers: Optimizers, *, steps: int) -> OuterSteps:
        """Creates the object that runs rounds of inner steps, and makes this engine lease rounds
        instead of batches. `steps`: number of steps per round."""
        self._leases = leases = RoundLeases(self._leases, steps=steps)
        return OuterSteps(
            self._session,
            leases,
            self._tensors,
            steps=steps,
            inner=optimizers.own,
            outer=optimizers.on_servers,
            push=self.exchange,
        )

    def _start(self) -> None:
        """Starts training with the servers' values. If the servers are uninitialized, first
        initializes them with rank 0's values."""
        if self._started:
            return
        has_values = self.has_values()
        if not has_values:
            self._materialize()
        gave = self._require_servers().start(has_values=has_values, joins_late=self._joins_late)
        self._started = True
        self._writes = WrittenParameters(self.module.named_parameters(), self.strategy, whole=True)
        if gave and self._resumed:
            _log.warning(
                "the parameter servers had no values and received those of the checkpoint. Their "
                "momentum and moments start from zero, because under async_sgd these are stored "
                "in the servers' data directories, not in checkpoints"
            )
        if self._joins_late:
            epochs = None if self._handover is None else self._handover.take()
            if epochs is None:
                _log.warning(
                    "no peer could send its registered objects, schedule position and buffers, so "
                    "this joiner starts with its own"
                )
            self._epochs = epochs or {}
        elif self._handover is not None:
            self._handover.take_first_buffers()

    def _materialize(self) -> None:
        materialize(self.module, self.optimizer, self._session.device)
        parameters = dict(self.module.named_parameters())
        for tensor in self._tensors:
            tensor.parameter = parameters[tensor.name]

    def _leave(self) -> None:
        """Deregisters this worker from the servers, and stops servers that this process has
        started. Idempotent."""
        atexit.unregister(self._leave)
        if self._outer is not None:
            self._outer.close()
        self._leases.close()
        if self._handover is not None:
            self._handover.close()
        self._tables.close()
        if self._servers is not None:
            self._servers.close()
        if self._own_cluster is not None:
            self._own_cluster.close()
            self._own_cluster = None

    # ------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass with the most recently pulled values."""
        if self.module.training and torch.is_grad_enabled():
            self._session.lifecycle.ensure_step()
        return self._compute(*args, **kwargs)

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Runs the forward and backward passes on this worker's batch. Returns this worker's loss,
        which is not averaged across workers."""
        step = self._session.lifecycle.ensure_step()
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        step.loss = float(loss.detach())
        loss.backward()
        return loss.detach()

    @override
    def zero_grad(self, clear: Callable[[], None]) -> None:
        clear()
        self._tables.drop_gradients()

    def synchronize_gradients(self) -> None:
        """Does nothing: `optimizer.step()` pushes each worker's gradients separately."""

    # ------------------------------------------------------------------------- for ShardedOptimizer

    def groups_are_read(self) -> None:
        """Records the changes that have been made to the optimizer's settings. Must be called
        whenever the script reads `optimizer.param_groups`."""
        if self._optimizers is not None:
            self._optimizers.look()

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Finishes an iteration of this worker or, with inner steps, a step of its round. Returns
        COMMITTED, or LOST in two cases: the run ended while the job was on hold for lack of
        workers, or the script left the loop over the step's batches in the middle of a round.
        Raises the same errors as `exchange`."""
        if (scaled or inspected) and self._tables:
            raise ConfigurationError(
                "a GradScaler cannot be used with sparse tables, because it does not see the "
                "gradients of their rows; train in float32 or bfloat16 without it"
            )
        if self._outer is not None:
            self._outer.check_step()
        _refuse(
            self._writes.names_beyond_rounding(),
            "in the passes of a step (by forward(), say) or before them",
        )
        # the update itself writes to parameters; a script may call step() again after an error, and
        # hooks of the update may read the model
        self._writes.replaced()
        try:
            return super().finish_step(update, scaled=scaled, inspected=inspected)
        except StopTraining as stop:
            return self._own.lifecycle.give_up_step(stop)
        finally:
            self._writes.note()

    def step_optimizer(self, *, usable: bool) -> None:
        """Pushes the gradients; the servers then step the optimizer. With inner steps, this worker
        steps its own optimizer instead, and the servers step theirs at the end of a round."""
        if self._outer is None:
            self.exchange(
                self._gradients() if usable else {}, self._tables.pushes() if usable else {}
            )
        else:
            self._outer.take(usable=usable)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that this worker will push. Raises the same errors as
        `check_gradients`."""
        trained = [tensor for tensor in self._tensors if tensor.trained]
        check_gradients(trained)
        return gradients(trained)

    @property
    def steps_in_round(self) -> int:
        """Number of inner steps since the last push."""
        return 0 if self._outer is None else self._outer.steps

    @property
    @override
    def within_round(self) -> bool:
        return self.steps_in_round > 0

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the optimizer's settings and sends them to the servers. With inner steps, also
        loads momentum and moments. Without inner steps, the servers have these, so momentum and
        moments in `state`, which a synchronous run has saved, are ignored."""
        kept = self._require_optimizers().kept_here(state)
        if state.get("state") and not kept["state"]:
            _log.warning(
                "load_state_dict loaded the optimizer's settings, but not its momentum or moments: "
                "under async_sgd the parameter servers keep these; with inner_steps= workers do"
            )
        super().load_optimizer_state_dict(kept)

    def synchronize_parameters(self) -> None:
        """Pulls the latest values between steps. In the middle of a round whose batches are not
        leased, pushes the round early instead.

        Raises:
            PreconditionError: called within a step, whose gradient belongs to the current values;
                or within a round of leased batches, which commits as a unit.
        """
        step = self._session.step
        if step is not None and step.handed_out:
            raise PreconditionError(
                "synchronize_parameters was called within a step; call it after optimizer.step()"
            )
        if self._outer is not None and self._outer.steps:
            self._outer.push_now()
            self._own.progress.round_pushed()
            self._writes.note()
        else:
            self.pull()

    def exchange(
        self,
        sent: Mapping[str, torch.Tensor],
        rows: Mapping[int, PushedRows] = MappingProxyType({}),
    ) -> None:
        """Finishes an iteration: pushes gradients and rows of sparse tables, if there are any, and
        pulls the latest values.

        Args:
            sent: gradients, by tensor name.
            rows: rows of sparse tables, by partition.

        Raises:
            DeadlineError (SERVER_AWAY): a server was unreachable for longer than `server_timeout`.
            StopTraining: the job was on hold for lack of workers and was then stopped.
        """
        clock = self._clock + 1
        pull = clock % self._async_options.pull_every == 0
        step = self._session.step
        source = step.source if step is not None else None
        batch = self._leases.at_hand(source.name) if source is not None else 0
        iteration = Iteration(
            clock=clock,
            revision=self._require_optimizers().look(),
            gradients=sent,
            pull=pull,
            batch=batch,
            rows=rows,
        )
        others = (
            self._own.progress.waits.of("the distance to the slowest worker")
            if self._async_options.waits_for_others
            else nullcontext()
        )
        self._own.progress.pushing(batch if sent or rows else 0)
        with others:
            pushed = self._require_servers().exchange(iteration)
        failpoint("exchange.done")
        self._tables.drop_gradients()
        self._clock = clock
        if step is not None:
            step.known = pushed.known
        if sent or rows:
            self._own.progress.pushed(pushed.staleness)
        self._require_participation().pushed()

    def pull(self) -> None:
        """Pulls the latest values between steps. Does nothing in the middle of a round. Under bsp,
        also does nothing while this worker participates, because the worker already has the values
        for its iteration."""
        if (
            self._started
            and not self.within_round
            and (self._require_participation().rests or not self._async_options.in_step)
        ):
            with self._receiving():
                self._require_servers().pull()

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Context in which values are received between steps. On entry, raises the errors of
        `_refuse_writes_between` if the script has written to parameters."""
        self._refuse_writes_between()
        try:
            yield
        finally:
            self._writes.note()

    # -------------------------------------------------------------- TrainingEngine: for the session

    @override
    def step_begins(self) -> None:
        source = self._session.step.source if self._session.step is not None else None
        if self._outer is not None:
            self._outer.step_begins(source)
        if source is not None and not source.leased:
            raise ConfigurationError(
                f"loader {source.name!r} deals steps that all ranks take together, but async_sgd "
                "has no such steps; pass batch_size= (the samples of one push) instead of "
                "global_batch_size= and micro_batch_size="
            )
        try:
            self._start()
            with self._receiving():
                self._require_servers().take_prefetched()
                if source is None:
                    # otherwise the coordinator may have no batch for this worker
                    self._require_participation().enter(self._clock)
            if source is None:
                self._writes.begin()
            self._find_epoch(source)
        except StopTraining as stop:  # while waiting for the coordinator or a server
            self._own.lifecycle.give_up_step(stop)
            raise

    def batch_begins(self) -> None:
        """Starts to detect whether the script writes to parameters. Values that may have been
        pulled while the batch was being leased are already in the module, so they are not mistaken
        for such writes."""
        self._writes.begin()

    def _find_epoch(self, source: StepSource | None) -> None:
        """On a joiner, moves the first loader that it uses to the epoch of the state that it has
        received, or to the epoch that the other workers have reached if that state has none. Also
        records the current generation, and keeps the state for joiners up to date."""
        if self._job is not None:
            if self._job.entered():
                self._own.metrics.entered(
                    number=self._job.generation,
                    member_id=self._job.member_id,
                    rank=self._job.rank,
                    world_size=self._job.world_size,
                )
            if source is not None and not self._placed:
                epoch = self._epochs.get(source.name)
                if epoch is None:
                    epoch = self._leases.newest_epoch(source.name, source.epoch)
                _move_to_epoch(source, epoch)
                self._placed = True
            if self._handover is not None:
                self._handover.refresh(
                    None if source is None else source.name, 0 if source is None else source.epoch
                )

    @override
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
        participation = self._require_participation()
        try:
            answer = self._leases.lease(
                loader=loader,
                epoch=epoch,
                batches_in_epoch=batches_in_epoch,
                finished=finished,
                want=want,
                at_hand=at_hand,
            )
        finally:
            if self._outer is not None and self._outer.has_leased(loader):
                self._own.progress.round_undone()
                self._writes.note()
        if want and not answer.batches:
            if answer.epoch_done:
                # No worker pushes before the next epoch, so an evaluation between epochs uses
                # the same values on all ranks.
                participation.rest()
                self.pull()
            elif self._leases.is_idle(loader):
                # Other workers may be waiting for this worker to finish an iteration, while this
                # worker cannot get a batch until they have finished theirs.
                participation.rest()
        elif answer.batches:
            with self._receiving():
                participation.enter(self._clock)
        elif not want:
            # The script left the loop: no worker should wait for this one any more, except until it
            # has finished the batch in progress.
            has_batch = at_hand is not None and not answer.took_back_at_hand
            participation.rest_after_push(has_batch)
            if not has_batch:
                with suppress(ShoalError, StopTraining):
                    # no worker should wait for a worker that leaves for good
                    participation.rest()
        return answer

    def capture(self) -> dict[str, Any]:
        """Returns the state for checkpoints. Includes the state of an inner optimizer, but not of
        the servers' optimizer, because the servers write their own snapshots."""
        if self._started:
            self._require_servers().write_snapshots()
        return {
            "model": self._unsharded_state(),
            "optimizer": self._require_optimizers().own.state_dict(),
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        self._check_fits(state["model"])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint before the first step. Servers that already have values keep these;
        servers without values receive the checkpoint's values."""
        self._check_not_started("shoal.resume")
        optimizers = self._require_optimizers()
        optimizers.check_checkpoint(state["optimizer"])
        self._check_fits(state["model"])
        if not self.has_values():
            self._materialize()
        load_captured(self.module, state["model"])
        optimizers.restore(state["optimizer"])
        self._resumed = True

    @property
    @override
    def row_store(self) -> RowStore | None:
        return self._tables.store

    @override
    def has_values(self) -> bool:
        return not any(tensor.is_meta for tensor in ModuleState(self.module).tensors.values())

    def micro_batch_begins(self) -> None:
        """Does nothing: a loader with micro-batches is rejected at the start of a step."""

    @override
    def micro_batch_ends(self, weight: float) -> None:
        pass

    @override
    def reduce(self, step: Step) -> None:
        """Does nothing: the servers apply each worker's gradients separately."""

    @override
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        raise InternalError(
            "a commit all-reduce was requested under async_sgd, whose steps have none"
        )

    @override
    def discard_step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        self._tables.drop_gradients()

    def commit_step(self) -> None:
        """Does nothing: buffers are local to this worker."""

    # ---------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Returns the servers' current values, on this rank's device. Before the first step,
        returns this worker's own values. The module is not changed."""
        own = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        if not self._started:
            return {name: value.clone() for name, value in own.items()}
        self._refuse_writes_between()
        return {
            name: value.to(own[name].device)
            for name, value in self._require_servers().read().items()
        }

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns the servers' current values, and this worker's own buffers."""
        if rank0_only and self._session.rank != 0:
            return {}
        with self._with_values_of_servers():
            return super().full_state_dict()

    def _unsharded_state(self) -> Mapping[str, Any]:
        with self._with_values_of_servers():
            return super()._unsharded_state()

    @contextmanager
    def _with_values_of_servers(self) -> Iterator[None]:
        """Context in which the module has the servers' current values; afterwards, this worker's
        values are restored. The values must be in the module itself, because its hooks may compute
        entries of `state_dict()` from them."""
        values = self.gather_full_parameters()
        own = {name: parameter.data for name, parameter in self.module.named_parameters()}
        try:
            for name, parameter in self.module.named_parameters():
                parameter.data = values[name]
            yield
        finally:
            for name, parameter in self.module.named_parameters():
                parameter.data = own[name]

    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """Replaces the module's parameters. Possible only before the first step; later, the servers
        determine the model's values.

        Raises:
            PreconditionError: called after the first step.
        """
        self._check_not_started("with_parameters")
        super().use_parameters(parameters)

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads a complete state dict. Possible only before the first step, like
        `use_parameters`."""
        self._check_not_started("load_model or deserialize")
        super().load_full(tensors)

    # ----------------------------------------------------------------------------------- invariants

    def _stopped(self, stop: StopTraining) -> None:
        """Ends this worker's participation in the run. Called if the run was stopped while this
        worker was waiting for rows of a sparse table."""
        self._own.lifecycle.give_up_step(stop)

    def _refuse_writes_between(self) -> None:
        """Raises ConfigurationError if the script has written to parameters since the last step or
        pull. Within a round, such writes are allowed, because they become part of the round's
        change."""
        if not self.within_round:
            _refuse(self._writes.overwritten(), "between two steps")

    def _check_not_started(self, what: str) -> None:
        if self._started:
            raise PreconditionError(
                f"{what} was called after the first step, when the parameter servers already "
                "have newer values; call it before the training loop"
            )

    def _require_servers(self) -> ParameterServers:
        assert self._servers is not None
        return self._servers

    def _require_participation(self) -> Participation:
        assert self._participation is not None
        return self._participation

    def _require_optimizers(self) -> Optimizers:
        assert self._optimizers is not None
        return self._optimizers


def _refuse(written: Sequence[str], when: str) -> None:
    """Raises ConfigurationError if the script has written to parameters.

    Args:
        written: names of the parameters to which it has written.
        when: when it did so, for the error.
    """
    if written:
        raise ConfigurationError(
            f"parameter {written[0]!r} was written {when}; with strategy='async_sgd', the next "
            "values from the parameter servers will overwrite it. Modify parameters before the "
            "first step, modify a copy (model.clone(), AveragedModel), use a buffer for values "
            "that the training loop sets, or use strategy='ddp'",
            reason="PARAMETERS_WRITTEN",
        )


def _move_to_epoch(source: StepSource, epoch: int) -> None:
    """Moves a joiner's loader to the epoch of the other workers. The joiner does not have to train
    on the batches of that epoch that others have already trained on: a batch is leased to only one
    worker."""
    state = source.state_dict()
    if state["epoch"] < epoch:
        source.load_state_dict({**state, "epoch": epoch, "samples": 0, "step": 0})
