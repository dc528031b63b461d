"""Digests of the state with which a rank ended its loop over a loader. The coordinator compares
those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Digests of the ranks' common state, taken when the script left its loop over a loader."""

    generation: int
    """Generation that it worked in, which determines the sharding."""
    step: int
    """Number of committed steps."""
    agreed: int
    """Step after which all ranks were last known to agree; 0 if none."""
    digests: Mapping[str, int]
    """Digests by the names of groups of tensors."""
