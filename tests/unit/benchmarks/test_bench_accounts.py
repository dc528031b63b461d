"""Table T8 (traffic and memory): counts of bytes on connections and of allocations, compared with
the formulas."""

from __future__ import annotations

import os
import socket

import pytest
import shoal
import torch

from benchmarks.memory_and_wire import CASES, Account
from benchmarks.workers.account import Live, _pieces
from benchmarks.workers.wire import traffic


def test_traffic_is_bytes_written_to_connections_counted_once_whether_read_or_not() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as here,
    ):
        there, _ = listener.accept()
        with there, socket.socket(fileno=os.dup(here.fileno())):
            before = traffic()
            here.sendall(bytes(50_000))
            there.sendall(bytes(7))
            here.recv(7)
            counted = traffic().since(before)
            assert counted.sent == 50_007


def test_freed_memory_is_not_counted() -> None:
    live = Live()
    live.changed(1000, 100)
    live.changed(2000, 50)
    live.changed(1000, -100)
    assert live.bytes == 50


def test_blocks_overlapped_by_a_new_allocation_count_as_freed() -> None:
    live = Live()
    for address in (1000, 1100, 1200):
        live.changed(address, 100)
    live.changed(1050, 100)  # overlaps the first two blocks
    assert live.bytes == 200
    live.changed(5000, -10)  # a block that was allocated before the counting began
    assert live.bytes == 200


def test_account_reports_the_rank_with_the_most_memory_and_the_mean_traffic() -> None:
    rank = {
        "model": 100,
        "parameters": 50,
        "gradients": 50,
        "optimizer": 100,
        "peak": 400,
        "sent": 180.0,
        "received": 90.0,
    }
    mirrors = {
        "mirrored_parameters": 50,
        "mirrored_gradients": 50,
        "mirrored_optimizer": 100,
        "sent_to_mirrors": 30.0,
    }
    first, second = rank | mirrors, rank | mirrors | {"parameters": 60, "sent": 200.0}
    account = Account.of([first, second], with_received=False)
    assert (account.held, account.mirrors, account.sent, account.sent_to_mirrors) == (
        210,
        200,
        160.0,
        30.0,
    )
    assert Account.of([first, second], with_received=True).sent == 250.0


@pytest.mark.parametrize(
    ("strategy", "held", "sent"),
    [
        ("ddp", 4, 4 / 3),
        ("zero1", 2 + 2 / 3, 4 / 3),
        ("zero2", 2, 4 / 3),
        ("zero3", 4 / 3, 2),
        ("fsdp", 4 / 3, 2),
        ("async_sgd", 2, 2),
    ],
)
def test_the_formulas_for_three_ranks_with_adamw(strategy: str, held: float, sent: float) -> None:
    (case,) = [each for each in CASES if each.strategy == strategy]
    assert case.held is not None
    assert case.sent is not None
    assert (case.held(3), case.sent(3)) == (pytest.approx(held), pytest.approx(sent))


@pytest.mark.parametrize(
    ("strategy", "options", "pieces"),
    [
        ("ddp", {}, (0, 0)),
        ("zero1", {}, (2, 2)),
        ("hybrid", {"data_parallel_strategy": "zero2", "elementwise_optimizer": True}, (2, 2)),
    ],
)
def test_mirrored_state_is_distinguished_from_owned_state(
    strategy: str, options: dict[str, object], pieces: tuple[int, int]
) -> None:
    def rank() -> tuple[int, int]:
        net = torch.nn.Linear(6, 2)
        model, optimizer = shoal.as_distributed(
            net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, **options
        )
        for x, y in shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(4, 6), torch.ones(4, 2)), global_batch_size=4
        ):
            model.train_step(x, y, torch.nn.functional.mse_loss)
            optimizer.step()
        own, mirrored = _pieces(model)
        return len(own), len(mirrored)

    assert shoal.launch(rank, world_size=2) == [pieces] * 2
