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

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from torch import nn

from shoal_worker.elastic.contract import Leases, StepStatus
from shoal_worker.elastic.group import Channel, Group, LocalChannel
from shoal_worker.elastic.step import CONTROL_LENGTH
from shoal_worker.failpoints import failpoint
from shoal_worker.sharding.assembling import assemble
from shoal_worker.sharding.collectives import SessionCollectives
from shoal_worker.sharding.exact import DIGITS, from_digits, square_digits
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.optimizer_state import ShardedOptimizerState
from shoal_worker.sharding.partition import Group as ParameterGroup
from shoal_worker.sharding.partition import alike
from shoal_worker.sharding.resharding import VALUES, Cut, Held, buddy_stride, hold, reshard
from shoal_worker.sharding.unit import Stage, Unit
from shoal_worker.sharding.whole_state import Place, optimizer_state, spread
from shoal_worker.strategies.base import ShardedModel, ShardedOptimizer, call_module, check_optimizer_covers, loss_of
from shoal_worker.strategies.buffers import CommittedBuffers

_ELEMENTWISE: Final = frozenset({"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"})
"""Optimizers of torch.optim that update each element from its own gradient and state alone."""
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
    settings: list[dict[str, Any]] | None = None
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
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ConfigurationError("the model has no parameter with requires_grad=True: there is nothing to train")
        self._collectives = SessionCollectives(self._session)
        units = [(group.module, [self._unit(part) for part in alike(group)]) for group in self.groups()]
        self._execution = ShardedExecution(units, self._collectives, self.stage)
        self._units: list[Unit] = self._execution.units
        self._trained = [unit for unit in self._units if unit.trained]
        self._step_buffers = CommittedBuffers(self.module)
        self._optimizer: torch.optim.Optimizer | None = None
        self._places: list[list[Place]] = []
        """The parameters of the optimizer's groups, in the user's order."""
        self._state = ShardedOptimizerState(None)
        self._cut: Cut | None = None
        """None: the parameters are whole, on every rank."""
        self._before: Held | None = None
        """The shards of the cut before, until the next commit."""
        self._stride = 1
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

    def _unit(self, part: ParameterGroup) -> Unit:
        return Unit(part.name, part.parameters, part.names, stage=self.stage, wide=self.config.deterministic)

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `ShardedModel`. The optimizer gets the pieces that this rank holds in the place of the parameters."""
        if optimizer is not None:
            check_optimizer_covers(self.module, optimizer)
            self._check_optimizer(optimizer)
            holdings = [(unit, holding) for unit in self._units for holding in unit.holdings]
            pieces: dict[int, list[nn.Parameter]] = {}
            for unit, holding in holdings:
                for parameter, piece in zip(unit.parameters, holding.pieces, strict=True):
                    pieces.setdefault(id(parameter), []).append(piece)
            where = {id(p): (u, i) for u, unit in enumerate(self._units) for i, p in enumerate(unit.parameters)}
            self._places = [[where[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [piece for p in group["params"] for piece in pieces[id(p)]]
        self._optimizer = optimizer
        self._state = ShardedOptimizerState(optimizer)
        self._session.attach(self)
        self._step_buffers.commit()

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer).__name__ not in _ELEMENTWISE and not self._options.get("elementwise_optimizer", False):
            raise ConfigurationError(
                f"strategy {self.strategy!r} cuts parameters into flat pieces, and {type(optimizer).__name__} is not known to treat each "
                f"element by itself; use one of {', '.join(sorted(_ELEMENTWISE))}, or say elementwise_optimizer=True if it does"
            )
        if optimizer.state:
            raise ConfigurationError("the optimizer has stepped before: call as_distributed first, then load its state")

    # ------------------------------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; in training its backward pass reduces the gradients over all ranks."""
        if self.module.training and torch.is_grad_enabled():
            self._session.ensure_step()
            self._weigh()
        return self.module(*args, **kwargs)

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
            return torch.zeros((), dtype=self._units[0].sum_dtype, device=self._units[0].device)  # the step is lost
        norm = math.sqrt(closing.squared_norm) / closing.divisor if math.isfinite(closing.squared_norm) else math.nan
        scale = max_norm / (norm * closing.scale + 1e-6)
        norm *= closing.scale
        if not scale >= 1.0:  # with a norm that is not a number, all become that
            closing.scale *= scale
            self._scale_gradients(scale)
        return torch.tensor(norm, dtype=self._units[0].sum_dtype, device=self._units[0].device)

    def _weigh(self) -> None:
        """What the gradients of the coming pass count."""
        step = self._session.step
        assert step is not None
        share = step.share
        self._execution.reduces_in_backward = self.stage > Stage.OPTIMIZER or not step.in_micro_batches
        if step.in_micro_batches:
            weight = step.micro_batch or 0.0
        elif share is None or not share.total_weight:
            weight = 0.0
        else:
            weight = share.weight / share.total_weight
        self._execution.factor = weight if self.config.loss_reduction == "mean" else float(weight > 0)

    def _scale_gradients(self, scale: float) -> None:
        for unit in self._trained:
            for holding in unit.holdings:
                for piece in holding.pieces:
                    if piece.grad is not None:
                        piece.grad.mul_(scale)

    # --------------------------------------------------------------------------------------------- Replica: for the session

    def capture(self) -> dict[str, Any]:
        """See `Replica`. Before the first step all of the state; from then on what every rank has of it."""
        if self._cut is None:
            return {"model": self.module.state_dict(), "optimizer": None}
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {
            "applied": self._applied,
            "closing": dict(vars(self._closing)) if self._closing is not None and self._closing.number == self._applied else None,
            "buffers": {name: value for name, value in self.module.state_dict().items() if name not in parameters},
            "settings": self._settings(),
            "scalars": [self._state.scalars(unit) for unit in self._units],
            "keys": [{k: str(v).removeprefix("torch.") for k, v in self._state.element_keys(unit).items()} for unit in self._units],
            "passed": [list(each) for each in self._execution.passed],
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Replica`. A rank that holds shards applies the one step that it has not."""
        if "model" in state:
            self._restore_whole(state)
            return
        if self._cut is not None and state["applied"] != self._applied:
            self._roll_forward(Closing(**state["closing"]) if state["closing"] is not None else None)
        self._applied = state["applied"]
        self.module.load_state_dict(state["buffers"], strict=False)
        self._step_buffers.commit()
        self._use(state["settings"])
        self._scalars = state["scalars"]
        self._keys = [{k: getattr(torch, v) for k, v in own.items()} for own in state["keys"]]
        self._execution.passed = [(kind, number) for kind, number in state["passed"]]

    def _restore_whole(self, state: Mapping[str, Any]) -> None:
        for unit in self._units:
            unit.make_whole()
        self.module.load_state_dict(state["model"])
        self._step_buffers.commit()
        saved = state["optimizer"]
        if saved is not None and self._optimizer is not None:
            spread(self._places, saved, self._units, self._state)
            self._use([{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]])
        self._cut, self._before, self._closing = None, None, None

    def _roll_forward(self, closing: Closing | None) -> None:
        if closing is None or closing.number != self._applied + 1 or not self._sealed:
            raise PreconditionError(f"this rank has applied {self._applied} steps and its peers more: it cannot follow")
        self._hand_out(closing)
        self._scale_gradients(closing.scale)
        if self._optimizer is not None:
            assert closing.settings is not None
            self._use(closing.settings)
            self._optimizer.step()
        for unit in self._trained:
            unit.changed()
        self._execution.forget()
        self._sealed = False

    def regroup(self, group: Group) -> None:
        """See `Replica`. Cuts the shards for the ranks of `group`."""
        number = group.generation.number
        if self._cut is not None and self._cut.number == number:
            return
        stride = buddy_stride([peer.host for peer in group.generation.peers])
        told = [row[0] for row in group.all_gather_integers([int(self._cut is not None)])]
        if not any(told):
            return  # no step has begun anywhere: all ranks hold all of it
        if self._cut is not None:
            self._scalars = [self._state.scalars(unit) for unit in self._units]
            self._keys = [self._state.element_keys(unit) for unit in self._units]
        held = self._held(self._keys)
        cut = reshard(self._units, self._state, held, self._scalars, self._keys, group, number=number, stride=stride)
        self._before = held[0] if held else None
        self._cut, self._stride = cut, stride
        if self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()

    def _held(self, keys: Sequence[Mapping[str, torch.dtype]]) -> list[Held]:
        """The cuts of which this rank holds shards."""
        held = [hold(self._units, self._state, self._cut, keys)] if self._cut is not None else []
        return held + ([self._before] if self._before is not None else [])

    @torch.no_grad()
    def assemble(self, channel: Channel) -> dict[str, Any]:
        """See `Replica`."""
        keys = [self._state.element_keys(unit) for unit in self._units]
        if self._cut is not None:
            wholes = assemble(self._units, self._held(keys), keys, channel)
        else:
            wholes = [
                {VALUES: unit.own.shard, **{key: self._state.shard(unit, unit.own, key, dtype) for key, dtype in own.items()}}
                for unit, own in zip(self._units, keys, strict=True)
            ]
        scalars = [self._state.scalars(unit) for unit in self._units]
        optimizer = optimizer_state(self._places, self._settings(), self._units, scalars, wholes) if self._optimizer is not None else None
        return {"model": self._named(wholes), "optimizer": optimizer}

    def _named(self, wholes: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The module's state dict with these values of its parameters."""
        values: dict[str, torch.Tensor] = {}
        views = {
            id(parameter): view
            for unit, whole in zip(self._units, wholes, strict=True)
            for parameter, view in zip(unit.parameters, unit.layout.views(whole[VALUES]), strict=True)
        }
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, value in self.module.state_dict().items():
            values[name] = views[id(parameters[name])] if name in parameters else value
        return values

    @contextlib.contextmanager
    def whole_for(self, channel: Channel) -> Iterator[None]:
        """See `ShardedModel`."""
        if self._cut is None or isinstance(channel, LocalChannel):
            yield
            return
        wholes = assemble(self._units, self._held([{}] * len(self._units)), [{}] * len(self._units), channel)
        with torch.no_grad():
            for unit, whole in zip(self._units, wholes, strict=True):
                unit.fill(whole[VALUES])
        self._execution.pinned = True
        try:
            yield
        finally:
            self._execution.free_all()

    def has_values(self) -> bool:
        """See `Replica`."""
        return not any(t.is_meta for t in self.module.state_dict().values())

    @torch.no_grad()
    def step_begins(self) -> None:
        """See `Replica`."""
        step, group = self._session.step, self._session.group
        assert step is not None
        self._execution.forget()
        self._weights, self._changes, self._sealed = 0.0, None, False
        if self._cut is None:
            world_size, rank = step.placement.world_size, step.placement.rank
            if group is not None:
                self._stride = buddy_stride([peer.host for peer in group.generation.peers])
            mirrored = (rank - self._stride) % world_size if world_size > 1 else None
            for unit in self._units:
                self._state.cut(unit, self._state.element_keys(unit), world_size, rank, mirrored)
            self._execution.free_all()
            self._cut = Cut(number=step.placement.generation, world_size=world_size, position=rank, mirrored=mirrored)
        elif self.stage is not Stage.PARAMETERS:
            self._execution.gather_all()  # where a failure kept it from being done after the update

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
        present = torch.tensor([float(flag) for unit in self._trained for flag in unit.touched], dtype=torch.float64)
        if not step.in_micro_batches:
            self._changes = self._step_buffers.changes(_WIDE) * (step.share.weight / (step.share.total_weight or 1.0))
        changes = torch.zeros(self._step_buffers.size, dtype=torch.float64) if self._changes is None else self._changes
        summed = torch.cat([word, weights, norm, present, changes])
        if not self._collectives.all_reduce(summed).wait() or not self._passes("reduction.completed"):
            return
        word, weights, norm, present, changes = summed.split([CONTROL_LENGTH, 1, len(norm), len(present), len(changes)])
        total = (float(weights) or 1.0) if step.in_micro_batches else 1.0
        self._closing = Closing(
            number=self._applied + 1,
            divisor=total if self.config.loss_reduction == "mean" else 1.0,
            squared_norm=self._norm_from(norm),
            present=[count > 0 for count in present.tolist()],
            changes=changes / total,
        )
        self._hand_out(self._closing)
        session.take_control_word(word.tolist())

    def _passes(self, name: str) -> bool:
        try:
            failpoint(name)
        except MembershipChanged as error:
            self._session.mark_lost(error)
            return False
        return True

    def _norm_part(self) -> torch.Tensor:
        """What this rank's gradients add to the squared norm; as digits too where its bits must not depend on the number of ranks."""
        gradients = [unit.own.gradient for unit in self._trained if unit.own.gradient is not None]
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
        for unit in self._trained:
            gradient = unit.own.gradient
            if gradient is None:
                continue
            unit.mirror.gradient = torch.empty_like(gradient)
            on_their_way.append(self._collectives.pass_on(unit.mirror.gradient, gradient, stride=self._stride))
        self._sealed = [pending.wait() for pending in on_their_way].count(False) == 0
        return self._sealed

    def _hand_out(self, closing: Closing) -> None:
        flags = iter(closing.present)
        for unit in self._trained:
            present = [next(flags) for _ in unit.parameters]
            for holding in unit.holdings:
                holding.hand_out(closing.divisor, present)

    def update(self, step: Callable[[], Any]) -> None:
        """Updates the pieces that this rank holds, and fetches the others where parameters are whole on every rank."""
        assert self._closing is not None
        self._closing.settings = self._settings()
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
        self._before, self._sealed = None, False

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def _use(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, own in zip(self._optimizer.param_groups if self._optimizer is not None else [], settings, strict=True):
            group.update(own)

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

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel`: flat pieces."""
        return {name: piece.detach() for unit in self._units for name, piece in zip(unit.parameter_names, unit.own.pieces, strict=True)}


class ShardedParametersOptimizer(ShardedOptimizer):
    """The user's optimizer, stepped on the pieces that this rank holds."""

    def step(self, closure: Callable[[], Any] | None = None) -> StepStatus:  # type: ignore[override]
        """See `ShardedOptimizer`."""
        if closure is not None:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}.step(closure): closures run the backward pass again, outside of the step; "
                "use an optimizer that needs none (LBFGS does)"
            )
        return self._session.finish_step(lambda: self._model.update(self.optimizer.step))

    def synchronize_parameters(self) -> None:
        """Parameters agree on all ranks after every step: nothing to do."""

    def synchronize_optimizer_state(self) -> None:
        """Each rank's state is its own, and its buddy's: nothing to do."""
