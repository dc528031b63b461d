"""Implements the styles of a plan. Each split module's class gains a mixin whose `forward` works
with parameters that are DTensors.

The class is changed in place, as in FSDP2, so that names, attributes and isinstance are unaffected,
and a copy of the model works independently. Every module that contains a split module opens a
region (region.py) around its forward pass. Submodules can therefore be called directly, and
activation checkpointing can rerun them alone.

`parallelize` splits a model in place, across the ranks of a tensor-parallel group, according to a
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from shoal_common.errors import ConfigurationError
from shoal_common.formats.wire import checksum
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shoal_worker.tensor_parallel.blocks import is_convolution, linear_like, own_parameters
from shoal_worker.tensor_parallel.context import (
    DropoutRandomness,
    ParallelContext,
    grad_partial,
    local_offset,
    split_dimension,
    whole,
)
from shoal_worker.tensor_parallel.multihead import MultiheadForward
from shoal_worker.tensor_parallel.region import region
from shoal_worker.tensor_parallel.split_plan import (
    Distributor,
    PlanEntry,
    Share,
    Style,
    TensorParallelPlan,
)
from shoal_worker.torch_internals import pytree, uncompiled

# torch.compile cannot trace a region (placing a packed DTensor fails in Dynamo), so a model is not
# compiled within a region.


class Region(nn.Module):
    """Mixin for a module that contains split modules. Its forward code may mix plain tensors and
    DTensors."""

    _shoal_context: ParallelContext

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with region(self._shoal_context):
            return super().forward(*args, **kwargs)


class Root(nn.Module):
    """Mixin for the model itself. Its results are plain tensors, except split logits if the loss is
    computed in parallel."""

    _shoal_context: ParallelContext
    _shoal_keeps_logits: bool

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with region(self._shoal_context):
            output = super().forward(*args, **kwargs)
        return pytree.tree_map_only(DTensor, self._outward, output)

    def _outward(self, value: DTensor) -> torch.Tensor:
        if self._shoal_keeps_logits and value.ndim > 1 and split_dimension(value) == value.ndim - 1:
            return value
        return whole(value)


def run_inside(root: nn.Module, run: Callable[[], Any], *, last: bool) -> Any:
    """Calls `run`, which runs part of the forward pass of the model `root`, in the model's region.
    Returns the result, with DTensors converted to plain tensors. If the model is not split, only
    calls `run`.

    `last`: True if `run` completes the forward pass; its logits may then remain split for a
    parallel loss.
    """
    if not isinstance(root, Root):
        return run()
    with region(root._shoal_context):
        output = run()
    return pytree.tree_map_only(DTensor, root._outward if last else whole, output)


class Column(nn.Module):
    """A linear layer split by output features. Its output is split along the last dimension."""

    _shoal_context: ParallelContext

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with region(self._shoal_context, leaf=True) as mode:
            output: torch.Tensor = super().forward(mode.enter(input))
            return output


class ColumnGathered(Column):
    """A linear layer split by output features. Its output is gathered."""

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        assert isinstance(output, DTensor)
        return whole(output)


class Convolution(nn.Module):
    """A convolution split by output channels. Its output is gathered along the channel dimension,
    which precedes the spatial dimensions."""

    _shoal_context: ParallelContext
    weight: nn.Parameter
    bias: nn.Parameter | None
    _conv_forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """torch's own implementation of the convolution, including padding."""

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with region(self._shoal_context, leaf=True) as mode:
            output = self._conv_forward(
                grad_partial(mode.enter(input)),
                _local(self.weight),
                None if self.bias is None else _local(self.bias),
            )
            return whole(self._shoal_context.sharded(output, 1 - self.weight.ndim))


class PackedColumn(nn.Module):
    """A linear layer whose output consists of several concatenated parts. Each part is split
    separately. The weight has an additional dimension for the parts."""

    _shoal_context: ParallelContext
    _shoal_output_dimension: int
    weight: nn.Parameter
    bias: nn.Parameter | None

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with region(self._shoal_context, leaf=True) as mode:
            local = grad_partial(mode.enter(input))
            weight, bias = (
                _local(self.weight),
                None if self.bias is None else _local(self.bias).flatten(),
            )
            parts = weight.shape[self._shoal_output_dimension]
            matrix = (
                weight.flatten(0, 1)
                if self._shoal_output_dimension == 0
                else weight.flatten(1, 2).t()
            )
            output = F.linear(local, matrix, bias).unflatten(-1, (parts, -1))
            return self._shoal_context.sharded(output, -1).flatten(-2)


class Row(nn.Module):
    """A linear layer split by input features. Its output is summed across ranks."""

    _shoal_context: ParallelContext

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with region(self._shoal_context, leaf=True):
            return self._shoal_context.leave(super().forward(input))


class Vocabulary(nn.Module):
    """nn.Embedding split by rows. Each rank looks up its own rows, with zeros for other ranks'
    rows; the results are summed."""

    _shoal_context: ParallelContext

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, nn.Embedding)
        context = self._shoal_context
        with region(context, leaf=True):
            ids = whole(input) if isinstance(input, DTensor) else input
            # a parameter is a tensor
            first, rows = local_offset(self.weight, 0), _local(self.weight)  # type: ignore[arg-type]
            own = ids - first
            elsewhere = (own < 0) | (own >= rows.shape[0])
            padding = None if self.padding_idx is None else self.padding_idx - first
            if padding is not None and not 0 <= padding < rows.shape[0]:
                padding = None
            found = F.embedding(own.masked_fill(elsewhere, 0), rows, padding).masked_fill(
                elsewhere.unsqueeze(-1), 0
            )
            return context.leave(
                DTensor.from_local(found, context.mesh, [Partial()], run_check=False)
            )


class EmbeddingDimension(nn.Module):
    """nn.Embedding, or nn.EmbeddingBag with any `mode`, split by columns. Its output is
    gathered."""

    _shoal_context: ParallelContext

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = self._shoal_context
        with region(context, leaf=True):
            if isinstance(self, nn.EmbeddingBag):
                if per_sample_weights is not None:
                    per_sample_weights = grad_partial(context.replicated(per_sample_weights))
                output = F.embedding_bag(
                    input, _local(self.weight), offsets, mode=self.mode,
                    per_sample_weights=per_sample_weights,
                    include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
                )  # fmt: skip
            else:
                assert isinstance(self, nn.Embedding)
                output = F.embedding(input, _local(self.weight), self.padding_idx)
            return whole(context.sharded(output, -1))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


_MIXINS: Mapping[Style, type[nn.Module]] = {
    Style.COLUMN: Column,
    Style.PACKED_COLUMN: PackedColumn,
    Style.COLUMN_GATHERED: ColumnGathered,
    Style.ROW: Row,
    Style.VOCABULARY: Vocabulary,
    Style.EMBEDDING_DIMENSION: EmbeddingDimension,
    Style.ATTENTION: MultiheadForward,
}


class ShoalStyle(ParallelStyle):
    """The plan's style for one module, as a `ParallelStyle` for `parallelize_module`."""

    def __init__(
        self,
        context: ParallelContext,
        distributor: Distributor,
        *,
        entry: PlanEntry | None,
        contains_split: bool,
        root: bool,
        loss_parallel: bool,
        runs: bool,
    ) -> None:
        """Creates the style.

        Args:
            entry: the module's entry in the plan; None for a module that does not own parameters.
            contains_split: True if the module contains split modules.
            root: True for the model itself.
            runs: True if this rank runs the module.
        """
        super().__init__()
        self._context = context
        self._distributor = distributor
        self._entry = entry
        self._contains_split = contains_split
        self._root = root
        self._keeps_logits = loss_parallel
        self._runs = runs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = Style.REPLICATE if self._entry is None else self._entry.style
        layer = linear_like(module)
        if layer is not None:
            # a module's attributes may be anything
            module._shoal_output_dimension = layer.output_dimension  # type: ignore[assignment]
        if self._entry is not None:
            for (name, _), layout in zip(
                own_parameters(module), self._entry.parameters, strict=True
            ):
                self._distributor.distribute(module, name, layout)
        if not self._runs:
            return module
        mixins: list[type[nn.Module]] = [Root] if self._root else []
        if style is not Style.REPLICATE:
            mixins.append(Convolution if is_convolution(module) else _MIXINS[style])
        elif (
            self._contains_split
            and not self._root
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        ):
            mixins.append(Region)
        if mixins:
            _add_mixins(module, mixins)
            # a module's attributes may be anything
            module._shoal_context = self._context  # type: ignore[assignment]
        if self._root:
            # a module's attributes may be anything
            module._shoal_keeps_logits = self._keeps_logits  # type: ignore[assignment]
        return module


def _add_mixins(module: nn.Module, mixins: Sequence[type[nn.Module]]) -> None:
    own = type(module)
    module.__class__ = type(
        own.__name__,
        (*mixins, own),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__},
    )


_ADDED: Final = frozenset({"_shoal_context", "_shoal_keeps_logits", "_shoal_output_dimension"})
"""Attributes that are added to modules whose class is changed."""


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    *,
    share: Share,
    dropout: DropoutRandomness,
) -> None:
    """Splits the model's parameters across `mesh` and changes its modules to work with the split
    parameters. Must be called on all ranks of the mesh, with the same arguments.

    Afterwards, every rank must pass the same inputs to the model, and gets the same outputs and
    gradients. The parameters named by `share` are replaced by new, uninitialized ones (DTensors if
    they are split). On a mesh of one rank, the model is not changed.

    Args:
        mesh: one-dimensional mesh; may be a slice of a larger mesh.
        share: part of the model on this rank.

    Raises:
        ConfigurationError: the plan is for a different model or number of ranks, or differs between
            ranks; nothing has changed.
    """
    _check(model, mesh, plan)
    _check_agreement(mesh, plan)
    if plan.size == 1:
        return
    kind = mesh.device_type
    device = (
        torch.device(kind)
        if kind == "cpu"
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )
    context = ParallelContext(mesh, sequence_dimension=plan.sequence_dimension, dropout=dropout)
    parallelize_module(
        model,
        mesh,
        _styles(model, plan, context, Distributor(mesh, share, device)),
        src_data_rank=None,
    )


def _styles(
    model: nn.Module, plan: TensorParallelPlan, context: ParallelContext, distributor: Distributor
) -> dict[str, ParallelStyle]:
    """Returns the style of each module that has parameters or contains a split module."""
    runs = distributor.share.runs
    split = [
        entry.module
        for entry in plan.entries
        if entry.style is not Style.REPLICATE and runs(entry.module)
    ]
    styles: dict[str, ParallelStyle] = {}
    for path, _ in model.named_modules():
        entry = plan.by_module.get(path)
        contains = any(inner.startswith(f"{path}.") for inner in split) if path else bool(split)
        if entry is not None or contains:
            styles[path] = ShoalStyle(
                context,
                distributor,
                entry=entry,
                contains_split=contains,
                root=path == "" and bool(split),
                loss_parallel=plan.loss_parallel,
                runs=runs(path),
            )
    return styles


def unparallelize(model: nn.Module) -> None:
    """Restores the original classes of a model's modules. Does not change the parameters, which
    must be replaced afterwards."""
    for module in model.modules():
        if "_shoal_context" in module.__dict__:
            module.__class__ = type(module).__bases__[-1]
        for name in _ADDED & module.__dict__.keys():
            del module.__dict__[name]


def _check(model: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    if mesh.ndim != 1 or mesh.size() != plan.size:
        raise ConfigurationError(
            f"parallelize: the plan is for {plan.size} ranks, but the mesh has shape "
            f"{tuple(mesh.mesh.shape)}; create the plan with the size of the tensor-parallel "
            "mesh, and pass only that dimension of a larger mesh"
        )
    shapes: Mapping[str, tuple[int, ...]] = {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    planned = {layout.name: layout.shape for layout in plan.parameters}
    if shapes != planned:
        other = sorted(set(shapes.items()) ^ set(planned.items()))[:3]
        raise ConfigurationError(
            f"parallelize: the plan was created for another model; they differ in {other}. Create "
            "a new plan with make_plan"
        )


def _check_agreement(mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    """Raises ConfigurationError if the ranks have different plans, because they would then wait for
    one another forever or mix up their values."""
    digest = checksum(memoryview(repr(plan).encode())) >> 1
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=mesh.device_type)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    # Called on the group itself. If it failed, dist.all_reduce would look the group up in torch's
    # world, which does not contain it, and raise a misleading error.
    mesh.get_group().allreduce([bounds], options).wait()
    if bounds[0] != -bounds[1]:
        raise ConfigurationError(
            "parallelize: the ranks of the mesh have different plans; call make_plan with the "
            "same arguments on all of them"
        )
