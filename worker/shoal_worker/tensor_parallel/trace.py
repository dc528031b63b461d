"""Finds attention and MLP blocks where names do not tell: from the data flow of one forward pass on meta, which computes nothing.

Two patterns are known: linear layers whose outputs reach one other linear layer through elementwise functions only, and linear layers whose
outputs reach scaled_dot_product_attention as query, key and value, and the layer that takes its output. Attention that is spelled out as
matmul and softmax has no mark to know it by: that needs names, or a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal_worker.tensor_parallel.blocks import Block, LinearLike, linear_like

_ELEMENTWISE = frozenset(
    (
        "relu", "relu_", "gelu", "silu", "silu_", "mish", "tanh", "sigmoid", "leaky_relu", "elu", "selu", "softplus", "hardswish",
        "hardtanh", "hardsigmoid", "logsigmoid", "relu6", "dropout", "mul", "mul_", "__mul__", "__imul__", "__rmul__",
        "add", "add_", "__add__", "__iadd__", "__radd__", "sub", "__sub__", "div", "__truediv__", "neg", "abs", "pow", "square", "sqrt",
        "exp", "erf", "clamp", "to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone",
    )
)  # fmt: skip
"""Functions by name, which give each element of the output from that of the inputs."""


@dataclass(frozen=True)
class _Flow:
    """What a tensor is made of, back to the nearest linear layers."""

    layers: frozenset[str] = frozenset()
    elementwise: bool = True
    """Only elementwise functions lie between."""
    attention: int | None = None
    """The attention call that it is the output of."""


def trace_blocks(model: nn.Module, inputs: Any) -> list[Block]:
    """Runs `model(*inputs)` (a mapping: `model(**inputs)`) on the meta device.

    Raises:
        ConfigurationError: the model's code cannot run there.
    """
    recorder = _Recorder(model)
    tensors = {name: t.detach().to("meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
    by_layer = {id(tensors[name]): path for path, name in recorder.weights.items()}
    recorder.by_weight = by_layer
    arguments = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs)
    positional, named = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    try:
        with torch.no_grad(), recorder:
            torch.func.functional_call(model, tensors, positional, named)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's own code runs here
        raise ConfigurationError(
            f"the model cannot be traced on the meta device ({type(error).__name__}: {error}), so its blocks cannot be "
            "told from its data flow; give a plan for them"
        ) from error
    return recorder.blocks()


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers: dict[str, LinearLike] = {p: layer for p, m in model.named_modules() if (layer := linear_like(m)) is not None}
        self.weights = {path: f"{path}.weight" if path else "weight" for path in self.layers}
        self.by_weight: dict[int, str] = {}
        self._flows: dict[int, tuple[torch.Tensor, _Flow]] = {}
        self._into: dict[str, _Flow] = {}
        self._elsewhere: set[str] = set()
        self._attentions: list[tuple[frozenset[str], int, int]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        flows = [self._flow(t) for t in tensors]
        path = next((self.by_weight[id(t)] for t in tensors if id(t) in self.by_weight), None)
        if path is not None:
            # A Conv1D views its input first: the flow into it is that of its largest input.
            self._into[path] = next((f for f in flows if f.layers or f.attention is not None), _Flow(elementwise=False))
            self._set(result, _Flow(frozenset({path})))
        elif func is F.scaled_dot_product_attention:
            query, key, value = (self._flow(t) for t in tensors[:3])
            self._attentions.append((query.layers | key.layers | value.layers, tensors[0].shape[-3], tensors[1].shape[-3]))
            self._set(result, _Flow(attention=len(self._attentions) - 1))
        elif any(f.layers or f.attention is not None for f in flows):
            self._set(result, self._combined(func, tensors, flows, result))
        return result

    def _combined(self, func: Callable[..., Any], tensors: list[torch.Tensor], flows: list[_Flow], result: Any) -> _Flow:
        layers = frozenset[str]().union(*(f.layers for f in flows))
        calls = {f.attention for f in flows if f.attention is not None}
        same = isinstance(result, torch.Tensor) and all(
            not f.layers or t.shape == result.shape for t, f in zip(tensors, flows, strict=True)
        )
        fed = all(f.layers or t.numel() == 1 or t.shape[-1] == 1 for t, f in zip(tensors, flows, strict=True))
        elementwise = getattr(func, "__name__", "") in _ELEMENTWISE and same and fed and all(f.elementwise for f in flows)
        if not elementwise and isinstance(result, torch.Tensor):
            self._elsewhere |= layers if not _keeps_elements(func) else set()
        return _Flow(layers, elementwise and not calls, calls.pop() if len(calls) == 1 and not layers else None)

    def _flow(self, tensor: torch.Tensor) -> _Flow:
        return self._flows.get(id(tensor), (tensor, _Flow()))[1]

    def _set(self, result: Any, flow: _Flow) -> None:
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._flows[id(tensor)] = (tensor, flow)

    def blocks(self) -> list[Block]:
        found: list[Block] = []
        for row, flow in self._into.items():
            if flow.attention is not None:
                block = self._attention(row, *self._attentions[flow.attention])
            elif flow.layers and flow.elementwise:
                block = self._mlp(row, flow.layers)
            else:
                block = None
            taken = {path for b in found for path in (*b.columns, b.row)}
            if block is not None and not taken & {*block.columns, block.row}:
                found.append(block)
        return found

    def _attention(self, row: str, columns: frozenset[str], heads: int, key_heads: int) -> Block | None:
        if not columns or row in columns or len(columns) not in (1, 3):
            return None
        width = self.layers[row].in_features
        packed = len(columns) == 1
        if packed and self.layers[next(iter(columns))].out_features != 3 * width:
            return None
        ordered = [p for p in self.layers if p in columns]
        return Block(
            path=_common([*ordered, row]),
            kind="attention",
            columns=dict.fromkeys(ordered, 3 if packed else 1),
            row=row,
            heads=heads,
            key_heads=key_heads,
            reason=f"traced: {', '.join(ordered)} -> attention -> {row}",
        )

    def _mlp(self, row: str, columns: frozenset[str]) -> Block | None:
        width = self.layers[row].in_features
        if row in columns or columns & self._elsewhere or any(self.layers[c].out_features != width for c in columns):
            return None
        ordered = [p for p in self.layers if p in columns]
        return Block(
            path=_common([*ordered, row]),
            kind="mlp",
            columns=dict.fromkeys(ordered, 1),
            row=row,
            reason=f"traced: {', '.join(ordered)} -> elementwise -> {row}",
        )


def _keeps_elements(func: Callable[..., Any]) -> bool:
    """Functions that look at a tensor, or name its elements anew, without using them."""
    return getattr(func, "__name__", "") in (
        "__get__",
        "size",
        "dim",
        "view",
        "reshape",
        "transpose",
        "split",
        "chunk",
        "permute",
        "unbind",
        "flatten",
    )


def _common(paths: list[str]) -> str:
    """The module that contains all of them."""
    split = [p.split(".")[:-1] for p in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
