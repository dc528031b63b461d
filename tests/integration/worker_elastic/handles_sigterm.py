"""A script that sets its own SIGTERM handler, or ignores the signal. WHEN selects whether it does
so before or after `shoal.init()`."""

import json
import logging
import os
import signal
from pathlib import Path

import shoal
import torch
from torch import nn

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
output, when = Path(os.environ["OUTPUT"]), os.environ["WHEN"]
signals = []
if when == "before":
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
elif when == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
shoal.init()
if when == "after":
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
net = nn.Linear(2, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
loader = shoal.ElasticDataLoader(
    torch.utils.data.TensorDataset(torch.ones(32, 2)), global_batch_size=4
)
last = 10**9 if when == "before" else 10
for _ in loader.epochs(10**6):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loader.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if loader.global_step == last:
            break
    if loader.global_step >= last:
        break
received = {"signals": signals, "steps": loader.global_step}
(output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(received))
