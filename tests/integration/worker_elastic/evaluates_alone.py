"""A script with a common mistake: what all ranks do together is done by rank 0 alone."""

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.train import correct

torch.set_num_threads(1)
shoal.init()
net = nn.Linear(10, 2)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
data = torch.utils.data.TensorDataset(torch.randn(32, 10), torch.arange(32) % 2)
for x, y in shoal.ElasticDataLoader(data, global_batch_size=8):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if shoal.rank() == 0:
        shoal.evaluate(model, shoal.ElasticDataLoader(data, global_batch_size=8, train=False), correct)
