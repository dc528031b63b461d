"""A training script whose batches are made by data workers. After step 5 it waits for the file
`go`, so that a spare can arrive in time."""

import json
import os
import time
from pathlib import Path

import shoal
import torch
from torch import nn

torch.set_num_threads(1)


class Slow(torch.utils.data.Dataset):
    """Takes about as long to make a batch as a step takes, so that a batch is always in
    the making."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        x = torch.randn(8) + index / 240
        return x, (x.sum() > 4).long()


shoal.init()
output = Path(os.environ["OUTPUT"])
net = nn.Linear(8, 2)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
loader = shoal.ElasticDataLoader(Slow(), global_batch_size=24, num_workers=1)
for _ in loader.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.05)
        while loader.global_step == 5 and not (output / "go").exists():
            time.sleep(0.01)
result = {"steps": loader.global_step, "world": shoal.world_size()}
(output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))
