"""A script that asks for its rank at the top, before training, as scripts do that open a log.
Writes the answers as one JSON line to OUTPUT."""

import json
import os
from pathlib import Path

import shoal
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
shoal.init()
output = Path(os.environ["OUTPUT"])
group = shoal.process_group()
at_top = [
    shoal.is_joining(),
    shoal.rank(),
    shoal.world_size(),
    dist.get_rank(group),
    dist.get_rank(),
    group.rank(),
]
net = nn.Linear(2, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
everyones = [None]
if shoal.is_joining():  # torch itself reports a world of one
    dist.broadcast_object_list(everyones, group_src=0, group=group)
    dist.all_gather_object(everyones, "mine", group=group)
    assert everyones == ["mine"]
    assert shoal.broadcast("mine", from_rank=1) == "mine"
else:
    assert shoal.broadcast(shoal.rank(), from_rank=1) == 1
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(32, 2)), global_batch_size=4
)
for _ in loader.epochs(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
received = {
    "at_top": at_top,
    "in_the_end": [shoal.is_joining(), shoal.rank(), shoal.world_size(), dist.get_rank(group)],
}
shoal.shutdown()
(output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(received))
