"""Complete training steps over the NCCL backend on a device without a GPU: the ranks are threads
with real sessions and loaders."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import shoal
import torch
import torch.distributed as dist
from shoal_worker.api import shutdown
from shoal_worker.backends import worlds
from shoal_worker.backends.nccl.backend import NCCLBackend
from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.coordinator import fixed
from torch import nn

from tests.fake_device.autograd import passes_on_threads_of_autograd
from tests.fake_device.library import FakeCuda, in_threads, leaving_together
from tests.fake_device.machine import Machine

_TIMEOUT = timedelta(seconds=60)
_WORLD = 4
_STEPS = 3
_ON_THE_DEVICE = (
    "allreduce",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "recv",
    "send",
    "broadcast",
)


def model_with_rows(*, sparse: bool) -> nn.Module:
    """Returns a network that begins with an embedding; few of its rows are used in a step."""
    return nn.Sequential(
        nn.Embedding(20, 8, sparse=sparse),
        nn.Linear(8, 16),
        nn.Tanh(),
        *(nn.Linear(16, 16) for _ in range(5)),
        nn.Linear(16, 1),
    )


class Block(nn.Module):
    """A block that is gathered as one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def model_with_blocks() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), *(Block() for _ in range(6)), nn.Linear(8, 1))


def examples() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randint(0, 20, (48,), generator=draw), torch.randn(48, 1, generator=draw)
    )


def train(prototype: nn.Module, strategy: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = copy.deepcopy(prototype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(module, optimizer, strategy=strategy, **options)
    for x, y in shoal.ElasticDataLoader(examples(), global_batch_size=16, shuffle=True, seed=1):
        if strategy in ("pipeline", "hybrid"):
            model.train_step(x, y, nn.functional.mse_loss)
        else:
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return {name: value.clone() for name, value in state.items()}


def on_devices(
    machine: Machine, prototype: nn.Module, strategy: str, options: dict[str, Any]
) -> list[Any]:
    """Returns the result of each rank's training."""
    store, own, done = dist.HashStore(), threading.local(), threading.Barrier(_WORLD)

    class Own(NCCLBackend):
        device_type = "cpu"

        def __init__(self) -> None:
            super().__init__(own.device)

    def be(rank: int) -> dict[str, torch.Tensor]:
        own.device = FakeCuda(machine, rank)
        seat = worlds.Seat(
            rank=rank, world_size=_WORLD, store=store, timeout=_TIMEOUT, backend="nccl"
        )
        with worlds.entered(seat):
            with leaving_together(done, _TIMEOUT):
                trained = train(prototype, strategy, options)
            shutdown()
            return trained

    with (
        mock.patch.object(fixed, "backend_class", return_value=Own),
        worlds.installed(),
        passes_on_threads_of_autograd() as passes,
    ):
        outcomes = in_threads([lambda rank=rank: be(rank) for rank in range(_WORLD)])
        assert passes() >= _WORLD * _STEPS, outcomes
        return outcomes


def trained_as_by_one_process(strategy: str, options: dict[str, Any], *, sparse: bool) -> Machine:
    """Trains on devices and compares the result with that of one process. Checks that nothing is
    left behind and returns the devices."""
    torch.manual_seed(0)
    prototype = model_with_rows(sparse=sparse)
    (expected,) = shoal.launch(train, prototype, "ddp", {}, world_size=1)
    machine = Machine(seed=1)
    outcomes = on_devices(machine, prototype, strategy, options)
    assert not [each for each in outcomes if isinstance(each, BaseException)]
    for trained in outcomes:
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    assert not any(machine.busy(device) for device in range(_WORLD))
    # the subgroups, too, were finalized and not aborted
    assert all(stream.destroyed for stream in machine.streams)
    assert not machine.crashes
    assert not machine.frozen
    return machine


@pytest.mark.parametrize(
    ("strategy", "options", "sparse"),
    [
        ("ddp", {}, False),
        ("ddp", {}, True),
        ("zero1", {}, False),
        ("zero2", {}, False),
        ("zero3", {}, False),
        ("hsdp", {"shard_size": 2}, False),
        ("tensor", {}, False),
        ("pipeline", {"schedule": "1f1b", "micro_batches": 4}, False),
        ("pipeline", {"schedule": "zero_bubble", "micro_batches": 4}, False),
        (
            "hybrid",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batches": 4},
            False,
        ),
    ],
)
def test_training_on_devices_matches_one_process(
    strategy: str, options: dict[str, Any], sparse: bool
) -> None:
    trained_as_by_one_process(strategy, options, sparse=sparse)


@pytest.mark.parametrize(
    ("strategy", "options", "axes"),
    [
        ("hsdp", {"shard_size": 2}, 2),
        ("hybrid", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batches": 4}, 2),
        ("hybrid", {"tensor_parallel_size": 2, "data_parallel_strategy": "zero2"}, 2),
        ("zero3", {}, 0),
    ],
)
def test_split_groups_train_like_connected_ones(
    strategy: str, options: dict[str, Any], axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_NCCL_SPLIT", "1")
    machine = trained_as_by_one_process(strategy, options, sparse=False)
    assert max(stream.splits for stream in machine.streams) == axes


@pytest.mark.parametrize(
    ("strategy", "options", "most"),
    [
        ("zero2", {}, 0),
        ("zero3", {"shard_modules": [Block]}, 0),
        ("hsdp", {"shard_size": 2, "shard_modules": [Block]}, 0),
        # The ranks compare their batches in each step and, in the first, exchange the shapes of the
        # tensors between stages.
        ("pipeline", {"schedule": "1f1b", "micro_batches": 4}, _WORLD * _STEPS + _WORLD),
        ("local_sgd", {"sync_every": 3}, 0),
        ("local_sgd", {"sync_every": 3, "average_optimizer_state": True, "outer_momentum": 0.5}, 0),
    ],
)
def test_host_does_not_wait_for_blocks_during_a_step(
    strategy: str, options: dict[str, Any], most: int
) -> None:
    """Within a step, the host does not wait for blocks. Between steps it does, for parameters after
    an update and for the state at the end."""
    torch.manual_seed(0)
    prototype = model_with_blocks()
    local = strategy == "local_sgd"
    expected, *_ = shoal.launch(
        train,
        prototype,
        strategy if local else "ddp",
        options if local else {},
        world_size=_WORLD if local else 1,
    )
    in_steps: list[str] = []
    begin = Waits.begin

    def count(waits: Waits, what: str) -> None:
        world = worlds.own_world()
        step = (
            world.session.lifecycle.step
            if world is not None and world.session is not None
            else None
        )
        if step is not None and step.control is None and what in _ON_THE_DEVICE:
            in_steps.append(what)
        begin(waits, what)

    with mock.patch.object(Waits, "begin", count):
        outcomes = on_devices(Machine(seed=1), prototype, strategy, options)
    assert not [each for each in outcomes if isinstance(each, BaseException)]
    for trained in outcomes:
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
    assert len(in_steps) <= most, in_steps
