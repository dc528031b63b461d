"""Whether what several ranks hold in common is the same on all of them: now and then, by digests.

Replicas drift apart without a word when memory or arithmetic fails on one machine, or when a script changes parameters on one rank alone.
What a replica holds in common with others, and under which label, says the strategy (`TrainingEngine.in_common`); here ranks are compared.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from shoal_worker.state.digest import bytes_of


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """64-bit digest of the bytes of some tensors, one after the other."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.intdigest()


def state_tensors(state: Mapping[Any, Mapping[str, Any]], parameters: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The tensors of an optimizer's state, of these parameters in this order."""
    for parameter in parameters:
        own = state.get(parameter, {})
        yield from (value for _, value in sorted(own.items()) if isinstance(value, torch.Tensor))


def disagreement(told: Sequence[Mapping[str, int]]) -> str | None:
    """Which ranks hold something else than the others under one label, for an error; None: all agree. `told`: by rank."""
    for label in sorted({label for each in told for label in each}):
        held = {rank: each[label] for rank, each in enumerate(told) if label in each}
        counts = Counter(held.values())
        if len(counts) == 1:
            continue
        most, number = counts.most_common(1)[0]
        others = [rank for rank, digest in held.items() if digest != most]
        if 2 * number <= len(held):
            return f"ranks {list(held)} hold different values of {label}"
        return f"{', '.join(f'rank {rank}' for rank in others)}, of ranks {list(held)}, holds other values of {label} than the rest"
    return None
