"""What zero1, zero2 and zero3 have in common: how a model is trained whose parts are cut over the ranks.

They differ in what is cut (`Stage`) and in what is gathered at once (`groups`). (Rajbhandari et al., "ZeRO", SC 2020, sections 5 and 7;
Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.) The optimizer updates flat pieces of parameters. That is right for optimizers that treat
each element by itself, which most do; others are refused.

How a step ends, so that it outlives the death of a rank:

1. The gradients are summed; each rank has its shard's.
2. Each rank passes that sum on to its buddy, who mirrors the shard: parameters and optimizer state, as further pieces of the same
   optimizer.
3. The closing: one small all-reduce with the control word, the gradients' norm, which parameters were used, how the buffers changed. When
   a rank has seen it, every rank has done 2, so every rank can apply the step, and every mirror can for its owner.
4. Owners and mirrors apply the same update.

So after a failure either nobody has seen the closing, and the step is void, or somebody has: then those who have not get it from him, with
the state that is the same on all ranks, and apply the step too (`restore`). Then the shards are cut for the new group (`regroup`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError

from shoal_worker.elastic.contract import Leases
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.step import Step
from shoal_worker.failpoints import failpoint
from shoal_worker.sharding.cut_state import check_elementwise
from shoal_worker.sharding.issued import IssuedCollectives
from shoal_worker.sharding.unit import Stage
from shoal_worker.strategies.base import call_module, check_optimizer_covers, check_reproducible, loss_of
from shoal_worker.strategies.closing import Closing, ClosingSum
from shoal_worker.strategies.cut_model import CutModel, in_dtype
from shoal_worker.strategies.materialize import materialize

_WIDE: Final = torch.empty(0, dtype=torch.float64)
"""What the closing is summed in, and where."""


class ShardedParametersModel(CutModel):
    """A model whose optimizer state, and perhaps gradients and parameters, are cut over the ranks, in training."""

    asynchronous: ClassVar[bool] = False

    def initialize_sharding(self) -> None:
        """See `CutModel`."""
        super().initialize_sharding()
        self._weights = 0.0
        """Weight of the micro-batches of this rank in this step."""
        self._changes: torch.Tensor | None = None
        """By how much they changed the buffers, weighted."""
        self._applied = 0
        """Steps that this rank has applied."""
        self._closing: Closing | None = None
        """Of the step in progress once it is closed, and of the last one until then."""
        self._sealed = False
        """This rank's part of the step in progress is with its buddy."""
        self._passes_known_in: int | None = None
        """The generation whose ranks all know the collectives of a pass."""
        self._shown = False
        """A GradScaler may have looked at the gradients of this step, and scaled them."""
        self._handed_out = 0.0
        """Norm of this rank's gradients before it could, if so."""
        self._prepared = False
        """This rank has gone into the first collective of the step in progress."""

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `ShardedModel`. The optimizer gets the pieces that this rank holds in the place of the parameters."""
        self._optimizer = optimizer
        if optimizer is not None:
            check_optimizer_covers(self.module, optimizer)
            check_elementwise(optimizer, elementwise=bool(self._options.get("elementwise_optimizer", False)))
        if self._parts is not None:
            self._use_optimizer()
        self._session.attach(self)
        if self._parts is not None:
            self._step_buffers.commit()

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; in training its backward pass reduces the gradients over all ranks."""
        if self.module.training and torch.is_grad_enabled():
            step = self._session.ensure_step()
            if step.source is not None:  # else this may be a dry run before the loop, and no step
                check_reproducible(self.config, step)
            if step is self._session.step:  # else it is a joiner's pass ahead of its loop
                self._weigh(step)
        if self.config.param_dtype is not None:
            args, kwargs = in_dtype((args, kwargs), self.config.param_dtype)
        return self._call(*args, **kwargs)

    def train_step(self, inputs: Any, targets: Any = None, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None) -> torch.Tensor:
        """See `ShardedModel`. The loss travels in the closing."""
        session = self._session
        step = session.ensure_step()
        loss = loss_of(call_module(self, inputs), targets, loss_fn)
        step.loss = float(loss.detach())
        loss.backward()
        session.finish_reduction_if_whole()
        mean = step.mean_loss if step.control is not None else None
        return loss.detach() if mean is None else loss.detach().new_tensor(mean)

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
            return torch.zeros((), dtype=self._held.units[0].sum_dtype, device=self._held.units[0].device)  # the step is lost
        self.note_scale()
        norm = math.sqrt(closing.squared_norm) / closing.divisor if math.isfinite(closing.squared_norm) else math.nan
        scale = max_norm / (norm * closing.scale + 1e-6)
        norm *= closing.scale
        if not scale >= 1.0:  # with a norm that is not a number, all become that
            closing.scale *= scale
            self.scale_gradients(scale)
        return torch.tensor(norm, dtype=self._held.units[0].sum_dtype, device=self._held.units[0].device)

    def _weigh(self, step: Step) -> None:
        """What the gradients of the coming pass count."""
        if step.control is not None:
            raise PreconditionError(
                "the gradients of this step are reduced already, by clip_grad_norm_, synchronize_gradients or a GradScaler: do all "
                "backward passes of a step before"
            )
        share = step.share
        self._prepare_pass(step)
        if step.in_micro_batches:
            weight = step.micro_batch or 0.0
        elif share is None or not share.total_weight:
            weight = 0.0
        else:
            weight = share.weight / share.total_weight
        self._execution.factor = weight if self.config.loss_reduction == "mean" else float(weight > 0)

    def _prepare_pass(self, step: Step) -> None:
        """Before a step's first collective. A rank that has no micro-batch in it must know what the others do in their passes: it is told
        once in a generation. In the run's first step nobody knows: the parameters stay whole for that step."""
        self._execution.reduces_in_backward = self.stage > Stage.OPTIMIZER or not step.in_micro_batches
        if self._compression is not None:
            total = step.share.total_weight if step.share is not None and step.in_micro_batches else None
            self._compression.weigh(total or 1.0 if self.config.loss_reduction == "mean" else 1.0)
        if self._prepared or self.stage is not Stage.PARAMETERS or not step.in_micro_batches:
            return
        self._prepared = True
        group, generation = self._session.group, step.placement.generation
        if group is None or group.world_size == 1 or self._passes_known_in == generation or step.lost is not None:
            return
        try:
            told = [json.loads(each) for each in group.exchange(json.dumps(self._execution.passed).encode())]
        except MembershipChanged as error:
            self._session.mark_lost(error)
            return
        known = next((each for each in told if each), None)
        if known is None:
            self._execution.keep_whole()
        else:
            self._execution.passed = self._execution.passed or [(kind, number) for kind, number in known]
            self._passes_known_in = generation

    def scale_gradients(self, scale: float) -> None:
        """Of the pieces that this rank holds."""
        self._gradients.scale(scale)

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if self._held.whole:
            return self._held.capture_whole()
        last = self._closing if self._closing is not None and self._closing.number == self._applied else None
        return {
            **self._held.capture_common(),
            "applied": self._applied,
            "closing": dict(vars(last)) if last is not None else None,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Replica`. A rank that holds shards applies the one step that it has not."""
        if self._parts is None:
            unsaved = state.get("buffers", {}) if "model" in state else state["unsaved"]
            materialize(self.module, self._optimizer, self._session.device, buffers=unsaved)
            self._build()
            self._use_optimizer()
        if "model" in state:
            self._held.restore_whole(state)
            if self._compression is not None:
                self._compression.restore(state.get("compression"))
            self._closing = None
        else:
            if not self._held.whole and self._held.cut is not None and state["applied"] != self._applied:
                self._roll_forward(Closing(**state["closing"]) if state["closing"] is not None else None)
            self._applied = state["applied"]
            self._held.restore_common(state)
        self._step_buffers.commit()

    def _roll_forward(self, closing: Closing | None) -> None:
        if closing is None or closing.number != self._applied + 1 or not self._sealed:
            raise PreconditionError(f"this rank has applied {self._applied} steps and its peers more: it cannot follow")
        self._gradients.hand_out(closing.divisor, closing.present)
        self._gradients.scale(closing.scale)
        if self._held.optimizer is not None and not closing.skipped:
            assert closing.settings is not None
            self._held.settings = closing.settings
            self._held.optimizer.step()
            self._held.updated()
        for unit in self._held.trained:
            unit.changed()
        self._execution.forget()
        self._held.committed()
        if self._compression is not None:
            self._compression.commit(unusable=closing.skipped)
        self._closing, self._sealed = closing, False  # a peer may yet need it from this rank

    @torch.no_grad()
    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        IssuedCollectives.compare(group.exchange(self._execution.issued.encode() if self._parts is not None else b""), self.strategy)
        if self._parts is not None:
            self._execution.regrouped()
            self._parts.regroup(group)
        elif any(row[0] for row in group.all_gather_integers([0])):
            raise PreconditionError("this rank's model is on the meta device, and its peers' states are cut already: it should be a joiner")

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        step, group = self._session.step, self._session.group
        assert step is not None
        self._check_training()
        self._execution.forget()
        self._execution.issued.begin(self._applied + 1)
        self._weights, self._changes, self._sealed, self._shown, self._prepared = 0.0, None, False, False, False
        if self._held.whole:
            hosts = [peer.host for peer in group.generation.peers] if group is not None else [""]
            self._held.cut_whole(number=step.placement.generation, rank=step.placement.rank, hosts=hosts)
        elif self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()  # where a failure kept it from being done after the update
        if self._compression is not None:
            trained = self._held.trained
            self._compression.laid_out("units", [unit.parameter_names for unit in trained], [u.layout.padded_numel for u in trained])
            self._compression.step_begins()

    def _check_training(self) -> None:
        for unit in self._held.units:
            for name, parameter in zip(unit.parameter_names, unit.parameters, strict=True):
                if parameter.requires_grad != unit.trained:
                    raise ConfigurationError(
                        f"parameter {name!r} has requires_grad={parameter.requires_grad}, and had {unit.trained} at as_distributed: with "
                        f"strategy {self.strategy!r} what is trained is fixed then; start the next phase in a new run, from a checkpoint"
                    )

    def lease_batches(self, *, loader: str, epoch: int, batches_in_epoch: int, finished: Sequence[int], want: int) -> Leases:
        """Refused: a step is all ranks'."""
        raise ConfigurationError(
            f"loader {loader!r}: batch_size= leases batches for async_sgd; with strategy={self.strategy!r} give global_batch_size="
        )

    def micro_batch_begins(self) -> None:
        """See `Replica`."""
        self._step_buffers.put_back()

    def micro_batch_ends(self, weight: float) -> None:
        """See `Replica`."""
        if weight > 0:
            self._weights += weight
            changes = self._step_buffers.changes(_WIDE) * weight
            self._changes = changes if self._changes is None else self._changes + changes

    @torch.no_grad()
    def finish_reduction(self) -> None:
        """See `Replica`."""
        session = self._session
        step = session.step
        if step is None or step.share is None or step.lost is not None or step.control is not None:
            return
        check_reproducible(self.config, step)
        self._prepare_pass(step)
        if step.in_micro_batches and self.stage > Stage.OPTIMIZER:
            for _ in range(step.share.most_micro_batches - (step.share.micro_batches or 0)):
                self._execution.take_part()
        self._execution.reduce_rest()
        if step.lost is not None or not self._seal():
            return
        failpoint("sharded.sealed")
        gradients = self._gradients
        summing = ClosingSum(
            session.control_word(),
            self._execution.issued.word(),
            [self._weights],
            gradients.squared_norm_part(counts=self._held.division.replica(session.rank) == 0),
            gradients.touched,
            self._buffer_changes(step),
        )
        summed = summing.to_send(session.group.device if session.group is not None else "cpu")
        if not self._collectives.all_reduce(summed).wait() or not self._passes("reduction.completed"):
            return
        word, issued, weights, norm, present, changes = summing.split(summed)
        IssuedCollectives.check(issued.tolist(), self.strategy)
        total = (float(weights) or 1.0) if step.in_micro_batches else 1.0
        closing = self._closing = Closing(
            number=self._applied + 1,
            divisor=total if self.config.loss_reduction == "mean" else 1.0,
            squared_norm=self._gradients.squared_norm(norm),
            present=[count > 0 for count in present.tolist()],
            changes=changes / total,
        )
        self._gradients.hand_out(closing.divisor, closing.present)
        self._handed_out = self._gradients.own_norm() if self._shown else 0.0
        session.take_control_word(word.tolist())

    def _buffer_changes(self, step: Step) -> torch.Tensor:
        """This rank's part in the changes of the buffers."""
        if step.in_micro_batches:
            return torch.zeros(self._step_buffers.size, dtype=torch.float64) if self._changes is None else self._changes
        share = step.share
        assert share is not None
        return self._step_buffers.changes(_WIDE) * (share.weight / (share.total_weight or 1.0))

    def _passes(self, name: str) -> bool:
        try:
            failpoint(name)
        except MembershipChanged as error:
            self._session.mark_lost(error)
            return False
        return True

    def show_to_scaler(self) -> None:
        """Before a GradScaler looks for infinities in this rank's pieces: what one rank found, all are to find."""
        step = self._session.step
        if step is None or step.in_micro_batches or not any(self._gradients.touched):
            return
        self._shown = True
        self.finish_reduction()
        if self._closing is not None and step.control is not None and not math.isfinite(self._closing.squared_norm):
            self.scale_gradients(math.nan)

    def skip(self) -> None:
        """The step is closed, but nothing is to be updated."""
        assert self._closing is not None
        self._closing.skipped = True

    def note_scale(self) -> None:
        """A GradScaler's `unscale_` has scaled the pieces' gradients, all alike: who rolls the step forward must do the same."""
        closing = self._closing
        if not self._shown or closing is None:
            return
        before, now = self._handed_out, self._gradients.own_norm()
        if before > 0 and math.isfinite(before) and math.isfinite(now):
            closing.scale = now / before

    def _seal(self) -> bool:
        """Passes the summed gradients on to the buddy. False: the step is lost."""
        self._sealed = self._gradients.pass_on(self._collectives, self._held.division)
        return self._sealed

    def update(self, step: Callable[[], Any]) -> None:
        """Updates the pieces that this rank holds, and fetches the others where parameters are whole on every rank."""
        assert self._closing is not None
        self._closing.settings = self._held.settings
        step()
        self._held.updated()
        self._applied += 1
        with torch.no_grad():
            self._execution.applied()

    @torch.no_grad()
    def discard_step(self) -> None:
        """See `Replica`. What is sealed is kept: it may yet turn out that the step is applied."""
        if not self._sealed:
            self._execution.forget()
        self._step_buffers.put_back()

    @torch.no_grad()
    def commit_step(self) -> None:
        """See `Replica`."""
        assert self._closing is not None
        self._step_buffers.apply(self._closing.changes)
        self._execution.forget()
        self._step_buffers.commit()
        self._held.committed()
        if self._compression is not None:
            self._compression.commit(unusable=self._closing.skipped)
        self._sealed = False
