"""The whole model's state, under the original names: gathered from the stages, and loaded into any number of them.

Tensors travel as bytes, all of one stage's rank together, so their dtypes do not matter. Nothing is written to disk here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.pipelining.links import Links
from shoal_worker.pipelining.split import Split, named_tensors

_CHUNK_BYTES: Final = 32 * 2**20


def state_names(module: nn.Module) -> tuple[str, ...]:
    """The keys of the model's state dict.

    Raises:
        ConfigurationError: it holds something other than tensors.
    """
    state = module.state_dict(keep_vars=True)
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ConfigurationError(f"the state {odd[:5]} is no tensor: pipeline stages can only gather tensors; keep it outside of the model")
    return tuple(state)


def gather(
    names: Sequence[str], module: nn.Module, split: Split, rank_of: Sequence[int], links: Links, *, rank0_only: bool
) -> dict[str, torch.Tensor]:
    """Copies of the tensors of these names; with `rank0_only` empty on other ranks than 0 of the pipeline. All ranks call it."""
    named = named_tensors(module)
    found: dict[int, torch.Tensor] = {}
    for chunk, owner in _chunks(names, named, split, rank_of):
        tensors = [named[name] for name in chunk]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if links.rank == owner:
            data = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        else:
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=links.device)
        _deliver(data, owner, links, rank0_only)
        if rank0_only and links.rank != 0:
            continue
        for tensor, part in zip(tensors, data.split(sizes), strict=True):
            found[id(tensor)] = part.clone().view(tensor.dtype).view(tensor.shape)
    if rank0_only and links.rank != 0:
        return {}
    return {name: found[id(named[name])] for name in names}


def load(state: Mapping[str, torch.Tensor], names: Sequence[str], module: nn.Module, split: Split, stages: Sequence[int]) -> None:
    """Writes this rank's part of a whole state.

    Raises:
        ConfigurationError: names are missing or unknown, or a shape differs; nothing is changed.
    """
    named = named_tensors(module)
    missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
    if missing or unknown:
        raise ConfigurationError(f"the state does not fit the model: it lacks {missing[:5]} and has {unknown[:5]} besides")
    wrong = [name for name in names if state[name].shape != named[name].shape]
    if wrong:
        raise ConfigurationError(
            f"the state does not fit the model: {wrong[0]!r} has shape {tuple(state[wrong[0]].shape)}, the model's "
            f"{tuple(named[wrong[0]].shape)}"
        )
    with torch.no_grad():
        for name in names:
            if set(split.placement[name]) & set(stages):
                named[name].copy_(state[name])


def _deliver(data: torch.Tensor, owner: int, links: Links, rank0_only: bool) -> None:
    if not rank0_only:
        links.broadcast(data, owner, "gathering the model's state")
    elif links.rank == owner != 0:
        links.send(data, 0, "gathering the model's state")
        links.finish_sends()
    elif links.rank == 0 != owner:
        links.receive(data, owner, "gathering the model's state").wait()
    if links.rank == owner:
        links.traffic.state += data.numel() * (min(1, links.size - 1) if rank0_only else links.size - 1)


def _chunks(names: Sequence[str], named: Mapping[str, torch.Tensor], split: Split, rank_of: Sequence[int]) -> list[tuple[list[str], int]]:
    """The names by owner, in pieces; tied ones once."""
    chunks: list[tuple[list[str], int]] = []
    open_chunks: dict[int, tuple[list[str], int]] = {}
    seen: set[int] = set()
    for name in names:
        tensor = named[name]
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        owner = rank_of[split.placement[name][0]]
        chunk, size = open_chunks.get(owner, ([], _CHUNK_BYTES))
        if size >= _CHUNK_BYTES:
            chunk, size = [], 0
            chunks.append((chunk, owner))
        chunk.append(name)
        open_chunks[owner] = (chunk, size + tensor.numel() * tensor.element_size())
    return chunks
