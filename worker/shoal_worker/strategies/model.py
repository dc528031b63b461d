"""`ShardedModel`, the wrapper of the user's model for every strategy. The strategy's engine does
the work (`engine/base.py`)."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from shoal_common.errors import ConfigurationError, PreconditionError, UnavailableError
from torch import nn

from shoal_worker.checkpoint.place import check_same_place
from shoal_worker.checkpoint.writer import on_first
from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.session.session import Session
from shoal_worker.engine.base import Engine, Setup
from shoal_worker.engine.state.parameter_groups import checkpoint_activations
from shoal_worker.engine.step.passes import Loss
from shoal_worker.features.model_session import ModelSession
from shoal_worker.object_storage import is_url, local_path
from shoal_worker.state.serial import dump_tensors, load_tensors, read_tensors, write_file
from shoal_worker.state.tree import flatten, unflatten
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.torch_internals import in_function_transform


class ShardedModel(nn.Module):
    """A model that several ranks train together.

    `model.module` is the user's own module. Attributes that this class does not have, such as the
    `config` of transformers models, are looked up on that module. `model.sharding_config` describes
    the sharding.
    """

    declaration: ClassVar[Strategy]
    """Declaration of the strategy (engine, options, costs and supported features)."""
    strategy: ClassVar[str]
    """Name of the strategy."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "declaration" in cls.__dict__:
            cls.strategy = cls.declaration.name

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        config: ShardingConfiguration,
        *,
        backend: str | None,
        among: ModelSession | None = None,
        **options: Any,
    ) -> None:
        """Creates the model. `backend`: name of the communication backend; None: chosen for the
        session's device. `among`: this model's own session if several models are trained in one
        loop; None: it is the only model. `options`: options declared by the strategy.

        Raises:
            ConfigurationError: the strategy cannot train the module with these settings.
        """
        super().__init__()
        # Passes call the module returned by torch.compile, but state uses the names in the user's
        # own module.
        self._call: Callable[..., Any] = module.__call__
        self.module = getattr(module, "_orig_mod", module)
        self.sharding_config = config
        self.backend_name = backend or session.default_backend
        self._session = session
        self._among = among
        self._options = options
        self._forward_methods: set[str] = set()
        """Names of methods registered with `register_forward_method`."""
        if session.device.type == "cuda":
            # NCCL binds groups to the current device, which must differ between ranks of one host
            torch.cuda.set_device(session.device)
        checkpoint_activations(self.module, config.activation_checkpointing)
        self.on_before_initialize_sharding()
        self.initialize_sharding()

    @property
    def is_one_of_several(self) -> bool:
        """True if this is one of several models that are trained in one loop."""
        return self._among is not None

    def on_before_initialize_sharding(self) -> None:
        """Hook for subclasses, called once before anything is sharded. It may change `self.module`
        and `self.sharding_config`. Methods that need the engine (`state_dict`, `to`,
        `full_state_dict`, ...) cannot be called yet."""

    def initialize_sharding(self) -> None:
        """Creates the engine, which distributes the module across the ranks. Called once, by the
        constructor."""
        # A strong reference would form a cycle, so that only Python's garbage collector would free
        # the memory of an unused model.
        itself = weakref.ref(self)

        def call_model(*args: Any, **kwargs: Any) -> Any:
            model = itself()
            assert model is not None, "the engine calls a living model"
            return model(*args, **kwargs)

        def show(module: nn.Module) -> None:
            model = itself()
            if model is not None:
                super(ShardedModel, model).__setattr__("module", module)

        self.engine: Engine = self.declaration.engine(
            Setup(
                strategy=self.strategy,
                module=self.module,
                call=self._call,
                model=call_model,
                show=show,
                session=self._among or self._session,
                config=self.sharding_config,
                backend_name=self.backend_name,
                options=self._options,
                several=self._among is not None,
            )
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises PreconditionError if `module` is replaced after the engine has
        been created."""
        if name == "module" and "engine" in self.__dict__:
            raise PreconditionError(
                "model.module cannot be replaced, because Shoal trains the module passed to "
                "as_distributed; set its values with model.with_parameters(values), and compile "
                "it before as_distributed"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_forward_methods", ()):
            return functools.partial(
                self._through, self.engine.entering(name, frozen=self._is_frozen)
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # ------------------------------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass. In training mode, the backward pass also reduces the
        gradients across ranks, unless the strategy does so later."""
        return self._through(
            self.engine.forward_frozen if self._is_frozen else self.engine.forward, *args, **kwargs
        )

    @property
    def _is_frozen(self) -> bool:
        """True if this is one of several models, and gradients only flow through it to another
        model."""
        return self._among is not None and self._among.frozen and torch.is_grad_enabled()

    def register_forward_method(self, name: str) -> None:
        """Makes `model.NAME(...)` a forward pass like `model(...)`. Use this for a method of the
        module that uses parameters and is not called by `forward`, such as `encode` or `loss`. Must
        be called once on every rank, after `as_distributed`; from then on, call `model.NAME(...)`
        instead of `model.module.NAME(...)`. Required with `zero3`, `fsdp` and `hsdp`, because a
        rank has the full parameters only during passes. Forward hooks of the module itself do not
        run. (FSDP2 has `register_fsdp_forward_method` for the same purpose.)

        Raises:
            ConfigurationError: the module has no such method, `ShardedModel` already has a method
                of that name, or the strategy splits layers.
        """
        if hasattr(type(self), name):
            raise ConfigurationError(
                f"register_forward_method({name!r}): ShardedModel already has a method of that "
                "name; choose another name"
            )
        if not callable(getattr(self.module, name, None)) or isinstance(
            getattr(self.module, name), nn.Module
        ):
            raise ConfigurationError(
                f"register_forward_method({name!r}): {type(self.module).__name__} has no method of "
                "that name"
            )
        self.engine.check_forward_method(name)
        self._forward_methods.add(name)

    def _through(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a pass by calling `call`, a method of the engine. Records the pass's inputs, so that
        they can be compared across ranks."""
        if self.training and torch.is_grad_enabled():
            if in_function_transform():
                raise ConfigurationError(
                    "the distributed model is called inside a transform of torch.func (grad, vmap, "
                    "jvp, ...), whose gradients Shoal cannot reduce; compute the loss outside of "
                    "the transform and call loss.backward(), or apply the transform inside the "
                    "module's forward()"
                )
            self._session.lifecycle.note_inputs(args, kwargs)
        else:
            self._session.lifecycle.note_evaluated(args, kwargs)
        output = call(*args, **kwargs)
        if self._among is not None and torch.is_grad_enabled():
            self._among.refuse_stale(output)
        return output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module's forward pass in place, like `torch.nn.Module.compile`.
        `torch.compile(model)` has the same effect, but returns a compiled model. Neither compiles
        Shoal's own code."""
        self.module.compile(*args, **kwargs)

    def train_step(
        self, inputs: Any, targets: Any = None, loss_fn: Loss | None = None
    ) -> torch.Tensor:
        """Runs the forward and backward passes and reduces the gradients across ranks. Returns the
        loss averaged over the global batch, which is the same on every rank.

        If `inputs` is a mapping, its items are passed as keyword arguments; the items of a tuple
        are passed as positional arguments. Without `loss_fn`, the output's `.loss` is used. In
        `loader.steps()`, `inputs` and `targets` are a micro-batch, and its loss is returned. Under
        local_sgd and async_sgd, whose ranks do not communicate in each step, returns the loss of
        this rank's samples.
        """
        self._session.lifecycle.note_inputs(inputs, targets)
        return self.engine.train_step(inputs, targets, loss_fn)

    def predict(self, inputs: Any) -> Any:
        """Runs the forward pass in evaluation mode, without gradients. Restores each module's mode
        afterwards. Must be called on all ranks of a replica, with the same inputs; all receive the
        same outputs."""
        self._session.lifecycle.note_evaluated(inputs)
        return self.engine.predict(inputs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own `generate`, as in transformers models. Under `tensor`, it must be
        called on all ranks of a replica, with the same inputs; all receive the same tokens, even if
        they are sampled. If a rank fails during a call outside of `shoal.evaluate`, the other
        ranks' scripts stop.

        Raises:
            AttributeError: the module has no `generate`.
            PreconditionError: the strategy gathers parameters for each pass, so a rank whose text
                is finished early would leave the others waiting. Generate with a copy instead: call
                `model.clone().generate(...)` on every rank.
        """
        return self.engine.generate(*args, **kwargs)

    def loss_parallel(self) -> AbstractContextManager[None]:
        """Returns the context in which a script must compute the loss if it does so itself and the
        model was created with `loss_parallel=True`: the logits of such a model are split along the
        vocabulary. `train_step` enters this context itself. For all other models, the context has
        no effect."""
        return self.engine.loss_parallel()

    def synchronize_gradients(self) -> None:
        """Reduces the gradients across ranks. Needed only with `auto_sync_gradients=False`;
        otherwise the backward pass does this. Gradients that are already reduced are not reduced
        again."""
        self.engine.synchronize_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `optimizer.zero_grad()` does. Must be called on every rank."""
        self.engine.check_zero_grad(set_to_none=set_to_none)
        self.engine.zero_grad(lambda: super(ShardedModel, self).zero_grad(set_to_none))

    def get_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the current gradients by parameter name. If gradients are sharded across ranks,
        returns only the gradients of `local_shard`. Parameters without a gradient are omitted."""
        return self.engine.get_gradients()

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replaces the gradients of the named parameters.

        Raises:
            ConfigurationError: a name is unknown, a shape does not match, or gradients are sharded
                across ranks. Nothing is changed.
        """
        self.engine.set_gradients(gradients)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients so that their total norm, over the parameters on all ranks, is at
        most `max_norm`. Returns the norm before scaling.

        Raises:
            ConfigurationError: gradients are sharded across ranks, and `norm_type` is not 2.
        """
        return self.engine.clip_grad_norm_(max_norm, norm_type)

    # ---------------------------------------------------------------------------------------- state

    @property
    def local_shard(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by name; with a strategy that shards parameters, only this rank's
        shards of them."""
        return self.engine.local_shard

    def gather_full_parameters(self) -> dict[str, torch.Tensor]:
        """Returns full copies of all parameters, keyed by the original module's names. Must be
        called on every rank."""
        return self.engine.gather_full_parameters()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns full copies of all parameters and buffers, keyed by the original module's names.
        With `rank0_only`, other ranks receive an empty dict. Must be called on every rank."""
        return self.engine.full_state_dict(rank0_only=rank0_only)

    def load_full(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads the result of `full_state_dict` from any strategy. Must be called on every rank,
        with the same tensors.

        Raises:
            CorruptDataError: names or shapes do not match the model. Nothing is changed.
        """
        self.engine.load_full(tensors)

    def with_parameters(
        self, parameters: torch.Tensor | Mapping[str, torch.Tensor]
    ) -> ShardedModel:
        """Sets the parameters' values from a flat vector of all parameters in order, or from a dict
        by name. Returns the model itself. Must be called on every rank, with the same values.

        Raises:
            ConfigurationError: a name, a shape or the number of elements does not match, or ranks
                passed different values. Nothing is changed.
        """
        self.engine.use_parameters(parameters)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's state dict, whose names begin with `module.`, as those of DDP do.
        Raises PreconditionError if this rank has only part of the values."""
        self.engine.check_values_here(
            "state_dict()",
            "call model.full_state_dict(), which returns the whole state with the original "
            "module's names",
        )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of this model, or one with the original module's names, as returned by
        `full_state_dict`. Must be called on every rank, with the same state dict. Raises
        PreconditionError if this rank has only part of the values."""
        self.engine.check_values_here(
            "load_state_dict()",
            "load the result of model.full_state_dict() with model.load_full(state), or a file "
            "with model.load_model(path)",
        )
        if not any(name.startswith("module.") for name in state_dict):
            return self.module.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Implements conversions of the module by `to`, `half`, `float`, `cuda` and similar
        methods. Raises PreconditionError if the parameters are already distributed across the
        ranks."""
        if not self.engine.check_conversion(fn):
            return self
        # torch's method is untyped
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def clone(self) -> nn.Module:
        """Returns a full copy of the model in its current state, to keep, evaluate or save. The
        copy does not take part in training. Must be called on every rank."""
        return self.engine.clone(
            lambda module: type(self)(
                module,
                self._session,
                self.sharding_config,
                backend=self.backend_name,
                **self._options,
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a clone, because AveragedModel and other moving averages deep-copy the model.
        Must be called on every rank."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises PreconditionError, because a model is bound to its process and cannot be
        pickled."""
        raise PreconditionError(
            f"a model with strategy={self.strategy!r} cannot be pickled (as torch.save(model) "
            "does); save model.full_state_dict() or model.clone(), or call "
            "model.save_model(path), on every rank"
        )

    # ---------------------------------------------------------------------------------------- files

    def serialize(self) -> bytes:
        """Returns the parameters, the buffers, and the strategy's name and layout as bytes. Must be
        called on every rank."""
        return self._dumped(self.full_state_dict())

    def _dumped(self, state: Mapping[str, Any]) -> bytes:
        structure, tensors = flatten(dict(state))
        return dump_tensors(tensors, {**self.get_model_metadata(), "structure": structure})

    def deserialize(self, data: bytes) -> None:
        """Loads the result of `serialize` from any strategy. Must be called on every rank, with the
        same bytes.

        Raises:
            CorruptDataError: the bytes are damaged, come from a different program or a newer
                release, or belong to a different model. Nothing is changed.
            ConfigurationError: ranks were given different bytes. Nothing is changed.
        """
        self.load_full(self.engine.agreed("deserialize", lambda: _loaded(*load_tensors(data))))

    def save_model(self, path: str | Path) -> None:
        """Writes `serialize()` to a file or to a URL (`s3://bucket/model.safetensors`), atomically,
        on the first rank that has the state. Must be called on every rank. Returns once the file
        exists.

        Raises:
            ConfigurationError: ranks passed different paths. Raised on all ranks.
            UnavailableError (FILE_NOT_WRITTEN): the first rank cannot write the file. Raised on all
                ranks.
        """
        target = str(path) if is_url(path) else local_path(path).absolute()
        state = self.full_state_dict()

        def write() -> str | None:
            return write_file(target, self._dumped(state)) if self._session.is_first else None

        def body(channel: Channel) -> str | None:
            named = [each.decode() for each in channel.exchange(str(path).encode())]
            check_same_place("save_model", "path", named)
            refused: str | None = json.loads(
                channel.exchange(json.dumps(on_first(channel, write)).encode())[0]
            )
            return refused

        refused = self._session.operation("save_model", body) if self.engine.is_trained else write()
        if refused is not None:
            raise UnavailableError(refused, reason="FILE_NOT_WRITTEN")

    def load_model(self, path: str | Path) -> None:
        """Loads a file or URL written by `save_model`. Every rank must be able to read it. Raises
        the same errors as `deserialize`."""
        self.load_full(self.engine.agreed("load_model", lambda: _loaded(*read_tensors(path))))

    def get_model_metadata(self) -> dict[str, Any]:
        """Returns a JSON-serializable description of the model and its layout."""
        whole, layout = self.engine.unsharded_parameters(), self.engine.layout()
        return {
            "strategy": self.strategy,
            "world_size": self._session.world_size,
            "module": type(self.module).__name__,
            "parameters": sum(math.prod(shape) for _, shape in whole),
            "parameter_bytes": sum(math.prod(shape) * p.element_size() for p, shape in whole),
            "trainable_parameters": sum(math.prod(shape) for p, shape in whole if p.requires_grad),
            **({"layout": layout} if layout else {}),
        }

    # ---------------------------------------------------------------------------------------- ranks

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's model replica."""
        return self.engine.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas."""
        return self.engine.data_parallel_size


def _loaded(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state from data written by `serialize`. Data written by earlier releases contains
    only tensors."""
    state: Mapping[str, Any] = (
        unflatten(metadata["structure"], tensors) if "structure" in metadata else tensors
    )
    return state
