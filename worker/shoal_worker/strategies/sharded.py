"""What zero1, zero2 and zero3 have in common: a model and an optimizer whose parts are cut over the ranks.

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

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError

from shoal_worker.elastic.contract import Leases
from shoal_worker.elastic.group import Channel, Group
from shoal_worker.elastic.step import CONTROL_LENGTH, Step
from shoal_worker.failpoints import failpoint
from shoal_worker.sharding.collectives import SessionCollectives
from shoal_worker.sharding.cut_state import CutState, Settings, check_elementwise
from shoal_worker.sharding.exact import DIGITS, from_digits, square_digits
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.partition import Group as ParameterGroup
from shoal_worker.sharding.partition import alike
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.strategies.base import (
    ShardedModel,
    ShardedOptimizer,
    call_module,
    check_optimizer_covers,
    check_reproducible,
    loss_of,
    replaced_parameters,
)
from shoal_worker.strategies.buffers import CommittedBuffers
from shoal_worker.strategies.materialize import has_values, materialize, unsaved_buffers

_WIDE: Final = torch.empty(0, dtype=torch.float64)
"""What the closing is summed in, and where."""


@dataclass(kw_only=True)
class Closing:
    """What all ranks know of a step once it is closed."""

    number: int
    """Which step of this model it is, from 1."""
    divisor: float
    """Of the summed gradients."""
    squared_norm: float
    """Of the gradients, before the divisor."""
    present: list[bool]
    """For each trained parameter: some rank used it."""
    changes: torch.Tensor
    """Of the buffers; the mean over the ranks."""
    scale: float = 1.0
    """Of the gradients, by clipping."""
    skipped: bool = False
    """A GradScaler found infinities: the step counts, but nothing is updated."""
    settings: Settings | None = None
    """Of the parameter groups, when the step was applied."""


class ShardedParametersModel(ShardedModel):
    """A model whose optimizer state, and perhaps gradients and parameters, are cut over the ranks."""

    stage: ClassVar[Stage]
    asynchronous: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset({"elementwise_optimizer"})

    def groups(self) -> list[ParameterGroup]:
        """What is gathered and reduced at once, the group of the outermost module first."""
        raise NotImplementedError

    def initialize_sharding(self) -> None:
        """Takes over the memory of the parameters. They are cut when the first step begins: until then all ranks hold them whole."""
        # What torch.compile gave is called, but state is named as in the user's own module.
        self._call: Callable[..., Any] = self.module.__call__
        self.module = getattr(self.module, "_orig_mod", self.module)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ConfigurationError("the model has no parameter with requires_grad=True: there is nothing to train")
        self._collectives = SessionCollectives(self._session)
        self._optimizer: torch.optim.Optimizer | None = None
        """The user's, until it is used."""
        self._parts: CutState | None = None
        """None while the module is on the meta device: it is built when values come."""
        if has_values(self.module):
            self._build()
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

    def _unit(self, part: ParameterGroup) -> Unit:
        return Unit(part.name, part.parameters, part.names, stage=self.stage, wide=self.config.deterministic)

    def _build(self) -> None:
        units = [(group.module, [self._unit(part) for part in alike(group)]) for group in self.groups()]
        self._execution = ShardedExecution(units, self._collectives, self.stage)
        self._parts = CutState(self.module, self._execution, self.stage)
        self._step_buffers = CommittedBuffers(self.module)

    def _use_optimizer(self) -> None:
        if self._optimizer is not None:
            self._held.use_optimizer(self._optimizer, elementwise=bool(self._options.get("elementwise_optimizer", False)))

    @property
    def _held(self) -> CutState:
        if self._parts is None:
            raise PreconditionError("the model is on the meta device: it gets its values from its peers at the first live batch")
        return self._parts

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
        for unit in self._held.trained:
            for holding in unit.holdings:
                for piece in holding.pieces:
                    if piece.grad is not None:
                        piece.grad.mul_(scale)

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if self._held.cut is None:
            return {"model": self.module.state_dict(), "optimizer": None, "buffers": unsaved_buffers(self.module)}
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
            self._closing = None
        else:
            if self._held.cut is not None and state["applied"] != self._applied:
                self._roll_forward(Closing(**state["closing"]) if state["closing"] is not None else None)
            self._applied = state["applied"]
            self._held.restore_common(state)
        self._step_buffers.commit()

    def _roll_forward(self, closing: Closing | None) -> None:
        if closing is None or closing.number != self._applied + 1 or not self._sealed:
            raise PreconditionError(f"this rank has applied {self._applied} steps and its peers more: it cannot follow")
        self._hand_out(closing)
        self.scale_gradients(closing.scale)
        if self._held.optimizer is not None and not closing.skipped:
            assert closing.settings is not None
            self._held.settings = closing.settings
            self._held.optimizer.step()
        for unit in self._held.trained:
            unit.changed()
        self._execution.forget()
        self._held.committed()
        self._closing, self._sealed = closing, False  # a peer may yet need it from this rank

    @torch.no_grad()
    def regroup(self, group: Group) -> None:
        """See `Replica`."""
        if self._parts is not None:
            self._parts.regroup(group)
        elif any(row[0] for row in group.all_gather_integers([0])):
            raise PreconditionError("this rank's model is on the meta device, and its peers' states are cut already: it should be a joiner")

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`."""
        return self._held.assemble(channel)

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """See `ShardedModel`."""
        return self._held.whole_for(channel) if self._parts is not None else nullcontext()

    @property
    def in_parts(self) -> bool:
        """See `Replica`."""
        return self._parts is not None and self._parts.cut is not None and self._parts.cut.world_size > 1

    def has_values(self) -> bool:
        """See `Replica`."""
        return self._parts is not None

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        step, group = self._session.step, self._session.group
        assert step is not None
        self._check_training()
        self._execution.forget()
        self._weights, self._changes, self._sealed, self._shown, self._prepared = 0.0, None, False, False, False
        if self._held.cut is None:
            hosts = [peer.host for peer in group.generation.peers] if group is not None else []
            at = step.placement
            self._held.cut_whole(number=at.generation, rank=at.rank, world_size=at.world_size, hosts=hosts)
        elif self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()  # where a failure kept it from being done after the update

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
        word = torch.tensor(session.control_word(), dtype=torch.float64)
        weights = torch.tensor([self._weights], dtype=torch.float64)
        norm = self._norm_part()
        present = torch.tensor([float(flag) for unit in self._held.trained for flag in unit.touched], dtype=torch.float64)
        if not step.in_micro_batches:
            self._changes = self._step_buffers.changes(_WIDE) * (step.share.weight / (step.share.total_weight or 1.0))
        changes = torch.zeros(self._step_buffers.size, dtype=torch.float64) if self._changes is None else self._changes
        summed = torch.cat([word, weights, norm, present, changes]).to(session.group.device if session.group is not None else "cpu")
        if not self._collectives.all_reduce(summed).wait() or not self._passes("reduction.completed"):
            return
        word, weights, norm, present, changes = summed.cpu().split([CONTROL_LENGTH, 1, len(norm), len(present), len(changes)])
        total = (float(weights) or 1.0) if step.in_micro_batches else 1.0
        self._closing = Closing(
            number=self._applied + 1,
            divisor=total if self.config.loss_reduction == "mean" else 1.0,
            squared_norm=self._norm_from(norm),
            present=[count > 0 for count in present.tolist()],
            changes=changes / total,
        )
        self._hand_out(self._closing)
        self._handed_out = self._own_norm() if self._shown else 0.0
        session.take_control_word(word.tolist())

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
        if step is None or step.in_micro_batches or not any(any(unit.touched) for unit in self._held.trained):
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
        before, now = self._handed_out, self._own_norm()
        if before > 0 and math.isfinite(before) and math.isfinite(now):
            closing.scale = now / before

    def _own_norm(self) -> float:
        gradients = [piece.grad for unit in self._held.trained for piece in unit.own.pieces if piece.grad is not None]
        return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))

    def _norm_part(self) -> torch.Tensor:
        """What this rank's gradients add to the squared norm; as digits too where its bits must not depend on the number of ranks."""
        gradients = [unit.own.gradient for unit in self._held.trained if unit.own.gradient is not None]
        plain = torch.stack([g.double().square().sum().cpu() for g in gradients] or [torch.zeros((), dtype=torch.float64)]).sum().view(1)
        if not self.config.deterministic:
            return plain
        digits = [square_digits(g.float()) for g in gradients] if plain.isfinite() else []
        return torch.cat([plain, torch.stack(digits).sum(0) if digits else torch.zeros(DIGITS, dtype=torch.float64)])

    def _norm_from(self, summed: torch.Tensor) -> float:
        return from_digits(summed[1:].tolist()) if self.config.deterministic and summed[0].isfinite() else float(summed[0])

    def _seal(self) -> bool:
        """Passes the summed gradients on to the buddy. False: the step is lost."""
        if self._collectives.world_size == 1:
            self._sealed = True
            return True
        on_their_way = []
        for unit in self._held.trained:
            gradient = unit.own.gradient
            if gradient is None:
                continue
            unit.mirror.gradient = torch.empty_like(gradient)
            on_their_way.append(self._collectives.pass_on(unit.mirror.gradient, gradient, stride=self._held.stride))
        self._sealed = [pending.wait() for pending in on_their_way].count(False) == 0
        return self._sealed

    def _hand_out(self, closing: Closing) -> None:
        flags = iter(closing.present)
        for unit in self._held.trained:
            present = [next(flags) for _ in unit.parameters]
            for holding in unit.holdings:
                holding.hand_out(closing.divisor, present)

    def update(self, step: Callable[[], Any]) -> None:
        """Updates the pieces that this rank holds, and fetches the others where parameters are whole on every rank."""
        assert self._closing is not None
        self._closing.settings = self._held.settings
        step()
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
        self._sealed = False

    # ---------------------------------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`. Every rank calls it."""
        parameters = {name for name, _ in self.module.named_parameters()}
        return {name: value for name, value in self.full_state_dict().items() if name in parameters}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """See `ShardedModel`. Every rank calls it."""
        whole: dict[str, torch.Tensor] = {}

        def body(channel: Channel) -> None:
            with self.whole_for(channel):
                copies = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
            whole.update({} if rank0_only and channel.rank != 0 else copies)
            channel.exchange(b"")  # who comes out of this knows that all have theirs

        self._session.operation("full_state_dict", body)
        return whole

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's whole state. Every rank calls it."""
        whole: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            whole.update(copy.deepcopy(self._held.assemble(channel)["optimizer"]))
            channel.exchange(b"")

        self._session.operation("optimizer state_dict", body)
        return whole

    @torch.no_grad()
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the optimizer's whole state. Every rank calls it."""
        self._held.load_optimizer(state)

    @torch.no_grad()
    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel`."""
        self._held.load_values(tensors)
        self._step_buffers.commit()

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`: flat pieces."""
        return {name: piece.detach() for name, piece in self._own_pieces()}

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`: of the flat pieces of `local_shard`, summed over the ranks."""
        return {name: piece.grad for name, piece in self._own_pieces() if piece.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Refused: other ranks mirror this rank's pieces, and would apply other gradients.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"set_gradients: with strategy {self.strategy!r} other ranks hold mirrors; scale the loss, or use ddp")

    def save_model(self, path: str | Path) -> None:
        """See `ShardedModel`. When it returns on any rank, the file is in place."""
        super().save_model(path)
        self._session.operation("save_model", lambda channel: channel.exchange(b"") and None)

    def with_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> ShardedModel:
        """See `ShardedModel`. Every rank calls it, with the same values."""
        whole = self.full_state_dict()
        own = {name: whole[name] for name, _ in self.module.named_parameters()}
        replaced = replaced_parameters(parameters, own)
        shared = {id(p): name for name, p in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            whole[name] = replaced.get(shared[id(parameter)], whole[name])
        self.load_full(whole)
        return self

    def _whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        return [each for unit in self._held.units for each in zip(unit.parameters, unit.layout.shapes, strict=True)]

    def _own_pieces(self) -> list[tuple[str, torch.Tensor]]:
        return [each for unit in self._held.units for each in zip(unit.parameter_names, unit.own.pieces, strict=True)]


class ShardedParametersOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on the pieces that this rank holds."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's optimizer's own, over the pieces that this rank holds. Looking at them ends the reduction of a plain step."""
        self._model.show_to_scaler()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def _apply(self) -> None:
        self._model.update(super()._apply)

    def _update(self, *, usable: bool) -> None:
        if usable:
            self._model.note_scale()
            self.optimizer.step()
        else:
            self._model.skip()

    def _scale_gradients(self, scale: float) -> None:
        self._model.scale_gradients(scale)

    def state_dict(self) -> dict[str, Any]:
        """As one process would have it, whole: it loads under any strategy. Every rank calls it."""
        return self._model.optimizer_state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole one, of any strategy. Every rank calls it, with the same.

        Raises:
            CorruptDataError: it is of another optimizer; nothing is changed.
        """
        self._model.load_optimizer_state_dict(state_dict)

    def synchronize_parameters(self) -> None:
        """Parameters agree on all ranks after every step: nothing to do."""

    def synchronize_optimizer_state(self) -> None:
        """Each rank's state is its own, and its buddy's: nothing to do."""
