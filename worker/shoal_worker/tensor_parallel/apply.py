"""Lays a model out over the ranks of a tensor-parallel group, as a plan says. The result is the same module, changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from shoal_common.wire import checksum
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shoal_worker.tensor_parallel.context import DropoutRandomness, ParallelContext
from shoal_worker.tensor_parallel.layers import ShoalStyle
from shoal_worker.tensor_parallel.parameters import Distributor, Share
from shoal_worker.tensor_parallel.plan import TensorParallelPlan
from shoal_worker.tensor_parallel.state import TensorParallelState
from shoal_worker.tensor_parallel.styles import Style

_ADDED: Final = frozenset({"_shoal_context", "_shoal_keeps_logits", "_shoal_output_dimension"})
"""Attributes of modules, beside their classes."""


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TensorParallelPlan,
    *,
    dropout: DropoutRandomness = DropoutRandomness.PER_SHARD,
    source_rank: int | None = 0,
    share: Share | None = None,
) -> TensorParallelState:
    """Splits the model's parameters over `mesh` and changes its modules to work with them. Collective: all ranks of the mesh call it alike.

    Every rank passes the whole model, on its device or (but for the source) on `meta`; every rank passes the same inputs to it afterwards
    and gets the same outputs and gradients. Parameters that are split become new objects, the old ones are emptied: see
    `TensorParallelState.replaced`. On one rank the model stays as it is.

    Args:
        mesh: of one dimension; a slice of a larger one.
        source_rank: the rank within the mesh whose values win. None: the caller knows that all have the same; no values are sent.
        share: what of the model is on this rank, with `source_rank=None`; it is on `meta`, and buffers stay as they are. None: all.

    Raises:
        ConfigurationError: the plan is for another model or another number of ranks, or not the same on all of them; nothing is changed.
    """
    _check(model, mesh, plan)
    _check_agreement(mesh, plan)
    kind = mesh.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    distributor = Distributor(mesh, source_rank=source_rank, device=device, share=share)
    if plan.size > 1:
        context = ParallelContext(mesh, sequence_dimension=plan.sequence_dimension, dropout=dropout)
        parallelize_module(model, mesh, _styles(model, plan, context, distributor, share), src_data_rank=source_rank)
        if share is None:
            _share_buffers(model, distributor)
    return TensorParallelState(model, mesh, plan, distributor.replaced)


def _styles(
    model: nn.Module, plan: TensorParallelPlan, context: ParallelContext, distributor: Distributor, share: Share | None
) -> dict[str, ParallelStyle]:
    """For each module with parameters, and for each that contains a split one."""
    split = [entry.module for entry in plan.entries if entry.style is not Style.REPLICATE and (share is None or share.runs(entry.module))]
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
                runs=share is None or share.runs(path),
            )
    return styles


def unparallelize(model: nn.Module) -> None:
    """Gives the modules of a model their own classes back. Its parameters are as they were; put others in their places."""
    for module in model.modules():
        if "_shoal_context" in module.__dict__:
            module.__class__ = type(module).__bases__[-1]
        for name in _ADDED & module.__dict__.keys():
            del module.__dict__[name]


def _share_buffers(model: nn.Module, distributor: Distributor) -> None:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = distributor.values(f"{path}.{name}", buffer)


def _check(model: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    if mesh.ndim != 1 or mesh.size() != plan.size:
        raise ConfigurationError(
            f"parallelize: the plan is for {plan.size} ranks, the mesh has the shape {tuple(mesh.mesh.shape)}; "
            "make the plan with the size of the tensor-parallel mesh, and pass that dimension of a larger mesh only"
        )
    shapes: Mapping[str, tuple[int, ...]] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    planned = {layout.name: layout.shape for layout in plan.parameters}
    if shapes != planned:
        other = sorted(set(shapes.items()) ^ set(planned.items()))[:3]
        raise ConfigurationError(f"parallelize: the plan was made for another model; they differ in {other}. Make it anew with make_plan")


def _check_agreement(mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    """Ranks with different plans would wait for each other for ever, or mix their values."""
    digest = checksum(memoryview(repr(plan).encode())) >> 1
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=mesh.device_type)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    # Of the group itself: dist.all_reduce would look it up in torch's world to report a failure, and raise that it is not there.
    mesh.get_group().allreduce([bounds], options).wait()
    if bounds[0] != -bounds[1]:
        raise ConfigurationError("parallelize: the ranks of the mesh have different plans; call make_plan with the same arguments on each")
