"""Collectives that scripts call between steps: every rank gets the same result, and a wrong call is
one clear error on all ranks."""

from __future__ import annotations

import concurrent.futures
import inspect
import multiprocessing
import os
import signal
import time
from datetime import timedelta

import pytest
import shoal
import torch
from shoal_worker.elastic.session import first_of_machine
from shoal_worker.elastic.session.first_of_machine import main_first
from torch import nn

from tests.zygote.children import eventually


def _begin(strategy="ddp"):
    net = nn.Linear(2, 1)
    return shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy)


def _launched(run, world_size=3):
    def rank():
        _begin()
        return run(shoal.rank())

    return shoal.launch(rank, world_size=world_size)


def test_numbers_are_summed_in_their_own_type():
    assert _launched(lambda rank: shoal.all_reduce(rank + 1)) == [6, 6, 6]
    assert _launched(lambda rank: shoal.all_reduce(rank + 1, "mean")) == [2.0, 2.0, 2.0]
    assert _launched(lambda rank: shoal.all_reduce(0.5 * rank, "max")) == [1.0, 1.0, 1.0]
    assert _launched(lambda rank: shoal.all_reduce(2**60 + rank, "min")) == [2**60] * 3, (
        "integers stay exact"
    )


def test_tensors_and_containers_keep_their_shape_and_type():
    def run(rank):
        values = {
            "hits": torch.tensor([rank, 1], dtype=torch.int32),
            "loss": (torch.tensor(0.5 * rank, requires_grad=True), [rank]),
        }
        return shoal.all_reduce(values), shoal.all_reduce(values, "mean")

    for total, mean in _launched(run):
        assert total["hits"].dtype == torch.int64, "sums of small integer types do not wrap"
        assert total["hits"].tolist() == [3, 3]
        assert (total["loss"][0].item(), total["loss"][1]) == (1.5, [3])
        assert mean["hits"].tolist() == [1.0, 1.0], "the mean of integers is a float"
        assert mean["loss"][0].dtype == torch.float32


def test_sums_of_small_types_do_not_wrap():
    def run(rank):
        return shoal.all_reduce(torch.tensor([200], dtype=torch.uint8)), shoal.all_reduce(
            torch.tensor([True, rank == 0])
        )

    for bytes_, hits in _launched(run):
        assert bytes_.item() == 600
        assert hits.tolist() == [3, 1]


def test_sums_are_bitwise_equal_on_all_ranks():
    for total in (
        totals := _launched(
            lambda rank: shoal.all_reduce(
                torch.rand(1000, generator=torch.Generator().manual_seed(rank))
            )
        )
    ):
        assert torch.equal(total, totals[0])


def test_gather_collects_different_values():
    def run(rank):
        return shoal.gather(
            {"who": f"rank {rank}", "rows": torch.full((rank,), rank), "nothing": None}
        )

    for result in _launched(run):
        assert [each["who"] for each in result] == ["rank 0", "rank 1", "rank 2"]
        assert [each["rows"].tolist() for each in result] == [[], [1], [2, 2]]


def test_broadcast_sends_one_ranks_value_to_all():
    assert _launched(lambda rank: shoal.broadcast(f"of {rank}")) == ["of 0"] * 3
    assert _launched(lambda rank: shoal.broadcast(f"of {rank}", from_rank=2)) == ["of 2"] * 3
    assert _launched(lambda rank: shoal.broadcast([1, 2] if rank == 0 else None)) == [[1, 2]] * 3


def test_world_of_one_returns_its_own_values():
    def rank():
        _begin()
        shoal.barrier()
        return shoal.all_reduce(3), shoal.gather("x"), shoal.broadcast(4)

    assert shoal.launch(rank, world_size=1) == [(3, ["x"], 4)]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda rank: shoal.all_reduce(1, "product"),
            shoal.ConfigurationError,
            r"op='product'.*sum, mean, max, min",
        ),
        (
            lambda rank: shoal.all_reduce(object()),
            shoal.ConfigurationError,
            "a value of object: expected plain tensors, numbers",
        ),
        (
            lambda rank: shoal.gather(torch.ones(2).to_sparse()),
            shoal.ConfigurationError,
            "a value of Tensor: expected plain tensors",
        ),
        (
            lambda rank: shoal.all_reduce("word"),
            shoal.ConfigurationError,
            "value='word': expected tensors and numbers",
        ),
        (
            lambda rank: shoal.broadcast(1, from_rank=3),
            shoal.ConfigurationError,
            r"from_rank=3\): expected 0 to 2",
        ),
        (
            lambda rank: shoal.all_reduce({"loss": torch.zeros(1 + rank // 2)}),
            shoal.PreconditionError,
            r"value\['loss'\]: rank 0 passed a tensor of \(1,\).* rank 2 passed a tensor of "
            r"\(2,\).*Use gather for values that differ",
        ),
        (
            lambda rank: shoal.all_reduce([1] * (1 + rank)),
            shoal.PreconditionError,
            "rank 0 passed list of 1, but rank 1 passed list of 2",
        ),
    ],
)
def test_invalid_call_is_one_error_on_all_ranks(call, kind, message):
    def run(rank):
        with pytest.raises(kind, match=message):
            call(rank)
        return shoal.all_reduce(1)

    assert _launched(run) == [3, 3, 3], "the ranks continue together after the error"


def test_ranks_with_different_calls_are_reported():
    def run(rank):
        with pytest.raises(shoal.PreconditionError, match="ranks diverged") as result:
            shoal.barrier() if rank == 0 else shoal.gather(rank)
        return result.value.reason

    assert _launched(run) == ["RANKS_DIVERGED"] * 3


def test_collective_inside_a_step_is_refused():
    def rank():
        model, _ = _begin()
        loader = shoal.ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.zeros(8, 2)), global_batch_size=4
        )
        batches = iter(loader)
        (rows,) = next(batches)
        model(rows).sum().backward()
        with pytest.raises(
            shoal.PreconditionError,
            match=r"all_reduce sum was called inside a step; call it after optimizer\.step\(\)",
        ):
            shoal.all_reduce(1.0)

    shoal.launch(rank, world_size=2)


def test_print_once_prints_on_one_rank(capsys):
    _launched(lambda rank: shoal.print_once("from", rank, end="!\n"))
    assert capsys.readouterr().out == "from 0!\n"


# --------------------------------------------------------------------------------------- main_first


def _work(directory, name):
    (directory / f"{name}-comes").touch()
    with main_first(str(directory), timeout=timedelta(seconds=60)):
        (directory / f"{name}-entered").touch()
        eventually((directory / f"{name}-go").exists, f"{name} to go on")
        (directory / f"{name}-done").touch()


@pytest.fixture
def workers(tmp_path):
    """Function that starts one process per name and returns the processes, e.g. `workers("a",
    "b")`. Each process enters `main_first` and stays in it until the file <name>-go exists."""
    made = []

    def start(*names):
        started = [
            multiprocessing.get_context("fork").Process(target=_work, args=(tmp_path, name))
            for name in names
        ]
        for worker in started:
            worker.start()
        made.extend(started)
        return started

    yield start
    for worker in made:
        worker.kill()
        worker.join()


def test_other_ranks_of_a_machine_wait_until_the_first_one_is_done(tmp_path, workers):
    (first,) = workers("first")
    eventually((tmp_path / "first-entered").exists, "the first one")
    others = workers("second", "third")
    eventually(lambda: len(list(tmp_path.glob("[st]*-comes"))) == 2, "the others")
    time.sleep(0.3)  # leaves time for an early entry
    assert not list(tmp_path.glob("[st]*-entered")), "entered while the first is inside"
    (tmp_path / "first-go").touch()
    for name in ("second", "third"):  # both are inside at the same time
        eventually((tmp_path / f"{name}-entered").exists, f"{name}, with the other in it")
    assert (tmp_path / "first-done").exists()
    for name in ("second", "third"):
        (tmp_path / f"{name}-go").touch()
    for worker in (first, *others):
        worker.join(60)
        assert worker.exitcode == 0


def test_another_rank_takes_over_when_the_first_one_dies(tmp_path, workers):
    (first,) = workers("first")
    eventually((tmp_path / "first-entered").exists, "the first one")
    others = workers("second", "third")
    os.kill(first.pid, signal.SIGKILL)

    def entered():
        return [name for name in ("second", "third") if (tmp_path / f"{name}-entered").exists()]

    eventually(
        lambda: entered() and len(list(tmp_path.glob("[st]*-comes"))) == 2,
        "one of the others to enter, and both to have arrived",
    )
    time.sleep(0.3)  # leaves time for an early entry
    (alone,) = entered()
    (tmp_path / f"{alone}-go").touch()
    eventually(lambda: len(entered()) == 2, "the last one to enter")
    for name in entered():
        (tmp_path / f"{name}-go").touch()
    for worker in others:
        worker.join(60)
        assert worker.exitcode == 0


def test_blocks_are_identified_by_their_place_in_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def places():
        return [first_of_machine.next_block(here()) for _ in range(2)] + [
            first_of_machine.next_block(here())
        ]

    def here():
        return inspect.currentframe()

    mine = places()
    assert len(set(mine)) == 3
    with concurrent.futures.ThreadPoolExecutor(1) as other_rank:
        assert other_rank.submit(places).result() == mine


def test_child_forked_within_the_block_does_not_keep_the_lock(tmp_path, workers):
    with main_first(str(tmp_path), timeout=timedelta(seconds=5)):
        child = multiprocessing.get_context("fork").Process(
            target=eventually, args=((tmp_path / "end").exists, "the end")
        )
        child.start()
    with main_first(str(tmp_path), timeout=timedelta(seconds=5)):
        assert child.is_alive()
    (tmp_path / "end").touch()
    child.join()


def test_wait_for_the_first_rank_ends_at_its_deadline(tmp_path, workers):
    workers("first")
    eventually((tmp_path / "first-entered").exists, "the first one")
    with pytest.raises(
        shoal.DeadlineError,
        match=r"has not finished the block within 0:00:00.1.*main_first\(timeout=\)",
    ):
        _enter(tmp_path)


def _enter(directory):
    with main_first(str(directory), timeout=timedelta(seconds=0.1)):
        pass
