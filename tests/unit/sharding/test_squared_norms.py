"""The norm of a rank's gradients is correct for squares beyond float32 and needs few kernels on a
device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shoal_worker.sharding.gradients import squared_norms
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts the operations that would be kernels on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("length", [0, 1, 70_000])
def test_squares_beyond_float32_are_summed(length: int) -> None:
    gradient = torch.full((length,), 1e30)
    assert squared_norms([gradient, torch.tensor([3.0])]).tolist() == pytest.approx(
        [length * float(gradient[:1].double().sum()) ** 2, 9.0]
    )
    assert squared_norms([]).sum() == 0


def test_device_shard_of_any_size_takes_a_few_kernels_without_a_host_wait() -> None:
    """The norms of shards of any size need a few kernels and no wait for the device. The meta
    device stands in for a real one: reading a value from it raises an error."""
    shards = [
        torch.empty(100_000_000, device="meta"),
        torch.empty(7, device="meta", dtype=torch.bfloat16),
    ]
    with Counted() as counted:
        assert squared_norms(shards).device.type == "meta"
    assert len(counted.calls) <= 3 * len(shards) + 1, counted.calls
