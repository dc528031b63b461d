"""Scripts with a common mistake: rank 1 omits a call that the other rank makes in its third step.
MISTAKE selects the call: "step" is optimizer.step() in a loop that does not use Shoal's loader;
"second" is the optimizer of the second of two models."""

import os

import shoal
import torch
from torch import nn

torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
mistake, strategy = os.environ["MISTAKE"], os.environ["STRATEGY"]
# small layers are not sharded
options = {"minimum_parameter_group_size": 1} if strategy == "tensor" else {}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


x, y = torch.randn(64, 10), torch.arange(64) % 2
if mistake == "step":
    net = network()
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
    )
    for number in range(8):
        nn.functional.cross_entropy(model(x), y).backward()
        if number != 2 or shoal.rank() == 0:
            optimizer.step()
            optimizer.zero_grad()
else:
    nets = network(), network()
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    models, optimizers = shoal.as_distributed(nets, optimizers, strategy=strategy, **options)
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x, y), global_batch_size=8)
    for inputs, labels in loader:
        for number in [0] if loader.global_step == 2 and shoal.rank() == 1 else [0, 1]:
            nn.functional.cross_entropy(models[number](inputs), labels).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()
