"""Torch functions that a region runs in its own way, since DTensor's is wrong, missing or needs communication that can be spared.

A rule gets the region, the function and its arguments; torch functions called inside a rule see no mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from shoal_common.errors import ConfigurationError
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shoal_worker.tensor_parallel.attention import scaled_dot_product_attention
from shoal_worker.tensor_parallel.context import ParallelContext, placement_of, plain, split_dimension
from shoal_worker.tensor_parallel.dropout import dropout
from shoal_worker.tensor_parallel.loss import vocabulary_parallel_cross_entropy


class Region(Protocol):
    """The scope in which a rule runs (`region.RegionMode`)."""

    @property
    def context(self) -> ParallelContext: ...
    def enter_all(self, value: Any) -> Any:
        """Turns the plain tensors in an argument into replicated DTensors."""
        ...


Rule = Callable[[Region, Callable[..., Any], Any, Any], Any]


def _dropout(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return dropout(region.context, *args, **_renamed(kwargs, train="training", input="activation"))


def _attention(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return scaled_dot_product_attention(
        region.context, *region.enter_all(args), **{name: region.enter_all(v) for name, v in kwargs.items()}
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
    """With F.cross_entropy's parameters, in its order."""
    if size_average is not None or reduce is not None:
        raise ConfigurationError("cross_entropy over split logits: size_average and reduce are deprecated in torch; use reduction=")
    return vocabulary_parallel_cross_entropy(
        input,
        plain(target),
        weight=plain(weight),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _gathered(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """On the whole tensors, by every rank alike."""
    return func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})


def _refused(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    split = [a for a in (*args, *kwargs.values()) if isinstance(a, DTensor) and not placement_of(a).is_replicate()]
    if split:
        raise ConfigurationError(
            f"{getattr(func, '__name__', func)} draws random numbers for an activation of shape {tuple(split[0].shape)} that is split over "
            'the tensor-parallel ranks, which is right only for dropout; give the layers around it the style "replicate"'
        )
    return _gathered(region, func, args, kwargs)


def _split_parts(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Takes a packed output apart (query | key | value), of which each rank holds a piece of every part: without communication."""
    tensor, sections = (
        args[0],
        args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("chunks", kwargs.get("split_size"))),
    )
    dimension = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    placement = placement_of(tensor) if isinstance(tensor, DTensor) else None
    if isinstance(placement, _StridedShard) and dimension % tensor.ndim == placement.dim:
        part = tensor.shape[placement.dim] // placement.split_factor
        wanted = placement.split_factor if func in _CHUNKS else part
        equal = list(sections) == [part] * placement.split_factor if isinstance(sections, list | tuple) else sections == wanted
        if equal:
            return tensor.unflatten(placement.dim, (placement.split_factor, part)).unbind(placement.dim)
    return func(*args, **kwargs)


def _slice_part(region: Region, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same for `qkv[..., :n]`."""
    tensor, index = args
    placement = placement_of(tensor) if isinstance(tensor, DTensor) else None
    if isinstance(placement, _StridedShard) and placement.dim == tensor.ndim - 1 and isinstance(index, tuple) and len(index) > 1:
        *before, last = index
        part = tensor.shape[-1] // placement.split_factor
        if all(i is Ellipsis or i == slice(None) for i in before) and isinstance(last, slice):
            start, stop, step = last.indices(tensor.shape[-1])
            if step == 1 and start % part == 0 and stop == start + part and (Ellipsis in before or len(before) == tensor.ndim - 1):
                return tensor.unflatten(-1, (placement.split_factor, part)).select(-2, start // part)
    return func(region.enter_all(tensor), region.enter_all(index))


def _renamed(arguments: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in arguments.items()}


_CHUNKS = (torch.chunk, torch.Tensor.chunk)

RULES: dict[Any, Rule] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _slice_part,
    **dict.fromkeys((torch.split, torch.Tensor.split, *_CHUNKS), _split_parts),
    # Not in DTensor, or with buffers that are updated in place, or made of functions that would not see the mode.
    **dict.fromkeys(
        (
            F.batch_norm, F.instance_norm, F.group_norm, F.conv1d, F.conv2d, F.conv3d, F.embedding_bag, F.interpolate,
            F.multi_head_attention_forward, F.nll_loss,
        ),
        _gathered,
    ),
    **dict.fromkeys(
        (
            F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu, F.gumbel_softmax,
            torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.rand_like, torch.randn_like, torch.randint_like,
            torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.random_, torch.Tensor.exponential_, torch.multinomial,
        ),
        _refused,
    ),
}  # fmt: skip
"""By the function as torch's override protocol names it."""
