"""hsdp shards state over the ranks of a replica and sums gradients over replicas."""

from __future__ import annotations

from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.contract.generation import topology_of
from shoal_worker.sharding.layout import Division, in_replicas
from torch import nn

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MAX_NORM = 0.3


def make(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(
        nn.Linear(6, 16), nn.Sequential(*blocks), nn.BatchNorm1d(16), nn.Linear(16, 2)
    ).to(dtype)


def train(
    *, micro: bool, shard_size: int = 2, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Trains one rank. Returns the full state, the metadata, and the number of elements of
    optimizer state on this rank."""
    net = make(dtype)
    options = {"minimum_parameter_group_size": 64, "shard_size": shard_size, **options}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.Adam(net.parameters(), 0.01), strategy="hsdp", **options
    )
    data = torch.utils.data.TensorDataset(X.to(dtype))
    loader = shoal.ElasticDataLoader(
        data, global_batch_size=8, micro_batch_size=2 if micro else None, shuffle=False
    )
    for _ in loader.epochs(2):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for (x,) in step:
                model(x).square().mean().backward()
            model.clip_grad_norm_(MAX_NORM)
            assert optimizer.step()
            optimizer.zero_grad()
    held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return model.full_state_dict(), model.get_model_metadata(), held


def test_four_ranks_in_two_replicas_train_like_one_process_with_half_of_the_state_each() -> None:
    alone = make()
    optimizer = torch.optim.Adam(alone.parameters(), 0.01)
    for start in [0, 8, 16] * 2:
        for part in range(start, start + 8, 2):
            (alone(X[part : part + 2]).square().mean() / 4).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    ranks = shoal.launch(lambda: train(micro=True), world_size=4)
    numel = sum(p.numel() for p in alone.parameters())
    for state, metadata, held in ranks:
        for name, value in alone.named_parameters():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)
        assert metadata["layout"] == {
            "sharded": ["optimizer", "gradients", "parameters"],
            "shards": 2,
            "replicas": 2,
            "mirrored": False,
        }
        assert held <= numel / 2 + 16 * 4
    assert sum(held for _, _, held in ranks) == 2 * numel


def test_deterministic_results_do_not_depend_on_the_replicas() -> None:
    def bits(world_size: int, shard_size: int) -> list[dict[str, torch.Tensor]]:
        ranks = shoal.launch(
            lambda: train(
                micro=True, deterministic=True, dtype=torch.float32, shard_size=shard_size
            ),
            world_size=world_size,
        )
        return [state for state, *_ in ranks]

    (one,) = bits(1, 1)
    for state in [*bits(4, 2), *bits(4, 1), *bits(3, 2)]:
        assert [name for name in one if not state[name].equal(one[name])] == []


@pytest.mark.parametrize(
    ("hosts", "wanted", "shards"),
    [
        ("aabb", None, 2),
        ("aaaabbb", None, 7),
        ("aabb", 4, 4),
        ("aaabbb", 2, 2),
        ("aaabbb", 4, 6),
        ("a", None, 1),
        ("ab", 8, 2),
        ("abc", 1, 1),
    ],
)
def test_replicas_have_at_least_a_hosts_ranks_and_equal_sizes(
    hosts: str, wanted: int | None, shards: int
) -> None:
    assert in_replicas(topology_of(list(hosts)), wanted).shards == shards


def test_single_replica_is_mirrored_and_several_replicas_are_not() -> None:
    several, one = Division(world_size=4, shards=2), Division(world_size=4, shards=4, stride=2)
    assert [several.held(rank) for rank in range(4)] == [[0], [1], [0], [1]]
    assert [one.held(rank) for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_impossible_shard_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shard_size=0: expected"):
        shoal.launch(lambda: train(micro=False, shard_size=0), world_size=1)
