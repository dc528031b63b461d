"""Gradients of a model whose parameters are partly DTensors, partly plain: their norm over all ranks, their sum over replicas.

torch's own clip_grad_norm_ refuses a mix of them, and its DDP sees only the plain ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def grad_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients together, each element counted once, on every rank the same. Collective over the meshes of the parameters.

    Every rank passes the same parameters; one without a gradient counts as nought. Computed in float32, or float64 for such gradients.
    """
    shares: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    own = list(dict.fromkeys(parameters))
    for parameter in own:
        local, groups = _local_gradient(parameter)
        shares.setdefault(groups, []).extend([] if local is None else [local])
    device = next((p.to_local().device if isinstance(p, DTensor) else p.device for p in own), torch.device("cpu"))
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in own) else torch.float32
    infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, locals_ in shares.items():
        norms = torch.stack(
            [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in locals_] or [torch.zeros((), dtype=dtype, device=device)]
        )
        share = norms.max().double() if infinite else norms.double().pow(norm_type).sum()
        for group in groups:
            dist.all_reduce(share, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, share) if infinite else total + share
    return (total if infinite else total.pow(1 / norm_type)).to(dtype)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales all gradients so that their norm (see `grad_norm`) is at most `max_norm`; returns the norm before. Collective.

    Raises:
        ConfigurationError: `max_norm` or `norm_type` is not a positive number.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`; no gradient is changed.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ConfigurationError(f"clip_grad_norm_: max_norm={max_norm}, norm_type={norm_type}; expected positive numbers")
    own = list(dict.fromkeys(parameters))
    norm = grad_norm(own, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in own:
        local, _ = _local_gradient(parameter)
        if local is not None:
            local.mul_(scale.to(local.device, local.dtype))
    return norm


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[torch.Tensor], group: dist.ProcessGroup, *, divisor: float | None = None, bucket_bytes: int = 25 * 2**20
) -> None:
    """Sums the gradients over data-parallel replicas: this rank's part of each, with its counterparts in `group`. Collective.

    The parts travel in flat buckets, one all-reduce each, in flight together. A parameter that has a gradient on some ranks only gets one
    on all; one that has none anywhere stays without.

    Args:
        parameters: the same, in the same order, on every rank of the group; frozen ones are passed over.
        group: the ranks that hold the same shard: the other dimension of the mesh.
        divisor: what the sum is divided by; None: the group's size, so that the result is the mean.
        bucket_bytes: the most that one all-reduce carries, unless one parameter is larger.
    """
    own = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    by = float(group.size()) if divisor is None else divisor
    sent: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
    for bucket in _buckets(own, bucket_bytes):
        flat = _flat(bucket)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        sent.append((bucket, flat, work))
    for bucket, flat, work in sent:
        work.wait()
        _put_back(bucket, flat, by)


def _flat(bucket: Sequence[torch.Tensor]) -> torch.Tensor:
    """The local gradients one after the other, and for each whether it is there."""
    parts, there = [], []
    for parameter in bucket:
        local, _ = _local_gradient(parameter)
        there.append(local is not None)
        parts.append((torch.zeros_like(_local(parameter)) if local is None else local).reshape(-1))
    return torch.cat([*parts, torch.tensor(there, dtype=parts[0].dtype, device=parts[0].device)])


def _put_back(bucket: Sequence[torch.Tensor], flat: torch.Tensor, divisor: float) -> None:
    there = flat[-len(bucket) :].tolist()
    values = flat[: -len(bucket)].div_(divisor)
    offset = 0
    for parameter, present in zip(bucket, there, strict=True):
        own = _local(parameter)
        part = values[offset : offset + own.numel()].view(own.shape)
        offset += own.numel()
        if not present:
            continue
        local, _ = _local_gradient(parameter)
        if local is not None:
            local.copy_(part)
        elif isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                part.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        else:
            parameter.grad = part.clone()


def _buckets(parameters: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Of one dtype and device, in the order of the parameters."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, _local(parameter).device), []).append(parameter)
    for members in kinds.values():
        ends = itertools.accumulate(_local(p).numel() * p.element_size() for p in members)
        bucket: list[torch.Tensor] = []
        begin = 0
        for parameter, end in zip(members, ends, strict=True):
            if bucket and end - begin > limit:
                yield bucket
                bucket, begin = [], end - _local(parameter).numel() * parameter.element_size()
            bucket.append(parameter)
        yield bucket


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, tuple[dist.ProcessGroup, ...]]:
    """This rank's part of the gradient, sharing its memory, and the groups over which the parts make up the whole."""
    gradient = parameter.grad
    if not isinstance(parameter, DTensor):
        assert not isinstance(gradient, DTensor), "a plain parameter has a distributed gradient"
        return gradient, ()
    mesh = parameter.device_mesh
    split = tuple(mesh.get_group(i) for i, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate))
    if gradient is None:
        return None, split
    assert isinstance(gradient, DTensor)
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local(), split
