"""A script with a common mistake: rank 0 alone calls an operation that all ranks must call. With
IN_STEP all ranks call it, but in the middle of a step."""

import os

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.train import correct

torch.set_num_threads(1)
in_step = "IN_STEP" in os.environ
shoal.init()
net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1), strategy=os.environ["STRATEGY"]
)
data = torch.utils.data.TensorDataset(torch.randn(32, 10), torch.arange(32) % 2)
validation = shoal.ElasticDataLoader(data, global_batch_size=8, train=False)
for x, y in shoal.ElasticDataLoader(data, global_batch_size=8):
    nn.functional.cross_entropy(model(x), y).backward()
    if in_step:
        shoal.evaluate(model, validation, correct)
    optimizer.step()
    optimizer.zero_grad()
    if shoal.rank() == 0 and not in_step:
        shoal.evaluate(model, validation, correct)
