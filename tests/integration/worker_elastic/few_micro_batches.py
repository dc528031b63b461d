"""Trains with fewer micro-batches per step than ranks, from the first step on. Runs on three ranks,
with STRATEGY."""

import os

import shoal
import torch
from torch import nn


def main() -> None:
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 40), nn.Sequential(*[nn.Linear(40, 40) for _ in range(3)]), nn.Linear(40, 2)
    )
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9), strategy=os.environ["STRATEGY"]
    )
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(x), global_batch_size=16, micro_batch_size=8
    )
    for _ in loader.epochs(1):
        for step in loader.steps():
            for (inputs,) in step:
                model(inputs).square().mean().backward()
            assert optimizer.step()
            optimizer.zero_grad()
    assert all(value.isfinite().all() for value in model.full_state_dict().values())


if __name__ == "__main__":
    main()
