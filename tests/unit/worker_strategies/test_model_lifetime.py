"""A model without references is freed, so that a notebook can train one model after another."""

from __future__ import annotations

import gc
import weakref

import pytest
import shoal
import torch
from torch import nn

from tests.zygote.children import eventually

pytestmark = pytest.mark.usefixtures("existing_objects_kept")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "local_sgd"])
def test_a_model_is_freed_with_its_last_reference(strategy: str) -> None:
    def train() -> list[weakref.ref[object]]:
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        parameters = [weakref.ref(one) for one in net.parameters()]
        model, optimizer = shoal.as_distributed(
            net, torch.optim.AdamW(net.parameters(), 1e-2), strategy=strategy
        )
        for _ in range(2):
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shoal.shutdown()
        return [weakref.ref(net), weakref.ref(model), *parameters]

    left = shoal.launch(train, world_size=2)

    def all_are_freed() -> bool:
        gc.collect()
        return all(one() is None for ones in left for one in ones)

    # torch releases the results that a thread computed last only after that thread has ended
    eventually(all_are_freed, "the models to be freed", within_s=10)
