"""Clones: copies of the unsharded model that are independent of training."""

from __future__ import annotations

import gc
import weakref

import pytest
import shoal
import torch
from shoal_common.errors import PreconditionError
from torch import nn


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "local_sgd"])
def test_clone_is_the_unsharded_model_and_stays_unchanged(strategy: str) -> None:
    def body() -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
        net = nn.Sequential(nn.Embedding(5, 4), *blocks, nn.Linear(4, 5, bias=False))
        net[-1].weight = net[0].weight
        model, optimizer = shoal.as_distributed(
            net,
            torch.optim.AdamW(net.parameters(), 0.1),
            strategy=strategy,
            minimum_parameter_group_size=8,
        )
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.arange(12) % 5, torch.arange(12) % 3),
            global_batch_size=4,
        )

        def epoch() -> None:
            for x, y in loader:
                model.train_step(x, y, nn.functional.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()

        epoch()
        state, clone = model.full_state_dict(), model.clone()
        before = {name: value.clone() for name, value in state.items()}
        epoch()
        assert all(value.equal(before[name]) for name, value in state.items()), (
            "training changed the gathered state"
        )
        plain = getattr(clone, "module", clone)
        assert plain[-1].weight is plain[0].weight
        assert type(plain[0]) is nn.Embedding
        assert {name: value.tolist() for name, value in plain.state_dict().items()} == {
            n: v.tolist() for n, v in before.items()
        }
        clone.eval()
        assert clone(torch.tensor([1, 2])).shape == (2, 5)
        if plain is clone:
            clone.train()
            clone(torch.arange(5)).sum().backward()
            assert all(p.grad is not None for p in clone.parameters())
        epoch()

    shoal.launch(body, world_size=2)


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "zero1"])
def test_memory_of_a_clone_is_freed_when_it_is_dropped(strategy: str) -> None:
    net = nn.Linear(4, 4)
    model, _ = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)
    gc.disable()
    try:
        clone = model.clone()
        weight = weakref.ref(next(clone.parameters()))
        del clone
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("fresh_session")
def test_trained_module_cannot_be_replaced() -> None:
    net = nn.Linear(4, 4)
    model = shoal.as_distributed(net)
    with pytest.raises(PreconditionError, match=r"model\.module cannot be replaced"):
        model.module = nn.Linear(4, 4)
    assert model.module is net
