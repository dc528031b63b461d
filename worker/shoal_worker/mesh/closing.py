"""What all ranks know of a step once it is closed: see strategies/mesh.py for what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_worker.mesh.parts import Settings


@dataclass(kw_only=True)
class Closing:
    """Travels to ranks that missed it."""

    number: int
    """Which step of this model it is, from 1."""
    squared_norm: float
    """Of the mean gradients."""
    scale: float = 1.0
    """Of the gradients, by clipping."""
    skipped: bool = False
    """A GradScaler found infinities: the step counts, but nothing is updated."""
    settings: Settings | None = None
    """Of the parameter groups, when the step was applied."""
