"""A script with two training loaders, one of whose loops is left early, and with common code around
the loops: it inspects a batch, runs a forward pass before the loop, evaluates between loops, and
has a scheduler for each epoch. Writes its final state as one JSON line to OUTPUT."""

import hashlib
import json
import logging
import os
from pathlib import Path

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.train import correct

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
torch.set_num_threads(1)


def dataset(seed: int) -> torch.utils.data.TensorDataset:
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def train(
    loader: shoal.ElasticDataLoader, scheduler: torch.optim.lr_scheduler.LRScheduler, most: int
) -> None:
    """Trains for at most `most` steps of an epoch, counted by the loader: a joiner starts in the
    middle of the epoch, and a lost step does not count."""
    for step in loader.steps():
        for x, y in step:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if loader.step == most:
            break


output = Path(os.environ["OUTPUT"])
look = os.environ.get("LOOK") == "1"
shoal.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), deterministic=not look
)
first = shoal.ElasticDataLoader(dataset(1), global_batch_size=16, micro_batch_size=4, name="first")
second = shoal.ElasticDataLoader(
    dataset(2), global_batch_size=16, micro_batch_size=4, name="second"
)
validation = shoal.ElasticDataLoader(dataset(3), global_batch_size=48, train=False)
if "CHECKPOINTS" in os.environ:
    shoal.resume(os.environ["CHECKPOINTS"])
if look:
    next(iter(next(first.steps())))
    x, y = dataset(1)[:16]
    # before the loop: in a joiner this is not a step
    nn.functional.cross_entropy(model(x), y).backward()
    shoal.evaluate(model, validation, correct)
seen = []
for epoch in first.epochs(int(os.environ["EPOCHS"])):
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    # a new one in each epoch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    train(first, scheduler, most=2)
    shoal.evaluate(model, validation, correct)
    train(second, scheduler, most=99)
    seen.append((epoch, first.epoch, second.epoch))
    if "CHECKPOINTS" in os.environ:
        shoal.save_checkpoint(os.environ["CHECKPOINTS"])
result = {
    "steps": first.global_step + second.global_step,
    "second": second.global_step,
    "world": shoal.world_size(),
    "seen": seen[-1:],
    "digest": hashlib.sha256(
        b"".join(t.numpy().tobytes() for t in model.full_state_dict().values())
    ).hexdigest(),
}
shoal.shutdown()
(output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))
