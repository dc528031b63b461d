"""Trains with Lightning in an elastic job: `Trainer(strategy=ShoalStrategy("zero2"))`, and
`Checkpoints` (docs/guides/trainers.md)."""

from shoal.integrations.lightning.checkpoints import Checkpoints
from shoal.integrations.lightning.strategy import ShoalStrategy

__all__ = ["Checkpoints", "ShoalStrategy"]
