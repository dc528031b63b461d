"""Weighted means over the ranks of whatever each of them holds: parameters, buffers, optimizer state.

How the ranks reach each other is the caller's: within a step over the group, in an operation over its channel. All of it runs on the
calling thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal_worker.elastic.group import Channel, LocalChannel
from shoal_worker.state.digest import bytes_of

Add = Callable[[torch.Tensor], object]
"""Sums a flat tensor over all ranks, in place."""
Tell = Callable[[bytes], list[bytes]]
"""Sends some bytes to all ranks and returns everybody's, in rank order."""

_CHUNK_ELEMENTS = 2 << 20


def adding(channel: Channel) -> Add:
    """Sums by telling everybody everything, in rank order: for operations, which are rare and over fewer ranks than the group has."""

    def add(tensor: torch.Tensor) -> None:
        if isinstance(channel, LocalChannel):
            return
        for chunk in tensor.split(_CHUNK_ELEMENTS):
            told = channel.exchange(bytes(bytes_of(chunk)))
            parts = [torch.frombuffer(bytearray(part), dtype=tensor.dtype) for part in told]
            chunk.copy_(torch.stack(parts).sum(0))

    return add


@torch.no_grad()
def weighted_mean(tensors: Sequence[torch.Tensor], share: float, add: Add) -> list[torch.Tensor]:
    """The sum over the ranks of each one's `tensors` times its `share`; shares add up to 1. One sum for each dtype.

    Whole numbers are rounded.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    means: dict[int, torch.Tensor] = {}
    for dtype, indices in by_dtype.items():
        exact = dtype.is_floating_point or dtype.is_complex
        flat = torch.cat([tensors[i].detach().reshape(-1).to(dtype if exact else torch.float64) for i in indices]).mul_(share)
        add(torch.view_as_real(flat).view(-1) if dtype.is_complex else flat)
        parts = (flat if exact else flat.round().to(dtype)).split([tensors[i].numel() for i in indices])
        means.update((i, part.view(tensors[i].shape)) for i, part in zip(indices, parts, strict=True))
    return [means[i] for i in range(len(tensors))]


def mean_optimizer_state(state: dict[int, dict[str, Any]], tell: Tell, add: Add, device: torch.device) -> dict[int, dict[str, Any]]:
    """The mean over the ranks that have one of an optimizer's `state`, by parameter number as in `state_dict()["state"]`.

    Each entry is a mean over the ranks that have that parameter's. What is no tensor is that of the first of them.
    """
    described = [json.loads(told) for told in tell(json.dumps(_describe(state)).encode())]
    merged: dict[str, dict[str, Any]] = {}
    for entries in described:
        for number, entry in entries.items():
            merged.setdefault(number, entry)
    if not merged:
        return {}
    holders = torch.tensor([sum(number in entries for entries in described) for number in merged], dtype=torch.float64)
    places: list[tuple[int, str, float, bool]] = []
    parts: list[torch.Tensor] = []
    for (number, entry), count in zip(merged.items(), holders.tolist(), strict=True):
        for key, kind in entry.items():
            if "shape" in kind:
                own = state[int(number)][key] if int(number) in state else None
                dtype = getattr(torch, kind["dtype"])
                parts.append(own.to(device) if own is not None else torch.zeros(kind["shape"], dtype=dtype, device=device))
                places.append((int(number), key, count, kind["on_host"]))
    sums = weighted_mean(parts, 1.0, add)
    mean: dict[int, dict[str, Any]] = {
        int(number): {key: kind.get("value") for key, kind in entry.items()} for number, entry in merged.items()
    }
    for (number, key, count, on_host), total in zip(places, sums, strict=True):
        exact = total.is_floating_point() or total.is_complex()
        quotient = total / count if exact else (total.double() / count).round().to(total.dtype)
        mean[number][key] = quotient.cpu() if on_host else quotient
    return mean


def _describe(state: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        str(number): {
            key: {
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
                "on_host": value.device.type == "cpu",
            }
            if isinstance(value, torch.Tensor)
            else {"value": value}
            for key, value in entry.items()
        }
        for number, entry in state.items()
    }
