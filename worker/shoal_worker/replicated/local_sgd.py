"""Engine of local SGD. Every rank trains its own replica on its own samples, and the ranks average
their parameters periodically.

A *round* consists of the steps between two averages. Each rank commits steps without communication;
a round is committed on all ranks together. A failure within a round takes effect at the end of the
round, when the scripts of all ranks have reached the same position. The round's last step is then
aborted, and every rank restores the state that it had at the round's start
(`StrategySession.keep`): parameters, optimizer state, buffers, registered state and cursor. The
loader then redistributes the round's samples among the current ranks. A round ends after
`sync_every` steps, or earlier if the epoch ends, because a script cannot reenter a loop that it has
left. Joins, drains and stops wait until the round ends.

Each rank keeps its own optimizer state. A rank without optimizer state (a joiner, or a rank that
has fallen behind) receives the mean of the other ranks' states.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from shoal_common.failpoints import failpoint
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel, LocalChannel
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.contract.reported_loss import read_later
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import BUFFERS
from shoal_worker.engine.base import Setup
from shoal_worker.engine.state.module_state import ModuleState
from shoal_worker.engine.state.optimizer_state import load_optimizer
from shoal_worker.engine.step.failed_collectives import LosingStep, come_after
from shoal_worker.engine.step.passes import Loss, call_module, loss_of
from shoal_worker.replicated.buckets import AccumulatedReduction
from shoal_worker.replicated.engine import ReplicatedEngine
from shoal_worker.replicated.rounds import (
    Add,
    Exchange,
    OuterMomentum,
    Round,
    RoundOptions,
    adding,
    agreed_counts,
    check_configuration,
    mean_optimizer_state,
    weighted_mean,
)
from shoal_worker.torch_internals import uncompiled


class LocalSGDEngine(ReplicatedEngine):
    """Engine of local_sgd: every rank has a full replica of the model, and trains it independently
    between averages."""

    def __init__(self, setup: Setup) -> None:
        """Creates the engine from `setup`, including the options of local_sgd (`RoundOptions`).

        Raises:
            ConfigurationError: invalid options, or settings that have no meaning under local_sgd.
        """
        super().__init__(setup)
        check_configuration(self.config)
        self._rounds = RoundOptions(**self._options)
        self._outer = OuterMomentum(self._rounds)
        self._round = Round()
        self._step_weight = 0.0
        self._step_samples = 0
        self._reduced = False
        """True if the gradients of the step's micro-batches have been summed."""
        self._averaging = False
        """True if this step ends the round, and this rank has already applied its own update."""
        self._average: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of a tensor of the module and its average across ranks."""
        self._mean_state: dict[int, dict[str, Any]] | None = None

    @property
    def steps_alone(self) -> bool:
        """True, because each rank takes the steps of a round on its own."""
        return True

    @property
    def steps_in_round(self) -> int:
        """Number of steps since the last average. If it is 0, the parameters have just been
        averaged, so they are the same on all ranks."""
        return self._round.steps

    # ------------------------------------------------------------------------------------- training

    @uncompiled
    def _begin_pass(self) -> bool:
        """Prepares a training forward pass. Returns False, because gradients are not reduced."""
        if not self._attached:
            raise PreconditionError(
                "this model is a clone for evaluation; train the model that as_distributed returned"
            )
        self._session.lifecycle.ensure_step()
        return False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context without effect, because gradients are never reduced."""
        yield

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Runs the forward and backward passes of this rank's batch. Returns the loss of this batch
        only, because ranks do not communicate in each step."""
        step = self._session.lifecycle.ensure_step()
        loss = loss_of(call_module(self._setup.model, inputs), targets, loss_fn)
        reported = read_later(loss)
        summed = self._in_micro_batches and step.micro_batch is not None
        step.loss = (
            self._accumulation().add_loss(reported, step.micro_batch or 0.0) if summed else reported
        )
        loss.backward()
        return loss.detach()

    def synchronize_gradients(self) -> None:
        """Finishes the step's gradients on this rank, without reducing them across ranks."""
        self._session.lifecycle.reduce_and_commit()

    def synchronize_parameters(self) -> None:
        """Makes the next step end the round. Must be called on every rank, before that step's
        `step()`."""
        self._round.ends_early = True

    def synchronize_optimizer_state(self) -> None:
        """Makes the next step end the round, as `synchronize_parameters` does, and average the
        optimizer state too."""
        self._round.ends_early = self._round.averages_state = True

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Ends a step. The last step of a round averages the parameters. If that fails, returns
        LOST, and the round is repeated from its start."""
        self._prepare_end(update)
        return super().finish_step(update, scaled=scaled, inspected=inspected)

    def _prepare_end(self, update: Callable[[], None]) -> None:
        """Prepares the end of a step. If the step ends a round, applies this rank's own update, so
        that the average includes it."""
        step = self._session.step
        if step is None or step.share is None or step.lost is not None or self._averaging:
            return
        if not self._round.ends_with_next_step(self._rounds):
            return
        self._session.lifecycle.reduce_and_commit()
        self._update(update)
        if self._accumulated is not None and self._accumulated.open:
            self._accumulated.write_buffers()
        self._averaging = True

    def apply(self, update: Callable[[], None]) -> None:
        """Applies this rank's own update or, at the end of a round, the average that includes
        it."""
        if self._averaging:
            self._take_average()
        else:
            self._update(update)

    def _update(self, update: Callable[[], None]) -> None:
        step = self._session.step
        assert step is not None
        assert step.share is not None
        frozen = {
            name
            for name, parameter in self.module.named_parameters()
            if not parameter.requires_grad
        }
        if written := [name for name in self._writes.names() if name in frozen]:
            raise ConfigurationError(
                f"parameter {written[0]!r} has requires_grad=False but was written in a pass (for "
                "example by forward()): with strategy='local_sgd', the ranks average only "
                "trained parameters and buffers; keep the value in a buffer, or use ddp",
                reason="PARAMETERS_WRITTEN",
            )
        if not self._in_micro_batches:
            self._step_weight = step.share.weight
            self._step_samples = step.samples if self._step_weight > 0 else 0
        if self._step_weight > 0:  # otherwise this is a placeholder batch
            update()

    # ------------------------------------------------------------------------------------ averaging

    @override
    def reduce(self, step: Step) -> None:
        """Sums micro-batches on this rank. At the end of a round, also averages parameters and
        buffers across all ranks."""
        if self._in_micro_batches and not self._reduced:
            self._reduce_what_is_left(step)
            self._reduced = True
        if not self._averaging:
            self._step_buffers.extremes.agree(
                [self._step_buffers.extremes.made(counted=super()._counts(step))]
            )
        if self._averaging and step.phase is StepPhase.OPEN:
            if step.placement.generation != self._round.generation:
                # the round's training on failed ranks is lost too
                self._session.lifecycle.abort_step("the ranks have changed since the round began")
                return
            with LosingStep(self._session) as averaging:
                self._sum_round()
                failpoint("reduction.completed")
            if not averaging.failed:
                self._session.lifecycle.prepare_step()
        if step.phase is StepPhase.PREPARED:
            self._prepare_vote(step)

    def _add(self, tensor: torch.Tensor) -> None:
        group = self._group()
        if group is not None and (work := group.all_reduce_async(tensor)) is not None:
            come_after(self._session, group, work)

    def _group(self) -> Group | None:
        """Returns the group of all ranks, or None if this rank trains alone. Raises
        MembershipChanged if there is no group."""
        if not self._session.elastic:
            return None
        group = self._session.group
        if group is None:
            raise MembershipChanged("there is no group")
        return group

    def _counts(self, step: Step) -> bool:
        return self._round.weight + self._step_weight > 0

    @torch.no_grad()
    def _sum_round(self) -> None:
        """Computes the averages of parameters and buffers at the end of a round. Raises
        MembershipChanged."""
        if self._step_weight == 0:
            self._step_buffers.put_back()  # undoes the changes made by a placeholder batch
        tensors = self._averaged()
        group = self._group()
        weight = self._round.weight + self._step_weight
        step = self._session.step
        assert step is not None
        numbers = [weight, *step.offered]
        total, *step.summed = group.sum_numbers(numbers) if group is not None else numbers
        share = weight / total if total > 0 else 1.0 / self._session.world_size
        self._average = list(zip(tensors, weighted_mean(tensors, share, self._add), strict=True))
        if group is not None:
            self._check_alike(group.exchange)
            self._average += self._agree_on_counts(group.exchange, within_step=True)
        if (
            (self._rounds.average_optimizer_state or self._round.averages_state)
            and group is not None
            and self.optimizer is not None
        ):
            state, device = self.optimizer.state_dict()["state"], tensors[0].device
            self._mean_state = mean_optimizer_state(state, group.exchange, group.all_reduce, device)

    def _averaged(self) -> list[torch.Tensor]:
        """Returns the tensors to average: the parameters trained in the round, followed by
        statistics in buffers."""
        return [*self._round.trained.values(), *self._step_buffers.statistics()]

    def _agree_on_counts(
        self, exchange: Exchange, *, within_step: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs of a counter buffer and the value that all ranks give it. `within_step`:
        True if the current step is part of the round."""
        counters, begun = self._step_buffers.counters(), self._round
        if not counters:
            return []
        agreed = agreed_counts(
            begun.counters,
            counters,
            of_round=begun.steps + within_step,
            steps=begun.sampled_steps + (within_step and self._step_weight > 0),
            samples=begun.samples + (self._step_samples if within_step else 0),
            weight=begun.weight + (self._step_weight if within_step else 0.0),
            exchange=exchange,
        )
        return [(buffer, agreed[name]) for name, buffer in counters.items()]

    def _check_alike(self, exchange: Exchange) -> None:
        """Raises ConfigurationError unless all ranks have the same values in buffers that can
        neither be averaged nor summed."""
        self._step_buffers.refuse_new()
        names = self._step_buffers.alike_names()
        if names and len(set(exchange(str(self._step_buffers.digest_of_alike()).encode()))) > 1:
            raise self._step_buffers.apart(names)

    @torch.no_grad()
    def _take_average(self) -> None:
        for tensor, mean in self._average:
            tensor.copy_(mean)
        self._outer.move(self._round.trained)
        if self._mean_state is not None and self.optimizer is not None:
            self._load_optimizer_state(self._mean_state)

    def _load_optimizer_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        assert self.optimizer is not None
        load_optimizer(
            self.optimizer,
            {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]},
            exact=True,
        )

    # -------------------------------------------------------------- TrainingEngine: for the session

    @torch.no_grad()
    def step_begins(self) -> None:
        """Begins a step. At the start of a round, copies the state."""
        super().step_begins()
        self._forget_step()
        step = self._session.step
        assert step is not None
        if self._round.steps == 0:
            self._round.counters = {
                name: buffer.clone() for name, buffer in self._step_buffers.counters().items()
            }
            self._outer.round_begins(dict(self.module.named_parameters()))
            if self._session.elastic:
                self._session.keep(self._captured())
        self._round.step_begins(step.source, self.module, step.placement.generation)

    def batch_begins(self) -> None:
        """Does nothing, because gradients are not reduced."""

    @override
    def micro_batch_ends(self, weight: float) -> None:
        super().micro_batch_ends(weight)
        step = self._session.step
        if weight > 0 and step is not None:
            self._step_weight += weight
            self._step_samples += step.samples

    def _keep_for_redo(self) -> None:
        """Records the module's attributes, but only at the start of a round: a single step is never
        repeated, only the entire round, from the copy made by `keep`."""
        if not self._session.elastic:
            return
        self._writes.begin()
        if self._round.steps == 0:
            self._attributes.begin()

    def _report_writes(self, step: Step) -> None:
        """Does nothing, because parameters differ between ranks within a round anyway."""

    def _undo_writes(self) -> None:
        self._writes.forget()
        self._attributes.put_back()

    @property
    def holds_unreduced_gradients(self) -> bool:
        """False, because gradients are not reduced."""
        return False

    @override
    def discard_step(self) -> None:
        super().discard_step()
        self._forget_step()

    @override
    def commit_step(self) -> None:
        step = self._session.step
        if (
            step is not None
            and step.share is not None
            and not self._averaging
            and self._step_weight == 0
        ):
            self._step_buffers.put_back()  # undoes the changes made by a placeholder batch
        super().commit_step()
        if self._averaging:
            self._round_over()
            self._session.release()
        else:
            self._round.step_committed(self._step_weight, self._step_samples)

    def _forget_step(self) -> None:
        self._step_weight, self._step_samples = 0.0, 0
        self._reduced = self._averaging = False
        self._average, self._mean_state = [], None

    def _round_over(self) -> None:
        self._round = Round()
        self._forget_step()

    def _accumulation(self) -> AccumulatedReduction:
        if self._accumulated is None:
            self._accumulated = AccumulatedReduction(
                self.module, self._step_buffers, self._session, self.config, alone=True
            )
        return self._accumulated

    def _captured(self) -> dict[str, Any]:
        """Returns this rank's complete state."""
        return super().capture() | (
            {"outer_momentum": self._outer.momentum} if self._outer.momentum else {}
        )

    def capture(self) -> dict[str, Any]:
        """Returns the state that is the same on all ranks at the end of a round. Of the optimizer,
        it includes only the settings; `reshard` sends the optimizer's state."""
        captured = self._captured()
        if captured["optimizer"] is not None:
            captured["optimizer"] = {**captured["optimizer"], "state": {}}
        return captured

    @torch.no_grad()
    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        parameters = dict(self.module.named_parameters())
        momentum = state.get("outer_momentum", {})
        self._outer.momentum = {
            name: value.to(parameters[name].device, copy=True) for name, value in momentum.items()
        }
        self._round_over()

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the model's parameters and buffers, which are the same on all ranks once they
        have been averaged. Optimizer states are not included, because they differ between ranks."""
        return {
            name: tensors
            for name, tensors in super().in_common().items()
            if name in ("the model", BUFFERS)
        }

    def reshard(self, group: Group) -> None:
        """Sends the mean of the ranks' optimizer states to ranks that have none. Must be called on
        all ranks."""
        if self.optimizer is None:
            return
        state = self.optimizer.state_dict()["state"]
        held = [row[0] for row in group.all_gather_integers([int(bool(state))])]
        if not any(held) or all(held):
            return
        device = next(self.module.parameters()).device
        mean = mean_optimizer_state(state, group.exchange, group.all_reduce, device)
        if not state:
            self._load_optimizer_state(mean)

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """Returns the complete state with values averaged across ranks, even inside a round. Each
        rank then continues the round with its own values."""
        captured = self._captured()
        if isinstance(channel, LocalChannel):
            return captured
        add = adding(channel)
        if self._round.steps > 0:
            with self.unsharded_for(channel):
                captured["model"] = copy.deepcopy(ModuleState(self.module).captured())
        if self.optimizer is not None:
            mean = mean_optimizer_state(
                captured["optimizer"]["state"], channel.exchange, add, torch.device("cpu")
            )
            captured["optimizer"] = {**captured["optimizer"], "state": mean}
        return captured

    @contextlib.contextmanager
    def unsharded_for(self, channel: Channel) -> Iterator[None]:
        """Context in which the module's parameters and buffers have the averages over all ranks.
        Otherwise, each rank has its own values inside a round."""
        if self._round.steps == 0 or isinstance(channel, LocalChannel):
            yield
            return
        tensors = self._averaged()
        add: Add = adding(channel)
        weight = torch.tensor([self._round.weight], dtype=torch.float64)
        add(weight)
        share = (
            self._round.weight / float(weight) if float(weight) > 0 else 1.0 / channel.world_size
        )
        means = weighted_mean(tensors, share, add)
        counts = self._agree_on_counts(channel.exchange, within_step=False)
        extremes = self._step_buffers.extremes
        if extremes:
            extremes.agree(channel.exchange(extremes.made(counted=self._round.weight > 0)))
        with torch.no_grad():
            own, put_back = [tensor.clone() for tensor in tensors], self._step_buffers.kept()
            _copy(tensors, means)
            _copy([counter for counter, _ in counts], [value for _, value in counts])
            extremes.write()
        try:
            yield
        finally:
            with torch.no_grad():
                put_back()
                _copy(tensors, own)

    # ---------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Returns copies of all parameters. Inside a round, their values are averaged across ranks.
        Must be called on every rank."""
        return self._means(lambda: {name: p.detach() for name, p in self.module.named_parameters()})

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns a copy of the state dict. Inside a round, its values are averaged across ranks.
        Must be called on every rank."""
        whole = self._means(self.module.state_dict)
        return {} if rank0_only and self._session.rank != 0 else whole

    def _unsharded_state(self) -> Mapping[str, Any]:
        return self._means(lambda: ModuleState(self.module).captured())

    def _means(self, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Calls `read` while the module has the averages over all ranks, and returns a copy of its
        result."""
        whole: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            whole.clear()
            with self.unsharded_for(channel):
                whole.update(copy.deepcopy(read()))

        self._session.operation("full_state_dict", body)
        return whole


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)
