"""Digests of the state with which a rank ended its loop over a loader. The coordinator compares the
digests of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Digests of the ranks' common state, taken when the script left its loop over a loader."""

    generation: int
    """Generation in which the rank worked; the generation determines the sharding."""
    step: int
    """Number of committed steps."""
    agreed: int
    """Last step after which all ranks were known to have the same state; 0 if none."""
    digests: Mapping[str, int]
    """Digests by the names of groups of tensors."""
