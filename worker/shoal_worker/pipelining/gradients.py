"""After the schedule: the gradients of parameters that several stages hold are summed over their copies.

It comes after the schedule, and not from hooks in the backward pass: the reducer of torch's DDP does not see the second half of a split
backward pass and leaves its gradients unreduced, without a word. Gradients that no copy has stay None, as in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shoal_worker.pipelining.links import Links
from shoal_worker.pipelining.split import SharedParameter


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
