"""A region: a context for a forward pass that mixes plain tensors and DTensors.

A region solves several problems of DTensors: torch functions do not accept them together with plain
tensors; functions without a sharding rule gather them; and on the CPU, dropout draws the same mask
on every shard, and scaled_dot_product_attention never returns. Within a region, a torch function
called with a DTensor is therefore handled as follows:

- Its plain tensors are converted to replicated DTensors. A tensor that needs a gradient is
  converted once for all layers of a block that use it, so that query, key and value together cost
  one all-reduce in the backward pass.
- If Shoal has a rule for the function, the rule is called instead.

Calls without a DTensor run unchanged. Regions can be nested; only the outermost region installs the
mode. A region is a torch function mode of the thread that opened it, and such modes are not active
during a backward pass. If activation checkpointing recomputes a module in a backward pass, the
module opens its own region, on the thread that autograd uses.

There are rules for torch functions whose implementation in DTensor is wrong, missing, or
communicates unnecessarily. A rule receives the region, the function and its arguments. Torch
functions called by a rule are not intercepted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from shoal_common.errors import ConfigurationError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from shoal_worker.tensor_parallel.attention import dropout, scaled_dot_product_attention
from shoal_worker.tensor_parallel.context import (
    DropoutRandomness,
    ParallelContext,
    holds_dtensor,
    placement_of,
    plain,
    split_dimension,
)
from shoal_worker.tensor_parallel.loss import vocabulary_parallel_cross_entropy
from shoal_worker.torch_internals import _StridedShard, function_modes


class Region(Protocol):
    """The part of an open region that rules use. Implemented by `RegionMode`."""

    @property
    def context(self) -> ParallelContext: ...
    def enter_all(self, value: Any) -> Any:
        """Converts all plain tensors in an argument to replicated DTensors."""
        ...


Rule = Callable[[Region, Callable[..., Any], Any, Any], Any]


def _dropout(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return dropout(region.context, *args, **_renamed(kwargs, train="training", input="activation"))


def _attention(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return scaled_dot_product_attention(
        region.context,
        *region.enter_all(args),
        **{name: region.enter_all(v) for name, v in kwargs.items()},
    )


def _cross_entropy(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    logits = args[0] if args else kwargs["input"]
    if isinstance(logits, DTensor) and split_dimension(logits) == (1 if logits.ndim > 1 else 0):
        return _split_cross_entropy(*args, **kwargs)
    return _gathered(region, func, args, kwargs)


def _split_cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the cross-entropy of split logits. Has the same parameters as F.cross_entropy, in
    the same order."""
    if size_average is not None or reduce is not None:
        raise ConfigurationError(
            "cross_entropy over split logits does not support size_average and reduce, which are "
            "deprecated in torch; use reduction="
        )
    return vocabulary_parallel_cross_entropy(
        input,
        plain(target),
        weight=plain(weight),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _gathered(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the function on the full tensors, which gives the same result on every rank."""
    return func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})


def _refused(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    split = [
        a
        for a in (*args, *kwargs.values())
        if isinstance(a, DTensor) and not placement_of(a).is_replicate()
    ]
    if split:
        raise ConfigurationError(
            f"{getattr(func, '__name__', func)} draws random numbers for an activation of shape "
            f"{tuple(split[0].shape)} that is split over the tensor-parallel ranks, which is "
            'supported only for dropout; give the surrounding layers the style "replicate"'
        )
    return _gathered(region, func, args, kwargs)


def _split_parts(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Splits a packed output (query | key | value) into its parts, without communication. Each rank
    has a piece of every part."""
    tensor, sections = (
        args[0],
        args[1]
        if len(args) > 1
        else kwargs.get("split_size_or_sections", kwargs.get("chunks", kwargs.get("split_size"))),
    )
    dimension = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    placement = placement_of(tensor) if isinstance(tensor, DTensor) else None
    if isinstance(placement, _StridedShard) and dimension % tensor.ndim == placement.dim:
        part = tensor.shape[placement.dim] // placement.split_factor
        wanted = placement.split_factor if func in _CHUNKS else part
        equal = (
            list(sections) == [part] * placement.split_factor
            if isinstance(sections, list | tuple)
            else sections == wanted
        )
        if equal:
            return tensor.unflatten(placement.dim, (placement.split_factor, part)).unbind(
                placement.dim
            )
    return func(*args, **kwargs)


def _slice_part(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Implements indexing of a packed output. If the index selects one of its parts, as in
    `qkv[..., :n]`, needs no communication."""
    tensor, index = args
    placement = placement_of(tensor) if isinstance(tensor, DTensor) else None
    if (
        isinstance(placement, _StridedShard)
        and placement.dim == tensor.ndim - 1
        and isinstance(index, tuple)
        and len(index) > 1
    ):
        *before, last = index
        part = tensor.shape[-1] // placement.split_factor
        if all(i is Ellipsis or i == slice(None) for i in before) and isinstance(last, slice):
            start, stop, step = last.indices(tensor.shape[-1])
            if (
                step == 1
                and start % part == 0
                and stop == start + part
                and (Ellipsis in before or len(before) == tensor.ndim - 1)
            ):
                return tensor.unflatten(-1, (placement.split_factor, part)).select(
                    -2, start // part
                )
    return func(region.enter_all(tensor), region.enter_all(index))


def _concatenated(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Implements torch.cat, and ignores empty tensors of shape [0], as torch does. Key and value
    caches initially contain such tensors, but DTensor would try to split them along a dimension
    that they do not have."""
    tensors, *rest = args if args else (kwargs["tensors"],)
    kwargs = {name: value for name, value in kwargs.items() if name != "tensors"}
    kept = [t for t in tensors if t.shape != (0,)]
    return func(region.enter_all(kept or list(tensors)), *rest, **kwargs)


def _renamed(arguments: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in arguments.items()}


_CHUNKS = (torch.chunk, torch.Tensor.chunk)

RULES: dict[Any, Rule] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _concatenated),
    torch.Tensor.__getitem__: _slice_part,
    **dict.fromkeys((torch.split, torch.Tensor.split, *_CHUNKS), _split_parts),
    # Functions that DTensor does not support, that update buffers in place, or that call other
    # functions without this mode.
    **dict.fromkeys(
        (
            F.batch_norm, F.instance_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d,
            F.embedding_bag, F.interpolate,
            F.multi_head_attention_forward, F.nll_loss,
        ),
        _gathered,
    ),
    **dict.fromkeys(
        (
            F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
            F.rrelu, F.gumbel_softmax,
            torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.rand_like,
            torch.randn_like, torch.randint_like,
            torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.random_,
            torch.Tensor.exponential_, torch.multinomial,
        ),
        _refused,
    ),
}  # fmt: skip
"""Rules by torch function, as passed to `__torch_function__`."""


class RegionMode(TorchFunctionMode):
    """Torch function mode installed by `region`. May be used by only one thread."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context
        self.entered: list[dict[tuple[int, int], tuple[torch.Tensor, DTensor]]] = [{}]
        """Converted tensors of each open region, by id and version of the original tensor. The
        original is kept alive, so that its id is not reused."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not holds_dtensor(args) and not holds_dtensor(tuple(kwargs.values())):
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        return func(
            *self.enter_all(args), **{name: self.enter_all(value) for name, value in kwargs.items()}
        )

    def enter(self, tensor: torch.Tensor) -> DTensor:
        """Returns the tensor as a replicated DTensor, for use as the input of a tensor-parallel
        layer."""
        if isinstance(tensor, DTensor) and tensor.placements == (Replicate(),):
            return tensor
        if not isinstance(tensor, DTensor) and not (
            tensor.requires_grad and torch.is_grad_enabled()
        ):
            return self._turned(tensor)  # needs no communication, in either direction
        key = (id(tensor), 0 if tensor.is_inference() else tensor._version)
        found = self.entered[-1].get(key)
        if found is None:
            found = self.entered[-1][key] = (tensor, self._turned(tensor))
        return found[1]

    def enter_all(self, value: Any) -> Any:
        """Converts all plain tensors in an argument, including lists and tuples, to replicated
        DTensors."""
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, DTensor) else self.enter(value)
        if isinstance(value, list | tuple) and any(
            isinstance(v, torch.Tensor | list | tuple) for v in value
        ):
            turned = [self.enter_all(v) for v in value]
            return turned if isinstance(value, list) else tuple(turned)
        return value

    def _turned(self, tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor.redistribute(placements=[Replicate()])
        return self.context.replicated(tensor)


@contextlib.contextmanager
def region(context: ParallelContext, *, leaf: bool = False) -> Iterator[RegionMode]:
    """Opens a region on this thread. If a region with the same mesh is already open, uses it, but
    with this `context`.

    `leaf`: True to reuse tensors that the surrounding region has already converted.
    """
    outer = next(
        (mode for mode in reversed(function_modes()) if isinstance(mode, RegionMode)), None
    )
    if outer is not None and outer.context.mesh is context.mesh:
        around = outer.context
        outer.context = context  # a block of a model may run within the region of a loss
        if not leaf:
            outer.entered.append({})
        try:
            yield outer
        finally:
            outer.context = around
            if not leaf:
                outer.entered.pop()
        return
    mode = RegionMode(context)
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # In inference mode DTensor gives some views (flatten, unflatten) the shape of the local
            # tensor.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        yield mode


@contextlib.contextmanager
def loss_parallel(mesh: DeviceMesh) -> Iterator[None]:
    """Context in which F.cross_entropy and nn.CrossEntropyLoss accept logits that are split along
    the vocabulary. Other logits are unaffected.

    Needed only if the plan has `loss_parallel=True` and the loss is computed outside of the model.
    The backward pass may run outside of the context.
    """
    with region(
        ParallelContext(mesh, sequence_dimension=None, dropout=DropoutRandomness.PER_SHARD)
    ):
        yield
