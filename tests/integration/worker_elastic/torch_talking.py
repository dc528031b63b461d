"""A script whose ranks call torch.distributed's own functions after every step. Writes the values
that it received as one JSON file to OUTPUT."""

import json
import os
from pathlib import Path

import shoal
import torch
import torch.distributed as dist
from torch import nn

from tests.integration.worker_elastic.pacing import pace

torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
net = nn.Linear(3, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(72, 3)), global_batch_size=6
)
group = shoal.process_group()
received = {}
refused = []
for _ in loader.epochs(1):
    for (x,) in loader:
        pace(Path(os.environ["OUTPUT"], "hold"), loader.global_step, len(loader))
        model(x).square().mean().backward()
        committed = optimizer.step()
        optimizer.zero_grad()
        if not committed:
            continue
        step = loader.global_step
        while True:
            try:
                rank, world_size = dist.get_rank(group), dist.get_world_size(group)
                mean = torch.tensor([float(step)])
                dist.all_reduce(mean, group=group)
                mean /= dist.get_world_size(group)
                everyones = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
                dist.all_gather(everyones, torch.tensor([step, rank]), group=group)
                named = torch.tensor([step if rank == 0 else -1])  # only the root receives it
                dist.broadcast(named, src=0, group=group)
                dist.barrier(group=group)
                objects = [None] * world_size
                dist.all_gather_object(objects, {"step": step, "rank": rank}, group=group)
            except shoal.MembershipChanged as changed:
                refused.append([step, changed.reason])
            else:
                break
        received[step] = [mean.item(), [each.tolist() for each in everyones], named.item(), objects]
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
    json.dumps({"told": received, "refused": refused})
)
