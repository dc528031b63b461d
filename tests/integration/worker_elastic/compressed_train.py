"""Trains with compressed gradients, which leave a residual in every step. Writes its final state as
one JSON line to OUTPUT."""

import hashlib
import json
import os
from pathlib import Path

import shoal
import torch
from torch import nn


def main() -> None:
    """Runs one training, configured by the environment."""
    torch.set_num_threads(1)
    micro = os.environ["MICRO"] == "1"
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.SGD(net.parameters(), 0.05),
        strategy=os.environ["STRATEGY"],
        gradient_compression=os.environ["COMPRESSION"],
    )
    x = torch.randn(240, 10, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = shoal.ElasticDataLoader(
        dataset, global_batch_size=24, micro_batch_size=6 if micro else None
    )
    lost = 0
    for _ in loader.epochs(2):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for inputs, labels in step:
                nn.functional.cross_entropy(model(inputs), labels).backward()
            lost += not optimizer.step()
            optimizer.zero_grad()
    state = model.full_state_dict()
    result = {
        "steps": loader.global_step,
        "lost": lost,
        "generation": shoal.generation(),
        "digest": hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest(),
    }
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
        json.dumps(result)
    )


main()
