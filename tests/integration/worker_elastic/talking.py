"""A script whose ranks exchange values after every step. Writes the values that it received as one
JSON file to OUTPUT."""

import json
import os
from pathlib import Path

import shoal
import torch
from torch import nn

torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
net = nn.Linear(3, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(72, 3)), global_batch_size=6
)
received = {}
for _ in loader.epochs(1):
    for (x,) in loader:
        model(x).square().mean().backward()
        committed = optimizer.step()
        optimizer.zero_grad()
        if not committed:
            continue
        step = loader.global_step
        total = shoal.all_reduce({"ranks": 1, "steps": torch.tensor([step])})
        everyones = shoal.gather([step, shoal.rank()])
        named = shoal.broadcast(f"rank {shoal.rank()} at {step}")
        shoal.barrier()
        received[step] = [total["ranks"], total["steps"].tolist(), everyones, named]
        shoal.print_once("behind step", step)
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
    json.dumps({"told": received})
)
