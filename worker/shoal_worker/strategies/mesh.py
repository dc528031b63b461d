"""What tensor, pipeline and hybrid have in common: how a model is trained whose layers and stages lie on different ranks.

One engine over three axes (mesh/axes.py): `tensor` and `pipeline` are those where the others have one rank, `hybrid` has all. The model's
layers communicate in its passes, along the tensor axis and between the stages. What comes after the passes is here; a step ends as
`in_parts.py` says. Its gradients are sealed when those of this rank's part, added up over the micro-batches, are summed over the replicas,
and, where these hold shards of the sums (`mesh/along_data.py`), with the ranks that mirror them. After a failure the state is cut for the
ranks that are left (`regroup`), from the parts that any of them holds. A part that nobody holds is lost: see docs/strategies/hybrid.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from torch.autograd import Variable

from shoal_worker.elastic.contract import Share
from shoal_worker.elastic.group import Channel, Group, LocalChannel
from shoal_worker.elastic.step import CONTROL_LENGTH, Step
from shoal_worker.engine.closing import Closing
from shoal_worker.engine.elsewhere import gradient_of, guard_parts
from shoal_worker.failpoints import failpoint
from shoal_worker.mesh.division import Division, alone
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.sharding.hooks import when_gradients_come
from shoal_worker.sharding.issued import IssuedCollectives
from shoal_worker.strategies.base import call_module, loss_of
from shoal_worker.strategies.divided import DividedModel
from shoal_worker.tensor_parallel.region import loss_parallel


class MeshModel(DividedModel):
    """A model that several ranks hold together, in training and between steps."""

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `ModelInParts`. Raises ConfigurationError: the model cannot be cut for the ranks that the job begins with."""
        super().attach(optimizer)
        if self._session.begins and not self._session.is_joining:  # those whom a death has left wait for its replacement
            self._check_divisible()

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on all ranks of a replica together.

        Raises:
            ConfigurationError: in training, of a pipeline: only train_step can take a batch through it.
        """
        training = self._trains
        if training and self.module.training and self.pipelined:
            raise ConfigurationError(
                f"model(x) with strategy={self.strategy!r}: in training a pipeline takes a batch through both passes at once; "
                "call loss = model.train_step(x, y, loss_fn) in the place of the forward pass, the loss and backward()"
            )
        # In a loop without a loader of Shoal's a spare waits here, where its next step begins.
        begun = training and self.idle and self._session.step is None and self._begin_pass()
        if self._ahead or (training and not begun and not self._begin_pass()):
            return self._stand_in()(*args, **kwargs)
        with self._passing():
            if self._pipeline_here:
                return self._through_pipeline(kwargs if kwargs and not args else args)
            output = self.module(*args, **kwargs)
        if training and self._parts is not None:
            self._parts.hidden.show()
            self._in_passes = True
            when_gradients_come(output, lambda _: Variable._execution_engine.queue_callback(self._after_passes), mode="any")
        return output

    def _after_passes(self) -> None:
        self._in_passes = False
        self._held.hidden.hide()

    def _begin_pass(self) -> bool:
        """Before passes of training. True if they are part of a step."""
        step = self._session.ensure_step()
        if step is not self._session.step:
            return False  # a joiner's pass ahead of its loop
        if step.control is not None:
            raise PreconditionError(
                "the gradients of this step are reduced already, by train_step, clip_grad_norm_, synchronize_gradients or a GradScaler: do "
                "all backward passes of a step before; to accumulate, give micro_batch_size= to the loader and loop over loader.steps()"
            )
        self._prepare_pass(step)
        return True

    def _prepare_pass(self, step: Step) -> None:
        if self._division is not None and step.lost is None:
            try:
                self._division.begin_pass(step)
            except MembershipChanged as error:
                self._session.mark_lost(error)

    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor | None:
        if self.pipelined:
            return self._train_in_pipeline(inputs, targets, loss_fn)
        output = call_module(self, inputs)
        with self.loss_parallel():
            loss = loss_of(output, targets, loss_fn)
        loss.backward()
        return loss

    def _train_in_pipeline(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor | None:
        if not self._begin_pass() or self._division is None:  # ahead of the loop, or the step was lost before the model was laid out
            loss = loss_of(call_module(self._stand_in(), inputs), targets, loss_fn)
            loss.backward()
            return loss
        count = self._template.pipeline.micro_batches
        seeds = torch.randint(2**62, (count,)).tolist()  # the ranks of a replica draw alike
        batches = cut_batch(inputs, targets, count=count, seeds=seeds)
        step = self._session.step
        if step is not None and step.weigh is not None:
            weights = step.weigh([one.samples for one in batches])
            batches = [dataclasses.replace(one, weight=weight) for one, weight in zip(batches, weights, strict=True)]
        several = step is not None and step.in_micro_batches  # of which the closing tells but the mean
        try:
            with self._passing():
                return self._division.train_on(batches, None if loss_fn is None else self._within_region(loss_fn), everywhere=several)
        except MembershipChanged as error:
            self._session.mark_lost(error)
            return torch.zeros((), dtype=torch.float64)

    @contextlib.contextmanager
    def loss_parallel(self) -> Iterator[None]:
        """Put around a loss that is computed outside of a model made with `loss_parallel=True`: its logits are split over the vocabulary.
        `train_step` does it itself; without that option it does nothing."""
        mesh = self._division.mesh if self._division is not None else None
        with loss_parallel(mesh) if mesh is not None and self._options.get("loss_parallel") else contextlib.nullcontext():
            yield

    def _within_region(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        def loss(output: Any, targets: Any) -> torch.Tensor:
            with self.loss_parallel():
                return loss_fn(output, targets)

        return loss

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if not self.in_parts:
            own = {"model": self.module.state_dict(), "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None}
            unsaved = self._held.unsaved() if self._parts is not None else {}
            return own | {"applied": self._applied} | ({"buffers": unsaved} if unsaved else {})
        return {"unsaved": self._held.unsaved(), "settings": self._held.settings, "applied": self._applied}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Replica`."""
        self._give_values(state)
        held = self._held
        if "model" in state:
            held.check(state)
            if self.in_parts and (self._division is None or self._division.group.broken is not None):
                self._division = None
                held.make_whole()  # parts of it are lost, and this is to take their place: it is cut anew when the next step begins
            held.load_values(state["model"])
            if state["optimizer"] is not None:
                held.load_optimizer(state["optimizer"])
            self._applied = state.get("applied", 0)  # a checkpoint's ranks begin to count anew
            self._closing = None
        else:
            if self._division is None or state["applied"] != self._applied:
                self._release()
                held.drop()  # nothing, or too old: what its peers hold comes when the ranks are divided
                self._closing = None
            held.settings = state["settings"]
            self._applied = state["applied"]
        self._commit_buffers()

    def _hand_out(self, closing: Closing) -> None:
        self._held.hidden.show_gradients()
        self._gradients.hand_out(closing.divisor)
        self._held.hidden.handed_out()
        guard_parts(self._held.optimized, guarded=True)

    def _updated(self) -> None:
        self._held.along_data.updated()

    def _as_closing(self, told: Mapping[str, Any]) -> Closing:
        return Closing(**told)

    @torch.no_grad()
    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        execution = self._division.execution if self._division is not None else None
        issued = execution.issued.encode().decode() if execution is not None else ""
        told = [json.loads(each) for each in group.exchange(json.dumps([self.in_parts, issued]).encode())]
        IssuedCollectives.compare([each.encode() for _, each in told], self.strategy)
        if not any(in_parts for in_parts, _ in told):
            return
        if self._too_few(group.world_size):
            state = self._held.gather_whole(group)
            self._release()
            self._held.take_whole(state)
        else:
            self._lay_out(group, gathered=True)

    @torch.no_grad()
    def bring_together(self, channel: Channel) -> None:
        """See `Replica`: some ranks may have begun the first step, and laid the model out for ranks that are gone, others not."""
        if self._parts is not None and self._parts.make_whole_again(channel):
            self._division = None

    def _lay_out(self, group: Group, *, gathered: bool) -> None:
        """Divides the ranks anew. `gathered`: by the parts that they hold; else each has all.

        A failure at any place leaves every rank with the parts that it had, so that they can be divided again.
        """
        held, axes = self._held, self._divide(group.world_size)
        at = axes.at(group.rank)
        taken = held.take(group if gathered else LocalChannel(), axes, at)
        division = Division(group, axes, self._session, self.sharding) if at is not None else None
        if division is not None:
            self._release()
            division.lay_out(held, taken, averages=self.config.loss_reduction == "mean")
            self._division = division
        if gathered:
            group.exchange(b"")  # all have theirs: what a spare holds is needed until then
        if division is None:
            self._release()
            held.drop()

    def _release(self) -> None:
        old, self._division = self._division, None
        if old is not None:
            old.release()

    @torch.no_grad()
    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """See `Replica`."""
        if self._parts is not None:
            self._parts.copy_singles(channel, leaving)

    @property
    def holds(self) -> list[str]:
        """See `Replica`: the shards that it holds of its part of the model."""
        if self._division is None or not self.in_parts:
            return []
        cut = self._division.cut
        return [f"{cut.at.pipeline}.{cut.at.tensor}.{position}" for position in cut.positions]

    def working(self, group: Group) -> Group:
        """See `Replica`."""
        return self._division.all if self._division is not None and self._division.group is group else group

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        self._begin_step()
        self._standing_in.clear()
        if self._division is None:
            try:
                if self.lacks_ranks:  # nobody begins a step so, unless only to lose it
                    raise MembershipChanged("there are too few ranks for one replica of the model")
                self._lay_out(self._session.group or alone(), gathered=False)
            except MembershipChanged as error:
                self._session.mark_lost(error)
                return
        if self.idle:
            return
        division = self._divided
        self._check_training()
        self._held.hidden.drop_gradients()
        division.begin_step(self._applied + 1)
        step = self._session.step
        if step is not None and step.source is None:
            division.seed_step()

    def micro_batch_begins(self) -> None:
        """See `Replica`."""
        if self._division is not None:
            self._division.buffers.put_back()

    def micro_batch_ends(self, weight: float) -> None:
        """See `Replica`."""
        step = self._session.step
        if self._division is not None and step is not None and step.lost is None:
            self._held.hidden.show_gradients()
            try:
                self._division.add(weight)
            except MembershipChanged as error:
                self._session.mark_lost(error)

    @torch.no_grad()
    def _reduce(self, step: Step, share: Share) -> None:
        session = self._session
        division = self._divided
        self._held.hidden.show_gradients()
        try:
            if not step.in_micro_batches:
                division.add(share.weight)
            self._prepare_pass(step)
            for _ in range(share.most_micro_batches - (share.micro_batches or 0)):
                division.take_part()
            division.sum_gradients()
            if step.lost is not None:
                return
            failpoint("reduction.completed")
            session.seal_step()
            failpoint("sharded.sealed")
            norm = division.gradients.squared_norm()
            issued = division.execution.issued.word() if division.execution is not None else []
            told = division.all.sum_numbers([*session.control_word(), norm, *issued])
            failpoint("step.closed")
        except MembershipChanged as error:
            session.mark_lost(error)
            return
        word, norm, issued = told[:CONTROL_LENGTH], told[CONTROL_LENGTH], told[CONTROL_LENGTH + 1 :]
        if issued:
            IssuedCollectives.check(issued, self.strategy)
        self._close(Closing(number=self._applied + 1, squared_norm=norm, divisor=division.gradients.divisor), word)

    @property
    def _has_gradients(self) -> bool:
        step = self._session.step
        left = self._division is not None and self._division.gradients.any_left
        return left or (step is not None and step.control is not None) or any(gradient_of(p) is not None for p in self.module.parameters())

    def _drop_gradients(self) -> None:
        self._held.hidden.drop_gradients()
        if self._division is not None:
            self._division.drop_gradients()

    @torch.no_grad()
    def discard_step(self) -> None:
        """See `Replica`."""
        self._whereabouts.pending = False
        if self._division is None:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        self._division.forget()
        self._division.buffers.put_back()

    @torch.no_grad()
    def commit_step(self) -> None:
        """See `Replica`."""
        division = self._divided
        division.buffers.apply(division.gradients.changes)
        division.buffers.commit()
        self._in_passes = self._whereabouts.pending = False
        division.forget()
        self._held.hidden.hide()
        self._held.forget_before()
