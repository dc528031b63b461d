"""Gathers the full state of a sharded model and optimizer outside of training, and loads it again.
Runs on several ranks, with STRATEGY."""

import os

import shoal
import torch
from torch import nn

EXPECTED = "expected.safetensors"


def main() -> None:
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    with torch.device("cpu" if shoal.rank() == 0 else "meta"):
        net = nn.Sequential(
            nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 2)
        )
    first, others = (
        list(net[0].parameters()),
        [p for layer in list(net)[1:] for p in layer.parameters()],
    )
    groups = [{"params": first, "lr": 1e-3}, {"params": others}]
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(groups, 1e-2), strategy=os.environ["STRATEGY"]
    )
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = shoal.ElasticDataLoader(dataset, global_batch_size=48)
    for _ in loader.epochs(2):
        for inputs, labels in loader:
            model.train_step(inputs, labels, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    state, whole, data = optimizer.state_dict(), model.full_state_dict(), model.serialize()
    model.with_parameters({"0.bias": torch.zeros(32)})
    assert not model.gather_full_parameters()["0.bias"].any()
    assert not model.module[0].weight.requires_grad or model.predict(x[:4]).shape == (4, 2)
    model.deserialize(data)
    optimizer.deserialize(optimizer.serialize())
    optimizer.load_state_dict(state)
    assert all(value.equal(whole[name]) for name, value in model.full_state_dict().items())
    again = optimizer.state_dict()
    assert [group["lr"] for group in again["param_groups"]] == [1e-3, 1e-2]
    for index, values in state["state"].items():
        assert all(value.equal(again["state"][index][key]) for key, value in values.items())

    plain = nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 2)
    )
    plain.load_state_dict(whole)
    torch.optim.AdamW(
        [{"params": list(plain[0].parameters())}, {"params": list(plain[1:].parameters())}]
    ).load_state_dict(state)
    model.save_model(os.environ["OUTPUT"] + "/model.safetensors")
    model.load_model(os.environ["OUTPUT"] + "/model.safetensors")


if __name__ == "__main__":
    main()
