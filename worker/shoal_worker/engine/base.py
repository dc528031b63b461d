"""Interface and defaults of engines: how a strategy's model is trained and stored, below the public
`ShardedModel` and `ShardedOptimizer`.

There are four: `replicated/engine.py` (every rank holds the entire model), `sharding/engine.py`
(tensors are sharded over the ranks), `mesh/engine.py` (layers and stages are on different ranks)
and `asynchronous/engine.py` (values come from parameter servers). A strategy declares its engine
and the engine's options (`strategies/declaration.py`).

An engine serves the user's model and optimizer, which forward their calls to it, and the session,
for which it is a `TrainingEngine`. Everything runs on the training thread; hooks of a backward pass
run on torch's thread for it, while the training thread waits.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from typing_extensions import override

from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.state.strategy_interface import StrategySession, TrainingEngine
from shoal_worker.engine.state.extremes import find_extremes
from shoal_worker.engine.state.hidden_parameters import blank_copies, inside, want_gradients
from shoal_worker.engine.state.module_state import (
    ModuleState,
    check_model_fits,
    check_state_can_travel,
    load_captured,
)
from shoal_worker.engine.state.optimizer_state import load_optimizer, strided_like
from shoal_worker.engine.state.parameters import agreed, named_values
from shoal_worker.engine.step.buffers import give_memory, kept_buffers
from shoal_worker.engine.step.passes import Loss, call_module
from shoal_worker.engine.step.tentative_update import TentativeUpdate
from shoal_worker.modes import evaluating
from shoal_worker.state.fits import check_fits
from shoal_worker.state.tree import flatten
from shoal_worker.torch_internals import _BatchNorm

# --------------------------------------------------------------------------------------- the engine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Inputs for creating an engine.

    Three of them can be called: `module` only computes; `call` is the same after torch.compile, and
    is called by `Engine.forward`; `model` goes through `Engine.forward`, and is called by
    `Engine.train_step`.
    """

    strategy: str
    """Name of the strategy, for errors and metadata."""
    module: nn.Module
    """The user's own module, unsharded."""
    call: Callable[..., Any]
    """Forward pass of the module, compiled if torch.compile was used."""
    model: Callable[..., Any]
    """The `ShardedModel`, called as the user calls it, with the user's hooks."""
    show: Callable[[nn.Module], None]
    """Makes another module the one that `ShardedModel.module` is."""
    session: StrategySession
    config: ShardingConfiguration
    backend_name: str
    options: Mapping[str, Any]
    """Keyword arguments of `as_distributed` specific to the strategy."""
    several: bool = False
    """True if the model is one of several: passes of others go through it, even while the script
    has frozen it, and leave gradients here."""


def _normalizes_batches(layer: nn.Module) -> bool:
    """Returns whether the layer normalizes over only this rank's samples, and refuses a single
    one."""
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


class Engine(TrainingEngine):
    """One model and its optimizer in training. By default, this rank holds all of both."""

    keeps_parameters_whole: ClassVar[bool] = False
    """True if the module's own `state_dict()` has the parameters' current values between steps, as
    in torch."""

    def __init__(self, setup: Setup) -> None:
        """Lays the module out over the ranks.

        Raises:
            ConfigurationError: it cannot be trained so.
        """
        self.strategy = setup.strategy
        self.backend_name = setup.backend_name
        self.module = setup.module
        self.config = setup.config
        self.optimizer: torch.optim.Optimizer | None = None
        """The user's optimizer; None if there is none, or before `attach`."""
        give_memory(setup.module)
        check_state_can_travel(setup.module, setup.strategy, whole=self.keeps_parameters_whole)
        self.least_samples = 2 if any(map(_normalizes_batches, setup.module.modules())) else 1
        self.extremes = find_extremes(setup.module)
        """Buffers that hold minima and maxima."""
        self._setup = setup
        self._entry: Callable[..., Any] | None = None
        """Method of the module used by the next pass; None: `forward`."""
        self._session = setup.session
        self._options = setup.options

    # ------------------------------------------------------- for ShardedModel: passes and gradients

    @abc.abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Joins the session: from here on module and optimizer are the run's state. Once."""

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass, which in training begins the step if no loader did."""

    def entering(self, name: str, *, frozen: bool) -> Callable[..., Any]:
        """Returns `forward`, or `forward_frozen`, through the given method of the module instead of
        its own (`register_forward_method`)."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._entry = self._as_forward(name)
            try:
                return (
                    self.forward_frozen(*args, **kwargs)
                    if frozen
                    else self.forward(*args, **kwargs)
                )
            finally:
                self._entry = None

        return call

    def check_forward_method(self, name: str) -> None:
        """Raises ConfigurationError: no pass can go through a method beside `forward`."""

    def _as_forward(self, name: str) -> Callable[..., Any]:
        """Returns the module's method, to be called as its forward pass."""
        method: Callable[..., Any] = getattr(self.module, name)
        return method

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, or the method used by this pass. Nested calls are passes through
        `forward`."""
        call, self._entry = self._entry or self._setup.call, None
        return call(*args, **kwargs)

    @abc.abstractmethod
    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Implements `ShardedModel.train_step`."""

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Implements `ShardedModel.predict`."""
        with evaluating(self.module):
            return call_module(self.module, inputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `ShardedModel.generate`."""
        self.check_values_here(
            "generate()", "model.clone().generate(...) generates with a copy of the whole model"
        )
        module: Any = self.module
        return module.generate(*args, **kwargs)

    def loss_parallel(self) -> AbstractContextManager[None]:
        """Implements `ShardedModel.loss_parallel`."""
        return nullcontext()

    @abc.abstractmethod
    def synchronize_gradients(self) -> None:
        """Implements `ShardedModel.synchronize_gradients`."""

    def zero_grad(self, clear: Callable[[], None]) -> None:
        """Clears the gradients of the current step. `clear`: torch's own way, for gradients at
        torch's usual place."""
        clear()

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """Implements `ShardedModel.get_gradients`."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Implements `ShardedModel.set_gradients`."""
        parameters = dict(self.module.named_parameters())
        for name, gradient in gradients.items():
            if name not in parameters:
                raise ConfigurationError(
                    f"set_gradients: the model has no parameter {name!r}; expected one of its "
                    f"parameters: {sorted(parameters)[:5]} ..."
                )
            if gradient.shape != parameters[name].shape:
                raise ConfigurationError(
                    f"set_gradients: the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                    f"but the parameter has shape {tuple(parameters[name].shape)}"
                )
        for name, gradient in gradients.items():
            parameters[name].grad = strided_like(
                gradient.to(parameters[name].dtype), parameters[name]
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Implements `ShardedModel.clip_grad_norm_`."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    # --------------------------------------------------------------------- for ShardedModel: values

    def check_values_here(self, call: str, instead: str) -> None:
        """Raises PreconditionError if this rank lacks some of the module's values. `call`,
        `instead`: for the error."""

    def check_conversion(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Returns whether torch should apply `fn` (a conversion such as `to`, `half`, `cuda`) to
        the module's tensors.

        Raises:
            PreconditionError: it would move them away from the ranks' shards.
        """
        return True

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Implements `ShardedModel.gather_full_parameters`."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Implements `ShardedModel.full_state_dict`."""
        return (
            {}
            if rank0_only and self._session.rank != 0
            else copy.deepcopy(self.module.state_dict())
        )

    def _whole_state(self) -> Mapping[str, Any]:
        """Returns copies of the module's complete state, including parameters omitted by its own
        `state_dict()`."""
        return copy.deepcopy(ModuleState(self.module).captured())

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """Parameters on this rank, as in `ShardedModel.local_shard`."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Implements `ShardedModel.load_full`."""
        check_model_fits(tensors, self.module, ModuleState(self.module).shapes(listed=True))
        load_captured(self.module, tensors, listed=True)

    def _check_fits(self, tensors: Mapping[str, Any]) -> None:
        """Raises CorruptDataError unless this is a state of the module."""
        check_model_fits(tensors, self.module, ModuleState(self.module).shapes())

    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """Implements `ShardedModel.with_parameters`."""
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.agreed(
                "with_parameters", lambda: named_values(parameters, own)
            ).items():
                own[name].copy_(value)

    def agreed(self, kind: str, read: Callable[[], T]) -> T:
        """Returns the result of `read` once all ranks that train this model have obtained the same
        (`parameters.agreed`). A clone's result is its own."""
        return agreed(self._session, kind, read) if self.is_trained else read()

    @property
    def is_trained(self) -> bool:
        """True if this engine's model is the one trained by the run, and not a clone."""
        return self._session.trains(self)

    def clone(self, remake: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Returns a copy of the unsharded module as it is now. `remake`: creates a `ShardedModel`
        of the same strategy from a module."""
        state = self._whole_state()
        copied = copy.deepcopy(self.module, blank_copies(self.module))
        for key, tensor in ModuleState(copied).tensors.items():
            tensor.data = state[key]  # in place of what lies here, which may be a part, or nothing
        return copied

    def layout(self) -> dict[str, Any]:
        """Returns JSON-able facts about the distribution over the ranks, for
        `ShardedModel.get_model_metadata`."""
        return {}

    def whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """Returns the module's parameters with their unsharded shapes."""
        return [(p, p.shape) for p in self.module.parameters()]

    # ------------------------------------------------------------------------- for ShardedOptimizer

    @property
    def updates_parts(self) -> bool:
        """True if this process's optimizer updates only parts of the parameters, or none: step
        hooks would not see what they see in one process."""
        return False

    # other objects replace them in the module when the ranks are divided
    replaces_parameters = False

    def groups_are_read(self) -> None:
        """Prepares for access to the optimizer's parameter groups by a scheduler, a GradScaler or
        the user."""

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Ends the step.

        Args:
            update: update to make if the step counts, called in `apply`. It belongs to
                `ShardedOptimizer` and calls this engine in turn: it undoes a GradScaler's scale by
                `scale_gradients`, and then calls `step_optimizer`.
            scaled: a GradScaler has left its scale for gradients that are not unscaled yet.
            inspected: a GradScaler has looked for infinities.
        """
        return self._session.finish_step(lambda: self.apply(update))

    def apply(self, update: Callable[[], None]) -> None:
        """Calls `update` once every rank's part of the step is included, with this rank's gradients
        available to the optimizer."""
        update()

    def step_optimizer(self, *, usable: bool) -> None:
        """Makes the step of the user's optimizer. Gradients that are not `usable` change nothing,
        though the step counts."""
        assert self.optimizer is not None
        if usable:
            self.optimizer.step()
        else:
            self.skip()

    def note_scaler(self, name: str) -> None:
        """Records that the registered GradScaler of that name has stepped the optimizer in a step
        that counts; empty: none has."""

    def skip(self) -> None:
        """Handles a step that counts although a GradScaler found its gradients unusable, the same
        on all ranks."""

    def apply_tentatively(self, apply: Callable[[], None]) -> TentativeUpdate:
        """Calls `apply` in a step of several models that is not known to count. Returns the update
        for `exchange_update`."""
        assert self.optimizer is not None
        update = TentativeUpdate(self.optimizer)
        apply()
        return update

    def exchange_update(self, update: TentativeUpdate) -> None:
        """Restores the values before the last update or, if that was done, those after it."""
        update.exchange()

    def freeze(self) -> Callable[[], None]:
        """Freezes the model after its own update in a step of several models: until the returned
        call, gradients pass through the module to others but none reach its parameters; its buffers
        are then restored to their current values."""
        with inside():
            trained = [
                parameter for parameter in self.module.parameters() if parameter.requires_grad
            ]
        want_gradients(trained, False)
        put_back = kept_buffers(self.module)

        def thaw() -> None:
            want_gradients(trained, True)
            put_back()

        return thaw

    def divide_alike(self, several: Sequence[Engine]) -> None:
        """Makes the engines of several attached models shard in the same way."""

    def fetch_put_back(self) -> None:
        """Fetches unsharded values again from the owners that alone update them, after updates of
        the current step were undone on all ranks. A collective, whose failure marks the step
        lost."""

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass when none of its parameters gets a gradient, so that
        nothing is reduced."""
        return self._compute(*args, **kwargs)

    def has_gradients(self) -> bool:
        """Returns whether a backward pass of the current step has left nonzero gradients."""
        gradients = (
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        )
        return any(
            bool((gradient._values() if gradient.is_sparse else gradient).count_nonzero())
            for gradient in gradients
        )

    @property
    def changing_buffers(self) -> bool:
        """True if the module has buffers that the ranks must agree on. Used with several models."""
        return False

    def scale_gradients(self, scale: float) -> None:
        """Multiplies the gradients of the parameters that this rank updates."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if dense := [gradient for gradient in gradients if gradient.layout is torch.strided]:
            torch._foreach_mul_(dense, scale)
        for gradient in (each for each in gradients if each.layout is not torch.strided):
            gradient.mul_(scale)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's complete state, as on a single process."""
        assert self.optimizer is not None
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads an optimizer's complete state, the same on all ranks.

        Raises:
            CorruptDataError: it belongs to another optimizer; nothing is changed.
        """
        self._check_optimizer_fits(state)
        assert self.optimizer is not None
        load_optimizer(self.optimizer, state, exact=False)

    def _check_optimizer_fits(self, state: Mapping[str, Any]) -> None:
        """Raises CorruptDataError unless this is a state of this optimizer over unsharded
        parameters."""
        assert self.optimizer is not None
        check_fits(
            state,
            self.optimizer,
            [[p.shape for p in group["params"]] for group in self.optimizer.param_groups],
        )

    def synchronize_parameters(self) -> None:
        """Brings the ranks' parameters together. They agree after every step: nothing to do."""

    def synchronize_optimizer_state(self) -> None:
        """Brings the ranks' optimizer states together. Each is right after every step: nothing to
        do."""

    # ----------------------------------------------- for the session: see `TrainingEngine` for each

    @property
    @override
    def data_parallel_rank(self) -> int:
        """Rank, since each rank is a replica."""
        return self._session.rank

    @property
    @override
    def data_parallel_size(self) -> int:
        """Number of ranks, since each is a replica."""
        return self._session.world_size

    @property
    @override
    def consistency_check_every(self) -> int:
        """Interval from the configuration."""
        return self.config.consistency_check_every

    @override
    def check_optimizer_state(self) -> None:
        state = self.optimizer.state if self.optimizer is not None else {}
        for name, parameter in self._optimized():
            for key, value in state.get(parameter, {}).items():
                try:
                    self._check_can_travel(key, value)
                except ConfigurationError as error:
                    raise ConfigurationError(
                        f"{type(self.optimizer).__name__} stores {key!r} for parameter {name!r}: "
                        f"{error}",
                        reason="STATE_UNSUPPORTED",
                    ) from error

    def _optimized(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields the tensors that the optimizer updates here, by parameter name."""
        return self.module.named_parameters()

    def _check_can_travel(self, key: str, value: Any) -> None:
        """Raises ConfigurationError unless such an entry of the optimizer's state can be sent."""
        flatten({key: value})

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises CorruptDataError if `restore` would refuse this state; nothing is changed."""
