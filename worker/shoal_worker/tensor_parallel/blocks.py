"""Finds attention and MLP blocks in a model by the names and shapes of its modules. Recognizes the
names used in torch, Hugging Face (Llama, Mistral, GPT-2, BERT, T5, OPT, GPT-NeoX, ...), Meta's
Llama, nanoGPT and timm.

Modules are recognized as a block only if their shapes agree with their names. A wrong guess costs
communication but never gives a wrong result, because DTensor computes correctly regardless of how
layers are split (docs/explanation/mesh.md#tensor-parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal_worker.torch_internals import pytree

# ------------------------------------------------------------------------------------ linear layers
#
# Layers that multiply by a matrix, in either orientation: nn.Linear (out x in) and Hugging Face's
# Conv1D (in x out).


@dataclass(frozen=True)
class LinearLike:
    """Shape of a linear layer, or of a layer such as Conv1D that computes the same function."""

    in_features: int
    out_features: int
    output_dimension: int
    """Dimension of the weight that contains the output features: 0 for nn.Linear, 1 for Conv1D."""


_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def linear_like(module: nn.Module) -> LinearLike | None:
    """Returns the layer's shape; None if the module is not equivalent to a linear layer, or if a
    parametrization computes its weight."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return LinearLike(weight.shape[1], weight.shape[0], 0)
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == weight.shape[1]:
        return LinearLike(weight.shape[0], weight.shape[1], 1)
    return None


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that the module owns directly, the weight first."""
    own = [(name, p) for name, p in module._parameters.items() if p is not None]
    return sorted(own, key=lambda item: "weight" not in item[0])


def is_convolution(module: nn.Module) -> bool:
    """Returns whether a module is a torch convolution without groups that uses torch's own forward
    pass. Each output channel of such a convolution is computed from all input channels with weights
    of its own, so the convolution can be split by output channels. Subclasses may do more, such as
    standardizing the weight."""
    own = next((kind for kind in _CONVOLUTIONS if isinstance(module, kind)), None)
    if own is None or module.groups != 1 or "weight" not in module._parameters:
        return False
    kind: Any = type(module)
    return kind.forward is own.forward and kind._conv_forward is own._conv_forward


# ------------------------------------------------------------------------------------------- blocks

QUERY: Final[tuple[str, ...]] = (
    "q_proj",
    "query",
    "q",
    "wq",
    "to_q",
    "q_lin",
    "query_proj",
    "q_linear",
)
KEY: Final[tuple[str, ...]] = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj", "k_linear")
VALUE: Final[tuple[str, ...]] = (
    "v_proj",
    "value",
    "v",
    "wv",
    "to_v",
    "v_lin",
    "value_proj",
    "v_linear",
)
PACKED: Final[tuple[str, ...]] = (
    "c_attn",
    "qkv",
    "qkv_proj",
    "Wqkv",
    "to_qkv",
    "in_proj",
    "attn_qkv",
    "query_key_value",
)
PACKED_BY_HEAD: Final[tuple[str, ...]] = ("query_key_value",)
"""Names of layers whose output contains the query, key and value of the first head, followed by the
query, key and value of the second head, and so on. Such an output is split into contiguous ranges
of heads."""
OUTPUT: Final[tuple[str, ...]] = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "wo",
    "o",
    "out",
    "to_out",
    "to_out.0",
    "out_lin",
    "proj",
    "Wo",
    "output.dense",
    "out_linear",
)
UP: Final[tuple[str, ...]] = (
    "up_proj", "gate_proj", "c_fc", "fc1", "w1", "w3", "wi", "wi_0", "wi_1", "lin1", "linear1",
    "dense_h_to_4h", "fc_in", "up", "gate",
    "intermediate.dense", "intermediate_dense", "w_up", "w_gate",
)  # fmt: skip
UP_PACKED: Final[tuple[str, ...]] = ("gate_up_proj", "w12", "gate_up")
DOWN: Final[tuple[str, ...]] = (
    "down_proj",
    "c_proj",
    "fc2",
    "w2",
    "wo",
    "lin2",
    "linear2",
    "dense_4h_to_h",
    "fc_out",
    "down",
    "output.dense",
    "output_dense",
    "w_down",
)
HEADS: Final[tuple[str, ...]] = (
    "num_heads",
    "n_head",
    "n_heads",
    "num_attention_heads",
    "nhead",
    "heads",
    "n_local_heads",
)
KEY_HEADS: Final[tuple[str, ...]] = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "kv_heads",
    "n_local_kv_heads",
)
HEAD_SIZES: Final[tuple[str, ...]] = (
    "head_dim",
    "attention_head_size",
    "d_head",
    "dim_head",
    "head_size",
    "key_value_proj_dim",
    "d_kv",
)

_ELEMENTWISE_MODULES: Final = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU,
    nn.SELU, nn.CELU, nn.Softplus, nn.Softsign,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Block:
    """An attention or MLP block. Its first layers are split by output features. Its last layer
    takes their split outputs, and sums its own output across ranks."""

    path: str
    """Path of the module that contains all of the block's layers."""
    kind: str
    """"attention" or "mlp"."""
    columns: Mapping[str, int]
    """The block's first layers, by path. The value is the number of parts in the layer's output: 3
    for packed query, key and value."""
    row: str
    heads: int | None = None
    """Number of query heads; None for an MLP."""
    key_heads: int | None = None
    """Number of key and value heads."""
    reason: str


def find_blocks(model: nn.Module) -> list[Block]:
    """Returns the model's blocks, as found by the names and shapes of modules. Blocks do not
    overlap."""
    found: list[Block] = []
    taken: set[str] = set()
    for path, module in model.named_modules():
        parent = model.get_submodule(path.rpartition(".")[0]) if path else None
        for block in (
            *_attention(path, module, parent),
            *_sequential(path, module),
            *_mlp(path, module),
        ):
            layers = {*block.columns, block.row}
            if not layers & taken:
                found.append(block)
                taken |= layers
    return found


def joined(path: str, name: str) -> str:
    """Returns the path of the submodule `name` of the module at `path` ("" for the root)."""
    return f"{path}.{name}" if path else name


def _attention(path: str, module: nn.Module, parent: nn.Module | None) -> Iterator[Block]:
    if isinstance(module, nn.MultiheadAttention):
        return
    layers = _layers(module)
    separate: list[str] = [
        name for names in (QUERY, KEY, VALUE) for name in names if name in layers
    ][:3]
    if len(separate) == 3:
        columns: dict[str, int] = dict.fromkeys(separate, 1)
        width = layers[separate[0]].out_features
    else:
        name = next(
            (
                n
                for n in PACKED
                if n in layers and layers[n].out_features == 3 * (layers[n].out_features // 3)
            ),
            None,
        )
        if name is None:
            return
        columns = {name: 1 if name in PACKED_BY_HEAD else 3}
        width = layers[name].out_features // 3
    owner, prefix = path, ""
    output: str | None = next(
        (n for n in OUTPUT if n in layers and n not in columns and layers[n].in_features == width),
        None,
    )
    if output is None and parent is not None:
        around = _layers(parent)
        output = next((n for n in OUTPUT if n in around and around[n].in_features == width), None)
        owner, _, prefix = path.rpartition(".")
    if output is None:
        return
    heads, key_heads = _heads(
        module, parent, width, layers[separate[1]].out_features if len(separate) == 3 else width
    )
    core = joined(owner, prefix) if prefix else owner
    yield Block(
        path=owner,
        kind="attention",
        columns={joined(core, name): parts for name, parts in columns.items()},
        row=joined(owner, output),
        heads=heads,
        key_heads=key_heads,
        reason=f"attention: {', '.join(columns)} -> {output}",
    )


def _heads(
    module: nn.Module, parent: nn.Module | None, width: int, key_width: int
) -> tuple[int | None, int | None]:
    """Returns the number of query heads and the number of key heads, from attributes of the
    attention module, of the module around it, or of their configurations."""
    places = [
        p
        for m in (module, parent)
        if m is not None
        for p in (m, getattr(m, "config", None))
        if p is not None
    ]
    heads = _attribute(places, HEADS)
    if heads is None:
        size = _attribute(places, HEAD_SIZES)
        heads = width // size if size and width % size == 0 else None
    if heads is None or width % heads:
        return None, None
    key_heads = key_width // (width // heads)
    return heads, key_heads or None


def _attribute(places: list[object], names: tuple[str, ...]) -> int | None:
    for place in places:
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _mlp(path: str, module: nn.Module) -> Iterator[Block]:
    layers = _layers(module)
    for names, parts in ((UP_PACKED, 2), (UP, 1)):
        ups = [n for n in names if n in layers]
        for down in (n for n in DOWN if n in layers and n not in ups):
            fitting = [n for n in ups if layers[n].out_features == parts * layers[down].in_features]
            if fitting:
                yield Block(
                    path=path,
                    kind="mlp",
                    columns={joined(path, n): parts for n in fitting},
                    row=joined(path, down),
                    reason=f"MLP: {', '.join(fitting)} -> {down}",
                )
                return


def _sequential(path: str, module: nn.Module) -> Iterator[Block]:
    """Yields blocks for sequences that consist of a Linear, elementwise modules, and another
    Linear."""
    if not isinstance(module, nn.Sequential):
        return
    begun: tuple[str, LinearLike] | None = None
    for name, child in module.named_children():
        layer = linear_like(child)
        if layer is None:
            begun = begun if isinstance(child, _ELEMENTWISE_MODULES) else None
        elif begun is not None and begun[1].out_features == layer.in_features:
            yield Block(
                path=path,
                kind="mlp",
                columns={joined(path, begun[0]): 1},
                row=joined(path, name),
                reason=f"sequence: {begun[0]} -> elementwise -> {name}",
            )
            begun = None
        else:
            begun = (name, layer)


def _layers(module: nn.Module) -> dict[str, LinearLike]:
    """Returns the linear layers among the module's children and grandchildren, by name."""
    found = {}
    for name, child in module.named_children():
        for inner, candidate in (
            (name, child),
            *((f"{name}.{n}", c) for n, c in child.named_children()),
        ):
            layer = linear_like(candidate)
            if layer is not None:
                found[inner] = layer
    return found


# ------------------------------------------------------------------------------ blocks by data flow
#
# Finds attention and MLP blocks that cannot be recognized by name. Traces the data flow of one
# forward pass on the meta device, without computing values. Two patterns are supported: linear
# layers whose outputs reach one other linear layer through elementwise functions only, and linear
# layers whose outputs reach scaled_dot_product_attention as query, key and value, with the layer
# that takes its output. Attention implemented with matmul and softmax cannot be recognized in this
# way: it needs known names, or a plan.


_ELEMENTWISE_CALLS: Final = frozenset(
    (
        "relu", "relu_", "gelu", "silu", "silu_", "mish", "tanh", "sigmoid", "leaky_relu", "elu",
        "selu", "softplus", "hardswish",
        "hardtanh", "hardsigmoid", "logsigmoid", "relu6", "dropout", "mul", "mul_", "__mul__",
        "__imul__", "__rmul__",
        "add", "add_", "__add__", "__iadd__", "__radd__", "sub", "__sub__", "div", "__truediv__",
        "neg", "abs", "pow", "square", "sqrt",
        "exp", "erf", "clamp", "to", "float", "double", "half", "bfloat16", "type_as", "contiguous",
        "clone",
    )
)  # fmt: skip
"""Names of functions that compute each element of the output from the same element of the
inputs."""


@dataclass(frozen=True)
class _Flow:
    """Origin of a tensor: the last linear layers that it was computed from."""

    layers: frozenset[str] = frozenset()
    elementwise: bool = True
    """True if there are only elementwise functions between these layers and the tensor."""
    attention: int | None = None
    """Index of the attention call that returned this tensor; None if a different function returned
    it."""


def trace_blocks(model: nn.Module, inputs: Any) -> list[Block]:
    """Runs `model(*inputs)` (for a mapping: `model(**inputs)`) on the meta device, and returns the
    blocks found by data flow.

    Raises:
        ConfigurationError: the model's code cannot run on the meta device.
    """
    recorder = _Recorder(model)
    tensors = {
        name: t.detach().to("meta")
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    by_layer = {id(tensors[name]): path for path, name in recorder.weights.items()}
    recorder.by_weight = by_layer
    arguments = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs)
    positional, named = (
        ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    )
    try:
        with torch.no_grad(), recorder:
            torch.func.functional_call(model, tensors, positional, named)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's own code runs here
        raise ConfigurationError(
            f"the model cannot be traced on the meta device ({type(error).__name__}: {error}), so "
            "its blocks cannot be derived from its data flow; pass a plan for them"
        ) from error
    return recorder.blocks()


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers: dict[str, LinearLike] = {
            p: layer for p, m in model.named_modules() if (layer := linear_like(m)) is not None
        }
        self.weights = {path: f"{path}.weight" if path else "weight" for path in self.layers}
        self.by_weight: dict[int, str] = {}
        self._flows: dict[int, tuple[torch.Tensor, _Flow]] = {}
        self._into: dict[str, _Flow] = {}
        self._elsewhere: set[str] = set()
        self._attentions: list[tuple[frozenset[str], int, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        flows = [self._flow(t) for t in tensors]
        path = next((self.by_weight[id(t)] for t in tensors if id(t) in self.by_weight), None)
        if path is not None:
            # A Conv1D first reshapes its input, so its input is taken to be the largest one.
            self._into[path] = next(
                (f for f in flows if f.layers or f.attention is not None), _Flow(elementwise=False)
            )
            self._set(result, _Flow(frozenset({path})))
        elif func is F.scaled_dot_product_attention:
            query, key, value = (self._flow(t) for t in tensors[:3])
            self._attentions.append(
                (
                    query.layers | key.layers | value.layers,
                    tensors[0].shape[-3],
                    tensors[1].shape[-3],
                )
            )
            self._set(result, _Flow(attention=len(self._attentions) - 1))
        elif any(f.layers or f.attention is not None for f in flows):
            self._set(result, self._combined(func, tensors, flows, result))
        return result

    def _combined(
        self, func: Callable[..., Any], tensors: list[torch.Tensor], flows: list[_Flow], result: Any
    ) -> _Flow:
        layers = frozenset[str]().union(*(f.layers for f in flows))
        calls = {f.attention for f in flows if f.attention is not None}
        same = isinstance(result, torch.Tensor) and all(
            not f.layers or t.shape == result.shape for t, f in zip(tensors, flows, strict=True)
        )
        fed = all(
            f.layers or t.numel() == 1 or t.shape[-1] == 1
            for t, f in zip(tensors, flows, strict=True)
        )
        elementwise = (
            getattr(func, "__name__", "") in _ELEMENTWISE_CALLS
            and same
            and fed
            and all(f.elementwise for f in flows)
        )
        if not elementwise and isinstance(result, torch.Tensor):
            self._elsewhere |= layers if not _keeps_elements(func) else set()
        return _Flow(
            layers,
            elementwise and not calls,
            calls.pop() if len(calls) == 1 and not layers else None,
        )

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

    def _attention(
        self, row: str, columns: frozenset[str], heads: int, key_heads: int
    ) -> Block | None:
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
        if (
            row in columns
            or columns & self._elsewhere
            or any(self.layers[c].out_features != width for c in columns)
        ):
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
    """Returns whether a function only reads properties of a tensor or rearranges its elements."""
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
    """Returns the path of the innermost module that contains all given modules."""
    split = [p.split(".")[:-1] for p in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
