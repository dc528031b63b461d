"""Digests of a rank's state at the end of its loop over a loader. The coordinator compares the
digests of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Digests of the state that must be the same on all ranks, computed when the script left its
    loop over a loader."""

    generation: int
    """The rank's generation. Digests of sharded state are comparable only within one generation."""
    step: int
    """Number of committed steps."""
    agreed: int
    """Last step whose state is known to have been the same on all ranks; 0 if there is none."""
    digests: Mapping[str, int]
    """Digest of each group of tensors, by name of the group."""
