"""What tensor, pipeline and hybrid have in common: how a model is trained whose layers and stages lie on different ranks.

One engine over three axes (mesh/axes.py): `tensor` and `pipeline` are those where the others have one rank, `hybrid` has all. The model's
layers communicate in its passes, along the tensor axis and between the stages. What comes after the passes is here:

1. The gradients of this rank's part are added up over the micro-batches, then summed over the replicas: one all-reduce along the data axis.
2. The closing: one small all-reduce over all ranks with the control word and the gradients' norm. When a rank has seen it, every rank has
   done 1, so every rank can apply the step.
3. Each rank updates its part.

So after a failure either nobody has seen the closing, and the step is void, or somebody has: then those who have not get it from him, and
apply the step too (`restore`). Then the state is cut for the ranks that are left (`regroup`), from the parts that any of them holds. A part
that nobody holds is lost: see docs/strategies/hybrid.md.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError

from shoal_worker.elastic.contract import Leases
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.step import CONTROL_LENGTH
from shoal_worker.failpoints import failpoint
from shoal_worker.mesh.closing import Closing
from shoal_worker.mesh.division import Division, alone
from shoal_worker.mesh.gathering import gather
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.sharding.cut_state import check_elementwise
from shoal_worker.strategies.base import call_module, check_optimizer_covers, loss_of
from shoal_worker.strategies.divided import DividedModel
from shoal_worker.strategies.materialize import materialize
from shoal_worker.tensor_parallel.region import loss_parallel


class MeshModel(DividedModel):
    """A model that several ranks hold together, in training and between steps."""

    asynchronous: ClassVar[bool] = False

    def initialize_sharding(self) -> None:
        """See `DividedModel`."""
        self._applied = 0
        """Steps that this rank has applied."""
        self._closing: Closing | None = None
        """Of the step in progress once it is closed, and of the last one until then."""
        self._sealed = False
        """The gradients of the step in progress are summed over the replicas."""
        self._shown = False
        """A GradScaler may have looked at the gradients of this step, and scaled them."""
        self._handed_out = 0.0
        """Norm of this rank's gradients before it could, if so."""
        super().initialize_sharding()

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `ShardedModel`. When the first step begins the optimizer gets this rank's part in the place of the parameters."""
        self._optimizer = optimizer
        if optimizer is not None:
            check_optimizer_covers(self.module, optimizer)
            check_elementwise(optimizer, elementwise=self._any_optimizer)
            if self._parts is not None:
                self._parts.use_optimizer(optimizer)
        self._session.attach(self)
        if not self._session.is_joining:
            self._check_divisible()

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, on all ranks of a replica together.

        Raises:
            ConfigurationError: in training, of a pipeline: only train_step can take a batch through it.
        """
        training = self.module.training and torch.is_grad_enabled()
        if training and self.pipelined:
            raise ConfigurationError(
                f"model(x) with strategy={self.strategy!r}: in training a pipeline takes a batch through both passes at once; "
                "call loss = model.train_step(x, y, loss_fn) in the place of the forward pass, the loss and backward()"
            )
        if self._ahead or (training and not self._begin_pass()):
            return self._stand_in()(*args, **kwargs)
        if self._pipeline_here:
            return self._through_pipeline(kwargs if kwargs and not args else args)
        return self.module(*args, **kwargs)

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
        return True

    def train_step(self, inputs: Any, targets: Any = None, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None) -> torch.Tensor:
        """See `ShardedModel`. All ranks of a replica pass the same batch. The loss travels in the closing.

        In `loader.steps()` the batch is the micro-batch: its own loss is returned, on every rank of the replica.
        """
        session = self._session
        if self.pipelined:
            loss = self._train_in_pipeline(inputs, targets, loss_fn)
        else:
            output = call_module(self, inputs)
            with self.loss_parallel():
                loss = loss_of(output, targets, loss_fn)
            loss.backward()
        step = session.ensure_step()
        step.loss = float(loss.detach())
        session.finish_reduction_if_whole()
        mean = step.mean_loss if step.control is not None else None
        return loss.detach() if mean is None else loss.detach().new_tensor(mean)

    def _train_in_pipeline(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor:
        if not self._begin_pass() or self._division is None:  # ahead of the loop, or the step was lost before the model was laid out
            loss = loss_of(call_module(self._stand_in(), inputs), targets, loss_fn)
            loss.backward()
            return loss
        count = self._template.pipeline.micro_batches
        seeds = torch.randint(2**62, (count,)).tolist()  # the ranks of a replica draw alike
        batches = cut_batch(inputs, targets, count=count, seeds=seeds)
        try:
            return self._division.train_on(batches, None if loss_fn is None else self._within_region(loss_fn))
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

    def synchronize_gradients(self) -> None:
        """Ends the step's reduction."""
        self.finish_reduction()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `ShardedModel`. The norm came with the closing, so this needs no communication.

        Raises:
            ConfigurationError: another norm than the Euclidean one.
        """
        if norm_type != 2.0:
            raise ConfigurationError(f"clip_grad_norm_: norm_type={norm_type}; with strategy {self.strategy!r} expected 2.0")
        self.finish_reduction()
        step, closing = self._session.step, self._closing
        if step is None or step.control is None or closing is None:
            return torch.zeros((), dtype=torch.float64)  # the step is lost
        self.note_scale()
        norm = math.sqrt(closing.squared_norm) if math.isfinite(closing.squared_norm) else math.nan
        scale = max_norm / (norm * closing.scale + 1e-6)
        norm *= closing.scale
        if not scale >= 1.0:  # with a norm that is not a number, all become that
            closing.scale *= scale
            self.scale_gradients(scale)
        return torch.tensor(norm, dtype=torch.float64)

    def scale_gradients(self, scale: float) -> None:
        """Of this rank's part."""
        self._divided.gradients.scale(scale)

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if not self.in_parts:
            own = {"model": self.module.state_dict(), "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None}
            unsaved = self._held.unsaved() if self._parts is not None else {}
            return own | {"buffers": unsaved} if unsaved else own
        last = self._closing if self._closing is not None and self._closing.number == self._applied else None
        return {
            "unsaved": self._held.unsaved(),
            "settings": self._held.settings,
            "applied": self._applied,
            "closing": dict(vars(last)) if last is not None else None,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Replica`. A rank that holds a part applies the one step that it has not."""
        if self._parts is None:
            unsaved = state.get("buffers", {}) if "model" in state else state["unsaved"]
            materialize(self.module, self._optimizer, self._session.device, buffers=unsaved)
            self._build()
        held = self._held
        if "model" in state:
            if self.in_parts and (self._division is None or self._division.group.broken is not None):
                self._division = None
                held.make_whole()  # parts of it are lost, and this is to take their place: it is cut anew when the next step begins
            held.load_values(state["model"])
            if state["optimizer"] is not None:
                held.load_optimizer(state["optimizer"])
            self._closing = None
        elif self._division is None:
            held.drop()  # what its peers hold comes when the ranks are divided
            held.settings = state["settings"]
            self._applied, self._closing = state["applied"], None
        else:
            if state["applied"] != self._applied:
                self._roll_forward(Closing(**state["closing"]) if state["closing"] is not None else None)
            held.settings = state["settings"]
            self._applied = state["applied"]
        if self._division is not None:
            self._division.buffers.commit()

    def _roll_forward(self, closing: Closing | None) -> None:
        if closing is None or closing.number != self._applied + 1 or not self._sealed:
            raise PreconditionError(f"this rank has applied {self._applied} steps and its peers more: it cannot follow")
        division, held = self._divided, self._held
        division.gradients.hand_out()
        division.gradients.scale(closing.scale)
        if held.optimizer is not None and not closing.skipped:
            assert closing.settings is not None
            held.settings = closing.settings
            held.optimizer.step()
        self._closing = closing  # a peer may yet need it from this rank
        self._end_step(division)

    def _end_step(self, division: Division) -> None:
        """It is applied here."""
        division.buffers.apply(division.gradients.changes)
        division.buffers.commit()
        division.forget()
        self._held.forget_before()
        self._sealed = False

    @torch.no_grad()
    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        told = [json.loads(each) for each in group.exchange(json.dumps(self.in_parts).encode())]
        if any(told):
            self._lay_out(group, gathered=True)

    def _lay_out(self, group: Group, *, gathered: bool) -> None:
        """Divides the ranks anew. `gathered`: by the parts that they hold; else each has all."""
        held, axes = self._held, self._divide(group.world_size)
        wholes = list(gather(group, held.held(), held.blueprint_for)) if gathered else None
        old, self._division = self._division, None
        if old is not None:
            old.release()
        if axes.at(group.rank) is None:
            held.drop()
            return
        division = Division(group, axes, lost=self._lose, device=self._session.device)
        division.lay_out(held, wholes, averages=self.config.loss_reduction == "mean")
        self._division, self._sealed = division, False

    def _lose(self, error: BaseException) -> bool:
        if self._session.step is None:
            return False
        self._session.mark_lost(error)
        return True

    def working(self, group: Group) -> Group:
        """See `Replica`."""
        return self._division.all if self._division is not None and self._division.group is group else group

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        self._shown, self._sealed = False, False
        self._standing_in.clear()
        if self._division is None:
            try:
                self._lay_out(self._session.group or alone(), gathered=False)
            except MembershipChanged as error:
                self._session.mark_lost(error)
                return
        division = self._divided
        self._check_training()
        division.forget()
        division.gradients.begin()
        division.buffers.commit()

    def _check_training(self) -> None:
        for name, piece in self._held.pieces.items():
            if piece.requires_grad != self._held.is_trained(name):
                raise ConfigurationError(
                    f"parameter {name!r} has requires_grad={piece.requires_grad}, and had {not piece.requires_grad} at as_distributed: "
                    f"with strategy {self.strategy!r} what is trained is fixed then; start the next phase in a new run, from a checkpoint"
                )

    def lease_batches(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """Refused: a step is all ranks'."""
        raise ConfigurationError(
            f"loader {loader!r}: batch_size= leases batches for async_sgd; with strategy={self.strategy!r} give global_batch_size="
        )

    def micro_batch_begins(self) -> None:
        """See `Replica`."""
        if self._division is not None:
            self._division.buffers.put_back()

    def micro_batch_ends(self, weight: float) -> None:
        """See `Replica`."""
        if self._division is not None:
            self._division.add(weight)

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """See `Replica`."""
        session = self._session
        step = session.step
        if step is None or step.share is None or step.lost is not None or step.control is not None:
            return
        division = self._divided
        if not step.in_micro_batches:
            division.add(step.share.weight)
        try:
            division.sum_gradients()
            self._sealed = True
            failpoint("sharded.sealed")
            norm = division.gradients.squared_norm()
            summed = torch.tensor([*session.control_word(), norm], dtype=torch.float64, device=division.all.device)
            division.all.all_reduce(summed)
            failpoint("reduction.completed")
        except MembershipChanged as error:
            session.mark_lost(error)
            return
        *word, norm = summed.tolist()
        assert len(word) == CONTROL_LENGTH
        self._closing = Closing(number=self._applied + 1, squared_norm=norm / division.gradients.divisor**2)
        division.gradients.hand_out()
        self._handed_out = division.gradients.own_norm() if self._shown else 0.0
        session.take_control_word(word)

    def show_to_scaler(self) -> None:
        """Before a GradScaler looks for infinities in this rank's part: what one rank found, all are to find."""
        step = self._session.step
        if step is None or step.share is None or step.in_micro_batches or not self._has_gradients:
            return
        self._shown = True
        self.finish_reduction()
        if self._closing is not None and step.control is not None and not math.isfinite(self._closing.squared_norm):
            self.scale_gradients(math.nan)

    @property
    def _has_gradients(self) -> bool:
        step = self._session.step
        return (step is not None and step.control is not None) or any(p.grad is not None for p in self.module.parameters())

    def skip(self) -> None:
        """The step is closed, but nothing is to be updated."""
        assert self._closing is not None
        self._closing.skipped = True

    def note_scale(self) -> None:
        """A GradScaler's `unscale_` has scaled the gradients, all alike: who rolls the step forward must do the same."""
        closing = self._closing
        if not self._shown or closing is None:
            return
        before, now = self._handed_out, self._divided.gradients.own_norm()
        if before > 0 and math.isfinite(before) and math.isfinite(now):
            closing.scale = now / before

    def update(self, step: Callable[[], Any]) -> None:
        """Updates this rank's part."""
        assert self._closing is not None
        self._closing.settings = self._held.settings
        step()
        self._applied += 1

    @torch.no_grad()
    def discard_step(self) -> None:
        """See `Replica`. What is sealed is kept: it may yet turn out that the step is applied."""
        if self._division is None:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        self._division.forget()
        self._division.buffers.put_back()

    @torch.no_grad()
    def commit_step(self) -> None:
        """See `Replica`."""
        self._end_step(self._divided)
