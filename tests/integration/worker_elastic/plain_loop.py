"""A script with torch's own loader, whose lost batches are dropped, and with its own count of
committed steps. Writes its final state as one JSON line to OUTPUT."""

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
shoal.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
model, optimizer = shoal.as_distributed(
    net,
    torch.optim.AdamW(net.parameters(), 1e-2),
    strategy=os.environ["STRATEGY"],
    consistency_check_every=0,
)
x = torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
loader = torch.utils.data.DataLoader(dataset, batch_size=4)
committed, dropped, evaluated = 0, [], []
for epoch in range(2):
    for number, (inputs, labels) in enumerate(loader):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if optimizer.step():
            committed += 1
        else:
            dropped.append((epoch, number))
        optimizer.zero_grad()
        if committed % 3 == 0:
            evaluated.append([committed, shoal.evaluate(model, loader, correct)])
        received = shoal.evaluate(model, loader, correct, every_steps=4)
        if received is not None:
            evaluated.append(["every 4", received])
state = model.full_state_dict()
result = {
    "digest": hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest(),
    "committed": committed,
    "dropped": dropped,
    "evaluated": evaluated,
}
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))
