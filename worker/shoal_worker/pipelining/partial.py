"""The part of a model that one stage runs.

For a chain (split.py), this part is a sequence of blocks. A layered model (split.py) keeps its own
forward code. Each stage runs all of that code on a copy of the model whose parameters are `Absent`
if they belong to other stages:

- Modules before the layers return a `Placeholder` of the right shape, which is determined by
  running the modules on the meta device.
- The layers of earlier stages return the placeholder unchanged. The stage's own first layer uses
  the received value instead.
- The forward pass ends where the next stage's part begins.

Masks, position tables and other values that a model computes from its inputs alone are therefore
recomputed on each stage instead of sent. Apart from the tensor that is passed from layer to layer,
the model must not use other stages' values; otherwise an error is raised, so the result is never
silently wrong.

A stage runs only one forward pass at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.pipelining.micro_batches import Border, Call, tensors_in
from shoal_worker.pipelining.split import Form, Split, named_tensors
from shoal_worker.torch_internals import DisableTorchFunctionSubclass

# ------------------------------------------------------------------------------------- placeholders
#
# Tensors that represent data that only another stage has. A `Placeholder` represents a value: it
# has the right shape, dtype and device, but arbitrary contents. Results computed from a placeholder
# are placeholders too, so a result that depends on another stage's data is detected and rejected. A
# new tensor that only uses the shape (zeros_like, new_full) is not a placeholder. An `Absent`
# represents a parameter, takes no memory, and cannot be used in computations. A tensor on the meta
# device would not be sufficient: in torch 2.13, the matrix product of a CPU tensor and a meta
# tensor does not raise an error, but returns a CPU tensor with arbitrary values.

_FRESH: Final = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.empty_like,
        torch.rand_like,
        torch.randn_like,
        torch.Tensor.new_zeros,
        torch.Tensor.new_ones,
        torch.Tensor.new_full,
        torch.Tensor.new_empty,
        torch.Tensor.new_tensor,
    }
)
_READS: Final = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.equal,
        torch.allclose,
        torch.Tensor.equal,
        torch.Tensor.allclose,
    }
)

_LOOKS: Final = frozenset(
    {
        "__get__",
        "__set__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_floating_point",
        "is_complex",
    }
    | {"detach", "requires_grad_", "t", "__repr__", "__len__", "__hash__", "data_ptr", "get_device"}
)
"""Operations permitted on an `Absent`."""


class Placeholder(torch.Tensor):
    """Stands for a value that only another stage has; see the comment above."""

    received: torch.Tensor | None = None
    """The received value that has replaced the placeholder, if any. Used again if activation
    checkpointing reruns the forward pass."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            raise ConfigurationError(
                "the model's forward branches on values that exist only on another pipeline "
                f"stage ({getattr(func, '__name__', func)}); branch only on its inputs, or give "
                "the model a method pipeline_blocks()"
            )
        if func in _FRESH:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # torch's method is untyped
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Absent(torch.Tensor):
    """Stands for a parameter of another stage; see the comment above. Its attributes can be read.
    Transposing or detaching it returns an `Absent` too."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _LOOKS:
            raise ConfigurationError(
                f"the model's forward uses ({name}) parameters of a module on another pipeline "
                "stage without calling that module; use a module for this computation (such as a "
                "tied nn.Linear head), or give the model a method pipeline_blocks()"
            )
        # torch's method is untyped
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def absent_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an `Absent` that stands for a parameter or buffer."""
    with DisableTorchFunctionSubclass():
        # does not return a DTensor
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(Absent)
    return (
        nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else empty
    )


def placeholder_like(value: torch.Tensor, device: torch.device) -> Placeholder:
    """Returns a placeholder on `device` with the shape and dtype of `value`, which may be on the
    meta device."""
    with DisableTorchFunctionSubclass():
        return torch.zeros(value.shape, dtype=value.dtype, device=device).as_subclass(Placeholder)


# ----------------------------------------------------------------------------------- a stage's part

Inside = Callable[[Callable[[], Any], bool], Any]
"""Function that runs part of the model's forward pass inside a wrapper and returns the result. Its
first argument is a function that runs the part; its second argument is True for the last part."""


def _as_it_is(run: Callable[[], Any], _: bool) -> Any:
    return run()


class PartialModel(nn.Module):
    """One stage's part of a model. Shares its parameters and buffers with the original model."""

    _modes: Sequence[tuple[nn.Module, nn.Module]]
    """Pairs of a module of this part and the module of the original model that determines its
    training mode."""

    def forward(self, received: Border | None, call: Call) -> Any:
        """Runs the stage. Returns the input of the next stage as a `Border` or, on the last stage,
        the model's output. `received`: the previous stage's output; None on the first stage."""
        raise NotImplementedError

    @functools.cached_property
    def held_parameters(self) -> list[nn.Parameter]:
        """The parameters of this stage."""
        return [p for p in self.parameters() if not p.is_meta]

    def follow_modes(self) -> None:
        """Copies the training mode of each module from the corresponding module of the original
        model."""
        for mine, original in self._modes:
            if mine.training != original.training:
                # setting a module's attribute is slow, so it is avoided if nothing changes
                mine.training = original.training


def partial_model(
    module: nn.Module,
    split: Split,
    stage: int,
    plain: Callable[[nn.Module], None] | None = None,
    inside: Inside | None = None,
) -> PartialModel:
    """Returns the part of `module` that one stage runs. It shares the tensors of `module`. Modules
    of other stages may be on the meta device.

    Args:
        plain: converts a module of another stage, so that it can be run to determine the shape of
            its output; None: no conversion is needed.
        inside: wrapper in which the blocks of a chain are run, for models that need to do something
            before or after their forward pass; None: no wrapper.

    Raises:
        ConfigurationError: a layered model cannot be copied.
    """
    plan = split.stages[stage]
    if split.blocks.form is Form.CHAIN:
        blocks = [(name, module.get_submodule(name)) for name in plan.modules]
        return _ChainPart(
            module, blocks, last=stage == len(split.stages) - 1, inside=inside or _as_it_is
        )
    try:
        return _LayeredPart(module, split, stage, plain or (lambda _: None), inside or _as_it_is)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), but each pipeline stage needs a "
            "copy; implement __deepcopy__, or give the model a method pipeline_blocks()"
        ) from error


class _ChainPart(PartialModel):
    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        last: bool,
        inside: Inside,
    ) -> None:
        super().__init__()
        self._modes = [(self, module)]  # the blocks are modules of the model itself
        self._inside = inside
        self._names = [name for name, _ in blocks]
        self.blocks = nn.ModuleList(module for _, module in blocks)
        self._is_last = last

    def forward(self, received: Border | None, call: Call) -> Any:
        value = self._inside(lambda: self._pass(received, call), self._is_last)
        return value if self._is_last else Border.of(value, self._names[-1])

    def _pass(self, received: Border | None, call: Call) -> Any:
        blocks = list(self.blocks)
        value: Any
        if received is None:
            value, blocks = blocks[0](*call.args, **call.kwargs), blocks[1:]
        else:
            value = received.value()
        for block in blocks:
            value = block(value)
        return value


class _StageEnds(BaseException):
    """Raised inside the model's forward pass where the next stage begins, to end this stage's pass.
    Not a subclass of Exception, so that `except Exception` in the model does not catch it."""

    def __init__(self, border: Border) -> None:
        self.border = border


@dataclass
class _Run:
    """One forward pass of a stage."""

    received: Border | None
    """The received value; None once the stage's first layer has used it."""


@dataclass
class _State:
    """Mutable state of a stage's forward passes. It is a separate object, because setting a
    module's attribute is slow."""

    run: _Run | None = None
    wrapped: int = 0
    given: int = 0
    """Elements of the tuples that the layers return; see `Border.given`."""


class _LayeredPart(PartialModel):
    def __init__(
        self,
        module: nn.Module,
        split: Split,
        stage: int,
        plain: Callable[[nn.Module], None],
        inside: Inside,
    ) -> None:
        super().__init__()
        self._inside = inside
        blocks, plan = split.blocks, split.stages[stage]
        layers = blocks.blocks[blocks.has_embedding : len(blocks.blocks) - blocks.has_head]
        self._is_last = plan.last == len(blocks.blocks)
        self._state = _State()
        own = set(plan.modules)
        others = [name for block in blocks.blocks for name in block.names if name not in own]
        self.shell = _copy(module, split, stage, others, plain)
        self._modes = [(self, module), *zip(self.shell.modules(), module.modules(), strict=True)]
        self._device = next(
            (t.device for t in self.shell.parameters() if not t.is_meta), torch.device("cpu")
        )
        first, end = plan.first - blocks.has_embedding, plan.last - blocks.has_embedding
        for index, layer in enumerate(layers):
            self._arrange_layer(
                layer.name,
                index,
                first if stage > 0 else -1,
                end if not self._is_last else len(layers) + 1,
                len(layers),
            )
        outside = {name for block in blocks.blocks for name in block.names} - {
            layer.name for layer in layers
        }
        for name in outside - own:
            self._stand_in(name)

    def forward(self, received: Border | None, call: Call) -> Any:
        self._state.run = _Run(received)
        try:
            output = self.shell(*call.args, **call.kwargs)
        except _StageEnds as ends:
            self._check_values(ends.border.tensors)
            tensors = ends.border.tensors
            return replace(ends.border, tensors=self._inside(lambda: tensors, False))
        finally:
            run, self._state.run = self._state.run, None
        if not self._is_last:
            raise ConfigurationError(
                "the model's forward returned without running all of its layers, so the layers "
                "cannot be divided into pipeline stages; run all layers, or give the model a "
                "method pipeline_blocks()"
            )
        self._check_values(tensors_in(output))
        if run.received is not None:
            raise ConfigurationError(
                "the model's forward did not run the layers of this pipeline stage; run all "
                "layers in their order, or give the model a method pipeline_blocks()"
            )
        return output

    def _check_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises ConfigurationError if a value that this stage passes on was computed from a
        placeholder."""
        for one in tensors:
            if isinstance(one, Placeholder):
                raise ConfigurationError(
                    "the model's output depends on values of earlier pipeline stages other than "
                    "the tensor passed between layers (such as all hidden states, or a skip "
                    "connection around the layers); disable such outputs, or give the model a "
                    "method pipeline_blocks()"
                )

    # --------------------------------------------------------------------------------------- layers

    def _arrange_layer(self, name: str, index: int, first: int, end: int, layers: int) -> None:
        """Prepares one of the model's layers for this stage: layers of earlier stages are skipped,
        and the forward pass ends at the next stage's first layer. `first`: index of the layer that
        takes the value received from the previous stage; -1 in the first stage. `end`: index of the
        next stage's first layer."""
        layer = self.shell.get_submodule(name)
        original = layer.forward
        if max(first, 0) <= index < end:
            layer.register_forward_hook(self._record)
        if index < first:
            layer.forward = (
                self._entering_after() if index == first - 1 == layers - 1 else self._skipped
            )
        elif index == first:
            layer.forward = self._entering(name, original)
        elif index == end:
            layer.forward = self._ending
        if index == end - 1 == layers - 1:
            layer.forward = self._ending_after(layer.forward)

    def _skipped(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward method of a layer that belongs to an earlier stage. Computes
        nothing, and returns a placeholder for the layer's output."""
        received = self._running.received
        slot = _hidden_slot(args, kwargs)
        hidden = args[0] if slot is None else kwargs[slot]
        if received is None:
            raise ConfigurationError(
                "the model's forward runs a layer of an earlier pipeline stage after the first "
                "layer of this stage; run each layer once, in order, or give the model a method "
                "pipeline_blocks()"
            )
        if isinstance(hidden, torch.Tensor) and not isinstance(hidden, Placeholder):
            # the model's input, which every stage has
            hidden = placeholder_like(hidden, self._device)
        if not received.wrapped:
            return hidden
        others = (
            placeholder_like(hidden, self._device) if received.given >> i & 1 else None
            for i in range(1, received.wrapped)
        )
        return (hidden, *others)

    def _entering(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward method that replaces that of the stage's first layer. It uses the
        received value as the layer's input."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            slot = _hidden_slot(args, kwargs)
            stand_in = args[0] if slot is None else kwargs[slot]
            others = (
                [*args[1:], *kwargs.values()]
                if slot is None
                else [*args, *(v for k, v in kwargs.items() if k != slot)]
            )
            if any(isinstance(one, Placeholder) for one in tensors_in(others)):
                raise ConfigurationError(
                    f"layer {name!r} uses several results of earlier modules, not only its first "
                    "argument, so no pipeline stage can begin there; pass a single tensor "
                    "between layers, or give the model a method pipeline_blocks()"
                )
            value = self._take(name, stand_in)
            return (
                original(value, *args[1:], **kwargs)
                if slot is None
                else original(*args, **{**kwargs, slot: value})
            )

        return forward

    def _entering_after(self) -> Callable[..., Any]:
        """Returns the forward method that replaces that of the last layer, in a stage that consists
        only of modules after the layers. It returns the received value."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = self._skipped(*args, **kwargs)
            received = self._running.received
            assert received is not None
            self._running.received = None
            return (received.tensors[0], *output[1:]) if received.wrapped else received.tensors[0]

        return forward

    def _take(self, name: str, stand_in: Any) -> torch.Tensor:
        """Returns the received value, to replace `stand_in`, the placeholder that the layer `name`
        got as its input. If activation checkpointing runs the layer again, returns the same value
        again."""
        known = getattr(stand_in, "received", None)
        if known is not None:
            return known  # type: ignore[no-any-return]  # torch's attributes are untyped
        run = self._state.run
        if run is None or run.received is None or not isinstance(stand_in, Placeholder):
            raise ConfigurationError(
                f"no pipeline stage can begin with layer {name!r}: it is called twice, or its "
                "input was not returned by an earlier module, or reentrant checkpointing calls it "
                "again in the backward pass; use non-reentrant checkpointing, or give the model a "
                "method pipeline_blocks()"
            )
        stand_in.received = run.received.tensors[0]
        run.received = None
        return stand_in.received

    def _ending(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward method of the next stage's first layer: ends this stage's forward
        pass."""
        slot = _hidden_slot(args, kwargs)
        value = args[0] if slot is None else kwargs[slot]
        raise _StageEnds(
            Border(tensors=(value,), wrapped=self._state.wrapped, given=self._state.given)
        )

    def _ending_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward method that replaces that of the last layer, in a stage that is
        followed only by modules after the layers. It ends the stage's forward pass after the layer.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            raise _StageEnds(_output_border(output))

        return forward

    # -------------------------------------------------------------------- modules before the layers

    def _stand_in(self, name: str) -> None:
        """Makes a module of another stage return placeholders. Their shapes are determined from the
        module's inputs and cached, because most micro-batches have the same shapes."""
        module = self.shell.get_submodule(name)
        original = module.forward
        module.eval()
        known: tuple[Any, Any] = (None, None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            if self._running.received is None:
                raise ConfigurationError(
                    f"{name!r} belongs to another pipeline stage because of its position among "
                    "the model's submodules, but the model's forward runs it on this stage; "
                    "register the submodules in the order in which they run"
                )
            try:
                with torch.no_grad(), DisableTorchFunctionSubclass():
                    kind = (module.training, _kind(args), _kind(kwargs))
                    if kind != known[0]:
                        known = (
                            kind,
                            original(*_mapped(args, _shape_of), **_mapped(kwargs, _shape_of)),
                        )
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigurationError(
                    f"{name!r} is on another pipeline stage, and its output's shape cannot be "
                    f"computed here ({error}); give the model a method pipeline_blocks()"
                ) from error
            return _mapped(known[1], lambda one: placeholder_like(one, self._device))

        module.forward = forward

    @property
    def _running(self) -> _Run:
        run = self._state.run
        if run is None:
            raise ConfigurationError(
                "a layer of another pipeline stage was called outside of the model's forward; "
                "call layers only within forward"
            )
        return run

    def _record(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Records the structure of the layers' output: a tensor, or a tuple of a certain length."""
        border = _output_border(output)
        self._state.wrapped, self._state.given = border.wrapped, border.given


def _copy(
    module: nn.Module,
    split: Split,
    stage: int,
    others: Sequence[str],
    plain: Callable[[nn.Module], None],
) -> nn.Module:
    """Returns a copy of the model's modules. Tensors of this stage are shared with the original;
    tensors of the modules in `others` are `Absent`."""
    named = named_tensors(module)
    valueless = {id(tensor): absent_like(tensor) for tensor in named.values()}
    elsewhere: dict[int, Any] = {}
    for name in others:
        part = module.get_submodule(name)
        elsewhere[id(part)] = copy.deepcopy(part, dict(valueless))
        plain(elsewhere[id(part)])
    held = {id(tensor): tensor for name, tensor in named.items() if stage in split.placement[name]}
    return copy.deepcopy(module, {**valueless, **held, **elsewhere})


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns an uninitialized parameter or buffer of the same type and shape on a different
    device."""
    empty = torch.empty_like(tensor, device=device)
    return (
        nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else empty
    )


def _hidden_slot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns the name of the keyword argument through which a layer gets the previous layer's
    output: the first one that is a tensor. Returns None if the layer gets it as its first
    positional argument."""
    if args:
        return None
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return name
    raise ConfigurationError(
        "a layer of the model is called without a tensor argument, so the layers cannot be "
        "divided into pipeline stages; give the model a method pipeline_blocks()"
    )


def _output_border(output: Any) -> Border:
    if isinstance(output, torch.Tensor):
        return Border(tensors=(output,))
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        given = sum(1 << i for i, one in enumerate(output) if i > 0 and one is not None)
        return Border(tensors=(output[0],), wrapped=len(output), given=given)
    raise ConfigurationError(
        f"a layer of the model returned {type(output).__name__}; only a tensor, or a tuple that "
        "begins with one, can be passed between pipeline stages; give the model a method "
        "pipeline_blocks()"
    )


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _kind(value: Any) -> Any:
    """Returns a cache key for an input of a module. If two inputs have equal keys, the outputs have
    the same shapes. The key of a value of an unknown type is not equal to any other key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return [(key, _kind(one)) for key, one in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [_kind(one) for one in value]
    return (
        (type(value), value)
        if value is None or isinstance(value, bool | int | float | str)
        else object()
    )


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(one, change) for one in value)
    return value
