"""What every strategy's model has in common: the public surface of `ShardedModel`. `base_optimizer.py` has `ShardedOptimizer`.

A strategy is one file beside this one: a `ShardedModel` and the `ShardedOptimizer` that goes with it, written against `Session` (when a
step begins, commits, is lost) and registered in `registry.py`.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from shoal_common.errors import ConfigurationError, PreconditionError, UnavailableError
from torch import nn

from shoal_worker.checkpoint.company import on_first
from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.group import Channel, Group
from shoal_worker.elastic.modes import evaluating
from shoal_worker.elastic.session import Session
from shoal_worker.elastic.step import Step
from shoal_worker.engine.activation_checkpointing import checkpoint_activations
from shoal_worker.engine.agreeing import agreed
from shoal_worker.engine.elsewhere import blank_copies
from shoal_worker.state.part import StatePart
from shoal_worker.state.serial import dump_tensors, load_tensors, read_tensors, write_file
from shoal_worker.strategies.settings import check_settings

T = TypeVar("T")


class ShardedModel(nn.Module, abc.ABC):
    """A model that several ranks train together.

    `model.module` is the user's own; attributes that this class lacks are looked up there.
    """

    strategy: ClassVar[str]
    """Name in the registry."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Keyword arguments of `as_distributed` that only this strategy knows."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Fields of `ShardingConfiguration` that not every strategy knows, and this one does."""
    compresses: ClassVar[bool] = False
    """It takes `gradient_compression=`."""
    complex_parameters: ClassVar[bool] = False
    """It trains them."""

    def __init__(self, module: nn.Module, session: Session, config: ShardingConfiguration, *, backend: str | None, **options: Any) -> None:
        """`backend`: None chooses by the session's device. `options`: those named in `options`."""
        super().__init__()
        if config.compressor is not None and not self.compresses:
            raise ConfigurationError(
                f"gradient_compression={config.compressor.name!r} with strategy={self.strategy!r}, which does not compress: take ddp, "
                "zero1, zero2, zero3, fsdp or async_sgd, or leave it out"
            )
        check_settings(self.strategy, self.settings, config)
        if not self.complex_parameters:
            _check_real(module, self.strategy)
        self.module = module
        self.config = config
        self.backend_name = backend or session.default_backend
        self._session = session
        self._options = options
        if session.device.type == "cuda":
            torch.cuda.set_device(session.device)  # NCCL binds groups to it, and ranks of one host must not share one
        checkpoint_activations(self.module, config.activation_checkpointing)
        self.on_before_initialize_sharding()
        self.initialize_sharding()

    def on_before_initialize_sharding(self) -> None:
        """Hook for subclasses: called once, before anything is sharded."""

    @abc.abstractmethod
    def initialize_sharding(self) -> None:
        """Lays the module out over the ranks. Called once, by the constructor."""

    @abc.abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Joins the session: from here on model and optimizer are the run's state. Called once, by `as_distributed`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # ------------------------------------------------------------------------------------------------------------- training

    @abc.abstractmethod
    def train_step(
        self,
        inputs: Any,
        targets: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Forward, loss, backward and synchronization. Returns the loss averaged over the whole batch, the same on every rank.

        A mapping as `inputs` becomes keyword arguments, a tuple positional ones. Without `loss_fn` the output's `.loss` is used.
        """

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The forward pass in evaluation mode, without gradients; each module's mode is put back afterwards."""
        with evaluating(self.module):
            return call_module(self.module, inputs)

    @abc.abstractmethod
    def synchronize_gradients(self) -> None:
        """Sums the gradients over the ranks, where that does not happen by itself during the backward pass."""

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name, as they are now; parameters without one are left out."""
        return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replaces gradients by name.

        Raises:
            ConfigurationError: an unknown name or another shape; nothing is changed.
        """
        parameters = dict(self.module.named_parameters())
        for name, gradient in gradients.items():
            if name not in parameters:
                raise ConfigurationError(f"set_gradients: the model has no parameter {name!r}; it has {sorted(parameters)[:5]} ...")
            if gradient.shape != parameters[name].shape:
                raise ConfigurationError(
                    f"set_gradients: the gradient of {name!r} has shape {tuple(gradient.shape)}, "
                    f"the parameter {tuple(parameters[name].shape)}"
                )
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.to(parameters[name].dtype)

    @abc.abstractmethod
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients so that their norm over all parameters of all ranks is at most `max_norm`; returns the norm before."""

    # ---------------------------------------------------------------------------------------------------------------- state

    @property
    def speaks(self) -> bool:
        """See `Replica`: each rank is one."""
        return True

    @property
    def idle(self) -> bool:
        """See `Replica`: there are no spares."""
        return False

    @property
    def lacks_ranks(self) -> bool:
        """See `Replica`: any number is enough."""
        return False

    @property
    def replica_size(self) -> int:
        """See `Replica`: there are no spares."""
        return 1

    def working(self, group: Group) -> Group:
        """See `Replica`: all do."""
        return group

    @property
    def holds(self) -> Sequence[str]:
        """See `Replica`: it is not in parts."""
        return ()

    def bring_together(self, channel: Channel) -> None:
        """See `Replica`: an update leaves nothing behind on single ranks that others hold."""

    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        """See `Replica`: every rank holds all of it, or has no peer that could."""

    @property
    def steps_alone(self) -> bool:
        """See `Replica`: the ranks take them together."""
        return False

    @property
    def consistency_check_every(self) -> int:
        """See `Replica`."""
        return self.config.consistency_check_every

    def in_common(self) -> Mapping[str, int]:
        """See `Replica`: nothing that others hold."""
        return {}

    def part(self, channel: Channel) -> StatePart | None:
        """This rank's part of the state, where no rank has all of it: see `Replica`."""
        return None

    def whole_for(self, channel: Channel) -> contextlib.AbstractContextManager[None]:
        """While open, this rank can compute without its peers: it has the whole parameters. Opened by all ranks of an operation."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the whole parameters on every rank, by the original module's names."""

    @abc.abstractmethod
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Copies of parameters and buffers under the original module's names; with `rank0_only` empty on other ranks."""

    @property
    @abc.abstractmethod
    def local_shard(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the parameters."""

    def with_parameters(self, parameters: torch.Tensor | Mapping[str, torch.Tensor]) -> ShardedModel:
        """This model with other values: a flat vector of all parameters in order, or a dict by name. Returns self. Every rank calls it,
        with the same values.

        Raises:
            ConfigurationError: a name, a shape or the number of elements does not fit, or ranks differ; nothing is changed.
        """
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, value in self.agreed("with_parameters", lambda: replaced_parameters(parameters, own)).items():
                own[name].copy_(value)
        return self

    def agreed(self, kind: str, read: Callable[[], T]) -> T:
        """What `read` gives, once all ranks that train this model have been given the same; see `agreeing.agreed`. A clone's is its own."""
        return agreed(self._session, kind, read) if self._session.trains(self) else read()

    def clone(self) -> nn.Module:
        """A copy of the whole model as it is now, to keep, evaluate or save. It takes no part in training. Every rank calls it."""
        state = self.full_state_dict()
        copied = copy.deepcopy(self.module, blank_copies(self.module))
        for name, tensor in copied.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                tensor.data = state[name]  # in place of what lies here, which may be a part, or nothing
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A clone: what AveragedModel and other keepers of moving averages ask for. Every rank calls it."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: what pickle would write is this rank's process as well.

        Raises:
            PreconditionError: always.
        """
        raise PreconditionError(
            f"a model with strategy={self.strategy!r} cannot be pickled (torch.save(model) does): save model.full_state_dict() or "
            "model.clone(), or call model.save_model(path), on every rank"
        )

    # ---------------------------------------------------------------------------------------------------------------- files

    @abc.abstractmethod
    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `full_state_dict` of any strategy gave, the same on every rank.

        Raises:
            CorruptDataError: names or shapes are not the model's; nothing is changed.
        """

    def serialize(self) -> bytes:
        """Parameters and buffers with the strategy's name and layout. Every rank calls it."""
        return dump_tensors(self.full_state_dict(), self.get_model_metadata())

    def deserialize(self, data: bytes) -> None:
        """Loads what `serialize` of any strategy gave. Every rank calls it, with the same bytes.

        Raises:
            CorruptDataError: damaged, foreign or newer, or not of this model; nothing is changed.
            ConfigurationError: ranks were given different bytes; nothing is changed.
        """
        self.load_full(self.agreed("deserialize", lambda: load_tensors(data)[0]))

    def save_model(self, path: str | Path) -> None:
        """Writes `serialize()` to a file, atomically, on the first rank that holds the state. Every rank calls it; when it returns, the
        file is there.

        Raises:
            UnavailableError (FILE_NOT_WRITTEN): on all ranks: the first one cannot write it.
        """
        target, tensors = Path(path), self.full_state_dict()

        def write() -> str | None:
            return write_file(target, dump_tensors(tensors, self.get_model_metadata())) if self._session.is_first else None

        def body(channel: Channel) -> str | None:
            refused: str | None = json.loads(channel.exchange(json.dumps(on_first(channel, write)).encode())[0])
            return refused

        refused = self._session.operation("save_model", body) if self._session.trains(self) else write()
        if refused is not None:
            raise UnavailableError(refused, reason="FILE_NOT_WRITTEN")

    def load_model(self, path: str | Path) -> None:
        """Reads a file of `save_model`, which every rank must see. Raises what `deserialize` raises."""
        self.load_full(self.agreed("load_model", lambda: read_tensors(Path(path))[0]))

    def get_model_metadata(self) -> dict[str, Any]:
        """What the model is and how it is laid out; JSON-able."""
        return {
            "strategy": self.strategy,
            "world_size": self._session.world_size,
            "module": type(self.module).__name__,
            "parameters": sum(math.prod(shape) for _, shape in self._whole_parameters()),
            "parameter_bytes": sum(math.prod(shape) * p.element_size() for p, shape in self._whole_parameters()),
            "trainable_parameters": sum(math.prod(shape) for p, shape in self._whole_parameters() if p.requires_grad),
        }

    def _whole_parameters(self) -> list[tuple[torch.Tensor, torch.Size]]:
        """The module's parameters, with the shapes that they have when they are whole."""
        return [(p, p.shape) for p in self.module.parameters()]

    # ---------------------------------------------------------------------------------------------------------------- ranks

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model this rank belongs to."""
        return self._session.rank

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas."""
        return self._session.world_size


def call_module(module: Callable[..., Any], inputs: Any) -> Any:
    """Calls `module` with `inputs`: a mapping as keyword arguments, a tuple as positional ones, all else as one argument."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)


def loss_of(output: Any, targets: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor:
    """The loss of an output: `loss_fn(output, targets)`, or the output's `.loss`.

    Raises:
        ConfigurationError: there is neither, or it is no one number.
    """
    if loss_fn is not None:
        return _one_number(loss_fn(output, targets))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f"train_step without loss_fn needs an output with a .loss tensor; the model returned {type(output).__name__}"
        )
    return _one_number(loss)


def _one_number(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ConfigurationError(f"the loss is {found}: expected a tensor of one element, such as the mean over the batch")
    return loss


def replaced_parameters(
    parameters: torch.Tensor | Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """What `with_parameters` was given, by name; `own`: the model's whole parameters in order.

    Raises:
        ConfigurationError: a name, a shape or the number of elements does not fit.
    """
    given = _unflatten_vector(parameters, own) if isinstance(parameters, torch.Tensor) else dict(parameters)
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ConfigurationError(f"with_parameters: the model has no parameters {unknown[:5]}")
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ConfigurationError(f"with_parameters: {name!r} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}")
    return given


def _unflatten_vector(vector: torch.Tensor, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    total = sum(p.numel() for p in own.values())
    if vector.dim() != 1 or vector.numel() != total:
        raise ConfigurationError(f"with_parameters: expected a flat vector of {total} elements, got shape {tuple(vector.shape)}")
    return dict(
        zip(own, (v.view_as(p) for v, p in zip(vector.split([p.numel() for p in own.values()]), own.values(), strict=True)), strict=True)
    )


def check_reproducible(config: ShardingConfiguration, step: Step) -> None:
    """Raises ConfigurationError for a step whose result would depend on the number of ranks although `deterministic=True` was asked for."""
    if config.deterministic and not step.in_micro_batches:
        raise ConfigurationError(
            "deterministic=True needs micro-batches, whose results do not depend on the number of ranks: give micro_batch_size= to "
            "the ElasticDataLoader and iterate over loader.steps()"
        )


def check_optimizer_covers(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that the optimizer was made for this module.

    Raises:
        ConfigurationError: it holds tensors that are not parameters of the module.
    """
    own = {id(p) for p in module.parameters()}
    foreign = sum(1 for p in _parameters(optimizer) if id(p) not in own)
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {foreign} tensor(s) that are not parameters of the model; make it from the same model's parameters()"
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _check_real(module: nn.Module, strategy: str) -> None:
    """Raises ConfigurationError for a complex parameter that is trained."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigurationError(
                f"parameter {name!r} is complex, and strategy={strategy!r} sums real numbers: keep it as two real ones "
                "(torch.view_as_complex in the forward pass), or take ddp or local_sgd"
            )
