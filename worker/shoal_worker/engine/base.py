"""Interface and defaults of engines. An engine stores and trains the model of a strategy. It
implements the public `ShardedModel` and `ShardedOptimizer`.

There are four engines: `replicated/engine.py` (every rank has the full model), `sharding/engine.py`
(tensors are sharded across the ranks), `mesh/engine.py` (layers and stages are on different ranks)
and `asynchronous/engine.py` (parameters are on parameter servers). A strategy declares its engine
and the engine's options (`strategies/declaration.py`).

`ShardedModel` and `ShardedOptimizer` forward the user's calls to the engine, and the session calls
the engine through the interface `TrainingEngine`. All methods run on the training thread, except
hooks of a backward pass, which run on torch's autograd thread while the training thread waits.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from shoal_worker.state.tree import flatten, join_path
from shoal_worker.torch_internals import _BatchNorm

# --------------------------------------------------------------------------------------- the engine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments for creating an engine.

    Three of the arguments run the model when they are called. `module` is the user's module:
    calling it runs the forward pass and nothing else. `call` runs the same forward pass, compiled
    if torch.compile was used; `Engine.forward` calls it. `model` is the public wrapper around
    `Engine.forward`; `Engine.train_step` calls it."""

    strategy: str
    """Name of the strategy. Used in errors and metadata."""
    module: nn.Module
    """The user's own module, unsharded."""
    call: Callable[..., Any]
    """Forward pass of the module, compiled if torch.compile was used."""
    model: Callable[..., Any]
    """The `ShardedModel`. Calling it runs the user's hooks too."""
    show: Callable[[nn.Module], None]
    """Function that sets the module returned by `ShardedModel.module`."""
    session: StrategySession
    config: ShardingConfiguration
    backend_name: str
    options: Mapping[str, Any]
    """Keyword arguments of `as_distributed` that are specific to the strategy."""
    several: bool = False
    """True if the model is one of several. Passes of the other models may then run through this one
    and add to its gradients, and the script may freeze this model for some of these passes."""


def _normalizes_batches(layer: nn.Module) -> bool:
    """Returns whether the layer normalizes over this rank's samples only, like BatchNorm. Such a
    layer raises an error for a single sample."""
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


class Engine(TrainingEngine):
    """Trains one model with its optimizer. The defaults are for engines whose ranks all have the
    full model and optimizer."""

    keeps_parameters_unsharded: ClassVar[bool] = False
    """True if the module's own `state_dict()` contains the current values of the parameters between
    steps, as in plain torch."""

    def __init__(self, setup: Setup) -> None:
        """Prepares the user's module for training.

        Raises:
            ConfigurationError: the module cannot be trained with these settings.
        """
        self.strategy = setup.strategy
        self.backend_name = setup.backend_name
        self.module = setup.module
        self.config = setup.config
        self.optimizer: torch.optim.Optimizer | None = None
        """The user's optimizer; None if there is none, or before `attach`."""
        give_memory(setup.module)
        check_state_can_travel(setup.module, setup.strategy, whole=self.keeps_parameters_unsharded)
        self.least_samples = 2 if any(map(_normalizes_batches, setup.module.modules())) else 1
        self.extremes = find_extremes(setup.module)
        """Buffers that contain minima and maxima, by name (`extremes.py`)."""
        self._setup = setup
        self._entry: Callable[..., Any] | None = None
        """Method of the module that the next forward pass calls; None: `forward`."""
        self._session = setup.session
        self._options = setup.options

    # ------------------------------------------------------- for ShardedModel: passes and gradients

    @abc.abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Attaches the optimizer and registers this engine with the session: module and optimizer
        become part of the run's state. Must be called once."""

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass. In training mode, begins a step if no loader has begun
        one."""

    def entering(self, name: str, *, frozen: bool) -> Callable[..., Any]:
        """Returns a function that runs a forward pass with the module's method `name` in place of
        its `forward` (`register_forward_method`). That function otherwise behaves like
        `Engine.forward` or, if `frozen`, like `Engine.forward_frozen`."""

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
        """Checks that the module's method `name` can be used as a forward pass; otherwise raises
        ConfigurationError."""

    def _as_forward(self, name: str) -> Callable[..., Any]:
        """Returns a function that calls the module's method `name` as the module's forward pass."""
        method: Callable[..., Any] = getattr(self.module, name)
        return method

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, or the method that `entering` has selected for this pass. Calls nested
        in the pass always use `forward`."""
        call, self._entry = self._entry or self._setup.call, None
        return call(*args, **kwargs)

    @abc.abstractmethod
    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """Runs the forward and backward passes of a batch and returns the loss
        (`ShardedModel.train_step`)."""

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Returns the module's output in evaluation mode, without gradients
        (`ShardedModel.predict`)."""
        with evaluating(self.module):
            return call_module(self.module, inputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own `generate` (`ShardedModel.generate`)."""
        self.check_values_here(
            "generate()",
            "call model.clone().generate(...), which generates with a copy of the whole model",
        )
        module: Any = self.module
        return module.generate(*args, **kwargs)

    def loss_parallel(self) -> AbstractContextManager[None]:
        """Returns a context for computing a loss from outputs that are sharded across ranks
        (`ShardedModel.loss_parallel`)."""
        return nullcontext()

    @abc.abstractmethod
    def synchronize_gradients(self) -> None:
        """Reduces the step's gradients across ranks (`ShardedModel.synchronize_gradients`)."""

    @property
    def keeps_zero_gradients(self) -> bool:
        """True if a gradient that was cleared with `set_to_none=False` is zero in the next update,
        as in torch, even if no pass uses the parameter until then."""
        return True

    def check_zero_grad(self, *, set_to_none: bool) -> None:
        """Checks that clearing the gradients has the same effect as in torch.

        Raises:
            ConfigurationError: `set_to_none` is False, but parameters that the next step does not
                use would have no gradient instead of zero. The optimizer would then not apply their
                weight decay and momentum.
        """
        if not set_to_none and not self.keeps_zero_gradients:
            raise ConfigurationError(
                f"zero_grad(set_to_none=False) with strategy={self.strategy!r}: gradients of zero "
                "are not kept until the next step, although torch would update parameters with "
                "them (weight decay, momentum); call zero_grad() without set_to_none"
            )

    def zero_grad(self, clear: Callable[[], None]) -> None:
        """Clears the gradients of the current step. `clear`: torch's own `zero_grad`, which clears
        gradients in `.grad`."""
        clear()

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """Returns this rank's gradients by parameter name (`ShardedModel.get_gradients`)."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replaces gradients by parameter name (`ShardedModel.set_gradients`). Raises
        ConfigurationError for an unknown name or a wrong shape."""
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
        """Clips the gradients by their norm, and returns the norm
        (`ShardedModel.clip_grad_norm_`)."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    # --------------------------------------------------------------------- for ShardedModel: values

    def check_values_here(self, call: str, instead: str) -> None:
        """Checks that this rank has the values of all parameters; otherwise raises
        PreconditionError. `call`, `instead`: for the error message, the user's call that needs
        these values, and an alternative to it."""

    def check_conversion(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Checks a conversion such as `to`, `half` or `cuda`. Returns whether torch should apply
        `fn` to the module's tensors.

        Raises:
            PreconditionError: the engine cannot apply the conversion to the ranks' shards.
        """
        return True

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Returns full copies of all parameters (`ShardedModel.gather_full_parameters`)."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns a copy of the complete state dict (`ShardedModel.full_state_dict`)."""
        return (
            {}
            if rank0_only and self._session.rank != 0
            else copy.deepcopy(self.module.state_dict())
        )

    def _unsharded_state(self) -> Mapping[str, Any]:
        """Returns copies of the module's complete state, including parameters that the module's own
        `state_dict()` omits."""
        return copy.deepcopy(ModuleState(self.module).captured())

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, by name (`ShardedModel.local_shard`). A parameter that is split
        across ranks is represented by this rank's part of it."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads a complete state dict (`ShardedModel.load_full`). Raises CorruptDataError if it
        belongs to a different model."""
        check_model_fits(tensors, self.module, ModuleState(self.module).shapes(listed=True))
        load_captured(self.module, tensors, listed=True)

    def _check_fits(self, tensors: Mapping[str, Any]) -> None:
        """Checks that `tensors` fits the module; otherwise raises CorruptDataError."""
        check_model_fits(tensors, self.module, ModuleState(self.module).shapes())

    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """Replaces the values of parameters on all ranks (`ShardedModel.with_parameters`)."""
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.agreed(
                "with_parameters", lambda: named_values(parameters, own)
            ).items():
                own[name].copy_(value)

    def agreed(self, kind: str, read: Callable[[], T]) -> T:
        """Returns the result of `read` after checking that it is the same on all ranks that train
        this model (`parameters.agreed`). For a clone of the model, the result is not checked.
        `kind`: the user's call, for error messages."""
        return agreed(self._session, kind, read) if self.is_trained else read()

    @property
    def is_trained(self) -> bool:
        """True if this engine trains the run's model; False if its model is a clone."""
        return self._session.trains(self)

    def clone(self, remake: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Returns a copy of the unsharded module with its current values. `remake`: function that
        creates a `ShardedModel` of the same strategy from a module."""
        state = self._unsharded_state()
        copied = copy.deepcopy(self.module, blank_copies(self.module))
        for key, tensor in ModuleState(copied).tensors.items():
            tensor.data = state[key]  # already a copy, so no memory is shared
        return copied

    def layout(self) -> dict[str, Any]:
        """Returns a JSON-serializable description of the model's distribution across the ranks, for
        `ShardedModel.get_model_metadata`."""
        return {}

    def unsharded_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """Returns the module's parameters with their unsharded shapes."""
        return [(p, p.shape) for p in self.module.parameters()]

    # ------------------------------------------------------------------------- for ShardedOptimizer

    updates_parts = False
    """True if this process's optimizer updates only parts of the parameters, or none at all. Step
    hooks would then see different tensors than on a single process."""

    # If True, other objects replace the parameters in the module when the ranks are assigned their
    # parts.
    replaces_parameters = False

    def groups_are_read(self) -> None:
        """Called before a scheduler, a GradScaler or the user reads the optimizer's parameter
        groups."""

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Ends the step, and returns its outcome.

        Args:
            update: function of `ShardedOptimizer` that updates the model; called by `apply` if the
                step is committed. The function calls this engine's `scale_gradients` to undo a
                GradScaler's scale, and then its `step_optimizer`.
            scaled: True if the gradients are still multiplied by a GradScaler's scale.
            inspected: True if a GradScaler has checked the gradients for infinities."""
        return self._session.lifecycle.finish_step(partial(self.apply, update))

    def apply(self, update: Callable[[], None]) -> None:
        """Makes this rank's gradients available to the optimizer and calls `update`. Called once
        the step is committed."""
        update()

    def step_optimizer(self, *, usable: bool) -> None:
        """Runs the step of the user's optimizer. If the gradients are not `usable`, leaves the
        parameters unchanged; the step is committed nevertheless."""
        assert self.optimizer is not None
        if usable:
            self.optimizer.step()
        else:
            self.skip()

    def note_scaler(self, name: str) -> None:
        """Records the name of the registered GradScaler that has stepped the optimizer in a
        committed step; empty if it was stepped without a scaler."""

    def skip(self) -> None:
        """Records that a committed step leaves the parameters unchanged, because a GradScaler found
        infinities in its gradients. Called on all ranks or on none."""

    def apply_tentatively(self, apply: Callable[[], None]) -> TentativeUpdate:
        """Calls `apply` in a step of several models, before the step's outcome is known. Returns
        the update, which can be undone with `exchange_update`."""
        assert self.optimizer is not None
        update = TentativeUpdate(self.optimizer)
        apply()
        return update

    def exchange_update(self, update: TentativeUpdate) -> None:
        """Undoes `update`, or reapplies it if it has been undone."""
        update.exchange()

    def freeze(self) -> Callable[[], None]:
        """Freezes the model after its own update in a step of several models. Gradients still flow
        through the module to other models, but its own parameters receive none. Returns a function
        that unfreezes the model and restores the buffers to the values that they had when `freeze`
        was called."""
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
        """Makes the engines of several attached models use the same mesh of ranks."""

    def fetch_put_back(self) -> None:
        """Gathers the values of unsharded parameters again from the ranks that own them, after
        updates of the current step have been undone on all ranks. Must be called on all ranks. If
        it fails, the step is marked as failed."""

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass while none of the module's parameters requires gradients.
        The backward pass then does not reduce gradients."""
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
        """True if the module has buffers whose changes must be combined across ranks. Used only if
        the run trains several models."""
        return False

    def scale_gradients(self, scale: float) -> None:
        """Multiplies the gradients of the parameters that this rank updates by `scale`."""
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
        """Loads the optimizer's complete state, which must be the same on all ranks.

        Raises:
            CorruptDataError: the state belongs to a different optimizer. Nothing is changed.
        """
        self._check_optimizer_fits(state)
        assert self.optimizer is not None
        load_optimizer(self.optimizer, state, exact=False)

    def _check_optimizer_fits(self, state: Mapping[str, Any]) -> None:
        """Checks that `state` is a complete state of this optimizer, for unsharded parameters;
        otherwise raises CorruptDataError."""
        assert self.optimizer is not None
        check_fits(
            state,
            self.optimizer,
            [[p.shape for p in group["params"]] for group in self.optimizer.param_groups],
        )

    def synchronize_parameters(self) -> None:
        """Averages the parameters across ranks. Does nothing by default, because they are the same
        on all ranks after every step."""

    def synchronize_optimizer_state(self) -> None:
        """Synchronizes the ranks' optimizer states. Does nothing by default, because each rank's
        state is correct after every step."""

    # ----------------------------------------------- for the session: see `TrainingEngine` for each

    @property
    @override
    def data_parallel_rank(self) -> int:
        """Index of this process's replica. It is the rank, because each rank is a replica by
        default."""
        return self._session.rank

    @property
    @override
    def data_parallel_size(self) -> int:
        """Number of replicas. It is the number of ranks, because each rank is a replica by
        default."""
        return self._session.world_size

    @property
    @override
    def consistency_check_every(self) -> int:
        """Number of steps between comparisons of the ranks' state, from the configuration."""
        return self.config.consistency_check_every

    @override
    def frozen(self) -> Mapping[str, torch.Tensor]:
        return {
            join_path(("model", key)): tensor
            for key, tensor in ModuleState(self.module).tensors.items()
            # other classes may store their values elsewhere, or not as plain tensors
            if type(tensor) is nn.Parameter
            and tensor.layout is torch.strided
            and not tensor.requires_grad
        }

    @override
    def check_optimizer_state(self) -> None:
        state = self.optimizer.state if self.optimizer is not None else {}
        for name, parameter in self._optimized():
            for key, value in state.get(parameter, {}).items():
                try:
                    self._check_can_travel(key, value)
                except ConfigurationError as error:
                    raise ConfigurationError(
                        f"{type(self.optimizer).__name__} keeps an unsupported value in its "
                        f"state, {key!r} of parameter {name!r}: {error}",
                        reason="STATE_UNSUPPORTED",
                    ) from error

    def _optimized(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields the tensors that this rank's optimizer updates, each with its parameter's name."""
        return self.module.named_parameters()

    def _check_can_travel(self, key: str, value: Any) -> None:
        """Checks that `value`, the entry `key` of the optimizer's state, can be sent to peers;
        otherwise raises ConfigurationError."""
        flatten({key: value})
