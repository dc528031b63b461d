"""local_sgd in a world of one, the options that it refuses, and the averages that its ranks
compute."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.replicated.rounds import mean_optimizer_state, weighted_mean
from torch import nn

from tests.unit.worker_elastic.ranks import Room
from tests.unit.worker_strategies.small_problem import data, network

pytestmark = pytest.mark.usefixtures("fresh_session")


def start(**options: Any) -> tuple[Any, Any]:
    net = network()
    pair: tuple[Any, Any] = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy="local_sgd", **options
    )
    return pair


def test_single_process_is_bitwise_plain_torch() -> None:
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    model, distributed = start(sync_every=2)
    for x, y in torch.utils.data.DataLoader(data(), batch_size=8):
        for net, stepped in ((plain, optimizer), (model, distributed)):
            stepped.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            stepped.step()
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), model.full_state_dict().values(), strict=True)
    )


def test_a_round_ends_with_the_epoch_or_where_the_script_says() -> None:
    model, optimizer = start(sync_every=3)
    loader = shoal.ElasticDataLoader(data(), global_batch_size=8)
    seen = []
    for number, (x, y) in enumerate(loader):
        assert model.train_step(x, y, nn.functional.cross_entropy) > 0
        if number == 1:
            optimizer.synchronize_parameters()
        assert optimizer.step()
        seen.append(model.steps_in_round)
    assert seen == [1, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 0},
        {"sync_every": 2.5},
        {"outer_nesterov": True},
        {"outer_momentum": 1.0},
        {"outer_learning_rate": 0.0},
        {"deterministic": True},
        {"loss_reduction": "sum"},
        {"auto_sync_gradients": False},
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        start(**options)


def test_a_round_with_steps_of_two_loaders_is_refused() -> None:
    model, optimizer = start(sync_every=3)
    first, second = (
        shoal.ElasticDataLoader(data(), global_batch_size=8, name=name)
        for name in ("first", "second")
    )
    x, y = next(iter(first))
    model.train_step(x, y, nn.functional.cross_entropy)
    optimizer.step()
    with pytest.raises(PreconditionError, match=r"loader 'second'.*sync_every=1"):
        next(iter(second))


def test_mean_keeps_dtypes_and_rounds_integers() -> None:
    def rank(number: int) -> list[torch.Tensor]:
        mine = [
            torch.full((2,), number + 1.0),
            torch.full((), 3 * number),
            torch.full((1, 2), number + 0.5j),
        ]
        return weighted_mean(mine, [0.25, 0.75][number], Ends(room, number).add)

    room = Room(2)
    with ThreadPoolExecutor(2) as pool:
        for means in pool.map(rank, range(2)):
            assert means[0].tolist() == [1.75, 1.75]
            assert (means[1].tolist(), means[1].dtype) == (2, torch.int64)
            assert means[2].tolist() == [[0.75 + 0.5j] * 2]


def test_rank_without_optimizer_state_receives_the_mean_of_the_others() -> None:
    states: list[dict[int, dict[str, Any]]] = [
        {
            0: {"step": torch.tensor(4.0), "exp_avg": torch.tensor([1.0, 3.0]), "note": None},
            1: {"step": torch.tensor(2.0)},
        },
        {},
        {0: {"step": torch.tensor(4.0), "exp_avg": torch.tensor([3.0, 5.0]), "note": None}},
    ]

    def rank(number: int) -> dict[int, dict[str, Any]]:
        ends = Ends(room, number)
        return mean_optimizer_state(states[number], ends.exchange, ends.add, torch.device("cpu"))

    room = Room(3)
    with ThreadPoolExecutor(3) as pool:
        for mean in pool.map(rank, range(3)):
            assert mean[0]["exp_avg"].tolist() == [2.0, 4.0]
            assert (float(mean[0]["step"]), float(mean[1]["step"]), mean[0]["note"]) == (
                4.0,
                2.0,
                None,
            )


class Ends:
    """One rank's connections to the other ranks."""

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self._rank, self._number = room, rank, -1

    def exchange(self, value: Any) -> list[Any]:
        self._number += 1
        return self._room.gather(self._number, self._rank, value)

    def add(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self.exchange(tensor.clone())).sum(0))
