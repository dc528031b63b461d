"""A script whose module counts its training passes in every way that a module can: in a buffer, in
extra state, in plain attributes and, under ddp, in a frozen parameter. The script counts its
batches three times in a registered object. Writes its result as one JSON file to
OUTPUT."""

import json
import os
from pathlib import Path
from typing import Any

import shoal
import torch
from torch import nn


class Counting(nn.Module):
    """A layer that counts its training passes."""

    buffer: torch.Tensor

    def __init__(self, *, writes_parameter: bool) -> None:
        super().__init__()
        self.linear, self.writes_parameter = nn.Linear(10, 1), writes_parameter
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("buffer", torch.tensor(0))
        self.number, self.tensor, self.extra = 0, torch.zeros(()), {"passes": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                if self.writes_parameter:
                    self.frozen.add_(1)
                self.buffer += 1
                self.number += 1
                self.tensor += 1
            self.extra["passes"] += 1
        output: torch.Tensor = self.linear(x)
        return output

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.extra)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = dict(state)


class Seen:
    """An object that the script registers: batches received, passed through the model, stepped."""

    def __init__(self) -> None:
        self.batches = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
strategy = os.environ["STRATEGY"]
net = Counting(writes_parameter=strategy == "ddp")
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 0.01), strategy=strategy
)
x = torch.randn(80, 10, generator=torch.Generator().manual_seed(1))
loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x), global_batch_size=8)
seen = Seen()
shoal.register_state(seen=seen)
lost = 0
for _ in loader.epochs(2):
    for (inputs,) in loader:
        seen.batches[0] += 1
        model(inputs).square().mean().backward()
        seen.batches[1] += 1
        lost += not optimizer.step()
        seen.batches[2] += 1
        optimizer.zero_grad()
state: dict[str, Any] = model.full_state_dict()
result = {
    "steps": loader.global_step,
    "lost": lost,
    "seen": seen.batches.tolist(),
    "frozen": state["frozen"].item(),
    "buffer": state["buffer"].item(),
    "extra": state["_extra_state"],
    "number": net.number,
    "tensor": net.tensor.item(),
}
Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))
