"""What an engine is: how a strategy's model is trained and kept, below the public `ShardedModel`
and `ShardedOptimizer`.

There are four: `replicated/engine.py` (every rank holds the whole), `sharding/engine.py` (tensors
are cut over the ranks), `mesh/engine.py` (layers and stages lie on different ranks) and
`asynchronous/engine.py` (values come from parameter servers). A strategy declares which one, and
with what (`strategies/declaration.py`).

An engine stands between three: the model and the optimizer that users hold, which hand their calls
on to it, and the session, whose `TrainingEngine` it is. All of it runs on the training thread;
hooks of a backward pass run on torch's thread for it, while the training thread waits.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from shoal_common.errors import ConfigurationError, InternalError, ShoalError
from torch import nn

from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.channel import Channel
from shoal_worker.elastic.group import Group
from shoal_worker.elastic.loader_interface import Leases, StepStatus
from shoal_worker.elastic.row_store import RowStore
from shoal_worker.elastic.strategy_interface import StrategySession
from shoal_worker.engine.buffers import give_memory, kept_buffers
from shoal_worker.engine.extremes import find_extremes
from shoal_worker.engine.hidden_parameters import blank_copies, inside, want_gradients
from shoal_worker.engine.module_state import (
    ModuleState,
    check_model_fits,
    check_state_can_travel,
    load_captured,
)
from shoal_worker.engine.optimizer_state import load_optimizer, strided_like
from shoal_worker.engine.parameters import agreed, named_values
from shoal_worker.engine.passes import Loss, call_module
from shoal_worker.engine.tentative_update import TentativeUpdate
from shoal_worker.modes import evaluating
from shoal_worker.state.fits import check_fits
from shoal_worker.state.tree import StatePart, flatten
from shoal_worker.torch_internals import _BatchNorm

# --------------------------------------------------------------------------------------- the engine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is made from.

    Three things can be called: `module` by itself computes and does no more; `call` is the same, as
    torch.compile made it, and what `Engine.forward` calls; `model` goes through `Engine.forward`,
    and is what `Engine.train_step` calls.
    """

    strategy: str
    """The strategy's name, for errors and metadata."""
    module: nn.Module
    """The user's own, whole."""
    call: Callable[..., Any]
    """The module's forward pass: what torch.compile made of it, where it did."""
    model: Callable[..., Any]
    """The `ShardedModel`, to be called as the user calls it, with the hooks that the user put on
    it."""
    show: Callable[[nn.Module], None]
    """Makes another module the one that `ShardedModel.module` is."""
    session: StrategySession
    config: ShardingConfiguration
    backend_name: str
    options: Mapping[str, Any]
    """The strategy's own keyword arguments of `as_distributed`."""
    several: bool = False
    """The model is one of several: passes of others go through it, also while the script has frozen
    it, and leave gradients here."""


def _normalizes_batches(layer: nn.Module) -> bool:
    """Returns True if the layer normalizes by the samples of this rank alone, and refuses one."""
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


class Engine(abc.ABC):
    """One model and its optimizer in training. Where nothing else is said, this rank holds the
    whole of both."""

    asynchronous: ClassVar[bool] = False
    """See `TrainingEngine`."""
    keeps_parameters_whole: ClassVar[bool] = False
    """The module's own `state_dict()` finds the parameters' newest values between steps, as torch's
    does."""

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
        """The user's; None: there is none, or `attach` is to come."""
        give_memory(setup.module)
        check_state_can_travel(setup.module, setup.strategy, whole=self.keeps_parameters_whole)
        self.least_samples = 2 if any(map(_normalizes_batches, setup.module.modules())) else 1
        """See `TrainingEngine`."""
        self.extremes = find_extremes(setup.module)
        """Buffers that hold minima and maxima."""
        self._setup = setup
        self._entry: Callable[..., Any] | None = None
        """A method of the module that the next pass goes through; None: `forward`."""
        self._session = setup.session
        self._options = setup.options

    # ------------------------------------------------------- for ShardedModel: passes and gradients

    @abc.abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Joins the session: from here on module and optimizer are the run's state. Once."""

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, which in training begins the step where no loader did."""

    def entering(self, name: str, *, frozen: bool) -> Callable[..., Any]:
        """`forward`, or `forward_frozen`, through that method of the module in the place of its own
        (`register_forward_method`)."""

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
        """The module's method, to be called as its forward pass."""
        method: Callable[..., Any] = getattr(self.module, name)
        return method

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, or the method of it that this pass goes through. What that calls in
        turn are passes through `forward`."""
        call, self._entry = self._entry or self._setup.call, None
        return call(*args, **kwargs)

    @abc.abstractmethod
    def train_step(self, inputs: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
        """See `ShardedModel.train_step`."""

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """See `ShardedModel.predict`."""
        with evaluating(self.module):
            return call_module(self.module, inputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `ShardedModel.generate`."""
        self.check_values_here(
            "generate()", "model.clone().generate(...) generates with a copy of the whole model"
        )
        module: Any = self.module
        return module.generate(*args, **kwargs)

    def loss_parallel(self) -> AbstractContextManager[None]:
        """See `ShardedModel.loss_parallel`."""
        return nullcontext()

    @abc.abstractmethod
    def synchronize_gradients(self) -> None:
        """See `ShardedModel.synchronize_gradients`."""

    def zero_grad(self, clear: Callable[[], None]) -> None:
        """Clears the gradients of the step in progress. `clear`: torch's own way, for gradients
        that are where torch looks for them."""
        clear()

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel.get_gradients`."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.set_gradients`."""
        parameters = dict(self.module.named_parameters())
        for name, gradient in gradients.items():
            if name not in parameters:
                raise ConfigurationError(
                    f"set_gradients: the model has no parameter {name!r}; it has "
                    f"{sorted(parameters)[:5]} ..."
                )
            if gradient.shape != parameters[name].shape:
                raise ConfigurationError(
                    f"set_gradients: the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                    f"the parameter {tuple(parameters[name].shape)}"
                )
        for name, gradient in gradients.items():
            parameters[name].grad = strided_like(
                gradient.to(parameters[name].dtype), parameters[name]
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """See `ShardedModel.clip_grad_norm_`."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    # --------------------------------------------------------------------- for ShardedModel: values

    def check_values_here(self, call: str, instead: str) -> None:
        """Raises PreconditionError where this rank has not all values of the module. `call`,
        `instead`: for the error."""

    def check_conversion(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether torch is to apply `fn` (a conversion: `to`, `half`, `cuda` and the like) to the
        module's tensors.

        Raises:
            PreconditionError: it would put them elsewhere than where the ranks' shards are.
        """
        return True

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel.gather_full_parameters`."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """See `ShardedModel.full_state_dict`."""
        return (
            {}
            if rank0_only and self._session.rank != 0
            else copy.deepcopy(self.module.state_dict())
        )

    def _whole_state(self) -> Mapping[str, Any]:
        """Copies of all of the module's state, with the parameters that its own `state_dict()`
        leaves out."""
        return copy.deepcopy(ModuleState(self.module).captured())

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """See `ShardedModel.local_shard`."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.load_full`."""
        self._check_fits(tensors)
        load_captured(self.module, tensors)

    def _check_fits(self, tensors: Mapping[str, Any]) -> None:
        """Raises CorruptDataError unless this is a state of the module."""
        check_model_fits(tensors, self.module, ModuleState(self.module).shapes())

    def use_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """See `ShardedModel.with_parameters`."""
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.agreed(
                "with_parameters", lambda: named_values(parameters, own)
            ).items():
                own[name].copy_(value)

    def agreed(self, kind: str, read: Callable[[], T]) -> T:
        """What `read` gives, once all ranks that train this model have been given the same
        (`parameters.agreed`). A clone's is its own."""
        return agreed(self._session, kind, read) if self.is_trained else read()

    @property
    def is_trained(self) -> bool:
        """Whether this engine's model is the one that the run trains, and not a clone of that."""
        return self._session.trains(self)

    def clone(self, remake: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """A copy of the whole module as it is now. `remake`: makes a `ShardedModel` of the same
        strategy from a module."""
        state = self._whole_state()
        copied = copy.deepcopy(self.module, blank_copies(self.module))
        for key, tensor in ModuleState(copied).tensors.items():
            tensor.data = state[key]  # in place of what lies here, which may be a part, or nothing
        return copied

    def layout(self) -> dict[str, Any]:
        """What there is to tell of how it lies over the ranks, for
        `ShardedModel.get_model_metadata`; JSON-able."""
        return {}

    def whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """The module's parameters, with the shapes that they have when they are whole."""
        return [(p, p.shape) for p in self.module.parameters()]

    # ------------------------------------------------------------------------- for ShardedOptimizer

    updates_parts = False
    """The optimizer of this process updates parts of the parameters, or none: step hooks would not
    see what they see in one process."""
    # other objects take their places in the module when the ranks are divided
    replaces_parameters = False
    passes_with = ""  # all ranks go through the passes together

    def groups_are_read(self) -> None:
        """Somebody is about to look at the optimizer's parameter groups: a scheduler, a GradScaler,
        the user."""

    def finish_step(
        self, update: Callable[[], None], *, scaled: bool, inspected: bool
    ) -> StepStatus:
        """Ends the step.

        Args:
            update: what is to be done if the step counts, called in `apply`. It is
                `ShardedOptimizer`'s, and calls this engine in turn: it undoes a GradScaler's scale
                by `scale_gradients`, and then calls `step_optimizer`.
            scaled: a GradScaler has left its scale, for gradients that are not unscaled yet.
            inspected: a GradScaler has looked for infinities.
        """
        return self._session.finish_step(lambda: self.apply(update))

    def apply(self, update: Callable[[], None]) -> None:
        """Every rank's part of the step is in: calls `update`, with this rank's gradients where the
        optimizer finds them."""
        update()

    def step_optimizer(self, *, usable: bool) -> None:
        """The user's optimizer's own step. Gradients that are not `usable` change nothing, though
        the step counts."""
        assert self.optimizer is not None
        if usable:
            self.optimizer.step()
        else:
            self.skip()

    def note_scaler(self, name: str) -> None:
        """The registered GradScaler of that name has stepped the optimizer in a step that counts;
        empty: none has."""

    def skip(self) -> None:
        """The step counts, but a GradScaler found its gradients unusable, on all ranks alike."""

    def apply_tentatively(self, apply: Callable[[], None]) -> TentativeUpdate:
        """Calls `apply`, in a step of several models that is not known to count. Returns what
        `exchange_update` puts back."""
        assert self.optimizer is not None
        update = TentativeUpdate(self.optimizer)
        apply()
        return update

    def exchange_update(self, update: TentativeUpdate) -> None:
        """Puts back what there was before the last update; or, if that was done, what there was
        after it."""
        update.exchange()

    def freeze(self) -> Callable[[], None]:
        """Behind its own update in a step of several models: until the returned call gradients go
        through the module to others, and come to none of its parameters; its buffers are then what
        they are now."""
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
        """It is one of several models, whose engines these are, and all are attached: what is cut
        over the ranks is cut alike."""

    def fetch_put_back(self) -> None:
        """Updates of the step in progress were put back, on all ranks alike: values that every rank
        holds and only their owner updates are fetched from there again. A collective, whose failure
        marks the step lost."""

    def forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass where none of its parameters is to get a gradient: nothing will
        be reduced."""
        return self._compute(*args, **kwargs)

    def has_gradients(self) -> bool:
        """A backward pass of the step in progress has left some that are not zero."""
        gradients = (
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        )
        return any(
            bool((gradient._values() if gradient.is_sparse else gradient).count_nonzero())
            for gradient in gradients
        )

    @property
    def changing_buffers(self) -> bool:
        """The module has buffers that the ranks must agree on. Asked where several models are
        trained."""
        return False

    def scale_gradients(self, scale: float) -> None:
        """Multiplies the gradients of what this rank is to update."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if dense := [gradient for gradient in gradients if gradient.layout is torch.strided]:
            torch._foreach_mul_(dense, scale)
        for gradient in (each for each in gradients if each.layout is not torch.strided):
            gradient.mul_(scale)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's whole state, as one process would have it."""
        assert self.optimizer is not None
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over an optimizer's whole state, the same on all ranks.

        Raises:
            CorruptDataError: it is of another optimizer; nothing is changed.
        """
        self._check_optimizer_fits(state)
        assert self.optimizer is not None
        load_optimizer(self.optimizer, state, exact=False)

    def _check_optimizer_fits(self, state: Mapping[str, Any]) -> None:
        """Raises CorruptDataError unless this is a state of this optimizer, over whole
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
    def models(self) -> int:
        """One."""
        return 1

    @property
    def data_parallel_rank(self) -> int:
        """Each rank is a replica."""
        return self._session.rank

    @property
    def data_parallel_size(self) -> int:
        """Each rank is a replica."""
        return self._session.world_size

    @property
    def leads_replica(self) -> bool:
        """Each rank is a replica."""
        return True

    @property
    def row_store(self) -> RowStore | None:
        """See `TrainingEngine`."""
        return None

    @property
    def idle(self) -> bool:
        """There are no spares."""
        return False

    @property
    def lacks_ranks(self) -> bool:
        """False: one rank is enough."""
        return False

    @property
    def replica_size(self) -> int:
        """There are no spares."""
        return 1

    def issued(self) -> bytes:
        """None are compared."""
        return b""

    def compare_issued(self, told: Sequence[bytes]) -> None:
        """See `TrainingEngine`."""

    def working(self, group: Group) -> Group:
        """All ranks work."""
        return group

    @property
    def in_parts(self) -> bool:
        """Each rank has all of the state."""
        return False

    @property
    def holds(self) -> Sequence[str]:
        """The state is not in parts."""
        return ()

    @property
    def steps_alone(self) -> bool:
        """The ranks take steps together."""
        return False

    @property
    def within_round(self) -> bool:
        """Each step counts by itself."""
        return False

    @property
    def consistency_check_every(self) -> int:
        """What the configuration says."""
        return self.config.consistency_check_every

    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Nothing that others hold."""
        return {}

    def whole_everywhere(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Nothing that a script could write between steps."""
        return {}

    def check_optimizer_state(self) -> None:
        """See `TrainingEngine`."""
        state = self.optimizer.state if self.optimizer is not None else {}
        for name, parameter in self._optimized():
            for key, value in state.get(parameter, {}).items():
                try:
                    self._check_can_travel(key, value)
                except ConfigurationError as error:
                    raise ConfigurationError(
                        f"{type(self.optimizer).__name__} keeps {key!r} of parameter {name!r}: "
                        f"{error}",
                        reason="STATE_UNSUPPORTED",
                    ) from error

    def _optimized(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors that the optimizer updates here, by parameter name."""
        return self.module.named_parameters()

    def _check_can_travel(self, key: str, value: Any) -> None:
        """Raises ConfigurationError unless such an entry of the optimizer's state can be sent."""
        flatten({key: value})

    @abc.abstractmethod
    def has_values(self) -> bool: ...

    @abc.abstractmethod
    def capture(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None: ...

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises CorruptDataError if `restore` would refuse this state; nothing is changed."""

    def assemble(self, channel: Channel) -> dict[str, Any]:
        """What is captured is whole."""
        return self.capture()

    def part(self, channel: Channel) -> StatePart | None:
        """There are no parts: `assemble` it."""
        return None

    def whole_for(self, channel: Channel) -> AbstractContextManager[None]:
        """The module is whole."""
        return nullcontext()

    def regroup(self, group: Group) -> None:
        """Nothing is cut over the ranks."""

    def bring_together(self, channel: Channel) -> None:
        """An update leaves nothing behind on single ranks that others hold."""

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """Every rank holds all of it, or has no peer that could."""

    def lease_batches(
        self,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        finished: Sequence[int],
        want: int,
        at_hand: int | None = None,
    ) -> Leases:
        """Refused: a step is all ranks'."""
        raise ConfigurationError(
            f"loader {loader!r}: batch_size= leases batches for async_sgd; with "
            f"strategy={self.strategy!r} give global_batch_size="
        )

    @abc.abstractmethod
    def step_begins(self) -> None: ...

    def batch_begins(self) -> None:
        """There is nothing to do before the passes."""

    @abc.abstractmethod
    def micro_batch_begins(self) -> None: ...

    @abc.abstractmethod
    def micro_batch_ends(self, weight: float) -> None: ...

    @abc.abstractmethod
    def finish_reduction(self) -> None: ...

    def closing(self) -> dict[str, Any]:
        """Nothing: a rank that has the gradients' sums can apply the step without knowing more."""
        return {}

    def take_closing(self, told: Mapping[str, Any]) -> None:
        """Does nothing: this rank has the gradients' sums, and needs no more to apply the step."""

    @property
    def partly_updated(self) -> bool:
        """There is one model."""
        return False

    def withdraw_updates(self) -> None:
        """A step of one model updates when it counts."""

    def reinstate_updates(self) -> None:
        """There is nothing to reinstate."""

    def writes_apart(self) -> ShoalError:
        """What a pass writes is refused, or stays this rank's own."""
        return InternalError("ranks that compare no written parameters found them different")

    @abc.abstractmethod
    def discard_step(self) -> None: ...

    @abc.abstractmethod
    def commit_step(self) -> None: ...
