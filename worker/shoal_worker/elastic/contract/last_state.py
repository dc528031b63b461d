"""Digests of the state that a rank had when it ended its loop over a loader. The coordinator
compares the digests of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Digests of the state that all ranks have in common, computed when the script left its loop
    over a loader."""

    generation: int
    """Generation in which the rank worked. Digests of sharded state are comparable only within one
    generation."""
    step: int
    """Number of committed steps."""
    agreed: int
    """Last step after which all ranks were known to have the same state; 0 if none."""
    digests: Mapping[str, int]
    """Name of a group of tensors -> digest of the group."""
