"""Mirrors that are moved to host memory between updates do not change training, recovery or
checkpoints. The memory is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.features.several_models import SeveralEngines
from shoal_worker.sharding import mirrors
from shoal_worker.sharding.sharded_state import ShardedState
from shoal_worker.state.digest import state_digest
from torch import nn

from tests.fake_device.host_memory import MarkedMemory
from tests.simulation import oracle
from tests.simulation.scenario import parse

STRATEGIES = ("zero1", "zero2", "zero3", "fsdp")


def mirrored(optimizer: Any) -> list[torch.Tensor]:
    """Returns the shards that a rank mirrors, and their optimizer state."""
    held = optimizer._engine._held
    assert isinstance(held, ShardedState)
    found: list[torch.Tensor] = []
    for unit in held.units:
        found += [
            value
            for piece in unit.mirror.pieces
            for value in optimizer.optimizer.state.get(piece, {}).values()
            if value.dim()
        ]
        found += [unit.mirror.shard] if unit.apart else []
    return [each for each in found if each.numel()]


def train(strategy: str, options: dict[str, Any], away: list[bool]) -> int:
    """Trains one rank. In each step, records after the passes whether the mirrors are in host
    memory."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    model, optimizer = shoal.as_distributed(
        net, optimizer, strategy=strategy, consistency_check_every=3, **options
    )
    draw = torch.Generator().manual_seed(1)
    samples = torch.utils.data.TensorDataset(
        torch.randn(48, 6, generator=draw), torch.arange(48) % 2
    )
    for x, y in shoal.ElasticDataLoader(samples, global_batch_size=6, shuffle=False):
        nn.functional.cross_entropy(model(x), y).backward()
        away += [getattr(tensor, "is_away", False) for tensor in mirrored(optimizer)]
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return state_digest([model.full_state_dict(), optimizer.state_dict()])


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[MarkedMemory]:
    """The host memories of the ranks' devices."""
    made: list[MarkedMemory] = []

    def beside(device: torch.device) -> MarkedMemory:
        made.append(MarkedMemory())
        return made[-1]

    monkeypatch.setattr(mirrors, "memory_beside", beside)
    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mirrors_in_host_memory_give_the_same_bits(
    strategy: str, memories: list[MarkedMemory]
) -> None:
    here: list[bool] = []
    expected = shoal.launch(train, strategy, {"mirrors": "device"}, here, world_size=3)
    assert not any(here)
    assert memories == []
    away: list[bool] = []
    assert shoal.launch(train, strategy, {"mirrors": "host"}, away, world_size=3) == expected
    assert all(away)
    assert len(memories) == 3


def train_two(strategy: str, where: str, away: list[bool]) -> int:
    """Trains a discriminator and a generator. In each step, the discriminator's update is withdrawn
    and reinstated, as when a rank asks its peers whether the step counts. Records after the passes
    whether the mirrors of both are in host memory."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 6)),
        nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)),
    ]
    adams = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
    (generator, discriminator), optimizers = shoal.as_distributed(
        nets, adams, strategy=strategy, mirrors=where
    )
    draw = torch.Generator().manual_seed(1)
    samples = torch.utils.data.TensorDataset(
        torch.randn(24, 6, generator=draw), torch.randn(24, 3, generator=draw)
    )
    for real, noise in shoal.ElasticDataLoader(samples, global_batch_size=6, shuffle=False):
        (discriminator(generator(noise).detach()) - discriminator(real)).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(generator(noise)).mean().neg().backward()
        engine = current_session().engine
        assert isinstance(engine, SeveralEngines)
        engine.withdraw_updates()
        engine.reinstate_updates()
        away += [getattr(each, "is_away", False) for each in mirrored(optimizers[0])]
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return state_digest(
        [
            generator.full_state_dict(),
            discriminator.full_state_dict(),
            *(each.state_dict() for each in optimizers),
        ]
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_mirrors_in_host_memory_give_the_same_bits_for_several_models(
    strategy: str, memories: list[MarkedMemory]
) -> None:
    expected = shoal.launch(train_two, strategy, "device", [], world_size=3)
    away: list[bool] = []
    assert shoal.launch(train_two, strategy, "host", away, world_size=3) == expected
    assert all(away)
    assert away
    assert all(memory.moves for memory in memories)


def test_mirrors_stay_on_a_device_with_enough_memory(memories: list[MarkedMemory]) -> None:
    away: list[bool] = []
    shoal.launch(train, "zero2", {}, away, world_size=2)
    assert not any(away)
    assert [memory.moves for memory in memories] == [0, 0]


def test_mirrors_in_host_memory_with_offload_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r'mirrors="host" with offload=\'cpu\': .*leave mirrors out'
    ):
        shoal.ShardingConfiguration(mirrors="host", offload="cpu")
    with pytest.raises(
        ConfigurationError, match=r"mirrors='disk': expected \"device\" or \"host\""
    ):
        shoal.ShardingConfiguration(mirrors="disk")  # type: ignore[arg-type]  # the refused value


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MarkedMemory]:
    """Makes all devices appear short of memory, even in runs without faults."""
    oracle.reference.cache_clear()
    memory = MarkedMemory(wanted=True)
    monkeypatch.setattr(mirrors, "memory_beside", lambda device: memory)
    yield memory
    oracle.reference.cache_clear()


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        pytest.param(
            strategy,
            faults,
            id=f"{name}-{strategy}",
            marks=() if strategy == quick else pytest.mark.matrix,
        )
        for name, quick, faults in (
            ("a death", "zero3", ["b dies at point 60"]),
            (
                "a death and a joiner",
                "zero1",
                ["b dies at point 103", "at point 110 of a: one more joins"],
            ),
            ("two deaths", "zero2", ["a dies at point 90", "c dies at point 150"]),
        )
        for strategy in ("zero1", "zero2", "zero3")
    ],
)
def test_mirror_in_host_memory_replaces_its_owners_shard(
    strategy: str, faults: list[str], short_of_memory: MarkedMemory
) -> None:
    verdict = oracle.run(
        parse("\n".join([f"{strategy}, loop save, 4 ranks, replaced, schedule 1", *faults]))
    )
    assert verdict.ok, f"\n{verdict.scenario}\n\n{verdict}"
    assert short_of_memory.moves > 100
