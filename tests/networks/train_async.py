"""The training script of tests with parameter servers. Writes the decrease of the loss as JSON to
OUTPUT."""

import json
import os
from pathlib import Path

import shoal
import torch
from torch import nn


def main() -> None:
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    net = nn.Linear(10, 1)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.05), strategy="async_sgd"
    )
    x = torch.randn(480, 10, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    for _ in loader.epochs(int(os.environ["EPOCHS"])):
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y).item()
    result = {"rank": shoal.rank(), "loss": loss, "without": y.square().mean().item()}
    (Path(os.environ["OUTPUT"]) / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
        json.dumps(result)
    )


if __name__ == "__main__":
    main()
