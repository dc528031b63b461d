"""A script that evaluates every few steps, which it counts in the way that COUNT selects. Writes
its final state as one JSON line to OUTPUT."""

import hashlib
import json
import logging
import os
import random
from pathlib import Path

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.train import correct

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
torch.set_num_threads(1)
EVERY = 3
count_by = os.environ["COUNT"]


class Shuffled(torch.utils.data.Sampler[int]):
    """A sampler with its own generator, which is not seeded."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator_of_its_own = random.Random()

    def __iter__(self):
        return iter(self.generator_of_its_own.sample(range(self.length), self.length))


shoal.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
model, optimizer = shoal.as_distributed(net, optimizer, strategy=os.environ.get("STRATEGY", "ddp"))
x = torch.randn(80, 10, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
loader = shoal.ElasticDataLoader(dataset, global_batch_size=8, sampler=Shuffled(80))
validation = shoal.ElasticDataLoader(dataset, global_batch_size=16, train=False)
evaluated = []
committed = 0
for _ in loader.epochs(2):
    for i, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        committed += bool(optimizer.step())
        received = None
        if count_by == "every_steps":
            received = shoal.evaluate(model, validation, correct, every_steps=EVERY)
            shoal.save_checkpoint(os.environ["CHECKPOINTS"], keep=99, every_steps=EVERY)
        elif (count_by == "enumerate" and i % EVERY == 0) or (
            count_by == "own count" and committed % EVERY == 0
        ):
            received = shoal.evaluate(model, validation, correct)
        elif count_by == "plain save, enumerate" and i % EVERY == 0:
            shoal.save_checkpoint(os.environ["CHECKPOINTS"])
        if received is not None:
            evaluated.append([loader.global_step, received])
state = model.full_state_dict()
result = {
    "world": shoal.world_size(),
    "digest": hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest(),
    "evaluated": evaluated,
}
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))
