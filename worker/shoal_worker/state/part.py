"""What one rank holds of a state that no rank has whole, told so that it can be written as a share of the whole.

A strategy lays what is cut over the ranks into flat vectors. Its part of a state has, in the place of each such tensor, a view of a vector
on the meta device, which has the vector's length and no memory; beside it are the runs of the vectors that lie here. Which elements of
which tensor a run holds follows from where the views lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Adjacent elements of one vector."""

    vector: torch.Tensor
    """Flat, on the meta device."""
    begin: int
    """The first element's place in it."""
    values: torch.Tensor
    """Flat. Shares memory with the live state; may reach beyond the vector's end, as padding does."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A state in shards, from one rank's point of view."""

    state: Any
    """The whole state as one process would have it, with views on the meta device for what is cut. Equal on all ranks."""
    count: int
    """Number of shards that make the whole."""
    shards: Mapping[int, Sequence[Run]]
    """Those that this rank is to write, by number from 0. Over all ranks each is there once."""
