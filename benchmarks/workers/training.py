"""The model, the optimizer and the data of all workers. They are the same for every system, so that
a step needs the same computation."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workers.workload import Workload

CLASSES = 10
LAYERS = 4
SAMPLES_PER_RANK = 6400
MANY_EPOCHS = 1_000_000

loss_fn = nn.CrossEntropyLoss()


def network(workload: Workload) -> nn.Module:
    """Returns an MLP. It consists of few large operations, so that the model's own overhead is
    small."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(workload.width, workload.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(workload.width, CLASSES))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD with momentum, at a rate small enough to train on random labels indefinitely."""
    return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


def dataset(workload: Workload) -> TensorDataset:
    """Returns random samples, the same in all processes."""
    generator = torch.Generator().manual_seed(1)
    count = SAMPLES_PER_RANK * workload.ranks
    inputs = torch.randn(count, workload.width, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))
