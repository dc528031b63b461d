"""Optimizers that torch lacks, e.g. `shoal.optim.LAMB(net.parameters(), 1e-3)`. They are torch
optimizers; parameter servers run them too."""

from __future__ import annotations

from shoal_common.optimizers.for_torch import LAMB, DelayedNesterov, RowWiseAdagrad

__all__ = ["LAMB", "DelayedNesterov", "RowWiseAdagrad"]
