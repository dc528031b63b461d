"""A script whose ranks normalize over the samples of all ranks. Writes its result as one JSON file
to OUTPUT."""

import json
import os
from pathlib import Path

import shoal
import torch
from torch import nn

torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(3, 5),
    nn.SyncBatchNorm(5),
    nn.Tanh(),
    nn.Linear(5, 4),
    nn.SyncBatchNorm(4),
    nn.Linear(4, 1),
).double()
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.5), strategy=os.environ["STRATEGY"]
)
samples = torch.randn(72, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(samples), global_batch_size=8, shuffle=False
)
for _ in loader.epochs(2):
    for (x,) in loader:
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
trained = {name: value.tolist() for name, value in model.full_state_dict().items()}
received = {"trained": trained, "steps": loader.global_step, "world": shoal.world_size()}
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(received))
