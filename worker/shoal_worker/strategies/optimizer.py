"""`ShardedOptimizer`, the wrapper of the user's optimizer for every strategy. The strategy's engine
performs the steps (`engine/base.py`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shoal_worker.elastic.contract.loader_interface import Placement, StepStatus
from shoal_worker.elastic.session.evaluation import should_early_stop
from shoal_worker.elastic.session.session import Session
from shoal_worker.elastic.session.worker_process import find_session
from shoal_worker.state.forwarding import ForwardingOptimizer
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import flatten, unflatten
from shoal_worker.strategies.fitting import OptimizationInputData, OptimizationResult, fit
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.whole_groups import StateOfPieces, WholeGroups
from shoal_worker.torch_internals import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def _check_alone(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Hook that torch calls before each step of any optimizer. Raises ConfigurationError if this
    optimizer is a second one for the run's model."""
    session = find_session()
    if session is not None:
        session.registered.check_alone(optimizer)


register_optimizer_step_pre_hook(_check_alone)


def _global_hook() -> str:
    """Returns a description of a step hook that the script has registered for all optimizers; "" if
    there is none."""
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            if hook is not _check_alone:
                return (
                    "the global step hook "
                    f"{getattr(hook, '__qualname__', type(hook).__qualname__)!r} in a step"
                )
    return ""


MembershipCallback = Callable[[Placement, Placement], object]
"""Callback that receives the previous and the current placement of this process."""


class ShardedOptimizer(ForwardingOptimizer):
    """The optimizer of a `ShardedModel`. It continues with the remaining ranks when ranks fail,
    leave or join.

    It shares settings and state with the user's optimizer, so schedulers, and code that inspects an
    optimizer, work with either of the two. The parameters in its groups are the model's own. The
    script does not have to handle changes of membership: the global batch size, the learning rate
    and its schedule stay the same, and steps aborted by a fault are repeated.
    `on_membership_change` is meant for other purposes, such as logging, the number of data workers
    or cost accounting.
    """

    # With this flag, GradScaler always calls step() and passes it the scale and the result of its
    # check, instead of skipping the call.
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: ShardedModel, session: Session
    ) -> None:
        """Wraps `optimizer`, the user's optimizer of `model`."""
        super().__init__(optimizer)
        self._model = model
        self._engine = model.engine
        self._session = session
        self._callbacks: list[MembershipCallback] = []
        self._last_placement: Placement | None = None
        self.defaults = optimizer.defaults
        self._whole = (
            WholeGroups(optimizer, dict(model.module.named_parameters()))
            if self._engine.updates_parts and not self._engine.asynchronous
            else None
        )
        session.registered.advance_with(optimizer)
        self._patch_step_hooks()
        self._refuse_step_hooks()

    def __getattr__(self, name: str) -> Any:
        """Looks up missing attributes on the wrapped optimizer. If this rank updates only parts of
        parameters, methods of the optimizer's own class raise an error when called, because they
        might change parameters."""
        value = super().__getattr__(name)
        own = (
            inspect.ismethod(value)
            and not name.startswith("_")
            and not hasattr(torch.optim.Optimizer, name)
        )
        if not own or not self.__dict__["_engine"].updates_parts:
            return value

        def refused(*args: Any, **kwargs: Any) -> Any:
            kind = type(self.optimizer).__name__
            raise ConfigurationError(
                f"optimizer.{name}() with strategy={self._engine.strategy!r}: the {kind} of this "
                "rank has only parts of the parameters, and values that its methods write would "
                "not reach the model. Use strategy='ddp', or, if the method writes to no "
                f"parameter, call {kind}.{name} on the optimizer passed to as_distributed",
                reason="OPTIMIZER_METHOD",
            )

        return refused

    def _patch_step_hooks(self) -> None:
        self.__dict__.setdefault(
            "_optimizer_step_pre_hooks", self.optimizer._optimizer_step_pre_hooks
        )
        self.__dict__.setdefault(
            "_optimizer_step_post_hooks", self.optimizer._optimizer_step_post_hooks
        )

    def _refuse_step_hooks(self, registered: str | None = None) -> None:
        """Raises ConfigurationError if the optimizer updates only parts of parameters and has a
        step hook, which would see only these parts. `registered`: description of a hook that is
        about to be registered; None: check the hooks that exist."""
        own = self.optimizer
        if not self._engine.updates_parts:
            return
        found = registered or (
            "a step hook"
            if own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks
            else _global_hook()
        )
        if found:
            raise ConfigurationError(
                f"{found} of {type(own).__name__} with strategy={self._engine.strategy!r}: the "
                "optimizer of this rank updates only parts of parameters, so a hook would not see "
                "the same tensors as on a single process. Do the hook's work in the loop, before "
                "or after optimizer.step(): model.clip_grad_norm_(max_norm) clips gradients"
                + ("" if self._engine.asynchronous else "; with_parameters(values) sets values")
            )

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Registers a step hook, as in torch. Raises ConfigurationError if the optimizer updates
        only parts of parameters."""
        self._refuse_step_hooks("register_step_pre_hook")
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Registers a step hook, as in torch. Raises ConfigurationError if the optimizer updates
        only parts of parameters."""
        self._refuse_step_hooks("register_step_post_hook")
        return super().register_step_post_hook(hook)

    def step(self, closure: Callable[[], Any] | None = None) -> StepStatus:  # type: ignore[override]
        # torch's method returns the closure's loss
        """Applies the step prepared by the backward pass, either on all ranks or on none. Returns
        the outcome; see `StepStatus`.

        Raises:
            ConfigurationError: a `closure` was passed, which is not supported, because it would run
                the backward pass again, outside of the step; or there are step hooks, and the
                optimizer updates only parts of parameters.
        """
        if closure is not None:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}.step(closure): a closure would run the backward "
                "pass again, outside of the step; use an optimizer that needs no closure (LBFGS "
                "needs one)"
            )
        self._refuse_step_hooks()
        if self._whole is not None:
            self._whole.check()
        scaled, inspected = (
            self._set_by_scaler("grad_scale") is not None,
            self._set_by_scaler("found_inf") is not None,
        )
        status = self._engine.finish_step(self._update, scaled=scaled, inspected=inspected)
        if status is not StepStatus.LOST:
            self._engine.note_scaler(self._session.registered.scaler_of(self))
        before, self._last_placement = self._last_placement, self.membership
        if before is not None and before.generation != self._last_placement.generation:
            for callback in self._callbacks:
                callback(before, self._last_placement)
        return status

    def _update(self) -> None:
        """Updates the parameters in a committed step. Skips the update if a GradScaler has found an
        infinity or NaN. The scaler stores its result on this optimizer, and the result is the same
        on all ranks."""
        found_inf = self._set_by_scaler("found_inf")
        usable = found_inf is None or not float(found_inf) > 0
        grad_scale = self._set_by_scaler("grad_scale")
        if grad_scale is not None:
            self._session.registered.scaled_by(float(grad_scale))
        if usable and grad_scale is not None:
            self._engine.scale_gradients(1.0 / float(grad_scale))
        self._engine.step_optimizer(usable=usable)

    def _set_by_scaler(self, name: str) -> torch.Tensor | None:
        """Returns an attribute that a GradScaler sets on the optimizer for a step; None if it is
        not set. Reads the instance's dict, because a failing `getattr` would take as long as a
        small kernel."""
        return self.__dict__.get(name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's optimizer's parameter groups, with the model's own parameters even if this
        rank updates only pieces of them. In a step without micro-batches, reading the groups first
        completes the reduction of the gradients, because the caller may be a GradScaler, which
        inspects them."""
        self._engine.groups_are_read()
        if self._whole is None:
            return self.optimizer.param_groups
        if self._engine.replaces_parameters:
            self._whole.follow(dict(self._model.module.named_parameters()))
        return self._whole.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._whole is None:
            self.optimizer.param_groups = groups
        else:
            self._whole.groups = groups

    @property
    def state(self) -> Any:
        """State of the user's optimizer for the tensors that this rank updates."""
        own = self.optimizer.state
        return (
            own
            if self._whole is None
            else StateOfPieces(own, self._whole.groups, self._engine.strategy)
        )

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's `zero_grad` does.

        Raises:
            ConfigurationError: `set_to_none` is False, but the strategy does not keep gradients of
                zero.
        """
        self._engine.check_zero_grad(set_to_none=set_to_none)
        self._engine.zero_grad(lambda: self.optimizer.zero_grad(set_to_none=set_to_none))

    @property
    def membership(self) -> Placement:
        """Current placement of this process: `generation`, `rank` and `world_size`. Rank and world
        size are the same as `shoal.rank()` and `shoal.world_size()`."""
        return self._session.script_placement

    def on_membership_change(self, callback: MembershipCallback) -> None:
        """Registers a callback for changes of membership. The training thread calls
        `callback(before, after)` at the end of the first `step()` after a change, on every rank
        that also took part in the previous step. Exceptions raised by the callback propagate from
        `step()` once the step is complete."""
        self._callbacks.append(callback)

    def state_dict(self) -> dict[str, Any]:
        """Returns the complete state in the format of a single process, which can be loaded under
        any strategy. Must be called on every rank."""
        return self._engine.optimizer_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer on a single process, or of a `ShardedOptimizer` under any
        strategy. Must be called on every rank, with the same state.

        Raises:
            CorruptDataError: the state belongs to a different optimizer. Nothing is changed.
            ConfigurationError: ranks were given different states. Nothing is changed.
        """
        self._engine.load_optimizer_state_dict(
            self._engine.agreed("optimizer.load_state_dict", lambda: state_dict)
        )

    def serialize(self) -> bytes:
        """Returns settings and state as bytes, for `deserialize` under any strategy and number of
        ranks. Must be called on every rank."""
        structure, tensors = flatten(self.state_dict())
        return dump_tensors(
            tensors,
            {"kind": "optimizer", "strategy": self._engine.strategy, "structure": structure},
        )

    def deserialize(self, data: bytes) -> None:
        """Loads the result of `serialize` from any strategy. Must be called on every rank, with the
        same bytes.

        Raises:
            CorruptDataError: the bytes are damaged, come from a different program or a newer
                release, or belong to a different optimizer. Nothing is changed.
            ConfigurationError: ranks were given different bytes. Nothing is changed.
        """
        self._engine.load_optimizer_state_dict(
            self._engine.agreed("optimizer.deserialize", lambda: _optimizer_state(data))
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises PreconditionError, because the model's layout across the ranks is fixed at
        creation."""
        raise PreconditionError(
            "add_param_group was called after as_distributed; add parameter groups to the "
            "optimizer before as_distributed"
        )

    def optimize(self, data: OptimizationInputData) -> OptimizationResult:
        """Runs a complete fit: trains, validates after each epoch, and stops early if requested;
        see `OptimizationInputData`. Must be called on every rank, with the same data.

        The fit survives faults as a user's loop does. After `shoal.resume`, it continues from the
        point at which the checkpoint was saved, for example by `on_epoch`. Afterwards, the model
        has the values of the last step.

        Raises:
            ConfigurationError: the model is one of several that are trained in one loop.
        """
        if self._model.is_one_of_several:
            raise ConfigurationError(
                "optimize(data) trains one model, but as_distributed received several; write the "
                "training loop yourself"
            )
        return fit(self._session, self._model, self, data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PreconditionError, because an optimizer is bound to its process and has only this
        rank's part of the state."""
        raise PreconditionError(
            f"an optimizer with strategy={self._engine.strategy!r} cannot be pickled or copied "
            "(torch.save(optimizer) pickles); save optimizer.state_dict() or "
            "optimizer.serialize(), on every rank"
        )

    def synchronize_parameters(self) -> None:
        """Synchronizes the ranks' parameters if they may differ between steps. Under local_sgd, the
        next step ends the round. Under async_sgd, this worker pulls the latest values. Does nothing
        under other strategies. Must be called on every rank."""
        self._engine.synchronize_parameters()

    def synchronize_optimizer_state(self) -> None:
        """Synchronizes the ranks' optimizer states if they may differ between steps. Under
        local_sgd, the next step averages parameters and optimizer states. Does nothing under other
        strategies. Must be called on every rank."""
        self._engine.synchronize_optimizer_state()

    def should_early_stop(
        self,
        metric: float,
        *,
        mode: str = "min",
        patience: int = 5,
        min_delta: float = 0.0,
        name: str | None = None,
    ) -> bool:
        """Returns whether to stop, because `metric` has not improved by more than `min_delta` in
        the last `patience` calls. The result is the same on all ranks.

        The ranks' metrics are averaged, so pass either the result of `evaluate` or each rank's own
        value. Must be called on every rank. Each optimizer counts its own calls, separately by
        `mode` and `name`.

        Args:
            name: name of the metric, if the script monitors several metrics.

        Raises:
            ConfigurationError: the mode is unknown, the patience is below 1, or the script calls
                this method in two places with the same `mode` and `name`.
        """
        caller = sys._getframe(1)
        return should_early_stop(
            self._session,
            metric,
            mode=mode,
            patience=patience,
            min_delta=min_delta,
            name=name,
            optimizer=self._session.registered.number_of(self.optimizer),
            site=(caller.f_code, caller.f_lasti),
        )


def _optimizer_state(data: bytes) -> dict[str, Any]:
    """Returns the optimizer state from a result of `ShardedOptimizer.serialize`. Raises
    CorruptDataError if `data` is anything else."""
    tensors, metadata = load_tensors(data)
    if metadata.get("kind") != "optimizer":
        raise CorruptDataError(
            "the bytes contain a model's state, not an optimizer's; load them with "
            "model.deserialize()",
            reason="FILE_FOREIGN",
        )
    state: dict[str, Any] = unflatten(metadata.get("structure"), tensors)
    return state


ElasticOptimizer = ShardedOptimizer
"""Another name for `ShardedOptimizer`."""
