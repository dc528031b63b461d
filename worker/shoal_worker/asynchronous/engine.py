"""The engine of async_sgd: values come from the parameter servers, and each iteration pushes this worker's gradients to them.

With inner steps an iteration is a round of them (`outer_steps.py`): the optimizer is this worker's, and the servers run the outer one.

What that means for training is told in `strategies/async_sgd.py`. All of it runs on the training thread.
"""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from shoal_common import codecs
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError, ShoalError
from shoal_common.failpoints import failpoint
from shoal_common.rpc.channel import ChannelSettings

from shoal_worker.asynchronous.job import Handover, Job
from shoal_worker.asynchronous.leases import CoordinatorLeases, LeaseSource, LocalLeases
from shoal_worker.asynchronous.options import AsyncOptions, Revision, ServerOptimizer, check_configuration
from shoal_worker.asynchronous.outer_steps import Round, RoundLeases
from shoal_worker.asynchronous.own_cluster import OwnCluster
from shoal_worker.asynchronous.servers import ParameterServers
from shoal_worker.asynchronous.tables import PushedRows, Tables
from shoal_worker.asynchronous.tensors import HostTensor, Iteration, check_gradients, gradients
from shoal_worker.elastic.loader_interface import Leases, StepSource, StepStatus, StopTraining
from shoal_worker.elastic.membership import Membership
from shoal_worker.elastic.session import Session
from shoal_worker.engine.base import Engine, Loss, Setup, call_module, loss_of
from shoal_worker.engine.parameters import check_optimizer_covers, check_trains, materialize

_log = logging.getLogger(__name__)


class AsyncEngine(Engine):
    """A worker's copy of the model, whose values come from the parameter servers."""

    asynchronous: ClassVar[bool] = True

    # ------------------------------------------------------------------------------------------------------------ beginning

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        check_configuration(self.config, self.backend_name)
        self._own = cast(Session, setup.session)
        """The session itself: its membership, its metrics and its end are this engine's business as well."""
        self._async_options = AsyncOptions(**self._options)
        self._servers: ParameterServers | None = None
        self._schedule: ServerOptimizer | None = None
        self._leases: LeaseSource = LocalLeases()
        self._round: Round | None = None
        """With inner steps; and the leases, which are of rounds then."""
        self._round_leases: RoundLeases | None = None
        self._pushed_to: torch.optim.Optimizer | None = None
        """The optimizer that the servers run: the outer one, or the user's."""
        self._job: Job | None = None
        self._own_cluster: OwnCluster | None = None
        self._tensors: list[HostTensor] = []
        self._started = False
        self._clock = 0
        """Iterations finished, as the servers are told."""
        self._rests = True
        """Nobody waits for this worker (ssp, bsp): it has no batch. It enters when it gets one."""
        self._rests_after_push = False
        """Its loop is left, with a batch at hand."""
        self._handover: Handover | None = None
        self._joins_late = False
        """The job had begun when this worker came."""
        self._placed = False
        """The first loader knows which epoch the others are in."""
        self._tables = Tables(self.module)
        if self._tables and self._async_options.in_step:
            raise ConfigurationError(
                'consistency="bsp" with sparse tables: their rows are looked up within the step, and nobody waits until all have been; '
                'use "asp" or "ssp"'
            )
        if self._tables and self._async_options.inner_steps:
            raise ConfigurationError(
                f"inner_steps={self._async_options.inner_steps} with sparse tables: their rows are on the servers, which take a step of "
                "theirs with each push; leave inner_steps out"
            )
        check_trains(self.module)
        if any(buffer.is_meta for buffer in self.module.buffers()):
            raise ConfigurationError(
                "the model has buffers on the meta device: with async_sgd buffers are each worker's own, and come from nowhere else; build "
                "it with values"
            )

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Engine`. Lays the tensors out over the servers, and waits for these."""
        if optimizer is None:
            raise ConfigurationError(
                'strategy="async_sgd" needs the optimizer, which the servers run: as_distributed(model, optimizer, ...)'
            )
        check_optimizer_covers(self.module, optimizer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.optimizer = optimizer
        options = self._async_options
        there = self._pushed_to = optimizer if options.outer_optimizer is None else options.outer_optimizer
        check_same_parameters(optimizer, there, names)
        argument = "optimizer" if options.outer_optimizer is None else "outer_optimizer"
        self._schedule = ServerOptimizer(there, names, delay_compensation=options.delay_compensation, argument=argument)
        groups = {id(p): number for number, group in enumerate(there.param_groups) for p in group["params"]}
        # Together with others, what has small gradients would have none of the largest values, and would be lost beside a block's scale.
        compressor = self.config.compressor
        apart = compressor is not None and compressor.codec not in (codecs.FLOAT16, codecs.BFLOAT16, codecs.POWERSGD)
        tensors = [HostTensor(name, p, trained=id(p) in groups, apart=apart) for name, p in self.module.named_parameters()]
        # Those of one parameter group lie side by side on the servers, which then step them at once.
        self._tensors = sorted(tensors, key=lambda tensor: groups.get(id(tensor.parameter), len(groups)))
        if options.inner_steps:
            self._round = Round([tensor for tensor in self._tensors if tensor.trained], steps=options.inner_steps)
        self._joins_late = self._session.is_joining
        self._session.attach(self)
        atexit.register(self._leave)
        self._own.on_close(self._leave)
        try:
            job = self._open_job()
            if options.inner_steps:
                self._leases = self._round_leases = RoundLeases(self._leases, steps=options.inner_steps)
            shard_map = job.declare([*(tensor.spec for tensor in self._tensors), *self._tables.specs()])
            self._schedule.check_layout(shard_map)
            self._servers = ParameterServers(
                job, shard_map, self._tensors, self._schedule, self._async_options, self._own.metrics, self.config.compressor
            )
            self._servers.configure()
            self._tables.connect(job, shard_map, patience=self._async_options.server_timeout, stopped=self._stopped)
        except StopTraining as stop:
            self._leave()
            self._own.give_up_step(stop)
            raise
        except BaseException:
            self._leave()
            raise

    def _open_job(self) -> Job:
        membership, settings = self._own.membership, self._own.settings
        if membership is None:
            self._own_cluster = OwnCluster()
            link, channel = self._own_cluster.link, self._own_cluster.channel
        else:
            assert settings.coordinator is not None
            assert isinstance(membership, Membership), "a rank of a launch was refused"
            link, channel = membership.link, ChannelSettings(address=settings.coordinator, token=settings.token, tls=settings.tls)
        job = Job(
            link,
            channel,
            patience=settings.rendezvous_timeout,
            straggler_patience=settings.collective_timeout,
            transport=settings.server_transport,
            fell_back=lambda transport: self._own.metrics.transports_lost.labels(transport).inc(),
        )
        if membership is not None:
            self._job, self._leases = job, CoordinatorLeases(job, ahead=self._async_options.lease_ahead)
            if self._own.donor is not None:
                self._handover = Handover(self._own.donor, job, self._own_state)
        return job

    def _start(self) -> None:
        """Gives the servers rank 0's values if they have none, and takes over what they have."""
        if self._started:
            return
        has_values = self.has_values()
        if not has_values:
            self._materialize()
        self._require_servers().start(has_values=has_values)
        self._started = True
        if self._joins_late:
            self._go_on_from_a_peer()

    def _go_on_from_a_peer(self) -> None:
        state = self._handover.take() if self._handover is not None else None
        if state is None:
            _log.warning("no peer could give its registered state and schedule; those of this joiner begin anew")
            return
        assert self._schedule is not None
        assert self._pushed_to is not None
        _load_settings(self._require_optimizer(), state["groups"])
        if self._round is not None:
            _load_settings(self._pushed_to, state["outer_groups"])
        self._schedule.adopt(state["revision"])
        self._session.registered.restore(state["registered"])

    def _own_state(self) -> dict[str, Any]:
        """Without an inner optimizer's moments: a joiner's begin anew."""
        assert self._pushed_to is not None
        outer = {} if self._round is None else {"outer_groups": self._pushed_to.state_dict()["param_groups"]}
        return {
            "registered": self._session.registered.capture(),
            "groups": self._require_optimizer().state_dict()["param_groups"],
            "revision": self.look_at_schedule().number,
            **outer,
        }

    def _materialize(self) -> None:
        materialize(self.module, self.optimizer, self._session.device)
        parameters = dict(self.module.named_parameters())
        for tensor in self._tensors:
            tensor.parameter = parameters[tensor.name]

    def _leave(self) -> None:
        """Takes leave of the servers; stops those that are this process's own. Idempotent."""
        atexit.unregister(self._leave)
        if self._round is not None and self._round.steps and not self._round.is_leased:
            _log.warning(
                "%d inner steps since the last push are not on the servers; behind a loop of your own call "
                "optimizer.synchronize_parameters()",
                self._round.steps,
            )
        self._leases.close()
        if self._handover is not None:
            self._handover.close()
        self._tables.close()
        if self._servers is not None:
            self._servers.close()
        if self._own_cluster is not None:
            self._own_cluster.close()
            self._own_cluster = None

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with the values pulled last."""
        if self.module.training and torch.is_grad_enabled():
            self._session.ensure_step()
        return self._setup.call(*args, **kwargs)

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Forward, loss and backward. Returns the loss of this worker's batch: there is no common one."""
        step = self._session.ensure_step()
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        step.loss = float(loss.detach())
        loss.backward()
        return loss.detach()

    def zero_grad(self, clear: Callable[[], None]) -> None:
        """See `Engine`."""
        clear()
        self._tables.drop_gradients()

    def synchronize_gradients(self) -> None:
        """Nothing to do: each worker's gradient is pushed by itself, in `optimizer.step()`."""

    # ------------------------------------------------------------------------------------------------------ for ShardedOptimizer

    def groups_are_read(self) -> None:
        """See `Engine`. Notices what has changed since."""
        if self._schedule is not None:
            self.look_at_schedule()

    def finish_step(self, update: Callable[[], None], *, scaled: bool, inspected: bool) -> StepStatus:
        """See `Engine`: an iteration of this worker alone, or a step of its round. LOST when the run ended while the job stood still for
        want of workers, or where the step's loop was left within a round; else COMMITTED. Raises as `exchange`."""
        if (scaled or inspected) and self._tables:
            raise ConfigurationError(
                "a GradScaler with sparse tables: it does not see the gradients of their rows; train in float32 or bfloat16, without it"
            )
        self._check_round()
        try:
            return super().finish_step(update, scaled=scaled, inspected=inspected)
        except StopTraining as stop:
            return self._own.give_up_step(stop)

    def step_optimizer(self, *, usable: bool) -> None:
        """See `Engine`: the servers step. With inner steps this worker does, and the servers with the last of a round."""
        if self._round is None:
            self.exchange(self._gradients() if usable else {}, self._tables.pushes() if usable else {})
        else:
            self._take_inner_step(self._round, usable=usable)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """This worker's, to be pushed. Raises as `check_gradients`."""
        trained = [tensor for tensor in self._tensors if tensor.trained]
        check_gradients(trained)
        return gradients(trained)

    def _take_inner_step(self, taken: Round, *, usable: bool) -> None:
        """Again after a push that failed: then the round is pushed, and no step is taken."""
        step = self._session.step
        source = step.source if step is not None else None
        left_out = False
        if not taken.is_over:
            batches = self._round_leases.round_of(source.name) if self._round_leases is not None and source is not None else None
            if not taken.take(self._require_optimizer(), source, batches, usable=usable):
                if step is not None:
                    step.pushed = ()
                return
            taken.end()
        else:
            left_out = all(tensor.parameter.grad is None for tensor in self._tensors)
        self._push_round(taken, left_out=left_out)

    def _push_round(self, over: Round, *, left_out: bool = False) -> None:
        self.exchange({} if left_out else over.outer_gradients())
        over.settle()
        # The servers have stepped it: its schedulers need not warn that nobody has.
        self._pushed_to._opt_called = True  # type: ignore[union-attr]
        step = self._session.step
        if self._round_leases is not None and step is not None and step.source is not None:
            step.pushed = self._round_leases.round_of(step.source.name)

    def _check_round(self) -> None:
        """Before a step is finished: what of it counts for nothing, since the round that it was in has gone back.

        Raises:
            PreconditionError: the script was handed the batch again.
        """
        step = self._session.step
        if self._round_leases is None or step is None or step.source is None or self._round_leases.round_of(step.source.name) is not None:
            return
        if not step.left:
            raise PreconditionError(
                "the round of inner steps that this batch is in went back to the coordinator when its loop was left; leave the loop again, "
                "and go on with the next epoch"
            )
        self._session.void_step("its loop was left within a round of inner steps, whose batches are dealt again")

    @property
    def steps_in_round(self) -> int:
        """Inner steps since the last push."""
        return 0 if self._round is None else self._round.steps

    @property
    def within_round(self) -> bool:
        """See `TrainingEngine`."""
        return self.steps_in_round > 0

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Engine`: the settings, which go to the servers; what is momentum and moments in a synchronous run has no place on the
        workers, but with inner steps."""
        if self._round is not None:
            super().load_optimizer_state_dict(state)
            return
        super().load_optimizer_state_dict({"state": {}, "param_groups": state.get("param_groups")})

    def synchronize_parameters(self) -> None:
        """Pulls what all workers have reached; between steps. Within a round of the user's own loop it ends the round, with a push.

        Raises:
            PreconditionError: within a step: the gradient at hand is of the values that are there. Within a round of leased batches, which
                counts as a whole.
        """
        step = self._session.step
        if step is not None and step.handed_out:
            raise PreconditionError("synchronize_parameters within a step: call it after optimizer.step()")
        if self._round is None or not self._round.steps:
            self.pull()
            return
        if self._round.is_leased:
            raise PreconditionError(
                f"synchronize_parameters {self._round.steps} inner steps after the last push: the batches of a round count together, with "
                "its last step; call it where model.steps_in_round is 0"
            )
        if not self._round.is_over:
            self._round.end()
        self._push_round(self._round)

    def exchange(self, sent: Mapping[str, torch.Tensor], rows: Mapping[int, PushedRows] = MappingProxyType({})) -> None:
        """Ends an iteration: pushes gradients, by the tensors' names, and rows of tables, by partition, and pulls what all workers have
        reached. Pushes nothing where there are none.

        Raises:
            DeadlineError (SERVER_AWAY): a server was away for longer than `server_timeout`.
            StopTraining: the job stood still for want of workers, and was stopped then.
        """
        clock = self._clock + 1
        pull = clock % self._async_options.pull_every == 0
        step = self._session.step
        source = step.source if step is not None else None
        batch = self._leases.at_hand(source.name) if source is not None else 0
        iteration = Iteration(clock=clock, revision=self.look_at_schedule(), gradients=sent, pull=pull, batch=batch, rows=rows)
        pushed = self._require_servers().exchange(iteration)
        failpoint("exchange.done")
        self._tables.drop_gradients()
        self._clock = clock
        if step is not None:
            step.known = pushed.known
        if sent or rows:
            self._own.progress.pushed(pushed.staleness)
        if self._rests_after_push:
            self._rests_after_push = False
            self._rest()

    def look_at_schedule(self) -> Revision:
        """Notices what schedulers have changed."""
        assert self._schedule is not None
        return self._schedule.look()

    def pull(self) -> None:
        """Brings back what all workers have reached; between steps, not within a round. With bsp a worker that takes part has the values of
        its iteration, and keeps them."""
        if self._started and not self.within_round and (self._rests or not self._async_options.in_step):
            self._require_servers().pull()

    def _rest(self) -> None:
        """Says that nobody need wait for this worker; again as often as there is reason to: a server may have been started anew, without
        its data."""
        if self._async_options.waits_for_others:
            self._require_servers().rest()
            self._rests = True

    def _enter(self) -> None:
        """Takes part, from the iteration on that others are about to begin."""
        if self._rests and self._async_options.waits_for_others:
            self._require_servers().enter(self._clock)
            self._rests = False

    # --------------------------------------------------------------------------------------------- TrainingEngine: for the session

    def step_begins(self) -> None:
        """See `TrainingEngine`."""
        source = self._session.step.source if self._session.step is not None else None
        if self._round is not None:
            self._round.check_source(source)
        if source is not None and not source.leased:
            raise ConfigurationError(
                f"loader {source.name!r} deals steps that all ranks take together, and with async_sgd there are none; give it batch_size= "
                "(the samples of one push) instead of global_batch_size= and micro_batch_size="
            )
        try:
            self._start()
            if source is None:
                self._enter()  # else there may be no batch for it
            self._find_epoch(source)
        except StopTraining as stop:  # while it waited for the coordinator, or a server
            self._own.give_up_step(stop)
            raise

    def _find_epoch(self, source: StepSource | None) -> None:
        """Once: a joiner goes on where the others are."""
        if self._job is not None:
            self._job.entered()
            if self._handover is not None:
                self._handover.refresh()
            if source is not None and not self._placed:
                _move_to_epoch(source, self._leases.newest_epoch(source.name, source.epoch))
                self._placed = True

    def lease_batches(
        self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int, at_hand: int | None = None
    ) -> Leases:
        """See `LoaderSession`."""
        try:
            answer = self._leases.lease(
                loader=loader, epoch=epoch, batches_in_epoch=batches_in_epoch, finished=finished, want=want, at_hand=at_hand
            )
        finally:
            self._undo_round(loader)
        if want and not answer.batches:
            if answer.epoch_done:
                # Nobody pushes before the next epoch begins: what is evaluated between epochs is the same on all ranks.
                self._rest()
                self.pull()
            elif self._leases.is_idle(loader):
                # Others may wait for this worker to finish an iteration, and it will find none before they have finished theirs.
                self._rest()
        elif answer.batches:
            self._enter()
        elif not want:
            # The loop is left: nobody is to wait for what this worker does elsewhere, but for the batch that it has at hand.
            self._rests_after_push = at_hand is not None and not answer.took_back_at_hand
            if not self._rests_after_push:
                with suppress(ShoalError, StopTraining):  # whoever leaves for good is not waited for either
                    self._rest()
        return answer

    def _undo_round(self, loader: str) -> None:
        """A loop was left, or goes on with other batches: what inner steps of a round have moved that went back with its loop is undone."""
        if self._round is None or self._round_leases is None:
            return
        if self._round.has_gone_back(loader, self._round_leases.round_of(loader)):
            if not self._round.is_over:
                _log.warning(
                    "loader %r: its loop was left %d inner steps after the last push; they are undone, and their batches dealt again. "
                    "Leave a loop where model.steps_in_round is 0",
                    loader,
                    self._round.steps,
                )
            self._round.undo()

    def capture(self) -> dict[str, Any]:
        """See `TrainingEngine`: for checkpoints. What the servers run keeps its state there, and they write snapshots of their own
        meanwhile; an inner optimizer's is this worker's."""
        if self._started:
            self._require_servers().write_snapshots()
        return {"model": self.full_state_dict(), "optimizer": self._require_optimizer().state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `TrainingEngine`: of a checkpoint, before the first step. Servers that have values keep them; others get these."""
        self._check_not_started("shoal.resume")
        groups = state["optimizer"]["param_groups"] if state["optimizer"] is not None else []
        own = self._require_optimizer().param_groups
        if len(groups) != len(own) or any(mine.keys() - loaded.keys() - {"initial_lr"} for mine, loaded in zip(own, groups, strict=True)):
            raise CorruptDataError("the checkpoint is of another optimizer: its parameter groups differ", reason="OPTIMIZER_DIFFERS")
        self._check_fits(state["model"])
        if not self.has_values():
            self._materialize()
        self.module.load_state_dict(state["model"])
        if self._round is not None and state["optimizer"] is not None and state["optimizer"]["state"]:
            self._require_optimizer().load_state_dict(state["optimizer"])
        else:  # momentum and moments of a synchronous run have no place on the workers
            _load_settings(self._require_optimizer(), groups)

    def has_values(self) -> bool:
        """See `TrainingEngine`."""
        return not any(t.is_meta for t in self.module.state_dict().values())

    def micro_batch_begins(self) -> None:
        """See `TrainingEngine`. Loaders with micro-batches are refused when the step begins."""

    def micro_batch_ends(self, weight: float) -> None:
        """See `TrainingEngine`."""

    def finish_reduction(self) -> None:
        """See `TrainingEngine`: nothing is reduced."""

    def discard_step(self) -> None:
        """See `TrainingEngine`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._tables.drop_gradients()

    def commit_step(self) -> None:
        """See `TrainingEngine`: buffers are this worker's own."""

    # ---------------------------------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """The servers' values as they are now, on this rank's device; before the first step this worker's. The module stays as it is."""
        own = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        if not self._started:
            return {name: value.clone() for name, value in own.items()}
        return {name: value.to(own[name].device) for name, value in self._require_servers().read().items()}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """`gather_full_parameters`, and this worker's own buffers."""
        if rank0_only and self._session.rank != 0:
            return {}
        state: dict[str, torch.Tensor] = copy.deepcopy(self.module.state_dict())
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        values = self.gather_full_parameters()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = values[names[id(parameter)]]
        return state

    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """See `Engine`. Only before the first step: after it the servers' values are the model's.

        Raises:
            PreconditionError: later.
        """
        self._check_not_started("with_parameters")
        super().use_parameters(parameters)

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Engine`; as with `use_parameters`, only before the first step."""
        self._check_not_started("load_model or deserialize")
        super().load_full(tensors)

    # ----------------------------------------------------------------------------------------------------------- invariants

    def _stopped(self, stop: StopTraining) -> None:
        """The run ended while this worker waited for rows of a table."""
        self._own.give_up_step(stop)

    def _check_not_started(self, what: str) -> None:
        if self._started:
            raise PreconditionError(
                f"{what}: the parameter servers hold newer values since the first step; call it before the training loop"
            )

    def _require_servers(self) -> ParameterServers:
        assert self._servers is not None
        return self._servers

    def _require_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer


def _load_settings(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Takes over the settings of parameter groups. State stays: some optimizers make theirs with themselves."""
    optimizer.load_state_dict({"state": optimizer.state_dict()["state"], "param_groups": groups})


def check_same_parameters(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raises ConfigurationError unless both optimizers are made from the same parameters. `names`: id(parameter) -> its name."""
    here, there = ({id(p) for group in each.param_groups for p in group["params"]} for each in (inner, outer))
    if differing := sorted(names.get(each, "a tensor that is not of the model") for each in here ^ there):
        raise ConfigurationError(
            f"outer_optimizer={type(outer).__name__}: it and the optimizer must be made from the same parameters, and one of them lacks "
            f"{', '.join(differing[:5])}{f' and {len(differing) - 5} more' if len(differing) > 5 else ''}"
        )


def _move_to_epoch(source: StepSource, epoch: int) -> None:
    """A joiner goes on where the others are; what it may have missed of that epoch is leased to whoever asks."""
    state = source.state_dict()
    if state["epoch"] < epoch:
        source.load_state_dict({**state, "epoch": epoch, "samples": 0, "step": 0})
