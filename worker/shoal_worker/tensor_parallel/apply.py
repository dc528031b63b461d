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
from shoal_worker.tensor_parallel.styles import Style

_ADDED: Final = frozenset({"_shoal_context", "_shoal_keeps_logits", "_shoal_output_dimension"})
"""Attributes of modules, beside their classes."""


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan, *, share: Share, dropout: DropoutRandomness) -> None:
    """Splits the model's parameters over `mesh` and changes its modules to work with them. Collective: all ranks of the mesh call it alike.

    Every rank passes the same inputs to the model afterwards and gets the same outputs and gradients. The parameters that `share` names
    become new objects, DTensors where they are split, with any values in them. On one rank the model stays as it is.

    Args:
        mesh: of one dimension; a slice of a larger one.
        share: what of the model is on this rank.

    Raises:
        ConfigurationError: the plan is for another model or another number of ranks, or not the same on all of them; nothing is changed.
    """
    _check(model, mesh, plan)
    _check_agreement(mesh, plan)
    if plan.size == 1:
        return
    kind = mesh.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    context = ParallelContext(mesh, sequence_dimension=plan.sequence_dimension, dropout=dropout)
    parallelize_module(model, mesh, _styles(model, plan, context, Distributor(mesh, share, device)), src_data_rank=None)


def _styles(model: nn.Module, plan: TensorParallelPlan, context: ParallelContext, distributor: Distributor) -> dict[str, ParallelStyle]:
    """For each module with parameters, and for each that contains a split one."""
    runs = distributor.share.runs
    split = [entry.module for entry in plan.entries if entry.style is not Style.REPLICATE and runs(entry.module)]
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
    """Gives the modules of a model their own classes back. Its parameters are as they were; put others in their places."""
    for module in model.modules():
        if "_shoal_context" in module.__dict__:
            module.__class__ = type(module).__bases__[-1]
        for name in _ADDED & module.__dict__.keys():
            del module.__dict__[name]


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
