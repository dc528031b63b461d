"""Creates a model's tensor-parallel plan from the user's styles and the model's structure. Raises
an error if a plan cannot be determined from these.

Large parameters are replicated only if the user requests it. Small parameters are replicated
(norms, biases and other vectors, and parameters with fewer elements than the minimum), and the plan
gives the reason for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from shoal_common.errors import ConfigurationError
from torch import nn
from torch.distributed.tensor import DTensor

from shoal_worker.tensor_parallel.blocks import (
    Block,
    LinearLike,
    find_blocks,
    is_convolution,
    joined,
    linear_like,
    own_parameters,
    trace_blocks,
)
from shoal_worker.tensor_parallel.split_plan import (
    ParameterLayout,
    PlanEntry,
    Split,
    Style,
    TensorParallelPlan,
    to_split,
)
from shoal_worker.torch_internals import needs_torch

_NORMS: Final = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_LINEAR_STYLES: Final = (Style.COLUMN, Style.PACKED_COLUMN, Style.COLUMN_GATHERED, Style.ROW)


def make_plan(
    model: nn.Module,
    size: int,
    *,
    plan: Mapping[str, Split | Style | str] | None = None,
    minimum_parameter_group_size: int = 1024,
    sequence_dimension: int | None = None,
    loss_parallel: bool = False,
    example_inputs: Any = None,
) -> TensorParallelPlan:
    """Returns the plan for `model` on `size` ranks. Uses only shapes, so the parameters may be on
    the meta device.

    Args:
        plan: styles of some or all modules, by path pattern. A pattern is a path whose components
            may contain wildcards, such as `layers.*.mlp.up`; later patterns take precedence. The
            path of a parameter that a module owns directly is also a pattern, with "replicate". The
            styles of modules that do not match a pattern are derived. If a pattern matches a layer
            of a block, the block's other layers are treated as separate layers.
        minimum_parameter_group_size: modules with fewer elements may be replicated; for a block,
            the size of its largest layer is used.
        sequence_dimension: dimension along which activations between blocks are split (sequence
            parallelism): usually 1, or 0 if the sequence comes first.
        loss_parallel: True to leave the logits split along the vocabulary. The layer that computes
            them must be a separate layer at the end of the model.
        example_inputs: a tuple of positional arguments or a mapping of keyword arguments of
            `model`, for tracing if the blocks cannot be found by name. Only shapes matter; no
            values are computed.

    Raises:
        ConfigurationError: a large module cannot be split. The message names the module, its size
            and the remedy.
    """
    if size < 1:
        raise ConfigurationError(f"tensor parallelism over {size} ranks: expected at least 1")
    if size > 1:
        # 2.11 does not flatten split dimensions
        needs_torch(2, 12, f"tensor parallelism over {size} ranks", "use zero3 or fsdp")
    return _Planner(
        model,
        size,
        plan or {},
        minimum_parameter_group_size,
        sequence_dimension,
        loss_parallel,
        example_inputs,
    ).plan()


@dataclass(frozen=True)
class _Role:
    """Style of a module, the block that it belongs to, and the reason for the style."""

    split: Split
    block: str
    reason: str
    asked: bool = False


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        size: int,
        given: Mapping[str, Split | Style | str],
        minimum: int,
        sequence_dimension: int | None,
        loss_parallel: bool,
        example_inputs: Any,
    ) -> None:
        self._model = model
        self._size = size
        self._given = {pattern: to_split(value) for pattern, value in given.items()}
        self._minimum = minimum
        self._sequence_dimension = sequence_dimension
        self._loss_parallel = loss_parallel
        self._inputs = example_inputs
        self._roles: dict[str, _Role] = {}
        self._first: dict[int, tuple[str, ParameterLayout]] = {}
        """Layout of each parameter, by identity, with the path of the module where the parameter
        was found first."""
        self._names = {id(p): name for name, p in model.named_parameters()}

    def plan(self) -> TensorParallelPlan:
        if any(isinstance(p, DTensor) for p in self._model.parameters()):
            raise ConfigurationError(
                "tensor parallelism: the model's parameters are already DTensors; pass a model "
                "with plain parameters"
            )
        self._take_given()
        self._derive_blocks()
        owners = [
            (path, module) for path, module in self._model.named_modules() if own_parameters(module)
        ]
        holders = self._holders(owners)
        entries = {
            path: self._entry(path, module) for path, module in owners if path not in holders
        }
        entries |= {path: self._held(path, module) for path, module in owners if path in holders}
        return TensorParallelPlan(
            size=self._size,
            entries=tuple(entries[path] for path, _ in owners),
            sequence_dimension=self._sequence_dimension,
            loss_parallel=self._loss_parallel,
        )

    # ---------------------------------------------------------------------------------------- roles

    def _take_given(self) -> None:
        modules = dict(self._model.named_modules())
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        for pattern, split in self._given.items():
            matched = [
                path for path in (*modules, *(parameters - set(modules))) if _matches(path, pattern)
            ]
            if not matched:
                raise ConfigurationError(
                    f"tensor-parallel plan: no module or parameter matches {pattern!r}; the model "
                    f"has the modules {sorted(modules)[1:6]} ..."
                )
            for path in matched:
                if path in parameters and split.style is not Style.REPLICATE:
                    raise ConfigurationError(
                        f"tensor-parallel plan: {path} is a parameter, not a module; the only "
                        'style for a parameter is "replicate"'
                    )
                self._roles[path] = _Role(split, path, "requested", asked=True)
                if split.style is Style.REPLICATE and path in modules:
                    for inner, _ in modules[path].named_modules():
                        self._roles[joined(path, inner) if inner else path] = _Role(
                            split, path, "requested", asked=True
                        )

    def _derive_blocks(self) -> None:
        for path, module in self._model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                self._derive_multihead(path, module)
        blocks = find_blocks(self._model)
        if self._inputs is not None:
            named = {
                path
                for block in blocks
                if block.kind == "mlp" or block.heads
                for path in (*block.columns, block.row)
            }
            traced = [
                b
                for b in trace_blocks(self._model, self._inputs)
                if not named & {*b.columns, b.row}
            ]
            over = {path for block in traced for path in (*block.columns, block.row)}
            blocks = [b for b in blocks if not over & {*b.columns, b.row}] + traced
        for block in blocks:
            layers = (*block.columns, block.row)
            if not any(path in self._roles for path in layers) and not self._replicates_small(
                block.path, layers, block.kind
            ):
                self._derive_block(block)

    def _derive_multihead(self, path: str, module: nn.MultiheadAttention) -> None:
        if path in self._roles or self._replicates_small(
            path, (path, joined(path, "out_proj")), "attention"
        ):
            return
        kind = f"nn.MultiheadAttention(embed_dim={module.embed_dim}, num_heads={module.num_heads})"
        if module.num_heads % self._size:
            raise self._refusal(
                path,
                module,
                f"{kind}: its {module.num_heads} heads are not divisible by {self._size}",
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise self._refusal(
                path,
                module,
                f"{kind}: add_bias_kv and add_zero_attn add a position to every head, which "
                "tensor parallelism does not support",
            )
        self._roles[path] = _Role(
            Split(style=Style.ATTENTION, heads=module.num_heads), path, f"{module.num_heads} heads"
        )
        self._roles[joined(path, "out_proj")] = _Role(
            Split(style=Style.ROW), path, "sums the heads"
        )

    def _derive_block(self, block: Block) -> None:
        layers = {path: self._layer(path) for path in (*block.columns, block.row)}
        if block.kind == "attention":
            self._check_heads(block, layers)
        for path, parts in block.columns.items():
            if layers[path].out_features % (parts * self._size):
                features = f"{layers[path].out_features} output features" + (
                    f" in {parts} parts" if parts > 1 else ""
                )
                raise self._refusal(
                    path,
                    self._model.get_submodule(path),
                    f"its {features} are not divisible by {self._size}",
                )
        if layers[block.row].in_features % self._size:
            what = (
                f"its {layers[block.row].in_features} input features are not divisible by "
                f"{self._size}"
            )
            raise self._refusal(block.row, self._model.get_submodule(block.row), what)
        for path, parts in block.columns.items():
            style = Style.PACKED_COLUMN if parts > 1 else Style.COLUMN
            self._roles[path] = _Role(Split(style=style, parts=parts), block.path, block.reason)
        self._roles[block.row] = _Role(Split(style=Style.ROW), block.path, block.reason)

    def _check_heads(self, block: Block, layers: Mapping[str, LinearLike]) -> None:
        module = self._model.get_submodule(block.path)
        if block.heads is None or block.key_heads is None:
            raise self._refusal(
                block.path,
                module,
                f"the number of heads of this attention block is unknown ({block.reason}), "
                "because no attribute specifies it",
                remedy="Give the attention module an attribute num_heads, pass example_inputs so "
                "that it can be traced, or pass a plan",
            )
        for heads, of in (
            (block.heads, "attention heads"),
            (block.key_heads, "key and value heads"),
        ):
            if heads % self._size:
                raise self._refusal(
                    block.path, module, f"its {heads} {of} are not divisible by {self._size}"
                )

    def _replicates_small(self, block: str, paths: tuple[str, ...], kind: str) -> bool:
        """Assigns the style "replicate" to a block's layers if none of them is large enough to
        justify the communication. Returns whether it did so."""
        largest = max(_elements(self._model.get_submodule(path)) for path in paths)
        if largest >= self._minimum:
            return False
        for path in paths:
            self._roles[path] = _Role(
                Split(style=Style.REPLICATE),
                block,
                f"{kind} block below {self._minimum} elements a layer",
            )
        return True

    # -------------------------------------------------------------------------------------- entries

    def _entry(self, path: str, module: nn.Module) -> PlanEntry:
        role = self._roles.get(path) or self._alone(path, module)
        self._check(path, module, role)
        layouts, tied_to = [], None
        for name, parameter in own_parameters(module):
            stored, dimension = _stored(module, name, tuple(parameter.shape), role.split)
            layout = ParameterLayout(
                name=self._names[id(parameter)],
                shape=tuple(parameter.shape),
                stored_shape=stored,
                dimension=dimension,
                element_size=parameter.element_size(),
                trainable=parameter.requires_grad,
            )
            first_module, first = self._first.setdefault(id(parameter), (path, layout))
            if (first.stored_shape, first.dimension) != (layout.stored_shape, layout.dimension):
                raise ConfigurationError(
                    f"tensor parallelism: {joined(path, name)} is tied to {first.name}, but the "
                    f"plan splits one along dimension {layout.dimension} and the other along "
                    f"{first.dimension}; choose compatible styles for both modules, such as "
                    "vocabulary and column_gathered"
                )
            tied_to = first_module if first_module != path else tied_to
            layouts.append(replace(layout, name=first.name))
        return PlanEntry(
            module=path,
            kind=type(module).__name__,
            style=role.split.style,
            block=role.block,
            parameters=tuple(layouts),
            parts=role.split.parts,
            tied_to=tied_to,
            reason=role.reason,
        )

    def _holders(self, owners: Sequence[tuple[str, nn.Module]]) -> set[str]:
        """Returns the modules that are not layers themselves, but refer to parameters of layers and
        have no other parameters. For example, BERT's head refers to the bias of its decoder. The
        layers determine how these parameters are split. In the forward code of such a module, they
        are DTensors with full shapes."""
        layers = {
            path
            for path, m in owners
            if linear_like(m) or is_convolution(m) or isinstance(m, nn.Embedding | nn.EmbeddingBag)
        }
        known = {
            id(p) for path, module in owners if path in layers for _, p in own_parameters(module)
        }
        return {
            path
            for path, m in owners
            if path not in layers
            and path not in self._roles
            and all(id(p) in known for _, p in own_parameters(m))
        }

    def _held(self, path: str, module: nn.Module) -> PlanEntry:
        found = [self._first[id(parameter)] for _, parameter in own_parameters(module)]
        return PlanEntry(
            module=path,
            kind=type(module).__name__,
            style=Style.REPLICATE,
            block=path,
            parameters=tuple(layout for _, layout in found),
            tied_to=found[0][0],
            reason=f"as {found[0][0]}",
        )

    def _alone(self, path: str, module: nn.Module) -> _Role:
        """Returns the style of a module that is not part of a block, with the reason."""
        elements = _elements(module)
        if isinstance(module, _NORMS) or _is_norm(module):
            return _Role(Split(style=Style.REPLICATE), path, "norm")
        tied = next(
            (self._first[id(p)][0] for _, p in own_parameters(module) if id(p) in self._first), None
        )
        shared = tied is not None and self._first_dimension(module) is not None
        if elements < self._minimum and not shared:
            return _Role(Split(style=Style.REPLICATE), path, f"below {self._minimum} elements")
        if tied is not None and not shared:
            return _Role(Split(style=Style.REPLICATE), path, f"as {tied}")
        if isinstance(module, nn.Embedding):
            return _Role(Split(style=Style.VOCABULARY), path, "embedding, by rows")
        if isinstance(module, nn.EmbeddingBag):
            return _Role(Split(style=Style.EMBEDDING_DIMENSION), path, "embedding bag, by columns")
        if linear_like(module) is not None:
            if self._loss_parallel:
                return _Role(
                    Split(style=Style.COLUMN),
                    path,
                    "separate layer, output stays split for the parallel loss",
                )
            return _Role(
                Split(style=Style.COLUMN_GATHERED), path, "separate layer, output gathered"
            )
        if is_convolution(module):
            return _Role(
                Split(style=Style.COLUMN_GATHERED),
                path,
                "convolution by output channels, output gathered",
            )
        asked = [self._roles.get(joined(path, name)) for name, _ in own_parameters(module)]
        large = [
            (name, p)
            for (name, p), role in zip(own_parameters(module), asked, strict=True)
            if role is None and p.ndim > 1 and p.numel() >= self._minimum
        ]
        if not large:
            return _Role(
                Split(style=Style.REPLICATE),
                path,
                "requested" if any(asked) else f"vectors, or below {self._minimum} elements",
            )
        name, parameter = large[0]
        shape = "x".join(map(str, parameter.shape))
        raise self._refusal(
            path,
            module,
            f"there is no style for {type(module).__name__}, whose parameter {name} has "
            f"{parameter.numel():,} elements ({shape})",
            remedy="Replicate it explicitly with "
            f'plan={{"{joined(path, name) if path == "" else path}": "replicate"}}',
        )

    def _first_dimension(self, module: nn.Module) -> int | None:
        """Returns the dimension along which this module's parameters are split in another module
        that shares them and came earlier in the plan. Returns None if they are not split there, or
        not shared."""
        return next(
            (
                self._first[id(p)][1].dimension
                for _, p in own_parameters(module)
                if id(p) in self._first
            ),
            None,
        )

    def _check(self, path: str, module: nn.Module, role: _Role) -> None:
        """Raises ConfigurationError if the module does not support the style, or if some rank would
        not get any part of it."""
        style, layer = role.split.style, linear_like(module)
        fits = {
            Style.VOCABULARY: type(module) is nn.Embedding,
            Style.EMBEDDING_DIMENSION: isinstance(module, nn.Embedding | nn.EmbeddingBag),
            Style.ATTENTION: isinstance(module, nn.MultiheadAttention),
            Style.COLUMN_GATHERED: layer is not None or is_convolution(module),
            Style.REPLICATE: True,
        }
        if not fits.get(style, layer is not None):
            raise ConfigurationError(
                f"tensor-parallel plan: {path or 'the model'} is a {type(module).__name__}, which "
                f"does not support the style {style.value!r}"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and style is not Style.REPLICATE:
            odd = [n for n in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(module, n)]
            if odd:
                raise self._refusal(
                    path,
                    module,
                    f"{type(module).__name__} with {odd[0]}={getattr(module, odd[0])} needs the "
                    "whole table on one rank",
                )
        if role.asked:
            self._check_asked(path, module, role.split, layer)
        if (
            style is Style.EMBEDDING_DIMENSION
            and module.get_parameter("weight").shape[1] % self._size
        ):
            raise self._refusal(
                path,
                module,
                f"its {module.embedding_dim} columns are not divisible by {self._size}",
            )
        if (
            is_convolution(module)
            and style is Style.COLUMN_GATHERED
            and module.get_parameter("weight").shape[0] % self._size
        ):
            raise self._refusal(
                path,
                module,
                f"its {module.out_channels} output channels are not divisible by {self._size}",
            )
        rows = None
        if isinstance(module, nn.Embedding) and style is Style.VOCABULARY:
            rows = module.num_embeddings
        elif (
            layer is not None
            and style in (Style.COLUMN, Style.COLUMN_GATHERED)
            and role.block == path
        ):
            rows = layer.out_features
        if rows is not None and -(-rows // self._size) * (self._size - 1) >= rows:
            raise self._refusal(
                path,
                module,
                f"its {rows} rows, in pieces of {-(-rows // self._size)}, leave at least one of "
                f"{self._size} ranks without rows",
            )

    def _check_asked(
        self, path: str, module: nn.Module, split: Split, layer: LinearLike | None
    ) -> None:
        if split.heads is not None and split.heads % self._size:
            raise self._refusal(
                path, module, f"its {split.heads} heads are not divisible by {self._size}"
            )
        if (
            isinstance(module, nn.MultiheadAttention)
            and split.style is Style.ATTENTION
            and module.num_heads % self._size
        ):
            raise self._refusal(
                path, module, f"its {module.num_heads} heads are not divisible by {self._size}"
            )
        if layer is None or split.style not in _LINEAR_STYLES:
            return
        features, of = (
            (layer.in_features, "input")
            if split.style is Style.ROW
            else (layer.out_features, "output")
        )
        uneven = split.style in (Style.COLUMN, Style.COLUMN_GATHERED)
        if not uneven and features % (split.parts * self._size):
            parts = f" in {split.parts} parts" if split.parts > 1 else ""
            raise self._refusal(
                path,
                module,
                f"its {features} {of} features{parts} are not divisible by {self._size}",
            )

    def _layer(self, path: str) -> LinearLike:
        layer = linear_like(self._model.get_submodule(path))
        assert layer is not None
        return layer

    def _refusal(
        self, path: str, module: nn.Module, what: str, *, remedy: str | None = None
    ) -> ConfigurationError:
        elements = sum(p.numel() for p in module.parameters())
        replicate = f'replicate it explicitly with plan={{"{path}": "replicate"}}'
        return ConfigurationError(
            f"tensor parallelism over {self._size} ranks cannot split {path or 'the model'} "
            f"({type(module).__name__}, {elements:,} elements): {what}. "
            f"{remedy or f'Choose a tensor-parallel size that divides it, or {replicate}'}"
        )


def _elements(module: nn.Module) -> int:
    """Returns the number of elements in the largest parameter that the module owns directly."""
    return max((p.numel() for _, p in own_parameters(module)), default=0)


def _is_norm(module: nn.Module) -> bool:
    """Returns whether the module is a norm from another library, such as T5's or Llama's
    RMSNorm."""
    return type(module).__name__.lower().endswith("norm") and all(
        p.ndim == 1 for _, p in own_parameters(module)
    )


def _matches(path: str, pattern: str) -> bool:
    """Returns whether a path matches a pattern, component by component as in parallelize_module."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )


def _stored(
    module: nn.Module, name: str, shape: tuple[int, ...], split: Split
) -> tuple[tuple[int, ...], int | None]:
    """Returns the shape of a parameter as it is stored, and the dimension along which it is
    split."""
    style = split.style
    if style is Style.REPLICATE:
        return shape, None
    if style is Style.ATTENTION:
        if name.startswith("in_proj"):
            return (3, shape[0] // 3, *shape[1:]), 1
        return shape, 0  # q_proj_weight and similar
    if name not in ("weight", "bias"):
        return shape, None
    if style is Style.VOCABULARY:
        return shape, 0
    if style is Style.EMBEDDING_DIMENSION:
        return shape, 1
    if is_convolution(module):
        return shape, 0
    layer = linear_like(module)
    assert layer is not None
    if style is Style.ROW:
        return shape, None if name == "bias" else 1 - layer.output_dimension
    dimension = layer.output_dimension if name == "weight" else 0
    if split.parts == 1:
        return shape, dimension
    packed = (
        *shape[:dimension],
        split.parts,
        shape[dimension] // split.parts,
        *shape[dimension + 1 :],
    )
    return packed, dimension + 1
