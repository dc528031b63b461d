"""A small problem for tests that train in a world of one."""

from __future__ import annotations

import torch
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def data(samples: int = 40) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))
