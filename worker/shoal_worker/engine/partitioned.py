"""Base of engines in which a rank need not have the full model. Implements the end of a step, and
operations between steps.

`sharding/engine.py` shards a model's tensors across ranks (zero1 and similar). `mesh/engine.py`
splits a model's layers and stages (tensor, pipeline, hybrid). In both cases, a step is prepared
when each rank has everything needed to update its own part of the model and the parts that it
mirrors. The gradients' norm and all other values that ranks need from each other (`CommitPayload`)
are sent in the commit all-reduce, together with the step vote. Each rank then updates its own part.
If the ranks have changed, the state is resharded after the update.

torch's own methods (`state_dict`, `zero_grad`, `to`) either work correctly, or raise an error that
names the alternative. Most of this is implemented by replacing the classes of the parameters
(`hidden_parameters.py`). docs/torch-calls.md lists all such methods.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.loader_interface import Share
from shoal_worker.elastic.contract.reported_loss import read_later
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.engine.base import Engine, Setup
from shoal_worker.engine.state.hidden_parameters import Whereabouts, guard_parts, inside, is_hidden
from shoal_worker.engine.state.module_state import ModuleState
from shoal_worker.engine.state.parameters import (
    check_optimizer_covers,
    check_trains,
    has_values,
    materialize,
    named_values,
)
from shoal_worker.engine.state.partitioned_state import PartitionedState
from shoal_worker.engine.step.buffers import joined
from shoal_worker.engine.step.passes import Loss
from shoal_worker.engine.step.tentative_update import TentativeUpdate
from shoal_worker.state.digest import digest_of
from shoal_worker.state.fits import check_elementwise

# --------------------------------------------------------------------------- the commit all-reduce


@dataclass(kw_only=True)
class CommitPayload:
    """Data about a committed step, the same on all ranks. Ranks that missed the commit all-reduce
    receive it from a peer.
    """

    number: int
    """Number of this model's step, from 1."""
    divisor: float
    """Divisor of the summed gradients."""
    squared_norm: float
    """Squared norm of the summed gradients, before division by `divisor`."""

    @property
    def norm(self) -> float:
        """Norm of the final gradients; NaN if they are not finite."""
        return (
            math.sqrt(self.squared_norm) / self.divisor
            if math.isfinite(self.squared_norm)
            else math.nan
        )


@dataclass(kw_only=True)
class ShardedCommitPayload(CommitPayload):
    """`CommitPayload` for a model that is sharded across all ranks, so that every rank has a piece
    of each parameter.
    """

    present: list[bool]
    """One flag for each trained parameter: True if at least one rank has used it."""
    changes: torch.Tensor
    """Changes to the buffers, averaged across ranks."""


class CommitSum:
    """Several float64 vectors that the commit all-reduce sums across ranks, each of which has the
    same length on all ranks."""

    def __init__(self, *parts: torch.Tensor | Sequence[float]) -> None:
        self._parts = [torch.as_tensor(part, dtype=torch.float64) for part in parts]

    def to_send(self) -> torch.Tensor:
        """Packs the vectors into one tensor on the CPU, which is the input of the all-reduce."""
        return torch.cat([part.cpu() for part in self._parts])

    def split(self, summed: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the sum of each vector as a tensor on the CPU. `summed`: result of the
        all-reduce."""
        parts: Sequence[torch.Tensor] = summed.split([len(part) for part in self._parts])
        return parts


# --------------------------------------------------------------------------------------- the engine

State = TypeVar("State", bound=PartitionedState)
Closed = TypeVar("Closed", bound=CommitPayload)


class Gradients(Protocol):
    """A step's summed gradients for the tensors that this rank's optimizer updates."""

    def scale(self, factor: float) -> None:
        """Multiplies the gradients by `factor`."""
        ...


class PartitionedEngine(Engine, Generic[State, Closed]):
    """Engine of a model whose state is partitioned across ranks, so that no rank needs all of
    it."""

    updates_parts = True
    _payload_type: type[Closed]
    """Class of the data about a committed step."""

    # ------------------------------------------------------------------------- what is cut, and how

    @abc.abstractmethod
    def _make_state(self) -> State:
        """Creates the partitioned state from the module, which must not be on the meta device."""

    @property
    @abc.abstractmethod
    def _gradients(self) -> Gradients: ...

    @abc.abstractmethod
    def _own_pieces(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields this rank's own piece of each parameter, with the parameter's name."""

    def _optimized(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._own_pieces() if self._parts is not None else ()

    @abc.abstractmethod
    def _trained(self) -> Iterable[tuple[str, torch.Tensor, bool]]:
        """Yields (name, parameter, trained) for this rank's parameters. `trained`: whether the
        parameter required gradients when `as_distributed` was called."""

    @abc.abstractmethod
    def _parameter_names(self) -> Mapping[str, str]:
        """Returns the state dict's keys of all parameters, in order. Each key is mapped to the
        parameter's first key, because a tied parameter has several keys."""

    @abc.abstractmethod
    def _commit_buffers(self) -> None:
        """Makes the buffers' current values part of the committed state."""

    @abc.abstractmethod
    def _take_pass(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor | None:
        """Runs the forward and backward passes of a batch. Returns the loss, or None if only
        another rank computes it; this rank then receives the loss with the commit all-reduce."""

    @property
    @abc.abstractmethod
    def _has_gradients(self) -> bool:
        """True if a pass of the current step has produced gradients."""

    @abc.abstractmethod
    def _hand_out(self, commit_payload: Closed) -> None:
        """Stores the gradients of a committed step where the optimizer finds them."""

    @abc.abstractmethod
    def _drop_gradients(self) -> None:
        """Discards the gradients of the current or the previous step."""

    @abc.abstractmethod
    def _updated(self) -> None:
        """Processes an update: called after the optimizer has updated this rank's part, for example
        to gather the updated parameters.
        """

    # ---------------------------------------------------------------------------------------- start

    def __init__(self, setup: Setup) -> None:
        """Creates the engine. The model is sharded when the first step begins; until then, every
        rank has the full model.

        Raises:
            ConfigurationError: the module has no trained parameter.
        """
        super().__init__(setup)
        check_trains(self.module)
        self._parts: State | None = None
        """Partitioned state of the model; None while the module is on the meta device."""
        self._applied = 0
        """Number of steps applied since the initial state or a checkpoint; the same on all
        ranks."""
        self._commit_payload: Closed | None = None
        """Commit data of the last committed step, which may be the current step."""
        self._clipped = 1.0
        """Factor that clipping has applied to the current step's gradients."""
        self._shown = False
        """True if a GradScaler may have inspected and unscaled the current step's gradients, or
        the optimizer has used them."""
        self._skipped = False
        """True if a GradScaler found infinities in the gradients. The step then counts, but the
        parameters stay unchanged."""
        self._carried = False
        """True if a backward pass of the current step found gradients of the previous step, because
        the script had not cleared them.
        """
        self._whereabouts = Whereabouts(self.strategy)
        self._overwritten = 0
        """Digest of this rank's parts if a joiner's script has overwritten the values received from
        its peers; otherwise 0."""

    def _build(self) -> None:
        """Creates the state if the module is not on the meta device. Called at the end of each
        engine's constructor, and again once a module on the meta device has been given memory and
        values."""
        if not has_values(self.module):
            return
        self._parts = self._make_state()
        if self.optimizer is not None:
            self._parts.use_optimizer(self.optimizer)

    def _give_values(self, state: Mapping[str, Any]) -> None:
        """Prepares for loading a captured or assembled state. Allocates memory for a module on the
        meta device."""
        self._overwritten = 0
        if self._parts is None:
            unsaved = state.get("buffers", {}) if "model" in state else state["unsaved"]
            materialize(self.module, self.optimizer, self._session.device, buffers=unsaved)
            self._build()

    @property
    def _held(self) -> State:
        if self._parts is None:
            raise PreconditionError(
                "the model is on the meta device; it receives its values from its peers at the "
                "first live batch"
            )
        return self._parts

    @property
    @override
    def keeps_zero_gradients(self) -> bool:
        return False

    @property
    def _any_optimizer(self) -> bool:
        """True if any optimizer is accepted, because the user has declared that its update is
        elementwise.
        """
        return bool(self._options.get("elementwise_optimizer", False))

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Attaches the optimizer and registers the engine with the session. In the first step, at
        the latest, the parameters in the optimizer's groups are replaced with this rank's pieces.
        """
        self.optimizer = optimizer
        if optimizer is not None:
            check_optimizer_covers(self.module, optimizer)
            self._check_optimizer(optimizer)
            if self._parts is not None:
                self._parts.use_optimizer(optimizer)
        self._session.attach(self)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks that the optimizer works with this rank's pieces of the parameters; otherwise
        raises ConfigurationError.
        """
        check_elementwise(optimizer, elementwise=self._any_optimizer)

    @override
    def has_values(self) -> bool:
        return self._parts is not None

    # ------------------------------------------------------------------------------------- training

    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Trains on a batch, which must be the same on all ranks of a replica. Returns the mean
        loss over the step's global batch, which is computed in the commit all-reduce.

        In `loader.steps()`, the batch is a micro-batch. In this case, returns the loss of the
        micro-batch, on every rank of the replica.
        """
        session = self._session
        mean_loss = self._take_pass(inputs, targets, loss_fn)
        step = session.lifecycle.ensure_step()
        step.loss = None if mean_loss is None else read_later(mean_loss)
        session.lifecycle.reduce_if_complete()
        mean = step.mean_loss if step.control is not None else None
        loss = (
            torch.zeros((), dtype=torch.float64, device=session.device)
            if mean_loss is None
            else mean_loss.detach()
        )
        return loss if mean is None else loss.new_full((), mean)

    @property
    def _trains(self) -> bool:
        """True if a forward pass that begins now belongs to training. In a step whose gradients
        have not been reduced yet, this includes passes in evaluation mode."""
        step = self._session.step
        return torch.is_grad_enabled() and (
            self.module.training or (step is not None and step.control is None)
        )

    def synchronize_gradients(self) -> None:
        """Sums the step's gradients and commits the step, or aborts it."""
        self._session.lifecycle.reduce_and_commit()

    @override
    def reduce(self, step: Step) -> None:
        if step.share is not None and step.phase is StepPhase.OPEN:
            self._reduce(step, step.share)
            step.writes = joined(step.writes, self._overwritten)

    @abc.abstractmethod
    def _reduce(self, step: Step, share: Share) -> None:
        """Sums the gradients and prepares the step. On failure, marks the step as failed."""

    def _refuse_reduced(self, step: Step) -> None:
        if step.control is not None:
            raise PreconditionError(
                "the gradients of this step were already reduced, by train_step, "
                "clip_grad_norm_, synchronize_gradients or a GradScaler; run all backward passes "
                "of a step first. To accumulate gradients, pass micro_batch_size= to the loader "
                "and loop over loader.steps()"
            )

    def _is_lost(self) -> bool:
        """Returns whether the step is known to have failed, or no step is in progress."""
        step = self._session.step
        return step is None or step.lost is not None

    def _proves_lost(self) -> bool:
        """Waits until all collectives issued so far have ended, and returns whether the step has
        failed. Without the wait, a collective that fails on a device would be noticed too late.
        """
        if not self._is_lost():
            self._session.lifecycle.settle_collectives()
        return self._is_lost()

    def _refuse_carried(self) -> None:
        """Raises PreconditionError if the gradients of the previous step have not been cleared.
        Plain torch would add this step's gradients to them, but this engine no longer has them
        after the update.
        """
        if self._carried:
            raise PreconditionError(
                "the gradients of the last step were not cleared before this step's backward "
                f"pass, which would add to them: with strategy={self.strategy!r}, nothing can be "
                "added to gradients of a finished step. Call optimizer.zero_grad() in every "
                "step; to accumulate over several batches, pass micro_batch_size= to the loader "
                "and loop over loader.steps()"
            )

    def _begin_step(self) -> None:
        """Resets the flags that describe the current step's gradients."""
        self._clipped = self._whereabouts.unscaled = 1.0
        self._shown = self._skipped = self._carried = False

    @override
    def commit_payload(self) -> dict[str, Any]:
        return dict(vars(self._commit_payload)) if self._commit_payload is not None else {}

    @torch.no_grad()
    @override
    def take_commit(self, payload: Mapping[str, Any]) -> None:
        self._commit_payload = self._payload_type(**payload)
        self._hand_out(self._commit_payload)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clips the gradients, and returns their norm over all ranks. First reduces them and
        commits the step, if necessary; the norm is part of the commit all-reduce, so no further
        communication is needed.

        Raises:
            ConfigurationError: `norm_type` is not 2.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                f"clip_grad_norm_: norm_type={norm_type}; strategy {self.strategy!r} supports "
                "only 2.0"
            )
        self._session.lifecycle.reduce_and_commit()
        step, commit_payload, norm = self._session.step, self._commit_payload, 0.0
        if step is not None and step.control is not None and commit_payload is not None:
            # otherwise the step was aborted
            norm = commit_payload.norm * self._clipped * float(self._whereabouts.unscaled)
            scale = max_norm / (norm + 1e-6)
            if not scale >= 1.0:  # if the norm is NaN, all gradients become NaN
                self._clipped *= scale
                self.scale_gradients(scale)
        return torch.full((), norm, dtype=torch.float64, device=self._session.device)

    def scale_gradients(self, scale: float) -> None:
        """Multiplies the gradients of this rank's part by `scale`."""
        with inside():
            self._gradients.scale(scale)

    def groups_are_read(self) -> None:
        """Reduces the gradients and commits the step before the optimizer's groups are read, unless
        the step has micro-batches. The reader may be a GradScaler, which looks for infinities in
        the gradients. If there is an infinity on one rank, all ranks must see it.
        """
        step = self._session.step
        if step is None or step.share is None:
            return
        if not step.in_micro_batches and self._has_gradients:
            self._session.lifecycle.reduce_and_commit()
        if step.control is not None and not self._shown:
            self._shown = True
            if self._commit_payload is not None and not math.isfinite(self._commit_payload.norm):
                self.scale_gradients(math.nan)
        if self._parts is not None:
            self._whereabouts.look_at(self._parts.optimized)

    @override
    def skip(self) -> None:
        self._skipped = True

    def apply(self, update: Callable[[], None]) -> None:
        """Updates this rank's part of the model."""
        guard_parts(self._held.optimized, guarded=False)
        self._shown = True  # later readers, such as schedulers, no longer need the norm
        update()
        self._applied += 1
        with torch.no_grad():
            self._updated()

    def apply_tentatively(self, apply: Callable[[], None]) -> TentativeUpdate:
        """Updates this rank's part in a step of several models, before the step's outcome is known.
        Afterwards, the step's gradients are regarded as used.
        """
        update = super().apply_tentatively(apply)
        self._whereabouts.pending = False
        return update

    @override
    def has_gradients(self) -> bool:
        return self._has_gradients

    @override
    def exchange_update(self, update: TentativeUpdate) -> None:
        super().exchange_update(update)
        self._applied += -1 if update.withdrawn else 1

    def _check_training(self) -> None:
        with inside():
            changed = next(
                (
                    (name, trained)
                    for name, p, trained in self._trained()
                    if p.requires_grad != trained
                ),
                None,
            )
            whole = self._setup.several and not any(p.requires_grad for _, p, _ in self._trained())
        if changed is not None and not whole:
            name, trained = changed
            raise ConfigurationError(
                f"parameter {name!r} has requires_grad={not trained}, but had {trained} at "
                f"as_distributed: with strategy {self.strategy!r}, parameters cannot be frozen "
                "or unfrozen after that; start the next phase in a new run, from a checkpoint"
            )

    # ---------------------------------------------------------------------------- torch's own calls

    @torch.no_grad()
    def zero_grad(self, clear: Callable[[], None]) -> None:
        """Discards the gradients of earlier backward passes. Like ddp, keeps the gradients that the
        current step's micro-batches have accumulated so far."""
        step = self._session.step
        if not self.has_values() or (
            step is not None and step.in_micro_batches and step.control is None
        ):
            return
        if self._whereabouts.pending and step is not None and step.control is not None:
            self.skip()
        self._carried = False
        self._drop_gradients()

    @override
    def check_values_here(self, call: str, instead: str) -> None:
        if any(is_hidden(p) for p in self.module.parameters()):
            raise PreconditionError(
                f"model.{call} cannot be used with strategy={self.strategy!r}, because each rank "
                "holds only parts of the parameters between passes. Instead, on every rank, "
                f"{instead}"
            )

    def check_conversion(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Checks a conversion of the module. Accepts only the device and dtype that all tensors
        already have; otherwise raises PreconditionError. Returns False, because torch must not
        apply the conversion.
        """
        for kind in {
            (t.dtype, t.device)
            for t in (*self.module.parameters(), *self.module.buffers())
            if not t.is_meta
        }:
            became = fn(torch.empty(0, dtype=kind[0], device=kind[1]))
            if (became.dtype, became.device) != kind:
                raise PreconditionError(
                    f"model.to({became.dtype}, {became.device}) cannot convert a model in "
                    f"{kind[0]} on {kind[1]}, because with strategy={self.strategy!r} it is "
                    "already divided over the ranks; convert the module before as_distributed, "
                    "or pass param_dtype="
                )
        return False

    # ---------------------------------------------------------------------------------------- state

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Returns full copies of all parameters, gathered from the ranks. Must be called on every
        rank."""
        whole, keys = self._unsharded_state(), self._named_state().keys
        return {name: whole[keys[name]] for name in dict.fromkeys(self._parameter_names().values())}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns a copy of the complete state dict. Must be called on every rank."""
        whole = self._unsharded_state(rank0_only=rank0_only)
        for name in self._named_state().left_out:
            whole.pop(name, None)
        return whole

    def _named_state(self) -> ModuleState:
        """Returns the module's state by name. The values of its parameters may be hidden."""
        return ModuleState(self.module)

    def _unsharded_state(self, *, rank0_only: bool = False) -> dict[str, Any]:
        whole: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            values = self._held.values(channel)
            whole.clear()
            if not rank0_only or channel.rank == 0:
                whole.update({key: copy.deepcopy(value) for key, value in values.items()})
            channel.exchange(b"")  # once this exchange has completed, all ranks have the values

        self._session.operation("full_state_dict", body)
        return whole

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's complete state, as on a single process. Must be called on every
        rank."""
        whole: dict[str, Any] = {}

        def body(channel: Channel) -> None:
            whole.update(copy.deepcopy(self._held.assemble(channel)["optimizer"]))
            channel.exchange(b"")

        self._session.operation("optimizer state_dict", body)
        return whole

    @torch.no_grad()
    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the optimizer's complete state. Must be called on every rank, with the same
        state."""
        self._held.load_optimizer(state)

    @torch.no_grad()
    @override
    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._named_state().left_out.keys() <= tensors.keys():
            tensors = self._unsharded_state() | dict(tensors)
        late = self.is_trained and self._session.is_joining
        before = self._digest_of_parts() if late else 0
        self._held.load_values(tensors)
        self._commit_buffers()
        if late and (now := self._digest_of_parts()) != before:
            self._overwritten = now or 1

    def _digest_of_parts(self) -> int:
        return digest_of(part for parts in self.in_common().values() for part in parts.values())

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """This rank's own pieces of the parameters, by name; without mirrors."""
        return {name: piece.detach() for name, piece in self._own_pieces()}

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the reduced gradients of `local_shard`, by parameter name."""
        return {name: piece.grad for name, piece in self._own_pieces() if piece.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raises an error, because gradients set on this rank would not reach the ranks that mirror
        its pieces or that apply the step later.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"set_gradients cannot be used with strategy {self.strategy!r}, because each rank "
            "has only parts of the gradients; scale the loss, or use ddp"
        )

    @override
    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        whole, names = self._unsharded_state(), self._parameter_names()
        keys = self._named_state().keys
        own = {first: whole[keys[first]] for first in dict.fromkeys(names.values())}
        replaced = self.agreed("with_parameters", lambda: named_values(parameters, own))
        self.load_full(
            whole
            | {keys[name]: replaced[first] for name, first in names.items() if first in replaced}
        )
