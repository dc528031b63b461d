"""What happens to the gradients after the schedule: summed over the copies of shared parameters, averaged over the data axis, clipped.

It comes after the schedule, and not from hooks in the backward pass: the reducer of torch's DDP does not see the second half of a split
backward pass and leaves its gradients unreduced, without a word. Gradients that no replica has stay None, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from shoal_worker.pipelining.links import Links, start_all_reduce
from shoal_worker.pipelining.split import SharedParameter

_BUCKET_BYTES: Final = 25 * 2**20


def sum_shared(
    shared: Sequence[SharedParameter], rank_of: Sequence[int], parameters: Mapping[str, nn.Parameter], links: Links, here: Sequence[bool]
) -> None:
    """Each copy of a shared parameter gets the sum of all copies' gradients, added in the order of their stages.

    Args:
        shared: Of the whole model, the same on every rank.
        rank_of: The rank of each stage.
        parameters: Those of this rank, by any of their names.
        links: To the pipeline's ranks.
        here: Whether a gradient of each of `shared` exists on any rank.
    """
    for one, exists in zip(shared, here, strict=True):
        ranks = list(dict.fromkeys(rank_of[stage] for stage in one.stages))
        if not exists or links.rank not in ranks or len(ranks) == 1:
            continue
        parameter = parameters[one.names[0]]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        owner, what = ranks[0], f"summing the gradients of {one.names[0]}"
        if links.rank == owner:
            for peer in ranks[1:]:
                other = torch.empty_like(gradient)
                links.receive(other, peer, what).wait()
                gradient = gradient + other
            for peer in ranks[1:]:
                links.send(gradient, peer, what)
                links.traffic.shared += gradient.numel() * gradient.element_size()
        else:
            links.send(gradient, owner, what)
            links.traffic.shared += gradient.numel() * gradient.element_size()
            links.finish_sends()
            gradient = torch.empty_like(gradient)
            links.receive(gradient, owner, what).wait()
        links.finish_sends()
        parameter.grad = gradient


def shared_exist(shared: Sequence[SharedParameter], parameters: Mapping[str, nn.Parameter], links: Links) -> list[bool]:
    """Whether any copy of each shared parameter has a gradient."""
    if not shared:
        return []
    own = [parameters.get(one.names[0]) for one in shared]
    found = torch.tensor([float(p is not None and p.grad is not None) for p in own], device=links.device)
    links.all_reduce(found, "comparing which shared parameters have gradients", dist.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


def sum_over(group: dist.ProcessGroup, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> int:
    """Sums the gradients over the ranks of a group, which all hold the same parameters. Returns the bytes reduced.

    `dtype`: what they are summed in; None: their own.
    """
    trainable = [p for p in parameters if p.requires_grad]
    total = 0
    running = []
    for bucket in _buckets(trainable):
        kind = dtype or bucket[0].dtype
        has = torch.tensor([float(p.grad is not None) for p in bucket], dtype=kind, device=bucket[0].device)
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(kind) for p in bucket]
        flat = torch.cat([*parts, has])
        total += flat.numel() * flat.element_size()
        running.append((bucket, flat, start_all_reduce(group, flat, "summing gradients over the data axis")))
    for bucket, flat, finish in running:
        finish()
        *parts, has = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for parameter, part, exists in zip(bucket, parts, has.tolist(), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if exists else None
    return total


def clip(
    parameters: Sequence[nn.Parameter], counted: Sequence[nn.Parameter], links: Links, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scales the gradients of `parameters` so that the norm over all stages is at most `max_norm`; returns the norm before, one number on
    all ranks.

    `counted`: those of this rank that no other rank counts.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    infinite = norm_type == float("inf")
    norms = [torch.linalg.vector_norm(g, norm_type).double() for g in gradients]
    if infinite:
        total = torch.stack(norms).max() if norms else torch.zeros((), dtype=torch.float64, device=links.device)
        links.all_reduce(total, "computing the norm of the gradients", dist.ReduceOp.MAX)
    else:
        total = sum((norm**norm_type for norm in norms), torch.zeros((), dtype=torch.float64, device=links.device))
        links.all_reduce(total, "computing the norm of the gradients")
        total = total ** (1 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return total


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Of one dtype each, in order, and of a size that is worth a message."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        if not buckets or buckets[-1][0].dtype != parameter.dtype or size >= _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
