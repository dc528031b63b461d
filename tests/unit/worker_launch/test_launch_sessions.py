"""Ranks of `shoal.launch` are full ranks: the public API works on them, and a launch ends when one
of them fails."""

from __future__ import annotations

import _thread
import functools
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, MembershipChanged
from shoal_worker.backends import GroupEndedError
from shoal_worker.backends.inmemory.turns import run_aside
from shoal_worker.elastic.session.worker_process import current_session, find_session
from torch import nn
from torch.utils.data import TensorDataset

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook_launch.py"
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]
DATA = TensorDataset(torch.linspace(-1, 1, 120).view(40, 3), torch.linspace(1, -1, 40).view(40, 1))


def distribute(
    strategy: str, *, seed: int = 0, device: str = "cpu", **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    with torch.device(device):
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 1e-2), strategy=strategy, **options
    )


def sums(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {
        "loss": nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"),
        "samples": len(batch[0]),
    }


def run_with_all(
    strategy: str, directory: Path, epochs: int
) -> tuple[dict[str, torch.Tensor], dict[str, float], list[bool], int, float]:
    """Runs a training script that uses the whole API."""
    model, optimizer = distribute(strategy, deterministic=True, minimum_parameter_group_size=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    shoal.register_state(scheduler=scheduler)
    loader = shoal.ElasticDataLoader(DATA, global_batch_size=10, micro_batch_size=2, seed=7)
    shoal.resume(directory)
    stops = []
    for _ in loader.epochs(epochs):
        for step in loader.steps():
            for x, y in step:
                nn.functional.mse_loss(model(x), y).backward()
            if optimizer.step():
                scheduler.step()
            optimizer.zero_grad()
        found = shoal.evaluate(
            model, shoal.ElasticDataLoader(DATA, global_batch_size=8, train=False), sums
        )
        # each rank's own metric; their average is the loss
        own = 2 * shoal.rank() - (shoal.world_size() - 1)
        stops.append(
            optimizer.should_early_stop(found["loss"] + 1e6 * own, min_delta=1e3, patience=2)
        )
        shoal.save_checkpoint(directory)
    return model.full_state_dict(), found, stops, loader.global_step, scheduler.get_last_lr()[0]


def train(strategy: str, before_step: Any) -> int:
    """Runs a short training. Calls `before_step(steps)` in each step before optimizer.step()."""
    model, optimizer = distribute(strategy)
    loader = shoal.ElasticDataLoader(DATA, global_batch_size=10)
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        if before_step(loader.global_step) is False:
            break
        optimizer.step()
        optimizer.zero_grad()
    return loader.global_step


# --- sessions


def test_each_rank_and_its_threads_have_their_own_session() -> None:
    def describe_session() -> Any:
        shoal.init()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(current_session).result() is current_session()
        return (
            shoal.rank(),
            shoal.world_size(),
            shoal.generation(),
            shoal.is_joining(),
            current_session(),
        )

    before = find_session()
    sessions = shoal.launch(describe_session, world_size=3)
    assert [one[:4] for one in sessions] == [(rank, 3, 1, False) for rank in range(3)]
    assert len({id(one[4]) for one in sessions}) == 3
    assert find_session() is before


def test_environment_of_a_job_is_ignored_by_ranks_of_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert shoal.launch(shoal.world_size, world_size=2) == [2, 2]


def test_the_first_ranks_weights_win_and_others_may_have_none() -> None:
    def weights() -> Any:
        rank = shoal.rank()
        model, _ = distribute("ddp", seed=rank, device="meta" if rank == 2 else "cpu")
        return model.full_state_dict()

    first, *others = shoal.launch(weights, world_size=3)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)


def test_launch_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    shoal.launch(train, "zero1", lambda steps: None, world_size=2)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


# --- a training script


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_resumed_on_other_ranks_ends_bitwise_like_one_rank(
    tmp_path: Path, strategy: str
) -> None:
    (expected,) = shoal.launch(run_with_all, "ddp", tmp_path / "one", 3, world_size=1)
    shoal.launch(run_with_all, strategy, tmp_path / "several", 2, world_size=3)
    assert len(list((tmp_path / "several").glob("step-*"))) == 2, (
        "saves are complete when launch returns"
    )
    for state, found, stops, steps, rate in shoal.launch(
        run_with_all, strategy, tmp_path / "several", 3, world_size=2
    ):
        assert [
            name for name in expected[0] if not torch.equal(state[name], expected[0][name])
        ] == []
        assert found == pytest.approx(expected[1])
        assert found["samples"] == len(DATA)
        assert stops == expected[2][2:] == [True]
        assert (steps, rate) == expected[3:] == (12, pytest.approx(1e-6))


def test_example_of_a_launch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    assert "zero3: accuracy 0.9" in capsys.readouterr().out


# --- failures


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_raises_ends_the_others_with_its_reason(strategy: str) -> None:
    outcomes: dict[int, BaseException] = {}

    def fail(steps: int) -> None:
        if shoal.rank() == 1 and steps == 2:
            raise ValueError("no such class")

    def be_rank() -> None:
        try:
            train(strategy, fail)
        except Exception as error:  # any exception; it is checked below
            outcomes[shoal.rank()] = error
            raise

    with pytest.raises(ValueError, match="no such class") as raised:
        shoal.launch(be_rank, world_size=3)
    assert raised.value.__notes__ == ["This was raised by rank 1 of 3 in shoal.launch."]
    for rank in (0, 2):
        assert isinstance(outcomes[rank], MembershipChanged)
        assert "rank 1 failed: ValueError: no such class" in str(outcomes[rank])


def test_a_rank_that_ends_before_the_others_is_named() -> None:
    with pytest.raises(
        MembershipChanged, match="rank 1 of group inmemory has shut its backend down"
    ):
        shoal.launch(train, "ddp", lambda steps: shoal.rank() != 1 or steps < 1, world_size=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "async_sgd"}, "its workers and servers are separate processes"),
        ({"strategy": "ddp", "backend": "gloo"}, "whose ranks are connected by 'inmemory'"),
    ],
)
def test_features_that_need_processes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        shoal.launch(functools.partial(distribute, **options), world_size=2)


def test_ranks_that_train_the_same_module_are_asked_to_make_their_own() -> None:
    net = nn.Linear(3, 1)

    def share() -> None:
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))

    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match=r"ranks 0 and 1 passed the same Linear.*copy\.deepcopy"
        ):
            shoal.launch(share, world_size=2)


# --- waiting for other ranks without collectives


def test_an_errand_waits_for_another_ranks_turn() -> None:
    opened = threading.Event()

    def be_rank() -> Any:
        if shoal.rank() == 0:
            return run_aside(lambda: opened.wait(20), "for rank 1")
        opened.set()
        return None

    assert shoal.launch(be_rank, world_size=2) == [True, None]


def test_errands_error_reaches_its_rank_and_a_failing_rank_ends_the_wait() -> None:
    over = threading.Event()
    ended: list[BaseException] = []

    def be_rank() -> None:
        if shoal.rank() == 1:
            run_aside(lambda: int("one"), "for nothing")
        try:
            run_aside(lambda: over.wait(20), "forever")
        except GroupEndedError as error:
            ended.append(error)
            raise

    with pytest.raises(ValueError, match="invalid literal"):
        shoal.launch(be_rank, world_size=2)
    over.set()
    assert "rank 1 failed: ValueError" in str(ended[0])


def test_ctrl_c_ends_ranks_that_compute() -> None:
    """Ctrl-C ends ranks that compute. Threads that continued in torch while the interpreter
    finalizes would end the process by SIGABRT."""

    def compute() -> None:
        if dist.get_rank() == 0:
            _thread.interrupt_main()
        numbers = torch.ones(100, 100)
        while True:
            numbers = torch.tanh(numbers @ numbers)

    with pytest.raises(KeyboardInterrupt):
        shoal.launch(compute, world_size=2)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("shoal-rank")
    ]
