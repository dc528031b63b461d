"""Modules built on the meta device receive memory, and their optimizers keep referring to their
parameters."""

from __future__ import annotations

import torch
from shoal_worker.engine.state.parameters import materialize
from torch import nn


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    return net


def test_the_optimizer_holds_the_new_parameters() -> None:
    net = on_meta()
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters()}, {"params": [net[1].bias]}], lr=1.0
    )
    materialize(net, optimizer, torch.device("cpu"))
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [
        id(net[0].weight),
        id(net[0].bias),
        id(net[1].bias),
    ]
    assert not any(tensor.is_meta for tensor in net.state_dict().values())


def test_shared_tensors_stay_shared() -> None:
    net = on_meta()
    materialize(net, None, torch.device("cpu"))
    assert net[1].weight is net[0].weight
    assert isinstance(net[1].weight, nn.Parameter)
